"""safetensors over two processes: one export, gathered in small pieces; each reads its slices; errors reach both."""

import json
import re
from pathlib import Path

from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "safetensors_files.py"


def test_weights_over_processes_are_exported_and_read(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    output = launch([WORKER, tmp_path], nproc=2, devices_per_proc=4, timeout_s=120).check().output
    for rank, text in enumerate(output):
        seen = json.loads(re.search(r"^SEEN (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]
        assert seen["fsdp"] and seen["stages"], seen
        assert {name.split(".")[1] for name in seen["names here"]} == {str(rank)}
        assert "could not be written (FileExistsError" in seen["no disk"]
        assert "belong to other stages of a pipeline" in seen["without gathered"]
        assert "jaxpar.pp.gathered(model, mesh): save_safetensors(model, folder)" in seen["without gathered"]
    assert len(list((tmp_path / "fsdp").glob("model-*.safetensors"))) > 1
