"""What an upload waits for, and how a wait ends: with room, with a failure, or at the deadline."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest

from dcp_s3 import AccessDeniedError, DeadlineExceededError, StorageError
from dcp_s3._transfer import upload as module
from dcp_s3._transfer.job import Head, Job
from dcp_s3._transfer.limits.retry import Deadline
from dcp_s3._transfer.upload import ObjectUpload
from tests.unit.test_upload import Store, upload_to


def failure_of(call: Callable[[], object]) -> BaseException | None:
    """What a call raises; a call that does not end within 10 s fails the test, and is left behind."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert raised, "it does not end"
    return raised[0]


def end_in(upload: ObjectUpload, seconds: float) -> None:
    """Have the deadline come so soon, now that everything until here has been done in peace."""
    upload._job = dataclasses.replace(upload._job, deadline=Deadline(seconds))


def failed_upload() -> tuple[Store, ObjectUpload]:
    """An upload whose first part has failed for good, and which knows it."""
    store = Store(fail_part=1)
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(10)))
    end = time.monotonic() + 10
    while upload._works:
        assert time.monotonic() < end
        time.sleep(0.001)
    return store, upload


def test_the_budget_that_others_hold():
    """It is waited for, not passed, while nothing of the upload's own is held; the wait ends at the deadline."""
    store = Store(limit=1000)
    store.budget.acquire_over("another upload", 1000)
    upload = upload_to(store, part_bytes=10, deadline_s=0.2)
    assert isinstance(failure_of(lambda: upload.reserve(1)), DeadlineExceededError)
    assert store.budget.peak == 1000


def test_the_room_that_no_part_makes():
    """A producer that waits for room behind parts that never end is let go at the deadline."""
    store = Store()
    store.hold()
    upload = upload_to(store, part_bytes=10, deadline_s=0.2)
    failure = failure_of(lambda: upload.append(memoryview(bytes(1000))))
    assert isinstance(failure, DeadlineExceededError)
    assert (failure.key, failure.operation) == ("k", "UploadPart")
    upload.abort()


@pytest.mark.parametrize("what, size", [("put_object", 5), ("complete_upload", 20)])
def test_a_last_request_that_does_not_end(monkeypatch: pytest.MonkeyPatch, what: str, size: int):
    """It is given up at the deadline as a part is, although nothing else is left to do."""
    monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    store = Store()

    async def never(*_: object) -> None:
        await asyncio.sleep(60)

    setattr(store, what, never)
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(size)))
    end_in(upload, 0.3)
    assert isinstance(failure_of(upload.finish), DeadlineExceededError)
    assert upload._works == {}


@pytest.mark.parametrize("what", ["budget", "room", "parts", "completion"])
def test_a_wait_is_idle(what: str):
    """Whatever is waited for, the waiting thread takes next to no CPU time: the training goes on beside it."""
    store = Store(limit=1000)
    completing = asyncio.Event()
    if what == "completion":

        async def complete(*_: object) -> None:
            await completing.wait()
            store.body = bytes(20)

        store.complete_upload = complete  # type: ignore[method-assign]
    else:
        store.hold()
    upload = upload_to(store, part_bytes=10)
    taken: list[float] = []

    def work() -> None:
        began = time.thread_time()
        if what == "budget":
            upload.reserve(1000)
            upload.append(memoryview(bytes(1000)[:10]), copied=True)
            upload.reserve(20)
        else:
            upload.append(memoryview(bytes(1000 if what == "room" else 20)))
            upload.finish()
        taken.append(time.thread_time() - began)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    if what == "completion":
        module.loop_thread().loop.call_soon_threadsafe(completing.set)
    elif what == "budget":
        upload.give_back(500)
    store.hold(open_again=True)
    thread.join(10)
    assert taken
    assert taken[0] < 0.2
    upload.abort()


def test_the_call_behind_a_failure():
    """Whatever it is, it raises what the part failed of, and nothing more is taken or sent."""
    store, upload = failed_upload()
    with pytest.raises(AccessDeniedError):
        upload.reserve(5)
    with pytest.raises(AccessDeniedError):
        upload.append(memoryview(bytes(10)))
    assert (upload._works, store.parts) == ({}, {})
    upload.abort()
    assert store.budget.held == 0


@pytest.mark.parametrize("fails", [True, False])
def test_what_ends_just_behind_the_deadline(monkeypatch: pytest.MonkeyPatch, *, fails: bool):
    """The requests under way end with the deadline: what they fail of says more than the clock, if they do."""
    assert module._SETTLE_S == 0.5
    monkeypatch.setattr(module, "_SETTLE_S", 60.0)
    store = Store(fail_part=2 if fails else None)
    store.hold()
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(40)))
    opening = threading.Timer(0.4, store.hold, kwargs={"open_again": True})
    opening.start()
    end_in(upload, 0.01)
    failure = failure_of(upload.finish)
    assert isinstance(failure, AccessDeniedError if fails else DeadlineExceededError)
    assert fails or sorted(store.parts) == [1, 2, 3, 4]
    opening.join()


def test_what_does_not_end_behind_the_deadline():
    """It is waited for half a second, and idly."""
    store = Store()
    store.hold()
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(10)))
    end_in(upload, 0.01)
    while not upload._job.deadline.expired:
        time.sleep(0.001)
    began, cpu = time.monotonic(), time.thread_time()
    with pytest.raises(DeadlineExceededError, match="uploading k"):
        upload._check()
    assert time.monotonic() - began >= 0.5
    assert time.thread_time() - cpu < 0.2
    upload.abort()


def test_a_part_that_is_missing():
    """Complete is not sent without every part: the store would join what it is told, and call that the object."""
    store = Store()
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(30)))
    upload._drain()
    del upload._entries[2]
    with pytest.raises(StorageError, match="parts are missing before Complete: have 2 of 3"):
        upload.finish()
    assert store.calls == ["create", "abort"]


def test_a_rest_behind_each_part():
    """A save that must not take more than its share of a core is held back where it has just spent some."""

    class Throttle:
        rests = 0

        def rest(self) -> None:
            self.rests += 1

    throttle = Throttle()
    upload = upload_to(Store(), part_bytes=10, throttle=throttle)
    upload.append(memoryview(bytes(35)))
    assert throttle.rests == 3
    upload.finish()
    assert throttle.rests == 4


def test_copies_are_given_back_by_whoever_stops():
    """When abort() returns nothing is held, although the loop thread may not have come to the end of the parts yet."""
    store = Store()
    store.hold()
    upload = upload_to(store, part_bytes=10)
    upload._ended = lambda work: None  # type: ignore[method-assign]
    upload.reserve(25)
    upload.append(memoryview(bytes(25)), copied=True)
    upload.abort()
    assert store.budget.held == 0


@pytest.mark.parametrize("what", ["create_upload", "abort_upload"])
def test_an_abort_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str):
    """It is given up after its time, and then nothing of the upload runs any more."""
    monkeypatch.setattr(module, "_LATE_ABORT_S", 0.2)
    store = Store()

    async def never(*_: object) -> None:
        await asyncio.sleep(60)

    setattr(store, what, never)
    upload = upload_to(store, part_bytes=10)
    upload.append(memoryview(bytes(10)))
    end_in(upload, 0.01)
    end = time.monotonic() + 10
    while not upload._created.started or not upload._job.deadline.expired:
        assert time.monotonic() < end
        time.sleep(0.001)
    upload.abort()
    assert "could not abort the upload of k" in caplog.text
    assert upload._created.wait(10)
    assert upload._aborting.wait(10)
    assert upload._works == {}


def test_an_upload_that_never_began(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Interrupted just before its Create, there is nothing to abort at the store, and nothing to warn of."""
    store = Store()
    upload = upload_to(store, part_bytes=10)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(upload, "_begin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        upload.append(memoryview(bytes(10)))
    upload.abort()
    assert upload._created.done()
    assert (store.calls, caplog.records) == ([], [])


def test_an_error_that_is_kept():
    """It keeps none of the memory that was to be sent: a staged state dict is not held by the report of its failure."""
    store = Store()

    class Owner(bytearray):
        """Memory that can be referred to weakly."""

    async def refuse(job: Job, key: str, views: Sequence[memoryview], crc: int, token: str) -> Head:
        raise AccessDeniedError("no")

    store.put_object = refuse  # type: ignore[method-assign]
    upload = upload_to(store, part_bytes=1000)
    owner = Owner(100)
    alive = weakref.ref(owner)
    upload.append(memoryview(owner))
    del owner
    with pytest.raises(AccessDeniedError) as caught:
        upload.finish()
    gc.collect()
    assert alive() is None
    assert caught.value.__traceback__ is not None
