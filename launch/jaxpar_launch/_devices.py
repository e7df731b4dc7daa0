"""How many workers this host should run, and on what: `auto`, `gpu`, `cpu` or a number.

    --nproc-per-node auto  ->  one per GPU, or one per CPU core where there is none
    JAX_PLATFORMS=cpu      ->  always the CPU

GPUs are counted by their device files, without any library: the launcher must start in milliseconds.
"""

import os
import re
from collections.abc import Mapping

from jaxpar_launch._errors import LaunchSpecError

_GPU_PLATFORMS = ("gpu", "cuda", "rocm")


def num_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_gpus(inherited: Mapping[str, str], *, dev: str = "/dev") -> int:
    """GPUs this host offers, or as many of them as CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES leaves."""
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in inherited:
            return len(
                [
                    name
                    for name in inherited[variable].split(",")
                    if name.strip() not in ("", "-1", "NoDevFiles")
                ]
            )
    if os.path.exists(f"{dev}/kfd"):  # AMD: every GPU has a render node, but so has a display adapter
        return len([name for name in os.listdir(f"{dev}/dri") if re.fullmatch(r"renderD\d+", name)])
    return len([name for name in os.listdir(dev) if re.fullmatch(r"nvidia\d+", name)])


def resolve_workers(nproc: str, inherited: Mapping[str, str], *, dev: str = "/dev") -> tuple[int, str]:
    """Turns `--nproc-per-node` into (number of workers, platform: "cpu", "gpu", or "other" for JAX to decide).

    Example:
        >>> resolve_workers("2", {"JAX_PLATFORMS": "cpu"})
        (2, 'cpu')
        >>> resolve_workers("gpu", {"CUDA_VISIBLE_DEVICES": "0,3"})
        (2, 'gpu')
    """
    platform = _platform(nproc, inherited, dev=dev)
    if nproc.isdigit() and int(nproc) > 0:
        return int(nproc), platform
    if nproc not in ("auto", "gpu", "cpu"):
        raise LaunchSpecError(
            f"--nproc-per-node {nproc} is neither a number of workers above 0 nor one of auto, gpu, cpu. "
            "Write for example --nproc-per-node 2."
        )
    if nproc == "gpu" and num_gpus(inherited, dev=dev) == 0:
        raise LaunchSpecError(
            "--nproc-per-node gpu: this host has no GPU (no device file, or CUDA_VISIBLE_DEVICES hides them all). "
            "Write --nproc-per-node cpu, or a number."
        )
    return (num_gpus(inherited, dev=dev) if platform == "gpu" else num_cores()), platform


def _platform(nproc: str, inherited: Mapping[str, str], *, dev: str) -> str:
    """What the user said in JAX_PLATFORMS or by the word `cpu` or `gpu`; else what the host has."""
    chosen = inherited.get("JAX_PLATFORMS", "").split(",")[0]
    if chosen:
        asked = "gpu" if chosen in _GPU_PLATFORMS else chosen if chosen == "cpu" else "other"
        if nproc in ("cpu", "gpu") and nproc != asked:
            raise LaunchSpecError(
                f"--nproc-per-node {nproc} contradicts JAX_PLATFORMS={inherited['JAX_PLATFORMS']}. Unset the "
                "variable, or give the number of workers."
            )
        return asked
    if nproc in ("cpu", "gpu"):
        return nproc
    if num_gpus(inherited, dev=dev):
        return "gpu"
    return "other" if os.path.exists(f"{dev}/accel0") else "cpu"  # accel0: a TPU
