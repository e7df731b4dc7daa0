"""The command `python -m jaxpar.pp`: a schedule by name or from a file, checked, simulated, shown, saved.

schedule --name ZBV --ranks 4 --microbatches 8   ->   grid, makespan, bubble and peak memory of each rank; files
compare --ranks 4 --microbatches 8               ->   one line for each schedule that these numbers allow
"""

import argparse
import sys
from collections.abc import Sequence

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._auto_schedule import auto_schedule
from jaxpar.pp._schedule._compare import compare
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._get_schedule import get_schedule, schedule_names
from jaxpar.pp._schedule._passes._communication import add_communication
from jaxpar.pp._schedule._render._render import render
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._schedule._simulate import simulate

USAGE_EXIT_CODE = 2
_SEARCH = "auto"

_OVERVIEW = """\
Pipeline schedules: who computes what, when.

examples:
  python -m jaxpar.pp compare --ranks 4 --microbatches 8
  python -m jaxpar.pp schedule --name 1F1B --ranks 4 --microbatches 8
  python -m jaxpar.pp schedule --name ZBV --ranks 4 --microbatches 8 --costs F=1,I=1.1,W=0.8 --svg zbv.svg
  python -m jaxpar.pp schedule --name auto --ranks 4 --microbatches 8 --costs I=1.2,W=0.8 --memory-limit 3
  python -m jaxpar.pp schedule --from-csv mine.csv --trace mine.json

how to read a grid: one row for each rank, one column for each step, a dot where the rank waits.
  2F0  forward of microbatch 0 on stage 2      2B0  its backward      2I0, 2W0  the backward's two halves
"""

_SCHEDULE = """\
Show one schedule: its grid, and the time, bubble and peak memory of each rank.

The schedule is proved lawful before anything is printed: every stage runs every microbatch once, in an
order that cannot deadlock. A file that breaks a law is refused; the message marks the cell.
"""

_COMPARE = """\
Compare all schedules that are defined for these numbers, the fastest first.

Costs are those of one rank's share of the model; with v stages on each rank, a stage takes and holds 1/v
of it, and messages stay as large. So all times, and all peaks, are in the same unit. With a memory limit
only what fits is listed, and beside it what a search finds within the limit.
"""

_COSTS = (
    "durations, link and memory, as name=number: F, B, I, W, OVERLAP_F_B, UNSHARD, RESHARD, REDUCE_GRAD, latency, "
    "bandwidth, message_bytes, activation, kept_for_W (default: F=1,I=1,W=1, B is I+W, messages take no time)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 for a mistake of the user's.

    Example:
        >>> main(["schedule", "--name", "1F1B", "--ranks", "1", "--microbatches", "2"])
        rank 0 | 0F0 0B0 0F1 0B1
        <BLANKLINE>
        makespan 6, 0.0 % idle
        rank  busy  idle  bubble  peak memory
           0     6     0    0.0%            1
        0
    """
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except (ScheduleError, OSError) as error:
        print(f"python -m jaxpar.pp: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    return 0


def _run_schedule(options: argparse.Namespace) -> None:
    costs = Costs.parse(options.costs)
    schedule = _chosen(options, costs)
    if options.communication and not schedule.has_communication:
        schedule = add_communication(schedule)
    timeline = simulate(schedule, costs, lockstep=options.lockstep)
    print(schedule, timeline, sep="\n\n")
    if options.csv is not None:
        schedule.to_csv(options.csv)
    for path in (options.svg, options.trace):
        if path is not None:
            render(timeline, path)


def _chosen(options: argparse.Namespace, costs: Costs) -> Schedule:
    given = (options.name, options.ranks, options.microbatches)
    if options.from_csv is not None:
        if any(number is not None for number in (*given, options.stages_per_rank, options.memory_limit)):
            raise ScheduleError(
                "--from-csv reads everything from the file: leave out --name, --ranks, --microbatches, "
                "--stages-per-rank and --memory-limit."
            )
        return Schedule.from_csv(options.from_csv)
    if any(number is None for number in given):
        raise ScheduleError(
            "give --name, --ranks and --microbatches, for instance --name 1F1B --ranks 4 --microbatches 8, "
            f"or --from-csv FILE. The names are {', '.join(schedule_names())}."
        )
    if options.name == _SEARCH:
        v = options.stages_per_rank or 1
        return auto_schedule(*given[1:], costs, options.memory_limit, stages_per_rank=v)
    if options.memory_limit is not None:
        raise ScheduleError(
            f"--memory-limit bounds a search: write --name {_SEARCH}, or compare all schedules."
        )
    return get_schedule(*given, stages_per_rank=options.stages_per_rank)


def _run_compare(options: argparse.Namespace) -> None:
    costs, limit = Costs.parse(options.costs), options.memory_limit
    table = compare(options.ranks, options.microbatches, costs, memory_limit=limit, lockstep=options.lockstep)
    print(table)


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m jaxpar.pp", description=_OVERVIEW, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="command")
    one = commands.add_parser(
        "schedule", help="show, check and save one schedule", description=_SCHEDULE, formatter_class=form
    )
    one.add_argument(
        "--name", help=f"one of {', '.join(schedule_names())}, an alias such as ZBV, or {_SEARCH} to search"
    )
    one.add_argument("--ranks", type=int, metavar="P", help="ranks of the pipeline")
    one.add_argument("--microbatches", type=int, metavar="M", help="microbatches of one step")
    one.add_argument(
        "--stages-per-rank",
        type=int,
        metavar="V",
        help="stages on each rank (default: the schedule's usual number)",
    )
    one.add_argument("--from-csv", metavar="FILE", help="read the schedule from PyTorch's CSV instead")
    one.add_argument("--communication", action="store_true", help="spell out sends and receives")
    one.add_argument("--csv", metavar="FILE", help="save the grid as PyTorch's CSV")
    one.add_argument("--svg", metavar="FILE", help="draw the timeline; FILE may also end in .png or .pdf")
    one.add_argument("--trace", metavar="FILE", help="save a .json trace for Chrome or Perfetto")
    one.set_defaults(run=_run_schedule)
    every = commands.add_parser(
        "compare", help="compare all schedules in one table", description=_COMPARE, formatter_class=form
    )
    every.add_argument("--ranks", type=int, metavar="P", required=True, help="ranks of the pipeline")
    every.add_argument(
        "--microbatches", type=int, metavar="M", required=True, help="microbatches of one step"
    )
    every.set_defaults(run=_run_compare)
    for command in (one, every):
        command.add_argument(
            "--memory-limit",
            type=float,
            metavar="X",
            help="what a rank may hold, in the unit of the activation's cost",
        )
        command.add_argument("--costs", default="", metavar="LIST", help=_COSTS)
        command.add_argument(
            "--lockstep", action="store_true", help="simulate a tick loop: all ranks wait after every action"
        )
    return parser
