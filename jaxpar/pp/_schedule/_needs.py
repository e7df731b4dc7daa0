"""What an action waits for: the data flow of a pipeline, from which laws, passes and the simulator are made.

    F(s, m)  <-  F(s-1, m)                               activation
    B(s, m)  <-  F(s, m), and B or I of (s+1, m)         stash, gradient
    I(s, m)  <-  the same
    W(s, m)  <-  I(s, m)

When the grid spells out communication, what crosses ranks is waited for as a message instead:
F(s, m) <- RECV_F(s, m) <- SEND_F(s-1, m) <- F(s-1, m), and B likewise.
"""

from collections.abc import Mapping

from jaxpar.pp._schedule._action import BACKWARD, Action, Op

Where = Mapping[tuple[int, Op, int], tuple[int, int]]


def key(action: Action) -> tuple[int, Op, int]:
    """An action of a microbatch, as tables are keyed: (stage, op, microbatch)."""
    assert action.microbatch is not None
    return action.stage, action.op, action.microbatch


def handed_over_by(action: Action, *, n_stages: int) -> tuple[int, tuple[Op, ...]] | None:
    """The neighbour stage that hands `action` its input, and the ops that may do it; None at the ends."""
    if action.op == Op.F and action.stage > 0:
        return action.stage - 1, (Op.F,)
    if action.op in BACKWARD and action.stage < n_stages - 1:
        return action.stage + 1, (Op.B, Op.I)
    return None


def kept_by(action: Action) -> Op | None:
    """The earlier action on the same stage whose stash `action` uses."""
    if action.op in BACKWARD:
        return Op.F
    return Op.I if action.op == Op.W else None


def needs(action: Action, where: Where, *, n_stages: int) -> list[tuple[int, Op, int]]:
    """Keys of all computations that `action`, an F, B, I or W, waits for and that `where` holds."""
    stage, microbatch = action.stage, action.microbatch
    assert microbatch is not None
    found = []
    if (kept := kept_by(action)) is not None:
        found.append((stage, kept, microbatch))
    if (given := handed_over_by(action, n_stages=n_stages)) is not None:
        neighbour, ops = given
        found += [(neighbour, op, microbatch) for op in ops if (neighbour, op, microbatch) in where]
    return found


def message_into(action: Action, rank_of_stage: tuple[int, ...]) -> Action | None:
    """The receive that brings `action` its input from another rank; None if nothing crosses ranks."""
    given = handed_over_by(action, n_stages=len(rank_of_stage))
    if given is None or rank_of_stage[given[0]] == rank_of_stage[action.stage]:
        return None
    return Action(action.stage, Op.RECV_F if action.op == Op.F else Op.RECV_B, action.microbatch)


def sender_of(receive: Action) -> Action:
    """The send that a receive is matched with, on the neighbour stage."""
    if receive.op == Op.RECV_F:
        return Action(receive.stage - 1, Op.SEND_F, receive.microbatch)
    return Action(receive.stage + 1, Op.SEND_B, receive.microbatch)


def receiver_of(send: Action) -> Action:
    """The receive that a send is matched with, on the neighbour stage."""
    if send.op == Op.SEND_F:
        return Action(send.stage + 1, Op.RECV_F, send.microbatch)
    return Action(send.stage - 1, Op.RECV_B, send.microbatch)
