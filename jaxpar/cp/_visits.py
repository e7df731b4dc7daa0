"""Which blocks of scores a rank computes at each step of the ring: tables, made before any number is known.

A rank's L rows are cut into N blocks. Under the head-tail layout the first half of them is chunk r, the second half
chunk 2c-1-r. At step s a rank meets the keys of rank r-s (mod c), in blocks of the same order. What it sees of them
(`#`), what it sees half (`\\`), and what is masked and never computed (`.`):

    step 0, own keys        keys of an earlier rank       keys of a later rank
             head tail               head tail                     head tail
       head   \\    .          head    #    .           head    .    .
       tail   #    \\          tail    #    .           tail    #    #

So every later step is two of the four quarters: (tail, head), and (side, side) with side = head or tail by rank.
Which of them is an index, not a branch: the program has no conditional, and each rank has the same work.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Visits(NamedTuple):
    """Blocks of scores to compute, one after the other.

    Attributes:
        rows: i32[n], the block of queries.
        keys: i32[n], the block of keys.
        offsets: i32[n], how far the first query of the block lies behind its first key in the sequence; None where
            every query sees every key.
    """

    rows: jax.Array | np.ndarray
    keys: jax.Array | np.ndarray
    offsets: jax.Array | np.ndarray | None

    def part(self, start: int, stop: int) -> "Visits":
        """The visits from `start` to `stop`."""
        offsets = None if self.offsets is None else self.offsets[start:stop]
        return Visits(self.rows[start:stop], self.keys[start:stop], offsets)


@dataclass(frozen=True)
class Schedule:
    """How the L rows of a rank are cut, and what is computed when.

    Attributes:
        ranks: Ranks of the ring, c.
        num_blocks: Blocks of a rank's rows, N; even in the head-tail layout.
        block: Rows of a block.
        causal: Whether a query sees only keys at its own or an earlier position.
        load_balanced: Head-tail layout.
    """

    ranks: int
    num_blocks: int
    block: int
    causal: bool
    load_balanced: bool

    def own(self) -> Visits:
        """Step 0: the rank's own keys. Blocks are in the order of the sequence, so causal is the lower triangle."""
        rows, keys = _product(self.num_blocks, self.num_blocks)
        if not self.causal:
            return Visits(rows, keys, None)
        rows, keys = rows[rows >= keys], keys[rows >= keys]
        return Visits(rows, keys, (rows - keys) * self.block)

    def met(self, rank: jax.Array | int, source: jax.Array | int) -> Visits:
        """A later step: the keys of rank `source`."""
        if self.causal and self.load_balanced:
            half = self.num_blocks // 2
            rows, keys = _product(half, half)
            side = jnp.where(source < rank, 0, half).astype(jnp.int32)
            return Visits(
                jnp.concatenate([rows + half, rows + side]), jnp.concatenate([keys, keys + side]), None
            )
        rows, keys = _product(self.num_blocks, self.num_blocks)
        between = (rank - source) * self.num_blocks * self.block
        return Visits(rows, keys, between + (rows - keys) * self.block if self.causal else None)


def choose_block(rows: int, block_size: int) -> int:
    """The divisor of `rows` nearest to `block_size`, by ratio.

    >>> choose_block(4096, 512), choose_block(1000, 300), choose_block(7, 4)
    (512, 250, 7)
    """
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    return min(divisors, key=lambda d: max(d / block_size, block_size / d))


def _product(rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(rows * keys, dtype=np.int32)
    return at // keys, at % keys
