"""Connections: whose certificate is believed, how many there are, which endpoint they lead to, and when they are signed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import ConfigError, CorruptCheckpointError, S3Config, StorageError, StorageUnavailableError
from dcp_s3._transfer.download import Downloader, RangeRead
from dcp_s3._transfer.s3.client_options import boto_options
from dcp_s3._transfer.s3.clients import Rotation
from dcp_s3._transfer.s3.data_plane import DataPlane
from tests.fault.conftest import KEY, QUICK, Transfer, pattern
from tests.fault.server import FaultServer, cut_reply, delay, error, never_answer, peak_in_flight

BODY = pattern(200_000)
CALLS: dict[str, Callable[[Transfer], Any]] = {
    "data-put": lambda t: t.put(BODY),
    "data-get": lambda t: t.get(0, 1000),
    "control-get": lambda t: t.store.get(KEY),
}


# ---------------------------------------------------------------------------------------------------------------------
# TLS


REFUSED = {
    "expired": "certificate has expired",
    "wrong-host": r"certificate is not valid for '127\.0\.0\.1'|'127\.0\.0\.1' doesn't match 'other\.invalid'",
    "unknown-ca": "unable to get local issuer certificate",
}
"""What is wrong with each certificate, in the words of OpenSSL; of a name, also in those of urllib3."""


@pytest.fixture(params=REFUSED)
def certificate(request: pytest.FixtureRequest) -> str:
    """What is wrong with the imposter's certificate."""
    return str(request.param)


@pytest.fixture
def imposter(certificate: Any) -> Iterator[FaultServer]:
    """A server whose certificate must be refused."""
    with FaultServer(tls=True, certificate=certificate) as server:
        server.put(KEY, BODY)
        yield server


@pytest.mark.parametrize("call", CALLS)
def test_a_bad_certificate_is_refused(
    imposter: FaultServer, transfer_to: Callable[..., Transfer], certificate: str, call: str
):
    """A certificate that is expired, for another host, or of an unknown CA: one connection, no request, and a text that says which
    of these it is and what to do.
    """
    transfer = transfer_to(imposter)
    why = rf"certificate was refused: .*({REFUSED[certificate]}).*verify_tls=.*AWS_CA_BUNDLE"
    with pytest.raises(StorageError, match=why) as caught:
        CALLS[call](transfer)
    assert type(caught.value) is StorageError
    assert transfer.job.counter.retries == 0
    assert imposter.counters["accepted"] == 1
    assert imposter.log == []


@pytest.mark.parametrize("call", CALLS)
def test_certificates_are_checked_by_default(
    https_server: FaultServer, transfer_to: Callable[..., Transfer], call: str
):
    """A config that says nothing of TLS refuses a certificate of a CA that this machine does not know, before any request."""
    https_server.clear()
    https_server.put(KEY, BODY)
    config = S3Config(endpoint_url=https_server.url, access_key_id="RANK3", secret_access_key="s", retry=QUICK)
    transfer = transfer_to(https_server, plane=DataPlane(config))
    with pytest.raises(StorageError, match=f"certificate was refused: .*{REFUSED['unknown-ca']}"):
        CALLS[call](transfer)
    assert transfer.job.counter.retries == 0
    assert https_server.log == []


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_tls_can_be_left_unchecked(imposter: FaultServer, transfer_to: Callable[..., Transfer]):
    """verify_tls=False takes any certificate, on both planes."""
    transfer = transfer_to(imposter, verify_tls=False)
    for call in CALLS.values():
        call(transfer)
    assert imposter.read(KEY) == BODY


@pytest.mark.parametrize("call", CALLS)
def test_aws_ca_bundle(
    https_server: FaultServer,
    transfer_to: Callable[..., Transfer],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
):
    """AWS_CA_BUNDLE names the CA of both planes, sending and receiving; without it the server is refused."""
    https_server.put(KEY, BODY)
    with pytest.raises(StorageError, match="certificate was refused"):
        CALLS[call](transfer_to(https_server, verify_tls=True))
    assert https_server.ca_bundle is not None
    monkeypatch.setenv("AWS_CA_BUNDLE", https_server.ca_bundle)
    CALLS[call](transfer_to(https_server, verify_tls=True, max_concurrency=3))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("content", [None, "no certificate in here"])
def test_a_ca_bundle_that_is_none(
    https_server: FaultServer, transfer_to: Callable[..., Transfer], tmp_path: Path, call: str, content: str | None
):
    """A CA bundle that is missing, or holds no certificate, is an error that names the file, at once."""
    bundle = tmp_path / "ca.pem"
    if content is not None:
        bundle.write_text(content)
    transfer = transfer_to(https_server, verify_tls=str(bundle))
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"verify_tls.*ca\.pem"):
        CALLS[call](transfer)
    assert transfer.job.counter.retries == 0
    assert time.monotonic() - started < 15


# ---------------------------------------------------------------------------------------------------------------------
# How many


@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_in_flight_is_max_concurrency(s3: FaultServer, transfer_to: Callable[..., Transfer], concurrency: int):
    """Parts and ranges in flight reach max_concurrency and never pass it, on as many connections."""
    transfer = transfer_to(s3, max_concurrency=concurrency, read_timeout_s=30.0)
    body, count = pattern(200 * 100), min(200, 3 * concurrency + 1)
    s3.put(KEY, body)
    reads: list[RangeRead[int]] = [
        RangeRead(KEY, n, 1, scratch=0, pieces=lambda: [memoryview(bytearray(1))], about=n) for n in range(count)
    ]
    downloader: Downloader[int] = Downloader(transfer.plane, transfer.job)
    for operation, work in (
        ("UploadPart", lambda: transfer.send(body[: count * 100], part_bytes=100)),
        ("GetObject", lambda: list(downloader.run(reads))),
    ):
        gate = s3.hold(operation)
        working = threading.Thread(target=work)
        working.start()
        gate.wait_arrived(concurrency)
        with pytest.raises(TimeoutError):
            gate.wait_arrived(concurrency + 1, timeout_s=0.1)
        gate.release()
        working.join(60)
        records = s3.requests(operation)
        assert len(records) == count
        assert peak_in_flight(records) == concurrency
        assert len({r.connection for r in records}) <= concurrency


def test_the_limit_is_the_planes(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Several uploads of one plane at once share max_concurrency."""
    transfer = transfer_to(plain_s3, max_concurrency=4)
    plain_s3.configure(latency_s=0.03)
    uploads = [transfer.upload(f"{KEY}.{n}", part_bytes=1000) for n in range(3)]
    for upload in uploads:
        upload.append(memoryview(bytes(6000)))
    for upload in uploads:
        upload.finish()
    assert peak_in_flight(plain_s3.log) == 4


def test_errors_give_their_connection_back(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Sixty refused requests of every kind leave no more sockets than the pool has, and none is unusable after."""
    transfer = transfer_to(s3, max_concurrency=2)
    before = s3.counters["open"]
    s3.on("*", error(403, "AccessDenied"))
    for _ in range(20):
        for call in CALLS.values():
            with pytest.raises(StorageError):
                call(transfer)
    assert s3.counters["open"] <= before + 8
    assert len({r.connection for r in s3.log}) <= 3
    s3.clear(log=False, state=False)
    transfer.put(BODY)
    assert transfer.get(0, 10) == BODY[:10]


def test_a_slot_is_taken_before_signing(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """50 parts, two at a time, 200 ms each, at a store that refuses a signature older than a second: none is."""
    plain_s3.configure(max_request_age_s=1.0, latency_s=0.2)
    transfer = transfer_to(plain_s3, max_concurrency=2)
    body = pattern(5000)
    transfer.send(body, part_bytes=100)
    assert plain_s3.read(KEY) == body
    parts = plain_s3.requests("UploadPart")
    assert len(parts) == 50
    assert peak_in_flight(parts) == 2
    assert {r.status for r in parts} == {200}
    assert max(r.t_start for r in parts) - min(r.t_start for r in parts) > 4
    assert max(r.age_s or 0.0 for r in parts) < 1


# ---------------------------------------------------------------------------------------------------------------------
# Several endpoints


@pytest.fixture
def three() -> Iterator[FaultServer]:
    """One store behind three endpoints."""
    with FaultServer(endpoints=3, min_part_bytes=0) as server:
        yield server


def test_endpoints_share_the_requests(three: FaultServer, transfer_to: Callable[..., Transfer]):
    """Parts, ranges and small requests go to all endpoints in turn."""
    transfer = transfer_to(three, endpoint_url=three.urls)
    transfer.send(BODY, part_bytes=4000)
    for _ in range(6):
        transfer.get(0, 10)
        transfer.store.head(KEY)
    for operation, least in (("UploadPart", 14), ("GetObject", 1), ("HeadObject", 1)):
        counts = [sum(r.endpoint == n for r in three.requests(operation)) for n in range(3)]
        assert min(counts) >= least, (operation, counts)
    assert three.read(KEY) == BODY


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_endpoint_is_survived(three: FaultServer, transfer_to: Callable[..., Transfer], dead: int):
    """An endpoint that refuses connections is met once or twice, then passed over: the others do all the work."""
    three.go_offline(dead)
    transfer = transfer_to(three, endpoint_url=three.urls, max_concurrency=1)
    transfer.send(BODY, part_bytes=4000)
    assert three.read(KEY) == BODY
    for _ in range(6):
        assert transfer.get(5, 10) == BODY[5:10]
        assert transfer.store.get(KEY).body == BODY
    assert transfer.job.counter.retries <= 2
    assert {r.endpoint for r in three.log} == {0, 1, 2} - {dead}


def test_endpoints_that_die_in_the_middle(three: FaultServer, transfer_to: Callable[..., Transfer]):
    """Two of three endpoints die while an upload is under way, one of them by falling silent."""
    transfer = transfer_to(three, endpoint_url=three.urls, read_timeout_s=0.5)
    three.configure(latency_s=0.01)
    upload = transfer.upload(part_bytes=2000)
    upload.append(memoryview(BODY)[:50_000])
    three.wait_for("UploadPart", count=10)
    three.go_offline(0)
    three.on("*", never_answer(), endpoint=1)
    upload.append(memoryview(BODY)[50_000:])
    upload.finish()
    assert three.read(KEY) == BODY
    assert three.violations() == []


def test_all_endpoints_dead(three: FaultServer, transfer_to: Callable[..., Transfer]):
    """With no endpoint left each is tried in turn, as often as the policy says in all."""
    for endpoint in range(3):
        three.go_offline(endpoint)
    transfer = transfer_to(three, endpoint_url=three.urls)
    for call in CALLS.values():
        with pytest.raises(StorageUnavailableError) as caught:
            call(transfer)
        assert caught.value.attempts == QUICK.max_attempts
    three.go_online(2)
    transfer.put(BODY)
    assert transfer.store.get(KEY).body == BODY


# ---------------------------------------------------------------------------------------------------------------------
# A proxy


class Proxy:
    """A forward proxy for plain HTTP: one request for each connection."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(1 << 16)
        method, _, rest = head.partition(b" http://")
        server, slash, rest = rest.partition(b"/")
        self.requests.append(method)
        host, port = server.decode().split(":")
        with client, socket.create_connection((host, int(port))) as upstream:
            line, _, fields = (method + b" " + slash + rest).partition(b"\r\n")
            upstream.sendall(line + b"\r\nConnection: close\r\n" + fields)
            threading.Thread(target=self._copy, args=(client, upstream), daemon=True).start()
            self._copy(upstream, client)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)  # close() alone waits for the other direction

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that the environment names."""
    running = Proxy()
    monkeypatch.setenv("http_proxy", running.url)
    yield running
    running.close()


def test_behind_a_proxy(plain_s3: FaultServer, transfer_to: Callable[..., Transfer], proxy: Proxy):
    """Behind HTTP_PROXY both planes go through it, and ranges are checked as strictly as without one."""
    transfer = transfer_to(plain_s3, max_concurrency=9)
    transfer.put(BODY)
    assert transfer.get(100, 150_000) == BODY[100:150_000]
    assert transfer.store.get(KEY).body == BODY
    transfer.send(BODY, f"{KEY}2", part_bytes=90_000)
    assert plain_s3.read(f"{KEY}2") == BODY
    assert sorted(proxy.requests) == sorted(r.method.encode() for r in plain_s3.log)

    plain_s3.on("GetObject", cut_reply(1000), nth=1)
    assert transfer.get(100, 150_000) == BODY[100:150_000]
    plain_s3.configure(ranges="ignore")
    for start, end in ((100, 200), (0, 200)):
        with pytest.raises(StorageUnavailableError):
            transfer.get(start, end)
    assert transfer.get(0, len(BODY)) == BODY
    plain_s3.configure(ranges="honour")
    with pytest.raises(CorruptCheckpointError, match="expected 300000 or more"):
        transfer.get(100, 300_000)


def test_rotation():
    """Endpoints take turns; one that gave no answer is passed over, unless all did: then the oldest failure is next."""
    rotation = Rotation(3)
    silent, slow_down = StorageUnavailableError("no answer"), StorageUnavailableError("503").with_context(status=503)
    assert [rotation.take() for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    rotation.note(1, slow_down)
    assert [rotation.take() for _ in range(3)] == [0, 1, 2]
    rotation.note(1, silent)
    assert [rotation.take() for _ in range(4)] == [0, 2, 0, 2]
    rotation.note(0, silent)
    assert [rotation.take() for _ in range(2)] == [2, 2]
    rotation.note(2, silent)
    assert rotation.take() == 1
    rotation.note(1, silent)
    assert rotation.take() == 0
    assert Rotation(1).take() == 0


def test_planes_of_many_threads(plain_s3: FaultServer):
    """Threads that use one control store at once get their own replies."""
    transfer = Transfer(plain_s3)
    for n in range(8):
        plain_s3.put(f"k{n}", str(n).encode() * 100)
    plain_s3.on("GetObject", delay(0.02))
    seen: dict[int, set[bytes]] = {n: set() for n in range(8)}

    def work(n: int) -> None:
        for _ in range(5):
            seen[n].add(transfer.store.get(f"k{n}").body)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {n: {str(n).encode() * 100} for n in range(8)}


def test_pools_are_large_enough():
    """The connection pool is larger than max_concurrency, whatever that is."""
    for concurrency in (1, 16, 256):
        options = boto_options(S3Config(max_concurrency=concurrency), path_style=True)
        assert options["max_pool_connections"] > concurrency
        assert options["retries"]["total_max_attempts"] == 1
