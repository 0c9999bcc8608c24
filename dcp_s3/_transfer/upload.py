"""One data object, streamed: the caller's thread appends views, parts leave from the loop thread while it goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dcp_s3._runtime.loop_thread import Bell, Work, loop_thread
from dcp_s3._transfer.checksum import combine, crc32c, header_value, is_etag_of_parts
from dcp_s3._transfer.limits.retry import Counter, Deadline, backoff_s, longest_wait_s
from dcp_s3._transfer.part_plan import MAX_OBJECT_BYTES, MAX_PARTS
from dcp_s3._transfer.s3.error_mapping import is_throttled
from dcp_s3.errors import AccessDeniedError, DcpS3Error, DeadlineExceededError, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dcp_s3._transfer.job import Head, Job
    from dcp_s3._transfer.limits.cpu_throttle import CpuThrottle
    from dcp_s3._transfer.s3.data_plane import DataPlane

_log = logging.getLogger(__name__)

T = TypeVar("T")

_QUEUED: Final = 4
"""Parts that may wait, cut and checked, behind those on the wire."""
_ABORT_S: Final = 30.0
"""Longest time for the abort of a failed upload, seconds; what it could not abort is left to ``gc``."""
_LATE_ABORT_S: Final = 5.0
"""The same when the save's deadline has passed or is near: the other ranks wait to hear of the failure."""
_CLOCK_STEP_S: Final = 2.0
"""Last-Modified and Date are whole seconds each: by so much an object may seem older than it is."""
_SETTLE_S: Final = 0.5
"""Behind the deadline, how long the requests that end with it are waited for: their errors say more."""


@dataclass(frozen=True, slots=True)
class ObjectReceipt:
    """A data object that is complete in the store, its size verified by HEAD.

    Attributes:
        key: Object key.
        size: Bytes.
        etag: As HEAD gave it.
        part_bytes: Size of every part but the last.
        crc32c: CRC32C of each part, in order.
    """

    key: str
    size: int
    etag: str
    part_bytes: int
    crc32c: tuple[int, ...]


class _Part:
    __slots__ = ("copied", "crc", "nbytes", "views")

    def __init__(self) -> None:
        self.views: list[memoryview] = []
        self.nbytes = 0
        self.copied = 0
        self.crc = 0


class ObjectUpload:
    """Uploads one object. Used by one thread; the requests run on the loop thread.

    Args:
        plane: The process's data plane.
        job: What its requests belong to.
        key: Object key, never used before.
        token: Kept in the object's user metadata.
        part_bytes: Size of every part but the last.
        max_parts: Most parts of one object.
        throttle: Rests between parts; ``None`` does not.
    """

    def __init__(
        self,
        plane: DataPlane,
        job: Job,
        key: str,
        token: str,
        *,
        part_bytes: int,
        max_parts: int = MAX_PARTS,
        throttle: CpuThrottle | None = None,
    ) -> None:
        self.key = key
        self.size = 0
        self.part_bytes = part_bytes
        self.capacity = min(part_bytes * max_parts, MAX_OBJECT_BYTES)
        self._plane = plane
        self._job = job
        self._token = token
        self._throttle = throttle
        self._part = _Part()
        self._crcs: list[int] = []
        self._entries: dict[int, dict[str, Any]] = {}
        self._room = plane.config.max_concurrency + _QUEUED
        self._works: dict[Work[Any], _Part | None] = {}
        """Requests with what they send, from before they start until they have ended: an interrupt loses none."""
        self._bell = Bell()
        self._failure: BaseException | None = None
        self._created: Work[tuple[str, bool]] | None = None
        self._undecided = False
        self._aborting: Work[None] | None = None
        self._aborted = False
        self._started = time.monotonic()

    # ------------------------------------------------------------------ caller's thread

    def append(self, view: memoryview, *, copied: bool = False) -> int:
        """Add bytes to the object; whole parts start on their way at once.

        Args:
            view: Contiguous bytes that stay unchanged until their part is acknowledged; the view keeps them alive.
            copied: The bytes were taken from the process's byte budget, which gets them back when their part is done.

        Returns:
            CRC32C of ``view``.

        Raises:
            DcpS3Error: An earlier part has failed for good, the deadline has passed, or the object would get too many parts.
        """
        if self.size + len(view) > self.capacity:
            raise StorageError(
                f"{self.key} would need more than {self.capacity // self.part_bytes} parts of {self.part_bytes} bytes, or be larger "
                "than the 5 TiB that S3 allows; raise part_bytes, or shard the tensor"
            ).with_context(rank=self._job.rank, bucket=self._job.bucket, key=self.key)
        total = 0
        offset = 0
        while offset < len(view):
            piece = view[offset : offset + self.part_bytes - self._part.nbytes]
            crc = crc32c(piece)
            total = combine(total, crc, len(piece)) if offset else crc
            part = self._part
            part.crc = combine(part.crc, crc, len(piece)) if part.nbytes else crc
            part.views.append(piece)
            part.nbytes += len(piece)
            part.copied += len(piece) if copied else 0
            offset += len(piece)
            self.size += len(piece)
            if part.nbytes == self.part_bytes:
                self._send_part()
        return total

    def reserve(self, nbytes: int) -> None:
        """Take ``nbytes`` of copies from the byte budget. Waits for earlier parts if need be.

        They come back with the parts that they are appended to, by :meth:`give_back`, or by :meth:`abort`.

        Raises:
            DcpS3Error: An earlier part has failed for good, or the deadline has passed.
        """
        while not self._plane.budget.try_acquire(self, nbytes):
            self._check()
            if not self._works and self._part.copied:
                # everything held is in the open part: nothing will be freed by waiting
                self._plane.budget.acquire_over(self, nbytes)
                break
            self._wait_a_moment()
        self._check()

    def give_back(self, nbytes: int) -> None:
        """Return what was reserved and is not needed."""
        self._plane.budget.release(self, nbytes)

    def finish(self) -> ObjectReceipt:
        """Send what is left, complete the object and verify it.

        Returns:
            The receipt for the index.

        Raises:
            DcpS3Error: The object could not be completed; nothing of it is left behind, as far as the store lets us.
        """
        try:
            if self._created is None:
                part, self._part = self._part, _Part()
                self._crcs.append(part.crc)
                head = self._await(self._submit_part(functools.partial(self._put, part), part))
            else:
                if self._part.nbytes:
                    self._send_part()
                self._drain()
                head = self._await(self._submit(self._complete))
        except BaseException:
            self.abort()
            raise
        return ObjectReceipt(self.key, self.size, head.etag, self.part_bytes, tuple(self._crcs))

    def abort(self) -> None:
        """Cancel what is under way, wait until it has ended, and abort the upload. Never raises; bounded in time.

        May be called again, and then does what is left: an interrupt may have ended the first call.
        """
        if self._aborted:
            return
        limit = min(_ABORT_S, max(_LATE_ABORT_S, self._job.deadline.remaining()))
        end = time.monotonic() + limit
        created = self._created
        works = [(work, part) for work, part in list(self._works.items()) if work is not created]
        for work, _ in works:
            work.stop()
        if created is not None and not created.started:
            created.stop()  # but not one under way: an upload whose id is not known yet could not be aborted
            created.wait(max(0.0, end - time.monotonic()))
        for work, part in works:
            if work.wait(max(0.0, end - time.monotonic())) and part is not None:
                self._release(part)
        self._part = _Part()
        self._plane.budget.release(self)
        never_began = created is None or (created.done() and _is_cancelled(created))
        if created is not None and not never_began and not self._undecided:
            # (an Abort must not overtake a Complete that may still be at work; what it leaves is for gc)
            if self._aborting is None:
                self._aborting = loop_thread().work(functools.partial(self._abort, created, limit))
            try:
                self._aborting.start()
                self._aborting.result(max(0.1, end - time.monotonic()))
            except (DcpS3Error, TimeoutError, concurrent.futures.CancelledError) as error:
                created.stop()
                self._aborting.stop()
                _log.warning("could not abort the upload of %s (dcp-s3 gc will): %s", self.key, error)
        self._aborted = True

    def _send_part(self) -> None:
        part, self._part = self._part, _Part()
        self._crcs.append(part.crc)
        number = len(self._crcs)
        if self._created is None:
            create = functools.partial(self._plane.create_upload, self._job, self.key, self._token)
            self._created = loop_thread().work(create, self._ended)  # known before it starts: it may have to be aborted
            self._begin(self._created)
        self._submit_part(functools.partial(self._upload, number, part), part)
        if self._throttle is not None:
            self._throttle.rest()

    def _submit_part(self, function: Callable[[], Coroutine[Any, Any, T]], part: _Part) -> Work[T]:
        """Send a part when there is room; its copies then go back to the budget when it has ended."""
        while len(self._works) >= self._room:
            self._check()
            self._wait_a_moment()
        self._check()
        return self._submit(function, part)

    def _submit(self, function: Callable[[], Coroutine[Any, Any, T]], part: _Part | None = None) -> Work[T]:
        work = loop_thread().work(function, self._ended)
        self._begin(work, part)
        return work

    def _begin(self, work: Work[Any], part: _Part | None = None) -> None:
        if not self._works:
            self._job.progress.touch()  # until now there was nothing to wait for
        self._works[work] = part
        if part is not None and part.copied:
            self._plane.budget.move(self, part, part.copied)
        work.start()

    def _ended(self, work: Work[Any]) -> None:
        part = self._works.get(work)
        if part is not None:
            self._release(part)
        error = work.exception()
        if error is not None and self._failure is None and not _is_cancelled(work):
            self._failure = error
        self._works.pop(work, None)
        self._bell.ring()

    def _release(self, part: _Part) -> None:
        part.views.clear()
        self._plane.budget.release(part)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._job.deadline.expired:
            self._settle()
            if self._failure is not None:
                raise self._failure
            raise self._job.deadline.error(f"uploading {self.key}").with_context(
                rank=self._job.rank, bucket=self._job.bucket, key=self.key, operation="UploadPart"
            )
        quiet = time.monotonic() - self._job.progress.last
        if self._works and quiet > self._plane.config.stall_limit_s:
            stalled = DeadlineExceededError(
                f"no byte has moved for {quiet:.0f} s (stall_limit_s); the store or the network is stuck"
            )
            raise stalled.with_context(
                rank=self._job.rank, bucket=self._job.bucket, key=self.key, operation="UploadPart"
            )

    def _settle(self) -> None:
        end = time.monotonic() + _SETTLE_S
        while self._works and self._failure is None and (left := end - time.monotonic()) > 0:
            self._bell.wait(left)

    def _wait_a_moment(self) -> None:
        self._bell.wait(min(0.2, self._job.deadline.remaining() + 0.001))

    def _drain(self) -> None:
        while self._works and self._failure is None:
            self._check()
            self._wait_a_moment()
        self._check()

    def _await(self, work: Work[T]) -> T:
        while not work.done():
            self._check()
            self._wait_a_moment()
        return work.result()

    # ------------------------------------------------------------------ loop thread

    async def _put(self, part: _Part) -> Any:  # noqa: ANN401 -- Head
        """Write the object in one request, and look whether the store has what it acknowledged."""
        await self._plane.put_object(self._job, self.key, part.views, part.crc, self._token)
        head = await self._plane.head_object(self._job, self.key)
        if head is not None and head.size == self.size and head.token in (self._token, None):
            return head
        found = "is not there" if head is None else f"has {head.size} bytes, not {self.size}"
        if head is not None and head.size == self.size:
            found = f"is another writer's (token {head.token}, not {self._token})"
        raise StorageError(f"the store acknowledged an object that {found}").with_context(
            rank=self._job.rank, operation="PutObject", bucket=self._job.bucket, key=self.key
        )

    async def _upload(self, number: int, part: _Part) -> None:
        assert self._created is not None  # noqa: S101 -- set before the first part is submitted
        upload_id, checksums = await asyncio.wrap_future(self._created)
        self._entries[number] = await self._plane.upload_part(
            self._job, self.key, upload_id, number, part.views, part.crc, checksums=checksums
        )

    async def _complete(self) -> Any:  # noqa: ANN401 -- Head
        """Complete, and settle by HEAD what the reply left unclear. Never two Completes at once."""
        assert self._created is not None  # noqa: S101 -- only called behind the first part
        upload_id, _ = await asyncio.wrap_future(self._created)
        numbers = sorted(self._entries)
        if numbers != list(range(1, len(self._crcs) + 1)):
            raise StorageError(f"parts are missing before Complete: have {len(numbers)} of {len(self._crcs)}")
        entries = [self._entries[number] for number in numbers]
        policy = self._plane.config.retry
        for attempt in range(1, policy.max_attempts + 1):
            failure: StorageError | None = None
            undecided, self._undecided = self._undecided, True  # whatever becomes of this task
            try:
                await self._plane.complete_upload(self._job, self.key, upload_id, entries)
            except StorageError as error:
                failure = error
                self._undecided = undecided or _may_be_at_work(error)
            try:
                head = await self._plane.head_object(self._job, self.key)
            except AccessDeniedError:
                if failure is None:
                    raise
                head = None  # without ListBucket a missing key is answered so
            if head is not None:
                await self._check_ours(head, failure)
                return head
            if failure is None:
                failure = StorageUnavailableError("Complete was answered with success, but the object is not there")
            failure.with_context(attempts=attempt, rank=self._job.rank, bucket=self._job.bucket, key=self.key)
            if attempt == policy.max_attempts or not _is_unclear(failure):
                raise failure
            self._job.counter.retries += 1
            self._job.deadline.check(f"completing {self.key}")
            await asyncio.sleep(min(backoff_s(policy, attempt), longest_wait_s(self._plane.config)))
        raise AssertionError

    async def _check_ours(self, head: Head, failure: StorageError | None) -> None:
        """Raise unless the object that HEAD shows behind a Complete is what was uploaded.

        A clear answer and the size are enough where the store keeps no user metadata; without that answer it takes a proof.

        Raises:
            StorageError: It has another size or token, or nothing shows whose it is.
        """
        if head.size != self.size or head.token not in (self._token, None):
            text = f"the completed object has {head.size} bytes and token {head.token}, expected {self.size} and {self._token}"
        elif head.token is not None or failure is None or await self._is_proven(head):
            return
        else:
            text = (
                "an object of the right size is there, but Complete was not answered with success and neither token, ETag, "
                "checksum nor time show that it is this save's; save again"
            )
        wrong = StorageError(text)
        wrong.with_context(operation="CompleteMultipartUpload", bucket=self._job.bucket, key=self.key)
        raise wrong from failure

    async def _is_proven(self, head: Head) -> bool:
        """Whether an object without our token is ours: by its ETag or checksum, or, where it has none of ours, by its time."""
        assert self._created is not None  # noqa: S101 -- only called behind a Complete
        numbers = range(1, len(self._crcs) + 1)
        same_etag = is_etag_of_parts(head.etag, [str(self._entries[number]["ETag"]) for number in numbers])
        if same_etag:
            return True
        if (await asyncio.wrap_future(self._created))[1]:
            seen = await self._plane.head_object(self._job, self.key, checksum=True)
            if seen is not None and seen.crc32c is not None:
                return seen.crc32c in self._checksums()
        elapsed_s = time.monotonic() - self._started
        return same_etag is None and head.age_s is not None and head.age_s <= elapsed_s + _CLOCK_STEP_S

    def _checksums(self) -> tuple[str, str]:
        """CRC32C of the object in the two forms that S3 knows: of the parts' checksums, and of all bytes."""
        composite = crc32c(memoryview(b"".join(crc.to_bytes(4, "big") for crc in self._crcs)))
        whole, left = 0, self.size
        for crc in self._crcs:
            whole = combine(whole, crc, min(self.part_bytes, left))
            left -= self.part_bytes
        return f"{header_value(composite)}-{len(self._crcs)}", header_value(whole)

    async def _abort(self, created: Work[tuple[str, bool]], limit: float) -> None:
        try:
            upload_id, _ = await asyncio.wrap_future(created)
        except (DcpS3Error, concurrent.futures.CancelledError):
            return  # it was never created, or nobody knows its id: gc finds it by its key
        # its own deadline: the save's has often passed when it comes to this
        job = dataclasses.replace(self._job, deadline=Deadline(limit), counter=Counter())
        await self._plane.abort_upload(job, self.key, upload_id)


def _is_cancelled(work: Work[Any]) -> bool:
    return isinstance(work.exception(), concurrent.futures.CancelledError)


def _is_unclear(error: StorageError) -> bool:
    """Whether a failed Complete may still have done its work, or may do it when it is sent again."""
    return isinstance(error, StorageUnavailableError) and not isinstance(error, DeadlineExceededError)


def _may_be_at_work(error: StorageError) -> bool:
    """Whether a failed Complete may still be done later, also when HEAD does not show its object yet.

    An error without a word of the store, or an error inside the store, says nothing; a store that throttles has refused.
    """
    return _is_unclear(error) and not is_throttled(error)
