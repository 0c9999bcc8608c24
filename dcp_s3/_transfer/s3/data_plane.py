"""The data plane: parts and ranges as asyncio requests on the loop thread, each one retried as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import math
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dcp_s3._runtime.loop_thread import ended
from dcp_s3._transfer.checksum import crc64nvme, header_value, md5_header
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.session import GIVEN, Given
from dcp_s3._transfer.http.sink import Sink, content_range
from dcp_s3._transfer.job import TOKEN_FIELD, Head, Job
from dcp_s3._transfer.limits import retry
from dcp_s3._transfer.limits.attempt_timeout import AttemptTimeout
from dcp_s3._transfer.limits.budget import ByteBudget
from dcp_s3._transfer.s3.clients import CurrentDataClients, connection_of, remind_of_tls
from dcp_s3._transfer.s3.control_store import creation, encryption, save_metadata
from dcp_s3._transfer.s3.error_mapping import is_expired, is_missing, is_refused_as_unknown, translate
from dcp_s3.errors import CorruptCheckpointError, DcpS3Error, StorageError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterator, Sequence
    from contextvars import ContextVar

    from dcp_s3._transfer.s3.clients import DataClients
    from dcp_s3.config import S3Config

_log = logging.getLogger(__name__)

T = TypeVar("T")

_CANCEL_S: Final = 5.0


@dataclass(slots=True)
class Learnt:
    """What the store has shown of itself.

    Attributes:
        sends_checksums: Bodies go with a checksum header.
        sends_md5: Bodies go with Content-MD5.
    """

    sends_checksums: bool
    sends_md5: bool = False


class DataPlane:
    """aiobotocore clients in one process, with the limits that all saves and loads through them share.

    Args:
        config: Endpoint, credentials and limits.
        budget: Bytes of copies; its own if not given.
    """

    def __init__(self, config: S3Config, budget: ByteBudget | None = None) -> None:
        self.config = config
        self.budget = ByteBudget(config.memory_bytes) if budget is None else budget
        self.learnt = Learnt(sends_checksums=config.checksum != "none")
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._clients = CurrentDataClients(connection_of(config))

    def for_config(self, config: S3Config, budget: ByteBudget) -> DataPlane:
        """The same plane for a config that differs in nothing that its clients depend on."""
        other = copy.copy(self)
        other.config = config
        other.budget = budget
        return other

    async def close(self) -> None:
        """Close all connections."""
        await self._clients.close()

    # ------------------------------------------------------------------ one request

    async def _call(
        self,
        job: Job,
        operation: str,
        method: str,
        key: str,
        params: dict[str, Any],
        *,
        part: int | None = None,
        views: Sequence[memoryview] | None = None,
        sink: Sink | None = None,
        once: bool = False,
        check: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Send one request until it has succeeded, with its body or into its sink, and ``check`` has seen the reply."""

        async def attempt() -> dict[str, Any]:
            job.deadline.check(f"sending {operation}")
            async with self._slots:  # before signing, so that no signature grows old in a queue
                try:
                    async with asyncio.timeout(job.deadline.remaining()):  # whoever gives the credentials may hang
                        clients = await self._clients.get()
                except Exception as error:
                    raise translate(error, operation=operation, bucket=job.bucket, key=key, part=part) from error
                endpoint = clients.rotation.take()
                try:
                    progress = Progress(job.progress)
                    if sink is not None:
                        sink.progress = progress
                    nbytes = sum(map(len, views or ())) + (sink.length if sink else 0)
                    given = Given(key, None if views is None else (views, progress), sink)
                    with clients.in_use():
                        with _set(GIVEN, given):
                            call = getattr(clients[endpoint], method)(Bucket=job.bucket, Key=key, **params)
                            request = asyncio.ensure_future(call)
                        reply: dict[str, Any] = await self._watched(request, progress, nbytes, job)
                    clients.rotation.heard(endpoint)
                    given.check_taken()
                    if check is not None:
                        check(reply)
                except Exception as error:
                    made = translate(error, operation=operation, bucket=job.bucket, key=key, part=part)
                    clients.rotation.note(endpoint, made)
                    remind_of_tls(clients, endpoint, made)
                    if is_expired(made) and await self._renewed(clients, job):
                        retry.mark(made, tries=2)  # once more, with other credentials
                    raise made from error
                return reply

        try:
            return await retry.acall(
                attempt,
                self.config.retry,
                deadline=job.deadline,
                counter=job.counter,
                longest_s=retry.longest_wait_s(self.config),
                once=once,
            )
        except DcpS3Error as error:
            error.with_context(rank=job.rank, operation=operation, bucket=job.bucket, key=key, part=part)
            raise

    async def _renewed(self, used: DataClients, job: Job) -> bool:
        """Whether other credentials are there now. Whoever gives them may fail, or hang: then there are none."""
        try:
            async with asyncio.timeout(job.deadline.remaining()):
                return await self._clients.renew(used)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the store's refusal is what the caller must hear
            _log.warning("no new credentials for those that the store refused: %s: %s", type(error).__name__, error)
            return False

    async def _watched(self, request: asyncio.Future[T], progress: Progress, nbytes: int, job: Job) -> T:
        """Wait for a request, and give it up when nothing moves for ``read_timeout_s``, or when it drips.

        Of a request without a body aiohttp sees more: the blanks that keep a long Complete alive are no silence.
        """
        quiet = self.config.read_timeout_s if nbytes else math.inf
        timeout = AttemptTimeout(2 * self.config.read_timeout_s, at_most=job.deadline.remaining())
        timeout.allow(nbytes)
        try:
            while True:
                now = time.monotonic()
                left = min(progress.last + quiet, timeout.end) - now
                if left <= 0:
                    raise TimeoutError(
                        f"given up after {timeout.spent():.1f} s, the last {now - progress.last:.1f} s of them silent; "
                        f"{progress.moved} of {nbytes} bytes had moved"
                    )
                done, _ = await asyncio.wait({request}, timeout=left)
                if done:
                    return request.result()
        finally:
            if not request.done():
                request.cancel()
                await ended(request, timeout_s=_CANCEL_S)
            if request.done() and not request.cancelled():
                request.exception()  # it failed as its waiter was cancelled, which nobody needs to hear of

    # ------------------------------------------------------------------ uploads

    def checksum_params(self, crc: int, views: Sequence[memoryview]) -> dict[str, Any]:
        """Headers that let the store check a body against the CRC32C that was computed from memory."""
        if not self.learnt.sends_checksums:
            return {}
        if self.config.checksum == "crc64nvme":
            value = functools.reduce(lambda value, view: crc64nvme(view, value), views, 0)
            return {"ChecksumCRC64NVME": header_value(value, bits=64)}
        return {"ChecksumCRC32C": header_value(crc)}

    async def put_object(self, job: Job, key: str, views: Sequence[memoryview], crc: int, token: str) -> Head:
        """Write an object in one request.

        Args:
            job: What the request belongs to.
            key: Object key.
            views: The body.
            crc: Its CRC32C.
            token: Kept in the object's user metadata, to know it again.

        Returns:
            Size, ETag and token.
        """
        size = sum(map(len, views))
        base = {"ContentLength": size} | creation(
            self.config, {TOKEN_FIELD: token} | save_metadata(job.deadline), data=True
        )
        reply = await self._send_body(job, "PutObject", "put_object", key, base, views, crc)
        return Head(size, str(reply.get("ETag", "")), token)

    async def create_upload(self, job: Job, key: str, token: str) -> tuple[str, bool]:
        """Begin a multipart upload.

        Returns:
            The upload id, and whether its parts carry checksums.
        """
        params = creation(self.config, {TOKEN_FIELD: token} | save_metadata(job.deadline), data=True)
        algorithm = {"ChecksumAlgorithm": "CRC64NVME" if self.config.checksum == "crc64nvme" else "CRC32C"}
        if self.learnt.sends_checksums:
            try:
                reply = await self._create(job, key, params | algorithm)
            except StorageError as error:
                if not self._turn_checksums_off(error):
                    raise
            else:
                return str(reply["UploadId"]), True
        reply = await self._create(job, key, params)
        return str(reply["UploadId"]), False

    async def _create(self, job: Job, key: str, params: dict[str, Any]) -> dict[str, Any]:
        def check(reply: dict[str, Any]) -> None:
            if not reply.get("UploadId"):
                raise retry.unavailable("the reply to CreateMultipartUpload has no upload id")

        return await self._call(job, "CreateMultipartUpload", "create_multipart_upload", key, params, check=check)

    async def upload_part(
        self, job: Job, key: str, upload_id: str, part: int, views: Sequence[memoryview], crc: int, *, checksums: bool
    ) -> dict[str, Any]:
        """Send one part.

        Returns:
            Its entry for :meth:`complete_upload`.
        """
        base: dict[str, Any] = {"UploadId": upload_id, "PartNumber": part, "ContentLength": sum(map(len, views))}
        base |= encryption(self.config, write=False)
        reply = await self._send_body(job, "UploadPart", "upload_part", key, base, views, crc, checksums=checksums)
        entry: dict[str, Any] = {"PartNumber": part, "ETag": reply["ETag"]}
        for name in ("ChecksumCRC32C", "ChecksumCRC64NVME"):
            if checksums and reply.get(name):
                entry[name] = reply[name]
        return entry

    async def _send_body(
        self,
        job: Job,
        operation: str,
        method: str,
        key: str,
        base: dict[str, Any],
        views: Sequence[memoryview],
        crc: int,
        *,
        checksums: bool = True,
    ) -> dict[str, Any]:
        def check(reply: dict[str, Any]) -> None:
            if not reply.get("ETag"):
                raise retry.unavailable(f"the reply to {operation} has no ETag")

        async def send(extra: dict[str, Any]) -> dict[str, Any]:
            part = base.get("PartNumber")
            return await self._call(job, operation, method, key, base | extra, part=part, views=views, check=check)

        sums = self.checksum_params(crc, views) if checksums else {}
        forms = [] if self.learnt.sends_md5 else [sums, {}] if sums and self.config.checksum == "auto" else [sums]
        for form in forms:
            try:
                reply = await send(form)
            except StorageError as error:
                if not is_refused_as_unknown(error) or (form and form is forms[-1]):
                    raise
                _log.info("the store refused %s with %s (%s)", operation, list(form) or "no checksum", error.code)
            else:
                if sums and not any(reply.get(name) for name in form):
                    self.learnt.sends_checksums = (
                        self.config.checksum != "auto"
                    )  # refused or ignored: not worth sending
                return reply
        # a bucket with Object Lock wants a checksum, and an old store knows only this one
        reply = await send({"ContentMD5": await asyncio.to_thread(md5_header, views)})
        self.learnt.sends_md5, self.learnt.sends_checksums = True, False
        return reply

    def _turn_checksums_off(self, error: StorageError) -> bool:
        if self.config.checksum != "auto" or not is_refused_as_unknown(error):
            return False
        _log.info("the store refuses checksum headers (%s); the manifest's own checksums stay", error.code)
        self.learnt.sends_checksums = False
        return True

    async def complete_upload(self, job: Job, key: str, upload_id: str, entries: list[dict[str, Any]]) -> None:
        """Send CompleteMultipartUpload once; again only where it was refused for expired credentials, and so not done.

        Raises:
            StorageError: Anything but a parsed result; what it means is settled by the caller, by HEAD.
        """

        def check(reply: dict[str, Any]) -> None:
            if not any(reply.get(name) for name in ("ETag", "Key", "Location")):
                raise retry.unavailable("the reply to CompleteMultipartUpload is empty")

        params = {"UploadId": upload_id, "MultipartUpload": {"Parts": entries}} | encryption(self.config, write=False)
        await self._call(
            job, "CompleteMultipartUpload", "complete_multipart_upload", key, params, once=True, check=check
        )

    async def abort_upload(self, job: Job, key: str, upload_id: str) -> None:
        """Abort a multipart upload; one that is gone is no error."""
        try:
            await self._call(job, "AbortMultipartUpload", "abort_multipart_upload", key, {"UploadId": upload_id})
        except StorageError as error:
            if error.status != 404:
                raise

    async def head_object(self, job: Job, key: str, *, checksum: bool = False) -> Head | None:
        """Size, ETag and token of a data object, ``None`` if it is not there; with its checksum on request."""
        params = encryption(self.config, write=False) | ({"ChecksumMode": "ENABLED"} if checksum else {})
        try:
            reply = await self._call(job, "HeadObject", "head_object", key, params)
        except StorageError as error:
            if is_missing(error):
                return None
            raise
        metadata = {name.lower(): value for name, value in reply.get("Metadata", {}).items()}
        size = reply.get("ContentLength")  # absent is not zero: some gateways leave it out of the reply to a HEAD
        return Head(
            await self._size(job, key) if size is None else int(size),
            str(reply.get("ETag", "")),
            metadata.get(TOKEN_FIELD),
            _age_s(reply),
            reply.get("ChecksumCRC32C"),
        )

    async def _size(self, job: Job, key: str) -> int:
        """Size of an object by the reply to a GET of its first byte."""
        params = {"Range": "bytes=0-0"} | encryption(self.config, write=False)
        try:
            reply = await self._call(job, "GetObject", "get_object", key, params, sink=Sink([1], job.progress))
        except StorageError as error:
            if error.status == 416:
                return 0
            raise
        ranged = content_range(str(reply.get("ContentRange") or ""))
        return 1 if ranged is None or ranged[2] is None else ranged[2]

    # ------------------------------------------------------------------ downloads

    async def get_range(
        self,
        job: Job,
        key: str,
        start: int,
        sink: Sink,
        *,
        etag: str | None = None,
        modified: dict[str, dt.datetime] | None = None,
    ) -> str:
        """Receive bytes ``[start, start + sink.length)`` of an object into a sink.

        Args:
            job: What the request belongs to.
            key: Object key.
            start: First byte.
            sink: Takes the bytes; filled from its beginning with every attempt.
            etag: The ETag that the object must have; ``None`` accepts any.
            modified: Told when the object was last modified, if the reply says so.

        Returns:
            The object's ETag.

        Raises:
            StorageError: The object is missing (``is_missing``), or another failure.
            CorruptCheckpointError: It is shorter than the range, or another object than before.
        """
        end = start + sink.length
        asked = f"bytes {start}-{end - 1}"

        def check(reply: dict[str, Any]) -> None:  # that it is the range that was asked for was seen before its bytes
            if etag is not None:
                check_same(etag, str(reply.get("ETag", "")))

        params = {"Range": f"bytes={start}-{end - 1}"} | encryption(self.config, write=False)
        try:
            reply = await self._call(job, "GetObject", "get_object", key, params, sink=sink, check=check)
        except StorageError as error:
            if error.status == 416:
                short = CorruptCheckpointError(f"the object ends before byte {end}: it was truncated")
                raise retry.copy_context(error, short) from error
            error.message = f"{error.message} (reading {asked})"
            raise
        if modified is not None and (when := reply.get("LastModified")) is not None:
            modified[key] = when
        return str(reply.get("ETag", ""))


def check_same(before: str, now: str) -> None:
    """Compare two ETags of what should be one object, with or without their quotes.

    Raises:
        CorruptCheckpointError: They differ.
    """
    if before.strip('"') != now.strip('"'):
        raise CorruptCheckpointError(f"the object changed while it was read (ETag {now}, was {before})")


def _age_s(reply: dict[str, Any]) -> float | None:
    """Seconds between an object's Last-Modified and the reply's Date, both by the store's clock."""
    written = reply.get("LastModified")
    date = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return None if written is None else float((parsedate_to_datetime(date) - written).total_seconds())
    except (TypeError, ValueError):  # no date, or one without a zone
        return None


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
