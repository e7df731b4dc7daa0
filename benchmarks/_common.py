"""What every benchmark shares: interleaved medians, and one JSON line per result.

    from _common import Result, emit, interleave, is_quick

    def main(argv: list[str] | None = None) -> int:
        rounds = 5 if is_quick(argv, __doc__) else 25
        medians = interleave({"jaxpar": step, "by hand": reference}, rounds=rounds)
        return emit(Result("ddp", "2 devices", "step", medians["jaxpar"] * 1e3, "ms",
                           baseline="by hand", baseline_value=medians["by hand"] * 1e3, target="ratio <= 1.02"))

    if __name__ == "__main__":
        raise SystemExit(main())

A machine's speed drifts while a benchmark runs, so every round runs every contender once, in an order that
rotates from round to round; medians of such rounds can be divided by each other, two separate loops cannot.
Scripts are run as files (`python benchmarks/ddp.py --quick`), which puts this folder on the path.
"""

import argparse
import contextlib
import json
import operator
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}
_TARGET = re.compile(r"(ratio|value) *(<=|>=|==|<|>) *([0-9.e+-]+)")


@dataclass(frozen=True)
class Result:
    """One measured number, beside the number it is judged by.

    `target` is a claim such as `"ratio <= 1.02"` or `"value >= 0.8"`, where ratio is value / baseline_value.
    A result without a target, or whose baseline could not be measured here, is information: `ok` is None.
    """

    bench: str
    config: str
    metric: str
    value: float
    unit: str
    baseline: str | None = None
    baseline_value: float | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if self.target is not None and not _TARGET.fullmatch(self.target):
            raise ValueError(f"target={self.target!r} is not of the form 'ratio <= 1.02' or 'value >= 0.8'")

    @property
    def ratio(self) -> float | None:
        """value / baseline_value, or None without a baseline."""
        return self.value / self.baseline_value if self.baseline_value else None

    @property
    def ok(self) -> bool | None:
        """Whether the target holds; None if there is none, or no baseline to judge by."""
        if self.target is None:
            return None
        what, sign, bound = _TARGET.fullmatch(self.target).groups()  # pyright: ignore[reportOptionalMemberAccess]
        measured = self.ratio if what == "ratio" else self.value
        return None if measured is None else _COMPARE[sign](measured, float(bound))

    def to_json(self) -> str:
        """The line that `python -m benchmarks` reads; numbers keep four significant digits."""
        return json.dumps(
            {
                "bench": self.bench,
                "config": self.config,
                "metric": self.metric,
                "value": _rounded(self.value),
                "unit": self.unit,
                "baseline": self.baseline,
                "baseline_value": _rounded(self.baseline_value),
                "ratio": _rounded(self.ratio),
                "target": self.target,
                "ok": self.ok,
            }
        )


def emit(*results: Result) -> int:
    """Prints one JSON line per result; returns the script's exit code, 1 if any target was missed."""
    for result in results:
        print(result.to_json(), flush=True)
    return int(any(result.ok is False for result in results))


def program_rows(
    bench: str, config: str, ours: Mapping[str, Any], by_hand: Mapping[str, Any]
) -> Iterator[Result]:
    """What a step communicates and needs, beside the hand-written one; both as `_program.program_facts` gives them."""
    (count, unit), (baseline_count, listed) = (_counted(facts["collectives"]) for facts in (ours, by_hand))
    yield Result(bench, config, "collectives", count, unit, f"by hand, {listed}", baseline_count)
    for metric, key, unit in (("sent", "sent_bytes", "MiB a step"), ("peak", "device_bytes", "MiB a device")):
        yield Result(bench, config, metric, mib(ours[key]), unit, "by hand", mib(by_hand[key]))


def mib(num_bytes: float) -> float:
    return num_bytes / 2**20


def interleave(
    contenders: Mapping[str, Callable[[], float | None]],
    *,
    rounds: int,
    warmups: int = 1,
    budget_s: float = float("inf"),
) -> dict[str, float]:
    """Runs every contender once per round and returns the median of each.

    A contender returns what it measured; one that returns None is timed by the wall clock, in seconds.
    It must wait for its own result (`jax.block_until_ready`). Warm-up rounds are run and forgotten. After
    `budget_s` seconds no further round begins (one is always measured): a busy machine gets fewer rounds.
    """
    deadline = time.perf_counter() + budget_s
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warmups + rounds):
        if round_ > warmups and time.perf_counter() > deadline:
            break
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            start_s = time.perf_counter()
            measured = contenders[name]()
            elapsed_s = time.perf_counter() - start_s
            if round_ >= warmups:
                samples[name].append(elapsed_s if measured is None else measured)
    return {name: statistics.median(values) for name, values in samples.items()}


def reset_peak_rss() -> None:
    """Begins a new window for `peak_rss_bytes`, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """The most memory that this process held since `reset_peak_rss`; since its start where the system has no windows."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_quick(argv: list[str] | None, description: str | None) -> bool:
    """Parses a script's only flag: `--quick` promises to end within 50 s on 2 cores."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: ends within 50 s on 2 cores")
    return parser.parse_args(argv).quick


def _counted(collectives: Mapping[str, float]) -> tuple[float, str]:
    kinds = " + ".join(f"{count:g} {kind}" for kind, count in collectives.items())
    return sum(collectives.values()), f"a step ({kinds})"


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")
