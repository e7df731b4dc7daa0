"""How a round of workers ended on this host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpar_launch._fates import Fate
from jaxpar_launch._fates import table as table_of_fates
from jaxpar_launch._hang import Place, summary, table
from jaxpar_launch._report import Failure

TIMEOUT_EXIT_CODE = 124  # as timeout(1)


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit code, failures (root cause first), and what its report is made of.

    Args:
        exit_code: 0 if all workers here are done.
        failures: of workers here.
        head: what happened, for people; empty if all is well.
        fates: how each worker ended, of other hosts too as far as that is known.
        first: the rank that failed first.
        is_timeout: whether it was out of time.
        is_leaving: whether this launcher was told to end.
        hang: where the workers here were, when some of the job made no progress.
        earlier: what went before it.
    """

    exit_code: int
    failures: tuple[Failure, ...]
    head: str
    fates: tuple[Fate, ...] = ()
    first: int | None = None
    is_timeout: bool = False
    is_leaving: bool = False
    hang: tuple[Place, ...] = ()
    earlier: tuple[str, ...] = ()

    @property
    def report(self) -> str:
        """For people; empty if all is well."""
        if not self.head:
            return ""
        lines = [f"  {line}" for line in table_of_fates(self.fates, first=self.first)]
        if self.earlier:
            lines += ["  before that:", *(f"  - {line}" for line in self.earlier)]
        return "\n".join([self.head, *lines])

    @property
    def can_restart(self) -> bool:
        """A worker failed or hung, and nobody asked for the end."""
        return bool(self.failures or self.hang) and not self.is_leaving and not self.is_timeout

    @property
    def cause(self) -> str:
        """Why it may be run again, in a few words."""
        if not self.failures:
            return summary(self.hang)
        return cause_of(self.failures[0])

    def after(self, earlier: Sequence[str]) -> "Outcome":
        """The same, with what went before it in the report of a job that failed in the end."""
        return replace(self, earlier=tuple(earlier))


def hang_text(places: Sequence[Place]) -> str:
    """The report of a hang: a line for each rank, and what follows from them."""
    return "\n".join([f"jaxpar-launch: {summary(places)}", table(places)])


def cause_of(root: Failure) -> str:
    """That a worker failed, and how, in a few words."""
    return f"rank {root.rank} failed ({root.cause}{told(root)})"


def told(root: Failure) -> str:
    """What a failed worker said, after a colon."""
    return f": {root.message}" if root.message else ""


def shell_code(exit_code: int) -> int:
    """A worker's exit code as the launcher's: 128 + n for signal n, as shells have it."""
    return exit_code if exit_code > 0 else 128 - exit_code
