"""Many ranged reads at once: submitted and taken back on the caller's thread, received on the loop thread."""

from __future__ import annotations

import collections
import functools
import logging
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from dcp_s3._runtime.loop_thread import Bell, Work, loop_thread
from dcp_s3._transfer.http.sink import Sink
from dcp_s3._transfer.s3.data_plane import check_same
from dcp_s3.errors import CorruptCheckpointError, DeadlineExceededError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dcp_s3._transfer.job import Job
    from dcp_s3._transfer.s3.data_plane import DataPlane

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S: Final = 0.5
"""So often the deadline and the stall limit are looked at, seconds."""
_CLOSE_S: Final = 10.0
"""Longest wait for the end of requests that were cancelled, seconds."""


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
    """Runs reads in their order, several at a time, and yields them as they end. Used by one thread.

    What is under way is one dict, and its works are asked for their state: a signal handler that raises, wherever it
    does, leaves nothing that :meth:`close` does not find.

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
        self._live: dict[RangeRead[T], Work[None] | None] = {}
        """Reads with their works, from before a read holds anything until it has given everything back."""
        self._again: collections.deque[RangeRead[T]] = collections.deque()
        self._bell = Bell()
        self._abandoned = False

    def run(self, reads: Iterable[RangeRead[T]]) -> Iterator[RangeRead[T]]:
        """Yield each read when its bytes are where they belong; its scratch is free again when the next is asked for.

        Whoever does not come to the end calls :meth:`close`.

        Raises:
            DcpS3Error: A read failed for good, or the deadline passed; the others have been cancelled.
        """
        self._abandoned = False
        waiting = iter(reads)
        upcoming: RangeRead[T] | None = next(waiting, None)
        try:
            while upcoming is not None or self._live:
                while len(self._live) - len(self._again) < 2 * self._plane.config.max_concurrency:
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
                yield done
                if done not in self._again:
                    self._let_go(done)
                self._job.progress.touch()  # the time that the caller took is no stall
        finally:
            self.close()

    def again(self, read: RangeRead[T]) -> None:
        """Have a read that was just yielded received once more, into the same place."""
        self._again.append(read)

    def close(self) -> None:
        """End what still runs before the destinations are given up: no byte may land in them afterwards. Bounded in time.

        May be called again, and then does what is left: an interrupt may have ended the first call.
        """
        works = [work for work in self._live.values() if work is not None]
        for work in works:
            if not work.done():
                work.stop()
        end = time.monotonic() + _CLOSE_S
        for work in works:
            work.wait(max(0.0, end - time.monotonic()))
        self._abandoned = True  # what ends later lets its read go by itself
        for read, its_work in list(self._live.items()):
            if its_work is None or its_work.done():
                self._let_go(read)
        self._again.clear()
        if self._live:
            _log.error(
                "%d requests of a load that has ended do not end: the tensors that they write to may change yet",
                len(self._live),
            )

    def _fits(self, read: RangeRead[T]) -> bool:
        alone = not self._live
        self._live[read] = None
        if not read.scratch or self._plane.budget.try_acquire(read, read.scratch):
            return True
        if alone:
            self._plane.budget.acquire_over(read, read.scratch)  # larger than what others left: it must go on
            return True
        del self._live[read]
        return False

    def _start(self, read: RangeRead[T]) -> None:
        if not read.tries:
            read.pieces = read.make_pieces()
        read.tries += 1
        work = loop_thread().work(functools.partial(self._receive, read), self._ended)
        self._live[read] = work
        work.start()

    def _ended(self, work: Work[None]) -> None:
        self._bell.ring()
        if self._abandoned:
            for read, its_work in list(self._live.items()):
                if its_work is work:
                    self._let_go(read)

    def _let_go(self, read: RangeRead[T]) -> None:
        read.pieces = ()
        self._plane.budget.release(read)
        self._live.pop(read, None)

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
        end = time.monotonic() + _LOOK_S
        while True:
            # also behind the deadline: the requests that end with it know key, attempts and request id
            for read, work in self._live.items():
                if work is not None and work.done():
                    work.result()
                    return read
            left = end - time.monotonic()
            if left <= 0:
                self._check()
                return None
            self._bell.wait(left)

    def _check(self) -> None:
        if self._job.deadline.expired:
            raise self._job.deadline.error("loading").with_context(rank=self._job.rank, operation="GetObject")
        quiet = time.monotonic() - self._job.progress.last
        if quiet > self._plane.config.stall_limit_s:
            stalled = DeadlineExceededError(
                f"no byte has arrived for {quiet:.0f} s (stall_limit_s); the store or the network is stuck"
            )
            raise stalled.with_context(rank=self._job.rank, bucket=self._job.bucket, operation="GetObject")
