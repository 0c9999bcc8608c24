"""How long one attempt is waited for: bounded in all, by its size and by the deadline, however little the server sends."""

from __future__ import annotations

import collections
import contextvars
import functools
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Item = TypeVar("Item")
T = TypeVar("T")

SLOWEST_BYTES_PER_S: Final = 64 << 10
"""An attempt whose bytes come slower than this on average is given up; a server that drips must not hold a save."""

THREADS: Final = 8
"""Small requests at a time: enough to hide their latency, few enough for any store."""

_POLL_S: Final = 60.0
"""Longest single wait for a call, seconds."""


class AttemptTimeout:
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
        self.error: BaseException | None = None
        self._ended = threading.Lock()  # no Event: an interrupt may leave the lock inside it taken for ever
        self._ended.acquire()

    def run(self) -> None:
        try:
            self._value.append(self._context.run(self._function))
        except BaseException as error:  # noqa: BLE001 -- raised again on the thread that waits
            self.error = error
        finally:
            self._ended.release()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self._value[0]


def call_within(timeout: AttemptTimeout, function: Callable[[], T]) -> T:
    """Run a blocking call, and leave it behind when the time-out has passed.

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
    while not call.wait(max(0.0, timeout.end - time.monotonic())):
        if time.monotonic() >= timeout.end:  # not stretched meanwhile
            raise TimeoutError(f"given up after {timeout.spent():.1f} s")
    return call.result()


def call_all(work: Callable[[Item], T], items: Iterable[Item], *, threads: int = THREADS) -> list[T]:
    """Do ``work``, small requests, for each item, several at a time; results in order.

    After an error, which is raised when those under way have ended, no more are begun. An interrupt does not wait for
    them: they go on by themselves. (A pool of the standard library would wait for all, and for ever if the interrupt has
    hit one of its locks.)

    Args:
        work: A call that ends by itself.
        items: What for.
        threads: How many at a time, at most.

    Raises:
        BaseException: What the first of them, in their order, has raised.
    """
    calls = [_Call(functools.partial(work, item)) for item in items]
    waiting = collections.deque(calls)

    def some() -> None:
        while waiting:
            try:
                call = waiting.popleft()
            except IndexError:  # another thread has taken the last one
                return
            call.run()
            if call.error is not None:
                waiting.clear()

    workers = [_Call(some) for _ in range(min(threads, len(calls)))]
    try:
        for count, worker in enumerate(workers):
            try:
                threading.Thread(target=worker.run, name="dcp_s3-requests", daemon=True).start()
            except RuntimeError:  # the interpreter ends, waits for a save, and starts no more threads
                del workers[count:]
                break
        if not workers:
            some()
        for worker in workers:
            while not worker.wait(_POLL_S):
                pass
        for call in calls:
            if call.error is not None:
                raise call.error
        return [call.result() for call in calls]
    finally:
        waiting.clear()
