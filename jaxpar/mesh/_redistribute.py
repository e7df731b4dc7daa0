"""Changing the placements of an array: exactly the collectives of the plan, compiled once, differentiable.

    x = distribute(jnp.arange(8.0), mesh, [Shard(0)])     0 1 | 2 3 | 4 5 | 6 7
    y = redistribute(x, [Replicate()])                    one all-gather; the gradient of y is split again, for free

Outside `jit` the source is read from the array. Inside `jit` an array does not say how it lies: there the partitioner
brings it to the target, or the plan is run if the source is named. A partial source counts as replicated in the
backward pass, since the sum's gradient is the same for every term.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar._errors import PlacementError
from jaxpar.mesh._init_mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._layout import (
    Layout,
    auto_twin,
    explicit_twin,
    layout_to_placements,
    layout_to_spec,
    make_layout,
    same_devices,
    spec_to_layout,
)
from jaxpar.mesh._mesh import DeviceMesh
from jaxpar.mesh._placed import (
    Held,
    PlacedArray,
    check_even,
    extent_of,
    hold,
    is_traced,
    release,
    stack_axes,
    stacked_shape,
)
from jaxpar.mesh._placements import Partial, Placement, Replicate, Shard
from jaxpar.mesh._plan import Extent, RedistributionPlan, plan_steps
from jaxpar.mesh._steps import run_steps


def redistribute(
    x: jax.Array | PlacedArray,
    placements: Sequence[Placement],
    mesh: MeshLike | None = None,
    *,
    source: Sequence[Placement] | None = None,
    pad: bool = False,
) -> jax.Array | PlacedArray:
    """Bring an array to other placements: the same value, lying otherwise.

    Moves what `redistribution_plan` says, as one compiled program; nothing if the placements are the array's own.
    PyTorch: `DTensor.redistribute` (row D14, table 3.3). On a slice of the mesh only the slice's axes change; a new
    axis splits what the others left, so tensor and data parallel axes are added one after the other.

    Backward: the gradient is redistributed to the source placements, a partial source counting as replicated.

    Args:
        x: Array on a mesh.
        placements: One for each axis of `mesh`.
        mesh: The array's mesh or a slice of it; default all axes of the array's mesh.
        source: Placements that x has, one for each axis of the whole mesh: only inside `jit`, where an array does
            not say them. With it exactly the planned collectives run; without it XLA's partitioner chooses.
        pad: Allow dims that do not divide; the result is then a `PlacedArray`, if one does not.

    Returns:
        The array; a `PlacedArray` if a dim is padded or an op is not `sum`.

    Raises:
        PlacementError: Wrong placements, another mesh, uneven dims without `pad`, an array without a mesh.

    Example:
        >>> from jaxpar.mesh import Shard, distribute, init_device_mesh, placements_of
        >>> x = distribute(jnp.arange(8.0), init_device_mesh((8,), ("dp",)), [Shard(0)])
        >>> placements_of(redistribute(x, [Replicate()]))
        (Replicate(),)
    """
    before = None if source is None else _tuple(source)
    request = _Request(_tuple(placements), mesh, before, pad or isinstance(x, PlacedArray))
    return _redistribute(x, request)


def full_array(x: jax.Array | PlacedArray, mesh: MeshLike | None = None) -> jax.Array:
    """The whole value on every device of the array's mesh, with terms reduced and padding gone.

    All-gathers and all-reduces as planned; nothing for a replicated array, which one process may therefore ask for
    alone. For a sharded array every process of the mesh must call. PyTorch: `DTensor.full_tensor` (row D13).

    Args:
        x: Array; one that does not lie on a mesh is returned as it is.
        mesh: Mesh, needed only inside `jit` for arrays that do not say theirs.

    Returns:
        The array, replicated. `np.asarray` of it needs no further communication.

    Example:
        >>> from jaxpar.mesh import Shard, distribute, init_device_mesh
        >>> x = distribute(jnp.arange(8.0), init_device_mesh((8,), ("dp",)), [Shard(0)])
        >>> print(full_array(x))
        [0. 1. 2. 3. 4. 5. 6. 7.]
    """
    on = mesh if mesh is not None else _mesh_of(x)
    if on is None:
        return jnp.asarray(x)
    whole = as_jax_mesh(on)
    y = redistribute(x, (Replicate(),) * len(whole.axis_names), None if mesh is None else whole)
    assert not isinstance(y, PlacedArray)
    return y


def placements_of(x: jax.Array | PlacedArray, mesh: MeshLike | None = None) -> tuple[Placement, ...]:
    """How an array (or a `jax.ShapeDtypeStruct`) lies: one placement for each axis of its mesh, or of a slice.

    PyTorch: `DTensor.placements` (row D15). Read from the array's `NamedSharding`.

    Raises:
        PlacementError: The array does not lie on a mesh, or is traced with Auto axes and so does not say.

    Example:
        >>> from jaxpar.mesh import Shard, distribute, init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
        >>> placements_of(distribute(jnp.ones((8, 8)), mesh, [Replicate(), Shard(1)]))
        (Replicate(), Shard(dim=1))
    """
    if isinstance(x, PlacedArray):
        return layout_to_placements(x.layout, x.mesh if mesh is None else mesh)
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    known = isinstance(sharding, NamedSharding) and (not is_traced(x) or _is_explicit(sharding))
    if not known:
        raise PlacementError(
            f"placements_of: {'a traced array' if is_traced(x) else f'an array with sharding {sharding}'} does not "
            "say how it lies on a mesh. Ask outside jit, or place it with distribute(x, mesh, placements)."
        )
    layout = spec_to_layout(sharding.spec, x.ndim, sharding.mesh)
    return layout_to_placements(layout, sharding.mesh if mesh is None else mesh)


def redistribution_plan(
    x: jax.Array | PlacedArray | jax.ShapeDtypeStruct,
    placements: Sequence[Placement],
    mesh: MeshLike | None = None,
    *,
    source: Sequence[Placement] | None = None,
) -> RedistributionPlan:
    """What `redistribute(x, placements, mesh)` will run: collectives, bytes each device sends, local shapes.

    Nothing runs and nothing is compiled.

    Args:
        x: Array on a mesh; or a `jax.ShapeDtypeStruct`, whose sharding says the source unless `source` does.
        placements: One for each axis of `mesh`.
        mesh: Mesh or slice; default the array's.
        source: Placements of x over the axes of the whole mesh, if x does not say them.

    Example:
        >>> from jaxpar.mesh import Shard, init_device_mesh
        >>> mesh = init_device_mesh((8,), ("dp",))
        >>> shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> redistribution_plan(shape, [Shard(1)], mesh, source=[Shard(0)]).collectives
        ('all-to-all',)
    """
    on = mesh if mesh is not None else _mesh_of(x)
    if on is None:
        raise PlacementError("redistribution_plan: x does not lie on a mesh. Pass mesh=...")
    whole = as_jax_mesh(on)
    before = placements_of(x, whole) if source is None else tuple(source)
    origin = x.layout if isinstance(x, PlacedArray) else make_layout(before, whole, len(x.shape))
    target = make_layout(placements, on, len(x.shape), base=origin)
    extent = extent_of(x.shape, x.dtype, whole)
    steps = plan_steps(extent, extent.drop_unit_axes(origin), extent.drop_unit_axes(target))
    title = f"{jnp.dtype(x.dtype)}{list(x.shape)}: {_short(origin, whole)} -> {_short(target, whole)}"
    return RedistributionPlan(steps, title)


# Running it.


@dataclass(frozen=True)
class _Request:
    """The arguments of `redistribute` that are not arrays."""

    placements: tuple[Placement, ...]
    mesh: MeshLike | None
    source: tuple[Placement, ...] | None
    pad: bool


@partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["layout", "target", "mesh", "unreduced"]
)
@dataclass(frozen=True)
class _Origin:
    """Where the gradient comes from and goes back to; no layout if the partitioner had the choice."""

    layout: Layout | None = None
    target: Layout | None = None
    mesh: jax.sharding.Mesh | None = None
    unreduced: PartitionSpec | None = None


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _redistribute(x: jax.Array | PlacedArray, request: _Request) -> jax.Array | PlacedArray:
    return _run(x, request)[0]


def _forward(x: jax.Array | PlacedArray, request: _Request) -> tuple[jax.Array | PlacedArray, _Origin]:
    y, origin = _run(x, request)
    before, after = (layout.partial if layout else () for layout in (origin.layout, origin.target))
    if after and after != before:
        raise PlacementError(
            f"redistribute to {request.placements} cannot be differentiated: terms of a value are not unique, so they "
            "have no gradient of their own. Differentiate before the array becomes Partial."
        )
    odd = [op for _, op in before if op not in ("sum", "avg") and not after]
    if odd:
        raise PlacementError(
            f"redistribute from Partial({odd[0]}) cannot be differentiated: only sums and means are linear in their "
            "terms. Differentiate after the reduction."
        )
    return y, origin


def _backward(
    request: _Request, origin: _Origin, grad: jax.Array | PlacedArray
) -> tuple[jax.Array | PlacedArray]:
    layout, mesh = origin.layout, origin.mesh
    if layout is None or mesh is None:
        return (grad,)
    plain = layout.without(layout.partial_axes)
    if origin.unreduced is not None:
        back = _send_back(grad, plain, origin)
        spec = PartitionSpec(*origin.unreduced.partitions, reduced=origin.unreduced.unreduced)
        return (jax.device_put(back, NamedSharding(explicit_twin(mesh), spec)),)
    if not layout.partial or isinstance(grad, PlacedArray) and grad.layout.partial:
        return (_send_back(grad, layout, origin),)
    # Each term of a PlacedArray gets the gradient of the value: the terms of a mean that is the gradient.
    back = _send_back(grad, Layout(plain.dims, tuple((axis, "avg") for axis in layout.partial_axes)), origin)
    assert isinstance(back, PlacedArray)
    averaged = tuple(axis for axis, op in layout.partial if op == "avg")
    scale = 1 / extent_of((), back.dtype, mesh).num_ranks(averaged)
    return (PlacedArray(back.array * scale if averaged else back.array, back.shape, layout, back.mesh),)


_redistribute.defvjp(_forward, _backward)


def _send_back(grad: jax.Array | PlacedArray, layout: Layout, origin: _Origin) -> jax.Array | PlacedArray:
    """Redistribute a gradient to where the array came from."""
    assert origin.mesh is not None and origin.target is not None
    mesh = origin.mesh
    if is_traced(grad) and not isinstance(grad, PlacedArray):
        held = Held(grad, grad.shape, origin.target, mesh)
    else:
        held = hold(
            grad if _lies_on(grad, mesh) else jax.device_put(grad, NamedSharding(mesh, PartitionSpec()))
        )
    return release(_to_layout(held, layout), mesh)


def _run(x: jax.Array | PlacedArray, request: _Request) -> tuple[jax.Array | PlacedArray, _Origin]:
    if is_traced(x):
        return _run_traced(x, request)  # pyright: ignore[reportArgumentType]
    held = hold(x)
    if not isinstance(x, PlacedArray):
        _check_no_source(request)
    view, mesh = _view_and_mesh(request, held.mesh, x)
    target = make_layout(request.placements, view, len(held.shape), base=held.layout)
    unreduced = x.sharding.spec if isinstance(x, jax.Array) and held.layout.partial else None  # pyright: ignore
    origin = _Origin(held.layout, target, held.mesh, unreduced)
    if not request.pad:
        check_even(held.extent, target, "redistribute")
    if target == held.layout and _mesh_of(x) == mesh:
        return x, origin
    return release(_to_layout(held, target), mesh), origin


def _run_traced(x: jax.Array, request: _Request) -> tuple[jax.Array | PlacedArray, _Origin]:
    """Inside `jit`: run the plan if the source is known, else leave the way to XLA's partitioner."""
    on = request.mesh if request.mesh is not None else _mesh_of(x)
    if on is None:
        raise PlacementError(
            "redistribute: inside jit this array does not say its mesh. Pass it: redistribute(x, placements, mesh)."
        )
    whole = as_jax_mesh(on)
    sharding = jax.typeof(x).sharding
    if request.source is not None:
        layout = make_layout(request.source, whole, x.ndim)
    elif _is_explicit(sharding):
        layout = spec_to_layout(sharding.spec, x.ndim, whole)
    else:
        layout = None
    target = make_layout(request.placements, on, x.ndim, base=layout)
    _check_traced(x, layout, target, request, whole)
    if layout is None:
        return lax.with_sharding_constraint(x, NamedSharding(whole, layout_to_spec(target))), _Origin()
    if isinstance(whole, jax.sharding.AbstractMesh):
        raise PlacementError(
            "redistribute: inside jit the plan needs the devices. Pass the mesh: redistribute(x, placements, mesh)."
        )
    mesh = auto_twin(whole)
    origin = _Origin(layout, target, mesh, sharding.spec if layout.partial else None)
    held = Held(x, x.shape, layout, mesh)
    if layout.partial:
        held = _reduce_traced(held, target)
    return release(_to_layout(held, target), mesh), origin


def _reduce_traced(held: Held, target: Layout) -> Held:
    """Reduce an unreduced array inside `jit`, where it is bound to Explicit axes; the rest runs on Auto axes.

    Unreduced values cannot be sliced, so of the plan's steps only reductions can run here; if the plan begins with
    another, all terms are reduced first.
    """
    extent, layout = held.extent, held.layout
    steps = []
    for step in plan_steps(extent, layout, target):
        if not step.kind.startswith("reduce"):
            break
        steps.append(step)
    if not steps or steps[-1].after.partial:
        steps = list(plan_steps(extent, layout, layout.without(layout.partial_axes)))
    after = steps[-1].after
    program = jax.shard_map(
        lambda x: run_steps(x, layout, tuple(steps), extent),
        mesh=explicit_twin(held.mesh),
        in_specs=layout_to_spec(layout),
        out_specs=layout_to_spec(after),
    )
    sharding = NamedSharding(held.mesh, layout_to_spec(after))
    reduced = lax.with_sharding_constraint(jax.device_put(program(held.array), sharding), sharding)
    return Held(reduced, held.shape, after, held.mesh)


def _to_layout(held: Held, target: Layout) -> Held:
    """Run the plan."""
    if held.layout == target:
        return held
    array = _program(held.mesh, held.extent, held.layout, target)(held.array)
    return Held(array, held.shape, target, held.mesh)


@lru_cache(maxsize=1024)
def _program(
    mesh: jax.sharding.Mesh, extent: Extent, source: Layout, target: Layout
) -> Callable[[jax.Array], jax.Array]:
    """The compiled plan. Axes of size 1 are left out of the work and named in the result only."""
    sharding = NamedSharding(mesh, layout_to_spec(stack_axes(target)))
    if extent.is_empty:
        return jax.jit(lambda x: jnp.zeros(stacked_shape(extent, target), x.dtype), out_shardings=sharding)
    start, stop = extent.drop_unit_axes(source), extent.drop_unit_axes(target)
    steps = plan_steps(extent, start, stop)
    body = jax.shard_map(
        lambda x: run_steps(x, start, steps, extent),
        mesh=mesh,
        in_specs=layout_to_spec(stack_axes(start)),
        out_specs=layout_to_spec(stack_axes(stop)),
    )
    return jax.jit(body, out_shardings=sharding)


# Checks and small questions.


def _tuple(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return (placements,) if isinstance(placements, Shard | Replicate | Partial) else tuple(placements)


def _mesh_of(x: jax.Array | PlacedArray | jax.ShapeDtypeStruct) -> jax.sharding.Mesh | None:
    """The mesh of an array, with Auto axes if the array is unreduced; None if it does not lie on one."""
    if isinstance(x, PlacedArray):
        return x.mesh
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.axis_names:
        return None
    mesh: jax.sharding.Mesh = sharding.mesh  # pyright: ignore[reportAssignmentType]
    return auto_twin(mesh) if sharding.spec.unreduced and not is_traced(x) else mesh


def _is_explicit(sharding: NamedSharding) -> bool:
    types = sharding.mesh.axis_types
    return bool(types) and all(kind == AxisType.Explicit for kind in types)


def _lies_on(x: jax.Array | PlacedArray, mesh: jax.sharding.Mesh) -> bool:
    own = None if is_traced(x) else _mesh_of(x)
    return own is not None and same_devices(own, mesh)


def _view_and_mesh(
    request: _Request, own: jax.sharding.Mesh, x: jax.Array | PlacedArray
) -> tuple[MeshLike, jax.sharding.Mesh]:
    """The axes that change and the mesh of the result; the array must lie on that mesh."""
    if request.mesh is None:
        default = _mesh_of(x)
        assert default is not None
        return default, default
    asked = as_jax_mesh(request.mesh)
    if not same_devices(asked, own):
        raise PlacementError(
            f"redistribute: the array lies on {DeviceMesh(own)!r}, not on {DeviceMesh(asked)!r}. Placements speak of "
            "one mesh. Leave mesh out or pass a slice of the array's mesh; to change meshes use "
            "jax.device_put(x, placements_to_sharding(placements, mesh, x.ndim))."
        )
    return request.mesh, asked


def _check_no_source(request: _Request) -> None:
    if request.source is not None:
        raise PlacementError(
            "redistribute: source=... is for arrays inside jit. Outside, the array's own sharding says it. Drop it."
        )


def _check_traced(
    x: jax.Array, layout: Layout | None, target: Layout, request: _Request, mesh: jax.sharding.Mesh
) -> None:
    if target.partial:
        raise PlacementError(
            "redistribute to Partial runs outside jit only. Inside, write the terms in a shard_map with "
            'jax.lax.pcast(x, axis, to="unreduced").'
        )
    if request.source is not None and layout is not None and layout.partial:
        raise PlacementError(
            "redistribute: source=... names a Partial, but inside jit the type of an unreduced array says that itself. "
            "Drop source, or return the terms unreduced from a shard_map."
        )
    extent = extent_of(x.shape, x.dtype, mesh)
    for where, lies in (("redistribute: source", layout), ("redistribute", target)):
        if lies is not None and not request.pad:
            check_even(extent, lies, where)


def _short(layout: Layout, mesh: jax.sharding.Mesh) -> str:
    places = layout_to_placements(layout, mesh)
    return (
        "(" + ", ".join(f"{axis} {place}" for axis, place in zip(mesh.axis_names, places, strict=True)) + ")"
    )
