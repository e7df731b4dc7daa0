"""How an array lies along one mesh axis: `Shard`, `Replicate` or `Partial`, one for each axis in mesh order.

    mesh (dp=2, tp=2), x of 4 rows        (Shard(0), Replicate())     (Shard(0), Shard(0))     (Replicate(), Partial())
        tp=0      tp=1                     rows 01    rows 01          row 0      row 1         x = sum over tp of what
    dp=0  .         .                      rows 23    rows 23          row 2      row 3         the devices hold
    dp=1  .         .

Placements are how people say it; the array's `NamedSharding` is the record. Several axes on one dim split it left to
right in mesh order, as in `PartitionSpec(("dp", "tp"))`. The other order, `PartitionSpec(("tp", "dp"))`, in which
`dp` splits what `tp` has split already (fully sharded parameters of a tensor-parallel layer), is
`(Shard(0, after=("tp",)), Shard(0))`.
"""

from dataclasses import dataclass
from typing import TypeAlias

from jaxpar._errors import PlacementError

REDUCE_OPS = ("sum", "avg", "min", "max", "product")


@dataclass(frozen=True)
class Shard:
    """Split one dim over the axis, as `torch.chunk` does: pieces of ceil(n / ranks), the last ones shorter or empty.

    PyTorch: `Shard` and `_StridedShard` (rows D2, D4).

    Attributes:
        dim: The array dim. A negative dim counts from the end of each array that the placement is used for.
        after: Axes that come later in the mesh but split the dim before this axis does.

    Example:
        >>> Shard(-1), str(Shard(0))
        (Shard(dim=-1), 'S(0)')
    """

    dim: int
    after: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim}, after={self.after})" if self.after else f"Shard(dim={self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim}, after {' '.join(self.after)})" if self.after else f"S({self.dim})"


@dataclass(frozen=True)
class Replicate:
    """The same values on every rank of the axis. PyTorch: `Replicate` (row D1).

    Example:
        >>> Replicate(), str(Replicate())
        (Replicate(), 'R')
    """

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis holds a term; the value is their sum (or mean, minimum, maximum, product).

    PyTorch: `Partial` (row D3). `Partial("sum")` is JAX's own `PartitionSpec(unreduced={axis})`; JAX has no record
    for the other ops, so arrays that hold them are `PlacedArray`s.

    Attributes:
        op: `sum`, `avg`, `min`, `max` or `product`.

    Raises:
        PlacementError: The op is none of these.

    Example:
        >>> Partial(), str(Partial("max"))
        (Partial(sum), 'P(max)')
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise PlacementError(f"Partial({self.op!r}): the op must be one of {', '.join(REDUCE_OPS)}.")

    def __repr__(self) -> str:
        return f"Partial({self.op})"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement: TypeAlias = Shard | Replicate | Partial
