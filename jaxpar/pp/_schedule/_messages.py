"""Which messages a pipeline needs: an activation to the stage after, a gradient to the stage before.

F of stage s on another rank than s+1      (s)SEND_F -> (s+1)RECV_F
B or I of stage s on another rank than s-1 (s)SEND_B -> (s-1)RECV_B
"""

from jaxpar.pp._schedule._action import BACKWARD, Action, Op


def message_out_of(part: Action, rank_of_stage: tuple[int, ...]) -> tuple[Action, Action] | None:
    """The send and the receive that carry what `part` computed to another rank; None if it stays on its rank."""
    stage, microbatch = part.stage, part.microbatch
    if part.op == Op.F and stage + 1 < len(rank_of_stage):
        if rank_of_stage[stage + 1] != rank_of_stage[stage]:
            return Action(stage, Op.SEND_F, microbatch), Action(stage + 1, Op.RECV_F, microbatch)
    elif part.op in BACKWARD and stage > 0 and rank_of_stage[stage - 1] != rank_of_stage[stage]:
        return Action(stage, Op.SEND_B, microbatch), Action(stage - 1, Op.RECV_B, microbatch)
    return None


def other_end(message: Action) -> Action:
    """The receive of a send, or the send of a receive."""
    step = 1 if message.op in (Op.SEND_F, Op.RECV_B) else -1
    other = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}[
        message.op
    ]
    stage = message.stage + step
    assert stage >= 0
    return Action(stage, other, message.microbatch)
