"""The launcher runs on a bare Python: no site-packages, no jax, and quickly."""

import subprocess
import sys
from pathlib import Path

LAUNCH_FOLDER = Path(__file__).parents[2] / "launch"

LAUNCH_BARE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from jaxpar_launch.cli import main
code = main(sys.argv[1:])
foreign = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"jaxpar_launch", "__main__"}
sys.exit(code or (f"not of the standard library: {foreign}" if foreign else 0))
"""


def test_it_runs_isolated_and_imports_nothing_foreign(script) -> None:
    path = script("import os; print(os.environ['RANK'])")
    line = [
        "--nproc-per-node",
        "2",
        "--local-ranks-filter",
        "1",
        "--no-python",
        sys.executable,
        "-I",
        "-S",
        str(path),
    ]
    command = [sys.executable, "-I", "-S", "-c", LAUNCH_BARE, str(LAUNCH_FOLDER), *line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[rank 1] 1\n", "")


def test_the_scan_can_fail(tmp_path) -> None:
    (tmp_path / "not_standard.py").touch()
    source = LAUNCH_BARE.replace(
        "import sys\n", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport not_standard\n"
    )
    command = [sys.executable, "-I", "-S", "-c", source, str(LAUNCH_FOLDER), "--no-python", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "not_standard" in done.stderr
