"""A piece of a worker's script that shall be over in time: if it is not, the launcher treats the worker as hung.

with expires(after_s=30, scope="read a batch"):     begins and ends without a system call, as notes are written
    batch = next(batches)                           ^ after 30 s in here: stacks of all ranks, the table, then a restart or the end
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

from jaxpar_launch.flight import recorder


def expires(after_s: float, *, scope: str | None = None) -> AbstractContextManager[None]:
    """Has the launcher end the round if the block is not left in time (`torch.distributed.elastic.timer.expires`).

    Needs no `--hang-timeout`. Blocks may stand in each other and in several threads: the one that ends first counts. Outside a
    launcher it does nothing. It also decorates a function, each call of which then has its limit.

    Args:
        after_s: how long the block may take; the launcher looks several times a second.
        scope: what the report calls it: "read a batch"; by default the line of the script.

    Raises:
        ValueError: `after_s` is no time.

    Example:
        >>> with expires(after_s=30, scope="read a batch"):
        ...     next(iter("abc"))
        'a'
    """
    if not 0 < after_s < float("inf"):
        raise ValueError(
            f"expires(after_s={after_s!r}) must be a number of seconds above 0, as in expires(after_s=30)."
        )
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
    else:
        scope = repr(scope)
    return _limited(after_s, scope)


@contextlib.contextmanager
def _limited(after_s: float, scope: str) -> Iterator[None]:
    mine = recorder()
    if mine is None:
        yield
        return
    limit = mine.begin(after_s, scope)
    try:
        yield
    finally:
        mine.end(limit)
