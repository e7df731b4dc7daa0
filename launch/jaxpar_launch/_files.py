"""The files of one launch, laid out as torchelastic's (row E7).

    <log-dir>/<run id>_<random>/attempt_0/1/stdout.log stderr.log error.json flight.bin      1 = local rank
                                report.txt                                                   if the job failed
                                events.jsonl                                                 what happened (`_events.py`)

Without `--log-dir` the folder is a temporary one; it is removed at the end unless it holds logs.
"""

import contextlib
import os
from dataclasses import dataclass

from jaxpar_launch.env import scratch_root


@dataclass(frozen=True)
class RunFolder:
    """The folder of one launch; nobody else can read it, for workers' output may hold secrets."""

    path: str
    is_kept: bool

    @classmethod
    def make(cls, *, log_dir: str | None, run_id: str, is_kept: bool) -> "RunFolder":
        """Makes a folder of a new name under `log_dir`, or under the place for temporary files."""
        parent = os.path.abspath(log_dir) if log_dir else scratch_root()
        os.makedirs(parent, exist_ok=True)
        path = os.path.join(parent, f"{run_id if log_dir else 'jaxpar-launch'}_{os.urandom(6).hex()}")
        os.mkdir(path, mode=0o700)
        return cls(path, is_kept)

    def of_worker(self, *, attempt: int, local_rank: int) -> str:
        """The folder of one worker in one attempt; made on demand."""
        path = os.path.join(self.path, f"attempt_{attempt}", str(local_rank))
        os.makedirs(path)
        return path

    def keep(self, name: str, text: str) -> None:
        """Writes a file into the folder."""
        with open(os.path.join(self.path, name), "w") as file:
            file.write(text + "\n")

    def close(self) -> None:
        """Removes the folder unless it is to be kept."""
        if not self.is_kept:
            _remove(self.path)


def _remove(folder: str) -> None:
    """`shutil.rmtree` for our own small folders; importing shutil would cost every launch some milliseconds."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            _remove(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        os.rmdir(folder)
