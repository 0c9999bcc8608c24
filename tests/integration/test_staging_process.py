"""Staged state dicts in DCP's own hands: threads, other processes, forks, and what is left when they die."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import statistics
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from dcp_s3.errors import DcpS3Error
from dcp_s3.staging import Stager, lease_of
from tests.support.ranks import run_ranks, run_ranks_ok
from tests.unit.test_staging import block_of, mapped_blocks, open_blocks, release

MODES = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


def until(condition, limit_s=20.0):
    """Poll until something is so."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------- through a pipe, by hand


def _reader(pipe):
    """The other process: answers with sums, and hands back when told to."""
    staged = None
    while True:
        order = pipe.recv()
        if order == "release":
            release(staged)
        elif order == "forget":
            staged = None
        elif order == "look":
            pipe.send(sum(float(value.sum()) for value in staged.values()))
            continue
        elif order == "end":
            return
        else:
            staged = order
        pipe.send((len(staged) if staged else 0, sorted(mapped_blocks()), open_blocks()))


@contextlib.contextmanager
def reader():
    """A spawned process at the other end of a pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_reader, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        process.kill()
        process.join()
        ours.close()


def ask(pipe, order):
    pipe.send(order)
    assert pipe.poll(60)
    return pipe.recv()


@pytest.fixture
def few_descriptors():
    """At most 256 open files, here and in the processes started from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_three_thousand_tensors_cross_with_few_descriptors(few_descriptors):
    """Under `ulimit -n 256`, 3,000 tensors cross as one descriptor; the other process maps the block once for all saves, and its release hands it back."""
    stager = Stager(wait_s=30)
    state = {f"t{i}": torch.full((4, 4), float(i)) for i in range(3000)}
    blocks, places = [], []
    with reader() as (pipe, _):
        for turn in range(3):
            staged = stager.stage(state)
            blocks.append(block_of(staged))
            count, mappings, descriptors = ask(pipe, staged)
            assert (count, len(mappings), len(descriptors)) == (3000, 1, 1)
            places.append(mappings)
            assert ask(pipe, "look") == 16 * sum(float(value[0, 0]) for value in state.values())
            del staged
            ask(pipe, "release")
            for value in state.values():
                value.add_(1 + turn)
    assert len(set(blocks)) == 1
    assert places[0] == places[1] == places[2]


def test_what_was_sent_is_handed_back_by_the_receiver_alone():
    """The death of the sender's own tensors counts no more once they were sent; that of the receiver's does."""
    stager = Stager(wait_s=0.05)
    with reader() as (pipe, _):
        ask(pipe, stager.stage({"t": torch.full((1000,), 1.0)}))
        second = stager.stage({"t": torch.full((1000,), 2.0)})
        assert ask(pipe, "look") == 1000.0
        before = block_of(second)
        ask(pipe, second)
        del second
        ask(pipe, "forget")
        assert block_of(stager.stage({"t": torch.full((1000,), 3.0)})) == before


def test_a_receiver_unmaps_what_the_sender_gave_up():
    """A block that its owner dropped, or that grew, is not kept mapped in the other process."""
    stager = Stager(wait_s=0)
    with reader() as (pipe, _):
        for size in (10, 3_000_000, 6_000_000):
            staged = stager.stage({"t": torch.ones(size)})
            ask(pipe, staged)
            del staged  # never released: each one is given up for the next
        _, mappings, descriptors = ask(pipe, stager.stage({"t": torch.ones(5)}))
        assert (len(mappings), len(descriptors)) == (1, 1)


def test_a_killed_receiver_costs_a_wait_and_no_memory():
    """When the other process is killed in the middle, the next staging takes fresh memory after its wait, and the old goes."""
    stager = Stager(wait_s=0.1)
    with reader() as (pipe, process):
        staged = stager.stage({"t": torch.full((1000,), 1.0)})
        ask(pipe, staged)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        second = stager.stage({"t": torch.full((1000,), 2.0)})
        assert staged["t"].tolist() == [1.0] * 1000
        del staged
        assert len(mapped_blocks()) == 1
        assert len(open_blocks()) == 1
        assert second["t"].sum() == 2000


def test_what_nobody_received_is_taken_back():
    """A descriptor that waits for a process which died before it took it is withdrawn, and the memory is free."""
    stager = Stager(wait_s=0)
    with reader() as (pipe, process):
        ask(pipe, stager.stage({"t": torch.ones(10)}))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for _ in range(3):
            staged = stager.stage({"t": torch.ones(10)})
            with pytest.raises(OSError):  # a broken pipe or a reset connection
                pipe.send(staged)
            del staged
    stager.stage({"t": torch.ones(10)})
    stager.close()
    until(lambda: not open_blocks())
    assert not mapped_blocks()


class _Local:
    """Pickles, and does not unpickle in another process."""

    def __reduce__(self):
        return _here_only, (os.getpid(),)


def _here_only(pid):
    if pid != os.getpid():
        raise RuntimeError("not in this process")
    return _Local()


def test_what_does_not_cross_fails_the_save_and_not_the_pipe():
    """A leaf that does not pickle, or does not unpickle over there, arrives as a failed staging with the reason."""
    stager = Stager(wait_s=0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    staged = stager.stage({"t": torch.ones(3), "generator": 3})
    staged["generator"] = (x for x in range(3))
    ours.send(staged)
    received = theirs.recv()
    with pytest.raises(DcpS3Error, match="cannot pickle 'generator' object"):
        next(iter(received.values())).__create_write_items__("", None)
    staged = stager.stage({"t": torch.ones(3), "local": _Local()})
    process = context.Process(target=_plan, args=(theirs,))
    process.start()
    ours.send(staged)
    assert ours.poll(60)
    assert "RuntimeError: not in this process" in ours.recv()
    process.join()


def _plan(pipe):
    received = pipe.recv()
    try:
        next(iter(received.values())).__create_write_items__("", None)
    except DcpS3Error as error:
        pipe.send(str(error))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_nested_state_and_changes_made_after_staging_cross():
    """Nesting, ties, leaves, odd kinds of tensors, and what was put into the dict or viewed since, arrive as they are."""
    stager = Stager(buffers=2)
    tied = torch.randn(4)
    staged = stager.stage(
        {
            "a": tied,
            "b": [tied, {"c": (torch.ones(2, dtype=torch.float8_e4m3fn), 7)}],
            "sparse": torch.eye(3).to_sparse(),
            "empty": torch.empty(0, 2),
        }
    )
    staged["late"] = "x"
    staged["view"] = staged["a"][1:3]
    staged["transposed"] = stager.stage({"t": torch.arange(6.0).view(2, 3)})["t"].t()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    thread = threading.Thread(target=ours.send, args=(staged,))
    thread.start()
    received = theirs.recv()
    thread.join()
    assert received["a"] is received["b"][0]
    assert torch.equal(received["a"], tied)
    assert (
        received["b"][1]["c"][0].view(torch.uint8).tolist()
        == torch.ones(2, dtype=torch.float8_e4m3fn).view(torch.uint8).tolist()
    )
    assert received["b"][1]["c"][1] == 7
    assert torch.equal(received["sparse"].to_dense(), torch.eye(3))
    assert received["empty"].shape == (0, 2)
    assert received["late"] == "x"
    assert torch.equal(received["view"], tied[1:3])
    assert torch.equal(received["transposed"], torch.arange(6.0).view(2, 3).t())
    assert lease_of(received["a"]) is not lease_of(staged["a"])


# ------------------------------------------------------------------------------------------------------------- DTensors


def _dtensors(mesh, count, shape=(16, 16)):
    return {f"p{i}": DTensor.from_local(torch.full(shape, float(i)), mesh, [Shard(0)]) for i in range(count)}


def _stage_dtensors(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = _dtensors(mesh, 3)
    state["replicated"] = DTensor.from_local(torch.arange(4.0), mesh, [Replicate()])
    state["tied"] = state["p1"]
    state["empty"] = DTensor.from_local(torch.empty(0, 3), mesh, [Shard(0)])
    staged = Stager().stage(state)
    state["p1"].to_local().zero_()
    assert staged["p1"] is staged["tied"]
    assert staged["p1"]._spec is state["p1"]._spec
    assert type(staged["p1"]) is DTensor
    assert lease_of(staged["p1"]) is lease_of(staged["p2"].to_local())
    assert staged["p1"].to_local().unique().tolist() == [1.0]
    assert staged["replicated"].to_local().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert staged["empty"].to_local().shape == (0, 3)
    assert staged["p1"].shape == (16 * dist.get_world_size(), 16)


def test_dtensors_keep_their_spec_and_their_ties():
    """A DTensor is staged around a copied local tensor, with the very spec of the original."""
    run_ranks_ok(2, _stage_dtensors)


def _time_dtensors(rank):
    state = _dtensors(init_device_mesh("cpu", (1,)), 5000)
    stager = Stager(wait_s=0)
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        staged = stager.stage(state)
        seconds.append(time.perf_counter() - started)
        del staged
    return seconds


def test_thousands_of_small_dtensors_are_cheap():
    """A later staging of 5,000 small DTensors takes well under half a second (about 0.06 s of CPU on two cores)."""
    (seconds,) = run_ranks_ok(1, _time_dtensors)
    print(f"5,000 DTensors: first {seconds[0]:.3f} s, later {statistics.median(seconds[1:]):.3f} s")
    assert min(seconds[1:]) < 0.5


def _stage_sharded_tensor(rank):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    sharded = sharded_tensor.ones(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4, 2)
    staged = Stager().stage({"sharded": sharded})
    sharded.local_shards()[0].tensor.zero_()
    return staged["sharded"].local_shards()[0].tensor.tolist(), list(staged["sharded"].size())


def test_a_sharded_tensor_is_copied():
    """ShardedTensor, which DCP still writes, is staged with its shards' values."""
    (outcome,) = run_ranks_ok(1, _stage_sharded_tensor)
    assert outcome == ([[1.0, 1.0]] * 4, [4, 2])


# --------------------------------------------------------------------------------------------------- under dcp.async_save


class StagedFiles(dcp.FileSystemWriter):
    """DCP's file writer with our stager: what the S3 writer does, without S3."""

    _synchronize_after_execute = True
    stagers: dict[str, Stager] = {}  # noqa: RUF012 -- the process's, as stager_for keeps them; never pickled

    def __init__(self, path, *, hold=None, fail=False, kept=True, **options):
        super().__init__(path, **options)
        self.hold, self.fail, self.options = hold, fail, kept

    @property
    def stager(self):
        return self.stagers.setdefault("", Stager(wait_s=30))

    def stage(self, state_dict):
        return self.stager.stage(state_dict)

    def synchronize_staging(self):
        self.stager.synchronize()

    def close(self):
        self.stager.close()

    def write_data(self, plan, planner):
        if self.hold is not None:
            until(Path(self.hold).exists)
        leases = {lease_of(value) for value in planner.state_dict.values() if isinstance(value, torch.Tensor)}
        assert None not in leases
        try:
            if self.fail:
                raise OSError("the disk is gone")
            return super().write_data(plan, planner)
        finally:
            for lease in leases:
                lease.release()


def _loaded(path, like):
    target = {key: torch.zeros_like(value) for key, value in like.items()}
    dcp.load(target, checkpoint_id=path)
    return {key: (value.to_local() if isinstance(value, DTensor) else value) for key, value in target.items()}


def _save_three(rank, directory, mode):
    """Three saves, each held back until its values were overwritten."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, sharded = torch.zeros(1000), DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0)])
    state = {"model": model, "sharded": sharded}
    blocks = []
    for turn in range(1, 4):
        model.fill_(turn)
        sharded.to_local().fill_(10 * turn + rank)
        path = f"{directory}/{turn}"
        future = dcp.async_save(
            state, storage_writer=StagedFiles(path, hold=f"{path}.go"), async_checkpointer_type=mode
        )
        model.fill_(99)
        sharded.to_local().fill_(99)
        Path(f"{path}.go").touch()
        future.result()
        del future
        blocks.append(open_blocks())
    for turn in range(1, 4):
        loaded = _loaded(f"{directory}/{turn}", state)
        assert loaded["model"].unique().tolist() == [turn]
        assert loaded["sharded"].unique().tolist() == [10 * turn + rank]
    return blocks


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_async_save_holds_the_values_of_the_call(tmp_path, mode):
    """Two ranks, DTensors, values overwritten while the save is held back: each checkpoint has its own, from one kept block."""
    for blocks in run_ranks_ok(2, _save_three, str(tmp_path), mode, timeout_s=120):
        assert blocks[0] == blocks[1] == blocks[2]
        assert len(blocks[0]) == 1


class _Uncopyable:
    def __deepcopy__(self, memo):
        raise RuntimeError("cannot be copied")


def _fail_staging(rank, directory, mode):
    state = {"model": torch.ones(10), "odd": _Uncopyable() if rank == 1 else 3}
    try:
        dcp.async_save(state, storage_writer=StagedFiles(directory), async_checkpointer_type=mode).result()
    except CheckpointException as error:
        return {number: (type(failure[0]).__name__, str(failure[0])) for number, failure in error.failures.items()}
    return None


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_failed_staging_ends_the_save_on_every_rank(tmp_path, mode):
    """When staging fails on one rank, both get a CheckpointException that holds our error for that rank; nobody hangs."""
    for failures in run_ranks_ok(2, _fail_staging, str(tmp_path), mode, timeout_s=90):
        assert list(failures) == [1]
        name, text = failures[1]
        assert name == "DcpS3Error"
        assert "'odd' cannot be staged: RuntimeError: cannot be copied" in text


def _fail_and_save(rank, directory, mode, place):
    """A save that fails in planning or writing, with its future kept; then one that works, which must not wait."""
    failing = StagedFiles(f"{directory}/bad", fail=place == "writing")
    planner = _BadPlanner() if place == "planning" else None
    kept = dcp.async_save(
        {"t": torch.full((10,), 1.0)}, storage_writer=failing, planner=planner, async_checkpointer_type=mode
    )
    error = kept.exception(timeout=60)
    assert isinstance(error, CheckpointException)
    started = time.monotonic()
    future = dcp.async_save(
        {"t": torch.full((10,), 2.0)}, storage_writer=StagedFiles(f"{directory}/good"), async_checkpointer_type=mode
    )
    blocked = time.monotonic() - started
    future.result(timeout=60)
    assert _loaded(f"{directory}/good", {"t": torch.ones(10)})["t"].tolist() == [2.0] * 10
    del kept, error, future, planner  # which remembers the state dict
    gc.collect()
    return blocked, len(mapped_blocks())


class _BadPlanner(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        raise ValueError("no plan")


@pytest.mark.parametrize("place", ["planning", "writing"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_failed_save_is_followed_by_one_that_does_not_wait(tmp_path, mode, place):
    """After a save that failed, even with its future (and traceback) kept, the next staging neither waits nor leaks."""
    ((blocked, mappings),) = run_ranks_ok(1, _fail_and_save, str(tmp_path), mode, place, timeout_s=90)
    assert blocked < 10
    assert mappings == 1


def _kill_the_process(rank, directory):
    """DCP's checkpoint process is killed while it writes; two more saves are tried."""
    path = Path(directory)
    state = {"t": torch.full((1000,), 1.0)}
    future = dcp.async_save(
        state,
        storage_writer=StagedFiles(directory, hold=path / "never"),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    until(lambda: torch.distributed.checkpoint._async_process_executor._CHECKPOINT_PROCESS is not None, 60)
    process = torch.distributed.checkpoint._async_process_executor._CHECKPOINT_PROCESS._save_process
    until(lambda: _maps_a_block(process.pid), 60)
    os.kill(process.pid, signal.SIGKILL)
    errors, blocked = [repr(future.exception(timeout=60))], []
    for _ in range(3):
        started = time.monotonic()
        future = dcp.async_save(
            state, storage_writer=StagedFiles(directory), async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        blocked.append(time.monotonic() - started)
        errors.append(repr(future.exception(timeout=60)))
    del future
    gc.collect()
    StagedFiles(directory).close()
    until(lambda: not open_blocks())
    return errors, blocked, len(mapped_blocks())


def _maps_a_block(pid):
    return "memfd:dcp_s3-staging" in Path(f"/proc/{pid}/maps").read_text()


def test_a_dead_checkpoint_process_costs_neither_time_nor_memory(tmp_path):
    """After SIGKILL of DCP's process every save fails, but none of them blocks training for the wait, and no memory stays."""
    ((errors, blocked, mappings),) = run_ranks_ok(1, _kill_the_process, str(tmp_path), timeout_s=120)
    assert len(errors) == 4
    assert "None" not in errors
    assert max(blocked) < 10
    assert mappings == 0


def _stage_after_fork(rank):
    """Parent and forked child stage with the same stager; the parent's staged values must stay."""
    stager = Stager(wait_s=0)
    staged = stager.stage({"t": torch.full((1000,), 1.0)})
    lease = lease_of(staged["t"])
    idle = stager.stage({"t": torch.full((1000,), 5.0)})
    release(idle)
    parents = block_of(idle)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            mine = stager.stage({"t": torch.full((1000,), 7.0)})
            fresh = lease_of(staged["t"]) is None and block_of(mine) not in {parents, block_of(staged)}
            lease.release()
            del staged
            os.write(theirs, b"yes" if fresh and mine["t"].sum() == 7000 else b"no")
        os._exit(0)
    os.close(theirs)
    assert os.read(ours, 10) == b"yes"
    assert os.waitpid(child, 0)[1] == 0
    assert idle["t"].sum() == 5000
    assert staged["t"].sum() == 1000
    assert not lease.handed_back()
    assert block_of(stager.stage({"t": torch.zeros(1000)})) == parents
    return staged["t"].sum().item()


def test_a_forked_child_stages_in_memory_of_its_own():
    """After a fork the child's stagings, releases and dying tensors leave the parent's buffers alone."""
    assert run_ranks(1, _stage_after_fork, backend=None) == [1000.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_are_copied_by_a_side_stream():
    """What the caller's stream had queued before the call is in the copy, what it writes afterwards is not; conjugates are resolved."""
    stager = Stager(wait_s=0)
    for _ in range(2):
        tensor = torch.zeros(1 << 20, device="cuda")
        z = torch.randn(1000, dtype=torch.complex64, device="cuda")
        torch.cuda._sleep(100_000_000)
        tensor.fill_(1)
        staged = stager.stage(
            {"t": tensor, "slice": tensor[5:10], "z": z.conj(), "strided": z.view(10, 100).t(), "cpu": torch.ones(2)}
        )
        tensor.fill_(2)
        assert torch.equal(staged["t"], torch.ones(1 << 20))
        assert staged["slice"].tolist() == [1.0] * 5
        assert torch.equal(staged["z"], z.conj().resolve_conj().cpu())
        assert torch.equal(staged["strided"], z.view(10, 100).t().cpu())
        assert staged["t"].is_pinned()
        del staged
