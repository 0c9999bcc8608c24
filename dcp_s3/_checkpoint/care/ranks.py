"""Records of single ranks: which of them are those of the newest save, and whether they are all there."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_s3._checkpoint.care.inventory import read_record
from dcp_s3._checkpoint.format.layout import RECORD_NAME, record_name
from dcp_s3.errors import CheckpointNotFoundError, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from dcp_s3._checkpoint.care.inventory import Record
    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._transfer.s3.control_store import ControlStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewestSave:
    """The records at a URL, told apart by whether a load reads them.

    Attributes:
        records: What the checkpoint consists of: ``.metadata``, or the records of the ranks of the newest save.
        stale: Records of single ranks that no load may read: of an older save with more ranks, or beside a ``.metadata``.
        problem: Why the records do not make a checkpoint, empty if they do.
        note: What nothing tells for certain, or empty.
    """

    records: tuple[Record, ...]
    stale: tuple[Record, ...] = ()
    problem: str = ""
    note: str = ""


def newest_save(records: list[Record]) -> NewestSave:
    """Tell which records are those of the newest save, and whether they are all there.

    Each rank's index says with how many ranks it was written.

    Args:
        records: One or more, all of one URL.
    """
    own = [record for record in records if record.rank is None]
    by_rank = {record.rank: record for record in records if record.rank is not None}
    if own:
        later = [record for record in by_rank.values() if _made(record) > _made(own[0])]
        problem = (
            f"{_names(later)} were written after {RECORD_NAME} by a save with use_collectives=False, and no load reads them: every "
            f"load gives the older values of {RECORD_NAME}; load them from another URL, or delete the one that is not wanted"
        )
        return NewestSave(tuple(own), tuple(by_rank.values()), problem if later else "")
    newest = max(by_rank.values(), key=lambda record: (_made(record), record.created_unix_s))
    saved_by = newest.ranks
    of_it = {rank for rank, record in by_rank.items() if record.index is None or record.ranks == saved_by}
    is_told = saved_by > 0  # of another writer's nothing is known: then all there are count
    wanted = range(saved_by if is_told else max(of_it) + 1)
    counted = tuple(record for rank, record in by_rank.items() if rank in wanted)
    stale = tuple(record for rank, record in by_rank.items() if rank not in wanted)
    problems = []
    if missing := [rank for rank in wanted if rank not in by_rank]:
        problems.append(
            f"{len(missing)} of the {len(wanted)} ranks' records are missing, the first is {record_name(missing[0])}"
        )
    if others := [by_rank[rank] for rank in wanted if rank in by_rank and rank not in of_it]:
        problems.append(
            f"{_names(others)} are of another save, with {others[0].ranks} ranks, than {newest.name} with {saved_by}"
        )
    why = f"incomplete: {', and '.join(problems)}; save again, or load another checkpoint" if problems else ""
    note = "" if is_told else "nothing says how many ranks saved it, so a missing last one would not be noticed"
    return NewestSave(counted, stale, why, note)


def check_of_newest_save(store: ControlStore, url: CheckpointUrl, record: Record) -> None:
    """Refuse a rank's own record that an older save with more ranks has left, or that a newer one has not replaced yet.

    Rank 0 takes part in each save, so its record tells how many ranks the newest had. Where an index is missing nothing is
    known and nothing is refused.

    Args:
        store: The bucket.
        url: The checkpoint.
        record: A rank's own, or the checkpoint's, of which there is nothing to ask.

    Raises:
        CheckpointNotFoundError: It is of a save with another number of ranks than rank 0's record.
        StorageUnavailableError: The store failed.
    """
    if record.rank in (None, 0) or record.index is None:
        return
    first = record_name(0)
    try:
        newest = read_record(store, url, first)
    except StorageUnavailableError:
        raise
    except StorageError as error:
        _log.debug("%s says nothing of the newest save at %s: %s", first, url, error)
        return
    if newest.index is not None and newest.ranks != record.ranks:
        raise CheckpointNotFoundError(
            f"no checkpoint of rank {record.rank} at {url}: {record.name} was left by a save with {record.ranks} ranks, and "
            f"{first} is of one with {newest.ranks}; together they would be a mixture. Load with as many ranks as the "
            "newest save had, or from another URL"
        ).with_context(bucket=url.bucket, key=url.key(record.name))


def _made(record: Record) -> float:
    made = record.fetched.info.last_modified
    return 0.0 if made is None else made.timestamp()


def _names(records: list[Record]) -> str:
    return ", ".join(record.name for record in records[:3]) + (" …" if len(records) > 3 else "")
