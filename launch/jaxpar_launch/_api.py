"""The launcher as a function: for tests, notebooks and programs, with captured output, values per rank and a deadline.

launch(["train.py", "--steps", "3"], nproc=2, timeout_s=60)  ->  LaunchResult(exit_code, output, failures)
launch(train, args=(3,), nproc=2).values                     ->  {0: what rank 0 returned, 1: ...}
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxpar_launch._agent import run_agent
from jaxpar_launch._devices import num_gpus, resolve_workers
from jaxpar_launch._errors import LaunchFailedError, LaunchSpecError, LaunchTimeoutError
from jaxpar_launch._logs import MemorySink
from jaxpar_launch._report import Failure
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.env import inherited_environ, option_from_environ

if TYPE_CHECKING:
    from jaxpar_launch._call import Job


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Args:
        exit_code: 0, or the failed worker's code, 128 + n for signal n.
        output: what each rank wrote, stdout and stderr in the order of arrival; the index is the local rank.
        failures: the failed workers, root cause first.
        report: the text that `jaxpar-launch` would have printed at the end; empty if all went well.
    """

    exit_code: int
    output: tuple[str, ...]
    failures: tuple[Failure, ...]
    report: str
    _values: Mapping[int, Any] = field(default_factory=dict, repr=False)

    @property
    def values(self) -> dict[int, Any]:
        """What the function returned, by rank, of this host's workers; of a script there is none.

        Raises:
            LaunchFailedError: as `check`.
        """
        return dict(self.check()._values)

    def check(self) -> "LaunchResult":
        """Returns itself.

        Raises:
            LaunchFailedError: the exit code is not 0; the message is the report.
        """
        if self.exit_code != 0:
            raise LaunchFailedError(self.report)
        return self


def launch(
    job: "LaunchSpec | Job",
    entrypoint: "Job | None" = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    nproc: int = 1,
    devices_per_proc: int | None = None,
    max_restarts: int = 0,
    recover: str = "restart",
    recover_timeout_s: float = 10.0,
    hang_timeout_s: float | None = None,
    timeout_s: float | None = 60.0,
    kind: str = "script",
    environ: Mapping[str, str] | None = None,
    python: str = sys.executable,
    is_shown: bool = False,
) -> LaunchResult:
    """Runs a function or script in `nproc` processes and waits for them (`elastic_launch`, `mp.spawn`; row E9).

    A function is called as `function(*args, **kwargs)` in every process; which rank it is stands in the environment, and
    `jaxpar.init_process_group()` reads it. It is sent by name, so it belongs at the top level of a module or script; of a script,
    call `launch` under `if __name__ == "__main__":`, for the workers load it too. Functions of notebooks, and lambdas, need
    `cloudpickle`. Arguments and values are pickled: return NumPy arrays, for a `jax.Array` starts JAX where it arrives.

    A test of several processes is a script and three lines:

        def test_ranks_agree(tmp_path):
            script = tmp_path / "worker.py"
            script.write_text("import os; print('rank', os.environ['RANK'])")
            result = launch(script, nproc=2, timeout_s=30).check()     # .check() fails the test with the report
            assert result.output == ("rank 0\\n", "rank 1\\n")

    Args:
        job: a function; the script with its arguments; or a `LaunchSpec`, for all that the command line can do, several hosts
            too (then of the arguments below only `args`, `kwargs`, `timeout_s` and `is_shown` are used).
        entrypoint: the function, or script with arguments, of a `LaunchSpec` that has no command.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        nproc: how many workers.
        devices_per_proc: CPU devices, or GPUs, of each worker.
        max_restarts: how often all workers start again when one has failed.
        recover: "in-place": the others keep their processes then, if the script uses `jaxpar.mesh.run_recoverable`.
        recover_timeout_s: how long they may take to leave the old world before all start again.
        hang_timeout_s: how long a worker that notes its progress may note nothing.
        timeout_s: after so many seconds all workers are made to print their stacks, and killed; None waits on.
        kind: "script", "module" (as `python -m`), or "program" (anything executable).
        environ: variables to set beside the inherited ones.
        python: the interpreter that runs a script or module.
        is_shown: whether the output is shown too while it comes, with a prefix per rank.

    Returns:
        The result, for a failed job too; its `values` and `check()` raise then.

    Raises:
        LaunchTimeoutError: the job did not end in time; the message holds every rank's last lines.
        LaunchSpecError: it cannot be started as asked; a function or an argument cannot be sent.
        RendezvousError: the hosts of the `LaunchSpec` did not come together.

    Example:
        >>> launch(["echo", "hello"], kind="program", nproc=2).output
        ('hello\\n', 'hello\\n')
        >>> launch(divmod, args=(17, 5), nproc=2).values
        {0: (3, 2), 1: (3, 2)}
    """
    from jaxpar_launch._call import (
        check_not_loading,
        complete,
        read_values,
    )  # the command line starts faster without

    check_not_loading()
    if isinstance(job, LaunchSpec):
        spec, runs = job, entrypoint
    elif entrypoint is not None:
        raise LaunchSpecError(
            "launch takes a second job only after a LaunchSpec: write launch(spec, function)."
        )
    else:
        inherited = {**inherited_environ(), **(environ or {})}
        _, platform = resolve_workers(str(nproc), inherited)
        runs = job
        spec = LaunchSpec(
            kind=kind,
            nproc=nproc,
            platform=platform,
            num_gpus=num_gpus(inherited) if platform == "gpu" else 0,
            devices_per_proc=devices_per_proc,
            max_restarts=max_restarts,
            recover=recover,
            recover_timeout_s=recover_timeout_s,
            hang_timeout_s=hang_timeout_s,
            environ=environ or {},
            python=python,
        )
    memories = tuple(MemorySink() for _ in range(spec.nproc))
    pickles: dict[int, bytes] = {}
    with complete(spec, runs, args, kwargs or {}) as spec:
        outcome = run_agent(
            spec,
            timeout_s=timeout_s,
            is_shown=is_shown,
            memories=memories,
            values=pickles,
            secret=option_from_environ("--rdzv-token"),
        )
    output = tuple(memory.text() for memory in memories)
    if outcome.is_timeout:
        last = [f"--- rank {rank}\n{text[-4000:]}" for rank, text in enumerate(output)]
        raise LaunchTimeoutError("\n".join([f"{outcome.report} (timeout_s={timeout_s:g})", *last]))
    values = read_values(pickles) if spec.kind == "function" and outcome.exit_code == 0 else {}
    return LaunchResult(outcome.exit_code, output, outcome.failures, outcome.report, values)
