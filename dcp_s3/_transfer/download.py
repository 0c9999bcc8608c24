"""Many ranged reads at once: submitted and taken back on the caller's thread, received on the loop thread."""

from __future__ import annotations

import collections
import functools
import queue
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from dcp_s3._transfer.dataplane import check_same
from dcp_s3._transfer.portal import Work, portal
from dcp_s3._transfer.receive import Sink
from dcp_s3.errors import CorruptCheckpointError, DeadlineExceededError

if TYPE_CHECKING:
    import concurrent.futures
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dcp_s3._transfer.dataplane import DataPlane, Job

T = TypeVar("T")


class RangeRead(Generic[T]):
    """One ranged GET.

    Args:
        key: Object key.
        start: First byte of the object.
        length: Bytes asked for.
        scratch: Bytes of memory that :attr:`pieces` will allocate, taken from the process's byte budget.
        pieces: Makes the destination when the read's turn comes: writable views, and counts of bytes to drop.
        about: Whatever the caller wants to know it by.
    """

    __slots__ = ("about", "key", "length", "make_pieces", "pieces", "scratch", "start", "tries")

    def __init__(
        self,
        key: str,
        start: int,
        length: int,
        *,
        scratch: int,
        pieces: Callable[[], Sequence[memoryview | int]],
        about: T,
    ) -> None:
        self.key = key
        self.start = start
        self.length = length
        self.scratch = scratch
        self.make_pieces = pieces
        self.pieces: Sequence[memoryview | int] = ()
        self.about = about
        self.tries = 0


class Downloader(Generic[T]):
    """Runs reads in their order, several at a time, and yields them as they end.

    Args:
        plane: The process's data plane.
        job: What the requests belong to.

    Attributes:
        modified: When each object was last modified, by its key, as far as the store has said.
    """

    def __init__(self, plane: DataPlane, job: Job) -> None:
        self.modified: dict[str, dt.datetime] = {}
        self._plane = plane
        self._job = job
        self._etags: dict[str, str] = {}
        self._ended: queue.SimpleQueue[tuple[RangeRead[T], Work[Any]]] = queue.SimpleQueue()
        self._running: set[Work[Any]] = set()
        self._again: collections.deque[RangeRead[T]] = collections.deque()

    def run(self, reads: Iterable[RangeRead[T]]) -> Iterator[RangeRead[T]]:
        """Yield each read when its bytes are where they belong; its scratch is free again when the next is asked for.

        Raises:
            DcpS3Error: A read failed for good, or the deadline passed; the others have been cancelled.
        """
        waiting = iter(reads)
        upcoming: RangeRead[T] | None = next(waiting, None)
        try:
            while upcoming is not None or self._again or self._running:
                while len(self._running) < 2 * self._plane.config.max_concurrency:
                    if self._again:
                        self._start(self._again.popleft())
                    elif upcoming is not None and self._fits(upcoming):
                        self._start(upcoming)
                        upcoming = next(waiting, None)
                    else:
                        break
                done = self._next()
                if done is None:
                    continue
                try:
                    yield done
                finally:
                    if done not in self._again:
                        self._plane.budget.release(done.scratch)
                        done.pieces = ()
                self._job.progress.touch()  # the time that the caller took is no stall
        finally:
            self._cancel()

    def again(self, read: RangeRead[T]) -> None:
        """Have a read that was just yielded received once more, into the same place."""
        self._again.append(read)

    def _fits(self, read: RangeRead[T]) -> bool:
        if not read.scratch or self._plane.budget.try_acquire(read.scratch):
            return True
        if self._running or self._again:
            return False
        self._plane.budget.acquire_over(read.scratch)  # alone and larger than what others left: it must go on
        return True

    def _start(self, read: RangeRead[T]) -> None:
        try:
            if not read.tries:
                read.pieces = read.make_pieces()
            read.tries += 1
            work = portal().submit(self._receive(read))
        except BaseException:
            self._plane.budget.release(read.scratch)
            raise
        self._running.add(work)

        # the future is handed to its callback: one that named it would be a cycle, and keep the bytes until a collection
        work.add_done_callback(functools.partial(self._note, read))

    def _note(self, read: RangeRead[T], work: concurrent.futures.Future[Any]) -> None:
        self._ended.put((read, cast("Work[Any]", work)))

    async def _receive(self, read: RangeRead[T]) -> None:
        sink = Sink(read.pieces, self._job.progress)
        try:
            etag = await self._plane.get_range(
                self._job, read.key, read.start, sink, etag=self._etags.get(read.key), modified=self.modified
            )
        finally:
            sink.forget()
        try:
            check_same(self._etags.setdefault(read.key, etag), etag)  # ranges that set out together knew none
        except CorruptCheckpointError as error:
            error.with_context(rank=self._job.rank, bucket=self._job.bucket, key=read.key, operation="GetObject")
            raise

    def _next(self) -> RangeRead[T] | None:
        try:
            # also behind the deadline: the requests that end with it know key, attempts and request id
            read, work = self._ended.get(timeout=0.5)
        except queue.Empty:
            self._check()
            return None
        self._running.discard(work)
        try:
            work.result()
        except BaseException:
            self._plane.budget.release(read.scratch)
            raise
        return read

    def _check(self) -> None:
        if self._job.deadline.expired:
            raise self._job.deadline.error("loading").with_context(rank=self._job.rank, operation="GetObject")
        quiet = time.monotonic() - self._job.progress.last
        if quiet > self._plane.config.stall_limit_s:
            stalled = DeadlineExceededError(
                f"no byte has arrived for {quiet:.0f} s (stall_limit_s); the store or the network is stuck"
            )
            raise stalled.with_context(rank=self._job.rank, bucket=self._job.bucket, operation="GetObject")

    def _cancel(self) -> None:
        """End what still runs before the destinations are given up: no byte may land in them afterwards."""
        for work in self._running:
            work.stop()
        while self._running:
            read, work = self._ended.get()
            self._running.discard(work)
            self._plane.budget.release(read.scratch)
        for read in self._again:
            self._plane.budget.release(read.scratch)
        self._again.clear()
