"""Checks on axis names and sizes: what a user may name, and what the error says when it is not there."""

import difflib
import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from jaxpar._errors import MeshError

AxisNames: TypeAlias = str | Sequence[str]


class HasAxes(Protocol):
    """A mesh of either kind, as far as its axis names go."""

    @property
    def axis_names(self) -> tuple[str, ...]: ...


def as_names(mesh: HasAxes, axes: AxisNames) -> tuple[str, ...]:
    """One name or several as a tuple, each known to the mesh and named once; any order.

    Raises:
        MeshError: A name is unknown (the message names the nearest) or repeated.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if name not in mesh.axis_names:
            raise MeshError(_unknown(mesh, name))
    if len(set(names)) != len(names):
        raise MeshError(
            f"Axis {_first_repeated(names)!r} is named twice in {names} of {mesh!r}. An axis can be used once only. "
            f"Name each axis once: {tuple(dict.fromkeys(names))}."
        )
    return names


def select_axes(mesh: HasAxes, axes: AxisNames) -> tuple[str, ...]:
    """As `as_names`, and in mesh order, so that the groups of the selection are unambiguous.

    Raises:
        MeshError: A name is unknown or repeated, none is given, or the order is not the mesh's.
    """
    names = as_names(mesh, axes)
    if not names:
        raise MeshError(f"No axis named for {mesh!r}. Name at least one of {mesh.axis_names}.")
    ordered = tuple(name for name in mesh.axis_names if name in names)
    if names != ordered:
        raise MeshError(
            f"Axis order {names} is not the order of the mesh, {mesh.axis_names}. Ranks count row-major in mesh "
            f"order, so another order would name other groups. Write {ordered}."
        )
    return names


def check_new_names(where: str, names: Sequence[str], *, taken: Sequence[str] = ()) -> None:
    """Raise `MeshError` unless the names are identifiers, different, and not taken."""
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise MeshError(
                f"{where}: axis name {name!r} is not an identifier. Axes are named in code and in reports. "
                "Choose a name such as 'dp' or 'data_parallel'."
            )
        if name in taken:
            raise MeshError(
                f"{where}: axis name {name!r} is taken by another axis of the mesh, whose axes would be "
                f"{(*taken, *names)}. Axis names must be unique. Choose another name."
            )
    if len(set(names)) != len(names):
        raise MeshError(
            f"{where}: axis name {_first_repeated(names)!r} is given twice in {tuple(names)}. Axis names must be "
            "unique. Choose another name for one of them."
        )


def infer_shape(
    where: str, shape: Sequence[int], names: Sequence[str], total: int, total_is: str
) -> tuple[int, ...]:
    """Check sizes against names and replace one -1 by what is left of `total`.

    Args:
        where: Function that the message names.
        shape: Sizes, at most one of them -1.
        names: Axis names, as many as sizes.
        total: What the sizes must multiply to, if one is inferred.
        total_is: How the message introduces the total, e.g. `the number of devices is`.

    Raises:
        MeshError: Counts differ, a size is neither positive nor -1, or -1 cannot be inferred.
    """
    if len(shape) != len(names):
        raise MeshError(
            f"{where}: {len(shape)} sizes {tuple(shape)} for {len(names)} axis names {tuple(names)}. "
            "Each axis needs one size and one name."
        )
    bad = [size for size in shape if size != -1 and size < 1]
    if bad or list(shape).count(-1) > 1:
        raise MeshError(
            f"{where}: shape {tuple(shape)} is not possible. Sizes are at least 1, and one of them at most may be "
            "-1, which takes what the others leave."
        )
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape and total % known:
        raise MeshError(
            f"{where}: -1 in shape {tuple(shape)} cannot be inferred: {total_is} {total}, and {total} / {known} is "
            f"not whole. The other sizes must divide {total}."
        )
    return tuple(total // known if size == -1 else int(size) for size in shape)


def _first_repeated(names: Sequence[str]) -> str:
    return next(name for position, name in enumerate(names) if name in names[:position])


def _unknown(mesh: HasAxes, name: object) -> str:
    nearest = difflib.get_close_matches(str(name), mesh.axis_names, n=1, cutoff=0.4)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Axis {name!r} is not in {mesh!r}, whose axes are {mesh.axis_names}.{hint}"
