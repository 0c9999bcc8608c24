"""A bucket in memory that answers like ControlStore, with a clock that the test sets and a log of the requests."""

from __future__ import annotations

import datetime as dt
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import AccessDeniedError, S3Config, StorageError
from dcp_s3._checkpoint.format.layout import CheckpointUrl, manifest_name
from dcp_s3._checkpoint.format.manifest import Manifest, ObjectEntry
from dcp_s3._checkpoint.pickles.metadata import dumps
from dcp_s3._transfer.checksum import crc32c
from dcp_s3._transfer.s3.control_store import Fetched, ObjectInfo, UploadInfo
from tests.unit.records import make_metadata

EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)


@dataclass
class Stored:
    body: bytes
    made: dt.datetime
    etag: str
    metadata: dict[str, str] = field(default_factory=dict)


class FakeStore:
    def __init__(self, bucket: str = "ckpt") -> None:
        self.bucket = bucket
        self.config = S3Config()
        self.now = EPOCH
        self.objects: dict[str, Stored] = {}
        self.uploads: list[UploadInfo] = []
        self.log: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda operation, key: None
        self._lock = threading.RLock()

    def _request(self, operation: str, key: str) -> None:
        self.log.append((operation, key))
        self.before(operation, key)

    def _stored(self, operation: str, key: str) -> Stored:
        with self._lock:
            self._request(operation, key)
            if key not in self.objects:
                error = StorageError("no such key")
                raise error.with_context(status=404, code="NoSuchKey", key=key, operation=operation)
            return self.objects[key]

    def _info(self, key: str, stored: Stored) -> ObjectInfo:
        return ObjectInfo(key, len(stored.body), stored.etag, stored.made, dict(stored.metadata))

    def get(self, key: str, *, byte_range: tuple[int, int] | None = None) -> Fetched:
        stored = self._stored("get", key)
        if byte_range is not None and byte_range[0] >= len(stored.body):
            raise StorageError("range").with_context(status=416, code="InvalidRange")
        body = stored.body if byte_range is None else stored.body[byte_range[0] : byte_range[1]]
        return Fetched(body, self._info(key, stored), self.now)

    def head(self, key: str) -> ObjectInfo:
        return self._info(key, self._stored("head", key))

    def put(self, key: str, body: bytes, *, content_type: str = "", metadata: dict[str, str] | None = None) -> str:
        with self._lock:
            self._request("put", key)
            etag = f'"{hashlib.sha256(body).hexdigest()[:8]}-{len(self.log)}"'
            self.objects[key] = Stored(body, self.now, etag, metadata or {})
            return etag

    def delete(self, key: str) -> None:
        with self._lock:
            self._request("delete", key)
            self.objects.pop(key, None)

    def list(self, prefix: str, *, page_size: int = 1000) -> Iterator[ObjectInfo]:
        with self._lock:
            self._request("list", prefix)
            found = [self._info(key, self.objects[key]) for key in sorted(self.objects) if key.startswith(prefix)]
        yield from found

    def list_prefixes(self, prefix: str, *, page_size: int = 1000) -> Iterator[str]:
        with self._lock:
            self._request("list_prefixes", prefix)
            below = {
                prefix + key[len(prefix) :].partition("/")[0] + "/"
                for key in self.objects
                if key.startswith(prefix) and "/" in key[len(prefix) :]
            }
        yield from sorted(below)

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        self._request("list_uploads", prefix)
        yield from [upload for upload in self.uploads if upload.key.startswith(prefix)]

    def abort_upload(self, key: str, upload_id: str) -> None:
        with self._lock:
            self._request("abort", key)
            self.uploads = [upload for upload in self.uploads if upload.upload_id != upload_id]

    def server_time(self) -> dt.datetime:
        return self.now

    def start_upload(self, key: str) -> None:
        self.uploads.append(UploadInfo(key, f"upload-{len(self.uploads)}", self.now))


def denied(operation: str, key: str) -> None:
    raise AccessDeniedError("no").with_context(status=403, code="AccessDenied", key=key, operation=operation)


PART = 1000


def save(
    store: FakeStore,
    url: CheckpointUrl,
    *,
    write_id: str = "ab" * 16,
    token: str = "0123456789abcdef",
    record: str = ".metadata",
    manifest: bool = True,
    hint: bool = True,
    world_size: int = 1,
    change: Callable[[Metadata], None] = lambda metadata: None,
) -> list[str]:
    """Put a whole small checkpoint (4 chunks of 1,088 bytes and an object of 400); return its keys, the record's last."""
    path = f"data/{token}/__0_0.distcp"
    body = bytes(range(256)) * 18 + bytes(144)
    etag = store.put(url.key(path), body)
    metadata = make_metadata(path=path)
    metadata.storage_meta.save_id = write_id
    change(metadata)
    data = dumps(metadata)
    crcs = tuple(crc32c(body[start : start + PART]) for start in range(0, len(body), PART))
    entry = ObjectEntry(key=path, size=len(body), etag=etag, part_bytes=PART, crc32c=crcs)
    document = Manifest(
        write_id=write_id,
        record=record,
        metadata_sha256=hashlib.sha256(data).hexdigest(),
        metadata_bytes=len(data),
        world_size=world_size,
        created_unix_s=0.0,
        writer="test",
        objects=(entry,),
    )
    keys = [url.key(path)]
    if manifest:
        keys.append(url.key(manifest_name(write_id)))
        store.put(keys[-1], document.to_json())
    keys.append(url.key(record))
    store.put(keys[-1], data, metadata={"dcp-s3-write-id": write_id} if hint else None)
    return keys


def stock(
    store: FakeStore, url: CheckpointUrl, *, change: Callable[[Metadata], None] = lambda metadata: None
) -> list[str]:
    """Put a checkpoint as FileSystemWriter lays it out."""
    metadata = make_metadata(path="__0_0.distcp")
    metadata.storage_meta.save_id = "66f5e56c-1d57-4b25-b950-52c2254a8d6e"
    for info in metadata.storage_data.values():
        vars(info).pop("raw_offset", None)
        vars(info).pop("crc32c", None)
    change(metadata)
    store.put(url.key("__0_0.distcp"), bytes(4752))
    store.put(url.key(".metadata"), dumps(metadata))
    return [url.key("__0_0.distcp"), url.key(".metadata")]


def flip(store: FakeStore, key: str, position: int) -> None:
    body = bytearray(store.objects[key].body)
    body[position] ^= 1
    store.objects[key].body = bytes(body)
