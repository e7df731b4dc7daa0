"""What was received and may not be there yet, and how long it may take.

    activations of microbatch 3 from rank 0 (process 0)    waiting since 12.1 s     is_ready: not yet

JAX's own waits have no deadline, and cannot be broken off: so we ask until the arrays are ready, and only then touch them.
"""

import collections
import time
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpar._errors import ProcessGroupError
from jaxpar.pp._transport._protocol import Hop, Leaves

_LONGEST_PAUSE_S = 1e-3


@dataclass(frozen=True, eq=False)
class Expected:
    """Args:
    hop: from where.
    peers: the processes that send.
    arrays: received; nobody may donate them before they are there.
    """

    hop: Hop
    peers: tuple[int, ...]
    arrays: Leaves


@dataclass
class Arrivals:
    """Args:
    timeout_s: how long one wait may take.
    """

    timeout_s: float
    _expected: collections.deque[Expected] = field(default_factory=collections.deque)

    def expect(self, expected: Expected) -> None:
        """Remember something that was received."""
        self._expected.append(expected)

    def wait(self, values: Leaves | None) -> None:
        """Wait for arrays that were computed; or, without, for all that is expected.

        Raises:
            ProcessGroupError: they did not come in time, or a peer is lost.
        """
        deadline = time.monotonic() + self.timeout_s
        if values is not None:
            for x in values:
                self._until_ready(x, deadline)
            self._drop_ready()
            return
        while self._expected:
            for x in self._expected[0].arrays:
                self._until_ready(x, deadline)
            self._expected.popleft()

    def _until_ready(self, x: Any, deadline: float) -> None:
        pause_s = 2e-5
        while not x.is_deleted() and not x.is_ready():
            if time.monotonic() > deadline:
                raise ProcessGroupError(self._late())
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if not x.is_deleted():
            try:
                x.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                raise ProcessGroupError(self._lost(str(error))) from error

    def _drop_ready(self) -> None:
        while self._expected and all(_is_there(x) for x in self._expected[0].arrays):
            self._expected.popleft()

    def _late(self) -> str:
        first = next((e for e in self._expected if not all(map(_is_there, e.arrays))), None)
        if first is None:
            return (
                f"pipeline: the programs of this process, {jax.process_index()}, did not end within {self.timeout_s:g} s, though "
                f"all that they need has come: a collective inside a stage may wait for another process of it."
            )
        shapes = [f"{x.dtype}{list(x.shape)}" for x in first.arrays]
        return (
            f"pipeline: {first.hop.what}, did not come within {self.timeout_s:g} s: rank {first.hop.target} of the pipeline (process "
            f"{jax.process_index()}) expects {shapes} from rank {first.hop.source} (processes {list(first.peers)}). Look at the "
            f"output of those: they may have stopped, be at another step, or have been given a batch of another shape. If they are "
            f"only slow, or compile, write init_process_group(timeout_s=...)."
        )

    def _lost(self, reason: str) -> str:
        pending = [e for e in self._expected if not _came_well(e.arrays)]
        where = "" if not pending else (
            f" Waiting for: {pending[0].hop.what}, from rank {pending[0].hop.source} (processes {list(pending[0].peers)})."
        )  # fmt: skip
        return f"pipeline: another process of the pipeline is lost, as seen from process {jax.process_index()}.{where} {reason}"


def _is_there(x: Any) -> bool:
    return x.is_deleted() or x.is_ready()


def _came_well(arrays: Leaves) -> bool:
    try:
        for x in arrays:
            if not x.is_deleted():
                if not x.is_ready():
                    return False
                x.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True
