"""Which device stands where, on several hosts and on a TPU torus that are not here."""

from dataclasses import dataclass

import numpy as np
import pytest

from jaxpar.mesh._devices import arrange_devices, arrange_given, slice_shape


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "H100"
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    slice_index: int = 0


def hosts(num_hosts: int, per_host: int) -> list[FakeDevice]:
    """Devices in an order that mixes the hosts."""
    devices = [
        FakeDevice(id=host * 100 + local, process_index=host)
        for local in range(per_host)
        for host in range(num_hosts)
    ]
    return devices[::-1]


def process_indices(array: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda device: device.process_index)(array)


def test_the_last_axis_stays_inside_a_host():
    arranged = arrange_devices((2, 4), hosts(2, 4))
    assert process_indices(arranged).tolist() == [[0] * 4, [1] * 4]


def test_the_last_axes_together_stay_inside_a_host():
    arranged = process_indices(arrange_devices((4, 2, 2), hosts(4, 4)))
    assert [len(set(block.ravel().tolist())) for block in arranged] == [1, 1, 1, 1]


def test_an_axis_larger_than_a_host_spans_neighbouring_hosts():
    arranged = process_indices(arrange_devices((2, 8), hosts(4, 4)))
    assert arranged.tolist() == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]


def test_order_does_not_depend_on_the_order_of_discovery():
    devices = hosts(2, 4)
    assert (arrange_devices((2, 4), devices) == arrange_devices((2, 4), devices[::-1])).all()


@pytest.mark.parametrize(
    ("shape", "num_slices", "between"),
    [
        ((4, 8), 2, (2, 1)),
        ((2, 4), 4, (2, 2)),
        ((1, 8), 4, (1, 4)),
        ((8,), 1, (1,)),
        ((3, 8), 3, (3, 1)),
        ((3, 5), 2, None),
    ],
)
def test_slices_go_to_the_first_axes(shape, num_slices, between):
    assert slice_shape(shape, num_slices) == between


def tpu_slice(slice_index: int) -> list[FakeDevice]:
    """A v4 slice of 2 x 2 x 1 chips."""
    places = [(x, y, 0) for y in range(2) for x in range(2)]
    return [
        FakeDevice(
            id=slice_index * 4 + number,
            process_index=slice_index,
            platform="tpu",
            device_kind="TPU v4",
            coords=place,
            slice_index=slice_index,
        )
        for number, place in enumerate(places)
    ]


def test_tpu_axes_follow_the_torus():
    arranged = arrange_devices((2, 2), tpu_slice(0))
    rows = [{device.coords for device in row} for row in arranged]
    assert len({device.id for device in arranged.flat}) == 4
    for row in rows:  # an axis runs along one direction of the torus: its chips are neighbours
        (x0, y0, _), (x1, y1, _) = sorted(row)
        assert abs(x0 - x1) + abs(y0 - y1) == 1


def test_tpu_slices_are_joined_by_the_first_axis():
    arranged = arrange_devices((2, 4), tpu_slice(1) + tpu_slice(0))
    slices = np.vectorize(lambda device: device.slice_index)(arranged)
    assert [set(row.tolist()) for row in slices] == [{0}, {1}]


def v5e_slice() -> list[FakeDevice]:
    """16 chips of a v5e torus of 4 x 4, host by host as JAX lists them: 2 x 2 chips each."""
    places = [
        (2 * hx + x, 2 * hy + y, 0) for hy in range(2) for hx in range(2) for y in range(2) for x in range(2)
    ]
    return [
        FakeDevice(id=i, process_index=i // 4, platform="tpu", device_kind="TPU v5 lite", coords=place)
        for i, place in enumerate(places)
    ]


def coords(array: np.ndarray, dim: int) -> np.ndarray:
    return np.vectorize(lambda device: device.coords[dim])(array)


def test_a_list_of_tpu_devices_is_laid_along_the_torus():
    arranged = arrange_given((4, 4), v5e_slice())
    fixed = [dim for dim in (0, 1) if all(len(set(row)) == 1 for row in coords(arranged, dim).tolist())]
    assert len(fixed) == 1  # along the second axis one coordinate stays, and the other runs through all
    assert all(sorted(row) == [0, 1, 2, 3] for row in coords(arranged, 1 - fixed[0]).tolist())
    assert all(len(set(column)) == 1 for column in coords(arranged, 1 - fixed[0]).T.tolist())
    assert len(set(arranged.flat)) == 16


def test_an_array_of_tpu_devices_and_a_list_with_holes_are_kept_in_order():
    devices = v5e_slice()
    array = np.array(devices, dtype=object)
    assert arrange_given((4, 4), array).ravel().tolist() == devices
    diagonal = [device for device in devices if device.coords[0] == device.coords[1]][::-1]
    assert arrange_given((2, 2), diagonal).ravel().tolist() == diagonal


def test_a_list_of_other_devices_is_kept_in_order():
    devices = hosts(2, 4)
    assert arrange_given((2, 4), devices).ravel().tolist() == devices
