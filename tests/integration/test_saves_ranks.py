"""Ranks that save to different URLs are told so on every rank, before a byte is sent where that can be known."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from dcp_s3 import ConfigError
from tests.integration.conftest import bucket_on
from tests.integration.support import LIMIT_S, assert_same, blank, checkpoint_keys, failure_of, load, writer
from tests.support.ranks import run_ranks_ok

URLS = "the ranks of one save must save to one URL: ranks 0, 2: s3://bucket/a; rank 1: s3://bucket/b. "


class Anew(DefaultSavePlanner):
    """Makes the plans of all ranks anew, as a planner may: nothing that came with them is left."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(
            [SavePlan(plan.items, None, plan.planner_data) for plan in all_plans]
        )
        return [SavePlan(plan.items, None, plan.planner_data) for plan in plans], metadata


class Own(DefaultSavePlanner):
    """Uses the plan's field for storage itself."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        return SavePlan(plan.items, "the planner's", plan.planner_data)

    def finish_plan(self, new_plan):
        assert new_plan.storage_data == "the planner's"
        return super().finish_plan(new_plan)


HOW = ("sync", "async")
KINDS = (DefaultSavePlanner, Anew, Own)


def _state(value):
    return {"w": torch.full((3,), float(value)), "v": torch.full((5,), float(value)), "step": value}


def _own(rank, value):
    """A state of which each rank has a part, so that each writes an object."""
    return {f"mine{rank}": torch.full((4,), float(value)), **_state(value)}


def _save(how, state, store, **options):
    if how == "sync":
        return dcp.save(state, storage_writer=store, **options)
    return dcp.async_save(state, storage_writer=store, **options).result(timeout=LIMIT_S)


def _refused(how, state, store, **options):
    with pytest.raises(dcp.CheckpointException) as caught:
        _save(how, state, store, **options)
    return {"error": failure_of(caught.value, 0)}  # an exception by itself would pass for the rank's own


def _save_each(rank, bucket, paths, kind):
    return [_refused(how, _own(rank, 2), writer(bucket, paths[rank]), planner=kind()) for how in HOW]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_save_to_different_urls(faults, kind):
    """Both URLs and whose they are, on every rank; no byte is sent, or with plans of a planner's own nothing is committed."""
    bucket = bucket_on(faults)
    for path in ("a", "b"):
        dcp.save(_state(1), storage_writer=writer(bucket, path))
    before = bucket.keys()
    faults.clear(rules=False, state=False)
    told = run_ranks_ok(3, _save_each, bucket, ["a", "b", "a"], kind, timeout_s=2 * LIMIT_S)
    for error in (one["error"] for by_rank in told for one in by_rank):
        assert isinstance(error, ConfigError), error
        assert URLS in str(error)
        assert ("Nothing was sent" if kind is DefaultSavePlanner else "Nothing was committed") in str(error)
    sent = faults.requests("PutObject") + faults.requests("CreateMultipartUpload")
    assert all("/data/" in request.key for request in sent)
    if kind is DefaultSavePlanner:
        assert not sent
        assert bucket.keys() == before
    for path in ("a", "b"):
        assert_same(load(bucket, path, blank(_state(1))), _state(1))


def _one_url(rank, bucket):
    store = writer(bucket, ["a", "a/"][rank])
    for value, (how, kind) in enumerate(itertools.product(HOW, KINDS)):
        metadata = _save(how, _own(rank, value), store, planner=kind())
        assert_same(load(bucket, "a", blank(_own(rank, value))), _own(rank, value))
    return metadata


def test_one_url_in_two_forms(faults):
    """With and without a slash at its end it is one URL, whatever the planner does with the plans; nothing else is recorded."""
    bucket = bucket_on(faults)
    metadata, _ = run_ranks_ok(2, _one_url, bucket, timeout_s=2 * LIMIT_S)
    assert bucket.keys() == checkpoint_keys(bucket, "a", metadata)
    for info in metadata.storage_data.values():
        assert set(vars(info)) <= {"relative_path", "offset", "length", "transform_descriptors"}


def _cached(rank, bucket):
    """Places and plans change, each by itself."""

    def planner():
        return DefaultSavePlanner(enable_plan_caching=True)

    def state(value, extra):
        # the more rank 0 has for itself, the more of what both have is left to rank 1, whose own plan stays as it was
        first = {"extra": torch.full((extra,), 1.0)} if rank == 0 and extra else {}
        return first | _own(rank, value)

    saved = {}
    for value, (path, extra) in enumerate([("a", 0), ("b", 0), ("c", 1000), ("c", 0), ("d", 0), ("e", 50), ("a", 50)]):
        _save(HOW[value % 2], state(value, extra), writer(bucket, path), planner=planner())
        saved[path] = state(value, extra)
    for path, expected in saved.items():
        assert_same(load(bucket, path, blank(expected)), expected)
    told = [_refused(how, state(9, 50), writer(bucket, ["a", "b"][rank]), planner=planner()) for how in HOW]
    for path, expected in saved.items():
        assert_same(load(bucket, path, blank(expected)), expected)
    dcp.save(state(10, 50), storage_writer=writer(bucket, "b"), planner=planner())
    assert_same(load(bucket, "b", blank(state(10, 50))), state(10, 50))
    return told


def test_cached_plans(faults):
    """Plans that DCP has kept say nothing of a later save's URL: no good save is refused, and a bad one is not committed."""
    told = run_ranks_ok(2, _cached, bucket_on(faults), timeout_s=2 * LIMIT_S)
    for error in (one["error"] for by_rank in told for one in by_rank):
        assert isinstance(error, ConfigError)
        assert "rank 0: s3://bucket/a; rank 1: s3://bucket/b. Nothing was committed" in str(error)


def _alone(rank, bucket):
    state = _own(rank, rank)
    dcp.save(state, storage_writer=writer(bucket, f"rank-{rank}"), use_collectives=False)
    return dcp.save(state, storage_writer=writer(bucket, f"alone-{rank}"), no_dist=True)


def test_ranks_that_save_by_themselves(faults):
    """Without collectives, or without the group, each rank saves where it was told to."""
    bucket = bucket_on(faults)
    run_ranks_ok(2, _alone, bucket, timeout_s=2 * LIMIT_S)
    records = [key for key in bucket.keys("") if key.endswith(".metadata")]
    assert records == ["alone-0/.metadata", "alone-1/.metadata", "rank-0/__0.metadata", "rank-1/__1.metadata"]
