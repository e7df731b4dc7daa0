"""Cutting the connections to the other workers of this host, so that no collective waits for a lost one.

    0 -- 1 -- 2 -- 3     rank 2 dies: Gloo tells its neighbours 1 and 3, who leave; 0 waits for 1 without end
    x -- x       x -- x  every survivor shuts its own sockets down: the collective of each fails at once

JAX hands out no way to abort a collective, but the kernel knows whose sockets these are: one's own TCP connections whose
other end belongs to another worker. Linux only; elsewhere nothing is cut, and who then hangs makes all start again.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LINK = "socket:["


def cut(pids: Sequence[int]) -> int:
    """Shuts down this process's TCP connections to those processes; returns how many."""
    ends = dict(_connections())
    theirs = {
        ends[inode][0] for pid in pids if pid != os.getpid() for inode, _ in _sockets(pid) if inode in ends
    }
    number = 0
    for inode, descriptor in _sockets(os.getpid()):
        if inode in ends and ends[inode][1] in theirs:
            # A copy of the descriptor, for the connection's owner may close it meanwhile.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                number += 1
    return number


def _connections() -> Iterator[tuple[str, tuple[str, str]]]:
    """The inode of each TCP socket of this host, its own address and the other end's."""
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table) as file:
            next(file)
            for line in file:
                fields = line.split()
                yield fields[9], (fields[1], fields[2])


def _sockets(pid: int) -> Iterator[tuple[str, int]]:
    """Inode and descriptor of each socket of a process; none if it is gone, or another user's."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith(_LINK):
                    yield target[len(_LINK) : -1], int(name)
