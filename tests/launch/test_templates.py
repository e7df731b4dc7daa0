"""The templates for batch systems: they parse, and the launcher takes the lines in them."""

import re
import shlex
import subprocess
from pathlib import Path

from jaxpar_launch.cli import main

LAUNCH = Path(__file__).parents[2] / "launch"


def test_the_slurm_script_parses_and_its_line_is_right(capsys) -> None:
    path = LAUNCH / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", path], check=True, timeout=10)
    text = path.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ +jaxpar-launch (.*)$|srun .* jaxpar-launch (.*)$", text, re.MULTILINE)
    options = shlex.split("".join(line).replace('"$@"', "--no-python true").replace("$SLURM_JOB_ID", "41"))
    assert main(["--dry-run", *options]) == 0
    assert "# rank 0" in capsys.readouterr().out


def test_the_kubernetes_line_is_right(capsys) -> None:
    text = (LAUNCH / "kubernetes" / "jobset.yaml").read_text()
    options = re.findall(r"^ +- (--[^ \n]+)", text, re.MULTILINE)
    options = [option.replace("=gpu", "=8") for option in options]
    assert "--nnodes=4" in options and len(options) == 7
    assert main(["--dry-run", *options, "--no-python", "true"]) == 0
    assert "# rank 7 of 32" in capsys.readouterr().out
    probed = re.findall(r"livenessProbe:\n +httpGet: \{ path: /, port: (\d+) \}", text)
    assert probed == re.findall(r"--health-check-port=(\d+)", text)
    grace_s = int(re.findall(r"--grace-period=(\d+)", text)[0])
    assert grace_s < int(re.findall(r"terminationGracePeriodSeconds: (\d+)", text)[0])
