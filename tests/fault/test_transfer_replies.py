"""Replies in unusual forms to all kinds of requests, also those that aiohttp and urllib3 make."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

import pytest

from dcp_s3 import RetryPolicy, StorageUnavailableError
from dcp_s3._transfer.s3 import shared_clients
from tests.fault.conftest import KEY, Transfer, pattern, wait
from tests.fault.server import FaultServer

BODY = pattern(300_000)
TWICE = RetryPolicy(max_attempts=2, initial_wait_s=0.01, max_wait_s=0.01)


@dataclass
class Answer:
    """What a store has to say, before it takes a form."""

    method: str
    status: str
    headers: list[tuple[str, str]]
    body: bytes

    def whole(self, *more: tuple[str, str], body: bytes | None = None) -> bytes:
        """Head and body; a reply to HEAD has none."""
        lines = [f"HTTP/1.1 {self.status}", *(f"{name}: {value}" for name, value in [*self.headers, *more])]
        body = self.body if body is None else body
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if self.method == "HEAD" else body)


Form = Callable[[Answer], bytes]


def _chunks(answer: Answer) -> bytes:
    body = b"%x\r\n%b\r\n" % (len(answer.body), answer.body) if answer.body else b""
    return answer.whole(("Transfer-Encoding", "chunked"), body=body + b"0\r\n\r\n")


def _sized(answer: Answer, *more: tuple[str, str]) -> bytes:
    return answer.whole(*more, ("Content-Length", str(len(answer.body))))


FORMS: dict[str, Form] = {
    "chunks": _chunks,
    "blanks behind the length": lambda answer: answer.whole(("Content-Length", f"{len(answer.body)} \t")),
    "90 headers, 72 KB": lambda answer: _sized(answer, *((f"x-{n}", "v" * 800) for n in range(90))),
    "bare line feeds": lambda answer: _sized(Answer(answer.method, answer.status, answer.headers, b"")).replace(
        b"\r\nContent-Length: 0", b"\r\nContent-Length: %d" % len(answer.body)
    ).replace(b"\r\n", b"\n") + (b"" if answer.method == "HEAD" else answer.body),
    "a header over two lines": lambda answer: _sized(answer, ("x-folded", "a\r\n b")),
    "Bytes in capitals": lambda answer: _sized(answer).replace(b"bytes ", b"BYTES "),
    "a HEAD without a length": lambda answer: answer.whole() if answer.method == "HEAD" else _sized(answer),
}  # fmt: skip
DATA_FORMS: dict[str, Form] = {
    "72 KB in one header": lambda answer: _sized(answer, ("x-long", "v" * 72_000)),
    "200 headers": lambda answer: _sized(answer, *((f"x-{n}", "v") for n in range(200))),
    "interim replies": lambda answer: (
        b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + _sized(answer)
    ),
}
"""Forms that Python's http.client, and so the control plane, does not take."""


class Gateway:
    """A store behind something that gives its replies another form."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._objects: dict[tuple[str, int], bytes] = {}
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.bucket, self.ca_bundle = "bucket", None
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer, peer.makefile("rb") as lines:
            while (request := lines.readline().split()) and len(request) == 3:
                headers = {}
                while (line := lines.readline().strip()) != b"":
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                if "expect" in headers:
                    peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = lines.read(int(headers.get("content-length", "0")))
                peer.sendall(self._form(self._do(request[0].decode(), request[1].decode(), headers, body)))

    def _do(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True)
        answer = Answer(method, "200 OK", [("ETag", '"abc"'), ("Date", "Wed, 02 Dec 2026 21:00:00 GMT")], b"")
        if "uploads" in query:
            answer.body = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
        elif method == "POST":
            parts = sorted(number for key, number in self._objects if key == url.path and number)
            self._objects[url.path, 0] = b"".join(self._objects[url.path, number] for number in parts)
            answer.body = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
        elif method == "PUT":
            self._objects[url.path, int(query.get("partNumber", ["0"])[0])] = body
        else:
            answer.body = self._objects[url.path, 0]
            answer.headers.append(("x-amz-meta-dcp-s3-token", "0123456789abcdef"))
            if "range" in headers:
                first, last = map(int, headers["range"].removeprefix("bytes=").split("-"))
                span = f"bytes {first}-{min(last, len(answer.body) - 1)}/{len(answer.body)}"
                answer.status, answer.body = "206 Partial Content", answer.body[first : last + 1]
                answer.headers.append(("Content-Range", span))
        return answer


@pytest.fixture
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway of the form that the test names."""
    made = Gateway({**FORMS, **DATA_FORMS}[request.param])
    yield made
    made.close()


@pytest.mark.parametrize("gateway", [*FORMS, *DATA_FORMS], indirect=True)
def test_the_data_plane(gateway: Gateway, transfer_to: Callable[..., Transfer]):
    """Objects are written, in one request or in parts, looked at and read through any gateway, without a second attempt."""
    transfer = transfer_to(gateway, retry=TWICE, read_timeout_s=5)
    assert transfer.put(BODY).size == len(BODY)
    head = wait(transfer.plane.head_object(transfer.job, KEY))
    assert head is not None
    assert (head.size, head.token) == (len(BODY), "0123456789abcdef")
    assert transfer.get(1000, 250_000) == BODY[1000:250_000]
    assert transfer.send(BODY, f"{KEY}.parts", part_bytes=100_000).size == len(BODY)
    assert transfer.get(0, len(BODY), f"{KEY}.parts") == BODY
    assert transfer.job.counter.retries == 0


@pytest.mark.parametrize("gateway", FORMS, indirect=True)
def test_the_control_plane(gateway: Gateway, transfer_to: Callable[..., Transfer]):
    """So are the small objects, and what is said of their size is so."""
    transfer = transfer_to(gateway, retry=TWICE, read_timeout_s=5)
    assert transfer.store.put(KEY, BODY, content_type="text/plain") == '"abc"'
    assert transfer.store.head(KEY).size == len(BODY)
    found = transfer.store.get(KEY)
    assert (found.body, found.info.size) == (BODY, len(BODY))
    part = transfer.store.get(KEY, byte_range=(5, 9))
    assert (part.body, part.info.size) == (BODY[5:9], len(BODY))
    assert transfer.job.counter.retries == 0


@pytest.mark.parametrize("gateway", ["interim replies"], indirect=True)
def test_interim_replies_to_the_control_plane(gateway: Gateway, transfer_to: Callable[..., Transfer]):
    """http.client takes them for the reply proper: an error that says so, and no success of which the store has not spoken."""
    transfer = transfer_to(gateway, retry=TWICE, read_timeout_s=5)
    for call in (
        lambda: transfer.store.put(KEY, BODY, content_type="text/plain"),
        lambda: transfer.store.put(KEY, BODY, content_type="text/plain", retry=False),
        lambda: transfer.store.head(KEY),
        lambda: transfer.store.get(KEY),
    ):
        with pytest.raises(StorageUnavailableError, match="interim reply"):
            call()


def test_idle_connections_of_the_control_plane(
    s3: FaultServer, transfer_to: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
):
    """A connection that was idle for long, and may have gone without a word, is not used again; one just used is."""
    transfer = transfer_to(s3)
    s3.put(KEY, BODY)
    transfer.store.get(KEY)
    transfer.store.get(KEY)
    monkeypatch.setattr(shared_clients, "_IDLE_S", 0.2)
    time.sleep(0.3)
    transfer.store.get(KEY)
    first, second, third = [record.connection for record in s3.requests("GetObject")]
    assert first == second != third
    assert transfer.job.counter.retries == 0


def test_no_compression_is_asked_for(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Nothing else is asked for than the bytes as they are."""
    transfer = transfer_to(plain_s3)
    transfer.put(BODY)
    transfer.get(0, 10)
    transfer.store.get(KEY)
    assert {record.headers.get("accept-encoding", "identity") for record in plain_s3.log} == {"identity"}
