"""How `redistribute` runs: outside `jit`, inside it, and backwards.

outside jit     hold -> compiled plan -> release      the source is the array's sharding
inside jit      the partitioner, or the plan if the source is known
backward        the gradient goes back to the source, by the plan of the opposite way
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar._errors import PlacementError
from jaxpar.mesh._init_mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._layout import (
    Layout,
    auto_twin,
    explicit_twin,
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
from jaxpar.mesh._placements import Placement
from jaxpar.mesh._plan import Extent, plan_steps
from jaxpar.mesh._steps import run_steps
from jaxpar.mesh._where import is_explicit, mesh_of


@dataclass(frozen=True)
class Request:
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
def move(x: jax.Array | PlacedArray, request: Request) -> jax.Array | PlacedArray:
    return _run(x, request)[0]


def _forward(x: jax.Array | PlacedArray, request: Request) -> tuple[jax.Array | PlacedArray, _Origin]:
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
    request: Request, origin: _Origin, grad: jax.Array | PlacedArray
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


move.defvjp(_forward, _backward)


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


def _run(x: jax.Array | PlacedArray, request: Request) -> tuple[jax.Array | PlacedArray, _Origin]:
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
    if target == held.layout and mesh_of(x) == mesh:
        return x, origin
    return release(_to_layout(held, target), mesh), origin


def _run_traced(x: jax.Array, request: Request) -> tuple[jax.Array | PlacedArray, _Origin]:
    """Inside `jit`: run the plan if the source is known, else leave the way to XLA's partitioner."""
    on = request.mesh if request.mesh is not None else mesh_of(x)
    if on is None:
        raise PlacementError(
            "redistribute: inside jit this array does not say its mesh. Pass it: redistribute(x, placements, mesh)."
        )
    whole = as_jax_mesh(on)
    sharding = jax.typeof(x).sharding
    if request.source is not None:
        layout = make_layout(request.source, whole, x.ndim)
    elif is_explicit(sharding):
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
    array = compiled_plan(held.mesh, held.extent, held.layout, target)(held.array)
    return Held(array, held.shape, target, held.mesh)


@lru_cache(maxsize=1024)
def compiled_plan(
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


def _lies_on(x: jax.Array | PlacedArray, mesh: jax.sharding.Mesh) -> bool:
    own = None if is_traced(x) else mesh_of(x)
    return own is not None and same_devices(own, mesh)


def _view_and_mesh(
    request: Request, own: jax.sharding.Mesh, x: jax.Array | PlacedArray
) -> tuple[MeshLike, jax.sharding.Mesh]:
    """The axes that change and the mesh of the result; the array must lie on that mesh."""
    if request.mesh is None:
        default = mesh_of(x)
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


def _check_no_source(request: Request) -> None:
    if request.source is not None:
        raise PlacementError(
            "redistribute: source=... is for arrays inside jit. Outside, the array's own sharding says it. Drop it."
        )


def _check_traced(
    x: jax.Array, layout: Layout | None, target: Layout, request: Request, mesh: jax.sharding.Mesh
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
