"""From torch's metadata to the columns of an index."""

from __future__ import annotations

from itertools import chain, count, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from dcp_s3._checkpoint.format.index import AN_OBJECT, NOWHERE, Columns, Properties, Ragged, joined
from dcp_s3._checkpoint.pickles.metadata import loads
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

    from dcp_s3._checkpoint.format.index import Numbers

    Items = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]

_PROPERTIES = attrgetter("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
_INDEX = attrgetter("fqn", "offset")


def columns_of(
    items: Items,
    indexes: Sequence[MetadataIndex],
    infos: Sequence[Any],
    *,
    raw_offsets: Numbers | None = None,
    crc32c: Ragged | None = None,
    object_names: Sequence[str] | None = None,
    planner_data: object = None,
) -> tuple[Columns, str]:
    """Put into columns what a checkpoint's metadata say.

    Args:
        items: ``Metadata.state_dict_metadata``.
        indexes: Keys of ``Metadata.storage_data``, or with several of one key the last one counts.
        infos: Its values: torch's ``_StorageInfo``, one for each of ``indexes``.
        raw_offsets: Where the raw bytes begin in each record, ``NOWHERE`` if it has none; absent for other writers'.
        crc32c: For each record; absent for other writers'.
        object_names: The objects that there are; without them, those that are named.
        planner_data: ``Metadata.planner_data``.

    Returns:
        The columns, and where the planner's data are: ``columns``, or ``record`` if these columns cannot hold them, or ``none``.

    Raises:
        ValueError: A chunk has not as many dimensions as its tensor, or an index names none of the chunks.
    """
    names = list(items)
    kinds: dict[Any, int] = {}
    tensors = [item if isinstance(item, TensorStorageMetadata) else None for item in items.values()]
    of_kind = np.fromiter(
        (AN_OBJECT if t is None else _kind(kinds, t.properties) for t in tensors), np.uint16, len(names)
    )
    sizes = _ragged([() if tensor is None else tensor.size for tensor in tensors])
    item_rows = np.fromiter((1 if t is None else len(t.chunks) for t in tensors), np.uint32, len(names))
    chunks = [chunk for tensor in tensors if tensor is not None for chunk in tensor.chunks]
    offsets = _of_rows(tensors, map(attrgetter("offsets"), chunks))
    row_sizes = _of_rows(tensors, map(attrgetter("sizes"), chunks))
    dims = sizes.counts().repeat(item_rows)
    for shapes in (offsets, row_sizes):
        if len(dims) != len(shapes) or not np.array_equal(dims, shapes.counts()):
            raise ValueError(f"a chunk of {_first_of_other_dims(items)!r:.200} has not the dimensions of its tensor")

    keys = chain.from_iterable(
        zip(repeat(name), map(attrgetter("offsets"), tensor.chunks)) if tensor is not None else ((name, None),)
        for name, tensor in zip(names, tensors, strict=True)
    )
    given = dict(zip(map(_INDEX, indexes), count()))
    taken = np.fromiter(map(given.get, keys, repeat(NOWHERE)), np.int64, len(dims))
    if (stray := len(given) - np.count_nonzero(taken >= 0)) > 0:
        raise ValueError(f"{stray} of the {len(given)} records are of no chunk that the metadata describe")
    paths, planner = _paths(names, planner_data)
    if object_names is None:
        object_names = list(dict.fromkeys(info.relative_path for info in infos))
    numbers = {name: number for number, name in enumerate(object_names)}
    columns = Columns(
        properties=tuple(map(_named, kinds)),
        item_names=joined(names),
        item_order=np.array(sorted(range(len(names)), key=names.__getitem__), np.uint32),
        item_properties=of_kind,
        item_sizes=sizes,
        item_rows=item_rows,
        item_paths=paths,
        row_offsets=offsets,
        row_sizes=row_sizes,
        row_object=_taken((numbers[info.relative_path] for info in infos), np.int32, len(infos), taken),
        row_start=_taken(map(attrgetter("offset"), infos), np.int64, len(infos), taken),
        row_length=_taken(map(attrgetter("length"), infos), np.int64, len(infos), taken),
        row_raw_offset=_taken(
            repeat(NOWHERE, len(infos)) if raw_offsets is None else raw_offsets, np.int32, len(infos), taken
        ),
        row_crc32c=_crcs(crc32c, taken),
        object_names=tuple(object_names),
    )
    return columns, planner


def columns_of_record(data: bytes, *, source: str) -> Columns:
    """What a commit record without an index says.

    Args:
        data: The record's bytes.
        source: What they were read from, for the message.

    Raises:
        CorruptCheckpointError: It is damaged, or no checkpoint's metadata.
    """
    metadata = loads(data, source=source)
    indexes, infos = list(metadata.storage_data), list(metadata.storage_data.values())
    try:
        return columns_of(metadata.state_dict_metadata, indexes, infos)[0]
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"{source} is damaged: {error}") from None


def _kind(kinds: dict[Any, int], properties: TensorProperties) -> int:
    return kinds.setdefault(_PROPERTIES(properties), len(kinds))


def _named(kind: tuple[Any, ...]) -> Properties:
    dtype, layout, requires_grad, memory_format, pin_memory = kind
    return Properties(
        str(dtype).removeprefix("torch."),
        str(layout).removeprefix("torch."),
        bool(requires_grad),
        str(memory_format).removeprefix("torch."),
        bool(pin_memory),
    )


def _ragged(shapes: Sequence[Sequence[int]]) -> Ragged:
    counts = np.fromiter(map(len, shapes), np.uint8, len(shapes))
    return Ragged(np.fromiter(chain.from_iterable(shapes), np.int64, int(counts.sum(dtype=np.int64))), counts)


def _of_rows(tensors: Sequence[TensorStorageMetadata | None], shapes: Iterator[Sequence[int]]) -> Ragged:
    found: list[Sequence[int]] = []
    for tensor in tensors:
        found.extend([()] if tensor is None else [next(shapes) for _ in tensor.chunks])
    return _ragged(found)


def _first_of_other_dims(items: Items) -> str:
    return next(
        name
        for name, item in items.items()
        if isinstance(item, TensorStorageMetadata)
        and any(not len(item.size) == len(chunk.offsets) == len(chunk.sizes) for chunk in item.chunks)
    )


def _taken(values: Iterable[int] | Numbers, kind: type, length: int, rows: Numbers) -> Numbers:
    """The values of these rows; ``NOWHERE`` where there is no row."""
    column: Numbers = np.full(length + 1, NOWHERE, kind)
    column[:length] = values if isinstance(values, np.ndarray) else np.fromiter(values, kind, length)
    return column[rows]


def _crcs(crc32c: Ragged | None, rows: Numbers) -> Ragged:
    if crc32c is None:
        return Ragged(np.zeros(0, np.uint32), np.zeros(len(rows), np.uint32))
    with_none = Ragged(crc32c.values, np.append(crc32c.counts(), 0))
    return with_none.taken(rows % len(with_none))


def _paths(names: Sequence[str], planner_data: object) -> tuple[Ragged, str]:
    """The planner's paths as lengths of their parts, if they are those of DCP's own planners: their parts make the name."""
    none = Ragged(np.zeros(0, np.uint32), np.zeros(len(names), np.uint16))
    if planner_data is None:
        return none, "none"
    if type(planner_data) is not dict:
        return none, "record"
    parts: list[int] = []
    counts: list[int] = []
    found = 0
    for name in names:
        path = planner_data.get(name)
        if path is None:
            counts.append(0)
            continue
        if type(path) is not tuple or not {str, int}.issuperset(map(type, path)) or ".".join(map(str, path)) != name:
            return none, "record"
        parts.extend([2 * len(part) if type(part) is str else 2 * len(str(part)) + 1 for part in path])
        counts.append(len(path))
        found += 1
    if (
        found != len(planner_data)
        or max(counts, default=0) > np.iinfo(np.uint16).max
        or (found and not all(map(_known, planner_data.values())))
    ):
        return none, "record"
    return Ragged(np.array(parts, np.uint32), np.array(counts, np.uint16)), "columns"


def _known(path: object) -> bool:
    return bool(path)
