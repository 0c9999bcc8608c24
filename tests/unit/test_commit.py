"""The commit, answer by answer, on a bucket in memory: what is sent, what is left unsent, and what is said of it."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from dcp_s3 import (
    AccessDeniedError,
    CheckpointExistsError,
    CommitConflictError,
    DeadlineExceededError,
    RetryPolicy,
    S3Config,
    StorageError,
    StorageUnavailableError,
)
from dcp_s3._checkpoint.format.layout import CheckpointUrl
from dcp_s3._checkpoint.save import commit as module
from dcp_s3._checkpoint.save.commit import (
    Observed,
    check_permitted,
    commit,
    condition_of,
    confirm,
    delete_replaced,
    look,
    observe,
    put_index,
)
from dcp_s3._transfer.limits.retry import Deadline
from dcp_s3._transfer.s3.control_store import ObjectInfo
from dcp_s3._transfer.s3.probe import Conditions
from tests.unit.fake_store import FakeStore, denied, save
from tests.unit.records import repacked

RUN = CheckpointUrl("ckpt", "run")
RECORD = "run/.metadata"
OTHER = "run/__0.metadata"
OURS, FOREIGN, OLD = b"our record", b"their record", b"an older one"
BEFORE, NOW = "1" * 32, "7" * 32
BOTH = Conditions(create=True, replace="quoted")
NOTHING = Observed(None, None)


def failed(status: int, code: str) -> StorageError:
    """What a store's refusal, or its failure, is to the commit."""
    kind = StorageUnavailableError if status in (409, 503) else AccessDeniedError if status == 403 else StorageError
    error = kind(f"the store answered {status}")
    error.with_context(status=status, code=code, request_id=f"request-{code}")
    return error


class Bucket(FakeStore):
    """Honours conditions; `answers` says what becomes of the next PUTs of a record, one after the other.

    An answer is an error, which is raised with nothing done, or ("done", error), which is raised behind what was done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = S3Config(retry=RetryPolicy(max_attempts=5, initial_wait_s=0.001, max_wait_s=0.001))
        self.answers: list[Any] = []
        self.sent: list[dict[str, Any]] = []
        self.kept: Callable[[bytes], bytes] = lambda body: body

    def put(
        self,
        key: str,
        body: bytes,
        *,
        content_type: str = "",
        metadata: dict[str, str] | None = None,
        if_match: str | None = None,
        if_none_match: bool = False,
        retry: bool = True,
    ) -> str:
        self.sent.append(
            {"key": key, "if_match": if_match, "if_none_match": if_none_match, "retry": retry, "type": content_type}
        )
        answer = self.answers.pop(0) if self.answers and key == RECORD else None
        if isinstance(answer, StorageError):
            self.log.append(("put", key))
            raise answer
        there = self.objects.get(key)
        if if_match is not None and there is None:
            raise failed(404, "NoSuchKey")
        if (if_none_match and there is not None) or (if_match is not None and there and there.etag != if_match):
            raise failed(412, "PreconditionFailed")
        etag = super().put(key, self.kept(body), metadata=metadata)
        if answer is not None:
            raise answer[1]
        return etag

    def operations(self, key: str = RECORD) -> list[str]:
        return [operation for operation, of in self.log if of == key]


@pytest.fixture
def store() -> Bucket:
    return Bucket()


@pytest.fixture(params=["new", "replacing"])
def observed(request: pytest.FixtureRequest, store: Bucket) -> Observed:
    """What the save saw at its beginning: nothing, or an older record."""
    if request.param == "replacing":
        store.put(RECORD, OLD, metadata={"dcp-s3-write-id": BEFORE})
    seen = observe(store, RECORD)
    store.log.clear()
    store.sent.clear()
    return seen


def put(
    store: Bucket,
    observed: Observed,
    conditions: Conditions | None = BOTH,
    *,
    deadline: Deadline | None = None,
    still_there: Callable[[], None] | None = None,
) -> None:
    """Commit our record."""
    commit(
        store,
        RECORD,
        OURS,
        write_id=NOW,
        index_sha256="5a" * 32,
        observed=observed,
        conditions=conditions,
        deadline=deadline or Deadline(30),
        still_there=still_there,
    )


def over() -> Deadline:
    """A deadline that has passed."""
    deadline = Deadline(1e-9)
    while not deadline.expired:
        time.sleep(0.001)
    return deadline


# ---------------------------------------------------------------------- the look at the beginning


def test_looking_takes_one_small_request(store: Bucket) -> None:
    """One GET tells the ETag, without a gateway's mark of weakness, and which save wrote the record."""
    assert observe(store, RECORD) == NOTHING
    etag = store.put(RECORD, OLD, metadata={"dcp-s3-write-id": BEFORE})
    store.log.clear()
    assert observe(store, RECORD) == Observed(etag, BEFORE)
    assert store.log == [("get", RECORD)]
    store.objects[RECORD].etag = f"W/{etag}"
    assert observe(store, RECORD) == Observed(etag, BEFORE)


def test_looking_asks_for_one_byte(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of many gigabytes is not read to be replaced."""
    store.put(RECORD, OLD)
    whole, asked = store.get, []

    def get(key: str, *, byte_range: tuple[int, int] | None = None) -> Any:
        asked.append(byte_range)
        return whole(key, byte_range=byte_range)

    monkeypatch.setattr(store, "get", get)
    observe(store, RECORD)
    assert asked == [(0, 1)]


def test_looking_at_an_empty_object(store: Bucket) -> None:
    """It has no first byte; a HEAD tells the rest, and it is replaced like any other."""
    etag = store.put(RECORD, b"")
    assert observe(store, RECORD) == Observed(etag, None)
    put(store, Observed(etag, None))
    assert store.objects[RECORD].body == OURS


@pytest.mark.parametrize(
    "answer, seen",
    [
        (failed(403, "AccessDenied"), Observed(None, None, certain=False)),
        (failed(404, "NoSuchKey"), NOTHING),
        (failed(403, "InvalidAccessKeyId"), None),
        (failed(404, "NoSuchBucket"), None),
        (failed(503, "SlowDown"), None),
        (failed(400, "AuthorizationHeaderMalformed"), None),
    ],
    ids=lambda value: getattr(value, "code", ""),
)
def test_what_looking_makes_of_an_answer(store: Bucket, answer: StorageError, seen: Observed | None) -> None:
    """No record, or none that may be seen; what says nothing of the record is raised as it is."""

    def fail(operation: str, key: str) -> None:
        raise answer

    store.before = fail
    if seen is not None:
        assert observe(store, RECORD) == seen
    else:
        with pytest.raises(StorageError) as caught:
            observe(store, RECORD)
        assert caught.value is answer
    assert store.operations() == ["get"]


def test_a_record_of_the_other_kind(store: Bucket) -> None:
    """Readers would go on loading the old one: it is an error that says which, where, and what to do."""
    assert look(store, RECORD, OTHER) == NOTHING
    store.put(OTHER, OLD)
    with pytest.raises(CheckpointExistsError, match=r"__0\.metadata, saved with use_collectives=False") as caught:
        look(store, RECORD, OTHER)
    assert "all below s3://ckpt/run/" in str(caught.value)
    assert (caught.value.bucket, caught.value.key) == ("ckpt", OTHER)
    with pytest.raises(CheckpointExistsError, match=r"\.metadata, saved with use_collectives=True.*below s3://ckpt/\)"):
        store.put(".metadata", OLD)
        look(store, "__0.metadata", ".metadata")


@pytest.mark.parametrize(
    "answer, fine",
    [
        (failed(403, "AccessDenied"), True),
        (failed(404, "NoSuchKey"), True),
        (failed(404, "NoSuchBucket"), False),
        (failed(503, "SlowDown"), False),
    ],
    ids=lambda value: getattr(value, "code", ""),
)
def test_a_record_of_the_other_kind_that_cannot_be_asked_for(
    store: Bucket, answer: StorageError, *, fine: bool
) -> None:
    """Without ListBucket what is not there is forbidden, which stops no save; a store that fails does."""

    def fail(operation: str, key: str) -> None:
        if key == OTHER:
            raise answer

    store.before = fail
    if fine:
        assert look(store, RECORD, OTHER) == NOTHING
    else:
        with pytest.raises(StorageError) as caught:
            look(store, RECORD, OTHER)
        assert caught.value is answer


# ---------------------------------------------------------------------- what is permitted, and under which condition


@pytest.mark.parametrize(
    "conditions, fine",
    [
        (BOTH, True),
        (Conditions(create=True, replace=None), True),
        (Conditions(create=False, replace="quoted"), False),
        (None, False),
    ],
)
def test_a_record_that_may_not_be_seen(store: Bucket, conditions: Conditions | None, *, fine: bool) -> None:
    """It could be there: only a store that refuses to replace it may be sent another."""
    check_permitted(store, RECORD, NOTHING, conditions)
    unseen = Observed(None, None, certain=False)
    if fine:
        check_permitted(store, RECORD, unseen, conditions)
        put(store, unseen, conditions)
        assert store.objects[RECORD].body == OURS
        return
    for act in (lambda: check_permitted(store, RECORD, unseen, conditions), lambda: put(store, unseen, conditions)):
        with pytest.raises(AccessDeniedError, match="overwritten unseen") as caught:
            act()
        assert (caught.value.bucket, caught.value.key) == ("ckpt", RECORD)
    assert store.sent == []


@pytest.mark.parametrize(
    "there, conditions, expected",
    [
        (None, None, (None, False)),
        (None, BOTH, (None, True)),
        (None, Conditions(create=False, replace="quoted"), (None, False)),
        ('"e"', None, (None, False)),
        ('"e"', BOTH, ('"e"', False)),
        ('"e"', Conditions(create=True, replace="bare"), ("e", False)),
        ('"e"', Conditions(create=True, replace=None), (None, False)),
    ],
)
def test_the_condition(there: str | None, conditions: Conditions | None, expected: tuple[str | None, bool]) -> None:
    """That nothing is there, or exactly what was seen; none where the store does not honour it."""
    assert condition_of(Observed(there, None), conditions) == expected


# ---------------------------------------------------------------------- the index


def test_the_index_is_put_and_looked_for(store: Bucket) -> None:
    """It keeps the deadline of its save, so that no collector takes it before; its size is looked at."""
    put_index(store, "run/index", b"{}", Deadline(59.5))
    stored = store.objects["run/index"]
    assert (stored.body, stored.metadata) == (b"{}", {"dcp-s3-save-s": "60"})
    assert store.sent[0]["type"] == "application/octet-stream"
    assert store.operations("run/index") == ["put", "head"]


@pytest.mark.parametrize("kept", [b"", b"{", b"{}\n"])
def test_an_index_that_the_store_keeps_otherwise(store: Bucket, kept: bytes) -> None:
    """A record must not name an index that nobody can read: nothing is committed."""
    store.kept = lambda body: kept
    with pytest.raises(StorageError, match=f"of 2 bytes and keeps {len(kept)}; nothing was committed") as caught:
        put_index(store, "run/index", b"{}", Deadline(60))
    assert (caught.value.bucket, caught.value.key) == ("ckpt", "run/index")


# ---------------------------------------------------------------------- the record's PUT


def test_one_request_under_one_condition(store: Bucket, observed: Observed) -> None:
    """An acknowledged conditional PUT is the commit. The client does not repeat it by itself: its outcome is settled here."""
    put(store, observed)
    assert store.objects[RECORD].body == OURS
    assert store.objects[RECORD].metadata == {"dcp-s3-write-id": NOW, "dcp-s3-index-sha256": "5a" * 32}
    assert store.operations() == ["put"]
    assert store.sent == [
        {
            "key": RECORD,
            "if_match": observed.etag,
            "if_none_match": observed.etag is None,
            "retry": False,
            "type": "application/octet-stream",
        }
    ]


def test_past_the_deadline_nothing_is_sent(store: Bucket, observed: Observed) -> None:
    """The other ranks, and a collector of garbage, count on it: what is late is not committed."""
    looked: list[int] = []
    with pytest.raises(DeadlineExceededError, match="about to commit; nothing was committed"):
        put(store, observed, deadline=over(), still_there=lambda: looked.append(1))
    assert (store.log, store.sent, looked) == ([], [], [])


@pytest.mark.parametrize("answer", [failed(503, "SlowDown"), failed(409, "ConditionalRequestConflict")])
def test_what_was_not_done_is_sent_again(store: Bucket, observed: Observed, answer: StorageError) -> None:
    """With the same condition, behind a look at what is there."""
    store.answers = [answer, answer]
    put(store, observed)
    assert store.operations() == ["put", "get", "put", "get", "put"]
    assert store.sent[0] == store.sent[1] == store.sent[2]
    assert store.objects[RECORD].body == OURS


def test_what_was_done_is_not_sent_again(store: Bucket, observed: Observed) -> None:
    """A lost reply: the record is read back and found to be ours."""
    store.answers = [("done", failed(503, "SlowDown"))]
    put(store, observed)
    assert store.operations() == ["put", "get"]


def test_a_refusal_of_what_is_already_ours(store: Bucket, observed: Observed) -> None:
    """A first PUT that arrived late makes the second one's condition fail; that is no conflict."""
    store.answers = [failed(503, "SlowDown"), ("done", failed(412, "PreconditionFailed"))]
    put(store, observed)
    assert store.operations() == ["put", "get", "put", "get"]
    assert store.objects[RECORD].body == OURS


@pytest.mark.parametrize("answer", [failed(503, "SlowDown"), failed(412, "PreconditionFailed")])
@pytest.mark.parametrize("there", [FOREIGN, b"our recorD", OURS + b"!"])
def test_another_writers_record_stands(store: Bucket, observed: Observed, answer: StorageError, there: bytes) -> None:
    """Whatever the PUT was answered: who finds another's record, of whatever size, does not send again."""
    FakeStore.put(store, RECORD, there)
    store.answers = [answer]
    with pytest.raises(
        CommitConflictError, match=r"another writer wrote or deleted s3://ckpt/run/\.metadata"
    ) as caught:
        put(store, observed)
    assert (caught.value.key, caught.value.operation, caught.value.attempts) == (RECORD, "PutObject", 1)
    assert store.objects[RECORD].body == there
    assert len(store.sent) == 1


@pytest.mark.parametrize("answer", [None, failed(503, "SlowDown")])
def test_what_was_to_be_replaced_has_been_deleted(store: Bucket, answer: StorageError | None) -> None:
    """A conflict as well, also where the store says 404: nothing is committed over an absence that the save did not see."""
    etag = store.put(RECORD, OLD)
    store.delete(RECORD)
    store.answers = [answer] if answer else []
    with pytest.raises(CommitConflictError, match="wrote or deleted"):
        put(store, Observed(etag, BEFORE))
    assert store.objects == {}


def test_a_record_that_the_first_look_was_refused_for(store: Bucket) -> None:
    """It can be read now: the error does not speak of another writer."""
    store.put(RECORD, FOREIGN)
    with pytest.raises(CommitConflictError, match="a record that this save did not know of"):
        put(store, Observed(None, None, certain=False))
    assert store.objects[RECORD].body == FOREIGN


@pytest.mark.parametrize(
    "answer", [failed(403, "AccessDenied"), failed(400, "EntityTooLarge"), failed(404, "NoSuchKey")]
)
def test_a_refusal_is_final(store: Bucket, answer: StorageError) -> None:
    """It is raised as it is, behind one request; a 404 means something only to a PUT that was to replace."""
    for seen in (NOTHING, Observed('"e"', BEFORE)) if answer.status != 404 else (NOTHING,):
        store.answers = [answer]
        store.log.clear()
        with pytest.raises(StorageError) as caught:
            put(store, seen)
        assert caught.value is answer
        assert store.operations() == ["put"]


@pytest.mark.parametrize("conditions", [None, Conditions(create=False, replace=None)])
def test_without_a_condition_who_won_is_read_back(
    store: Bucket, observed: Observed, conditions: Conditions | None
) -> None:
    """An acknowledged PUT without a condition says nothing of who came behind it."""
    put(store, observed, conditions)
    assert store.operations() == ["put", "get"]
    store.kept = lambda body: FOREIGN
    with pytest.raises(CommitConflictError):
        put(store, observed, conditions)


def test_a_condition_that_is_refused_for_ever(store: Bucket, observed: Observed) -> None:
    """After five refusals with nothing changed nobody else is blamed: the conditions do not work there."""
    store.answers = [failed(412, "PreconditionFailed")] * 9
    name = "If-Match" if observed.etag is not None else "If-None-Match"
    with pytest.raises(StorageError, match=rf"the commit's {name} 5 times.*s3://ckpt/run/\.metadata is as") as caught:
        put(store, observed)
    assert type(caught.value) is StorageError
    assert (caught.value.status, caught.value.code, caught.value.attempts) == (412, "PreconditionFailed", 5)
    assert len(store.sent) == 5


def test_another_writer_behind_many_refusals(store: Bucket, observed: Observed) -> None:
    """The last of five refusals is true, and somebody else is to blame: that is a conflict, and not the store's conditions."""
    store.answers = [failed(412, "PreconditionFailed")] * 5

    def meanwhile(operation: str, key: str) -> None:
        if len(store.sent) == 5 and operation == "get":
            store.before = lambda *_: None
            FakeStore.put(store, RECORD, FOREIGN)

    store.before = meanwhile
    with pytest.raises(CommitConflictError):
        put(store, observed)
    assert store.objects[RECORD].body == FOREIGN


def test_failures_are_no_refusals(store: Bucket, observed: Observed) -> None:
    """A store that is overloaded more often than that is asked again; four refusals among it change nothing."""
    store.answers = [failed(503, "SlowDown")] * 6 + [failed(412, "PreconditionFailed")] * 4
    put(store, observed)
    assert len(store.sent) == 11
    assert store.objects[RECORD].body == OURS


@pytest.mark.parametrize("bare", [False, True])
def test_a_get_with_another_etag_than_a_head(store: Bucket, monkeypatch: pytest.MonkeyPatch, *, bare: bool) -> None:
    """A gateway's GET names another ETag: what a HEAD names between two GETs without a change is tried, and holds."""
    etag = store.put(RECORD, OLD).strip('"') if bare else store.put(RECORD, OLD)
    store.objects[RECORD].etag = etag
    plain = store.get

    def get(key: str, **options: Any) -> Any:
        fetched = plain(key, **options)
        info = fetched.info
        return type(fetched)(
            fetched.body, ObjectInfo(key, info.size, f'W/{etag}-gzip"', info.last_modified, info.metadata), store.now
        )

    monkeypatch.setattr(store, "get", get)
    put(store, observe(store, RECORD), Conditions(create=True, replace="bare" if bare else "quoted"))
    assert store.objects[RECORD].body == OURS
    assert [request["if_match"] for request in store.sent][-1] == etag
    assert len(store.sent) == 3


def test_a_head_that_shows_another_writers_record(store: Bucket) -> None:
    """Its ETag is not taken for that of what the save saw: their record would be overwritten."""
    etag = store.put(RECORD, OLD)
    store.sent.clear()
    store.answers = [failed(412, "PreconditionFailed")]

    def meanwhile(operation: str, key: str) -> None:
        if operation == "head":
            store.before = lambda *_: None
            FakeStore.put(store, RECORD, FOREIGN)

    store.before = meanwhile
    with pytest.raises(CommitConflictError):
        put(store, Observed(etag, BEFORE))
    assert store.objects[RECORD].body == FOREIGN
    assert {request["if_match"] for request in store.sent} == {etag}


@pytest.mark.parametrize("answer", [failed(503, "SlowDown"), failed(403, "")])
def test_a_head_that_fails_costs_nothing(store: Bucket, answer: StorageError) -> None:
    """The look for another form of the ETag is a try: the PUT is sent again as it was."""
    etag = store.put(RECORD, OLD)
    store.sent.clear()
    store.answers = [failed(412, "PreconditionFailed")]

    def fail(operation: str, key: str) -> None:
        if operation == "head":
            raise answer

    store.before = fail
    put(store, Observed(etag, BEFORE))
    assert [request["if_match"] for request in store.sent] == [etag, etag]


def test_a_head_with_the_same_etag(store: Bucket) -> None:
    """There is no other form to be tried, and nothing more to be looked at."""
    etag = store.put(RECORD, OLD)
    store.log.clear()
    store.answers = [failed(412, "PreconditionFailed")]
    put(store, Observed(etag, BEFORE))
    assert store.operations() == ["put", "get", "head", "put"]


def test_no_head_where_it_could_not_help(store: Bucket) -> None:
    """Another form of an ETag is looked for only where an If-Match was refused."""
    store.answers = [failed(412, "PreconditionFailed"), failed(503, "SlowDown")]
    put(store, NOTHING)
    etag = store.objects[RECORD].etag
    store.answers = [failed(503, "SlowDown")]
    put(store, Observed(etag, BEFORE))
    assert "head" not in store.operations()


# ---------------------------------------------------------------------- when nobody can say


def unreadable(answer: StorageError) -> Callable[[str, str], None]:
    """A bucket whose GETs fail."""

    def fail(operation: str, key: str) -> None:
        if operation == "get":
            raise answer

    return fail


def test_an_outcome_that_stays_unknown(store: Bucket, observed: Observed) -> None:
    """At the deadline the error says so, with the store's last answer and how often it was asked; nothing is deleted."""
    store.answers = [failed(503, "SlowDown")] * 100_000
    with pytest.raises(StorageUnavailableError, match=r"commit outcome unknown.*the store answered 503") as caught:
        put(store, observed, deadline=Deadline(0.05))
    error = caught.value
    assert (error.status, error.code, error.request_id) == (503, "SlowDown", "request-SlowDown")
    assert (error.bucket, error.key, error.operation) == ("ckpt", RECORD, "PutObject")
    assert error.attempts == len(store.sent) > 1
    assert "delete" not in store.operations()


def test_a_store_that_was_never_heard_of(store: Bucket, observed: Observed) -> None:
    """Without a single answer to the PUT the error tells what became of the last attempt."""
    store.answers = [StorageUnavailableError("the connection was reset")] * 100_000
    with pytest.raises(
        StorageUnavailableError, match=r"commit outcome unknown.*\(the connection was reset\)"
    ) as caught:
        put(store, observed, deadline=Deadline(0.05))
    assert caught.value.status is None


def test_no_attempt_begins_that_the_deadline_would_cut(
    store: Bucket, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause that would outlast the deadline is not waited for."""
    monkeypatch.setattr(module, "backoff_s", lambda policy, attempt: 60.0)
    store.answers = [failed(503, "SlowDown")]
    started = time.monotonic()
    with pytest.raises(StorageUnavailableError, match="commit outcome unknown"):
        put(store, observed, deadline=Deadline(30))
    assert time.monotonic() - started < 10
    assert len(store.sent) == 1


def test_the_pause_between_two_attempts(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the policy's, and grows with the attempts: a store that is overloaded is left alone for a while."""
    asked, slept = [], []
    monkeypatch.setattr(module, "backoff_s", lambda policy, attempt: asked.append((policy, attempt)) or 0.25 * attempt)
    monkeypatch.setattr(module.time, "sleep", slept.append)
    store.answers = [failed(503, "SlowDown")] * 3
    put(store, NOTHING)
    assert asked == [(store.config.retry, 1), (store.config.retry, 2), (store.config.retry, 3)]
    assert slept == [0.25, 0.5, 0.75]


def test_a_store_that_cannot_be_read_for_a_while(store: Bucket, observed: Observed) -> None:
    """Where nothing is learnt the identical PUT is safe to repeat; its condition tells."""
    store.before = unreadable(failed(503, "SlowDown"))
    store.answers = [failed(503, "SlowDown"), failed(503, "SlowDown")]
    put(store, observed)
    assert store.operations() == ["put", "get", "put", "get", "put"]


def test_a_store_that_cannot_be_read_past_the_deadline(store: Bucket, observed: Observed) -> None:
    """The answer that counts is the PUT's, not the look's."""
    deadline = Deadline(0.05)

    def fail(operation: str, key: str) -> None:
        if operation == "get":
            while not deadline.expired:
                time.sleep(0.005)
            raise failed(503, "OfTheLook")

    store.before = fail
    store.answers = [failed(503, "SlowDown")]
    with pytest.raises(StorageUnavailableError, match="commit outcome unknown") as caught:
        put(store, observed, deadline=deadline)
    assert (caught.value.code, caught.value.attempts) == ("SlowDown", 1)


def test_a_look_that_is_answered_with_nonsense(store: Bucket, observed: Observed) -> None:
    """No repetition mends a refusal of the look: the outcome is unknown at once."""
    store.before = unreadable(failed(400, "InvalidRequest"))
    store.answers = [failed(503, "SlowDown")]
    with pytest.raises(StorageUnavailableError, match="commit outcome unknown") as caught:
        put(store, observed)
    assert caught.value.code == "SlowDown"
    assert len(store.sent) == 1


def test_the_last_word_of_the_store_is_told(store: Bucket, observed: Observed) -> None:
    """An attempt that the deadline cut short had no answer: the one before it is told of."""
    cut = StorageUnavailableError("cut short")
    store.answers = [failed(503, "SlowDown"), failed(409, "ConditionalRequestConflict"), cut]
    store.before = unreadable(failed(503, "SlowDown"))
    looks = 0

    def still_there() -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            raise StorageUnavailableError("the store cannot say")

    with pytest.raises(StorageUnavailableError, match=r"commit outcome unknown.*answered 409") as caught:
        put(store, observed, still_there=still_there)
    assert (caught.value.status, caught.value.attempts) == (409, 3)


@pytest.mark.parametrize("answer", [failed(412, "PreconditionFailed"), failed(503, "SlowDown")])
def test_a_record_that_may_not_be_read(store: Bucket, answer: StorageError) -> None:
    """A condition that failed tells that a checkpoint is there; any other answer tells nothing, and the refusal is raised."""
    refusal = failed(403, "AccessDenied")
    store.before = unreadable(refusal)
    store.answers = [answer]
    with pytest.raises((CheckpointExistsError, AccessDeniedError)) as caught:
        put(store, Observed(None, None, certain=False))
    if answer.status == 412:
        assert "may not read, so it cannot be replaced" in str(caught.value)
        assert (caught.value.bucket, caught.value.key) == ("ckpt", RECORD)
    else:
        assert caught.value is refusal
    assert len(store.sent) == 1


# ---------------------------------------------------------------------- whether what the record names is still there


def test_it_is_looked_for_before_each_attempt(store: Bucket, observed: Observed) -> None:
    """Also where the store has failed for an hour."""
    order: list[str] = []
    store.before = lambda operation, key: order.append(operation)
    store.answers = [failed(503, "SlowDown")]
    put(store, observed, still_there=lambda: order.append("look"))
    assert order == ["look", "get", "look", "put"]


def failing_at(number: int, error: Exception) -> Callable[[], None]:
    """A look for the save's own objects whose ``number``-th call raises."""
    looks = itertools.count(1)

    def still_there() -> None:
        if next(looks) == number:
            raise error

    return still_there


@pytest.mark.parametrize("at", [1, 2])
def test_what_was_taken_away_is_not_committed(store: Bucket, observed: Observed, at: int) -> None:
    """The error is told as it is, and no further PUT is sent."""
    gone = StorageError("gone")
    store.answers = [failed(503, "SlowDown")]
    with pytest.raises(StorageError) as caught:
        put(store, observed, still_there=failing_at(at, gone))
    assert caught.value is gone
    assert len(store.sent) == at - 1


@pytest.mark.parametrize("at", [1, 2])
def test_a_look_that_the_store_does_not_answer(store: Bucket, observed: Observed, at: int) -> None:
    """Before the first PUT it is the store's failure; behind one nobody knows what became of that."""
    silent = StorageUnavailableError("silent")
    store.answers = [failed(503, "SlowDown")]
    with pytest.raises(StorageUnavailableError) as caught:
        put(store, observed, still_there=failing_at(at, silent))
    if at == 1:
        assert caught.value is silent
    else:
        assert "commit outcome unknown" in str(caught.value)
        assert (caught.value.status, caught.value.attempts) == (503, 1)
    assert len(store.sent) == at - 1


# ---------------------------------------------------------------------- behind the commit


@pytest.mark.parametrize(
    "writer, size, expected",
    [
        (NOW, 40, True),
        (NOW, 39, "keeps 39 of its 40 bytes"),
        (NOW, 41, "keeps 41 of its 40 bytes"),
        (BEFORE, 40, "still has the one before"),
        ("9" * 32, 7, True),
        (None, 40, True),
        (None, 39, False),
        (None, None, "has none"),
    ],
)
def test_what_the_store_keeps_of_the_record(
    store: Bucket, writer: str | None, size: int | None, expected: bool | str
) -> None:
    """Ours or a later writer's: what was replaced may go. Unknown: it stays. Less, the old one, none: an error."""
    if size is not None:
        store.put(RECORD, bytes(size), metadata={} if writer is None else {"dcp-s3-write-id": writer})
    seen = Observed('"e"', BEFORE)
    if isinstance(expected, bool):
        assert confirm(store, RECORD, 40, write_id=NOW, observed=seen) is expected
        return
    with pytest.raises(StorageError, match=f"acknowledged the record and {expected}") as caught:
        confirm(store, RECORD, 40, write_id=NOW, observed=seen)
    assert (caught.value.bucket, caught.value.key) == ("ckpt", RECORD)


@pytest.mark.parametrize("answer", [failed(503, "SlowDown"), failed(403, "AccessDenied")])
def test_a_store_that_does_not_show_the_record(
    store: Bucket, answer: StorageError, caplog: pytest.LogCaptureFixture
) -> None:
    """An acknowledged commit stands; what it replaced is left to the collector, and that is said."""
    store.put(RECORD, bytes(40), metadata={"dcp-s3-write-id": NOW})

    def fail(operation: str, key: str) -> None:
        raise answer

    store.before = fail
    with caplog.at_level(logging.WARNING, logger="dcp_s3"):
        assert confirm(store, RECORD, 40, write_id=NOW, observed=Observed('"e"', BEFORE)) is False
    assert "left to dcp-s3 gc" in caplog.text


@pytest.fixture
def replaced(store: Bucket) -> list[str]:
    """The keys of a checkpoint whose record has just been replaced, its index's last."""
    *keys, record = save(store, RUN, write_id=BEFORE)
    index = store.objects[keys[-1]]
    index.body = repacked(index.body, conditional=True)
    store.objects[record].body = OURS
    store.log.clear()
    return keys


def test_what_was_replaced_is_deleted(store: Bucket, replaced: list[str]) -> None:
    """What its index names, and the index behind it: as long as one of those objects is there, it tells whose it is."""
    store.put("run/data/1111111111111111/__0_0.distcp", b"of another save")
    kept = set(store.objects) - set(replaced)
    assert delete_replaced(store, RUN, Observed('"e"', BEFORE)) == 0
    assert set(store.objects) == kept
    assert [key for operation, key in store.log if operation == "delete"] == replaced


@pytest.mark.parametrize("locked", [0, 1])
def test_what_cannot_be_deleted_is_counted(
    store: Bucket, replaced: list[str], locked: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Object Lock or a missing permission fails no save; the index stays as long as one of its objects does."""
    store.before = lambda operation, key: (
        denied(operation, key) if (operation, key) == ("delete", replaced[locked]) else None
    )
    assert delete_replaced(store, RUN, Observed('"e"', BEFORE)) == 1
    assert set(replaced) & set(store.objects) == set(replaced[locked:])
    assert f"could not delete {replaced[locked]} of the replaced checkpoint" in caplog.text


@pytest.mark.parametrize("case", ["another library's", "no index", "no condition", "silent"])
def test_what_may_still_be_needed_stays(store: Bucket, replaced: list[str], case: str) -> None:
    """What nobody can tell, and what a late PUT without a condition could bring back, is left to the collector."""
    seen = Observed('"e"', BEFORE)
    if case == "another library's":
        seen = Observed('"e"', None)
    elif case == "no index":
        del store.objects[replaced[-1]]
    elif case == "no condition":
        stored = store.objects[replaced[-1]]
        stored.body = repacked(stored.body, conditional=False)
    else:
        store.before = unreadable(failed(503, "SlowDown"))
    before = set(store.objects)
    assert delete_replaced(store, RUN, seen) == 0
    assert set(store.objects) == before
    assert store.operations(replaced[0]) == []
