"""Which bytes are asked for, and where they go: boxes of saved tensors, their checksums, and the reads that they share."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_s3 import CorruptCheckpointError
from dcp_s3._checkpoint.load import ranges
from dcp_s3._checkpoint.load.ranges import Piece, batches, checked_crcs, chunk_at, raw_pieces
from dcp_s3._transfer.checksum import crc32c
from tests.unit.records import make_metadata

READ, CHUNK, GAP, DIRECT = 64, 16, 8, 24


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything a quarter of a million times smaller."""
    monkeypatch.setattr(ranges, "READ_BYTES", READ)
    monkeypatch.setattr(ranges, "CRC_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(ranges, "GAP_BYTES", GAP)
    monkeypatch.setattr(ranges, "DIRECT_BYTES", DIRECT)


def crcs_of(data: bytes) -> tuple[int, ...]:
    return tuple(crc32c(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


class Saved:
    """A tensor as it lies in an object, behind `start` other bytes."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, start: int, *, crcs: bool = True) -> None:
        self.tensor = torch.arange(math.prod(sizes)).remainder(97).to(dtype).view(*sizes)
        self.data = bytes_of(self.tensor)
        self.start = start
        self.crcs = crcs_of(self.data) if crcs else ()

    def pieces(
        self, offsets: Sequence[int], lengths: Sequence[int], target: torch.Tensor, item: Any = None, key: str = "k"
    ) -> list[Piece]:
        return raw_pieces(
            key=key,
            data_start=self.start,
            sizes=tuple(self.tensor.shape),
            dtype=self.tensor.dtype,
            crcs=self.crcs,
            offsets=offsets,
            lengths=lengths,
            target=target,
            item=item,
        )

    def box(self, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        box = self.tensor
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            box = box.narrow(dim, offset, length)
        return box


def receive(read: Any, body: bytes) -> None:
    """Put what the store sends where the read wants it."""
    position = read.start
    for place in read.make_pieces():
        if isinstance(place, int):
            position += place
        else:
            place[:] = body[position : position + len(place)]
            position += len(place)
    assert position == read.start + read.length


def fetched(pieces: list[Piece], objects: dict[str, bytes]) -> list[Any]:
    """Receive, check and deliver all pieces; return the reads."""
    reads = list(batches(pieces))
    for read in reads:
        receive(read, objects[read.key])
        assert read.about.faults() == []
        read.about.deliver()
    return reads


def targets_of(lengths: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Memory of a shape: row-major, in another order, with gaps, of another type."""
    plain = torch.full(tuple(lengths), 7, dtype=dtype)
    turned = torch.full(tuple(reversed(lengths)), 7, dtype=dtype).permute(*reversed(range(len(lengths))))
    spread = torch.full((*lengths, 3), 7, dtype=dtype)[..., 1]
    return [plain, turned, spread, torch.full(tuple(lengths), 7, dtype=torch.float64)]


SHAPES = [(1,), (5,), (16,), (100,), (3, 4), (7, 5), (1, 40), (40, 1), (3, 4, 5), (2, 1, 9), (2, 3, 2, 3)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("crcs", [True, False])
def test_any_box_of_any_tensor(dtype: torch.dtype, *, crcs: bool) -> None:
    """Whatever part is wanted, and whatever the memory is like: it holds exactly that part, and no read is too long."""
    chance = random.Random(5)
    for sizes in SHAPES:
        saved = Saved(sizes, dtype, chance.randrange(50), crcs=crcs)
        body = chance.randbytes(saved.start) + saved.data + chance.randbytes(30)
        for _ in range(6):
            offsets = [chance.randrange(size) for size in sizes]
            lengths = [chance.randint(1, size - offset) for size, offset in zip(sizes, offsets, strict=True)]
            for target in targets_of(lengths, dtype):
                pieces = saved.pieces(offsets, lengths, target)
                reads = fetched(pieces, {"k": body})
                assert torch.equal(target.to(dtype), saved.box(offsets, lengths))
                assert all(read.length <= READ for read in reads)
                assert all(read.start >= saved.start for read in reads)
                assert all(read.start + read.length <= saved.start + len(saved.data) for read in reads)
                asked = [range(read.start, read.start + read.length) for read in reads]
                assert all(one.stop <= two.start for one, two in itertools.pairwise(asked))


def test_a_whole_tensor_is_asked_for_as_it_is() -> None:
    """What most tensors are: one piece up to the longest read; slices of that length beyond it, without a seam read twice."""
    for count, lengths in ((READ, [READ]), (READ + 1, [READ, 1]), (3 * READ, [READ] * 3)):
        saved, target = Saved((count,), torch.uint8, 10), torch.zeros(count, dtype=torch.uint8)
        pieces = saved.pieces([0], [count], target)
        assert [piece.end - piece.start for piece in pieces] == lengths
        assert [read.length for read in fetched(pieces, {"k": bytes(10) + saved.data})] == lengths
        assert torch.equal(target, saved.tensor)


@pytest.mark.parametrize("value", [torch.tensor(3.5), torch.tensor(3.5, dtype=torch.float64)])
def test_a_tensor_without_dimensions(value: torch.Tensor) -> None:
    """It is one element, received in place or by value."""
    data = struct.pack("<f", 2.25)
    pieces = raw_pieces(
        key="k", data_start=4, sizes=(), dtype=torch.float32, crcs=crcs_of(data), offsets=(), lengths=(), target=value,
        item=None,
    )  # fmt: skip
    fetched(pieces, {"k": bytes(4) + data})
    assert value.item() == 2.25


@pytest.mark.parametrize("lazy", ["conjugate", "negative"])
def test_memory_that_is_not_what_it_says(lazy: str) -> None:
    """A conjugate or negated view holds other bytes than its values: those are set, not its memory."""
    saved = Saved((6,), torch.complex64, 0)
    base = torch.zeros(6, dtype=torch.complex64)
    target = base.conj() if lazy == "conjugate" else torch._neg_view(base)
    fetched(saved.pieces([0], [6], target), {"k": saved.data})
    assert torch.equal(target.resolve_conj().resolve_neg(), saved.tensor)


def test_only_the_ends_are_extended() -> None:
    """To the beginning and the end of a checksum's 4 MiB, or of the data; in between each byte is asked for once."""
    saved, target = Saved((150,), torch.uint8, 5), torch.zeros(120, dtype=torch.uint8)
    pieces = saved.pieces([20], [120], target)
    assert [(piece.start - 5, piece.end - 5, piece.lead, piece.length) for piece in pieces] == [
        (16, 64, 4, 44),
        (64, 128, 0, 64),
        (128, 144, 0, 12),
    ]
    assert [piece.first_byte for piece in pieces] == [16, 64, 128]
    assert [len(piece.crcs) for piece in pieces] == [3, 4, 1]
    pieces = saved.pieces([140], [10], torch.zeros(10, dtype=torch.uint8))
    assert [(piece.start - 5, piece.end - 5) for piece in pieces] == [(128, 150)]


def test_rows_that_are_not_wanted_are_not_read() -> None:
    """Of a column box only the slices that hold something of it are asked for."""
    saved, target = Saved((4, 64), torch.uint8, 0), torch.zeros(4, 8, dtype=torch.uint8)
    lengths = [read.length for read in fetched(saved.pieces([0, 8], [4, 8], target), {"k": saved.data})]
    assert torch.equal(target, saved.box([0, 8], [4, 8]))
    assert sum(lengths) <= 4 * 64
    wide, target = Saved((2, 640), torch.uint8, 0), torch.zeros(2, 8, dtype=torch.uint8)
    reads = fetched(wide.pieces([0, 8], [2, 8], target), {"k": wide.data})
    assert torch.equal(target, wide.box([0, 8], [2, 8]))
    assert [read.start // READ for read in reads] == [0, 10]


def test_what_is_near_is_read_together() -> None:
    """Neighbours over a small gap share a read, up to its longest length; what is far off, and other objects, do not."""
    saved = Saved((16,), torch.uint8, 0, crcs=False)

    def reads(*starts: int) -> list[tuple[int, int]]:
        pieces = [Piece("k", start, start + 16, 0, 16, (), memoryview(bytearray(16)), None, None) for start in starts]
        return [(read.start, read.length) for read in fetched(pieces, {"k": saved.data * 40})]

    assert reads(0, 16 + GAP) == [(0, 40)]
    assert reads(16 + GAP, 0) == [(0, 40)]
    assert reads(0, 16 + GAP + 1) == [(0, 16), (25, 16)]
    assert reads(0, 16, 32, 48) == [(0, 64)]
    assert reads(0, 16, 32, 49) == [(0, 48), (49, 16)]
    assert reads(0, 8, 8) == [(0, 24)]
    pieces = [Piece(key, 0, 16, 0, 16, (), memoryview(bytearray(16)), None, None) for key in ("b", "a", "b")]
    assert [(read.key, read.length) for read in batches(pieces)] == [("a", 16), ("b", 16)]


def test_what_overlaps_is_read_once() -> None:
    """However long it is together; each piece gets its own bytes of it."""
    data = bytes(range(200))
    spans = [(0, 60), (40, 100), (90, 150), (10, 20), (150, 160)]
    targets = [bytearray(end - start) for start, end in spans]
    pieces = [
        Piece("k", start, end, 0, end - start, (), memoryview(target), None, None)
        for (start, end), target in zip(spans, targets, strict=True)
    ]
    reads = fetched(pieces, {"k": data})
    assert [(read.start, read.length) for read in reads] == [(0, 150), (150, 10)]
    assert [bytes(target) for target in targets] == [data[start:end] for start, end in spans]


def test_what_memory_a_read_takes() -> None:
    """Large pieces come straight into their tensors: only what surrounds them is scratch; small ones come together."""
    big = Piece("k", 0, 40, 4, 30, (), memoryview(bytearray(30)), None, None)
    small = Piece("k", 44, 54, 0, 10, (), memoryview(bytearray(10)), None, None)
    used: list[bytes] = []
    taken = Piece("k", 54, 60, 1, 4, (), None, lambda data: used.append(bytes(data)), None)
    (read,) = batches([big, small, taken])
    assert read.scratch == 10 + 10 + 6
    body = bytes(range(100))
    receive(read, body)
    read.about.deliver()
    assert [bytes(big.target), bytes(small.target)] == [body[4:34], body[44:54]]
    assert used == [body[54:60]]
    (read,) = batches([small, taken])
    assert read.scratch == 16
    assert (big.direct, small.direct, taken.direct) == (True, False, False)
    assert Piece("k", 0, DIRECT, 0, DIRECT, (), memoryview(bytearray(DIRECT)), None, None).direct


# ---------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("at", [0, 15, 16, 31, 32, 47, 48, 49])
def test_each_byte_is_covered_by_a_checksum(at: int, *, together: bool) -> None:
    """Also those of a last chunk that is not full, and those in front of what is wanted; the place is named, nothing is used."""
    saved = Saved((50,), torch.uint8, 7)
    target = torch.zeros(45, dtype=torch.uint8) if not together else torch.zeros(45, 3, dtype=torch.uint8)[:, 1]
    body = bytearray(bytes(7) + saved.data)
    body[7 + at] ^= 1
    item = object()
    (read,) = batches(saved.pieces([5], [45], target, item))
    assert read.about.together is together
    receive(read, bytes(body))
    ((piece, text),) = read.about.faults()
    assert piece.item is item
    chunk = at // CHUNK * CHUNK
    assert f"the 4 MiB from byte {chunk} of its data (byte {7 + chunk} of the object) is not the one computed" in text


def test_a_fault_in_a_later_slice_is_named_by_its_place() -> None:
    """Offsets count from the beginning of the tensor's data, whichever read they were in."""
    saved = Saved((200,), torch.uint8, 7)
    body = bytearray(bytes(7) + saved.data)
    body[7 + 150] ^= 1
    texts = []
    for read in batches(saved.pieces([0], [200], torch.zeros(200, dtype=torch.uint8))):
        receive(read, bytes(body))
        texts += [text for _, text in read.about.faults()]
    assert len(texts) == 1
    assert "from byte 144 of its data (byte 151 of the object)" in texts[0]


def test_each_faulty_piece_of_a_read_is_found() -> None:
    """And no other; what has checksums of another kind is asked about itself."""
    data = bytes(range(60))
    asked: list[bytes] = []

    def check(view: memoryview) -> str | None:
        asked.append(bytes(view))
        return "the archive is cut" if view[0] == 40 else None

    pieces = [
        Piece("k", 0, 16, 0, 16, (0,), memoryview(bytearray(16)), None, "wrong"),
        Piece("k", 16, 32, 0, 16, crcs_of(data[16:32]), memoryview(bytearray(16)), None, "right"),
        Piece("k", 32, 40, 0, 8, (), None, lambda data: None, "fine", check=check),
        Piece("k", 40, 60, 0, 20, (), None, lambda data: None, "cut", check=check),
    ]
    (read,) = batches(pieces)
    receive(read, data)
    assert [(piece.item, text[:11]) for piece, text in read.about.faults()] == [
        ("wrong", "the CRC32C "),
        ("cut", "the archive"),
    ]
    assert asked == [data[32:40], data[40:60]]


@pytest.mark.parametrize("nbytes, count", [(0, 0), (1, 1), (CHUNK, 1), (CHUNK + 1, 2), (3 * CHUNK, 3)])
def test_as_many_checksums_as_chunks(nbytes: int, count: int) -> None:
    """One less or more is not taken; none at all is what other writers keep."""
    crcs = tuple(range(count))
    assert checked_crcs(crcs, nbytes, source="x") == crcs
    assert checked_crcs(None, nbytes, source="x") == ()
    for wrong in (*crcs, 0), crcs[:-1]:
        if wrong != crcs:
            with pytest.raises(CorruptCheckpointError, match=f"x has {len(wrong)} CRCs for {nbytes} bytes"):
                checked_crcs(wrong, nbytes, source="x")


def test_which_chunk_an_index_names() -> None:
    """By its place, with the hint or without or with a wrong one; no other place, and no object, has one."""
    metadata, known = make_metadata(chunks=3), {}
    name = "model.layers.1.weight"
    chunks = metadata.state_dict_metadata[name].chunks
    for number, chunk in enumerate(chunks):
        for hint in (number, None, 0, 2, 99):
            assert chunk_at(metadata, MetadataIndex(name, chunk.offsets, hint), known) is chunk
    assert chunk_at(metadata, MetadataIndex(name, torch.Size([1, 0]), 0), known) is None
    assert chunk_at(metadata, MetadataIndex("step"), known) is None
