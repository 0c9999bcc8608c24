"""The receiving side of HTTP/1.1: the bytes of a range go from the socket into the caller's buffers.

A reply with the asked bytes and a plain length, as every store sends it, is taken apart here. All other replies (chunked
ones, errors, interim ones, unusual heads) go through h11, a library that knows what HTTP/1.1 allows.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
from typing import TYPE_CHECKING, Any, Final

import h11

from dcp_s3.errors import CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_s3._transfer.http.payload import Progress

_HEAD_BYTES: Final = 64 << 10
"""Longest head that is taken apart here."""
HEAD_BYTES: Final = 256 << 10
"""Longest head at all."""
_ERROR_BYTES: Final = 1 << 20
_END_OF_HEAD: Final = re.compile(rb"\n\r?\n")
_RANGE: Final = re.compile(r"bytes\s+([0-9]+)-([0-9]+)/([0-9]+|\*)", re.IGNORECASE | re.ASCII)
_PLAIN_STATUS: Final = re.compile(rb"HTTP/1\.1 20[06](?: |\Z)")
_UNUSUAL: Final = re.compile(rb"[^\r]\n|\n[ \t]|\r[^\n]|[\x00-\x08\x80-\xff]")
"""In a head: bare line ends, folded lines, bytes that are no text."""
_COMPRESSED: Final = {"gzip", "x-gzip", "compress", "deflate", "br", "zstd"}
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
        self._library: h11.Connection | None = None
        self._library_fills_sink = False
        self._body = bytearray()
        self.reusable = False

    @property
    def heard(self) -> bool:
        """Whether any byte of the present request's reply has come."""
        return self._used > 0 or self._library is not None

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
        if self._reply is not None or self._library is not None:
            return memoryview(self._head)  # moved on in buffer_updated
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
        if self._library is not None:
            self._parse(self._library, bytes(self._head[:nbytes]))
        elif self._into_sink and self._sink is not None:
            self._sink.advance(nbytes)
            self._finish_if_filled()
        else:
            self._used += nbytes
            self._take_head()

    def _take_head(self) -> None:
        end = _END_OF_HEAD.search(self._head, 0, self._used)
        if end is None and self._used < len(self._head):
            return
        parsed = _plain_head(bytes(self._head[: end.end()])) if end is not None and self._sink is not None else None
        if end is None or parsed is None:
            self._library = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
            # which request it was makes no difference to the reply of a GET or PUT
            self._library.send(h11.Request(method="GET", target="/", headers=[("Host", "s3")]))
            self._library.send(h11.EndOfMessage())
            self._parse(self._library, bytes(self._head[: self._used]))
            return
        self._reply, self.reusable = parsed
        assert self._sink is not None  # noqa: S101 -- only such a head is plain
        if fault := fault_of(self._reply, self._first_byte, self._sink.length):
            self._fail(fault)
            return
        self._into_sink = True
        if self._used - end.end() > self._sink.length:
            self._fail(ConnectionError("the reply is longer than it announces"))
            return
        self._sink.feed(memoryview(self._head)[end.end() : self._used])
        self._finish_if_filled()

    def _finish_if_filled(self) -> None:
        assert self._sink is not None  # noqa: S101 -- a body goes there only if there is one
        if self._sink.filled == self._sink.length:
            self._done()

    # ------------------------------------------------------------------ replies that the library reads

    def _parse(self, library: h11.Connection, data: bytes) -> None:
        """Hand over what has come; ``b""`` is the end of the connection."""
        try:
            library.receive_data(data)
            while self._waiter is not None and not self._waiter.done():
                event = library.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    return
                self._take_event(library, event)
        except h11.RemoteProtocolError as error:
            if data:
                self._fail(ConnectionError(f"not an HTTP reply: {error}"))

    def _take_event(self, library: h11.Connection, event: object) -> None:
        if isinstance(event, h11.Response):
            headers: dict[str, str] = {}
            for raw_name, raw_value in event.headers:
                name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
                headers[name] = f"{headers[name]}, {value}" if name in headers else value
            self._reply = Reply(event.status_code, headers)
            if self._sink is not None and event.status_code in (200, 206):
                self._library_fills_sink = True
                fault = fault_of(self._reply, self._first_byte, self._sink.length)
                if fault is not None:
                    self._fail(fault)
        elif isinstance(event, h11.Data):
            self._take_body(memoryview(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self._take_end(library)

    def _take_body(self, data: memoryview) -> None:
        if not self._library_fills_sink or self._sink is None:
            self._body += data
            if len(self._body) > _ERROR_BYTES:
                self._fail(ConnectionError("the reply is too long"))
        elif len(data) > self._sink.length - self._sink.filled:
            self._fail(ConnectionError(f"the reply is longer than the {self._sink.length} bytes that were asked for"))
        else:
            self._sink.feed(data)

    def _take_end(self, library: h11.Connection) -> None:
        assert self._reply is not None  # noqa: S101 -- its end follows its beginning
        if self._library_fills_sink and self._sink is not None and self._sink.filled < self._sink.length:
            self._fail(ConnectionError(f"the reply ended after {self._sink.filled} of {self._sink.length} bytes"))
            return
        self._reply.body = bytes(self._body)
        framed_twice = "content-length" in self._reply.headers and "transfer-encoding" in self._reply.headers
        in_step = library.their_state is h11.DONE and not library.trailing_data[0]
        self.reusable = in_step and not framed_twice  # RFC 9112, 6.1: such a connection is not to be used again
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
        if exc is None and self._library is not None:
            self._parse(self._library, b"")  # some bodies end with the connection
            self.reusable = False
            if self._waiter.done():
                return
        early = "before its reply" if self._sink is None else f"after {self._sink.filled} of {self._sink.length} bytes"
        self._waiter.set_exception(exc or ConnectionError(f"the connection ended {early}"))


def content_range(value: str) -> tuple[int, int, int | None] | None:
    """First byte, last byte and object size (``None`` where it is ``*``) of a Content-Range; ``None`` if it is none."""
    found = _RANGE.fullmatch(value.strip())
    return None if found is None else (int(found[1]), int(found[2]), None if found[3] == "*" else int(found[3]))


def fault_of(reply: Reply, first: int | None, length: int) -> Exception | None:
    """Why a reply with a good status does not carry the bytes that were asked for; ``None`` if it does.

    A reply that does not announce its length may still turn out too long or too short.

    Args:
        reply: Status and headers.
        first: Where the asked range starts; ``None`` if the whole object was asked for.
        length: Bytes that were asked for.
    """
    start = first or 0
    if reply.status == 206:
        ranged = reply.headers.get("content-range", "")
        span = content_range(ranged)
        if span is not None and span[2] is not None and span[2] < start + length:
            return CorruptCheckpointError(
                f"the object has {span[2]} bytes, expected {start + length} or more: it was truncated"
            )
        if span is None or span[:2] != (start, start + length - 1):
            return ConnectionError(f"the 206 reply has {f'Content-Range {ranged!r}' if ranged else 'no Content-Range'}")
    elif start:
        return ConnectionError("the store ignored the Range header")
    announced = reply.headers.get("content-length")
    sized = announced is not None and "transfer-encoding" not in reply.headers
    if sized and announced is not None and announced.strip().lstrip("0") == str(length):
        return None
    coding = reply.headers.get("content-encoding", "").strip().lower()
    if not _COMPRESSED.isdisjoint(part.strip() for part in coding.split(",")):  # not as the object was stored
        return StorageError(
            f"the reply is compressed (Content-Encoding: {coding}), which was not asked for: a proxy before the store must "
            "pass objects on as they are"
        ).with_context(status=reply.status)
    if sized and announced is not None:
        return ConnectionError(f"the {reply.status} reply announces {announced[:20]} bytes, expected {length}")
    return None


def _plain_head(head: bytes) -> tuple[Reply, bool] | None:
    """A reply that carries its range in the plainest form, and whether its connection stays; ``None`` for any other."""
    line, _, rest = head.partition(b"\r\n")
    if not _PLAIN_STATUS.match(line) or _UNUSUAL.search(rest):
        return None
    try:
        message = http.client.parse_headers(io.BytesIO(rest))
    except (ValueError, http.client.HTTPException):
        return None
    if message.defects:  # such as a line without a colon, behind which it would see no header
        return None
    headers = {name.lower(): value for name, value in message.items()}
    if len(message.get_all("content-length", ())) != 1 or "transfer-encoding" in headers:
        return None
    if not re.fullmatch("[0-9]{1,20}", headers["content-length"]):
        return None
    return Reply(int(line[9:12]), headers), headers.get("connection", "").lower() != "close"


def header_items(headers: Any) -> list[tuple[str, str]]:  # noqa: ANN401 -- botocore's own header class
    """A signed request's headers as text, without those that a kept connection must not carry."""
    return [
        (name, value.decode("latin-1") if isinstance(value, bytes) else str(value))
        for name, value in headers.items()
        if name.lower() not in ("content-length", "transfer-encoding", "expect", "connection")
    ]
