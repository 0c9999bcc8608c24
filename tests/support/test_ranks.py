"""The helper that runs ranks: results, errors, deaths and hangs of ranks reach the test as values."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.ranks import RankDied, RankError, RankTimeout, run_ranks, run_ranks_ok


def _total(rank, base):
    value = torch.tensor([base + rank])
    dist.all_reduce(value)
    return rank, dist.get_world_size(), int(value)


def test_ranks_talk_to_each_other():
    """Each rank gets its number and the arguments, and collectives reach all ranks."""
    assert run_ranks(3, _total, 10) == [(0, 3, 33), (1, 3, 33), (2, 3, 33)]


def _surroundings(rank, name):
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "parent's threads": len(list(Path(f"/proc/{os.getppid()}/task").iterdir())),
        "initialized": dist.is_initialized(),
        "package": "dcp_s3" in sys.modules,
        "variable": os.environ.get(name),
        "extra": os.environ.get("EXTRA"),
        "rank": os.environ.get("RANK"),
        "daemon": multiprocessing.current_process().daemon,
        "torch": torch.get_num_threads(),
    }


def test_a_rank_is_a_clean_process(monkeypatch):
    """Without a group a rank has one thread, as its parent had, the caller's environment of that moment, and not yet the package."""
    for value in ("one", "two"):
        monkeypatch.setenv("DCP_S3_TEST_VARIABLE", value)
        (seen,) = run_ranks(1, _surroundings, "DCP_S3_TEST_VARIABLE", backend=None, env={"EXTRA": "more"})
        assert seen == {
            "threads": 1,
            "parent's threads": 1,
            "initialized": False,
            "package": False,
            "variable": value,
            "extra": "more",
            "rank": None,
            "daemon": False,
            "torch": 1,
        }


class _Unpicklable(Exception):
    def __init__(self, *, reason):
        super().__init__(reason)


def _fail(rank):
    if rank == 1:
        raise KeyError("rank one")
    if rank == 2:
        raise _Unpicklable(reason="keyword only")
    return threading.Lock() if rank == 3 else "fine"


def test_errors_are_values():
    """What a rank raises is its result, with the traceback in a note; what does not pickle is told by its text."""
    fine, key_error, unpicklable, lock = run_ranks(4, _fail, backend=None)
    assert fine == "fine"
    assert isinstance(key_error, KeyError)
    assert key_error.args == ("rank one",)
    assert "in _fail" in key_error.__notes__[0]
    assert isinstance(unpicklable, RankError)
    assert "keyword only" in str(unpicklable)
    assert isinstance(lock, TypeError)
    with pytest.raises(AssertionError, match="rank one"):
        run_ranks_ok(2, _fail, backend=None)


def _save_with_a_failing_rank(rank, directory):
    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            if rank == 1:
                raise ValueError("no plan")
            return super().create_local_plan()

    dcp.save({"x": torch.ones(2)}, checkpoint_id=directory, planner=Planner())


def test_a_checkpoint_exception_arrives(tmp_path):
    """DCP's CheckpointException, a BaseException, arrives from every rank with its failures by rank."""
    for outcome in run_ranks(2, _save_with_a_failing_rank, str(tmp_path)):
        assert isinstance(outcome, dcp.CheckpointException)
        assert list(outcome.failures) == [1]
        assert isinstance(outcome.failures[1][0], ValueError)


def _die(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        os._exit(7)
    return rank


def test_deaths_are_values():
    """A rank that is killed, or leaves without a word, is told by its exit code; the others' results stand."""
    zero, killed, left = run_ranks(3, _die, backend=None)
    assert zero == 0
    assert isinstance(killed, RankDied)
    assert (killed.rank, killed.exitcode) == (1, -signal.SIGKILL)
    assert isinstance(left, RankDied)
    assert (left.rank, left.exitcode) == (2, 7)


def _hang(rank, path):
    if rank == 0:
        return "done"
    if rank == 1:
        child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
        child.start()
        path.write_text(str(child.pid))
        threading.Event().wait()
    threading.Thread(target=threading.Event().wait).start()
    return "done, and yet not"


def _exists(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_hangs_end(tmp_path):
    """A rank that hangs, before or after its return, is killed with its children and told by where its threads were."""
    begin = time.monotonic()
    zero, hung, stuck = run_ranks(3, _hang, tmp_path / "pid", timeout_s=4, backend=None)
    assert 4 <= time.monotonic() - begin < 12
    assert zero == "done"
    assert isinstance(hung, RankTimeout)
    assert "in _hang" in hung.threads
    assert isinstance(stuck, RankTimeout)
    assert "had returned" in str(stuck)
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while _exists(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _exists(child)


def _async_save(rank, directory, process):
    kind = dcp.state_dict_saver.AsyncCheckpointerType
    future = dcp.async_save(
        {"x": torch.full((4,), 5.0)},
        checkpoint_id=directory,
        async_checkpointer_type=kind.PROCESS if process else kind.THREAD,
    )
    future.result()
    target = {"x": torch.zeros(4)}
    dcp.load(target, checkpoint_id=directory)
    return target["x"].tolist()


@pytest.mark.parametrize("prefix_store", ["0", "1"])
@pytest.mark.parametrize("process", [False, True])
def test_async_saves_run_in_ranks(tmp_path, process, prefix_store):
    """A rank can start DCP's checkpoint process, and DCP's use of the group's own store works."""
    variables = {"DCP_USE_PREFIX_STORE": prefix_store}
    outcomes = run_ranks_ok(2, _async_save, str(tmp_path), process, env=variables)
    assert outcomes == [[5.0] * 4] * 2
