"""What a training function that `run_recoverable` calls is given: to keep state, to take it up again, to be left.

world 0    resume -> 0 steps     keep(10)  keep(20)  step 23: rank 1 is lost
world 1    resume -> 20 steps    on the survivors and the newcomer, from the memory of a survivor
"""

from collections.abc import Callable

from jaxpar._pytree import PyTree
from jaxpar.mesh._group import ProcessGroup
from jaxpar.mesh._host_copy import HostCopy, copy_to_host, restored
from jaxpar.mesh._meeting import meet


class Recovery:
    """One world of a job, as its training function sees it.

    Args:
        group: The world; None where nothing is recovered in place (another launcher, none, `--recover restart`).
        kept: What this process kept in an earlier world.
        restart_count: How often a worker of this job was lost before, whether it was replaced or all started again.
    """

    def __init__(
        self, group: ProcessGroup | None, *, kept: HostCopy | None = None, restart_count: int = 0
    ) -> None:
        self._group = group
        self._kept = kept
        self.restart_count = restart_count

    @property
    def kept(self) -> HostCopy | None:
        """The newest host copy of this process; None if there is none."""
        return self._kept

    def keep(self, num_steps: int, state: PyTree) -> None:
        """Copies a state to the memory of this process, in place of the one before.

        Nothing moves between devices; the call waits until the state is there. What the workers share must be whole on each:
        the state of a replicated (DDP) model, not of a sharded one. Where nothing is recovered in place, it does nothing.

        Args:
            num_steps: How many steps it has seen.
            state: A pytree: `nnx.state((model, optimizer))`.

        Raises:
            RecoveryError: A leaf is sharded; the message names it.
            WorkerLostError: A worker was lost; let it pass.
        """
        self.check()
        if self._group is not None:
            self._kept = copy_to_host(num_steps, state)

    def resume(
        self, state: PyTree, *, otherwise: Callable[[], tuple[int, PyTree]] | None = None
    ) -> tuple[int, PyTree]:
        """The newest state that any worker has kept, on all of them; every worker calls it once, before its first step.

        All meet. The survivor with the most steps sends its copy to all: one all-reduce of the state's bytes for each 32 MiB.

        Args:
            state: The fresh state: the structure, shapes, dtypes and shardings to restore.
            otherwise: Called on every worker when none has kept anything: at the first start, and after a restart of all. Returns
                the number of steps and the state of a checkpoint. Default: no step, and `state` itself.

        Returns:
            Number of steps, and the state after them.

        Raises:
            RecoveryError: `state` is another than what was kept.
            WorkerLostError: A worker was lost; let it pass.
        """
        steps, source = -1, 0
        if self._group is not None:
            said = -1 if self._kept is None else self._kept.num_steps
            (steps, source), _ = meet(self._group, "Recovery.resume", said, judge=_most_steps)
        if steps < 0:
            return (0, state) if otherwise is None else otherwise()
        return steps, restored(self._kept, state, source=source)

    def check(self) -> None:
        """A safe point: leaves this world if it has lost a worker. `keep`, `TrainStep` and every meeting are such points too.

        Raises:
            WorkerLostError: It has; let it pass.
        """
        if self._group is not None:
            self._group.check()


def _most_steps(said: list[int]) -> list[int]:
    """The most steps that anybody has kept, and the first who has."""
    return [max(said), said.index(max(said))]
