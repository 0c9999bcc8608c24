"""Checks that a checkpoint is whole: record, manifest, objects, ranges, and with ``deep`` every byte. Needs no torch."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from dcp_s3._checkpoint.care.inventory import Record, etags, read_records
from dcp_s3._checkpoint.care.ranks import newest_save
from dcp_s3._transfer.checksum import crc32c
from dcp_s3._transfer.limits.attempt_timeout import call_all
from dcp_s3._transfer.s3.control_store import is_missing
from dcp_s3.errors import CheckpointNotFoundError, CheckpointReplacedError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._checkpoint.format.manifest import ObjectEntry
    from dcp_s3._checkpoint.pickles.standin import Entry
    from dcp_s3._transfer.s3.control_store import ControlStore, ObjectInfo

SLICE_BYTES: Final = 8 << 20
"""A part is read in requests of this size; each thread holds one."""
_SHOWN: Final = 3
_NAMED: Final = 20
_REMEDY: Final = "restore it (an older version, a replica), or use an earlier checkpoint"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What :func:`dcp_s3.verify` found.

    Attributes:
        url: The checkpoint.
        ok: Whether there is no problem.
        problems: One text for each: which object, what is wrong with it, what to do.
        notes: What could not be checked, or is unusual and harmless.
        objects: How many data objects were looked at.
        checked_bytes: Bytes whose content was checked: the records, and with ``deep`` the data.
        seconds: How long it took.
    """

    url: str
    ok: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    objects: int
    checked_bytes: int
    seconds: float


class _Part(NamedTuple):
    entry: ObjectEntry
    number: int
    start: int
    end: int
    crc: int


def verify_checkpoint(store: ControlStore, url: CheckpointUrl, *, deep: bool) -> VerifyReport:
    """Check one checkpoint.

    Args:
        store: The bucket.
        url: The checkpoint's URL, not one above it.
        deep: Read every object and compare the CRCs of its parts.

    Raises:
        CheckpointNotFoundError: No commit record is there.
        CheckpointReplacedError: A save replaced the checkpoint meanwhile.
        StorageError: The store refused or failed.
    """
    start = time.monotonic()
    records = read_records(store, url)
    if not records:
        raise CheckpointNotFoundError(f"there is no checkpoint at {url}: neither .metadata nor __<rank>.metadata")
    check = _Check(store, url)
    found = newest_save(records)
    if found.problem:
        check.problems.append(f"{url}: {found.problem}")
    if found.note:
        check.notes.append(f"{url}: {found.note}")
    check.notes += [
        f"{record.source} is no part of this checkpoint, and was not checked: it is of an older save, or hidden by .metadata"
        for record in found.stale
    ]
    for record in found.records:
        check.record(record, deep=deep)
    if check.problems:
        known = {record.name: record.fetched.info.etag for record in records}
        if etags(store, url, known) != known:
            raise CheckpointReplacedError(f"{url} was replaced while it was verified; verify it again")
    return VerifyReport(
        url=str(url),
        ok=not check.problems,
        problems=tuple(check.problems),
        notes=tuple(check.notes),
        objects=check.objects,
        checked_bytes=check.checked_bytes,
        seconds=time.monotonic() - start,
    )


class _Check:
    def __init__(self, store: ControlStore, url: CheckpointUrl) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.objects = 0
        self.checked_bytes = 0
        self._store = store
        self._url = url

    def record(self, record: Record, *, deep: bool) -> None:
        try:
            summary = record.summary()
        except CorruptCheckpointError as error:
            self.problems.append(f"{error.message}; {_REMEDY}")
            return
        if flaws := summary.flaws(partial=record.rank is not None):
            more = f", and {len(flaws) - _NAMED} more" if len(flaws) > _NAMED else ""
            self.problems.append(
                f"{record.source}: {'; '.join(flaws[:_NAMED])}{more}: no load can give them; {_REMEDY}"
            )
        manifest = record.manifest
        listed: dict[str, ObjectEntry] = {}
        if manifest is not None:
            listed = {entry.key: entry for entry in manifest.objects}
            self.checked_bytes += len(record.fetched.body)
        elif record.is_ours(summary):
            self.problems.append(
                f"{record.source}: {record.reason}, so nothing says whether it is as it was saved; restore record and "
                "manifest together, or use an earlier checkpoint"
            )
        else:
            self.notes.append(
                f"{record.source}: another writer's checkpoint has no manifest: content not verifiable, only that every "
                "range lies within its object"
            )
        ranges: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in summary.entries:
            ranges[entry.relative_path].append(entry)
        whole = self._objects(record, listed, ranges)
        good = self._content(whole, ranges) if deep else set()
        for saved, info in whole.items():
            if saved.etag and info.etag and saved.etag.strip('"') != info.etag.strip('"'):
                self._other_etag(saved, info, ranges.get(saved.key, []), proven=saved.key in good, deep=deep)

    def _objects(
        self, record: Record, listed: dict[str, ObjectEntry], ranges: dict[str, list[Entry]]
    ) -> dict[ObjectEntry, ObjectInfo]:
        """Look at each object that manifest or record names; return those that can have the content that was saved."""
        keys = [*listed, *(key for key in ranges if key not in listed)]
        self.objects += len(keys)
        whole = {}
        for key, info in zip(keys, call_all(self._head, keys), strict=True):
            entry, inside = listed.get(key), ranges.get(key, [])
            if record.manifest is not None and entry is None:
                self._problem(key, f"is named by {record.name} but not by its manifest", inside)
            if info is None:
                self._problem(key, "is missing", inside)
                continue
            if entry is not None and info.size != entry.size:
                self._problem(key, f"has {info.size} bytes, not the {entry.size} that were saved", inside)
            elif entry is not None:
                whole[entry] = info
            if outside := [item for item in inside if item.offset + item.length > info.size]:
                self._problem(key, f"ends at byte {info.size}, before the ranges that {record.name} names", outside)
        return whole

    def _head(self, key: str) -> ObjectInfo | None:
        try:
            return self._store.head(self._url.key(key))
        except StorageError as error:
            if is_missing(error):
                return None
            raise

    def _other_etag(
        self, entry: ObjectEntry, info: ObjectInfo, inside: list[Entry], *, proven: bool, deep: bool
    ) -> None:
        what = f"has the ETag {info.etag}, not the {entry.etag} of the save"
        if proven:
            self.notes.append(f"{self._url.child(entry.key)} {what}, but the content of the save: it was copied")
        elif not deep:
            self._problem(entry.key, f"{what}: it was written again, or copied; a deep check tells which", inside)

    def _content(self, whole: dict[ObjectEntry, ObjectInfo], ranges: dict[str, list[Entry]]) -> set[str]:
        """Compare the CRC of every part; return the keys of the objects that are as they were saved."""
        good = {entry.key for entry in whole}
        parts = [
            _Part(entry, number, start, end, crc)
            for entry in whole
            for number, (start, end, crc) in enumerate(entry.parts(), 1)
        ]
        for part, what in zip(parts, call_all(self._differs, parts), strict=True):
            self.checked_bytes += part.end - part.start
            if what:
                good.discard(part.entry.key)
                hit = [
                    item
                    for item in ranges.get(part.entry.key, [])
                    if item.offset < part.end and item.offset + item.length > part.start
                ]
                self._problem(part.entry.key, f"part {part.number} (bytes {part.start}-{part.end - 1}) {what}", hit)
        return good

    def _differs(self, part: _Part) -> str:
        """Read a part slice by slice; return what is wrong with it, or an empty text."""
        crc = 0
        for start in range(part.start, part.end, SLICE_BYTES):
            end = min(start + SLICE_BYTES, part.end)
            try:
                body = self._store.get(self._url.key(part.entry.key), byte_range=(start, end)).body
            except StorageError as error:
                if is_missing(error) or error.status == 416:
                    return "has gone while it was being checked"
                raise
            if len(body) != end - start:
                return f"is cut off: {len(body)} bytes came for {end - start} at {start}"
            crc = crc32c(body, crc)
        return "" if crc == part.crc else f"has CRC32C {crc:08x}, not the {part.crc:08x} that was saved"

    def _problem(self, key: str, what: str, hit: Iterable[Entry]) -> None:
        names = list(dict.fromkeys(entry.fqn for entry in hit))
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        concerns = f" (concerns {shown})" if names else ""
        self.problems.append(f"{self._url.child(key)} {what}{concerns}; {_REMEDY}")
