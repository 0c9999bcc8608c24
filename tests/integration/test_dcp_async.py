"""dcp.async_save in threads and in DCP's checkpoint process: what is saved is what was there at the call."""

from __future__ import annotations

import concurrent.futures
import copy
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_s3 import CheckpointExistsError, DcpS3Error
from tests.integration.support import (
    LIMIT_S,
    assert_same,
    blank,
    checkpoint_keys,
    end_checkpoint_process,
    failure_of,
    load,
    wait_until,
    writer,
)
from tests.support.ranks import run_ranks_ok


class Gated(DefaultSavePlanner):
    """Holds a save in write_data until the gate opens."""

    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    def resolve_data(self, write_item):
        assert self._gate.wait(timeout=LIMIT_S)
        return super().resolve_data(write_item)


def _spoil(value):
    """Overwrite all that a caller can still write to."""
    if isinstance(value, DTensor):
        _spoil(value._local_tensor)
    elif isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _spoil(item)
        value.clear()


def test_the_values_of_the_call(bucket):
    """What async_save returns is a Future of the metadata, and what it saves are the values at its call, not later ones."""
    gate = threading.Event()
    state = {"big": torch.zeros(100_000), "small": torch.zeros(3), "list": [torch.zeros(2), {"step": 0}]}
    expected = copy.deepcopy(state)
    future = dcp.async_save(state, storage_writer=writer(bucket, "a"), planner=Gated(gate))
    assert type(future) is concurrent.futures.Future
    for tensor in (state["big"], state["small"], state["list"][0]):
        tensor.fill_(9)
    state["list"][1]["step"] = 9
    state["list"].append("more")
    assert not future.done()
    gate.set()
    metadata = future.result(timeout=LIMIT_S)
    assert bucket.keys() == checkpoint_keys(bucket, "a", metadata)
    assert_same(load(bucket, "a", blank(expected)), expected)


@pytest.mark.parametrize("buffers", [1, 3])
def test_overlapping_saves(bucket, buffers):
    """Three async saves 10 ms apart, with values 1, 2 and 3 to three ids on one writer, each save their own value."""
    store = writer(bucket, "run", staging_buffers=buffers)
    gate = threading.Event()
    if buffers == 1:
        gate.set()  # the second one waits for the first one's buffer
    state = {"x": torch.zeros(3 << 20), "y": torch.zeros(5), "step": 0}
    futures = []
    for value in (1, 2, 3):
        state["x"].fill_(value)
        state["y"].fill_(value)
        state["step"] = value
        planner = Gated(gate)
        futures.append(dcp.async_save(state, checkpoint_id=f"step-{value}", storage_writer=store, planner=planner))
        threading.Event().wait(0.01)
    state["x"].fill_(9)
    gate.set()
    for future in futures:
        future.result(timeout=LIMIT_S)
    for value in (1, 2, 3):
        expected = {"x": torch.full((3 << 20,), float(value)), "y": torch.full((5,), float(value)), "step": value}
        assert_same(load(bucket, f"run/step-{value}", blank(expected)), expected)


def test_staging_in_the_background(bucket):
    """With async_staging the reply has two futures; once the first is done the tensors may be written to."""
    gate = threading.Event()
    state = {"x": torch.full((100_000,), 4.0), "step": 4}
    expected = copy.deepcopy(state)
    reply = dcp.async_save(state, storage_writer=writer(bucket, "a", async_staging=True), planner=Gated(gate))
    assert isinstance(reply, AsyncSaveResponse)
    reply.staging_completion.result(timeout=LIMIT_S)
    state["x"].fill_(9)
    gate.set()
    reply.upload_completion.result(timeout=LIMIT_S)
    assert_same(load(bucket, "a", blank(expected)), expected)


def test_another_stager(bucket):
    """A stager of the caller's own, here DCP's, may stand between DCP and the writer."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    state = {"x": torch.full((1000,), 4.0), "step": 4}
    expected = copy.deepcopy(state)
    future = dcp.async_save(state, storage_writer=writer(bucket, "a"), async_stager=stager)
    state["x"].fill_(9)
    future.result(timeout=LIMIT_S)
    stager.close()
    assert_same(load(bucket, "a", blank(expected)), expected)


def test_a_failed_save_can_be_repeated(bucket):
    """A background save that fails leaves what was there and is told by its future; the same step can be saved again."""

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if write_item.index.fqn == "c":
                wait_until(bucket.uploads, "the upload of the first two is open")
                raise ZeroDivisionError("the third tensor")
            return super().resolve_data(write_item)

    def state(value):
        return {name: torch.full((1 << 20,), float(value)) for name in "abcde"}

    store = writer(bucket, "step-20", part_bytes=5 << 20)
    dcp.async_save(state(1), storage_writer=store).result(timeout=LIMIT_S)
    future = dcp.async_save(state(2), storage_writer=store, planner=Failing())
    error = failure_of(future.exception(timeout=LIMIT_S), 0)
    assert type(error) is ZeroDivisionError
    assert error.args == ("the third tensor",)
    assert bucket.uploads() == []
    assert_same(load(bucket, "step-20", blank(state(1))), state(1))
    metadata = dcp.async_save(state(3), storage_writer=store).result(timeout=LIMIT_S)
    assert_same(load(bucket, "step-20", blank(state(3))), state(3))
    assert set(checkpoint_keys(bucket, "step-20", metadata)) <= set(bucket.keys())


def _tree(mesh, value):
    whole = torch.arange(44.0).reshape(11, 4) * value
    tied = torch.full((9,), float(value))
    return {
        "model": {
            "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole, mesh, [Shard(1)]),
            "replicated": distribute_tensor(whole, mesh, [Replicate()]),
            "tied": [tied, tied],
            "view": whole.t()[1:3],
            "bf16": whole.to(torch.bfloat16),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(value))}},
            "groups": [{"lr": 0.1 * value, "betas": (0.9, 0.95)}],
        },
        "step": value,
        "empty": {},
    }


def _background_saves(rank, bucket, mode, members):
    group = dist.new_group(members, backend="gloo") if members else None
    if members and rank not in members:
        return None
    mesh = DeviceMesh.from_group(group, "cpu") if members else init_device_mesh("cpu", (2,))
    options = {"async_checkpointer_type": AsyncCheckpointerType[mode], "process_group": group}
    store = writer(bucket, "run")
    try:
        kept = []
        for value, name in enumerate(("a", "b", "a"), start=1):
            state = _tree(mesh, value)
            future = dcp.async_save(state, checkpoint_id=name, storage_writer=store, **options)
            _spoil(state)
            assert isinstance(future, concurrent.futures.Future)
            kept.append(future.result(timeout=LIMIT_S))
            template = load(bucket, f"run/{name}", blank(_tree(mesh, value)), process_group=group)
            assert_same(template, _tree(mesh, value))

        careful = writer(bucket, "run/b", overwrite=False)
        refused = dcp.async_save(_tree(mesh, 4), storage_writer=careful, **options).exception(timeout=LIMIT_S)
        assert type(failure_of(refused, 0)) is CheckpointExistsError

        extra = {"lock": threading.Lock()} if dist.get_rank(group) == 1 else {}
        state = _tree(mesh, 5) | extra
        failed = dcp.async_save(state, checkpoint_id="c", storage_writer=store, **options).exception(timeout=LIMIT_S)
        assert list(failed.failures) == [1]
        assert isinstance(failure_of(failed, 1), DcpS3Error)
        assert "'lock' cannot be staged" in str(failure_of(failed, 1))

        kept.append(
            dcp.async_save(_tree(mesh, 6), checkpoint_id="c", storage_writer=store, **options).result(timeout=LIMIT_S)
        )
        template = load(bucket, "run/c", blank(_tree(mesh, 6)), process_group=group)
        assert_same(template, _tree(mesh, 6))
        return kept
    finally:
        end_checkpoint_process()


@pytest.mark.parametrize("mode, members", [("THREAD", []), ("PROCESS", []), ("PROCESS", [1, 2])])
def test_background_saves_of_two_ranks(bucket, mode, members):
    """Two ranks save in the background, over an earlier save too; whatever fails on one rank fails on both, and hangs neither.

    So do they in a thread and in DCP's process, and in a group that global rank 0 is not in.
    """
    kept = run_ranks_ok(3 if members else 2, _background_saves, bucket, mode, members, timeout_s=2 * LIMIT_S)[-1]
    for name, metadata in (("a", kept[2]), ("b", kept[1]), ("c", kept[3])):
        assert bucket.keys(f"run/{name}") == checkpoint_keys(bucket, f"run/{name}", metadata)
    assert bucket.uploads() == []
