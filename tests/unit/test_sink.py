"""The small HTTP client by itself: any split of any reply, and sinks that take exactly what is theirs."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_s3 import CorruptCheckpointError
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.sink import Connection, Reply, Sink, header_items

BODY = bytes(range(256)) * 3
FIRST = 100
HEAD = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 100-867/5000\r\nContent-Length: 768\r\n"
    b'ETag: "abc"\r\nx-amz-meta-note: a: b\r\n\r\n'
)


class Wire(asyncio.Transport):
    """A transport that notes what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.aborted = False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def abort(self) -> None:
        self.aborted = True


class Outcome:
    """What a connection made of a reply that came in pieces."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        end: Exception | str | None = None,
        sink: Sink | None = None,
        first_byte: int | None = FIRST,
    ) -> None:
        self.target = bytearray(b"\xee" * len(BODY))
        self.sink = sink or Sink([memoryview(self.target)], Progress())
        self.wire = Wire()
        self.connection = Connection()
        self.reply: Reply | None = None
        self.error: BaseException | None = None
        asyncio.run(self._run(pieces, end, first_byte))

    async def _run(self, pieces: Sequence[bytes], end: Exception | str | None, first_byte: int | None) -> None:
        self.connection.connection_made(self.wire)
        request = asyncio.ensure_future(self.connection.request(b"GET", self.sink, first_byte))
        await asyncio.sleep(0)
        for piece in pieces:
            await self._feed(piece)
        if end is not None:
            self.connection.connection_lost(end if isinstance(end, Exception) else None)
        done, _ = await asyncio.wait({request}, timeout=0 if end is None else 5)
        if not done:
            request.cancel()
            await asyncio.wait({request})
            return
        self.error = request.exception()
        self.reply = None if self.error else request.result()

    async def _feed(self, piece: bytes) -> None:
        while piece and not self.wire.aborted:
            room = self.connection.get_buffer(-1)
            assert len(room) > 0
            count = min(len(room), len(piece))
            room[:count] = piece[:count]
            self.connection.buffer_updated(count)
            piece = piece[count:]
        await asyncio.sleep(0)


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


cuts = st.lists(st.integers(0, 5000), max_size=12)


@given(cuts, st.booleans())
def test_any_split_of_a_good_reply(places: list[int], interim: bool):
    """However the reply is cut on its way, with or without an interim reply, body and headers arrive whole."""
    data = (b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"") + HEAD + BODY
    outcome = Outcome(split(data, places))
    assert outcome.error is None
    assert outcome.reply is not None
    assert (outcome.reply.status, outcome.reply.headers["etag"]) == (206, '"abc"')
    assert outcome.reply.headers["x-amz-meta-note"] == "a: b"
    assert bytes(outcome.target) == BODY
    assert outcome.connection.reusable
    assert not outcome.wire.aborted


@given(cuts, st.integers(0, len(HEAD) + len(BODY) - 1))
def test_any_cut_of_a_good_reply(places: list[int], length: int):
    """A connection that ends before the reply does is an error that says how much of the body had come."""
    outcome = Outcome(split((HEAD + BODY)[:length], places), end="eof")
    got = max(0, length - len(HEAD))
    assert isinstance(outcome.error, ConnectionError)
    assert f"after {got} of {len(BODY)} bytes" in str(outcome.error)
    assert bytes(outcome.target[got:]) == b"\xee" * (len(BODY) - got)
    reset = ConnectionResetError("reset by peer")
    assert Outcome(split((HEAD + BODY)[:length], places), end=reset).error is reset


ERROR = b"<Error><Code>NoSuchKey</Code><Message>0\r\n\r\n</Message></Error>"


@pytest.mark.parametrize("form", ["length", "close"])
@given(places=cuts)
def test_any_split_of_an_error(form: str, places: list[int]):
    """The body of an error comes whole by its length or by the end of the connection; the target is not touched."""
    head = b"HTTP/1.1 404 Not Found\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(ERROR) if form == "length" else b"Connection: close\r\n\r\n"
    outcome = Outcome(split(head + ERROR, places), end="eof" if form == "close" else None)
    assert outcome.reply is not None
    assert (outcome.reply.status, outcome.reply.body) == (404, ERROR)
    assert asyncio.run(outcome.reply.read()) == ERROR
    assert outcome.connection.reusable is (form == "length")
    assert bytes(outcome.target) == b"\xee" * len(BODY)


@given(places=cuts, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_any_split_of_a_chunked_error(places: list[int], sizes: list[int]):
    """A chunked error body is joined, whatever its chunks and whatever they contain."""
    chunks, rest = b"", ERROR
    for size in sizes:
        if rest:
            chunks += b"%x;ext=1\r\n" % len(rest[:size]) + rest[:size] + b"\r\n"
            rest = rest[size:]
    if rest:
        chunks += b"%X\r\n" % len(rest) + rest + b"\r\n"
    head = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n"
    trailer = b"x-amz-trailer: t\r\n" if len(sizes) % 2 else b""
    outcome = Outcome(split(head + chunks + b"0\r\n" + trailer + b"\r\n", places))
    assert outcome.reply is not None
    assert (outcome.reply.status, outcome.reply.body) == (503, ERROR)


@pytest.mark.parametrize(
    "head, text",
    [
        (HEAD.replace(b"100-867/5000", b"101-868/5000"), "Content-Range 'bytes 101-868/5000'"),
        (HEAD.replace(b"Content-Range: bytes 100-867/5000\r\n", b""), "no Content-Range"),
        (HEAD.replace(b"Length: 768", b"Length: 767"), "announces 767 bytes, expected 768"),
        (HEAD.replace(b"Content-Length: 768", b"Transfer-Encoding: chunked") + b"zz\r\n", "illegal chunk header"),
        (HEAD.replace(b"Content-Length: 768", b"Content-Length: 768\r\nContent-Length: 769"), "not an HTTP reply"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 768\r\n\r\n", "ignored the Range header"),
        (b"HTTP/2 200\r\n\r\n", "not an HTTP reply"),
        (b"\x15\x03\x01\x00\x02\x02\r\n\r\n", "not an HTTP reply"),
        (b"HTTP/1.1 abc\r\n\r\n", "not an HTTP reply"),
        (b"x" * 300_000, "not an HTTP reply"),
        (b"HTTP/1.1 206 OK\r\n" + b"x-filler: 0123456789\r\n" * 15_000, "not an HTTP reply"),
        (HEAD.replace(b"Content-Length: 768", b"Content-Length: \xb2"), "not an HTTP reply"),  # a digit to str.isdigit
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, "not an HTTP reply"),
    ],
)
def test_replies_that_are_not_believed(head: bytes, text: str):
    """A reply that is not the asked range fails at its head: not one byte of its body reaches the target."""
    outcome = Outcome([head, BODY])
    assert isinstance(outcome.error, ConnectionError)
    assert text in str(outcome.error)
    assert bytes(outcome.target) == b"\xee" * len(BODY)
    assert outcome.wire.aborted
    assert not outcome.connection.reusable


@pytest.mark.parametrize(
    "body", [b"zz\r\n\r\n", b"-6\r\n", b"+5\r\nabcde\r\n", b"0x5\r\nabcde\r\n", b"1_0\r\n", b"\r\n", b"x" * 2_000_000]
)
def test_errors_that_are_no_end(body: bytes):
    """An error body whose chunks are none, or that has no end, is given up."""
    form = b"Transfer-Encoding: chunked" if len(body) < 100 else b"Connection: close"
    error = Outcome([b"HTTP/1.1 503 Busy\r\n" + form + b"\r\n\r\n", body]).error
    assert isinstance(error, ConnectionError)
    assert re.search("illegal chunk header|too long", str(error))


def test_an_object_that_ends_before_the_range():
    """An object shorter than the range is damage, not a failure of the connection."""
    head = HEAD.replace(b"100-867/5000", b"100-499/500").replace(b"Length: 768", b"Length: 400")
    error = Outcome([head + BODY[:400]]).error
    assert isinstance(error, CorruptCheckpointError)
    assert "has 500 bytes, expected 868 or more" in str(error)


def test_a_whole_object():
    """A 200 is right when the range begins at 0 and is as long as the object, or when none was asked for."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 768\r\n\r\n"
    for first_byte in (0, None):
        outcome = Outcome([head + BODY], first_byte=first_byte)
        assert (outcome.error, bytes(outcome.target)) == (None, BODY)


@pytest.mark.parametrize("extra", [b"x", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_bytes_behind_the_reply(extra: bytes):
    """A server that sends more than it announced is out of step: the connection is not used again."""
    together = Outcome([HEAD + BODY + extra])
    assert isinstance(together.error, ConnectionError)
    later = Outcome([HEAD + BODY, extra])
    assert (later.error, bytes(later.target)) == (None, BODY)
    assert later.wire.aborted
    assert later.connection.closed


@pytest.mark.parametrize(
    "line, header, reusable",
    [
        (b"HTTP/1.1", b"", True),
        (b"HTTP/1.1", b"Connection: close\r\n", False),
        (b"HTTP/1.0", b"", False),
        (b"HTTP/1.0", b"Connection: keep-alive\r\n", False),
    ],
)
def test_keep_alive(line: bytes, header: bytes, reusable: bool):
    """Whether a connection can be used again is the server's word; one of HTTP/1.0 is not."""
    data = HEAD.replace(b"HTTP/1.1", line).replace(b"ETag", header + b"ETag") + BODY
    assert Outcome([data]).connection.reusable is reusable


@settings(max_examples=40)
@given(st.lists(st.one_of(st.integers(0, 300), st.tuples(st.integers(0, 300))), max_size=8), st.data())
def test_sinks(plan: list[int | tuple[int]], data: st.DataObject):
    """Bytes fed or received in any portions land in the views in order; dropped ones nowhere; a rewind starts anew."""
    targets = [bytearray(b"\xee" * piece[0]) for piece in plan if isinstance(piece, tuple)]
    views = iter(targets)
    pieces: list[memoryview | int] = [memoryview(next(views)) if isinstance(piece, tuple) else piece for piece in plan]
    progress = Progress()
    sink = Sink(pieces, progress)
    length = sum(piece[0] if isinstance(piece, tuple) else piece for piece in plan)
    assert sink.length == length
    body = bytes(n * 7 % 251 for n in range(length))
    for attempt in range(2):
        sink.rewind()
        while sink.filled < length:
            count = data.draw(st.integers(1, 100))
            portion = body[sink.filled : sink.filled + count]
            if data.draw(st.booleans()):
                sink.feed(memoryview(portion + b"behind the end"[: max(0, sink.filled + count - length)]))
            else:
                room = sink.buffer()
                portion = portion[: len(room)]
                room[: len(portion)] = portion
                sink.advance(len(portion))
        assert progress.moved == (attempt + 1) * length
    position = 0
    for piece, target in zip(plan, _matched(plan, targets), strict=True):
        size = piece[0] if isinstance(piece, tuple) else piece
        if target is not None:
            assert bytes(target) == body[position : position + size]
        position += size


def _matched(plan: Sequence[Any], targets: Sequence[bytearray]) -> list[bytearray | None]:
    found = iter(targets)
    return [next(found) if isinstance(piece, tuple) else None for piece in plan]


def test_headers_of_a_kept_connection():
    """Headers go out as they were signed, but for those that would end the connection or announce a body."""
    headers = {"Host": "s3.test", "Range": b"bytes=0-1", "Content-Length": "0", "Connection": "close", "Expect": "100"}
    assert header_items(headers) == [("Host", "s3.test"), ("Range", "bytes=0-1")]
