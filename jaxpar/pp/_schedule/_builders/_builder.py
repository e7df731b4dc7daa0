"""What a named schedule is made of: where the stages lie, for which numbers it is defined, one row per rank."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._placement import loop


@dataclass(frozen=True)
class Shape:
    """The numbers that a builder gets: p ranks, m microbatches, v stages per rank."""

    n_ranks: int
    n_microbatches: int
    stages_per_rank: int

    @property
    def n_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.n_ranks * self.stages_per_rank


@dataclass(frozen=True)
class Builder:
    """One named schedule.

    name: As PyTorch calls it, where PyTorch has it; `aliases` are other names in use. Letter case does not matter.
    row: The actions of a rank, in order, without bubbles.
    place: `rank_of_stage` for p ranks and v stages per rank.
    stages_per_rank: The only number it is defined for; None if for any. `usual_stages_per_rank`: the default.
    rule: When it is defined, in words; `is_defined` decides.
    """

    name: str
    row: Callable[[Shape, int], Iterable[Action]]
    aliases: tuple[str, ...] = ()
    place: Callable[[int, int], tuple[int, ...]] = loop
    stages_per_rank: int | None = None
    usual_stages_per_rank: int = 1
    rule: str = ""
    is_defined: Callable[[Shape], bool] = lambda shape: True


def forwards(stage: int, microbatches: Iterable[int]) -> Iterator[Action]:
    """F of one stage for each microbatch."""
    return (Action(stage, Op.F, microbatch) for microbatch in microbatches)


def backwards(stage: int, microbatches: Iterable[int]) -> Iterator[Action]:
    """B of one stage for each microbatch."""
    return (Action(stage, Op.B, microbatch) for microbatch in microbatches)
