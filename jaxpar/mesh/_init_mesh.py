"""Making a mesh, and taking meshes of either kind: jaxpar's `DeviceMesh` and the plain `jax.sharding.Mesh`.

init_device_mesh((2, -1), ("dp", "tp"))     8 devices: dp=2, tp=4
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from jaxpar._errors import MeshError
from jaxpar.mesh._axes import AxisNames, as_names, check_new_names, infer_shape
from jaxpar.mesh._devices import Device, arrange_devices, arrange_given, check_unique
from jaxpar.mesh._mesh import DeviceMesh, auto_mesh

MeshLike: TypeAlias = DeviceMesh | jax.sharding.Mesh


def init_device_mesh(
    shape: int | Sequence[int],
    axis_names: AxisNames,
    *,
    devices: Sequence[Device] | np.ndarray | None = None,
) -> DeviceMesh:
    """Lay devices out along named axes; the last axis varies fastest and stays inside a host where it can.

    PyTorch: `init_device_mesh` (row M1). Nothing moves and no communicator is opened.

    On TPUs choose axis sizes that are dims of the torus, such as `(16, 16)` on a v5e slice of 256 chips. Each axis then is
    one ring of direct links, and a sum that is scattered over it (the gradients of `fully_shard`) is a reduce-scatter.
    Over one axis of 256, XLA:TPU makes it an all-reduce, which sends twice as much.

    Args:
        shape: Size of each axis, 1 allowed; one may be -1 and takes what the others leave.
        axis_names: Name of each axis.
        devices: Devices in the order they shall have, row-major; a list of TPU devices is laid out along the torus (to
            say where each one stands, give an array). Default: all devices of all processes, ordered by jaxpar.

    Returns:
        The mesh, over all the devices.

    Raises:
        MeshError: Sizes and names do not match, the sizes do not multiply to the number of devices, a name is
            repeated or not an identifier, a device is listed twice.

    Example:
        >>> init_device_mesh((2, -1), ("dp", "tp"))
        DeviceMesh((dp=2, tp=4), 'cpu', devices=8)
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    check_new_names("init_device_mesh", names)
    given = jax.devices() if devices is None else devices
    chosen = list(np.asarray(given, dtype=object).ravel())
    check_unique(chosen)
    full = infer_shape("init_device_mesh", sizes, names, len(chosen), "the number of devices is")
    _check_device_count(full, names, chosen, given=devices is not None)
    arranged = arrange_devices(full, chosen) if devices is None else arrange_given(full, devices)
    return DeviceMesh(auto_mesh(arranged, names))


def as_jax_mesh(mesh: MeshLike) -> jax.sharding.Mesh:
    """The `jax.sharding.Mesh` of a mesh; for a slice the whole one, on which arrays lie.

    Example:
        >>> as_jax_mesh(init_device_mesh((2, 4), ("dp", "tp"))["tp"]).axis_names
        ('dp', 'tp')
    """
    return mesh.jax_mesh if isinstance(mesh, DeviceMesh) else mesh


def as_device_mesh(mesh: MeshLike) -> DeviceMesh:
    """A mesh as `DeviceMesh`; a plain `jax.sharding.Mesh` with all its axes selected.

    Example:
        >>> as_device_mesh(jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,)))
        DeviceMesh((dp=8), 'cpu', devices=8)
    """
    return mesh if isinstance(mesh, DeviceMesh) else DeviceMesh(mesh)


def axes_of(mesh: MeshLike) -> tuple[str, ...]:
    """Names of the selected axes of a mesh, in mesh order.

    Example:
        >>> axes_of(init_device_mesh((2, 4), ("dp", "tp"))["tp"])
        ('tp',)
    """
    return mesh.axis_names


def axis_size(mesh: MeshLike, axes: AxisNames) -> int:
    """Number of ranks along an axis, or the product over several.

    Raises:
        MeshError: An axis is not in the mesh (the message names the nearest that is).

    Example:
        >>> axis_size(init_device_mesh((2, 4), ("dp", "tp")), ("dp", "tp"))
        8
    """
    return math.prod(as_jax_mesh(mesh).shape[name] for name in as_names(mesh, axes))


def _check_device_count(
    shape: tuple[int, ...], names: tuple[str, ...], devices: list[Device], *, given: bool
) -> None:
    needed, there = math.prod(shape), len(devices)
    if needed == there:
        return
    product = " * ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
    source = "devices" if given else "jax.devices()"
    if needed < there:
        cure = f"To use {needed} of them write devices={source}[:{needed}]."
    elif devices and devices[0].platform == "cpu" and len({d.process_index for d in devices}) == 1:
        cure = f'For CPU devices write jax.config.update("jax_num_cpu_devices", {needed}) before JAX starts.'
    else:
        cure = "Make an axis smaller, or write -1 for one of them."
    raise MeshError(
        f"init_device_mesh: {product} = {needed} devices, but {source} has {there}. A mesh takes every device that "
        f"it is given once, so that none idles unnoticed. {cure}"
    )
