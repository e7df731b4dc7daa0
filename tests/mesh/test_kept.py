"""Kept programs: files that are whole or not there, the oldest go first, and folders that others may write are refused."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax._src import compilation_cache, compiler, distributed

import jaxpar.mesh
from jaxpar._compat import keep_programs, world_of_programs
from jaxpar._errors import ProcessGroupError
from jaxpar._kept import KeptPrograms
from jaxpar.mesh import _keep
from jaxpar.mesh._group import Membership, group_slot
from jaxpar_launch.env import ProgramCache


def kept(folder: Path, *, world: str = "2 devices", max_bytes: int = 10_000) -> KeptPrograms:
    return KeptPrograms(folder, world=world, max_bytes=max_bytes)


def test_what_was_put_is_found_by_all_of_its_key(tmp_path: Path) -> None:
    kept(tmp_path / "new" / "rank-0").put("jit_f-1", b"program")
    folder = tmp_path / "new" / "rank-0"
    assert kept(folder).get("jit_f-1") == b"program"
    assert kept(folder).get("jit_f-2") is None
    assert kept(folder, world="4 devices").get("jit_f-1") is None
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b"", lambda b: b[:-1] + b"!"]
)
def test_a_damaged_file_is_removed_with_one_warning(tmp_path: Path, damage) -> None:
    store = kept(tmp_path)
    for key in ("jit_f-1", "jit_f-2"):
        store.put(key, b"program")
    for path in tmp_path.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match="is damaged, and was removed; the program is compiled"):
        assert store.get("jit_f-1") is None
    assert store.get("jit_f-2") is None  # a second warning would be an error here
    store.put("jit_f-1", b"anew")
    assert store.get("jit_f-1") == b"anew"


def test_a_renamed_file_is_not_the_other_program(tmp_path: Path) -> None:
    store = kept(tmp_path)
    store.put("jit_f-1", b"one")
    (one,) = tmp_path.iterdir()
    store.put("jit_f-2", b"two")
    (two,) = set(tmp_path.iterdir()) - {one}
    two.write_bytes(one.read_bytes())
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert store.get("jit_f-2") is None


def test_the_program_that_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = kept(tmp_path, max_bytes=3 * 132)
    for age, key in enumerate(("f-1", "f-2", "f-3")):
        store.put(key, bytes(100))
        (path,) = (path for path in tmp_path.iterdir() if time.time() - path.stat().st_mtime < 100)
        os.utime(path, times=(time.time() - 1000 + age,) * 2)
    assert store.get("f-1") is not None  # used now
    store.put("f-4", bytes(100))
    assert [store.get(key) is not None for key in ("f-1", "f-2", "f-3", "f-4")] == [True, False, True, True]
    with pytest.warns(RuntimeWarning, match="f-.* has 432 bytes, more than the 396 allowed"):
        store.put("f-5", bytes(400))
    assert store.get("f-1") is not None


def test_what_a_killed_writer_left_is_removed_later(tmp_path: Path) -> None:
    young, old = tmp_path / "young.part", tmp_path / "old.part"
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, times=(time.time() - 7200,) * 2)
    kept(tmp_path).put("f-1", b"program")
    assert young.exists() and not old.exists()


def test_a_folder_that_cannot_be_used_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = kept(tmp_path / "file" / "rank-0")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        store.put("f-1", b"program")
    store.put("f-2", b"program")
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert store.get("f-1") is None


def test_several_writers_share_a_folder(tmp_path: Path) -> None:
    stores = [kept(tmp_path, max_bytes=40 * 1032) for _ in range(4)]

    def work(store: KeptPrograms) -> None:
        for i in range(60):
            store.put(f"f-{i % 50}", bytes([i % 50]) * 1000)
            assert store.get(f"f-{i % 50}") in (None, bytes([i % 50]) * 1000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, stores))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 44 * 1032


@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_writes_but_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)  # both are set back after the test
    monkeypatch.setattr(compilation_cache, "get_file_cache", compilation_cache.get_file_cache)
    monkeypatch.setattr(distributed.global_state, "process_id", rank)
    executable = SimpleNamespace(serialize=lambda: b"machine code")
    store = kept(tmp_path)
    try:
        keep_programs(lambda: store, folder=str(tmp_path))
        for platform in ("cpu", "tpu", "gpu"):
            backend = SimpleNamespace(platform=platform, runtime_type=platform)
            program = [f"jit_{platform}-1", 2.0, f"jit_{platform}", backend, executable]
            takes_callbacks = "host_callbacks" in compiler._cache_write.__wrapped__.__code__.co_varnames
            compiler._cache_write(*program, *([[]] if takes_callbacks else []))
        found = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
        assert found == {"jit_cpu", "jit_tpu"} | ({"jit_gpu"} if rank == 0 else set())
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(("platform", "folder", "share"), [("cpu", "rank-3", 100), ("gpu", "shared", 800)])
def test_processes_share_files_on_gpus_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, folder: str, share: int
) -> None:
    opened: list[KeptPrograms] = []
    monkeypatch.setattr(_keep, "keep_programs", lambda open_store, *, folder: opened.append(open_store()))
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    _keep.keep_compiled(ProgramCache(str(tmp_path), 800), Membership(3, 8, coordinator_address="h:1"))
    assert (opened[0]._folder, opened[0]._max_bytes) == (tmp_path / folder, share)
    assert ("process any of" in world_of_programs()) == (platform == "gpu")


def test_folders_and_limits_that_cannot_be_right_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_slot(), "group", None)  # an earlier test's world of one
    for_all = tmp_path / "for_all"
    for_all.mkdir()
    for_all.chmod(0o777)
    (tmp_path / "file").write_text("")
    for name, message in (
        (f"{for_all}", "is another's .user .*, mode 777"),
        (f"{tmp_path}/file/x", "cannot be made: Not a directory"),
        ("gs://bucket/programs", "not at an address"),
    ):
        monkeypatch.setenv("JAXPAR_COMPILATION_CACHE_DIR", name)
        with pytest.raises(ProcessGroupError, match=message):
            jaxpar.mesh.init_process_group()
    monkeypatch.setenv("JAXPAR_COMPILATION_CACHE_MAX_BYTES", "10 GiB")
    with pytest.raises(ProcessGroupError, match="MAX_BYTES='10 GiB' is not a number of bytes"):
        jaxpar.mesh.init_process_group()
