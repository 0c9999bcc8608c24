"""Servers that hang, drip or fall silent: every wait is bounded, on both planes, and the last attempt succeeds."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from dcp_s3 import DeadlineExceededError, RetryPolicy, StorageUnavailableError
from tests.fault.conftest import KEY, Transfer, pattern
from tests.fault.server import MULTIPART, Action, FaultServer, cut_reply, delay, drip, never_answer, never_read

BODY = pattern(3_000_000)
SMALL = BODY[:10_000]
PART = 1_000_000
PATIENCE_S = 0.4
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
def impatient(s3: FaultServer, transfer_to: Callable[..., Transfer]) -> Transfer:
    """The transfer layer with 0.4 s of patience; tries to spare, as a busy machine may be slow to answer, too."""
    policy = RetryPolicy(max_attempts=4, initial_wait_s=0.002, max_wait_s=0.01)
    return transfer_to(s3, read_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S, retry=policy)


@pytest.mark.parametrize(
    "operation, stall",
    [pair for pair in itertools.product(CALLS, STALLS) if pair[1] != "stops-in-the-reply" or pair[0] == "GetObject"],
)
def test_a_stall_once(s3: FaultServer, impatient: Transfer, operation: str, stall: str):
    """A request that stalls once is given up after about read_timeout_s, and the next one does the work."""
    if operation == "GetObject":
        s3.put(KEY, SMALL)
    s3.on(operation, STALLS[stall], nth=1)
    started = time.monotonic()
    CALLS[operation](impatient)
    assert time.monotonic() - started < 15
    assert s3.read(KEY) == (BODY if operation in MULTIPART else SMALL)


@pytest.mark.parametrize("stall", STALLS)
def test_a_stall_of_the_control_plane(s3: FaultServer, impatient: Transfer, stall: str):
    """The same for small requests on the caller's thread: also a reply that drips without a pause is given up."""
    started = time.monotonic()
    if stall != "stops-in-the-reply":  # the reply to a PUT has no body to stop in
        s3.on("PutObject", STALLS[stall], nth=1)
        impatient.store.put(KEY, SMALL, content_type=BINARY)
        assert s3.read(KEY) == SMALL
    s3.put(KEY, SMALL)
    s3.on("GetObject", STALLS[stall], nth=1)
    assert impatient.store.get(KEY).body == SMALL
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("stall", ["never-reads", "never-answers", "drips"])
def test_a_stall_for_ever(plain_s3: FaultServer, transfer_to: Callable[..., Transfer], stall: str):
    """Two attempts, each bounded, then an error that says what did not come; on either plane."""
    policy = RetryPolicy(max_attempts=2, initial_wait_s=0.002, max_wait_s=0.01)
    transfer = transfer_to(plain_s3, read_timeout_s=0.3, connect_timeout_s=0.3, retry=policy)
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


def test_a_silent_connection(s3: FaultServer, impatient: Transfer):
    """A connection that is accepted and never serves is given up, and the next connection is used."""
    s3.put(KEY, SMALL)
    for call in (lambda: impatient.put(SMALL), lambda: impatient.get(0, 10), lambda: impatient.store.get(KEY)):
        s3.spoil_connections("hang")
        started = time.monotonic()
        call()
        assert time.monotonic() - started < 15
    assert s3.counters["refused"] >= 3


def test_what_a_stalled_attempt_says(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """The error of an attempt given up says how long it was silent and how many bytes had moved."""
    transfer = transfer_to(plain_s3, read_timeout_s=0.3, retry=RetryPolicy(max_attempts=1))
    plain_s3.put(KEY, BODY)
    plain_s3.on("GetObject", cut_reply(250_000, "stall"))
    with pytest.raises(StorageUnavailableError, match=r"0\.[3-9] s of them silent; 250000 of 300000 bytes had moved"):
        transfer.get(0, 300_000)


def test_slow_is_not_stalled(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A slow line that never pauses for read_timeout_s is left to do its work, however long that takes."""
    transfer = transfer_to(plain_s3, read_timeout_s=1.0)
    body = pattern(16_000_000)  # more than the buffers of the sockets hold
    plain_s3.put(KEY, body)
    plain_s3.configure(rate_bytes_s=8_000_000)
    started = time.monotonic()
    assert transfer.get(0, len(body)) == body
    assert time.monotonic() - started > 1.5
    transfer.put(body, "slow")
    assert plain_s3.read("slow") == body
    assert time.monotonic() - started > 3
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
    transfer = transfer_to(plain_s3, stall_limit_s=0.5)
    plain_s3.on("UploadPart", delay(0.25))
    upload = transfer.upload(part_bytes=1000)
    pause = threading.Event()
    pause.wait(0.6)  # planning of a large model
    for offset in range(0, 2000, 1000):
        upload.append(memoryview(SMALL)[offset : offset + 1000])
        plain_s3.wait_for("UploadPart", count=offset // 1000 + 1)
        pause.wait(0.6)  # a tensor that takes long to resolve
    assert upload.finish().size == 2000


def test_the_deadline_of_a_save(s3: FaultServer, transfer_to: Callable[..., Transfer], allowed: set[str]):
    """An upload that is slow in every part ends at the deadline, is aborted, and says which deadline it was."""
    transfer = transfer_to(s3, deadline_s=1.0, max_concurrency=1)
    s3.on("UploadPart", delay(0.3))
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="deadline of 1 s"):
        transfer.send(SMALL, part_bytes=500)
    assert time.monotonic() - started < 10
    assert (s3.uploads(), s3.objects()) == ({}, {})
    assert transfer.plane.budget.held == 0
