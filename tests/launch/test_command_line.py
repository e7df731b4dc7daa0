"""The command line: what is understood, what is refused and how, what a dry run shows."""

import re
import sys
from pathlib import Path

import pytest

from jaxpar_launch import LaunchSpec, LaunchSpecError, StreamChoice
from jaxpar_launch._devices import num_cores, resolve_workers
from jaxpar_launch.cli import main

GOLDEN = Path(__file__).parent / "dry_run.txt"


@pytest.fixture
def devices(tmp_path: Path):
    """A stand-in for /dev with so many GPUs."""

    def make(num_gpus: int) -> str:
        for index in range(num_gpus):
            (tmp_path / f"nvidia{index}").touch()
        (tmp_path / "nvidiactl").touch()
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("nproc", "inherited", "gpus", "expected"),
    [
        ("3", {}, 0, (3, "cpu")),
        ("3", {}, 8, (3, "gpu")),
        ("auto", {}, 0, (num_cores(), "cpu")),
        ("auto", {}, 8, (8, "gpu")),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "1,3"}, 8, (2, "gpu")),
        ("cpu", {}, 8, (num_cores(), "cpu")),
        ("auto", {"JAX_PLATFORMS": "cpu"}, 8, (num_cores(), "cpu")),
        ("2", {"JAX_PLATFORMS": "cuda,cpu"}, 0, (2, "gpu")),
        ("2", {"JAX_PLATFORMS": "tpu"}, 0, (2, "other")),
        ("2", {"CUDA_VISIBLE_DEVICES": ""}, 8, (2, "cpu")),
    ],
)
def test_number_of_workers_and_platform(nproc, inherited, gpus, expected, devices) -> None:
    assert resolve_workers(nproc, inherited, dev=devices(gpus)) == expected


@pytest.mark.parametrize(
    ("nproc", "inherited", "message"),
    [
        ("gpu", {}, "--nproc-per-node gpu: this host has no GPU"),
        ("0", {}, "--nproc-per-node 0 is neither"),
        ("many", {}, "--nproc-per-node many is neither"),
        ("gpu", {"JAX_PLATFORMS": "cpu"}, "--nproc-per-node gpu contradicts JAX_PLATFORMS=cpu"),
    ],
)
def test_impossible_numbers_of_workers_are_refused(nproc, inherited, message, devices) -> None:
    with pytest.raises(LaunchSpecError, match=re.escape(message)):
        resolve_workers(nproc, inherited, dev=devices(0))


@pytest.mark.parametrize(
    ("nproc", "per_proc", "expected"),
    [(8, None, [(0,), (1,), (7,)]), (2, None, [(0, 1, 2, 3), (4, 5, 6, 7)]), (2, 1, [(0,), (1,)])],
)
def test_gpus_are_shared_out_in_order(nproc, per_proc, expected) -> None:
    spec = LaunchSpec(
        command=("x",), kind="program", nproc=nproc, platform="gpu", num_gpus=8, devices_per_proc=per_proc
    )
    ranks = range(nproc) if nproc == 2 else (0, 1, 7)
    assert [spec.local_device_ids(rank) for rank in ranks] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(command=()), "Nothing to run"),
        (dict(command=("nowhere.py",), kind="script"), "There is no script 'nowhere.py'"),
        (dict(nproc=0), "--nproc-per-node 0: at least one worker"),
        (dict(devices_per_proc=0), "--devices-per-proc 0: a worker needs at least one"),
        (
            dict(nproc=3, platform="gpu", num_gpus=2),
            "--nproc-per-node 3 with --devices-per-proc 1 needs 3 GPUs",
        ),
        (dict(master_port=70000), "--master-port 70000 does not lie in 1..65535"),
        (dict(grace_s=-1.0), "--grace-period -1 must be a number of seconds"),
        (dict(failure_grace_s=float("nan")), "--failure-grace-period nan must be"),
        (dict(monitor_interval_s=0.0), "--monitor-interval 0 must be"),
        (dict(tee=StreamChoice.parse("2:3", flag="--tee")), "--tee names local rank 2"),
        (dict(local_ranks_filter=(1,)), "--local-ranks-filter names local rank 1"),
        (dict(log_line_prefix_template="${world} "), "there is no macro ${world}"),
        (dict(compilation_cache_dir=__file__), f"--compilation-cache-dir {__file__} is not a folder"),
        (dict(compilation_cache_dir="gs://b/c"), "--compilation-cache-dir gs://b/c is not a folder"),
        (dict(kind="notebook"), "kind='notebook' must be one of"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_at_construction(fields, message) -> None:
    with pytest.raises(LaunchSpecError, match=re.escape(message)):
        LaunchSpec(**(dict(command=("x",), kind="program") | fields))


@pytest.mark.parametrize("text", ["4", "0:4", "a:1", "1,2", ""])
def test_a_wrong_stream_choice_names_its_flag(text: str) -> None:
    with pytest.raises(LaunchSpecError, match=re.escape(f"--redirects {text} is neither")):
        StreamChoice.parse(text, flag="--redirects")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nnodes 2 train.py", "--nnodes 2 needs a place to meet: jaxpar-launch --nnodes 2 --rdzv-endpoint"),
        ("--nnodes 3:2 train.py", "--nnodes 3:2 is neither a number of hosts nor MIN:MAX"),
        ("--nnodes 2 --node-rank 2 train.py", "--node-rank 2 does not lie in 0..1"),
        ("--nnodes 2 --master-addr a train.py", "--nnodes 2 with --master-addr needs --node-rank too"),
        (
            "--nnodes 2 --rdzv-endpoint a --rdzv-conf x=1 t.py",
            "--rdzv-conf x=1: not name=seconds with a name of join_timeout",
        ),
        (
            "--nnodes 2 --rdzv-endpoint a --rdzv-backend mpi t.py",
            "--rdzv-backend mpi: there is tcp, c10d, static, etcd, etcd-v2, slurm",
        ),
        ("--start-method fork train.py", "--start-method: invalid choice: 'fork' (choose from"),
        ("--check train.py", "--check starts no script: leave 'train.py' out."),
        ("--run-path -m train", "--run-path means a Python script"),
        ("--max-restarts -1 --no-python true", "--max-restarts -1: a job cannot restart less than never"),
        ("--nproc-per-nod 2 train.py", "Did you mean --nproc-per-node?"),
        (
            "--master-port high train.py",
            "--master-port: 'high' is not a whole number; write for example 29500",
        ),
        ("--grace-period long train.py", "--grace-period: 'long' is not a number of seconds"),
        ("-m --no-python train", "-m and --no-python exclude each other"),
        ("--standalone --master-port 29500 train.py", "--standalone means this host and a free port"),
        ("--local-ranks-filter a,b --no-python true", "--local-ranks-filter a,b is not a list"),
        ("--tee", "--tee: expected one argument"),
        ("--no-python no-such-program", "'no-such-program' cannot be run: No such file or directory"),
        (
            "--master-addr 192.0.2.1 --no-python true",
            "--master-addr 192.0.2.1 is not an address of this host",
        ),
        ("", "Nothing to run"),
    ],
)
def test_a_wrong_line_is_explained_and_exits_with_2(line: str, message: str, capsys) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_help_names_every_option(capsys) -> None:
    from jaxpar_launch.cli import _parser

    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [name for action in _parser()._actions for name in action.option_strings if name not in text] == []


def test_the_folder_of_programs_reaches_the_workers_as_a_whole_path(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run", "--compilation_cache_dir", "programs", "--no-python", "true"]) == 0
    assert f"JAXPAR_COMPILATION_CACHE_DIR={tmp_path}/programs" in capsys.readouterr().out
    monkeypatch.setenv("JAXPAR_COMPILATION_CACHE_DIR", "others")
    assert main(["--dry-run", "--no-python", "true"]) == 0
    assert f"JAXPAR_COMPILATION_CACHE_DIR={tmp_path}/others" in capsys.readouterr().out


def test_a_dry_run_shows_environment_and_command_and_starts_nothing(
    monkeypatch, capsys, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PJRT_NPROC", "4")  # else it depends on this machine's cores
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    line = "--nproc_per_node=cpu --nproc-per-node 2 --devices-per-proc 2 --master-port 29500 --dry-run train.py --dry-run -- x"
    assert main(line.split()) == 0
    shown = capsys.readouterr().out.replace(sys.executable, "python")
    shown = re.sub(r"\S+/_run.py", "_run.py", shown)
    assert shown == GOLDEN.read_text()


def test_options_come_from_the_environment_and_the_line_wins(monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAXPAR_NPROC_PER_NODE", "3")
    monkeypatch.setenv("JAXPAR_DRY_RUN", "1")
    monkeypatch.setenv("JAXPAR_STANDALONE", "0")
    assert main(["--no-python", "true"]) == 0
    assert "# rank 2 of 3" in capsys.readouterr().out
    assert main(["--nproc-per-node", "2", "--no-python", "true"]) == 0
    assert "# rank 1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--nproc-per-node", "7"], ["--", "--help"], ["-m"], ["", "a b"], ["--x=--y", "-"]]
)
def test_the_scripts_arguments_stay_untouched(arguments: list[str], command, script) -> None:
    path = script("import sys; print(sys.argv)")
    done = command("--standalone", "--log-line-prefix-template", "-", path, *arguments)
    assert (done.returncode, done.stdout) == (0, f"{[str(path), *arguments]}\n")


def test_the_local_rank_may_stand_in_an_argument_of_the_script(command) -> None:
    done = command("--nproc-per-node", 2, "--no-python", "echo", "gpu${local_rank}/${x}")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] gpu0/${x}", "[rank 1] gpu1/${x}"]


def test_module_program_and_script(command, script) -> None:
    script("import os, sys; print(__name__, os.environ['RANK'], sys.argv[1:])", name="package/train.py")
    assert command("-m", "package.train", "--lr", "3").stdout == "__main__ 0 ['--lr', '3']\n"
    assert command("--no-python", "sh", "-c", "echo $RANK $0", "zero").stdout == "0 zero\n"
    assert command("--", "package/train.py").stdout == "__main__ 0 []\n"
