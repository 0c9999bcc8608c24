"""What lies at a URL: its commit records, the manifest that each one has, and the checkpoints below it."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from dcp_s3._checkpoint.layout import (
    RECORD_NAME,
    WRITE_ID_FIELD,
    is_record_name,
    is_write_id,
    manifest_name,
    manifest_write_id,
    owner_of,
    record_name,
    record_rank,
)
from dcp_s3._checkpoint.manifest import Manifest
from dcp_s3._checkpoint.standin import RecordSummary, read_record
from dcp_s3._transfer.store import is_missing
from dcp_s3.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dcp_s3._checkpoint.layout import CheckpointUrl
    from dcp_s3._transfer.store import ControlStore, Fetched

_log = logging.getLogger(__name__)

THREADS: Final = 8
"""Small requests at once: enough to hide their latency, few enough for any store."""
_TRIES: Final = 3
"""So often a record is read that is replaced while it is read."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_TOKEN = re.compile(r"[0-9a-f]{16}")
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class Record:
    """A commit record as it was read.

    Attributes:
        url: The checkpoint's URL.
        name: ``.metadata`` or ``__<rank>.metadata``.
        fetched: Its bytes, ETag and user metadata.
        manifest: The manifest that was written for exactly these bytes; ``None`` if there is none.
        reason: Why there is none.
    """

    url: CheckpointUrl
    name: str
    fetched: Fetched
    manifest: Manifest | None
    reason: str = ""

    @property
    def rank(self) -> int | None:
        """Of the rank that committed for itself; ``None`` for the checkpoint's own record."""
        return record_rank(self.name)

    @property
    def ranks(self) -> int:
        """How many ranks took part, as the manifest says; 0 without one."""
        return 0 if self.manifest is None else self.manifest.world_size

    @property
    def created_unix_s(self) -> float:
        """When its manifest was made, by the writer's clock; 0 without one."""
        return 0.0 if self.manifest is None else self.manifest.created_unix_s

    @property
    def source(self) -> str:
        """What to call it in a message."""
        return str(self.url.child(self.name))

    def summary(self) -> RecordSummary:
        """What the record says.

        Raises:
            CorruptCheckpointError: It cannot be read.
        """
        return read_record(self.fetched.body, source=self.source)

    def is_ours(self, summary: RecordSummary) -> bool:
        """Whether this package wrote the record, manifest or not."""
        if self.manifest is not None or is_write_id(self.fetched.info.metadata.get(WRITE_ID_FIELD)):
            return True
        return any(owner_of(entry.relative_path) == "" for entry in summary.entries[:1])


def read_records(store: ControlStore, url: CheckpointUrl) -> list[Record]:
    """Read every commit record at a URL, not those below it: the checkpoint's own, and those of single ranks.

    Raises:
        StorageError: The store refused or failed; a missing record is no error.
    """
    manifests = _Manifests(store, url)
    own = _read(store, url, RECORD_NAME, manifests)
    try:
        names = sorted(rank_records(store, url), key=natural)
    except AccessDeniedError:
        if own is None:
            raise
        names = []  # who may read a checkpoint by its name need not be allowed to list
    read = in_parallel(lambda name: _read(store, url, name, manifests), names) if names else []
    return [record for record in (own, *read) if record is not None]


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

    Each rank's manifest says with how many ranks it was written, except for those of version 0.1, which all say 1.

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
    of_it = {rank for rank, record in by_rank.items() if record.manifest is None or record.ranks == saved_by}
    # version 0.1 says 1 of each rank's record, and of another writer's nothing is known: then all there are count
    is_told = saved_by > 1 or of_it == {0}
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


def check_of_newest_save(store: ControlStore, url: CheckpointUrl, name: str, write_id: str | None) -> None:
    """Refuse a rank's own record that an older save with more ranks has left, or that a newer one has not replaced yet.

    Rank 0 takes part in each save, so its record tells how many ranks the newest had. Where a manifest is missing, or
    version 0.1 wrote both, nothing is known and nothing is refused.

    Args:
        store: The bucket.
        url: The checkpoint.
        name: The record that was read.
        write_id: Of its save.

    Raises:
        CheckpointNotFoundError: It is of a save with another number of ranks than rank 0's record.
        StorageUnavailableError: The store failed.
    """
    first = record_name(0)
    if record_rank(name) in (None, 0) or write_id is None or not is_write_id(write_id):
        return
    manifests = _Manifests(store, url)
    try:
        hint = store.head(url.key(first)).metadata.get(WRITE_ID_FIELD)
        if hint is None:  # a copy, or a store that keeps no user metadata
            hint = read_record(store.get(url.key(first)).body, source=str(url.child(first))).write_id or ""
        mine, theirs = manifests.of_save(write_id), manifests.of_save(hint) if is_write_id(hint) else None
    except StorageUnavailableError:
        raise
    except (StorageError, CorruptCheckpointError) as error:
        _log.debug("%s says nothing of the newest save at %s: %s", first, url, error)
        return
    if isinstance(mine, Manifest) and isinstance(theirs, Manifest) and mine.world_size != theirs.world_size:
        raise CheckpointNotFoundError(
            f"no checkpoint of rank {record_rank(name)} at {url}: {name} was left by a save with {mine.world_size} ranks, and "
            f"{first} is of one with {theirs.world_size}; together they would be a mixture. Load with as many ranks as the "
            "newest save had, or from another URL"
        ).with_context(bucket=url.bucket, key=url.key(name))


def _made(record: Record) -> float:
    made = record.fetched.info.last_modified
    return 0.0 if made is None else made.timestamp()


def _names(records: list[Record]) -> str:
    return ", ".join(record.name for record in records[:3]) + (" …" if len(records) > 3 else "")


def etags(store: ControlStore, url: CheckpointUrl, names: Iterable[str]) -> dict[str, str]:
    """The ETags that records have now; those that are not there are left out."""
    found = {}
    for name in names:
        try:
            found[name] = store.head(url.key(name)).etag
        except StorageError as error:
            if not is_missing(error):
                raise
    return found


def _read(store: ControlStore, url: CheckpointUrl, name: str, manifests: _Manifests) -> Record | None:
    for _ in range(_TRIES):
        fetched = _get(store, url.key(name))
        if fetched is None:
            return None
        record = _with_manifest(manifests, url, name, fetched)
        # between the two reads a save may have replaced the checkpoint, and deleted the old manifest
        if record.manifest is not None or etags(store, url, [name]).get(name) == fetched.info.etag:
            break
        manifests = _Manifests(store, url)
    return record


def rank_records(store: ControlStore, url: CheckpointUrl) -> Iterator[str]:
    """Names of the records of single ranks at a URL. Needs ListBucket."""
    start = len(url.key(""))
    for info in store.list(url.key("__")):
        name = info.key[start:]
        if is_record_name(name):
            yield name


def _get(store: ControlStore, key: str) -> Fetched | None:
    try:
        return store.get(key)
    except StorageError as error:
        if is_missing(error):
            return None
        raise


class _Manifests:
    """The manifests at a URL. Each is read once, however many records look for theirs; several threads may ask."""

    def __init__(self, store: ControlStore, url: CheckpointUrl) -> None:
        self._store = store
        self._url = url
        self._lock = threading.Lock()
        self._all: list[tuple[str, Manifest | str]] | None = None

    def of_save(self, write_id: str) -> Manifest | str | None:
        """The manifest of a save, why it cannot be read, or ``None`` if it is not there."""
        key = self._url.key(manifest_name(write_id))
        fetched = _get(self._store, key)
        if fetched is None:
            return None
        try:
            manifest = Manifest.from_json(fetched.body, source=f"s3://{self._url.bucket}/{key}")
        except CorruptCheckpointError as error:
            return error.message
        return manifest if manifest.write_id == write_id else f"{key} is the manifest of another save"

    def all(self) -> list[tuple[str, Manifest | str]]:
        """All of them, each with its save's write id. Empty where listing is not permitted."""
        with self._lock:
            if self._all is None:
                write_ids = self._list()
                found = zip(write_ids, in_parallel(self.of_save, write_ids) if write_ids else (), strict=True)
                self._all = [(write_id, manifest) for write_id, manifest in found if manifest is not None]
            return self._all

    def _list(self) -> list[str]:
        start = len(self._url.key(""))
        try:
            names = [info.key[start:] for info in self._store.list(self._url.key("manifest-"))]
        except AccessDeniedError:
            _log.debug("listing the manifests of %s is not permitted", self._url)
            return []
        return [write_id for name in names if (write_id := manifest_write_id(name)) is not None]


def _with_manifest(manifests: _Manifests, url: CheckpointUrl, name: str, fetched: Fetched) -> Record:
    """Find the manifest with the record's hash: by the id in the record's user metadata, else among all at the URL."""
    reason = "it has no manifest"
    hint = fetched.info.metadata.get(WRITE_ID_FIELD, "")
    if is_write_id(hint):
        manifest = manifests.of_save(hint)
        if isinstance(manifest, Manifest):
            if manifest.record == name and manifest.describes(fetched.body):
                return Record(url, name, fetched, manifest)
            reason = f"its bytes are not those that manifest-{hint}.json was written for"
        elif manifest is not None:
            reason = manifest
    for write_id, manifest in manifests.all():
        if write_id == hint:
            continue
        if isinstance(manifest, str):
            reason = manifest
        elif manifest.record == name and manifest.describes(fetched.body):
            return Record(url, name, fetched, manifest)
    return Record(url, name, fetched, None, reason)


def walk(store: ControlStore, root: CheckpointUrl) -> Iterator[CheckpointUrl]:
    """Every "directory" at and below ``root`` that can hold a commit record, parents first. Needs ListBucket.

    Listed level by level with a delimiter: the data objects of a checkpoint do not appear, and do not fill the pages.
    """
    level = [root]
    while level:
        yield from level
        level = list(chain.from_iterable(in_parallel(lambda url: _children(store, url), level)))


def _children(store: ControlStore, url: CheckpointUrl) -> list[CheckpointUrl]:
    start = len(url.key(""))
    inside_data = url.prefix.rpartition("/")[2] == "data"
    # a store that pages without tokens may give one twice
    names = dict.fromkeys(prefix[start:].removesuffix("/") for prefix in store.list_prefixes(url.key("")))
    # a token's directory has only data objects; "//" in a key gives an empty name, which no checkpoint URL has
    return [url.child(name) for name in names if name and not (inside_data and _TOKEN.fullmatch(name))]


def natural(text: str) -> list[str | int]:
    """Sort key by which step-9 comes before step-10."""
    # words and numbers alternate, so that like is compared with like
    return [int(word) if i % 2 else word for i, word in enumerate(_DIGITS.split(text))]


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Do small requests several at a time; results in order. After an error, which is raised, no more are begun."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="dcp_s3-tools") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
