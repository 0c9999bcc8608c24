"""The commit's one PUT, whatever becomes of it: ours, somebody else's, or nobody knows; never a wrong answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_s3 import (
    AccessDeniedError,
    CheckpointExistsError,
    CommitConflictError,
    DeadlineExceededError,
    StorageError,
    StorageUnavailableError,
)
from dcp_s3._checkpoint.save.commit import Observed, commit, observe
from dcp_s3._transfer.limits.retry import Deadline
from dcp_s3._transfer.s3.control_store import ControlStore
from dcp_s3._transfer.s3.probe import Conditions, conditions_of
from tests.fault.conftest import QUICK, Transfer
from tests.fault.server import PROFILES, Action, FaultServer, drop_reply, error, never_answer, reset

RECORD = "run/.metadata"
OURS, FOREIGN, OLD = b"our record", b"their record", b"the old record"
WRITE_ID = "7" * 32
BOTH = Conditions(create=True, replace="quoted")


def put(transfer: Transfer, observed: Observed, conditions: Conditions | None = BOTH) -> None:
    """Commit our record."""
    commit(
        transfer.store,
        RECORD,
        OURS,
        write_id=WRITE_ID,
        index_sha256="5a" * 32,
        observed=observed,
        conditions=conditions,
        deadline=transfer.job.deadline,
    )


@pytest.fixture(params=["new", "replacing"])
def observed(request: pytest.FixtureRequest, s3: FaultServer, transfer: Transfer) -> Observed:
    """What the save saw at its beginning: nothing, or an older record."""
    if request.param == "replacing":
        s3.put(RECORD, OLD, headers={"x-amz-meta-dcp-s3-write-id": "1" * 32})
    seen = observe(transfer.store, RECORD)
    assert seen.write_id == ("1" * 32 if request.param == "replacing" else None)
    s3.clear(state=False)
    return seen


def test_the_commit(s3: FaultServer, transfer: Transfer, observed: Observed):
    """One conditional PUT, one request; the record names the save that wrote it."""
    put(transfer, observed)
    assert s3.read(RECORD) == OURS
    (request,) = s3.log
    condition = ("if-none-match", "*") if observed.etag is None else ("if-match", observed.etag)
    assert request.headers[condition[0]] == condition[1]
    assert s3.objects()[RECORD]["headers"]["x-amz-meta-dcp-s3-write-id"] == WRITE_ID


LOST: dict[str, Action] = {
    "closed": drop_reply("close"),
    "reset": drop_reply("reset"),
    "500": error(500, "InternalError", at="reply"),
    "503-empty": error(503, body="", at="reply"),
    "never-answered": never_answer(commit=True),
}


@pytest.mark.parametrize("fault", LOST)
def test_a_commit_that_was_done_and_not_heard_of(
    s3: FaultServer, transfer_to: Callable[..., Transfer], observed: Observed, fault: str
):
    """The record is read back and found to be ours: success, and the PUT is not sent twice."""
    transfer = transfer_to(s3, read_timeout_s=0.8)
    s3.on("PutObject", LOST[fault], nth=1)
    put(transfer, observed)
    assert s3.read(RECORD) == OURS
    assert [r.operation for r in s3.log] == ["PutObject", "GetObject"]


@pytest.mark.parametrize(
    "fault", [reset("body", 1), reset("handle"), error(503, "SlowDown"), error(409, "ConditionalRequestConflict")]
)
def test_a_commit_that_was_not_done(s3: FaultServer, transfer: Transfer, observed: Observed, fault: Action):
    """The record is read back and found unchanged: the identical PUT is sent again, with the same condition."""
    s3.on("PutObject", fault, nth=1)
    put(transfer, observed)
    assert s3.read(RECORD) == OURS
    assert [r.operation for r in s3.log] == ["PutObject", "GetObject", "PutObject"]
    first, second = s3.requests("PutObject")
    for name in ("if-match", "if-none-match", "x-amz-meta-dcp-s3-write-id"):
        assert first.headers.get(name) == second.headers.get(name)


def test_a_commit_that_lands_late(s3: FaultServer, transfer: Transfer, observed: Observed):
    """The first PUT fails and lands only after it was looked for: the second meets its own record, and that is success."""
    gate = s3.hold("PutObject", at="late", then=error(503, "SlowDown"), nth=1)
    second = s3.hold("PutObject", nth=2)
    done = threading.Thread(target=put, args=(transfer, observed))
    done.start()
    second.wait_arrived()
    gate.release()
    deadline = time.monotonic() + 5
    while s3.objects().get(RECORD, {}).get("size") != len(OURS) or s3.read(RECORD) != OURS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.release()
    done.join(10)
    assert not done.is_alive()
    assert [r.status for r in s3.requests("PutObject")] == [503, 412]
    assert s3.read(RECORD) == OURS


def test_somebody_else_was_first(s3: FaultServer, transfer: Transfer, observed: Observed):
    """Another writer's record is there: CommitConflictError, and theirs stands."""
    s3.put(RECORD, FOREIGN)
    with pytest.raises(CommitConflictError) as caught:
        put(transfer, observed)
    assert (caught.value.bucket, caught.value.key) == ("bucket", RECORD)
    assert s3.read(RECORD) == FOREIGN
    assert len(s3.requests("PutObject")) == 1


def test_somebody_else_while_we_did_not_hear(s3: FaultServer, transfer: Transfer, observed: Observed):
    """Our PUT fails and meanwhile another writer commits: a conflict, not a second PUT."""
    gate = s3.hold("PutObject", at="handle", then=reset())
    failures: list[BaseException] = []

    def work() -> None:
        try:
            put(transfer, observed)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    gate.wait_arrived()
    s3.put(RECORD, FOREIGN)
    gate.release()
    thread.join(10)
    assert [type(failure) for failure in failures] == [CommitConflictError]
    assert s3.read(RECORD) == FOREIGN
    assert len(s3.requests("PutObject")) == 1


def test_the_replaced_record_is_gone(s3: FaultServer, transfer: Transfer):
    """A record that was there at the beginning and has been deleted since is a conflict, not a new record."""
    s3.put(RECORD, OLD)
    seen = observe(transfer.store, RECORD)
    s3.delete(RECORD)
    with pytest.raises(CommitConflictError):
        put(transfer, seen)
    assert s3.objects() == {}


@pytest.mark.parametrize(
    "answer", [error(403, "AccessDenied"), error(400, "EntityTooLarge"), error(404, "NoSuchBucket")]
)
def test_a_commit_that_is_refused(plain_s3: FaultServer, plain_transfer: Transfer, answer: Action):
    """A refusal is final: it is raised as it is, after one request."""
    plain_s3.on("PutObject", answer)
    with pytest.raises(StorageError) as caught:
        put(plain_transfer, Observed(None, None))
    assert answer.answer is not None
    assert (caught.value.status, caught.value.code) == (answer.answer.status, answer.answer.code)
    assert len(plain_s3.log) == 1


def test_a_store_that_fails_until_the_deadline(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """503 to every PUT: the identical PUT is repeated until the deadline, then the outcome is said to be unknown."""
    transfer = transfer_to(plain_s3, deadline_s=1.0)
    plain_s3.on("PutObject", error(503, "SlowDown"))
    started = time.monotonic()
    with pytest.raises(StorageUnavailableError, match="commit outcome unknown") as caught:
        put(transfer, Observed(None, None))
    assert time.monotonic() - started < 10
    # the store's last answer to the PUT, whatever became of the reading back and of an attempt that the deadline cut short
    assert (caught.value.status, caught.value.code) == (503, "SlowDown")
    assert (caught.value.attempts or 0) > QUICK.max_attempts
    assert len(plain_s3.requests("PutObject")) in (caught.value.attempts, (caught.value.attempts or 0) - 1)


def test_a_store_that_never_answers_the_commit(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A commit that hangs ends at the deadline, however long one read may take: the peers must hear of it in time."""
    transfer = transfer_to(plain_s3, deadline_s=1.0, read_timeout_s=30)
    plain_s3.on(("PutObject", "GetObject"), never_answer(commit=True))
    started = time.monotonic()
    with pytest.raises(StorageUnavailableError, match="commit outcome unknown"):
        put(transfer, Observed(None, None))
    assert time.monotonic() - started < 10


def test_past_the_deadline_nothing_is_committed(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A save that has slept past its deadline sends no PUT at all."""
    transfer = transfer_to(plain_s3, deadline_s=0.05)
    deadline = time.monotonic() + 5
    while not transfer.job.deadline.expired:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(DeadlineExceededError, match="nothing was committed"):
        put(transfer, Observed(None, None))
    assert plain_s3.log == []


def test_a_store_that_always_refuses_a_true_condition(plain_s3: FaultServer, plain_transfer: Transfer):
    """412 although nothing has changed is called that after a few tries, and blames no other writer; it does not go on for ever."""
    plain_s3.on("PutObject", error(412, "PreconditionFailed"))
    with pytest.raises(StorageError, match="conditional PUTs do not work through this endpoint") as caught:
        put(plain_transfer, Observed(None, None))
    assert not isinstance(caught.value, CommitConflictError)
    assert len(plain_s3.requests("PutObject")) == 5


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_store_without_conditions(plain_s3: FaultServer, plain_transfer: Transfer, first: str):
    """Without conditional PUTs the record is read back: what is there then is who committed."""
    plain_s3.configure(**PROFILES["ignores-conditions"])
    conditions = conditions_of(plain_transfer.store, "run/index")
    assert conditions == Conditions(create=False, replace=None)
    gate = plain_s3.hold("GetObject", at="head")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            put(plain_transfer, Observed(None, None), conditions)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    gate.wait_arrived()
    if first == "theirs":
        plain_s3.put(RECORD, FOREIGN)
    gate.release()
    thread.join(10)
    assert [type(failure) for failure in failures] == ([] if first == "ours" else [CommitConflictError])


def test_ceph_wants_bare_etags(plain_s3: FaultServer, plain_transfer: Transfer):
    """A store whose If-Match matches only without quotes is found out by the probe and replaced conditionally."""
    plain_s3.configure(**PROFILES["ceph"])
    plain_s3.put(RECORD, OLD)
    conditions = conditions_of(plain_transfer.store, "run/index")
    assert conditions == Conditions(create=True, replace="bare")
    put(plain_transfer, observe(plain_transfer.store, RECORD), conditions)
    assert plain_s3.read(RECORD) == OURS
    plain_s3.put(RECORD, FOREIGN)
    with pytest.raises(CommitConflictError):
        put(plain_transfer, Observed('"0"', None), conditions)


def test_a_record_that_may_not_be_read(plain_s3: FaultServer, plain_transfer: Transfer, allowed: set[str]):
    """Without the right to read, a new record can be committed, and an existing one is never replaced unseen."""
    allowed.add("forbidden-operation")
    plain_s3.configure(denied_operations=("GetObject", "ListObjectsV2"))
    seen = observe(plain_transfer.store, RECORD)
    assert seen == Observed(None, None, certain=False)
    put(plain_transfer, seen)
    assert plain_s3.read(RECORD) == OURS
    with pytest.raises(CheckpointExistsError, match="may not read"):
        put(plain_transfer, seen)
    with pytest.raises(AccessDeniedError, match="could be overwritten unseen"):
        put(plain_transfer, seen, None)


def test_a_record_that_was_there_and_not_seen(plain_s3: FaultServer, plain_transfer: Transfer):
    """A record that the first look was refused for, and that can be read later, stands; the error does not speak of another writer."""
    plain_s3.put(RECORD, FOREIGN)
    plain_s3.on("GetObject", error(403, "AccessDenied"))
    seen = observe(plain_transfer.store, RECORD)
    assert not seen.certain
    plain_s3.clear(log=False, state=False)
    with pytest.raises(CommitConflictError, match="first look was refused"):
        put(plain_transfer, seen)
    assert plain_s3.read(RECORD) == FOREIGN


def test_the_probe_of_another_save(plain_s3: FaultServer, plain_transfer: Transfer):
    """A save that waits for what another one is asking the store waits no longer than its own deadline."""
    gate = plain_s3.hold("PutObject", at="handle")
    config = plain_transfer.config
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(conditions_of, ControlStore(config, "bucket"), "run/index-1")
        gate.wait_arrived()
        start = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="another save that probes the store"):
            conditions_of(ControlStore(config, "bucket", deadline=Deadline(0.3)), "run/index-2")
        assert 0.25 < time.monotonic() - start < 5
        gate.release()
        gate.remove()
        assert asking.result() == BOTH
    assert conditions_of(ControlStore(config, "bucket", deadline=Deadline(5.0)), "run/index-2") == BOTH


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_wrong_credentials_are_not_an_absent_record(plain_s3: FaultServer, plain_transfer: Transfer, code: str):
    """A 403 that is about the credentials is raised at the beginning, not taken for "there may be nothing"."""
    plain_s3.on("GetObject", error(403, code))
    with pytest.raises(AccessDeniedError) as caught:
        observe(plain_transfer.store, RECORD)
    assert caught.value.code == code


def test_an_empty_record(plain_s3: FaultServer, plain_transfer: Transfer):
    """An empty object at the record's key, on which a range is 416, is seen and replaced like any other."""
    plain_s3.put(RECORD, b"")
    seen = observe(plain_transfer.store, RECORD)
    assert seen.etag is not None
    put(plain_transfer, seen)
    assert plain_s3.read(RECORD) == OURS


def test_observing_a_store_that_ignores_ranges(plain_s3: FaultServer, plain_transfer: Transfer):
    """Looking at a record takes its ETag and write id, whatever the store thinks of the one byte that is asked for."""
    plain_s3.configure(ranges="ignore")
    plain_s3.put(RECORD, OLD, headers={"x-amz-meta-dcp-s3-write-id": "1" * 32})
    seen = observe(plain_transfer.store, RECORD)
    assert (seen.etag, seen.write_id) == (f'"{plain_s3.objects()[RECORD]["etag"]}"', "1" * 32)
