"""The mean of replicas that differ, and where they go on from there.

    replicas  w_0, w_1, ...  --one all-reduce per bucket-->  mean         without an outer optimizer all go on from there
    average before    w                                                   with one:  w <- w + its update(w - mean)

The mean over some of the axes along which replicas lie (those of a node, say) leaves replicas that differ along the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import _compat
from jaxpar.ddp._hooks import allreduce_hook
from jaxpar.ddp._reduce import Reduction, reduce_buckets
from jaxpar.fsdp._offload import on_device
from jaxpar.train._parts import live_spec
from jaxpar.train._replicas import Replicas
from jaxpar.train._update import Update
from jaxpar.train._variables import Variables

Leaves = list[jax.Array]


@dataclass(frozen=True, eq=False)
class Average:
    """The programs that average; each works on the variables in place.

    Args:
        replicas: where they lie.
        model: the variables of the model, which has the last average over all replicas.
        copies: those of the replicas.
        outer: the outer optimizer's; None: there is none.
        reduction: bucket sizes.
        donate: whether the buffers of all of them are used again.
    """

    replicas: Replicas
    model: Variables
    copies: Variables
    outer: Variables | None
    reduction: Reduction
    donate: bool

    def over_all(self) -> Callable[[], None]:
        """The average of all replicas: the model gets it, or what the outer optimizer makes of it."""
        program = self.program_over_all()

        def run() -> None:
            model, copies, outer = program(*self.arguments())
            self.model.assign(*model)
            self.copies.assign(*copies)
            if self.outer is not None:
                self.outer.assign(*outer)

        return run

    def over(self, axes: tuple[str, ...]) -> Callable[[], None]:
        """The average along some of the axes; the model stays as it is."""
        program = self.program_over(axes)
        return lambda: self.copies.assign(*program(self.copies.values()))

    def arguments(self) -> tuple[Any, Any, Any]:
        """What `program_over_all` takes: variables of the replicas, of the model, and of the outer optimizer."""
        if self.outer is None:
            return self.copies.values(), (), ()
        return self.copies.values(), self.model.values()[0], self.outer.values()

    def program_over_all(self) -> jax.stages.Wrapped:
        """Returns values for the model, the replicas, and the outer optimizer."""
        mean = self._mean(self.replicas.axes, is_whole=True)

        def average(copies: tuple[Leaves, Leaves], before: Any, outer: Any) -> Any:
            params, rest = mean(*jax.tree.map(on_device, copies))
            if self.outer is not None:
                params, outer = self._outer_step(params, rest, *jax.tree.map(on_device, (before, outer)))
            repeated = self.replicas.repeated
            own = [
                repeated(x) if is_own else jnp.copy(x)
                for x, is_own in zip(rest, self.replicas.is_own, strict=True)
            ]
            return (params, rest), ([repeated(x) for x in params], own), outer

        values = (self.model.values(), *self.arguments()[::2])
        return self._jitted(average, values, num_donated=3)

    def program_over(self, axes: tuple[str, ...]) -> jax.stages.Wrapped:
        """Returns values for the replicas."""
        mean = self._mean(axes, is_whole=False)

        def average(copies: tuple[Leaves, Leaves]) -> Any:
            return mean(*jax.tree.map(on_device, copies))

        return self._jitted(average, self.copies.values(), num_donated=1)

    def _jitted(self, average: Callable[..., Any], values: Any, num_donated: int) -> jax.stages.Wrapped:
        """`values` lie as the results shall."""
        return jax.jit(
            average,
            out_shardings=jax.tree.map(lambda x: x.sharding, values),
            donate_argnums=range(num_donated) if self.donate else (),
            compiler_options=_compat.compiler_options(self.replicas.mesh.devices.flat[0].platform),
        )

    def _mean(self, axes: tuple[str, ...], *, is_whole: bool) -> Callable[..., Any]:
        """Parameters and floating buffers: of one replica if it is the mean of all, else of each."""
        live = tuple(axis for axis in axes if axis in self.replicas.live)
        stacked = [[live_spec(x.sharding) for x in leaves] for leaves in self.copies.values()]
        one = [[live_spec(x.sharding) for x in leaves] for leaves in self.model.values()]

        def mean(params: Leaves, rest: Leaves) -> tuple[Leaves, Leaves]:
            params, rest = self._summed([x[0] for x in params], self.replicas.taken(rest), live)
            return (params, rest) if is_whole else ([x[None] for x in params], self.replicas.put_back(rest))

        return jax.shard_map(
            mean,
            mesh=self.replicas.mesh,
            in_specs=tuple(stacked),
            out_specs=tuple(one if is_whole else stacked),
        )

    def _summed(self, params: Leaves, rest: Leaves, live: tuple[str, ...]) -> tuple[Leaves, Leaves]:
        num = 1
        for axis in live:
            num *= jax.lax.axis_size(axis)
        own = [i for i, is_own in enumerate(self.replicas.is_own) if is_own]
        shares = [x / num for x in (*params, *(rest[i] for i in own))]
        # A hook is for gradients: to send parameters in bfloat16 would round them.
        reduction = replace(self.reduction, comm_hook=allreduce_hook)
        buckets = reduction.buckets(shares, [live] * len(shares))
        means, _ = reduce_buckets(shares, reduction, buckets, [()] * len(shares))
        for i, value in zip(own, means[len(params) :], strict=True):
            rest[i] = value
        return means[: len(params)], rest

    def _outer_step(
        self, means: Leaves, rest: Sequence[jax.Array], before: Leaves, outer: tuple[Leaves, Leaves]
    ) -> tuple[Leaves, tuple[Leaves, Leaves]]:
        """The outer optimizer's gradient is what the replicas moved by, backwards."""
        assert self.outer is not None
        update = Update(self.model, self.outer, (None,) * len(means), None, lambda mine, _: mine)
        moved = [w - mean for w, mean in zip(before, means, strict=True)]
        (params, _, *outer_values), _ = update(moved, before, list(rest), *outer)
        return params, tuple(outer_values)  # pyright: ignore[reportReturnType]
