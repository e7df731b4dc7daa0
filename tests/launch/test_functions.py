"""A function in every worker: its values come back by rank, its errors as a worker's, and nothing is left (row E9)."""

import functools
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxpar_launch import (
    LaunchFailedError,
    LaunchResult,
    LaunchSpec,
    LaunchSpecError,
    RendezvousConf,
    RendezvousSpec,
    heartbeat,
    launch,
)
from jaxpar_launch._ports import PortReservation


@dataclass(frozen=True)
class Place:
    rank: int
    what: Any


def place(what: Any = None, *, more: Any = None) -> Place:
    return Place(int(os.environ["RANK"]), (what, more))


def fail(*, on_rank: str, until_attempt: int = 9) -> str:
    if os.environ["RANK"] == on_rank and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < until_attempt:
        raise ValueError("boom")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def hang(until_attempt: int) -> str:
    heartbeat("start")
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < until_attempt:
        time.sleep(60)
    return "well"


def no_value() -> threading.Lock:
    return threading.Lock()  # pyright: ignore


class OnlyThere:
    """Unpickles in the process that made it only."""

    def __init__(self, pid: int | None = None) -> None:
        if pid not in (None, os.getpid()):
            raise RuntimeError("not here")

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return OnlyThere, (os.getpid(),)


def test_values_come_back_by_rank() -> None:
    result = launch(place, args=([1],), kwargs={"more": b"x"}, nproc=2, timeout_s=30)
    assert result.values == {rank: Place(rank, ([1], b"x")) for rank in range(2)}


def test_what_can_be_pickled_can_be_called() -> None:
    assert launch(functools.partial(place, 3), timeout_s=30).values == {0: Place(0, (3, None))}
    assert launch("-".join, args=(["a", "b"],), timeout_s=30).values == {0: "a-b"}


def test_an_exception_is_the_ranks_failure_with_its_traceback() -> None:
    result = launch(fail, kwargs={"on_rank": "1"}, nproc=2, timeout_s=30)
    assert result.exit_code == 1 and [failure.rank for failure in result.failures] == [1]
    line = fail.__code__.co_firstlineno + 2
    assert f"exit code 1: ValueError: boom\n  at {__file__}:{line}" in result.report
    assert "_called.py" not in result.report  # the traceback begins with the function
    with pytest.raises(LaunchFailedError, match="rank 1 failed first(.|\n)*Traceback"):
        _ = result.values


def test_after_a_restart_the_last_attempt_returns() -> None:
    result = launch(fail, kwargs={"on_rank": "1", "until_attempt": 2}, nproc=2, max_restarts=2, timeout_s=30)
    assert result.values == {0: "2", 1: "2"}


def test_a_function_that_hangs_starts_again() -> None:
    assert launch(hang, args=(1,), hang_timeout_s=0.5, max_restarts=1, timeout_s=30).values == {0: "well"}


def test_a_value_that_cannot_be_sent_is_the_ranks_failure(no_cloudpickle) -> None:
    result = launch(no_value, timeout_s=30)
    assert result.exit_code == 1
    message = result.failures[0].message
    assert message is not None and message.startswith("TypeError: a lock was returned, which cannot be sent")


def test_a_value_that_cannot_be_made_here_names_its_rank() -> None:
    with pytest.raises(
        LaunchFailedError, match="rank 0 returned a value that cannot be read here: RuntimeError: not here"
    ):
        launch(OnlyThere, timeout_s=30)


def test_who_leaves_early_with_0_returns_nothing() -> None:
    assert launch(sys.exit, timeout_s=30).values == {0: None}


def test_scripts_return_nothing(script) -> None:
    assert launch(script("pass"), timeout_s=30).values == {}


def test_no_file_is_left_but_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    spec = LaunchSpec(nproc=2, log_dir=str(tmp_path / "logs"))
    assert launch(spec, place, args=(1,), timeout_s=30).values[1] == Place(1, (1, None))
    launch(fail, kwargs={"on_rank": "0"}, timeout_s=30)
    assert list(scratch.iterdir()) == []
    assert list(tmp_path.glob("logs/**/*.pickle")) == []


# Scripts and modules: the workers load what is __main__ here.

MAIN = """
import os, sys
from dataclasses import dataclass
from jaxpar_launch import launch

@dataclass
class Point:
    x: int

def moved(point):
    return Point(point.x + int(os.environ["RANK"])), __name__, sys.argv[1:]

{guard}
    values = launch(moved, args=(Point(3),), nproc=2, timeout_s=30).values
    print([values[rank][0] == Point(3 + rank) for rank in range(2)], values[1][1:])
"""


def run_python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("words", [["pkg/train.py"], ["-m", "pkg.train"], ["pkg"]])
def test_a_function_of_the_main_script_or_module(words: list[str], script, tmp_path: Path) -> None:
    name = "pkg/__main__.py" if words == ["pkg"] else "pkg/train.py"
    script(MAIN.format(guard='if __name__ == "__main__":'), name=name)
    done = run_python(*words, "a", folder=tmp_path)
    assert done.stdout == "[True, True] ('__mp_main__', ['a'])\n", done.stderr


def test_a_script_without_a_guard_is_told_to_have_one(script, tmp_path: Path) -> None:
    path = script(MAIN.format(guard="if True:"))
    done = run_python(str(path), folder=tmp_path)
    assert done.returncode == 1
    assert f"launch is called at line 14 of {path} while a worker loads this script" in done.stderr
    assert "Put the call under `if __name__ == '__main__':`" in done.stderr


def test_a_function_under_the_guard_is_asked_for_at_the_top(script, tmp_path: Path) -> None:
    source = "def late(): pass\n    from jaxpar_launch import launch\n    launch(late, timeout_s=30).check()"
    path = script(f"if __name__ == '__main__':\n    {source}\n")
    done = run_python(str(path), folder=tmp_path)
    assert (
        f"AttributeError: late is not there when {path} is loaded by a worker. Define it at the top"
        in done.stderr
    )


# As in a notebook: __main__ has no file.

TYPED_IN = MAIN.format(guard="if True:")


@pytest.fixture
def no_cloudpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process and the workers: the workers take over its sys.path, where an empty stand-in comes first."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "cloudpickle.py").write_text("raise ImportError('hidden')\n")
    monkeypatch.syspath_prepend(tmp_path / "hidden")
    monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)


def test_functions_and_classes_of_a_notebook_go_by_value(tmp_path: Path) -> None:
    done = run_python("-c", TYPED_IN, "a", folder=tmp_path)
    assert done.stdout == "[True, True] ('__main__', ['a'])\n", done.stderr


def test_what_a_function_made_goes_by_value() -> None:
    base = 3
    assert launch(lambda x: base + x, args=(4,), nproc=2, timeout_s=30).values == {0: 7, 1: 7}


@pytest.mark.parametrize("kind", ["lambda", "notebook"])
def test_without_cloudpickle_a_module_is_asked_for(kind: str, no_cloudpickle, tmp_path: Path) -> None:
    message = "cannot be sent to workers: .*Put the function at the top level of a module or script; or install cloudpickle"
    if kind == "lambda":
        with pytest.raises(LaunchSpecError, match=f"launch: .*<lambda> and its arguments {message}"):
            launch(lambda: 1)
    else:
        done = run_python("-c", TYPED_IN, folder=tmp_path)
        assert re.search(f"launch: moved and its arguments {message}", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (place,),
            {"args": (threading.Lock(),)},
            "launch: place and its arguments cannot .* Arguments must be plain data",
        ),
        ((place, place), {}, "launch takes a second job only after a LaunchSpec"),
        ((LaunchSpec(),), {}, "launch: nothing to run. Write launch"),
        ((LaunchSpec(command=("true",), kind="program"), place), {}, "the LaunchSpec runs 'true' already"),
        ((["true"],), {"kind": "program", "args": (1,)}, "args and kwargs are a function's"),
        (
            (place,),
            {"python": "/usr/bin/other"},
            "python='/usr/bin/other', but a function can only run where it was made",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(arguments: tuple, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchSpecError, match=message):
        launch(*arguments, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "a"}, "endpoint='a' is not host:port"),
        ({"endpoint": "a:1", "most": 1}, "a meeting of least=2 to most=1 hosts cannot be"),
    ],
)
def test_a_meeting_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchSpecError, match=message):
        RendezvousSpec(**{"least": 2, "most": 2} | fields)


def test_a_spec_and_a_script(script) -> None:
    spec = LaunchSpec(environ={"ANSWER": "42"})
    path = script("import os, sys; print(os.environ['ANSWER'], sys.argv[1])")
    assert launch(spec, [path, "x"], timeout_s=30).check().output == ("42 x\n",)


def on_two_hosts(function: Any, **launched: Any) -> list[LaunchResult]:
    """Two launchers that meet on loopback, two workers each."""
    port = PortReservation.draw("127.0.0.1")
    port.close()
    conf = RendezvousConf(last_call_timeout=0.5, join_timeout=20)
    meeting = RendezvousSpec(endpoint=f"127.0.0.1:{port.port}", least=2, most=2, conf=conf)
    spec = LaunchSpec(nproc=2, rendezvous=meeting)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: launch(spec, function, timeout_s=40, **launched), range(2)))


def test_each_of_several_hosts_gets_the_values_of_its_own_ranks() -> None:
    first, second = sorted((result.values for result in on_two_hosts(place)), key=min)
    assert (first, second) == tuple(
        {rank: Place(rank, (None, None)) for rank in ranks} for ranks in ((0, 1), (2, 3))
    )


def test_a_failure_on_one_host_leaves_no_values_on_any() -> None:
    for result in on_two_hosts(fail, kwargs={"on_rank": "3"}):
        with pytest.raises(LaunchFailedError, match="ValueError: boom"):
            _ = result.values
