"""The index: what a checkpoint holds and where it lies, as columns of numbers and text. Nothing in it is run.

It is a safetensors file, compressed with gzip, so that ``gunzip`` and any safetensors reader show it. Each column is one
array, one value per item, per chunk or per object; a column of lists is one array of all values and one of their counts.
The header is the file's ``__metadata__``. Reading takes time and memory in proportion to the size of the object.

Source: https://huggingface.co/docs/safetensors (the format).
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import json
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from dcp_s3._checkpoint.format.layout import DATA_PREFIX, check_relative, is_record_name, is_write_id
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Numbers = NDArray[Any]

__all__ = ["AN_OBJECT", "FORMAT", "NOWHERE", "Columns", "Index", "ObjectEntry", "Properties", "Ragged", "joined"]

FORMAT: Final = 1
NOWHERE: Final = -1
"""In ``row_object``: the chunk is in the metadata, and nobody wrote it. In ``row_raw_offset``: there is no raw data."""
AN_OBJECT: Final = 0xFFFF
"""In ``item_properties``: the item is no tensor."""

_MAX_INT: Final = (1 << 63) - 1
_MOST_HEADER: Final = 1 << 20
"""Bytes of a safetensors header; ours takes 3 KiB and 100 bytes for each kind of tensor."""
_MOST_RATIO: Final = 64
_SLACK: Final = 1 << 20
"""An index is not unpacked to more than ``_MOST_RATIO`` times its size and ``_SLACK`` bytes; measured: 9 times."""
_FEW_NAMES: Final = 1 << 16
"""Of so many a table is made at once; of more, which takes 100 bytes each, only those are looked at that are asked for."""
_SHA256 = re.compile(r"[0-9a-f]{64}")

_COLUMNS: Final[dict[str, str]] = {
    "item_names": "u1",
    "item_names.counts": "u4",
    "item_order": "u4",
    "item_properties": "u2",
    "item_dims": "u1",
    "item_sizes": "i8",
    "item_rows": "u4",
    "item_paths": "u4",
    "item_paths.counts": "u2",
    "row_offsets": "i8",
    "row_sizes": "i8",
    "row_object": "i4",
    "row_start": "i8",
    "row_length": "i8",
    "row_raw_offset": "i4",
    "row_crc32c": "u4",
    "row_crc32c.counts": "u4",
    "object_names": "u1",
    "object_names.counts": "u4",
    "object_sizes": "i8",
    "object_etags": "u1",
    "object_etags.counts": "u4",
    "object_part_bytes": "i8",
    "object_crc32c": "u4",
    "object_crc32c.counts": "u4",
}


class Properties(NamedTuple):
    """Torch's ``TensorProperties``, by the names that torch has for their values."""

    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """One data object as it was when its upload was complete."""

    key: str
    """Name relative to the checkpoint's URL."""
    size: int
    """Bytes."""
    etag: str
    """As the store gave it; empty where it gave none."""
    part_bytes: int
    """Grid of the CRCs: bytes per part, the last one may be shorter; 1 or more."""
    crc32c: tuple[int, ...]
    """CRC32C of each part."""

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Each part as ``(start, end, crc32c)``; bytes of the object, the end exclusive."""
        for i, crc in enumerate(self.crc32c):
            yield i * self.part_bytes, min((i + 1) * self.part_bytes, self.size), crc


class Ragged:
    """A column of lists: all their values in a row.

    Args:
        values: Of all lists, one after the other.
        counts: How many each list has; together as many as there are.
    """

    __slots__ = ("ends", "values")

    def __init__(self, values: Numbers, counts: Numbers) -> None:
        self.values = values
        self.ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def part(self, i: int) -> Numbers:
        """The values of list ``i``, not negative."""
        return self.values[self.ends[i - 1] if i else 0 : self.ends[i]]

    def numbers(self, i: int) -> tuple[int, ...]:
        """The values of list ``i``, as Python's."""
        return tuple(self.part(i).tolist())

    def lists(self) -> Iterator[tuple[int, ...]]:
        """All lists, as Python's."""
        values, start = self.values.tolist(), 0
        for end in self.ends.tolist():
            yield tuple(values[start:end])
            start = end

    def text(self, i: int) -> str:
        """List ``i`` as the text whose UTF-8 it is."""
        return self.part(i).tobytes().decode("utf-8", "surrogatepass")

    def texts(self) -> list[str]:
        """All of them."""
        data, start, found = self.values.tobytes(), 0, []
        for end in self.ends.tolist():
            found.append(data[start:end].decode("utf-8", "surrogatepass"))
            start = end
        return found

    def counts(self) -> Numbers:
        """Length of each list."""
        return np.diff(self.ends, prepend=0)

    def taken(self, rows: Numbers) -> Ragged:
        """The lists of these rows, in their order."""
        counts = self.counts()[rows]
        moved = Ragged(self.values, counts)
        shift = (self.ends[rows] - moved.ends).repeat(counts)
        moved.values = self.values[np.arange(len(shift)) + shift] if len(shift) else self.values[:0]
        return moved


def joined(texts: Sequence[str]) -> Ragged:
    """A column of texts."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    counts = np.fromiter(map(len, encoded), np.uint32, len(encoded))
    return Ragged(np.frombuffer(b"".join(encoded), np.uint8), counts)


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns:
    """The items of a state dict in their order, and for each its rows: a tensor's chunks, or the one record of an object.

    Attributes:
        properties: The kinds of tensors there are.
        item_names: Each item's name.
        item_order: Indexes of the items, sorted by name.
        item_properties: Index in ``properties``; ``AN_OBJECT`` for what is no tensor.
        item_sizes: Each item's shape; of an object, empty.
        item_rows: How many rows it has.
        item_paths: The planner's path to it in the nested state dict, as the lengths of the path's parts in its name, twice,
            plus 1 if the part is a number; empty if the planner gave none.
        row_offsets: Where the chunk begins in its tensor.
        row_sizes: Its shape.
        row_object: Index of the object that it lies in, or ``NOWHERE``.
        row_start: Offset of its record in the object, bytes.
        row_length: Of the record, bytes.
        row_raw_offset: Offset of the raw tensor bytes in the record, or ``NOWHERE``.
        row_crc32c: CRC32C of each 4 MiB of the raw tensor bytes, or of the record where there are none.
        object_names: Names of the objects, relative to the checkpoint's URL.
    """

    properties: tuple[Properties, ...]
    item_names: Ragged
    item_order: Numbers
    item_properties: Numbers
    item_sizes: Ragged
    item_rows: Numbers
    item_paths: Ragged
    row_offsets: Ragged
    row_sizes: Ragged
    row_object: Numbers
    row_start: Numbers
    row_length: Numbers
    row_raw_offset: Numbers
    row_crc32c: Ragged
    object_names: tuple[str, ...]

    @functools.cached_property
    def row_ends(self) -> Numbers:
        """Behind the last row of each item."""
        return np.cumsum(self.item_rows, dtype=np.int64)

    @functools.cached_property
    def names(self) -> list[str]:
        """All names, in the items' order."""
        return self.item_names.texts()

    @functools.cached_property
    def _items(self) -> dict[str, int]:
        return {name: item for item, name in enumerate(self.names)}

    def find(self, name: str) -> int | None:
        """Index of the item of this name, ``None`` if there is none. Looks at as few names as it can."""
        if len(self.item_order) <= _FEW_NAMES:
            return self._items.get(name)
        wanted = name.encode("utf-8", "surrogatepass")
        low, high = 0, len(self.item_order)
        while low < high:
            middle = (low + high) // 2
            item = int(self.item_order[middle])
            found = self.item_names.part(item).tobytes()
            if found == wanted:
                return item
            if found < wanted:
                low = middle + 1
            else:
                high = middle
        return None

    def rows(self, item: int) -> range:
        """The rows of an item."""
        end = int(self.row_ends[item])
        return range(end - int(self.item_rows[item]), end)

    def is_object(self, item: int) -> bool:
        """Whether an item is no tensor."""
        return int(self.item_properties[item]) == AN_OBJECT

    def object_ends(self) -> list[int]:
        """Where the last record of each object ends, bytes."""
        ends = np.zeros(len(self.object_names), np.int64)
        held = self.row_object != NOWHERE
        np.maximum.at(ends, self.row_object[held], self.row_start[held] + self.row_length[held])
        return [int(end) for end in ends]

    def by_object(self) -> list[Numbers]:
        """The rows that lie in each object."""
        order = np.argsort(self.row_object, kind="stable")
        bounds = np.searchsorted(self.row_object[order], np.arange(len(self.object_names) + 1))
        return [order[start:end] for start, end in itertools.pairwise(bounds.tolist())]

    def names_of(self, rows: Numbers) -> list[str]:
        """The items that rows are of, each once."""
        items = dict.fromkeys(np.searchsorted(self.row_ends, rows, side="right").tolist())
        return [self.item_names.text(item) for item in items]


@dataclass(frozen=True, eq=False, kw_only=True)
class Index:
    """What one save wrote. It is live while the commit record is the one that it names."""

    write_id: str
    """32 hex digits; the record's ``storage_meta.save_id``."""
    record: str
    """Name of the commit record: ``.metadata`` or ``__<rank>.metadata``."""
    record_sha256: str
    """Of the record's bytes; 64 hex digits."""
    record_bytes: int
    """Size of the record."""
    world_size: int
    """Ranks that took part; 1 or more."""
    created_unix_s: float
    """When it was made, by the coordinator's clock; seconds since 1970. For people only."""
    writer: str
    """Program and version."""
    version: str | None
    """DCP's version of the metadata."""
    checkpoint_id: str
    """Where it was saved to; a copy may lie elsewhere."""
    objects: tuple[ObjectEntry, ...]
    columns: Columns
    planner_data: str = "columns"
    """Where the planner's data are: in the ``columns``, only in the ``record``, or in neither: ``none``."""
    conditional: bool = False
    """Whether the record's PUT has a condition, so that a copy of it that arrives late is refused. False: not, or not known."""

    def describes(self, record: bytes) -> bool:
        """Whether these bytes are the commit record that this index was written for."""
        return len(record) == self.record_bytes and hashlib.sha256(record).hexdigest() == self.record_sha256

    def to_bytes(self) -> bytes:
        """The index as it is stored."""
        from safetensors.numpy import save

        header = {
            "format": FORMAT,
            "writer": self.writer,
            "write_id": self.write_id,
            "record": self.record,
            "record_sha256": self.record_sha256,
            "record_bytes": self.record_bytes,
            "created_unix_s": self.created_unix_s,
            "world_size": self.world_size,
            "version": self.version,
            "checkpoint_id": self.checkpoint_id,
            "planner_data": self.planner_data,
            "conditional": self.conditional,
            "properties": self.columns.properties,
        }
        arrays = {name: np.ascontiguousarray(values, _COLUMNS[name]) for name, values in self._arrays()}
        data = save(arrays, metadata={name: json.dumps(value) for name, value in header.items()})
        packed = gzip.compress(data, 1, mtime=0)
        # the reader's bound holds for every index: what packs better than that is not packed
        return packed if len(data) <= _most_unpacked(len(packed)) else gzip.compress(data, 0, mtime=0)

    def _arrays(self) -> Iterator[tuple[str, Numbers]]:
        columns = self.columns
        ragged = {
            "item_names": columns.item_names,
            "item_paths": columns.item_paths,
            "row_crc32c": columns.row_crc32c,
            "object_names": joined(columns.object_names),
            "object_etags": joined([entry.etag for entry in self.objects]),
            "object_crc32c": Ragged(
                np.array([crc for entry in self.objects for crc in entry.crc32c], np.uint32),
                np.array([len(entry.crc32c) for entry in self.objects], np.uint32),
            ),
        }
        for name, column in ragged.items():
            yield name, column.values
            yield f"{name}.counts", column.counts()
        for name in (
            "item_order",
            "item_properties",
            "item_rows",
            "row_object",
            "row_start",
            "row_length",
            "row_raw_offset",
        ):
            yield name, getattr(columns, name)
        yield "item_dims", columns.item_sizes.counts()
        for name in ("item_sizes", "row_offsets", "row_sizes"):
            yield name, getattr(columns, name).values
        yield "object_sizes", np.array([entry.size for entry in self.objects], np.int64)
        yield "object_part_bytes", np.array([entry.part_bytes for entry in self.objects], np.int64)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Index:
        """Read an index that was fetched from the store. Header fields and columns that are not known are ignored.

        Args:
            data: The object's bytes.
            source: What they were read from, for the message.

        Raises:
            CorruptCheckpointError: It is no index, is damaged, or was written in a newer format.
        """
        raw = _unpacked(data, source)
        header = _Header(_header(raw, source), source)
        number = header.integer("format", low=1)
        if number > FORMAT:
            raise CorruptCheckpointError(
                f"{source} has index format {number}; this version of dcp_s3 reads up to {FORMAT}: use a newer one"
            )
        columns, objects = _Reader(raw, source).read(header.properties())
        return cls(
            write_id=header.text("write_id", is_write_id, "32 hex digits"),
            record=header.text("record", is_record_name, "the name of a commit record"),
            record_sha256=header.text("record_sha256", _SHA256.fullmatch, "64 hex digits"),
            record_bytes=header.integer("record_bytes", low=0),
            world_size=header.integer("world_size", low=1),
            created_unix_s=header.seconds("created_unix_s"),
            writer=header.text("writer", bool, "text"),
            version=None if header.value("version") is None else header.text("version", bool, "text"),
            checkpoint_id=header.text("checkpoint_id", bool, "text"),
            planner_data=header.text(
                "planner_data", ("columns", "record", "none").__contains__, "columns, record or none"
            ),
            conditional=header.value("conditional") is True,
            objects=objects,
            columns=columns,
        )


def _most_unpacked(packed: int) -> int:
    return _MOST_RATIO * packed + _SLACK


def _unpacked(data: bytes, source: str) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)  # gzip
    try:
        raw = unpacker.decompress(data, _most_unpacked(len(data)))
    except zlib.error as error:
        raise CorruptCheckpointError(f"{source} is not an index: {error}") from None
    if not unpacker.eof or unpacker.unused_data:
        what = "is cut off" if not unpacker.unconsumed_tail and not unpacker.eof else "has more bytes than an index"
        raise CorruptCheckpointError(f"{source} {what}: {len(data)} bytes")
    return raw


def _header(raw: bytes, source: str) -> dict[str, Any]:
    size = int.from_bytes(raw[:8], "little")
    if size > min(_MOST_HEADER, len(raw) - 8):
        raise CorruptCheckpointError(f"{source} is not an index: its header would have {size} bytes")
    try:
        texts = json.loads(raw[8 : 8 + size])["__metadata__"]
        return {str(name): json.loads(text) for name, text in texts.items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source} is not an index: its header cannot be read ({error!r:.80})") from None


class _Reader:
    """Takes the columns out of an index, and holds them against one another."""

    def __init__(self, raw: bytes, source: str) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import load

        self._source = source
        try:
            self._arrays = load(raw)
        except (SafetensorError, KeyError, ValueError) as error:
            raise CorruptCheckpointError(f"{source} is not an index: {error!s:.200}") from None
        for name, kind in _COLUMNS.items():
            column = self._arrays.get(name)
            if column is None or column.ndim != 1 or column.dtype != np.dtype(f"<{kind}"):
                raise CorruptCheckpointError(f"{source} is damaged: its column {name!r} is missing or of another kind")

    def read(self, properties: tuple[Properties, ...]) -> tuple[Columns, tuple[ObjectEntry, ...]]:
        objects = self._objects()
        arrays = self._arrays
        items, rows = len(arrays["item_dims"]), len(arrays["row_object"])
        kinds, dims, item_rows, order = (
            arrays[name] for name in ("item_properties", "item_dims", "item_rows", "item_order")
        )
        no_tensor = kinds == AN_OBJECT
        self._check("item_properties", len(kinds) == items and bool((no_tensor | (kinds < len(properties))).all()))
        self._check("item_rows", len(item_rows) == items and int(item_rows.sum(dtype=np.int64)) == rows)
        self._check("item_dims", not bool((no_tensor & ((dims > 0) | (item_rows != 1))).any()))
        self._check(
            "item_order",
            len(order) == items
            and bool((np.bincount(order, minlength=items) == 1).all() if _below(order, items) else False),
        )
        row_dims = dims.repeat(item_rows)
        columns = Columns(
            properties=properties,
            item_names=self._ragged("item_names", items),
            item_order=order,
            item_properties=kinds,
            item_sizes=self._shapes("item_sizes", dims),
            item_rows=item_rows,
            item_paths=self._ragged("item_paths", items),
            row_offsets=self._shapes("row_offsets", row_dims),
            row_sizes=self._shapes("row_sizes", row_dims),
            row_object=arrays["row_object"],
            row_start=self._of_rows("row_start", rows),
            row_length=self._of_rows("row_length", rows),
            row_raw_offset=self._of_rows("row_raw_offset", rows),
            row_crc32c=self._ragged("row_crc32c", rows),
            object_names=tuple(entry.key for entry in objects),
        )
        self._check_ranges(columns, np.array([*(entry.size for entry in objects), 0], np.int64))
        return columns, objects

    def _check(self, name: str, good: bool) -> None:
        if not good:
            raise CorruptCheckpointError(f"{self._source} is damaged: its column {name!r} does not fit the others")

    def _ragged(self, name: str, length: int) -> Ragged:
        values, counts = self._arrays[name], self._arrays[f"{name}.counts"]
        self._check(name, len(counts) == length and int(counts.sum(dtype=np.int64)) == len(values))
        return Ragged(values, counts)

    def _shapes(self, name: str, dims: Numbers) -> Ragged:
        values = self._arrays[name]
        self._check(name, int(dims.sum(dtype=np.int64)) == len(values) and not bool((values < 0).any()))
        return Ragged(values, dims)

    def _of_rows(self, name: str, rows: int) -> Numbers:
        values = self._arrays[name]
        self._check(name, len(values) == rows and not bool((values < NOWHERE).any()))
        return values

    def _check_ranges(self, columns: Columns, sizes: Numbers) -> None:
        """Each row lies within its object, and none begins in another one; the same range may have several."""
        where, start, length = columns.row_object, columns.row_start, columns.row_length
        self._check("row_object", bool(((where >= NOWHERE) & (where < len(sizes) - 1)).all()))
        room = sizes[where]  # of what is nowhere: 0, the last
        inside = (start >= 0) & (length >= 0) & (start <= room) & (length <= room - start)
        self._check("row_start", bool((inside | (where == NOWHERE)).all()))
        self._check("row_raw_offset", bool((columns.row_raw_offset <= length).all()))
        if not apart(where, start, length):
            raise CorruptCheckpointError(f"{self._source} is damaged: ranges of its rows overlap")

    def _objects(self) -> tuple[ObjectEntry, ...]:
        arrays = self._arrays
        sizes, part_bytes = arrays["object_sizes"], arrays["object_part_bytes"]
        count = len(sizes)
        self._check("object_sizes", not bool((sizes < 0).any()))
        self._check("object_part_bytes", len(part_bytes) == count and not bool((part_bytes < 1).any()))
        crcs = self._ragged("object_crc32c", count)
        self._check("object_crc32c", bool((crcs.counts() == (sizes // part_bytes + (sizes % part_bytes > 0))).all()))
        try:
            names, etags = self._ragged("object_names", count).texts(), self._ragged("object_etags", count).texts()
        except UnicodeDecodeError:
            raise CorruptCheckpointError(f"{self._source} is damaged: a name or an ETag is no text") from None
        if len(set(names)) != count:
            raise CorruptCheckpointError(f"{self._source} is damaged: it names an object twice")
        for name in names:
            if not check_relative(name, source=self._source).startswith(DATA_PREFIX):
                raise CorruptCheckpointError(
                    f"{self._source} names the object {name!r}, which is not below {DATA_PREFIX}"
                )
        return tuple(
            ObjectEntry(key=name, size=size, etag=etag, part_bytes=part, crc32c=crcs.numbers(i))
            for i, (name, size, etag, part) in enumerate(
                zip(names, sizes.tolist(), etags, part_bytes.tolist(), strict=True)
            )
        )


def _below(values: Numbers, limit: int) -> bool:
    return not len(values) or int(values.max()) < limit


def apart(where: Numbers, start: Numbers, length: Numbers) -> bool:
    """Whether no range begins in another one; several may be the same. Empty ranges count for nothing.

    Args:
        where: The object of each.
        start: Where it begins.
        length: Bytes.
    """
    held = (where != NOWHERE) & (length > 0)
    where, start, length = where[held], start[held], length[held]
    if not _in_order(where, start):
        order = np.lexsort((length, start, where))
        where, start, length = where[order], start[order], length[order]
    same = (where[1:] == where[:-1]) & ~((start[1:] == start[:-1]) & (length[1:] == length[:-1]))
    return not bool((same & (start[1:] < start[:-1] + length[:-1])).any())


def _in_order(where: Numbers, start: Numbers) -> bool:
    later = (where[1:] > where[:-1]) | ((where[1:] == where[:-1]) & (start[1:] >= start[:-1]))
    return bool(later.all())


class _Header:
    """Takes values out of the header, and complains about what is absent or of the wrong kind."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def _damaged(self, name: str, wanted: str) -> CorruptCheckpointError:
        found = repr(self._values[name])[:80] if name in self._values else "nothing"
        return CorruptCheckpointError(f"{self._source} is damaged: {name!r} must be {wanted}, found {found}")

    def value(self, name: str) -> object:
        return self._values.get(name)

    def text(self, name: str, accepts: Callable[[str], object], wanted: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or not accepts(value):
            raise self._damaged(name, wanted)
        return value

    def integer(self, name: str, *, low: int) -> int:
        value = self._values.get(name)
        if type(value) is not int or not low <= value <= _MAX_INT:
            raise self._damaged(name, f"a whole number, {low} or more")
        return value

    def seconds(self, name: str) -> float:
        value = self._values.get(name)
        # NaN and infinity fail the comparison
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
            raise self._damaged(name, "seconds since 1970")
        return float(value)

    def properties(self) -> tuple[Properties, ...]:
        value = self._values.get("properties")
        wanted = [str, str, bool, str, bool]
        if not isinstance(value, list) or not all(
            isinstance(kind, list) and list(map(type, kind)) == wanted for kind in value
        ):
            raise self._damaged("properties", "a list of tensor properties")
        return tuple(Properties(*kind) for kind in value)
