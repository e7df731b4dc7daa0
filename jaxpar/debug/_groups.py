"""Which devices a collective joins, and which mesh axes that means.

XLA writes the same groups in three ways; over a mesh (dp=2, tp=2) with devices 0 1 / 2 3:

    {{0,2},{1,3}}                            the lists themselves
    [2,2]<=[2,2]T(1,0)                       an iota of shape [2,2], transposed, reshaped to [groups, members]
    mesh['dp'=2,'tp'=2] {'dp'}               the mesh and the axes inside a group

Ids are positions in the flattened device mesh, not `Device.id`. An axis belongs to a collective if the ids of a
group differ along it. Groups that are no union of whole axes have no name.
"""

import itertools
import re
from collections.abc import Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:,?\s*device_ids=\(?(?P<ids>\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\[?[\d,\s]+\]?)\)?)?"
    r",?\s*\{(?P<axes>[^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")


def replica_groups(attributes: str, num_devices: int) -> Groups:
    """The groups in an instruction's attributes; none or `{}` means all devices in one group."""
    if found := _MESH.search(attributes):
        return _from_mesh(found.group("mesh"), found.group("axes"), found.group("ids"))
    if found := re.search(r"replica_groups=" + _IOTA.pattern, attributes):
        return _as_groups(_iota(*found.groups()))
    found = _LISTS.search(attributes)
    lists = re.findall(r"\{([\d,\s]*)\}", found.group(1)) if found else []
    groups = tuple(tuple(int(i) for i in members.split(",")) for members in lists if members.strip())
    return groups or (tuple(range(num_devices)),)


def source_target_pairs(attributes: str) -> Groups:
    """The (source, target) pairs of a collective-permute, without those that send to themselves."""
    found = _PAIRS.search(attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found.group(1)) if found else []
    return tuple((int(source), int(target)) for source, target in pairs if source != target)


def axes_of_groups(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Axes that a group spans, in mesh order; None if the groups are not unions of whole axes."""
    names = tuple(axis_sizes)
    coords = _coordinates(groups[0], axis_sizes)
    inside = tuple(k for k in range(len(names)) if len(set(coords[k])) > 1)
    ids = np.arange(np.prod(tuple(axis_sizes.values()), dtype=int)).reshape(tuple(axis_sizes.values()))
    rows = _rows(ids, list(inside))
    same = {frozenset(row) for row in rows.tolist()} == {frozenset(group) for group in groups}
    return tuple(names[k] for k in inside) if same else None


def axes_of_pairs(pairs: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Axes along which a source differs from its target, in mesh order."""
    source = _coordinates([pair[0] for pair in pairs], axis_sizes)
    target = _coordinates([pair[1] for pair in pairs], axis_sizes)
    return tuple(
        name for name, a, b in zip(axis_sizes, source, target, strict=True) if not np.array_equal(a, b)
    )


def mesh_in_text(text: str) -> dict[str, int] | None:
    """Axis sizes of the first mesh printed in a module's replica groups, if it prints any."""
    found = _MESH.search(text)
    return _mesh_sizes(found.group("mesh")) if found and not found.group("ids") else None


def _coordinates(ids: tuple[int, ...] | list[int], axis_sizes: Mapping[str, int]) -> tuple[np.ndarray, ...]:
    return np.unravel_index(np.asarray(ids), tuple(axis_sizes.values()))


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in rows.tolist())


def _ints(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", text)]


def _iota(shape: str, dims: str, permutation: str | None) -> np.ndarray:
    ids = np.arange(np.prod(_ints(dims), dtype=int)).reshape(_ints(dims))
    return (ids.transpose(_ints(permutation)) if permutation else ids).reshape(_ints(shape))


def _mesh_sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"'?([^',=\s]+)'?=(\d+)", text)}


def _from_mesh(mesh: str, axes: str, ids: str | None) -> Groups:
    """`'x':(2)4` inside the braces is a part of an axis: size 4, after a major part of size 2 is split off."""
    parts = re.findall(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?", axes)
    used = {name: (int(before or 1), int(size or 0)) for name, before, size in parts}
    shape: list[int] = []
    inside: list[int] = []
    for name, size in _mesh_sizes(mesh).items():
        before, part = used.get(name, (1, 0))
        inside += [len(shape) + 1] if name in used else []
        shape += [before, part or size, size // before // (part or size)]
    return _as_groups(_rows(_device_ids(ids, shape), inside))


def _device_ids(ids: str | None, shape: list[int]) -> np.ndarray:
    if ids is None:
        return np.arange(np.prod(shape, dtype=int)).reshape(shape)
    iota = _IOTA.match(ids)
    return (_iota(*iota.groups()) if iota else np.asarray(_ints(ids))).reshape(shape)


def _rows(ids: np.ndarray, inside: list[int]) -> np.ndarray:
    outside = [k for k in range(ids.ndim) if k not in inside]
    members = int(np.prod([ids.shape[k] for k in inside], dtype=int))
    return ids.transpose(list(itertools.chain(outside, inside))).reshape(-1, members)
