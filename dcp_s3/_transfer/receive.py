"""A small HTTP/1.1 client's receiving side: body bytes go straight into the caller's buffers."""

from __future__ import annotations

import asyncio
import http.client
import io
import re
from typing import TYPE_CHECKING, Any, Final

from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_s3._transfer.payload import Progress

_HEAD_BYTES: Final = 64 << 10
_HEX: Final = re.compile(rb"[0-9a-fA-F]{1,8}")
_ERROR_BYTES: Final = 1 << 20
_TRASH: Final = memoryview(bytearray(256 << 10))
"""Where bytes go that nobody wants; written by many, read by none."""


class Sink:
    """Where the bytes of one ranged GET go.

    Args:
        pieces: In the order of the bytes: writable byte views to be filled, or counts of bytes to drop.
        progress: Told of every byte that arrives.
    """

    __slots__ = ("_index", "_offset", "_pieces", "filled", "length", "progress")

    def __init__(self, pieces: Sequence[memoryview | int], progress: Progress) -> None:
        self._pieces = [piece for piece in pieces if (piece if isinstance(piece, int) else len(piece))]
        self.length = sum(piece if isinstance(piece, int) else len(piece) for piece in self._pieces)
        self.progress = progress
        self.rewind()

    def rewind(self) -> None:
        """Start again at the first byte."""
        self._index = self._offset = self.filled = 0

    def forget(self) -> None:
        """Let go of the pieces. A connection keeps the context of the request that opened it, and so its sink."""
        self._pieces = []

    def buffer(self) -> memoryview:
        """The place of the next byte; never empty while bytes are missing."""
        piece = self._pieces[self._index]
        if isinstance(piece, int):
            return _TRASH[: min(len(_TRASH), piece - self._offset)]
        return piece[self._offset :]

    def advance(self, nbytes: int) -> None:
        """``nbytes`` have been put at :meth:`buffer`."""
        piece = self._pieces[self._index]
        self._offset += nbytes
        self.filled += nbytes
        if self._offset == (piece if isinstance(piece, int) else len(piece)):
            self._index += 1
            self._offset = 0
        self.progress.advance(nbytes)

    def feed(self, data: memoryview) -> None:
        """Copy ``data`` in, as far as there is room; for bytes that came along with the head."""
        while data and self.filled < self.length:
            room = self.buffer()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.advance(count)
            data = data[count:]


class Reply:
    """Status, headers (lower-case names) and, unless the sink took it, the body."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self.body = b""

    async def read(self) -> bytes:
        """The body, in the form that aiobotocore expects of a raw response."""
        return self.body


class Connection(asyncio.BufferedProtocol):
    """One connection, on which one request at a time waits for its reply.

    Attributes:
        closed: It can carry no further request.
        reusable: The last reply leaves it fit for another request.
        idle_since: When it was put aside, seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD_BYTES)
        self._sink: Sink | None = None
        self._first_byte: int | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self.closed = False
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._used = 0
        self._reply: Reply | None = None
        self._into_sink = False
        self._rest = bytearray()
        self._left: int | None = None
        self._chunked = False
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 -- create_connection gives no other
        self._transport = transport

    async def request(self, head: bytes, sink: Sink, first_byte: int | None) -> Reply:
        """Send a GET and have its reply, the body in ``sink`` if the status is 200 or 206."""
        self._reset()
        self._sink = sink
        self._first_byte = first_byte
        self._waiter = asyncio.get_running_loop().create_future()
        assert self._transport is not None  # noqa: S101 -- connected before it is handed out
        self._transport.write(head)
        try:
            return await self._waiter
        finally:
            self._waiter = None
            self._sink = None

    def abort(self) -> None:
        """Close at once, without waiting for the peer: an attempt given up must not overlap its successor."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._into_sink and self._sink is not None and self._sink.filled < self._sink.length:
            return self._sink.buffer()
        if self._reply is not None:
            return memoryview(self._head)  # a small body, moved on in buffer_updated
        return memoryview(self._head)[self._used :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiter is None or self._waiter.done():
            self.abort()  # bytes that nobody asked for: the connection is out of step
            return
        try:
            self._take(nbytes)
        except Exception as error:  # noqa: BLE001 -- whatever a peer sends, its request must hear of it
            self._fail(ConnectionError(f"not an HTTP reply: {error!r}"))

    def _take(self, nbytes: int) -> None:
        if self._into_sink and self._sink is not None:
            self._sink.advance(nbytes)
            self._finish_if_filled()
        elif self._reply is not None:
            self._take_body(memoryview(self._head)[:nbytes])
        else:
            self._used += nbytes
            self._take_head()

    def _take_head(self) -> None:
        end = self._head.find(b"\r\n\r\n", 0, self._used)
        if end < 0:
            if self._used == len(self._head):
                self._fail(ConnectionError(f"the reply's head is longer than {_HEAD_BYTES} bytes"))
            return
        try:
            reply, keep_alive = _parse_head(bytes(self._head[: end + 4]))
        except (ValueError, http.client.HTTPException) as error:
            self._fail(ConnectionError(f"not an HTTP reply: {error}"))
            return
        rest = bytes(self._head[end + 4 : self._used])
        if 100 <= reply.status < 200:  # an interim reply; the real one follows
            self._used = len(rest)
            self._head[: len(rest)] = rest
            self._take_head()
            return
        self._reply = reply
        self.reusable = keep_alive
        length = reply.headers.get("content-length")
        self._chunked = "chunked" in reply.headers.get("transfer-encoding", "").lower()
        self._left = int(length) if length is not None and length.isdigit() and not self._chunked else None
        if reply.status == 204:
            self._left, self._chunked = 0, False
        if self._sink is not None and reply.status in (200, 206):
            fault = fault_of(reply, self._left, self._first_byte, self._sink.length)
            if fault is not None:
                self._fail(fault)
                return
            self._into_sink = True
            if len(rest) > self._sink.length:
                self._fail(ConnectionError("the reply is longer than it announces"))
                return
            self._sink.feed(memoryview(rest))
            self._finish_if_filled()
        else:
            self._take_body(memoryview(rest))

    def _finish_if_filled(self) -> None:
        assert self._sink is not None  # noqa: S101 -- a body goes there only if there is one
        if self._sink.filled == self._sink.length:
            self._done()

    def _take_body(self, data: memoryview) -> None:
        self._rest += data
        assert self._reply is not None  # noqa: S101 -- set with the head
        if self._left is not None and len(self._rest) >= self._left:
            self._reply.body = bytes(self._rest[: self._left])
            self._done()
        elif self._chunked:
            self._take_chunks()
        if len(self._rest) > _ERROR_BYTES:
            self._fail(ConnectionError("the reply is too long"))

    def _take_chunks(self) -> None:
        assert self._reply is not None  # noqa: S101 -- set with the head
        try:
            body = _dechunk(bytes(self._rest))
        except ValueError as error:
            self._fail(ConnectionError(f"not a chunked body: {error}"))
            return
        if body is not None:
            self._reply.body = body
            self._done()

    def _done(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._reply is not None:
            self._waiter.set_result(self._reply)

    def _fail(self, error: Exception) -> None:
        self.reusable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._waiter is None or self._waiter.done():
            return
        if self._reply is not None and not self._into_sink and self._left is None and not self._chunked:
            self._reply.body = bytes(self._rest)  # a body that ends with the connection
            self.reusable = False
            self._done()
            return
        early = "before its reply" if self._sink is None else f"after {self._sink.filled} of {self._sink.length} bytes"
        self._waiter.set_exception(exc or ConnectionError(f"the connection ended {early}"))


def fault_of(reply: Reply, announced: int | None, first: int | None, length: int) -> Exception | None:
    """Why a reply with a good status does not carry the bytes that were asked for; ``None`` if it does."""
    start = first or 0
    if reply.status == 206:
        ranged = reply.headers.get("content-range", "")
        span, _, total = ranged.partition("/")
        if span.startswith("bytes ") and total.isdigit() and int(total) < start + length:
            return CorruptCheckpointError(
                f"the object has {total} bytes, expected {start + length} or more: it was truncated"
            )
        if span != f"bytes {start}-{start + length - 1}":
            return ConnectionError(f"the 206 reply has {f'Content-Range {ranged!r}' if ranged else 'no Content-Range'}")
    elif start:
        return ConnectionError("the store ignored the Range header")
    if announced != length:
        count = "no length" if announced is None else f"{announced} bytes"
        return ConnectionError(f"the {reply.status} reply announces {count}, expected {length}")
    return None


def _parse_head(head: bytes) -> tuple[Reply, bool]:
    line, _, rest = head.partition(b"\r\n")
    version, _, status = line.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError(repr(line[:40]))
    message = http.client.parse_headers(io.BytesIO(rest))
    headers = {name.lower(): value for name, value in message.items()}
    connection = headers.get("connection", "").lower()
    keep_alive = connection == "keep-alive" if version == b"HTTP/1.0" else connection != "close"
    return Reply(int(status[:3]), headers), keep_alive


def _dechunk(data: bytes) -> bytes | None:
    """The body of a chunked reply; ``None`` while its end has not come."""
    body = bytearray()
    position = 0
    while (end := data.find(b"\r\n", position)) >= 0:
        digits = data[position:end].partition(b";")[0].strip()
        if not _HEX.fullmatch(digits):
            raise ValueError(f"a chunk of {digits[:20]!r} bytes")
        size = int(digits, 16)
        start = end + 2
        if size == 0:
            ended = data.startswith(b"\r\n", start) or b"\r\n\r\n" in data[start:]  # the latter behind trailers
            return bytes(body) if ended else None
        if len(data) < start + size + 2:
            return None
        body += data[start : start + size]
        position = start + size + 2
    return None


def header_items(headers: Any) -> list[tuple[str, str]]:  # noqa: ANN401 -- botocore's own header class
    """A signed request's headers as text, without those that a kept connection must not carry."""
    return [
        (name, value.decode("latin-1") if isinstance(value, bytes) else str(value))
        for name, value in headers.items()
        if name.lower() not in ("content-length", "transfer-encoding", "expect", "connection")
    ]
