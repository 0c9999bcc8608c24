"""The commit: one PUT of the record makes a checkpoint true, and whatever became of that PUT is found out."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dcp_s3._checkpoint.format.index import Index
from dcp_s3._checkpoint.format.layout import INDEX_FIELD, WRITE_ID_FIELD, index_name
from dcp_s3._transfer.limits.attempt_timeout import call_all
from dcp_s3._transfer.limits.retry import backoff_s
from dcp_s3._transfer.s3.control_store import is_missing, is_precondition_failed, save_metadata
from dcp_s3._transfer.s3.probe import Conditions, conditions_of
from dcp_s3.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CommitConflictError,
    DcpS3Error,
    StorageError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._transfer.limits.retry import Deadline
    from dcp_s3._transfer.s3.control_store import ControlStore

_log = logging.getLogger(__name__)

_REFUSALS: Final = 5
"""So often a store may refuse the condition although nothing has changed, before the save fails: conditions do not work there."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What was at the record's key when the save began.

    Attributes:
        etag: ETag of the record that the save will replace, ``None`` if there was none.
        write_id: Its write id, if it is one of ours.
        certain: ``False`` when reading was not permitted, which S3 also answers for a missing key without ListBucket.
    """

    etag: str | None
    write_id: str | None
    certain: bool = True


def observe(store: ControlStore, key: str) -> Observed:
    """Look at the record before a save. A GET of one byte: a HEAD's 403 has no code to tell denied from absent.

    Raises:
        StorageError: The bucket is missing, the credentials are wrong, or the store fails.
    """
    try:
        info = store.get(key, byte_range=(0, 1)).info
    except AccessDeniedError as error:
        if error.code == "AccessDenied":
            return Observed(None, None, certain=False)
        raise
    except StorageError as error:
        if is_missing(error):
            return Observed(None, None)
        if error.status != 416:
            raise
        info = store.head(key)  # an empty object, by nobody's rules a checkpoint; it is replaced like one
    return Observed(_strong(info.etag), info.metadata.get(WRITE_ID_FIELD))


def look(store: ControlStore, key: str, other: str) -> Observed:
    """Look at a save's record, and then whether there is one of the other kind (``use_collectives``).

    Args:
        store: The bucket.
        key: Key of the record that the save will write.
        other: Key of a record that must not be there: readers would go on loading the one, or mix both.

    Raises:
        CheckpointExistsError: The other one is there.
        StorageError: As of :func:`observe`.
    """
    observed = observe(store, key)
    if _is_there(store, other):
        folder, name = other.rpartition("/")[::2]
        alone = name != ".metadata"
        raise CheckpointExistsError(
            f"a checkpoint of another kind is there ({name}, saved with use_collectives={not alone}), and this save has "
            f"use_collectives={alone}: readers would load the old one, or parts of both. Nothing was sent. Save to another URL, "
            f"or delete that checkpoint first (all below s3://{store.bucket}/{folder}{'/' if folder else ''})"
        ).with_context(bucket=store.bucket, key=other)
    return observed


def _is_there(store: ControlStore, key: str) -> bool:
    try:
        store.head(key)
    except AccessDeniedError:  # without ListBucket so is a key that is not there
        return False
    except StorageError as error:
        if is_missing(error):
            return False
        raise
    return True


def _strong(etag: str) -> str:
    """An ETag as conditions compare it: a gateway may call that of a GET weak (RFC 9110, section 8.8.3)."""
    return etag.removeprefix("W/")


def usable_conditions(store: ControlStore, key: str, mode: str, rank: int) -> tuple[Conditions | None, str]:
    """Which conditional PUTs a save may use, and which the store lacks.

    Args:
        store: The bucket.
        key: The save's index; see :func:`~dcp_s3._transfer.s3.probe.conditions_of`.
        mode: ``S3Config.conditional_commit``.
        rank: Named in errors.

    Returns:
        ``None`` if they are off; and the names of the headers that the store does not honour, empty if it does both.

    Raises:
        StorageError: They are required, and the store does not honour both; or it fails for another reason.
    """
    if mode == "off":
        return None, ""
    conditions = conditions_of(store, key)
    if conditions.create and conditions.replace is not None:
        return conditions, ""
    lacking = "If-None-Match and If-Match" if not conditions.create else "If-Match"
    if mode == "required":
        raise StorageError(
            f"the store does not honour {lacking} and conditional_commit='required': two writers could overwrite each other"
        ).with_context(rank=rank, bucket=store.bucket)
    return conditions, lacking


def check_permitted(store: ControlStore, key: str, observed: Observed, conditions: Conditions | None) -> None:
    """Raise where a save could overwrite what it may not see.

    Raises:
        AccessDeniedError: Reading the record is not permitted, and the store does not honour If-None-Match.
    """
    if not observed.certain and not (conditions is not None and conditions.create):
        raise AccessDeniedError(
            "reading the record is not permitted and the store does not honour If-None-Match, so an existing checkpoint could "
            "be overwritten unseen; allow GetObject and ListBucket on the prefix"
        ).with_context(bucket=store.bucket, key=key, operation="GetObject")


def condition_of(observed: Observed, conditions: Conditions | None) -> tuple[str | None, bool]:
    """What the record's PUT carries as ``If-Match``, and whether it carries ``If-None-Match``."""
    if conditions is None:
        return None, False
    if observed.etag is None:
        return None, conditions.create
    return conditions.match_value(observed.etag), False


def put_index(store: ControlStore, key: str, data: bytes, deadline: Deadline) -> None:
    """PUT the index and look whether it is there: behind the commit the checkpoint before may be gone.

    Args:
        store: The bucket.
        key: Key of the index.
        data: The index.
        deadline: The save's; kept with the index, so that no collector takes it before.

    Raises:
        StorageError: The store failed, or keeps something of another size.
    """
    store.put(key, data, content_type="application/octet-stream", metadata=save_metadata(deadline))
    kept = store.head(key).size
    if kept != len(data):
        raise StorageError(
            f"the store acknowledged the index of {len(data)} bytes and keeps {kept}; nothing was committed"
        ).with_context(operation="PutObject", bucket=store.bucket, key=key)


def commit(
    store: ControlStore,
    key: str,
    body: bytes,
    *,
    write_id: str,
    index_sha256: str,
    observed: Observed,
    conditions: Conditions | None,
    deadline: Deadline,
    still_there: Callable[[], None] | None = None,
) -> None:
    """PUT the record so that it replaces exactly what was observed, and find out what became of it.

    Args:
        store: The bucket.
        key: Key of the record.
        body: The record.
        write_id: This save's id.
        index_sha256: Of this save's index, in hex.
        observed: What the save saw at its beginning.
        conditions: What the store honours; ``None`` commits unconditionally.
        deadline: Past it nothing is committed any more.
        still_there: Called before each PUT; raises if what the record names has been taken away.

    Raises:
        CommitConflictError: Another writer's record is there.
        AccessDeniedError: See :func:`check_permitted`.
        CheckpointExistsError: A record is there that these credentials cannot read, so it cannot be replaced.
        DeadlineExceededError: The deadline had passed before the first PUT.
        StorageUnavailableError: The outcome is unknown.
        StorageError: The store refused the PUT.
    """
    if_match, if_none_match = condition_of(observed, conditions)
    check_permitted(store, key, observed, conditions)
    deadline.check("about to commit; nothing was committed")
    refusals = attempt = 0
    told: StorageError | None = None  # the last answer; an attempt that the deadline cuts short has none
    while True:
        attempt += 1
        if still_there is not None:
            try:
                still_there()
            except StorageUnavailableError as error:
                if told is None:
                    raise
                raise _unknown(store, key, attempt - 1, told) from error
        try:
            store.put(
                key,
                body,
                content_type="application/octet-stream",
                metadata={WRITE_ID_FIELD: write_id, INDEX_FIELD: index_sha256},
                if_match=if_match,
                if_none_match=if_none_match,
                retry=False,
            )
        except StorageError as error:
            gone = if_match is not None and is_missing(error)  # 404: what it was to replace has been deleted
            if not (is_precondition_failed(error) or gone or isinstance(error, StorageUnavailableError)):
                raise
            failure = error
        else:
            if if_match is not None or if_none_match:
                return
            failure = StorageError("an unconditional PUT was answered with success")  # who won is read back
        told = failure if told is None or failure.status is not None else told
        try:
            there = _read_back(store, key, body, observed)
        except AccessDeniedError as error:
            if is_precondition_failed(failure):
                raise CheckpointExistsError(
                    "a checkpoint is there that these credentials may not read, so it cannot be replaced"
                ).with_context(bucket=store.bucket, key=key) from error
            raise
        except StorageError as error:
            if deadline.expired or not isinstance(error, StorageUnavailableError):
                raise _unknown(store, key, attempt, told) from error
            there = "unchanged"  # nothing learnt: the identical PUT is safe to repeat
        if there == "ours":
            return
        refusals += is_precondition_failed(failure)
        if there == "unchanged" and refusals >= _REFUSALS:
            raise StorageError(
                f"the store refused the commit's {'If-Match' if if_match is not None else 'If-None-Match'} {refusals} times, though "
                f"s3://{store.bucket}/{key} is as this save found it: conditional PUTs do not work through this endpoint (does "
                "something in between change ETags or conditions?). What is there stands, ours is not there; "
                "conditional_commit='off' saves without conditions"
            ).with_context(**_of_the_put(store, key, attempt, failure)) from failure
        if there == "foreign":
            place = f"s3://{store.bucket}/{key}"
            why = (
                f"another writer wrote or deleted {place} after this save had looked"
                if observed.certain
                else f"{place} holds a record that this save did not know of, as its first look was refused"
            )
            raise CommitConflictError(f"{why}; what is there now stands, ours is not there").with_context(
                bucket=store.bucket, key=key, operation="PutObject", attempts=attempt
            ) from failure
        if conditions is not None and if_match is not None and is_precondition_failed(failure):
            if_match = _other_form(store, key, body, observed, conditions) or if_match
        pause = backoff_s(store.config.retry, attempt)
        if deadline.remaining() <= pause:
            raise _unknown(store, key, attempt, told) from failure
        time.sleep(pause)


def _unknown(store: ControlStore, key: str, attempts: int, cause: StorageError) -> DcpS3Error:
    return StorageUnavailableError(
        f"commit outcome unknown: the record was sent but the store never confirmed it ({cause.message}); load the checkpoint "
        "to see which one is there. Nothing that this save wrote was deleted"
    ).with_context(**_of_the_put(store, key, attempts, cause))


def _of_the_put(store: ControlStore, key: str, attempts: int, answer: StorageError) -> dict[str, Any]:
    """What an error says of the record's PUT and of its last answer."""
    return {
        "bucket": store.bucket,
        "key": key,
        "operation": "PutObject",
        "status": answer.status,
        "code": answer.code,
        "request_id": answer.request_id,
        "attempts": attempts,
    }


def _read_back(store: ControlStore, key: str, body: bytes, observed: Observed) -> str:
    """Whose record is there now: ``ours``, ``foreign``, or ``unchanged`` since the save began."""
    try:
        there = store.get(key)
    except StorageError as error:
        if is_missing(error):
            return "unchanged" if observed.etag is None else "foreign"
        raise
    if len(there.body) == len(body) and hashlib.sha256(there.body).digest() == hashlib.sha256(body).digest():
        return "ours"
    return "unchanged" if observed.etag is not None and _strong(there.info.etag) == observed.etag else "foreign"


def _other_form(store: ControlStore, key: str, body: bytes, observed: Observed, conditions: Conditions) -> str | None:
    """The ETag that HEAD gives the observed record, where GETs have another: between two GETs that show no change."""
    try:
        etag = _strong(store.head(key).etag)
        if etag and etag != observed.etag and _read_back(store, key, body, observed) == "unchanged":
            return conditions.match_value(etag)
    except StorageError as error:
        _log.debug("no other ETag of %s could be had: %s", key, error)
    return None


def confirm(store: ControlStore, key: str, size: int, *, write_id: str, observed: Observed) -> bool:
    """Look at the record that the store has acknowledged, before what it replaced is deleted.

    Args:
        store: The bucket.
        key: Key of the record.
        size: Its size in bytes.
        write_id: This save's id.
        observed: What the save saw at its beginning.

    Returns:
        Whether this record, or a later writer's, is there. ``False``: the store cannot say, so nothing may be deleted.

    Raises:
        StorageError: The store acknowledged the record and has lost it, has cut it, or still has the one before.
    """
    try:
        there = store.head(key)
    except DcpS3Error as error:
        if not is_missing(error):
            _log.warning(
                "the store acknowledged %s and cannot show it; what it replaced is left to dcp-s3 gc: %s", key, error
            )
            return False
        fate = "has none"
    else:
        writer = there.metadata.get(WRITE_ID_FIELD)
        if writer == write_id and there.size == size:
            return True
        if writer is None:  # another library's, or metadata are not kept
            return there.size == size
        if writer not in (write_id, observed.write_id):
            return True
        fate = f"keeps {there.size} of its {size} bytes" if writer == write_id else "still has the one before"
    raise StorageError(
        f"the store acknowledged the record and {fate}: nothing may be there to load; what this save would have replaced "
        "was not deleted. Save again, and do not trust this store"
    ).with_context(bucket=store.bucket, key=key, operation="PutObject")


def delete_replaced(store: ControlStore, url: CheckpointUrl, observed: Observed) -> int:
    """Delete what the index of the replaced record names, then that index. Best effort: never raises.

    Only of a record whose PUT had a condition: one without, that was repeated and is still on its way, may put the replaced
    record back, and that needs what it names. ``gc`` deletes it later, when the PUT's signature is too old.

    Returns:
        How many objects could not be deleted (Object Lock, missing permission); ``gc`` tries them again.
    """
    if observed.write_id is None:
        return 0
    name = url.key(index_name(observed.write_id))
    try:
        index = Index.from_bytes(store.get(name).body, source=name)
    except DcpS3Error as error:
        _log.warning(
            "the replaced checkpoint's index %s cannot be read; its objects are left to dcp-s3 gc: %s", name, error
        )
        return 0
    if not index.conditional:
        _log.info(
            "the record that %s has replaced was written without a condition: its objects are left to dcp-s3 gc", url
        )
        return 0
    keys = [url.key(entry.key) for entry in index.objects]
    failures = sum(call_all(lambda key: _delete(store, key), keys))
    return failures + (_delete(store, name) if not failures else 0)


def _delete(store: ControlStore, key: str) -> int:
    try:
        store.delete(key)
    except DcpS3Error as error:
        _log.warning("could not delete %s of the replaced checkpoint; it is left to dcp-s3 gc: %s", key, error)
        return 1
    return 0
