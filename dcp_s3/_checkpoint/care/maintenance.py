"""The tools' public functions: list, verify, collect garbage. They read indexes; only of other writers' records do they import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_s3._checkpoint.care import garbage
from dcp_s3._checkpoint.care.flaws import flaws_of
from dcp_s3._checkpoint.care.garbage import GarbageReport
from dcp_s3._checkpoint.care.inventory import read_records
from dcp_s3._checkpoint.care.ranks import newest_save
from dcp_s3._checkpoint.care.survey import survey
from dcp_s3._checkpoint.care.verify import VerifyReport, verify_checkpoint
from dcp_s3._checkpoint.format.layout import RECORD_NAME, parse_url
from dcp_s3._transfer.limits.attempt_timeout import call_all
from dcp_s3._transfer.s3.control_store import ControlStore
from dcp_s3.config import S3Config
from dcp_s3.errors import CheckpointNotFoundError, CheckpointReplacedError, CorruptCheckpointError

if TYPE_CHECKING:
    import datetime as dt
    import os
    from collections.abc import Iterator

    from dcp_s3._checkpoint.care.survey import Place
    from dcp_s3._checkpoint.format.layout import CheckpointUrl

__all__ = [
    "CheckpointInfo",
    "GarbageReport",
    "VerifyReport",
    "abort_stale_uploads",
    "collect_garbage",
    "list_checkpoints",
    "verify",
    "verify_all",
    "verify_each",
]

DAY_S = 86400.0
_COMMIT_S = 60.0
"""A record is written right after its index; more than this apart they are looked at."""
_TRIES = 3
"""So often a checkpoint is verified that is replaced while it is verified."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint, or an attempt at one that was not committed.

    Attributes:
        url: Where it is.
        records: Its commit records: ``.metadata``, or one per rank.
        write_id: Identity of the save; ``None`` of another writer's, and of several records.
        committed_at: When the (last) record was written, by the store's clock.
        bytes: Size of the data objects at the URL and of the records. Of another writer's checkpoint: of what the record
            names.
        objects: How many data objects.
        ours: It was written by this package, and if committed there is the index of its record.
        state: ``committed``, ``stock`` (committed by another writer: no index), ``corrupt: <why>`` (record and index do
            not belong together, or the record cannot be read), or ``uncommitted``: objects of ours without a record, of a
            save that still runs or has failed. Record and index are read only where the listing leaves a question; what
            can be trusted is what :func:`verify` tells.
    """

    url: str
    records: tuple[str, ...]
    write_id: str | None
    committed_at: dt.datetime | None
    bytes: int
    objects: int
    ours: bool
    state: str


def list_checkpoints(
    url: str | os.PathLike[str], *, config: S3Config | None = None, uncommitted: bool = False
) -> list[CheckpointInfo]:
    """Find every committed checkpoint at a URL and below it. Needs ListBucket.

    Args:
        url: ``s3://bucket/prefix`` of a checkpoint, or of a place with checkpoints below it.
        config: Default: from the environment.
        uncommitted: Also tell of URLs where data objects of ours lie and no commit record.

    Returns:
        Sorted by URL, numbers by value: ``step-9`` before ``step-10``.

    Raises:
        ConfigError: The URL or the configuration is wrong.
        StorageError: The store refused or failed.
    """
    root = parse_url(url)
    store = _open(root, config)
    found = call_all(lambda place: _info(store, place), survey(store, root))
    return [info for info in found if info is not None and (uncommitted or info.records)]


def _info(store: ControlStore, place: Place) -> CheckpointInfo | None:
    if not place.records:
        return CheckpointInfo(
            url=str(place.url),
            records=(),
            write_id=None,
            committed_at=None,
            bytes=place.bytes,
            objects=place.objects,
            ours=True,
            state="uncommitted",
        )
    if (told := _told_by_listing(place)) is not None:
        return told
    records = read_records(store, place.url, list(place.records))
    if not records:  # deleted meanwhile
        return None
    found = newest_save(records)
    records = list(found.records)
    times = [time for record in records if (time := record.fetched.info.last_modified) is not None]
    sizes: dict[str, int] = {}
    write_ids: set[str | None] = set()
    state = "committed"
    for record in records:
        if record.index is not None:
            write_ids.add(record.index.write_id)
            sizes.update((entry.key, entry.size) for entry in record.index.objects)
            continue
        try:
            columns = record.columns()
        except CorruptCheckpointError as error:
            state = f"corrupt: {error.message}"
            continue
        write_ids.add(None)
        for name, end in zip(columns.object_names, columns.object_ends(), strict=True):
            sizes[name] = max(sizes.get(name, 0), end)
        if flaws := flaws_of(columns, partial=record.rank is not None):
            state = f"corrupt: {record.name}: {flaws[0]}"
        elif record.ours:
            state = f"corrupt: {record.name}: {record.reason}"
        elif state == "committed":
            state = "stock"
    if found.problem and not state.startswith("corrupt"):
        state = f"corrupt: {found.problem}"
    return CheckpointInfo(
        url=str(place.url),
        records=tuple(record.name for record in records),
        write_id=write_ids.pop() if len(write_ids) == 1 else None,
        committed_at=max(times, default=None),
        bytes=sum(sizes.values()) + sum(record.fetched.info.size for record in records),
        objects=len(sizes),
        ours=all(record.index is not None for record in records),
        state=state,
    )


def _told_by_listing(place: Place) -> CheckpointInfo | None:
    """What there is to say of a place that is as a save leaves it: one record, and the index written just before it.

    To read them takes two requests for each checkpoint; for 200 that is seconds.
    """
    record = place.records.get(RECORD_NAME)
    if record is None or not record.size or len(place.records) != 1 or len(place.indexes) != 1:
        return None
    ((write_id, index),) = place.indexes.items()
    if record.last_modified is None or index.last_modified is None:
        return None
    # an index that is younger is of another save, and so is one that is much older
    if not 0 <= (record.last_modified - index.last_modified).total_seconds() <= _COMMIT_S:
        return None
    return CheckpointInfo(
        url=str(place.url),
        records=(RECORD_NAME,),
        write_id=write_id,
        committed_at=record.last_modified,
        bytes=place.bytes + record.size,
        objects=place.objects,
        ours=True,
        state="committed",
    )


def verify(url: str | os.PathLike[str], *, deep: bool = False, config: S3Config | None = None) -> VerifyReport:
    """Check that a checkpoint is whole: record and index belong together, every object is there with the right size.

    Args:
        url: The checkpoint's URL.
        deep: Also read every object and compare its CRCs with those taken at the save.
        config: Default: from the environment.

    Raises:
        ConfigError: The URL or the configuration is wrong.
        CheckpointNotFoundError: No checkpoint is there.
        CheckpointReplacedError: A save replaced the checkpoint while it was read.
        StorageError: The store refused or failed.
    """
    place = parse_url(url)
    return verify_checkpoint(_open(place, config), place, deep=deep)


def verify_all(
    url: str | os.PathLike[str], *, deep: bool = False, config: S3Config | None = None
) -> list[VerifyReport]:
    """Verify every committed checkpoint at a URL and below it: a run, or any prefix. Needs ListBucket.

    Args:
        url: ``s3://bucket/prefix`` of a checkpoint, or of a place with checkpoints below it.
        deep: Also read every object and compare its CRCs with those taken at the save.
        config: Default: from the environment.

    Returns:
        One report for each, sorted by URL, numbers by value; empty where there is none. One that is replaced again and
        again while it is verified has a report that says so; one that is deleted meanwhile has none.

    Raises:
        ConfigError: The URL or the configuration is wrong.
        StorageError: The store refused or failed.
    """
    return list(verify_each(url, deep=deep, config=config))


def verify_each(
    url: str | os.PathLike[str], *, deep: bool = False, config: S3Config | None = None
) -> Iterator[VerifyReport]:
    """:func:`verify_all`, each report as soon as it is made."""
    root = parse_url(url)
    store = _open(root, config)
    for place in survey(store, root):
        if place.records and (report := _verified(store, place.url, deep=deep)) is not None:
            yield report


def _verified(store: ControlStore, url: CheckpointUrl, *, deep: bool) -> VerifyReport | None:
    problem = ""
    for _ in range(_TRIES):
        try:
            return verify_checkpoint(store, url, deep=deep)
        except CheckpointReplacedError as error:
            problem = error.message
        except CheckpointNotFoundError:
            return None
    return VerifyReport(url=str(url), ok=False, problems=(problem,), notes=(), objects=0, checked_bytes=0, seconds=0.0)


def collect_garbage(
    url: str | os.PathLike[str],
    *,
    dry_run: bool = True,
    older_than_s: float = DAY_S,
    config: S3Config | None = None,
    no_writer_runs: bool = False,
) -> GarbageReport:
    """Delete what failed and replaced saves left at a URL and below it, and abort their open uploads.

    Only objects of this package's exact name pattern go, if no commit record's index names them and they are older
    than the margin by the store's clock. Where a record has no matching index (another writer's checkpoint, or a
    damaged one), nothing is touched. Needs ListBucket, ListBucketMultipartUploads, DeleteObject, AbortMultipartUpload.

    Args:
        url: ``s3://bucket/prefix`` of a checkpoint, or of a place with checkpoints below it.
        dry_run: Only report.
        older_than_s: The margin, seconds; at least the save deadline and 900 s more. What a save wrote that may take longer
            waits for that save's own deadline, which is kept with its objects.
        config: Default: from the environment. Its ``save_deadline_s`` should be that of the writers.
        no_writer_runs: Allow a smaller margin, and let it alone count.

    Raises:
        ConfigError: The URL, the configuration or the margin is wrong.
        StorageError: The store refused or failed.
    """
    root = parse_url(url)
    config = config if config is not None else S3Config.from_env()
    garbage.check_margin(older_than_s, config.save_deadline_s, no_writer_runs=no_writer_runs)
    return garbage.collect(
        _open(root, config), root, dry_run=dry_run, older_than_s=older_than_s, no_writer_runs=no_writer_runs
    )


def abort_stale_uploads(
    url: str | os.PathLike[str],
    *,
    older_than_s: float = DAY_S,
    dry_run: bool = False,
    config: S3Config | None = None,
    no_writer_runs: bool = False,
) -> GarbageReport:
    """Abort the open multipart uploads of our objects at a URL and below it that are older than the margin.

    Args:
        url: ``s3://bucket/prefix``.
        older_than_s: The margin, seconds; at least the save deadline and 900 s more.
        dry_run: Only report.
        config: Default: from the environment. Its ``save_deadline_s`` should be that of the writers.
        no_writer_runs: Allow a smaller margin.

    Raises:
        ConfigError: The URL, the configuration or the margin is wrong.
        StorageError: The store refused or failed.
    """
    root = parse_url(url)
    config = config if config is not None else S3Config.from_env()
    garbage.check_margin(older_than_s, config.save_deadline_s, no_writer_runs=no_writer_runs)
    return garbage.abort_uploads(
        _open(root, config), root, dry_run=dry_run, older_than_s=older_than_s, no_writer_runs=no_writer_runs
    )


def _open(url: CheckpointUrl, config: S3Config | None) -> ControlStore:
    return ControlStore(config if config is not None else S3Config.from_env(), url.bucket)
