"""Descriptions of clusters that are not here: what is refused, and why."""

import importlib.util
import re
from typing import Any

import pytest

from jaxpar._errors import MeshError
from jaxpar.debug import topology
from jaxpar.debug._torus import _default_torus


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("h1000", {"num_devices": 8}, "Known kinds: h100, v5e, v6e, v5p."),
        ("h100", {"num_devices": 8, "torus": (2, 4)}, "GPUs stand in hosts, not on a torus."),
        ("v5e", {"num_devices": 12}, "Say it, as torus=(2, 3) for 6 chips."),
        ("v5p", {"num_devices": 0}, "0 is no power of two"),
        ("v5e", {"num_devices": 16, "torus": (4, 8)}, "4 * 8 = 32 chips on a torus of 2 dims."),
        ("v5p", {"num_devices": 16, "torus": (4, 4)}, "v5p chips stand on a torus of 3 dims"),
        ("v6e", {"num_devices": 16, "torus": (-4, -4)}, "must hold 16 of them"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=re.escape(message)):
        topology(kind, **options)


def test_without_libtpu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MeshError, match=re.escape("pip install 'jaxpar[aot-tpu]'")):
        topology("v5e", num_devices=8)


def test_a_slice_that_the_compiler_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: object) -> None:
        raise RuntimeError(f"no such topology: {name}")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    with pytest.raises(MeshError, match=re.escape("knows no slice v5e:3x5 (no such topology: v5e:3x5)")):
        topology("v5e", num_devices=15, torus=(3, 5))


@pytest.mark.parametrize(
    ("kind", "num_devices", "torus"),
    [
        ("v5e", 256, (16, 16)),
        ("v5e", 8, (2, 4)),
        ("v5e", 1, (1, 1)),
        ("v5p", 64, (4, 4, 4)),
        ("v5p", 128, (4, 4, 8)),
    ],
)
def test_the_torus_is_near_a_square_or_cube(kind: str, num_devices: int, torus: tuple[int, ...]) -> None:
    assert _default_torus(kind, num_devices) == torus
