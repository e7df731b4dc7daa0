"""Full state: the same host arrays from every layout, and back into every layout, exactly."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.debug import collectives
from jaxpar.fsdp import full_state, fully_shard, load_full_state
from jaxpar.fsdp._full_state import iter_full_state
from jaxpar.mesh import init_device_mesh
from jaxpar.mesh._pieces import gather_slice, read_gathered
from jaxpar.mesh._stream import MAX_PIECES_IN_FLIGHT, Piece, Reading, read_all


class Model(nnx.Module):
    """One of each: kernels, what divides by nothing, a scalar, other dtypes, statistics, keys, a tree, a tie."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(params=seed, dropout=jax.random.key(seed, impl="rbg"))
        self.linear = nnx.Linear(8, 12, rngs=rngs)
        self.odd = nnx.Param(jax.random.normal(rngs.params(), (5, 3)))
        self.gate = nnx.Param(jnp.float32(seed + 0.5))
        self.half = nnx.Param(jax.random.normal(rngs.params(), (4, 8), jnp.bfloat16))
        self.table = nnx.Param(jax.random.randint(rngs.params(), (8,), 0, 99))
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.norm.mean[...] += seed
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.extra = nnx.Variable({"a": jnp.full(3, seed), "b": seed + 0.25})
        self.blocks = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs)])
        self.tied = self.blocks[0].kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.gate[...]


SHAPES = {
    "blocks.0.kernel": (4, 4),
    "drop.rngs.count": (),
    "drop.rngs.key": (4,),
    "extra.a": (3,),
    "extra.b": (),
    "gate": (),
    "half": (4, 8),
    "linear.bias": (12,),
    "linear.kernel": (8, 12),
    "norm.bias": (4,),
    "norm.mean": (4,),
    "norm.scale": (4,),
    "norm.var": (4,),
    "odd": (5, 3),
    "table": (8,),
}


def mesh_of(*sizes: int) -> Any:
    num = int(np.prod(sizes))
    return init_device_mesh(sizes, ("replica", "dp")[-len(sizes) :], devices=jax.devices()[:num])


def tensor_parallel(model: Model) -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    split = NamedSharding(mesh.jax_mesh, P("tp", None))
    kernel = model.linear.kernel
    value = kernel.get_value()
    is_abstract = isinstance(value, jax.ShapeDtypeStruct)
    kernel.set_value(
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=split)
        if is_abstract
        else jax.device_put(value, split)
    )
    fully_shard(model, mesh["dp"], pad_above_bytes=0)


LAYOUTS: dict[str, Callable[[Model], Any]] = {
    "plain": lambda model: None,
    "dp1": lambda model: fully_shard(model, mesh_of(1)),
    "dp2": lambda model: fully_shard(model, mesh_of(2), units="linear"),
    "dp4 padded": lambda model: fully_shard(model, mesh_of(4), pad_above_bytes=0),
    "dp8": lambda model: fully_shard(model, mesh_of(8)),
    "hsdp": lambda model: fully_shard(model, mesh_of(2, 4), pad_above_bytes=0),
    "tp": tensor_parallel,
}


def make(layout: str, seed: int = 0) -> Model:
    model = Model(seed)
    LAYOUTS[layout](model)
    return model


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def shardings(module: Any) -> list[Any]:
    return [getattr(x, "sharding", None) for x in jax.tree.leaves(nnx.state(module))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_the_same_in_every_layout(layout: str) -> None:
    state, expected = full_state(make(layout)), full_state(Model(0))
    assert {name: x.shape for name, x in state.items()} == SHAPES
    assert_same(state, expected)
    plain = Model(0)
    np.testing.assert_array_equal(state["odd"], plain.odd[...])
    np.testing.assert_array_equal(state["drop.rngs.key"], jax.random.key_data(plain.drop.rngs.key[...]))
    assert state["half"].dtype == jnp.bfloat16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_loads_into_every_layout(layout: str) -> None:
    model, expected = make(layout, seed=1), full_state(make("dp4 padded"))
    before = shardings(model)
    assert load_full_state(model, expected) == ()
    assert_same(full_state(model), expected)
    assert shardings(model) == before
    assert model.drop.rngs.key[...].dtype == Model(0).drop.rngs.key[...].dtype
    assert model.extra.get_value()["b"] == 0.25
    assert not model.norm.mean[...].committed  # or it could not meet sharded arrays outside jit


@pytest.mark.parametrize("layout", ["plain", "dp4 padded", "tp"])
def test_state_makes_an_abstract_model_real(layout: str) -> None:
    abstract = nnx.eval_shape(lambda: Model(1))
    LAYOUTS[layout](abstract)
    wanted, expected = shardings(abstract), full_state(Model(0))
    expected["extra.b"] = np.array(0.25, np.float32)  # Flax makes Python's floats f32 when it takes shapes
    load_full_state(abstract, expected)
    assert_same(full_state(abstract), expected)
    got = shardings(abstract)
    assert all(s is None or s == g for s, g in zip(wanted, got, strict=True))
    assert layout == "plain" or abstract.linear.kernel.sharding.num_devices > 1


def test_optimizer_state_has_the_names_and_shapes_of_its_parameters() -> None:
    model, to = make("dp4 padded"), make("dp2")
    tx = optax.adamw(1e-3)
    optimizer, other = (nnx.Optimizer(m, tx, wrt=nnx.Param) for m in (model, to))
    optimizer.opt_state[0].mu["odd"].set_value(2 * model.odd.get_value())
    state = full_state(optimizer)
    assert state["opt_state.0.mu.odd"].shape == (5, 3)
    np.testing.assert_array_equal(state["opt_state.0.mu.odd"], 2 * Model(0).odd[...])
    assert {"step", "opt_state.0.count", "opt_state.0.nu.blocks.0.kernel"} <= state.keys()
    before = shardings(other)
    load_full_state(other, state)
    assert_same(full_state(other), state)
    assert shardings(other) == before


def test_arrays_belong_to_the_caller() -> None:
    model = make("dp4 padded")
    expected, state = full_state(model), full_state(model)
    for x in state.values():
        x[...] = 0  # every array can be written
    assert_same(full_state(model), expected)
    kept = {name: x.copy() for name, x in expected.items()}
    load_full_state(model, kept)
    for x in kept.values():
        x[...] = 0
    assert_same(full_state(model), expected)


def test_lazy_mappings_load(tmp_path: Any) -> None:
    model = make("dp4 padded")
    state = full_state(model)
    np.savez(tmp_path / "state.npz", **{name: x for name, x in state.items() if name != "half"})
    other = make("dp2", seed=1)
    with np.load(tmp_path / "state.npz") as saved:
        assert load_full_state(other, saved, strict=False) == ("half",)
    found = full_state(other)
    assert_same(found, state | {"half": found["half"]})


def test_all_that_does_not_fit_is_named_at_once_and_nothing_is_loaded() -> None:
    model = make("dp4 padded")
    before, state = full_state(model), full_state(Model(1))
    del state["gate"]
    state["extra_name"] = np.zeros(3)
    state["odd"] = np.zeros(16, np.float32)
    state["half"] = state["half"].astype(np.float32)
    text = (
        "load_full_state: 4 names do not fit FSDPModel; nothing was loaded:\n"
        "    gate: missing from the state (float32[])\n"
        "    half: dtype float32 in the state, bfloat16 here; cast it with .astype if that is meant\n"
        "    odd: shape [16] in the state, [5, 3] here\n"
        "    extra_name: unexpected, no variable has this name\n"
    )
    with pytest.raises(ParallelizeError, match=re.escape(text)):
        load_full_state(model, state)
    assert_same(full_state(model), before)
    with pytest.raises(ParallelizeError, match="2 names do not fit"):
        load_full_state(model, state, strict=False)


def test_other_mistakes_are_named() -> None:
    with pytest.raises(ParallelizeError, match="budget_bytes=0 lets nothing through"):
        full_state(Model(0), budget_bytes=0)
    with pytest.raises(ParallelizeError, match=r"\['bias', 'kernel'\] of Linear have shapes but no values"):
        full_state(nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))))
    bare = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    bare.mask = nnx.data(jnp.ones(2))
    for use in (full_state, lambda model: load_full_state(model, {})):
        with pytest.raises(
            ParallelizeError, match=r"outside variables: \['mask'\].*self.mask = nnx.Variable"
        ):
            use(bare)
    twice = nnx.Dict({"a.b": nnx.Param(jnp.ones(2)), "a": nnx.Dict({"b": nnx.Param(jnp.ones(2))})})
    with pytest.raises(ParallelizeError, match=r"two arrays of the name 'a\.b'"):
        full_state(twice)


# What travels at once.


def test_pieces_in_flight_stay_within_the_budget() -> None:
    in_flight: list[int] = []
    peaks: list[tuple[int, int]] = []

    def piece(num_bytes: int) -> Piece:
        def start() -> None:
            in_flight.append(num_bytes)
            peaks.append((sum(in_flight), len(in_flight)))

        return Piece(num_bytes, start, lambda _: in_flight.remove(num_bytes))

    sizes = [[3, 3], [], [20], [1] * 20, [4, 4, 4], []]
    readings = (Reading([piece(n) for n in ns], lambda k=k: np.array(k)) for k, ns in enumerate(sizes))
    assert [int(x) for x in read_all(readings, 8)] == list(range(len(sizes)))  # pyright: ignore
    assert not in_flight and len(peaks) == 26
    assert all(num_bytes <= 8 or (num_bytes, num) == (20, 1) for num_bytes, num in peaks)
    assert max(num for _, num in peaks) == MAX_PIECES_IN_FLIGHT
    assert max(num_bytes for num_bytes, _ in peaks if num_bytes <= 8) == 8  # pieces do overlap


def test_arrays_come_one_by_one() -> None:
    stream = iter_full_state(make("dp2"), budget_bytes=1)
    assert next(stream)[0] == "blocks.0.kernel"
    assert len(list(stream)) == len(SHAPES) - 1


@pytest.mark.parametrize("budget_bytes", [1, 40, 4096])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 3), P("tp")),
        ((3, 8), P(None, "dp")),
        ((16, 3), P(("tp", "dp"))),
        ((4, 2, 6), P("tp", None, "dp")),
        ((0, 4), P("dp")),
    ],
)
def test_what_lies_on_other_processes_is_gathered_slice_by_slice(
    shape: tuple[int, ...], spec: P, budget_bytes: int
) -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x = jax.device_put(value, NamedSharding(mesh, spec))
    reading = read_gathered(x, budget_bytes, keep=True)
    pieces = list(reading.pieces)
    ranks = x.size // max(1, x.addressable_shards[0].data.size)
    assert all(piece.num_bytes <= max(budget_bytes, 4 * ranks) for piece in pieces)
    for piece in pieces:
        started = piece.start()
        assert started.nbytes == piece.num_bytes
        piece.finish(started)
    np.testing.assert_array_equal(reading.result(), value)
    others = read_gathered(x, budget_bytes, keep=False)
    assert [x for x in read_all([others], budget_bytes)] == [None]


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_state_in_host_memory_is_read_and_loaded(kind: str) -> None:
    mesh = mesh_of(4).jax_mesh
    sharding = NamedSharding(mesh, P("dp"), memory_kind=kind)
    x = jax.device_put(jnp.arange(8.0), sharding)
    (gathered,) = read_all([read_gathered(x, 16, keep=True)], 16)
    np.testing.assert_array_equal(gathered, np.arange(8.0))
    holder = nnx.Dict({"x": nnx.Param(x)})
    load_full_state(holder, {"x": np.ones(8, np.float32)})
    assert holder["x"].get_value().sharding == sharding
    np.testing.assert_array_equal(full_state(holder)["x"], np.ones(8))


def test_a_slice_is_one_all_gather() -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    sharding = NamedSharding(mesh.jax_mesh, P(("tp", "dp")))
    x = jax.device_put(jnp.ones((16, 3)), sharding)
    table = collectives(gather_slice(sharding, 2, 4).lower(x, 0).compile(), mesh)  # pyright: ignore
    assert [(row.kind, row.count, row.bytes) for row in table] == [("all_gather", 1, 8 * 4 * 4)]


def test_training_goes_on_after_reading_and_loading() -> None:
    mesh = mesh_of(4)

    def run(*, interrupted: bool) -> dict[str, np.ndarray]:
        model = fully_shard(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), mesh, pad_above_bytes=0)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        step = jaxpar.TrainStep(lambda m, b: (m(b) ** 2).mean(), model, optimizer, mesh=mesh)
        batch = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
        step(batch)
        if interrupted:
            states = full_state(model), full_state(optimizer)
            step(batch)
            for module, state in zip((model, optimizer), states, strict=True):
                load_full_state(module, state)
        step(batch)
        return full_state(model) | full_state(optimizer)

    assert_same(run(interrupted=True), run(interrupted=False))
