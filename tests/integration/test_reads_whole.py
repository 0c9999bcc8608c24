"""A load that would leave a part of its template as it is, since no chunk holds it, says so and names the tensors."""

from __future__ import annotations

import pickle
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_s3 import CorruptCheckpointError, S3StorageReader
from dcp_s3._checkpoint.load.load_coverage import missing
from tests.integration.conftest import bucket_on
from tests.integration.support import assert_same, failure_of, load, reader
from tests.support.ranks import run_ranks_ok


def _sharded(local, rank):
    """A DTensor of two parts of four rows, of which this one is a rank's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)


def _save_alone(rank, directory):
    """Each rank saves its half of a DTensor as if it were alone, which is what a group that is gone leads to."""
    state = {"w": _sharded(torch.full((4, 3), rank + 1.0), rank), "plain": torch.ones(3)}
    dcp.save(state, storage_writer=FileSystemWriter(f"{directory}/{rank}"), no_dist=True)


def _half(bucket, directory):
    """Put a checkpoint into the bucket of which one rank's half is missing."""
    run_ranks_ok(2, _save_alone, str(directory))
    for file in (directory / "0").iterdir():
        bucket.put(f"a/{file.name}", file.read_bytes())


def _load_halves(rank, bucket, no_dist):
    template = {"w": _sharded(torch.zeros(4, 3), rank), "plain": torch.zeros(3)}
    try:
        dcp.load(template, storage_reader=reader(bucket, "a"), no_dist=no_dist)
    except dcp.CheckpointException as caught:
        return {failed: error[0] for failed, error in caught.failures.items()}
    return template["w"].to_local()


def test_half_a_checkpoint_on_two_ranks(faults, tmp_path):
    """The rank whose half is missing says so, on every rank; DCP's own reader leaves it untouched."""
    bucket = bucket_on(faults)
    _half(bucket, tmp_path)
    for failures in run_ranks_ok(2, _load_halves, bucket, False):
        assert list(failures) == [1]
        assert isinstance(failures[1], CorruptCheckpointError)
        assert "w is not whole: its chunks hold 12 of its 24 elements" in str(failures[1])
        assert "load an older one" in str(failures[1])
        assert "plain" not in str(failures[1])


def test_half_a_checkpoint_alone(faults, tmp_path):
    """So does a load of the whole tensor, with verify=False too; who asks for something else, or for the half, gets it."""
    bucket = bucket_on(faults)
    _half(bucket, tmp_path)
    for verify in (True, False):
        source = S3StorageReader(bucket.url("a"), config=bucket.endpoint.config(), verify=verify)
        template = {"w": torch.zeros(8, 3), "plain": torch.zeros(3)}
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.load(template, storage_reader=source)
        error = failure_of(caught.value, 0)
        assert isinstance(error, CorruptCheckpointError)
        assert "w is not whole" in str(error)
        assert not template["plain"].any()
    assert_same(load(bucket, "a", {"plain": torch.zeros(3)}), {"plain": torch.ones(3)})
    own, other = run_ranks_ok(2, _load_halves, bucket, True)
    assert_same(own, torch.ones(4, 3))
    assert "w is not whole" in str(other[0])


def _edited(bucket, directory, edit):
    dcp.save({"w": torch.ones(4, 3), "plain": torch.ones(3)}, storage_writer=FileSystemWriter(directory))
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    edit(metadata)
    bucket.put("a/.metadata", pickle.dumps(metadata))
    bucket.put("a/__0_0.distcp", (directory / "__0_0.distcp").read_bytes())


def _without_chunks(metadata):
    metadata.state_dict_metadata["w"].chunks.clear()


def _twice(metadata):
    metadata.state_dict_metadata["w"].chunks *= 2


def _larger(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([5, 3])


@pytest.mark.parametrize(
    "edit, rows, flaw",
    [
        (_without_chunks, 4, "is not whole: its chunks hold 0 of its 12 elements"),
        (_twice, 4, "has chunks that overlap: they hold 24 elements, and it has 12"),
        (_larger, 5, "is not whole: its chunks hold 12 of its 15 elements"),
    ],
)
def test_chunks_that_are_no_cover(faults, tmp_path, edit, rows, flaw):
    """No chunk, the same one twice, too few."""
    bucket = bucket_on(faults)
    _edited(bucket, tmp_path, edit)
    with pytest.raises(dcp.CheckpointException) as caught:
        load(bucket, "a", {"w": torch.zeros(rows, 3)})
    assert f"w {flaw}" in str(failure_of(caught.value, 0))
    assert_same(load(bucket, "a", {"plain": torch.zeros(3)}), {"plain": torch.ones(3)})


def test_what_it_costs():
    """Less than 10 us of CPU time for each of 100,000 chunks of one tensor, and of 20,000 tensors."""
    properties = TensorProperties(dtype=torch.float32)
    chunks = [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([1, 4])) for n in range(100_000)]
    tensors = {"big": TensorStorageMetadata(properties, torch.Size([100_000, 4]), chunks)}
    tensors |= {
        f"t{n}": TensorStorageMetadata(
            properties, torch.Size([4]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
        )
        for n in range(20_000)
    }
    planner = DefaultLoadPlanner()
    planner.state_dict = dict.fromkeys(tensors)
    metadata = Metadata(tensors)
    before = time.thread_time()
    assert missing(metadata, LoadPlan([]), planner) == []
    assert time.thread_time() - before < 1.2
    chunks.pop()
    assert missing(metadata, LoadPlan([]), planner) == [
        "big is not whole: its chunks hold 399996 of its 400000 elements"
    ]
