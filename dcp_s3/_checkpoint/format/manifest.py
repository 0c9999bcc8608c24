"""The integrity manifest: which objects a commit record stands for, and the CRCs of their parts."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dcp_s3._checkpoint.format.layout import DATA_PREFIX, check_relative, is_record_name, is_write_id
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FORMAT", "Manifest", "ObjectEntry"]

FORMAT: Final = 1

_MAX_INT: Final = (1 << 63) - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """One data object as it was when its upload was complete."""

    key: str
    """Name relative to the checkpoint's URL."""
    size: int
    """Bytes."""
    etag: str
    """As the store gave it; empty where it gave none."""
    part_bytes: int
    """Grid of the CRCs: bytes per part, the last one may be shorter; 1 or more."""
    crc32c: tuple[int, ...]
    """CRC32C of each part."""

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Each part as ``(start, end, crc32c)``; bytes of the object, the end exclusive."""
        for i, crc in enumerate(self.crc32c):
            yield i * self.part_bytes, min((i + 1) * self.part_bytes, self.size), crc


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one save wrote. It is live while the commit record has the hash that it names."""

    write_id: str
    """32 hex digits; the record's ``storage_meta.save_id``."""
    record: str
    """Name of the commit record: ``.metadata`` or ``__<rank>.metadata``."""
    metadata_sha256: str
    """Of the record's bytes; 64 hex digits."""
    metadata_bytes: int
    """Size of the record."""
    world_size: int
    """Ranks that took part; 1 or more."""
    created_unix_s: float
    """When it was made, by the coordinator's clock; seconds since 1970. For people only."""
    writer: str
    """Program and version."""
    objects: tuple[ObjectEntry, ...]
    conditional: bool = False
    """Whether the record's PUT has a condition, so that a copy of it that arrives late is refused. False: not, or not known."""

    def describes(self, record: bytes) -> bool:
        """Whether these bytes are the commit record that this manifest was written for."""
        return len(record) == self.metadata_bytes and hashlib.sha256(record).hexdigest() == self.metadata_sha256

    def to_json(self) -> bytes:
        """The manifest as it is stored (UTF-8)."""
        document = {
            "format": FORMAT,
            "writer": self.writer,
            "write_id": self.write_id,
            "record": self.record,
            "created_unix_s": self.created_unix_s,
            "metadata_sha256": self.metadata_sha256,
            "metadata_bytes": self.metadata_bytes,
            "world_size": self.world_size,
            "conditional": self.conditional,
            "objects": [
                {
                    "key": entry.key,
                    "size": entry.size,
                    "etag": entry.etag,
                    "part_bytes": entry.part_bytes,
                    "crc32c": struct.pack(f">{len(entry.crc32c)}I", *entry.crc32c).hex(),
                }
                for entry in self.objects
            ],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, *, source: str) -> Manifest:
        """Read a manifest that was fetched from the store. Fields that are not known are ignored.

        Args:
            data: The object's bytes.
            source: What they were read from, for the message.

        Raises:
            CorruptCheckpointError: It is no manifest, is damaged, or was written in a newer format.
        """
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{source} is not a manifest: {error}") from None
        if not isinstance(document, dict):
            raise CorruptCheckpointError(f"{source} is not a manifest: its top is no JSON object")
        check = _Fields(document, source)
        number = check.integer("format", low=1)
        if number > FORMAT:
            raise CorruptCheckpointError(
                f"{source} has manifest format {number}; this version of dcp_s3 reads up to {FORMAT}: use a newer one"
            )
        objects = document.get("objects")
        if not isinstance(objects, list):
            raise CorruptCheckpointError(f"{source} is damaged: 'objects' must be a list")
        manifest = cls(
            write_id=check.text("write_id", is_write_id, "32 hex digits"),
            record=check.text("record", is_record_name, "the name of a commit record"),
            metadata_sha256=check.text("metadata_sha256", _SHA256.fullmatch, "64 hex digits"),
            metadata_bytes=check.integer("metadata_bytes", low=0),
            world_size=check.integer("world_size", low=1),
            created_unix_s=check.seconds("created_unix_s"),
            writer=check.text("writer", bool, "text"),
            objects=tuple(_entry(item, source) for item in objects),
            conditional=document.get("conditional") is True,
        )
        if len({entry.key for entry in manifest.objects}) != len(manifest.objects):
            raise CorruptCheckpointError(f"{source} is damaged: it names an object twice")
        return manifest


def _entry(item: object, source: str) -> ObjectEntry:
    if not isinstance(item, dict):
        raise CorruptCheckpointError(f"{source} is damaged: an entry of 'objects' is no JSON object")
    check = _Fields(item, source)
    key = check_relative(check.text("key", bool, "text"), source=source)
    if not key.startswith(DATA_PREFIX):
        raise CorruptCheckpointError(f"{source} names the object {key!r}, which is not below {DATA_PREFIX}")
    size = check.integer("size", low=0)
    part_bytes = check.integer("part_bytes", low=1)
    digits = check.text("crc32c", lambda _: True, "text")
    count = -(-size // part_bytes)
    try:
        if len(digits) != 8 * count:
            raise ValueError
        crcs = struct.unpack(f">{count}I", bytes.fromhex(digits))
    except (ValueError, struct.error):
        raise CorruptCheckpointError(
            f"{source} is damaged: {key} has {size} bytes in parts of {part_bytes}, so {count} CRCs of 8 hex digits are "
            f"expected, not {len(digits)} characters"
        ) from None
    etag = check.text("etag", lambda _: True, "text")
    return ObjectEntry(key=key, size=size, etag=etag, part_bytes=part_bytes, crc32c=crcs)


class _Fields:
    """Takes values out of a JSON object, and complains about what is absent or of the wrong kind."""

    def __init__(self, document: dict[str, Any], source: str) -> None:
        self._document = document
        self._source = source

    def _damaged(self, name: str, wanted: str) -> CorruptCheckpointError:
        found = repr(self._document[name])[:80] if name in self._document else "nothing"
        return CorruptCheckpointError(f"{self._source} is damaged: {name!r} must be {wanted}, found {found}")

    def text(self, name: str, accepts: Callable[[str], object], wanted: str) -> str:
        value = self._document.get(name)
        if not isinstance(value, str) or not accepts(value):
            raise self._damaged(name, wanted)
        return value

    def integer(self, name: str, *, low: int) -> int:
        value = self._document.get(name)
        if type(value) is not int or not low <= value <= _MAX_INT:
            raise self._damaged(name, f"a whole number, {low} or more")
        return value

    def seconds(self, name: str) -> float:
        value = self._document.get(name)
        # NaN and infinity fail the comparison
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
            raise self._damaged(name, "seconds since 1970")
        return float(value)
