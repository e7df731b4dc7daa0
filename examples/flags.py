"""The flags of `train_lm.py`, grouped as --help shows them; a wrong one is answered with what to write."""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxpar.pp import schedule_names
from parallel import AXES
from transformer import PRESETS

SCHEDULES = tuple(name for name in schedule_names() if name != "ForwardOnly")


def parse_args(
    manual: str, *, strategies: Iterable[str], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line; `manual` is three paragraphs: a sentence, commands to start with, the rest."""
    introduction, commands, rest = manual.split("\n\n")
    parser = argparse.ArgumentParser(
        prog="train_lm.py",
        usage="train_lm.py [--flag value ...]     (--help explains every flag)",
        description=introduction,
        epilog=f"examples:\n{commands}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = Group(parser, "text")
    text.path("--data", "files or folders (default: the sources of Python's own library)", many=True)
    text.count("--max-bytes", 8_000_000, "read at most so much text")
    text.count("--seq", 64, "bytes that the model sees at once")

    model = Group(parser, "model")
    model.choice("--preset", PRESETS, "small", "size of the model")
    model.count("--width", None, "replaces the preset's width; the MLP is 3 times as wide")
    model.count("--depth", None, "replaces the preset's number of blocks")
    model.choice(
        "--dtype",
        ("float32", "bfloat16"),
        "float32",
        "what layers compute in; parameters stay float32, and CPUs are slow at bfloat16",
    )

    parallelism = Group(parser, "parallelism")
    parallelism.choice(
        "--strategy",
        strategies,
        "ddp",
        "ddp: every device holds the whole model; zero1: all but the optimizer's state; fsdp: 1/dp of everything",
    )
    parallelism.mesh(
        "--mesh",
        "devices by axis: dp=4 (rows), dp=2,tp=2 (maths of each layer), dp=2,cp=2 (sequences), replica=2,dp=2 (fsdp in groups), "
        "pp=2,dp=2 (stages of blocks); "
        "default: all devices of all processes on dp",
    )
    parallelism.switch(
        "--sequence-parallel", "with tp: norms and what is saved between layers are split along the sequence"
    )

    parallelism.choice("--schedule", SCHEDULES, "1F1B", "with pp: in which order stages work")
    parallelism.count(
        "--microbatches",
        None,
        "with pp: compute each step's batch in so many parts (default: 4 for each stage rank)",
    )

    training = Group(parser, "training")
    training.count("--steps", 500, "optimizer steps")
    training.count("--batch", 16, "windows of text in a step, all devices together")
    training.count("--accumulate", 1, "compute each step's batch in so many parts")
    training.number("--lr", 2e-3, "highest learning rate")
    training.count("--warmup", None, "steps until it is reached (default: 20, or a tenth of few)")
    training.number("--clip-norm", 1.0, "largest gradient norm; 0 for no limit")
    training.number("--seed", 0, "of parameters, batches and sample")

    saves = Group(parser, "checkpoints")
    saves.path("--checkpoint-dir", "save the run here, and continue from here (default: nothing is saved)")
    saves.count("--checkpoint-every", 100, "steps between checkpoints; one more on SIGTERM and at the end")
    saves.number("--checkpoint-minutes", None, "and one whenever so many minutes have passed")
    saves.count("--keep", 3, "how many of the latest checkpoints stay")
    saves.resume(
        "--resume", "auto: after the latest checkpoint, if there is one; never; or the number of a step"
    )

    output = Group(parser, "output")
    output.path("--out", "folder for what follows (default: --checkpoint-dir, or runs/lm-DATE-TIME)")
    output.path("--metrics", "JSON lines (default: metrics.jsonl in that folder)")
    output.path("--plot", "loss curve (default: loss.png in that folder)")
    output.path("--export", "the trained model as a Llama of Hugging Face, for transformers (default: none)")
    output.count("--eval-every", 100, "steps between evaluations on held-out files")
    output.count("--eval-batches", 16, "batches in each evaluation")
    output.text("--prompt", "def ", "what the sample starts with")
    output.count("--sample-bytes", 300, "length of the sample")
    output.number("--temperature", 0.7, "of the sample; 0 takes the likeliest byte always")
    args = parser.parse_args(argv)
    if args.checkpoint_dir is None and args.resume not in ("auto", "never"):
        parser.error(
            f"argument --resume: step {args.resume} of which run? Name its folder with --checkpoint-dir"
        )
    if args.export and (":/" in str(args.export) or (args.export.exists() and not args.export.is_dir())):
        parser.error(
            f"argument --export: {args.export} is no folder of this disk, and would be found out after the training"
        )
    if args.microbatches is None:
        args.microbatches = 4 * args.mesh["pp"] if args.mesh["pp"] > 1 else 1
    if args.mesh["pp"] > 1 and args.accumulate > 1:
        parser.error(
            f"argument --accumulate: with pp, parts of the batch are its microbatches; write --microbatches {args.microbatches * args.accumulate}"
        )
    if args.mesh["pp"] > 1 and args.strategy == "zero1":
        parser.error("argument --strategy: with pp write ddp or fsdp, which shards the optimizer's state too")
    if args.mesh["replica"] > 1 and args.strategy != "fsdp":
        parser.error(
            f"argument --mesh: replica is for --strategy fsdp, whose shards it replicates; write dp={math.prod(args.mesh[axis] for axis in ('replica', 'dp'))}"
        )
    if args.sequence_parallel and args.mesh["tp"] == 1:
        parser.error(
            "argument --sequence-parallel: it is a way to do tensor parallelism; write --mesh dp=2,tp=2"
        )
    return args


class Group:
    """One headline of --help; a method per kind of flag."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._add = parser.add_argument_group(title).add_argument

    def count(self, flag: str, default: int | None, text: str) -> None:
        self._add(flag, type=_count, metavar="N", default=default, help=_with_default(text, default))

    def number(self, flag: str, default: float | None, text: str) -> None:
        kind = float if default is None else type(default)
        self._add(flag, type=kind, metavar="X", default=default, help=_with_default(text, default))

    def resume(self, flag: str, text: str) -> None:
        self._add(
            flag, type=_resume, metavar="auto|never|STEP", default="auto", help=_with_default(text, "auto")
        )

    def text(self, flag: str, default: str, text: str) -> None:
        self._add(flag, metavar="TEXT", default=default, help=_with_default(text, repr(default)))

    def choice(self, flag: str, choices: Iterable[str], default: str, text: str) -> None:
        self._add(flag, choices=tuple(choices), default=default, help=_with_default(text, default))

    def path(self, flag: str, text: str, *, many: bool = False) -> None:
        self._add(flag, type=Path, metavar="PATH", nargs="+" if many else None, help=text)

    def switch(self, flag: str, text: str) -> None:
        self._add(flag, action="store_true", help=text)

    def mesh(self, flag: str, text: str) -> None:
        self._add(
            flag, type=_mesh, metavar="AXIS=N,...", default=dict.fromkeys(AXES, 1) | {"dp": -1}, help=text
        )


def _with_default(text: str, default: object) -> str:
    return text if default is None else f"{text} (default: {default})"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _resume(text: str) -> str:
    if text not in ("auto", "never") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, never, or the number of a step")
    return text


def _mesh(text: str) -> dict[str, int]:
    """`dp=2,tp=2` -> {"pp": 1, "replica": 1, "dp": 2, "cp": 1, "tp": 2}."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh; write axis=size, for example dp=2"
        ) from None
    if "dp" not in sizes or not set(sizes) <= set(AXES):
        raise argparse.ArgumentTypeError(
            f"{text!r}: the axes are dp and, if you like, {', '.join(axis for axis in AXES if axis != 'dp')}; "
            f"write dp={math.prod(sizes.values())}"
        )
    return {name: sizes.get(name, 1) for name in AXES}
