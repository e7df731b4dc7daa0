"""The simulator: golden values, closed forms, links by hand, and what holds for every timeline."""

import dataclasses
import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar._errors import ScheduleError
from jaxpar.pp import (
    Action,
    Costs,
    Event,
    Message,
    Schedule,
    Timeline,
    add_communication,
    get_schedule,
    simulate,
    without_bubbles,
)

SHAPES = ((2, 4), (4, 8), (4, 16))

# Measured on the orders that PyTorch 2.13 emits, at F = I = W = 1: makespan, idle, peak until I, peak until W.
GOLDEN = {
    "GPipe": [(15, 3, (4, 4), (4, 4)), (33, 9, (8,) * 4, (8,) * 4), (57, 9, (16,) * 4, (16,) * 4)],
    "1F1B": [
        (15, 3, (2, 1), (2, 1)),
        (33, 9, (4, 3, 2, 1), (4, 3, 2, 1)),
        (57, 9, (4, 3, 2, 1), (4, 3, 2, 1)),
    ],
    "LoopedBFS": [(27, 3, (8, 8), (8, 8)), (57, 9, (16,) * 4, (16,) * 4), (105, 9, (32,) * 4, (32,) * 4)],
    "Interleaved1F1B": [
        (27, 3, (5, 3), (5, 3)),
        (57, 9, (11, 9, 7, 5), (11, 9, 7, 5)),
        (105, 9, (11, 9, 7, 5), (11, 9, 7, 5)),
    ],
    "InterleavedZeroBubble": [
        (25, 1, (4, 3), (4, 4)),
        (51, 3, (8, 7, 6, 5), (8,) * 4),
        (99, 3, (8, 7, 6, 5), (8,) * 4),
    ],
    "ZBVZeroBubble": [(25, 1, (4, 4), (4, 4)), (51, 3, (8,) * 4, (8,) * 4), (99, 3, (8,) * 4, (8,) * 4)],
    "DualPipeV": [(26, 2, (5, 5), (5, 5)), (54, 6, (9,) * 4, (9,) * 4), (102, 6, (9,) * 4, (9,) * 4)],
}
GOLDEN_CASES = [
    (name, shape, row) for name, rows in GOLDEN.items() for shape, row in zip(SHAPES, rows, strict=True)
]

ONE_F_ONE_B = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])


@pytest.mark.parametrize(("name", "shape", "expected"), GOLDEN_CASES)
def test_golden_makespan_bubble_and_peak(name: str, shape: tuple[int, int], expected: tuple) -> None:
    makespan, idle, until_input, until_weight = expected
    schedule = get_schedule(name, *shape)
    timeline = simulate(schedule)
    assert timeline.makespan == makespan
    assert timeline.idle == (idle,) * shape[0]
    assert timeline.peak == until_weight
    assert simulate(schedule, Costs(kept_for_W=0)).peak == until_input


# Idle time of every rank at F = I = W = 1, from the schedules' papers; what m < p adds, from the shape of the order.
CLOSED_FORMS = {
    "GPipe": lambda p, m, v: 3 * (p - 1),
    "1F1B": lambda p, m, v: 3 * (p - 1),
    "LoopedBFS": lambda p, m, v: 3 * ((p - 1) + (v - 1) * max(0, p - m)),
    "Interleaved1F1B": lambda p, m, v: 3 * ((p - 1) + (v - 1) * max(0, p - m)),
    "InterleavedZeroBubble": lambda p, m, v: p - 1 if m >= p else None,
    "ZBVZeroBubble": lambda p, m, v: max(p - 1, 2 * (2 * p - 1 - m)),
    "DualPipeV": lambda p, m, v: 2 * (p - 1),
}
STAGES = {"GPipe": (1,), "1F1B": (1,), "ZBVZeroBubble": (2,), "DualPipeV": (2,)}


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("p", range(2, 17))
def test_idle_time_is_the_closed_form(name: str, p: int) -> None:
    tried = 0
    for v, m in itertools.product(STAGES.get(name, (1, 2, 3, 4)), sorted({p // 2, p, 4 * p})):
        try:
            schedule = get_schedule(name, p, m, stages_per_rank=v)
        except ScheduleError as error:
            assert error.law == "definition"
            continue
        if (idle := CLOSED_FORMS[name](p, m, v)) is not None:
            assert simulate(schedule).idle == (idle,) * p, (p, m, v)
            tried += 1
    assert tried


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "LoopedBFS"])
def test_closed_form_with_unequal_times(name: str) -> None:
    timeline = simulate(get_schedule(name, 4, 8), Costs(F=2, I=3, W=0.5))
    assert timeline.idle == (3 * 5.5,) * 4


def test_latency_by_hand() -> None:
    """0F0 ends at 1, arrives at 1.5; 1F0 ends at 2.5, 1B0 at 4.5, arrives at 5; 0B0 ends at 7, 1B1 at 7.5."""
    timeline = simulate(ONE_F_ONE_B, Costs(latency=0.5))
    assert [event.end for event in timeline.events[1]] == [2.5, 4.5, 5.5, 7.5]
    assert [event.end for event in timeline.events[0]] == [1, 2, 7, 10]


def test_messages_on_one_link_follow_each_other() -> None:
    """A message occupies its link for 3: the second activation is made at 2 but leaves at 4, after the first."""
    schedule = Schedule([["0F0", "0F1"], ["1F0", "1F1"]])
    timeline = simulate(schedule, Costs(message_bytes=6, bandwidth=2, latency=0.5))
    assert timeline.messages == (
        Message(0, 1, Action.parse("0F0"), 1.0, 4.0, 4.5),
        Message(0, 1, Action.parse("0F1"), 4.0, 7.0, 7.5),
    )
    assert [event.start for event in timeline.events[1]] == [4.5, 7.5]
    assert [type(step) for step in timeline.critical_path] == [Event, Message, Message, Event]


def test_both_directions_of_a_link_are_independent() -> None:
    """0F1 travels forward from 4 to 7, 1B0 backward from 5.5 to 8.5."""
    timeline = simulate(
        Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]),
        Costs(F=1, I=0.25, W=0.25, message_bytes=3, bandwidth=1),
    )
    starts = {str(message.action): message.start for message in timeline.messages}
    assert starts == {"0F0": 1, "0F1": 4, "1B0": 5.5, "1B1": 8.5}


def test_a_spelled_out_message_is_posted_when_its_send_is_reached() -> None:
    early = Schedule([["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]])
    late = Schedule([["0F0", "0F1", "0SEND_F0", "0SEND_F1"], ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]])
    assert [event.start for event in simulate(early).events[1]] == [1, 2]
    assert [event.start for event in simulate(late).events[1]] == [2, 3]
    assert {event.action.op for row in simulate(late).events for event in row} == {"F"}


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipeV", "Interleaved1F1B"])
@pytest.mark.parametrize("lockstep", [False, True])
def test_sends_written_by_the_pass_change_no_time(name: str, lockstep: bool) -> None:
    schedule = without_bubbles(get_schedule(name, 4, 8))
    costs = Costs(I=1.5, latency=0.25, message_bytes=1, bandwidth=2)
    plain = simulate(schedule, costs, lockstep=lockstep)
    lowered = simulate(add_communication(schedule), costs, lockstep=lockstep)
    assert lowered.events == plain.events


def test_stage_actions_take_their_time_on_the_rank() -> None:
    row = ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD", "0RESHARD"]
    timeline = simulate(Schedule([row]), Costs(UNSHARD=5, REDUCE_GRAD=7, RESHARD=0.5))
    assert [event.end for event in timeline.events[0]] == [5, 6, 8, 15, 15.5]


def test_an_overlapped_pair_is_one_event_with_one_end() -> None:
    schedule = get_schedule("DualPipeV", 2, 4)
    timeline = simulate(schedule, Costs(OVERLAP_F_B=2.5))
    pairs = [event for row in timeline.events for event in row if event.action.sub_actions]
    assert len(pairs) > 2
    assert {event.duration for event in pairs} == {2.5}


def test_each_stage_has_its_own_duration() -> None:
    timeline = simulate(Schedule([["0F0"], ["1F0"]]), Costs(F=(1.0, 4.0)))
    assert timeline.makespan == 5
    assert timeline.bubble_fraction == (0.8, 0.2)


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="F has 3 numbers, but the schedule has 2 stages"):
        simulate(ONE_F_ONE_B, Costs(F=(1.0, 1.0, 1.0)))


def test_bubbles_of_the_grid_change_no_time() -> None:
    schedule = get_schedule("ZBH1", 4, 6)
    costs = Costs(F=1, I=1.3, W=0.6)
    assert simulate(without_bubbles(schedule), costs).events == simulate(schedule, costs).events


def test_a_tick_lasts_as_long_as_its_slowest_rank() -> None:
    """Ticks 0F0 | 0F1 1F0 | 1B0 | 0B0 1F1 | 1B1 | 0B1 take 1, 1, 2, 2, 2, 2."""
    timeline = simulate(ONE_F_ONE_B, lockstep=True)
    assert [event.start for event in timeline.events[0]] == [0, 1, 4, 8]
    assert timeline.makespan == 10


def test_a_tick_ends_with_its_messages() -> None:
    """Four of the six ticks end with a message, which takes 1 on its link and 0.5 more to arrive."""
    costs = Costs(latency=0.5, message_bytes=1, bandwidth=1)
    assert simulate(ONE_F_ONE_B, costs, lockstep=True).makespan == 10 + 4 * 1.5


def test_two_messages_of_a_tick_on_one_link_follow_each_other() -> None:
    """In a V an activation of stage 0 and a gradient of stage 3 go the same way."""
    costs = Costs(message_bytes=3, bandwidth=1)
    schedule = get_schedule("DualPipeV", 2, 4)
    timeline = simulate(schedule, costs, lockstep=True)
    pairs = [
        (one, other)
        for one, other in itertools.combinations(timeline.messages, 2)
        if one.source == other.source == 0 and one.end == other.start
    ]
    assert pairs
    tick_starts = {event.start for row in timeline.events for event in row}
    assert all(min(t for t in tick_starts if t > one.start) == other.arrival for one, other in pairs)


def test_lockstep_keeps_columns_that_are_ticks_already() -> None:
    schedule = Schedule([["0F0", "", "", "0F1"], ["", "", "1F0", "", "1F1"]])
    timeline = simulate(schedule, Costs(F=(1.0, 2.0)), lockstep=True)
    assert [event.start for event in timeline.events[1]] == [1, 4]
    beside = simulate(Schedule([["0F0", "0F1"], ["1F0", "1F1"]]), lockstep=True)
    assert [event.start for event in beside.events[1]] == [1, 2]


def test_memory_over_time_by_hand() -> None:
    """Held whole from F to the end of I, a quarter of it until the end of W."""
    schedule = Schedule([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    timeline = simulate(schedule, Costs(activation=4, kept_for_W=1))
    assert timeline.live(0) == ((0, 4), (1, 8), (3, 5), (4, 2), (5, 1), (6, 0))
    assert timeline.peak == (8,)


def test_memory_of_an_evaluation_is_freed_at_once() -> None:
    assert simulate(get_schedule("ForwardOnly", 2, 3)).live(1) == ((1, 1), (2, 1), (3, 1), (4, 0))


def test_nothing_takes_any_time() -> None:
    timeline = simulate(ONE_F_ONE_B, Costs(F=0, I=0, W=0))
    assert timeline.makespan == 0
    assert timeline.bubble_fraction == (0, 0)
    assert timeline.peak == (2, 1)


def test_a_timeline_prints_one_line_for_each_rank() -> None:
    assert str(simulate(get_schedule("1F1B", 2, 4))).splitlines() == [
        "makespan 15, 20.0 % idle",
        "rank  busy  idle  bubble  peak memory",
        "   0    12     3   20.0%            2",
        "   1    12     3   20.0%            1",
    ]


NAMES = (
    "GPipe",
    "1F1B",
    "Eager1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBH1",
    "ZBH2",
    "ZBV",
)
durations = st.floats(0.1, 4.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    p = draw(st.integers(1, 4))
    schedule = get_schedule(draw(st.sampled_from(NAMES)), p, p * draw(st.integers(1, 3)))
    per_stage = st.tuples(*[durations] * schedule.n_stages)
    costs = Costs(
        F=draw(per_stage), I=draw(per_stage), W=draw(durations), latency=draw(st.floats(0, 2)),
        message_bytes=draw(st.floats(0, 3)), bandwidth=draw(durations),
    )  # fmt: skip
    return schedule, costs


@settings(max_examples=60, deadline=None)
@given(cases())
def test_laws_of_every_timeline(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    timeline, ticked = simulate(schedule, costs), simulate(schedule, costs, lockstep=True)
    for one in (timeline, ticked):
        check_inputs_have_come(one)
        check_critical_path(one)
        for rank, row in enumerate(one.events):
            assert [event.action for event in row] == [a for a in schedule.rows[rank] if a is not None]
            assert all(a.end <= b.start for a, b in itertools.pairwise(row))
            assert one.busy[rank] == pytest.approx(sum(costs.of(event.action) for event in row), rel=1e-12)
            assert 0 <= one.idle[rank] + 1e-9
            assert one.live(rank)[-1][1] == 0
        assert one.peak == schedule.peak_live()
    assert timeline.makespan <= ticked.makespan * (1 + 1e-12)


def check_inputs_have_come(timeline: Timeline) -> None:
    """Every event starts after the message it uses, and after what its own rank hands over."""
    schedule, links = timeline.schedule, {}
    end_of = {part: event.end for row in timeline.events for event in row for part in event.action.parts}
    for message in timeline.messages:
        assert message.start >= end_of[message.action]
        assert message.end == message.start + timeline.costs.on_link(message.action.stage)
        assert message.arrival == message.end + timeline.costs.latency
        links.setdefault((message.source, message.target), []).append(message)
        stage = message.action.stage + (1 if message.action.op == "F" else -1)
        users = [k for k in ("F", "B", "I") if (k == "F") == (message.action.op == "F")]
        cells = [
            schedule.cells[c] for k in users if (c := (stage, k, message.action.microbatch)) in schedule.cells
        ]
        assert len(cells) == 1 and cells[0][0] == message.target
        user = schedule.rows[cells[0][0]][cells[0][1]]
        start = next(e.start for e in timeline.events[message.target] if e.action == user)
        assert start >= message.arrival
    for messages in links.values():
        assert all(a.end <= b.start for a, b in itertools.pairwise(messages))


def check_critical_path(timeline: Timeline) -> None:
    """From 0 to the makespan without a gap, and no event or message is longer than its cost."""
    path = timeline.critical_path
    assert path[0].start == 0
    for one, following in itertools.pairwise(path):
        handed_over = {one.end} if isinstance(one, Event) else {one.end, one.arrival}
        assert following.start in handed_over
    assert timeline.makespan == (path[-1].end if isinstance(path[-1], Event) else path[-1].arrival)
    assert timeline.makespan >= max(event.end for row in timeline.events for event in row)
    assert timeline.makespan >= max(timeline.busy) * (1 - 1e-12)


@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from([0.25, 2.0, 8.0]), st.booleans())
def test_times_scale_with_costs(case: tuple[Schedule, Costs], factor: float, lockstep: bool) -> None:
    """Powers of two scale floats exactly, so the whole timeline is exactly scaled."""
    schedule, costs = case
    scaled = dataclasses.replace(
        costs,
        F=tuple(x * factor for x in costs.F), I=tuple(x * factor for x in costs.I), W=costs.W * factor,
        latency=costs.latency * factor, bandwidth=costs.bandwidth / factor,
    )  # fmt: skip
    one, other = simulate(schedule, costs, lockstep=lockstep), simulate(schedule, scaled, lockstep=lockstep)
    assert other.makespan == one.makespan * factor
    assert other.busy == tuple(x * factor for x in one.busy)
    assert [m.arrival for m in other.messages] == [m.arrival * factor for m in one.messages]
    assert other.bubble_fraction == one.bubble_fraction


def num_calls(n_microbatches: int) -> int:
    """Python calls of one simulation: a measure of its time that a busy machine does not disturb."""
    schedule, calls = get_schedule("1F1B", 4, n_microbatches), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        simulate(schedule)
    finally:
        sys.setprofile(None)
    return calls


def test_time_is_linear_in_the_number_of_actions() -> None:
    assert num_calls(128) < 4.2 * num_calls(32)
