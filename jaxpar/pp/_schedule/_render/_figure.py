"""A timeline as the papers draw it: a lane for each rank, rectangles to scale, memory below.

    rank 0  [0][1][2]//////[ 0  ][3][ 1  ]      colour: the op; lighter: the later stages of a rank
    rank 1  ///[0][ 0  ][1][ 1  ]               number: the microbatch; hatched: idle
    memory  _/~~~~~~~~~~~~~~~~~~~~~~~~~~~~      one curve for each rank

matplotlib is imported when something is drawn, and its `pyplot`, which keeps state, never.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._timeline import Event, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Color = tuple[float, float, float]

_STYLE: dict[Op, tuple[str, Color]] = {
    Op.F: ("forward", (0.22, 0.42, 0.69)),
    Op.B: ("backward", (0.20, 0.55, 0.31)),
    Op.I: ("input gradient", (0.16, 0.60, 0.62)),
    Op.W: ("weight gradient", (0.80, 0.56, 0.16)),
    Op.UNSHARD: ("unshard", (0.45, 0.33, 0.60)),
    Op.RESHARD: ("reshard", (0.65, 0.58, 0.74)),
    Op.REDUCE_GRAD: ("reduce gradients", (0.72, 0.25, 0.27)),
}
_LANE = 0.84  # of the distance between two lanes
_LIGHTEST = 0.5  # how much white the last stage of a rank gets
_FONT_POINTS = 7.0
_DIGIT = 0.64  # width of a digit over its height
_MAX_NAMED = 8  # memory curves with a name in the legend
_MAX_WIDTH_IN, _MIN_WIDTH_IN, _COLUMN_IN = 24.0, 6.0, 0.17


def draw(timeline: Timeline, ax: "Axes | None" = None, *, memory_ax: "Axes | None" = None) -> "Figure":
    """Draw the timeline: into a new figure with the memory below, or into axes of yours.

    Numbers stand in the rectangles that are wide enough for them. Of an overlapped pair the forward is the upper
    half, the backward the lower. Needs matplotlib (`pip install 'jaxpar[examples]'`). Source: the figures of the
    schedules' papers, PyTorch's `visualize_schedule` (row 9.6).

    Args:
        timeline: What `simulate` returned.
        ax: Where to draw the lanes; by default a new figure is made.
        memory_ax: Where to draw the memory if `ax` is given; by default nowhere.

    Returns:
        The figure; `render` writes one to a file.

    Raises:
        ScheduleError: matplotlib is not installed.

    Example:
        >>> from jaxpar.pp import Schedule, simulate
        >>> figure = draw(simulate(Schedule([["0F0", "0B0"]])))
        >>> [ax.get_ylabel() for ax in figure.axes]
        ['', 'memory']
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ScheduleError(
            "drawing a timeline needs matplotlib, which is not installed. Run: pip install 'jaxpar[examples]'"
        ) from None
    if ax is None:
        figure = Figure(figsize=_size_in(timeline), layout="constrained")
        heights = (0.32 * len(timeline.events) + 0.5, 1.2)
        axes: list[Axes] = list(figure.subplots(2, 1, sharex=True, height_ratios=heights))
        ax, memory_ax = axes
    _draw_lanes(timeline, ax)
    if memory_ax is not None:
        _draw_memory(timeline, memory_ax)
    (memory_ax or ax).set_xlabel("time")
    found = ax.figure
    return found if isinstance(found, Figure) else found.figure  # of a subfigure


def _size_in(timeline: Timeline) -> tuple[float, float]:
    numbered = (e for row in timeline.events for e in row if e.action.microbatch is not None)
    shortest = min((event.duration for event in numbered if event.duration), default=1.0)
    width = _COLUMN_IN * timeline.makespan / shortest
    return min(max(width, _MIN_WIDTH_IN), _MAX_WIDTH_IN), 0.32 * len(timeline.events) + 2.6


def _draw_lanes(timeline: Timeline, ax: "Axes") -> None:
    ranks = len(timeline.events)
    points_per_unit = ax.get_window_extent().width * 72 / ax.figure.dpi / (timeline.makespan or 1.0)
    for rank, row in enumerate(timeline.events):
        ax.broken_barh(
            [(0, timeline.makespan)], (rank - _LANE / 2, _LANE), facecolor="0.97", edgecolor="0.8", hatch="////",
            linewidth=0,
        )  # fmt: skip
        boxes: dict[tuple[Color, float, float], list[tuple[float, float]]] = defaultdict(list)
        for event in row:
            for part, bottom, height in _boxes(event):
                color = _color(timeline, rank, part)
                boxes[color, bottom, height].append((event.start, event.duration))
                _write_number(ax, event, part, color, bottom + height / 2, points_per_unit)
        for (color, bottom, height), spans in boxes.items():
            line = 0.5 if points_per_unit * spans[0][1] > 4 else 0.0
            ax.broken_barh(spans, (bottom, height), facecolor=color, edgecolor="white", linewidth=line)
    ax.set(xlim=(0, timeline.makespan or 1.0), ylim=(ranks - 0.5, -0.5))
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    _add_legend(timeline, ax)


def _boxes(event: Event) -> list[tuple[Action, float, float]]:
    """The parts of an event, each with the bottom and the height of its box; the y axis points down."""
    height = _LANE / len(event.action.parts)
    top = event.rank - _LANE / 2
    return [(part, top + height * number, height) for number, part in enumerate(event.action.parts)]


def _color(timeline: Timeline, rank: int, part: Action) -> Color:
    stages = timeline.schedule.stages_of_rank(rank)
    white = _LIGHTEST * stages.index(part.stage) / max(1, len(stages) - 1)
    red, green, blue = (channel + (1 - channel) * white for channel in _STYLE[part.op][1])
    return red, green, blue


def _write_number(
    ax: "Axes", event: Event, part: Action, color: Color, middle: float, points_per_unit: float
) -> None:
    if part.microbatch is None:
        return
    text = str(part.microbatch)
    size = _FONT_POINTS * (0.8 if event.action.sub_actions else 1.0)
    if event.duration * points_per_unit < _DIGIT * size * len(text) + 1:
        return
    ink = "black" if sum(color) > 1.75 else "white"
    number = ax.text(
        (event.start + event.end) / 2, middle, text, color=ink, fontsize=size, ha="center", va="center_baseline",
        clip_on=True,
    )  # fmt: skip
    number.set_in_layout(False)  # it lies in its box, and asking thousands is slow


def _add_legend(timeline: Timeline, ax: "Axes") -> None:
    from matplotlib.patches import Patch

    ops = timeline.schedule.ops
    handles = [Patch(facecolor=color, label=name) for op, (name, color) in _STYLE.items() if op in ops]
    handles.append(Patch(facecolor="0.97", edgecolor="0.7", hatch="////", linewidth=0, label="idle"))
    if timeline.schedule.n_stages > timeline.schedule.n_ranks:
        handles.append(Patch(facecolor="none", label="lighter: later stages of the rank"))
    ax.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False, fontsize=8,
        handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip


def _draw_memory(timeline: Timeline, ax: "Axes") -> None:
    ranks = len(timeline.events)
    for rank in range(ranks):
        times, held = zip(*timeline.live(rank), strict=True)
        shade = 0.75 * rank / max(1, ranks - 1)
        ax.step(
            [*times, timeline.makespan], [*held, held[-1]], where="post", color=(shade, shade, shade), linewidth=1.0,
            label=f"rank {rank}",
        )  # fmt: skip
    ax.set(ylabel="memory", xlim=(0, timeline.makespan or 1.0), ylim=(0, 1.1 * max(timeline.peak) or 1.0))
    ax.locator_params(axis="y", nbins=4, steps=[1, 2, 5, 10])
    ax.tick_params(length=3)
    ax.spines[["top", "right"]].set_visible(False)
    if ranks <= _MAX_NAMED:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7)
