"""PowerSGD: what is sent plus what is kept is the true gradient, in two thin all-reduces (row P33)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar._module import vary, varying_axes
from jaxpar.ddp import DistributedDataParallel, PowerSGD, StatefulHook
from jaxpar.ddp._powersgd import orthonormal
from jaxpar.ddp._reduce import Reduction, reduce_buckets
from jaxpar.debug import collectives
from jaxpar.mesh import init_device_mesh

ALWAYS = {"start_powerSGD_iter": 0, "use_error_feedback": False, "warm_start": False}
Gradients = dict[str, np.ndarray]  # f32[steps, ranks, ...]


def _run(
    hook: PowerSGD, grads: Gradients, *, tail: tuple[str | None, ...] = ()
) -> tuple[Gradients, Gradients]:
    """Reduces gradients step by step; `tail` splits their own dims over `tp`.

    Returns the sums f32[steps, ...] and the errors at the end f32[ranks, ...].
    """
    num_ranks, tp = len(next(iter(grads.values()))[0]), 2 if "tp" in tail else 1
    mesh = init_device_mesh((num_ranks, tp), ("dp", "tp"), devices=jax.devices()[: num_ranks * tp]).jax_mesh
    reduction = Reduction(comm_hook=hook)

    def local(grads: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        steps = [g[:, 0] for g in grads]
        states = jax.tree.map(
            lambda s: vary(s, tuple(varying_axes(steps[0]))), reduction.init_states([g[0] for g in steps])
        )

        def step(states: Any, mine: list[jax.Array]) -> Any:
            buckets = reduction.buckets(mine, [("dp",)] * len(mine))
            summed, states = reduce_buckets(mine, reduction, buckets, states)
            return states, summed

        states, summed = lax.scan(step, states, steps)
        errors = [
            state["error"].reshape(1, *g.shape[1:])
            if "error" in state
            else jnp.zeros((1, *g.shape[1:]), g.dtype)
            for state, g in zip(states, steps, strict=True)
        ]
        return summed, errors

    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "dp", *tail),), out_specs=(P(None, *tail), P("dp", *tail))
    )
    summed, errors = jax.jit(f)(list(grads.values()))
    return dict(zip(grads, summed, strict=True)), dict(zip(grads, errors, strict=True))


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _with_singular_values(rows: int, cols: int, values: list[float]) -> np.ndarray:
    u, _ = np.linalg.qr(_normal(rows, len(values)))
    v, _ = np.linalg.qr(_normal(cols, len(values)))
    return ((u * values) @ v.T).astype(np.float32)


def test_what_was_sent_and_what_is_kept_add_up_to_the_gradients() -> None:
    grads = {"bias": _normal(7, 4, 12), "conv": _normal(7, 4, 2, 2, 6, 20), "matrix": _normal(7, 4, 16, 12)}
    sent, errors = _run(PowerSGD(2, start_powerSGD_iter=3, min_compression_rate=1), grads)
    for name, g in grads.items():
        np.testing.assert_allclose(
            sent[name].sum(0) + errors[name].sum(0), g.sum((0, 1)), atol=2e-5, err_msg=name
        )
        np.testing.assert_allclose(sent[name][:3], g[:3].sum(1), atol=2e-6, err_msg=name)  # before the start
    np.testing.assert_allclose(sent["bias"], grads["bias"].sum(1), atol=2e-6)  # never compressed
    for name in ("conv", "matrix"):
        compressed = np.asarray(sent[name][3:]).reshape(4, -1, grads[name].shape[-1])
        assert [np.linalg.matrix_rank(m, tol=1e-4) for m in compressed] == [2] * 4
        norms = np.linalg.norm(np.asarray(errors[name]).reshape(4, -1), axis=1)
        assert norms.min() > 0.1 and len(set(norms.round(4))) == 4  # each rank has an error of its own


def test_full_rank_is_exact() -> None:
    grads = {"wide": _normal(2, 2, 5, 9), "tall": _normal(2, 2, 11, 4)}
    sent, _ = _run(PowerSGD(50, min_compression_rate=0.01, **ALWAYS), grads)
    for name, g in grads.items():
        np.testing.assert_allclose(sent[name], g.sum(1), atol=1e-5, err_msg=name)


def test_warm_start_converges_to_the_best_low_rank_approximation() -> None:
    matrix = _with_singular_values(16, 12, [8.0, 4.0, 1.0, 0.5])
    hook = PowerSGD(2, start_powerSGD_iter=2, use_error_feedback=False, min_compression_rate=1)
    sent, _ = _run(hook, {"m": np.broadcast_to(matrix / 2, (12, 2, 16, 12))})
    u, s, vt = np.linalg.svd(matrix)
    np.testing.assert_allclose(sent["m"][-1], (u[:, :2] * s[:2]) @ vt[:2], atol=1e-5)
    distances = [np.linalg.norm(m - matrix) for m in np.asarray(sent["m"])[2:]]
    assert distances[0] > distances[-1] and distances[-1] == pytest.approx(np.hypot(1.0, 0.5), rel=1e-5)


def test_zero_gradients_stay_zero_and_do_not_block_what_comes_after() -> None:
    """An unused parameter: P and Q are zero; when it is used again, Q starts anew."""
    matrix = _with_singular_values(16, 12, [3.0])
    used = np.array([1, 1, 0, 0, 1, 1], np.float32)
    sent, errors = _run(
        PowerSGD(1, start_powerSGD_iter=2), {"m": used[:, None, None, None] * matrix[None, None]}
    )
    np.testing.assert_array_equal(sent["m"][2:4], 0)
    np.testing.assert_allclose(sent["m"][4:], np.stack([matrix] * 2), atol=1e-5)
    np.testing.assert_allclose(errors["m"], 0, atol=1e-5)


def test_a_parameter_split_over_another_axis_is_compressed_block_by_block() -> None:
    g = _normal(4, 2, 16, 24)
    sent, errors = _run(PowerSGD(1, start_powerSGD_iter=2), {"m": g}, tail=(None, "tp"))
    np.testing.assert_allclose(sent["m"].sum(0) + errors["m"].sum(0), g.sum((0, 1)), atol=1e-5)
    for block in np.split(np.asarray(sent["m"][-1]), 2, axis=1):
        assert np.linalg.matrix_rank(block, tol=1e-4) == 1


@pytest.mark.parametrize(
    ("p", "rank"),
    [
        pytest.param(_normal(10, 4), 4, id="independent"),
        pytest.param(1e-30 * _normal(10, 2), 2, id="squares underflow"),
        pytest.param(np.stack([np.ones(10), np.ones(10) + 1e-4 * np.arange(10)], 1), 2, id="nearly parallel"),
        pytest.param(
            np.stack([np.ones(10), np.zeros(10), np.ones(10), np.arange(10)], 1), 2, id="dependent and zero"
        ),
        pytest.param(np.zeros((10, 2)), 0, id="zero"),
    ],
)
def test_orthonormal_columns_whatever_the_matrix(p: np.ndarray, rank: int) -> None:
    basis = np.asarray(jax.jit(orthonormal)(jnp.asarray(p, jnp.float32)), np.float64)
    np.testing.assert_allclose(basis.T @ basis, np.diag((np.abs(basis).max(0) > 0).astype(float)), atol=1e-6)
    assert np.linalg.matrix_rank(basis) == rank
    np.testing.assert_allclose(basis @ (basis.T @ p), p, atol=2e-6 * np.abs(p).max())


def test_training_with_two_thin_all_reduces() -> None:
    """The loss falls, parameters are equal on all devices, and the bytes are those of the factors."""
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    rngs, init = nnx.Rngs(0), nnx.initializers.uniform(0.1)
    first, last = (nnx.Linear(*size, rngs=rngs, kernel_init=init) for size in ((32, 64), (64, 8)))
    model = nnx.Sequential(first, jax.nn.relu, last)
    hook = PowerSGD(2, start_powerSGD_iter=2)
    DistributedDataParallel(model, mesh, comm_hook=hook)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), model, optimizer, mesh=mesh)
    batch = {"x": _normal(16, 32), "y": _normal(16, 8)}

    table = collectives(step, batch)
    # Compressed are [32, 64] (96 * 2 * 2 < 2048) and [64, 8] (72 * 2 * 2 < 512), not the biases.
    biases, ps, qs = 4 * (64 + 8), 4 * 2 * (32 + 64), 4 * 2 * (64 + 8)
    assert [row.bytes for row in table if not row.is_conditional] == [4]  # the loss
    assert sorted(row.bytes for row in table if row.is_conditional) == sorted(
        [4 * (32 * 64 + 64 * 8) + biases, ps + biases, qs]
    )
    losses = [float(step(batch)["loss"]) for _ in range(12)]
    assert losses[-1] < 0.6 * losses[0]
    for _, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        copies = [np.asarray(shard.data) for shard in value.get_value().addressable_shards]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize(
    ("shape", "state"),
    [
        ((64,), {"step": ()}),
        ((), {"step": ()}),
        ((8, 8), {"step": ()}),  # (8 + 8) * 2 * 2 = 64 = 8 * 8: it would not save enough
        ((64, 32), {"step": (), "error": (64, 32), "q": (32, 2)}),
        ((3, 3, 64, 128), {"step": (), "error": (576, 128), "q": (128, 2)}),  # a convolution
        ((64, 4, 16), {"step": (), "error": (64, 64), "q": (64, 2)}),  # an attention's kernel
    ],
)
def test_state_of_a_parameter(shape: tuple[int, ...], state: dict[str, tuple[int, ...]]) -> None:
    hook = PowerSGD(2)
    assert isinstance(hook, StatefulHook)
    assert {k: x.shape for k, x in hook.init(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).items()} == state
    assert all(x.dtype == jnp.float32 for x in hook.init(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_powerSGD_iter": 1}, r"start_powerSGD_iter=1.*Write start_powerSGD_iter=2 or more"),
        (
            {"start_powerSGD_iter": 0, "use_error_feedback": False},
            r"use_error_feedback=False, warm_start=True",
        ),
        ({"matrix_approximation_rank": 0}, r"matrix_approximation_rank=0.*at least 1"),
        ({"min_compression_rate": -1}, r"min_compression_rate=-1.*at least 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelizeError, match=message):
        PowerSGD(**options)
