"""What the fault tests of the transfer layer share: servers that are reset for each test, and the package on top of them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import botocore.session
import pytest
import torch.distributed.checkpoint as dcp

from dcp_s3 import RetryPolicy, S3Config
from dcp_s3._runtime.loop_thread import loop_thread
from dcp_s3._transfer.checksum import crc32c
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.session import ViewSession
from dcp_s3._transfer.http.sink import Sink
from dcp_s3._transfer.job import Head, Job
from dcp_s3._transfer.limits.retry import Counter, Deadline
from dcp_s3._transfer.s3 import planes, probe, shared_clients
from dcp_s3._transfer.s3.clients import connection_of
from dcp_s3._transfer.s3.control_store import ControlStore
from dcp_s3._transfer.s3.data_plane import DataPlane
from dcp_s3._transfer.upload import ObjectReceipt, ObjectUpload
from tests.fault.provider import Provider
from tests.fault.server import FaultServer, Handle, Settings

T = TypeVar("T")

KEY = "run/data/0123456789abcdef/__0_0.distcp"
TOKEN = "0123456789abcdef"
QUICK = RetryPolicy(max_attempts=5, initial_wait_s=0.002, max_wait_s=0.01)
"""Waits that a test does not notice."""


def pattern(nbytes: int) -> bytes:
    """Bytes that no shifted, shortened or repeated copy of them equals."""
    return os.urandom(nbytes)


def wait(coroutine: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
    """Run a coroutine on the package's loop thread."""
    return loop_thread().submit(coroutine).result(timeout_s)


class Transfer:
    """The package's transfer layer on one server: a data plane, a job, and a control store when asked for.

    Args:
        s3: The server.
        plane: The data plane, where it is not the transfer's own.
        deadline_s: Of the job and the control store.
        **settings: Fields of S3Config that differ from quick retries and time-outs that a busy machine keeps.
    """

    def __init__(self, s3: Handle, *, plane: DataPlane | None = None, deadline_s: float = 60, **settings: Any) -> None:
        self.s3 = s3
        self.plane = DataPlane(config_of(s3, **settings)) if plane is None else plane
        self.config = self.plane.config
        self.job = Job(s3.bucket, Deadline(deadline_s), Counter(), Progress(), 3)

    @functools.cached_property
    def store(self) -> ControlStore:
        """The control plane, for the same rank and deadline."""
        return ControlStore(self.config, self.s3.bucket, deadline=self.job.deadline, rank=3, counter=self.job.counter)

    def put(self, body: bytes, key: str = KEY) -> Head:
        """Write an object in one request of the data plane."""
        return wait(self.plane.put_object(self.job, key, [memoryview(body)], crc32c(body), TOKEN))

    def get(self, start: int, end: int, key: str = KEY, **options: Any) -> bytes:
        """Read a range with the data plane, into memory that held something else before."""
        target = bytearray(b"\xee" * (end - start))
        wait(self.plane.get_range(self.job, key, start, Sink([memoryview(target)], self.job.progress), **options))
        return bytes(target)

    def upload(self, key: str = KEY, *, part_bytes: int, **options: Any) -> ObjectUpload:
        """Begin an object of parts."""
        return ObjectUpload(self.plane, self.job, key, TOKEN, part_bytes=part_bytes, **options)

    def send(self, body: bytes, key: str = KEY, *, part_bytes: int) -> ObjectReceipt:
        """Write an object of parts; an upload that fails is aborted, as every user of it does."""
        upload = self.upload(key, part_bytes=part_bytes)
        try:
            upload.append(memoryview(body))
        except BaseException:
            upload.abort()
            raise
        return upload.finish()


def config_of(s3: Handle, **settings: Any) -> S3Config:
    """Return a config for a server: quick retries, and time-outs that a busy machine keeps."""
    defaults: dict[str, Any] = {
        "endpoint_url": s3.url,
        "access_key_id": "RANK3",
        "secret_access_key": "SECRET-KEY-VALUE",
        "verify_tls": s3.ca_bundle or True,
        "retry": QUICK,
        "connect_timeout_s": 20.0,
        "read_timeout_s": 20.0,
    }
    return S3Config(**{**defaults, **settings})


def failure_of(call: Callable[[], object]) -> BaseException | None:
    """What a save or load through DCP failed of in this process; None if it did not."""
    try:
        call()
    except dcp.CheckpointException as failed:
        failure: BaseException = failed.failures[0][0]
        return failure
    return None


@pytest.fixture(scope="session", autouse=True)
def service_read_once() -> Iterator[None]:
    """The description of S3, which each SDK session reads anew (0.2 s), is read once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture(autouse=True)
def quiet_loops() -> Iterator[None]:
    """No event loop has to say that an exception was never looked at, or that a callback failed."""
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Listening(level=logging.ERROR)
    logging.getLogger("asyncio").addHandler(handler)
    yield
    logging.getLogger("asyncio").removeHandler(handler)
    assert said == []


@pytest.fixture(scope="session")
def default_planes() -> Iterator[dict[str, DataPlane]]:
    """Data planes with the default settings, by server: to make one takes 0.1 s."""
    planes: dict[str, DataPlane] = {}
    yield planes
    for plane in planes.values():
        wait(plane.close())


def default_transfer(s3: Handle, planes: dict[str, DataPlane]) -> Transfer:
    """Return the transfer layer with the default settings, as if nothing had been learnt of the server."""
    plane = planes.get(s3.url)
    if plane is None or plane.budget.held:
        plane = planes[s3.url] = DataPlane(config_of(s3))
    plane.learnt.sends_checksums, plane.learnt.sends_md5, plane.budget.peak = True, False, 0
    return Transfer(s3, plane=plane)


@pytest.fixture(autouse=True)
def forgotten_clients(default_planes: dict[str, DataPlane]) -> Iterator[None]:
    """No finding about a store, and no client but the default ones, lives on behind the test that made it."""
    yield
    kept = {connection_of(plane.config) for plane in default_planes.values()}
    for plane in list(planes._planes.values()):
        wait(plane.close())
    planes._planes.clear()
    planes._budgets.clear()
    for place in set(shared_clients._shared) - kept:
        shared_clients._shared.pop(place).close()
    for shared in shared_clients._shared.values():
        shared.without_checksums = False
    probe._known.clear()


@pytest.fixture(scope="session")
def http_server() -> Iterator[FaultServer]:
    """One HTTP server for the whole run."""
    with FaultServer() as server:
        yield server


@pytest.fixture(scope="session")
def https_server() -> Iterator[FaultServer]:
    """One HTTPS server for the whole run."""
    with FaultServer(tls=True) as server:
        yield server


@pytest.fixture
def allowed() -> set[str]:
    """Names of the server's checks that the test may break (`open-upload`: where an abort cannot get through)."""
    return set()


@pytest.fixture
def reset_server(allowed: set[str]) -> Iterator[Callable[[FaultServer], FaultServer]]:
    """Empties a shared server before the test, and afterwards has it say what the client must never have done."""
    used: list[FaultServer] = []

    def reset(server: FaultServer) -> FaultServer:
        server.clear()
        server.configure(**(dataclasses.asdict(Settings()) | {"min_part_bytes": 0}))
        used.append(server)
        return server

    yield reset
    for server in used:
        server.clear(log=False, state=False)
        end = time.monotonic() + 1  # the server looks only now and then whether a client that it does not read has gone
        while (found := server.violations(ignore=tuple(allowed))) and time.monotonic() < end:
            time.sleep(0.02)
        assert found == []


@pytest.fixture(params=["http", "https"])
def s3(request: pytest.FixtureRequest, reset_server: Callable[[FaultServer], FaultServer]) -> FaultServer:
    """An empty server, over HTTP and over HTTPS. The test fails if the client did what it must never do."""
    return reset_server(request.getfixturevalue(f"{request.param}_server"))


@pytest.fixture
def plain_s3(http_server: FaultServer, reset_server: Callable[[FaultServer], FaultServer]) -> FaultServer:
    """An empty server over HTTP alone, for what TLS cannot change."""
    return reset_server(http_server)


@pytest.fixture
def transfer_to() -> Iterator[Callable[..., Transfer]]:
    """Makes a Transfer for a server, and closes it."""
    made: list[Transfer] = []

    def make(s3: Handle, **settings: Any) -> Transfer:
        made.append(Transfer(s3, **settings))
        return made[-1]

    yield make
    for transfer in made:
        wait(transfer.plane.close())


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Provider:
    """The credential_process of the default profile."""
    provider = Provider(tmp_path)
    (tmp_path / "config").write_text("[default]\n" + provider.config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return provider


@pytest.fixture
def with_chain(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]) -> Callable[..., Transfer]:
    """Makes transfer layers whose credentials come from the chain."""
    plain_s3.configure(require_signature=True)
    return lambda **settings: transfer_to(plain_s3, **{"access_key_id": None, "secret_access_key": None, **settings})


@pytest.fixture
def transfer(s3: FaultServer, default_planes: dict[str, DataPlane]) -> Transfer:
    """The transfer layer on `s3` with quick retries; its connections may be in use already."""
    return default_transfer(s3, default_planes)


@pytest.fixture
def plain_transfer(plain_s3: FaultServer, default_planes: dict[str, DataPlane]) -> Transfer:
    """The transfer layer on `plain_s3` with quick retries; its connections may be in use already."""
    return default_transfer(plain_s3, default_planes)


@pytest.fixture
def completes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The XML of every CompleteMultipartUpload that was sent, as the SDK hands it to the wire."""
    seen: list[bytes] = []
    plain = ViewSession.send

    async def noting(self: ViewSession, request: Any) -> Any:
        if isinstance(request.body, (bytes, bytearray)) and b"CompleteMultipartUpload" in request.body:
            seen.append(bytes(request.body))
        return await plain(self, request)

    monkeypatch.setattr(ViewSession, "send", noting)
    return seen
