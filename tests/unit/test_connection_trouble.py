"""The HTTP client without TLS: lines that are slow, kept connections that end, and threads that fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time

import pytest

from dcp_s3._transfer.http import pool
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.pool import PlainPool
from dcp_s3._transfer.http.sink import Sink
from tests.unit.test_connection import BODY, OK, answer, get, listening, put, read_request

# ---------------------------------------------------------------------------------------------------- rates


def test_a_thread_gives_up_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence that nobody ends, as its loop stands still, ends the thread somewhat later than the request would have ended."""
    monkeypatch.setattr(pool, "_LATER_S", 0.5)
    held = threading.Event()

    def never_read(peer: socket.socket) -> None:
        held.wait(10)

    with listening(never_read) as address:
        started = time.monotonic()
        (failed,) = put(address, BODY, limit_s=9, read_timeout_s=0.5)
        seconds = time.monotonic() - started
        held.set()
    assert isinstance(failed, TimeoutError)
    assert "nothing moved for" in str(failed)
    assert 0.9 < seconds < 5


def test_a_slow_line_is_not_a_silent_one() -> None:
    """Of a body that goes out or comes in at 1 MB/s, also behind a start that was a thousand times as fast, something is told of at
    least every half second, to the last byte that leaves the kernel's buffer.
    """
    body = BODY[:6_000_000]
    told: list[float] = []

    class Told(Progress):
        def touch(self) -> None:
            super().touch()
            told.append(time.monotonic())

        def advance(self, nbytes: int) -> None:
            super().advance(nbytes)
            told.append(time.monotonic())

    def slowly(peer: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += peer.recv(1)
        left = len(body)
        while left:
            left -= len(peer.recv(min(left, 50_000)))
            if left < 4_000_000:
                time.sleep(0.05)
        peer.sendall(OK)

    def serve_slowly(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(
            b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes 0-%d/*\r\n\r\n"
            % (len(body), len(body) - 1)
        )
        for start in range(0, len(body), 50_000):
            peer.sendall(body[start : start + 50_000])
            if start > 3_000_000:
                time.sleep(0.05)

    for handler, call in (
        (slowly, lambda address: put(address, body, progress=Told())),
        (serve_slowly, lambda address: get(address, Sink([memoryview(bytearray(len(body)))], Told()))),
    ):
        told.clear()
        with listening(
            handler, receive_bytes=64_000
        ) as address:  # what the peer's kernel holds nobody here can see move
            started = time.monotonic()
            (reply,) = call(address)
            ended = time.monotonic()
        assert reply.status in (200, 206)
        assert ended - started > 2
        times = [started, *told, ended]
        print([(round(a - started, 2), round(b - a, 2)) for a, b in itertools.pairwise(times) if b - a > 0.3])
        assert max(after - before for before, after in itertools.pairwise(times)) < 1.4


# ---------------------------------------------------------------------------------------------------- kept connections


def test_a_kept_connection_that_ends_as_it_is_used() -> None:
    """The request is sent once more, at once, on a new connection; sent or received, and however much of the body had gone."""
    heads: list[bytes] = []

    def twice_and_leave(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(OK)
        heads.append(peer.recv(1000))  # then it closes, with bytes unread

    def accept(peer: socket.socket) -> None:
        heads.append(read_request(peer)[0])
        peer.sendall(OK)

    for body in (b"x" * 100, BODY):
        with listening(twice_and_leave, accept) as address:
            replies = put(address, b"first", body)
        assert [reply.status for reply in replies] == [200, 200]
    assert all(head.startswith(b"PUT /b/k?x=1 ") for head in heads)

    def leave_a_get(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 206 P\r\nContent-Length: 10240000\r\nContent-Range: bytes 0-10239999/*\r\n\r\n" + BODY)
        peer.recv(65536)

    sinks = [Sink([memoryview(bytearray(len(BODY)))], Progress()) for _ in range(2)]
    with listening(leave_a_get, answer(BODY)) as address:
        assert [reply.status for reply in get(address, *sinks)] == [206, 206]


def test_a_new_connection_is_not_replaced() -> None:
    """A connection that ends without a reply is an error if it is new, also in a kept one's place; and so is a reply cut short."""

    def leave(peer: socket.socket) -> None:
        peer.recv(1000)

    def once_and_leave(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(OK)
        peer.recv(1000)

    def once_and_stammer(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(OK)
        read_request(peer)
        peer.sendall(b"H")

    with listening(leave) as address:
        (failed,) = put(address, b"x")
    assert isinstance(failed, ConnectionError)
    with listening(once_and_leave, leave) as address:
        first, failed = put(address, b"x", b"y")
    assert first.status == 200
    assert isinstance(failed, ConnectionError)
    with listening(once_and_stammer) as address:
        first, failed = put(address, b"x", b"y")
    assert first.status == 200
    assert isinstance(failed, ConnectionError)


# ---------------------------------------------------------------------------------------------------- errors in threads


@pytest.mark.parametrize("failure", [ValueError("mine"), OSError("mine"), BlockingIOError(11, "mine")])
def test_an_error_in_a_sending_thread(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    """It ends the request at once, with its text, though the peer says nothing."""
    held = threading.Event()

    def wait(peer: socket.socket) -> None:
        held.wait(10)

    class Failing(Progress):
        def advance(self, nbytes: int) -> None:
            raise failure

    with listening(wait) as address:
        started = time.monotonic()
        (raised,) = put(address, BODY, progress=Failing())
        seconds = time.monotonic() - started
        held.set()
    assert isinstance(raised, OSError)
    assert "mine" in str(raised) or isinstance(failure, BlockingIOError)
    assert seconds < 2


def test_an_error_in_a_receiving_thread() -> None:
    """The same of one that receives."""

    class Failing(Progress):
        def advance(self, nbytes: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise OSError("mine")
            super().advance(nbytes)

    def serve(peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            answer(BODY)(peer)

    with listening(serve) as address:
        (failed,) = get(address, Sink([memoryview(bytearray(len(BODY)))], Failing()))
    assert "mine" in str(failed)


def test_a_socket_that_does_not_wait() -> None:
    """A socket that somebody has made non-blocking is an error at once, and not a loop that spins."""
    held = threading.Event()

    async def run(address: tuple[str, int]) -> None:
        plain = PlainPool(limit=1, connect_timeout_s=5, read_timeout_s=5)
        connection = await plain._connected(address)
        connection._socket.setblocking(False)
        try:
            await connection.send(b"PUT / HTTP/1.1\r\n\r\n", [memoryview(BODY)], Progress())
        finally:
            connection.abort()

    with listening(lambda peer: held.wait(10) and None) as address:
        started = time.monotonic()
        with pytest.raises(ConnectionError, match="non-blocking"):
            asyncio.run(run(address))
        assert time.monotonic() - started < 2
        held.set()
