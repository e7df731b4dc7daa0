"""Looks at checkpoints from a shell, without devices.

python -m jaxpar.checkpoint list FOLDER              steps, when, how large, metrics
python -m jaxpar.checkpoint show FOLDER [STEP]       arrays with shapes, dtypes and layouts
python -m jaxpar.checkpoint verify FOLDER [STEP]     compares files with what was written; exit code 1 if they differ
"""

import argparse
import sys
from pathlib import Path

import rich.box
import rich.filesize
from rich.console import Console
from rich.table import Table

from jaxpar.checkpoint import CheckpointError, metadata, steps, verify


def main(argv: list[str] | None = None) -> int:
    """Runs one of the three; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpar.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("list", "show", "verify"))
    parser.add_argument("folder", type=Path, help="that was given to CheckpointManager")
    parser.add_argument(
        "step", type=int, nargs="?", help="which checkpoint (default: the latest; list and verify: all)"
    )
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # nothing is cut off in a file
    try:
        chosen = steps(args.folder) if args.step is None else [args.step]
        if not chosen:
            raise CheckpointError(f"{args.folder} has no complete checkpoint.")
        if args.command == "list":
            console.print(_list(args.folder, chosen))
            return 0
        if args.command == "show":
            console.print(_show(args.folder, chosen[-1]))
            return 0
        return _verify(args.folder, chosen, console)
    except CheckpointError as error:
        print(f"python -m jaxpar.checkpoint: {error}", file=sys.stderr)
        return 2


def _list(folder: Path, chosen: list[int]) -> Table:
    table = Table("step", "saved", "processes", "devices", "arrays", "bytes", "metrics", box=rich.box.ASCII)
    for step in chosen:
        found = metadata(folder, step)
        arrays = [x for named in found.arrays.values() for x in named.values()]
        size = rich.filesize.decimal(sum(x.num_bytes for x in arrays))
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items())
        row = (step, found.saved_at, found.num_processes, found.num_devices, len(arrays), size, metrics)
        table.add_row(*map(str, row))
    return table


def _show(folder: Path, step: int) -> Table:
    found = metadata(folder, step)
    table = Table("group", "name", "dtype", "shape", "layout", "bytes", box=rich.box.ASCII)
    for group, named in found.arrays.items():
        for name, x in named.items():
            dtype = x.dtype if x.key is None else f"{x.dtype} (key {x.key})"
            table.add_row(
                group, name, dtype, str(list(x.shape)), x.layout, rich.filesize.decimal(x.num_bytes)
            )
    table.caption = f"data_state {found.data_state}   extra {dict(found.extra)}"
    return table


def _verify(folder: Path, chosen: list[int], console: Console) -> int:
    is_damaged = False
    for step in chosen:
        lines = verify(folder, step)
        is_damaged = is_damaged or bool(lines)
        console.print(f"step {step}: " + ("; ".join(lines) if lines else "as it was written"))
    return int(is_damaged)


if __name__ == "__main__":
    raise SystemExit(main())
