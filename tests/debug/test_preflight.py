"""`jaxpar-launch --check`: one line for what is equal, a table, and who does not fit."""

from typing import Any

import pytest

from jaxpar.debug._preflight import table, wrong_with
from jaxpar_launch import launch


def fact(rank: int, **fields: Any) -> dict[str, Any]:
    usual = {
        "rank": rank, "host": f"node{rank}", "python": "3.11.9", "jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12",
        "optax": None, "jaxpar": "0.1", "platform": "cpu", "devices": 4, "kind": "cpu", "memory_gib": 9.0, "skew_s": 0.001,
    }  # fmt: skip
    return usual | fields


def test_what_fits_has_nothing_wrong() -> None:
    assert wrong_with([fact(0), fact(1)], asked=4) == []


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"jax": "0.9.0"}, "rank 2 on node2 has jax 0.9.0, the others 0.10.2"),
        ({"optax": "0.2"}, "rank 2 on node2 has optax 0.2, the others None"),
        ({"devices": 3}, "rank 2 on node2 sees 3 devices, --devices-per-proc 4 asked for 4"),
        ({"memory_gib": 0.25}, "rank 2 on node2 has 0.2 GiB of memory left"),
        ({"skew_s": -90.0}, "the clock of rank 2 on node2 is -90.0 s off that of rank 0"),
    ],
)
def test_who_does_not_fit_is_named(odd: dict[str, Any], message: str) -> None:
    assert message in wrong_with([fact(0), fact(1), fact(2, **odd)], asked=4)


def test_what_is_equal_stands_once() -> None:
    lines = table([fact(0), fact(1, jax="0.9.0")]).splitlines()
    assert lines[0].startswith(
        "2 workers, all with python 3.11.9, jaxlib 0.10.2, flax 0.12, jaxpar 0.1, platform cpu"
    )
    assert lines[1].split() == ["rank", "host", "jax", "memory", "clock"]
    assert [line.split()[:3] for line in lines[3:]] == [["0", "node0", "0.10.2"], ["1", "node1", "0.9.0"]]


def test_two_workers_are_well() -> None:
    result = launch(
        ["jaxpar.debug._preflight"],
        kind="module",
        nproc=2,
        devices_per_proc=2,
        environ={"JAX_PLATFORMS": "cpu"},
        timeout_s=60,
    ).check()
    assert "2 workers, all with python" in result.output[0]
    assert "a sum over 4 devices takes" in result.output[0]
    assert result.output[0].splitlines()[-1] == "all is well"
