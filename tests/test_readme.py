"""The front page is true: its Python runs, its file tree and generated parts are those of the tree."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_python_of_the_readme_runs(capsys) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for block in PYTHON:
        exec(compile(block, "README.md", "exec"), names)
        printed.append(capsys.readouterr().out.rstrip())
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed[0])]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert names["predictions"].shape == (3, 1)  # type: ignore[attr-defined]
    for table in printed[1:]:
        assert table and table in README, f"the table in README.md is not what is printed:\n{table}"


def test_generated_parts_are_those_of_the_tree() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / ".ci" / "readme.py"], capture_output=True, text=True, timeout=60
    )
    assert check.returncode == 0, check.stdout


def test_the_two_commands_stand_in_ci_too() -> None:
    assert "pip install -e '.[examples]' && jaxpar-launch --nproc-per-node 2 examples/train_lm.py" in README
    assert "pip install -e '.[test]' && pytest" in README
    assert re.search(r"^pytest$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
