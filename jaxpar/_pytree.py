"""Names of the leaves of a pytree: `blocks.0.attention.qkv.kernel`, as a PyTorch user would write them."""

import fnmatch
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


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name matches a glob: `*` stands for one segment or a part of it, `**` for any number of them.

    Example:
        >>> from jaxpar._pytree import matches
        >>> matches("blocks.0", "blocks.*"), matches("blocks.0.mlp", "blocks.*"), matches("blocks.0.mlp", "**.mlp")
        (True, False, True)
    """
    return _match_segments(name.split("."), pattern.split("."))


def _match_segments(name: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_match_segments(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _match_segments(name[1:], pattern[1:])
