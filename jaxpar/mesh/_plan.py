"""Which collectives bring an array from one layout to another, and how many bytes each device sends.

    one axis                  collective          each of W devices sends (ring), n = bytes of the whole array
    S(i) -> R                 all-gather          (W-1)/W n
    S(i) -> S(j)              all-to-all          (W-1)/W n/W
    P    -> R                 all-reduce          2 (W-1)/W n
    P    -> S(i)              reduce-scatter      (W-1)/W n
    R    -> S(i), R -> P      none

A layout is a state, each row a move, and the plan is the path with the fewest bytes, then the fewest steps (Dijkstra).
Several axes that make the same move go together, in one collective over all of them. A dim split over nested axes
gives up its innermost ones first; to free an outer one, a collective-permute swaps the nesting, so that no device
ever holds more than its old or its new part.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count
from math import prod

from jaxpar.mesh._chunks import is_even, padded_length
from jaxpar.mesh._layout import Layout


@dataclass(frozen=True)
class RedistributionStep:
    """One step of a plan.

    Attributes:
        kind: `gather`, `exchange` (to another dim), `split`, `reorder` (the nesting), `reduce`, `reduce_scatter` or
            `make_partial`.
        axes: Mesh axes it runs over, outermost first.
        dim: Dim that loses the axes (`gather`, `exchange`), gains them (`split`, `reduce_scatter`) or keeps them
            (`reorder`); None if no dim is concerned.
        to_dim: Dim that gains the axes in an `exchange`; None otherwise.
        op: Reduce op of partial axes; None otherwise.
        collective: The operation in the compiled program, as `jaxpar.debug` names it; None if nothing is sent.
        local_shape: Shape on each device after the step.
        sent_bytes: Bytes that each device sends in a ring.
        after: The layout after the step.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int | None
    to_dim: int | None
    op: str | None
    collective: str | None
    local_shape: tuple[int, ...]
    sent_bytes: int
    after: Layout

    def __str__(self) -> str:
        what = self.collective or f"local {self.kind.replace('_', ' ')}"
        where = (
            ""
            if self.dim is None
            else f" dim {self.dim}" + ("" if self.to_dim is None else f"->{self.to_dim}")
        )
        how = f" ({self.op})" if self.op else ""
        text = f"{what}{how}{where} over {' '.join(self.axes)}"
        return f"{text:<40} -> {list(self.local_shape)} per device, sends {self.sent_bytes:,} bytes"


@dataclass(frozen=True, repr=False)
class RedistributionPlan:
    """Steps that bring an array from one layout to another; `redistribute` executes exactly these.

    Attributes:
        steps: In order.
        title: What goes where.
    """

    steps: tuple[RedistributionStep, ...]
    title: str = ""

    @property
    def collectives(self) -> tuple[str, ...]:
        """Kinds of the collectives of the compiled program, in order."""
        return tuple(step.collective for step in self.steps if step.collective is not None)

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in all, in the ring model."""
        return sum(step.sent_bytes for step in self.steps)

    def __str__(self) -> str:
        lines = [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)] or ["  nothing to do"]
        total = f"  in all {len(self.collectives)} collectives, {self.sent_bytes:,} bytes sent by each device"
        return "\n".join([self.title, *lines, total])

    __repr__ = __str__


@dataclass(frozen=True)
class Extent:
    """What the planner must know of array and mesh: logical shape, bytes per element, size of each axis."""

    shape: tuple[int, ...]
    itemsize: int
    sizes: tuple[tuple[str, int], ...]

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements, so that nothing ever has to move."""
        return prod(self.shape) == 0

    def parts(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Sizes of some axes."""
        table = dict(self.sizes)
        return tuple(table[axis] for axis in axes)

    def num_ranks(self, axes: tuple[str, ...]) -> int:
        """Number of ranks over some axes together."""
        return prod(self.parts(axes))

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Shape in memory of one device."""
        return tuple(
            padded_length(size, self.parts(axes)) for size, axes in zip(self.shape, layout.dims, strict=True)
        )

    def local_bytes(self, layout: Layout) -> int:
        """Bytes in memory of one device."""
        return prod(self.local_shape(layout)) * self.itemsize

    def is_even(self, dim: int, axes: tuple[str, ...]) -> bool:
        """Whether `dim` splits over `axes` without padding."""
        return is_even(self.shape[dim], self.parts(axes))

    def drop_unit_axes(self, layout: Layout) -> Layout:
        """The layout without axes of size 1, which mean nothing and cost nothing."""
        return layout.without([axis for axis, size in self.sizes if size == 1])


@lru_cache(maxsize=4096)
def plan_steps(extent: Extent, source: Layout, target: Layout) -> tuple[RedistributionStep, ...]:
    """The cheapest steps from `source` to `target`, both without axes of size 1."""
    if extent.is_empty:
        return ()
    ticket = count()
    queue: list[tuple[int, int, int, Layout, tuple[RedistributionStep, ...]]] = [
        (0, 0, next(ticket), source, ())
    ]
    done: set[Layout] = set()
    while queue:
        sent, num_steps, _, layout, steps = heapq.heappop(queue)
        if layout == target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step in _moves(extent, layout, target):
            if step.after not in done:
                total = (sent + step.sent_bytes, num_steps + 1, next(ticket))
                heapq.heappush(queue, (*total, step.after, (*steps, step)))
    raise AssertionError(f"no path from {source} to {target}")


# Moves. Each yields steps that make sense on the way to the target: an axis only ever goes from where it is to where
# the target wants it, or to replicated in between.


def _moves(extent: Extent, layout: Layout, target: Layout) -> Iterator[RedistributionStep]:
    yield from _gathers_and_exchanges(extent, layout, target)
    yield from _splits(extent, layout, target)
    yield from _reorders(extent, layout, target)
    yield from _reductions(extent, layout, target)
    yield from _partials(extent, layout, target)


def _gathers_and_exchanges(extent: Extent, layout: Layout, target: Layout) -> Iterator[RedistributionStep]:
    for dim, axes in enumerate(layout.dims):
        for length in range(1, len(axes) + 1):
            inner = axes[-length:]
            ranks, local = extent.num_ranks(inner), extent.local_bytes(layout)
            gathered = layout.without(inner)
            yield _step(
                extent, gathered, "gather", inner, dim, collective="all_gather", sent=(ranks - 1) * local
            )
            for to_dim, wanted in enumerate(target.dims):
                if to_dim != dim and set(inner) <= set(wanted):
                    after = _add(gathered, to_dim, inner)
                    # Padding of the gaining dim travels too.
                    moved = extent.local_bytes(_add(layout, to_dim, inner))
                    yield _step(
                        extent, after, "exchange", inner, dim, to_dim=to_dim, collective="all_to_all",
                        sent=(ranks - 1) * moved,
                    )  # fmt: skip


def _splits(extent: Extent, layout: Layout, target: Layout) -> Iterator[RedistributionStep]:
    for dim, axis in _free(layout, target):
        yield _step(extent, _add(layout, dim, (axis,)), "split", (axis,), dim)


def _reorders(extent: Extent, layout: Layout, target: Layout) -> Iterator[RedistributionStep]:
    for dim, axes in enumerate(layout.dims):
        stay = tuple(axis for axis in target.dims[dim] if axis in axes)
        wanted = (*stay, *(axis for axis in axes if axis not in stay))
        if wanted != axes and extent.is_even(dim, axes):
            first = next(index for index, axis in enumerate(axes) if axis != wanted[index])
            after = Layout(
                tuple(wanted if at == dim else names for at, names in enumerate(layout.dims)), layout.partial
            )
            sent = extent.local_bytes(layout)
            yield _step(
                extent, after, "reorder", axes[first:], dim, collective="collective_permute", sent=sent
            )


def _reductions(extent: Extent, layout: Layout, target: Layout) -> Iterator[RedistributionStep]:
    ops = dict(layout.partial)
    leaving = tuple(axis for axis, op in layout.partial if dict(target.partial).get(axis) != op)
    for op in dict.fromkeys(ops[axis] for axis in leaving):
        axes = tuple(axis for axis in leaving if ops[axis] == op)
        for length in range(1, len(axes) + 1):
            for some in combinations(axes, length):
                yield _reduce(extent, layout, some, op)
        for dim, wanted in enumerate(target.dims):
            for run in _runs(wanted):
                if set(run) <= set(axes):
                    yield _reduce_scatter(extent, layout, run, op, dim)


def _reduce(extent: Extent, layout: Layout, axes: tuple[str, ...], op: str) -> RedistributionStep:
    ranks, local = extent.num_ranks(axes), extent.local_bytes(layout)
    if op == "product":  # no such collective: the terms are gathered and multiplied on each device
        sent, collective = (ranks - 1) * local, "all_gather"
    else:
        sent, collective = 2 * (ranks - 1) * local // ranks, "all_reduce"
    return _step(extent, layout.without(axes), "reduce", axes, None, op=op, collective=collective, sent=sent)


def _reduce_scatter(
    extent: Extent, layout: Layout, axes: tuple[str, ...], op: str, dim: int
) -> RedistributionStep:
    after = _add(layout.without(axes), dim, axes)
    sent = (extent.num_ranks(axes) - 1) * extent.local_bytes(after)
    # Only sums have a reduce-scatter in jax.lax; other terms are exchanged and reduced on each device: the same bytes.
    collective = "reduce_scatter" if op in ("sum", "avg") else "all_to_all"
    return _step(extent, after, "reduce_scatter", axes, dim, op=op, collective=collective, sent=sent)


def _partials(extent: Extent, layout: Layout, target: Layout) -> Iterator[RedistributionStep]:
    ops = dict(target.partial)
    busy = {*layout.partial_axes, *(axis for axes in layout.dims for axis in axes)}
    order = [axis for axis, _ in extent.sizes]

    def with_partial(base: Layout, axis: str) -> Layout:
        pairs = (*base.partial, (axis, ops[axis]))
        return Layout(base.dims, tuple(sorted(pairs, key=lambda pair: order.index(pair[0]))))

    for axis in ops:
        if axis not in busy:
            yield _step(extent, with_partial(layout, axis), "make_partial", (axis,), None, op=ops[axis])
    for dim, axes in enumerate(layout.dims):  # zeros around the piece make it a term of the sum
        if axes and ops.get(axes[-1]) == "sum":
            after = with_partial(layout.without(axes[-1:]), axes[-1])
            yield _step(extent, after, "make_partial", axes[-1:], dim, op="sum")


# Helpers.


def _step(
    extent: Extent,
    after: Layout,
    kind: str,
    axes: tuple[str, ...],
    dim: int | None,
    *,
    to_dim: int | None = None,
    op: str | None = None,
    collective: str | None = None,
    sent: int = 0,
) -> RedistributionStep:
    return RedistributionStep(kind, axes, dim, to_dim, op, collective, extent.local_shape(after), sent, after)


def _add(layout: Layout, dim: int, axes: tuple[str, ...]) -> Layout:
    dims = tuple((*names, *axes) if at == dim else names for at, names in enumerate(layout.dims))
    return Layout(dims, layout.partial)


def _free(layout: Layout, target: Layout) -> Iterator[tuple[int, str]]:
    """Axes that replicate now and split a dim in the target."""
    busy = {*layout.partial_axes, *(axis for axes in layout.dims for axis in axes)}
    for dim, wanted in enumerate(target.dims):
        yield from ((dim, axis) for axis in wanted if axis not in busy)


def _runs(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All contiguous parts of a tuple."""
    for start in range(len(axes)):
        for stop in range(start + 1, len(axes) + 1):
            yield axes[start:stop]
