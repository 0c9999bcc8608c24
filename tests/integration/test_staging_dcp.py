"""Staged state dicts in DCP's own hands: async_save in a thread and in a process, and saves that fail."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from dcp_s3.staging import Stager, lease_of
from tests.integration.test_staging_process import until
from tests.support.ranks import run_ranks_ok
from tests.unit.test_staging import kept_blocks, mapped_blocks, open_blocks

MODES = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


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
        blocks.append(kept_blocks())
    for turn in range(1, 4):
        loaded = _loaded(f"{directory}/{turn}", state)
        assert loaded["model"].unique().tolist() == [turn]
        assert loaded["sharded"].unique().tolist() == [10 * turn + rank]
    return blocks


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_async_save_holds_the_values_of_the_call(tmp_path, mode):
    """Two ranks, DTensors, values overwritten while the save is held back: each checkpoint has its own, from one kept block."""
    for blocks in run_ranks_ok(2, _save_three, str(tmp_path), mode, timeout_s=120):
        assert blocks[0] == blocks[1] == blocks[2]  # in a process: the shared one
        assert len(blocks[0]) == 1


def _save_with_async_staging(rank, directory):
    tensor = torch.full((100_000,), 1.0)
    writer = StagedFiles(directory)
    StagedFiles.stagers[""] = Stager(async_staging=True)
    response = dcp.async_save({"t": tensor}, storage_writer=writer)
    response.staging_completion.result(timeout=60)
    tensor.fill_(2)
    response.upload_completion.result(timeout=60)
    writer.close()
    return _loaded(directory, {"t": tensor})["t"].unique().tolist()


def test_async_staging_completes_before_the_upload(tmp_path):
    """With async_staging DCP answers with two futures; after the first, the caller may write to its tensors."""
    assert run_ranks_ok(1, _save_with_async_staging, str(tmp_path)) == [[1.0]]


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
