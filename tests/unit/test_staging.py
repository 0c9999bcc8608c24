"""The stager: what it copies, when it writes to a buffer again, and that it never raises."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import gc
import io
import multiprocessing
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch

from dcp_s3 import staging
from dcp_s3._staging import buffers
from dcp_s3._staging.handoff import FAILURE_KEY
from dcp_s3.errors import DcpS3Error
from dcp_s3.staging import Stager, StagingFailed, lease_of, stager_for
from tests.support.staging import await_background, close_stagers
from tests.unit.test_interrupts import at_each_place


def mapped_blocks():
    """Bytes of each mapping of a staging block in this process, by its start."""
    return {region.address: region.size for region in buffers._regions}


def kept_blocks():
    """Names of the staging blocks that are this process's own."""
    return {block.token for block in buffers._owned}


def open_blocks():
    """Inodes of the shared staging blocks that this process holds a descriptor of."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if "memfd:dcp_s3-staging" in str(fd.readlink()):
                inodes.add(fd.stat().st_ino)
    return inodes


@pytest.fixture(autouse=True, scope="module")
def no_block_of_earlier_tests():
    """The blocks that are counted here are this module's own."""
    close_stagers()


@pytest.fixture(autouse=True)
def no_block_is_left():
    """Whatever a test did, no block outlives its tensors and its stager, and that without the cyclic collector."""
    yield
    assert not mapped_blocks()
    assert not kept_blocks()
    assert not open_blocks()
    assert not buffers._leases


def block_of(staged):
    """The block that the first tensor of a staged state dict lies in, by its name: no other ever has the same."""
    return lease_of(next(value for value in staged.values() if isinstance(value, torch.Tensor))).block.token


def release(staged):
    """What write_data does in the end: hand back the leases of what it wrote."""
    for value in staged.values():
        lease = lease_of(value) if isinstance(value, torch.Tensor) else None
        if lease is not None:
            lease.release()


def failure(staged):
    """The error inside a failed staging."""
    assert list(staged) == [FAILURE_KEY]
    try:  # pytest.raises would keep the test's frame, and its buffers with it
        staged[FAILURE_KEY].__create_write_items__(FAILURE_KEY, staged[FAILURE_KEY])
    except DcpS3Error as error:
        error.__traceback__ = None
        return str(error)
    return pytest.fail("planning did not raise")


# ------------------------------------------------------------------------------------------- whose turn the buffer is


def test_a_released_buffer_is_used_again():
    """After release() the next staging copies into the same memory, although the old tensors still live."""
    stager = Stager(wait_s=0)
    first = stager.stage({"t": torch.full((1000,), 1.0)})
    release(first)
    second = stager.stage({"t": torch.full((1000,), 2.0)})
    assert block_of(second) == block_of(first)
    assert second["t"][0] == 2.0


def test_a_buffer_is_not_written_to_before_it_is_handed_back():
    """Without release, and with a tensor of it alive (a slice is enough), staging takes other memory after its wait."""
    stager = Stager(wait_s=0.05)
    first = stager.stage({"t": torch.full((1000,), 1.0), "u": torch.zeros(3)})
    part = first["t"][5:9]
    before = block_of(first)
    del first
    gc.collect()
    started = time.monotonic()
    second = stager.stage({"t": torch.full((1000,), 2.0)})
    assert time.monotonic() - started >= 0.05
    assert block_of(second) != before
    assert part.tolist() == [1.0] * 4


def test_dead_tensors_hand_their_buffer_back():
    """When every tensor of a staging is gone its memory is used again at once, without any release."""
    stager = Stager(wait_s=0)
    staged = stager.stage({"t": torch.ones(1000), "nested": [torch.ones(3)]})
    before = block_of(staged)
    del staged
    assert block_of(stager.stage({"t": torch.ones(1000)})) == before


def test_a_late_release_frees_nothing_newer():
    """Leases of an earlier staging, released again or looked up from its tensors, do not hand back the newer one."""
    stager = Stager(wait_s=0)
    first = stager.stage({"t": torch.full((10,), 1.0)})
    old = lease_of(first["t"])
    old.release()
    second = stager.stage({"t": torch.full((10,), 2.0)})
    assert block_of(second) == block_of(first)
    assert lease_of(first["t"]) is old
    assert lease_of(second["t"]) is not old
    old.release()
    release(first)
    third = stager.stage({"t": torch.full((10,), 3.0)})
    assert block_of(third) != block_of(second)
    assert second["t"].tolist() == [2.0] * 10


def test_lease_of_knows_its_own():
    """Staged tensors, their views and detached aliases have a lease; ordinary, sparse, empty and copied tensors have none."""
    source = torch.ones(4, 4)
    staged = Stager().stage({"t": source, "empty": torch.empty(0)})
    lease = lease_of(staged["t"])
    assert lease_of(staged["t"][1:]) is lease
    assert lease_of(staged["t"].detach().t()) is lease
    for other in (
        source,
        staged["empty"],
        staged["t"].clone(),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
    ):
        assert lease_of(other) is None


def test_leases_stay_with_their_tensors():
    """Tensors that die one by one leave no lease to what comes to lie where they were, and take none of another staging's."""
    stager = Stager(buffers=2, wait_s=0)
    state = {f"t{i}": torch.ones(3) for i in range(200)}
    first, last = stager.stage(state), "t199"
    for name in list(first)[:-1]:
        del first[name]
    assert all(lease_of(tensor) is None for tensor in [torch.ones(3) for _ in range(400)])
    second = stager.stage(state)
    lease = lease_of(second[last])
    assert lease is not lease_of(first[last])
    del first
    assert all(lease_of(tensor) is lease for tensor in second.values())


def test_a_wait_ends_with_the_hand_back():
    """A staging that waits goes on, into the same memory, as soon as another thread releases it."""
    stager = Stager(wait_s=30)
    first = stager.stage({"t": torch.zeros(10)})
    before = block_of(first)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(stager.stage, {"t": torch.ones(10)})
        assert not concurrent.futures.wait([waiting], timeout=0.1).done
        release(first)
        second = waiting.result(timeout=10)
    assert block_of(second) == before
    assert second["t"].tolist() == [1.0] * 10


def test_two_buffers_overlap():
    """With buffers=2 a second staging does not wait for the first; a third takes whichever comes back."""
    stager = Stager(buffers=2, wait_s=30)
    first = stager.stage({"t": torch.full((10,), 1.0)})
    started = time.monotonic()
    second = stager.stage({"t": torch.full((10,), 2.0)})
    assert time.monotonic() - started < 5
    assert block_of(first) != block_of(second)
    release(second)
    third = stager.stage({"t": torch.full((10,), 3.0)})
    assert block_of(third) == block_of(second)
    assert first["t"].tolist() == [1.0] * 10


def test_a_save_that_failed_is_not_waited_for(caplog):
    """When the thread that took the staged dict up has ended without a release, the next staging takes other memory at once."""
    stager = Stager(wait_s=60)
    kept = []

    def save_and_fail(staged):
        kept.append(dict(staged.items()))

    first = stager.stage({"t": torch.full((10,), 1.0)})
    thread = threading.Thread(target=save_and_fail, args=(first,))
    thread.start()
    thread.join()
    started = time.monotonic()
    second = stager.stage({"t": torch.full((10,), 2.0)})
    assert time.monotonic() - started < 10
    assert block_of(second) != block_of(first)
    assert kept[0]["t"].tolist() == [1.0] * 10
    assert "without handing its buffer back" in caplog.text


def test_the_thread_that_copies_a_save_may_end_after_releasing():
    """A save that succeeded, and whose thread is gone, leaves its memory to the next staging."""
    stager = Stager(wait_s=0)
    first = stager.stage({"t": torch.ones(10)})
    thread = threading.Thread(target=lambda: [lease_of(value).release() for _, value in first.items()])
    thread.start()
    thread.join()
    assert block_of(stager.stage({"t": torch.ones(10)})) == block_of(first)


def test_a_block_grows_and_is_kept():
    """A larger state dict extends the block, a smaller one uses part of it: there is one all the while, and all values hold."""
    stager = Stager(wait_s=0)
    files = set()
    for count in (10, 3_000_000, 5, 4_000_000, 4_000_000):
        staged = stager.stage({f"t{i}": torch.full((count,), float(i)) for i in range(3)})
        assert [value[count - 1].item() for value in staged.values()] == [0.0, 1.0, 2.0]
        files.update(kept_blocks())
        assert len(kept_blocks()) == len(mapped_blocks()) == 1
        assert not open_blocks()
        del staged
    assert len(files) == 1


def test_memory_is_flat_over_saves():
    """Thirty stagings use one block, whether handed back by release or by death; thirty failed saves do not pile up."""
    state = {f"t{i}": torch.rand(250_000) for i in range(8)}
    stager = Stager(wait_s=0)
    sizes = []
    for turn in range(30):
        staged = stager.stage(state)
        if turn % 2:
            release(staged)
        else:
            del staged
        sizes.append(sum(mapped_blocks().values()))
    assert len(set(sizes)) == 1
    for _ in range(30):  # never handed back: the previous one is still held when the next is staged
        staged = stager.stage(state)
        assert len(mapped_blocks()) <= 2
    del staged


def test_one_pool_for_all():
    """Stagers differ by the number of buffers and mode alone, and share their memory; zero buffers are refused."""
    kinds = [(1, False), (2, False), (1, True)]
    stagers = [stager_for(buffers=buffers, async_staging=in_thread) for buffers, in_thread in kinds]
    assert stagers == [stager_for(buffers=buffers, async_staging=in_thread) for buffers, in_thread in kinds]
    assert len(set(stagers)) == 3
    seen = set()
    for _ in range(3):
        for stager in stagers[:2]:
            staged = stager.stage({"t": torch.ones(10)})
            seen.add(block_of(staged))
            release(staged)
            del staged
    assert len(seen) == 1
    assert len(kept_blocks()) == 1
    stagers[0].close()
    with pytest.raises(ValueError, match="at least 1"):
        Stager(buffers=0)


def test_two_threads_never_share_a_buffer():
    """Eight threads that stage at once with one stager each find their own values."""
    stager = Stager(buffers=2, wait_s=20)

    def stage_and_check(number):
        for _ in range(5):
            staged = stager.stage({"t": torch.full((50_000,), float(number))})
            assert torch.equal(staged["t"], torch.full((50_000,), float(number)))
            release(staged)
        return number

    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        assert list(executor.map(stage_and_check, range(8))) == list(range(8))


def test_close_gives_the_memory_back_and_the_stager_goes_on():
    """After close() no block is mapped, but for one that is still read; a further stage() works."""
    stager = Stager()
    staged = stager.stage({"t": torch.full((10,), 1.0)})
    stager.close()
    assert staged["t"].tolist() == [1.0] * 10
    again = stager.stage({"t": torch.full((10,), 2.0)})
    assert staged["t"].tolist() == [1.0] * 10
    assert again["t"].tolist() == [2.0] * 10
    del staged, again
    stager.close()
    assert not kept_blocks()


@pytest.mark.parametrize("attempts", [3])
def test_an_interrupt_at_any_place(attempts):
    """Whatever place: the next staging neither waits nor has wrong values, and one block is kept in the end, with one lease."""
    stager = Stager(wait_s=30)
    state = {"t": torch.full((1000,), 1.0), "nested": [torch.ones(3), {"n": 3}]}
    kept = collections.deque(maxlen=1)  # as sys.last_exc does

    def work(over):
        try:
            staged = stager.stage(state)
        except BaseException as error:
            over()
            kept.append(error)
            raise
        over()
        assert staged["t"].tolist() == [1.0] * 1000
        del staged
        started = time.monotonic()
        again = stager.stage({"t": torch.full((1000,), 2.0)})
        assert time.monotonic() - started < 5
        assert again["t"].tolist() == [2.0] * 1000

    assert at_each_place(work, step=attempts) > 100
    kept.clear()
    gc.collect()
    release(stager.stage(state))
    staged = stager.stage(state)
    assert len(kept_blocks()) == 1
    del staged


# --------------------------------------------------------------------------------------------------- private and shared


def test_memory_is_private_until_it_crosses():
    """No descriptor is open before a state dict crosses; then it lies in shared memory, as do all later ones, in one block."""
    stager = Stager(wait_s=10)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    before = block_of(stager.stage({"t": torch.ones(1000)}))
    assert not open_blocks()
    seen = []
    for turn in range(3):
        staged = stager.stage({"t": torch.full((1000,), float(turn)), "n": turn})
        ours.send(staged)
        assert len(open_blocks()) == 1
        del staged
        received = theirs.recv()
        assert received["t"].tolist() == [float(turn)] * 1000
        assert received["n"] == turn
        release(received)
        del received
        seen.append(kept_blocks())
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 1
    assert before not in seen[0]
    buffers._received.clear()


def test_what_crossed_is_not_written_to_before_it_is_handed_back():
    """A crossing moves the hand-back to the receiver: while that reads, neither the sender's tensors nor theirs change."""
    stager = Stager(wait_s=0.05)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    staged = stager.stage({"t": torch.full((1000,), 1.0)})
    ours.send(staged)
    received = theirs.recv()
    second = stager.stage({"t": torch.full((1000,), 2.0)})
    assert received["t"].tolist() == staged["t"].tolist() == [1.0] * 1000
    del staged
    third = stager.stage({"t": torch.full((1000,), 3.0)})
    assert received["t"].tolist() == [1.0] * 1000
    assert (second["t"][0], third["t"][0]) == (2.0, 3.0)
    del received
    buffers._received.clear()


def test_further_shared_blocks_are_made_in_the_background():
    """With two buffers the second shared block is there some time after the first crossing, and is what the next staging takes."""
    stager = Stager(buffers=2, wait_s=0)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    ours.send(stager.stage({"t": torch.ones(1000)}))
    received = theirs.recv()
    await_background()
    made = kept_blocks()
    staged = stager.stage({"t": torch.ones(1000)})
    assert block_of(staged) in made
    assert received["t"].sum() == 1000
    del received, staged
    buffers._received.clear()


def test_no_shared_memory_fails_the_save_that_crosses(monkeypatch):
    """A crossing for which there is no memory arrives as a failed staging; the next one crosses."""
    stager = Stager(wait_s=0)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(buffers.os, "pwrite", full)
        ours.send(stager.stage({"t": torch.ones(10)}))
        assert "No space left" in failure(theirs.recv())
    ours.send(stager.stage({"t": torch.ones(10)}))
    received = theirs.recv()
    assert received["t"].sum() == 10
    del received
    buffers._received.clear()


# ------------------------------------------------------------------------------------------------------- its failures


class Uncopyable:
    def __deepcopy__(self, memo):
        raise RuntimeError("not me")


@pytest.mark.parametrize(
    "leaf,reason",
    [
        (Uncopyable(), "RuntimeError: not me"),
        (threading.Lock(), "TypeError"),
        (torch.empty(3, device="meta"), "no data"),
    ],
    ids=["refuses", "lock", "meta"],
)
def test_a_leaf_that_cannot_be_copied_fails_the_save(leaf, reason):
    """stage() returns; planning the save raises an error that names the leaf and the reason, and that pickles."""
    stager = Stager()
    staged = stager.stage({"fine": torch.ones(2), "model": {"layers": [torch.ones(1), {"bad": leaf}]}})
    text = failure(staged)
    assert "'model/layers/1/bad'" in text
    assert reason in text
    error = pickle.loads(pickle.dumps(staged[FAILURE_KEY].error))
    assert type(error) is DcpS3Error
    assert str(error) == text
    assert stager.stage({"fine": torch.ones(2)})["fine"].tolist() == [1.0, 1.0]


def test_a_freed_storage_fails_the_save():
    """A tensor whose storage was resized to nothing (FSDP1 does it between uses) is reported, not read."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    assert "'freed' cannot be staged" in failure(Stager().stage({"freed": tensor}))


def test_a_failed_staging_cannot_be_saved_as_an_object():
    """Pickling the failure, as a foreign planner that ignores DCP's hook would have torch.save do, raises its error."""
    failed = StagingFailed(DcpS3Error("it failed"))
    with pytest.raises(DcpS3Error, match="it failed"):
        torch.save(failed, io.BytesIO())


def test_no_memory_fails_the_save_and_not_the_next(monkeypatch):
    """When the system has no memory for a block the save fails with its error; once there is some, staging works again."""
    stager = Stager(wait_s=0)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(buffers.mmap, "mmap", full)
        assert "No space left" in failure(stager.stage({"t": torch.ones(10)}))
    assert stager.stage({"t": torch.ones(10)})["t"].sum() == 10


def test_an_error_in_the_copy_hands_the_buffer_back(monkeypatch):
    """A copy that fails half-way leaves the buffer to the next staging; an interrupt passes, and does so too."""
    stager = Stager(wait_s=0)
    first = stager.stage({"t": torch.ones(10)})
    before = block_of(first)
    del first
    for error in (RuntimeError("broken copy"), KeyboardInterrupt()):

        def broken(*arguments, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", broken)
            if isinstance(error, KeyboardInterrupt):
                with pytest.raises(KeyboardInterrupt):
                    stager.stage({"t": torch.ones(10)})
            else:
                assert "broken copy" in failure(stager.stage({"t": torch.ones(10)}))
        error.__traceback__ = None
        gc.collect()
        assert block_of(stager.stage({"t": torch.ones(10)})) == before


# ------------------------------------------------------------------------------------------------------ in the background


def test_async_staging_gives_a_future():
    """With async_staging the copy runs in a thread; structure and values of leaves are those of the call."""
    stager = Stager(async_staging=True)
    state = {"t": torch.arange(10.0), "steps": [1]}
    future = stager.stage(state)
    state["steps"].append(2)
    state["late"] = 1
    stager.synchronize()
    assert future.done()
    staged = future.result()
    assert list(staged) == ["t", "steps"]
    assert staged["steps"] == [1]
    assert torch.equal(staged["t"], torch.arange(10.0))
    stager.close()


def test_async_staging_does_not_wait_for_a_buffer():
    """The call returns while the previous buffer is out; the future is done when that is handed back."""
    stager = Stager(wait_s=30, async_staging=True)
    first = stager.stage({"t": torch.zeros(10)}).result(timeout=10)
    second = stager.stage({"t": torch.ones(10)})
    assert not concurrent.futures.wait([second], timeout=0.1).done
    release(first)
    assert block_of(second.result(timeout=10)) == block_of(first)
    stager.close()


def test_async_staging_fails_in_the_save_too():
    """A failure, in the walk or in the copy, is the future's value and not its exception."""
    stager = Stager(async_staging=True)
    assert "not me" in failure(stager.stage({"bad": Uncopyable()}).result(timeout=10))
    stager.close()


def test_the_public_names_are_all_there():
    """What staging promises to its users can be imported from it."""
    assert all(hasattr(staging, name) for name in staging.__all__)
