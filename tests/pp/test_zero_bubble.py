"""Zero bubble means: between its first action and its last no rank ever waits, at F = I = W."""

import pytest

from jaxpar.pp import Costs, Timeline, get_schedule, simulate


def pauses(timeline: Timeline) -> list[float]:
    """For each rank, how long it waits between its first action and its last."""
    return [
        row[-1].end - row[0].start - busy for row, busy in zip(timeline.events, timeline.busy, strict=True)
    ]


@pytest.mark.parametrize("name", ["ZBH2", "ZBVZeroBubble"])
@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
def test_no_rank_waits_once_it_has_begun(name: str, p: int) -> None:
    """The skew of the start, one forward for each hop, is all that is left; the end has the same skew."""
    m = 2 * p
    timeline = simulate(get_schedule(name, p, m))
    assert pauses(timeline) == [0.0] * p
    starts = [row[0].start for row in timeline.events]
    assert starts == [float(rank) for rank in range(p)]
    assert timeline.makespan == timeline.busy[0] + p - 1


def test_h1_waits_once_for_its_first_gradient_and_holds_less() -> None:
    h1, h2 = (get_schedule(name, 4, 16) for name in ("ZBH1", "ZBH2"))
    assert pauses(simulate(h1)) == [3.0, 2.0, 1.0, 0.0]
    assert h1.peak_live() == (4,) * 4 and h2.peak_live() == (7,) * 4


def test_h2_ends_as_a_parallelogram() -> None:
    """Rank 0 is done p - 1 before the last: the next step's first forward may begin."""
    ends = [row[-1].end for row in simulate(get_schedule("ZBH2", 4, 8)).events]
    assert ends == [24.0, 25.0, 26.0, 27.0]


def test_1f1b_is_no_zero_bubble_schedule() -> None:
    """The measure can fail, and unequal times bring pauses back."""
    assert max(pauses(simulate(get_schedule("1F1B", 4, 8)))) > 0
    assert max(pauses(simulate(get_schedule("ZBV", 4, 8), Costs(F=2.0)))) > 0
