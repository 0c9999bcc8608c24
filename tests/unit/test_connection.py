"""The HTTP client without TLS against a socket that a test holds: what goes out and comes in, also when the peer does not behave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.pool import PlainPool
from dcp_s3._transfer.http.sink import Sink

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: x\r\n\r\n"
BODY = bytes(range(256)) * 40_000  # more than the buffers of two sockets hold
HEADERS = [("Host", "store"), ("X-Signed", "yes")]

Handler = Callable[[socket.socket], None]


def read_request(peer: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of the next request; empty if the connection has ended."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = peer.recv(65536)
        if not more:
            return b"", b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    while len(body) < length:
        more = peer.recv(1 << 20)
        if not more:
            break
        body += more
    return head, body


@contextlib.contextmanager
def listening(*handlers: Handler, receive_bytes: int = 0) -> Iterator[tuple[str, int]]:
    """A server that gives each connection to the next handler."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        if receive_bytes:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)

        def serve() -> None:
            for handler in handlers:
                peer, _ = server.accept()
                with peer:
                    handler(peer)

        served = pool.submit(serve)
        yield server.getsockname()
        served.result(10)


def put(
    address: tuple[str, int],
    *bodies: bytes,
    progress: Progress | None = None,
    limit_s: float = 10,
    connect_timeout_s: float = 5,
    read_timeout_s: float = 5,
) -> list[Any]:
    """PUT bodies one after the other through one pool; each gives its reply or its error."""

    async def run() -> list[Any]:
        pool = PlainPool(limit=2, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s)
        replies: list[Any] = []
        for body in bodies:
            views = [memoryview(body)[:100], memoryview(b""), memoryview(body)[100:]]
            try:
                async with asyncio.timeout(limit_s):
                    replies.append(await pool.put(address, "/b/k?x=1", HEADERS, views, progress or Progress()))
            except (OSError, TimeoutError) as error:
                replies.append(error)
        pool.close()
        return replies

    return asyncio.run(run())


def test_what_is_sent() -> None:
    """Request line, headers as signed, the length, all views in order; and the next request takes the same connection."""
    seen: list[tuple[bytes, bytes]] = []

    def handler(peer: socket.socket) -> None:
        while True:
            request = read_request(peer)
            if not request[0]:
                return
            seen.append(request)
            peer.sendall(OK)

    progress = Progress()
    with listening(handler) as address:
        first, second = put(address, BODY, b"tiny", progress=progress)
    assert [body for _, body in seen] == [BODY, b"tiny"]
    lines = seen[0][0].split(b"\r\n")
    assert lines[0] == b"PUT /b/k?x=1 HTTP/1.1"
    assert set(lines[1:]) == {b"Host: store", b"X-Signed: yes", b"Content-Length: %d" % len(BODY)}
    assert (first.status, first.headers["etag"], second.status) == (200, "x", 200)
    assert progress.moved == len(BODY) + 4  # of the heads nothing counts


@pytest.mark.parametrize("closes", [True, False])
def test_a_reply_before_all_was_sent(closes: bool) -> None:
    """A store that refuses early is heard, and its connection, which still expects a body, is not used again."""
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 7\r\n\r\n<Error>"
    ended = threading.Event()

    def refuse(peer: socket.socket) -> None:
        peer.recv(1000)
        peer.sendall(refusal)
        if not closes:
            time.sleep(0.3)
            while True:  # until the client has cut it
                try:
                    if not peer.recv(1 << 20):
                        break
                except OSError:
                    break
        ended.set()

    def accept(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(OK)

    with listening(refuse, accept) as address:
        first, second = put(address, BODY, b"next")
        assert ended.wait(10)
    # a peer that closes with bytes unread resets, which may overtake its reply
    assert (closes and isinstance(first, ConnectionError)) or (first.status, first.body) == (403, b"<Error>")
    assert second.status == 200


@pytest.mark.parametrize("after", [0, 10, 1_000_000])
def test_a_connection_that_ends(after: int) -> None:
    """Without a reply it is an error of the connection, soon."""

    def leave(peer: socket.socket) -> None:
        left = after
        while left > 0:
            left -= len(peer.recv(left))

    with listening(leave) as address:
        (failed,) = put(address, BODY)
    assert isinstance(failed, ConnectionError)


def test_a_reply_that_ends_with_the_connection() -> None:
    """Without a length the body is what comes until the end."""

    def handler(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(b"HTTP/1.1 500 Oops\r\n\r\n<Code>InternalError</Code>")

    with listening(handler) as address:
        (reply,) = put(address, b"x" * 1000)
    assert (reply.status, reply.body) == (500, b"<Code>InternalError</Code>")


@pytest.mark.parametrize(
    "text, body",
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    ],
)
def test_forms_of_a_reply(text: bytes, body: bytes) -> None:
    """No body, an interim reply, chunks, an error; the connection stays in use."""

    def handler(peer: socket.socket) -> None:
        for _ in range(2):
            read_request(peer)
            peer.sendall(text)

    with listening(handler) as address:
        replies = put(address, b"x" * 1000, b"y")
    assert [reply.body for reply in replies] == [body, body]


def test_a_peer_that_never_reads() -> None:
    """An attempt that is given up is cut at once: its bytes do not go on arriving, and nothing waits for the peer."""
    given_up = threading.Event()
    held: list[bytes] = []

    def stall(peer: socket.socket) -> None:
        assert given_up.wait(10)
        with contextlib.suppress(ConnectionResetError):
            while data := peer.recv(1 << 20):
                held.append(data)

    with listening(stall) as address:
        (failed,) = put(address, BODY, limit_s=0.3)
        given_up.set()
    assert isinstance(failed, TimeoutError)
    assert sum(map(len, held)) < len(BODY)


@pytest.mark.parametrize(
    "said", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n-6\r\n", OK + OK]
)
def test_a_peer_that_talks_nonsense_and_never_reads(said: bytes) -> None:
    """The request ends at once, and with it the thread that was blocked in sending: nobody reads the views any more."""
    over = threading.Event()

    def handler(peer: socket.socket) -> None:
        peer.recv(1000)
        peer.sendall(said)
        over.wait(10)

    body = BODY * 3
    with listening(handler) as address:
        started = time.monotonic()
        (reply,) = put(address, body)  # running to its end waits for the threads of its loop
        seconds = time.monotonic() - started
        over.set()
    assert seconds < 3
    assert isinstance(reply, ConnectionError) or reply.status == 200


def test_a_connection_that_ended_while_idle() -> None:
    """Its end is seen, and the next request opens another."""
    closed = threading.Event()

    def once(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(OK)
        peer.close()
        closed.set()

    async def run(address: tuple[str, int]) -> list[int]:
        pool = PlainPool(limit=2, connect_timeout_s=5, read_timeout_s=5)
        statuses = []
        for _ in range(2):
            reply = await pool.put(address, "/", HEADERS, [memoryview(b"x" * 500)], Progress())
            statuses.append(reply.status)
            await asyncio.to_thread(closed.wait, 10)
            await asyncio.sleep(0.05)
        pool.close()
        return statuses

    with listening(once, once) as address:
        assert asyncio.run(run(address)) == [200, 200]


def test_nobody_listens() -> None:
    """The error names host and port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    (failed,) = put(address, b"x")
    assert isinstance(failed, ConnectionError)
    assert f"no connection to {address[0]}:{address[1]}" in str(failed)


def test_a_name_with_two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first does not answer: the second is taken."""

    def handler(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(OK)

    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    with listening(handler) as address:

        async def both(self: object, *args: Any, **kwargs: Any) -> list[Any]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
            return [(*kind, nobody), (*kind, address)]

        monkeypatch.setattr(asyncio.SelectorEventLoop, "getaddrinfo", both)
        (reply,) = put(("store", 80), b"x" * 200)
    assert reply.status == 200


def test_an_address_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its share of the time to connect only, and comes last at the next attempt."""
    tried: list[Any] = []

    def handler(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    silent = ("192.0.2.1", 80)  # RFC 5737: for documentation; nobody is asked, the connect below is the test's own
    connect = asyncio.SelectorEventLoop.sock_connect
    with listening(handler, handler) as address:

        async def both(self: object, *args: Any, **kwargs: Any) -> list[Any]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
            return [(*kind, silent), (*kind, address)]

        async def hang(self: Any, made: socket.socket, place: Any) -> None:
            tried.append(place)
            if place == silent:
                await asyncio.sleep(60)
            await connect(self, made, place)

        monkeypatch.setattr(asyncio.SelectorEventLoop, "getaddrinfo", both)
        monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", hang)
        replies = put(("store", 80), b"x" * 200, b"y" * 200, connect_timeout_s=1)
    assert [reply.status for reply in replies] == [200, 200]
    assert tried == [silent, address, address]


# ---------------------------------------------------------------------------------------------------- GET

RANGE = [("Host", "store"), ("Range", "bytes=0-10239999")]


def get(address: tuple[str, int], *sinks: Sink, limit_s: float = 10) -> list[Any]:
    """GET into sinks, one after the other through one pool; each gives its reply or its error."""

    async def run() -> list[Any]:
        pool = PlainPool(limit=2, connect_timeout_s=5, read_timeout_s=5)
        replies: list[Any] = []
        for sink in sinks:
            try:
                async with asyncio.timeout(limit_s):
                    replies.append(await pool.get(address, "/b/k", RANGE, sink, first_byte=0))
            except (OSError, TimeoutError) as error:
                replies.append(error)
        pool.close()
        return replies

    return asyncio.run(run())


def answer(body: bytes, sent: int | None = None) -> Handler:
    """Serve a range whose head announces all of ``body``, and send so many bytes of it."""
    head = (
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes 0-%d/99999999\r\nETag: x\r\n\r\n"
    )

    def handler(peer: socket.socket) -> None:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                more = peer.recv(65536)
                if not more:
                    return
                data += more
            data = data.partition(b"\r\n\r\n")[2]
            peer.sendall(head % (len(body), len(body) - 1) + body[: len(body) if sent is None else sent])
            if sent is not None:
                return

    return handler


def test_a_range_into_views() -> None:
    """All bytes where they belong, those that nobody wants dropped, each told of once; twice over one connection."""
    blocks = [bytearray(len(BODY) - 3_000_000), bytearray(2_000_000)]
    progress = Progress()
    sinks = [Sink([memoryview(blocks[0]), 1_000_000, memoryview(blocks[1])], progress) for _ in range(2)]
    with listening(answer(BODY)) as address:
        first, second = get(address, *sinks)
    assert (first.status, second.status, first.headers["etag"]) == (206, 206, "x")
    assert bytes(blocks[0]) == BODY[: len(blocks[0])]
    assert bytes(blocks[1]) == BODY[-2_000_000:]
    assert progress.moved == 2 * len(BODY)


@pytest.mark.parametrize("sent", [0, 1000, 300_000, 5_000_000, len(BODY) - 1])
def test_a_body_that_ends_early(sent: int) -> None:
    """The error says how far it came."""
    with listening(answer(BODY, sent)) as address:
        (failed,) = get(address, Sink([memoryview(bytearray(len(BODY)))], Progress()))
    assert isinstance(failed, ConnectionError)
    assert f"the connection ended after {sent} of {len(BODY)} bytes" in str(failed)


def test_nothing_lands_after_a_read_was_given_up() -> None:
    """A body that stalls is cut, and no thread writes into its place afterwards."""
    given_up = threading.Event()
    block = bytearray(len(BODY))

    def stall(peer: socket.socket) -> None:
        answer(BODY, 6_000_000)(peer)
        assert given_up.wait(10)
        with contextlib.suppress(OSError):
            peer.sendall(BODY[6_000_000:])

    with listening(stall) as address:
        (failed,) = get(address, Sink([memoryview(block)], Progress()), limit_s=0.5)
        block[:] = bytes(len(BODY))
        given_up.set()
    assert isinstance(failed, TimeoutError)
    assert not any(block)


def test_a_refused_get() -> None:
    """The error's body is given, and the sink stays as it was."""
    block = bytearray(len(BODY))

    def refuse(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n<NoSuch/>")

    with listening(refuse) as address:
        (reply,) = get(address, Sink([memoryview(block)], Progress()))
    assert (reply.status, reply.body) == (404, b"<NoSuch/>")
    assert not any(block)
