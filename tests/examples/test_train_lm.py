"""The language-model script, from its flags to its files."""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import corpus
import flags
import train_lm
from hf_llama import load_llama
from jaxpar_launch import LaunchResult, launch
from report import Delayed, Report
from resume import Saves
from transformer import preset

SCRIPT = Path(train_lm.__file__)
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling takes most of the time
TINY = "--preset tiny --depth 1 --seq 32 --steps 45 --batch 8 --accumulate 2 --lr 1e-2 --eval-every 30"
TINY += " --eval-batches 2 --sample-bytes 24 --max-bytes 200000"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LaunchResult]:
    """A run on two processes from beginning to end."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*TINY.split(), "--out", folder, "--export", folder / "llama"]
    return folder, launch([SCRIPT, *words], nproc=2, environ=QUICK, timeout_s=300).check()


def test_two_processes_train_evaluate_sample_and_leave_files(whole_run: tuple[Path, LaunchResult]) -> None:
    folder, result = whole_run
    text, other = result.output
    for expected in (
        "ddp over dp=2",
        "[####################] 45/45",
        "step 30: held-out loss",
        "sample at",
        "def ",
    ):
        assert expected in text
    assert "\x1b" not in text and "\r" not in text
    assert "loss" not in other

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train, held_out = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    assert [line["step"] for line in train] == list(range(1, 46))
    assert [line["step"] for line in held_out] == [30, 45]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "time_s"} <= set(train[0])
    assert train[0]["loss"] > 5 and train[-1]["loss"] < 3.9 and held_out[-1]["loss"] < 3.9
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_exported_has_the_loss_of_the_trained_model(
    whole_run: tuple[Path, LaunchResult],
) -> None:
    folder, result = whole_run
    assert f"Llama       {folder / 'llama'}" in result.output[0]
    args = flags.parse_args(train_lm.__doc__ or "", strategies=["ddp"], argv=TINY.split())
    model, text = load_llama(folder / "llama"), train_lm.read_text(args)
    losses = [
        train_lm.evaluation_loss(model, windows)
        for windows in corpus.held_out_windows(text.held_out, batch=args.batch, seq=args.seq, max_batches=2)
    ]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert np.mean(losses) == pytest.approx(last["loss"], rel=1e-5)


def test_a_run_that_is_told_to_end_goes_on_with_other_processes(
    whole_run: tuple[Path, LaunchResult], tmp_path: Path
) -> None:
    """SIGTERM in the middle, then the same command on one process: one run, each step once, the losses of one run."""
    parts = tmp_path / "parts"
    words = [*TINY.split(), "--checkpoint-dir", str(parts), "--checkpoint-every", "1000"]
    command = [sys.executable, "-m", "jaxpar_launch", "--nproc-per-node", "2", SCRIPT, *words]
    started = subprocess.Popen(command, env=os.environ | QUICK, stdout=subprocess.PIPE, text=True)
    try:
        end_s = time.monotonic() + 200
        while time.monotonic() < end_s and not (parts / "metrics.jsonl").exists():
            time.sleep(0.05)
        # Before the first step: JAX looks once a second whether SIGTERM came, and all steps take little longer.
        started.send_signal(signal.SIGTERM)
        said = started.communicate(timeout=60)[0]
    finally:
        started.kill()
    assert "told to end: saved after step" in said, said
    done = len(train_losses(parts))
    assert 1 <= done < 45 and sorted(p.name for p in parts.iterdir() if p.is_dir()) == [str(done)]
    result = launch([SCRIPT, *words], nproc=1, devices_per_proc=2, environ=QUICK, timeout_s=300).check()
    assert f"continued after step {done} of 45" in result.output[0]
    losses, expected = train_losses(parts), train_losses(whole_run[0])
    assert list(losses) == list(range(1, 46))
    # Sums over two devices of one process or of two round differently (6e-8), and the steps of Adam let that grow.
    np.testing.assert_allclose([*losses.values()], [*expected.values()], rtol=1e-4)


def test_resume_never_wants_an_empty_folder(tmp_path: Path) -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    words = f"--checkpoint-dir {tmp_path} --steps 7 --resume"
    with Saves(parse(f"{words} auto")) as saves:
        assert saves.restore(model, optimizer) == (0, "")
        saves.save(7, model, optimizer)
    with Saves(parse(f"{words} never")) as saves:
        with pytest.raises(
            ValueError, match=r"--resume never, but --checkpoint-dir has checkpoints of steps \[7\]"
        ):
            saves.restore(model, optimizer)
    with Saves(parse(f"{words} 7 --batch 8")) as saves:
        said = "continued after step 7 of 7; other flags than before: --batch 16 then, 8 now"
        assert saves.restore(model, optimizer) == (7, said)


def parse(words: str) -> argparse.Namespace:
    return flags.parse_args(train_lm.__doc__ or "", strategies=("ddp",), argv=words.split())


def train_losses(folder: Path) -> dict[int, float]:
    """Losses by step, of the lines that are complete."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in found if line["kind"] == "train"}


def test_wrong_data_is_one_line_that_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    result = launch([SCRIPT, "--data", tmp_path], nproc=1, timeout_s=120)
    assert result.exit_code == 1 and "Traceback" not in result.output[0]
    assert "train_lm.py: --data has 5 bytes to train on and 0 held out" in result.output[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mesh 2", "'2' is not a mesh; write axis=size, for example dp=2"),
        ("--mesh tp=4", "the axes are dp and, if you like, pp, replica, cp, tp; write dp=4"),
        ("--mesh dp=2,ep=2", "the axes are dp and, if you like, pp, replica, cp, tp; write dp=4"),
        ("--mesh dp=2 --sequence-parallel", "it is a way to do tensor parallelism; write --mesh dp=2,tp=2"),
        ("--mesh replica=2,dp=2", "replica is for --strategy fsdp, whose shards it replicates; write dp=4"),
        (
            "--mesh pp=2,dp=2 --accumulate 2",
            "parts of the batch are its microbatches; write --microbatches 16",
        ),
        ("--mesh pp=2,dp=2 --strategy zero1", "with pp write ddp or fsdp"),
        ("--schedule 2F2B", "invalid choice: '2F2B'"),
        ("--steps 0", "'0' is not a whole number above 0"),
        ("--batch many", "'many' is not a whole number above 0"),
        ("--strategy deepspeed", "invalid choice: 'deepspeed'"),
        ("--export gs://bucket/llama", "gs:/bucket/llama is no folder of this disk"),
        (f"--export {__file__}", "is no folder of this disk"),
        ("--resume last", "'last' is not auto, never, or the number of a step"),
        ("--resume 400", "step 400 of which run? Name its folder with --checkpoint-dir"),
    ],
)
def test_wrong_flags_say_what_to_write(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags.parse_args(train_lm.__doc__, strategies=("ddp", "zero1"), argv=words.split())
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 2


@pytest.mark.parametrize(("pp", "flag"), [(1, "--accumulate"), (2, "--microbatches")])
@pytest.mark.parametrize(("batch", "choices"), [(30, "--batch 28 or --batch 32"), (3, "--batch 4")])
def test_batch_that_does_not_divide_names_the_next_ones(batch: int, choices: str, pp: int, flag: str) -> None:
    args = argparse.Namespace(batch=batch, accumulate=2, microbatches=2, mesh={"pp": pp})
    with pytest.raises(ValueError, match=rf"2 devices times {flag} 2.*Write {choices}\."):
        train_lm.check_batch(args, num_devices=2)
    args.batch = 32
    train_lm.check_batch(args, num_devices=2)


def test_pipeline_trains_evaluates_and_samples(tmp_path: Path) -> None:
    flags = "--preset tiny --depth 2 --seq 32 --steps 20 --batch 8 --microbatches 4 --lr 1e-2 --eval-every 20"
    flags += " --eval-batches 1 --sample-bytes 8 --max-bytes 100000 --mesh pp=2,dp=2 --schedule ZBH1"
    command = [SCRIPT, *flags.split(), "--out", tmp_path]
    result = launch(command, nproc=1, devices_per_proc=4, environ=QUICK, timeout_s=300).check()
    assert "ddp over pp=2,dp=2" in result.output[0] and "sample at" in result.output[0]
    *train, held_out = [
        json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert train[0] > 5 and train[-1] < 4.2 and held_out < 4.2


def test_heads_are_not_cut() -> None:
    with pytest.raises(ValueError, match="tp=4, and the model 2 key/value heads"):
        train_lm.check_heads(preset("tiny"), 4)
    train_lm.check_heads(preset("tiny"), 2)


def test_every_stage_has_a_block() -> None:
    with pytest.raises(ValueError, match="pp=4, and the model 2 blocks. Write --depth 4 or more"):
        train_lm.check_stages(preset("tiny"), 4)
    train_lm.check_stages(preset("tiny"), 2)


def test_help_has_the_commands_to_start_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags.parse_args(train_lm.__doc__, strategies=("ddp",), argv=["--help"])
    assert "jaxpar-launch --nproc-per-node 2 examples/train_lm.py" in capsys.readouterr().out


def test_files_are_held_out_whole(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i + 1]) * 50)
    (tmp_path / "binary").write_bytes(b"ab\0")
    (tmp_path / ".hidden").write_text("hidden")
    text = corpus.read_corpus(corpus.files_under([tmp_path]), max_bytes=10_000)
    assert text.num_files == 20
    assert set(text.held_out) == {10, 20}
    assert set(text.train) == set(range(1, 20)) - {10}
    assert corpus.read_corpus(corpus.files_under([tmp_path]), max_bytes=99).train.size == 90


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        corpus.files_under([tmp_path / "nowhere"])


def test_default_text_is_large_and_ordered() -> None:
    files = corpus.standard_library_files()
    assert files == sorted(files) and len(files) > 200
    assert not any("site-packages" in path.parts for path in files)


def test_windows_depend_on_seed_and_step_only() -> None:
    text = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)

    def windows(*, seed: int = 0, step: int = 1) -> np.ndarray:
        return corpus.training_windows(text, batch=4, seq=9, seed=seed, step=step)

    assert windows().shape == (4, 10)
    assert bytes(windows()[0]) in bytes(text)
    np.testing.assert_array_equal(windows(), windows())
    assert (windows() != windows(step=2)).any() and (windows() != windows(seed=1)).any()


@pytest.mark.parametrize("size", [10, 11, 100, 1000])
def test_held_out_windows_lie_inside_the_text(size: int) -> None:
    batches = list(corpus.held_out_windows(np.arange(size) % 256, batch=4, seq=9, max_batches=3))
    assert {batch.shape for batch in batches} == {(4, 10)} and len(batches) == min(3, max(1, size // 36))
    assert batches[0][0].tolist() == list(range(10))


def test_numbers_are_read_late_and_none_is_lost() -> None:
    delayed = Delayed(delay=2)
    early = [done for step in range(5) for done in delayed.push(step, {"loss": np.float32(step)})]
    assert early == [(0, {"loss": 0.0}), (1, {"loss": 1.0}), (2, {"loss": 2.0})]
    assert [step for step, _ in delayed.flush()] == [3, 4]


def test_terminal_shows_a_bar_with_loss_and_speed(tmp_path: Path) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100)
    with Report(tmp_path / "metrics.jsonl", num_steps=10, tokens_per_step=100, console=console) as report:
        report.steps((step, {"loss": 2.5}) for step in range(1, 11))
    assert (
        "10/10" in terminal.getvalue()
        and "loss 2.500" in terminal.getvalue()
        and "tokens/s" in terminal.getvalue()
    )


def test_process_that_does_not_report_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Report(None, num_steps=1, tokens_per_step=1) as report:
        report.steps([(1, {"loss": 1.0})])
        report.evaluation(1, 1.0)
    assert capsys.readouterr().out == ""
