"""Reads a commit record without torch: torch's classes become plain stand-ins."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dcp_s3._checkpoint.format.coverage import flaw_of
from dcp_s3._checkpoint.format.layout import check_relative
from dcp_s3._checkpoint.pickles.strict_pickle import Sealed, load, reason_of, shown
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Entry", "RecordSummary", "check_storage_infos", "read_record"]

METADATA: Final = "torch.distributed.checkpoint.metadata"
FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
PATH_MODULES: Final = ("pathlib", "pathlib._local")
"""Python 3.13 has the classes of pathlib in the second one."""

_MAX_INT: Final = (1 << 63) - 1
MAX_DIMENSIONS: Final = 64


class Entry(NamedTuple):
    """Where one item of the state dict (a chunk of a tensor, or an object) lies."""

    fqn: str
    relative_path: str
    offset: int
    """Of the record in the object, bytes."""
    length: int
    """Of the record, bytes."""
    raw_offset: int | None
    """Of the raw tensor bytes in the record; ``None`` for other records, and where another writer wrote it."""
    crc32c: bytes | None
    """Little-endian uint32 per 4 MiB of the raw tensor bytes (or of the whole record)."""
    chunk: tuple[int, ...] | None = None
    """Offsets of the chunk in its tensor; ``None`` for an object."""


class TensorShape(NamedTuple):
    """A tensor, and the chunks that it was saved in."""

    sizes: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Offsets and sizes of each."""


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """What the tools need of a commit record."""

    write_id: str | None
    """``storage_meta.save_id``; other writers' have another form, or none."""
    entries: tuple[Entry, ...]
    fqns: tuple[str, ...]
    """Names of the state dict's items."""
    tensor_bytes: int
    """Size of all tensors, unsharded, bytes."""
    tensors: dict[str, TensorShape]

    def flaws(self, *, partial: bool) -> list[str]:
        """What cannot be loaded whole: a clause for each item, which begins with its name.

        Args:
            partial: The record is one rank's own, and may have a part of each tensor.
        """
        stored: dict[str, set[tuple[int, ...] | None]] = {}
        for entry in self.entries:
            stored.setdefault(entry.fqn, set()).add(entry.chunk)
        found = []
        for fqn in self.fqns:
            there, tensor = stored.get(fqn, set()), self.tensors.get(fqn)
            if tensor is None:
                if not there:
                    found.append(f"{fqn[:200]} is named and lies nowhere")
                continue
            flaw = flaw_of(tensor.sizes, tensor.chunks, partial=partial)
            if flaw is None and len(there) < len(tensor.chunks):
                nowhere = [begin for begin, sizes in tensor.chunks if begin not in there and 0 not in sizes]
                if nowhere:
                    flaw = f"is not whole: {len(nowhere)} of its {len(tensor.chunks)} chunks lie nowhere"
            if flaw is not None:
                found.append(f"{fqn[:200]} {flaw}")
        return found


class _Bag(metaclass=Sealed):
    """Stand-in of a dataclass: what the pickle sets lies in ``__dict__``."""

    __slots__ = ("__dict__",)


class _Metadata(_Bag):
    pass


class _StorageMeta(_Bag):
    pass


class _TensorStorageMetadata(_Bag):
    pass


class _BytesStorageMetadata(_Bag):
    pass


class _StorageInfo(_Bag):
    pass


class _TensorProperties(_Bag):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__dict__["dtype"] = state[0]


class _MetadataIndex(_Bag):
    def __hash__(self) -> int:
        fields = self.__dict__
        fqn, offset = fields["fqn"], fields.get("offset")
        if type(fqn) is not str or (offset is not None and type(offset) is not _Numbers):
            raise TypeError("an index is a name and an offset")
        return hash((fqn, offset))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _MetadataIndex):
            return NotImplemented
        mine, theirs = self.__dict__, other.__dict__
        return bool(mine["fqn"] == theirs["fqn"] and mine.get("offset") == theirs.get("offset"))


class _Numbers(tuple[int, ...]):
    """Stand-in of torch.Size."""

    __slots__ = ()


class _Size(metaclass=Sealed):
    __slots__ = ()

    def __new__(cls, numbers: tuple[int, ...]) -> _Numbers:  # type: ignore[misc]  # a gate makes something else than itself
        if type(numbers) is not tuple or len(numbers) > MAX_DIMENSIONS or not {int}.issuperset(map(type, numbers)):
            raise TypeError("a size is a tuple of numbers")
        return _Numbers(numbers)


class _Dict(metaclass=Sealed):
    __slots__ = ()

    def __new__(cls) -> dict[Any, Any]:  # type: ignore[misc]
        return {}  # pickle fills it later; with arguments it would copy what it is given


class _Text(metaclass=Sealed):
    """Stand-in of what is made from a few words (a path, a layout, a memory format) and that the tools do not need."""

    __slots__ = ()

    def __new__(cls, *_: object) -> None:  # type: ignore[misc]
        return None


_NAMES: Final[dict[tuple[str, str], Any]] = {
    (METADATA, "Metadata"): _Metadata,
    (METADATA, "StorageMeta"): _StorageMeta,
    (METADATA, "TensorStorageMetadata"): _TensorStorageMetadata,
    (METADATA, "BytesStorageMetadata"): _BytesStorageMetadata,
    (METADATA, "ChunkStorageMetadata"): _Bag,
    (METADATA, "TensorProperties"): _TensorProperties,
    (METADATA, "MetadataIndex"): _MetadataIndex,
    (METADATA, "_MEM_FORMAT_ENCODING"): _Text,
    (FILESYSTEM, "_StorageInfo"): _StorageInfo,
    (FILESYSTEM, "_StoragePrefix"): _Bag,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Text,
    ("collections", "OrderedDict"): _Dict,
    **{(module, name): _Text for module in PATH_MODULES for name in ("PosixPath", "PurePosixPath")},
}
_DTYPE = re.compile(r"bool|bit|(?:b?float|complex|q?u?int|bits)([0-9]{1,3})[a-z0-9_]*")


def _find(module: str, name: str) -> object:
    if module == "torch" and _DTYPE.fullmatch(name):
        return name
    return _NAMES.get((module, name))


def _itemsize(dtype: str) -> int:
    match = _DTYPE.fullmatch(dtype)
    # packed types (float4_e2m1fn_x2, bits1x8) have one byte per element as torch counts them
    return max(1, int(match[1]) // 8) if match and match[1] else 1


def read_record(data: bytes, *, source: str) -> RecordSummary:
    """Read a commit record (``.metadata``), ours or another DCP writer's.

    Args:
        data: The record's bytes.
        source: What they were read from, for the message.

    Raises:
        CorruptCheckpointError: It is damaged, no checkpoint's metadata, or names something that such a one does not need.
    """
    top = load(data, _find, source=source)
    if type(top) is not _Metadata:
        raise CorruptCheckpointError(f"{source} is not a checkpoint's metadata: its top is a {type(top).__name__}")
    try:
        return _summary(top.__dict__, source)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source} is damaged: {reason_of(error)}") from None


def _summary(fields: dict[str, Any], source: str) -> RecordSummary:
    items, storage, meta = fields["state_dict_metadata"], fields.get("storage_data"), fields.get("storage_meta")
    if type(items) is not dict or type(storage) is not dict:
        raise CorruptCheckpointError(f"{source} is damaged: its state_dict_metadata or storage_data is no dict")
    tensor_bytes = 0
    tensors = {}
    for fqn, item in items.items():
        if type(fqn) is not str or type(item) not in (_TensorStorageMetadata, _BytesStorageMetadata):
            raise CorruptCheckpointError(f"{source} is damaged: the entry {shown(fqn)} is no tensor and no object")
        if type(item) is _TensorStorageMetadata:
            tensor_bytes += _tensor_bytes(item.__dict__, fqn, source)
            tensors[fqn] = _shape(item.__dict__, fqn, source)
    check_storage_infos(storage.values(), kind=_StorageInfo, source=source)
    entries = []
    for index, info in storage.items():
        where = info.__dict__
        fqn = index.__dict__["fqn"] if type(index) is _MetadataIndex else None
        if type(fqn) is not str:
            raise CorruptCheckpointError(f"{source} is damaged: a key of its storage_data is no index")
        entries.append(
            Entry(
                fqn,
                where["relative_path"],
                where["offset"],
                where["length"],
                where.get("raw_offset"),
                where.get("crc32c"),
                index.__dict__.get("offset"),
            )
        )
    save_id = meta.__dict__.get("save_id") if type(meta) is _StorageMeta else None
    return RecordSummary(
        write_id=save_id if isinstance(save_id, str) else None,
        entries=tuple(entries),
        fqns=tuple(items),
        tensor_bytes=tensor_bytes,
        tensors=tensors,
    )


def _tensor_bytes(fields: dict[str, Any], fqn: str, source: str) -> int:
    size, dtype = fields["size"], fields["properties"].__dict__["dtype"]
    if type(size) is not _Numbers or type(dtype) is not str or not all(0 <= n <= _MAX_INT for n in size):
        raise CorruptCheckpointError(f"{source} is damaged: the shape or dtype of {fqn[:200]!r} is impossible")
    return math.prod(size) * _itemsize(dtype)


def _shape(fields: dict[str, Any], fqn: str, source: str) -> TensorShape:
    chunks = fields["chunks"]
    if type(chunks) is list and {_Bag}.issuperset(map(type, chunks)):
        places = [(chunk.__dict__["offsets"], chunk.__dict__["sizes"]) for chunk in chunks]
        # a custom planner may have put other sequences there than torch.Size
        if {_Numbers, tuple, list}.issuperset(map(type, chain.from_iterable(places))):
            numbers = list(chain.from_iterable(chain.from_iterable(places)))
            if {int}.issuperset(map(type, numbers)) and all(-_MAX_INT <= number <= _MAX_INT for number in numbers):
                return TensorShape(fields["size"], tuple((tuple(offsets), tuple(sizes)) for offsets, sizes in places))
    raise CorruptCheckpointError(f"{source} is damaged: the chunks of {fqn[:200]!r} are impossible")


def check_storage_infos(infos: Collection[Any], *, kind: type, source: str) -> None:
    """Check the values of a record's ``storage_data``; used for torch's own class and for its stand-in.

    Args:
        infos: Instances of ``kind``.
        kind: The class that they must have.
        source: What they were read from, for the message.

    Raises:
        CorruptCheckpointError: A path leads out of the checkpoint, a number or CRC list is impossible, or a range of an object
            reaches into another one.
    """
    ends: dict[str, int] = {}
    in_order, are_texts = True, set()
    try:
        for info in infos:
            if type(info) is not kind:
                break
            fields = info.__dict__
            path, offset, length = fields["relative_path"], fields["offset"], fields["length"]
            if type(path) is not str or type(offset) is not int or type(length) is not int:
                break
            end, last = offset + length, ends.get(path)
            if last is None:
                check_relative(path, source=source)
            elif offset < last:
                in_order = False
            ends[path] = end
            if offset < 0 or length < 0 or end > _MAX_INT:
                break
            if len(fields) > 3:
                raw_offset, crcs = fields.get("raw_offset"), fields.get("crc32c")
                if raw_offset is not None and (type(raw_offset) is not int or not 0 <= raw_offset <= length):
                    break
                if crcs is not None and (type(crcs) is not bytes or len(crcs) & 3):
                    break
                if (texts := fields.get("transform_descriptors")) is not None and id(texts) not in are_texts:
                    if not isinstance(texts, (list, tuple)) or not {str}.issuperset(map(type, texts)):
                        break
                    are_texts.add(id(texts))  # it may be that of all entries
        else:
            if not in_order:
                _check_apart(infos, source)
            return
    except (AttributeError, KeyError) as error:
        raise CorruptCheckpointError(f"{source} is damaged: an entry of its storage_data lacks {error}") from None
    members = list(getattr(info, "__dict__", {}).items())[:6]
    entry = ", ".join(f"{name}={shown(value)}" for name, value in members if type(name) is str) or shown(info)
    raise CorruptCheckpointError(f"{source} is damaged: its storage_data has the impossible entry {entry}")


def _check_apart(infos: Collection[Any], source: str) -> None:
    """Ranges may be the same, but none may begin in another one."""
    before, end = "", 0
    for path, offset, length in sorted(
        {(info.relative_path, info.offset, info.length) for info in infos if info.length}
    ):
        if path == before and offset < end:
            raise CorruptCheckpointError(
                f"{source} is damaged: the {length} bytes of {path} from {offset} that its storage_data names overlap others"
            )
        before, end = path, offset + length
