"""Sums of losses and metrics of all stages to metrics that every process has, and the factor of the gradients on every rank.

sums of each rank  ->  last rank: metrics, 1 / count  ->  every rank         a few numbers, one move for each rank

Every rank needs the factor; the loss too, if the optimizer looks at it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.pp._ranks import Ranks, wanted
from jaxpar.pp._stage import Stage
from jaxpar.train._local import LocalStep
from jaxpar.train._stage_end import MeansOfAll
from jaxpar.train._stage_sums import sums_of_rank

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class StageMetrics:
    """Args:
    ranks: of the pipeline.
    means: `(sums) -> (metrics, 1 / count)`, on the last rank.
    sources: for each rank, where its sums are: their number, stage, position there, and type at the last rank.
    results: for each rank, metrics and factor as they lie there.
    treedef: of metrics and factor.
    loss_at: which of them is the loss.
    first: for a rank of another shape than the last one's, what it does with its sums before they move.
    """

    ranks: Ranks
    means: Callable[..., Any]
    sources: tuple[tuple[tuple[int, int, int, jax.ShapeDtypeStruct], ...], ...]
    results: tuple[list[jax.ShapeDtypeStruct], ...]
    treedef: Any
    loss_at: int
    first: Mapping[int, Callable[..., Any]]

    @classmethod
    def of(
        cls, stages: Sequence[Stage], treedef: Any, locals_: Sequence[LocalStep], ranks: Ranks, num_parts: int
    ) -> "StageMetrics":
        """For the programs of all stages.

        Args:
            stages: of all ranks.
            treedef: of the metrics, as `Mean`s.
            locals_: for each rank the step's options there.
            ranks: of the pipeline.
            num_parts: microbatches of a step.
        """
        last, local = stages[-1], locals_[ranks.last]
        made = sorted(
            (i, s, position, type_)
            for s, stage in enumerate(stages)
            for position, (i, type_) in enumerate(zip(stage.sums, stage.sum_types, strict=True))
        )
        kept = [(s, position, type_) for i, s, position, type_ in made if i > 0]  # 0 is the total, once more
        first, between = {}, [last.between(type_) for _, _, type_ in kept]
        for rank, mesh in enumerate(ranks.meshes):
            which = [k for k, (s, *_) in enumerate(kept) if ranks.of_stage[s] == rank]
            if mesh.shape == last.mesh.shape or not which:
                continue
            scale = local.num_ranks / locals_[rank].num_ranks
            sums = sums_of_rank(treedef, which, locals_[rank].axes, scale)
            types = [kept[k][-1] for k in which]
            first[rank] = sums.compiled(mesh, types)
            given = [stages[kept[k][0]].between(type_) for k, type_ in zip(which, types, strict=True)]
            for k, x in zip(which, jax.eval_shape(first[rank], given), strict=True):
                between[k] = wanted(x, NamedSharding(last.mesh, PartitionSpec()))
        means = MeansOfAll(
            treedef,
            local,
            num_parts=local.num_ranks * num_parts,
            num_losses=locals_[ranks.of_stage[made[0][1]]].num_ranks * num_parts,
            whole=frozenset(k for k, (s, *_) in enumerate(kept) if ranks.of_stage[s] in first),
        )
        program = means.compiled(last.mesh, [x.sharding.spec for x in between])
        sources = tuple(
            tuple(
                (k, s, position, like)
                for k, ((s, position, _), like) in enumerate(zip(kept, between, strict=True))
                if ranks.of_stage[s] == rank
            )
            for rank in range(len(ranks.meshes))
        )
        made_there = jax.eval_shape(program, between)
        leaves, treedef = jax.tree.flatten(made_there)
        places = jax.tree.unflatten(treedef, range(len(leaves)))
        results = tuple(
            [wanted(x, NamedSharding(mesh, PartitionSpec())) for x in leaves] for mesh in ranks.meshes
        )
        return cls(ranks, program, sources, results, treedef, places[0]["loss"], first)

    @property
    def loss_type(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the loss."""
        return self.results[-1][self.loss_at]

    def __call__(
        self, sums: Sequence[Leaves | None], *, is_loss_wanted: bool = False
    ) -> tuple[dict[str, Any], dict[int, jax.Array], dict[int, jax.Array]]:
        """Metrics, and by rank, for those that are here, the factor, and the loss if it is wanted.

        Args:
            sums: of each stage that is here.
            is_loss_wanted: on every rank.
        """
        collected = self._collected(sums)
        ranks, metrics, factors, losses = self.ranks, None, {}, {}
        if ranks.last in ranks.here:
            metrics = jax.tree.leaves(self.means(collected))
        made, sent = metrics, self._sent(is_loss_wanted)
        for rank, types in enumerate(self.results):
            values = None if made is None else [made[i] for i in sent]
            types = [types[i] for i in sent]
            arrival = ranks.move(values, ranks.last, rank, types, "the metrics of the step")
            if arrival is not None:
                arrived = dict(zip(sent, arrival(), strict=True))
                factors[rank] = arrived[sent[-1]]
                if is_loss_wanted:
                    losses[rank] = arrived[self.loss_at]
                metrics = [*arrived.values()] if metrics is None else metrics
        assert metrics is not None
        return jax.tree.unflatten(self.treedef, metrics)[0], factors, losses

    def _sent(self, is_loss_wanted: bool) -> list[int]:
        """Where every process can read the metrics on the last rank, only numbers for the devices are sent on."""
        num = len(self.results[0])
        if self.ranks.is_spread:
            return [*range(num)]
        return [self.loss_at, num - 1] if is_loss_wanted else [num - 1]

    def _collected(self, sums: Sequence[Leaves | None]) -> Leaves:
        """All sums on the last rank."""
        ranks = self.ranks
        collected: Leaves = [None] * sum(map(len, self.sources))
        for rank, source in enumerate(self.sources):
            values: Leaves | None = None
            if rank in ranks.here:
                values = [of_stage[place] for _, s, place, _ in source if (of_stage := sums[s]) is not None]
                values = self.first[rank](values) if rank in self.first else values
            types = [like for *_, like in source]
            arrival = ranks.move(values, rank, ranks.last, types, "sums of losses and metrics")
            for (k, *_), x in zip(source, arrival() if arrival else (), strict=arrival is not None):
                collected[k] = x
        return collected
