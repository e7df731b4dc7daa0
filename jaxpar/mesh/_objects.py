"""Plain Python values and host arrays between processes: gather from all, broadcast from one.

    rank 0: {"loss": 2.0}   rank 1: {"loss": 4.0}      all_gather_object -> [{"loss": 2.0}, {"loss": 4.0}]  on both
    rank 0: config          rank 1: None               broadcast_object  -> config                          on both

Values travel through the job's store, not over the devices: no compilation, no order among collectives to keep, and
a deadline. A value that cannot travel, or a function that raises, is an error on every process, not a hang.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpar._errors import CollectiveError, DesyncError, ProcessGroupError
from jaxpar.mesh._meeting import meet
from jaxpar.mesh._object_codec import UnencodableError, decode_object, encode_object
from jaxpar.mesh._process_group import current_group


def all_gather_object(obj: Any | Callable[[], Any], *, timeout_s: float | None = None) -> list[Any]:
    """Gives every process the values of all processes, in rank order (rows C27, C31).

    Args:
        obj: None, bool, int, float, str, bytes, NumPy arrays and scalars, and list, tuple, dict of these; or a
            function without arguments that returns one. It need not have one structure on all processes.
        timeout_s: Deadline from now; default the `timeout_s` of `init_process_group`.

    Returns:
        One value per process; types, dtypes and bits as they were. No pickle.

    Raises:
        CollectiveError: Some rank's value cannot travel; on every process, with rank and path of the value.
        ProcessGroupError: Some rank's function raised, or some ranks did not come in time; on every process.

    Example:
        >>> from jaxpar.mesh import all_gather_object
        >>> all_gather_object({"loss": 2.5})
        [{'loss': 2.5}]
    """
    group = current_group()
    ranks = range(group.world_size)
    return _share("all_gather_object", obj, speakers=ranks, facts={}, timeout_s=timeout_s)


def broadcast_object(obj: Any | Callable[[], Any], *, root: int = 0, timeout_s: float | None = None) -> Any:
    """Gives every process the value of one process (rows C27, C31).

    Args:
        obj: As for `all_gather_object`; ignored on the other processes. A function runs on the root only: the way
            to download or read something once.
        root: The rank whose value it is, the same on all processes.
        timeout_s: Deadline from now; default the `timeout_s` of `init_process_group`.

    Raises:
        CollectiveError: `root` is no rank, or its value cannot travel; on every process.
        DesyncError: The processes name different roots.
        ProcessGroupError: The root's function raised, or some ranks did not come in time; on every process.

    Example:
        >>> from jaxpar.mesh import broadcast_object
        >>> broadcast_object(lambda: ("vocabulary", 256))
        ('vocabulary', 256)
    """
    return _share("broadcast_object", obj, speakers=(root,), facts={"root": root}, timeout_s=timeout_s)[0]


def process_allgather(array: Any, *, timeout_s: float | None = None) -> np.ndarray:
    """Stacks one host array per process; the same result and shape rule for one process and for many (case LJ-8).

    For values that each process has for itself: counts, timings, metrics. An array that is spread over the devices
    of several processes is read with `jaxpar.mesh.full_array`.

    Args:
        array: NumPy array, number, or a `jax.Array` that this process can read; one shape and dtype on all.
        timeout_s: Deadline from now; default the `timeout_s` of `init_process_group`.

    Returns:
        NumPy array [world_size, *array.shape], row r from rank r.

    Raises:
        CollectiveError: Shapes or dtypes differ, or an array is not readable here; on every process.
        ProcessGroupError: Some ranks did not come in time.

    Example:
        >>> from jaxpar.mesh import process_allgather
        >>> process_allgather([1, 2]).shape
        (1, 2)
    """
    rows = _share(
        "process_allgather",
        lambda: _on_host(array),
        speakers=range(current_group().world_size),
        facts={},
        timeout_s=timeout_s,
    )
    kinds = [(row.shape, row.dtype) for row in rows]
    if len(set(kinds)) > 1:
        listed = ", ".join(f"rank {rank}: {dtype}{list(shape)}" for rank, (shape, dtype) in enumerate(kinds))
        raise CollectiveError(
            f"process_allgather: the arrays cannot be stacked: {listed}. All processes need one shape and dtype;"
            " use all_gather_object for values that differ."
        )
    return np.stack(rows)


def _on_host(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise UnencodableError(
            f"value is a jax.Array {array.shape} spread over several processes. Write jaxpar.mesh.full_array(value)"
        )
    return np.asarray(array)


def _share(
    name: str, obj: Any, *, speakers: Any, facts: dict[str, int], timeout_s: float | None
) -> list[Any]:
    """What the speakers say, on every process; their failures too."""
    group = current_group()
    said, cause = _say(obj) if group.rank in speakers else ({"text": ""}, None)
    verdict, heard = meet(group, name, said | facts, judge=_faults, wanted=speakers, timeout_s=timeout_s)
    if verdict is not True:
        error = {"raised": ProcessGroupError, "desync": DesyncError}.get(verdict[0], CollectiveError)
        raise error(f"{name}: {verdict[1]} (this is rank {group.rank}).") from cause
    return [decode_object(one["text"]) for one in heard]


def _say(obj: Any) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"text": encode_object(obj() if callable(obj) else obj)}, None
    except UnencodableError as error:
        return {"fault": "cannot travel", "why": str(error)}, error
    except Exception as error:  # the others wait: whatever went wrong here, they must hear of it
        return {"fault": "raised", "why": f"{type(error).__name__}: {error}"}, error


def _faults(all_said: list[dict[str, Any]]) -> bool | list[str]:
    """True, or the kind and the text of what is wrong."""
    roots = [said["root"] for said in all_said if "root" in said]
    if len(set(roots)) > 1:
        listed = ", ".join(f"rank {rank}: root={root}" for rank, root in enumerate(roots))
        return ["desync", f"the processes name different roots: {listed}"]
    if roots and not 0 <= roots[0] < len(all_said):
        return ["root", f"root={roots[0]} is no rank of this job: ranks are 0 to {len(all_said) - 1}"]
    for rank, said in enumerate(all_said):
        if "fault" in said:
            verb = "cannot send its value" if said["fault"] == "cannot travel" else "raised"
            return [said["fault"], f"rank {rank} {verb}: {said['why']}"]
    return True
