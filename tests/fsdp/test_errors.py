"""What `fully_shard` refuses, and what it says to write instead."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar._errors import ParallelizeError
from jaxpar.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method, sharded_call, unshard
from jaxpar.mesh import init_device_mesh


def model() -> nnx.Sequential:
    return nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)])


DP = init_device_mesh((8,), ("dp",))
GRID = init_device_mesh((2, 2, 2), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (DP, {"units": "layer.*"}, r"units='layer\.\*' matches no module.*layers"),
        (DP, {"shard_axis": "tp"}, r"'tp' is not among the axes \('dp',\)"),
        (DP, {"shard_axis": "dp", "replicate_axis": "dp"}, "named twice"),
        (GRID, {}, r"which of them shard parameters\?.*fully_shard\(model, mesh\['c'\]\)"),
        (
            DP,
            {"reshard_after_forward": 3},
            r"reshard_after_forward=3 does not divide the 8 ranks.*\[1, 2, 4, 8\]",
        ),
        (
            DP,
            {"reshard_after_forward": 4},
            r"Split the axis: init_device_mesh\(\(2, 4\), \('dp_outer', 'dp_inner'\)\)",
        ),
        (DP, {"shard_dim_fn": lambda name, x: 2}, r"shard_dim_fn chose dim 2 of layers\.0\.\w+"),
        (
            init_device_mesh((3,), ("dp",), devices=jax.devices()[:3]),
            {"shard_dim_fn": lambda name, x: 0},
            r"16 % 3 = 1",
        ),
        (DP, {"ignored_params": ["head.*"]}, r"'head\.\*', which matches none of the parameters"),
        (DP, {"prefetch": -1}, "prefetch=-1 is negative"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_wrong_options_say_what_to_write(mesh: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelizeError, match=message):
        fully_shard(model(), mesh, **options)


def test_strict_names_every_parameter_that_would_stay_whole() -> None:
    mesh = init_device_mesh((3,), ("dp",), devices=jax.devices()[:3])
    with pytest.raises(
        ParallelizeError, match=r"strict=True.*4 parameters.*layers\.1\.kernel: no dim of \[16, 16\]"
    ):
        fully_shard(model(), mesh, strict=True)
    fully_shard(model(), mesh, strict=True, pad_above_bytes=0)
    fully_shard(model(), mesh, strict=True, ignored_params=["layers.*.*"])


def test_a_module_is_a_unit_once() -> None:
    once = fully_shard(model(), DP, units="layers.*")
    with pytest.raises(ParallelizeError, match="FSDPLinear is a unit already"):
        fully_shard(once.layers[0], DP)


def test_a_container_that_is_never_called_is_refused() -> None:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    for module in (nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0))]), Holder()):
        with pytest.raises(ParallelizeError, match=r"never called itself.*units='blocks\.\*'"):
            fully_shard(module, DP)


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ParallelizeError, match="Dropout has no parameters"):
        fully_shard(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), DP)


def test_nothing_is_changed_by_a_refused_call() -> None:
    untouched = model()
    with pytest.raises(ParallelizeError):
        fully_shard(untouched, DP, units=("layers.*", "nothing"))
    assert (
        type(untouched.layers[0]) is nnx.Linear and len(untouched.layers[0].kernel.sharding.device_set) == 1
    )


def test_registering_needs_a_unit_with_that_method() -> None:
    with pytest.raises(ParallelizeError, match="Linear is no unit"):
        register_fsdp_forward_method(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "encode")
    unit = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), DP)
    with pytest.raises(ParallelizeError, match="has no method 'encode'"):
        register_fsdp_forward_method(unit, "encode")


def test_policies_take_floating_dtypes() -> None:
    with pytest.raises(ParallelizeError, match=r"reduce_dtype=.*int8 is not a floating dtype"):
        MixedPrecisionPolicy(reduce_dtype=jnp.int8)


def test_unshard_needs_a_manual_axis_and_a_spec_that_can_be_gathered() -> None:
    with pytest.raises(ParallelizeError, match="'dp' is not manual here"):
        unshard(jnp.ones(8), P("dp"), "dp")
    mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh

    def wrong(x: jax.Array) -> jax.Array:
        return sharded_call(lambda w: w, {"w": x}, specs=P(("dp", "tp")), axis="dp")["w"]

    with pytest.raises(ParallelizeError, match=r"w has the spec .* of which \('dp',\) cannot be gathered"):
        jax.shard_map(wrong, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P("tp"))(jnp.ones(8))
