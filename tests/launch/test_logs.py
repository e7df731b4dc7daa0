"""The workers' output: whole lines with a prefix, files as torchelastic lays them out, bars on a terminal."""

import os
import pty
import stat

import pytest

from jaxpar_launch import LaunchSpec, launch
from jaxpar_launch._logs import MAX_LINE_BYTES, ConsoleSink, LineSplitter

TALK = """
import os, sys
print("out", os.environ["RANK"])
print("err", os.environ["RANK"], file=sys.stderr)
"""


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_lines_do_not_depend_on_how_the_bytes_arrive(size: int) -> None:
    data = b"one\ntwo\r\n\n10%\r20%\rlast"
    splitter = LineSplitter()
    lines = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]
    assert lines + splitter.flush() == [b"one\n", b"two\r\n", b"\n", b"10%\r", b"20%\r", b"last"]


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * MAX_LINE_BYTES) == [b"x" * MAX_LINE_BYTES]
    assert splitter.flush() == []


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"a\n\nb", b"> a\n> \n> b\n"),
        (b"\r10%\r20%\r100%\n", b"> 10%\r> 20%\r> 100%\n"),  # a redrawn bar is redrawn, with its prefix
        (b"\xff\xfe\n", b"> \xff\xfe\n"),
    ],
)
def test_every_line_gets_the_prefix(data: bytes, shown: bytes) -> None:
    read_fd, write_fd = os.pipe()
    sink = ConsoleSink(write_fd, "> ")
    sink.feed(data)
    sink.close()
    assert os.read(read_fd, 1000) == shown
    os.close(read_fd)
    sink.feed(b"nobody reads\n")  # `| head` has gone: no error
    os.close(write_fd)


def test_prefix_and_streams_are_kept_apart(command, script) -> None:
    done = command("--nproc-per-node", 2, script(TALK))
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(done.stderr.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]


def test_prefix_template_and_filter(command, script) -> None:
    template = "${role_name}/${local_rank}/${rank}: "
    done = command("--nproc-per-node", 2, "--role", "eval", "--log-line-prefix-template", template,
                   "--local-ranks-filter", "1", script(TALK))  # fmt: skip
    assert (done.stdout, done.stderr) == ("eval/1/1: out 1\n", "eval/1/1: err 1\n")


def test_one_worker_speaks_without_prefix(command, script) -> None:
    done = command(script("print('a', end=''); print('b')"))
    assert done.stdout == "ab\n"


def test_lines_of_many_ranks_never_mix(command, script) -> None:
    path = script("""
        import os
        for _ in range(300):
            print(os.environ["RANK"] * 200)
    """)
    done = command("--nproc-per-node", 3, path)
    lines = done.stdout.splitlines()
    assert len(lines) == 900
    assert set(lines) == {f"[rank {rank}] {str(rank) * 200}" for rank in range(3)}


@pytest.mark.parametrize(
    ("options", "files", "stdout"),
    [
        ((), {"stdout": "out {}\n", "stderr": "err {}\n"}, ["[rank 0] out 0", "[rank 1] out 1"]),
        (("--redirects", "3"), {"stdout": "out {}\n", "stderr": "err {}\n"}, []),
        (("--redirects", "1"), {"stdout": "out {}\n"}, []),
        (("--tee", "2"), {"stderr": "err {}\n"}, ["[rank 0] out 0", "[rank 1] out 1"]),
    ],
)
def test_log_files(options, files, stdout, command, script, tmp_path) -> None:
    done = command("--nproc-per-node", 2, "--log-dir", "logs", *options, script(TALK))
    assert sorted(done.stdout.splitlines()) == stdout
    [run] = (tmp_path / "logs").iterdir()
    assert f"logs are in {run}" in done.stderr
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    for rank in (0, 1):
        folder = run / "attempt_0" / str(rank)
        assert {file.stem: file.read_text() for file in folder.iterdir()} == {
            name: text.format(rank) for name, text in files.items()
        }


def test_redirects_by_rank(command, script, tmp_path) -> None:
    done = command("--nproc-per-node", 2, "--log-dir", "logs", "-r", "1:3", script(TALK))
    assert done.stdout == "[rank 0] out 0\n"
    assert [
        str(file.relative_to(tmp_path / "logs").parent)[-1] for file in tmp_path.glob("logs/*/*/*/*.log")
    ] == ["1", "1"]


def test_a_failure_is_explained_from_redirected_output_and_its_error_file_kept(
    command, script, tmp_path
) -> None:
    done = command("--log-dir", "logs", "--redirects", "3", script("print('last'); raise ValueError('boom')"))
    assert "exit code 1: ValueError: boom" in done.stderr
    assert "| ValueError: boom" in done.stderr or "| last" in done.stderr
    (report,) = tmp_path.glob("logs/*/report.txt")
    assert report.read_text() in done.stderr
    assert len(list(tmp_path.glob("logs/*/attempt_0/0/error.json"))) == 1


def test_without_logs_no_file_is_left(script, tmp_path, monkeypatch) -> None:
    path = script(TALK)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    launch(path, nproc=2, timeout_s=20).check()
    launch(script("1 / 0"), nproc=2, timeout_s=20)
    assert list(scratch.iterdir()) == []


def test_output_is_captured_per_rank_in_order(script) -> None:
    result = launch(script(TALK), nproc=2, timeout_s=20).check()
    assert [sorted(text.splitlines()) for text in result.output] == [["err 0", "out 0"], ["err 1", "out 1"]]


def test_a_print_is_seen_before_the_worker_crashes(script) -> None:
    result = launch(script("import os; print('seen'); os.kill(os.getpid(), 9)"), timeout_s=20)
    assert result.output == ("seen\n",)


def test_on_a_terminal_rank_0_has_the_terminal_and_the_others_a_prefix(command, script) -> None:
    path = script("""
        import os, sys
        print(os.environ["RANK"], sys.stdout.isatty(), sys.stderr.isatty())
    """)
    controller, terminal = pty.openpty()
    process = command.start("--nproc-per-node", 2, path, stdout=terminal, stderr=terminal)
    os.close(terminal)
    assert process.wait(timeout=20) == 0
    text = os.read(controller, 10000).decode()
    os.close(controller)
    assert sorted(text.split("\r\n")) == ["", "0 True True", "[rank 1] 1 False False"]


def test_a_spec_with_a_custom_environment(script) -> None:
    path = script("import os; print(os.environ['ANSWER'])")
    spec = LaunchSpec(command=(str(path),), environ={"ANSWER": "42"})
    assert launch(spec, timeout_s=20).check().output == ("42\n",)
