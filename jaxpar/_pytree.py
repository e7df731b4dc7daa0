"""Names of the leaves of a pytree: `blocks.0.attention.qkv.kernel`, as a PyTorch user would write them."""

from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the dotted name of one leaf; Flax's own `.value` at the end is not part of the name."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    if len(names) > 1 and names[-1] in ("value", "raw_value"):
        names.pop()
    return ".".join(names)


def leaf_names(tree: PyTree) -> tuple[str, ...]:
    """Returns the dotted names of all leaves, in flattening order."""
    return tuple(leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])
