"""What happens in a job as one launcher sees it: a line of JSON for each event, in the log folder; the last one says how things stand.

    {"time": "2026-01-31T09:30:00.125Z", "host": "node0", "round": 1, "restarts": 1, "event": "worker_ended", "rank": 3, ...}

| event                                  | beside it                                                             |
|----------------------------------------|-----------------------------------------------------------------------|
| launched                               | pid of the launcher, number of workers                                |
| gathering                              | the launcher waits for others                                         |
| rendezvous                             | ranks of this host, world_size, group_rank, hosts, coordinator        |
| worker_started, worker_ended           | rank, local_rank, pid; exit_code or signal                            |
| failure, hang                          | text: what happened, here or on another host                          |
| joined, left, lost                     | text: which hosts came or went                                        |
| signal, signal_passed_on               | name: of a signal to the launcher                                     |
| killed                                 | ranks that did not end in time                                        |
| replaced, restart                      | text: why                                                             |
| out_of_time                            | `launch(timeout_s=)` is over                                          |
| ended                                  | exit_code of the launcher, text                                       |

A line is one write, so a file is never left with half of one, and readers may follow it (`tail -f`). Without a log folder nothing is
written.
"""

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

from jaxpar_launch._round import Round

if TYPE_CHECKING:
    from jaxpar_launch._members import End

FILE_NAME = "events.jsonl"
# How things stand after an event; after others as before.
_STATUS = {
    "launched": "meeting",
    "gathering": "waiting",
    "rendezvous": "running",
    "replaced": "running",
    "failure": "failing",
    "hang": "failing",
    "lost": "failing",
    "out_of_time": "failing",
    "signal": "stopping",
    "joined": "restarting",
    "left": "restarting",
    "restart": "restarting",
}


class Events:
    """The events of one launcher.

    Args:
        folder: where the file goes; None: nowhere.
        host: of this launcher.
    """

    def __init__(self, folder: str | None, host: str) -> None:
        self._host, self._fd = host, -1
        self.status = "meeting"
        self.round = self.restarts = 0
        if folder is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._fd = os.open(os.path.join(folder, FILE_NAME), flags, 0o600)

    def turn_to(self, round_: Round) -> None:
        """What follows belongs to this round."""
        self.round, self.restarts = round_.number, round_.restart_count

    def note(self, event: str, **facts: Any) -> None:
        """Something happened."""
        self.status = _STATUS.get(event, self.status)
        if self._fd < 0:
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = {"time": stamp, "host": self._host, "round": self.round, "restarts": self.restarts}
        data = json.dumps(line | {"event": event} | facts).encode() + b"\n"
        with contextlib.suppress(OSError):  # a full disk is no reason to stop training
            os.write(self._fd, data)

    def close(self) -> None:
        """Nothing more will happen."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def note_end(events: Events, end: "End | None") -> None:
    """That a round has ended on another host; None: nobody can tell any more."""
    if end is None:
        events.note("lost", text="the rendezvous is gone")
    else:
        events.note(end.kind, text=end.text)
