"""What to launch, as frozen data that proves itself: a `LaunchSpec` that exists can be started.

    command line --(cli)--> LaunchSpec --(agent)--> rounds of workers
    launch(...)  --------------^

Facts that others branch on (argv of a worker, its devices, where its output goes) are derived here, once.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxpar_launch._errors import LaunchSpecError
from jaxpar_launch._rdzv_spec import RendezvousSpec
from jaxpar_launch._run import VALUE_FILE
from jaxpar_launch._streams import StreamChoice

KINDS = ("script", "module", "program", "function")
PLATFORMS = ("cpu", "gpu", "other")
RECOVERIES = ("restart", "in-place")
DEFAULT_PREFIX = "[rank ${rank}] "
_MACROS = ("role_name", "local_rank", "rank", "hostname")
_RUNNER, _CALLED = (
    os.path.join(os.path.dirname(os.path.abspath(__file__)), name) for name in ("_run.py", "_called.py")
)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One host's share of a job.

        command      script.py --lr 3; None: what launch(spec, ...) is given
        kind         script: a Python file, module: as `python -m`, program: any, function: a file of launch(function)
        nproc        workers on this host       platform  cpu, gpu, or other (left to JAX)
        grace_s      SIGTERM -> SIGKILL         when a launcher is told to stop, or hosts joined: time to write a checkpoint
        failure_grace_s  the same               when a worker failed: short, for JAX swallows SIGTERM
        hang_timeout_s   how long a worker that notes its progress may note nothing; None: for ever
        health_check_port    where the launcher answers whether it is well (`_health.py`); None: nowhere
        max_restarts     how often all workers start again when one has failed
        recover          what then: restart; in-place: the others keep their processes, if their script can (`run_recoverable`)
        recover_timeout_s    how long they may take to leave the old world before all start again
        rendezvous       where other hosts are met; None: this host alone
        compilation_cache_dir  where jaxpar.init_process_group() lets workers keep compiled programs; None: nowhere

    Raises:
        LaunchSpecError: at construction; names the flag and the line to write instead.

    Example:
        >>> LaunchSpec(command=("a.out",), kind="program", nproc=0)
        Traceback (most recent call last):
        jaxpar_launch._errors.LaunchSpecError: --nproc-per-node 0: at least one worker is needed. Write ...
    """

    command: tuple[str, ...] | None = None
    kind: str = "script"
    nproc: int = 1
    platform: str = "cpu"
    devices_per_proc: int | None = None
    num_gpus: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    role: str = "default"
    run_id: str = "none"
    grace_s: float = 30.0
    failure_grace_s: float = 1.0
    hang_timeout_s: float | None = None
    health_check_port: int | None = None
    max_restarts: int = 0
    recover: str = "restart"
    recover_timeout_s: float = 10.0
    rendezvous: RendezvousSpec | None = None
    monitor_interval_s: float = 0.1
    log_dir: str | None = None
    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    local_ranks_filter: tuple[int, ...] | None = None
    log_line_prefix_template: str = DEFAULT_PREFIX
    compilation_cache_dir: str | None = None
    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for check in (
            _check_command,
            _check_devices,
            _check_numbers,
            _check_recovery,
            _check_logs,
            _check_kept,
        ):
            check(self)

    @property
    def has_logs(self) -> bool:
        """Whether output goes to files that stay."""
        return bool(self.log_dir or self.redirects or self.tee)

    def argv(self, error_file: str, *, local_rank: int = 0) -> list[str]:
        """The command of one worker; Python workers run inside `_run.py`, which records their failure.

        In arguments of a script, "${local_rank}" is replaced, as torchrun does.
        """
        name, *arguments = self.command or ("",)
        command = [name, *(text.replace("${local_rank}", str(local_rank)) for text in arguments)]
        if self.kind == "program":
            return command
        kind = self.kind
        if kind == "function":
            value_file = os.path.join(os.path.dirname(error_file), VALUE_FILE)
            kind, command = "script", [_CALLED, *command, value_file]
        return [self.python, _RUNNER, error_file, kind, *command]

    def local_device_ids(self, local_rank: int) -> tuple[int, ...] | None:
        """The GPUs of one worker, counted within CUDA_VISIBLE_DEVICES: equal shares, in order."""
        if self.platform != "gpu" or not self.num_gpus:
            return None
        share = self.devices_per_proc or self.num_gpus // self.nproc
        return tuple(range(local_rank * share, (local_rank + 1) * share))

    def prefix(self, *, rank: int, local_rank: int, hostname: str) -> str:
        """What stands before each line of a worker's output."""
        values = {"role_name": self.role, "local_rank": local_rank, "rank": rank, "hostname": hostname}
        return re.sub(r"\$\{(\w+)\}", lambda macro: str(values[macro[1]]), self.log_line_prefix_template)


def _check_command(spec: LaunchSpec) -> None:
    if spec.kind not in KINDS or spec.platform not in PLATFORMS:
        raise LaunchSpecError(
            f"kind={spec.kind!r} must be one of {KINDS}, platform={spec.platform!r} of {PLATFORMS}."
        )
    if spec.command is None:
        return
    if not spec.command:
        raise LaunchSpecError(
            "Nothing to run: name a script, as in `jaxpar-launch --nproc-per-node 2 train.py`."
        )
    name = spec.command[0]
    if spec.kind == "script" and not os.path.exists(name):
        raise LaunchSpecError(
            f"There is no script {name!r} in {os.getcwd()}. For a module write -m {name.removesuffix('.py')}, for "
            "another program --no-python."
        )


def _check_devices(spec: LaunchSpec) -> None:
    if spec.nproc < 1:
        raise LaunchSpecError(
            f"--nproc-per-node {spec.nproc}: at least one worker is needed. Write --nproc-per-node 1, or auto."
        )
    if spec.devices_per_proc is not None and spec.devices_per_proc < 1:
        raise LaunchSpecError(
            f"--devices-per-proc {spec.devices_per_proc}: a worker needs at least one device. Write --devices-per-proc 1."
        )
    needed = spec.nproc * (spec.devices_per_proc or 1)
    if spec.platform == "gpu" and spec.num_gpus and needed > spec.num_gpus:
        raise LaunchSpecError(
            f"--nproc-per-node {spec.nproc} with --devices-per-proc {spec.devices_per_proc or 1} needs {needed} GPUs; "
            f"this host offers {spec.num_gpus}. Write --nproc-per-node gpu, or set JAX_PLATFORMS=cpu."
        )


def _check_numbers(spec: LaunchSpec) -> None:
    if spec.master_port is not None and not 0 < spec.master_port < 65536:
        raise LaunchSpecError(
            f"--master-port {spec.master_port} does not lie in 1..65535. Leave it out to get a free port."
        )
    if spec.health_check_port is not None and not 0 < spec.health_check_port < 65536:
        raise LaunchSpecError(
            f"--health-check-port {spec.health_check_port} does not lie in 1..65535. Write for example --health-check-port 8080."
        )
    if spec.max_restarts < 0:
        raise LaunchSpecError(
            f"--max-restarts {spec.max_restarts}: a job cannot restart less than never. Write --max-restarts 0, or more."
        )
    for flag, value, least in (
        ("--grace-period", spec.grace_s, 0.0),
        ("--failure-grace-period", spec.failure_grace_s, 0.0),
        ("--monitor-interval", spec.monitor_interval_s, 0.001),
        ("--recover-timeout", spec.recover_timeout_s, 0.1),
        ("--hang-timeout", 1.0 if spec.hang_timeout_s is None else spec.hang_timeout_s, 0.1),
    ):
        if not least <= value < float("inf"):
            raise LaunchSpecError(f"{flag} {value:g} must be a number of seconds, at least {least:g}.")


def _check_recovery(spec: LaunchSpec) -> None:
    """In-place recovery is offered where it is proved: one host, CPU workers (jax 0.10 and 0.12)."""
    if spec.recover not in RECOVERIES:
        raise LaunchSpecError(f"--recover {spec.recover!r} must be one of {', '.join(RECOVERIES)}.")
    if spec.recover == "restart":
        return
    instead = "Write --recover restart: all workers start again."
    if spec.rendezvous is not None:
        raise LaunchSpecError(
            f"--recover in-place replaces workers of one host; this job is spread over several. {instead}"
        )
    if spec.platform != "cpu":
        raise LaunchSpecError(
            "--recover in-place is proved for workers on the CPU only: whether NCCL lets a survivor out of a collective, and the "
            f"old backend its memory go, is not. {instead}"
        )
    if spec.max_restarts == 0:
        raise LaunchSpecError(
            "--recover in-place: a recovery counts as a restart, and --max-restarts 0 allows none. Write --max-restarts 3."
        )


def _check_logs(spec: LaunchSpec) -> None:
    named = [("--redirects", spec.redirects.max_rank()), ("--tee", spec.tee.max_rank())]
    named += [("--local-ranks-filter", rank) for rank in spec.local_ranks_filter or ()]
    for flag, rank in named:
        if rank >= spec.nproc:
            raise LaunchSpecError(
                f"{flag} names local rank {rank}, but --nproc-per-node {spec.nproc} makes local ranks "
                f"0..{spec.nproc - 1}."
            )
    for macro in re.findall(r"\$\{(\w*)\}", spec.log_line_prefix_template):
        if macro not in _MACROS:
            raise LaunchSpecError(
                f"--log-line-prefix-template: there is no macro ${{{macro}}}; there are "
                f"{', '.join('${' + name + '}' for name in _MACROS)}."
            )


def _check_kept(spec: LaunchSpec) -> None:
    folder = spec.compilation_cache_dir
    if folder is not None and ("://" in folder or (os.path.exists(folder) and not os.path.isdir(folder))):
        raise LaunchSpecError(
            f"--compilation-cache-dir {folder} is not a folder. Name one of a disk that outlives the job, or leave it out."
        )
