"""Train a byte-level transformer on text, over as many processes and devices as there are.

    jaxpar-launch --nproc-per-node 2 examples/train_lm.py      two processes on this machine
    python examples/train_lm.py                                one process, all devices that it sees
    jaxpar-launch --nproc-per-node 2 examples/train_lm.py --mesh dp=2 --strategy fsdp
    jaxpar-launch --nproc-per-node 4 examples/train_lm.py --mesh dp=2,tp=2
    JAX_NUM_CPU_DEVICES=8 python examples/train_lm.py --mesh pp=2,dp=2,tp=2 --schedule 1F1B
    python examples/train_lm.py --data ~/books --preset medium --steps 2000
    jaxpar-launch --nproc-per-node 2 --max-restarts 3 examples/train_lm.py --checkpoint-dir runs/a     may be killed at any time

Without --data it reads the sources of Python's own standard library, so there is nothing to download. It
leaves a folder with metrics.jsonl and loss.png, and prints the loss on held-out files and a sample at the end.
With --checkpoint-dir the same command goes on where the run stood, on whatever devices there are then.
"""

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import corpus
import jaxpar
import parallel
from corpus import Corpus
from flags import parse_args
from hf_llama import save_llama
from jaxpar.fsdp import shard_optimizer_state, sharding_report
from jaxpar.mesh import DeviceMesh, full_array, get_rank
from jaxpar.pp import gathered
from report import Delayed, Report
from resume import Saves, about_end, folder
from transformer import Transformer, TransformerConfig, generate, loss_fn, preset

# Steps in flight: enough to hide Python behind the devices, few enough to stop soon after Ctrl-C.
STEPS_AHEAD = 4

evaluation_loss = nnx.jit(loss_fn)


def main() -> None:
    args = parse_args(__doc__ or "", strategies=parallel.STRATEGIES)
    jaxpar.init_process_group(preemption=args.checkpoint_dir is not None)  # SIGTERM: save, then end
    try:
        mesh = jaxpar.init_device_mesh(tuple(args.mesh.values()), tuple(args.mesh))
        check_batch(args, num_devices=math.prod(map(mesh.size, parallel.BATCH_AXES)))
        text = read_text(args)
        config = model_config(args)
        check_heads(config, mesh.size("tp"))
        check_stages(config, mesh.size("pp"))
    except (ValueError, FileNotFoundError) as error:  # a flag is wrong: its message says all
        sys.exit(f"train_lm.py: {error}")
    train(args, config, text, mesh)


def train(args: argparse.Namespace, config: TransformerConfig, text: Corpus, mesh: DeviceMesh) -> None:
    model, optimizer, step, schedule = build(args, config, mesh)
    stored = sharding_report(model)
    run = (
        f"{stored.num_parameters / 1e6:.2f} M parameters, {args.strategy} over {mesh_text(mesh)}, "
        f"{stored.bytes_per_device / 1e6:.2f} MB of them on each device"
    )
    metrics_path, plot_path = output_paths(args)
    with Saves(args) as saves:
        try:
            done, continued = saves.restore(model, optimizer)
        except ValueError as error:
            sys.exit(f"train_lm.py: {error}")
        report = Report(
            metrics_path if get_rank() == 0 else None,
            num_steps=args.steps,
            tokens_per_step=args.batch * args.seq,
            steps_done=done,
        )
        report.print(
            f"{run} | {text.num_files} files of text: {text.train.size / 1e6:.1f} MB to train on, "
            f"{text.held_out.size / 1e6:.1f} MB held out"
        )
        if continued:
            report.print(continued)
        delayed = Delayed(delay=STEPS_AHEAD)
        with report:
            for i in range(done + 1, args.steps + 1):
                windows = corpus.training_windows(
                    text.train, batch=args.batch, seq=args.seq, seed=args.seed, step=i
                )
                report.steps(delayed.push(i, step(parallel.on_mesh(windows, mesh)) | {"lr": schedule(i - 1)}))
                saves.save(i, model, optimizer)
                if saves.should_stop:
                    report.steps(delayed.flush())
                    report.print(about_end(i, args))
                    return
                if i % args.eval_every == 0 or i == args.steps:
                    report.steps(delayed.flush())
                    report.evaluation(i, evaluate(model, text, args, mesh))
    with gathered(model, mesh):
        report.print(f"\nsample at temperature {args.temperature}:\n{generate_text(model, args)}\n")
        if args.export:
            save_llama(model, args.export, max_length=args.seq)
    if get_rank() == 0:
        report.plot(plot_path, title=run, chance=text.loss_of_frequencies())
    report.print(f"metrics     {metrics_path}\nloss curve  {plot_path}")
    if args.export:
        report.print(f"Llama       {args.export}")


def build(
    args: argparse.Namespace, config: TransformerConfig, mesh: DeviceMesh
) -> tuple[Transformer, nnx.Optimizer, jaxpar.TrainStep, optax.Schedule]:
    """The model in its parallel form, its optimizer, the step that trains it, and its learning rate by step."""
    model = jaxpar.init_sharded(
        lambda: Transformer(config, rngs=nnx.Rngs(args.seed)),
        lambda model: parallel.parallelize(
            model,
            mesh,
            args.strategy,
            is_sequence_parallel=args.sequence_parallel,
            schedule=args.schedule,
            microbatches=args.microbatches,
        ),
    )
    schedule = learning_rate(args)
    optimizer = nnx.Optimizer(model, adamw(schedule), wrt=nnx.Param)
    if args.strategy == "zero1":
        shard_optimizer_state(optimizer, mesh["dp"])
    step = jaxpar.TrainStep(
        parallel.training_loss,
        model,
        optimizer,
        mesh=mesh,
        batch_axes=parallel.BATCH_AXES,
        sequence_axes="cp",
        accumulate=args.accumulate,
        clip_norm=args.clip_norm or None,
    )
    return model, optimizer, step, schedule


def evaluate(model: Transformer, text: Corpus, args: argparse.Namespace, mesh: DeviceMesh) -> float:
    """Mean loss on held-out windows: the same model object in global view, no training step involved."""
    batches = corpus.held_out_windows(
        text.held_out, batch=args.batch, seq=args.seq, max_batches=args.eval_batches
    )
    with gathered(model, mesh):
        losses = [evaluation_loss(model, parallel.on_mesh(windows, mesh)) for windows in batches]
    return float(np.mean(losses))


def generate_text(model: Transformer, args: argparse.Namespace) -> str:
    """--prompt and how the model goes on; all processes compute it together, for each may hold a part of the model."""
    prompt = np.frombuffer(args.prompt.encode() or b"\n", np.uint8)
    tokens = generate(
        model,
        prompt[None],
        args.sample_bytes,
        temperature=args.temperature,
        key=jax.random.key(args.seed),
        window=args.seq,
    )
    text = bytes([*prompt, *np.asarray(full_array(tokens))[0]]).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


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
    """The preset with --width and --depth in place of its own."""
    config = preset(args.preset, dtype=jnp.dtype(args.dtype))
    if args.depth:
        config = dataclasses.replace(config, depth=args.depth)
    if args.width:
        config = dataclasses.replace(config, width=args.width, hidden=3 * args.width)
    return config


def read_text(args: argparse.Namespace) -> Corpus:
    """The text of --data, or of Python's own library; enough for one window or an error."""
    files = corpus.files_under(args.data) if args.data else corpus.standard_library_files()
    text = corpus.read_corpus(files, max_bytes=args.max_bytes)
    shorter = min(text.train.size, text.held_out.size)
    if shorter <= args.seq:
        raise ValueError(
            f"--data has {text.train.size} bytes to train on and {text.held_out.size} held out, in {text.num_files} text "
            f"files; one window takes --seq {args.seq} plus 1. Name more text, or write --seq {max(shorter - 1, 1)}."
        )
    return text


def check_batch(args: argparse.Namespace, *, num_devices: int) -> None:
    """Does the global batch split over devices and parts?"""
    flag = "--microbatches" if args.mesh["pp"] > 1 else "--accumulate"
    num_parts = args.microbatches if args.mesh["pp"] > 1 else args.accumulate
    unit = num_devices * num_parts
    if args.batch % unit:
        below, above = args.batch // unit * unit, -(-args.batch // unit) * unit
        choices = " or ".join(f"--batch {size}" for size in (below, above) if size)
        raise ValueError(
            f"--batch {args.batch} is not a multiple of {num_devices} devices times {flag} {num_parts}: every "
            f"device computes the same number of rows in each part. Write {choices}."
        )


def check_heads(config: TransformerConfig, tp: int) -> None:
    """Do the key/value heads split over tp?"""
    if config.kv_heads % tp:
        raise ValueError(
            f"--mesh has tp={tp}, and the model {config.kv_heads} key/value heads: a head is never cut. Write a tp that divides "
            f"{config.kv_heads}, or take a larger --preset."
        )


def check_stages(config: TransformerConfig, pp: int) -> None:
    """Are there blocks for every stage?"""
    if config.depth < pp:
        raise ValueError(
            f"--mesh has pp={pp}, and the model {config.depth} blocks. Write --depth {pp} or more."
        )


def output_paths(args: argparse.Namespace) -> tuple[Path, Path]:
    """Where the metrics and the picture go."""
    out = folder(args) or Path("runs") / time.strftime("lm-%Y%m%d-%H%M%S")
    return args.metrics or out / "metrics.jsonl", args.plot or out / "loss.png"


def mesh_text(mesh: DeviceMesh) -> str:
    """`dp=2`, as --mesh takes it."""
    sizes = {name: mesh.size(name) for name in mesh.axis_names}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "dp")


if __name__ == "__main__":
    main()
