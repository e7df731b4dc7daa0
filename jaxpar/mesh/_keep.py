"""A restart compiles nothing: every process keeps its compiled programs where `--compilation-cache-dir` says.

    DIR/rank-0/jit_train_step-3f2a...      CPU, TPU: each process its own
    DIR/shared/jit_train_step-91c0...      GPU: process 0 writes for all, so DIR must be on a disk that all hosts see

A program is found again by its text, the compiler's options and version, the devices, the processes and the machine's
kind of CPU; tracing and lowering are done anew. The files hold machine code: who may write them runs code as this user.
"""

import os
import platform
import stat
from pathlib import Path

import jax

from jaxpar._compat import keep_programs, world_of_programs
from jaxpar._errors import ProcessGroupError
from jaxpar._kept import KeptPrograms
from jaxpar.mesh._group import Membership
from jaxpar_launch.env import ProgramCache

_WHERE = "init_process_group: JAXPAR_COMPILATION_CACHE_DIR"


def keep_compiled(cache: ProgramCache, member: Membership) -> None:
    """Loads this process's programs from the folder from now on, and keeps new ones there.

    Raises:
        ProcessGroupError: The folder cannot be made, or others may write into it.
    """
    folder = _private_folder(cache.folder)

    def open_store() -> KeptPrograms:
        world = world_of_programs()
        if jax.default_backend() == "gpu":
            return KeptPrograms(folder / "shared", world=world, max_bytes=cache.max_bytes)
        share = cache.max_bytes // member.world_size
        return KeptPrograms(folder / f"rank-{member.rank}", world=f"{world}, {_cpu()}", max_bytes=share)

    keep_programs(open_store, folder=str(folder))


def _private_folder(name: str) -> Path:
    if "://" in name:
        raise ProcessGroupError(
            f"{_WHERE}={name}: programs are kept in a folder, not at an address. Name one of a disk that outlives the"
            " job; for a bucket there is JAX's own JAX_COMPILATION_CACHE_DIR, which keeps those of rank 0."
        )
    folder = Path(name).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ProcessGroupError(
            f"{_WHERE}={name}: cannot be made: {error.strerror}. Name a folder that you may write, or none."
        ) from error
    if found.st_mode & stat.S_IWOTH or found.st_uid not in (os.geteuid(), 0):
        owner = f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}"
        raise ProcessGroupError(
            f"{_WHERE}={name} is another's ({owner}; this process is user {os.geteuid()}): who may write there could"
            f" make this process run any code. Write JAXPAR_COMPILATION_CACHE_DIR={folder / 'mine'}, or chmod 700 it."
        )
    return folder


def _cpu() -> str:
    """The kind of CPU: XLA compiles for the very one it runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = [platform.processor()]
    told = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return f"{platform.machine()} {told or lines}"
