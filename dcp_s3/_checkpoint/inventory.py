"""What lies at a URL: its commit records, the manifest that each one has, and the checkpoints below it."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from dcp_s3._checkpoint.layout import (
    RECORD_NAME,
    WRITE_ID_FIELD,
    is_record_name,
    is_write_id,
    manifest_name,
    manifest_write_id,
    owner_of,
)
from dcp_s3._checkpoint.manifest import Manifest
from dcp_s3._transfer.store import is_missing
from dcp_s3.errors import AccessDeniedError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dcp_s3._checkpoint.layout import CheckpointUrl
    from dcp_s3._checkpoint.standin import RecordSummary
    from dcp_s3._transfer.store import ControlStore, Fetched

_log = logging.getLogger(__name__)

THREADS: Final = 8
"""Small requests at once: enough to hide their latency, few enough for any store."""
_TRIES: Final = 3
"""So often a record is read that is replaced while it is read."""

Item = TypeVar("Item")
Result = TypeVar("Result")

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
    def source(self) -> str:
        """What to call it in a message."""
        return str(self.url.child(self.name))

    def summary(self) -> RecordSummary:
        """What the record says.

        Raises:
            CorruptCheckpointError: It cannot be read.
        """
        from dcp_s3._checkpoint.standin import read_record  # its expressions take a while to compile; ls does without

        return read_record(self.fetched.body, source=self.source)

    def is_ours(self, summary: RecordSummary) -> bool:
        """Whether this package wrote the record, manifest or not."""
        if self.manifest is not None or is_write_id(self.fetched.info.metadata.get(WRITE_ID_FIELD)):
            return True
        return any(owner_of(entry.relative_path) == "" for entry in summary.entries[:1])


def read_records(store: ControlStore, url: CheckpointUrl, names: list[str] | None = None) -> list[Record]:
    """Read every commit record at a URL, not those below it: the checkpoint's own, and those of single ranks.

    Args:
        store: The bucket.
        url: The checkpoint's URL.
        names: Those that a listing has just shown; without them the records of single ranks are listed.

    Raises:
        StorageError: The store refused or failed; a missing record is no error.
    """
    own = _read(store, url, RECORD_NAME) if names is None or RECORD_NAME in names else None
    try:
        if names is None:
            names = sorted(rank_records(store, url), key=natural)
    except AccessDeniedError:
        if own is None:
            raise
        names = []  # who may read a checkpoint by its name need not be allowed to list
    return [
        record
        for record in (own, *(_read(store, url, name) for name in names if name != RECORD_NAME))
        if record is not None
    ]


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


def _read(store: ControlStore, url: CheckpointUrl, name: str) -> Record | None:
    for _ in range(_TRIES):
        fetched = _get(store, url.key(name))
        if fetched is None:
            return None
        record = _with_manifest(store, url, name, fetched)
        # between the two reads a save may have replaced the checkpoint, and deleted the old manifest
        if record.manifest is not None or etags(store, url, [name]).get(name) == fetched.info.etag:
            break
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


def _with_manifest(store: ControlStore, url: CheckpointUrl, name: str, fetched: Fetched) -> Record:
    """Find the manifest with the record's hash: by the id in the record's user metadata, else among all at the URL."""
    reason = "it has no manifest"
    hint = fetched.info.metadata.get(WRITE_ID_FIELD, "")
    tried = set()
    for write_id in _write_ids(store, url, hint):
        if write_id in tried:
            continue
        tried.add(write_id)
        key = url.key(manifest_name(write_id))
        manifest_bytes = _get(store, key)
        if manifest_bytes is None:
            continue
        try:
            manifest = Manifest.from_json(manifest_bytes.body, source=f"s3://{url.bucket}/{key}")
        except CorruptCheckpointError as error:
            reason = error.message
            continue
        if manifest.record == name and manifest.write_id == write_id and manifest.describes(fetched.body):
            return Record(url, name, fetched, manifest)
        if write_id == hint:
            reason = f"its bytes are not those that manifest-{write_id}.json was written for"
    return Record(url, name, fetched, None, reason)


def _write_ids(store: ControlStore, url: CheckpointUrl, hint: str) -> Iterator[str]:
    if is_write_id(hint):
        yield hint
    start = len(url.key(""))
    try:
        for info in store.list(url.key("manifest-")):
            if (write_id := manifest_write_id(info.key[start:])) is not None:
                yield write_id
    except AccessDeniedError:
        _log.debug("listing the manifests of %s is not permitted", url)


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
