"""Saves stream: parts leave while later tensors are still resolved, in bounded memory, without copies of CPU tensors."""

from __future__ import annotations

import concurrent.futures
import gc
import io
import re
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_s3 import CorruptCheckpointError
from dcp_s3._transfer.s3.planes import data_plane
from tests.fault.server import FaultServerProcess, peak_in_flight
from tests.integration.conftest import bucket_on
from tests.integration.support import assert_same, bits, blank, failure_of, load, reader, wait_until, writer
from tests.support.ranks import run_ranks_ok

MIB = 1 << 20
PART = 5 * MIB


@pytest.fixture(scope="module")
def faults_process():
    """A server that drops the bytes of data objects: reads of them give zeros."""
    with FaultServerProcess(discard_bodies="/data/", latency_s=0.02, checksum="ignore") as server:
        yield server


class _Timed(DefaultSavePlanner):
    """Notes when each item is resolved, on the clock of the server's log."""

    def __init__(self, before=lambda name: None):
        super().__init__()
        self.times = {}
        self._before = before

    def resolve_data(self, write_item):
        self._before(write_item.index.fqn)
        data = super().resolve_data(write_item)
        self.times[write_item.index.fqn] = time.monotonic()
        return data


def test_the_first_part_is_sent_before_the_last_tensor_is_resolved(faults):
    """The last tensor is resolved only once the store has seen the first part, whose answer is still held back."""
    gate = faults.hold("UploadPart")

    def before(name):
        if name == "t7":
            gate.wait_arrived()

    planner = _Timed(before)
    state = {f"t{n}": torch.full((2 * MIB // 4,), float(n)) for n in range(8)}

    def release():
        gate.wait_arrived()
        wait_until(lambda: "t7" in planner.times, "the last tensor is resolved")
        gate.release()

    releasing = threading.Thread(target=release)
    releasing.start()
    bucket = bucket_on(faults)
    dcp.save(state, storage_writer=writer(bucket, "a", part_bytes=PART), planner=planner)
    releasing.join()
    parts = faults.requests("UploadPart")
    assert len(parts) == 4
    assert min(part.t_start for part in parts) < planner.times["t7"] < min(part.t_end for part in parts)
    assert faults.violations() == []
    assert_same(load(bucket, "a", blank(state)), state)


def _ranks_stream(rank, bucket, rows):
    mesh = init_device_mesh("cpu", (2,))
    state = {f"t{n}": distribute_tensor(torch.full((rows, 1024), float(n)), mesh, [Shard(0)]) for n in range(12)}
    planner = _Timed()
    dcp.save(state, storage_writer=writer(bucket[rank], "a", part_bytes=PART, max_concurrency=1), planner=planner)
    return planner.times


def test_every_rank_streams():
    """On two ranks parts are acknowledged while later tensors are unresolved: no rank runs ahead of its uploads by more
    than the parts that may be queued and on the wire.
    """
    with FaultServerProcess(latency_s=0.01) as server:
        buckets = [bucket_on(server, f"RANK{rank}") for rank in range(2)]
        times = run_ranks_ok(2, _ranks_stream, buckets, 2 * PART // 4096)
        ahead = 1 + 4 + 1  # on the wire, queued, and the one that is being filled
        for rank in range(2):
            parts = server.requests("UploadPart", access_key=f"RANK{rank}")
            assert len(parts) == 13
            assert peak_in_flight(parts) == 1
            resolved, acknowledged = sorted(times[rank].values()), sorted(part.t_end for part in parts)
            assert len(resolved) == 12
            for index in range(ahead + 1, 12):
                assert acknowledged[index - ahead - 1] < resolved[index], index
        assert server.violations() == []


def test_contiguous_cpu_tensors_are_sent_from_where_they_lie(faults):
    """What is written into a tensor between the sending of its part's head and of its body is what the store gets: there is
    no copy. Nothing of it is charged to the budget, and the load finds that the bytes are not those of the checksum.
    """
    bucket = bucket_on(faults)
    weight = torch.zeros(4 * PART // 4)
    settings = {"part_bytes": 2 * PART, "checksum": "none", "max_concurrency": 3, "memory_bytes": 33 * MIB}
    gate = faults.hold("UploadPart", part=2, at="head")

    def before(name):
        if name == "z":  # resolved last: by now the part with the middle of the weight is on its way, its body unread
            gate.wait_arrived()
            weight[3 * PART // 4] = 7.0
            gate.release()

    dcp.save({"a": weight, "z": torch.ones(3)}, storage_writer=writer(bucket, "x", **settings), planner=_Timed(before))
    (key,) = faults.objects("x/data/")
    stored = np.frombuffer(faults.read(key), dtype=np.uint8)
    record = bytes(stored).index(np.float32(7.0).tobytes())
    assert np.count_nonzero(stored == 0x40) >= 1
    assert record > 2 * PART
    plane = data_plane(bucket.endpoint.config(**settings))
    assert 0 < plane.budget.peak <= 3 * MIB  # slabs for heads and tails
    assert plane.budget.held == 0
    with pytest.raises(dcp.CheckpointException) as caught:
        load(bucket, "x", {"a": torch.empty_like(weight)})
    assert isinstance(failure_of(caught.value, 0), CorruptCheckpointError)


class _Made(DefaultSavePlanner):
    """Makes each tensor when it is resolved, so that the save is its only owner, and keeps weak references."""

    def __init__(self, before):
        super().__init__()
        self.alive = {}
        self._before = before

    def resolve_data(self, write_item):
        name = write_item.index.fqn
        self._before(name)
        memory = np.full(write_item.tensor_data.size.numel(), int(name[1:]), dtype=np.float32)
        self.alive[name] = weakref.ref(memory)
        return torch.from_numpy(memory)

    def living(self):
        return [name for name, memory in self.alive.items() if memory() is not None]


def test_a_tensor_is_released_when_its_last_part_is_acknowledged(faults):
    """While the save still runs, nothing holds the tensors whose parts were all acknowledged, and the others are held."""
    names = [f"t{n:02d}" for n in range(12)]
    state = {name: torch.empty(PART // 4) for name in names}
    late = faults.hold("UploadPart", part=8)
    seen = {}

    def before(name):
        if name == names[-1]:  # 11 tensors in 11 parts and a bit: all but the 8th are answered
            faults.wait_for("UploadPart", count=10)
            wait_until(lambda: len(planner.living()) <= 3, "acknowledged tensors are released")
            gc.collect()
            seen["living"] = planner.living()
            late.release()

    planner = _Made(before)
    bucket = bucket_on(faults)
    dcp.save(state, storage_writer=writer(bucket, "a", part_bytes=PART), planner=planner)
    # the 8th part holds the end of one tensor and the beginning of the next; the last part is still open
    assert seen["living"] == ["t06", "t07", "t10"]
    assert planner.living() == []
    wanted = {name: torch.full_like(tensor, float(name[1:])) for name, tensor in state.items()}
    assert_same(load(bucket, "a", blank(state)), wanted)


# ---------------------------------------------------------------------------------------------------- memory


def _resident(field):
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def _growth(action):
    """Run an action; return by how much resident memory grew above what it was before, at its peak, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    before = _resident("VmRSS")
    action()
    return (_resident("VmHWM") - before) / MIB


def _saved_and_loaded(rank, bucket, shape, memory_bytes):
    """Save and load one shape of state; return the peak growth of resident memory, MiB, and the budget's peak, bytes."""
    settings = {"memory_bytes": memory_bytes, "max_concurrency": 4}
    store, source = writer(bucket, **settings), reader(bucket, **settings)
    plane = data_plane(store._config)
    warm = {"warm": torch.zeros(4 * MIB)}
    dcp.save(warm, checkpoint_id=bucket.url("warm"), storage_writer=store)
    dcp.load(warm, checkpoint_id=bucket.url("warm"), storage_reader=source)
    state = {
        "one": lambda: {"w": torch.zeros(512 * MIB // 4)},
        "many": lambda: {f"w{n}": torch.zeros(2 * MIB // 4) for n in range(96)},
        "middling": lambda: {f"w{n}": torch.zeros(160 * 1024 // 4) for n in range(1200)},
        "strided": lambda: {"w": torch.zeros(8192, 16384).t()},
        "small": lambda: {f"w{n}": torch.zeros(16 * 1024 // 4) for n in range(4096)},
    }[shape]()
    for tensor in state.values():
        tensor.fill_(0.0)  # resident from here on
    figures = []
    for run, role in ((dcp.save, {"storage_writer": store}), (dcp.load, {"storage_reader": source})):
        plane.budget.peak = 0
        grown = _growth(lambda run=run, role=role: run(state, checkpoint_id=bucket.url(shape), **role))
        figures.append((grown, plane.budget.peak))
    return figures


@pytest.mark.parametrize("shape", ["one", "many", "middling", "strided", "small"])
def test_memory_is_bounded_whatever_the_size(faults_process, shape):
    """Saving and loading up to 512 MiB takes a constant for contiguous tensors, and at most memory_bytes for what has to be
    copied, by the process's resident set; the store is slower than the memory, so everything that can pile up does.
    """
    limit = 64 * MIB
    (((saving, saved), (loading, loaded)),) = run_ranks_ok(
        1, _saved_and_loaded, bucket_on(faults_process), shape, limit, backend=None, timeout_s=110
    )
    print(
        f"{shape}: save {saving:.1f} MiB, load {loading:.1f} MiB; of the budget {saved / MIB:.1f}, {loaded / MIB:.1f}"
    )
    noise = 24  # one read's copy, tasks, the transport's buffers, the record and what it is made of: MiB
    most = {"one": (0, 0), "many": (0, 0), "middling": (0, 64), "strided": (64, 64), "small": (64, 64)}
    assert saving < most[shape][0] + noise
    assert loading < most[shape][1] + noise
    assert max(saved, loaded) <= limit
    if most[shape][0] == 0:
        assert saved <= 4 * MIB


def test_a_load_lets_go_of_its_destination(faults):
    """When a load is over nothing of the package holds the memory that it was received into: not the connections that are kept,
    and no cycle that only a garbage collection would find.
    """
    bucket = bucket_on(faults)
    dcp.save({"w": torch.ones(5 * MIB), "v": torch.ones(40_000)}, storage_writer=writer(bucket, "a"))
    memory = [np.zeros(5 * MIB, dtype=np.float32), np.zeros(40_000, dtype=np.float32)]
    template = {"w": torch.from_numpy(memory[0]), "v": torch.from_numpy(memory[1])}
    alive = [weakref.ref(array) for array in memory]
    planner = DefaultLoadPlanner()  # DCP's own: it keeps the state dict
    gc.collect()
    gc.disable()
    try:
        load(bucket, "a", template, planner=planner)
        assert template["w"].sum() == 5 * MIB
        del memory, template, planner
        held = [array() is not None for array in alive]
    finally:
        gc.enable()
    assert held == [False, False]


def test_two_saves_share_one_budget(faults):
    """Two saves at once, of tensors that have to be copied, share the one limit of their process: a save whose open part waits
    beside another that holds all the rest goes on with that part.
    """
    bucket = bucket_on(faults)
    settings = {"memory_bytes": 48 * MIB, "part_bytes": PART}
    plane = data_plane(bucket.endpoint.config(**settings))
    faults.configure(latency_s=0.02)
    states = [{"w": torch.arange(8 * MIB).reshape(2048, 4096).t()} for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        saves = [
            pool.submit(dcp.save, state, storage_writer=writer(bucket, f"s{n}", **settings), no_dist=True)
            for n, state in enumerate(states)
        ]
        for save in saves:
            save.result(60)
    assert 32 * MIB < plane.budget.peak <= 48 * MIB + 2 * PART
    assert plane.budget.held == 0
    for n, state in enumerate(states):
        assert_same(load(bucket, f"s{n}", blank(state)), state)


def _can_be_saved(dtype):
    buffer = io.BytesIO()
    try:
        torch.save(torch.empty(1, dtype=dtype), buffer)
        torch._utils._element_size(dtype)  # what DCP's planner asks
    except (RuntimeError, NotImplementedError, KeyError, TypeError):
        return False
    return True


def test_strided_tensors_of_every_dtype(faults):
    """Tensors that have to be copied in slices come back bit by bit: every dtype that can be saved, conj and neg views too."""
    named = [
        dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype) and not name.startswith("q")
    ]
    dtypes = sorted({dtype for dtype in named if _can_be_saved(dtype)}, key=str)
    assert len(dtypes) > 20
    state = {}
    for dtype in dtypes:
        raw = torch.arange(520 * 1031 * dtype.itemsize).to(torch.uint8)
        state[str(dtype)] = (raw & 1 if dtype is torch.bool else raw).view(dtype).view(520, 1031).t()
    conj = state["torch.complex64"].conj()
    state |= {
        "conj": conj,
        "neg": conj.imag,
        "channels": torch.rand(2, 64, 70, 70).to(memory_format=torch.channels_last),
    }
    bucket = bucket_on(faults)
    dcp.save(state, storage_writer=writer(bucket, "a"))
    loaded = load(bucket, "a", blank(state))
    for name, tensor in state.items():
        assert torch.equal(bits(loaded[name]), bits(tensor)), name
