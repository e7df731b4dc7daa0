"""A `PartitionSpec` as one tuple of axes for each dim, and back.

P(("tp", "dp"), None)   <->   [("tp", "dp"), ()]
"""

from jax.sharding import PartitionSpec


def entries(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """A spec as one tuple of axes for each dim."""
    names = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return names + [()] * (ndim - len(names))


def as_spec(names: list[tuple[str, ...]]) -> PartitionSpec:
    """The inverse of `entries`."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in names))
