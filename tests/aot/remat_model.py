"""What the ahead-of-time tests compile: the transformer of `examples/`, each block computed again in its backward."""

import sys
from pathlib import Path

import jax
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from transformer import Block, Transformer, TransformerConfig


class RematBlock(Block):
    """A block whose backward computes it again: it saves its input only."""

    __call__ = nnx.remat(Block.__call__)


class Model(Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, rngs=nnx.Rngs(0))
        self.blocks = nnx.List([RematBlock(config, rngs=nnx.Rngs(0)) for _ in range(config.depth)])


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
