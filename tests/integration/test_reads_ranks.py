"""Ranks that do not load the same checkpoint are told what differs: the URL that they were given, or the record at it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_s3 import CheckpointReplacedError, ConfigError
from tests.integration.conftest import bucket_on
from tests.integration.support import reader, writer
from tests.support.ranks import run_ranks_ok


def _load_each(rank, bucket, paths):
    template = {"w": torch.zeros(3)}
    try:
        dcp.load(template, storage_reader=reader(bucket, paths[rank]))
    except dcp.CheckpointException as caught:
        return {failed: error[0] for failed, error in caught.failures.items()}
    return template["w"].tolist()


def test_ranks_that_load_different_urls(faults):
    """Both URLs and whose they are, as what it is: an error of the configuration, on every rank."""
    bucket = bucket_on(faults)
    for path in ("a", "b"):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer(bucket, path))
    for failures in run_ranks_ok(3, _load_each, bucket, ["a", "b", "a"]):
        error = failures[0]
        assert isinstance(error, ConfigError)
        assert "the ranks of one load must load from one URL: ranks 0, 2: s3://bucket/a; rank 1: s3://bucket/b" in str(
            error
        )
        assert "replaced" not in str(error)
    assert run_ranks_ok(2, _load_each, bucket, ["a", "a/"]) == [[1.0] * 3] * 2


def _load_across_a_save(rank, bucket):
    """Rank 1 reads the record when rank 0 has read it and then replaced it."""
    import torch.distributed as dist

    source = reader(bucket, "a")
    read_record = source.read_metadata

    def in_turn(*args, **kwargs):
        if rank == 1:
            dist.barrier()
            return read_record(*args, **kwargs)
        found = read_record(*args, **kwargs)
        dcp.save({"w": torch.zeros(3)}, storage_writer=writer(bucket, "a"), no_dist=True)
        dist.barrier()
        return found

    source.read_metadata = in_turn
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3)}, storage_reader=source)
    return {failed: error[0] for failed, error in caught.value.failures.items()}


def test_ranks_that_read_different_records(faults):
    """One URL whose record was replaced between two ranks' looks at it: nothing is read, and a new load gets the new one."""
    bucket = bucket_on(faults)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer(bucket, "a"))
    faults.clear(rules=False, state=False)
    for failures in run_ranks_ok(2, _load_across_a_save, bucket):
        assert isinstance(failures[0], CheckpointReplacedError)
        assert "they saw different checkpoints; load again" in str(failures[0])
    assert not faults.requests("GetObject", key="/data/")


def test_many_ranks_are_told_briefly(faults):
    """As many URLs and ranks as somebody reads."""
    bucket = bucket_on(faults)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer(bucket, "a"))
    source = reader(bucket, "a")
    source.read_metadata()
    mine = source.prepare_local_plan(LoadPlan([]))
    plans = [dataclasses.replace(mine) for _ in range(1000)]
    assert source.prepare_global_plan(plans) == plans
    plans[7] = dataclasses.replace(mine, storage_data=("s3://bucket/b", "x"))
    with pytest.raises(ConfigError) as caught:
        source.prepare_global_plan(plans)
    assert "ranks 0, 1, 2, 3, 4, …: s3://bucket/a; rank 7: s3://bucket/b" in str(caught.value)
    each = [dataclasses.replace(mine, storage_data=(f"s3://bucket/{n}", "x")) for n in range(1000)]
    with pytest.raises(ConfigError) as caught:
        source.prepare_global_plan(each)
    assert str(caught.value).endswith("rank 4: s3://bucket/4; …")
