"""The example transformer computes what its docstrings say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from transformer import Transformer, TransformerConfig, generate, grouped_attention, loss_fn, preset, rope

TINY = preset("tiny")


def random_tokens(shape: tuple[int, ...], *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab, shape, dtype=np.uint8)


def create(config: TransformerConfig) -> Transformer:
    return nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def model() -> Transformer:
    return create(TINY)


@pytest.mark.parametrize(("tied", "dtype"), [(False, jnp.float32), (True, jnp.bfloat16)])
def test_logits_are_float32_and_parameters_too(tied: bool, dtype: jnp.dtype) -> None:
    model = nnx.eval_shape(lambda: Transformer(preset("tiny", tied=tied, dtype=dtype), rngs=nnx.Rngs(0)))
    logits = nnx.eval_shape(lambda model, tokens: model(tokens), model, random_tokens((2, 8)))
    assert (logits.shape, logits.dtype) == ((2, 8, TINY.vocab), jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    assert (model.head is None) == tied


def test_untrained_model_predicts_all_tokens_alike(model: Transformer) -> None:
    assert abs(float(nnx.jit(loss_fn)(model, random_tokens((2, 17)))) - np.log(TINY.vocab)) < 0.1


def test_future_tokens_do_not_change_past_logits(model: Transformer) -> None:
    tokens = random_tokens((2, 12))
    changed = tokens.copy()
    changed[:, 7:] += 1
    forward = nnx.jit(lambda model, tokens: model(tokens))
    before, after = forward(model, tokens), forward(model, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (np.abs(before[:, 7:] - after[:, 7:]).max(axis=(0, 2)) > 1e-3).all()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_grouped_attention_equals_full_attention_on_repeated_heads(num_groups: int) -> None:
    B, K, T, E = 2, 2, 6, 4
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, K, num_groups, T, E), np.float32)
    k, v = rng.standard_normal((2, B, K, T, E), np.float32)
    k_repeated, v_repeated = (np.repeat(x[:, :, None], num_groups, axis=2) for x in (k, v))
    score = q @ k_repeated.swapaxes(-1, -2) / np.sqrt(E)
    weight = np.where(np.tril(np.ones((T, T), bool)), np.exp(score), 0.0)
    expected = weight / weight.sum(-1, keepdims=True) @ v_repeated
    np.testing.assert_allclose(jax.jit(grouped_attention)(q, k, v), expected, rtol=1e-5, atol=1e-6)


def test_rope_scores_depend_on_distance_only() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 8), np.float32)
    turn = jax.jit(lambda x: rope(x, jax.numpy.arange(16)))
    score = np.asarray(turn(np.tile(q, (16, 1)))) @ np.asarray(turn(np.tile(k, (16, 1)))).T
    for distance in range(-15, 16):
        diagonal = np.diagonal(score, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-5, atol=1e-5)
    assert np.ptp(score[:, 0]) > 0.1
    np.testing.assert_allclose(score[0, 0], q @ k, rtol=1e-5)


def test_qkv_columns_split_into_whole_heads(model: Transformer) -> None:
    """The first half of the columns of `qkv` with the first half of the rows of `out` is half of the heads."""
    graph, state = nnx.split(model.blocks[0].attention)
    qkv, out = state["qkv"]["kernel"][...], state["out"]["kernel"][...]

    @jax.jit
    def attend(qkv: jax.Array, out: jax.Array) -> jax.Array:
        attention = nnx.merge(graph, state)
        attention.qkv.kernel, attention.out.kernel = nnx.Param(qkv), nnx.Param(out)
        return attention(x)

    x = np.random.default_rng(0).standard_normal((2, 8, TINY.width), np.float32)
    parts = [
        attend(columns, rows)
        for columns, rows in zip(
            np.split(qkv, TINY.kv_heads, axis=1), np.split(out, TINY.kv_heads), strict=True
        )
    ]
    np.testing.assert_allclose(sum(parts), attend(qkv, out), rtol=1e-5, atol=1e-6)


def test_loss_falls_on_a_learnable_sequence() -> None:
    model = create(preset("tiny", depth=1))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    tokens = np.tile(np.frombuffer(b"jaxpar ", np.uint8), (2, 5))

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(25)]
    assert losses[0] > 5.0 and losses[-1] < 0.5
    # The window is shorter than the text, so the sample also crosses the sliding of the window.
    sample = generate(model, tokens[:1, :7], 21, temperature=0.0, key=jax.random.key(0), window=16)
    assert bytes(np.asarray(sample[0], np.uint8)) == b"jaxpar " * 3


def test_generation_equals_token_by_token_argmax(model: Transformer) -> None:
    prompt = random_tokens((2, 3))
    sample = generate(model, prompt, 9, temperature=0.0, key=jax.random.key(0), window=8)
    forward = nnx.jit(lambda model, window, last: model(window)[:, last].argmax(-1))
    text = prompt
    for _ in range(9):
        window = text[:, -8:]
        padded = np.pad(window, ((0, 0), (0, 8 - window.shape[1])))
        text = np.concatenate(
            [text, forward(model, padded, window.shape[1] - 1)[:, None].astype(np.uint8)], axis=1
        )
    np.testing.assert_array_equal(sample, text[:, 3:])


def test_sampling_follows_its_key(model: Transformer) -> None:
    def sample(seed: int) -> np.ndarray:
        key = jax.random.key(seed)
        return np.asarray(generate(model, random_tokens((2, 3)), 9, temperature=1.0, key=key, window=8))

    np.testing.assert_array_equal(sample(0), sample(0))
    assert (sample(0) != sample(1)).any()


def test_config_says_which_width_to_write() -> None:
    with pytest.raises(ValueError, match="Write width=104"):
        TransformerConfig(width=100, heads=4)
    with pytest.raises(ValueError, match="heads=4 is not a multiple of kv_heads=3"):
        TransformerConfig(heads=4, kv_heads=3)
