"""Background saves that nobody waits for: one after another, in the world of their call, and never half committed."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, _async_thread_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from dcp_s3 import ConfigError
from tests.integration.support import LIMIT_S, end_checkpoint_process, failure_of, load, wait_until, writer
from tests.support.ranks import run_ranks, run_ranks_ok

SHAPE = (8, 1000)


class Lines(logging.Handler):
    """Keeps what the package logs at ERROR."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines = []
        logging.getLogger("dcp_s3").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


class Gated(DefaultSavePlanner):
    """Holds a save in write_data until the gate opens."""

    def __init__(self, gate, begun=None):
        super().__init__()
        self._gate, self._begun = gate, begun

    def resolve_data(self, write_item):
        if self._begun is not None:
            self._begun.set()
        assert self._gate.wait(timeout=LIMIT_S)
        return super().resolve_data(write_item)


class Late:
    """Has DCP's thread for a save begin only when the gate opens, as on a machine that has other things to do."""

    def __init__(self):
        self.gate = threading.Event()
        self._real = _async_thread_executor.save_wrapper
        _async_thread_executor.save_wrapper = self

    def __call__(self, *args, **kwargs):
        assert self.gate.wait(timeout=LIMIT_S)
        return self._real(*args, **kwargs)


def _sharded(value):
    """A state of one sharded tensor, made without a collective: a save may be under way in the group."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())), _init_backend=False)
    local = torch.full((SHAPE[0] // dist.get_world_size(), SHAPE[1]), float(value))
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}


def _whole(bucket, path):
    return load(bucket, path, {"w": torch.full(SHAPE, -1.0)})["w"]


def _records(bucket):
    return [key for key in list(bucket.keys()) if key.endswith(".metadata")]


def _saving_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("AsyncCheckpointExecutor")]


# ---------------------------------------------------------------------- the group is destroyed under a save


def _train_and_leave(rank, bucket, path, moment):
    lines = Lines()
    model = fully_shard(torch.nn.Linear(1000, 8, bias=False))
    with torch.no_grad():
        model.weight.fill_(2.0)
    begun, gate = threading.Event(), threading.Event()
    late = Late() if moment == "before it begins" else None
    future = dcp.async_save({"w": model.weight}, storage_writer=writer(bucket, path), planner=Gated(gate, begun))
    if late is None:
        assert begun.wait(timeout=LIMIT_S)
    dist.destroy_process_group()
    if late is not None:
        late.gate.set()
    gate.set()
    concurrent.futures.wait([future], timeout=LIMIT_S)
    wait_until(lambda: not _saving_threads(), "DCP's thread ends")
    return lines.lines, str(future.exception())


@pytest.mark.parametrize("there", ["nothing", "a checkpoint"])
@pytest.mark.parametrize("moment", ["before it begins", "while it writes"])
def test_the_group_is_destroyed_under_a_save(bucket, moment, there):
    """Nothing is committed of a save whose group has gone, what was there before stands, and each of its ranks says so."""
    if there == "a checkpoint":
        dcp.save({"w": torch.full(SHAPE, 1.0)}, storage_writer=writer(bucket, "run"))
    before = _records(bucket)

    outcomes = run_ranks_ok(2, _train_and_leave, bucket, "run", moment, timeout_s=LIMIT_S)

    assert _records(bucket) == before
    if there == "a checkpoint":
        assert torch.equal(_whole(bucket, "run"), torch.full(SHAPE, 1.0))
    for rank, (lines, error) in enumerate(outcomes):
        if moment == "before it begins":
            (line,) = lines
            assert f"async_save was called on rank {rank} of a process group of 2 ranks, and there is none now" in line
            assert "ConfigError" in error
        elif rank == 0:
            (line,) = lines
            assert line.startswith(f"the save of {bucket.url('run')} on rank 0 ended between two of DCP's steps")
        else:
            assert lines == []  # it wrote all its bytes; what becomes of them is the coordinator's to tell
        assert error != "None"


def _new_group(rank, bucket):
    late = Late()
    future = dcp.async_save({"w": torch.ones(3)}, storage_writer=writer(bucket, "run"))
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    late.gate.set()
    with pytest.raises(dcp.CheckpointException) as caught:
        future.result(timeout=LIMIT_S)
    return str(failure_of(caught.value, 0))


def test_another_group_in_its_place(bucket):
    """A group of another size is as wrong as none."""
    for error in run_ranks_ok(2, _new_group, bucket, timeout_s=LIMIT_S):
        assert "of a process group of 2 ranks, and there is none now" in error
    assert bucket.keys() == []


def _alone_in_company(rank, bucket):
    mine = dist.new_group([rank], use_local_synchronization=True)
    futures = [
        dcp.async_save(
            {"w": torch.full((3,), float(rank))}, storage_writer=writer(bucket, f"alone/{rank}"), no_dist=True
        ),
        dcp.async_save(
            {"w": torch.full((3,), float(rank))}, storage_writer=writer(bucket, f"sub/{rank}"), process_group=mine
        ),
    ]
    for future in futures:
        future.result(timeout=LIMIT_S)
    dist.barrier()


def test_saves_of_a_part_of_the_group(bucket):
    """A lone rank and a subgroup save as they always did, while the group stands."""
    run_ranks_ok(2, _alone_in_company, bucket, timeout_s=LIMIT_S)
    for rank in (0, 1):
        for place in ("alone", "sub"):
            got = load(bucket, f"{place}/{rank}", {"w": torch.zeros(3)})["w"]
            assert torch.equal(got, torch.full((3,), float(rank)))


# ---------------------------------------------------------------------- records that do not cover their tensors


class Spoilt(DefaultSavePlanner):
    """A planner that makes the metadata say something else of the only tensor."""

    def __init__(self, chunks):
        super().__init__()
        self._chunks = chunks

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        kind = type(metadata.state_dict_metadata["w"].chunks[0])
        metadata.state_dict_metadata["w"].chunks[:] = [
            kind(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self._chunks
        ]
        return plans, metadata


@pytest.mark.parametrize(
    "chunks, told",
    [
        ([((0, 0), (4, 1000))], "w is not whole: its chunks hold 4000 of its 8000 elements"),
        ([((0, 0), (5, 1000)), ((4, 0), (4, 1000))], "w has chunks that overlap: they hold 9000 elements"),
        ([((0, 0), (4, 1000)), ((0, 0), (4, 1000))], "w has chunks that overlap, and lacks as many elements"),
        ([((1, 0), (8, 1000))], "w has a chunk outside of it"),
    ],
)
def test_a_record_that_does_not_cover_its_tensors(bucket, chunks, told):
    """It is not committed, though only one rank saves: DCP looks at that for several only."""
    state = {"w": torch.full(SHAPE, 1.0)}
    dcp.save(state, storage_writer=writer(bucket, "run"))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"w": torch.full(SHAPE, 2.0)}, storage_writer=writer(bucket, "run"), planner=Spoilt(chunks))
    error = failure_of(caught.value, 0)
    assert isinstance(error, ConfigError)
    assert error.message.startswith(told)
    assert torch.equal(_whole(bucket, "run"), state["w"])


def _shards_alone(rank, bucket, collectives):
    place = writer(bucket, f"run/{rank}" if collectives else "run")
    dcp.save(_sharded(1), storage_writer=place, no_dist=collectives, use_collectives=collectives)


def test_one_ranks_shards_are_no_checkpoint_of_all(bucket):
    """A rank that saves its shards alone is refused; with use_collectives=False, where that is meant, it is not."""
    for rank, outcome in enumerate(run_ranks(2, _shards_alone, bucket, True, timeout_s=LIMIT_S)):
        assert "w is not whole: its chunks hold 4000 of its 8000 elements" in str(failure_of(outcome, 0)), rank
    assert not _records(bucket)
    run_ranks_ok(2, _shards_alone, bucket, False, timeout_s=LIMIT_S)


# ---------------------------------------------------------------------- saves that nobody waits for, in one group


def _pile_up(rank, bucket, kind, count, one_writer, settings):
    shared = writer(bucket, **settings)
    futures = []
    for step in range(count):
        store = shared if one_writer else writer(bucket, **settings)
        if rank:
            time.sleep(0.01 * (step % 3))  # the ranks are never quite together
        futures.append(
            dcp.async_save(
                _sharded(step),
                checkpoint_id=bucket.url(f"run/{step}"),
                storage_writer=store,
                async_checkpointer_type=kind,
            )
        )
    for future in futures:
        getattr(future, "upload_completion", future).result(timeout=LIMIT_S)
    if kind is AsyncCheckpointerType.PROCESS:
        end_checkpoint_process()


@pytest.mark.parametrize("one_writer", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"staging_buffers": 2}, {"async_staging": True}], ids=["plain", "two buffers", "async staging"]
)
def test_saves_that_are_not_awaited(bucket, settings, one_writer):
    """Five saves at once in one group all commit, each with its own values."""
    run_ranks_ok(2, _pile_up, bucket, AsyncCheckpointerType.THREAD, 5, one_writer, settings, timeout_s=LIMIT_S)
    for step in range(5):
        assert torch.equal(_whole(bucket, f"run/{step}"), torch.full(SHAPE, float(step)))


def test_saves_in_a_process_that_are_not_awaited(bucket):
    """So in DCP's checkpoint process, which the first of them starts."""
    run_ranks_ok(2, _pile_up, bucket, AsyncCheckpointerType.PROCESS, 3, True, {}, timeout_s=2 * LIMIT_S)
    for step in range(3):
        assert torch.equal(_whole(bucket, f"run/{step}"), torch.full(SHAPE, float(step)))


def _one_fails(rank, bucket):
    shared = writer(bucket)
    states = [_sharded(step) for step in range(4)]
    if rank:
        states[1]["w"] = threading.Lock()  # what cannot be staged
    futures = [
        dcp.async_save(state, checkpoint_id=bucket.url(f"run/{step}"), storage_writer=shared)
        for step, state in enumerate(states)
    ]
    return [future.exception(timeout=LIMIT_S) is None for future in futures]


def test_one_of_them_fails_on_one_rank(bucket):
    """It fails on every rank, and those behind it commit."""
    assert run_ranks_ok(2, _one_fails, bucket, timeout_s=LIMIT_S) == [[True, False, True, True]] * 2
    for step in (0, 2, 3):
        assert torch.equal(_whole(bucket, f"run/{step}"), torch.full(SHAPE, float(step)))


def _one_in_front(rank, bucket):
    gate = threading.Event()
    future = dcp.async_save(_sharded(1), storage_writer=writer(bucket, "a"), planner=Gated(gate))
    threading.Timer(0.3, gate.set).start()
    dcp.save(_sharded(2), storage_writer=writer(bucket, "b"))
    assert future.done()


def test_a_save_in_front_of_one_in_the_background(bucket):
    """``dcp.save`` waits until the save in the background has ended: they use one group."""
    run_ranks_ok(2, _one_in_front, bucket, timeout_s=LIMIT_S)
    assert [_whole(bucket, path)[0, 0].item() for path in ("a", "b")] == [1.0, 2.0]


def test_saves_of_one_process_to_one_place(bucket):
    """They follow one another: none is told that another writer was there."""
    store = writer(bucket, "run")
    futures = [dcp.async_save({"w": torch.full(SHAPE, float(n))}, storage_writer=store) for n in range(4)]
    for future in futures:
        future.result(timeout=LIMIT_S)
    assert _whole(bucket, "run")[0, 0].item() == 3.0
