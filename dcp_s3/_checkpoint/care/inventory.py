"""What lies at a URL: its commit records, and the index that each one has. Loads and tools read them here."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dcp_s3._checkpoint.format.index import Index
from dcp_s3._checkpoint.format.layout import (
    INDEX_FIELD,
    RECORD_NAME,
    WRITE_ID_FIELD,
    index_name,
    is_record_name,
    is_write_id,
    record_rank,
)
from dcp_s3._transfer.limits.attempt_timeout import call_all
from dcp_s3._transfer.s3.control_store import is_missing
from dcp_s3.errors import AccessDeniedError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dcp_s3._checkpoint.format.index import Columns
    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._transfer.s3.control_store import ControlStore, Fetched

_TRIES: Final = 3
"""So often a record is read that is replaced while it is read."""
BEGIN_BYTES: Final = 16 << 10
"""Of a record, whose user metadata name its index, no more is read; other writers' small records are whole with that."""
_RANGE_BYTES: Final = 16 << 20
"""A larger index is read in ranges of this size, side by side."""
_DIGITS = re.compile(r"([0-9]+)")
_SAVE_ID = re.compile(rb"\x8c\x07save_id\x94\x8c\x20([0-9a-f]{32})\x94")
"""The write id as pickle writes it into a record of ours; a copy may have lost the user metadata."""
_OUR_OBJECT = re.compile(rb"data/[0-9a-f]{16}/__[0-9]+_[0-9]+\.distcp")


@dataclass(frozen=True, slots=True)
class Record:
    """A commit record as it was read.

    Attributes:
        url: The checkpoint's URL.
        name: ``.metadata`` or ``__<rank>.metadata``.
        fetched: Its beginning, or all its bytes, with its size, ETag and user metadata.
        index: The index that was written for it; ``None`` if there is none.
        reason: Why there is none.
        ours: This package wrote it, index or not.
    """

    url: CheckpointUrl
    name: str
    fetched: Fetched
    index: Index | None
    reason: str = ""
    ours: bool = False

    @property
    def rank(self) -> int | None:
        """Of the rank that committed for itself; ``None`` for the checkpoint's own record."""
        return record_rank(self.name)

    @property
    def ranks(self) -> int:
        """How many ranks took part, as the index says; 0 without one."""
        return 0 if self.index is None else self.index.world_size

    @property
    def created_unix_s(self) -> float:
        """When its index was made, by the writer's clock; 0 without one."""
        return 0.0 if self.index is None else self.index.created_unix_s

    @property
    def source(self) -> str:
        """What to call it in a message."""
        return str(self.url.child(self.name))

    @property
    def whole(self) -> bool:
        """Whether all its bytes were read."""
        return len(self.fetched.body) == self.fetched.info.size

    def columns(self) -> Columns:
        """What the checkpoint holds: from the index, or of a record without one from its pickle, which needs torch.

        Raises:
            CorruptCheckpointError: The record cannot be read.
        """
        if self.index is not None:
            return self.index.columns
        from dcp_s3._checkpoint.pickles.columns import columns_of_record

        return columns_of_record(self.fetched.body, source=self.source)


def read_records(
    store: ControlStore, url: CheckpointUrl, names: list[str] | None = None, *, whole: bool = False
) -> list[Record]:
    """Read every commit record at a URL, not those below it: the checkpoint's own, and those of single ranks.

    Args:
        store: The bucket.
        url: The checkpoint's URL.
        names: Those that a listing has just shown; without them the records of single ranks are listed.
        whole: Read all their bytes, and hold them against the index.

    Raises:
        StorageError: The store refused or failed; a missing record is no error.
    """

    def read(name: str) -> Record | None:
        try:
            return read_record(store, url, name, whole=whole)
        except StorageError as error:
            if is_missing(error):
                return None
            raise

    own = read(RECORD_NAME) if names is None or RECORD_NAME in names else None
    try:
        if names is None:
            names = sorted(rank_records(store, url), key=natural)
    except AccessDeniedError:
        if own is None:
            raise
        names = []  # who may read a checkpoint by its name need not be allowed to list
    ranks = [name for name in names if name != RECORD_NAME]
    found = call_all(read, ranks) if ranks else []
    return [record for record in (own, *found) if record is not None]


def read_record(store: ControlStore, url: CheckpointUrl, name: str, *, whole: bool = False) -> Record:
    """Read one commit record, and the index that its user metadata, or a copy's own bytes, name.

    Args:
        store: The bucket.
        url: The checkpoint's URL.
        name: The record.
        whole: Read all its bytes, and hold them against the index.

    Raises:
        StorageError: It is missing, or the store refused or failed.
    """
    for _ in range(_TRIES):
        record = _with_index(store, url, name, _begin(store, url.key(name)), whole=whole)
        # between the two reads a save may have replaced the checkpoint, and deleted the old index
        if (
            record.index is not None
            or not record.ours
            or etags(store, url, [name]).get(name) == record.fetched.info.etag
        ):
            break
    return record


def _begin(store: ControlStore, key: str) -> Fetched:
    try:
        return store.get(key, byte_range=(0, BEGIN_BYTES))
    except StorageError as error:
        if error.status != 416:  # an empty object has no range
            raise
        return store.get(key)


def _with_index(store: ControlStore, url: CheckpointUrl, name: str, fetched: Fetched, *, whole: bool) -> Record:
    hint, sha256 = (fetched.info.metadata.get(field, "") for field in (WRITE_ID_FIELD, INDEX_FIELD))
    told = is_write_id(hint)
    index = _read_index(store, url, hint, sha256) if told and sha256 else None
    if len(fetched.body) != fetched.info.size and (whole or not isinstance(index, Index)):
        fetched = store.get(url.key(name))
    if isinstance(index, Index):
        size = fetched.info.size
        good = index.describes(fetched.body) if len(fetched.body) == size else index.record_bytes == size
        if good and (index.record, index.write_id) == (name, hint):
            return Record(url, name, fetched, index, ours=True)
        index = f"its bytes are not those that {index_name(hint)} was written for"
    if told and sha256:
        return Record(url, name, fetched, None, index or f"its index {index_name(hint)} is missing", ours=True)
    reason = "it has no index"
    named = [match.decode() for match in _SAVE_ID.findall(fetched.body)]
    for write_id in dict.fromkeys([*named[:1], *([hint] if told else [])]):
        index = _read_index(store, url, write_id)
        if isinstance(index, Index):
            if (index.record, index.write_id) == (name, write_id) and index.describes(fetched.body):
                return Record(url, name, fetched, index, ours=True)
            index = f"its bytes are not those that {index_name(write_id)} was written for"
        reason = index or f"its index {index_name(write_id)} is missing"
    # several marks, so that no one damaged byte makes it pass for another writer's, which has nothing to be held against
    ours = told or bool(named) or _OUR_OBJECT.search(fetched.body) is not None
    return Record(url, name, fetched, None, reason, ours=ours)


def _read_index(store: ControlStore, url: CheckpointUrl, write_id: str, sha256: str = "") -> Index | str | None:
    """The index of a save, why it cannot be used, or ``None`` if it is not there."""
    key = url.key(index_name(write_id))
    try:
        data = get_in_ranges(store, key)
    except StorageError as error:
        if is_missing(error):
            return None
        if error.status == 416:
            return f"s3://{url.bucket}/{key} is empty"
        raise
    source = f"s3://{url.bucket}/{key}"
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        return f"{source} is not the index that was written with it: bytes were changed after the save"
    try:
        return Index.from_bytes(data, source=source)
    except CorruptCheckpointError as error:
        return error.message


def get_in_ranges(store: ControlStore, key: str) -> bytes:
    """All bytes of an object whose name is never used twice; a large one in several requests side by side."""
    first = store.get(key, byte_range=(0, _RANGE_BYTES))
    starts = range(_RANGE_BYTES, first.info.size, _RANGE_BYTES)
    if not starts:
        return first.body
    rest = call_all(lambda start: store.get(key, byte_range=(start, start + _RANGE_BYTES)).body, starts)
    return b"".join([first.body, *rest])


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


def rank_records(store: ControlStore, url: CheckpointUrl) -> Iterator[str]:
    """Names of the records of single ranks at a URL. Needs ListBucket."""
    start = len(url.key(""))
    for info in store.list(url.key("__")):
        name = info.key[start:]
        if is_record_name(name):
            yield name


def natural(text: str) -> list[str | int]:
    """Sort key by which step-9 comes before step-10."""
    # words and numbers alternate, so that like is compared with like
    return [int(word) if i % 2 else word for i, word in enumerate(_DIGITS.split(text))]
