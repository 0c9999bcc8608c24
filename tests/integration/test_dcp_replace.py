"""Saving over a checkpoint: it is replaced whole or not at all, and the ranks of one load never see two."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_s3 import CheckpointExistsError, CheckpointReplacedError, DcpS3Error, S3StorageReader
from tests.integration.support import (
    LIMIT_S,
    assert_same,
    blank,
    checkpoint_keys,
    failure_of,
    load,
    reader,
    wait_until,
    writer,
)
from tests.support.ranks import run_ranks, run_ranks_ok

ROWS = 1 << 18
"""Rows of 4 float32 that a rank holds of each tensor: 4 MiB, so that three of them open a multipart upload."""


def _state(value, names="abcde", rows=ROWS):
    """On each rank its rows of tensors that have a value all over; without a group, the whole tensors."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tensors = {name: torch.full((rows, 4), float(value)) for name in names}
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        tensors = {name: DTensor.from_local(mine, mesh, [Shard(0)], run_check=False) for name, mine in tensors.items()}
    return tensors | {"step": value}


def _fewer_ranks(rank, bucket):
    dcp.save(_state(1, rows=50), storage_writer=writer(bucket, "a"))


def test_replaced_whole(endpoint, bucket):
    """A save replaces a checkpoint of more ranks and other keys whole: the bucket then holds exactly the new one's objects.

    What others have put under the url, and a checkpoint below it, stay.
    """
    dcp.save(_state(7, rows=5), storage_writer=writer(bucket, "a/best"))
    bucket.put("a/events.log", b"somebody else's")
    others = bucket.keys()
    run_ranks_ok(2, _fewer_ranks, bucket, timeout_s=2 * LIMIT_S)
    assert len(bucket.keys()) == len(others) + 4
    saved = _state(2, "abx", rows=50)
    metadata = dcp.save(saved, storage_writer=writer(bucket, "a"))
    assert bucket.keys() == sorted([*others, *checkpoint_keys(bucket, "a", metadata)])
    assert_same(load(bucket, "a", blank(saved)), saved)
    assert_same(load(bucket, "a/best", blank(_state(7, rows=5))), _state(7, rows=5))
    assert bucket.uploads() == []


def _careful(rank, bucket, value):
    dcp.save(_state(value), storage_writer=writer(bucket, "a", overwrite=False))


def test_overwrite_refused(endpoint, bucket):
    """overwrite=False makes a new checkpoint, and over an existing one fails on every rank before any data is uploaded."""
    assert run_ranks_ok(2, _careful, bucket, 1, timeout_s=2 * LIMIT_S) == [None, None]
    before = bucket.keys()
    for outcome in run_ranks(2, _careful, bucket, 2, timeout_s=2 * LIMIT_S):
        error = failure_of(outcome, 0)
        assert type(error) is CheckpointExistsError
        assert bucket.url("a") in str(error)
        assert (error.rank, error.key) == (0, bucket.key("a/.metadata"))
    assert bucket.keys() == before
    assert bucket.uploads() == []
    whole = {name: torch.ones(2 * ROWS, 4) for name in "abcde"} | {"step": 1}
    assert_same(load(bucket, "a", blank(whole)), whole)


class Foreign(Exception):
    """An exception of a user's that survives no pickling."""

    def __init__(self, *, reason):
        super().__init__(reason)


class _Failing(DefaultSavePlanner):
    """Raises on one rank when the third of five tensors is resolved and the upload of the first two is open."""

    def __init__(self, bucket, rank, error):
        super().__init__()
        self._bucket = bucket
        self._rank = rank
        self._error = error

    def resolve_data(self, write_item):
        if write_item.index.fqn == "c" and self._rank == (dist.get_rank() if dist.is_initialized() else 0):
            mine = f"__{self._rank}_0.distcp"
            wait_until(lambda: any(key.endswith(mine) for key in self._bucket.uploads()), "an upload is open")
            raise self._error
        return super().resolve_data(write_item)


def _fails_half_way(rank, bucket):
    store = writer(bucket, "a", part_bytes=5 << 20)
    dcp.save(_state(1), storage_writer=store)
    failures = []
    for error in (ZeroDivisionError("tensor", 3), Foreign(reason="tensor 3 of 5")):
        begin = time.monotonic()
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(_state(2), storage_writer=store, planner=_Failing(bucket, 1, error))
        assert time.monotonic() - begin < LIMIT_S
        assert list(caught.value.failures) == [1]
        failures.append(failure_of(caught.value, 1))
        assert_same(load(bucket, "a", blank(_state(1))), _state(1))
    dist.barrier()
    open_uploads = bucket.uploads()
    dist.barrier()
    metadata = dcp.save(_state(3), storage_writer=store)
    assert_same(load(bucket, "a", blank(_state(3))), _state(3))
    return failures, open_uploads, metadata


def test_a_rank_fails_half_way(bucket):
    """When write_data raises on one rank, every rank is told the original error, the old checkpoint loads, and no upload stays open.

    An error that cannot be sent to the other ranks is told by its text; nobody waits for it. The save can be repeated.
    """
    results = run_ranks_ok(2, _fails_half_way, bucket, timeout_s=2 * LIMIT_S)
    for (original, foreign), open_uploads, _ in results:
        assert type(original) is ZeroDivisionError
        assert original.args == ("tensor", 3)
        assert type(foreign) is DcpS3Error
        assert foreign.rank == 1
        assert "Foreign: tensor 3 of 5" in str(foreign)
        assert open_uploads == []
    assert set(checkpoint_keys(bucket, "a", results[0][-1])) <= set(bucket.keys())


def test_it_fails_half_way_without_a_group(bucket):
    """Without a group the original error is what the save's CheckpointException holds, and nothing of the save can be seen."""
    error = ZeroDivisionError("tensor", 3)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_state(1), storage_writer=writer(bucket, "a", part_bytes=5 << 20), planner=_Failing(bucket, 0, error))
    assert failure_of(caught.value, 0) is error
    assert bucket.uploads() == []
    assert not [key for key in bucket.keys("a") if key.endswith((".metadata", ".distcp"))]


def test_it_fails_while_an_upload_is_created(bucket):
    """A save that fails while CreateMultipartUpload is on its way leaves no upload open either."""

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if write_item.index.fqn == "c":
                raise ZeroDivisionError("at once")
            return super().resolve_data(write_item)

    store = writer(bucket, "a", part_bytes=5 << 20)
    for _ in range(5):
        with pytest.raises(dcp.CheckpointException):
            dcp.save(_state(1), storage_writer=store, planner=Failing())
    assert bucket.uploads() == []


class _Between(S3StorageReader):
    """Rank 1 replaces the checkpoint when rank 0 has read its record, before or after it has read its own."""

    def __init__(self, bucket, when, directory):
        super().__init__(bucket.url("a"), config=bucket.endpoint.config())
        self._replace = lambda: dcp.save(_whole(2), storage_writer=writer(bucket, "a"), no_dist=True)
        self._when = when
        self._directory = directory

    def read_metadata(self, *args, **kwargs):
        if dist.get_rank() == 1 and self._when == "before":
            self._wait("read")
            self._replace()
        metadata = super().read_metadata(*args, **kwargs)
        if dist.get_rank() == 0:
            (self._directory / "read").touch()
        return metadata

    def read_data(self, plan, planner):
        # past the plan's collectives: both have read the record
        if self._when == "after":
            if dist.get_rank() == 1:
                self._replace()
                (self._directory / "replaced").touch()
            self._wait("replaced")
        return super().read_data(plan, planner)

    def _wait(self, name):
        deadline = time.monotonic() + LIMIT_S
        while not (self._directory / name).exists():
            assert time.monotonic() < deadline, f"not {name} in time"
            time.sleep(0.01)


def _whole(value):
    return {name: torch.full((2 * ROWS, 4), float(value)) for name in "ab"} | {"step": value}


def _load_amid_a_replacement(rank, bucket, when, directory):
    template = blank(_state(1, "ab"))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(template, storage_reader=_Between(bucket, when, directory))
    dcp.load(template, storage_reader=reader(bucket, "a"))
    assert_same(template, _state(2, "ab"))
    return {failing: wrapped[0] for failing, wrapped in caught.value.failures.items()}


@pytest.mark.parametrize(
    "when, failing, text",
    [
        ("before", [0], "was replaced while the ranks read it: they saw different checkpoints"),
        ("after", [0, 1], "was replaced or deleted while it was read"),
    ],
    ids=["before", "after"],
)
def test_replaced_while_it_is_loaded(bucket, tmp_path, when, failing, text):
    """Ranks of one load never read two checkpoints: one that is replaced meanwhile fails the load on all, and it can be repeated.

    So it is when the ranks' records differ (the coordinator sees it), and when the data of the record that they read are gone.
    """
    dcp.save(_whole(1), storage_writer=writer(bucket, "a"))
    outcomes = run_ranks_ok(2, _load_amid_a_replacement, bucket, when, tmp_path, timeout_s=2 * LIMIT_S)
    for failures in outcomes:
        assert sorted(failures) == failing
        for error in failures.values():
            assert type(error) is CheckpointReplacedError
            assert f"{bucket.url('a')} {text}; load again" in str(error)
    assert_same(load(bucket, "a", blank(_whole(2))), _whole(2))
