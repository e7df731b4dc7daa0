"""Placements, `PartitionSpec` and `NamedSharding` of the same array, turned into each other.

placements over (dp, tp)            layout: axes of each dim, outermost first      PartitionSpec
(Shard(0), Shard(0))                ((dp, tp), ())                                 P(("dp", "tp"))
(Shard(0, after=("tp",)), Shard(0)) ((tp, dp), ())                                 P(("tp", "dp"))
(Replicate(), Partial())            ((), ()) and tp: sum                           P(unreduced={"tp"})
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar._errors import PlacementError
from jaxpar.mesh._init_mesh import MeshLike, as_jax_mesh, axes_of
from jaxpar.mesh._placements import Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Layout:
    """Which axes split each dim, outermost first, and which axes hold terms still to be reduced.

    Attributes:
        dims: For each dim of the array the axes that split it.
        partial: Pairs (axis, op) in mesh order.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes that hold terms."""
        return tuple(axis for axis, _ in self.partial)

    def without(self, axes: Sequence[str]) -> "Layout":
        """The layout with these axes replicated."""
        dims = tuple(tuple(axis for axis in names if axis not in axes) for names in self.dims)
        return Layout(dims, tuple(pair for pair in self.partial if pair[0] not in axes))


def placements_to_spec(placements: Sequence[Placement], mesh: MeshLike, ndim: int) -> PartitionSpec:
    """The `PartitionSpec` of placements, one for each axis of the mesh or slice.

    Args:
        placements: One placement for each selected axis, in mesh order. Axes not selected replicate.
        mesh: Mesh or slice.
        ndim: Number of dims of the array.

    Returns:
        The spec; `Partial("sum")` becomes `unreduced`.

    Raises:
        PlacementError: The count is not the mesh's, a dim is not the array's, ops are mixed, an op is not `sum`.

    Example:
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
        >>> print(placements_to_spec((Shard(1), Shard(-1)), mesh, 2))
        P(None, ('dp', 'tp'))
    """
    return layout_to_spec(make_layout(placements, mesh, ndim))


def placements_to_sharding(placements: Sequence[Placement], mesh: MeshLike, ndim: int) -> NamedSharding:
    """The `NamedSharding` of placements; as `placements_to_spec`.

    JAX keeps unreduced axes on meshes with Explicit axes only, so with a `Partial` the sharding's mesh is the twin of
    `mesh` with Explicit axes.

    Example:
        >>> from jaxpar.mesh import init_device_mesh
        >>> placements_to_sharding((Shard(0),), init_device_mesh((8,), ("dp",)), 2).spec[0]
        'dp'
    """
    layout = make_layout(placements, mesh, ndim)
    jax_mesh = as_jax_mesh(mesh)
    return NamedSharding(explicit_twin(jax_mesh) if layout.partial else jax_mesh, layout_to_spec(layout))


def spec_to_placements(
    spec: PartitionSpec | NamedSharding, mesh: MeshLike | None = None, *, ndim: int | None = None
) -> tuple[Placement, ...]:
    """The placements of a `PartitionSpec` or `NamedSharding`, one for each axis of the mesh or slice.

    Args:
        spec: Spec, or sharding whose spec is meant.
        mesh: Mesh or slice; default the sharding's own.
        ndim: Number of dims of the array; default as many as the spec names.

    Raises:
        PlacementError: A bare spec without a mesh, or one with unconstrained dims.

    Example:
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
        >>> spec_to_placements(PartitionSpec(("tp", "dp")), mesh)
        (Shard(dim=0, after=('tp',)), Shard(dim=0))
    """
    if isinstance(spec, NamedSharding):
        mesh = spec.mesh if mesh is None else mesh  # pyright: ignore[reportAssignmentType]
        spec = spec.spec
    if mesh is None:
        raise PlacementError("spec_to_placements: a PartitionSpec does not say its mesh. Pass mesh=...")
    layout = spec_to_layout(spec, len(spec.partitions) if ndim is None else ndim, as_jax_mesh(mesh))
    return layout_to_placements(layout, mesh)


def make_layout(
    placements: Sequence[Placement], mesh: MeshLike, ndim: int, base: Layout | None = None
) -> Layout:
    """The layout of placements over the axes of a mesh or slice; other axes stay as in `base` (default: replicated).

    On a slice, an axis that already splits its dim keeps its place, and a new one splits what the others left.
    """
    names = axes_of(mesh)
    wanted = _normalised(placements, mesh, ndim)
    base = Layout(((),) * ndim) if base is None else base
    whole = set(names) == set(as_jax_mesh(mesh).axis_names)
    dims = tuple(_dim_axes(dim, wanted, base.dims[dim], keep_order=not whole) for dim in range(ndim))
    partial = {axis: op for axis, op in base.partial if axis not in names}
    partial |= {axis: place.op for axis, place in wanted.items() if isinstance(place, Partial)}
    ordered = tuple((axis, partial[axis]) for axis in as_jax_mesh(mesh).axis_names if axis in partial)
    _check_after(wanted, dims)
    return Layout(dims, ordered)


def layout_to_placements(layout: Layout, mesh: MeshLike) -> tuple[Placement, ...]:
    """The placement of each selected axis of a mesh."""
    ops = dict(layout.partial)
    order = as_jax_mesh(mesh).axis_names
    dim_of = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}

    def placement(axis: str) -> Placement:
        if axis in ops:
            return Partial(ops[axis])
        if axis not in dim_of:
            return Replicate()
        axes = layout.dims[dim_of[axis]]
        earlier = axes[: axes.index(axis)]
        return Shard(
            dim_of[axis], tuple(other for other in earlier if order.index(other) > order.index(axis))
        )

    return tuple(placement(axis) for axis in axes_of(mesh))


def layout_to_spec(layout: Layout) -> PartitionSpec:
    """The `PartitionSpec` of a layout, without trailing replicated dims."""
    others = [f"{axis}: {op}" for axis, op in layout.partial if op != "sum"]
    if others:
        raise PlacementError(
            f"Partial over {', '.join(others)} has no PartitionSpec: JAX's unreduced axes are sums. "
            "Arrays with other ops are PlacedArrays; reduce them with redistribute(x, [Replicate()])."
        )
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in layout.dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries, unreduced=frozenset(layout.partial_axes))


def spec_to_layout(spec: PartitionSpec, ndim: int, mesh: jax.sharding.Mesh) -> Layout:
    """The layout that a spec says for an array of `ndim` dims."""
    entries = spec.partitions + (None,) * (ndim - len(spec.partitions))
    if PartitionSpec.UNCONSTRAINED in entries:
        raise PlacementError(
            f"{spec} leaves a dim unconstrained, so it has no placements. Name its axes, or None."
        )
    dims = tuple(
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries
    )
    return Layout(dims, tuple((axis, "sum") for axis in mesh.axis_names if axis in spec.unreduced))


def explicit_twin(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The same devices with Explicit axes, on which JAX keeps unreduced arrays."""
    return _with_axis_types(mesh, AxisType.Explicit)


def auto_twin(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The same devices with Auto axes."""
    return _with_axis_types(mesh, AxisType.Auto)


def same_devices(one: jax.sharding.Mesh, other: jax.sharding.Mesh) -> bool:
    """Whether two meshes differ in their axis types at most."""
    return auto_twin(one) == auto_twin(other)


def _with_axis_types(mesh: jax.sharding.Mesh, axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * len(mesh.axis_names))


def _normalised(placements: Sequence[Placement], mesh: MeshLike, ndim: int) -> dict[str, Placement]:
    """Each selected axis' placement with a dim that is not negative; checks all that can be wrong with them."""
    names = axes_of(mesh)
    placements = (placements,) if isinstance(placements, Shard | Replicate | Partial) else tuple(placements)
    if len(placements) != len(names):
        raise PlacementError(
            f"{len(placements)} placements {placements} for the {len(names)} axes {names} of "
            f"{mesh!r}. Give one placement for each axis, in mesh order."
        )
    ops = {place.op for place in placements if isinstance(place, Partial)}
    if len(ops) > 1:
        raise PlacementError(
            f"Placements {placements} mix the reduce ops {sorted(ops)}. Different reductions do not commute, so the "
            "value would not be defined. Use one op for all axes."
        )
    return {axis: _normalised_one(place, axis, ndim) for axis, place in zip(names, placements, strict=True)}


def _normalised_one(place: Placement, axis: str, ndim: int) -> Placement:
    if not isinstance(place, Shard | Replicate | Partial):
        raise PlacementError(
            f"{place!r} for axis {axis!r} is not a placement. Write Shard(dim), Replicate() or Partial()."
        )
    if not isinstance(place, Shard):
        return place
    if not -ndim <= place.dim < ndim:
        allowed = (
            f"Its dims are {-ndim} to {ndim - 1}."
            if ndim
            else "A scalar has no dim to split; use Replicate()."
        )
        raise PlacementError(
            f"{place!r} for axis {axis!r}: dim {place.dim} does not exist in an array of rank {ndim}. {allowed}"
        )
    return Shard(place.dim % ndim, place.after)


def _dim_axes(
    dim: int, wanted: dict[str, Placement], before: tuple[str, ...], *, keep_order: bool
) -> tuple[str, ...]:
    """Axes that shall split `dim`, outermost first."""
    on_dim = {axis: place for axis, place in wanted.items() if isinstance(place, Shard) and place.dim == dim}
    if not keep_order:
        return _nesting(on_dim)
    stay = tuple(axis for axis in before if axis not in wanted or axis in on_dim)
    new = {axis: place for axis, place in on_dim.items() if axis not in stay}
    return (*stay, *_nesting(new))


def _nesting(on_dim: dict[str, Shard]) -> tuple[str, ...]:
    """Mesh order, but each axis behind those that its placement names in `after`."""
    order: list[str] = []

    def visit(axis: str, trail: tuple[str, ...]) -> None:
        if axis in trail:
            raise PlacementError(
                f"Axes {(*trail, axis)} are each said to split a dim after the other. Drop one of the `after`s."
            )
        for other in on_dim[axis].after:
            if other in on_dim:
                visit(other, (*trail, axis))
        if axis not in order:
            order.append(axis)

    for axis in on_dim:
        visit(axis, ())
    return tuple(order)


def _check_after(wanted: dict[str, Placement], dims: tuple[tuple[str, ...], ...]) -> None:
    for axis, place in wanted.items():
        if not isinstance(place, Shard):
            continue
        earlier = dims[place.dim][: dims[place.dim].index(axis)]
        missing = [other for other in place.after if other not in earlier]
        if missing:
            raise PlacementError(
                f"{place!r} for axis {axis!r}: axis {missing[0]!r} does not split dim {place.dim} before {axis!r} does; "
                f"the dim is split by {dims[place.dim]}, outermost first. Name in `after` only axes that do."
            )
