"""One thread makes items ahead of the loop that takes them, in order, and never more than `size`.

thread     make 0 | make 1 | room? | make 2 | ...        an exception of make 2 is raised
loop                 take 0 | step   | take 1 | step       by the take that would have got item 2
"""

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

import jax

from jaxpar.data._input_wait import InputWait

T = TypeVar("T")
CLOSE_TIMEOUT_S = 2.0  # a read that hangs holds up neither the loop nor the end of the program


class Background(Iterator[T]):
    """Takes from a generator that a thread of its own runs; size 0 runs it in the loop, with no thread.

    The thread ends with the items, by `close()`, or when nobody holds this iterator any more.
    """

    def __init__(self, items: Generator[T, None, None], *, size: int, wait: InputWait) -> None:
        self._wait = wait
        if size == 0:
            self._take, self._close = items.__next__, items.close
            return
        channel: _Channel[T] = _Channel(size)
        # The thread must not hold this object, or it would be held for ever. enable_x64 is a setting of each thread.
        thread = threading.Thread(
            target=_make,
            args=(items, channel, jax.config.read("jax_enable_x64")),
            name="jaxpar-data",
            daemon=True,
        )
        self._take = channel.take
        self._close = weakref.finalize(self, _stop, channel, thread)
        thread.start()

    def __next__(self) -> T:
        with self._wait.waiting():
            return self._take()

    def close(self) -> None:
        """Drops what was made ahead and waits for the thread; one that is in a long read ends after it."""
        self._close()


class _Channel(Generic[T]):
    """Items that are ready, between one thread that makes and one that takes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._error: BaseException | None = None

    def has_room(self) -> bool:
        """Waits until another item may be made; False if nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._ready) < self._size)
            return not self._is_over

    def put(self, item: T) -> None:
        with self._changed:
            if not self._is_over:
                self._ready.append(item)
                self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes after what is ready, except this error."""
        with self._changed:
            self._is_over, self._error = True, error
            self._changed.notify_all()

    def take(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._ready)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        raise StopIteration if error is None else error

    def close(self) -> None:
        with self._changed:
            self._ready.clear()
            self._is_over = True
            self._changed.notify_all()


def _make(items: Generator[T, None, None], channel: _Channel[T], x64: bool) -> None:
    error = None
    try:
        with jax.enable_x64(x64):
            while channel.has_room():
                channel.put(next(items))
        items.close()
    except StopIteration:
        pass
    except BaseException as raised:
        error = raised
    channel.end(error)


def _stop(channel: _Channel[T], thread: threading.Thread) -> None:
    channel.close()
    if thread is not threading.current_thread():
        thread.join(CLOSE_TIMEOUT_S)
