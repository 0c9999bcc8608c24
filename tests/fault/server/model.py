"""What the store holds: buckets, object versions, multipart uploads and their parts."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from .request import S3Error
from .settings import Settings

_ZEROS = memoryview(bytes(2**20))
_NUMBERS = itertools.count(1)

Tamper = Literal["flip", "truncate", "lose"]


class Blob:
    """Immutable bytes in pieces; a piece given as a number stands for that many discarded bytes."""

    def __init__(self, pieces: Iterable[bytes | bytearray | int] = ()) -> None:
        self.pieces = tuple(pieces)
        self.size = sum(piece if isinstance(piece, int) else len(piece) for piece in self.pieces)

    @classmethod
    def keeping(cls, data: bytes | bytearray, key: str, discard: str | None) -> Blob:
        """Hold ``data``, or only its length if ``key`` matches the regular expression ``discard``."""
        return cls([len(data) if discard is not None and re.search(discard, key) else data])

    @classmethod
    def joined(cls, blobs: Iterable[Blob]) -> Blob:
        """Concatenate without copying."""
        return cls(itertools.chain.from_iterable(blob.pieces for blob in blobs))

    @property
    def discarded(self) -> bool:
        """Whether some of the bytes were not kept."""
        return any(isinstance(piece, int) for piece in self.pieces)

    def slices(self, start: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """Yield the bytes [start, end) in views; discarded bytes read as zeros."""
        end, at = self.size if end is None else min(end, self.size), 0
        for piece in self.pieces:
            length = piece if isinstance(piece, int) else len(piece)
            first, last = max(start - at, 0), min(end - at, length)
            if first < last:
                if isinstance(piece, int):
                    for offset in range(first, last, len(_ZEROS)):
                        yield _ZEROS[: min(len(_ZEROS), last - offset)]
                else:
                    yield memoryview(piece)[first:last]
            at += length

    def read(self) -> bytes:
        """Return all bytes in one object."""
        return b"".join(self.slices())

    def tampered(self, kind: Tamper, at: int) -> Blob:
        """Return a damaged copy: lowest bit of byte ``at`` flipped (negative: from the end), cut to ``at`` bytes, or empty."""
        if kind == "lose":
            return Blob()
        data = bytearray(self.read())
        if kind == "truncate":
            return Blob([data[:at]])
        data[at] ^= 1
        return Blob([data])


@dataclasses.dataclass
class StoredObject:
    """One version of an object; ``marker`` is a delete marker."""

    blob: Blob
    etag: str
    last_modified: float
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    checksum_type: str = "FULL_OBJECT"
    version_id: str | None = None
    marker: bool = False
    parts: int | None = None


@dataclasses.dataclass
class Part:
    """An uploaded part, as its last acknowledged attempt left it."""

    blob: Blob
    size: int
    etag: str
    checksums: dict[str, str]
    last_modified: float


@dataclasses.dataclass
class Upload:
    """A multipart upload; ``state`` outlives its end, so that late calls can be answered."""

    upload_id: str
    bucket: str
    key: str
    headers: dict[str, str]
    algorithm: str | None
    checksum_type: str
    initiated: float
    parts: dict[int, Part] = dataclasses.field(default_factory=dict)
    state: Literal["open", "completed", "aborted"] = "open"
    result: dict[str, Any] = dataclasses.field(default_factory=dict)  # the elements of the Complete answer


STORED_HEADERS = re.compile(
    r"x-amz-meta-|x-amz-server-side-encryption|x-amz-storage-class$|x-amz-tagging$|x-amz-object-lock-"
    r"|content-type$|content-disposition$|content-language$|cache-control$|expires$|content-encoding$"
)


def stored_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers that become part of an object; an SSE-C key stays out, its MD5 stays."""
    kept = {
        name: value
        for name, value in headers.items()
        if STORED_HEADERS.match(name) and name != "x-amz-server-side-encryption-customer-key"
    }
    encodings = [item.strip() for item in kept.pop("content-encoding", "").split(",")]
    encodings = [item for item in encodings if item and item != "aws-chunked"]
    return kept | ({"content-encoding": ",".join(encodings)} if encodings else {})


class Store:
    """All state of the server. Used on the event loop's thread only, so each operation is atomic."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.buckets: dict[str, dict[str, list[StoredObject]]] = {}
        self.uploads: dict[str, Upload] = {}

    def now(self) -> float:
        """Return the store's clock in Unix seconds."""
        return time.time() + self.settings.clock_offset_s

    @staticmethod
    def unique(kind: str) -> str:
        """Return an identifier that this process has not given out before."""
        return f"{kind}{next(_NUMBERS):08d}"

    def bucket(self, name: str) -> dict[str, list[StoredObject]]:
        """Return a bucket's keys."""
        if name not in self.buckets:
            raise S3Error("NoSuchBucket", "The specified bucket does not exist")
        return self.buckets[name]

    def latest(self, bucket: str, key: str) -> StoredObject | None:
        """Return the current version of a key, None if there is none."""
        versions = self.bucket(bucket).get(key)
        return None if not versions or versions[-1].marker else versions[-1]

    def version(self, bucket: str, key: str, version_id: str | None) -> StoredObject | None:
        """Return one version of a key, the current one for None."""
        if version_id is None:
            return self.latest(bucket, key)
        found = [item for item in self.bucket(bucket).get(key, []) if item.version_id == version_id]
        if not found:
            raise S3Error("NoSuchVersion", "The specified version does not exist")
        return found[0]

    def put(self, bucket: str, key: str, item: StoredObject) -> None:
        """Make ``item`` the current version."""
        versions = self.bucket(bucket).setdefault(key, [])
        if self.settings.versioned:
            item.version_id = self.unique("v")
            versions.append(item)
        else:
            versions[:] = [item]

    def delete(self, bucket: str, key: str, version_id: str | None = None) -> str | None:
        """Delete a key (a marker in a versioned bucket) or one version; return the marker's version id."""
        keys = self.bucket(bucket)
        if self.settings.object_lock and key in keys:
            raise S3Error("AccessDenied", "Access Denied because object protected by object lock.")
        if version_id is not None:
            kept = [item for item in keys.get(key, []) if item.version_id != version_id]
            keys[key] = kept
        elif self.settings.versioned:
            marker = StoredObject(Blob(), "", self.now(), version_id=self.unique("v"), marker=True)
            keys.setdefault(key, []).append(marker)
            return marker.version_id
        else:
            keys.pop(key, None)
        if not keys.get(key, True):
            del keys[key]
        return None

    def current(self, bucket: str, prefix: str = "") -> list[tuple[str, StoredObject]]:
        """Return the current versions below a prefix in key order (UTF-8 bytes)."""
        found = [
            (key, versions[-1])
            for key, versions in self.bucket(bucket).items()
            if versions and not versions[-1].marker and key.startswith(prefix)
        ]
        return sorted(found, key=lambda pair: pair[0].encode())

    def open_uploads(self, bucket: str | None = None) -> list[Upload]:
        """Return the uploads neither completed nor aborted, ordered as their listing is."""
        found = [u for u in self.uploads.values() if u.state == "open" and bucket in (None, u.bucket)]
        return sorted(found, key=lambda upload: (upload.key.encode(), upload.upload_id))
