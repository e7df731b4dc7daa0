"""What a worker knows from its environment: its rank, its world, and where to meet the others.

    launcher                                          worker
    WorkerEnv(rank=1, ...).to_environ()  -- exec -->  WorkerEnv.from_environ()

| for            | variables                                                                                  |
|----------------|--------------------------------------------------------------------------------------------|
| torchrun users | RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_* ROLE_* MASTER_ADDR/_PORT TORCHELASTIC_* |
| jaxpar         | JAXPAR_COORDINATOR JAXPAR_STORE JAXPAR_STORE_TOKEN JAXPAR_ERROR_FILE JAXPAR_RECOVERY         |
|                | JAXPAR_COMPILATION_CACHE_DIR JAXPAR_COMPILATION_CACHE_MAX_BYTES                              |
| plain JAX      | JAX_COORDINATOR_ADDRESS JAX_PROCESS_ID JAX_NUM_PROCESSES JAX_LOCAL_DEVICE_IDS, Open MPI's     |
| the backend    | JAX_PLATFORMS JAX_NUM_CPU_DEVICES JAX_CUDA_VISIBLE_DEVICES, thread counts                    |

Surprise: JAX (0.10 to 0.12) reads rank and world size from no variable of its own, only from a cluster it
recognises. Three of Open MPI's variables are therefore set too, and `jax.distributed.initialize()` without
arguments works; it also looks for Open MPI before Slurm, so a launcher inside a Slurm job is not mistaken
for the job's tasks.

This is the launcher's only file that reads the environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar_launch._errors import WorkerEnvError

# (field, variable, type); the first six and the coordinator's address make a process a worker.
_FIELDS = (
    ("rank", "RANK", int),
    ("local_rank", "LOCAL_RANK", int),
    ("world_size", "WORLD_SIZE", int),
    ("local_world_size", "LOCAL_WORLD_SIZE", int),
    ("master_addr", "MASTER_ADDR", str),
    ("master_port", "MASTER_PORT", int),
    ("group_rank", "GROUP_RANK", int),
    ("group_world_size", "GROUP_WORLD_SIZE", int),
    ("role_name", "ROLE_NAME", str),
    ("role_rank", "ROLE_RANK", int),
    ("role_world_size", "ROLE_WORLD_SIZE", int),
    ("restart_count", "TORCHELASTIC_RESTART_COUNT", int),
    ("max_restarts", "TORCHELASTIC_MAX_RESTARTS", int),
    ("run_id", "TORCHELASTIC_RUN_ID", str),
    ("coordinator", "JAXPAR_COORDINATOR", str),
    ("store", "JAXPAR_STORE", str),
    ("store_token", "JAXPAR_STORE_TOKEN", str),
    ("error_file", "JAXPAR_ERROR_FILE", str),
    ("recovery", "JAXPAR_RECOVERY", str),
    ("platform", "JAX_PLATFORMS", str),
    ("devices_per_proc", "JAX_NUM_CPU_DEVICES", int),
    ("local_device_ids", "JAX_LOCAL_DEVICE_IDS", tuple),
)
_REQUIRED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MARKERS = ("RANK", "WORLD_SIZE", "JAXPAR_COORDINATOR", "JAXPAR_STORE")
_START_LINE = "jaxpar-launch --nproc-per-node 2 train.py"


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """One worker's place in the job, as the launcher decided it and the worker reads it (torchrun, row 10.2).

    Args:
        rank, world_size: this process among all of the job.
        local_rank, local_world_size: this process among those of its host.
        master_addr, master_port: the address that rank 0 may listen on.
        group_rank, group_world_size: this host's launcher among all launchers.
        role_name, role_rank, role_world_size: this process among those of its role.
        restart_count, max_restarts, run_id: which attempt this is, of how many, of which job.
        coordinator: "host:port" of JAX's coordination service, which rank 0 starts; by default the master's
            address. New in every attempt unless the port was given.
        store, store_token: "host:port" of the launcher's key-value store and the job's secret, if it has one.
        error_file: where a failing worker leaves its last words (`jaxpar_launch.errors`).
        recovery: "host:port" of a coordination service that the launcher keeps, for `jaxpar.mesh.run_recoverable`; None
            without `--recover in-place`.
        platform: the value of JAX_PLATFORMS, "cpu" for a job on the CPU; None leaves the choice to JAX.
        devices_per_proc: how many CPU devices JAX shall make; None leaves JAX's default of one.
        local_device_ids: the accelerators of its host that this process owns; None means all.

    Example:
        >>> env = WorkerEnv(rank=1, local_rank=1, world_size=2, local_world_size=2,
        ...                 master_addr="127.0.0.1", master_port=29500, devices_per_proc=4, platform="cpu")
        >>> WorkerEnv.from_environ(env.to_environ()) == env
        True
        >>> env.to_environ()["JAX_COORDINATOR_ADDRESS"]
        '127.0.0.1:29500'
        >>> WorkerEnv.from_environ({"HOME": "/root"}) is None    # not started by a launcher
        True
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    group_rank: int = 0
    group_world_size: int = 1
    role_name: str = "default"
    role_rank: int = -1
    role_world_size: int = -1
    restart_count: int = 0
    max_restarts: int = 0
    run_id: str = "none"
    coordinator: str = ""
    store: str | None = None
    store_token: str | None = None
    error_file: str | None = None
    recovery: str | None = None
    platform: str | None = None
    devices_per_proc: int | None = None
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        derived = {
            "role_rank": self.rank if self.role_rank < 0 else self.role_rank,
            "role_world_size": self.world_size if self.role_world_size < 0 else self.role_world_size,
            "coordinator": self.coordinator or join_address(self.master_addr, self.master_port),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check("RANK", self.rank, "WORLD_SIZE", self.world_size)
        self._check("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size)
        self._check("GROUP_RANK", self.group_rank, "GROUP_WORLD_SIZE", self.group_world_size)
        if self.local_world_size > self.world_size:
            raise WorkerEnvError(
                f"LOCAL_WORLD_SIZE={self.local_world_size} is more than WORLD_SIZE={self.world_size}: a host "
                "cannot run more processes than the job has."
            )
        for variable, address in (
            ("JAXPAR_COORDINATOR", self.coordinator),
            ("JAXPAR_STORE", self.store),
            ("JAXPAR_RECOVERY", self.recovery),
        ):
            if address is not None:
                split_address(address, variable=variable)

    @staticmethod
    def _check(rank_name: str, rank: int, size_name: str, size: int) -> None:
        if not 0 <= rank < size:
            raise WorkerEnvError(
                f"{rank_name}={rank} does not lie in 0..{size_name}-1 with {size_name}={size}. Every process "
                f"needs its own number below the count; `{_START_LINE}` sets both."
            )

    def to_environ(self) -> dict[str, str]:
        """The variables to start this worker with; those of fields that are None are left out."""
        environ = {}
        for name, variable, kind in _FIELDS:
            value = getattr(self, name)
            if value is not None:
                environ[variable] = ",".join(map(str, value)) if kind is tuple else str(value)
        if self.error_file is not None:  # for torchelastic's own `@record`, of the same format
            environ["TORCHELASTIC_ERROR_FILE"] = self.error_file
        if self.local_device_ids is not None:
            # For programs that never call jax.distributed.initialize(): without it every worker would
            # reserve memory on every GPU. The numbers count within CUDA_VISIBLE_DEVICES, which stays as it is.
            for variable in ("JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES"):
                environ[variable] = environ["JAX_LOCAL_DEVICE_IDS"]
        return environ | self._for_plain_jax()

    def _for_plain_jax(self) -> dict[str, str]:
        return {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            "JAX_NUM_PROCESSES": str(self.world_size),
            "JAX_PROCESS_ID": str(self.rank),
            # How JAX recognises Open MPI; it takes the coordinator from the variable above, not from here.
            "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{self.coordinator}",
            "OMPI_COMM_WORLD_SIZE": str(self.world_size),
            "OMPI_COMM_WORLD_RANK": str(self.rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(self.local_rank),
            # A real Open MPI 5 around us would make jax 0.12 ask mpi4py instead; an empty version does not.
            "OMPI_VERSION": "",
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "WorkerEnv | None":
        """Reads this process's place from `environ` (default: `os.environ`).

        PyTorch's `env://` variables alone (set by hand, without a launcher) are enough; then there is no store.

        Returns:
            None when no launcher started this process.

        Raises:
            WorkerEnvError: some variables are missing or malformed; the message names them.
        """
        environ = os.environ if environ is None else environ
        environ = {
            name: value for name, value in environ.items() if value
        }  # an empty variable is an unset one
        if not any(variable in environ for variable in _MARKERS):
            return None
        if missing := [variable for variable in _REQUIRED if variable not in environ]:
            there = ", ".join(
                f"{name}={environ[name]}" for name in (*_REQUIRED, *_MARKERS[2:]) if name in environ
            )
            raise WorkerEnvError(
                f"The environment is that of a worker ({there}) but lacks {', '.join(missing)}. A process with "
                f"half an identity would train alone or hang. Start it with `{_START_LINE}`, or unset "
                f"{', '.join(name for name in _MARKERS if name in environ)} for a single process."
            )
        if "TORCHELASTIC_USE_AGENT_STORE" in environ and "JAXPAR_COORDINATOR" not in environ:
            raise WorkerEnvError(
                "JAXPAR_COORDINATOR is missing: torchrun started this process, and its own store listens on "
                f"MASTER_PORT={environ['MASTER_PORT']}, where JAX would have to. Start it with `{_START_LINE}`."
            )
        return cls(
            **{
                name: _parse(variable, environ[variable], kind)
                for name, variable, kind in _FIELDS
                if variable in environ
            }
        )


def split_address(address: str, *, variable: str) -> tuple[str, int]:
    """`"host:port"` (or `"[v6]:port"`) as a pair; `variable` is what the error names."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise WorkerEnvError(
            f"{variable}={address!r} is not host:port with a port in 1..65535, as 10.0.0.1:29500."
        )
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """A pair as `"host:port"`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def option_from_environ(flag: str) -> str | None:
    """The value of a command line flag given as a variable: `--log-dir` may come as JAXPAR_LOG_DIR."""
    return os.environ.get("JAXPAR_" + flag.lstrip("-").replace("-", "_").upper())


@dataclass(frozen=True)
class ProgramCache:
    """Where a process keeps its compiled programs, and how large the folder may become for the whole job."""

    folder: str
    max_bytes: int


def program_cache(environ: Mapping[str, str] | None = None) -> ProgramCache | None:
    """What JAXPAR_COMPILATION_CACHE_DIR and _MAX_BYTES say, set by hand or by the launcher; None: nothing is kept.

    Raises:
        WorkerEnvError: the number of bytes is none.

    Example:
        >>> program_cache({"JAXPAR_COMPILATION_CACHE_DIR": "programs"})
        ProgramCache(folder='programs', max_bytes=10737418240)
    """
    environ = os.environ if environ is None else environ
    folder = environ.get("JAXPAR_COMPILATION_CACHE_DIR")
    if not folder:
        return None
    variable = "JAXPAR_COMPILATION_CACHE_MAX_BYTES"
    text = environ.get(variable) or str(10 * 2**30)
    if not text.isdigit() or not int(text):
        raise WorkerEnvError(
            f"{variable}={text!r} is not a number of bytes, one at least; leave it out for 10 GiB."
        )
    return ProgramCache(folder, int(text))


def scratch_root() -> str:
    """Where temporary files of this machine go."""
    return os.environ.get("TMPDIR", "/tmp")


def inherited_environ() -> dict[str, str]:
    """What workers inherit from the launcher: everything, but the password of etcd, which is the launcher's alone."""
    return {name: value for name, value in os.environ.items() if name != "JAXPAR_ETCD_PASSWORD"}


def thread_defaults(
    inherited: Mapping[str, str], *, nproc: int, num_cores: int, platform: str, devices_per_proc: int | None
) -> dict[str, str]:
    """Thread counts by which several workers share one host's cores; whatever the user set is left out.

    OMP_NUM_THREADS is 1 as with torchrun. XLA's CPU pool takes every core of the affinity mask, in every
    worker, unless PJRT_NPROC (or NPROC) says less; it must hold two threads per device where there is more
    than one, or jax 0.10.2 deadlocks once 33 collective programs are in flight. Measured, 2 cores: two
    devices hang with 2 or 3 threads and run with 4; one device runs with a single thread.

    Example:
        >>> thread_defaults({}, nproc=4, num_cores=16, platform="cpu", devices_per_proc=1)
        {'OMP_NUM_THREADS': '1', 'PJRT_NPROC': '4', 'NPROC': '4'}
        >>> thread_defaults({"NPROC": "3"}, nproc=1, num_cores=2, platform="cpu", devices_per_proc=8)
        {}
    """
    defaults = {"OMP_NUM_THREADS": "1"} if nproc > 1 and "OMP_NUM_THREADS" not in inherited else {}
    if platform == "cpu" and not {"PJRT_NPROC", "NPROC"} & set(inherited):
        num_devices = devices_per_proc or _parse(
            "JAX_NUM_CPU_DEVICES", inherited.get("JAX_NUM_CPU_DEVICES", "1"), int
        )
        floor = 2 * num_devices if num_devices > 1 else 1
        pool = str(max(num_cores // nproc, floor))
        defaults |= {"PJRT_NPROC": pool, "NPROC": pool}
    return defaults


def _parse(variable: str, text: str, kind: type) -> Any:
    if kind is str:
        return text
    try:
        return tuple(int(part) for part in text.split(",")) if kind is tuple else int(text)
    except ValueError:
        want = "integers with commas between them" if kind is tuple else "an integer"
        raise WorkerEnvError(f"{variable}={text!r} is not {want}; `{_START_LINE}` sets it right.") from None
