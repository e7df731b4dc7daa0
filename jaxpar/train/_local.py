"""What one device does in a step: forward, backward, and the sums over the batch axes.

    one microbatch    forward -> [losses: 1 all-reduce] -> backward, a bucket reduced where it is ready
    n microbatches    n x (forward -> backward), gradients added up locally -> [losses] -> all buckets
                      units of fully_shard: scattered in each backward, or gathered before all and scattered after

Gradients are taken of the **sum** over devices of `total / (count of the whole batch)`, so every reduction is a
plain sum, and a parameter that is used outside the wrapped call is right too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar._errors import BatchError
from jaxpar._mean import Mean, divide
from jaxpar._module import vary, varying_axes
from jaxpar._pytree import PyTree
from jaxpar.ddp._order import ready_order
from jaxpar.fsdp._order import new_order
from jaxpar.fsdp._outside import refused_outside
from jaxpar.fsdp._whole import Units
from jaxpar.train._dropout import Positions, use_global_positions
from jaxpar.train._metrics import split_output, sum_over_ranks, values
from jaxpar.train._scan import scan_sum, widen
from jaxpar.train._sums import GradientSums, Plan

Leaves = list[jax.Array]


@dataclass(frozen=True)
class LocalStep:
    """The body of the step's `shard_map`: everything in it is per device.

    Args:
        loss_fn: `loss_fn(model, batch)`.
        merge: builds the model from parameter leaves and other leaves.
        split: takes the other leaves out of a model.
        sums: how gradients are summed.
        rest_axes: for each other leaf, the batch axes over which it is replicated: what differs there after the
            forward is made equal.
        axes: axes of size above 1 that split the batch or its sequences.
        positions: how rows and sequences lie, for random masks.
        counts: those other leaves that count random keys of dropouts: every microbatch draws from the same ones.
        num_ranks: product of their sizes.
        accumulate: number of microbatches.
        is_buffer_mean: other leaves are made equal by their mean, instead of taking rank 0's.
        is_cut: the trace will be cut into the stages of a pipeline.
        replicas: axes along which replicas lie that differ: nothing is summed over them here.
        units: units to gather before the microbatches and to scatter after them; None: in each.
    """

    loss_fn: Callable[[Any, Any], Any]
    merge: Callable[[Sequence[jax.Array], Sequence[jax.Array]], nnx.Module]
    split: Callable[[nnx.Module], Leaves]
    sums: GradientSums
    rest_axes: tuple[tuple[str, ...], ...]
    axes: tuple[str, ...]
    positions: Positions
    counts: tuple[int, ...]
    num_ranks: int
    accumulate: int
    is_buffer_mean: bool = False
    units: Units | None = None
    is_cut: bool = False
    replicas: tuple[str, ...] = ()

    def __call__(
        self, params: Leaves, rest: Leaves, states: tuple[PyTree, ...], batch: PyTree
    ) -> tuple[Leaves, Leaves, tuple[PyTree, ...], dict[str, PyTree]]:
        """Returns gradients, the model's other state, the hook's states, and the metrics, reduced."""
        run = self._accumulated if self.accumulate > 1 else self._at_once
        mine = jax.tree.map(lambda x: x[0], states)  # f32[1, ...]: this rank's row of f32[ranks, ...]
        grads, rest, mine, metrics = run(params, rest, mine, batch)
        return grads, rest, jax.tree.map(lambda x: x[None], mine), metrics

    def _plan(self, params: Leaves, rest: Leaves, batch: PyTree) -> Plan:
        """The buckets, filled in the order in which this model's gradients become ready."""
        by_default = self.sums.plan(params)
        if self.accumulate > 1 or len(by_default.buckets) + len(by_default.groups) < 2:
            return by_default
        order = ready_order(lambda p: self.forward(self.sums.marked(p), rest, batch)[0].total, params)
        return self.sums.plan(params, order)

    def forward(
        self,
        params: Sequence[jax.Array],
        rest: Sequence[jax.Array],
        batch: PyTree,
        microbatch: jax.Array | None = None,
    ) -> tuple[Mean, dict[str, PyTree], Leaves]:
        model = self.merge(params, rest)
        rows = next((x.shape[0] for x in jax.tree.leaves(batch) if x.ndim), 0)
        use_global_positions(model, replace(self.positions, num_rows=rows), microbatch)
        with new_order(root=model, is_cut=self.is_cut), refused_outside(model):
            loss, metrics = split_output(self.loss_fn(model, batch))
        return Mean(vary(loss.total, self.axes), loss.count), metrics, self.split(model)

    def evaluated(self, params: Leaves, rest: Leaves, batch: PyTree) -> dict[str, PyTree]:
        """The metrics of a forward, reduced; nothing else."""
        if self.accumulate == 1:
            loss, metrics, _ = self.forward(params, rest, batch)
            means: PyTree = {"loss": loss, **metrics}
        else:
            start = list(rest)

            def microbatch(rest: Leaves, part: PyTree) -> tuple[Leaves, PyTree, Leaves]:
                rest = [start[i] if i in self.counts else x for i, x in enumerate(rest)]
                loss, metrics, rest_out = self.forward(params, rest, part[1], part[0])
                return [], {"loss": loss, **metrics}, rest_out

            parts = (jnp.arange(self.accumulate), jax.tree.map(self._split_rows, batch))
            _, means, _ = scan_sum(microbatch, rest, parts)
        means, _ = sum_over_ranks(means, [], self.axes)
        return values(means, self.num_ranks * self.accumulate)

    def _at_once(self, params: Leaves, rest: Leaves, states: Any, batch: PyTree) -> Any:
        plan = self._plan(params, rest, batch)

        def objective(mine: Leaves, states: Any) -> Any:
            marked, tokens = self.sums.in_backward(mine, params, states, plan)
            loss, metrics, rest_out = self.forward(marked, rest, batch)
            return (loss.total, tokens), ({"loss": loss, **metrics}, rest_out)

        mine = self.sums.slices.take(params)
        (total, _), pullback, (means, rest) = jax.vjp(objective, mine, states, has_aux=True)
        means, rest = self._reduce_results(means, rest)
        seed = vary(self._one_over_count(means["loss"], total.dtype), tuple(varying_axes(total)))
        grads, states = pullback((seed, self.sums.start(_number_of(means), plan)))
        return grads, rest, states, values(means, self.num_ranks)

    def _accumulated(self, params: Leaves, rest: Leaves, states: Any, batch: PyTree) -> Any:
        microbatches = jax.tree.map(self._split_rows, batch)
        run = self._sum if self.units is None else self._sum_whole
        grads, means, rest = run(self.sums.marked(params), rest, microbatches)
        means, rest = self._reduce_results(means, rest)
        scale = self._one_over_count(means["loss"], jnp.promote_types(means["loss"].total.dtype, jnp.float32))
        grads = [(g * scale).astype(p.dtype) for g, p in zip(grads, params, strict=True)]
        plan = self._plan(params, rest, batch)
        grads, states = self.sums.after_backward(grads, states, plan, _number_of(means))
        return grads, rest, states, values(means, self.num_ranks * self.accumulate)

    def _sum(self, params: Leaves, rest: Leaves, microbatches: PyTree) -> tuple[Leaves, PyTree, Leaves]:
        """The sums of the gradients and of the losses, and the other leaves after all microbatches."""

        start = list(rest)

        def microbatch(rest: Leaves, part: PyTree) -> tuple[Leaves, PyTree, Leaves]:
            index, rows = part
            rest = [start[i] if i in self.counts else x for i, x in enumerate(rest)]

            def objective(params: Leaves) -> Any:
                loss, metrics, rest_out = self.forward(params, rest, rows, index)
                return loss.total, ({"loss": loss, **metrics}, rest_out)

            total, pullback, (means, rest_out) = jax.vjp(objective, params, has_aux=True)
            (grads,) = pullback(vary(jnp.ones_like(total), tuple(varying_axes(total))))
            return [widen(g) for g in grads], means, rest_out

        return scan_sum(microbatch, rest, (jnp.arange(self.accumulate), microbatches))

    def _sum_whole(self, params: Leaves, rest: Leaves, microbatches: PyTree) -> tuple[Leaves, PyTree, Leaves]:
        """The same, with all parameters gathered once; the sums of their gradients are scattered once."""
        assert self.units is not None
        num, shards = len(params), [*params, *rest]
        whole = self.units.gather(shards)
        grads, means, after = self._sum(whole[:num], whole[num:], microbatches)
        grads = self.units.scatter([*grads, *[None] * len(rest)], shards)[:num]
        # A frozen parameter of a unit is among the rest: it was whole in the loop only.
        rest = [shards[i] if i in self.units.leaves else x for i, x in enumerate(after, start=num)]
        return grads, means, rest

    def _split_rows(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.accumulate, x.shape[0] // self.accumulate, *x.shape[1:])

    def _one_over_count(self, loss: Mean, dtype: Any) -> jax.Array:
        return self.one_over(self.num_ranks * self.accumulate if loss.count is None else loss.count, dtype)

    @staticmethod
    def one_over(count: jax.Array | int, dtype: Any) -> jax.Array:
        """1 / count; 0 for a batch in which nothing counts."""
        return divide(jnp.ones((), dtype), jnp.asarray(count, dtype))

    def _reduce_results(self, means: PyTree, rest: Leaves) -> tuple[PyTree, Leaves]:
        """Losses, metrics and the buffers that differ between ranks: one all-reduce in all."""
        differing = self._differing(rest, self.rest_axes)
        means, synced = sum_over_ranks(
            means,
            [rest[i] for i in differing],
            self.axes,
            is_buffer_mean=self.is_buffer_mean,
            replicas=self.replicas,
        )
        return means, _replaced(rest, differing, synced)

    def made_equal(self, rest: Leaves, rest_axes: Sequence[tuple[str, ...]]) -> Leaves:
        """Variables that differ between ranks over which they are replicated, made equal: one all-reduce, or none."""
        differing = self._differing(rest, rest_axes)
        if not differing:
            return rest
        buffers = [rest[i] for i in differing]
        _, synced = sum_over_ranks({}, buffers, self.axes, is_buffer_mean=self.is_buffer_mean)
        return _replaced(rest, differing, synced)

    def _differing(self, rest: Leaves, rest_axes: Sequence[tuple[str, ...]]) -> list[int]:
        """Which variables differ between ranks over which they are replicated.

        Raises:
            BatchError: one of them is not floating.
        """
        differing = [i for i, x in enumerate(rest) if varying_axes(x) & set(rest_axes[i])]
        for i in differing:
            if not jnp.issubdtype(rest[i].dtype, jnp.floating):
                raise BatchError(
                    f"loss_fn made a non-floating model variable ({rest[i].dtype}{list(rest[i].shape)}) differ between "
                    f"the ranks of {(*self.axes, *self.replicas)}. A replicated variable must be equal on all of them: reduce it with "
                    f"jaxpar.mesh.all_reduce, or make it floating to take rank 0's."
                )
        return differing


def _replaced(values: Leaves, places: Sequence[int], new: Sequence[jax.Array]) -> Leaves:
    replaced = dict(zip(places, new, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(values)]


def _number_of(means: PyTree) -> jax.Array:
    return means["loss"].total
