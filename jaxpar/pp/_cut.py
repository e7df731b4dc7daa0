"""Cut a traced program into stages by data flow.

    program   tokens, embedding -> x0 -> [mark 1] -> x1 -> [mark 2] -> x2, targets, embedding -> loss
    stage 0   tokens, embedding -> x0                    sends x0
    stage 1   x0                -> x1                    sends x1, and x0 too if stage 2 uses it (a skip connection)
    stage 2   x1, targets, embedding -> loss

What lies behind mark k belongs to stage k or a later one. What comes of parameters alone (a cast, a transpose) or of the
batch alone (a mask, targets) is made again in every stage that uses it; nothing of it travels. What comes of both and of
no mark (an embedding) belongs to the first stage that uses it. Values that later stages use travel through all stages
between, so schedules know neighbours only, and their gradients come back the same way.

A variable that the program changes (a running mean, a count of random keys) goes from microbatch to microbatch within its
stage. If several stages read it, each must be able to make its new value for itself: of variables or of the batch alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar import _compat
from jaxpar._errors import ParallelizeError

_STATE, _BATCH = "state", "batch"


@dataclass(frozen=True, eq=False)
class Piece:
    """One stage of a program: `(*reads, *received) -> (*sent, *results)`.

    Args:
        program: its closed jaxpr.
        reads: which inputs of the whole program it reads.
        num_received: how many values come from the stage before.
        num_sent: how many go to the stage after.
        results: which outputs of the whole program it makes.
    """

    program: Any
    reads: tuple[int, ...]
    num_received: int
    num_sent: int
    results: tuple[int, ...]


def cut(
    closed: Any,
    is_state: Sequence[bool],
    n_stages: int,
    updates: Sequence[tuple[int, int]] = (),
    *,
    may_idle: bool = False,
) -> tuple[Piece, ...]:
    """The stages of a traced program whose entries are marked 1 to n_stages - 1.

    Args:
        closed: a closed jaxpr without nested calls around marks.
        is_state: for each input whether it is a parameter or another variable of the model; else it is of the batch.
        n_stages: how many stages.
        updates: for each variable that the next microbatch is given changed: its input, and the output that it becomes.
        may_idle: let stages pass that have nothing to do.

    Raises:
        ParallelizeError: a mark is missing, comes twice or out of order, a stage has nothing to do, or one stage changes a
            variable that another one reads.
    """
    return _Cutter(closed, tuple(is_state), n_stages, dict(updates)).pieces(may_idle=may_idle)


class _Cutter:
    def __init__(
        self, closed: Any, is_state: tuple[bool, ...], n_stages: int, updates: dict[int, int]
    ) -> None:
        self.jaxpr, self.consts, self.n_stages = closed.jaxpr, closed.consts, n_stages
        self.updates = updates
        # Of each variable: what it comes of, and the stage behind whose mark it lies (-1: behind none).
        self.made_of: dict[Any, frozenset[str]] = {}
        self.anchor: dict[Any, int] = {}
        for variable, state in zip(self.jaxpr.invars, is_state, strict=True):
            self.made_of[variable] = frozenset({_STATE if state else _BATCH})
        self._follow_forward()
        self.stage_of = self._place()
        self._drop_marks()

    def _follow_forward(self) -> None:
        seen: set[int] = set()
        for equation in self.jaxpr.eqns:
            operands = _variables(equation.invars)
            made_of = frozenset().union(*(self.made_of.get(v, frozenset()) for v in operands))
            anchor = max((self.anchor.get(v, -1) for v in operands), default=-1)
            mark = _compat.marked_stage(equation)
            if mark is not None:
                seen.add(mark)
                if anchor == mark:
                    raise ParallelizeError(
                        f"pipeline: stage {mark} is entered twice: the module at its beginning is called again with what "
                        f"comes of its first call. Split at modules that the model calls once."
                    )
                if anchor > mark:
                    raise ParallelizeError(
                        f"pipeline: stage {mark} begins behind stage {anchor}: the split points are not in the order in "
                        f"which the model calls them. Name them in the order of calls."
                    )
                anchor = mark if len(made_of) > 1 or anchor >= 0 else anchor
            for variable in equation.outvars:
                self.made_of[variable], self.anchor[variable] = made_of, anchor
        missing = set(range(1, self.n_stages)) - seen
        if missing:
            raise ParallelizeError(
                f"pipeline: the beginning of stage {min(missing)} was never reached while tracing the loss: its module is "
                f"not called, or only inside jax.lax.scan, jax.lax.cond, jax.checkpoint or a unit of fully_shard, where a cut "
                f"cannot be made. Split at modules that the model calls in plain Python, and at units or between them."
            )

    def _is_floating(self, variable: Any) -> bool:
        """Whether a variable is cheap to make wherever it is used: of parameters alone, or of the batch alone."""
        return self.anchor.get(variable, -1) < 0 and len(self.made_of.get(variable, ())) < 2

    def _place(self) -> dict[int, int | None]:
        """The stage of each equation, by number; None for one that each stage makes for itself."""
        stage_of: dict[int, int | None] = {}
        used_in: dict[Any, int] = {}  # the first stage that uses a variable
        for number in reversed(range(len(self.jaxpr.eqns))):
            equation = self.jaxpr.eqns[number]
            if all(map(self._is_floating, equation.outvars)):
                stage_of[number] = None
                continue
            anchor = max(self.anchor[variable] for variable in equation.outvars)
            mark = _compat.marked_stage(equation)
            if anchor < 0:
                stage = min((used_in.get(v, self.n_stages) for v in equation.outvars), default=self.n_stages)
                stage = 0 if stage == self.n_stages else stage
            else:
                stage = anchor
            stage_of[number] = stage
            for variable in _variables(equation.invars):
                first = stage - 1 if mark is not None else stage
                used_in[variable] = min(used_in.get(variable, self.n_stages), max(first, 0))
        return stage_of

    def _drop_marks(self) -> None:
        """Marks have done their work; without them a value has one name, travels once and is not kept beside itself."""
        names: dict[Any, Any] = {}
        equations: list[Any] = []
        stage_of: dict[int, int | None] = {}

        def unmarked(atoms: Sequence[Any]) -> list[Any]:
            return [a if _compat.is_literal(a) else names.get(a, a) for a in atoms]

        for number, equation in enumerate(self.jaxpr.eqns):
            if _compat.marked_stage(equation) is None:
                stage_of[len(equations)] = self.stage_of[number]
                equations.append(equation.replace(invars=unmarked(equation.invars)))
            else:
                names |= zip(equation.outvars, unmarked(equation.invars), strict=True)
        outputs = unmarked(self.jaxpr.outvars)
        self.jaxpr = _compat.sub_program(self.jaxpr, self.jaxpr.invars, outputs, equations)
        self.stage_of = stage_of

    def pieces(self, *, may_idle: bool) -> tuple[Piece, ...]:
        if not may_idle:
            self._check_work()
        home = {
            variable: stage
            for number, stage in self.stage_of.items()
            for variable in self.jaxpr.eqns[number].outvars
            if stage is not None
        }
        last_use = self._last_uses()
        results = self._result_stages(home)
        crossing = [
            [v for v, stage in home.items() if stage < boundary <= last_use.get(v, -1)]
            for boundary in range(self.n_stages + 1)
        ]
        return tuple(
            self._piece(
                stage,
                crossing[stage],
                crossing[stage + 1],
                [i for i in sorted(results) if stage in results[i]],
            )
            for stage in range(self.n_stages)
        )

    def _check_work(self) -> None:
        idle = set(range(self.n_stages)) - set(self.stage_of.values())
        if idle:
            stage = min(idle)
            raise ParallelizeError(
                f"pipeline: stage {stage} of {self.n_stages} has nothing to do: no computation lies between its beginning "
                f"and that of stage {stage + 1}. (What comes of the batch alone, or of parameters alone, is made again by "
                f"every stage that uses it.) Remove the split point."
            )

    def _last_uses(self) -> dict[Any, int]:
        """The last stage that uses each variable, also through what it makes for itself."""
        last: dict[Any, int] = {}
        for number in reversed(range(len(self.jaxpr.eqns))):
            equation = self.jaxpr.eqns[number]
            stage = self.stage_of[number]
            if stage is None:
                continue
            for variable in _variables(equation.invars):
                last[variable] = max(last.get(variable, -1), stage)
        return last

    def _result_stages(self, home: dict[Any, int]) -> dict[int, frozenset[int]]:
        """Which stages make each output: its home; or if it comes of inputs alone, the first that reads them anyway.

        The new value of a variable is made by all stages that read the old one. What stays as it is nobody makes.
        """
        reads = [
            self._needed_inputs([e for n, e in enumerate(self.jaxpr.eqns) if self.stage_of[n] == stage])
            for stage in range(self.n_stages)
        ]
        unchanged = {o for i, o in self.updates.items() if self.jaxpr.outvars[o] is self.jaxpr.invars[i]}
        stages: dict[int, frozenset[int]] = {}
        for number, atom in enumerate(self.jaxpr.outvars):
            if number in unchanged:
                continue
            if not _compat.is_literal(atom) and atom in home:
                stages[number] = frozenset({home[atom]})
                continue
            old = {i for i, o in self.updates.items() if o == number}
            needed = self._needed_inputs([], outputs=[atom])
            first = next((s for some in (old, needed) for s, inputs in enumerate(reads) if inputs & some), 0)
            stages[number] = frozenset({first})
            reads[first] |= needed
        changed = [(i, o) for i, o in self.updates.items() if o not in unchanged]
        while any([self._follow_readers(i, o, home, reads, stages) for i, o in changed]):
            pass
        return stages

    def _follow_readers(
        self, i: int, o: int, home: dict[Any, int], reads: list[set[int]], stages: dict[int, frozenset[int]]
    ) -> bool:
        """Let every stage that reads variable `i` make its new value, output `o`; whether that was news."""
        atom = self.jaxpr.outvars[o]
        missing = {stage for stage, inputs in enumerate(reads) if i in inputs} - stages[o]
        if not missing:
            return False
        if not _compat.is_literal(atom) and atom in home:
            raise ParallelizeError(
                f"pipeline: stage {home[atom]} changes a variable of the model, {self.jaxpr.invars[i].aval}, that stage "
                f"{min(missing)} reads too. Stages work on different microbatches at the same time, so neither could wait for "
                f"the other's value. Split where all that uses the variable lies in one stage, or give each stage its own."
            )
        stages[o] |= missing
        for stage in missing:
            reads[stage] |= self._needed_inputs([], outputs=[atom])
        return True

    def _needed_inputs(self, equations: Sequence[Any], outputs: Sequence[Any] = ()) -> set[int]:
        """Inputs of the program that some equations use, also through what is made of inputs alone."""
        wanted = {v for e in equations for v in _variables(e.invars)} | set(_variables(outputs))
        for number in reversed(range(len(self.jaxpr.eqns))):
            equation = self.jaxpr.eqns[number]
            if self.stage_of[number] is None and wanted & set(equation.outvars):
                wanted |= set(_variables(equation.invars))
        return {i for i, variable in enumerate(self.jaxpr.invars) if variable in wanted}

    def _piece(self, stage: int, received: list[Any], sent: list[Any], results: list[int]) -> Piece:
        equations = [e for n, e in enumerate(self.jaxpr.eqns) if self.stage_of[n] in (stage, None)]
        outputs = [*sent, *(self.jaxpr.outvars[i] for i in results)]
        program = _compat.sub_program(self.jaxpr, [*self.jaxpr.invars, *received], outputs, equations)
        program, used = _compat.without_unused(program, [True] * len(outputs))
        reads = tuple(i for i in range(len(self.jaxpr.invars)) if used[i])
        inputs = [*(self.jaxpr.invars[i] for i in reads), *received]
        program = _compat.closed(_compat.sub_program(program, inputs, outputs, program.eqns), self.consts)
        return Piece(program, reads, len(received), len(sent), tuple(results))


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not _compat.is_literal(atom)]
