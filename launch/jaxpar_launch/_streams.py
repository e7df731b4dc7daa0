"""Which output of which worker goes where: the values of `--redirects` and `--tee`, torchrun's notation.

"3"         both streams of every worker          0 none   1 stdout   2 stderr   3 both
"0:1,2:3"   stdout of local rank 0, both of 2     (bits: 1 = stdout, 2 = stderr)
"""

from dataclasses import dataclass

from jaxpar_launch._errors import LaunchSpecError

STREAM_BITS = {"stdout": 1, "stderr": 2}


@dataclass(frozen=True)
class StreamChoice:
    """A choice of streams: `default` for every worker, `by_rank` for single ones (bits as above).

    Example:
        >>> StreamChoice.parse("0:1,2:3", flag="--tee").has(2, "stderr")
        True
    """

    default: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str, *, flag: str) -> "StreamChoice":
        """Reads `3` or `0:1,2:3`; `flag` is what the error names."""
        try:
            if ":" not in text:
                return cls(default=cls._bits(text))
            pairs = [part.split(":") for part in text.split(",")]
            return cls(by_rank=tuple((int(rank), cls._bits(bits)) for rank, bits in pairs))
        except ValueError:
            raise LaunchSpecError(
                f"{flag} {text} is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor local ranks with these, "
                f"as in {flag} 0:3,1:2."
            ) from None

    @staticmethod
    def _bits(text: str) -> int:
        if text not in ("0", "1", "2", "3"):
            raise ValueError(text)
        return int(text)

    def has(self, local_rank: int, stream: str) -> bool:
        """Whether the worker's `stream` ("stdout" or "stderr") is chosen."""
        return bool(dict(self.by_rank).get(local_rank, self.default) & STREAM_BITS[stream])

    def max_rank(self) -> int:
        """The highest local rank named, -1 if none is."""
        return max((rank for rank, _ in self.by_rank), default=-1)

    def __bool__(self) -> bool:
        return bool(self.default or any(bits for _, bits in self.by_rank))
