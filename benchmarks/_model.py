"""What the JAX workers train: the transformer of `examples/`, one batch, and the step that a JAX user writes by hand.

Sizes are those of `_torch_model.py`.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from _common import interleave, peak_rss_bytes, reset_peak_rss
from jaxpar.data import global_batch
from jaxpar.mesh import DeviceMesh, get_rank

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from transformer import Block as Block
from transformer import Transformer, TransformerConfig

ROWS_PER_RANK, TIME = 8, 64
SMALL = TransformerConfig(vocab=256, width=256, depth=2, heads=8, kv_heads=8, hidden=768)
TX = optax.adamw(3e-4)

Step = Callable[[Any], jax.Array]
Place = Callable[[str, Any], NamedSharding]


def loss_fn(model: Transformer, tokens_BT: jax.Array) -> jax.Array:
    logits = model(tokens_BT[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()


def abstract(config: TransformerConfig) -> Transformer:
    """The model without arrays, to compile for devices that are not here."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def build(config: TransformerConfig = SMALL) -> Transformer:
    """The model with numbers from NumPy: compiling its random initialisation would take longer than the benchmark."""
    graphdef, shapes = nnx.split(abstract(config))
    rng = np.random.default_rng(0)
    numbers = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype), shapes)
    return nnx.merge(graphdef, numbers)


def local_batch() -> np.ndarray:
    """This process's rows: i32[rows, TIME + 1]."""
    rows = ROWS_PER_RANK * jax.local_device_count()
    return np.random.default_rng(get_rank()).integers(0, SMALL.vocab, (rows, TIME + 1), dtype=np.int32)


class ByHand:
    """What a JAX user writes: state and batch placed on the mesh, one `jax.jit`, and XLA's partitioner.

    Args:
        model: concrete to run, abstract to compile only.
        mesh: its axis "dp" splits the batch.
        place: the sharding of each array of parameters and optimizer state, by its dotted name.
        compute_dtype: what parameters are cast to before they are used.
    """

    def __init__(
        self, model: Transformer, mesh: DeviceMesh, place: Place, *, compute_dtype: DTypeLike = jnp.float32
    ) -> None:
        self.mesh = mesh
        graphdef, params = nnx.split(model)
        opt_state = jax.eval_shape(TX.init, params)
        self.places = jax.tree.map_with_path(lambda path, x: place(_dotted(path), x), (params, opt_state))
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
        state = (params, opt_state if is_abstract else TX.init(params))
        self.state = jax.tree.map(_on_mesh, state, self.places)

        def train(params: Any, opt_state: Any, batch: jax.Array) -> Any:
            def loss_of(params: Any) -> jax.Array:
                cast = jax.tree.map(lambda x: x.astype(compute_dtype), params)
                return loss_fn(nnx.merge(graphdef, cast), batch)

            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, opt_state = TX.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        self._jitted = jax.jit(
            train,
            donate_argnums=(0, 1),
            in_shardings=(*self.places, None),
            out_shardings=(*self.places, None),
        )

    def __call__(self, batch: np.ndarray) -> jax.Array:
        """One step; returns the loss."""
        *self.state, loss = self._jitted(*self.state, global_batch(batch, self.mesh, "dp"))
        return loss

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The step for this process's rows, or for a `jax.ShapeDtypeStruct` of all rows with its sharding."""
        is_abstract = isinstance(batch, jax.ShapeDtypeStruct)
        return self._jitted.lower(*self.state, batch if is_abstract else global_batch(batch, self.mesh, "dp"))


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _on_mesh(x: Any, place: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    return jax.make_array_from_callback(x.shape, place, lambda index: x[index])


def medians(contenders: Mapping[str, Step], batch: np.ndarray, *, rounds: int) -> dict[str, float]:
    """Median seconds of each contender's step, interleaved; every step is waited for."""

    def run(step: Step) -> None:
        jax.block_until_ready(step(batch))

    turns = {name: functools.partial(run, step) for name, step in contenders.items()}
    return interleave(turns, rounds=rounds, warmups=2)


def peak_rss_of(step: Step, batch: np.ndarray, *, rounds: int) -> int:
    """The most memory of this process while it runs steps; compilation is not in it."""
    for round_ in range(rounds + 2):
        if round_ == 2:
            reset_peak_rss()
        jax.block_until_ready(step(batch))
    return peak_rss_bytes()
