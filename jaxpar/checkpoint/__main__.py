"""Looks at checkpoints from a shell, and turns them into safetensors files and back, without model and devices.

python -m jaxpar.checkpoint list FOLDER              steps, when, how large, metrics
python -m jaxpar.checkpoint show FOLDER [STEP]       arrays with shapes, dtypes and layouts
python -m jaxpar.checkpoint verify FOLDER [STEP]     compares files with what was written; exit code 1 if they differ
python -m jaxpar.checkpoint export FOLDER OUT [STEP] [--dtype bfloat16]     the model's arrays as safetensors files
python -m jaxpar.checkpoint import FILES FOLDER [STEP]                      safetensors files as a checkpoint, of step 0
"""

import argparse
import sys
from pathlib import Path

import jax
import rich.box
import rich.filesize
from rich.console import Console
from rich.table import Table

from jaxpar.checkpoint import (
    CheckpointError,
    checkpoint_to_safetensors,
    metadata,
    safetensors_to_checkpoint,
    steps,
    verify,
)


def main(argv: list[str] | None = None) -> int:
    """Runs one of them; the exit code."""
    args = _parser().parse_args(argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # nothing is cut off in a file
    try:
        if args.command in ("export", "import"):
            jax.config.update("jax_platforms", "cpu")  # nothing is computed
            return _export(args, console) if args.command == "export" else _import(args, console)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpar.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    folder = "that was given to CheckpointManager"
    for name, default, about in (
        ("list", "all", "what a folder has"),
        ("show", "the latest", "what a checkpoint holds"),
        ("verify", "all", "whether files are as they were written"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("folder", type=Path, help=folder)
        command.add_argument("step", type=int, nargs="?", help=f"which checkpoint (default: {default})")
    export = commands.add_parser("export", help="a checkpoint to safetensors files")
    export.add_argument("folder", type=Path, help=folder)
    export.add_argument("out", type=Path, help="where the files go")
    export.add_argument("step", type=int, nargs="?", help="which checkpoint (default: the latest)")
    export.add_argument("--group", default="model", help="model, optimizer or extra (default: model)")
    export.add_argument("--dtype", help="what floating arrays are rounded to (default: as they are)")
    export.add_argument(
        "--max-shard-bytes", type=int, default=5 * 10**9, metavar="N", help="of a file (default: %(default)s)"
    )
    back = commands.add_parser("import", help="safetensors files to a checkpoint")
    back.add_argument("files", type=Path, help="one file, or a folder of them")
    back.add_argument("folder", type=Path, help="that will be given to CheckpointManager")
    back.add_argument("step", type=int, nargs="?", default=0, help="of the checkpoint (default: 0)")
    return parser


def _export(args: argparse.Namespace, console: Console) -> int:
    checkpoint_to_safetensors(
        args.folder,
        args.out,
        step=args.step,
        group=args.group,
        dtype=args.dtype,
        max_shard_bytes=args.max_shard_bytes,
    )
    step = metadata(args.folder, args.step).step
    console.print(f"step {step} of {args.folder}: {args.group} written to {args.out}")
    return 0


def _import(args: argparse.Namespace, console: Console) -> int:
    safetensors_to_checkpoint(args.files, args.folder, step=args.step)
    console.print(f"{args.files} written as step {args.step} of {args.folder}")
    return 0


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
