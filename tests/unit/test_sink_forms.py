"""The forms that HTTP/1.1 allows a reply, beyond the usual one: each gives its bytes, or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_s3 import StorageError
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.sink import Sink
from tests.unit.test_sink import BODY, HEAD, Outcome, cuts, split

LENGTH = b"Content-Length: 768"
CHUNKED = HEAD.replace(LENGTH, b"Transfer-Encoding: chunked")


def chunks(body: bytes, size: int = 100, trailer: bytes = b"") -> bytes:
    """A body in chunks."""
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"


FORMS: dict[str, tuple[bytes, bool]] = {
    "chunked": (CHUNKED + chunks(BODY), True),
    "chunked, one byte each": (CHUNKED + chunks(BODY, 1), True),
    "chunked, with extensions": (CHUNKED + b"300;a=b\r\n" + BODY + b"\r\n000;z\r\n\r\n", True),
    "chunked, with a trailer": (CHUNKED + chunks(BODY, trailer=b"x-amz-checksum-crc32c: AAAA\r\n"), True),
    "Chunked in capitals": (HEAD.replace(LENGTH, b"TRANSFER-ENCODING: Chunked") + chunks(BODY), True),
    "chunked, and a length": (CHUNKED.replace(b"ETag", b"Content-Length: 5\r\nETag") + chunks(BODY), False),
    "ends with the connection": (HEAD.replace(LENGTH + b"\r\n", b"") + BODY, False),
    "ends with the connection, and says so": (HEAD.replace(LENGTH, b"Connection: Close") + BODY, False),
    "HTTP/1.0": (HEAD.replace(b"HTTP/1.1", b"HTTP/1.0").replace(LENGTH + b"\r\n", b"") + BODY, False),
    "blanks behind the length": (HEAD.replace(b"768", b"768 \t ") + BODY, True),
    "no blank before the length": (HEAD.replace(b": 768", b":768") + BODY, True),
    "zeros before the length": (HEAD.replace(b": 768", b": 000768") + BODY, True),
    "the length twice": (HEAD.replace(LENGTH, LENGTH + b"\r\n" + LENGTH) + BODY, True),
    "the length twice in one line": (HEAD.replace(LENGTH, LENGTH + b", 768") + BODY, True),
    "Bytes in capitals": (HEAD.replace(b"bytes 100", b"Bytes 100") + BODY, True),
    "BYTES and blanks": (HEAD.replace(b"bytes 100-867/5000", b"BYTES  100-867/5000 ") + BODY, True),
    "the size of the object unknown": (HEAD.replace(b"/5000", b"/*") + BODY, True),
    "72 KB of headers": (HEAD.replace(b"ETag", b"".join(b"x-%d: %b\r\n" % (n, b"v" * 700) for n in range(102)) + b"ETag") + BODY, True),
    "72 KB in one header": (HEAD.replace(b"ETag", b"x-long: " + b"v" * 72_000 + b"\r\nETag") + BODY, True),
    "bare line feeds": (HEAD.replace(b"\r\n", b"\n") + BODY, True),
    "line ends of both kinds": (HEAD.replace(b"\r\nETag", b"\nETag") + BODY, True),
    "names in any case": (HEAD.replace(LENGTH, b"cOnTeNt-LeNgTh: 768").replace(b"ETag", b"ETAG") + BODY, True),
    "a header over two lines": (HEAD.replace(b"ETag", b"x-folded: a\r\n b\r\n\tc\r\nETag") + BODY, True),
    "an empty header": (HEAD.replace(b"ETag", b"x-empty:\r\nETag") + BODY, True),
    "no reason": (HEAD.replace(b" Partial Content", b"") + BODY, True),
    "interim replies": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nx-a: b\r\n\r\n" + HEAD + BODY, True),
    "an interim reply, then chunks": (b"HTTP/1.1 103 Early Hints\nLink: x\n\n" + CHUNKED + chunks(BODY), True),
    "an identity coding": (CHUNKED.replace(b"ETag", b"Content-Encoding: identity\r\nETag") + chunks(BODY), True),
    "a coding that the object was stored with": (HEAD.replace(b"ETag", b"Content-Encoding: gzip\r\nETag") + BODY, True),
}  # fmt: skip
"""Each with whether its connection can be used again."""


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15, deadline=None)
@given(places=cuts)
def test_any_split_of_any_form(form: str, places: list[int]):
    """The bytes arrive whole, in whatever portions the reply comes, and no others are touched."""
    data, reusable = FORMS[form]
    ends = b"onnection: C" in data or "ends with" in form or form == "HTTP/1.0"
    outcome = Outcome(split(data, places), end="eof" if ends else None)
    assert outcome.error is None
    assert outcome.reply is not None
    assert (outcome.reply.status, outcome.reply.headers["etag"]) == (206, '"abc"')
    assert outcome.reply.headers["x-amz-meta-note"] == "a: b"
    assert bytes(outcome.target) == BODY
    assert outcome.connection.reusable is reusable


@given(places=cuts, length=st.integers(0, 5000))
def test_any_cut_of_a_chunked_reply(places: list[int], length: int):
    """A chunked body that ends with its connection, and not with its last chunk, is an error."""
    data = CHUNKED + chunks(BODY)
    outcome = Outcome(split(data[: length % len(data)], places), end="eof")
    assert isinstance(outcome.error, ConnectionError)


WRONG: dict[str, tuple[bytes, str]] = {
    "chunks that are too short": (CHUNKED + chunks(BODY[:-1]), "ended after 767 of 768 bytes"),
    "chunks that are too long": (CHUNKED + chunks(BODY + b"x"), "longer than the 768 bytes that were asked for"),
    "a connection that ends early": (HEAD.replace(LENGTH + b"\r\n", b"") + BODY[:500], "ended after 500 of 768 bytes"),
    "a connection that goes on": (HEAD.replace(LENGTH + b"\r\n", b"") + BODY + b"x", "longer than the 768"),
    "a header of 400 KB": (
        HEAD.replace(b"ETag", b"x: " + b"v" * 400_000 + b"\r\nETag") + BODY,
        "Receive buffer too long",
    ),
    "two lengths": (HEAD.replace(LENGTH, LENGTH + b"\r\nContent-Length: 7") + BODY, "conflicting Content-Length"),
    "a length that is none": (HEAD.replace(b"768", b"+768") + BODY, "bad Content-Length"),
    "a chunk that is none": (CHUNKED + b"x\r\n" + BODY, "illegal chunk header"),
    "an unknown transfer coding": (
        HEAD.replace(LENGTH, b"Transfer-Encoding: gzip, chunked") + BODY,
        "Transfer-Encoding",
    ),
    "a length behind a line that is no header": (
        HEAD.replace(b"ETag", b"no header\r\nContent-Length: 5\r\nETag") + BODY,
        "illegal header line",
    ),
    "a header without a name": (HEAD.replace(b"ETag", b": x\r\nETag") + BODY, "illegal header line"),
}


@pytest.mark.parametrize("form", WRONG)
@settings(max_examples=15, deadline=None)
@given(places=cuts)
def test_replies_that_are_wrong(form: str, places: list[int]):
    """What is not the bytes that were asked for, or could be read in two ways, is an error, and the connection is cut."""
    data, text = WRONG[form]
    outcome = Outcome(split(data, places), end="eof")
    assert isinstance(outcome.error, ConnectionError)
    assert text in str(outcome.error)
    assert outcome.connection.closed
    assert not outcome.connection.reusable


@pytest.mark.parametrize("coding", [b"gzip", b" GZIP", b"deflate", b"br", b"aws-chunked, gzip"])
@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked", b"Content-Length: 99", b"Connection: close"])
def test_a_proxy_that_compresses(coding: bytes, framing: bytes):
    """A reply that somebody compressed on its way is no damage of the object, and no further try would help."""
    outcome = Outcome([HEAD.replace(LENGTH, framing + b"\r\nContent-Encoding: " + coding)])
    assert type(outcome.error) is StorageError
    assert "the reply is compressed (Content-Encoding:" in str(outcome.error)
    assert bytes(outcome.target) == b"\xee" * len(BODY)


@pytest.mark.parametrize("behind", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_bytes_behind_a_small_reply(framing: str, behind: bytes):
    """What comes behind a reply that is no sink's is nobody's: the connection is not used again."""
    head = b"HTTP/1.1 404 Not Found\r\n"
    body = head + (
        b"Content-Length: 3\r\n\r\nabc"
        if framing == "length"
        else b"Transfer-Encoding: chunked\r\n\r\n" + chunks(b"abc")
    )
    outcome = Outcome([body + behind])
    assert outcome.reply is not None
    assert (outcome.reply.status, outcome.reply.body) == (404, b"abc")
    assert not outcome.connection.reusable


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8), places=cuts)
def test_chunks_into_several_views(sizes: Sequence[int], places: list[int]):
    """Chunks fill the views of a sink in order, whatever their sizes; what is to be dropped is dropped."""
    rest = len(BODY) - 300
    blocks = [bytearray(b"\xee" * 100), bytearray(b"\xee" * rest)]
    sink = Sink([memoryview(blocks[0]), 200, memoryview(blocks[1])], Progress())
    data, position = b"", 0
    while position < len(BODY):
        piece = BODY[position : position + sizes[position % len(sizes)]]
        data += b"%x\r\n%b\r\n" % (len(piece), piece)
        position += len(piece)
    outcome = Outcome(split(CHUNKED + data + b"0\r\n\r\n", places), sink=sink)
    assert outcome.error is None
    assert bytes(blocks[0]) == BODY[:100]
    assert bytes(blocks[1]) == BODY[300:]
