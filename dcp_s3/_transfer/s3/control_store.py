"""The control plane: small requests that the caller waits for, each bounded in time, and what both planes send alike."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode

from dcp_s3._transfer.checksum import crc32c, header_value, md5_header
from dcp_s3._transfer.limits import retry
from dcp_s3._transfer.limits.attempt_timeout import AttemptTimeout, call_within
from dcp_s3._transfer.s3.clients import ControlClients, connection_of, remind_of_tls
from dcp_s3._transfer.s3.error_mapping import (
    is_expired,
    is_missing,
    is_page,
    is_precondition_failed,
    is_refused_as_unknown,
    not_s3,
    translate,
)
from dcp_s3._transfer.s3.shared_clients import SharedClients, shared_clients
from dcp_s3.errors import CorruptCheckpointError, DcpS3Error, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator

    from dcp_s3._transfer.limits.retry import Counter, Deadline
    from dcp_s3.config import S3Config

_log = logging.getLogger(__name__)

__all__ = [
    "ControlStore",
    "Fetched",
    "ObjectInfo",
    "UploadInfo",
    "is_missing",
    "is_precondition_failed",
    "is_refused_as_unknown",
]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store says of an object. The ETag is verbatim, with its quotes."""

    key: str
    size: int
    etag: str
    last_modified: dt.datetime | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fetched:
    """An object's bytes, or a range of them, with the store's clock at the reply."""

    body: bytes
    info: ObjectInfo
    server_time: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class UploadInfo:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    upload_id: str
    initiated: dt.datetime | None = None


def encryption(config: S3Config, *, write: bool) -> dict[str, Any]:
    """Request parameters of server-side encryption: SSE-C goes with reads and parts too, the others with creation."""
    if config.sse_customer_key is not None:
        return {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": config.sse_customer_key}
    if not write or config.sse is None:
        return {}
    return {"ServerSideEncryption": config.sse} | (
        {"SSEKMSKeyId": config.sse_kms_key_id} if config.sse_kms_key_id is not None else {}
    )


def creation(config: S3Config, metadata: dict[str, str] | None, *, data: bool) -> dict[str, Any]:
    """Request parameters that an object gets when it is created. The storage class is for data objects only."""
    options = encryption(config, write=True)
    merged = dict(config.metadata) | (metadata or {})
    if merged:
        options["Metadata"] = merged
    if config.tags:
        options["Tagging"] = urlencode(dict(config.tags))
    if data and config.storage_class is not None:
        options["StorageClass"] = config.storage_class
    return options


SAVE_FIELD: Final = "dcp-s3-save-s"
"""User metadata of what a save writes before its record: the save's deadline, whole seconds."""


def save_metadata(deadline: Deadline) -> dict[str, str]:
    """What a collector of garbage must know of a save whose objects it finds: how long it may take."""
    return {SAVE_FIELD: str(math.ceil(deadline.seconds))}


_OF_A_LIST: Final = ("Contents", "IsTruncated", "KeyCount", "Name", "Prefix")
"""What the reply to a listing has, at least one of them; a web page that happens to be XML has none."""
K = TypeVar("K")

_ASK_S: Final = 0.01
"""So often a thread looks whether another one still asks, seconds."""
_LAST_CHARACTER: Final = "\U0010ffff"


class ControlStore:
    """Synchronous requests to one bucket. Thread-safe; every failure is one of our public errors.

    Args:
        config: Endpoint, credentials and limits.
        bucket: Bucket name.
        deadline: Ends the retries and the attempts.
        rank: Named in errors.
        counter: Counts the retries.
    """

    def __init__(
        self,
        config: S3Config,
        bucket: str,
        *,
        deadline: Deadline | None = None,
        rank: int | None = None,
        counter: Counter | None = None,
    ) -> None:
        self.config = config
        self.bucket = bucket
        self._deadline = deadline
        self._rank = rank
        self._counter = counter
        self._place = connection_of(config)
        self._server_time: dt.datetime | None = None

    def _call(
        self, operation: str, method: str, key: str | None, params: dict[str, Any], *, once: bool = False
    ) -> dict[str, Any]:
        def attempt() -> dict[str, Any]:
            if self._deadline is not None:
                self._deadline.check(f"sending {operation}")
            with shared_clients(self._place) as shared:
                return self._attempt(shared, operation, method, key, params)

        try:
            return retry.call(
                attempt,
                self.config.retry,
                deadline=self._deadline,
                counter=self._counter,
                longest_s=retry.longest_wait_s(self.config),
                once=once,
            )
        except DcpS3Error as error:
            error.with_context(rank=self._rank, operation=operation, bucket=self.bucket, key=key)
            raise

    def _attempt(
        self, shared: SharedClients, operation: str, method: str, key: str | None, params: dict[str, Any]
    ) -> dict[str, Any]:
        timeout = self._attempt_timeout()
        try:
            clients = shared.clients or call_within(timeout, shared.get)
        except Exception as error:
            raise translate(error, operation=operation, bucket=self.bucket, key=key) from error
        endpoint = clients.rotation.take()
        timeout.allow(len(params.get("Body", b"")))

        def send() -> dict[str, Any]:
            reply: dict[str, Any] = getattr(clients[endpoint], method)(Bucket=self.bucket, **params)
            if "Body" in reply:
                timeout.allow(int(reply.get("ContentLength") or 0))
                most = None if "Range" in params else self.config.max_record_bytes
                reply["Body"] = _read_all(reply["Body"], reply.get("ContentLength"), most)
            return reply

        try:
            reply = call_within(timeout, send)
        except Exception as error:
            made = translate(error, operation=operation, bucket=self.bucket, key=key)
            clients.rotation.note(endpoint, made)
            remind_of_tls(clients, endpoint, made)
            if is_expired(made) and self._renewed(shared, clients):
                retry.mark(made, tries=2)  # once more, with other credentials
            raise made from error
        clients.rotation.heard(endpoint)
        if int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode") or 200) < 200:
            clients.close()  # the reply proper is still to come on that connection
            raise retry.unavailable("an interim reply (1xx) came, which the SDK takes for the reply proper")
        self._note_time(reply)
        return reply

    def _renewed(self, shared: SharedClients, used: ControlClients) -> bool:
        """Whether other credentials are there now. Whoever gives them may fail, or hang: then there are none."""
        try:
            return call_within(self._attempt_timeout(), lambda: shared.renew(used))
        except Exception as error:  # noqa: BLE001 -- whatever it is, the store's refusal is what the caller must hear
            _log.warning("no new credentials for those that the store refused: %s: %s", type(error).__name__, error)
            return False

    @contextlib.contextmanager
    def waiting_for(self, asking: dict[K, int], place: K, doing: str) -> Iterator[None]:
        """Be the one thread that asks something of a place; each of those that wait has its own deadline.

        Args:
            asking: Identity of the thread that asks, by place. (Not a lock: an interrupt could leave that taken for ever.)
            place: The place.
            doing: What is waited for, for the error.

        Raises:
            DeadlineExceededError: The deadline passed first.
        """
        me = threading.get_ident()

        def leave() -> None:
            if asking.get(place) == me:
                asking.pop(place, None)

        try:
            while asking.setdefault(place, me) != me:
                if self._deadline is not None:
                    self._deadline.check(doing)
                time.sleep(_ASK_S)
            yield
        finally:
            try:
                leave()
            finally:
                leave()  # an interrupt may have ended the first call

    def _attempt_timeout(self) -> AttemptTimeout:
        seconds = self.config.connect_timeout_s + 2 * self.config.read_timeout_s
        return AttemptTimeout(seconds, at_most=math.inf if self._deadline is None else self._deadline.remaining())

    def _note_time(self, reply: dict[str, Any]) -> None:
        date = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date:
            self._server_time = parsedate_to_datetime(date)

    def get(self, key: str, *, byte_range: tuple[int, int] | None = None) -> Fetched:
        """Read an object, or bytes ``[start, end)`` of it.

        Raises:
            CorruptCheckpointError: The whole object is larger than ``max_record_bytes``.
            StorageError: It is missing (``is_missing``), or another failure.
        """
        params = {"Key": key} | encryption(self.config, write=False)
        if byte_range is not None:
            params["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        reply = self._call("GetObject", "get_object", key, params)
        body: bytes | None = reply["Body"]
        if body is None:
            text = f"s3://{self.bucket}/{key} has more than max_record_bytes={self.config.max_record_bytes} bytes; set that higher to read it"
            raise CorruptCheckpointError(text).with_context(rank=self._rank, bucket=self.bucket, key=key)
        if is_page(body) and (byte_range is None or not reply.get("ETag")):  # no record and no manifest
            raise not_s3(200, body).with_context(rank=self._rank, operation="GetObject", bucket=self.bucket, key=key)
        if byte_range is not None and not reply.get("ContentRange"):  # the store ignores ranges
            body = body[byte_range[0] : byte_range[1]]
        info = _info(key, reply)
        if "ContentLength" not in reply and not reply.get("ContentRange"):  # a body in chunks
            info = replace(info, size=len(body))
        return Fetched(body=body, info=info, server_time=self._server_time)

    def head(self, key: str) -> ObjectInfo:
        """Size, ETag and user metadata of an object.

        Raises:
            StorageError: It is missing (``is_missing``), or another failure.
        """
        reply = self._call("HeadObject", "head_object", key, {"Key": key} | encryption(self.config, write=False))
        info = _info(key, reply)
        if "ContentLength" in reply:
            return info
        try:  # absent is not zero: some gateways leave it out of the reply to a HEAD
            return replace(info, size=self.get(key, byte_range=(0, 1)).info.size)
        except StorageError as error:
            if error.status != 416:
                raise
            return info

    def put(
        self,
        key: str,
        body: bytes,
        *,
        content_type: str,
        metadata: dict[str, str] | None = None,
        if_match: str | None = None,
        if_none_match: bool = False,
        retry: bool = True,
    ) -> str:
        """Write a small object in one request.

        Args:
            key: Object key.
            body: Its bytes.
            content_type: MIME type.
            metadata: User metadata besides the configured.
            if_match: Replace only the object with this ETag.
            if_none_match: Create only if there is none.
            retry: Repeat passing failures; ``False`` repeats only what was refused for expired credentials, and so not done.

        Returns:
            The ETag.

        Raises:
            StorageError: The condition did not hold (``is_precondition_failed``), or another failure.
        """
        params: dict[str, Any] = {"Key": key, "Body": body, "ContentType": content_type}
        params |= creation(self.config, metadata, data=False)
        if if_match is not None:
            params["IfMatch"] = if_match
        if if_none_match:
            params["IfNoneMatch"] = "*"
        with shared_clients(self._place) as shared:
            without_checksums = shared.without_checksums
        if without_checksums:
            params["ContentMD5"] = md5_header([body])
        elif self.config.checksum != "none":
            params["ChecksumCRC32C"] = header_value(crc32c(body))
        try:
            reply = self._call("PutObject", "put_object", key, params, once=not retry)
        except StorageError as error:
            if not is_refused_as_unknown(error) or "ContentMD5" in params or if_match or if_none_match:
                raise
            # a store without checksum headers, or one whose Object Lock wants Content-MD5 instead
            params.pop("ChecksumCRC32C", None)
            params["ContentMD5"] = md5_header([body])
            reply = self._call("PutObject", "put_object", key, params, once=not retry)
            with shared_clients(self._place) as shared:
                shared.without_checksums = True
        return str(reply.get("ETag", ""))

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""
        self._call("DeleteObject", "delete_object", key, {"Key": key})

    def list(self, prefix: str, *, page_size: int = 1000) -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix``, in key order. Needs ListBucket."""
        for page in self._pages(prefix, page_size, delimiter=None):
            for item in page.get("Contents", ()):
                yield ObjectInfo(item["Key"], int(item["Size"]), item.get("ETag", ""), item.get("LastModified"))

    def list_prefixes(self, prefix: str, *, page_size: int = 1000) -> Iterator[str]:
        """The "directories" right below ``prefix``, each ending with a slash. Needs ListBucket."""
        for page in self._pages(prefix, page_size, delimiter="/"):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"]

    def _pages(self, prefix: str, page_size: int, delimiter: str | None) -> Iterator[dict[str, Any]]:
        token: str | None = None
        last = ""
        while True:
            params: dict[str, Any] = {"Prefix": prefix, "MaxKeys": page_size}
            if delimiter:
                params["Delimiter"] = delimiter
            if token is not None:
                params["ContinuationToken"] = token
            elif last:
                # a store that says "truncated" without a continuation token; behind all that a common prefix stands for
                params["StartAfter"] = last + _LAST_CHARACTER if delimiter and last.endswith(delimiter) else last
            page = self._call("ListObjectsV2", "list_objects_v2", prefix, params)
            if page.keys().isdisjoint(_OF_A_LIST):
                raise StorageError(
                    "what answers is no S3 endpoint: its reply to a listing has nothing that S3's has; check endpoint_url"
                ).with_context(rank=self._rank, operation="ListObjectsV2", bucket=self.bucket, key=prefix)
            yield page
            if not page.get("IsTruncated"):
                return
            before, token = (token, last), page.get("NextContinuationToken")
            for name, kind in (("Key", "Contents"), ("Prefix", "CommonPrefixes")):
                last = max(last, *(item[name] for item in page.get(kind, ())), "")
            if (token, last) == before:
                raise StorageError(f"the store's pagination is broken: its listing of {prefix!r} would never end")

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        """All open multipart uploads below ``prefix``. Needs ListBucketMultipartUploads."""
        params: dict[str, Any] = {"Prefix": prefix}
        while True:
            page = self._call("ListMultipartUploads", "list_multipart_uploads", prefix, params)
            for item in page.get("Uploads", ()):
                yield UploadInfo(item["Key"], item["UploadId"], item.get("Initiated"))
            if not page.get("IsTruncated"):
                return
            items = page.get("Uploads") or [{}]
            key = page.get("NextKeyMarker") or items[-1].get("Key", "")
            upload_id = page.get("NextUploadIdMarker") or items[-1].get("UploadId", "")
            if (key, upload_id) == (params.get("KeyMarker", ""), params.get("UploadIdMarker", "")):
                raise StorageError(
                    f"the store's pagination is broken: its listing of uploads below {prefix!r} would never end"
                )
            params |= {"KeyMarker": key, "UploadIdMarker": upload_id}

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort a multipart upload; one that is gone is no error."""
        try:
            self._call("AbortMultipartUpload", "abort_multipart_upload", key, {"Key": key, "UploadId": upload_id})
        except StorageError as error:
            if error.status != 404:
                raise

    def server_time(self) -> dt.datetime:
        """The store's clock at its last reply, as a time with zone.

        Raises:
            StorageUnavailableError: No reply so far carried a date.
        """
        if self._server_time is None:
            raise StorageUnavailableError("the store's replies carry no Date header, so its clock is unknown")
        return self._server_time

    def close(self) -> None:
        """Nothing to close: the clients are the process's and serve later calls."""


def _info(key: str, reply: dict[str, Any]) -> ObjectInfo:
    size = int(reply.get("ContentLength") or 0)
    total = str(reply.get("ContentRange", "")).rpartition("/")[2]
    return ObjectInfo(
        key=key,
        size=int(total) if total.isdigit() else size,
        etag=str(reply.get("ETag", "")),
        last_modified=reply.get("LastModified"),
        metadata={str(name).lower(): str(value) for name, value in reply.get("Metadata", {}).items()},
    )


def _read_all(body: Any, expected: int | None, most: int | None) -> bytes | None:  # noqa: ANN401 -- botocore's StreamingBody
    """All of a body; ``None`` if it is larger than ``most``, of which then nothing is read where its size is known."""
    with contextlib.closing(body):
        data = b"" if most is not None and (expected or 0) > most else body.read(None if most is None else most + 1)
    if most is not None and max(len(data), expected or 0) > most:
        return None
    if expected is not None and len(data) != expected:
        raise EOFError(f"the body ended after {len(data)} of {expected} bytes")
    return bytes(data)
