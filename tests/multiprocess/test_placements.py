"""Placed arrays whose devices belong to two processes: each sees its own pieces, and all see one value (case LJ-8)."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.mesh import (
    Partial,
    Replicate,
    Shard,
    destroy_process_group,
    distribute,
    from_local,
    full_array,
    init_device_mesh,
    normal,
    placements_of,
    redistribute,
    to_local,
)
from jaxpar_launch import launch

VALUE = np.arange(10.0, dtype=np.float32).reshape(5, 2)


def look() -> dict[str, Any]:
    """What one process sees."""
    jaxpar.init_process_group(timeout_s=30)
    mesh = init_device_mesh((2, 2), ("dp", "tp"))

    padded = distribute(VALUE, mesh, (Shard(0), Shard(1)), pad=True)
    terms = from_local(lambda place: np.float32(1 + 2 * place[0] + place[1]), mesh, (Partial(), Partial()))
    peaks = from_local(lambda place: VALUE * place[0], mesh, (Partial("max"), Replicate()))
    moved = redistribute(padded, (Replicate(), Shard(0)), pad=True)
    drawn = normal(jax.random.key(0), (4, 4), mesh, (Shard(0), Shard(0)))

    seen = {
        "mesh": repr(mesh),
        "coordinates": mesh.local_coordinates(),
        "padded": [np.asarray(piece).tolist() for piece in to_local(padded)],
        "moved": [np.asarray(piece).tolist() for piece in to_local(moved)],
        "moved whole": np.asarray(full_array(moved)).tolist(),
        "terms": [float(piece) for piece in to_local(terms)],
        "sum": float(full_array(terms)),
        "max": np.asarray(full_array(peaks)).tolist(),
        "placements": [str(place) for place in placements_of(terms)],
        "normal": np.array_equal(full_array(drawn), jax.random.normal(jax.random.key(0), (4, 4))),
    }
    destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return list(launch(look, nproc=2, devices_per_proc=2, timeout_s=120).values.values())


def test_the_last_axis_lies_inside_a_process(seen: list[dict]) -> None:
    assert seen[0]["mesh"] == "DeviceMesh((dp=2, tp=2), 'cpu', devices=4, processes=2)"
    assert [one["coordinates"] for one in seen] == [((0, 0), (0, 1)), ((1, 0), (1, 1))]


def test_each_process_sees_its_own_pieces(seen: list[dict]) -> None:
    assert [one["padded"] for one in seen] == [
        [VALUE[:3, :1].tolist(), VALUE[:3, 1:].tolist()],
        [VALUE[3:, :1].tolist(), VALUE[3:, 1:].tolist()],
    ]
    assert [one["moved"] for one in seen] == [[VALUE[:3].tolist(), VALUE[3:].tolist()]] * 2
    assert [one["terms"] for one in seen] == [[1.0, 2.0], [3.0, 4.0]]


def test_all_processes_see_one_value(seen: list[dict]) -> None:
    for one in seen:
        assert one["moved whole"] == VALUE.tolist()
        assert one["sum"] == 10.0
        assert one["max"] == VALUE.tolist()
        assert one["placements"] == ["P(sum)", "P(sum)"]
        assert one["normal"] is True
