"""Changing the placements of an array: exactly the collectives of the plan, compiled once, differentiable.

    x = distribute(jnp.arange(8.0), mesh, [Shard(0)])     0 1 | 2 3 | 4 5 | 6 7
    y = redistribute(x, [Replicate()])                    one all-gather; the gradient of y is split again, for free

Outside `jit` the source is read from the array. Inside `jit` an array does not say how it lies: there the partitioner
brings it to the target, or the plan is run if the source is named. A partial source counts as replicated in the
backward pass, since the sum's gradient is the same for every term.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar._errors import PlacementError
from jaxpar.mesh._init_mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._layout import Layout, layout_to_placements, make_layout
from jaxpar.mesh._move import Request, move
from jaxpar.mesh._placed import PlacedArray, extent_of
from jaxpar.mesh._placements import Partial, Placement, Replicate, Shard
from jaxpar.mesh._plan import RedistributionPlan, plan_steps
from jaxpar.mesh._where import mesh_of, placements_of


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

    To communicate in another dtype, cast before and after (PyTorch's `forward_dtype`).

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
    request = Request(_tuple(placements), mesh, before, pad or isinstance(x, PlacedArray))
    return move(x, request)


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
    on = mesh if mesh is not None else mesh_of(x)
    if on is None:
        return jnp.asarray(x)
    whole = as_jax_mesh(on)
    y = redistribute(x, (Replicate(),) * len(whole.axis_names), None if mesh is None else whole)
    assert not isinstance(y, PlacedArray)
    return y


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
        ('all_to_all',)
    """
    on = mesh if mesh is not None else mesh_of(x)
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


def _tuple(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return (placements,) if isinstance(placements, Shard | Replicate | Partial) else tuple(placements)


def _short(layout: Layout, mesh: jax.sharding.Mesh) -> str:
    places = layout_to_placements(layout, mesh)
    return (
        "(" + ", ".join(f"{axis} {place}" for axis, place in zip(mesh.axis_names, places, strict=True)) + ")"
    )
