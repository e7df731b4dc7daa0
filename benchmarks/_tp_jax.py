"""Worker of tp.py: times, counts and compiles jaxpar's tensor-parallel step and the annotated one; memory of attention."""

import argparse
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from _model import ROWS_PER_RANK, SMALL, TIME, TX, Block, ByHand, Transformer, build, medians, peak_rss_of
from _program import program_facts
from jaxpar.cp import ring_attention
from jaxpar.debug import memory
from jaxpar.mesh import DeviceMesh
from jaxpar.tp import cross_entropy, parallelize_module
from parallel import tensor_parallel_plan
from transformer import grouped_attention

ROWS = 2 * ROWS_PER_RANK  # both ranks compute on all of them
COLUMNS, ROWWISE = P(None, "tp"), P("tp", None)
SPLIT = {
    "embed.embedding": ROWWISE,
    "qkv.kernel": COLUMNS,
    "out.kernel": ROWWISE,
    "gate.kernel": COLUMNS,
    "up.kernel": COLUMNS,
    "down.kernel": ROWWISE,
    "head.kernel": COLUMNS,
}
# Attention alone: f32[1, HEADS, T, WIDTH]; each key/value head serves HEADS / KV_HEADS.
HEADS, KV_HEADS, WIDTH = 8, 2, 64


class Ours:
    """jaxpar's step, with the plan of `examples/`."""

    def __init__(self, mesh: DeviceMesh, *, is_sequence_parallel: bool) -> None:
        plan = tensor_parallel_plan(SMALL, is_sequence_parallel=is_sequence_parallel)
        model = parallelize_module(build(SMALL), mesh["tp"], plan)
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        self._step = jaxpar.TrainStep(_split_loss, model, optimizer, mesh=mesh, batch_axes="dp")
        self.lower = self._step.lower

    def __call__(self, batch: Any) -> jax.Array:
        return self._step(batch)["loss"]


def _split_loss(model: Transformer, tokens_BT: jax.Array) -> jax.Array:
    return cross_entropy(model(tokens_BT[:, :-1]), tokens_BT[:, 1:], "tp")


class Annotated(nnx.Module):
    """A block with the constraints that a user writes around attention and MLP.

    Args:
        block: the plain block.
        whole: how their inputs lie.
        residual: how the residual stream lies: whole too, or its positions split over tp (sequence parallel).
    """

    def __init__(self, block: Block, *, whole: NamedSharding, residual: NamedSharding) -> None:
        self.block = block
        self.whole = functools.partial(jax.lax.with_sharding_constraint, shardings=whole)
        self.residual = functools.partial(jax.lax.with_sharding_constraint, shardings=residual)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        block, x_BTD = self.block, self.residual(x_BTD)
        x_BTD = self.residual(x_BTD + block.attention(self.whole(block.norm1(x_BTD))))
        return self.residual(x_BTD + block.mlp(self.whole(block.norm2(x_BTD))))


def by_hand(mesh: DeviceMesh, *, is_sequence_parallel: bool) -> ByHand:
    """The same parameters in the same places, activations constrained, and XLA's partitioner."""

    def place(name: str, x: Any) -> NamedSharding:
        spec = next((spec for layer, spec in SPLIT.items() if layer in name), P())
        return NamedSharding(mesh.jax_mesh, spec)

    whole = NamedSharding(mesh.jax_mesh, P("dp"))
    residual = NamedSharding(mesh.jax_mesh, P("dp", "tp")) if is_sequence_parallel else whole
    model: Any = build(SMALL)
    model.blocks = nnx.List([Annotated(block, whole=whole, residual=residual) for block in model.blocks])
    return ByHand(model, mesh, place)


CONTENDERS = {"jaxpar": Ours, "by hand": by_hand}


def make(name: str, mode: str, mesh: DeviceMesh) -> Ours | ByHand:
    return CONTENDERS[name](mesh, is_sequence_parallel=mode == "sequence")


def time_steps(rounds: int, modes: list[str]) -> dict[str, Any]:
    """For each mode the median step of both contenders, and what their programs communicate and need."""
    mesh, batch = _mesh(), _batch()
    steps = {f"{name}, {mode}": make(name, mode, mesh) for mode in modes for name in CONTENDERS}
    seconds = medians(steps, batch, rounds=rounds)
    losses = [float(step(batch)) for step in steps.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3, err_msg=f"{list(steps)} trained differently")
    reports = {
        key: {"step_s": seconds[key], **program_facts(step.lower(batch).compile(), mesh)}
        for key, step in steps.items()
    }
    return {mode: {name: reports[f"{name}, {mode}"] for name in CONTENDERS} for mode in modes}


def peak_rss(name: str, mode: str, rounds: int) -> dict[str, int]:
    """The most memory of this process while one contender alone runs steps; compilation is not in it."""
    mesh, batch = _mesh(), _batch()
    return {"rss_bytes": peak_rss_of(make(name, mode, mesh), batch, rounds=rounds)}


def attention_bytes(length: int, num_ranks: list[int]) -> dict[str, int]:
    """Temporaries per device of causal attention, forward and backward, dense and as a ring; nothing is run."""
    programs = {"dense": jax.jit(_with_backward(_dense))}
    for ranks in num_ranks:
        mesh = jaxpar.init_device_mesh((ranks,), ("cp",), devices=jax.devices()[:ranks]).jax_mesh
        rows = P(None, None, "cp", None)
        ring = functools.partial(ring_attention, axis="cp", rotate="ppermute")
        programs[str(ranks)] = jax.jit(
            jax.shard_map(_with_backward(ring), mesh=mesh, in_specs=rows, out_specs=rows)
        )
    x, kv = (jax.ShapeDtypeStruct((1, heads, length, WIDTH), jnp.float32) for heads in (HEADS, KV_HEADS))
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}  # LLVM's effort: the same memory plan
    lowered = {name: program.lower(x, kv, kv, x) for name, program in programs.items()}
    return {name: memory(program.compile(options)).temp_bytes for name, program in lowered.items()}


def _with_backward(attend: Any) -> Any:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(dout)

    return both


def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    B, _, T, E = q.shape
    return grouped_attention(q.reshape(B, k.shape[1], -1, T, E), k, v).reshape(q.shape)


def _mesh() -> DeviceMesh:
    jaxpar.init_process_group()
    return jaxpar.init_device_mesh((1, jax.device_count()), ("dp", "tp"))


def _batch() -> np.ndarray:
    """The same rows for all ranks: i32[ROWS, TIME + 1]."""
    return np.random.default_rng(0).integers(0, SMALL.vocab, (ROWS, TIME + 1), dtype=np.int32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    steps = what.add_parser("steps")
    steps.add_argument("rounds", type=int)
    steps.add_argument("modes", nargs="+")
    rss = what.add_parser("rss")
    rss.add_argument("name")
    rss.add_argument("mode")
    rss.add_argument("rounds", type=int)
    attention = what.add_parser("attention")
    attention.add_argument("length", type=int)
    attention.add_argument("num_ranks", type=int, nargs="+")
    arguments = vars(parser.parse_args())
    run = {"steps": time_steps, "rss": peak_rss, "attention": attention_bytes}
    print(json.dumps(run[arguments.pop("what")](**arguments)), flush=True)
