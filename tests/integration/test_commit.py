"""The commit: one PUT makes a checkpoint true, whatever becomes of its reply; and nobody's checkpoint is overwritten unseen."""

from __future__ import annotations

import concurrent.futures
import logging
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from botocore.exceptions import ClientError
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_s3 import (
    CheckpointExistsError,
    CommitConflictError,
    DeadlineExceededError,
    RetryPolicy,
    StorageError,
    StorageUnavailableError,
)
from dcp_s3._checkpoint.format.index import Index
from tests.fault.server import (
    PROFILES,
    FaultServerProcess,
    delay,
    drop_reply,
    error,
    never_answer,
    reset,
)
from tests.integration.conftest import bucket_on
from tests.integration.support import assert_same, blank, checkpoint_keys, failure_of, load, reader, wait_until, writer
from tests.servers import fresh_bucket
from tests.support.ranks import run_ranks_ok

RECORD = r"\.metadata$"
QUICK = RetryPolicy(initial_wait_s=0.01, max_wait_s=0.05)


def _state(value):
    return {"w": torch.full((1000,), float(value)), "step": value}


def _save(bucket, value, path="a", *, overwrite=True, planner=None, **settings):
    store = writer(bucket, path, overwrite=overwrite, **{"retry": QUICK, **settings})
    return dcp.save(_state(value), storage_writer=store, planner=planner, no_dist=True)


def _failed_save(bucket, value, **options):
    with pytest.raises(dcp.CheckpointException) as caught:
        _save(bucket, value, **options)
    return failure_of(caught.value, 0)


def _loaded(bucket, path="a"):
    """Return the value of the one checkpoint that all of a loaded state belongs to."""
    state = load(bucket, path, blank(_state(0)), no_dist=True)
    assert_same(state, _state(state["step"]))
    return state["step"]


def _held(server, path="a"):
    return sorted(server.objects(f"{path}/"))


@pytest.fixture(params=["new", "replacing"])
def seen(request, faults):
    """The value of the checkpoint that is there before the save that is tested; None: there is none."""
    if request.param == "new":
        return None
    _save(bucket_on(faults), 1)
    return 1


# ---------------------------------------------------------------------------------------------------- lost replies


@pytest.mark.parametrize("how", ["close", "reset", "500", "503", "silence"])
def test_the_reply_is_lost_but_the_record_is_there(faults, seen, how):
    """The PUT of the record was done and its reply lost: the record is read back, found to be ours, and the save is a success."""
    bucket = bucket_on(faults)
    action = {
        "close": drop_reply("close"),
        "reset": drop_reply("reset"),
        "500": error(500, "InternalError", at="reply"),
        "503": error(503, "SlowDown", at="reply"),
        "silence": never_answer(commit=True),
    }[how]
    rule = faults.on("PutObject", action, key=RECORD, times=1)
    metadata = _save(bucket, 2, read_timeout_s=1.0)
    assert rule.fired == 1
    assert len(faults.requests("PutObject", key=RECORD)) == (1 if seen is None else 2)  # never a second PUT of ours
    assert _loaded(bucket) == 2
    assert _held(faults) == checkpoint_keys(bucket, "a", metadata)  # what was replaced is gone as ever


@pytest.mark.parametrize("how", ["500", "503", "reset", "409"])
def test_the_record_never_arrived(faults, seen, how):
    """The PUT of the record failed and nothing has changed: the identical conditional PUT is repeated, and then is done."""
    bucket = bucket_on(faults)
    action = {
        "500": error(500, "InternalError"),
        "503": error(503, "SlowDown"),
        "reset": reset(),
        "409": error(409, "ConditionalRequestConflict"),
    }[how]
    rule = faults.on("PutObject", action, key=RECORD, times=3)
    before = len(faults.requests("PutObject", key=RECORD))
    _save(bucket, 2)
    sent = faults.requests("PutObject", key=RECORD)[before:]
    assert (rule.fired, len(sent)) == (3, 4)
    conditions = {(r.headers.get("if-match"), r.headers.get("if-none-match")) for r in sent}
    assert len(conditions) == 1
    assert (None, None) not in conditions
    assert _loaded(bucket) == 2


def _set_deadline(monkeypatch, seconds):
    """Give the saves of this process a deadline without a config of its own, for which clients would have to be made first."""
    monkeypatch.setattr("dcp_s3.writer.deadline_s", lambda configured, name: seconds)


def test_the_outcome_stays_unknown(faults, monkeypatch):
    """A store that fails until the deadline leaves the outcome open, and the error says so; no data of the save is deleted, and
    what was there before still loads.
    """
    bucket = bucket_on(faults)
    _save(bucket, 1, path="old")
    _set_deadline(monkeypatch, 2.5)
    faults.on("PutObject", error(500, "InternalError"), key=RECORD)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        saves = {path: pool.submit(_failed_save, bucket, 2, path=path) for path in ("new", "old")}
    for path, save in saves.items():
        unknown = save.result()
        assert isinstance(unknown, StorageUnavailableError)
        assert "commit outcome unknown" in str(unknown)
        assert (unknown.operation, unknown.key) == ("PutObject", f"{path}/.metadata")
        assert unknown.attempts > 1
    assert faults.requests("DeleteObject") == []
    assert [len(faults.objects(f"{path}/data/")) for path in saves] == [1, 2]
    assert _loaded(bucket, "old") == 1


def test_a_record_that_lands_late(faults, seen):
    """A PUT that was answered 503 and is carried out later is found at the next look: success, and no conflict with itself."""
    bucket = bucket_on(faults)
    late = faults.hold("PutObject", key=RECORD, at="late", then=error(503, "SlowDown"), times=1)
    blocked = faults.on("PutObject", error(503, "SlowDown"), key=RECORD)

    def land():
        late.wait_arrived()
        before = len(faults.requests("GetObject", key=RECORD))
        faults.wait_for("GetObject", key=RECORD, count=before + 1)
        late.release()
        wait_until(lambda: ".metadata" in str(_held(faults)) and _loaded(bucket) == 2, "the late PUT is done")
        blocked.remove()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        landing = pool.submit(land)
        _save(bucket, 2)
        landing.result()
    assert _loaded(bucket) == 2


# ---------------------------------------------------------------------------------------------------- other writers


class _Meanwhile(DefaultSavePlanner):
    """Does something while a save is under way, when it has looked and has not committed."""

    def __init__(self, action):
        super().__init__()
        self._action = action

    def resolve_data(self, write_item):
        if self._action is not None:
            action, self._action = self._action, None
            action()
        return super().resolve_data(write_item)


def test_another_writer_commits_in_between(endpoint, bucket):
    """Of two saves that saw the same state the first to commit stands and loads whole; the other one gets CommitConflictError.

    On each real store: on Ceph RGW with ETags in its own form.
    """
    for path, seen in (("new", None), ("old", 1)):
        if seen is not None:
            _save(bucket, seen, path)
        conflict = _failed_save(bucket, 3, path=path, planner=_Meanwhile(lambda path=path: _save(bucket, 2, path)))
        assert isinstance(conflict, CommitConflictError)
        assert "what is there now stands" in str(conflict)
        assert (conflict.key, conflict.bucket) == (bucket.key(f"{path}/.metadata"), bucket.name)
        assert _loaded(bucket, path) == 2
        _save(bucket, 4, path)
        assert _loaded(bucket, path) == 4


def test_another_writer_commits_between_two_attempts(faults, seen):
    """When the first PUT of the record failed and another's is there at the next look, that one stands."""
    bucket = bucket_on(faults)
    gate = faults.hold("PutObject", key=RECORD, then=error(500, "InternalError"), times=1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        saving = pool.submit(_failed_save, bucket, 3)
        gate.wait_arrived()
        _save(bucket, 2)
        gate.release()
        conflict = saving.result()
    assert isinstance(conflict, CommitConflictError)
    assert _loaded(bucket) == 2


def test_the_checkpoint_goes_away_in_between(faults):
    """A save that set out to replace a checkpoint does not commit over its absence: somebody deleted it meanwhile."""
    bucket = bucket_on(faults)
    _save(bucket, 1)
    conflict = _failed_save(bucket, 2, planner=_Meanwhile(lambda: faults.delete("a/.metadata")))
    assert isinstance(conflict, CommitConflictError)
    assert "wrote or deleted" in str(conflict)
    assert "a/.metadata" not in _held(faults)


def test_many_writers_and_one_url(endpoint, bucket):
    """Of four saves that all looked before any committed exactly one succeeds, and what loads is that one's, whole."""
    together = threading.Barrier(4)

    def save(value):
        try:
            _save(bucket, value, planner=_Meanwhile(lambda: together.wait(timeout=60)))
        except dcp.CheckpointException as failed:
            return failure_of(failed, 0)
        return value

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(save, range(4)))
    winners = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(winners) == 1, outcomes
    assert all(isinstance(outcome, CommitConflictError) for outcome in outcomes if outcome not in winners), outcomes
    assert _loaded(bucket) == winners[0]


def _no_overwrite(rank, bucket):
    store = writer(bucket, "a", overwrite=False)
    failures = []
    for _ in range(2):
        try:
            dcp.save({"x": torch.full((5,), float(rank)), "more": torch.ones(1 << 19)}, storage_writer=store)
        except dcp.CheckpointException as failed:
            failures.append(failed.failures)
    return failures


def test_overwrite_false(faults):
    """overwrite=False on an existing checkpoint is CheckpointExistsError on every rank, before any rank sends a byte."""
    for failures in run_ranks_ok(2, _no_overwrite, bucket_on(faults)):
        ((rank, (exists, _)),) = failures[0].items()
        assert rank == 0
        assert isinstance(exists, CheckpointExistsError)
        assert "overwrite=False" in str(exists)
        assert len(failures) == 1  # the first save was fine
    data = faults.requests(("PutObject", "UploadPart"), key="/data/")
    commits = faults.requests("PutObject", key=RECORD)
    assert len(commits) == 1
    assert all(request.t_start < commits[0].t_start for request in data)


# ---------------------------------------------------------------------------------------------------- time


def test_nothing_is_committed_past_the_deadline(faults, seen, monkeypatch):
    """A save that is late when everything is uploaded sends no record: it fails, and what was there before stays."""
    bucket = bucket_on(faults)
    _save(bucket, 9, path="warm")
    before = len(faults.requests("PutObject", key=f"a/{RECORD}"))
    _set_deadline(monkeypatch, 2.0)
    faults.on("PutObject", delay(reply_s=2.5), key="a/index")
    late = _failed_save(bucket, 2)
    assert isinstance(late, DeadlineExceededError)
    assert "the deadline of 2 s passed" in str(late)
    assert len(faults.requests("PutObject", key="a/index")) > before
    assert len(faults.requests("PutObject", key=f"a/{RECORD}")) == before
    assert ("a/.metadata" in _held(faults)) == (seen is not None)
    if seen is not None:
        assert _loaded(bucket) == seen


# ---------------------------------------------------------------------------------------------------- what stores honour


LACKING = {
    "ignores-conditions": "If-None-Match and If-Match",
    "refuses-conditions": "If-None-Match and If-Match",
    "ignores-if-match": "If-Match",
    "refuses-if-match": "If-Match",
}


@pytest.mark.parametrize("profile", ["aws", "ceph", *LACKING])
@pytest.mark.parametrize("mode", ["auto", "required", "off"])
def test_modes_and_stores(faults, profile, mode, caplog):
    """auto: conditional as far as the store honours it, else with a warning; required: refused elsewhere, before data is sent, and
    nothing is left of that; off: never.
    """
    faults.configure(**PROFILES[profile])
    bucket = bucket_on(faults, name=f"{profile}-{mode}")
    lacking = LACKING.get(profile)
    if mode == "required" and lacking is not None:
        for _ in range(2):
            refused = _failed_save(bucket, 1, conditional_commit=mode)
            assert isinstance(refused, StorageError)
            assert f"does not honour {lacking} and conditional_commit='required'" in str(refused)
        assert faults.requests(("PutObject", "UploadPart"), key="/data/") == []
        assert faults.requests("PutObject", key=RECORD) == []
        assert len(faults.requests("DeleteObject")) == 1  # what the probe needed; the second save knew
        assert faults.objects(bucket=bucket.name) == {}
        return
    with caplog.at_level(logging.WARNING, logger="dcp_s3"):
        for value in (1, 2):
            metadata = _save(bucket, value, conditional_commit=mode)
            assert _loaded(bucket) == value
    kept = set(faults.objects("a/", bucket=bucket.name)) - set(checkpoint_keys(bucket, "a", metadata))
    # a PUT of the first record without a condition might yet arrive: what it names is left to gc
    assert len(kept) == (0 if mode != "off" and lacking is None else 2)
    sent = [
        (r.headers.get("if-none-match"), r.headers.get("if-match")) for r in faults.requests("PutObject", key=RECORD)
    ]
    etags = [r.reply_headers["etag"] for r in faults.requests("PutObject", key=RECORD)]
    match = etags[0].strip('"') if profile == "ceph" else etags[0]
    create = mode != "off" and lacking != "If-None-Match and If-Match"
    assert sent == [("*" if create else None, None), (None, match if create and lacking is None else None)]
    warned = [record.getMessage() for record in caplog.records if "may overwrite each other" in record.getMessage()]
    assert bool(warned) == (mode == "auto" and lacking is not None)
    assert all(f"the store does not honour {lacking}: two writers" in text for text in warned)


@pytest.mark.parametrize("profile", LACKING)
def test_without_conditions_the_loser_hears_of_it(faults, profile):
    """On a store without conditions the record is read back: a save whose record was overwritten meanwhile is no success. So it is
    where only If-Match is lacking, and the save replaces a checkpoint.
    """
    faults.configure(**PROFILES[profile])
    bucket = bucket_on(faults, name=profile)
    if LACKING[profile] == "If-Match":
        _save(bucket, 0)
    gate = faults.hold("PutObject", key=RECORD, at="reply", nth=1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        saving = pool.submit(_failed_save, bucket, 1)
        gate.wait_arrived()
        _save(bucket, 2)
        gate.release()
        conflict = saving.result()
    assert isinstance(conflict, CommitConflictError)
    assert _loaded(bucket) == 2


def test_a_real_store_that_wants_bare_etags(ceph_rgw):
    """On Ceph RGW, which compares If-Match with the bare ETag, saves replace each other under the condition, and a stale one does not."""
    with fresh_bucket(ceph_rgw) as bucket:
        for value in (1, 2, 3):
            _save(bucket, value, conditional_commit="required")
            assert _loaded(bucket) == value
        stale = _failed_save(
            bucket,
            5,
            conditional_commit="required",
            planner=_Meanwhile(lambda: _save(bucket, 4, conditional_commit="required")),
        )
        assert isinstance(stale, CommitConflictError)
        assert _loaded(bucket) == 4
        assert len([key for key in bucket.keys("a") if key.endswith(".json")]) == 2  # the stale one's stays for gc


# ---------------------------------------------------------------------------------------------------- what a record promises


def _three_ranks(rank, buckets):
    mesh = init_device_mesh("cpu", (3,))
    for value in (1, 2):
        whole = torch.full((3 * 1408, 1024), float(value))
        state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": value}
        dcp.save(state, storage_writer=writer(buckets[rank], "a", part_bytes=5 << 20))


def test_what_a_record_names_is_there():
    """From the first moment at which a record can be read, every object of its index is there with its size, though one rank's last part
    is slow: polled during a first save and a replacing one, in which also the old record's objects are there as long as it is.
    """
    with FaultServerProcess() as server:
        server.on("UploadPart", delay(0.7), access_key="RANK2", part=2)
        place = bucket_on(server, "POLL")
        done = threading.Event()
        found = []

        def poll():
            client = place.endpoint.client()
            while not done.wait(0.01):
                try:
                    record = client.get_object(Bucket=place.name, Key="a/.metadata")
                except ClientError:
                    continue
                write_id = record["Metadata"]["dcp-s3-write-id"]
                try:
                    index = client.get_object(Bucket=place.name, Key=f"a/index-{write_id}.safetensors.gz")
                    entries = Index.from_bytes(index["Body"].read(), source="index").objects
                    sizes = [
                        client.head_object(Bucket=place.name, Key=f"a/{entry.key}")["ContentLength"]
                        for entry in entries
                    ]
                except ClientError as missing:
                    again = client.get_object(Bucket=place.name, Key="a/.metadata")
                    found.append((write_id, again["Metadata"]["dcp-s3-write-id"] != write_id or missing))
                    continue
                found.append((write_id, sizes == [entry["size"] for entry in entries] and len(entries) == 3))
            client.close()

        polling = threading.Thread(target=poll)
        polling.start()
        try:
            run_ranks_ok(3, _three_ranks, [bucket_on(server, f"RANK{rank}") for rank in range(3)])
            wait_until(lambda: len({write_id for write_id, _ in found}) == 2, "both checkpoints were seen")
        finally:
            done.set()
            polling.join()
        assert {whole for _, whole in found} == {True}
        slow = server.requests("UploadPart", access_key="RANK2", part=2)
        commits = server.requests("PutObject", key=RECORD)
        assert len(slow) == len(commits) == 2
        for part, commit in zip(slow, commits, strict=True):
            assert part.t_end < commit.t_start
        reader(place, "a").read_metadata()
