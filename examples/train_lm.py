"""Train a byte-level transformer on text, data-parallel over as many processes and devices as there are.

    jaxpar-launch --nproc-per-node 2 examples/train_lm.py      two processes on this machine
    python examples/train_lm.py                                one process, all devices that it sees
    python examples/train_lm.py --data ~/books --preset medium --steps 2000

Without --data it reads the sources of Python's own standard library, so there is nothing to download. It
leaves a folder with metrics.jsonl and loss.png, and prints the loss on held-out files and a sample at the end.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import Corpus
from flax import nnx
from report import Delayed, Report
from transformer import PRESETS, Transformer, TransformerConfig, generate, loss_fn, preset

import jaxpar
from jaxpar.data import global_batch
from jaxpar.ddp import DistributedDataParallel
from jaxpar.mesh import DeviceMesh, get_rank, get_world_size

STRATEGIES: dict[str, Callable[[nnx.Module, DeviceMesh], object]] = {"ddp": DistributedDataParallel}
# Steps in flight: enough to hide Python behind the devices, few enough to stop soon after Ctrl-C.
STEPS_AHEAD = 4


def main() -> None:
    args = parse_args()
    jaxpar.init_process_group()
    try:
        mesh = jaxpar.init_device_mesh(tuple(args.mesh.values()), tuple(args.mesh))
        check_batch(args, num_parts=mesh.size("dp"))
        text = read_text(args)
        config = model_config(args)
    except (ValueError, FileNotFoundError) as error:  # a flag is wrong: its message says all
        sys.exit(f"train_lm.py: {error}")
    model = jaxpar.init_sharded(
        lambda: Transformer(config, rngs=nnx.Rngs(args.seed)),
        lambda model: STRATEGIES[args.strategy](model, mesh),
    )
    schedule = learning_rate(args)
    optimizer = nnx.Optimizer(model, adamw(schedule), wrt=nnx.Param)
    step = jaxpar.TrainStep(
        loss_fn,
        model,
        optimizer,
        mesh=mesh,
        batch_axes=("dp",),
        accumulate=args.accumulate,
        clip_norm=args.clip_norm or None,
    )

    metrics_path, plot_path = output_paths(args)
    report = Report(
        metrics_path if get_rank() == 0 else None, num_steps=args.steps, tokens_per_step=args.batch * args.seq
    )
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    report.print(
        f"{num_parameters / 1e6:.2f} M parameters | {text.train.size / 1e6:.1f} MB of text to train on, "
        f"{text.held_out.size / 1e6:.1f} MB held out, {text.num_files} files | {args.strategy} over {mesh_text(mesh)}"
    )
    delayed = Delayed(delay=STEPS_AHEAD)
    with report:
        for i in range(1, args.steps + 1):
            windows = corpus.training_windows(
                text.train, batch=args.batch, seq=args.seq, seed=args.seed, step=i
            )
            report.steps(delayed.push(i, step(own_rows(windows)) | {"lr": schedule(i - 1)}))
            if i % args.eval_every == 0 or i == args.steps:
                report.steps(delayed.flush())
                report.evaluation(i, evaluate(model, text, args, mesh))
        report.print(
            f"\nsample at temperature {args.temperature}:\n{args.prompt}{generate_text(model, args)}\n"
        )
    if get_rank() == 0:
        title = f"{num_parameters / 1e6:.2f} M parameters, {args.strategy} over {mesh_text(mesh)}"
        report.plot(plot_path, title=title, chance=text.loss_of_frequencies())
        report.print(f"metrics     {metrics_path}\nloss curve  {plot_path}")


def evaluate(model: Transformer, text: Corpus, args: argparse.Namespace, mesh: DeviceMesh) -> float:
    """Mean loss on held-out windows: the same model object in global view, no training step involved."""
    batches = corpus.held_out_windows(
        text.held_out, batch=args.batch, seq=args.seq, max_batches=args.eval_batches
    )
    losses = [evaluation_loss(model, global_batch(own_rows(windows), mesh, ("dp",))) for windows in batches]
    return float(np.mean(losses))


evaluation_loss = nnx.jit(loss_fn)


def generate_text(model: Transformer, args: argparse.Namespace) -> str:
    """What the model writes after --prompt; every process computes it, since every process holds the model."""
    prompt = np.frombuffer(args.prompt.encode(), np.uint8)[None]
    key = jax.random.key(args.seed)
    tokens = generate(
        model, prompt, args.sample_bytes, temperature=args.temperature, key=key, window=args.seq
    )
    return bytes(np.asarray(tokens[0], np.uint8)).decode(errors="replace")


def own_rows(windows: np.ndarray) -> np.ndarray:
    """This process's rows of the global batch."""
    return np.split(windows, get_world_size())[get_rank()]


def learning_rate(args: argparse.Namespace) -> optax.Schedule:
    """From 0 up to --lr, then down a cosine to a tenth of it."""
    warmup = min(20, args.steps // 10) if args.warmup is None else args.warmup
    end = max(args.steps, warmup + 1)
    return optax.warmup_cosine_decay_schedule(0.0, args.lr, warmup, end, end_value=args.lr / 10)


def adamw(schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW that decays matrices only: norm scales are left alone."""
    is_matrix = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    return optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=is_matrix)


def model_config(args: argparse.Namespace) -> TransformerConfig:
    config = preset(args.preset, dtype=jnp.dtype(args.dtype))
    if args.depth:
        config = dataclasses.replace(config, depth=args.depth)
    if args.width:
        config = dataclasses.replace(config, width=args.width, hidden=3 * args.width)
    return config


def read_text(args: argparse.Namespace) -> Corpus:
    files = corpus.files_under(args.data) if args.data else corpus.standard_library_files()
    text = corpus.read_corpus(files, max_bytes=args.max_bytes)
    shorter = min(text.train.size, text.held_out.size)
    if shorter <= args.seq:
        raise ValueError(
            f"--data has {text.train.size} bytes to train on and {text.held_out.size} held out, in {text.num_files} text "
            f"files; one window takes --seq {args.seq} plus 1. Name more text, or write --seq {max(shorter - 1, 1)}."
        )
    return text


def check_batch(args: argparse.Namespace, *, num_parts: int) -> None:
    unit = num_parts * args.accumulate
    if args.batch % unit:
        below, above = args.batch // unit * unit, -(-args.batch // unit) * unit
        choices = " or ".join(f"--batch {size}" for size in (below, above) if size)
        raise ValueError(
            f"--batch {args.batch} is not a multiple of dp={num_parts} times --accumulate {args.accumulate}: every "
            f"device computes the same number of rows in each part. Write {choices}."
        )


def output_paths(args: argparse.Namespace) -> tuple[Path, Path]:
    """Where the metrics and the picture go."""
    folder = args.out or Path("runs") / time.strftime("lm-%Y%m%d-%H%M%S")
    return args.metrics or folder / "metrics.jsonl", args.plot or folder / "loss.png"


def mesh_text(mesh: DeviceMesh) -> str:
    return ",".join(f"{name}={mesh.size(name)}" for name in mesh.axis_names)


def parse_mesh(text: str) -> dict[str, int]:
    """`dp=2` -> {"dp": 2}."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh; write axis=size, for example dp=2"
        ) from None
    if set(sizes) != {"dp"}:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the axis of --strategy ddp is dp; write dp={math.prod(sizes.values())}"
        )
    return sizes


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    introduction, examples, rest = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        usage="train_lm.py [--flag value ...]     (--help explains every flag)",
        description=introduction,
        epilog=f"examples:\n{examples}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = parser.add_argument_group("text")
    data.add_argument(
        "--data", nargs="+", type=Path, metavar="PATH", help="files or folders (default: Python's library)"
    )
    data.add_argument(
        "--max-bytes", type=positive, default=8_000_000, help="read at most so much text (default: 8e6)"
    )
    data.add_argument(
        "--seq", type=positive, default=128, help="bytes that the model sees at once (default: 128)"
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--preset", choices=PRESETS, default="small", help="tiny, small, medium or large (default: small)"
    )
    model.add_argument(
        "--width", type=positive, help="replaces the preset's width; the MLP is 3 times as wide"
    )
    model.add_argument("--depth", type=positive, help="replaces the preset's number of blocks")
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what layers compute in; parameters stay float32. bfloat16 is fast on GPUs and slow on CPUs",
    )

    parallel = parser.add_argument_group("parallelism")
    parallel.add_argument(
        "--strategy", choices=STRATEGIES, default="ddp", help="ddp: each device holds the whole model"
    )
    parallel.add_argument(
        "--mesh",
        type=parse_mesh,
        default={"dp": -1},
        metavar="dp=N",
        help="devices by axis; their product is the number of devices of all processes (default: dp = all)",
    )

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=300, help="optimizer steps (default: 300)")
    training.add_argument(
        "--batch", type=positive, default=32, help="windows in a step, all devices together (default: 32)"
    )
    training.add_argument(
        "--accumulate", type=positive, default=1, help="compute each step's batch in so many parts"
    )
    training.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (default: 3e-3)")
    training.add_argument(
        "--warmup", type=int, help="steps of rising rate before the cosine (default: 20, or a tenth)"
    )
    training.add_argument(
        "--clip-norm", type=float, default=1.0, help="largest gradient norm, 0 for no limit (default: 1)"
    )
    training.add_argument(
        "--seed", type=int, default=0, help="of parameters, batches and sample (default: 0)"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--eval-every", type=positive, default=100, help="steps between evaluations (default: 100)"
    )
    output.add_argument(
        "--eval-batches", type=positive, default=8, help="held-out batches in each (default: 8)"
    )
    output.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where results go (default: runs/lm-DATE-TIME)"
    )
    output.add_argument(
        "--metrics", type=Path, metavar="FILE", help="JSON lines (default: metrics.jsonl in the folder)"
    )
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="loss curve (default: loss.png in the folder)"
    )
    output.add_argument("--prompt", default="def ", help="what the sample starts with (default: 'def ')")
    output.add_argument(
        "--sample-bytes", type=positive, default=300, help="length of the sample (default: 300)"
    )
    output.add_argument(
        "--temperature", type=float, default=0.7, help="0: always the likeliest byte (default: 0.7)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
