"""What lies at a URL and below it, committed or not, found by few listings: a single one where it fits on a page."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from dcp_s3._checkpoint.care.inventory import natural
from dcp_s3._checkpoint.format.layout import (
    DATA_PREFIX,
    RECORD_NAME,
    CheckpointUrl,
    index_write_id,
    is_record_name,
    owner_of,
)
from dcp_s3._transfer.limits.attempt_timeout import call_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcp_s3._transfer.s3.control_store import ControlStore, ObjectInfo

PAGE: Final = 1000
"""Keys on the page of a listing; a "directory" with fewer is known after one."""
_DIRECT: Final = (RECORD_NAME, "__", "index-")
"""How the names begin of what is looked for directly at a URL."""
_DATA: Final = DATA_PREFIX.removesuffix("/")
_TOKEN = re.compile(r"[0-9a-f]{16}")


@dataclass(slots=True)
class Place:
    """A URL at which something of a checkpoint lies.

    Attributes:
        url: The URL.
        records: The commit records there, by name; none of an attempt that was not committed, or not yet.
        indexes: The indexes there, by write id.
        objects: How many of our data objects lie there, whichever save wrote them.
        bytes: Their size.
    """

    url: CheckpointUrl
    records: dict[str, ObjectInfo] = field(default_factory=dict)
    indexes: dict[str, ObjectInfo] = field(default_factory=dict)
    objects: int = 0
    bytes: int = 0


def survey(store: ControlStore, root: CheckpointUrl) -> list[Place]:
    """Find every URL at and below ``root`` that holds commit records, or objects of ours. Needs ListBucket.

    A page of keys tells all of a small place. One with more keys is listed level by level, so that of its data objects
    only those are listed that lie in the folder of a save's data.

    Returns:
        Sorted by URL, numbers by value.

    Raises:
        StorageError: The store refused or failed.
    """
    found = _Found(root)
    level = [root]
    while level:
        level = list(chain.from_iterable(call_all(lambda url: _visit(store, url, found), level)))
    return found.places()


def _visit(store: ControlStore, url: CheckpointUrl, found: _Found) -> list[CheckpointUrl]:
    """Note what lies at ``url``; return what is left to be looked at below it."""
    start = url.key("")
    page = list(islice(store.list(start), PAGE))
    if len(page) < PAGE:
        found.note(page)
        return []
    # a store that pages without tokens may give one twice; "//" in a key gives an empty name, which no URL has
    names = dict.fromkeys(prefix[len(start) :].removesuffix("/") for prefix in store.list_prefixes(start))
    if url.prefix.rpartition("/")[2] == _DATA and all(map(_TOKEN.fullmatch, names)):
        found.note(store.list(start))  # a folder for each rank of each save, of few objects: pages of them cost less
        return []
    for name in _DIRECT:
        found.note(info for info in store.list(url.key(name)) if "/" not in info.key[len(start) :])
    return [url.child(name) for name in names if name]


class _Found:
    def __init__(self, root: CheckpointUrl) -> None:
        self._root = root
        self._places: dict[str, Place] = {}
        self._lock = threading.Lock()

    def note(self, objects: Iterable[ObjectInfo]) -> None:
        """Keep what is a record or an object of ours. Objects come in the order of their keys; threads may share this."""
        last = ""
        for info in objects:
            folder, _, name = info.key.rpartition("/")
            with self._lock:
                if is_record_name(name):
                    if (place := self._place(folder)) is not None:
                        place.records[name] = info
                elif info.key != last and (owner := owner_of(info.key)) is not None:
                    last = info.key
                    # a folder with a record, which comes first, is a checkpoint at a URL that looks like a save's data
                    has_record = folder in self._places and self._places[folder].records
                    if (place := self._place(folder if has_record else owner)) is not None:
                        _add(place, name, info)

    def _place(self, prefix: str) -> Place | None:
        # an object right below the root can belong to a checkpoint above it; "//" is in no URL
        if not (prefix == self._root.prefix or prefix.startswith(self._root.key(""))) or (
            prefix and "" in prefix.split("/")
        ):
            return None
        return self._places.setdefault(prefix, Place(CheckpointUrl(self._root.bucket, prefix)))

    def places(self) -> list[Place]:
        """What was found."""
        for place in self._places.values():
            place.records = {name: place.records[name] for name in sorted(place.records, key=natural)}
        return sorted(self._places.values(), key=lambda place: natural(place.url.prefix))


def _add(place: Place, name: str, info: ObjectInfo) -> None:
    if (write_id := index_write_id(name)) is not None:
        place.indexes[write_id] = info
    else:
        place.objects += 1
        place.bytes += info.size
