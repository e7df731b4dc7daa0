"""TPU slices that are not here: compile-only devices on a torus.

v5e, 256 chips    torus (16, 16): chip (x, y) has fast links to (x +- 1, y) and (x, y +- 1)
"""

import importlib.util
import math
from collections.abc import Sequence
from types import MappingProxyType

from jax import Device
from jax.experimental import topologies

from jaxpar._errors import MeshError

# Dims of the torus.
TPU_KINDS = MappingProxyType({"v5e": 2, "v6e": 2, "v5p": 3})


def tpu_topology(kind: str, *, num_devices: int, torus: Sequence[int] | None) -> list[Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The TPU part of `topology`, which describes it."""
    shape = _default_torus(kind, num_devices) if torus is None else tuple(torus)
    if len(shape) != TPU_KINDS[kind] or math.prod(shape) != num_devices or min(shape) < 1:
        raise MeshError(
            f"topology({kind!r}, num_devices={num_devices}, torus={shape}): {' * '.join(map(str, shape))} = "
            f"{math.prod(shape)} chips on a torus of {len(shape)} dims. {kind} chips stand on a torus of {TPU_KINDS[kind]} "
            f"dims, and it must hold {num_devices} of them."
        )
    if not has_tpu_compiler():
        raise MeshError(
            f"topology({kind!r}): XLA's TPU compiler is not installed; jax alone compiles for the CPU only. Run: "
            "pip install 'jaxpar[aot-tpu]' (a wheel of 213 MB; no TPU needed)."
        )
    name = f"{kind}:{'x'.join(map(str, shape))}"
    try:
        return list(topologies.get_topology_desc(name, platform="tpu").devices)
    except RuntimeError as error:
        raise MeshError(
            f"topology({kind!r}, num_devices={num_devices}): the TPU compiler knows no slice {name} ({error}). Name one "
            f"that exists, as torus=(4, 8)."
        ) from error


def has_tpu_compiler() -> bool:
    """Whether libtpu is installed, with or without a TPU to use it."""
    return importlib.util.find_spec("libtpu") is not None


def _default_torus(kind: str, num_devices: int) -> tuple[int, ...]:
    """As near to a cube as a power of two can be, the smaller dims first: 256 is (16, 16), 32 is (4, 8)."""
    exponent, dims = num_devices.bit_length() - 1, TPU_KINDS[kind]
    if num_devices < 1 or num_devices != 1 << exponent:
        raise MeshError(
            f"topology({kind!r}, num_devices={num_devices}): {num_devices} is no power of two, so the shape of the torus "
            f"cannot be guessed. Say it, as torus={(2,) * (dims - 1) + (3,)} for {3 * 2 ** (dims - 1)} chips."
        )
    return tuple(1 << (exponent + i) // dims for i in range(dims))
