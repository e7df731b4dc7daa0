"""What a compiled step communicates and needs, as numbers that travel in JSON."""

from collections import Counter
from typing import Any

import jax

from jaxpar.debug import collectives, memory
from jaxpar.mesh import DeviceMesh


def program_facts(compiled: jax.stages.Compiled, mesh: DeviceMesh) -> dict[str, Any]:
    """Collectives by kind, bytes that a device sends, and bytes that must fit on it."""
    table, counts = collectives(compiled, mesh=mesh), Counter[str]()
    for row in table:
        counts[row.kind] += row.count
    return {
        "collectives": dict(sorted(counts.items())),
        "sent_bytes": table.wire_bytes(),
        "device_bytes": memory(compiled).total_bytes,
    }
