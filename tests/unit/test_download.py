"""Many reads at once, with a store that is a dictionary: order, memory, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import time
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_s3 import CorruptCheckpointError, DeadlineExceededError, S3Config, StorageError
from dcp_s3._runtime.loop_thread import loop_thread
from dcp_s3._transfer import download as module
from dcp_s3._transfer.download import Downloader, RangeRead
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.sink import Sink
from dcp_s3._transfer.job import Job
from dcp_s3._transfer.limits.budget import ByteBudget
from dcp_s3._transfer.limits.retry import Counter, Deadline
from dcp_s3._transfer.s3.data_plane import check_same

BODY = bytes(n * 31 % 251 for n in range(5000))


class Store:
    """Stands in for a DataPlane: gives bytes of one body, and fails or waits where the test says."""

    def __init__(self, *, limit: int = 10_000, concurrency: int = 4, fail_at: int | None = None) -> None:
        self.config = S3Config(max_concurrency=concurrency, stall_limit_s=0.3)
        self.budget = ByteBudget(limit)
        self.fail_at = fail_at
        self.begun: list[int] = []
        self.running = self.most = 0
        self.etag = '"1"'

    async def get_range(
        self, job: Job, key: str, start: int, sink: Sink, *, etag: str | None = None, modified: Any = None
    ) -> str:
        self.begun.append(start)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.001 * (start % 7))
            if start == self.fail_at:
                raise StorageError("no").with_context(key=key)
            if start == -1:
                await asyncio.sleep(60)
            sink.rewind()
            sink.feed(memoryview(BODY)[start : start + sink.length])
        finally:
            self.running -= 1
        return self.etag


def downloader(store: Store, *, deadline_s: float = 20) -> Downloader[int]:
    plane: Any = store
    return Downloader(plane, Job("b", Deadline(deadline_s), Counter(), Progress(), 1))


def read(start: int, length: int, into: bytearray, *, scratch: int = 0) -> RangeRead[int]:
    return RangeRead("k", start, length, scratch=scratch, pieces=lambda: [memoryview(into)], about=start)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 900), st.integers(0, 1500)), max_size=25),
    st.integers(1, 6),
    st.integers(1000, 4000),
)
def test_any_reads(plan: list[tuple[int, int, int]], concurrency: int, limit: int):
    """Every read is yielded once, with its bytes; they begin in order; memory and concurrency stay within bounds."""
    store = Store(limit=limit, concurrency=concurrency)
    targets = [bytearray(length) for _, length, _ in plan]
    reads = [
        read(start, length, target, scratch=scratch)
        for (start, length, scratch), target in zip(plan, targets, strict=True)
    ]
    seen = []
    for done in downloader(store).run(reads):
        seen.append(done)
        assert store.budget.held <= max(limit, 1500)
    assert len(seen) == len(set(seen)) == len(reads)
    assert store.begun == [start for start, _, _ in plan]
    assert store.most <= 2 * concurrency
    assert store.budget.held == 0
    for (start, length, _), target in zip(plan, targets, strict=True):
        assert bytes(target) == BODY[start : start + length]


def test_memory_is_made_when_it_is_needed():
    """The destination of a read is allocated when its turn comes, not when the plan is made."""
    store = Store(limit=1000)
    made: list[int] = []

    def pieces(number: int) -> list[memoryview]:
        made.append(number)
        return [memoryview(bytearray(10))]

    reads: list[RangeRead[int]] = [
        RangeRead("k", n, 10, scratch=400, pieces=lambda n=n: pieces(n), about=n) for n in range(10)
    ]
    running = downloader(store).run(reads)
    first = next(running)
    assert len(made) == 2
    assert first.pieces
    next(running)
    assert not first.pieces
    running.close()
    assert store.budget.held == 0


@pytest.mark.parametrize("fail_at", [0, 10, 200, 490])
def test_a_failure(fail_at: int):
    """The first failure is raised; all memory is given back; nothing runs any more."""
    store = Store(fail_at=fail_at)
    reads = [read(start, 10, bytearray(10), scratch=100) for start in range(0, 500, 10)]
    with pytest.raises(StorageError, match="no"):
        list(downloader(store).run(reads))
    assert (store.budget.held, store.running) == (0, 0)


@pytest.mark.parametrize("error", [MemoryError(), OSError("mmap")])
def test_memory_that_cannot_be_had(error: Exception):
    """The budget gets back what was reserved for it, and the other reads end."""
    store = Store()

    def refuse() -> list[memoryview]:
        raise error

    reads = [read(3, 50, bytearray(50), scratch=50), RangeRead("k", 0, 99, scratch=99, pieces=refuse, about=0)]
    with pytest.raises(type(error)):
        list(downloader(store).run(reads))
    assert (store.budget.held, store.running) == (0, 0)


def test_again():
    """A read that is asked for again is received into the same memory, and counts its tries."""
    store = Store()
    target = bytearray(10)
    loading = downloader(store)
    tries = []
    for done in loading.run([read(5, 10, target, scratch=50)]):
        tries.append((done.tries, bytes(target)))
        if done.tries < 3:
            target[:] = bytes(10)
            loading.again(done)
    assert tries == [(n, BODY[5:15]) for n in (1, 2, 3)]
    assert (store.budget.held, store.budget.peak) == (0, 50)


def test_a_caller_that_gives_up_on_a_read():
    """Also the memory of what it has just asked for again goes back, once."""
    store = Store()
    loading = downloader(store)

    def give_up() -> None:
        for done in loading.run([read(5, 10, bytearray(10), scratch=50), read(6, 10, bytearray(10), scratch=60)]):
            loading.again(done)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    gc.collect()
    assert (store.budget.held, store.running) == (0, 0)


def test_the_bounds_of_time():
    """A read that never ends is given up at the stall limit or the deadline, whichever is first."""
    for deadline_s, text in ((20.0, "stall_limit_s"), (0.1, "deadline of 0.1 s")):
        store = Store()
        with pytest.raises(DeadlineExceededError, match=text):
            list(downloader(store, deadline_s=deadline_s).run([read(-1, 10, bytearray(10), scratch=7)]))
        assert (store.budget.held, store.running) == (0, 0)


def test_the_stall_limit_that_nobody_set():
    """A load is given up when no byte has arrived for 120 s, and not before."""
    store = Store()
    store.config = S3Config()
    assert store.config.stall_limit_s == 120.0
    loading = downloader(store)
    loading._job.progress.last = time.monotonic() - 100
    loading._check()
    loading._job.progress.last = time.monotonic() - 120.1
    with pytest.raises(DeadlineExceededError, match=r"no byte has arrived for 12\d s \(stall_limit_s\)") as stalled:
        list(loading.run([read(-1, 10, bytearray(10), scratch=7)]))
    assert (stalled.value.operation, store.budget.held, store.running) == ("GetObject", 0, 0)


def test_two_objects_under_one_key():
    """Ranges of one key with different ETags are an error, also when they set out together; quotes do not count."""
    etags = iter(['"1"', "1", '"2"'])

    class Changing(Store):
        async def get_range(self, *args: Any, **options: Any) -> str:
            await super().get_range(*args, **options)
            return next(etags)

    store = Changing(concurrency=8)
    with pytest.raises(CorruptCheckpointError, match=r'ETag "2", was .?1') as caught:
        list(downloader(store).run([read(n, 10, bytearray(10)) for n in (0, 7, 14)]))
    assert (caught.value.key, caught.value.bucket, caught.value.rank) == ("k", "b", 1)
    check_same('"a"', "a")


def test_later_ranges_name_what_was_read():
    """A range that sets out when its object's ETag is known asks for that very object; those of another one do not."""
    asked: list[tuple[str, str | None]] = []

    class Noting(Store):
        async def get_range(self, job: Job, key: str, start: int, sink: Sink, **options: Any) -> str:
            asked.append((key, options["etag"]))
            await super().get_range(job, key, start, sink, **options)
            return f'"of {key}"'

    store = Noting(concurrency=1)
    keys = ["a", "a", "a", "b", "b", "b"]
    reads: list[RangeRead[int]] = [
        RangeRead(key, n, 10, scratch=0, pieces=lambda: [memoryview(bytearray(10))], about=n)
        for n, key in enumerate(keys)
    ]
    assert len(list(downloader(store).run(reads))) == 6
    assert [key for key, _ in asked] == keys
    assert asked[0] == ("a", None)
    assert asked[2] == ("a", '"of a"')
    assert asked[5] == ("b", '"of b"')
    assert set(asked) <= {(key, etag) for key in "ab" for etag in (None, f'"of {key}"')}


def test_when_the_objects_were_modified():
    """The store's answers are kept by key, for whoever compares them with the record's time."""
    when = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

    class Dated(Store):
        async def get_range(self, job: Job, key: str, start: int, sink: Sink, **options: Any) -> str:
            options["modified"][key] = when
            return await super().get_range(job, key, start, sink, **options)

    loading = downloader(Dated())
    assert len(list(loading.run([read(5, 10, bytearray(10))]))) == 1
    assert loading.modified == {"k": when}


def test_memory_is_let_go_with_its_read():
    """Whoever keeps the context of a request (a connection does) keeps none of the bytes that it brought."""
    sinks: list[Sink] = []

    class Keeping(Store):
        async def get_range(self, job: Job, key: str, start: int, sink: Sink, **options: Any) -> str:
            sinks.append(sink)
            return await super().get_range(job, key, start, sink, **options)

    class Owner(bytearray):
        """Memory that can be referred to weakly."""

    owner = Owner(10)
    alive = weakref.ref(owner)
    reads = [read(5, 10, owner)]
    (done,) = downloader(Keeping()).run(reads)
    assert bytes(owner) == BODY[5:15]
    del owner, done, reads
    gc.collect()
    assert len(sinks) == 1
    assert alive() is None


def test_the_time_that_the_caller_takes_is_no_stall():
    """A planner that works on a read for longer than the stall limit is not taken for a store that is stuck."""
    store = Store(concurrency=1)
    loading = downloader(store)
    reads = [read(start, 10, bytearray(10), scratch=6000) for start in (0, 7)]  # one after the other
    seen = 0
    for _ in loading.run(reads):
        seen += 1
        loading._job.progress.last = time.monotonic() - 100
    assert seen == 2
    assert time.monotonic() - loading._job.progress.last < 50


def test_a_read_that_takes_long():
    """It is waited for, and nothing else is yielded meanwhile."""

    class Slow(Store):
        async def get_range(self, *args: Any, **options: Any) -> str:
            await asyncio.sleep(0.7)
            return await super().get_range(*args, **options)

    store = Slow()
    store.config = S3Config()
    only = read(5, 10, bytearray(10))
    assert list(downloader(store).run([only])) == [only]


def test_memory_that_others_hold():
    """A load goes on beside what others have taken: one read at a time of those that need memory, all of those that do not."""
    store = Store(limit=1000)
    store.budget.acquire_over("others", 1500)
    held = [store.budget.held for _ in downloader(store).run(read(7, 10, bytearray(10), scratch=600) for _ in range(3))]
    assert held == [2100] * 3
    assert store.most == 1
    assert len(list(downloader(store).run([read(6, 10, bytearray(10)) for _ in range(3)]))) == 3
    assert store.most == 3
    assert store.budget.held == 1500


def test_what_was_to_be_read_again_when_it_was_closed():
    """It is forgotten: the next run has its own reads alone."""
    loading = downloader(Store())
    running = loading.run([read(0, 10, bytearray(10))])
    loading.again(next(running))
    running.close()
    other = read(7, 10, bytearray(10))
    assert list(loading.run([other])) == [other]


def test_a_request_that_does_not_end_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It is not waited for longer than close() may take, that is told, and what it holds comes back when it ends."""
    monkeypatch.setattr(module, "_CLOSE_S", 0.05)
    store = Store()
    gates = {0: asyncio.Event(), 10: asyncio.Event()}

    async def stubborn(job: Job, key: str, start: int, *_: Any, **__: Any) -> str:
        store.running += 1
        gate = gates[start]
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        return '"1"'

    reads = [read(0, 10, bytearray(10), scratch=100), read(10, 10, bytearray(10), scratch=30)]
    loading = downloader(store)
    assert len(list(loading.run([read(0, 10, bytearray(10))]))) == 1
    assert not caplog.records
    store.get_range = stubborn  # type: ignore[method-assign]
    loading._fits(reads[0])
    loading._start(reads[0])
    loading._fits(reads[1])
    loading._start(reads[1])
    end = time.monotonic() + 10
    while store.running < 2:
        assert time.monotonic() < end
        time.sleep(0.001)
    loading.close()
    assert "2 requests of a load that has ended do not end" in caplog.text
    assert store.budget.held == 130
    for start, left in ((0, reads[1:]), (10, [])):
        loop_thread().loop.call_soon_threadsafe(gates[start].set)
        end = time.monotonic() + 10
        while len(loading._live) > len(left):
            assert time.monotonic() < end
            time.sleep(0.001)
        assert list(loading._live) == left
        assert store.budget.held == sum(other.scratch for other in left)
    assert (reads[0].pieces, reads[1].pieces) == ((), ())


def test_a_load_that_waits_is_idle():
    """The thread that waits for the store takes next to no CPU time."""
    store = Store()

    async def slow(*_: Any, **__: Any) -> str:
        await asyncio.sleep(0.6)
        return '"1"'

    store.get_range = slow  # type: ignore[method-assign]
    store.config = S3Config(stall_limit_s=30)
    began = time.thread_time()
    assert len(list(downloader(store).run([read(0, 10, bytearray(10))]))) == 1
    assert time.thread_time() - began < 0.2
