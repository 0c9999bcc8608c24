"""Ranged reads: what counts as the bytes that were asked for, and what is done about everything else."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_s3 import CorruptCheckpointError, DeadlineExceededError, StorageError, StorageUnavailableError
from dcp_s3._transfer.download import Downloader, RangeRead
from dcp_s3._transfer.http.sink import Sink
from dcp_s3._transfer.s3.control_store import is_missing
from tests.fault.conftest import KEY, QUICK, Transfer, pattern, wait
from tests.fault.server import (
    FaultServer,
    cut_reply,
    delay,
    error,
    flip_reply,
    never_answer,
    reply_headers,
)

BODY = pattern(400_000)
START, END = 1000, 301_000
LENGTH = END - START
CUTS = {"0": 0, "1": 1, "half": LENGTH // 2, "last-1": LENGTH - 1}


class Reads:
    """Runs reads of one object through a Downloader, into one buffer."""

    def __init__(self, transfer: Transfer, size: int, step: int, *, scratch: int = 0) -> None:
        self.downloader: Downloader[int] = Downloader(transfer.plane, transfer.job)
        self.buffer = bytearray(size)
        view = memoryview(self.buffer)
        self.reads = [
            RangeRead(
                KEY,
                start,
                min(step, size - start),
                scratch=scratch,
                pieces=lambda start=start: [view[start : min(start + step, size)]],
                about=start,
            )
            for start in range(0, size, step)
        ]

    def run(self) -> list[int]:
        return [read.about for read in self.downloader.run(self.reads)]


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_download_is_read_again(s3: FaultServer, transfer: Transfer, cut: str, how: Any):
    """A body that ends early, once, is asked for again as a whole; the target holds nothing of the first try."""
    s3.put(KEY, BODY)
    s3.on("GetObject", cut_reply(CUTS[cut], how), nth=1)
    assert transfer.get(START, END) == BODY[START:END]
    assert [r.headers["range"] for r in s3.log] == [f"bytes={START}-{END - 1}"] * 2
    s3.on("GetObject", cut_reply(CUTS[cut], how), nth=1)
    assert transfer.store.get(KEY, byte_range=(START, END)).body == BODY[START:END]
    assert len(s3.log) == 4


@pytest.mark.parametrize("cut", CUTS)
def test_a_download_that_is_always_cut(s3: FaultServer, transfer: Transfer, cut: str):
    """In the end the error names key, range, bytes got and expected, and how often it was tried."""
    s3.put(KEY, BODY)
    s3.on("GetObject", cut_reply(CUTS[cut]))
    with pytest.raises(StorageUnavailableError) as caught:
        transfer.get(START, END)
    text = str(caught.value)
    assert f"the connection ended after {CUTS[cut]} of {LENGTH} bytes" in text
    assert f"bytes {START}-{END - 1}" in text
    assert f"key={KEY}" in text
    assert caught.value.attempts == QUICK.max_attempts == len(s3.log)
    with pytest.raises(StorageUnavailableError) as caught:
        transfer.store.get(KEY)
    assert (caught.value.key, caught.value.attempts) == (KEY, QUICK.max_attempts)
    assert re.search(
        rf"\b{CUTS[cut]} (bytes )?read\b.*\b({len(BODY)}|{len(BODY) - CUTS[cut]} more expected)", str(caught.value)
    )


def test_a_download_that_stops_half_way(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A body that stops without an end of the connection is given up after read_timeout_s, and asked for again."""
    transfer = transfer_to(s3, read_timeout_s=0.8)
    s3.put(KEY, BODY)
    s3.on("GetObject", cut_reply(LENGTH // 2, "stall"), nth=1)
    assert transfer.get(START, END) == BODY[START:END]
    s3.on("GetObject", cut_reply(LENGTH // 2, "stall"), nth=1)
    assert transfer.store.get(KEY).body == BODY
    assert len(s3.log) == 4


WRONG = {
    "content-range-of-another-part": {"Content-Range": f"bytes 0-{LENGTH - 1}/{len(BODY)}"},
    "content-range-one-off": {"Content-Range": f"bytes {START + 1}-{END}/{len(BODY)}"},
    "no-content-range": {"Content-Range": None},
    "content-range-of-nonsense": {"Content-Range": "rows 1-2/3"},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_content_range(s3: FaultServer, transfer: Transfer, wrong: str):
    """A 206 whose Content-Range is not the asked one is not believed: once is repeated, for ever is an error."""
    s3.put(KEY, BODY)
    s3.on("GetObject", reply_headers(WRONG[wrong]), nth=1)
    assert transfer.get(START, END) == BODY[START:END]
    assert len(s3.log) == 2
    s3.on("GetObject", reply_headers(WRONG[wrong]))
    with pytest.raises(StorageUnavailableError, match="Content-Range"):
        transfer.get(START, END)
    assert len(s3.log) == 2 + QUICK.max_attempts


@pytest.mark.parametrize("announced", [LENGTH - 1, LENGTH + 1, 0])
def test_a_wrong_length(s3: FaultServer, transfer: Transfer, announced: int):
    """A Content-Length that is not the range's is not believed, nor are the bytes that come."""
    s3.put(KEY, BODY)
    s3.on("GetObject", reply_headers({"Content-Length": str(announced)}))
    with pytest.raises(StorageUnavailableError) as caught:
        transfer.get(START, END)
    assert f"announces {announced} bytes, expected {LENGTH}" in str(caught.value)
    s3.clear(state=False)
    assert transfer.get(START, END) == BODY[START:END]


def test_a_store_that_ignores_ranges(s3: FaultServer, transfer: Transfer):
    """A 200 is right for the whole object only; for a part of it, also the first, its bytes are not used."""
    s3.put(KEY, BODY)
    s3.configure(ranges="ignore")
    assert transfer.get(0, len(BODY)) == BODY
    for start, end in ((START, END), (0, END), (1, len(BODY))):
        with pytest.raises(StorageUnavailableError):
            transfer.get(start, end)
    assert transfer.store.get(KEY, byte_range=(START, END)).body == BODY[START:END]
    assert transfer.store.get(KEY, byte_range=(0, 1)).info.size == len(BODY)


def test_an_object_that_is_too_short(s3: FaultServer, transfer: Transfer):
    """An object that ends inside, or before, the range is damaged: said at once, with both sizes, and not retried."""
    s3.put(KEY, BODY[:1500])
    with pytest.raises(CorruptCheckpointError, match=rf"has 1500 bytes, expected {END} or more"):
        transfer.get(START, END)
    with pytest.raises(CorruptCheckpointError, match=f"ends before byte {END}"):
        transfer.get(2000, END)
    assert [r.status for r in s3.log] == [206, 416]


def test_a_missing_object(s3: FaultServer, transfer: Transfer):
    """404 costs one request and is told from all else; a missing bucket is not a missing object."""
    with pytest.raises(StorageError) as caught:
        transfer.get(0, 10)
    assert is_missing(caught.value)
    assert (caught.value.code, len(s3.log)) == ("NoSuchKey", 1)
    s3.on("GetObject", error(404, "NoSuchBucket"))
    with pytest.raises(StorageError) as caught:
        transfer.get(0, 10)
    assert not is_missing(caught.value)


@pytest.mark.parametrize("etag", ['"other"', "other", None])
def test_an_object_that_changes_between_two_ranges(plain_s3: FaultServer, plain_transfer: Transfer, etag: str | None):
    """Two ranges of one object with different ETags are bytes of two objects: an error, not a mixture."""
    plain_s3.put(KEY, BODY)
    plain_s3.on("GetObject", reply_headers({"ETag": etag}), nth=2)
    reads = Reads(plain_transfer, len(BODY), len(BODY) // 2)
    with pytest.raises(CorruptCheckpointError, match="changed while it was read") as caught:
        reads.run()
    assert caught.value.key == KEY


@pytest.mark.parametrize("form", ['"{}"', "{}"])
def test_a_range_of_another_object_than_was_asked_for(plain_s3: FaultServer, plain_transfer: Transfer, form: str):
    """A reply with another ETag than the known one is an error at once, for which no repetition would help; with the known
    one, in quotes or without, its bytes are taken.
    """
    plain_s3.put(KEY, BODY)
    known = plain_s3.objects()[KEY]["etag"]
    assert plain_transfer.get(START, END, etag=form.format(known)) == BODY[START:END]
    plain_s3.put(KEY, BODY[::-1])
    now = plain_s3.objects()[KEY]["etag"]
    with pytest.raises(CorruptCheckpointError, match="changed while it was read") as caught:
        plain_transfer.get(START, END, etag=form.format(known))
    assert f'(ETag "{now}", was {form.format(known)})' in str(caught.value)
    assert (caught.value.key, caught.value.operation) == (KEY, "GetObject")
    assert len(plain_s3.requests("GetObject")) == 2


def test_an_etag_may_lose_its_quotes(plain_s3: FaultServer, plain_transfer: Transfer):
    """A store that gives the ETag with quotes once and without them then has not changed the object."""
    plain_s3.put(KEY, BODY)
    bare = plain_s3.objects()[KEY]["etag"]
    plain_s3.on("GetObject", reply_headers({"ETag": bare}), nth=2)
    reads = Reads(plain_transfer, len(BODY), 100_000)
    assert sorted(reads.run()) == [0, 100_000, 200_000, 300_000]
    assert bytes(reads.buffer) == BODY


def test_many_ranges(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Each byte is asked for once, by ranges that are under way together, on no more connections than needed."""
    transfer = transfer_to(s3, max_concurrency=6)
    s3.put(KEY, BODY)
    reads = Reads(transfer, len(BODY), 10_000)
    assert sorted(reads.run()) == list(range(0, 400_000, 10_000))
    assert bytes(reads.buffer) == BODY
    log = s3.requests("GetObject")
    assert len(log) == 40
    assert sum(r.reply_bytes for r in log) == len(BODY)
    assert len({r.connection for r in log}) <= 6


def test_one_failure_ends_the_others(plain_s3: FaultServer, plain_transfer: Transfer):
    """A read that fails for good cancels the rest; the first error is raised, nothing is held, no byte lands later."""
    plain_s3.put(KEY, BODY)
    plain_s3.on("GetObject", error(403, "AccessDenied"), nth=5)
    plain_s3.on("GetObject", delay(0.3), since=6)
    reads = Reads(plain_transfer, len(BODY), 10_000, scratch=10_000)
    started = time.monotonic()
    with pytest.raises(StorageError) as caught:
        reads.run()
    assert caught.value.code == "AccessDenied"
    assert time.monotonic() - started < 10
    landed = bytes(reads.buffer)
    plain_s3.wait_for("GetObject", count=len(plain_s3.log))
    assert bytes(reads.buffer) == landed
    assert plain_transfer.plane.budget.held == 0


def test_a_caller_that_stops(plain_s3: FaultServer, plain_transfer: Transfer):
    """A caller that leaves the loop, or raises in it, has everything cancelled and the memory given back."""
    plain_s3.put(KEY, BODY)
    plain_s3.configure(latency_s=0.02)
    reads = Reads(plain_transfer, len(BODY), 5000, scratch=5000)
    running: Iterator[Any] = reads.downloader.run(reads.reads)
    next(running)
    assert plain_transfer.plane.budget.held > 0
    running.close()
    assert plain_transfer.plane.budget.held == 0

    reads = Reads(plain_transfer, len(BODY), 5000, scratch=5000)
    with pytest.raises(ZeroDivisionError):
        for read in reads.downloader.run(reads.reads):
            reads.downloader.again(read)
            raise ZeroDivisionError
    assert plain_transfer.plane.budget.held == 0


def test_a_read_that_is_asked_for_again(plain_s3: FaultServer, plain_transfer: Transfer):
    """A read whose bytes were damaged on the way comes once more, into the same memory, for no more of the budget."""
    plain_s3.put(KEY, BODY)
    plain_s3.on("GetObject", flip_reply(7), nth=1)
    reads = Reads(plain_transfer, 10_000, 10_000, scratch=10_000)
    tries = []
    for read in reads.downloader.run(reads.reads):
        tries.append((read.tries, bytes(reads.buffer) == BODY[:10_000]))
        if read.tries == 1:
            reads.downloader.again(read)
    assert tries == [(1, False), (2, True)]
    assert (plain_transfer.plane.budget.held, plain_transfer.plane.budget.peak) == (0, 10_000)


def test_the_budget_bounds_what_is_held(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Scratch memory of all reads together stays within memory_bytes, also while the caller is slow."""
    mib = 1 << 20
    transfer = transfer_to(plain_s3, memory_bytes=32 * mib)
    plain_s3.put(KEY, bytes(64))
    reads: list[RangeRead[int]] = [
        RangeRead(KEY, n, 1, scratch=10 * mib, pieces=lambda: [memoryview(bytearray(1))], about=n) for n in range(12)
    ]
    downloader: Downloader[int] = Downloader(transfer.plane, transfer.job)
    for _ in downloader.run(reads):
        assert transfer.plane.budget.held <= 30 * mib
    assert (transfer.plane.budget.peak, transfer.plane.budget.held) == (30 * mib, 0)


def test_one_read_larger_than_the_budget(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A read that alone needs more than memory_bytes is done by itself, rather than waited for for ever."""
    mib = 1 << 20
    transfer = transfer_to(plain_s3, memory_bytes=32 * mib)
    plain_s3.put(KEY, bytes(64))
    sizes = [8, 100, 8]
    reads: list[RangeRead[int]] = [
        RangeRead(KEY, n, 1, scratch=size * mib, pieces=lambda: [memoryview(bytearray(1))], about=n)
        for n, size in enumerate(sizes)
    ]
    downloader: Downloader[int] = Downloader(transfer.plane, transfer.job)
    assert [read.about for read in downloader.run(reads)] == [0, 1, 2]
    assert (transfer.plane.budget.peak, transfer.plane.budget.held) == (100 * mib, 0)


def test_the_deadline_of_a_load(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A load whose store never answers ends at its deadline, on either plane, however long a read may take."""
    transfer = transfer_to(plain_s3, deadline_s=0.8, read_timeout_s=30)
    plain_s3.put(KEY, BODY)
    plain_s3.on("GetObject", never_answer())
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"deadline of 0.8 s") as caught:
        Reads(transfer, len(BODY), 100_000).run()
    assert time.monotonic() - started < 10
    assert caught.value.rank == 3
    transfer = transfer_to(plain_s3, deadline_s=0.8, read_timeout_s=30)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"deadline of 0.8 s"):
        transfer.store.get(KEY)
    assert time.monotonic() - started < 10


def test_the_stall_limit_of_a_load(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A load in which no byte arrives for stall_limit_s is given up, whatever each request may still wait for."""
    transfer = transfer_to(plain_s3, stall_limit_s=0.6, read_timeout_s=30)
    plain_s3.put(KEY, BODY)
    plain_s3.on("GetObject", never_answer())
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="stall_limit_s"):
        Reads(transfer, len(BODY), 100_000).run()
    assert time.monotonic() - started < 15


def test_a_slow_caller_is_no_stall(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """The time in which nothing moves because the caller is busy does not count as a stall of the store."""
    transfer = transfer_to(plain_s3, stall_limit_s=1.5, max_concurrency=1)
    plain_s3.put(KEY, BODY)
    reads = Reads(transfer, 30_000, 10_000)
    seen = []
    for read in reads.downloader.run(reads.reads):
        seen.append(read.about)
        if len(seen) == 2:
            plain_s3.wait_for("GetObject", count=3)
            threading.Event().wait(1.6)  # what a planner's commit_tensor may take
            plain_s3.on("GetObject", delay(0.8))
            reads.downloader.again(read)
    assert seen == [0, 10_000, 20_000, 10_000]


def test_where_the_bytes_go(s3: FaultServer, transfer: Transfer):
    """One reply fills several targets and drops what lies between them; not a byte beside them is touched."""
    s3.put(KEY, BODY)
    memory = bytearray(b"\xee" * 1000)
    view = memoryview(memory)
    sink = Sink([view[100:101], 0, 5, view[300:900], view[50:50], 100_000, view[0:10]], transfer.job.progress)
    assert sink.length == 1 + 5 + 600 + 100_000 + 10
    wait(transfer.plane.get_range(transfer.job, KEY, 17, sink))
    expected = bytearray(b"\xee" * 1000)
    expected[100:101] = BODY[17:18]
    expected[300:900] = BODY[23:623]
    expected[0:10] = BODY[100_623:100_633]
    assert memory == expected


@pytest.mark.parametrize("start", [0, len(BODY) - 1])
def test_a_range_of_one_byte(s3: FaultServer, transfer: Transfer, start: int):
    """The first and the last byte of an object can be read alone."""
    s3.put(KEY, BODY)
    assert transfer.get(start, start + 1) == BODY[start : start + 1]


def test_errors_leave_the_connections_usable(s3: FaultServer, transfer: Transfer):
    """Error replies are read to their end: 20 refused reads and 20 good ones go over one connection."""
    s3.put(KEY, BODY)
    s3.on("GetObject", error(404, "NoSuchKey"), key="absent")
    for _ in range(20):
        with pytest.raises(StorageError):
            transfer.get(0, 10, "absent")
        assert transfer.get(5, 10) == BODY[5:10]
    assert len({r.connection for r in s3.log}) == 1


def test_a_connection_that_the_server_closed(s3: FaultServer, transfer: Transfer):
    """An idle connection that the server has closed costs at most one more try."""
    s3.put(KEY, BODY)
    assert transfer.get(5, 10) == BODY[5:10]
    s3.go_offline()
    s3.go_online()
    assert transfer.get(5, 10) == BODY[5:10]
    transfer.put(BODY, "other")
    assert transfer.job.counter.retries <= 2
