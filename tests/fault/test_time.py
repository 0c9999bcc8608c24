"""Time: one rank's slow or silent store is told to every rank, with all that is known of it, within the deadline and 10 s."""

from __future__ import annotations

import pickle
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import DcpS3Error, RetryPolicy, S3Config, S3StorageReader, S3StorageWriter, StorageUnavailableError
from tests.fault.server import Action, FaultServerProcess, drip, error, never_answer, never_read
from tests.support.ranks import run_ranks_ok

DEADLINE_S = 5.0
GRACE_S = 10.0
MIB = 1 << 20
ATTEMPTS = 3

TROUBLES: dict[str, Action] = {
    "503 storm": error(503, "SlowDown"),
    "accepts and never reads": never_read(),
    "reads and never answers": never_answer(),
    "drips a byte per 5 s": drip(every_s=5.0),
    "drips a byte per 0.2 s": drip(every_s=0.2),  # never silent for read_timeout_s
}
ONCE: dict[str, Action] = {
    "never read once": never_read(),
    "never answered once": never_answer(),
    "done once, and not answered": never_answer(commit=True),
}


def _state(elements: int = 400_000) -> dict[str, torch.Tensor]:
    """Eight tensors, of which DCP gives four to each rank: one upload of two parts per rank."""
    return {f"t{n}": torch.full((elements,), float(n)) for n in range(8)}


def _outcome(call: Any, *args: Any, **options: Any) -> tuple[dict[int, Any], float]:
    """What DCP says that each rank raised, and how long it took, seconds."""
    started = time.monotonic()
    try:
        call(*args, **options)
    except dcp.CheckpointException as failed:
        return {rank: failure[0] for rank, failure in failed.failures.items()}, time.monotonic() - started
    return {}, time.monotonic() - started


def _save_and_load(rank: int, url: str, names: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Save to a new place and load an old one, once for each trouble. Each rank signs with an id of its own."""
    config = S3Config(
        endpoint_url=url, access_key_id=f"RANK{rank}", secret_access_key="secret", part_bytes=5 * MIB, **settings
    )
    warm = S3StorageReader("s3://bucket/old/0", config=config)
    warm.read_metadata()  # making a client takes longer than a trouble lasts, on a busy machine
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        store = S3StorageWriter(f"s3://bucket/new/{number}", config=config)
        found[f"save, {name}"] = _outcome(dcp.save, _state(), storage_writer=store)
        template = {key: torch.full_like(value, -1.0) for key, value in _state().items()}
        source = S3StorageReader(f"s3://bucket/old/{number}", config=config)
        found[f"load, {name}"] = _outcome(dcp.load, template, storage_reader=source)
        if not found[f"load, {name}"][0]:
            assert all(torch.equal(template[key], value) for key, value in _state().items())
    return found


@pytest.fixture
def server() -> Any:
    with FaultServerProcess(min_part_bytes=0) as running:
        config = S3Config(endpoint_url=running.url, access_key_id="BEFORE", secret_access_key="secret")
        for number in range(max(len(TROUBLES), len(ONCE))):
            before = S3StorageWriter(f"s3://bucket/old/{number}", config=config)
            dcp.save(_state(), storage_writer=before, no_dist=True)
        yield running


def test_one_ranks_trouble_reaches_the_others(server: FaultServerProcess):
    """Whatever rank 1's store does to its data, both ranks raise the same failure of rank 1, with operation, key, number of
    attempts and, where there was a reply, the store's request id, within the deadline and 10 s; and nothing is committed.
    """
    for number, action in enumerate(TROUBLES.values()):
        server.on("*", action, key=f"/{number}/data/", access_key="RANK1")
    settings = {
        "read_timeout_s": 0.5,
        "save_deadline_s": DEADLINE_S,
        "load_deadline_s": DEADLINE_S,
        "retry": RetryPolicy(max_attempts=ATTEMPTS, initial_wait_s=0.02, max_wait_s=0.1),
    }
    outcomes = run_ranks_ok(2, _save_and_load, server.url, list(TROUBLES), settings, timeout_s=150)
    assert len(outcomes[0]) == 2 * len(TROUBLES)
    for what, (failures, seconds) in outcomes[0].items():
        there, seconds_there = outcomes[1][what]
        assert list(failures) == list(there) == [1], what
        failure = failures[1]
        assert str(failure) == str(there[1]), what
        assert max(seconds, seconds_there) < DEADLINE_S + GRACE_S, (what, seconds, seconds_there)
        assert isinstance(failure, StorageUnavailableError), (what, failure)
        assert (failure.rank, failure.bucket) == (1, "bucket"), (what, failure)
        assert "/data/" in str(failure.key), (what, failure)
        assert failure.operation in ("CreateMultipartUpload", "UploadPart", "GetObject"), (what, failure)
        assert failure.attempts in range(1, ATTEMPTS + 1), (what, failure)
        if "503" in what:
            assert failure.attempts == ATTEMPTS, (what, failure)
            assert (failure.status, failure.code) == (503, "SlowDown")
            assert failure.request_id, (what, failure)
            assert f"request_id={failure.request_id}" in str(failure)
        same = pickle.loads(pickle.dumps(failure))
        assert isinstance(same, DcpS3Error)
        assert same.__dict__ == failure.__dict__
    assert [key for key in server.objects("new/") if key.endswith(".metadata")] == []


def _save_in_trouble(rank: int, url: str, paths: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Save once where nothing is wrong, so that the clients are made and the store is probed; then to each path."""
    config = S3Config(endpoint_url=url, access_key_id=f"RANK{rank}", secret_access_key="secret", **settings)
    state = _state(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp_s3.writer.deadline_s", lambda configured, name: 60.0)
        dcp.save(state, storage_writer=S3StorageWriter("s3://bucket/warm", config=config))
    return {
        path: _outcome(dcp.save, state, storage_writer=S3StorageWriter(f"s3://bucket/{path}", config=config))
        for path in paths
    }


@pytest.mark.parametrize("what", ["index", "record"])
def test_trouble_with_the_commit_reaches_every_rank(what: str):
    """When rank 0's PUT of the index or of the record is refused for ever or never answered, both ranks raise the same failure
    of rank 0, with operation and key, within the deadline and 10 s. The record's is repeated until the deadline, and its outcome is
    unknown, as the error says.
    """
    name = r"/index-\w+\.safetensors\.gz$" if what == "index" else r"/\.metadata$"
    troubles: dict[str, Action] = {"busy": error(503, "SlowDown"), "silent": never_answer()}
    settings = {
        "read_timeout_s": 0.5,
        "save_deadline_s": DEADLINE_S,
        "retry": RetryPolicy(max_attempts=ATTEMPTS, initial_wait_s=0.02, max_wait_s=0.1),
    }
    with FaultServerProcess() as server:
        rules = {
            path: server.on("PutObject", action, key=f"^{path}{name}", access_key="RANK0")
            for path, action in troubles.items()
        }
        outcomes = run_ranks_ok(2, _save_in_trouble, server.url, list(troubles), settings, timeout_s=150)
        fired = {path: rule.fired for path, rule in rules.items()}
        left = set(server.objects())
    assert {key for key in left if key.endswith(".metadata")} == {"warm/.metadata"}
    for path in troubles:
        (failures, seconds), (there, seconds_there) = (outcomes[rank][path] for rank in range(2))
        assert list(failures) == list(there) == [0], path
        failure = failures[0]
        assert (str(failure), failure.__dict__) == (str(there[0]), there[0].__dict__), path
        assert max(seconds, seconds_there) < DEADLINE_S + GRACE_S, (path, seconds, seconds_there)
        assert type(failure) is StorageUnavailableError, (path, failure)
        assert (failure.rank, failure.bucket, failure.operation) == (0, "bucket", "PutObject"), (path, failure)
        assert re.search(f"^{path}{name}", str(failure.key)), (path, failure)
        assert ("commit outcome unknown" in str(failure)) is (what == "record"), (path, failure)
        if what == "index":
            assert failure.attempts == fired[path] == ATTEMPTS, (path, failure)
        else:
            assert failure.attempts - fired[path] in (0, 1), (path, failure)  # the last one may meet the deadline
            assert fired[path] > 1
            assert min(seconds, seconds_there) > DEADLINE_S - 1, (path, seconds, seconds_there)
        if path == "busy":
            assert (failure.status, failure.code) == (503, "SlowDown")
            assert f"request_id={failure.request_id}" in str(failure)


def test_one_stall_is_survived(server: FaultServerProcess):
    """A request for data that is left unread or unanswered once is made again, and the save and the load succeed."""
    rules = {}
    for number, (name, action) in enumerate(ONCE.items()):
        for kind, operations in (("save", ("PutObject", "UploadPart")), ("load", ("GetObject",))):
            rules[f"{kind}, {name}"] = server.on(
                operations, action, key=f"/{number}/data/", access_key="RANK1", times=1
            )
    settings = {"save_deadline_s": 60.0, "load_deadline_s": 60.0, "read_timeout_s": 1.0}
    outcomes = run_ranks_ok(2, _save_and_load, server.url, list(ONCE), settings, timeout_s=120)
    for what, rule in rules.items():
        for found in outcomes:
            failures, seconds = found[what]
            assert failures == {}, (what, failures)
            assert seconds < 30, (what, seconds)
        assert rule.fired == 1, what
    assert sorted(key for key in server.objects("new/") if key.endswith("/.metadata")) == [
        f"new/{number}/.metadata" for number in range(len(ONCE))
    ]
    assert server.violations() == []
