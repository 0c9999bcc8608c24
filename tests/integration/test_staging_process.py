"""Staged state dicts beside other processes: sent to one, forked into one, made of DTensors, copied from a device."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import statistics
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from dcp_s3.errors import DcpS3Error
from dcp_s3.staging import Stager, lease_of
from tests.support.ranks import run_ranks, run_ranks_ok
from tests.support.staging import close_stagers
from tests.unit.test_staging import block_of, mapped_blocks, open_blocks, release


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


@pytest.fixture(autouse=True, scope="module")
def no_block_of_earlier_tests():
    """The blocks that are counted here are this module's own."""
    close_stagers()


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
    assert len(set(blocks[1:])) == 1  # the first one was private until it crossed
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
    seconds, cpu_seconds = [], []
    for _ in range(7):
        started, cpu_started = time.perf_counter(), time.process_time()
        staged = stager.stage(state)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        del staged
    return seconds, cpu_seconds


def test_thousands_of_small_dtensors_are_cheap():
    """A later staging of 5,000 small DTensors takes well under half a second (about 0.06 s of CPU on two cores)."""
    ((seconds, cpu_seconds),) = run_ranks_ok(1, _time_dtensors)
    print(f"5,000 DTensors: first {seconds[0]:.3f} s, later {statistics.median(seconds[1:]):.3f} s")
    assert statistics.median(cpu_seconds[1:]) < 0.5


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


def _stage_after_fork(rank):
    """Parent and forked child stage with the same stager; the parent's staged values must stay."""
    stager = Stager(wait_s=0)
    staged = stager.stage({"t": torch.full((1000,), 1.0)})
    lease = lease_of(staged["t"])
    idle = stager.stage({"t": torch.full((1000,), 5.0)})
    release(idle)
    parents, held = block_of(idle), block_of(staged)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            mine = stager.stage({"t": torch.full((1000,), 7.0)})
            fresh = lease_of(staged["t"]) is None and block_of(mine) not in {parents, held}
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
