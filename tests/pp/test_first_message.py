"""Both sides of a pair meet before its first program: its connections wait 30 s, and a failure is final (Gloo)."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh import _warm_up
from jaxpar.pp._transport import _permute
from jaxpar.pp._transport._permute import Permutes
from jaxpar.pp._transport._protocol import Hop, Leaves

MEETING = "the first message of a pipeline from devices [{}] to [{}]"


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the meetings that were held."""
    held: list[str] = []
    monkeypatch.setattr(_warm_up, "current_group", lambda: None)
    monkeypatch.setattr(_warm_up, "meet", lambda group, name, *_, **__: held.append(name))
    _permute._connect.cache_clear()
    return held


def moved(transport: Permutes, meshes: tuple[Mesh, Mesh], source: int, target: int) -> Leaves:
    place = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]
    wanted = jax.ShapeDtypeStruct((3,), np.float32, sharding=place[target])
    value = jax.device_put(np.arange(3, dtype=np.float32), place[source])
    return transport.move([value], Hop(source, target, "activations of microbatch 0"), [wanted])()


def pair() -> tuple[Mesh, Mesh]:
    first, second = (Mesh(np.array([device]), ("x",)) for device in jax.devices()[:2])
    return first, second


def test_each_direction_meets_once_before_its_first_message(meetings: list[str]) -> None:
    meshes = pair()
    transport = Permutes(meshes, timeout_s=20)
    for source, target in [(0, 1), (0, 1), (1, 0), (0, 1), (1, 0)]:
        (array,) = moved(transport, meshes, source, target)
        np.testing.assert_array_equal(array, np.arange(3, dtype=np.float32))
        assert array.devices() == set(meshes[target].devices.flat)
    assert meetings == [MEETING.format(0, 1), MEETING.format(1, 0)]


def test_who_does_not_come_to_the_meeting_is_named(
    monkeypatch: pytest.MonkeyPatch, meetings: list[str]
) -> None:
    def nobody(*_: Any, **__: Any) -> None:
        raise ProcessGroupError("ranks [1] of 2 did not come within 20 s")

    monkeypatch.setattr(_warm_up, "meet", nobody)
    meshes = pair()
    with pytest.raises(
        ProcessGroupError, match="activations of microbatch 0, did not come within 20 s"
    ) as failed:
        moved(Permutes(meshes, timeout_s=20), meshes, 0, 1)
    assert "ranks [1] of 2" in str(failed.value.__cause__)
