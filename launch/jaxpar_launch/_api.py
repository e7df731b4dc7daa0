"""The launcher as a function: for tests and notebooks, with captured output and a deadline.

launch(["train.py", "--steps", "3"], nproc=2, timeout_s=60)  ->  LaunchResult(exit_code, output, failures)
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpar_launch._agent import run_agent
from jaxpar_launch._devices import num_gpus, resolve_workers
from jaxpar_launch._errors import LaunchFailedError, LaunchTimeoutError
from jaxpar_launch._logs import MemorySink
from jaxpar_launch._report import Failure
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.env import inherited_environ


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Args:
        exit_code: 0, or the failed worker's code, 128 + n for signal n.
        output: what each rank wrote, stdout and stderr in the order of arrival; the index is the rank.
        failures: the failed workers, root cause first.
        report: the text that `jaxpar-launch` would have printed at the end; empty if all went well.
    """

    exit_code: int
    output: tuple[str, ...]
    failures: tuple[Failure, ...]
    report: str

    def check(self) -> "LaunchResult":
        """Returns itself.

        Raises:
            LaunchFailedError: the exit code is not 0; the message is the report.
        """
        if self.exit_code != 0:
            raise LaunchFailedError(self.report)
        return self


def launch(
    command: "LaunchSpec | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
    *,
    nproc: int = 1,
    devices_per_proc: int | None = None,
    max_restarts: int = 0,
    hang_timeout_s: float | None = None,
    timeout_s: float = 60.0,
    kind: str = "script",
    environ: Mapping[str, str] | None = None,
    python: str = sys.executable,
    is_shown: bool = False,
) -> LaunchResult:
    """Runs a script in `nproc` processes of this host and waits for them (torchelastic's `elastic_launch`, row E9).

    A test of several processes is a script and three lines:

        def test_ranks_agree(tmp_path):
            script = tmp_path / "worker.py"
            script.write_text("import os; print('rank', os.environ['RANK'])")
            result = launch(script, nproc=2, timeout_s=30).check()     # .check() fails the test with the report
            assert result.output == ("rank 0\\n", "rank 1\\n")

    Args:
        command: the script and its arguments, or a complete `LaunchSpec` (then only `timeout_s` and `is_shown` of
            the other arguments are used).
        nproc: how many workers.
        devices_per_proc: CPU devices, or GPUs, of each worker.
        max_restarts: how often all workers start again when one has failed.
        hang_timeout_s: how long a worker that notes its progress may note nothing.
        timeout_s: after so many seconds all workers are made to print their stacks, and killed.
        kind: "script", "module" (as `python -m`), or "program" (anything executable).
        environ: variables to set beside the inherited ones.
        python: the interpreter that runs a script or module.
        is_shown: whether the output is shown too while it comes, with a prefix per rank.

    Returns:
        The result, for a failed job too.

    Raises:
        LaunchTimeoutError: the job did not end in time; the message holds every rank's last lines.
        LaunchSpecError: it cannot be started as asked.

    Example:
        >>> launch(["echo", "hello"], kind="program", nproc=2).output
        ('hello\\n', 'hello\\n')
    """
    if isinstance(command, LaunchSpec):
        spec = command
    else:
        parts = [command] if isinstance(command, str | os.PathLike) else list(command)
        inherited = {**inherited_environ(), **(environ or {})}
        _, platform = resolve_workers(str(nproc), inherited)
        spec = LaunchSpec(
            command=tuple(os.fspath(part) for part in parts),
            kind=kind,
            nproc=nproc,
            platform=platform,
            num_gpus=num_gpus(inherited) if platform == "gpu" else 0,
            devices_per_proc=devices_per_proc,
            max_restarts=max_restarts,
            hang_timeout_s=hang_timeout_s,
            environ=environ or {},
            python=python,
        )
    memories = tuple(MemorySink() for _ in range(spec.nproc))
    outcome = run_agent(spec, timeout_s=timeout_s, is_shown=is_shown, memories=memories)
    output = tuple(memory.text() for memory in memories)
    if outcome.is_timeout:
        last = [f"--- rank {rank}\n{text[-4000:]}" for rank, text in enumerate(output)]
        raise LaunchTimeoutError("\n".join([f"{outcome.report} (timeout_s={timeout_s:g})", *last]))
    return LaunchResult(outcome.exit_code, output, outcome.failures, outcome.report)
