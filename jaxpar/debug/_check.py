"""Assert what a program communicates, exactly: what is expected is there, and nothing else is."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar._errors import CommunicationCheckError
from jaxpar.debug._collectives import collectives
from jaxpar.debug._program import Program
from jaxpar.debug._table import Collective, CollectiveTable
from jaxpar.mesh import MeshLike

Key = str | tuple[str, str | Sequence[str]]


def assert_collectives(
    program: Program | CollectiveTable,
    *args: Any,
    expected: Mapping[Key, int],
    bytes: Mapping[Key, int] | None = None,
    mesh: MeshLike | None = None,
    **kwargs: Any,
) -> CollectiveTable:
    """Check the collectives of a compiled program against exact counts, and bytes if given.

    Args:
        program: As for `collectives`, or a table that it returned.
        *args: Arguments to lower with.
        expected: Executions per run, by kind (`"all_reduce"`, over any axis) or by kind and axis
            (`("all_reduce", "dp")`; several axes as a tuple). A collective that no key names must not be there,
            so `{}` asserts that nothing is communicated.
        bytes: Bytes per device and run (`CollectiveTable.bytes`), by the same kinds of key.
        mesh: As for `collectives`.
        **kwargs: Keyword arguments to lower with.

    Returns:
        The table, for further checks.

    Raises:
        CommunicationCheckError: A count or a byte total differs, a collective is there that is not named, or a
            count cannot be told because a loop has no known trip count. The message shows the whole table.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((8,), ("dp",)).jax_mesh
        >>> f = jax.shard_map(lambda x: jax.lax.psum(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> table = assert_collectives(f, jnp.ones((8, 16)), expected={("all_reduce", "dp"): 1})
    """
    table = (
        program if isinstance(program, CollectiveTable) else collectives(program, *args, mesh=mesh, **kwargs)
    )
    faults = [
        *_differences(expected, {key: table.count(*_split(key)) for key in expected}, "executions"),
        *_differences(
            bytes or {}, {key: table.bytes(*_split(key)) for key in bytes or {}}, "bytes per device"
        ),
        *_unexpected(table, expected),
        *_uncounted(table),
    ]
    if faults:
        raise CommunicationCheckError(_message(faults, table))
    return table


def _split(key: Key) -> tuple[str, str | Sequence[str] | None]:
    return (key, None) if isinstance(key, str) else key


def _differences(expected: Mapping[Key, int], found: Mapping[Key, int], unit: str) -> list[str]:
    wrong = [key for key in expected if expected[key] != found[key]]
    return [f"{_name(key)}: expected {expected[key]} {unit}, found {found[key]}" for key in wrong]


def _unexpected(table: CollectiveTable, expected: Mapping[Key, int]) -> list[str]:
    named = {id(row) for key in expected for row in table.select(*_split(key))}
    return [
        f"{_title(row)}: not expected, found {row.count} executions" for row in table if id(row) not in named
    ]


def _uncounted(table: CollectiveTable) -> list[str]:
    loops = [row for row in table if not row.is_count_known]
    return [f"{_title(row)}: in a loop of unknown trip count, so it cannot be counted" for row in loops]


def _title(row: Collective) -> str:
    over = f" over {', '.join(row.axes)}" if row.axes else ""
    return f"{row.kind}{over}" + (f" ({row.op_name})" if row.op_name else "")


def _name(key: Key) -> str:
    kind, axis = _split(key)
    axes = axis if isinstance(axis, str) or axis is None else ", ".join(axis)
    return kind if axes is None else f"{kind} over {axes}"


def _message(faults: list[str], table: CollectiveTable) -> str:
    lines = "\n".join(f"  {fault}" for fault in faults)
    indented = "\n".join(f"    {line}" for line in str(table).splitlines())
    return (
        f"The compiled program does not communicate as asserted:\n{lines}\nThe whole program:\n{indented}\n"
        "If the new communication is meant, change expected=; if not, find its origin by op_name in "
        "jaxpar.debug.collectives(...).to_dicts()."
    )
