"""The steps of a job of several hosts, as data: who is in, in which order, and when it is over (rows E2 to E4)."""

import json
from dataclasses import replace

import pytest

from jaxpar_launch._members import End, Member, State


def member(name: str, **fields: object) -> Member:
    return Member(**{"id": name, "host": name, "address": "10.0.0.1", "nproc": 2} | fields)  # pyright: ignore


def end(kind: str) -> End:
    return End(kind=kind, host="a", text=kind, exit_code=3)


def running(*members: Member, most: int = 4, **fields: object) -> State:
    state = State(**fields)  # pyright: ignore
    for m in members:
        state = state.arrive(m, most=most)
    return state.seal(state.round)


LIMITS = {"max_restarts": 1, "least": 1, "most": 4}


def test_it_survives_the_wire() -> None:
    state = replace(running(member("a", node_rank=0), member("b")), over=end("failure"))
    assert State.from_wire(json.loads(json.dumps(state.to_wire()))) == state
    assert State.from_wire(None) == State()


def test_ranks_run_through_the_hosts_in_the_order_given_by_hand_then_before_then_of_arrival() -> None:
    state = running(
        member("late", last_rank=1),
        member("new"),
        member("early", last_rank=0, nproc=3),
        member("first", node_rank=0),
    )
    assert [m.id for m in state.members] == ["first", "early", "late", "new"]
    assert [state.first_rank(i) for i in range(4)] == [0, 2, 5, 7]
    assert state.world_size == 9 and state.rank_of("new") == 3 and state.rank_of("other") is None


def test_who_arrives_twice_is_there_once_and_who_finds_no_room_waits() -> None:
    state = State()
    for name in ("a", "a", "b", "c"):
        state = state.arrive(member(name), most=2)
    assert [m.id for m in state.members] == ["a", "b"] and [m.id for m in state.newcomers] == ["c"]
    assert state.drop(["a"]).members == (member("b"),)


def test_while_it_runs_nobody_is_let_in_or_dropped() -> None:
    state = running(member("a")).arrive(member("b"), most=4).drop(["a"])
    assert [m.id for m in state.members] == ["a"] and [m.id for m in state.newcomers] == ["b"]


@pytest.mark.parametrize(("kind", "cost"), [("failure", 1), ("lost", 1), ("joined", 0), ("left", 0)])
def test_what_ends_a_round_costs_a_restart_or_not(kind: str, cost: int) -> None:
    state = running(member("a"), member("b")).arrive(member("c"), most=4)
    after = state.end(0, end(kind), **LIMITS)
    assert (after.round, after.restarts, after.is_running, after.over) == (1, cost, False, None)
    assert [m.id for m in after.members] == ["c"]  # the others arrive again when their workers have ended


def test_without_a_restart_left_a_failure_is_the_end() -> None:
    state = running(member("a"), restarts=1)
    assert state.end(0, end("failure"), **LIMITS).over == end("failure")
    assert state.end(0, end("joined"), **LIMITS).over is None


def test_who_leaves_too_few_behind_ends_the_job() -> None:
    state = running(member("a"), member("b"))
    assert state.end(0, end("left"), **LIMITS | {"least": 2}).over == end("left")
    third = state.arrive(member("c"), most=2)
    assert third.end(0, end("left"), **LIMITS | {"least": 2}).over is None  # who waits takes the place


def test_a_step_that_comes_late_changes_nothing() -> None:
    state = running(member("a"))
    next_round = state.end(0, end("failure"), **LIMITS)
    assert next_round.end(0, end("failure"), **LIMITS) == next_round
    assert next_round.seal(0) == next_round
    over = state.finish(end("done"))
    assert over.finish(end("failure")) == over == over.arrive(member("z"), most=4)
