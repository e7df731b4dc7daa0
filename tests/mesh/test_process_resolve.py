"""Which process is this? The launcher, arguments, a cluster or nobody says; contradictions and late calls are errors."""

import os
import re

import jax
import pytest

import jaxpar
from jaxpar._errors import ProcessGroupError
from jaxpar.mesh import get_local_rank, get_rank, get_world_size, is_initialized
from jaxpar.mesh._distributed import _resolve
from jaxpar.mesh._group import Membership, Venue
from jaxpar_launch.env import WorkerEnv

WORKER = WorkerEnv(
    rank=1,
    local_rank=1,
    world_size=2,
    local_world_size=2,
    master_addr="10.0.0.1",
    master_port=29500,
    store="10.0.0.1:29501",
    store_token="secret",
    restart_count=3,
)
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "3",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nobody says anything."""
    for name in os.environ:
        if re.match(
            "RANK|WORLD_SIZE|LOCAL_|MASTER_|JAXPAR_|SLURM_|OMPI_|JAX_COORD|K8S|KUBERNETES|TPU_", name
        ):
            monkeypatch.delenv(name)
    return monkeypatch


def launch_as(environment: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)


def resolve(
    given: dict | None = None, device_ids: tuple[int, ...] | None = None
) -> tuple[Membership, Venue | None]:
    return _resolve(given or {}, device_ids, False, 5.0)


def test_a_process_of_which_nobody_says_anything_is_alone(environment: pytest.MonkeyPatch) -> None:
    assert resolve() == (Membership(0, 1), None)
    assert (get_rank(), get_world_size(), get_local_rank(), is_initialized()) == (0, 1, 0, False)


def test_the_launcher_is_believed(environment: pytest.MonkeyPatch) -> None:
    launch_as(environment, WORKER.to_environ())
    member = Membership(1, 2, local_rank=1, coordinator_address="10.0.0.1:29500")
    assert resolve() == (member, Venue("10.0.0.1:29501", "secret", "attempt/3"))
    assert resolve({"rank": 1, "world_size": 2}) == resolve()


def test_arguments_that_contradict_the_launcher_name_both(environment: pytest.MonkeyPatch) -> None:
    launch_as(environment, WORKER.to_environ())
    with pytest.raises(
        ProcessGroupError, match="world_size=3 was passed, the launcher set 2.*leave them out"
    ):
        resolve({"world_size": 3, "rank": 1})


def test_half_an_environment_is_an_error(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("WORLD_SIZE", "2")
    for ask in (resolve, get_rank):
        with pytest.raises(ProcessGroupError, match="lacks RANK"):
            ask()


def test_pytorchs_variables_by_hand_need_no_store(environment: pytest.MonkeyPatch) -> None:
    launch_as(environment, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})
    launch_as(environment, {"MASTER_ADDR": "node01", "MASTER_PORT": "29500"})
    assert resolve() == (Membership(0, 2, local_rank=0, coordinator_address="node01:29500"), None)


def test_explicit_arguments_make_a_member(environment: pytest.MonkeyPatch) -> None:
    given = {"coordinator_address": "node01:1", "world_size": 4, "rank": 3}
    expected = Membership(3, 4, coordinator_address="node01:1", local_device_ids=(0, 1))
    assert resolve(given, (0, 1)) == (expected, None)


def test_explicit_arguments_come_all_or_none(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ProcessGroupError, match="world_size, rank given, but not coordinator_address.*all three"
    ):
        resolve({"world_size": 2, "rank": 0})


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_processes_is_refused(environment: pytest.MonkeyPatch, world_size: int) -> None:
    with pytest.raises(ProcessGroupError, match=f"world_size={world_size}, but a job has at least one"):
        resolve({"coordinator_address": "node01:1", "world_size": world_size, "rank": 0})


def test_slurm_is_detected_by_jax(environment: pytest.MonkeyPatch) -> None:
    launch_as(environment, SLURM)
    expected = Membership(4, 6, coordinator_address="node07:62674", local_device_ids=(1,))
    assert resolve() == (expected, None)


def test_a_single_slurm_task_is_alone_and_keeps_all_its_devices(environment: pytest.MonkeyPatch) -> None:
    launch_as(environment, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    member, venue = resolve()
    assert (member.rank, member.world_size, member.local_device_ids, venue) == (0, 1, None, None)


# Too late, or not at all ---------------------------------------------------------------------------------------


def test_jax_in_use_before_init_is_an_error(environment: pytest.MonkeyPatch) -> None:
    jax.devices()
    with pytest.raises(
        ProcessGroupError, match=r"JAX is already in use .* \(rank 0 of 2\).*first thing in the script"
    ):
        jaxpar.init_process_group(coordinator_address="127.0.0.1:1", world_size=2, rank=0, timeout_s=1)
    assert not is_initialized()


def test_a_process_that_was_launched_but_has_not_joined_is_told_to(environment: pytest.MonkeyPatch) -> None:
    launch_as(environment, WORKER.to_environ())
    for ask in (get_rank, get_world_size, get_local_rank):
        with pytest.raises(
            ProcessGroupError, match=r"one of several, but has not joined them: call jaxpar.init"
        ):
            ask()
