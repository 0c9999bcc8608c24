"""Says at save which objects a load will refuse, by the check that the load makes.

Nearly all objects of a state dict are numbers and texts, and name nothing: a search for what looks like a name, 2 µs a record,
is all that they cost. Of the others each sort is checked once, and all together not more than a bounded number of bytes.
"""

from __future__ import annotations

import logging
import re
import struct
from typing import Final

from dcp_s3._checkpoint.archive.stock_archive import load_record
from dcp_s3._checkpoint.pickles.objects import foreign_names, not_loadable, user_allowed
from dcp_s3.errors import DcpS3Error, ObjectNotLoadableError

__all__ = ["Loadability"]

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(rb"c[^\x00-\x1f]{1,200}\n[^\x00-\x1f]{1,200}\n")
"""A GLOBAL instruction, or what looks like one."""
_END: Final = b".PK\x07\x08"
"""STOP, the last instruction, and what follows in the archive."""
_LOOKED_AT: Final = 256 << 10
"""Bytes of one record: its pickle lies at its beginning."""
_LOADED: Final = 1 << 20
"""Bytes of a record that is loaded for a try."""
_PER_SAVE: Final = 1 << 20
"""Bytes of pickles that are followed in one save, 0.4 s of CPU time, where each counts at least ``_LEAST``."""
_LEAST: Final = 1024
_HEADER: Final = struct.Struct("<4s5H3L2H")
"""A local file header of a zip archive (APPNOTE.TXT 4.3.7)."""
_MOST_SORTS: Final = 4096
_SHOWN: Final = 5
"""Objects that the warning names."""

_good: set[tuple[frozenset[bytes], frozenset[str]]] = set()
"""What the pickles named that were found good, with what the user had allowed then."""


class Loadability:
    """Of one rank's save: the objects that ``S3StorageReader`` will refuse as it is by default."""

    def __init__(self) -> None:
        self._left = _PER_SAVE
        self._count = 0
        self._shown: list[str] = []

    def look(self, fqn: str, record: memoryview) -> None:
        """Look at an object's record.

        Args:
            fqn: The object's name in the state dict.
            record: What is written of it, bytes.
        """
        if self._left <= 0:
            return
        pickle = _pickle_in(record)
        if _NAME.search(pickle) is None:
            return
        sort = frozenset(_NAME.findall(pickle)), frozenset(user_allowed())
        if sort in _good:
            return
        self._left -= _LEAST + len(pickle)
        try:
            if len(record) <= _LOADED:
                load_record(record, fqn, trusted=False)
            elif names := foreign_names(pickle):
                raise not_loadable(fqn, names)
        except DcpS3Error as error:
            self._count += 1
            if len(self._shown) < _SHOWN:
                types = error.types if isinstance(error, ObjectNotLoadableError) else ()
                self._shown.append(f"{fqn} ({', '.join(types) or 'what its pickle does'})")
        else:
            if len(record) <= _LOADED and len(_good) < _MOST_SORTS:
                _good.add(sort)

    def warn(self, url: object) -> None:
        """Log one warning if there was such an object.

        Args:
            url: The checkpoint.
        """
        if self._count:
            more = f" and {self._count - len(self._shown)} more" if self._count > len(self._shown) else ""
            _log.warning(
                "%s%d of the objects saved to %s will not load unless asked for with S3StorageReader(trust_pickle=True) or, where "
                "allowing these types is enough, torch.serialization.safe_globals([...]): %s%s; tensors and plain Python values load always",
                "at least " if self._left <= 0 else "", self._count, url, ", ".join(self._shown), more,
            )  # fmt: skip


def _pickle_in(record: memoryview) -> bytes:
    """The first entry of a torch.save archive, or its beginning; all of the record's beginning if it is no archive."""
    head = bytes(record[:_LOOKED_AT])
    if len(head) < _HEADER.size:
        return head
    *_, name, extra = _HEADER.unpack_from(head)
    start = _HEADER.size + name + extra
    end = head.find(_END, start)
    return head[start:] if end < 0 else head[start : end + 1]
