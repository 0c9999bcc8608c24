"""The wire: kept connections that have gone, lines that are slow, replies of other servers, and loops of other policies."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter, StorageUnavailableError
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.pool import PlainPool
from dcp_s3._transfer.http.sink import Sink
from tests.fault.conftest import KEY, Transfer, config_of, pattern, wait
from tests.fault.server import FaultServer, reply_headers, reset
from tests.unit.test_sink_forms import chunks

BODY = pattern(300_000)
CALLS: dict[str, tuple[str, Callable[[Transfer], Any]]] = {
    "get": ("GetObject", lambda t: t.get(0, len(BODY))),
    "put": ("PutObject", lambda t: t.put(BODY, "other")),
    "head": ("HeadObject", lambda t: wait(t.plane.head_object(t.job, KEY))),
}


@pytest.fixture(params=CALLS)
def operation(request: pytest.FixtureRequest) -> str:
    """The operation that a test sends by :func:`send`."""
    return CALLS[request.param][0]


@pytest.fixture
def transfer(s3: FaultServer, transfer_to: Callable[..., Transfer]) -> Transfer:
    """A transfer layer on a store that holds an object."""
    s3.put(KEY, BODY)
    return transfer_to(s3)


@pytest.fixture
def send(transfer: Transfer, operation: str) -> Callable[[], Any]:
    """Send one request of the operation."""
    call = next(call for name, call in CALLS.values() if name == operation)
    return lambda: call(transfer)


def test_a_kept_connection_that_has_gone(s3: FaultServer, transfer: Transfer, operation: str, send: Callable[[], Any]):
    """A request on a kept connection that the server closes goes again at once: no attempt is counted, no endpoint avoided."""
    send()
    rule = s3.on(operation, reset("head"), nth=1)
    send()
    assert rule.fired == 1
    assert len(s3.requests(operation)) == 3
    assert transfer.job.counter.retries == 0


def test_a_new_connection_that_breaks(s3: FaultServer, transfer: Transfer, operation: str, send: Callable[[], Any]):
    """A request whose new connection breaks is one attempt, and the next is counted."""
    s3.on(operation, reset("head"), nth=1)
    send()
    assert transfer.job.counter.retries == 1


def test_connections_that_always_break(s3: FaultServer, transfer: Transfer, operation: str, send: Callable[[], Any]):
    """A server that closes every connection is asked as often as the policy says, and once more for a kept connection."""
    send()
    s3.clear(state=False)
    s3.on(operation, reset("head"))
    with pytest.raises(StorageUnavailableError):
        send()
    assert len(s3.requests(operation)) == transfer.config.retry.max_attempts + 1


def test_a_complete_is_not_sent_again_unasked(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Complete is not repeated because its kept connection has gone: whether it was done is looked up first."""
    transfer = transfer_to(s3)
    transfer.send(BODY, "first", part_bytes=200_000)
    s3.clear(state=False)
    s3.on("CompleteMultipartUpload", reset("head"), nth=1)
    transfer.send(BODY, KEY, part_bytes=200_000)
    order = [record.operation for record in s3.log if record.operation in ("CompleteMultipartUpload", "HeadObject")]
    assert order[:3] == ["CompleteMultipartUpload", "HeadObject", "CompleteMultipartUpload"]
    assert s3.read(KEY) == BODY


def test_bytes_that_come_slowly_are_no_silence(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A line that was fast and turns slow is waited for as long as bytes come, though the range takes longer than
    read_timeout_s.
    """
    body = pattern(6_000_000)
    s3.put(KEY, body)
    transfer = transfer_to(s3, read_timeout_s=1.5)
    transfer.get(0, len(body))
    s3.configure(rate_bytes_s=1_200_000)
    assert transfer.get(0, len(body)) == body
    assert transfer.job.counter.retries == 0


def test_a_head_without_a_length(plain_s3: FaultServer):
    """A gateway whose replies to HEAD have no Content-Length can be saved to: an absent length is not zero."""
    plain_s3.on("HeadObject", reply_headers({"Content-Length": None}))
    config = config_of(plain_s3)
    state = {"w": torch.arange(3_000_000, dtype=torch.int32), "small": torch.ones(3), "step": 7}
    dcp.save(state, storage_writer=S3StorageWriter("s3://bucket/gateway", config=config))
    loaded = {"w": torch.zeros(3_000_000, dtype=torch.int32), "small": torch.zeros(3), "step": 0}
    dcp.load(loaded, storage_reader=S3StorageReader("s3://bucket/gateway", config=config))
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["step"] == 7


# ---------------------------------------------------------------------------------------------------------------------
# replies that the scripted server does not send


@contextmanager
def replying(*replies: bytes) -> Iterator[tuple[str, int]]:
    """Serve one connection that answers each request with the next reply; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for reply in replies:
                    seen = b""
                    while b"\r\n\r\n" not in seen:
                        data = connection.recv(65536)
                        if not data:
                            return
                        seen += data
                    connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()
        thread.join(10)
        assert not thread.is_alive()


def fetch(*replies: bytes, length: int) -> list[bytes]:
    """Receive a range once per reply, over one kept connection."""

    async def run(address: tuple[str, int]) -> list[bytes]:
        pool = PlainPool(limit=2, connect_timeout_s=5, read_timeout_s=5)
        found = []
        for _ in replies:
            target = bytearray(length)
            await pool.get(address, "/k", [("Host", "s3")], Sink([memoryview(target)], Progress()), first_byte=0)
            found.append(bytes(target))
        pool.close()
        return found

    with replying(*replies) as address:
        return wait(run(address), 20)


def test_large_ranges_in_unusual_replies():
    """Megabytes arrive whole in chunks, with bare line feeds and behind 72 KB of headers, all over one connection."""
    body = pattern(5_000_000)
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-4999999/5000000\r\n"
    sized = head + b"Content-Length: 5000000\r\n"
    replies = [
        head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(body, 70_001),
        sized.replace(b"\r\n", b"\n") + b"\n" + body,
        sized + b"x-filler: " + b"f" * 72_000 + b"\r\n\r\n" + body,
        sized + b"\r\n" + body,
    ]
    assert fetch(*replies, length=len(body)) == [body] * 4


# ---------------------------------------------------------------------------------------------------------------------
# threads and loops


def test_another_loop_policy(plain_s3: FaultServer):
    """A program that has installed another policy, such as uvloop's, saves bodies larger than a socket's buffer."""
    program = f"""
        import asyncio, torch, torch.distributed.checkpoint as dcp
        from dcp_s3 import RetryPolicy, S3Config, S3StorageWriter

        class Loop(asyncio.SelectorEventLoop):
            def add_reader(self, fd, *rest):  # as uvloop does
                getattr(fd, "setblocking", lambda _: None)(False)
                super().add_reader(fd, *rest)

        class Policy(asyncio.DefaultEventLoopPolicy):
            _loop_factory = Loop

        asyncio.set_event_loop_policy(Policy())
        config = S3Config(endpoint_url="{plain_s3.url}", access_key_id="RANK3", secret_access_key="s",
                          read_timeout_s=5, retry=RetryPolicy(max_attempts=1))
        dcp.save({{"w": torch.ones(8_000_000)}}, storage_writer=S3StorageWriter("s3://bucket/loop", config=config))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "loop/.metadata" in plain_s3.objects()
