"""Every form of sharding equals one device: {FSDP, HSDP} x {reshard, keep, inner} x {1, 3 microbatches} in fp32.

In bf16 each form is run with one number of microbatches, each number with three forms: every pair of values meets.

The model is the example transformer's little sister: embedding, attention, gated MLP, norms, tied head.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.fsdp import MixedPrecisionPolicy, fully_shard
from jaxpar.mesh import DeviceMesh, init_device_mesh

VOCAB, WIDTH, TIME, ROWS, STEPS = 16, 16, 6, 24, 3


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, param_dtype=dtype, rngs=rngs)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)
        self.gate = linear(WIDTH, 2 * WIDTH)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, param_dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norm(x_BTD)), 3, axis=-1)
        scores = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), q @ k.mT / WIDTH**0.5, -1e30)
        x_BTD = x_BTD + self.out(jax.nn.softmax(scores) @ v)
        return x_BTD + self.down(jax.nn.silu(self.gate(x_BTD)))


class Transformer(nnx.Module):
    def __init__(self, dtype: Any = jnp.float32) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dtype) for _ in range(1)])

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.embed.attend(x_BTD)


def loss_fn(model: nnx.Module, tokens_BT: jax.Array) -> jax.Array:
    logits_BTV = model(tokens_BT[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:]).mean()


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TIME + 1)).astype(np.int32)


plain = functools.cache(Transformer)


@functools.cache
def one_device(dtype: Any = jnp.float32) -> tuple[list[float], list[np.ndarray]]:
    """Plain Flax and optax; for float64 call it within `jax.enable_x64`."""
    model = nnx.clone(plain(dtype))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, TOKENS)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(STEPS)]
    return losses, [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def train(mesh: DeviceMesh, *, accumulate: int = 1, dtype: Any = jnp.float32, **options: Any) -> Any:
    """Losses and parameters after three steps."""
    model = nnx.clone(plain(dtype))
    fully_shard(model, mesh, units="blocks.*", **options)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = jaxpar.TrainStep(
        loss_fn, model, optimizer, mesh=mesh, batch_axes=mesh.axis_names, accumulate=accumulate
    )
    losses = [float(step(TOKENS)["loss"]) for _ in range(STEPS)]
    return losses, [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh((size,), ("dp",), devices=jax.devices()[:size])


def check(got: Any, expected: Any, *, rtol: float, atol: float) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=rtol)
    for ours, theirs in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


MESHES = {
    ("fsdp", True): ((4,), ("dp",), {}),
    ("fsdp", False): ((4,), ("dp",), {}),
    ("fsdp", 2): ((2, 2), ("outer", "inner"), {"shard_axis": ("outer", "inner")}),
    ("hsdp", True): ((2, 2), ("replica", "shard"), {}),
    ("hsdp", False): ((2, 2), ("replica", "shard"), {}),
    ("hsdp", 2): (
        (2, 2, 2),
        ("replica", "outer", "inner"),
        {"shard_axis": ("outer", "inner"), "replicate_axis": "replica"},
    ),
}
BF16 = MixedPrecisionPolicy(jnp.bfloat16, jnp.float32, output_dtype=jnp.float32)


CASES = [
    *itertools.product(MESHES, (1, 3), ("fp32",)),
    *zip(MESHES, itertools.cycle((1, 3)), itertools.repeat("bf16"), strict=False),
]


@pytest.mark.parametrize(
    ("form", "accumulate", "precision"),
    CASES,
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_equals_one_device(form: tuple[str, bool | int], accumulate: int, precision: str) -> None:
    shape, axes, options = MESHES[form]
    mesh = init_device_mesh(shape, axes, devices=jax.devices()[: int(np.prod(shape))])
    policy = BF16 if precision == "bf16" else None
    got = train(mesh, accumulate=accumulate, reshard_after_forward=form[1], mp_policy=policy, **options)
    if precision == "fp32":
        check(got, one_device(), rtol=1e-5, atol=1e-5)
    else:
        # Each device rounds the gradient of its own rows to bf16, and the sum is fp32: as in microbatches on one.
        check(got, bf16_on_one_device(mesh.size() * accumulate), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[0], one_device()[0], rtol=1e-2)


@functools.cache
def bf16_on_one_device(num_microbatches: int) -> Any:
    return train(mesh_of(1), accumulate=num_microbatches, mp_policy=BF16)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_equals_one_device_on_any_number(size: int) -> None:
    check(train(mesh_of(size)), one_device(), rtol=1e-5, atol=1e-5)


def test_equals_one_device_in_float64() -> None:
    with jax.enable_x64(True):
        check(train(mesh_of(4), dtype=jnp.float64), one_device(jnp.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [3, 5])
def test_parameters_that_no_dim_divides_are_stored_flat_and_equal_one_device(size: int) -> None:
    """Width 16 and vocabulary 16 on 3 or 5 devices: padded storage, of which neither loss nor update knows."""
    tokens = np.concatenate([TOKENS, TOKENS[:6]])  # 30 rows
    losses = []
    for mesh, options in ((mesh_of(1), {}), (mesh_of(size), {"pad_above_bytes": 0})):
        model = nnx.clone(plain(jnp.float32))
        fully_shard(model, mesh, units="blocks.*", **options)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, clip_norm=0.5)
        losses.append([[float(x) for x in step(tokens).values()] for _ in range(STEPS)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
