"""Checkpoints: how fast against a plain copy of the bytes, how long training stands still, what another layout costs.

    save, until complete           bytes/s against writing the same arrays one after the other to files, and fsync
    save, with and without         the loop's standstill against the same save waited for
    checksums off                  against on
    restore                        bytes/s against reading the files; into the layout saved from, another, one device
    memory                         largest growth of the process while it saves and restores, against the state's bytes

One process with 4 CPU devices; a model of four layers in FSDP with Adam's state, random numbers, which do not compress. Every round
runs every contender once; medians. `--quick`: 25 MB instead of 200 MB, fewer rounds.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jaxpar  # noqa: E402
from _common import Result, emit, interleave, is_quick, mib, peak_rss_bytes, reset_peak_rss  # noqa: E402
from jaxpar.checkpoint import CheckpointManager  # noqa: E402
from jaxpar.fsdp import full_state, fully_shard  # noqa: E402
from jaxpar.tp import ColwiseParallel, parallelize_module  # noqa: E402

NUM_LAYERS = 4


def main(argv: list[str] | None = None) -> int:
    """Measures all; one line per result."""
    quick = is_quick(argv, __doc__)
    width, rounds = (720, 3) if quick else (2048, 7)
    with tempfile.TemporaryDirectory() as scratch:
        return emit(*results(Path(scratch), width=width, rounds=rounds))


def results(scratch: Path, *, width: int, rounds: int) -> Iterator[Result]:
    """All rows."""
    job = built("fsdp", width)
    state = host_state(job)
    num_bytes = sum(x.nbytes for x in state.values())
    config = f"{mib(num_bytes):.0f} MiB, FSDP over 4 devices of 1 process"
    # First of all: later, memory that was freed and not given back hides what is taken.
    with CheckpointManager(scratch / "restore") as manager:
        first = {
            "save": lambda: [manager.save(1, *job), manager.wait()],
            "restore": lambda: manager.restore(*job),
        }
        for what, run in first.items():
            reset_peak_rss()
            before = peak_rss_bytes()
            run()
            grown = peak_rss_bytes() - before
            yield Result(
                "checkpoint",
                config,
                f"memory to {what}",
                mib(grown),
                "MiB",
                "the state's bytes",
                mib(num_bytes),
            )
    saves = Saves(job, scratch)
    times = interleave(
        {
            "save": saves.complete,
            "stall": saves.stall,
            "no checksums": saves.without_checksums,
            "copy": lambda: plain_copy(state, scratch / "copy"),
        },
        rounds=rounds,
    )
    speed = lambda name: mib(num_bytes) / times[name]  # noqa: E731
    yield Result(
        "checkpoint", config, "save, complete", speed("save"), "MiB/s", "plain copy and fsync", speed("copy")
    )
    yield Result(
        "checkpoint", config, "save, without checksums", speed("no checksums"), "MiB/s", "with", speed("save")
    )
    yield Result(
        "checkpoint",
        config,
        "training stands still",
        times["stall"],
        "s",
        "until complete",
        times["save"],
        target="ratio <= 0.5",
    )

    targets = {layout: built(layout, width) for layout in ("fsdp", "tp", "one device")}
    contenders: dict[str, Any] = {
        layout: (lambda target=target: restored(scratch / "restore", target))
        for layout, target in targets.items()
    }
    contenders["read"] = lambda: plain_read(scratch / "copy")
    times = interleave(contenders, rounds=rounds)
    for layout in targets:
        what = "restore, same layout" if layout == "fsdp" else f"restore into {layout}"
        yield Result(
            "checkpoint",
            config,
            what,
            speed_of(num_bytes, times[layout]),
            "MiB/s",
            "plain read",
            speed_of(num_bytes, times["read"]),
        )
    del targets


def built(layout: str, width: int) -> tuple[nnx.Module, nnx.Optimizer]:
    """A model and its optimizer in a layout."""
    model = nnx.Sequential(*[nnx.Linear(width, width, rngs=nnx.Rngs(i)) for i in range(NUM_LAYERS)])
    mesh = jaxpar.init_device_mesh((4,), ("x",))
    if layout == "fsdp":
        fully_shard(model, mesh["x"], units="layers.*")
    elif layout == "tp":
        parallelize_module(model, mesh["x"], {"layers.*": ColwiseParallel()})
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    for variable in (node for _, node in nnx.iter_graph(optimizer) if isinstance(node, nnx.OptVariable)):
        x = variable.get_value()  # zeros would be written as a few bytes
        random = np.random.default_rng(0).normal(size=x.shape).astype(x.dtype)
        variable.set_value(jax.device_put(random, x.sharding))
    return model, optimizer


def host_state(job: tuple[nnx.Module, nnx.Optimizer]) -> dict[str, np.ndarray]:
    """All arrays on the host."""
    return {f"{i}.{name}": x for i, part in enumerate(job) for name, x in full_state(part).items()}


class Saves:
    """Saves in several ways, each into a folder of its own, and what they take in seconds."""

    def __init__(self, job: tuple[nnx.Module, nnx.Optimizer], scratch: Path) -> None:
        self._job, self._scratch, self._step = job, scratch, 0
        self._with = CheckpointManager(scratch / "with", keep=1)
        self._without = CheckpointManager(scratch / "without", keep=1, checksums=False)

    def complete(self) -> float:
        return self._timed(self._with)[1]

    def stall(self) -> float:
        return self._timed(self._with)[0]

    def without_checksums(self) -> float:
        return self._timed(self._without)[1]

    def _timed(self, manager: CheckpointManager) -> tuple[float, float]:
        self._step += 1
        start_s = time.perf_counter()
        manager.save(self._step, *self._job)
        stall_s = time.perf_counter() - start_s
        manager.wait()
        return stall_s, time.perf_counter() - start_s


def plain_copy(state: dict[str, np.ndarray], folder: Path) -> None:
    """The same bytes, a file for each array, durable."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, x in state.items():
        with (folder / name).open("wb") as out:
            x.tofile(out)
            out.flush()
            os.fsync(out.fileno())


def plain_read(folder: Path) -> None:
    """The files of `plain_copy`, into memory."""
    for path in folder.iterdir():
        np.fromfile(path, np.uint8)


def restored(folder: Path, job: tuple[nnx.Module, nnx.Optimizer]) -> float:
    """Seconds to restore, with the files compared to their checksums."""
    with CheckpointManager(folder) as manager:
        start_s = time.perf_counter()
        manager.restore(*job)
        jax.block_until_ready([nnx.state(part) for part in job])
        return time.perf_counter() - start_s


def speed_of(num_bytes: int, seconds: float) -> float:
    return mib(num_bytes) / seconds


if __name__ == "__main__":
    raise SystemExit(main())
