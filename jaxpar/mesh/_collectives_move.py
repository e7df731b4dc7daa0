"""Collectives that move blocks between devices: all_to_all, permute, ring_shift."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar._errors import CollectiveError
from jaxpar._pytree import PyTree, leaf_name
from jaxpar.mesh._axes import AxisNames
from jaxpar.mesh._collectives_axes import ManualAxes, check_dim, check_divisible, manual_axes, to_varying


def all_to_all(x: PyTree, axis: AxisNames, *, split_dim: int, concat_dim: int) -> PyTree:
    """Cut each device's block along one dim, send part j to device j, join what comes in along another.

        before   device i: [p_i0, ..., p_i,n-1]  along split_dim     f32[D0, D1]        varying
        after    device j: [p_0j, ..., p_n-1,j]  along concat_dim    f32[D0 / n, n D1]  varying
        dual     all_to_all with split_dim and concat_dim exchanged

    PyTorch: `all_to_all_single` with equal splits (C23). Each device sends (n-1)/n N bytes. The dim that is sharded
    over the axis moves from concat_dim to split_dim. Twice with the dims exchanged is the identity.

    Args:
        x: Array or pytree; one device's block.
        axis: Mesh axis, or several (parts in row-major order).
        split_dim: Dim that is cut; its size must divide by the number of devices.
        concat_dim: Dim along which the parts are joined.

    Raises:
        CollectiveError: Outside shard_map, unknown axis, no such dim, or it does not divide.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
        >>> f = lambda x: all_to_all(x, "dp", split_dim=1, concat_dim=0)
        >>> x = jnp.arange(4.0).reshape(2, 2)
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("dp", None), out_specs=P(None, "dp"))(x)
        Array([[0., 1.],
               [2., 3.]], dtype=float32)
    """
    axes = manual_axes("all_to_all", axis)

    def exchange(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
        name, leaf = leaf_name(path) or "x", to_varying(jnp.asarray(leaf), axes.names)
        split = check_dim("all_to_all", name, split_dim, leaf.ndim, name="split_dim")
        concat = check_dim("all_to_all", name, concat_dim, leaf.ndim, name="concat_dim")
        check_divisible("all_to_all", name, leaf, split, axes)
        return lax.all_to_all(leaf, axes.wide, split, concat, tiled=True) if axes.wide else leaf

    return jax.tree_util.tree_map_with_path(exchange, x)


def permute(x: PyTree, axis: AxisNames, pairs: Sequence[tuple[int, int]]) -> PyTree:
    """Send blocks from device to device: one block out and one in at most, for each device.

        before   device i: x_i                                                varying
        after    device t: x_s for each pair (s, t); devices no pair names as target: 0    varying
        dual     permute with every pair turned around

    PyTorch: `batch_isend_irecv`, `permute_tensor` (C25, C28). A device that sends, sends N bytes.

    Args:
        x: Array or pytree; one device's block, the same shape on all.
        axis: Mesh axis, or several (ranks row-major).
        pairs: (source, target) positions on the axis; sources differ, targets differ.

    Raises:
        CollectiveError: Outside shard_map, unknown axis, a position that is not on the axis, a device that sends
            or receives twice.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((4, 2), ("pp", "dp")).jax_mesh
        >>> f = lambda x: permute(x, "pp", [(0, 1), (1, 2), (2, 3)])
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(jnp.arange(1.0, 5.0))
        Array([0., 1., 2., 3.], dtype=float32)
    """
    axes = manual_axes("permute", axis)
    checked = tuple((int(source), int(target)) for source, target in pairs)
    _check_pairs(checked, axes)
    return jax.tree.map(lambda leaf: _permuted(jnp.asarray(leaf), axes, checked), x)


def ring_shift(x: PyTree, axis: AxisNames, *, shift: int = 1) -> PyTree:
    """Send every block `shift` positions up the axis, around the end.

        before   device i: x_i                   varying
        after    device i: x_{(i - shift) % n}   varying
        dual     ring_shift by -shift

    PyTorch: send to rank + 1, receive from rank - 1 (C25). Each device sends N bytes. n shifts by 1 are the
    identity, and so is a shift by a multiple of n, which sends nothing.

    Args:
        x: Array or pytree; one device's block, the same shape on all.
        axis: Mesh axis, or several (ranks row-major).
        shift: Positions to move; may be negative.

    Raises:
        CollectiveError: Outside shard_map, or unknown axis.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((4, 2), ("pp", "dp")).jax_mesh
        >>> f = lambda x: ring_shift(x, "pp")
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(jnp.arange(4.0))
        Array([3., 0., 1., 2.], dtype=float32)
    """
    axes = manual_axes("ring_shift", axis)
    n = axes.num_ranks
    pairs = tuple((rank, (rank + shift) % n) for rank in range(n))
    return jax.tree.map(lambda leaf: _permuted(jnp.asarray(leaf), axes, pairs), x)


def _permuted(x: jax.Array, axes: ManualAxes, pairs: tuple[tuple[int, int], ...]) -> jax.Array:
    if not pairs:
        return to_varying(jnp.zeros_like(x), axes.names)
    x = to_varying(x, axes.names)
    stays = len(pairs) == axes.num_ranks and all(source == target for source, target in pairs)
    return x if stays else lax.ppermute(x, *_in_mesh_order(axes, pairs))


def _in_mesh_order(
    axes: ManualAxes, pairs: tuple[tuple[int, int], ...]
) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The same moves with axes and ranks in mesh order: `ppermute` counts ranks that way whatever order it is given.

    All other collectives, and `axis_index`, count in the order given (jax 0.10 to 0.12).
    """
    names = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes.wide)
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    ranks = np.arange(axes.num_ranks).reshape([sizes[name] for name in names])
    in_order = ranks.transpose([names.index(name) for name in axes.wide]).ravel()
    return names, tuple((int(in_order[source]), int(in_order[target])) for source, target in pairs)


def _check_pairs(pairs: tuple[tuple[int, int], ...], axes: ManualAxes) -> None:
    for rank in (rank for pair in pairs for rank in pair):
        if not 0 <= rank < axes.num_ranks:
            raise CollectiveError(
                f"permute: position {rank} in pairs={pairs} is not on the axis {axes.names} of {axes.num_ranks} "
                f"devices. Positions are 0 to {axes.num_ranks - 1}; write (i + 1) % {axes.num_ranks} to go around."
            )
    for role, ranks in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice:
            raise CollectiveError(
                f"permute: {role} {twice[0]} is named twice in pairs={pairs}. A device sends one block and receives "
                "one. For one to many use broadcast or all_gather, for many to one all_reduce or gather."
            )
