"""Devices that are not here: the compiler's description of an accelerator cluster, to compile for ahead of time.

    topology("h100", num_devices=64)   ->   64 compile-only devices: 8 hosts x 8 GPUs
    topology("v5e", num_devices=256)   ->   256 compile-only devices on a 16 x 16 torus

A mesh of such devices compiles steps (`jit(f).lower(abstract_args).compile()`) exactly as on the cluster, with no
accelerator and no driver on this machine; only running them is impossible. The cost does not grow with the device
count.
"""

import importlib.util
from collections.abc import Sequence
from types import MappingProxyType

from jax import Device
from jax.experimental import topologies

from jaxpar._errors import MeshError
from jaxpar.debug._torus import TPU_KINDS, tpu_topology

_GPUS_PER_HOST = 8

# What XLA's GPU compiler asks a device for (message GpuTargetConfigProto of openxla/xla), with the public numbers
# of the H100 SXM: 132 streaming multiprocessors of 128 FP32 lanes, 80 GB HBM3 at 3.35 TB/s, 50 MiB L2 cache.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 12 minor: 9 }
dnn_version_info { major: 9 minor: 8 }
"""
_TARGETS = MappingProxyType({"h100": _H100})


def topology(kind: str, *, num_devices: int, torus: Sequence[int] | None = None) -> list[Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Compile-only devices of a cluster that need not exist.

    Args:
        kind: Device kind: `"h100"`; `"v5e"`, `"v6e"` or `"v5p"` for TPUs.
        num_devices: Number of devices. Up to 8 H100s stand in one host; more must fill whole hosts of 8.
        torus: Shape of the TPU slice, such as `(8, 16)`, or `(4, 4, 8)` for v5p. Default: for a power of two the shape
            nearest to a square or cube.

    Returns:
        The devices, those of one host next to each other. Make a mesh with `init_device_mesh(..., devices=...)`, which
        lays its axes along the torus.

    Raises:
        MeshError: The kind is unknown, the count does not fill hosts or the torus, or the compiler is not installed
            (`pip install 'jaxpar[aot]'` for GPUs, `'jaxpar[aot-tpu]'` for TPUs) or not loadable.
    """
    if kind in TPU_KINDS:
        return tpu_topology(kind, num_devices=num_devices, torus=torus)
    if kind not in _TARGETS:
        raise MeshError(
            f"topology({kind!r}): device kind unknown. Known kinds: {', '.join([*_TARGETS, *TPU_KINDS])}."
        )
    if torus is not None:
        raise MeshError(
            f"topology({kind!r}, torus={tuple(torus)}): GPUs stand in hosts, not on a torus. Leave torus out."
        )
    per_host = min(num_devices, _GPUS_PER_HOST)
    if num_devices < 1 or num_devices % per_host:
        raise MeshError(
            f"topology({kind!r}, num_devices={num_devices}): {num_devices} devices do not fill hosts of "
            f"{_GPUS_PER_HOST}. Choose at most {_GPUS_PER_HOST}, or a multiple of {_GPUS_PER_HOST}."
        )
    if not has_gpu_compiler():
        raise MeshError(
            f"topology({kind!r}): XLA's GPU compiler is not installed; jax alone compiles for the CPU only. "
            "Run: pip install 'jaxpar[aot]' (no GPU and no driver needed)."
        )
    shape = f"1x{num_devices // per_host}x{per_host}"
    try:
        described = topologies.get_topology_desc(
            platform="cuda", topology=shape, target_config=_TARGETS[kind]
        )
    except NotImplementedError as error:
        raise MeshError(
            f"topology({kind!r}): the GPU compiler is installed but JAX did not load it ({error}). It looks for a "
            "driver unless JAX runs on the CPU. Before the first use of JAX write "
            "jax.config.update('jax_platforms', 'cpu'), or set JAX_PLATFORMS=cpu."
        ) from error
    return list(described.devices)


def has_gpu_compiler() -> bool:
    """Whether a CUDA plugin of JAX is installed, with or without a GPU to use it."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_{name}") for name in ("cuda12", "cuda13"))
