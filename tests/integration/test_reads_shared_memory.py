"""Names that share memory are loaded as DCP's own readers load them: what comes last in their order stays."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter

from dcp_s3 import S3StorageReader
from dcp_s3._checkpoint.load.overlap import rounds
from tests.integration.conftest import bucket_on
from tests.integration.support import assert_same, bits, load, reader, writer
from tests.support.ranks import run_ranks_ok

MIB = 1 << 20


def _save(bucket, directory, state, **settings):
    """Save with our writer, and put the same objects where stock readers look for them."""
    dcp.save(state, storage_writer=writer(bucket, "a", **settings))
    for key in bucket.keys("a/"):
        file = directory / key.removeprefix("a/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bucket.get(key))


def _tied(*names, like):
    """One tensor under several names."""
    shared = torch.full_like(like, 99)
    return dict.fromkeys(names, shared)


def _loaded_by(source, template, **options):
    dcp.load(template, storage_reader=source, **options)
    return template


def _same_as_stock(bucket, directory, make, **options):
    """Load two fresh templates, one through DCP's reader of files, and compare all that they hold."""
    want = _loaded_by(FileSystemReader(directory), make())
    got = _loaded_by(
        S3StorageReader(bucket.url("a"), config=bucket.endpoint.config(max_concurrency=2), **options), make()
    )
    assert_same(got, want)
    return got


@pytest.mark.parametrize("verify", [True, False])
def test_two_names_of_one_big_tensor(faults, tmp_path, verify):
    """Two tensors of 16 MiB that differ, loaded into one memory 50 times: it holds the last one, whole, each time."""
    bucket = bucket_on(faults)
    state = {"a": torch.arange(4 * MIB), "b": -torch.arange(4 * MIB)}
    state = {name: value.float() for name, value in state.items()}
    _save(bucket, tmp_path, state)
    template = _tied("a", "b", like=state["a"])
    _same_as_stock(bucket, tmp_path, lambda: _tied("a", "b", like=state["a"]), verify=verify)
    source = S3StorageReader(bucket.url("a"), config=bucket.endpoint.config(max_concurrency=2), verify=verify)
    for _ in range(50):
        template["a"].fill_(99)
        dcp.load(template, storage_reader=source)
        assert torch.equal(template["b"], state["b"])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("names", ["ab", "ba", "abc", "cab"])
def test_names_in_one_object(faults, tmp_path, names, verify):
    """Neighbours of one object, read in one range, are no damage where they share memory; the plan's last name stays."""
    bucket = bucket_on(faults)
    state = {name: torch.full((MIB,), float(ord(name))) for name in "abc"} | {"other": torch.ones(5), "step": 7}
    _save(bucket, tmp_path, state)

    def make():
        return {"step": 0, **_tied(*names, like=state["a"]), "other": torch.zeros(5)}

    got = _same_as_stock(bucket, tmp_path, make, verify=verify)
    assert got["a"][0] == ord(max(names))  # dcp.load goes through its names in this order
    assert got["step"] == 7


def _views_of(buffer, cuts):
    return {f"v{n}": buffer[low:high] for n, (low, high) in enumerate(cuts)}


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 600_000), (400_000, 1_000_000)],
        [(400_000, 1_000_000), (0, 600_000)],
        [(0, 1_000_000), (300_000, 300_010), (5, 900_000), (0, 3)],
        [(n * 1000, n * 1000 + 1500) for n in range(50)],
    ],
    ids=["two", "two-reversed", "nested", "a-chain"],
)
def test_views_that_overlap(faults, tmp_path, cuts):
    """Views of one buffer that overlap in part."""
    bucket = bucket_on(faults)
    _save(bucket, tmp_path, {f"v{n}": torch.full((high - low,), float(n)) for n, (low, high) in enumerate(cuts)})
    _same_as_stock(bucket, tmp_path, lambda: _views_of(torch.zeros(1_000_000), cuts))


@pytest.mark.parametrize("turn", range(7))
def test_every_kind_of_target(faults, tmp_path, turn):
    """Rows, columns, another dtype's view, the contiguous whole and more of one memory, with each of them as the last."""
    bucket = bucket_on(faults)

    def views():
        buffer = torch.zeros(MIB)
        matrix = buffer[: 600 * 500].view(600, 500)
        found = [
            buffer,
            matrix[:, 100:300],
            matrix[250],
            matrix[:100, :200].t(),
            buffer[:70].view(torch.int32),
            buffer[10::3][:1000],
            buffer[77],
        ]
        return {f"v{n}": view for n, view in enumerate(found[turn:] + found[:turn])}

    _save(bucket, tmp_path, {name: torch.full_like(view, 10 + int(name[1])) for name, view in views().items()})
    _same_as_stock(bucket, tmp_path, views)


def test_saved_as_another_dtype(faults, tmp_path):
    """Of two names the first is converted and copied, the second received in place."""
    bucket = bucket_on(faults)
    _save(bucket, tmp_path, {"a": torch.full((MIB,), 1.5, dtype=torch.float64), "b": torch.full((MIB,), 2.5)})
    for names in ("ab", "ba"):
        _same_as_stock(bucket, tmp_path, lambda: _tied(*names, like=torch.zeros(MIB)))  # noqa: B023


def test_stock_writers_records(faults, tmp_path):
    """Records that are unpickled, of objects that end in any order; the order of the objects decides, as in DCP's reader."""
    bucket = bucket_on(faults)
    names = [f"t{n}" for n in range(12)]
    saved = {name: torch.full((1000 * (12 - n),), float(n)) for n, name in enumerate(names)}
    dcp.save(saved, storage_writer=FileSystemWriter(tmp_path, thread_count=3))
    for file in tmp_path.iterdir():
        bucket.put(f"a/{file.name}", file.read_bytes())

    def make():
        buffer = torch.zeros(20_000)
        return {name: buffer[: len(saved[name])] for name in names}

    for _ in range(5):
        _same_as_stock(bucket, tmp_path, make)


class OneScratch(DefaultLoadPlanner):
    """Gives one buffer for all tensors, and takes each one's values out of it when it is told that they are there."""

    def set_up_planner(self, *args, **kwargs):
        super().set_up_planner(*args, **kwargs)
        self.scratch = torch.zeros(MIB)

    def resolve_tensor(self, read_item):
        return self.scratch[: read_item.lengths.numel()].view(read_item.lengths)

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor)


def test_a_planner_with_one_buffer(faults, tmp_path):
    """DCP lets a planner hand out memory of its own and copy from it in commit_tensor: that may be the same each time."""
    bucket = bucket_on(faults)
    state = {f"t{n}": torch.full((n + 1, 100), float(n)) for n in range(40)}
    _save(bucket, tmp_path, state)
    template = {name: torch.zeros_like(value) for name, value in state.items()}
    assert_same(_loaded_by(reader(bucket, "a"), template, planner=OneScratch()), state)


def test_interleaved_columns(faults):
    """300 columns of one matrix share no element: they are read in one range, not one after the other."""
    bucket = bucket_on(faults)
    state = {f"c{n}": torch.full((200,), float(n)) for n in range(300)}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    faults.clear(rules=False, state=False)
    matrix = torch.zeros(200, 300)
    load(bucket, "a", {f"c{n}": matrix[:, n] for n in range(300)})
    assert torch.equal(matrix, torch.arange(300.0).expand(200, 300))
    assert len(faults.requests("GetObject", key="/data/")) == 1


def test_tied_tensors_need_two_rounds(faults):
    """200 tied pairs cost one further range, not one for each of them."""
    bucket = bucket_on(faults)
    state = {f"{half}{n:03d}": torch.full((100,), float(n)) for half in "ab" for n in range(200)}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    faults.clear(rules=False, state=False)
    shared = [torch.zeros(100) for _ in range(200)]
    load(bucket, "a", {f"{half}{n:03d}": shared[n] for half in "ab" for n in range(200)})
    assert [int(value[0]) for value in shared] == list(range(200))
    assert len(faults.requests("GetObject", key="/data/")) == 2


def _load_tied_shards(rank, bucket):
    """Two names of one DTensor, sharded over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (2,))
    shared = zeros(1000, 700, device_mesh=mesh, placements=[Shard(0)])
    dcp.load({"a": shared, "b": shared, "c": torch.zeros(3)}, storage_reader=reader(bucket, "a"))
    return shared.to_local()


def test_sharded_names(faults):
    """The local parts of a DTensor under two names hold the last one's values on every rank."""
    bucket = bucket_on(faults)
    want = torch.rand(1000, 700)
    dcp.save({"a": torch.rand(1000, 700), "b": want, "c": torch.ones(3)}, storage_writer=writer(bucket, "a"))
    assert_same(torch.cat(run_ranks_ok(2, _load_tied_shards, bucket)), want)


# ---------------------------------------------------------------------------------------------------- the rounds


@st.composite
def _view(draw):
    """A view of a small buffer, in one of the forms that templates have."""
    offset, rows, columns = (draw(st.integers(0, 20)), draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    stride = draw(st.sampled_from([columns, columns + 1, 6, 12])), draw(st.sampled_from([1, 1, 2]))
    return (rows, columns), stride, offset


@settings(max_examples=300, deadline=None)
@given(st.lists(_view(), max_size=8))
def test_rounds_leave_what_the_order_leaves(views):
    """Written round by round, within a round in any order, memory holds what writing one by one leaves; disjoint ones wait for none."""
    buffer = torch.zeros(120, dtype=torch.int64)
    targets = [torch.as_strided(buffer, *view) for view in views]
    numbers = rounds(targets)
    elements = [set(torch.as_strided(torch.arange(120), *view).reshape(-1).tolist()) for view in views]
    for later in range(len(views)):
        for earlier in range(later):
            if elements[earlier] & elements[later]:
                assert numbers[earlier] < numbers[later]
    if not any(elements[a] & elements[b] for a in range(len(views)) for b in range(a)) and all(
        target.is_contiguous() for target in targets
    ):
        assert not any(numbers)


def test_rounds_of_what_has_no_memory():
    """Objects, empty tensors, other devices and wrappers of the same memory."""
    plain = torch.zeros(10)
    assert rounds([]) == []
    assert (
        rounds([None, plain, None, plain[:0], torch.empty(10, device="meta"), torch.empty(10, device="meta")])
        == [0] * 6
    )
    assert rounds([plain, None, torch.nn.Parameter(plain, requires_grad=False)]) == [0, 0, 1]
    assert rounds([plain[:5], plain[5:], plain, plain[2], plain[3]]) == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("rows, columns", [(50, 40), (3, 200)])
def test_rounds_of_interleaved_views(rows, columns):
    """Columns, blocks of columns and rows apart from them share nothing, though their bounds do."""
    matrix = torch.zeros(rows, columns)
    half = columns // 2
    assert not any(rounds([matrix[:, n] for n in range(columns)]))
    assert not any(rounds([matrix[:, n : n + 10] for n in range(0, columns, 10)]))
    assert rounds([matrix[:2, :half], matrix[:, half:], matrix[2:, :half], matrix[1]]) == [0, 0, 0, 1]
    assert rounds([matrix[:, :half], matrix[:, half - 1 :]]) == [0, 1]
    heads = torch.zeros(8, 3, 4, 16)
    assert not any(rounds([heads[:, part, head] for part in range(3) for head in range(4)]))


def test_finding_what_shares_memory_costs_milliseconds():
    """20,000 tensors, apart and in pairs: less than 10 microseconds of CPU time each."""
    apart = [torch.empty(4) for _ in range(20_000)]
    for targets, deepest in ((apart, 0), (apart[:10_000] * 2, 1)):
        before = time.thread_time()
        assert max(rounds(targets)) == deepest
        assert time.thread_time() - before < 0.6
    assert bits(apart[0]).numel() == 16
