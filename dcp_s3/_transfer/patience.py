"""How long one attempt is waited for: bounded in all, by its size and by the deadline, however little the server sends."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

SLOWEST_BYTES_PER_S: Final = 64 << 10
"""An attempt whose bytes come slower than this on average is given up; a server that drips must not hold a save."""

_POLL_S: Final = 60.0
"""Longest single wait for a call, seconds."""


class Patience:
    """Until when one attempt is waited for.

    Args:
        seconds: From now, for an attempt without a body.
        at_most: Seconds from now that no body may stretch it beyond.
    """

    def __init__(self, seconds: float, *, at_most: float) -> None:
        self._started = time.monotonic()
        self._latest = self._started + at_most
        self.end = min(self._started + seconds, self._latest)

    def allow(self, nbytes: int) -> None:
        """Give it the time that a body of ``nbytes`` may take at the slowest rate."""
        self.end = min(self.end + nbytes / SLOWEST_BYTES_PER_S, self._latest)

    def spent(self) -> float:
        """Seconds since the attempt began."""
        return time.monotonic() - self._started


class _Call(Generic[T]):
    """A blocking call on a thread of its own."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._context = contextvars.copy_context()
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Lock()  # no Event: an interrupt may leave the lock inside it taken for ever
        self._ended.acquire()

    def run(self) -> None:
        try:
            self._value.append(self._context.run(self._function))
        except BaseException as error:  # noqa: BLE001 -- raised again on the thread that waits
            self._error = error
        finally:
            self._ended.release()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


def call_within(patience: Patience, function: Callable[[], T]) -> T:
    """Run a blocking call, and leave it behind when the patience is at its end.

    A socket's time-out restarts with every byte, so a server that drips could hold its client for ever. The call goes on
    by itself, on a daemon thread, until its socket ends.

    Raises:
        TimeoutError: The call took too long.
    """
    call = _Call(function)
    try:
        threading.Thread(target=call.run, name="dcp_s3-request", daemon=True).start()
    except RuntimeError:  # the interpreter ends and starts no more threads
        return function()
    while not call.wait(max(0.0, patience.end - time.monotonic())):
        if time.monotonic() >= patience.end:  # not stretched meanwhile
            raise TimeoutError(f"given up after {patience.spent():.1f} s")
    return call.result()


def call_all(functions: Sequence[Callable[[], T]], *, threads: int) -> list[T]:
    """Run blocking calls that end by themselves, several at a time, and return their values in their order.

    An interrupt leaves them behind: those that have begun go on by themselves, the others never begin. (A pool of the
    standard library would wait for all, and for ever if the interrupt has hit one of its locks.)

    Args:
        functions: The calls.
        threads: Most calls at a time.

    Raises:
        BaseException: What the first of them, in their order, has raised.
    """
    calls = [_Call(function) for function in functions]
    waiting = collections.deque(calls)

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                waiting.popleft().run()

    try:
        for count in range(min(threads, len(calls))):
            try:
                threading.Thread(target=work, name="dcp_s3-requests", daemon=True).start()
            except RuntimeError:  # the interpreter ends and starts no more threads
                if not count:
                    work()
        for call in calls:
            while not call.wait(_POLL_S):
                pass
        return [call.result() for call in calls]
    finally:
        waiting.clear()
