"""Once round the ring: how the keys and values of every other rank come by, and what a call is made of.

At step s, 1 to c-1, rank r meets the keys and values of rank r-s (mod c). They come in one of two ways:

    ppermute     rank by rank, while the step before is computed; two of them in memory
    allgather    all at once, while step 0 is computed; all of them in memory
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import jax
from jax import lax

from jaxpar._after import number_of, wait_for
from jaxpar._pytree import PyTree
from jaxpar.cp._axis import rank_on
from jaxpar.cp._softmax import Keys
from jaxpar.cp._visits import Schedule, Visits
from jaxpar.mesh import all_gather, ring_shift

Rotate = Literal["allgather", "ppermute"]
Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Ring:
    """What is known of a call before its arrays: hashable, so that it can steer a `custom_vjp`.

    Attributes:
        axis: Mesh axis whose ranks form the ring.
        rotate: How keys and values get round.
        scale: Of the scores.
        schedule: What is computed when.
    """

    axis: str
    rotate: Rotate
    scale: float
    schedule: Schedule

    def round(self, keys: Keys, step: Callable[[Keys, Visits, Carry], Carry], carry: Carry) -> Carry:
        """Steps 1 to c-1: `carry = step(keys of another rank, what is seen of them, carry)`."""
        ranks = self.schedule.ranks
        rank = rank_on(self.axis, ranks)
        gathers = self.rotate == "allgather" and ranks > 1
        whole = all_gather(keys, self.axis, tiled=False) if gathers else None
        for hop in range(1, ranks):
            source = (rank - hop) % ranks
            keys = self._next(keys, carry) if whole is None else _of(whole, source)
            carry = step(keys, self.schedule.met(rank, source), carry)
        return carry

    def _next(self, keys: Keys, carry: PyTree) -> Keys:
        """The keys of the rank before. They are used, and leave again, when what was computed so far is there.

        So a hop is no more than one step ahead, and keys and values do not pile up.
        """
        keys = ring_shift(keys, self.axis)
        return keys._replace(kv=wait_for(keys.kv, [number_of(jax.tree.leaves(carry))]))


def _of(whole: Keys, source: jax.Array | int) -> Keys:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, source, keepdims=False), whole)
