"""A worker's environment: what the launcher writes, the worker reads; half an identity is an error."""

import re

import pytest

from jaxpar_launch import WorkerEnvError
from jaxpar_launch.env import WorkerEnv, join_address, split_address, thread_defaults

PLACE = dict(
    rank=3, local_rank=1, world_size=4, local_world_size=2, master_addr="10.0.0.1", master_port=29500
)
FULL = PLACE | dict(
    group_rank=1,
    group_world_size=2,
    role_name="trainer",
    role_rank=2,
    role_world_size=3,
    restart_count=1,
    max_restarts=3,
    run_id="job7",
    coordinator="10.0.0.1:40123",
    store="10.0.0.1:40124",
    store_token="secret",
    error_file="/tmp/error.json",
)


@pytest.mark.parametrize(
    "fields",
    [
        PLACE,
        FULL,
        FULL | dict(platform="cpu", devices_per_proc=4),
        FULL | dict(local_device_ids=(2, 3)),
        PLACE | dict(master_addr="fe80::1"),
    ],
)
def test_what_is_written_is_read_back(fields) -> None:
    env = WorkerEnv(**fields)
    assert WorkerEnv.from_environ(env.to_environ()) == env


def test_torchruns_variables_have_torchruns_meaning() -> None:
    environ = WorkerEnv(**FULL).to_environ()
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
    }
    assert {name: environ[name] for name in expected} == expected


def test_variables_for_plain_jax_and_gpus() -> None:
    environ = WorkerEnv(**FULL, local_device_ids=(2, 3)).to_environ()
    assert environ["JAX_COORDINATOR_ADDRESS"] == environ["JAXPAR_COORDINATOR"] == "10.0.0.1:40123"
    assert (environ["JAX_PROCESS_ID"], environ["JAX_NUM_PROCESSES"]) == ("3", "4")
    assert environ["JAX_LOCAL_DEVICE_IDS"] == environ["JAX_CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "JAX_NUM_CPU_DEVICES" not in environ and "JAX_PLATFORMS" not in environ


@pytest.mark.parametrize(
    "environ", [{}, {"HOME": "/root"}, {"RANK": ""}, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}]
)
def test_without_a_launcher_there_is_no_worker(environ) -> None:
    assert WorkerEnv.from_environ(environ) is None


def test_pytorchs_env_variables_by_hand_are_enough() -> None:
    environ = {
        name: value for name, value in WorkerEnv(**PLACE).to_environ().items() if not name.startswith("JAX")
    }
    env = WorkerEnv.from_environ(environ)
    assert env is not None and env.coordinator == "10.0.0.1:29500" and env.store is None


@pytest.mark.parametrize(
    "missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_a_missing_variable_is_named(missing: str) -> None:
    environ = WorkerEnv(**FULL).to_environ()
    del environ[missing]
    with pytest.raises(WorkerEnvError, match=f"lacks {missing}"):
        WorkerEnv.from_environ(environ)


def test_torchrun_is_recognised() -> None:
    environ = {
        name: value for name, value in WorkerEnv(**PLACE).to_environ().items() if not name.startswith("JAX")
    }
    with pytest.raises(WorkerEnvError, match="torchrun started this process"):
        WorkerEnv.from_environ(environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RANK", "three", "RANK='three' is not an integer"),
        ("RANK", "4", "RANK=4 does not lie in 0..WORLD_SIZE-1 with WORLD_SIZE=4"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK=-1 does not lie in 0..LOCAL_WORLD_SIZE-1"),
        ("GROUP_RANK", "2", "GROUP_RANK=2 does not lie in 0..GROUP_WORLD_SIZE-1"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 is more than WORLD_SIZE=4"),
        ("JAXPAR_COORDINATOR", "10.0.0.1", "JAXPAR_COORDINATOR='10.0.0.1' is not host:port"),
        ("JAXPAR_STORE", "10.0.0.1:0", "JAXPAR_STORE='10.0.0.1:0' is not host:port"),
        ("JAX_LOCAL_DEVICE_IDS", "0;1", "JAX_LOCAL_DEVICE_IDS='0;1' is not integers"),
    ],
)
def test_a_malformed_variable_is_named(variable: str, value: str, message: str) -> None:
    with pytest.raises(WorkerEnvError, match=re.escape(message)):
        WorkerEnv.from_environ(WorkerEnv(**FULL).to_environ() | {variable: value})


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 1), ("fe80::1", 65535), ("node-3", 29500)])
def test_addresses_split_as_they_were_joined(host: str, port: int) -> None:
    assert split_address(join_address(host, port), variable="X") == (host, port)


@pytest.mark.parametrize(
    ("inherited", "nproc", "devices", "platform", "expected"),
    [
        ({}, 2, 1, "cpu", {"OMP_NUM_THREADS": "1", "PJRT_NPROC": "4", "NPROC": "4"}),
        ({}, 8, 1, "cpu", {"OMP_NUM_THREADS": "1", "PJRT_NPROC": "1", "NPROC": "1"}),
        ({}, 8, 4, "cpu", {"OMP_NUM_THREADS": "1", "PJRT_NPROC": "8", "NPROC": "8"}),  # 2 per device
        (
            {"JAX_NUM_CPU_DEVICES": "4"},
            8,
            None,
            "cpu",
            {"OMP_NUM_THREADS": "1", "PJRT_NPROC": "8", "NPROC": "8"},
        ),
        ({}, 1, None, "cpu", {"PJRT_NPROC": "8", "NPROC": "8"}),
        ({}, 2, None, "gpu", {"OMP_NUM_THREADS": "1"}),
        ({"OMP_NUM_THREADS": "6", "PJRT_NPROC": "3"}, 2, 8, "cpu", {}),
    ],
)
def test_workers_share_the_cores_and_the_user_wins(inherited, nproc, devices, platform, expected) -> None:
    got = thread_defaults(inherited, nproc=nproc, num_cores=8, platform=platform, devices_per_proc=devices)
    assert got == expected
