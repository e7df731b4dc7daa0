"""The three ways in which XLA writes replica groups mean the same devices and the same mesh axes."""

import pytest

from jaxpar.debug._groups import axes_of_groups, axes_of_pairs, replica_groups, source_target_pairs

MESH = {"dp": 2, "tp": 2}
ROWS, COLUMNS, ALL = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("text", "groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3}}", ROWS, ("tp",)),
        ("replica_groups=[2,2]<=[4]", ROWS, ("tp",)),
        ("replica_groups=mesh['dp'=2,'tp'=2] {'tp'}", ROWS, ("tp",)),
        ("replica_groups={{0,2},{1,3}}", COLUMNS, ("dp",)),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", COLUMNS, ("dp",)),
        ("replica_groups=mesh['dp'=2,'tp'=2] {'dp'}", COLUMNS, ("dp",)),
        ("replica_groups={{0,1,2,3}}", ALL, ("dp", "tp")),
        ("replica_groups=[1,4]<=[4]", ALL, ("dp", "tp")),
        ("replica_groups=mesh['dp'=2,'tp'=2] {'dp','tp'}", ALL, ("dp", "tp")),
        ("replica_groups={}", ALL, ("dp", "tp")),
        ("channel_id=1", ALL, ("dp", "tp")),
    ],
)
def test_every_syntax_gives_the_same_groups_and_axes(text: str, groups: tuple, axes: tuple) -> None:
    found = replica_groups(f"channel_id=1, {text}, use_global_device_ids=true", 4)
    assert found == groups
    assert axes_of_groups(found, MESH) == axes


def test_part_of_an_axis_in_mesh_syntax() -> None:
    # 'x' of 8 split as 2 x 4: the major part joins devices 4 apart, the minor part joins neighbours.
    assert replica_groups("replica_groups=mesh['x'=8] {'x':(1)2}", 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert replica_groups("replica_groups=mesh['x'=8] {'x':(2)4}", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("ids", ["([2,2]<=[2,2]T(1,0))", "(0,2,1,3)"])
def test_mesh_syntax_with_its_own_device_order(ids: str) -> None:
    assert replica_groups(f"replica_groups=mesh['a'=2,'b'=2], device_ids={ids} {{'b'}}", 4) == COLUMNS


def test_groups_that_are_no_whole_axes_have_no_name() -> None:
    assert axes_of_groups(((0, 1), (2, 3)), {"dp": 4}) is None
    assert axes_of_groups(((0, 3), (1, 2)), MESH) is None


def test_axes_of_size_one_are_never_named() -> None:
    assert axes_of_groups(ROWS, {"dp": 2, "pp": 1, "tp": 2}) == ("tp",)


def test_pairs_name_the_axis_they_move_along_and_skip_self_sends() -> None:
    pairs = source_target_pairs("source_target_pairs={{0,2},{2,0},{1,3},{3,1},{5,5}}")
    assert pairs == ((0, 2), (2, 0), (1, 3), (3, 1))
    assert axes_of_pairs(pairs, MESH) == ("dp",)
