"""Servers that hang, drip or fall silent: every wait is bounded, on both planes, and the last attempt succeeds."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_s3 import DeadlineExceededError, RetryPolicy, StorageUnavailableError
from tests.fault.conftest import KEY, Transfer, pattern
from tests.fault.server import MULTIPART, Action, FaultServer, cut_reply, delay, drip, never_answer, never_read

BODY = pattern(3_000_000)
SMALL = BODY[:10_000]
PART = 1_000_000
IMPATIENT: dict[str, Any] = {
    "read_timeout_s": 0.25,
    "connect_timeout_s": 0.25,
    "retry": RetryPolicy(max_attempts=12, initial_wait_s=0.002, max_wait_s=0.01),
}
BINARY = "application/octet-stream"

STALLS: dict[str, Action] = {
    "never-reads": never_read(),
    "never-answers": never_answer(),
    "works-and-never-answers": never_answer(commit=True),
    "drips": drip(0.1),
    "stops-in-the-reply": cut_reply(0, "stall"),
}
CALLS: dict[str, Callable[[Transfer], object]] = {
    "PutObject": lambda t: t.put(SMALL),
    "UploadPart": lambda t: t.send(BODY, part_bytes=PART),
    "CompleteMultipartUpload": lambda t: t.send(BODY, part_bytes=PART),
    "GetObject": lambda t: t.get(0, len(SMALL)),
}


@pytest.fixture
def impatient(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]) -> Transfer:
    """The transfer layer with time-outs of 0.25 s; tries to spare, as a busy machine may be slow to answer, too."""
    return transfer_to(plain_s3, **IMPATIENT)


@pytest.fixture
def impatient_over_tls(
    https_server: FaultServer,
    reset_server: Callable[[FaultServer], FaultServer],
    transfer_to: Callable[..., Transfer],
) -> Transfer:
    """The same over HTTPS."""
    return transfer_to(reset_server(https_server), **IMPATIENT)


def stall_once(transfer: Transfer, operation: str, stall: str) -> None:
    """Have the first request of an operation stall, and check that the work is done all the same, soon."""
    if operation == "GetObject":
        transfer.s3.put(KEY, SMALL)
    transfer.s3.on(operation, STALLS[stall], nth=1)
    started = time.monotonic()
    CALLS[operation](transfer)
    assert time.monotonic() - started < 15
    assert transfer.s3.read(KEY) == (BODY if operation in MULTIPART else SMALL)


@pytest.mark.parametrize(
    "operation, stall",
    [pair for pair in itertools.product(CALLS, STALLS) if pair[1] != "stops-in-the-reply" or pair[0] == "GetObject"],
)
def test_a_stall_once(impatient: Transfer, operation: str, stall: str):
    """A request that stalls once is given up after about read_timeout_s, and the next one does the work."""
    stall_once(impatient, operation, stall)


@pytest.mark.parametrize(
    "operation, stall",
    [
        ("UploadPart", "never-reads"),
        ("CompleteMultipartUpload", "never-reads"),
        ("CompleteMultipartUpload", "works-and-never-answers"),
        ("GetObject", "never-answers"),
        ("GetObject", "stops-in-the-reply"),
    ],
)
def test_a_stall_once_over_tls(impatient_over_tls: Transfer, operation: str, stall: str):
    """The same over HTTPS, where an orderly end would wait for the peer: connections given up are cut."""
    stall_once(impatient_over_tls, operation, stall)


def control_stall_once(transfer: Transfer, stall: str) -> None:
    """The same for the control plane."""
    started = time.monotonic()
    if stall != "stops-in-the-reply":  # the reply to a PUT has no body to stop in
        transfer.s3.on("PutObject", STALLS[stall], nth=1)
        transfer.store.put(KEY, SMALL, content_type=BINARY)
        assert transfer.s3.read(KEY) == SMALL
    transfer.s3.put(KEY, SMALL)
    transfer.s3.on("GetObject", STALLS[stall], nth=1)
    assert transfer.store.get(KEY).body == SMALL
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("stall", STALLS)
def test_a_stall_of_the_control_plane(impatient: Transfer, stall: str):
    """Small requests are bounded in the same way: also a reply that drips without a pause is given up."""
    control_stall_once(impatient, stall)


def test_a_stall_of_the_control_plane_over_tls(impatient_over_tls: Transfer):
    """The same over HTTPS."""
    control_stall_once(impatient_over_tls, "never-answers")


@pytest.mark.parametrize("stall", ["never-reads", "never-answers", "drips"])
def test_a_stall_for_ever(plain_s3: FaultServer, transfer_to: Callable[..., Transfer], stall: str):
    """Two attempts, each bounded, then an error that says what did not come; on either plane."""
    policy = RetryPolicy(max_attempts=2, initial_wait_s=0.002, max_wait_s=0.01)
    transfer = transfer_to(plain_s3, read_timeout_s=0.2, connect_timeout_s=0.2, retry=policy)
    plain_s3.put(KEY, SMALL)
    plain_s3.on(("PutObject", "GetObject"), STALLS[stall])
    for call in (
        lambda: transfer.put(SMALL),
        lambda: transfer.get(0, len(SMALL)),
        lambda: transfer.store.get(KEY),
    ):
        started = time.monotonic()
        with pytest.raises(StorageUnavailableError) as caught:
            call()
        assert time.monotonic() - started < 15
        assert (caught.value.attempts, caught.value.key) == (2, KEY)
        assert "did not get an answer" in str(caught.value)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_silent_connection(request: pytest.FixtureRequest, scheme: str):
    """A connection that is accepted and never serves is given up, and the next connection is used."""
    transfer: Transfer = request.getfixturevalue("impatient" if scheme == "http" else "impatient_over_tls")
    s3 = transfer.s3
    s3.put(KEY, SMALL)
    before = s3.counters["refused"]
    for call in (lambda: transfer.put(SMALL), lambda: transfer.get(0, 10), lambda: transfer.store.get(KEY)):
        s3.spoil_connections("hang")
        started = time.monotonic()
        call()
        assert time.monotonic() - started < 15
    assert s3.counters["refused"] == before + 3


def test_what_a_stalled_attempt_says(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """The error of an attempt given up says how long it was silent and how many bytes had moved."""
    transfer = transfer_to(plain_s3, read_timeout_s=0.3, retry=RetryPolicy(max_attempts=1))
    plain_s3.put(KEY, BODY)
    plain_s3.on("GetObject", cut_reply(150_000, "stall"))
    with pytest.raises(StorageUnavailableError, match=r"0\.[3-9] s of them silent; 150000 of 200000 bytes had moved"):
        transfer.get(0, 200_000)


def test_slow_is_not_stalled(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A slow line that never pauses for read_timeout_s is left to do its work, however long that takes."""
    transfer = transfer_to(plain_s3, read_timeout_s=2.0)
    body = pattern(18_000_000)  # more than the buffers of the sockets hold
    plain_s3.put(KEY, body)
    plain_s3.configure(rate_bytes_s=6_000_000)
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        down = pool.submit(transfer.get, 0, len(body))
        up = pool.submit(transfer.put, body, "slow")
        assert down.result() == body
        up.result()
    assert time.monotonic() - started > 2.5
    assert plain_s3.read("slow") == body
    assert transfer.job.counter.retries == 0


def test_the_stall_limit_of_a_save(plain_s3: FaultServer, transfer_to: Callable[..., Transfer], allowed: set[str]):
    """An upload in which nothing moves for stall_limit_s is given up, whatever each request may still wait for."""
    allowed.add("open-upload")
    transfer = transfer_to(plain_s3, stall_limit_s=0.6, read_timeout_s=30, deadline_s=60)
    plain_s3.on("UploadPart", never_answer())
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="stall_limit_s") as caught:
        transfer.send(SMALL, part_bytes=1000)
    assert time.monotonic() - started < 15
    assert (caught.value.rank, caught.value.key) == (3, KEY)


def test_a_slow_producer_is_no_stall(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Nothing moves while a producer makes the next bytes, or before the first: that does not count as a stall."""
    transfer = transfer_to(plain_s3, stall_limit_s=1.0)
    plain_s3.on("UploadPart", delay(0.3))
    upload = transfer.upload(part_bytes=1000)
    pause = threading.Event()
    pause.wait(1.2)  # planning of a large model
    upload.append(memoryview(SMALL)[:1000])
    plain_s3.wait_for("UploadPart")
    pause.wait(1.2)  # a tensor that takes long to resolve
    upload.append(memoryview(SMALL)[1000:2000])
    assert upload.finish().size == 2000


def test_the_deadline_of_a_save(plain_s3: FaultServer, transfer_to: Callable[..., Transfer], allowed: set[str]):
    """An upload that is slow in every part ends at the deadline, is aborted, and says which deadline it was."""
    transfer = transfer_to(plain_s3, deadline_s=1.0, max_concurrency=1)
    plain_s3.on("UploadPart", delay(0.3))
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="deadline of 1 s"):
        transfer.send(SMALL, part_bytes=500)
    assert time.monotonic() - started < 10
    assert (plain_s3.uploads(), plain_s3.objects()) == ({}, {})
    assert transfer.plane.budget.held == 0
