"""Which device stands where in a mesh.

    shape (dp=2, tp=4) on two hosts of four devices:     host 0 | a b c d    <- tp runs inside a host,
                                                         host 1 | e f g h       dp between hosts

Axes named later vary fastest, so the chattiest axis (tensor parallel) is named last and stays inside a host where
it can. CPU and GPU devices are ordered by (process, id). TPU devices follow the torus as
`jax.experimental.mesh_utils` lays it out, several slices with the first axes between them. Devices that the user
gives are kept in the user's order; a list of TPU devices has none that a mesh could want (host by host, 2 x 2 chips
each), so it is laid out along the torus too, if it fills a box of it.

    shape (16, 16) on a v5e slice of 16 x 16 chips       each axis is a ring of direct links
    shape (256,)                                         one ring through both dims of the torus

Only an axis that runs along whole dims of the torus has its reduce-scatters done by rings: over the flattened (256,)
XLA:TPU sends an all-reduce instead, twice the bytes.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
from jax.experimental import mesh_utils

from jaxpar._errors import MeshError


class Device(Hashable, Protocol):
    """As much of a `jax.Device` as a mesh needs to know."""

    @property
    def id(self) -> int: ...

    @property
    def process_index(self) -> int: ...

    @property
    def platform(self) -> str: ...


def arrange_devices(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """Order devices for a mesh of `shape`: later axes inside a host, TPU axes along the torus.

    Args:
        shape: Axis sizes, whose product is the number of devices.
        devices: Devices in any order.

    Returns:
        An object array of devices of `shape`.
    """
    if devices[0].platform == "tpu":
        return _arrange_tpu(shape, devices)
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return object_array(ordered).reshape(shape)


def arrange_given(shape: tuple[int, ...], devices: Sequence[Device] | np.ndarray) -> np.ndarray:
    """Devices that the user chose: a list of TPU devices along the torus, all others in the user's order.

    Args:
        shape: As for `arrange_devices`.
        devices: An array says where each device stands (row-major); a list of TPU devices only which they are.
    """
    if not isinstance(devices, np.ndarray) and devices[0].platform == "tpu" and _fill_boxes(devices):
        return arrange_devices(shape, devices)
    return object_array(list(np.asarray(devices, dtype=object).ravel())).reshape(shape)


def object_array(devices: Sequence[Device]) -> np.ndarray:
    """A flat object array; NumPy is kept from looking inside the devices."""
    array = np.empty(len(devices), dtype=object)
    array[:] = list(devices)
    return array


def check_unique(devices: Sequence[Device]) -> None:
    """Raise `MeshError` if a device is listed twice."""
    seen: dict[Device, int] = {}
    for position, device in enumerate(devices):
        if device in seen:
            raise MeshError(
                f"init_device_mesh: devices[{seen[device]}] and devices[{position}] are the same device, {device}. "
                "A device can stand at one place of a mesh only. List each device once."
            )
        seen[device] = position


def slice_shape(shape: tuple[int, ...], num_slices: int) -> tuple[int, ...] | None:
    """Split `num_slices` over the leading axes: the part of each axis that runs between slices.

    Returns None if the slices cannot be laid along the axes, e.g. 4 slices over axes (3, 8).
    """
    between = []
    for size in shape:
        factor = math.gcd(size, num_slices)
        between.append(factor)
        num_slices //= factor
    return tuple(between) if num_slices == 1 else None


def _fill_boxes(devices: Sequence[Device]) -> bool:
    """Whether the chips of each slice fill a box of its torus."""
    slices: dict[int, list[tuple[int, ...]]] = {}
    for device in devices:
        place = (*getattr(device, "coords", ()), getattr(device, "core_on_chip", 0))
        slices.setdefault(getattr(device, "slice_index", 0), []).append(place)
    return all(
        math.prod(max(along) - min(along) + 1 for along in zip(*places, strict=True)) == len(places)
        for places in slices.values()
    )


def _arrange_tpu(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    between = slice_shape(shape, num_slices)
    if num_slices == 1 or between is None:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    within = tuple(size // factor for size, factor in zip(shape, between, strict=True))
    return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
