"""Checks that a checkpoint is whole: record, index, objects, ranges, and with ``deep`` every byte."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dcp_s3._checkpoint.care.flaws import flaws_of
from dcp_s3._checkpoint.care.inventory import Record, etags, read_records
from dcp_s3._checkpoint.care.ranks import newest_save
from dcp_s3._transfer.checksum import crc32c
from dcp_s3._transfer.limits.attempt_timeout import call_all
from dcp_s3._transfer.s3.control_store import is_missing
from dcp_s3.errors import CheckpointNotFoundError, CheckpointReplacedError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from dcp_s3._checkpoint.format.index import Columns, Numbers, ObjectEntry
    from dcp_s3._checkpoint.format.layout import CheckpointUrl
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
    records = read_records(store, url, whole=True)
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
        self._columns: Columns
        self._rows: dict[str, Numbers] = {}

    def record(self, record: Record, *, deep: bool) -> None:
        try:
            columns = record.columns()
        except CorruptCheckpointError as error:
            self.problems.append(f"{error.message}; {_REMEDY}")
            return
        if flaws := flaws_of(columns, partial=record.rank is not None):
            more = f", and {len(flaws) - _NAMED} more" if len(flaws) > _NAMED else ""
            self.problems.append(
                f"{record.source}: {'; '.join(flaws[:_NAMED])}{more}: no load can give them; {_REMEDY}"
            )
        listed: dict[str, ObjectEntry] = {}
        if record.index is not None:
            listed = {entry.key: entry for entry in record.index.objects}
            self.checked_bytes += len(record.fetched.body)
        elif record.ours:
            self.problems.append(
                f"{record.source}: {record.reason}, so nothing says whether it is as it was saved; restore record and "
                "index together, or use an earlier checkpoint"
            )
        else:
            self.notes.append(
                f"{record.source}: another writer's checkpoint has no index: content not verifiable, only that every "
                "range lies within its object"
            )
        self._columns = columns
        self._rows = dict(zip(columns.object_names, columns.by_object(), strict=True))
        whole = self._objects(record, listed)
        good = self._content(whole) if deep else set()
        for saved, info in whole.items():
            if saved.etag and info.etag and saved.etag.strip('"') != info.etag.strip('"'):
                self._other_etag(saved, info, proven=saved.key in good, deep=deep)

    def _objects(self, record: Record, listed: dict[str, ObjectEntry]) -> dict[ObjectEntry, ObjectInfo]:
        """Look at each object that the record names; return those that can have the content that was saved."""
        keys = list(self._rows)
        self.objects += len(keys)
        ends = self._columns.object_ends()
        whole = {}
        for key, end, info in zip(keys, ends, call_all(self._head, keys), strict=True):
            entry = listed.get(key)
            if info is None:
                self._problem(key, "is missing")
                continue
            if entry is not None and info.size != entry.size:
                self._problem(key, f"has {info.size} bytes, not the {entry.size} that were saved")
            elif entry is not None:
                whole[entry] = info
            if end > info.size:
                what = f"ends at byte {info.size}, before the ranges that {record.name} names"
                self._problem(key, what, info.size, end)
        return whole

    def _head(self, key: str) -> ObjectInfo | None:
        try:
            return self._store.head(self._url.key(key))
        except StorageError as error:
            if is_missing(error):
                return None
            raise

    def _other_etag(self, entry: ObjectEntry, info: ObjectInfo, *, proven: bool, deep: bool) -> None:
        what = f"has the ETag {info.etag}, not the {entry.etag} of the save"
        if proven:
            self.notes.append(f"{self._url.child(entry.key)} {what}, but the content of the save: it was copied")
        elif not deep:
            self._problem(entry.key, f"{what}: it was written again, or copied; a deep check tells which")

    def _content(self, whole: dict[ObjectEntry, ObjectInfo]) -> set[str]:
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
                place = f"part {part.number} (bytes {part.start}-{part.end - 1})"
                self._problem(part.entry.key, f"{place} {what}", part.start, part.end)
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

    def _problem(self, key: str, what: str, start: int = 0, end: int | None = None) -> None:
        """Note what is wrong with an object, and which tensors have bytes of it in ``[start, end)``."""
        names = self._columns.names_of(self._hit(key, start, end))
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        concerns = f" (concerns {shown})" if names else ""
        self.problems.append(f"{self._url.child(key)} {what}{concerns}; {_REMEDY}")

    def _hit(self, key: str, start: int, end: int | None) -> Numbers:
        rows, columns = self._rows[key], self._columns
        ends = columns.row_start[rows] + columns.row_length[rows]
        hit = ends > start
        if end is not None:
            hit &= columns.row_start[rows] < end
        return np.sort(rows[hit])
