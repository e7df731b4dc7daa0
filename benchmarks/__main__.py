"""Runs every benchmark and rewrites the table between `<!-- benchmarks -->` and `<!-- /benchmarks -->` in README.md.

    python -m benchmarks            # all, thorough
    python -m benchmarks --quick    # all, under a minute each
    python -m benchmarks ddp launch # some; rows of the others stay as they are

Each script runs in a process of its own, one after the other: they all want the whole machine.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
OPEN, CLOSE = "<!-- benchmarks -->", "<!-- /benchmarks -->"
HEADER = "| benchmark | config | metric | value | baseline | ratio | target | ok |\n|---|---|---|---|---|---|---|---|"
QUICK_LIMIT_S, THOROUGH_LIMIT_S = 60, 1800


def main(argv: list[str] | None = None) -> int:
    """Runs the named scripts (all by default), prints their lines, updates README.md; 1 if any failed."""
    names = sorted(path.stem for path in HERE.glob("[!_]*.py"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute a script")
    parser.add_argument("--readme", type=Path, default=README, help="the file whose table is rewritten")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(names):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are: {', '.join(names)}")

    rows, failed = {}, []
    for name in args.names or names:
        code, rows[name] = run_script(name, quick=args.quick)
        if code != 0:
            failed.append(name)
    args.readme.write_text(with_table(args.readme.read_text(), rows))
    if failed:
        print(f"benchmarks that failed or missed a target: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run_script(name: str, *, quick: bool) -> tuple[int, list[str]]:
    """Runs one script, echoing its JSON lines; returns its exit code and its table rows."""
    command = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if quick else [])]
    limit_s = QUICK_LIMIT_S if quick else THOROUGH_LIMIT_S
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, cwd=HERE.parent)
    except subprocess.TimeoutExpired:
        print(f"{name}: not finished after {limit_s} s", file=sys.stderr)
        return 1, []
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    print(*lines, sep="\n", flush=True)
    return done.returncode, [table_row(json.loads(line)) for line in lines]


def table_row(result: dict) -> str:
    """One result as a row of the README's table."""
    value = f"{result['value']:g} {result['unit']}"
    baseline = (
        f"{result['baseline']}: {result['baseline_value']:g}" if result["baseline_value"] is not None else ""
    )
    ratio = f"{result['ratio']:g}" if result["ratio"] is not None else ""
    ok = {True: "yes", False: "**no**", None: ""}[result["ok"]]
    cells = [
        result["bench"],
        result["config"],
        result["metric"],
        value,
        baseline,
        ratio,
        result["target"] or "",
        ok,
    ]
    return "| " + " | ".join(cells) + " |"


def with_table(text: str, rows: dict[str, list[str]]) -> str:
    """`text` with the rows of the benchmarks in `rows` replaced and all other rows kept."""
    before, opened, rest = text.partition(OPEN)
    old, closed, after = rest.partition(CLOSE)
    if not (opened and closed):
        raise SystemExit(f"README.md has no table to rewrite: add the two lines {OPEN} and {CLOSE}.")
    kept = [line for line in old.splitlines() if line.startswith("| ") and line not in HEADER]
    kept = [line for line in kept if line.split("|")[1].strip() not in rows]
    body = sorted(
        kept + [row for of_one in rows.values() for row in of_one], key=lambda row: row.split("|")[1]
    )
    return before + "\n".join([OPEN, HEADER, *body, CLOSE]) + after


if __name__ == "__main__":
    raise SystemExit(main())
