"""One stage on its devices: its programs, compiled, with arrays in and out.

    start      variables -> sums of losses and of gradients (zero), variables that the forward changes
    forward    params, variables, batch, number, received, sums -> sent, kept, sums, variables      (F)
    backward   params, kept, received, gradients of sent, sums -> gradients of received, sums       (B)
    inputs     params, kept, received, gradients of sent -> gradients of received, carry            (I)
    weights    what W uses of these, carry, sums -> sums                                            (W)

Sums are updated in place (donated). What a program does not return, and nobody holds, is free when it has run.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import _compat
from jaxpar._module import vary
from jaxpar._residuals import is_floating
from jaxpar._spec import entries
from jaxpar.pp._code import StageCode
from jaxpar.pp._dealt import dealt
from jaxpar.pp._relayout import live
from jaxpar.pp._stacked import spec, stack, unstack

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Kinds:
    """How the inputs and outputs of the whole program are numbered, and how they lie on a stage's mesh.

    Inputs: trained parameters, other variables, batch, the microbatch's number. Outputs: what is summed over microbatches
    (the loss's total first), then the other variables after the forward.

    Args:
        params: how each parameter lies.
        rest: how each other variable lies.
        batch: how every array of the batch lies.
        param_marks: for each parameter the axes over which it is marked as varying: its gradient is summed there later.
        rest_marks: for each other variable, the axes over which the forward lets it vary.
        num_sums: how many outputs are summed.
        n_microbatches: in how many parts each device takes its rows.
        is_gathered: whether programs are given whole parameters, gathered before, as they lie between programs.
        is_smaller: whether these programs are for the smaller ones, if they cannot be equal.
    """

    params: tuple[PartitionSpec, ...]
    rest: tuple[PartitionSpec, ...]
    batch: PartitionSpec
    param_marks: tuple[tuple[str, ...], ...]
    rest_marks: tuple[tuple[str, ...], ...]
    num_sums: int
    n_microbatches: int
    is_gathered: bool
    is_smaller: bool = False


@dataclass(frozen=True, eq=False)
class Stage:
    """The compiled programs of one stage; each compiles when it is first called.

    Args:
        code: its traced programs.
        kinds: how the whole program is numbered.
        mesh: its devices; the axes are those that the trace saw.
        received_as: how what it receives lies between programs, if the stage before has a mesh of another shape.
        sent_as: how what it sends lies between programs, if the stage after has a mesh of another shape.
    """

    code: StageCode
    kinds: Kinds
    mesh: Mesh
    received_as: tuple[PartitionSpec, ...] | None = None
    sent_as: tuple[PartitionSpec, ...] | None = None

    @property
    def rest(self) -> tuple[int, ...]:
        """Which other variables it reads."""
        return tuple(i - len(self.kinds.params) for i in self.code.others if i < self._first_batch)

    @property
    def changed(self) -> tuple[int, ...]:
        """Which other variables its forward changes."""
        return tuple(i - self.kinds.num_sums for i in self.code.results if i >= self.kinds.num_sums)

    @property
    def batch(self) -> tuple[int, ...]:
        """Which arrays of the batch it reads; the last number is the microbatch's number."""
        return tuple(i - self._first_batch for i in self.code.others if i >= self._first_batch)

    @property
    def _first_batch(self) -> int:
        return len(self.kinds.params) + len(self.kinds.rest)

    def between(self, type_: Any, where: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a value of this type between programs."""
        where = spec(type_, self.mesh.axis_names) if where is None else where
        parts = entries(where, 1 + type_.ndim)
        shape = (
            size * math.prod(self.mesh.shape[axis] for axis in names)
            for size, names in zip((1, *type_.shape), parts, strict=True)
        )
        return jax.ShapeDtypeStruct(tuple(shape), type_.dtype, sharding=NamedSharding(self.mesh, where))

    @functools.cached_property
    def received(self) -> list[jax.ShapeDtypeStruct]:
        """What it wants to receive, between programs."""
        return self._crossing(self.code.received, self.received_as)

    @property
    def sent(self) -> list[jax.ShapeDtypeStruct]:
        """What it sends, between programs."""
        return self._crossing(self.code.sent, self.sent_as)

    @functools.cached_property
    def after(self) -> list[jax.ShapeDtypeStruct]:
        """The gradients of what it sent that it wants, between programs."""
        return self._crossing(self.code.gradients_after, _of_floating(self.code.sent, self.sent_as))

    def _crossing(
        self, types: Sequence[Any], lies: Sequence[PartitionSpec] | None
    ) -> list[jax.ShapeDtypeStruct]:
        return list(map(self.between, types, [None] * len(types) if lies is None else lies))

    def _crossing_specs(
        self, types: Sequence[Any], lies: Sequence[PartitionSpec] | None
    ) -> list[PartitionSpec]:
        """How values that cross a boundary lie on this side of it."""
        return self.specs(types) if lies is None else [live(some, self.mesh) for some in lies]

    @functools.cached_property
    def start(self) -> Callable[..., Any]:
        """`(params, changed variables) -> (sums, gradients, changed variables)`, between programs."""

        def run(params: Leaves, changed: Leaves) -> tuple[Leaves, Leaves, Leaves]:
            zeros = [_zeros(t) for t in self.sum_types]
            changed = [vary(x, self.kinds.rest_marks[i]) for i, x in zip(self.changed, changed, strict=True)]
            grads = [_zeros(t) for t in self.grad_types]
            return _stack(zeros), _stack(grads), _stack(changed)

        rest = [self.kinds.rest[i] for i in self.changed]
        out = (self.specs(self.sum_types), self.specs(self.grad_types), self.specs(self.changed_types))
        return self._program(run, (self._param_specs, rest), out)

    @functools.cached_property
    def forward(self) -> Callable[..., Any]:
        """`(params, fixed variables, changed variables, batch, number, received, sums)` -> the same side of the stage:
        `(sent, kept, changed variables, sums)`."""

        def run(
            params: Leaves,
            fixed: Leaves,
            changed: Leaves,
            batch: Leaves,
            number: Any,
            received: Leaves,
            sums: Leaves,
        ) -> tuple[Leaves, ...]:
            made = self.run_forward(
                params, fixed, _unstack(changed), batch, number, _unstack(received), _unstack(sums)
            )
            return tuple(map(_stack, made))

        fixed = [self.kinds.rest[i] for i in self.fixed]
        batch = [self.kinds.batch for _ in self.arrays]
        changed, sums = self.specs(self.changed_types), self.specs(self.sum_types)
        return self._program(
            run,
            (
                self._param_specs,
                fixed,
                changed,
                batch,
                PartitionSpec(),
                self._received_specs,
                sums,
            ),
            (self._sent_specs, self.specs(self.code.kept), changed, sums),
            donate=(6,),
        )

    @functools.cached_property
    def backward(self) -> Callable[..., Any]:
        """`(params, kept, received, gradients of sent, gradients) -> (gradients of received, gradients)`."""

        def run(
            params: Leaves, kept: Leaves, received: Leaves, after: Leaves, grads: Leaves
        ) -> tuple[Leaves, Leaves]:
            values = (self.marked(params), *map(_unstack, (kept, received, after)))
            outputs = self.code.backward(*(x for leaves in values for x in leaves))
            new, before = outputs[: len(grads)], outputs[len(grads) :]
            return _stack(before), _stack(_added(_unstack(grads), new))

        grads = self.specs(self.grad_types)
        return self._program(run, (*self._backward_specs, grads), (self._before_specs, grads), donate=(4,))

    @functools.cached_property
    def inputs(self) -> Callable[..., Any]:
        """`(params, kept, received, gradients of sent) -> (gradients of received, carry)`."""

        def run(params: Leaves, kept: Leaves, received: Leaves, after: Leaves) -> tuple[Leaves, Leaves]:
            values = (self.marked(params), *map(_unstack, (kept, received, after)))
            outputs = self.code.halves.first(*(x for leaves in values for x in leaves))
            num = self.code.halves.num_first
            return _stack(outputs[:num]), _stack(outputs[num:])

        out = (self._before_specs, self.specs(self.code.halves.carry_types))
        return self._program(run, self._backward_specs, out)

    def kept_for_weights(self, kept: Leaves, received: Leaves, after: Leaves) -> Leaves:
        """What W uses of what I was given, parameters apart."""
        flat = [*kept, *received, *after]
        return [
            flat[i - len(self.code.params)]
            for i in self.code.halves.second_uses
            if i >= len(self.code.params)
        ]

    @functools.cached_property
    def weights(self) -> Callable[..., Any]:
        """`(params, what W uses, carry, gradients) -> gradients`."""
        num_params = len(self.code.params)
        uses = self.code.halves.second_uses
        specs = [*self.specs(self.code.kept), *self._received_specs, *self._after_specs]

        def run(params: Leaves, used: Leaves, carry: Leaves, grads: Leaves) -> Leaves:
            marked = self.marked(params)
            of_params = [marked[i] for i in uses if i < num_params]
            new = self.code.halves.second(*of_params, *_unstack(used), *_unstack(carry))
            return _stack(_added(_unstack(grads), new))

        grads = self.specs(self.grad_types)
        used = [specs[i - num_params] for i in uses if i >= num_params]
        carry = self.specs(self.code.halves.carry_types)
        return self._program(run, (self._param_specs, used, carry, grads), grads, donate=(3,))

    @property
    def fixed(self) -> tuple[int, ...]:
        """Which other variables it reads and does not change."""
        return tuple(i for i in self.rest if i not in self.changed)

    @property
    def arrays(self) -> tuple[int, ...]:
        """Which arrays of the batch it reads."""
        return tuple(i for i in self.batch if i != self.code.number)

    @property
    def sums(self) -> tuple[int, ...]:
        """Which sums it makes."""
        return tuple(i for i in self.code.results if i < self.kinds.num_sums)

    @property
    def sum_types(self) -> list[Any]:
        """Their types."""
        types = dict(zip(self.code.results, self.code.result_types, strict=True))
        return [types[i] for i in self.sums]

    @property
    def changed_types(self) -> list[Any]:
        """Types of the variables that it changes."""
        types = dict(zip(self.code.results, self.code.result_types, strict=True))
        return [types[self.kinds.num_sums + i] for i in self.changed]

    @property
    def grad_types(self) -> list[Any]:
        """Types of the sums of gradients, in fp32 at least."""
        return [t.update(dtype=jnp.promote_types(t.dtype, jnp.float32)) for t in self.code.gradients]

    @property
    def _param_specs(self) -> list[PartitionSpec]:
        if self.kinds.is_gathered:
            return self.specs(self.code.param_types)
        return [self.kinds.params[i] for i in self.code.params]

    @property
    def _backward_specs(self) -> tuple[list[PartitionSpec], ...]:
        return (self._param_specs, self.specs(self.code.kept), self._received_specs, self._after_specs)

    @property
    def _received_specs(self) -> list[PartitionSpec]:
        return self._crossing_specs(self.code.received, self.received_as)

    @property
    def _sent_specs(self) -> list[PartitionSpec]:
        return self._crossing_specs(self.code.sent, self.sent_as)

    @property
    def _before_specs(self) -> list[PartitionSpec]:
        """Of gradients of what it received."""
        lies = _of_floating(self.code.received, self.received_as)
        return self._crossing_specs(self.code.gradients_before, lies)

    @property
    def _after_specs(self) -> list[PartitionSpec]:
        """Of gradients of what it sent."""
        return self._crossing_specs(self.code.gradients_after, _of_floating(self.code.sent, self.sent_as))

    def run_forward(
        self,
        params: Leaves,
        fixed: Leaves,
        changed: Leaves,
        batch: Leaves,
        number: Any,
        received: Leaves,
        sums: Leaves,
    ) -> tuple[Leaves, Leaves, Leaves, Leaves]:
        """F on one device: `(sent, kept, changed variables, sums)`."""
        others = self._others(fixed, changed, batch, number)
        values = iter(self.code.forward(*self.marked(params), *others, *received))
        sent, results, kept = (
            [next(values) for _ in types]
            for types in (self.code.sent, self.code.result_types, self.code.kept)
        )
        made = dict(zip(self.code.results, results, strict=True))
        sums = [old + made[i] for i, old in zip(self.sums, sums, strict=True)]
        return sent, kept, [made[self.kinds.num_sums + i] for i in self.changed], sums

    def marked(self, params: Leaves) -> Leaves:
        """This device's parameters as the programs take them."""
        if self.kinds.is_gathered:
            return _unstack(params)
        return [vary(p, self.kinds.param_marks[i]) for i, p in zip(self.code.params, params, strict=True)]

    def _others(self, fixed: Leaves, changed: Leaves, batch: Leaves, number: Any) -> Leaves:
        """The inputs of the whole program that are no parameters, in its order."""
        variables = dict(zip(self.fixed, fixed, strict=True)) | dict(zip(self.changed, changed, strict=True))
        variables = {i: vary(x, self.kinds.rest_marks[i]) for i, x in variables.items()}
        arrays = {i: self._rows(x, number) for i, x in zip(self.arrays, batch, strict=True)}
        return [
            *(variables[i] for i in self.rest),
            *(number if i == self.code.number else arrays[i] for i in self.batch),
        ]

    def _rows(self, x: jax.Array, number: jax.Array) -> jax.Array:
        """This device's rows of one microbatch."""
        rows, first = dealt(x.shape[0], self.kinds.n_microbatches, is_smaller=self.kinds.is_smaller)
        return jax.lax.dynamic_slice_in_dim(x, number * rows + first, rows)

    def specs(self, types: Sequence[Any]) -> list[PartitionSpec]:
        """How values of these types lie between programs."""
        return [spec(t, self.mesh.axis_names) for t in types]

    def _program(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        return jax.jit(
            jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs), donate_argnums=donate
        )


def _of_floating(types: Sequence[Any], lies: Sequence[PartitionSpec] | None) -> list[PartitionSpec] | None:
    """How gradients of values lie: as the values, of which those that are floating have one."""
    if lies is None:
        return None
    return [some for some, type_ in zip(lies, types, strict=True) if is_floating(type_)]


def _zeros(type_: Any) -> jax.Array:
    return vary(jnp.zeros(type_.shape, type_.dtype), tuple(_compat.varying_axes(type_)))


def _stack(values: Leaves) -> Leaves:
    return [stack(x) for x in values]


def _unstack(values: Leaves) -> Leaves:
    return [unstack(x) for x in values]


def _added(sums: Leaves, new: Leaves) -> Leaves:
    return [old + x.astype(old.dtype) for old, x in zip(sums, new, strict=True)]
