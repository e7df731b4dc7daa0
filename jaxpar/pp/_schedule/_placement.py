"""Which rank holds which stage: round and round, or there and back, or any table.

4 ranks, 2 stages each    loop  0 1 2 3 | 0 1 2 3      stages 0 and 4 on rank 0
                          v     0 1 2 3 | 3 2 1 0      stages 0 and 7 on rank 0: no message at the turn
"""


def loop(n_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """`rank_of_stage` when stages go round the ranks: stage s is on rank s mod p.

    >>> loop(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(stage % n_ranks for stage in range(n_ranks * stages_per_rank))


def v_shape(n_ranks: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """`rank_of_stage` when every other pass over the ranks runs backwards.

    >>> v_shape(2)
    (0, 1, 1, 0)
    """
    there = tuple(range(n_ranks))
    return tuple(rank for turn in range(stages_per_rank) for rank in (there[::-1] if turn % 2 else there))
