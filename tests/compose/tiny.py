"""A transformer as small as can be, in float64 unless told otherwise: one block, tied embedding; compiling is what takes time here."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxpar
from jaxpar.mesh import Replicate, Shard
from jaxpar.tp import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel


class Core(nnx.Module):
    """Causal attention; the one place where positions meet."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        T, E = q.shape[-2:]
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), q @ k.mT / E**0.5, -1e30)
        return jax.nn.softmax(scores) @ v


class Attention(nnx.Module):
    """Causal, four heads, in one dtype throughout (`jax.nn.dot_product_attention` would compute in float32)."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.core = Core()
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, param_dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).reshape(B, T, -1, 3, D // 4).transpose(3, 0, 2, 1, 4)
        return self.out(self.core(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, -1))


class Block(nnx.Module):
    def __init__(self, width: int, dropout: float, dtype: Any, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.norm = nnx.RMSNorm(width, param_dtype=dtype, rngs=rngs)
        self.attention = Attention(width, dtype, rngs)
        self.up = nnx.Linear(width, 2 * width, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.dropout(self.down(jax.nn.silu(self.up(x))))


class Transformer(nnx.Module):
    """Tied embedding, one block; with dropout if asked for."""

    def __init__(
        self, vocab: int = 16, width: int = 16, dropout: float = 0.0, dtype: Any = jnp.float64
    ) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(vocab, width, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(width, dropout, dtype, rngs) for _ in range(1)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def losses_of(model: nnx.Module, batch: dict[str, Any]) -> jax.Array:
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]) * batch["weights"]


def loss_fn(model: nnx.Module, batch: dict[str, Any]) -> jaxpar.Mean:
    return jaxpar.Mean(losses_of(model, batch).sum(), batch["weights"].sum())


def sequence_loss_fn(model: nnx.Module, batch: dict[str, Any]) -> jaxpar.Mean:
    """The same loss, of this rank's part of the sequences."""
    part = {"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:], "weights": batch["weights"]}
    part = {name: jaxpar.cp.split_sequence(x, "cp") for name, x in part.items()}
    losses = optax.softmax_cross_entropy_with_integer_labels(model(part["inputs"]), part["targets"])
    return jaxpar.Mean((losses * part["weights"]).sum(), part["weights"].sum())


def plan(*, is_sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """Splits the model over `tp`: Megatron's plan, without and with sequence parallelism."""
    sequence = Shard(1) if is_sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(output_layouts=sequence, attend_input_layouts=sequence),
        "blocks.*.attention.qkv": ColwiseParallel(heads=4),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=sequence),
        "blocks.*.up": ColwiseParallel(input_layouts=sequence),
        "blocks.*.down": RowwiseParallel(output_layouts=sequence),
    }
    if is_sequence_parallel:
        whole = PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate())
        plan |= {"blocks.*.norm": SequenceParallel(), "blocks.*.dropout": SequenceParallel()}
        plan |= {"blocks.*.attention": whole}
    return plan
