"""What a job with the least rights can do: put, get, head what is there, and multipart; a missing key is answered 403."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import AccessDeniedError, CheckpointExistsError, CheckpointNotFoundError
from tests.fault.server import MULTIPART, PROFILES, FaultServerProcess, error
from tests.integration.conftest import bucket_on
from tests.integration.support import assert_same, blank, failure_of, load, reader, writer
from tests.support.ranks import run_ranks_ok

ALLOWED = ("PutObject", "GetObject", "HeadObject", *MULTIPART)


@pytest.fixture
def least(faults):
    """A store that allows what the package's documentation asks for, and nothing else."""
    faults.configure(**PROFILES["least-privilege"])
    return faults


def _state(value):
    return {"big": torch.full((3 << 20,), float(value)), "small": torch.full((3,), float(value)), "step": value}


def _used(server):
    return {record.operation for record in server.log}


def test_save_and_load_by_id(least):
    """A new checkpoint, of one PUT or of parts, is saved and loaded by its id with no right to list, to look at or make buckets."""
    bucket = bucket_on(least)
    dcp.save(_state(1), storage_writer=writer(bucket, "run/step-1", part_bytes=5 << 20))
    dcp.save({"small": torch.ones(3)}, checkpoint_id=bucket.url("run/step-2"), storage_writer=writer(bucket))
    dcp.async_save(_state(3), storage_writer=writer(bucket, "run/step-3")).result()
    for step in (1, 3):
        assert_same(load(bucket, f"run/step-{step}", blank(_state(step))), _state(step))
    assert_same(load(bucket, "run/step-2", {"small": torch.zeros(3)}), {"small": torch.ones(3)})
    assert least.violations() == []
    assert _used(least) <= {"PutObject", "GetObject", "HeadObject", *MULTIPART}
    assert "UploadPart" in _used(least)


def test_replacing_without_the_right_to_delete(least, caplog):
    """A save over a checkpoint succeeds; that the old objects may not be deleted is logged, they stay, and nothing reads them."""
    bucket = bucket_on(least)
    first = dcp.save(_state(1), storage_writer=writer(bucket, "a"))
    old = set(least.objects("a/"))
    with caplog.at_level(logging.WARNING, logger="dcp_s3"):
        dcp.save(_state(2), storage_writer=writer(bucket, "a"))
    assert_same(load(bucket, "a", blank(_state(2))), _state(2))
    assert old < set(least.objects("a/"))
    told = [record.getMessage() for record in caplog.records if "could not delete" in record.getMessage()]
    (data,) = {info.relative_path for info in first.storage_data.values()}
    assert len(told) == 1
    assert f"a/{data}" in told[0]
    assert "AccessDenied" in told[0]
    # its data could not be deleted, so the index that names it stays for gc
    assert len(least.requests("DeleteObject")) == 1
    assert [line for line in least.violations() if "DeleteObject" not in line] == []


def _ranks(rank, buckets):
    for value in (1, 2):
        state = {"x": torch.full((4,), float(value)), f"mine-{rank}": torch.full((3,), float(rank))}
        dcp.save(state, storage_writer=writer(buckets[rank], "a"))
        assert_same(load(buckets[rank], "a", blank(state)), state)


def test_two_ranks(tmp_path):
    """Two ranks with the least rights save, save again and load; each sends only what it may."""
    with FaultServerProcess(allowed_operations=(*ALLOWED, "DeleteObject"), hide_missing=True) as server:
        run_ranks_ok(2, _ranks, [bucket_on(server, f"RANK{rank}") for rank in range(2)])
        assert server.violations() == []
        assert len(server.objects("a/")) == 4  # record, index, an object of each rank: what was replaced is gone


def test_a_record_that_may_not_be_read(least):
    """A bare AccessDenied on reading .metadata is no checkpoint for a load, and means absent for a save: the store's own condition then
    keeps an unseen checkpoint from being overwritten.
    """
    bucket = bucket_on(least)
    with pytest.raises(CheckpointNotFoundError, match="there is none, or reading it is not permitted") as denied:
        reader(bucket, "a").read_metadata()
    assert (denied.value.status, denied.value.code, denied.value.key) == (403, "AccessDenied", "a/.metadata")
    with pytest.raises(dcp.CheckpointException, match="or reading it is not permitted"):
        load(bucket, "a", {"x": torch.zeros(3)})

    state = {"x": torch.ones(3)}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    (commit,) = [r for r in least.requests("PutObject", key=r"\.metadata$") if r.status == 200]
    assert commit.headers["if-none-match"] == "*"
    # now one is there, and the right to see it is taken away
    before = least.read("a/.metadata")
    rule = least.on("GetObject", error(403, "AccessDenied"), key=r"\.metadata$")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"x": torch.zeros(3)}, storage_writer=writer(bucket, "a"))
    hidden = failure_of(caught.value, 0)
    assert isinstance(hidden, CheckpointExistsError)
    assert "may not read" in str(hidden)
    assert least.read("a/.metadata") == before
    rule.remove()
    assert_same(load(bucket, "a", blank(state)), state)


@pytest.mark.parametrize("conditional_put", ["ignore", "refuse"])
def test_neither_sight_nor_conditions(least, conditional_put):
    """Where the record may not be read and the store honours no condition, a save is refused before any data is sent, and leaves nothing
    if it may delete.
    """
    least.configure(conditional_put=conditional_put, allowed_operations=(*ALLOWED, "DeleteObject"))
    bucket = bucket_on(least, name=conditional_put)
    for settings in ({}, {"conditional_commit": "off"}):
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(_state(1), storage_writer=writer(bucket, "a", **settings))
        unseen = failure_of(caught.value, 0)
        assert isinstance(unseen, AccessDeniedError)
        assert "could be overwritten unseen; allow GetObject and ListBucket" in str(unseen)
        assert least.requests(("PutObject", "UploadPart"), key="/data/") == []
        assert least.requests("PutObject", key=r"\.metadata$") == []
    assert least.objects(bucket=conditional_put) == {}
    assert least.violations() == []


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_other_refusals_are_not_taken_for_absence(least, code):
    """Only a bare AccessDenied may mean that there is nothing: wrong credentials say so, at save and at load."""
    bucket = bucket_on(least)
    least.on("GetObject", error(403, code))
    with pytest.raises(AccessDeniedError, match=code):
        reader(bucket, "a").read_metadata()
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_state(1), storage_writer=writer(bucket, "a"))
    assert failure_of(caught.value, 0).code == code
    assert least.objects() == {}


def test_a_job_that_may_only_read(least):
    """With GetObject alone a checkpoint loads; a save is told what it may not do, and leaves nothing."""
    bucket = bucket_on(least)
    dcp.save(_state(1), storage_writer=writer(bucket, "a"))
    before = set(least.objects())
    least.configure(allowed_operations=("GetObject",))
    least.clear(rules=False, state=False)
    assert_same(load(bucket, "a", blank(_state(1))), _state(1))
    assert _used(least) == {"GetObject"}
    for path in ("a", "b"):
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(_state(2), storage_writer=writer(bucket, path))
        denied = failure_of(caught.value, 0)
        assert isinstance(denied, AccessDeniedError)
        assert "check the policy" in str(denied)
    assert set(least.objects()) == before
