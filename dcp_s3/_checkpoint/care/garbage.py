"""Deletes what no commit record names: the objects of saves that failed or were replaced, and their open uploads.

Only objects of exactly our name pattern are ever touched, and each belongs to the checkpoint directly above it. One of
them goes when (a) no live index names it, (b) it is older than the margin by the store's own clock, and (c) older than
the deadline of the save that wrote it, plus some slack: a save keeps its deadline in the user metadata of what it writes.
The objects are listed before the records are read: a commit in between is seen. Since a save commits within its deadline
or not at all, nothing that is older than deadline and slack can still become live.

Where a store keeps no user metadata the margin alone stands, and the save looks for itself (``presence.py``). So it is
with an open upload, whose metadata nobody can read: it waits as long as other objects of its save, or at its URL, tell. An
abort that comes too early fails the save and takes nothing that was committed.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from dcp_s3._checkpoint.care.inventory import etags, natural, rank_records, read_records
from dcp_s3._checkpoint.format.layout import (
    DATA_PREFIX,
    RECORD_NAME,
    CheckpointUrl,
    index_name,
    index_write_id,
    is_record_name,
    owner_of,
)
from dcp_s3._transfer.limits.attempt_timeout import call_all
from dcp_s3._transfer.s3.control_store import SAVE_FIELD, is_missing
from dcp_s3.config import DEFAULT_DEADLINE_S
from dcp_s3.errors import AccessDeniedError, ConfigError, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dcp_s3._checkpoint.care.inventory import Record
    from dcp_s3._transfer.s3.control_store import ControlStore, ObjectInfo, UploadInfo

_log = logging.getLogger(__name__)

SLACK_S: Final = 900.0
"""Beyond the deadline: a PUT that was signed just before it may still be under way."""
_BATCH: Final = 500
"""So many deletions between two looks at the commit records."""
_VERSIONS_DAYS: Final = 7
_SECONDS = re.compile(r"[0-9]{1,12}")
_LONGEST_MARGIN_S: Final = 100 * 366 * 86400.0


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What was collected, or with ``dry_run`` would be.

    Attributes:
        url: Where it was looked for: at this URL and below.
        dry_run: Nothing was deleted.
        older_than_s: The margin, seconds.
        removed: Keys of the objects, in the order of the bucket.
        removed_bytes: Their size.
        aborted: Keys of the multipart uploads; a key can occur more than once.
        waiting: How many objects no record names, but are too young: the save that wrote them could still commit.
        live: How many objects a record's index names.
        refused: Keys that the store did not let go (Object Lock, permissions).
        skipped: Checkpoints that were left alone, each with the reason.
        notes: What else there is to know.
        lifecycle_rule: A lifecycle configuration (JSON) for the prefix; of a URL without one for the whole bucket. On a
            versioned bucket a deleted object stays as an old version until such a rule, or somebody, removes it. To apply
            a configuration replaces all rules that the bucket has: add this one to those.
        seconds: How long it took.
    """

    url: str
    dry_run: bool
    older_than_s: float
    removed: tuple[str, ...] = ()
    removed_bytes: int = 0
    aborted: tuple[str, ...] = ()
    waiting: int = 0
    live: int = 0
    refused: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lifecycle_rule: str = ""
    seconds: float = 0.0


def check_margin(older_than_s: float, save_deadline_s: float | None, *, no_writer_runs: bool) -> None:
    """Refuse a margin within which a save could still commit.

    Raises:
        ConfigError: The margin is negative or endless, or too small beside a running writer.
    """
    if not 0 <= older_than_s <= _LONGEST_MARGIN_S:
        raise ConfigError(
            f"older_than_s must be 0 to {_LONGEST_MARGIN_S:.0f} seconds (100 years), got {older_than_s:g}"
        )
    deadline = DEFAULT_DEADLINE_S if save_deadline_s is None else save_deadline_s
    if older_than_s < deadline + SLACK_S and not no_writer_runs:
        raise ConfigError(
            f"older_than_s={older_than_s:g} is less than the save deadline of {deadline:g} s plus {SLACK_S:g} s: objects of a "
            "save that still runs could be deleted; take a larger margin, or say no_writer_runs=True if that is so"
        )


def lifecycle_rule(url: CheckpointUrl) -> str:
    """A lifecycle configuration that removes old versions and stale uploads below a URL, as JSON.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutBucketLifecycleConfiguration.html
    """
    rule = {
        "ID": "dcp-s3",
        "Status": "Enabled",
        "Filter": {"Prefix": url.key("")},
        "NoncurrentVersionExpiration": {"NoncurrentDays": _VERSIONS_DAYS},
        "Expiration": {"ExpiredObjectDeleteMarker": True},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _VERSIONS_DAYS},
    }
    return json.dumps({"Rules": [rule]})


def collect(
    store: ControlStore, root: CheckpointUrl, *, dry_run: bool, older_than_s: float, no_writer_runs: bool = False
) -> GarbageReport:
    """Collect garbage at and below ``root``. The margin must have been checked.

    Args:
        store: The bucket.
        root: Where to look.
        dry_run: Only report.
        older_than_s: The margin, seconds.
        no_writer_runs: The margin alone counts, and not what the objects tell of the deadline of their save.

    Raises:
        StorageError: The store refused or failed; what was deleted until then is gone.
    """
    run = _Run(store, root, dry_run=dry_run, older_than_s=older_than_s, no_writer_runs=no_writer_runs)
    run.list_objects()
    run.list_uploads_if_possible()
    for owner in sorted({*run.objects, *run.uploads}, key=natural):
        run.collect_at(CheckpointUrl(root.bucket, owner))
    return run.report()


def abort_uploads(
    store: ControlStore, root: CheckpointUrl, *, dry_run: bool, older_than_s: float, no_writer_runs: bool = False
) -> GarbageReport:
    """Abort the stale multipart uploads of our objects at and below ``root``, and nothing else.

    Args:
        store: The bucket.
        root: Where to look.
        dry_run: Only report.
        older_than_s: The margin, seconds.
        no_writer_runs: The margin alone counts.

    Raises:
        StorageError: The store refused or failed.
    """
    run = _Run(store, root, dry_run=dry_run, older_than_s=older_than_s, no_writer_runs=no_writer_runs)
    run.list_uploads()
    for owner in sorted(run.uploads, key=natural):
        run.abort_at(CheckpointUrl(root.bucket, owner))
    return run.report()


@dataclass
class _Found:
    """Our objects directly below one checkpoint's URL."""

    stale: list[ObjectInfo] = field(default_factory=list)
    young: list[ObjectInfo] = field(default_factory=list)


class _Run:
    def __init__(
        self, store: ControlStore, root: CheckpointUrl, *, dry_run: bool, older_than_s: float, no_writer_runs: bool
    ) -> None:
        self.objects: defaultdict[str, _Found] = defaultdict(_Found)
        self.uploads: defaultdict[str, list[UploadInfo]] = defaultdict(list)
        self._start = time.monotonic()
        self._store = store
        self._root = root
        self._dry_run = dry_run
        self._margin = dt.timedelta(seconds=older_than_s)
        self._no_writer_runs = no_writer_runs
        self._now: dt.datetime | None = None
        self._protected: list[str] = []
        self._longest = self._margin
        self._unasked: StorageError | None = None
        self._removed: list[ObjectInfo] = []
        self._aborted: list[str] = []
        self._waiting = 0
        self._live = 0
        self._refused: list[str] = []
        self._refusal: AccessDeniedError | None = None
        self._skipped: list[str] = []
        self._notes: list[str] = []

    def list_objects(self) -> None:
        """Find our objects. The store's clock is read from the first page: later ones would make objects look older."""
        beside = None
        for info in self._store.list(self._root.key("")):
            self._now = self._now or self._store.server_time()
            folder, _, name = info.key.rpartition("/")
            if is_record_name(name):
                beside = folder  # it comes before the objects beside it: another writer's, at a URL like data/<token>
            elif (folder != beside or not name.endswith(".distcp")) and (owner := self._owner(info.key)) is not None:
                found = self.objects[owner]
                (found.stale if self._is_stale(info.last_modified, self._margin) else found.young).append(info)

    def list_uploads(self) -> None:
        """Find the open multipart uploads of our objects that are older than the margin."""
        for upload in self._store.list_uploads(self._root.key("")):
            self._now = self._now or self._store.server_time()
            owner = self._owner(upload.key)
            if owner is not None and upload.key.endswith(".distcp") and self._is_stale(upload.initiated, self._margin):
                self.uploads[owner].append(upload)

    def list_uploads_if_possible(self) -> None:
        """The same; a store that cannot list them, or does not permit it, is noted."""
        try:
            self.list_uploads()
        except StorageUnavailableError:
            raise
        except StorageError as error:
            self.uploads.clear()
            self._notes.append(f"open multipart uploads could not be listed, so none was aborted: {error}")

    def _owner(self, key: str) -> str | None:
        owner = owner_of(key)
        # an object right below the root can belong to a checkpoint above it, which was not asked about
        if owner is None or not (owner == self._root.prefix or owner.startswith(self._root.key(""))):
            return None
        return owner

    def _is_stale(self, made: dt.datetime | None, margin: dt.timedelta) -> bool:
        return made is not None and self._now is not None and self._now - made > margin

    def collect_at(self, url: CheckpointUrl) -> None:
        """Collect the garbage of one checkpoint's URL, without those below it."""
        found = self.objects[url.prefix]
        records = read_records(self._store, url)
        if unknown := [record for record in records if record.index is None]:
            reasons = "; ".join(f"{record.name}: {record.reason}" for record in unknown)
            self._skipped.append(
                f"{url} has a commit record without a matching index, so nothing there is touched ({reasons})"
            )
            return
        live = {url.key(name) for record in records for name in _names(record)}
        self._live += sum(info.key in live for info in (*found.stale, *found.young))
        self._waiting += sum(info.key not in live for info in found.young)
        garbage = self._outlived([info for info in found.stale if info.key not in live])
        # indexes last, in a round of their own: until its objects are gone, an index tells what they were
        rounds = [[info for info in garbage if _is_index(info) is last] for last in (False, True)]
        if all(self._remove(url, records, keys) for keys in rounds):
            self.abort_at(url)

    def _outlived(self, garbage: list[ObjectInfo]) -> list[ObjectInfo]:
        """Those whose save is over. One request for all that a rank wrote in one save, and one per index."""
        if self._no_writer_runs:
            return garbage
        first = {_written_together(info.key): info for info in reversed(garbage)}
        margins = dict(zip(first, call_all(self._margin_of, first.values()), strict=True))
        over = []
        for info in garbage:
            if self._is_over(info.key, info.last_modified, margins):
                over.append(info)
            else:
                self._waiting += 1
        return over

    def _is_over(self, key: str, made: dt.datetime | None, margins: dict[str, dt.timedelta]) -> bool:
        margin = margins[_written_together(key)]
        if self._is_stale(made, margin):
            return True
        self._protected.append(key)
        if margin != dt.timedelta.max:
            self._longest = max(self._longest, margin)
        return False

    def _margin_of(self, info: ObjectInfo) -> dt.timedelta:
        """From what age on the save that wrote an object can no longer commit."""
        try:
            deadline = self._store.head(info.key).metadata.get(SAVE_FIELD, "")
        except StorageUnavailableError:
            raise
        except StorageError as error:
            if is_missing(error):
                return self._margin  # somebody else has just deleted it
            self._unasked = error
            return dt.timedelta.max
        if not _SECONDS.fullmatch(deadline):
            return self._margin
        return max(self._margin, dt.timedelta(seconds=int(deadline) + SLACK_S))

    def abort_at(self, url: CheckpointUrl) -> None:
        """Abort the uploads at one checkpoint's URL whose save is over, as far as that can be known."""
        uploads = self.uploads[url.prefix]
        if not self._no_writer_runs:
            folders = list(dict.fromkeys(_written_together(upload.key) for upload in uploads))
            margins = dict(zip(folders, call_all(lambda folder: self._margin_in(url, folder), folders), strict=True))
            uploads = [upload for upload in uploads if self._is_over(upload.key, upload.initiated, margins)]
        self.abort(uploads)

    def _margin_in(self, url: CheckpointUrl, folder: str) -> dt.timedelta:
        """What an object beside an upload tells of their save; where it has none, any object at the URL of the job's saves."""
        try:
            for prefix in (f"{folder}/", url.key(DATA_PREFIX)):
                for info in islice(self._store.list(prefix, page_size=1), 1):
                    if owner_of(info.key) == url.prefix:
                        return self._margin_of(info)
        except AccessDeniedError:
            _log.debug("listing the objects of %s is not permitted", url)
        return self._margin

    def _remove(self, url: CheckpointUrl, records: list[Record], garbage: list[ObjectInfo]) -> bool:
        if self._dry_run:
            self._removed += garbage
            return True
        for batch in _batches(garbage):
            if not self._is_unchanged(url, records):
                self._skipped.append(
                    f"{url} was committed to while garbage was collected; the rest is left to the next run"
                )
                return False
            for info, gone in zip(batch, call_all(self._delete, batch), strict=True):
                if gone:
                    self._removed.append(info)
                else:
                    self._refused.append(info.key)
        return True

    def _is_unchanged(self, url: CheckpointUrl, records: list[Record]) -> bool:
        """Whether the commit records are still those that were read."""
        known = {record.name: record.fetched.info.etag for record in records}
        return known == etags(self._store, url, {RECORD_NAME, *known, *rank_records(self._store, url)})

    def _delete(self, info: ObjectInfo) -> bool:
        try:
            self._store.delete(info.key)
        except AccessDeniedError as error:
            self._refusal = error
            _log.debug("the store refuses to delete %s: %s", info.key, error)
            return False
        return True

    def abort(self, uploads: list[UploadInfo]) -> None:
        """Abort multipart uploads, or with ``dry_run`` count them."""
        gone = [True] * len(uploads) if self._dry_run else call_all(self._abort, uploads)
        for upload, is_gone in zip(uploads, gone, strict=True):
            (self._aborted if is_gone else self._refused).append(upload.key)

    def _abort(self, upload: UploadInfo) -> bool:
        try:
            self._store.abort_upload(upload.key, upload.upload_id)
        except AccessDeniedError as error:
            self._refusal = error
            _log.debug("the store refuses to abort the upload %s of %s: %s", upload.upload_id, upload.key, error)
            return False
        return True

    def report(self) -> GarbageReport:
        """What was done."""
        if self._unasked is not None:
            self._notes.append(
                f"some objects could not be asked for the deadline of their save, so they were left: {self._unasked}"
            )
        elif self._protected:
            self._notes.append(
                f"{len(self._protected)} objects and uploads are older than {self._margin.total_seconds():g} s, but of saves "
                f"that may still commit until they are {self._longest.total_seconds():g} s old (their deadline and "
                f"{SLACK_S:g} s): left, the first is {self._protected[0]}; say no_writer_runs=True if none runs"
            )
        if self._refusal is not None:
            _log.warning("the store refused %d deletions below %s: %s", len(self._refused), self._root, self._refusal)
            self._notes.append(f"{len(self._refused)} deletions were refused, the last with: {self._refusal}")
        report = GarbageReport(
            url=str(self._root),
            dry_run=self._dry_run,
            older_than_s=self._margin.total_seconds(),
            removed=tuple(info.key for info in self._removed),
            removed_bytes=sum(info.size for info in self._removed),
            aborted=tuple(self._aborted),
            waiting=self._waiting,
            live=self._live,
            refused=tuple(self._refused),
            skipped=tuple(self._skipped),
            notes=tuple(self._notes),
            lifecycle_rule=lifecycle_rule(self._root),
            seconds=time.monotonic() - self._start,
        )
        _log.info(
            "garbage at %s: %s %d objects (%d bytes) and %d uploads, %d refused, %d too young, %d live, %d checkpoints skipped",
            report.url,
            "would remove" if report.dry_run else "removed",
            len(report.removed),
            report.removed_bytes,
            len(report.aborted),
            len(report.refused),
            report.waiting,
            report.live,
            len(report.skipped),
        )
        return report


def _is_index(info: ObjectInfo) -> bool:
    return index_write_id(info.key.rpartition("/")[2]) is not None


def _names(record: Record) -> Iterator[str]:
    """Names, relative to the URL, of what a record keeps alive."""
    if record.index is not None:
        yield index_name(record.index.write_id)
        yield from (entry.key for entry in record.index.objects)


def _written_together(key: str) -> str:
    """What one rank wrote in one save lies in one folder; an index stands for itself."""
    folder, _, name = key.rpartition("/")
    return key if index_write_id(name) is not None else folder


def _batches(items: Iterable[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
