"""What every collective checks first: that it runs inside `shard_map`, over axes that are there.

    manual_axes("all_reduce", ("dp", "tp"))   ->   ManualAxes(names=("dp", "tp"), sizes=(2, 4))

Axes of size 1 cost nothing: data moves over the `wide` axes only; over a `unit` axis only the type changes.
"""

import difflib
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar._compat import forget_axes, varying_axes
from jaxpar._errors import CollectiveError
from jaxpar.mesh._axes import AxisNames


@dataclass(frozen=True)
class ManualAxes:
    """The axes that a collective runs over, in the order given: the first varies slowest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Devices that take part in one group."""
        return math.prod(self.sizes)

    @property
    def wide(self) -> tuple[str, ...]:
        """Axes with more than one device."""
        return tuple(name for name, size in zip(self.names, self.sizes, strict=True) if size > 1)

    @property
    def unit(self) -> tuple[str, ...]:
        """Axes of one device."""
        return tuple(name for name in self.names if name not in self.wide)

    def rank(self) -> jax.Array:
        """This device's position in the group, row-major over the axes."""
        return lax.axis_index(self.wide)


def manual_axes(where: str, axis: AxisNames) -> ManualAxes:
    """Check that `where` is called inside `shard_map` over these axes.

    Raises:
        CollectiveError: Outside shard_map, unknown or repeated axis, no axis, or `check_vma=False`.
    """
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(str(name) for name in mesh.manual_axes)
    if not manual:
        raise CollectiveError(
            f"{where} over {names} is called outside shard_map. A collective by axis name joins the devices of a "
            "mesh axis, and only code inside shard_map runs once per device. Write jax.shard_map(lambda x: "
            f"{where}(x, {names[0] if names else 'dp'!r}, ...), mesh=mesh, in_specs=..., out_specs=...)."
        )
    if not names:
        raise CollectiveError(f"{where} names no axis. Name at least one of {manual}.")
    for name in names:
        if name not in manual:
            raise CollectiveError(_unknown_axis(where, name, manual))
    if len(set(names)) != len(names):
        raise CollectiveError(
            f"{where}: an axis is named twice in {names}. Each axis can be joined once only."
        )
    axes = ManualAxes(names, tuple(mesh.shape[name] for name in names))
    if not varying_axes(jax.typeof(lax.axis_index(names))):
        raise CollectiveError(
            f"{where} over {names} is called under check_vma=False. Without the types that tell equal values from "
            "different ones, a sum is differentiated as another sum and gradients grow by the number of devices. "
            "Leave check_vma out of shard_map: True is the default."
        )
    return axes


def to_varying(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Type a value as different on each device of these axes; no data moves."""
    missing = tuple(name for name in names if name not in varying_axes(jax.typeof(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def equal_over_unit(x: jax.Array, axes: ManualAxes) -> jax.Array:
    """Type a value as equal over the axes of size 1; nothing is emitted."""
    return forget_axes(x, axes.unit)


def sum_over(x: jax.Array, axes: ManualAxes) -> jax.Array:
    """The sum over the group, invariant; booleans, at most one of which may be set, stay booleans."""
    x = equal_over_unit(to_varying(x, axes.names), axes)
    if not axes.wide:
        return x
    wire = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    return lax.psum(wire, axes.wide).astype(x.dtype)


def only_on(root: int, x: jax.Array, axes: ManualAxes) -> jax.Array:
    """`x` on the root, zeros on the other devices of its group."""
    return jnp.where(axes.rank() == root, x, jnp.zeros_like(x)) if axes.wide else to_varying(x, axes.names)


def check_root(where: str, root: int, axes: ManualAxes) -> None:
    """Raise `CollectiveError` unless the root is a rank of the group."""
    if not 0 <= root < axes.num_ranks:
        raise CollectiveError(
            f"{where}: root={root} is not on {_sized(axes)}, whose ranks are 0 to {axes.num_ranks - 1}. The root is "
            "a position on the axis, not a device id or a rank of the whole mesh. Write root=0 for the first."
        )


def check_op(where: str, op: str, known: tuple[str, ...]) -> None:
    """Raise `CollectiveError` unless the op is one that `where` has."""
    if op not in known:
        near = difflib.get_close_matches(str(op), known, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CollectiveError(f"{where}: op {op!r} is unknown. Ops are {', '.join(map(repr, known))}.{hint}")


def check_dim(where: str, leaf: str, dim: int, ndim: int, *, name: str = "dim") -> int:
    """The dim counted from the front; `CollectiveError` if the array has no such dim."""
    if not -ndim <= dim < ndim:
        raise CollectiveError(
            f"{where}: {name}={dim} of {leaf} is out of range: it has {ndim} dim{'' if ndim == 1 else 's'}. Choose a "
            "dim that each device's own block has."
        )
    return dim % ndim


def check_divisible(where: str, leaf: str, x: jax.Array, dim: int, axes: ManualAxes) -> None:
    """Raise `CollectiveError` unless each device can get an equal part of the dim."""
    size, ranks = x.shape[dim], axes.num_ranks
    if size % ranks:
        raise CollectiveError(
            f"{where}: dim {dim} of {leaf} with shape {x.shape} does not divide over {_sized(axes)}: {size} = "
            f"{size // ranks} * {ranks} + {size % ranks}. Every device gets an equal part. Choose another dim, or "
            f"pad dim {dim} to {-(-size // ranks) * ranks} first (jnp.pad)."
        )


def _sized(axes: ManualAxes) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in zip(axes.names, axes.sizes, strict=True))
    return f"{'axis' if len(axes.names) == 1 else 'axes'} {sizes}"


def _unknown_axis(where: str, name: object, manual: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(name), manual, n=2, cutoff=0.4)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return (
        f"{where}: axis {name!r} is not a manual axis here; the enclosing shard_map has {manual}.{hint} Only axes "
        "that shard_map takes over can be communicated over by name. Use one of them, or add the axis to "
        "shard_map's mesh and axis_names."
    )
