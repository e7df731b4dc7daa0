"""A script under the launcher is the script run directly; its last words are kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar_launch import _run, launch

SELF_PORTRAIT = """
import pickle, sys
class Local: pass
main = sys.modules["__main__"]
print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sorted(set(main.__dict__) - {"__annotations__"}), main.__dict__ is globals())
print(pickle.loads(pickle.dumps(Local())).__class__ is Local)
def fail(depth):
    if depth == 0:
        raise ValueError("boom")
    fail(depth - 1)
if "fail" in sys.argv:
    try:
        1 / 0
    except ZeroDivisionError:
        fail(2)
if "exit" in sys.argv:
    sys.exit(5)
if "text" in sys.argv:
    sys.exit("no data")
"""


def under_the_runner(kind: str, *command: str, folder: Path) -> list[str]:
    return [sys.executable, _run.__file__, str(folder / "error.json"), kind, *command]


def run(command: list[str], folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [[], ["--x", "--"], ["fail"], ["exit"], ["text"]])
def test_a_script_behaves_as_if_run_directly(arguments: list[str], script, tmp_path) -> None:
    script(SELF_PORTRAIT, name="inner/portrait.py")
    direct = run([sys.executable, "inner/portrait.py", *arguments], tmp_path)
    assert (
        run(under_the_runner("script", "inner/portrait.py", *arguments, folder=tmp_path), tmp_path) == direct
    )


@pytest.mark.parametrize("arguments", [["--x"], ["fail"]])
def test_a_module_behaves_as_if_run_by_python_m(arguments: list[str], script, tmp_path) -> None:
    script(SELF_PORTRAIT, name="inner/portrait.py")
    direct = run([sys.executable, "-m", "inner.portrait", *arguments], tmp_path)
    assert run(under_the_runner("module", "inner.portrait", *arguments, folder=tmp_path), tmp_path) == direct


def test_a_folder_with_a_main_behaves_as_if_run_directly(script, tmp_path) -> None:
    script(SELF_PORTRAIT, name="inner/__main__.py")
    direct = run([sys.executable, "inner", "--x"], tmp_path)
    assert run(under_the_runner("script", "inner", "--x", folder=tmp_path), tmp_path) == direct


def test_a_syntax_error_looks_the_same(script, tmp_path) -> None:
    script("if x\n", name="wrong.py")
    direct = run([sys.executable, "wrong.py"], tmp_path)
    assert run(under_the_runner("script", "wrong.py", folder=tmp_path), tmp_path) == direct


def test_processes_spawned_by_a_script_find_its_main(script) -> None:
    path = script("""
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [3]))
    """)
    assert launch(path, timeout_s=30).check().output == ("[9]\n",)


def test_the_error_file_is_torchelastics(script, tmp_path) -> None:
    path = script(SELF_PORTRAIT)
    run(under_the_runner("script", str(path), "fail", folder=tmp_path), tmp_path)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    extra = message["extraInfo"]
    assert message["message"] == "ValueError: boom"
    assert "ZeroDivisionError" in extra["py_callstack"] and "_run.py" not in extra["py_callstack"]
    assert float(extra["timestamp"]) > 1.7e9
    assert (extra["file"], extra["line"], extra["function"]) == (str(path), 10, "fail")


def test_an_exit_with_0_writes_no_error_file_and_runs_atexit(script, tmp_path) -> None:
    path = script("import atexit, sys; atexit.register(print, 'bye'); sys.exit()")
    assert run(under_the_runner("script", str(path), folder=tmp_path), tmp_path) == (0, "bye\n", "")
    assert not (tmp_path / "error.json").exists()


def test_a_failing_worker_leaves_without_waiting_but_with_its_files_written(script, tmp_path) -> None:
    path = script("""
        import atexit, sys, threading, time
        atexit.register(time.sleep, 60)                      # as JAX's shutdown barrier
        threading.Thread(target=time.sleep, args=[60]).start()
        metrics = open(sys.argv[1], "w")
        metrics.write("step 1")
        raise ValueError("boom")
    """)
    code, _, _ = run(
        under_the_runner("script", str(path), str(tmp_path / "metrics"), folder=tmp_path), tmp_path
    )
    assert code == 1
    assert (tmp_path / "metrics").read_text() == "step 1"


def test_the_users_excepthook_is_used(script, tmp_path) -> None:
    path = script("import sys; sys.excepthook = lambda kind, error, trace: print('mine', error); 1 / 0")
    assert run(under_the_runner("script", str(path), folder=tmp_path), tmp_path) == (
        1,
        "mine division by zero\n",
        "",
    )


PROGRAMS = {
    "record": "@record\ndef main():\n    raise ValueError('boom')\nmain()",
    "excepthook": "install_excepthook()\nraise ValueError('boom')",
}


@pytest.mark.parametrize("how", PROGRAMS)
def test_a_program_can_record_its_failure_itself(how: str, script) -> None:
    source = f"from jaxpar_launch.errors import install_excepthook, record\n{PROGRAMS[how]}\n"
    path = script("import atexit, time\natexit.register(time.sleep, 60)\n" + source)
    result = launch([sys.executable, path], kind="program", nproc=2, timeout_s=20)
    assert result.exit_code == 1
    assert result.failures[0].message == "ValueError: boom"
    assert result.failures[0].file == str(path)
    assert "Traceback (most recent call last)" in "".join(result.output)


def test_the_error_file_of_torchelastics_own_record_is_read(script) -> None:
    path = script("""
        import json, os, sys, time
        extra = {"py_callstack": "Traceback ...", "timestamp": str(int(time.time()))}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": {"message": "ValueError: boom", "extraInfo": extra}}, file)
        os._exit(1)
    """)
    result = launch([sys.executable, path], kind="program", timeout_s=20)
    assert "exit code 1: ValueError: boom" in result.report


def test_outside_a_launcher_record_changes_nothing(monkeypatch) -> None:
    from jaxpar_launch.errors import install_excepthook, record

    for name in ("RANK", "WORLD_SIZE", "JAXPAR_COORDINATOR", "JAXPAR_STORE"):
        monkeypatch.delenv(name, raising=False)
    before = sys.excepthook
    install_excepthook()
    assert sys.excepthook is before

    @record
    def main() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        main()
