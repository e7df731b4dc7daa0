"""Every notebook runs from top to bottom, is short, ends with assertions, and is committed with its outputs."""

import json
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
MAX_CELLS = 14


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The client's own event loop and sockets, closed by the garbage collector on some Pythons.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_notebook_runs_and_its_last_cell_asserts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling takes most of the time
    notebook = nbformat.read(path, as_version=4)
    assert len(notebook.cells) <= MAX_CELLS
    assert "assert" in notebook.cells[-1].source
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_outputs_and_without_a_machines_paths(path: Path) -> None:
    text = path.read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) - 2
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    assert "site-packages" not in text


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "00_tour",
        "01_placements",
        "02_fsdp",
        "03_tensor_parallel",
        "04_schedules",
        "05_pipeline",
    ]
