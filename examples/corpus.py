"""Text files as one array of bytes, and batches of windows cut from it.

    files (sorted) -> every tenth is held out -> u8[bytes] each -> windows u8[batch, seq + 1]

A byte is a token: nothing to download, a vocabulary of 256. The windows of a step depend on (seed, step) and
on the position in the global batch only, so every layout of the same run sees the same text.
"""

import dataclasses
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

# Installed packages are not the standard library; the others are tables and test data rather than prose and code.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "idlelib", "pydoc_data", "test", "tests"}
)
HELD_OUT_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes of other files to evaluate on, both u8[n]."""

    train: np.ndarray
    held_out: np.ndarray
    num_files: int

    def loss_of_frequencies(self) -> float:
        """Loss in nats of always predicting the byte frequencies of the training text: what to beat."""
        frequency = np.bincount(self.train, minlength=256) + 1.0
        return float(-np.log(frequency / frequency.sum())[self.held_out].mean())


def standard_library_files() -> list[Path]:
    """The sources of the running Python's own standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]


def files_under(paths: Iterable[Path]) -> list[Path]:
    """The files named, and those in the folders named, without hidden ones; in a fixed order.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        if path.is_file():
            found.append(path)
        else:
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            found += [f for f in inside if not any(p.startswith(".") for p in f.relative_to(path).parts)]
    return found


def read_corpus(files: Iterable[Path], *, max_bytes: int) -> Corpus:
    """Read text files until `max_bytes`; binary ones (with a zero byte) are left out.

    Every tenth file is held out; of fewer than ten files, the last tenth of each.
    """
    texts: list[np.ndarray] = []
    left = max_bytes
    for file in files:
        text = np.fromfile(file, np.uint8)[:left]
        if text.size and text.all():
            texts.append(text)
            left -= text.size
        if left <= 0:
            break
    if len(texts) >= HELD_OUT_EVERY:
        held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = [text for i, text in enumerate(texts, start=1) if i % HELD_OUT_EVERY]
    else:
        cuts = [text.size - text.size // HELD_OUT_EVERY for text in texts]
        held_out = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
        train = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    return Corpus(_joined(train), _joined(held_out), len(texts))


def training_windows(text: np.ndarray, *, batch: int, seq: int, seed: int, step: int) -> np.ndarray:
    """The global batch of a step: u8[batch, seq + 1], windows from random places."""
    starts = np.random.default_rng((seed, step)).integers(0, text.size - seq, batch)
    return text[starts[:, None] + np.arange(seq + 1)]


def held_out_windows(text: np.ndarray, *, batch: int, seq: int, max_batches: int) -> Iterator[np.ndarray]:
    """Global batches u8[batch, seq + 1] of windows spread evenly over the text, the same ones every time."""
    num_windows = (text.size - 1) // seq
    num_batches = max(1, min(max_batches, num_windows // batch))
    windows = np.linspace(0, num_windows - 1, num_batches * batch).astype(np.int64)
    for starts in np.split(windows * seq, num_batches):
        yield text[starts[:, None] + np.arange(seq + 1)]


def _joined(texts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(texts) if texts else np.empty(0, np.uint8)
