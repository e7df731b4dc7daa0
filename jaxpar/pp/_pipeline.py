"""`pipeline`: say how a model is cut into stages and in which order they run; a `TrainStep` does it.

model     the same object, its class swapped for one that carries the plan
TrainStep(loss_fn, model, ...)     traces the loss once, cuts it, and runs the schedule
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import ModuleT, swap_class
from jaxpar.mesh import MeshLike, as_jax_mesh, axes_of
from jaxpar.pp._balance import Balance, Sample, balanced_splits
from jaxpar.pp._by_hand import PipelineStages
from jaxpar.pp._schedule._action import COMPUTE
from jaxpar.pp._schedule._get_schedule import find_builder, get_schedule
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._shapes import Shapes, checked_shapes
from jaxpar.pp._split_points import SplitPoint, Splits, check_splits
from jaxpar.pp._transport._choose import TransportName, check_transport

PLAN = "_jaxpar_pipeline"
Executor = Literal["mpmd", "spmd"]


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is pipelined; an attribute of its class.

    Args:
        axis: the mesh axis over which stages lie.
        splits: where stages begin.
        schedule: who does what, in which order.
        remat: whether a stage keeps only what it receives, and computes its forward again in the backward.
        transport: how arrays get from stage to stage between processes.
        executor: what runs the schedule.
        shapes: ranks with other sizes of the other axes than the mesh has, and these.
    """

    axis: str
    splits: Splits
    schedule: Schedule
    remat: bool
    transport: TransportName
    executor: Executor = "mpmd"
    shapes: Shapes = ()


def pipeline(
    model: ModuleT,
    mesh: MeshLike,
    *,
    split_spec: Mapping[str, SplitPoint] | None = None,
    n_stages: int | None = None,
    balance: Balance = "params",
    sample: Sample | None = None,
    schedule: str | Schedule = "1F1B",
    n_microbatches: int | None = None,
    remat: bool = False,
    transport: TransportName = "auto",
    executor: Executor = "mpmd",
    shapes: Mapping[int, Mapping[str, int]] | None = None,
) -> ModuleT:
    """Pipelines a model over a mesh axis: `TrainStep` cuts its loss into stages and runs them by the schedule.

    The cut is made in the traced program, by data flow: skip connections, masks, keyword arguments and tied weights need
    no change of the model. Over the axis travel, for each microbatch, the activations between neighbour stages, and
    their gradients back. Parameters and their optimizer state move to the devices of their stage in the first step; to call
    the model after that, see `gathered`. Sources: PyTorch's `pipeline` and `PipelineStage` (parity PP1, PP3).

    Args:
        model: a Flax NNX module, already given to `fully_shard`, `parallelize_module` or `DistributedDataParallel` over
            other axes, or not.
        mesh: one mesh axis, as `mesh["pp"]`; its size is the number of ranks.
        split_spec: module names and "beginning" or "end": where stages begin, in the order in which they run.
        n_stages: instead, how many stages: cut between the modules of the model's longest list, so that the heaviest
            stage is as light as possible. Default: those of `PipelineStages`; for another model, one for each rank.
        balance: what stages weigh: "params", the parameters of these modules; "flops", what the sample computes, an
            embedding before and a head behind the modules included; "time", seconds that this takes here, forward and
            backward.
        sample: for "flops" and "time": `(loss_fn, batch)`, the loss function of the `TrainStep` and a batch; the rows of
            one device and microbatch are best. For "flops", shapes and dtypes are enough.
        schedule: a name for `get_schedule`, or a `Schedule` for these stages; of one that spells out messages, gathers or
            reductions, the computations count.
        n_microbatches: in how many parts each step takes its batch; for a schedule given by name.
        remat: keep only what stages receive, and compute the forward again in the backward.
        transport: between processes: "pull" posts what is sent at a server of each process, and the neighbour pulls it
            (`jax.experimental.transfer`; asynchronous); "permute" runs one small collective program on the devices of both
            ranks for each message. "auto" takes the first where the platform has it; on CPU the second, if a stage lies on
            several processes. Within a process the runtime copies.
        executor: what runs the schedule. `"mpmd"`: a program for each action, on the devices of its stage; ranks wait only for
            what they need. `"spmd"`: the whole schedule as one program over the whole mesh, a loop of ticks: nothing is
            dispatched between actions, messages travel beside computations, and the program can be compiled ahead of time;
            but a tick lasts as long as its slowest rank (`simulate(..., lockstep=True)`), so stages should be alike and the
            schedule made for it: "LockStep1F1B". Take it where actions are short against the cost of a dispatch.
        shapes: for some ranks other sizes of the axes beside the pipeline's, as in `{0: {"dp": 4, "tp": 1}}`: the rank's devices
            are arranged anew, axes that are not named keep the mesh's size, and the product stays. Gradients, dropout and
            the rows of each microbatch are as before. What crosses to a rank of another shape must be an array of which each rank
            of an axis has one block along one dim (rows, a sequence split by `tp`), or all have all of it: it is laid out anew, on
            whichever side less has to move. With "mpmd", in one process.

    Returns:
        The same object.

    Raises:
        ParallelizeError: a split point that does not exist, too many stages, a balance without a sample, a mesh of several
            axes, a schedule for another number of ranks or stages, or shapes of other numbers of devices.
        ScheduleError: the named schedule is not defined for these numbers.

    Example:
        >>> import jaxpar
        >>> from flax import nnx
        >>> mesh = jaxpar.init_device_mesh((2, 4), ("pp", "dp"))
        >>> model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(4)])
        >>> _ = jaxpar.pp.pipeline(model, mesh["pp"], n_stages=2, n_microbatches=4)
        >>> jaxpar.pp.plan_of(model).splits
        (('layers.2', 'beginning'),)
    """
    check_transport(transport)
    names = axes_of(mesh)
    if len(names) != 1:
        raise ParallelizeError(
            f"pipeline: stages lie along one mesh axis, got a mesh with the axes {names}. Write pipeline(model, mesh['pp'])."
        )
    n_ranks = as_jax_mesh(mesh).shape[names[0]]
    if executor not in get_args(Executor):
        raise ParallelizeError(f"pipeline: executor={executor!r} is none of {get_args(Executor)}.")
    its_shapes = checked_shapes(shapes, as_jax_mesh(mesh), names[0])
    if its_shapes and executor != "mpmd":
        raise ParallelizeError(
            f"pipeline: executor={executor!r} is one program over the whole mesh, in which every rank has the mesh's shape, so it "
            f'cannot have shapes={shapes}. Take executor="mpmd", or leave shapes out.'
        )
    if split_spec is not None and n_stages is not None:
        raise ParallelizeError(
            "pipeline: give split_spec or n_stages, not both: one says where, the other how many."
        )
    if split_spec is not None and balance != "params":
        raise ParallelizeError(
            f"pipeline: split_spec says where to cut, so balance={balance!r} has nothing to choose. Write n_stages={len(split_spec) + 1} "
            f"in place of split_spec, or leave balance out."
        )
    if n_stages is not None and n_stages < 1:
        raise ParallelizeError(f"pipeline: n_stages={n_stages} must be at least 1.")
    if split_spec is not None:
        splits = check_splits(model, split_spec)
    elif isinstance(model, PipelineStages) and n_stages is None:
        splits = check_splits(model, {f"stages.{i}": "beginning" for i in range(1, len(model.stages))})
    else:
        wanted = n_stages or (
            schedule.n_stages if isinstance(schedule, Schedule) else _usual_stages(schedule, n_ranks)
        )
        splits = balanced_splits(model, wanted, balance=balance, sample=sample)
    plan = PipelinePlan(
        names[0],
        splits,
        _schedule(schedule, n_ranks, len(splits) + 1, n_microbatches),
        remat,
        transport,
        executor,
        its_shapes,
    )
    return swap_class(model, "Pipelined", _call, {PLAN: plan})


def plan_of(model: Any) -> PipelinePlan | None:
    """The plan of a model that was given to `pipeline`; None for another one.

    Args:
        model: any module.

    Example:
        >>> from flax import nnx
        >>> plan_of(nnx.Linear(2, 2, rngs=nnx.Rngs(0))) is None
        True
    """
    return getattr(type(model), PLAN, None)


def _call(original: Any, self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _compute_only(schedule: Schedule) -> Schedule:
    """The schedule without what the executor does by itself: messages, gathers, reductions."""
    rows = [[a for a in row if a is None or a.parts[0].op in COMPUTE] for row in schedule.rows]
    return Schedule(rows, schedule.rank_of_stage, memory_limit=schedule.memory_limit)


def _usual_stages(name: str, n_ranks: int) -> int:
    return find_builder(name).usual_stages_per_rank * n_ranks


def _schedule(schedule: str | Schedule, n_ranks: int, n_stages: int, n_microbatches: int | None) -> Schedule:
    if isinstance(schedule, Schedule):
        for what, has, wanted in (
            ("ranks", schedule.n_ranks, n_ranks),
            ("stages", schedule.n_stages, n_stages),
        ):
            if has != wanted:
                raise ParallelizeError(
                    f"pipeline: the schedule is for {has} {what}, but there are {wanted}: the mesh axis has {n_ranks} ranks, "
                    f"the model is cut into {n_stages} stages."
                )
        if n_microbatches not in (None, schedule.n_microbatches):
            raise ParallelizeError(
                f"pipeline: n_microbatches={n_microbatches}, but the schedule is for {schedule.n_microbatches}. Leave it out."
            )
        return _compute_only(schedule)
    if n_microbatches is None:
        raise ParallelizeError(
            f"pipeline: how many microbatches? Write n_microbatches={4 * n_ranks}, for instance."
        )
    if n_stages % n_ranks:
        raise ParallelizeError(
            f"pipeline: {n_stages} stages do not divide among {n_ranks} ranks ({n_stages} % {n_ranks} = {n_stages % n_ranks}), "
            f"as the schedule {schedule!r} wants it. Cut into {-(-n_stages // n_ranks) * n_ranks} stages, or give a Schedule "
            f"with a rank_of_stage of its own."
        )
    return get_schedule(schedule, n_ranks, n_microbatches, stages_per_rank=n_stages // n_ranks)
