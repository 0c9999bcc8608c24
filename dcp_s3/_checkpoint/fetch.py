"""Which bytes of which objects make the asked tensors, and what is done with them when they have arrived and been checked."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dcp_s3._checkpoint.record import memory_of, scratch
from dcp_s3._transfer.checksum import CRC_CHUNK_BYTES, crc32c
from dcp_s3._transfer.download import RangeRead
from dcp_s3._transfer.plan import coalesce
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

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

    @property
    def direct(self) -> bool:
        """Whether its bytes are received straight into their target."""
        return self.target is not None and self.length >= DIRECT_BYTES


class Batch:
    """The pieces of one ranged GET and where their bytes are."""

    __slots__ = ("pieces", "scratch", "segments", "start", "together")

    def __init__(self, pieces: Sequence[Piece], start: int, end: int) -> None:
        self.pieces = pieces
        self.start = start
        overlap = any(a.end > b.start for a, b in itertools.pairwise(pieces))
        self.together = overlap or not any(piece.direct for piece in pieces)
        self.segments: list[list[memoryview]] = []
        if self.together:
            self.scratch = end - start
        else:
            self.scratch = sum(p.end - p.start - (p.length if p.direct else 0) for p in pieces)

    def destinations(self) -> list[memoryview | int]:
        """Allocate the scratch and lay out where the bytes of the GET go."""
        if self.together:
            block = scratch(self.scratch)
            self.segments = [[block[p.start - self.start : p.end - self.start]] for p in self.pieces]
            return [block]
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

    def faults(self) -> list[tuple[Piece, int]]:
        """Pieces whose bytes do not have their CRC, each with the offset of the first wrong chunk in its record."""
        return [
            (piece, piece.first_byte + chunk * CRC_CHUNK_BYTES)
            for piece, segments in zip(self.pieces, self.segments, strict=True)
            if (chunk := _first_wrong(segments, piece.crcs)) is not None
        ]

    def deliver(self) -> None:
        """Hand the checked bytes on."""
        for piece, segments in zip(self.pieces, self.segments, strict=True):
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
        for start, end, first, last in coalesce(((p.start, p.end) for p in same), gap=GAP_BYTES, limit=READ_BYTES):
            batch = Batch(same[first:last], start, end)
            yield RangeRead(key, start, end - start, scratch=batch.scratch, pieces=batch.destinations, about=batch)


def unpack_crcs(packed: bytes | None, nbytes: int, *, source: str) -> tuple[int, ...]:
    """The CRCs that ride on a record's storage info, checked against the length that they cover."""
    if packed is None:
        return ()
    count = -(-nbytes // CRC_CHUNK_BYTES)
    if len(packed) != 4 * count:
        raise CorruptCheckpointError(
            f"{source} has {len(packed)} bytes of CRCs for {nbytes} bytes of data, expected {4 * count}"
        )
    return struct.unpack(f"<{count}I", packed)


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
    itemsize = dtype.itemsize
    rows, row_bytes = (sizes[0], itemsize) if sizes else (1, itemsize)
    for size in sizes[1:]:
        row_bytes *= size
    total = rows * row_bytes
    first = offsets[0] if sizes else 0
    count = lengths[0] if sizes else 1
    whole_rows = list(lengths[1:]) == list(sizes[1:])
    memory = None
    if (
        whole_rows
        and target.is_cpu
        and target.dtype == dtype
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
    ):
        memory = memory_of(target)
    step = max(1, READ_BYTES // row_bytes)
    if memory is not None and row_bytes * count > READ_BYTES:
        return _direct_pieces(key, data_start, total, crcs, first * row_bytes, memory, item)
    pieces = []
    for row in range(first, first + count, step):
        n = min(step, first + count - row)
        low, high = row * row_bytes, (row + n) * row_bytes
        piece = _extended(key, data_start, total, crcs, low, high, item)
        if memory is not None:
            piece.target = memory[low - first * row_bytes : high - first * row_bytes]
        else:
            part = target[row - first : row - first + n] if sizes else target
            box = (list(offsets[1:]), list(lengths[1:]))
            shape = [n, *sizes[1:]] if sizes else []
            piece.use = _Copy(piece, dtype, shape, box, part)
        pieces.append(piece)
    return pieces


def _direct_pieces(
    key: str,
    data_start: int,
    total: int,
    crcs: tuple[int, ...],
    low: int,
    memory: memoryview,
    item: Any,  # noqa: ANN401
) -> list[Piece]:
    """Cut at multiples of the read size in the record, so that only the two ends can need bytes for their CRC."""
    pieces = []
    position, end = low, low + len(memory)
    while position < end:
        stop = min(end, (position // READ_BYTES + 1) * READ_BYTES)
        piece = _extended(key, data_start, total, crcs, position, stop, item)
        piece.target = memory[position - low : stop - low]
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


class _Copy:
    """Copies a box out of received rows: for other devices, strides, dtypes, and columns."""

    __slots__ = ("_box", "_dtype", "_lead", "_length", "_part", "_shape")

    def __init__(
        self, piece: Piece, dtype: torch.dtype, shape: list[int], box: tuple[list[int], list[int]], part: torch.Tensor
    ) -> None:
        self._lead, self._length = piece.lead, piece.length
        self._dtype, self._shape, self._box, self._part = dtype, shape, box, part

    def __call__(self, data: memoryview) -> None:
        import torch

        aligned = bytearray(data[self._lead : self._lead + self._length])
        rows = torch.frombuffer(aligned, dtype=torch.uint8).view(self._dtype).view(self._shape)
        for dim, (offset, length) in enumerate(zip(*self._box, strict=True), start=1):
            rows = rows.narrow(dim, offset, length)
        self._part.copy_(rows)
