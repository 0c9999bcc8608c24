"""Which bytes of which objects make the asked tensors, and what is done with them when they have arrived and been checked."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3._checkpoint.archive.tensor_archive import COPIED_AS, copy_values, memory_of, scratch
from dcp_s3._transfer.checksum import CRC_CHUNK_BYTES, crc32c
from dcp_s3._transfer.download import RangeRead
from dcp_s3._transfer.part_plan import coalesce
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

    _Index = tuple[int, ...]

READ_BYTES: Final = 16 << 20
"""Most bytes of one GET, and of one slice of a big tensor; a multiple of the CRC chunk."""
GAP_BYTES: Final = 64 << 10
"""Bytes between two wanted ranges (heads and tails of records) that are rather received and dropped than skipped."""
DIRECT_BYTES: Final = 256 << 10
"""Ranges of at least this are received straight into the tensor; smaller ones come together and are copied out."""


@dataclass(slots=True, eq=False)
class Piece:
    """A contiguous range of an object that one tensor, or one object, wants.

    Attributes:
        key: Object key.
        start: First wanted byte of the object, extended down to a CRC chunk's beginning.
        end: Behind the last one, extended up to a CRC chunk's end, or the end of the data.
        lead: Bytes at the beginning that are only there for the CRC.
        length: Wanted bytes behind ``lead``.
        crcs: CRC32C of each 4 MiB chunk from ``start``; empty if the writer kept none.
        target: Memory for exactly the wanted bytes, or ``None``.
        use: Called with all bytes of the range if there is no target.
        item: What it is a part of.
        first_byte: Offset of ``start`` in the record's data, for messages.
        check: Says what is wrong with all bytes of the range, where the writer kept other checksums than ``crcs``.
    """

    key: str
    start: int
    end: int
    lead: int
    length: int
    crcs: tuple[int, ...]
    target: memoryview | None
    use: Callable[[memoryview], None] | None
    item: Any
    first_byte: int = 0
    check: Callable[[memoryview], str | None] | None = None

    @property
    def direct(self) -> bool:
        """Whether its bytes are received straight into their target."""
        return self.target is not None and self.length >= DIRECT_BYTES


class Batch:
    """The pieces of one ranged GET and where their bytes are."""

    __slots__ = ("block", "pieces", "scratch", "segments", "start", "together")

    def __init__(self, pieces: Sequence[Piece], start: int, end: int) -> None:
        self.pieces = pieces
        self.start = start
        overlap = any(a.end > b.start for a, b in itertools.pairwise(pieces))
        self.together = overlap or not any(piece.direct for piece in pieces)
        self.block = memoryview(b"")
        self.segments: list[list[memoryview]] = []
        if self.together:
            self.scratch = end - start
        else:
            self.scratch = sum(p.end - p.start - (p.length if p.direct else 0) for p in pieces)

    def destinations(self) -> list[memoryview | int]:
        """Allocate the scratch and lay out where the bytes of the GET go."""
        if self.together:
            self.block = scratch(self.scratch)
            return [self.block]
        out: list[memoryview | int] = []
        position = self.start
        self.segments = []
        for piece in self.pieces:
            if piece.start > position:
                out.append(piece.start - position)
            if piece.direct and piece.target is not None:
                trail = piece.end - piece.start - piece.lead - piece.length
                parts = [scratch(piece.lead), piece.target, scratch(trail)]
            else:
                parts = [scratch(piece.end - piece.start)]
            self.segments.append(parts)
            out += parts
            position = piece.end
        return out

    def _arrived(self) -> Iterator[tuple[Piece, Sequence[memoryview]]]:
        """Each piece with the memory that holds its bytes; of many small ones, slices that last no longer than they are used."""
        if not self.together:
            yield from zip(self.pieces, self.segments, strict=True)
            return
        for piece in self.pieces:
            yield piece, (self.block[piece.start - self.start : piece.end - self.start],)

    def faults(self) -> list[tuple[Piece, str]]:
        """Pieces whose bytes are not those that were saved, each with what is wrong."""
        found = []
        for piece, segments in self._arrived():
            if (chunk := _first_wrong(segments, piece.crcs)) is not None:
                offset = piece.first_byte + chunk * CRC_CHUNK_BYTES
                place = piece.start - piece.first_byte + offset
                what = f"the CRC32C of the 4 MiB from byte {offset} of its data (byte {place} of the object)"
                found.append((piece, f"{what} is not the one computed at save"))
            elif piece.check is not None and (fault := piece.check(segments[0])) is not None:
                found.append((piece, fault))
        return found

    def deliver(self) -> None:
        """Hand the checked bytes on."""
        for piece, segments in self._arrived():
            if piece.direct and not self.together:
                continue
            data = segments[0]
            if piece.target is not None:
                piece.target[:] = data[piece.lead : piece.lead + piece.length]
            elif piece.use is not None:
                piece.use(data)


def _first_wrong(segments: Sequence[memoryview], crcs: Sequence[int]) -> int | None:
    if not crcs:
        return None
    crc = filled = chunk = 0
    for segment in segments:
        offset = 0
        while offset < len(segment):
            part = segment[offset : offset + CRC_CHUNK_BYTES - filled]
            crc = crc32c(part, crc)
            filled += len(part)
            offset += len(part)
            if filled == CRC_CHUNK_BYTES:
                if crc != crcs[chunk]:
                    return chunk
                crc = filled = 0
                chunk += 1
    return chunk if filled and crc != crcs[chunk] else None


def batches(pieces: Sequence[Piece]) -> Iterator[RangeRead[Batch]]:
    """Join neighbouring pieces of one object into ranged reads, in the order of object and offset."""
    ordered = sorted(pieces, key=lambda piece: (piece.key, piece.start, piece.end))
    for key, group in itertools.groupby(ordered, key=lambda piece: piece.key):
        same = list(group)
        spans: list[tuple[int, int]] = []
        firsts: list[int] = []
        for index, piece in enumerate(same):
            if spans and piece.start < spans[-1][1]:  # what overlaps is read once, however long it is together
                spans[-1] = spans[-1][0], max(spans[-1][1], piece.end)
            else:
                spans.append((piece.start, piece.end))
                firsts.append(index)
        firsts.append(len(same))
        for start, end, first, last in coalesce(spans, gap=GAP_BYTES, limit=READ_BYTES):
            batch = Batch(same[firsts[first] : firsts[last]], start, end)
            yield RangeRead(key, start, end - start, scratch=batch.scratch, pieces=batch.destinations, about=batch)


def chunk_at(
    metadata: Metadata, index: MetadataIndex, tables: dict[str, dict[tuple[int, ...], ChunkStorageMetadata]]
) -> ChunkStorageMetadata | None:
    """The chunk of a tensor that an index means; ``None`` if it means an object, or a chunk that is not there.

    Args:
        metadata: The checkpoint's.
        index: Name, offset, and perhaps a hint at the chunk's place.
        tables: Chunks by their offsets, kept by the caller from call to call.
    """
    tensor = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(tensor, TensorStorageMetadata):
        return None
    offset = tuple(index.offset or ())
    if index.index is not None and index.index < len(tensor.chunks):
        hinted = tensor.chunks[index.index]
        if tuple(hinted.offsets) == offset:
            return hinted
    table = tables.get(index.fqn)
    if table is None:
        table = tables[index.fqn] = {tuple(chunk.offsets): chunk for chunk in tensor.chunks}
    if index.offset is None and len(tensor.chunks) == 1:
        return tensor.chunks[0]
    return table.get(offset)


def checked_crcs(crcs: tuple[int, ...] | None, nbytes: int, *, source: str) -> tuple[int, ...]:
    """The CRCs of a record, checked against the length that they cover; none where the writer kept none."""
    if crcs is None:
        return ()
    count = -(-nbytes // CRC_CHUNK_BYTES)
    if len(crcs) != count:
        raise CorruptCheckpointError(f"{source} has {len(crcs)} CRCs for {nbytes} bytes of data, expected {count}")
    return crcs


def raw_pieces(
    *,
    key: str,
    data_start: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    crcs: tuple[int, ...],
    offsets: Sequence[int],
    lengths: Sequence[int],
    target: torch.Tensor,
    item: Any,  # noqa: ANN401 -- the caller's own
) -> list[Piece]:
    """The pieces that bring a box of a saved tensor into a target of the same shape.

    Args:
        key: Object key.
        data_start: Where the tensor's row-major data begins in the object.
        sizes: Shape of the saved tensor (the chunk in the record).
        dtype: Its element type.
        crcs: CRC32C of each 4 MiB of the data; empty if there are none.
        offsets: Where the box begins, per dimension.
        lengths: Its shape; all at least 1.
        target: Filled; of shape ``lengths``, any device, strides and dtype.
        item: Kept on the pieces.
    """
    total = math.prod(sizes) * dtype.itemsize
    plain = (
        target.is_cpu and target.dtype == dtype and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    )
    if (
        plain and total <= READ_BYTES and tuple(lengths) == tuple(sizes) and not any(offsets)
    ):  # what most tensors are, and many are small
        return [Piece(key, data_start, data_start + total, 0, total, crcs, memory_of(target), None, item)]
    place = _Place(dtype, sizes or (1,), offsets or (0,), lengths or (1,), target if sizes else target[None])
    low, high = place.first * dtype.itemsize, place.end * dtype.itemsize
    memory = memory_of(target) if plain and high - low == math.prod(lengths) * dtype.itemsize else None
    pieces = []
    position = low
    while position < high:
        # cut at multiples of the read size in the record, so that only the two ends can need bytes for their CRC, and so
        # that several items of one record have their seams at the same bytes
        stop = min(high, (position // READ_BYTES + 1) * READ_BYTES)
        piece = _extended(key, data_start, total, crcs, position, stop, item)
        if memory is not None:
            piece.target = memory[position - low : stop - low]
            pieces.append(piece)
        elif place.has(position // dtype.itemsize, stop // dtype.itemsize):
            piece.use = functools.partial(place.fill, position // dtype.itemsize, piece.lead, piece.length)
            pieces.append(piece)
        position = stop
    return pieces


def _extended(
    key: str,
    data_start: int,
    total: int,
    crcs: tuple[int, ...],
    low: int,
    high: int,
    item: Any,  # noqa: ANN401
) -> Piece:
    start, end = low, high
    if crcs:
        start = low // CRC_CHUNK_BYTES * CRC_CHUNK_BYTES
        end = min(total, -(-high // CRC_CHUNK_BYTES) * CRC_CHUNK_BYTES)
    return Piece(
        key=key,
        start=data_start + start,
        end=data_start + end,
        lead=low - start,
        length=high - low,
        crcs=crcs[start // CRC_CHUNK_BYTES : -(-end // CRC_CHUNK_BYTES)],
        target=None,
        use=None,
        item=item,
        first_byte=start,
    )


class _Place:
    """Where a box of a saved tensor goes when its bytes cannot be received in place: other device, strides, dtype, columns.

    Args:
        dtype: Element type of the saved tensor.
        sizes: Its shape, one dimension or more.
        offsets: Where the box begins in it.
        lengths: Shape of the box; all at least 1.
        target: Filled; of shape ``lengths``.

    Attributes:
        first: Index of the box's first element in the row-major saved tensor.
        end: Behind that of its last one.
    """

    __slots__ = ("_dtype", "_lengths", "_offsets", "_sizes", "_target", "end", "first")

    def __init__(
        self,
        dtype: torch.dtype,
        sizes: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        self._dtype, self._sizes, self._offsets, self._lengths = dtype, tuple(sizes), offsets, lengths
        self._target = target
        self.first = self.end = 0
        for size, offset, length in zip(sizes, offsets, lengths, strict=True):
            self.first = self.first * size + offset
            self.end = self.end * size + offset + length - 1
        self.end += 1

    def has(self, first: int, end: int) -> bool:
        """Whether any of the elements ``[first, end)`` of the row-major saved tensor is in the box."""
        return any(True for _ in self._common(first, end))

    def fill(self, first: int, lead: int, length: int, data: memoryview) -> None:
        """Copy what belongs to the box out of ``length`` bytes behind the first ``lead`` of ``data``.

        Args:
            first: Index of the element that these bytes begin with.
            lead: Bytes.
            length: Bytes, a whole number of elements.
            data: What was received.
        """
        import torch

        flat = torch.frombuffer(data[lead : lead + length], dtype=torch.uint8)
        if flat.data_ptr() % self._dtype.itemsize:
            flat = flat.clone()
        flat, target = flat.view(self._dtype), self._target
        if target.dtype == self._dtype and not (target.is_conj() or target.is_neg()):
            # as numbers of the same width: torch cannot copy every dtype by element
            flat, target = flat.view(COPIED_AS[target.itemsize]), target.view(COPIED_AS[target.itemsize])
        for start, shape, origin, low, size in self._common(first, first + length // self._dtype.itemsize):
            part = flat[start - first : start - first + math.prod(shape)].view(shape)
            into = target
            for dim, count in enumerate(size):
                part = part.narrow(dim, low[dim] - origin[dim], count)
                into = into.narrow(dim, low[dim] - self._offsets[dim], count)
            copy_values(into, part)

    def _common(self, first: int, end: int) -> Iterator[tuple[int, _Index, _Index, _Index, _Index]]:
        """The blocks of ``[first, end)`` that reach into the box: start, shape, origin, and the common part's origin and shape."""
        for start, origin, shape in _blocks(self._sizes, first, end):
            low = tuple(map(max, origin, self._offsets))
            size = tuple(
                min(a + n, b + m) - c
                for a, n, b, m, c in zip(origin, shape, self._offsets, self._lengths, low, strict=True)
            )
            if min(size) > 0:
                yield start, shape, origin, low, size


def _blocks(sizes: _Index, first: int, end: int) -> Iterator[tuple[int, _Index, _Index]]:
    """Cut the elements ``[first, end)`` of a row-major array into blocks: a row's end, whole rows, a row's beginning.

    Yields:
        Index of a block's first element, where the block begins per dimension, and its shape.
    """
    if len(sizes) == 1:
        yield first, (first,), (end - first,)
        return
    row = math.prod(sizes[1:])
    index = first // row
    if first % row or end < (index + 1) * row:
        stop = min(end, (index + 1) * row)
        for start, origin, shape in _blocks(sizes[1:], first - index * row, stop - index * row):
            yield index * row + start, (index, *origin), (1, *shape)
        first, index = stop, index + 1
    if count := (end - first) // row:
        yield first, (index, *(0 for _ in sizes[1:])), (count, *sizes[1:])
        first, index = first + count * row, index + count
    if first < end:
        yield from _blocks(sizes, first, end)
