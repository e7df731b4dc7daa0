"""What a training run shows while it runs and leaves behind: a progress bar, metrics.jsonl, a loss curve.

    step's metrics (lazy arrays) -> Delayed -> floats, some steps later -> Report: bar or lines, JSONL, PNG

Reading a number waits for the step that makes it, so numbers are read a few steps late: the devices always
have the next steps queued, and never more than those. On a terminal there is a live bar; into a pipe or a file
goes a plain line every few seconds.
"""

import collections
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 5.0


class Delayed:
    """Hand over lazy metrics, get back floats of the step `delay` calls ago.

    >>> delayed = Delayed(delay=1)
    >>> list(delayed.push(1, {"loss": np.float32(4.5)}))
    []
    >>> list(delayed.push(2, {"loss": np.float32(4.0)}))
    [(1, {'loss': 4.5})]
    >>> list(delayed.flush())
    [(2, {'loss': 4.0})]
    """

    def __init__(self, *, delay: int) -> None:
        self.delay = delay
        self._waiting: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()

    def push(self, step: int, metrics: dict[str, Any]) -> Iterator[tuple[int, dict[str, float]]]:
        self._waiting.append((step, metrics))
        return self._pop(leave=self.delay)

    def flush(self) -> Iterator[tuple[int, dict[str, float]]]:
        return self._pop(leave=0)

    def _pop(self, *, leave: int) -> Iterator[tuple[int, dict[str, float]]]:
        while len(self._waiting) > leave:
            step, metrics = self._waiting.popleft()
            yield step, {name: float(value) for name, value in metrics.items()}


class Report:
    """Progress, metrics file and loss curve of one run; on the processes that do not report, nothing at all.

    Args:
        metrics_path: the JSON-lines file to write, or None on a process that does not report.
        num_steps: steps of the run.
        tokens_per_step: tokens of the global batch.
        steps_done: of a run that is continued: lines of these steps stay in the file, later ones are done again.
        console: where to show progress (default: standard output).
    """

    def __init__(
        self,
        metrics_path: Path | None,
        *,
        num_steps: int,
        tokens_per_step: int,
        steps_done: int = 0,
        console: Console | None = None,
    ) -> None:
        self.num_steps, self.tokens_per_step = num_steps, tokens_per_step
        self.train: list[tuple[int, float]] = []
        self.held_out: list[tuple[int, float]] = []
        self.tokens_per_s = 0.0
        self._times: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)
        self._started_s = self._printed_s = time.monotonic()
        self._file = None
        if metrics_path:
            kept = _lines_up_to(metrics_path, steps_done)
            self.train += [(line["step"], line["loss"]) for line in kept if line["kind"] == "train"]
            self.held_out += [(line["step"], line["loss"]) for line in kept if line["kind"] == "eval"]
            self._file = _create(metrics_path).open("w")
            self._file.writelines(json.dumps(line) + "\n" for line in kept)
        self.console = console or Console(quiet=metrics_path is None, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f} | {task.fields[speed]} tokens/s | ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=metrics_path is None or not self.console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task(
            "", total=num_steps, completed=steps_done, loss=float("nan"), speed="-"
        )

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._file:
            self._file.close()

    def print(self, text: str = "") -> None:
        """A line above the bar, as it is: no markup."""
        self.console.print(text, markup=False)

    def steps(self, done: Iterable[tuple[int, dict[str, float]]]) -> None:
        """Some training steps are done; steps count from 1."""
        for step, metrics in done:
            self._step(step, metrics)

    def _step(self, step: int, metrics: dict[str, float]) -> None:
        now_s = time.monotonic()
        self._times.append((step, now_s))
        (first, first_s), num = self._times[0], len(self._times)
        self.tokens_per_s = (step - first) * self.tokens_per_step / (now_s - first_s) if num > 1 else 0.0
        self.train.append((step, metrics["loss"]))
        self._write("train", step, metrics | {"tokens_per_s": round(self.tokens_per_s, 1)})
        self._bar.update(self._task, completed=step, loss=metrics["loss"], speed=self._speed())
        due = now_s - self._printed_s > LINE_EVERY_S or step in (1, self.num_steps)
        if due and not self.console.is_terminal:
            self._printed_s = now_s
            self.print(self._line(step, metrics["loss"]))

    def evaluation(self, step: int, loss: float) -> None:
        """The held-out loss after `step` training steps."""
        self._times.clear()  # the time of the evaluation is not training time
        self.held_out.append((step, loss))
        self._write("eval", step, {"loss": loss})
        self.print(f"step {step}: held-out loss {loss:.3f} ({loss / np.log(2):.2f} bits per byte)")

    def plot(self, path: Path, *, title: str, chance: float) -> None:
        """Draw training and held-out loss over steps; `chance` is the level that byte frequencies alone reach."""
        steps, losses = np.array(self.train).T
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(losses), color="tab:blue", linewidth=2, label="training (smoothed)")
        axes.plot(*np.array(self.held_out).T, "o-", color="tab:orange", markersize=5, label="held-out files")
        axes.axhline(chance, color="gray", linestyle=":", label="byte frequencies alone")
        axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title, xlim=(0, self.num_steps * 1.01))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(_create(path), dpi=150)

    def _write(self, kind: str, step: int, values: dict[str, float]) -> None:
        if self._file:
            time_s = round(time.monotonic() - self._started_s, 3)
            print(
                json.dumps({"kind": kind, "step": step, "time_s": time_s, **values}),
                file=self._file,
                flush=True,
            )

    def _speed(self) -> str:
        speed = self.tokens_per_s
        return "-" if not speed else f"{speed / 1000:.1f}k" if speed >= 1000 else f"{speed:.0f}"

    def _line(self, step: int, loss: float) -> str:
        done = round(20 * step / self.num_steps)
        eta_s = (
            (self.num_steps - step) * self.tokens_per_step / self.tokens_per_s if self.tokens_per_s else None
        )
        eta = "-" if eta_s is None else f"{int(eta_s) // 60}:{int(eta_s) % 60:02d}"
        return (
            f"[{'#' * done}{'.' * (20 - done)}] {step:>{len(str(self.num_steps))}}/{self.num_steps} | "
            f"loss {loss:.3f} | {self._speed()} tokens/s | ETA {eta}"
        )


def _lines_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a metrics file that a continued run keeps; a line that was cut short is none."""
    if step == 0 or not path.exists():
        return []
    found = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["step"] <= step:
            found.append(line)
    return found


def _create(path: Path) -> Path:
    """The path, with the folders above it made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a thirtieth of the run around each value."""
    window = np.ones(len(values) // 60 * 2 + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
