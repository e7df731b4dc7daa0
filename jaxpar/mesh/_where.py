"""Where an array lies: its mesh and its placements, as far as it says them.

array outside jit                 its NamedSharding says both
array inside jit, Auto axes       its type says the mesh, not the placements
array inside jit, Explicit axes   its type says both (unreduced arrays are always of this kind)
"""

import jax
from jax.sharding import AxisType, NamedSharding

from jaxpar._errors import PlacementError
from jaxpar.mesh._init_mesh import MeshLike
from jaxpar.mesh._layout import auto_twin, layout_to_placements, spec_to_layout
from jaxpar.mesh._placed import PlacedArray, is_traced
from jaxpar.mesh._placements import Placement


def placements_of(
    x: jax.Array | PlacedArray | jax.ShapeDtypeStruct, mesh: MeshLike | None = None
) -> tuple[Placement, ...]:
    """How an array (or a `jax.ShapeDtypeStruct`) lies: one placement for each axis of its mesh, or of a slice.

    PyTorch: `DTensor.placements` (row D15). Read from the array's `NamedSharding`.

    Raises:
        PlacementError: The array does not lie on a mesh, or is traced with Auto axes and so does not say.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar.mesh import Replicate, Shard, distribute, init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
        >>> placements_of(distribute(jnp.ones((8, 8)), mesh, [Replicate(), Shard(1)]))
        (Replicate(), Shard(dim=1))
    """
    if isinstance(x, PlacedArray):
        return layout_to_placements(x.layout, x.mesh if mesh is None else mesh)
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or is_traced(x) and not is_explicit(sharding):
        raise PlacementError(
            f"placements_of: {'a traced array' if is_traced(x) else f'an array with sharding {sharding}'} does not "
            "say how it lies on a mesh. Ask outside jit, or place it with distribute(x, mesh, placements)."
        )
    own: jax.sharding.Mesh = sharding.mesh  # pyright: ignore[reportAssignmentType]
    return layout_to_placements(
        spec_to_layout(sharding.spec, len(x.shape), own), own if mesh is None else mesh
    )


def mesh_of(x: jax.Array | PlacedArray | jax.ShapeDtypeStruct) -> jax.sharding.Mesh | None:
    """The mesh of an array, with Auto axes if the array is unreduced; None if it does not lie on one."""
    if isinstance(x, PlacedArray):
        return x.mesh
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.axis_names:
        return None
    mesh: jax.sharding.Mesh = sharding.mesh  # pyright: ignore[reportAssignmentType]
    return auto_twin(mesh) if sharding.spec.unreduced and not is_traced(x) else mesh


def is_explicit(sharding: NamedSharding) -> bool:
    """Whether all axes are Explicit, so that the types of traced arrays say their shardings."""
    types = sharding.mesh.axis_types
    return bool(types) and all(kind == AxisType.Explicit for kind in types)
