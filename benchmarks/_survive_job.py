"""What a job that survives writes down, and whether it is what one undisturbed process would have written.

    FOLDER/log/ATTEMPT-RANK.jsonl    a line for each step of each process: loss, world size, the samples of its rows
    FOLDER/checkpoints               what it continues from

A step that was done more than once counts as its last attempt did it: from what that attempt began with, all later steps follow.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_SAMPLES, BATCH, EPOCHS = 230, 24, 4  # the last batch of an epoch is not full, and is masked
NUM_STEPS = EPOCHS * -(-NUM_SAMPLES // BATCH)
WORKER = Path(__file__).with_name("_survive_worker.py")


@dataclass(frozen=True)
class Trace:
    """The steps that made the final parameters.

    Args:
        losses: by step.
        samples: of all processes, by step.
        worlds: number of processes, by step.
        num_lines: lines of all attempts: more than steps are steps done again.
    """

    losses: dict[int, float]
    samples: dict[int, list[int]]
    worlds: dict[int, int]
    num_lines: int

    def faults(self, *, rtol: float, reference: dict[int, float]) -> list[str]:
        """What is not as it should be: a step left out, a sample left out or seen twice, a loss of another run."""
        found = []
        if sorted(self.losses) != list(range(1, NUM_STEPS + 1)):
            found.append(f"steps {sorted(self.losses)}")
        per_epoch = NUM_STEPS // EPOCHS
        for epoch in range(EPOCHS):
            steps = range(1 + epoch * per_epoch, 1 + (epoch + 1) * per_epoch)
            seen = sorted(i for step in steps for i in self.samples.get(step, []))
            if seen != list(range(NUM_SAMPLES)):
                found.append(f"epoch {epoch}: {len(seen)} samples, {len(set(seen))} different")
        far = [s for s, loss in self.losses.items() if abs(loss - reference[s]) > rtol * abs(reference[s])]
        if far:
            found.append(f"losses of steps {far[:5]}: {[(self.losses[s], reference[s]) for s in far[:5]]}")
        return found


def trace(folder: Path) -> Trace:
    """Reads what all attempts of a job wrote; a line that a kill cut short is none."""
    attempts: dict[int, dict[int, list[dict[str, Any]]]] = {}
    num_lines = 0
    for path in (folder / "log").glob("*.jsonl"):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                line = json.loads(text)
                num_lines += line["rank"] == 0
                attempts.setdefault(line["attempt"], {}).setdefault(line["step"], []).append(line)
    final: dict[int, list[dict[str, Any]]] = {}
    for number in sorted(attempts):
        first = min(attempts[number])
        final = {step: lines for step, lines in final.items() if step < first} | attempts[number]
    return Trace(
        {step: lines[0]["loss"] for step, lines in final.items()},
        {step: [i for line in lines for i in line["samples"]] for step, lines in final.items()},
        {step: lines[0]["world"] for step, lines in final.items()},
        num_lines,
    )
