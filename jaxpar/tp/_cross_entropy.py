"""Cross entropy of logits that stay split over the classes.

    f32[B, T, V/t] on each rank  ->  max, sum of exponentials, picked logit  ->  f32[B, T] or f32[], equal on all ranks

The whole logits, V numbers for each token, exist on no rank: two numbers for each token travel, and one before them.
"""

from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar._compat import varying_axes
from jaxpar._errors import BatchError, CollectiveError
from jaxpar._mean import Mean
from jaxpar.mesh._axes import AxisNames
from jaxpar.mesh._collectives_axes import ManualAxes, equal_over_unit, manual_axes, to_varying
from jaxpar.tp._ce_rows import Rule, row_losses, stats_dtype

_REDUCTIONS = ("mean", "sum", "none", "mean_parts")


@overload
def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    axis: AxisNames,
    *,
    label_smoothing: float = 0.0,
    class_weights: jax.Array | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    vocab_size: int | None = None,
) -> jax.Array: ...


@overload
def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    axis: AxisNames,
    *,
    label_smoothing: float = 0.0,
    class_weights: jax.Array | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean_parts"],
    vocab_size: int | None = None,
) -> Mean: ...


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    axis: AxisNames,
    *,
    label_smoothing: float = 0.0,
    class_weights: jax.Array | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none", "mean_parts"] = "mean",
    vocab_size: int | None = None,
) -> jax.Array | Mean:
    """Cross entropy of logits split over the classes, without gathering them.

        before     rank i: logits f32[..., V/t], classes i V/t to (i+1) V/t    varying;   targets i32[...]   equal
        after      f32[] (or f32[...])                                         invariant
        forward    all-reduce (max) of one number for each token, all-reduce (sum) of two; one more with class weights,
                   one more with label smoothing
        backward   nothing is sent: rank i gets the gradient of its own columns, softmax minus one-hot

    PyTorch: `loss_parallel` with `torch.nn.functional.cross_entropy` (L1-L4), which sends the same numbers in three
    all-reduces and knows neither label smoothing nor a mean on meshes of several axes. All options mean what they mean
    there; classes are the last dim. The logits are kept for the backward in their own dtype, with two numbers for
    each token; sums are taken in float32 at least (float64 for float64), and so is the result.

    The axis decides what runs, as in a parallel layer: where `axis` is not manual (outside `shard_map`, in global view)
    or has one rank, this is the plain loss of whole logits f32[..., V]. Other axes of the mesh do not matter: each
    rank of `dp` has the loss of its own tokens.

    Args:
        logits: f32[..., V/t], this rank's columns; varying over the axis.
        targets: i32[...], class of each token; equal over the axis. What is neither a class nor `ignore_index` makes the
            loss and the token's gradient NaN.
        axis: Mesh axis that splits the classes, or several (row-major).
        label_smoothing: Share of each target that is spread evenly over the classes, 0 to 1.
        class_weights: f32[V] equal over the axis, or f32[V/t] of this rank's classes, varying. Not differentiated.
        ignore_index: Target of tokens that count for nothing.
        z_loss: Adds z_loss * logsumexp(logits)^2 to each token's loss, weighted as the token is (PaLM, section 5).
        reduction: "mean" over tokens that count, weighted by the weights of their classes (0 over none); "sum"; "none",
            the loss of each token; "mean_parts", the mean as `jaxpar.Mean(total, count)`, which stays exact over data
            parallel ranks, microbatches and accumulation steps.
        vocab_size: Number of classes, if V was padded to divide by t: columns from there on have probability and
            gradient 0, whatever the logits are.

    Returns:
        f32[], or f32[...] for "none"; a `jaxpar.Mean` for "mean_parts". Invariant over the axis.

    Raises:
        BatchError: Targets are not integers of the shape of the logits without the last dim, or differ over the axis.
        CollectiveError: Unknown axis; logits that do not vary over it; class weights or vocab_size that do not fit V;
            unknown reduction; label_smoothing not within 0 to 1.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import cross_entropy
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
        >>> f = lambda z, y: cross_entropy(z, y, "tp")
        >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P()), out_specs=P()))
        >>> print(f(jnp.log(jnp.array([[1.0, 2.0, 3.0, 4.0]])), jnp.array([1])))
        1.609438
    """
    axes = _splitting_axes(axis)
    _check_targets(logits, targets, axes)
    num_columns = logits.shape[-1] * axes.num_ranks
    num_classes = _num_classes(vocab_size, num_columns, axes)
    _check_options(reduction, label_smoothing)
    rule = Rule(axes, num_classes, ignore_index, label_smoothing, z_loss)
    weights = None
    if class_weights is not None:
        weights = _own_weights(rule, lax.stop_gradient(class_weights), logits)
    logits, targets = equal_over_unit(logits, axes), equal_over_unit(targets, axes)
    losses, counts = row_losses(rule, _as_varying_as(logits, targets, weights), targets, weights)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    mean = Mean(total, lax.stop_gradient(counts).sum())
    return mean if reduction == "mean_parts" else mean.value


def _splitting_axes(axis: AxisNames) -> ManualAxes:
    """The axes that split the classes here: none in global view, where the logits are whole."""
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    mesh = jax.sharding.get_abstract_mesh()
    is_known = not mesh.manual_axes or set(names) <= set(mesh.axis_names)
    if is_known and not set(names) & set(mesh.manual_axes):
        return ManualAxes((), ())
    return manual_axes("cross_entropy", axis)


def _as_varying_as(logits: jax.Array, targets: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Logits that vary over all axes their gradient will: equal logits with different targets have different ones."""
    others = [targets] if weights is None else [targets, weights]
    return to_varying(logits, tuple(sorted(set().union(*(varying_axes(jax.typeof(x)) for x in others)))))


def _own_weights(rule: Rule, weights: jax.Array, logits: jax.Array) -> jax.Array:
    """f32[V/t]: the weights of this rank's classes, 0 for padding."""
    axes, width = rule.axes, logits.shape[-1]
    num_columns, is_own = width * axes.num_ranks, bool(_varies_over(weights, axes.wide))
    lengths = (width,) if is_own else (rule.num_classes, num_columns)
    if weights.ndim != 1 or weights.size not in lengths:
        raise CollectiveError(
            f"cross_entropy over {axes.names}: class_weights of shape {weights.shape}, "
            f"{'different' if is_own else 'equal'} on the ranks, do not fit {rule.num_classes} classes in "
            f"{axes.num_ranks} x {width} columns. Give all {rule.num_classes} of them, equal on all ranks (in_specs "
            f"P()), or each rank its own {width} (in_specs P({', '.join(map(repr, axes.wide))}))."
        )
    weights = equal_over_unit(weights.astype(stats_dtype(logits)), axes)
    if not is_own:
        weights = jnp.pad(weights, (0, num_columns - weights.size))
        if axes.wide:
            weights = lax.dynamic_slice_in_dim(weights, axes.rank() * width, width)
    if not rule.is_padded(width):
        return weights
    return jnp.where(rule.columns(width) < rule.num_classes, weights, 0)


def _num_classes(vocab_size: int | None, num_columns: int, axes: ManualAxes) -> int:
    if vocab_size is None:
        return num_columns
    if not 1 <= vocab_size <= num_columns:
        raise CollectiveError(
            f"cross_entropy over {axes.names}: vocab_size={vocab_size} is not within the logits' columns, "
            f"{axes.num_ranks} ranks x {num_columns // axes.num_ranks} = {num_columns}. It is the number of classes "
            f"before padding, 1 to {num_columns}; without padding leave it out."
        )
    return vocab_size


def _check_targets(logits: jax.Array, targets: jax.Array, axes: ManualAxes) -> None:
    where = f"cross_entropy over {axes.names}"
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise BatchError(
            f"{where}: targets are {targets.dtype}, and classes are integers. Probabilities as targets are not "
            "supported: write targets.argmax(-1), or label_smoothing= for an even share of all classes."
        )
    if differs := _varies_over(targets, axes.wide):
        raise BatchError(
            f"{where}: targets vary over {differs}, the axis that splits the classes, so each rank would pick another "
            "class of the same token. Give all ranks the same targets: leave the axis out of their in_specs, or "
            f"gather them first, all_gather(targets, {differs[0]!r}, dim=..., invariant=True)."
        )
    if logits.ndim == 0 or targets.shape != logits.shape[:-1]:
        raise BatchError(
            f"{where}: targets of shape {targets.shape} do not fit logits of shape {logits.shape}, whose last dim is "
            f"the classes. Each token has one target: shape {logits.shape[:-1]}. (PyTorch has the classes in dim 1: "
            "write jnp.moveaxis(logits, 1, -1).)"
        )
    if axes.wide and (equal := [name for name in axes.wide if name not in _varies_over(logits, axes.wide)]):
        raise CollectiveError(
            f"{where}: logits of shape {logits.shape} are equal on all ranks of {equal[0]!r}, so they are not split "
            f"over it, and their {logits.shape[-1]} classes would count {axes.num_ranks} times. Split the layer that "
            "makes them (ColwiseParallel with its output left sharded), or use the plain loss."
        )


def _check_options(reduction: str, label_smoothing: float) -> None:
    if reduction not in _REDUCTIONS:
        raise CollectiveError(
            f"cross_entropy: reduction {reduction!r} is unknown. Reductions are {', '.join(map(repr, _REDUCTIONS))}."
        )
    if not 0 <= label_smoothing <= 1:
        raise CollectiveError(
            f"cross_entropy: label_smoothing={label_smoothing} is not within 0 to 1. It is the share of each target "
            "that is spread over all classes; 0.1 is usual."
        )


def _varies_over(x: jax.Array, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in varying_axes(jax.typeof(x)))
