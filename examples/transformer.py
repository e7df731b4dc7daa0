"""A decoder-only transformer in plain Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    tokens_BT -> embed -> [ x + attention(norm1(x)), x + mlp(norm2(x)) ] * depth -> norm -> head -> logits_BTV

It knows nothing of jaxpar: `train_lm.py` makes it parallel from outside. Two habits keep XLA fast: every
linear layer is a matmul on (tokens, width), because the weight gradient of a 3-d `x @ w` is slow on CPU, and
attention works on (batch, heads, time, head width).

Letters in array names: B batch, T and S time, D model width, H query heads, K key/value heads, G = H / K
queries per key/value head, E head width, F hidden width, V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How Llama 3 stretches rotary positions to texts longer than those it began with.

    A pair that turns more than `high` times in `length` tokens stays, one that turns less than `low` times turns `factor` times
    slower, and those between lie between.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192

    def __call__(self, frequency: jax.Array) -> jax.Array:
        turns = frequency * self.length / (2 * math.pi)
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a transformer; `preset(name)` gives the ready ones.

    Parameters are float32 always; `dtype` is what the layers compute in.
    """

    vocab: int = 256
    width: int = 128
    depth: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 384
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tied: bool = False
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: "
                f"each key/value head serves the same number of query heads."
            )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} is not a multiple of 2 * heads={2 * self.heads}: RoPE turns pairs, "
                f"so the head width must be even. Write width={math.ceil(self.width / (2 * self.heads)) * 2 * self.heads}."
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads


PRESETS = {
    "tiny": TransformerConfig(width=64, depth=2, heads=4, kv_heads=2, hidden=192),
    "small": TransformerConfig(width=128, depth=4, heads=4, kv_heads=2, hidden=384),
    "medium": TransformerConfig(width=256, depth=8, heads=8, kv_heads=4, hidden=768),
    "large": TransformerConfig(width=768, depth=12, heads=12, kv_heads=4, hidden=2048),
}


def preset(name: str, **changes: object) -> TransformerConfig:
    """The named size, with fields replaced: `preset("tiny", depth=3)`."""
    return dataclasses.replace(PRESETS[name], **changes)  # pyright: ignore[reportArgumentType]


class Attention(nnx.Module):
    """Causal self-attention; K key/value heads each serve G query heads.

    The columns of `qkv` are ordered by key/value head: [q_0 .. q_(G-1), k, v] for head 0, then for head 1, and
    so on. A contiguous column split therefore gives each part whole heads, and the head count is read from the
    width that arrives, so the layer also works on such a part.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.groups = config.heads // config.kv_heads
        self.head_width = config.head_width
        self.rope_base, self.rope_scaling = config.rope_base, config.rope_scaling
        self.core = CausalCore()
        qkv_width = config.kv_heads * (self.groups + 2) * config.head_width
        self.qkv = _linear(config.width, qkv_width, config, rngs=rngs)
        self.out = _linear(
            config.width, config.width, config, stddev=_residual_stddev(config, config.width), rngs=rngs
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        G, E = self.groups, self.head_width
        qkv = self.qkv(x_BTD.reshape(B * T, D)).reshape(B, T, -1, G + 2, E).transpose(0, 2, 3, 1, 4)
        position_T = self.core.positions(T)
        q_BKGTE = rope(qkv[:, :, :G], position_T, base=self.rope_base, scaling=self.rope_scaling)
        k_BKSE = rope(qkv[:, :, G], position_T, base=self.rope_base, scaling=self.rope_scaling)
        y_BKGTE = self.core(q_BKGTE, k_BKSE, qkv[:, :, G + 1])
        y_BTH = y_BKGTE.transpose(0, 3, 1, 2, 4)
        return self.out(y_BTH.reshape(B * T, -1)).reshape(B, T, D)


class CausalCore(nnx.Module):
    """The one place where positions meet: a part of the model, so that another one can take its place."""

    def positions(self, length: int) -> jax.Array:
        return jnp.arange(length)

    def __call__(self, q_BKGTE: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array) -> jax.Array:
        return grouped_attention(q_BKGTE, k_BKSE, v_BKSE)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = _linear(config.width, config.hidden, config, rngs=rngs)
        self.up = _linear(config.width, config.hidden, config, rngs=rngs)
        self.down = _linear(
            config.hidden, config.width, config, stddev=_residual_stddev(config, config.hidden), rngs=rngs
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        return self.down(jax.nn.silu(self.gate(x_ND)) * self.up(x_ND)).reshape(x_BTD.shape)


class Block(nnx.Module):
    """One pre-norm residual layer: attention, then MLP."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = _norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = _norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Transformer(nnx.Module):
    """Tokens to next-token logits.

    Args of the call: tokens_BT: i32[B, T]. Returns: f32[B, T, V]; position t sees tokens 0..t only.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(
            config.vocab,
            config.width,
            dtype=config.dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.norm = _norm(config, rngs=rngs)
        self.head = (
            None if config.tied else _linear(config.width, config.vocab, config, stddev=0.02, rngs=rngs)
        )

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embed(tokens_BT.astype(jnp.int32))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_ND = self.norm(x_BTD).reshape(-1, x_BTD.shape[-1])
        logits_NV = self.embed.attend(x_ND) if self.head is None else self.head(x_ND)
        return logits_NV.reshape(*tokens_BT.shape, -1).astype(jnp.float32)


def loss_fn(model: Transformer, tokens_BT: jax.Array) -> jax.Array:
    """Mean next-token cross-entropy in nats.

    Args:
        model: the model.
        tokens_BT: integers [B, T + 1]; the first T are read, the last T predicted.

    Returns:
        f32[], the mean over B * T predictions.
    """
    logits_BTV = model(tokens_BT[:, :-1])
    target_BT1 = tokens_BT[:, 1:, None].astype(jnp.int32)
    correct_BT1 = jnp.take_along_axis(logits_BTV, target_BT1, axis=-1)
    return (jax.nn.logsumexp(logits_BTV, axis=-1, keepdims=True) - correct_BT1).mean()


def generate(
    model: Transformer, prompt_BT: ArrayLike, n: int, *, temperature: float, key: jax.Array, window: int = 128
) -> jax.Array:
    """Continue each prompt by n sampled tokens.

    Every token is computed from the last `window` tokens without a key/value cache: short to read, one
    compilation, good for samples of a few hundred tokens.

    Args:
        model: the model.
        prompt_BT: integers [B, T], T >= 1.
        n: how many tokens to add.
        temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
        key: a `jax.random.key`.
        window: how many past tokens the model sees.

    Returns:
        i32[B, n], the new tokens.
    """
    prompt_BT = jnp.asarray(prompt_BT, jnp.int32)[:, -window:]
    length = prompt_BT.shape[1]
    # What lies right of `length` is never seen: attention is causal.
    window_BS = jnp.pad(prompt_BT, ((0, 0), (0, window - length)))
    return _generate(model, window_BS, length, n, temperature, key)


@functools.partial(nnx.jit, static_argnums=3)
def _generate(
    model: Transformer,
    window_BS: jax.Array,
    length: ArrayLike,
    n: int,
    temperature: jax.Array | float,
    key: jax.Array,
) -> jax.Array:
    def add_token(
        carry: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window_BS, length = carry
        logits_BV = jax.lax.dynamic_index_in_dim(model(window_BS), length - 1, axis=1, keepdims=False)
        sampled_B = jax.random.categorical(key, logits_BV / jnp.maximum(temperature, 1e-6))
        token_B = jnp.where(temperature > 0, sampled_B, logits_BV.argmax(-1)).astype(window_BS.dtype)
        full = length == window_BS.shape[1]
        window_BS = jnp.where(full, jnp.roll(window_BS, -1, axis=1), window_BS)
        length = jnp.where(full, length, length + 1)
        window_BS = jax.lax.dynamic_update_slice_in_dim(window_BS, token_B[:, None], length - 1, axis=1)
        return (window_BS, length), token_B

    _, tokens_nB = jax.lax.scan(add_token, (window_BS, jnp.asarray(length)), jax.random.split(key, n))
    return tokens_nB.T


def rope(
    x: jax.Array, position_T: jax.Array, *, base: float = 10_000.0, scaling: RopeScaling | None = None
) -> jax.Array:
    """Rotary positions: turn pair i of the vector at time t by the angle t * base ** (-2 i / E).

    The product of a turned query and a turned key then depends on their distance in time only.

    Args:
        x: [..., T, E] with E even; pair i is (x[i], x[i + E / 2]).
        position_T: the times.
        base: sets the slowest rotation.
        scaling: slows them down.

    Returns:
        An array like x.
    """
    E = x.shape[-1]
    frequency = base ** (-jnp.arange(0, E, 2, dtype=jnp.float32) / E)
    frequency = frequency if scaling is None else scaling(frequency)
    angle = position_T.astype(jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def grouped_attention(q_BKGTE: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array) -> jax.Array:
    """Causal softmax attention in which the G queries of a group share one key/value head.

    The queries of a group are stacked in time, so scores and values are two batched matmuls and keys are never
    repeated in memory. Scores and softmax are float32.

    Args:
        q_BKGTE: queries.
        k_BKSE: keys, S = T.
        v_BKSE: values.

    Returns:
        [B, K, G, T, E].
    """
    B, K, G, T, E = q_BKGTE.shape
    q_BKNE = (q_BKGTE * E**-0.5).reshape(B, K, G * T, E)
    score_BKNS = jnp.einsum("BKNE,BKSE->BKNS", q_BKNE, k_BKSE, preferred_element_type=jnp.float32)
    visible_TS = jnp.tril(jnp.ones((T, T), bool))
    score_BKGTS = jnp.where(visible_TS, score_BKNS.reshape(B, K, G, T, T), -jnp.inf)
    weight_BKNS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BKSE.dtype).reshape(B, K, G * T, T)
    return jnp.einsum("BKNS,BKSE->BKNE", weight_BKNS, v_BKSE).reshape(B, K, G, T, E)


def _residual_stddev(config: TransformerConfig, width_in: int) -> float:
    """The 2 * depth layers that add to the residual stream start smaller, as in GPT-2: their sum has unit scale."""
    return (2 * config.depth * width_in) ** -0.5


def _norm(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.width, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)


def _linear(
    width_in: int, width_out: int, config: TransformerConfig, *, stddev: float | None = None, rngs: nnx.Rngs
) -> nnx.Linear:
    return nnx.Linear(
        width_in,
        width_out,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=nnx.initializers.normal(stddev or width_in**-0.5),
        rngs=rngs,
    )
