"""Pictures and traces of timelines: what is drawn is what was simulated."""

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from jaxpar._errors import ScheduleError
from jaxpar.pp import (
    Costs,
    Timeline,
    add_communication,
    add_reduce_grad,
    add_unshard,
    chrome_trace,
    draw,
    get_schedule,
    render,
    simulate,
    without_bubbles,
)


def timeline_of(name: str, p: int, m: int, costs: Costs | None = None) -> Timeline:
    return simulate(get_schedule(name, p, m), costs or Costs(I=1.25, W=0.5, latency=0.25))


def boxes(figure: Figure) -> list[tuple[float, float, float, float]]:
    """Every rectangle of the lanes that is no bubble, as (left, right, top, bottom)."""
    collections = [
        c for c in figure.axes[0].collections if isinstance(c, PolyCollection) and not c.get_hatch()
    ]
    extents = [path.get_extents() for collection in collections for path in collection.get_paths()]
    return sorted((e.x0, e.x1, e.y0, e.y1) for e in extents)


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "Interleaved1F1B"])
def test_every_event_is_a_rectangle_to_scale_in_the_lane_of_its_rank(name: str) -> None:
    timeline = timeline_of(name, 3, 6)
    expected = sorted((e.start, e.end, e.rank - 0.42, e.rank + 0.42) for row in timeline.events for e in row)
    drawn = boxes(draw(timeline))
    assert len(drawn) == len(expected)
    for box, wanted in zip(drawn, expected, strict=True):
        assert box == pytest.approx(wanted)


def test_an_overlapped_pair_shares_its_lane() -> None:
    timeline = timeline_of("DualPipeV", 2, 4)
    pairs = [event for row in timeline.events for event in row if event.action.sub_actions]
    drawn = boxes(draw(timeline))
    for event in pairs:
        halves = [box for box in drawn if box[:2] == pytest.approx((event.start, event.end))]
        in_lane = [box for box in halves if abs((box[2] + box[3]) / 2 - event.rank) < 0.5]
        assert [round(box[3] - box[2], 6) for box in in_lane] == [0.42, 0.42]


def test_microbatch_numbers_stand_where_they_fit() -> None:
    few = draw(timeline_of("1F1B", 2, 4))
    assert sorted(int(text.get_text()) for text in few.axes[0].texts) == sorted([0, 1, 2, 3] * 4)
    assert not draw(timeline_of("ZBV", 4, 64)).axes[0].texts


def test_legend_names_the_ops_that_occur() -> None:
    figure = draw(timeline_of("ZBV", 2, 4))
    legend = figure.axes[0].get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [
        "forward",
        "input gradient",
        "weight gradient",
        "idle",
        "lighter: later stages of the rank",
    ]


def test_the_memory_curve_is_the_timelines() -> None:
    timeline = timeline_of("1F1B", 2, 4)
    line = draw(timeline).axes[1].lines[1]
    points = [*timeline.live(1), (timeline.makespan, 0.0)]
    assert [tuple(point) for point in line.get_xydata().tolist()] == [
        tuple(map(float, point)) for point in points
    ]


def test_draws_into_given_axes() -> None:
    ax, memory_ax = (figure := Figure()).subplots(2, 1)
    assert draw(timeline_of("GPipe", 2, 2), ax, memory_ax=memory_ax) is figure
    assert memory_ax.lines and len(figure.axes) == 2
    alone = Figure().subplots()
    assert draw(timeline_of("GPipe", 2, 2), alone).axes == [alone]
    part = (whole := Figure()).subfigures(1, 2)[0].subplots()
    assert draw(timeline_of("GPipe", 2, 2), part) is whole


def test_a_lowered_schedule_is_drawn_with_its_stage_actions() -> None:
    schedule = add_reduce_grad(add_unshard(without_bubbles(get_schedule("Interleaved1F1B", 2, 4))))
    timeline = simulate(add_communication(schedule), Costs(UNSHARD=0.5, RESHARD=0.25, REDUCE_GRAD=0.5))
    assert len(boxes(draw(timeline))) == sum(map(len, timeline.events))


def test_the_same_timeline_gives_the_same_svg(tmp_path: Path) -> None:
    timeline = timeline_of("ZBH1", 2, 4)
    render(timeline, tmp_path / "one.svg")
    render(timeline, tmp_path / "other.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "other.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "dc:date" not in text


def test_png_and_pdf_are_written_by_their_ending(tmp_path: Path) -> None:
    timeline = timeline_of("1F1B", 2, 2)
    render(timeline, tmp_path / "a.PNG")
    render(timeline, tmp_path / "a.pdf")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ScheduleError, match=r"ends in '.gif'. Pictures end in .svg, .png, .pdf, a trace in .json"
    ):
        render(timeline_of("1F1B", 2, 2), tmp_path / "a.gif")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ScheduleError, match=r"pip install 'jaxpar\[examples\]'"):
        draw(timeline_of("1F1B", 2, 2))


def test_drawing_touches_no_pyplot_and_importing_no_matplotlib() -> None:
    code = """
import sys
from jaxpar.pp import draw, get_schedule, simulate
assert "matplotlib" not in sys.modules
draw(simulate(get_schedule("1F1B", 2, 2)))
assert "matplotlib.figure" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def by_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_the_trace_has_a_slice_for_each_event() -> None:
    timeline = timeline_of("ZBV", 2, 4)
    slices = by_phase(chrome_trace(timeline), "X")
    assert [(s["tid"], s["name"], s["ts"], s["dur"]) for s in slices] == [
        (e.rank, str(e.action), e.start * 1e6, e.duration * 1e6) for row in timeline.events for e in row
    ]


def test_the_trace_names_its_threads_and_counts_memory() -> None:
    timeline = timeline_of("1F1B", 3, 3)
    trace = chrome_trace(timeline)
    names = [e["args"]["name"] for e in by_phase(trace, "M") if e["name"] == "thread_name"]
    assert names == ["rank 0", "rank 1", "rank 2"]
    held = [(e["ts"], e["args"]["held"]) for e in by_phase(trace, "C") if e["name"] == "memory of rank 2"]
    assert held == [(time * 1e6, amount) for time, amount in timeline.live(2)]


@pytest.mark.parametrize("spelled_out", [False, True])
def test_an_arrow_leaves_the_slice_that_made_a_message_and_enters_the_one_that_uses_it(
    spelled_out: bool,
) -> None:
    schedule = without_bubbles(get_schedule("ZBV", 2, 4))
    timeline = simulate(add_communication(schedule) if spelled_out else schedule, Costs(latency=0.5))
    trace = chrome_trace(timeline)
    slices = {(s["tid"], s["name"]): s for s in by_phase(trace, "X")}
    starts, ends = by_phase(trace, "s"), by_phase(trace, "f")
    assert [s["id"] for s in starts] == [e["id"] for e in ends] == list(range(len(timeline.messages)))
    for message, start, end in zip(timeline.messages, starts, ends, strict=True):
        stage, microbatch = message.action.stage, message.action.microbatch
        is_forward = start["name"] == "activation"
        letter = "F" if is_forward else "I"
        maker = slices[message.source, f"{stage}{letter}{microbatch}"]
        user = slices[message.target, f"{stage + (1 if is_forward else -1)}{letter}{microbatch}"]
        assert maker["ts"] < start["ts"] < maker["ts"] + maker["dur"]
        assert end["ts"] == user["ts"]


def test_the_trace_is_written_as_json(tmp_path: Path) -> None:
    timeline = timeline_of("DualPipeV", 2, 4)
    render(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(timeline)
