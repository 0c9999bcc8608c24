"""What lies at a URL: its commit records, the manifest that each one has, and the checkpoints below it."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dcp_s3._checkpoint.format.layout import (
    RECORD_NAME,
    WRITE_ID_FIELD,
    is_record_name,
    is_write_id,
    manifest_name,
    manifest_write_id,
    owner_of,
    record_rank,
)
from dcp_s3._checkpoint.format.manifest import Manifest
from dcp_s3._transfer.limits.attempt_timeout import call_all
from dcp_s3._transfer.s3.control_store import is_missing
from dcp_s3.errors import AccessDeniedError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._checkpoint.pickles.standin import RecordSummary
    from dcp_s3._transfer.s3.control_store import ControlStore, Fetched

_log = logging.getLogger(__name__)

_TRIES: Final = 3
"""So often a record is read that is replaced while it is read."""


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
        from dcp_s3._checkpoint.pickles.standin import (
            read_record,  # its expressions take a while to compile; ls does without
        )

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
    manifests = Manifests(store, url)
    own = _read(store, url, RECORD_NAME, manifests) if names is None or RECORD_NAME in names else None
    try:
        if names is None:
            names = sorted(rank_records(store, url), key=natural)
    except AccessDeniedError:
        if own is None:
            raise
        names = []  # who may read a checkpoint by its name need not be allowed to list
    ranks = [name for name in names if name != RECORD_NAME]
    read = call_all(lambda name: _read(store, url, name, manifests), ranks) if ranks else []
    return [record for record in (own, *read) if record is not None]


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


def _read(store: ControlStore, url: CheckpointUrl, name: str, manifests: Manifests) -> Record | None:
    for _ in range(_TRIES):
        fetched = _get(store, url.key(name))
        if fetched is None:
            return None
        record = _with_manifest(manifests, url, name, fetched)
        # between the two reads a save may have replaced the checkpoint, and deleted the old manifest
        if record.manifest is not None or etags(store, url, [name]).get(name) == fetched.info.etag:
            break
        manifests = Manifests(store, url)
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


class Manifests:
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
                found = zip(write_ids, call_all(self.of_save, write_ids) if write_ids else (), strict=True)
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


def _with_manifest(manifests: Manifests, url: CheckpointUrl, name: str, fetched: Fetched) -> Record:
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


def natural(text: str) -> list[str | int]:
    """Sort key by which step-9 comes before step-10."""
    # words and numbers alternate, so that like is compared with like
    return [int(word) if i % 2 else word for i, word in enumerate(_DIGITS.split(text))]
