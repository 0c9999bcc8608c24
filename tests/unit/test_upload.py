"""Cutting a stream into parts, and the memory that it holds, with a store that is a dictionary."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_s3 import (
    AccessDeniedError,
    DeadlineExceededError,
    RetryPolicy,
    S3Config,
    StorageError,
    StorageUnavailableError,
)
from dcp_s3._runtime.loop_thread import loop_thread
from dcp_s3._transfer import upload as module
from dcp_s3._transfer.checksum import crc32c, header_value
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.job import Head, Job
from dcp_s3._transfer.limits.budget import ByteBudget
from dcp_s3._transfer.limits.retry import Counter, Deadline
from dcp_s3._transfer.upload import ObjectReceipt, ObjectUpload

MIB = 1 << 20


class Store:
    """Stands in for a DataPlane: keeps parts in a dictionary, and fails or waits where the test says."""

    def __init__(self, *, limit: int = 32 * MIB, fail_part: int | None = None) -> None:
        self.config = S3Config(max_concurrency=4, retry=RetryPolicy(max_attempts=2, initial_wait_s=0, max_wait_s=0))
        self.budget = ByteBudget(limit)
        self.fail_part = fail_part
        self.parts: dict[int, bytes] = {}
        self.body: bytes | None = None
        self.calls: list[str] = []
        self.open = asyncio.Event()
        self.open.set()

    async def put_object(self, job: Job, key: str, views: Sequence[memoryview], crc: int, token: str) -> Head:
        self.calls.append("put")
        self.body = b"".join(views)
        assert crc == crc32c(self.body)
        return Head(len(self.body), '"put"', token)

    async def create_upload(self, job: Job, key: str, token: str) -> tuple[str, bool]:
        self.calls.append("create")
        return "upload-7", True

    async def upload_part(
        self, job: Job, key: str, upload_id: str, part: int, views: Sequence[memoryview], crc: int, *, checksums: bool
    ) -> dict[str, Any]:
        await self.open.wait()
        if part == self.fail_part:
            raise AccessDeniedError("no").with_context(part=part)
        self.parts[part] = b"".join(views)
        assert crc == crc32c(self.parts[part])
        return {"PartNumber": part, "ETag": f'"{part}"'}

    async def complete_upload(self, job: Job, key: str, upload_id: str, entries: list[dict[str, Any]]) -> None:
        self.calls.append("complete")
        assert [entry["PartNumber"] for entry in entries] == list(range(1, len(entries) + 1))
        assert [entry["ETag"] for entry in entries] == [f'"{n}"' for n in range(1, len(entries) + 1)]
        self.body = b"".join(self.parts[entry["PartNumber"]] for entry in entries)

    async def head_object(self, job: Job, key: str) -> Head | None:
        return None if self.body is None else Head(len(self.body), '"of-head"', "token")

    async def abort_upload(self, job: Job, key: str, upload_id: str) -> None:
        self.calls.append("abort")

    def hold(self, *, open_again: bool = False) -> None:
        """Have parts wait, or go on."""
        loop_thread().loop.call_soon_threadsafe(self.open.set if open_again else self.open.clear)


def upload_to(store: Store, *, part_bytes: int, deadline_s: float = 20, **options: Any) -> ObjectUpload:
    job = Job("b", Deadline(deadline_s), Counter(), Progress(), 0)
    plane: Any = store
    return ObjectUpload(plane, job, "k", "token", part_bytes=part_bytes, **options)


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=700), max_size=12), st.integers(1, 500), st.booleans())
def test_any_views_in_any_parts(views: list[bytes], part_bytes: int, copied: bool):
    """Views of any length become parts of one length, all but the last; CRCs are those of views and parts."""
    store, body = Store(), b"".join(views)
    upload = upload_to(store, part_bytes=part_bytes)
    for view in views:
        if copied:
            upload.reserve(len(view))
        assert upload.append(memoryview(view), copied=copied) == crc32c(view)
    receipt = upload.finish()
    assert store.body == body
    cut = [body[i : i + part_bytes] for i in range(0, len(body), part_bytes)]
    assert receipt == ObjectReceipt(
        "k",
        len(body),
        '"of-head"',
        part_bytes,
        tuple(crc32c(part) for part in cut or [b""]),
    )
    assert store.parts == ({} if len(body) < part_bytes else dict(enumerate(cut, 1)))
    assert store.budget.held == 0


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 8),
    st.booleans(),
)
def test_whatever_fails_gives_its_memory_back(views: list[tuple[int, bool]], fail_part: int, stop_early: bool):
    """After an upload that failed in any part, or was stopped at any point, not one reserved byte is held."""
    store = Store(fail_part=fail_part)
    upload = upload_to(store, part_bytes=300)
    failed: int | None = fail_part
    try:
        for size, copied in views:
            if copied:
                upload.reserve(size + 10)
                upload.give_back(10)
            upload.append(memoryview(bytes(size)), copied=copied)
        if stop_early:
            upload.reserve(1000)
            upload.abort()
        else:
            upload.finish()
    except AccessDeniedError as error:
        failed = error.part
        upload.abort()
    assert (store.budget.held, failed) == (0, fail_part)
    assert store.calls.count("abort") <= 1
    if sum(size for size, _ in views) // 300 >= fail_part:
        assert (store.body, "complete" in store.calls) == (None, False)


def test_reserving_waits_for_parts_that_are_on_their_way():
    """A full budget is waited for as long as parts will give some of it back, and not passed."""
    store = Store(limit=1000)
    upload = upload_to(store, part_bytes=400)
    store.hold()
    upload.reserve(900)
    upload.append(memoryview(bytes(900)), copied=True)  # two parts, and 100 bytes of the next one
    reserved = threading.Event()
    waiting = threading.Thread(target=lambda: (upload.reserve(600), reserved.set()))
    waiting.start()
    assert not reserved.wait(0.3)
    assert store.budget.held == 900
    store.hold(open_again=True)
    assert reserved.wait(5)
    waiting.join()
    upload.append(memoryview(bytes(600)), copied=True)
    upload.finish()
    assert (store.budget.peak <= 1000, store.budget.held) == (True, 0)


def test_reserving_does_not_wait_for_itself():
    """When all that is held lies in the open part, waiting would be for ever: the budget is passed."""
    store = Store(limit=1000)
    upload = upload_to(store, part_bytes=5000)
    upload.reserve(900)
    upload.append(memoryview(bytes(900)), copied=True)
    upload.reserve(900)
    upload.append(memoryview(bytes(900)), copied=True)
    assert store.budget.held == 1800
    assert upload.finish().size == 1800
    assert store.budget.held == 0


def test_memory_is_let_go_with_its_part():
    """A view is not kept alive beyond the acknowledgement of its part: staged tensors can be freed early."""
    store = Store()
    upload = upload_to(store, part_bytes=1000)

    class Owner(bytearray):
        """Memory that can be referred to weakly."""

    owner = Owner(1000)
    alive = weakref.ref(owner)
    upload.append(memoryview(owner))
    upload.append(memoryview(b"rest"))
    del owner
    upload._drain()
    gc.collect()
    assert alive() is None
    assert upload.finish().size == 1004


def test_parts_wait_for_room():
    """A producer faster than the store is held back after max_concurrency + 4 parts."""
    store = Store()
    store.hold()
    upload = upload_to(store, part_bytes=10)
    through = threading.Event()
    producer = threading.Thread(target=lambda: (upload.append(memoryview(bytes(1000))), through.set()))
    producer.start()
    assert not through.wait(0.3)
    assert upload.size <= 10 * (4 + 4 + 1)
    store.hold(open_again=True)
    assert through.wait(10)
    producer.join()
    assert upload.finish().size == 1000


def test_a_failure_stops_the_producer():
    """A part that failed for good is raised by the next call, not only at the end."""
    store = Store(fail_part=1)
    upload = upload_to(store, part_bytes=10)
    with pytest.raises(AccessDeniedError):
        for _ in range(1000):
            upload.append(memoryview(bytes(10)))
    assert len(store.parts) < 100
    with pytest.raises(AccessDeniedError):
        upload.finish()
    assert store.calls.count("abort") == 1


def test_an_object_takes_no_more_than_5_tib():
    """Parts of 1 GiB would do for more than S3 allows: what comes after goes into a further object."""
    assert upload_to(Store(), part_bytes=1 << 30).capacity == 5 << 40
    assert upload_to(Store(), part_bytes=8 << 20).capacity == 10_000 * (8 << 20)


def test_more_parts_than_an_object_may_have():
    """The limit is per object and is met before a byte too many is taken."""
    store = Store()
    upload = upload_to(store, part_bytes=10, max_parts=3)
    upload.append(memoryview(bytes(25)))
    with pytest.raises(StorageError, match="more than 3 parts of 10 bytes"):
        upload.append(memoryview(bytes(6)))
    upload.append(memoryview(bytes(5)))
    assert upload.finish().size == 30


def test_the_stall_limit_that_nobody_set():
    """An upload is given up when nothing was acknowledged for 120 s, and not before."""
    store = Store()
    assert store.config.stall_limit_s == 120.0
    store.hold()
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(10)))
    end = time.monotonic() + 10
    while store.calls != ["create"] and time.monotonic() < end:
        time.sleep(0.001)
    upload._job.progress.last = time.monotonic() - 100
    upload._check()
    upload._job.progress.last = time.monotonic() - 120.1
    with pytest.raises(DeadlineExceededError, match=r"no byte has moved for 12\d s \(stall_limit_s\)") as stalled:
        upload.finish()
    assert (stalled.value.key, stalled.value.operation) == ("k", "UploadPart")
    assert store.calls == ["create", "abort"]


def test_a_head_that_is_denied_behind_complete():
    """It is the failure if Complete was answered with success; else Complete's own is, and a denied HEAD says nothing."""
    store = Store()

    async def denied(job: Job, key: str) -> Head:
        raise AccessDeniedError("HEAD is denied")

    store.head_object = denied  # type: ignore[method-assign]
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(20)))
    with pytest.raises(AccessDeniedError, match="HEAD is denied"):
        upload.finish()
    assert store.calls.count("complete") == 1

    async def refuse(*_: object) -> None:
        raise StorageError("Complete is refused")

    store.complete_upload = refuse  # type: ignore[method-assign]
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(20)))
    with pytest.raises(StorageError, match="Complete is refused"):
        upload.finish()


def test_completes_that_follow_each_other(monkeypatch: pytest.MonkeyPatch):
    """Behind a Complete that failed there is a wait, as behind any request, and the log line of the save counts it."""
    monkeypatch.setattr(module, "backoff_s", lambda policy, attempt: 0.1 * attempt)
    store = Store()
    good, sent = store.complete_upload, []

    async def complete(job: Job, key: str, upload_id: str, entries: list[dict[str, Any]]) -> None:
        sent.append(time.monotonic())
        if len(sent) == 1:
            raise StorageUnavailableError("come back later")
        await good(job, key, upload_id, entries)

    store.complete_upload = complete  # type: ignore[method-assign]
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(20)))
    upload.finish()
    assert sent[1] - sent[0] >= 0.09
    assert upload._job.counter.retries == 1


@pytest.mark.parametrize(
    "seen, age_s, ours",
    [
        ("of parts", None, True),
        ("of all", None, True),
        ("other", 0.0, False),
        (None, 0.0, True),
        (None, 3600.0, False),
        (None, None, False),
    ],
)
def test_what_proves_an_object_without_a_token(seen: str | None, age_s: float | None, *, ours: bool):
    """Behind a Complete that nobody heard of: the store's checksum in either form; where it has none, the object's age."""
    body = bytes(range(25))
    composite = crc32c(b"".join(crc32c(body[i : i + 10]).to_bytes(4, "big") for i in (0, 10, 20)))
    checksums = {"of parts": header_value(composite) + "-3", "of all": header_value(crc32c(body)), "other": "AAAAAA=="}
    store = Store()

    async def unheard(*_: object) -> None:
        raise StorageUnavailableError("the answer was lost")

    async def head(job: Job, key: str, *, checksum: bool = False) -> Head:
        return Head(25, '"opaque"', None, age_s, checksums[seen] if checksum and seen is not None else None)

    store.complete_upload, store.head_object = unheard, head  # type: ignore[method-assign]
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(body))
    if ours:
        assert upload.finish().etag == '"opaque"'
    else:
        with pytest.raises(StorageError, match="neither token, ETag, checksum nor time"):
            upload.finish()
