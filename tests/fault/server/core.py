"""The server's parts put together, and the table from operation names to their code."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from . import listing, multipart, objects
from .journal import Record
from .model import Blob, Part, Store, StoredObject
from .policy import Policy
from .request import Reply, Request, S3Error
from .rules import Script
from .settings import Settings
from .wire import Connection

Handler = Callable[[Store, Request, bytearray], Reply]

_HANDLERS: dict[str, Handler] = {
    "AbortMultipartUpload": multipart.abort,
    "CompleteMultipartUpload": multipart.complete,
    "CreateBucket": objects.create_bucket,
    "CreateMultipartUpload": multipart.create,
    "DeleteBucket": objects.delete_bucket,
    "DeleteObject": objects.delete_object,
    "DeleteObjects": objects.delete_objects,
    "GetBucketLocation": objects.bucket_location,
    "GetBucketVersioning": objects.bucket_versioning,
    "GetObject": objects.get_object,
    "GetObjectLockConfiguration": objects.object_lock_configuration,
    "HeadBucket": objects.head_bucket,
    "HeadObject": objects.get_object,
    "ListBuckets": objects.list_buckets,
    "ListMultipartUploads": listing.list_uploads,
    "ListObjects": listing.list_objects,
    "ListObjectsV2": listing.list_objects,
    "ListParts": multipart.list_parts,
    "PutObject": objects.put_object,
    "UploadPart": multipart.upload_part,
}


class Core:
    """Store, script of faults, log and counters; lives on the event loop's thread."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.store = Store(settings)
        self.script = Script(seed)
        self.policy = Policy()
        self.records: list[Record] = []
        self.counters: dict[str, int] = {"accepted": 0, "open": 0, "peak_open": 0, "failed_handshakes": 0, "refused": 0}
        self.bugs: list[str] = []
        self.detached: set[asyncio.Task[None]] = set()

    @property
    def settings(self) -> Settings:
        """The switches in force."""
        return self.store.settings

    def detach(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside the connections, until the server stops."""

        def ended(task: asyncio.Task[None]) -> None:
            self.detached.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.note_bug(error)

        task = asyncio.get_running_loop().create_task(work)
        self.detached.add(task)
        task.add_done_callback(ended)

    def note_bug(self, error: BaseException) -> None:
        """Keep an exception of the server itself, so that the test that met it fails."""
        self.bugs.append("".join(traceback.format_exception(error)))

    def open_record(self, request: Request, connection: Connection) -> Record:
        """Begin the log entry of a request whose head is complete."""
        record = Record(
            index=len(self.records),
            t_start=time.monotonic(),
            connection=connection.number,
            endpoint=connection.endpoint,
            method=request.head.method,
            operation=request.operation,
            bucket=request.bucket,
            key=request.key,
            part=request.part,
            upload_id=request.upload_id,
            query=request.query,
            headers=request.headers,
            access_key=request.access_key,
            age_s=self.policy.age_s(self.store, request),
            forbidden=self.policy.forbids(self.store, request.operation),
        )
        self.records.append(record)
        return record

    def perform(self, request: Request, body: bytearray, record: Record) -> Reply:
        """Check rights and do the operation; an S3Error propagates."""
        if request.operation == "CompleteMultipartUpload":
            record.listed = [int(number) for number in re.findall(rb"<PartNumber>\s*(\d+)\s*</PartNumber>", body)]
        self.policy.check(self.store, request, record.age_s)
        handler = _HANDLERS.get(request.operation)
        if handler is None:
            raise S3Error("NotImplemented", f"{request.operation} is not part of this server")
        return handler(self.store, request, body)

    def tamper(self, request: Request, kind: Any, at: int) -> None:
        """Damage what an operation has just stored; ``kind`` is one of the kinds of model.Tamper."""
        stored = self._subject(request)
        if stored is None:
            return
        if kind == "lose" and isinstance(stored, StoredObject):
            versions = self.store.bucket(request.bucket)[request.key]
            versions.remove(stored)
            if not versions:
                del self.store.bucket(request.bucket)[request.key]
            return
        stored.blob = stored.blob.tampered(kind, at)

    def _subject(self, request: Request) -> StoredObject | Part | None:
        if request.operation == "UploadPart":
            upload = self.store.uploads.get(request.upload_id or "")
            return None if upload is None else upload.parts.get(request.part or 0)
        return self.store.latest(request.bucket, request.key)

    def put_directly(
        self, bucket: str, key: str, data: bytes, headers: dict[str, str], age_s: float, etag: str
    ) -> None:
        """Store an object without a request."""
        blob = Blob.keeping(data, key, self.settings.discard_bodies)
        self.store.put(bucket, key, StoredObject(blob, etag, self.store.now() - age_s, headers))
