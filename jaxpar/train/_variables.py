"""The variables of a module as two flat lists of arrays, and back: what a jitted program takes and returns.

    module  <->  (chosen [p0, p1, ...], rest [r0, r1, ...])  +  structure, fixed when the lists were made

The lists are read from the module's own variables at each step, without splitting its graph again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import leaf_names


@dataclass(frozen=True)
class Variables:
    """Args:
    graphdef: the module's structure.
    treedefs: of the state of the chosen variables and of the rest.
    chosen: the variables that a filter selected.
    rest: all others.
    chosen_filter: the filter.
    """

    graphdef: Any
    treedefs: tuple[Any, Any]
    chosen: tuple[Any, ...]
    rest: tuple[Any, ...]
    chosen_filter: Any

    @classmethod
    def of(cls, module: nnx.Pytree, chosen_filter: Any) -> "Variables":
        """Splits a module; every variable must hold one array."""
        graphdef, chosen, rest = nnx.split(module, chosen_filter, ...)
        by_path = {path: node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}
        lists = []
        for state in (chosen, rest):
            names = leaf_names(state)
            paths = [path for path, _ in nnx.to_flat_state(state)]
            if len(names) != len(paths):
                raise ParallelizeError(
                    f"a variable of {type(module).__name__} holds a pytree instead of one array (leaves: {names}). "
                    f"Give each array a variable of its own."
                )
            lists.append(tuple(by_path[path] for path in paths))
        treedefs = (jax.tree.structure(chosen), jax.tree.structure(rest))
        return cls(graphdef, treedefs, lists[0], lists[1], chosen_filter)

    @property
    def variables(self) -> tuple[Any, ...]:
        """All variables, in the order of both lists."""
        return self.chosen + self.rest

    @property
    def chosen_names(self) -> tuple[str, ...]:
        """Dotted names of the chosen variables."""
        return self._names(0)

    @property
    def rest_names(self) -> tuple[str, ...]:
        """Dotted names of the others."""
        return self._names(1)

    def values(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the arrays that the variables hold now."""
        return [v.get_value() for v in self.chosen], [v.get_value() for v in self.rest]

    def assign(self, chosen: Sequence[jax.Array], rest: Sequence[jax.Array]) -> None:
        """Gives the variables new arrays."""
        for variable, value in zip(self.variables, [*chosen, *rest], strict=True):
            variable.set_value(value)

    def merge(self, chosen: Sequence[Any], rest: Sequence[Any]) -> Any:
        """Builds a module of the same structure around other arrays (tracers)."""
        states = (jax.tree.unflatten(t, x) for t, x in zip(self.treedefs, (chosen, rest), strict=True))
        return nnx.merge(self.graphdef, *states)

    def split(self, module: Any) -> tuple[list[Any], list[Any]]:
        """Takes the arrays out of a module made by `merge`; variables that were added meanwhile are dropped."""
        _, chosen, rest = nnx.split(module, self.chosen_filter, ...)
        return self._known(chosen, 0), self._known(rest, 1)

    def rest_of(self, module: Any) -> list[Any]:
        """The second list of `split`."""
        return self.split(module)[1]

    def _names(self, which: int) -> tuple[str, ...]:
        return leaf_names(jax.tree.unflatten(self.treedefs[which], [0] * self.treedefs[which].num_leaves))

    def _known(self, state: Any, which: int) -> list[Any]:
        if jax.tree.structure(state) == self.treedefs[which]:
            return jax.tree.leaves(state)
        known = nnx.to_flat_state(
            jax.tree.unflatten(self.treedefs[which], [0] * self.treedefs[which].num_leaves)
        )
        now = dict(nnx.to_flat_state(state))
        return [now[path].get_value() for path, _ in known]
