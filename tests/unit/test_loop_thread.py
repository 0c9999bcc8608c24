"""The loop thread: coroutines from any thread, endings that are real, and a new one behind a fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_s3._runtime.loop_thread import LoopThread, ended, loop_thread
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.pool import PlainPool
from tests.unit.test_connection import read_request


@pytest.fixture
def opened() -> Iterator[LoopThread]:
    """A loop thread of the test's own."""
    made = LoopThread()
    yield made
    made.close()


def test_results_and_failures(opened: LoopThread):
    """A coroutine's value, or its very exception, comes out; each runs on the one loop thread."""
    failure = ValueError("mine")

    async def value() -> str:
        return threading.current_thread().name

    async def failing() -> None:
        raise failure

    assert opened.submit(value()).result(5) == "dcp_s3-loop"
    with pytest.raises(ValueError, match="mine") as caught:
        opened.submit(failing()).result(5)
    assert caught.value is failure


def test_beside_a_running_loop(opened: LoopThread):
    """A caller whose own loop runs, as in a notebook, can wait for work."""

    async def value() -> int:
        await asyncio.sleep(0)
        return 7

    async def notebook() -> int:
        return opened.submit(value()).result(5)

    assert asyncio.run(notebook()) == 7


def test_stopped_work_is_done_when_it_has_ended(opened: LoopThread):
    """stop() asks; the work counts as done only when its clean-up is over, and then as cancelled."""
    started, release, cleaned = threading.Event(), threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.to_thread(release.wait)
            cleaned.set()

    task = opened.submit(work())
    assert started.wait(5)
    task.stop()
    with pytest.raises(TimeoutError):
        task.result(0.1)
    assert not task.done()
    release.set()
    with pytest.raises(concurrent.futures.CancelledError):
        task.result(5)
    assert cleaned.is_set()


def test_stopped_before_it_began(opened: LoopThread):
    """Work that is stopped at once never runs, and says that it was cancelled."""
    ran = []

    async def work() -> None:
        ran.append(1)
        await asyncio.sleep(60)

    block = threading.Event()
    opened.loop.call_soon_threadsafe(block.wait)
    task = opened.submit(work())
    task.stop()
    block.set()
    with pytest.raises(concurrent.futures.CancelledError):
        task.result(5)
    assert ran == []


def test_stopped_too_late(opened: LoopThread):
    """Work that ended before it was stopped keeps its value."""

    async def value() -> int:
        return 3

    task = opened.submit(value())
    assert task.result(5) == 3
    task.stop()
    assert task.result(5) == 3


def test_a_future_that_cannot_be_cancelled(opened: LoopThread):
    """cancel() of the future does nothing: only the task decides, so that no clean-up is overtaken."""
    release = threading.Event()

    async def work() -> int:
        await asyncio.to_thread(release.wait)
        return 5

    task = opened.submit(work())
    assert task.cancel() is False
    release.set()
    assert task.result(5) == 5


def test_close(opened: LoopThread):
    """close() cancels what runs, runs the closers on the loop, in spite of one that fails, and ends the thread."""
    seen = []

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cancelled")

    async def bad() -> None:
        raise RuntimeError

    async def good() -> None:
        seen.append("closed")

    task = opened.submit(endless())
    opened.on_close(bad)
    opened.on_close(good)
    opened.submit(asyncio.sleep(0)).result(5)
    opened.close()
    assert seen == ["cancelled", "closed"]
    assert opened.loop.is_closed()
    with pytest.raises(concurrent.futures.CancelledError):
        task.result(1)
    opened.close()


def test_one_for_the_process():
    """All threads get the same loop thread."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(loop_thread())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_behind_a_fork():
    """A forked child gets a loop and a thread of its own; the parent's goes on; both processes end by themselves."""
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from dcp_s3._runtime.loop_thread import loop_thread

        async def pid():
            await asyncio.sleep(0)
            return os.getpid()

        first = loop_thread()
        assert first.submit(pid()).result(5) == os.getpid()
        child = os.fork()
        assert loop_thread().submit(pid()).result(5) == os.getpid()
        assert (loop_thread() is first) == (child != 0)
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print("parent done")
        """
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent done\n", "")
    assert time.monotonic() - started < 20


def test_waiting_for_the_end_through_cancellations():
    """However often the waiter is cancelled, it waits, and is cancelled then; with a time-out not for longer than that."""

    async def run(timeout_s: float | None) -> tuple[float, bool]:
        work = asyncio.get_running_loop().create_task(asyncio.sleep(0.3))
        waiter = asyncio.get_running_loop().create_task(ended(work, timeout_s=timeout_s))
        started = time.monotonic()
        for _ in range(3):
            await asyncio.sleep(0.02)
            waiter.cancel()
        await asyncio.wait({waiter})
        assert waiter.cancelled()
        return time.monotonic() - started, work.done()

    seconds, done = asyncio.run(run(None))
    assert done
    assert seconds >= 0.29
    seconds, done = asyncio.run(run(0.15))
    assert not done
    assert 0.14 <= seconds < 0.29


class _ForeignLoop(asyncio.SelectorEventLoop):
    """Like uvloop's: a socket that it watches becomes non-blocking, and there are no child watchers."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
        if isinstance(fd, socket.socket):
            fd.setblocking(False)
        return super().add_reader(fd, callback, *args)


class _ForeignPolicy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = _ForeignLoop

    def set_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if loop is not None and not isinstance(loop, _ForeignLoop):
            raise TypeError("not a loop of this policy")
        super().set_event_loop(loop)

    def get_child_watcher(self) -> Any:
        raise NotImplementedError


@pytest.fixture(params=["foreign", "uvloop"])
def policy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another loop policy, as `uvloop.install()` sets one."""
    foreign = request.param == "foreign"
    asyncio.set_event_loop_policy(_ForeignPolicy() if foreign else pytest.importorskip("uvloop").EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="asyncio has no loop policies that last: Python 3.14 deprecates them"
)
def test_another_loop_policy(policy: None):
    """Whatever loop the program has chosen for itself, ours is asyncio's: a body larger than the sockets' buffers goes out."""
    body = bytes(20_000_000)
    received = []

    def serve() -> None:
        peer, _ = server.accept()
        with peer:
            received.append(read_request(peer))
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def send() -> int:
        pool = PlainPool(limit=1, connect_timeout_s=5, read_timeout_s=5)
        async with asyncio.timeout(5):
            reply = await pool.put(server.getsockname(), "/", [("Host", "s")], [memoryview(body)], Progress())
        pool.close()
        return reply.status

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        serving = threading.Thread(target=serve)
        serving.start()
        opened = LoopThread()
        try:
            assert opened.submit(send()).result(10) == 200
            assert type(opened.loop) is asyncio.SelectorEventLoop
        finally:
            opened.close()
            serving.join(10)
    assert [len(found) for _, found in received] == [len(body)]
