"""Loads ask for what they need and no more: joined ranges, many at once, into the destination; each byte is checked."""

from __future__ import annotations

import dataclasses
import gc
import math
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

from dcp_s3._checkpoint.load import ranges
from dcp_s3._transfer.checksum import crc32c
from tests.fault.server import FaultServerProcess, peak_in_flight
from tests.integration.conftest import bucket_on
from tests.integration.support import assert_same, bits, blank, load, reader, writer
from tests.support.ranks import run_ranks_ok

MIB = 1 << 20
CHUNK = 4 * MIB
"""Grid of the CRCs of a record."""


def _reads(server, **wanted):
    """The GETs of data objects since the log was cleared."""
    return server.requests("GetObject", key="/data/", **wanted)


def _span(record):
    first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", record.headers["range"]).groups()
    return int(first), int(last) + 1


def _info(metadata, fqn):
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == fqn]
    return info


# ---------------------------------------------------------------------------------------------------- how much, how often


def test_a_big_tensor_comes_in_many_ranges_at_once(faults):
    """A tensor of 64 MiB is read in four ranges of 16 MiB, side by side, and not one byte beyond its data."""
    bucket = bucket_on(faults)
    state = {"w": torch.rand(16 * MIB)}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    metadata = reader(bucket, "a").read_metadata()
    faults.clear(rules=False, state=False)
    faults.configure(latency_s=0.05)
    assert_same(load(bucket, "a", blank(state)), state)
    reads = _reads(faults)
    assert peak_in_flight(reads) == 4
    start = _info(metadata, "w").offset + _info(metadata, "w").raw_offset
    assert sorted(map(_span, reads)) == [(start + n * 16 * MIB, start + (n + 1) * 16 * MIB) for n in range(4)]


def test_neighbours_are_joined(faults):
    """1,000 tensors of 4 KiB are one range; of every second one the gaps between are skipped no more than they are worth."""
    bucket = bucket_on(faults)
    state = {f"t{n:04d}": torch.full((1024,), float(n)) for n in range(1000)}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    metadata = reader(bucket, "a").read_metadata()
    faults.clear(rules=False, state=False)
    assert_same(load(bucket, "a", blank(state)), state)
    (read,) = _reads(faults)
    assert read.reply_bytes < 1000 * (4096 + 2000)
    # from end to end of what is asked for, and nothing before or behind it
    places = [info.offset + info.raw_offset for info in metadata.storage_data.values()]
    assert _span(read) == (min(places), max(places) + 4096)


def test_one_tensor_of_a_thousand(faults):
    """Asking for one tensor moves that tensor, the record and the index, whatever else the checkpoint holds."""
    bucket = bucket_on(faults)
    state = {f"t{n:04d}": torch.full((1024,), float(n)) for n in range(1000)} | {"big": torch.rand(12 * MIB)}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    small = sum(item["size"] for key, item in faults.objects("a/").items() if "/data/" not in key)
    for name in ("t0500", "big"):
        faults.clear(rules=False, state=False)
        assert_same(load(bucket, "a", {name: blank(state[name])}), {name: state[name]})
        assert sum(read.reply_bytes for read in _reads(faults)) == state[name].nbytes
        assert sum(record.reply_bytes for record in faults.log) == state[name].nbytes + small
        assert {record.operation for record in faults.log} == {"GetObject"}


def _load_shards(rank, buckets, rows, ranks, count):
    mesh = init_device_mesh("cpu", (ranks,))
    state = {"w": zeros(rows, 4096, device_mesh=mesh, placements=[Shard(0)])}
    state |= {f"t{n:04d}": torch.zeros(1024) for n in range(count)}
    load(buckets[rank], "a", state)
    first = rank * -(-rows // ranks)
    local = state["w"].to_local()
    wanted = torch.arange(first, first + local.shape[0], dtype=torch.float32)
    assert torch.equal(local, wanted[:, None].expand(local.shape)), rank
    assert all(torch.equal(state[f"t{n:04d}"], torch.full((1024,), float(n))) for n in range(count))
    return local.nbytes + count * 4096


@pytest.mark.parametrize("ranks, count", [(2, 1000), (3, 100)])
def test_each_rank_reads_its_share(ranks, count):
    """Of 64 MiB sharded by rows and many whole tensors of 4 KiB, written by one process, each of two ranks receives at most
    1.1 x its share; of three, whose rows begin inside CRC chunks, that and at most one chunk at either end.
    """
    rows = 4096
    with FaultServerProcess() as server:
        buckets = [bucket_on(server, f"RANK{rank}") for rank in range(ranks)]
        state = {"w": torch.arange(float(rows))[:, None].expand(rows, 4096).contiguous()}
        state |= {f"t{n:04d}": torch.full((1024,), float(n)) for n in range(count)}
        dcp.save(state, storage_writer=writer(bucket_on(server), "a"))
        server.clear(rules=False, state=False)
        shares = run_ranks_ok(ranks, _load_shards, buckets, rows, ranks, count)
        for rank, share in enumerate(shares):
            received = sum(r.reply_bytes for r in server.log if r.access_key == f"RANK{rank}")
            assert share < received < 1.1 * share + (2 * CHUNK if ranks == 3 else 0)


def test_resharding_by_columns_reads_each_record_once(faults):
    """Columns of row-wise records need all their rows: those are received once, however the destination is cut."""
    bucket = bucket_on(faults)
    whole = torch.arange(12e6).reshape(40, 300_000)  # rows of 1.2 MiB, which no CRC chunk is a multiple of
    dcp.save({"w": whole}, storage_writer=writer(bucket, "a"))
    for parts in ((0, 1), (0, 2), (1, 1), (1, 4)):
        faults.clear(rules=False, state=False)
        template = {"w": torch.zeros_like(whole)}
        load(bucket, "a", template, planner=_Cut(*parts))
        assert_same(template, {"w": whole})
        received = sum(read.reply_bytes for read in _reads(faults))
        assert received <= whole.nbytes * 1.1, (parts, received / whole.nbytes)


class _Cut(DefaultLoadPlanner):
    """Asks for each tensor in several items: bands of it along one dimension."""

    def __init__(self, dim, count):
        super().__init__()
        self._dim = dim
        self._count = count

    def create_local_plan(self):
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[band for item in plan.items for band in self._bands(item)])

    def _bands(self, item):
        size = item.lengths[self._dim] // self._count

        def moved(origin, n):
            return torch.Size([*origin[: self._dim], origin[self._dim] + n * size, *origin[self._dim + 1 :]])

        for n in range(self._count):
            yield dataclasses.replace(
                item,
                lengths=torch.Size([*item.lengths[: self._dim], size, *item.lengths[self._dim + 1 :]]),
                storage_offsets=moved(item.storage_offsets, n),
                dest_offsets=moved(item.dest_offsets, n),
            )


@pytest.mark.parametrize("mib", [2, 40])
def test_a_stock_record_is_fetched_once(faults, tmp_path, mib):
    """A stock writer's record can only be read whole: several items of it cost one GET, also beyond the size of a joined one."""
    from torch.distributed.checkpoint import FileSystemWriter

    whole = torch.arange(float(mib * MIB // 4)).reshape(8, -1)
    dcp.save({"w": whole}, storage_writer=FileSystemWriter(tmp_path / "stock"))
    for file in (tmp_path / "stock").iterdir():
        faults.put(f"a/{file.name}", file.read_bytes())
    template = {"w": torch.zeros_like(whole)}
    load(bucket_on(faults), "a", template, planner=_Cut(0, 4))
    assert_same(template, {"w": whole})
    (read,) = faults.requests("GetObject", key="distcp")
    assert read.reply_bytes < whole.nbytes + 4000


@pytest.mark.parametrize(
    "template",
    [
        lambda whole: torch.zeros(whole.shape, dtype=torch.float64),
        lambda whole: torch.zeros(whole.shape[::-1]).t(),
        lambda whole: torch.zeros(whole.shape, dtype=torch.bfloat16),
    ],
    ids=["wider", "strided", "narrower"],
)
def test_other_destinations_read_no_more(faults, template):
    """A destination of other strides or dtype gets the same values from the same ranges, at most 1.1 x the bytes."""
    bucket = bucket_on(faults)
    whole = torch.arange(12e6).reshape(40, 300_000) % 251
    dcp.save({"w": whole}, storage_writer=writer(bucket, "a"))
    faults.clear(rules=False, state=False)
    target = {"w": template(whole)}
    load(bucket, "a", target)
    assert torch.equal(target["w"], whole.to(target["w"].dtype))
    assert sum(read.reply_bytes for read in _reads(faults)) <= whole.nbytes * 1.1


@st.composite
def _boxes(draw):
    """A tensor, and boxes of it with destinations: contiguous, transposed, strided, or of another dtype."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64]))
    sizes = draw(st.lists(st.integers(1, 7), max_size=4))
    whole = torch.arange(math.prod(sizes)).reshape(sizes).to(dtype)
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        offsets = [draw(st.integers(0, size - 1)) for size in sizes]
        lengths = [draw(st.integers(1, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
        target = {
            "contiguous": lambda n: torch.zeros(n, dtype=dtype),
            "transposed": lambda n: torch.zeros(n[::-1], dtype=dtype).permute(list(reversed(range(len(n))))),
            "strided": lambda n: torch.zeros([2 * size for size in n], dtype=dtype)[
                tuple(slice(0, None, 2) for _ in n)
            ],
            "other dtype": lambda n: torch.zeros(n, dtype=torch.complex128),
        }[draw(st.sampled_from(["contiguous", "transposed", "strided", "other dtype"]))](lengths)
        boxes.append((offsets, lengths, target))
    return whole, boxes, draw(st.booleans())


@given(_boxes(), st.integers(0, 20))
def test_any_boxes_of_any_tensor(case, start):
    """Whatever boxes are asked of a record, their values arrive, from reads that do not overlap; units made small to reach all seams."""
    whole, boxes, verified = case
    raw = bytes(bits(whole).tolist())
    stored = b"\xff" * start + raw + b"tail"
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"READ_BYTES": 64, "CRC_CHUNK_BYTES": 16, "DIRECT_BYTES": 24, "GAP_BYTES": 8}.items():
            patch.setattr(ranges, name, size)
        crcs = tuple(crc32c(raw[at : at + 16]) for at in range(0, len(raw), 16)) if verified else ()
        pieces = [
            piece
            for offsets, lengths, target in boxes
            for piece in ranges.raw_pieces(
                key="k",
                data_start=start,
                sizes=tuple(whole.shape),
                dtype=whole.dtype,
                crcs=crcs,
                offsets=offsets,
                lengths=lengths,
                target=target,
                item=None,
            )
        ]
        behind = 0
        for read in ranges.batches(pieces):
            assert behind <= read.start
            position = read.start
            for place in read.make_pieces():
                if not isinstance(place, int):
                    place[:] = stored[position : position + len(place)]
                position += place if isinstance(place, int) else len(place)
            behind = read.start + read.length
            assert position == behind <= start + len(raw)
            assert not read.about.faults()
            read.about.deliver()
    for offsets, lengths, target in boxes:
        wanted = whole[tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))]
        assert torch.equal(target, wanted.to(target.dtype))


def test_nothing_is_read_for_nothing(faults):
    """Empty tensors cost no GET, and a load of nothing but them only the record's."""
    bucket = bucket_on(faults)
    state = {"e": torch.empty(0, 3), "z": torch.empty(0)}
    dcp.save({**state, "s": torch.tensor(3.5)}, storage_writer=writer(bucket, "a"))
    faults.clear(rules=False, state=False)
    assert_same(load(bucket, "a", dict(state)), state)
    assert _reads(faults) == []


@pytest.mark.usefixtures("collector_on")
def test_the_collector_works_after_a_load(faults):
    """Also where the same reader had read the record by itself before; a load that follows ends the pause of the look."""
    place = bucket_on(faults)
    dcp.save({"x": torch.ones(3)}, storage_writer=writer(place, "a"))
    source = reader(place, "a")
    source.read_metadata()
    assert not gc.isenabled()
    dcp.load({"x": torch.zeros(3)}, storage_reader=source)
    assert gc.isenabled()
