"""Wrong settings raise at once, wrong places and refusals with clear texts; and a store's error on one rank ends every rank in time."""

from __future__ import annotations

import socket
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import (
    AccessDeniedError,
    CheckpointNotFoundError,
    ConfigError,
    DeadlineExceededError,
    RetryPolicy,
    S3Config,
    S3StorageReader,
    S3StorageWriter,
    StorageError,
    StorageUnavailableError,
)
from tests.fault.server import FaultServer, FaultServerProcess, error, never_answer
from tests.integration.conftest import bucket_on
from tests.integration.support import failure_of, load, reader, writer
from tests.servers import Bucket, Endpoint
from tests.support.ranks import run_ranks_ok

STATE = {"w": torch.ones(10)}
REFUSALS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")


def _failed_save(bucket, path="a", **settings):
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(STATE, storage_writer=writer(bucket, path, **settings))
    return failure_of(caught.value, 0)


# ---------------------------------------------------------------------------------------------------- before any request


@pytest.mark.parametrize(
    "url, what",
    [
        ("bucket/a", "must look like s3://bucket/prefix"),
        ("/local/path", "must look like s3://bucket/prefix"),
        ("gs://bucket/a", "must look like s3://bucket/prefix"),
        ("https://host/bucket/a", "must look like s3://bucket/prefix"),
        ("s3://", "must look like s3://bucket/prefix"),
        ("s3:///a", "must look like s3://bucket/prefix"),
        ("s3://buc ket/a", "no valid bucket name"),
        ("s3://bucket//a", "empty path segment"),
        ("s3://bucket/a/../b", "'..' segment"),
        ("s3://bucket/a?versionId=1", "query"),
        ("s3://bucket/" + "a" * 1000, "at most 960"),
    ],
)
def test_urls_that_are_none(url, what):
    """A URL that cannot be one is refused where it is given, with what is wrong about it."""
    for kind in (S3StorageWriter, S3StorageReader):
        with pytest.raises(ConfigError, match=what.replace("'..'", r"'\.\.'").replace("?", r"\?")):
            kind(url)


@pytest.mark.parametrize(
    "settings, what",
    [
        ({"part_bytes": (5 << 20) - 1}, "part_bytes must be 0 .* or 5 MiB to 1 GiB"),
        ({"part_bytes": (1 << 30) + 1, "memory_bytes": 4 << 30}, "part_bytes must be 0 .* or 5 MiB to 1 GiB"),
        ({"part_bytes": -1}, "part_bytes must be"),
        ({"part_bytes": 20 << 20, "memory_bytes": 32 << 20}, "at least twice part_bytes"),
        ({"memory_bytes": 1 << 20}, "memory_bytes must be 32 MiB or more"),
        ({"addressing_style": "dns"}, "addressing_style must be one of 'auto', 'path', 'virtual', got 'dns'"),
        ({"checksum": "md5"}, "checksum must be one of"),
        ({"conditional_commit": "maybe"}, "conditional_commit must be one of"),
        ({"endpoint_url": "localhost:9000"}, "endpoint_url must look like"),
        ({"endpoint_url": "http://host/bucket"}, "must not have a path"),
        ({"access_key_id": "only"}, "go together"),
        ({"save_deadline_s": 0}, "save_deadline_s must be more than 0"),
        ({"max_concurrency": 0}, "max_concurrency must be 1 to 256"),
    ],
)
def test_settings_that_cannot_be(settings, what):
    """A setting out of its range is refused where it is given, with its name, the range and the value."""
    with pytest.raises(ConfigError, match=what):
        S3Config(**settings)
    with pytest.raises(ConfigError, match="must be an S3Config, got dict"):
        S3StorageWriter("s3://bucket/a", config=settings)


# ---------------------------------------------------------------------------------------------------- real stores


def test_places_that_are_not_there(endpoint, bucket):
    """A bucket or a checkpoint that does not exist is said to be missing, by its name, at save and at load."""
    with pytest.raises(
        CheckpointNotFoundError, match=f"no checkpoint at {bucket.url('step-7')}: .*there is none"
    ) as none:
        reader(bucket, "step-7").read_metadata()
    assert (none.value.bucket, none.value.key, none.value.status) == (bucket.name, bucket.key("step-7/.metadata"), 404)
    if endpoint.bucket is not None:
        return  # permission may end at the given bucket
    absent = Bucket(endpoint=endpoint, name=f"{bucket.name}-absent")
    missing = _failed_save(absent)
    assert isinstance(missing, StorageError)
    assert (missing.status, missing.code, missing.bucket) == (404, "NoSuchBucket", absent.name)
    assert "create the bucket" in str(missing)
    with pytest.raises(dcp.CheckpointException, match="NoSuchBucket"):
        load(absent, "a", {"w": torch.zeros(10)})


def test_credentials_that_are_wrong(endpoint, bucket):
    """An unknown key and a wrong secret are AccessDeniedErrors with the store's code, at save and at load; nothing is left."""
    dcp.save(STATE, storage_writer=writer(bucket, "good"))
    before = bucket.keys()
    for code, settings in {
        "InvalidAccessKeyId": {"access_key_id": "NOBODYKNOWSTHISKEYID"},
        "SignatureDoesNotMatch": {"secret_access_key": "not-the-secret"},
    }.items():
        denied = _failed_save(bucket, **settings)
        assert isinstance(denied, AccessDeniedError)
        assert (denied.status, denied.code, denied.operation) == (403, code, "GetObject")
        with pytest.raises(AccessDeniedError, match=code):
            reader(bucket, "good", **settings).read_metadata()
        with pytest.raises(dcp.CheckpointException, match=code):
            dcp.load({"w": torch.zeros(10)}, storage_reader=reader(bucket, "good", **settings))
    assert bucket.keys() == before
    assert bucket.uploads() == []


# ---------------------------------------------------------------------------------------------------- the scripted store


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_costs_one_request(faults, code):
    """Refused credentials are not tried again: a save sends one request, and so does a load, DCP's second try included."""
    bucket = bucket_on(faults)
    dcp.save(STATE, storage_writer=writer(bucket, "a"))
    before = faults.objects()
    faults.configure(key_errors={"BAD": code})
    refused = bucket_on(faults, "BAD")
    denied = _failed_save(refused)
    assert isinstance(denied, AccessDeniedError)
    assert denied.code == code
    assert len(faults.requests(access_key="BAD")) == 1
    faults.clear(rules=False, state=False)
    with pytest.raises(dcp.CheckpointException, match=code):
        load(refused, "a", {"w": torch.zeros(10)})
    assert len(faults.requests(access_key="BAD")) == 1
    assert faults.objects() == before


def test_a_refusal_that_comes_with_the_data(faults):
    """Credentials that are refused from the first data object on: that one request is the last but for the clean-up."""
    bucket = bucket_on(faults)
    faults.on("PutObject", error(403, "AccessDenied"), key="/data/")
    denied = _failed_save(bucket)
    assert isinstance(denied, AccessDeniedError)
    assert (denied.operation, denied.rank) == ("PutObject", 0)
    assert len(faults.requests("PutObject", key="/data/")) == 1
    assert faults.objects() == {}


def test_nobody_listens():
    """An endpoint that refuses connections ends save and load by the deadline, with how often it was tried."""
    with FaultServer() as server:
        bucket = bucket_on(server)
        settings = {"save_deadline_s": 2.0, "load_deadline_s": 2.0, "retry": RetryPolicy(max_attempts=1000)}
        dcp.save(STATE, storage_writer=writer(bucket, "a", **settings))
        server.go_offline()
        started = time.monotonic()
        unreachable = _failed_save(bucket, **settings)
        assert isinstance(unreachable, DeadlineExceededError)
        assert unreachable.attempts > 1
        assert "the deadline of 2 s passed" in str(unreachable)
        assert time.monotonic() - started < 6
        started = time.monotonic()
        with pytest.raises(dcp.CheckpointException, match=r"the deadline of 2 s passed"):
            dcp.load({"w": torch.zeros(10)}, storage_reader=reader(bucket, "a", **settings))
        assert time.monotonic() - started < 6
        # with few attempts it does not take the deadline
        few = _failed_save(bucket, retry=RetryPolicy(max_attempts=2, initial_wait_s=0.01))
        assert isinstance(few, StorageUnavailableError)
        assert few.attempts == 2
        # the next save works as soon as somebody listens again
        server.go_online()
        dcp.save(STATE, storage_writer=writer(bucket, "a", **settings))


@pytest.mark.parametrize("operation", ["GetObject", "PutObject"])
def test_nobody_answers(faults, operation):
    """A store that takes requests and never answers is given up at the deadline, however long a silence is allowed."""
    bucket = bucket_on(faults)
    dcp.save(STATE, storage_writer=writer(bucket, "a"))
    faults.on(operation, never_answer())
    settings = {"save_deadline_s": 2, "load_deadline_s": 2, "read_timeout_s": 60}
    started = time.monotonic()
    silent = _failed_save(bucket, **settings)
    assert isinstance(silent, StorageUnavailableError)
    assert time.monotonic() - started < 8
    if operation == "GetObject":
        started = time.monotonic()
        with pytest.raises(dcp.CheckpointException):
            dcp.load({"w": torch.zeros(10)}, storage_reader=reader(bucket, "a", **settings))
        assert time.monotonic() - started < 8


def test_nobody_accepts():
    """An address behind which connections are not even accepted is given up at the deadline, too."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        with socket.socket() as first, socket.socket() as second:
            for filler in (first, second):  # the backlog is full: further connections wait for ever
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            endpoint = Endpoint(
                name="scripted", endpoint_url=f"http://127.0.0.1:{port}", access_key="a", secret_key="secret"
            )
            started = time.monotonic()
            silent = _failed_save(Bucket(endpoint=endpoint, name="bucket"), save_deadline_s=2)
            assert isinstance(silent, StorageUnavailableError)
            assert time.monotonic() - started < 8


# ---------------------------------------------------------------------------------------------------- two ranks

DEADLINE_S = 3.0


def _outcome(call, *args, **options):
    """Return what DCP says that each rank raised, and how long it took."""
    started = time.monotonic()
    try:
        call(*args, **options)
    except dcp.CheckpointException as failed:
        return {rank: failure[0] for rank, failure in failed.failures.items()}, time.monotonic() - started
    return {}, time.monotonic() - started


def _one_rank_fails(rank, places, scenarios):
    """Save and load once per scenario, with its settings on the rank that it breaks."""
    found = {}
    state = {f"t{n}": torch.full((400_000,), float(n)) for n in range(8)}
    for name, (broken, settings) in scenarios.items():
        place, changes = (places[name], settings) if rank == broken else (places["good"][rank], {})
        template = {"t0": torch.zeros(400_000), "t7": torch.zeros(400_000)}
        found["save", name] = _outcome(dcp.save, state, storage_writer=writer(place, f"new/{name}", **changes))
        found["load", name] = _outcome(dcp.load, template, storage_reader=reader(place, "old", **changes))
    # and after all of this the group still works
    dcp.save({"x": torch.ones(3)}, storage_writer=writer(places["good"][rank], "after"))
    return found


def test_a_store_error_on_one_rank_ends_both():
    """Whatever one rank hears from its store, both leave save and load in time, with that rank's error; and nothing of the save is
    there that a load could take for a checkpoint.
    """
    with FaultServerProcess(key_errors={"BAD": "InvalidAccessKeyId"}) as server:
        dcp.save(
            {f"t{n}": torch.full((400_000,), float(n)) for n in range(8)},
            storage_writer=writer(bucket_on(server), "old"),
        )
        deadline = {
            "save_deadline_s": DEADLINE_S,
            "load_deadline_s": DEADLINE_S,
            "retry": RetryPolicy(max_attempts=1000),
        }
        scenarios, places = {}, {"good": [bucket_on(server, f"GOOD{rank}") for rank in range(2)]}
        for broken in (0, 1):
            scenarios[f"bad key on {broken}"] = broken, {}
            places[f"bad key on {broken}"] = bucket_on(server, "BAD")
            scenarios[f"503 on {broken}"] = broken, deadline
            places[f"503 on {broken}"] = bucket_on(server, f"BUSY{broken}")
        scenarios["silence on 1"] = 1, {**deadline, "read_timeout_s": 60.0}
        places["silence on 1"] = bucket_on(server, "SILENT")
        server.on("*", error(503, "SlowDown"), access_key="BUSY0")
        server.on("*", error(503, "SlowDown"), access_key="BUSY1")
        server.on("*", never_answer(), access_key="SILENT")
        outcomes = run_ranks_ok(2, _one_rank_fails, places, scenarios, timeout_s=100)
        for (kind, name), (failures, seconds) in outcomes[0].items():
            broken = scenarios[name][0]
            there, _ = outcomes[1][kind, name]
            assert list(failures) == list(there) == [broken], (kind, name, failures)
            assert str(failures[broken]) == str(there[broken])
            assert seconds < DEADLINE_S + 6, (kind, name, seconds)
            expected = AccessDeniedError if name.startswith("bad") else StorageUnavailableError
            failure = failures[broken]
            if kind == "save":
                assert isinstance(failure, expected), (kind, name, failure)
                assert failure.rank == broken
                assert failure.operation
                assert failure.key.startswith(f"new/{name}/")
            else:
                # DCP puts what read_metadata raises into an AssertionError of its own, by its text
                words = "InvalidAccessKeyId" if name.startswith("bad") else f"the deadline of {DEADLINE_S:g} s passed"
                assert words in str(failure), (kind, name, failure)
        left = server.objects("new/")
        assert [key for key in left if key.endswith((".metadata", ".json"))] == []
        assert "after/.metadata" in server.objects()
        assert server.violations(ignore=("open-upload",)) == []


def _deadlines(rank, bucket, timeout_s):
    """Try deadlines of, above and below the group's time-out."""
    found = {}
    for seconds in (timeout_s - 1, timeout_s, timeout_s + 1):
        store, source = writer(bucket, "a", save_deadline_s=seconds), reader(bucket, "a", load_deadline_s=seconds)
        saving, _ = _outcome(dcp.save, STATE, storage_writer=store)
        loading, _ = _outcome(dcp.load, {"w": torch.zeros(10)}, storage_reader=source)
        found[seconds] = saving, loading
    store, source = writer(bucket, "b"), reader(bucket, "b")
    assert _outcome(dcp.save, STATE, storage_writer=store)[0] == {}
    assert _outcome(dcp.load, {"w": torch.zeros(10)}, storage_reader=source)[0] == {}
    found["default"] = store._current().deadline.seconds, source._current().deadline.seconds
    return found


def test_a_deadline_that_is_none(faults):
    """A configured deadline that is not below the process group's time-out is refused on every rank, before any request; where none is
    configured, a save and a load have nine tenths of that time.
    """
    timeout_s = 40
    for outcomes in run_ranks_ok(2, _deadlines, bucket_on(faults), timeout_s, timeout_s=timeout_s):
        assert outcomes.pop(timeout_s - 1) == ({}, {})
        assert outcomes.pop("default") == (36.0, 36.0)
        for seconds, (saving, loading) in outcomes.items():
            assert list(saving) == list(loading) == [0, 1]
            for failure in saving.values():
                assert isinstance(failure, ConfigError)
                assert f"save_deadline_s={seconds} s must be less than the process group's time-out of 40 s" in str(
                    failure
                )
            assert all(f"load_deadline_s={seconds} s must be less than" in str(failure) for failure in loading.values())
