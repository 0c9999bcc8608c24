"""From an index to torch's metadata, whose objects are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3._checkpoint.format.index import AN_OBJECT, NOWHERE
from dcp_s3._runtime.gc_pause import gc_paused
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from dcp_s3._checkpoint.format.index import Columns, Index, Properties

__all__ = ["StoredRange", "metadata_of"]

_K = TypeVar("_K")
_V = TypeVar("_V")
_FEW_CHUNKS: Final = 8
"""Chunks of one tensor that are compared one after the other; for more a table is made."""
_FEW: Final = 4096
"""Values of a mapping that are made all at once: that costs a quarter of what it costs to make them one by one."""


@dataclass
class StoredRange(_StorageInfo):
    """Where a record of ours lies, with what a stock record has no place for.

    Attributes:
        raw_offset: Where the raw, row-major bytes of the tensor begin in the record; ``None`` if it has none.
        crc32c: CRC32C of each 4 MiB of them, or of the record.
    """

    raw_offset: int | None = None
    crc32c: tuple[int, ...] = ()


class _Lazy(MutableMapping[_K, _V]):
    """A mapping whose values are made when they are first asked for. Who changes it has a dict from then on."""

    def __init__(self, length: int) -> None:
        self._made: dict[_K, _V] = {}
        self._length = length
        self._all = False

    def _make(self, key: Any) -> _V:  # noqa: ANN401 -- whatever is asked for
        raise NotImplementedError

    def _make_all(self) -> Iterator[tuple[_K, _V]]:
        raise NotImplementedError

    def _keys(self) -> Iterator[_K]:
        raise NotImplementedError

    def _dict(self) -> dict[_K, _V]:
        if not self._all:
            made = self._made
            with gc_paused():
                self._made = dict(self._make_all())
            self._made.update(made)  # somebody may have changed those
            self._all = True
        return self._made

    def __getitem__(self, key: _K) -> _V:
        value = self._made.get(key)
        if value is not None:
            return value
        if not self._all and (len(self._made) + _FEW) * 4 > self._length:
            self._dict()
        if self._all:
            return self._made[key]
        value = self._made[key] = self._make(key)
        return value

    def __setitem__(self, key: _K, value: _V) -> None:
        self._dict()[key] = value

    def __delitem__(self, key: _K) -> None:
        del self._dict()[key]

    def __iter__(self) -> Iterator[_K]:
        return iter(self._made) if self._all else self._keys()

    def __len__(self) -> int:
        return len(self._made) if self._all else self._length

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._dict(),)  # who pickles or copies it wants the values

    def items(self) -> ItemsView[_K, _V]:
        """As of a dict."""
        return self._dict().items()


class _Items(_Lazy[str, TensorStorageMetadata | BytesStorageMetadata]):
    """``Metadata.state_dict_metadata``."""

    def __init__(self, columns: Columns, properties: list[TensorProperties]) -> None:
        super().__init__(len(columns.item_names))
        self._columns = columns
        self._properties = properties

    def __contains__(self, key: object) -> bool:
        if self._all or not isinstance(key, str):
            return key in self._made
        return self._columns.find(key) is not None

    def _keys(self) -> Iterator[str]:
        return iter(self._columns.names)

    def _make_all(self) -> Iterator[tuple[str, TensorStorageMetadata | BytesStorageMetadata]]:
        columns = self._columns
        sizes, offsets, row_sizes = (
            map(_shared_sizes(), column.lists())
            for column in (columns.item_sizes, columns.row_offsets, columns.row_sizes)
        )
        for name, kind, size, rows in zip(
            columns.names, columns.item_properties.tolist(), sizes, columns.item_rows.tolist(), strict=True
        ):
            chunks = [ChunkStorageMetadata(next(offsets), next(row_sizes)) for _ in range(rows)]
            if kind == AN_OBJECT:
                yield name, BytesStorageMetadata()
            else:
                yield name, TensorStorageMetadata(self._properties[kind], size, chunks)

    def _make(self, key: Any) -> TensorStorageMetadata | BytesStorageMetadata:  # noqa: ANN401
        columns = self._columns
        item = columns.find(key) if isinstance(key, str) else None
        if item is None:
            raise KeyError(key)
        if columns.is_object(item):
            return BytesStorageMetadata()
        return TensorStorageMetadata(
            properties=self._properties[columns.item_properties[item]],
            size=torch.Size(columns.item_sizes.numbers(item)),
            chunks=[
                ChunkStorageMetadata(
                    offsets=torch.Size(columns.row_offsets.numbers(row)),
                    sizes=torch.Size(columns.row_sizes.numbers(row)),
                )
                for row in columns.rows(item)
            ],
        )


class _StoredRanges(_Lazy[MetadataIndex, _StorageInfo]):
    """``Metadata.storage_data``."""

    def __init__(self, columns: Columns) -> None:
        super().__init__(int((columns.row_object != NOWHERE).sum()))
        self._columns = columns
        self._tables: dict[int, dict[tuple[int, ...], int]] = {}

    def _keys(self, *, all_rows: bool = False) -> Iterator[MetadataIndex]:
        columns = self._columns
        places = zip(columns.row_object.tolist(), columns.row_offsets.lists(), strict=True)
        for name, kind, rows in zip(
            columns.names, columns.item_properties.tolist(), columns.item_rows.tolist(), strict=True
        ):
            for number in range(rows):
                where, offset = next(places)
                if all_rows or where != NOWHERE:
                    yield MetadataIndex(name) if kind == AN_OBJECT else MetadataIndex(name, offset, number)

    def _make_all(self) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
        columns = self._columns
        stored = zip(
            columns.row_object.tolist(),
            columns.row_start.tolist(),
            columns.row_length.tolist(),
            columns.row_raw_offset.tolist(),
            columns.row_crc32c.lists(),
            strict=True,
        )
        for key in self._keys(all_rows=True):
            where, start, length, raw_offset, crcs = next(stored)
            if where != NOWHERE:
                raw = None if raw_offset == NOWHERE else raw_offset
                yield key, StoredRange(columns.object_names[where], start, length, raw_offset=raw, crc32c=crcs)

    def _make(self, key: Any) -> _StorageInfo:  # noqa: ANN401
        columns = self._columns
        row = self._row(key) if isinstance(key, MetadataIndex) else None
        if row is None or (where := int(columns.row_object[row])) == NOWHERE:
            raise KeyError(key)
        raw_offset = int(columns.row_raw_offset[row])
        return StoredRange(
            columns.object_names[where],
            int(columns.row_start[row]),
            int(columns.row_length[row]),
            raw_offset=None if raw_offset == NOWHERE else raw_offset,
            crc32c=columns.row_crc32c.numbers(row),
        )

    def _row(self, index: MetadataIndex) -> int | None:
        columns = self._columns
        item = columns.find(index.fqn)
        if item is None or (index.offset is None) != columns.is_object(item):
            return None
        rows = columns.rows(item)
        if index.offset is None:
            return rows[0]
        offset = tuple(index.offset)
        if len(rows) > _FEW_CHUNKS:
            table = self._tables.get(item)
            if table is None:
                table = self._tables[item] = {columns.row_offsets.numbers(row): row for row in rows}
            return table.get(offset)
        return next((row for row in rows if columns.row_offsets.numbers(row) == offset), None)


class _Paths(_Lazy[str, tuple[str | int, ...]]):
    """``Metadata.planner_data`` of DCP's own planners: each name's path in the nested state dict."""

    def __init__(self, columns: Columns) -> None:
        super().__init__(int((columns.item_paths.counts() > 0).sum()))
        self._columns = columns

    def _keys(self) -> Iterator[str]:
        ends = self._columns.item_paths.counts()
        return (name for name, parts in zip(self._columns.names, ends.tolist(), strict=True) if parts)

    def _make_all(self) -> Iterator[tuple[str, tuple[str | int, ...]]]:
        for name, parts in zip(self._columns.names, self._columns.item_paths.lists(), strict=True):
            if parts:
                yield name, _path(name, parts)

    def _make(self, key: Any) -> tuple[str | int, ...]:  # noqa: ANN401
        item = self._columns.find(key) if isinstance(key, str) else None
        parts = () if item is None else self._columns.item_paths.numbers(item)
        if not parts:
            raise KeyError(key)
        return _path(key, parts)


def _path(name: str, parts: tuple[int, ...]) -> tuple[str | int, ...]:
    path: list[str | int] = []
    position = 0
    for part in parts:
        end = position + part // 2
        text = name[position:end]
        path.append(int(text) if part % 2 else text)
        position = end + 1  # behind the dot
    return tuple(path)


def _shared_sizes() -> Callable[[tuple[int, ...]], torch.Size]:
    """Gives equal sizes one object."""
    known: dict[tuple[int, ...], torch.Size] = {}

    def size(numbers: tuple[int, ...]) -> torch.Size:
        found = known.get(numbers)
        if found is None:
            found = known[numbers] = torch.Size(numbers)
        return found

    return size


def metadata_of(index: Index, *, planner_data: object = None) -> Metadata:
    """The metadata that an index describes.

    Args:
        index: As it was read.
        planner_data: Those of the record, where the index does not have them.

    Raises:
        CorruptCheckpointError: It names a dtype, layout or memory format that this torch does not have.
    """
    columns = index.columns
    properties = [_properties(kind, index) for kind in columns.properties]
    paths: Mapping[str, Any] | None = _Paths(columns) if index.planner_data == "columns" else None
    return Metadata(
        state_dict_metadata=_Items(columns, properties),  # type: ignore[arg-type]  # as good as a dict to all that reads it
        planner_data=planner_data if index.planner_data == "record" else paths,
        storage_data=_StoredRanges(columns),
        storage_meta=StorageMeta(checkpoint_id=index.checkpoint_id, save_id=index.write_id),
        version=index.version,
    )


def _properties(kind: Properties, index: Index) -> TensorProperties:
    dtype, layout, memory_format = (vars(torch).get(name) for name in (kind.dtype, kind.layout, kind.memory_format))
    if (
        not isinstance(dtype, torch.dtype)
        or not isinstance(layout, torch.layout)
        or not isinstance(memory_format, torch.memory_format)
    ):
        raise CorruptCheckpointError(
            f"{index.checkpoint_id} holds tensors of {kind.dtype[:80]} ({kind.layout[:80]}, {kind.memory_format[:80]}), which "
            f"torch {torch.__version__} does not know: load it with a newer torch"
        )
    return TensorProperties(dtype, layout, kind.requires_grad, memory_format, kind.pin_memory)
