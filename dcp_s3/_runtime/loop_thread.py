"""The one loop thread of a process: coroutines go in from any thread, concurrent futures come out."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0
_POLL_S = 0.2
"""Longest single wait for a work: an interrupted waiter may have kept the wake-up."""


class Work(concurrent.futures.Future[T]):
    """A coroutine on the loop thread. Done only when its task has really ended, also after :meth:`stop`.

    (``asyncio.run_coroutine_threadsafe`` gives a future that counts as cancelled while its task still runs; an abort
    would then overtake the parts it has to follow.)

    A signal handler may raise between any two steps of the main thread. Whoever must not lose a work notes it before
    :meth:`start`; ``stop`` ends it wherever it was. No method that waits takes a lock of Python code: the ``Condition``
    of a future, left behind by an interrupt, would stop the loop thread for ever.

    Args:
        loop: The loop that it runs on.
        function: Makes the coroutine, on the loop thread.
        on_end: Called with the work on the loop thread when it is done. (A callback that named it would be a cycle, and
            keep what it holds until a garbage collection.)
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[], Coroutine[Any, Any, T]],
        on_end: Callable[[Work[T]], None] | None = None,
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # from now on only the task decides
        self.started = False
        self._loop = loop
        self._function: Callable[[], Coroutine[Any, Any, T]] | None = function
        self._on_end = on_end
        self._task: asyncio.Task[T] | None = None
        self._over = False
        self._error: BaseException | None = None
        self._value: T | None = None
        self._latch = threading.Lock()
        self._latch.acquire()

    def start(self) -> None:
        """Have it begin. A second call does nothing, nor does one behind :meth:`stop`."""
        self._loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            self.started = True
            self._task = self._loop.create_task(function())
            self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        self._task = None  # no cycle: what the coroutine held is free when the future is
        if task.cancelled():
            self._finish(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self._finish(error)
        else:
            self._finish(None, task.result())

    def _finish(self, error: BaseException | None, value: T | None = None) -> None:
        self._error, self._value, self._over = error, value, True
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(value)  # type: ignore[arg-type] # a T where there is no error
        self._latch.release()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    def stop(self) -> None:
        """Ask the task to end; the future then has a ``CancelledError``, unless it was done before."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._over:
            self._function = None
            self._finish(concurrent.futures.CancelledError())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done.

        Args:
            timeout_s: Longest wait, seconds; ``None`` has no limit.

        Returns:
            Whether it is.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._over:
            left = _POLL_S if end is None else min(_POLL_S, end - time.monotonic())
            if left <= 0:
                return False
            if self._latch.acquire(timeout=left):
                self._latch.release()  # for the next one
        return True

    def done(self) -> bool:
        """Whether it has ended."""
        return self._over

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it failed of; ``None`` if it did not. Raises TimeoutError behind ``timeout`` seconds."""
        if not self.wait(timeout):
            raise TimeoutError
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """Its value, or its exception, raised. Raises TimeoutError behind ``timeout`` seconds."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # no cycle of the traceback and its frame
        return self._value  # type: ignore[return-value] # a T where there is no error


class Bell:
    """Wakes one thread that waits. Only a hint: it may ring for nothing, and an interrupt may swallow a ring.

    A ``Condition`` is not for the main thread: a signal handler that raises at the end of its Python-written ``__enter__``
    leaves its lock taken for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the waiting thread, or the next one that waits."""
        with contextlib.suppress(RuntimeError):  # it has rung already
            self._lock.release()

    def wait(self, timeout_s: float) -> None:
        """Wait for a ring, for at most so many seconds."""
        self._lock.acquire(timeout=max(0.0, timeout_s))


async def ended(future: asyncio.Future[Any], *, timeout_s: float | None = None) -> None:
    """Wait until a future is done, through cancellations of the waiter too; the last of them is raised then.

    Args:
        future: What must not be left behind.
        timeout_s: Longest wait, seconds; ``None`` has no limit.
    """
    end = time.monotonic() + timeout_s if timeout_s is not None else None
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait({future}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class _Threads(concurrent.futures.ThreadPoolExecutor):
    """Runs the loop's blocking calls (name look-ups, reading of files), each on a daemon thread of its own.

    The pools of the standard library take nothing more once the interpreter has begun to end; but it then still waits for a
    background save, which may need a call yet.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """Start a call."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 -- raised again where it is waited for
                future.set_exception(error)
            else:
                future.set_result(value)

        try:
            threading.Thread(target=run, name="dcp_s3-call", daemon=True).start()
        except RuntimeError:  # from Python 3.12 on no thread starts when the interpreter has begun to end
            run()
        return future


class LoopThread:
    """An event loop on a daemon thread of its own, so that it works beside a caller's running loop."""

    def __init__(self) -> None:
        # whatever loop policy the program has installed: uvloop makes sockets that block non-blocking, and so sends nothing
        self.loop = asyncio.SelectorEventLoop()
        self.loop.set_default_executor(_Threads())
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="dcp_s3-loop", daemon=True)
        self._thread.start()

    def cpu_s(self) -> float:
        """CPU time that the loop thread has taken, seconds; 0 where the system does not say."""
        if not hasattr(time, "pthread_getclockid") or self._thread.ident is None or not self._thread.is_alive():
            return 0.0
        return time.clock_gettime(time.pthread_getclockid(self._thread.ident))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Work[T]:
        """Start a coroutine on the loop thread."""
        work = Work(self.loop, lambda: coroutine)
        work.start()
        return work

    def work(
        self, function: Callable[[], Coroutine[Any, Any, T]], on_end: Callable[[Work[T]], None] | None = None
    ) -> Work[T]:
        """A work that the caller notes, and then starts."""
        return Work(self.loop, function, on_end)

    def on_close(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have ``closer`` run on the loop before it stops."""
        self._closers.append(closer)

    def close(self) -> None:
        """Close what was opened on the loop, cancel what still runs, and stop the thread. Bounded in time."""
        if self.loop.is_closed() or threading.current_thread() is self._thread:
            return
        with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            self.submit(self._shut_down()).result(_CLOSE_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()

    async def _shut_down(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S / 2)
        for closer in self._closers:
            with contextlib.suppress(Exception):  # closing is best effort: the process ends
                await closer()


_lock = threading.Lock()
_loop_thread: LoopThread | None = None
_inherited: list[LoopThread] = []
"""A forked child's copy of its parent's loop thread: its thread does not exist here, and closing its loop would be wrong."""


def loop_thread() -> LoopThread:
    """The process's loop thread, started at first use."""
    global _loop_thread  # noqa: PLW0603 -- one per process by design
    with _lock:
        if _loop_thread is None:
            _loop_thread = LoopThread()
        return _loop_thread


def on_fork(forget: Callable[[], None]) -> None:
    """Have ``forget`` drop module-level state in a forked child, where neither the loop thread nor locks survive."""
    os.register_at_fork(after_in_child=forget)


def _forget() -> None:
    global _lock, _loop_thread  # noqa: PLW0603
    _lock = threading.Lock()
    if _loop_thread is not None:
        _inherited.append(_loop_thread)
    _loop_thread = None


def _close_at_exit() -> None:
    if _loop_thread is not None:
        _loop_thread.close()


on_fork(_forget)
atexit.register(_close_at_exit)
