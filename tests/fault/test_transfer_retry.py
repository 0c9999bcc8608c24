"""Which failures of one request are repeated, how often, how soon, and what is said when it was in vain."""

from __future__ import annotations

import itertools
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from dcp_s3 import (
    AccessDeniedError,
    DcpS3Error,
    DeadlineExceededError,
    RetryPolicy,
    StorageError,
    StorageUnavailableError,
)
from dcp_s3._transfer.s3.control_store import is_precondition_failed
from tests.fault.conftest import KEY, QUICK, Transfer, pattern, wait
from tests.fault.server import (
    Action,
    FaultServer,
    cut_reply,
    delay,
    drop_reply,
    error,
    never_answer,
    reply_headers,
    reset,
)

BODY = pattern(300_000)
JSON = "application/json"

HTML = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
PASSING: dict[str, Action] = {
    "503-slow-down": error(503, "SlowDown"),
    "503-empty": error(503, body=""),
    "429": error(429, "TooManyRequests"),
    "429-empty": error(429, body=""),
    "500": error(500, "InternalError"),
    "502-html": error(502, body=HTML, headers={"Content-Type": "text/html"}),
    "504-empty": error(504, body=""),
    "408-empty": error(408, body=""),
    "400-request-timeout": error(400, "RequestTimeout"),
    "400-not-xml": error(400, body="upstream sent too big a header"),
    "400-empty": error(400, body=""),
    "409-conditional-conflict": error(409, "ConditionalRequestConflict"),
    "reset-at-head": reset("head"),
    "reset-in-body": reset("body", 100_000),
    "reset-behind-body": reset("handle"),
    "done-then-closed": drop_reply("close"),
    "done-then-reset": drop_reply("reset"),
    "error-before-the-body-is-read": error(503, "SlowDown", at="head"),
}
FINAL: dict[str, tuple[Action, type[StorageError]]] = {
    "403-denied": (error(403, "AccessDenied"), AccessDeniedError),
    "403-empty": (error(403, body=""), AccessDeniedError),
    "401-empty": (error(401, body=""), AccessDeniedError),
    "404-no-bucket": (error(404, "NoSuchBucket"), StorageError),
    "403-unknown-key": (error(403, "InvalidAccessKeyId"), AccessDeniedError),
    "403-signature": (error(403, "SignatureDoesNotMatch"), AccessDeniedError),
    "400-malformed-auth": (error(400, "AuthorizationHeaderMalformed"), AccessDeniedError),
    "400-too-large": (error(400, "EntityTooLarge"), StorageError),
    "400-expired": (error(400, "ExpiredToken"), AccessDeniedError),
    "405": (error(405, "MethodNotAllowed"), StorageError),
}
GETS: dict[str, Action] = {
    "cut-reply": cut_reply(1000),
    "cut-reply-reset": cut_reply(1000, "reset"),
    "reset-at-head": reset("head"),
    "503": error(503, "SlowDown"),
    "400-not-xml": error(400, body="<<<"),
    "404-behind-a-good-body-is-no-404": error(502, body=HTML),
}


def refused(call: Callable[[], Any], kind: type[BaseException]) -> DcpS3Error:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert isinstance(caught.value, DcpS3Error)
    return caught.value


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_failure_is_repeated_once(s3: FaultServer, transfer: Transfer, fault: str):
    """A failure that passes costs one more request on either plane, and the object is the one that was sent."""
    s3.on("PutObject", PASSING[fault], nth=1)
    transfer.put(BODY)
    assert s3.read(KEY) == BODY
    counted = transfer.job.counter.retries
    assert counted == 1 or (counted == 0 and fault.startswith(("reset", "done")))  # a kept connection is just replaced
    assert [r.wire_bytes for r in s3.requests("PutObject")][1:] == [len(BODY)]

    s3.on("PutObject", PASSING[fault], key="small", nth=1)
    transfer.store.put("small", BODY, content_type=JSON)
    assert s3.read("small") == BODY
    assert len(s3.requests("PutObject", key="small")) == 2
    assert transfer.job.counter.retries == counted + 1


@pytest.mark.parametrize("fault", GETS)
def test_a_passing_failure_of_a_read_is_repeated_once(s3: FaultServer, transfer: Transfer, fault: str):
    """A read that fails, or whose body ends early, is one unit with its body on either plane."""
    s3.put(KEY, BODY)
    s3.on("GetObject", GETS[fault], nth=1)
    assert transfer.get(1000, 250_000) == BODY[1000:250_000]
    counted = transfer.job.counter.retries
    assert len(s3.requests("GetObject")) == 2
    assert counted == 1 or (counted == 0 and fault == "reset-at-head")  # a kept connection is just replaced
    s3.on("GetObject", GETS[fault], nth=1)
    assert transfer.store.get(KEY).body == BODY
    assert (len(s3.requests("GetObject")), transfer.job.counter.retries) == (4, counted + 1)


@pytest.mark.parametrize("fault", FINAL)
def test_a_refusal_is_not_repeated(s3: FaultServer, transfer: Transfer, fault: str):
    """A refusal costs exactly one request on either plane, and says status, code, bucket, key, rank and operation."""
    action, kind = FINAL[fault]
    s3.on(("PutObject", "GetObject"), action)
    s3.put(KEY, BODY)
    for call, operation in [
        (lambda: transfer.put(BODY), "PutObject"),
        (lambda: transfer.get(0, 100), "GetObject"),
        (lambda: transfer.store.put(KEY, b"{}", content_type=JSON), "PutObject"),
        (lambda: transfer.store.get(KEY), "GetObject"),
    ]:
        before = len(s3.log)
        failure = refused(call, kind)
        assert len(s3.log) == before + 1
        answer = action.answer
        assert answer is not None
        assert (failure.status, failure.code) == (answer.status, answer.code or str(answer.status))
        assert (failure.bucket, failure.key, failure.rank, failure.operation) == ("bucket", KEY, 3, operation)
        assert failure.attempts == 1
        assert failure.request_id
    assert transfer.job.counter.retries == 0


@pytest.mark.parametrize("attempts", [1, 4])
def test_a_constant_503_is_asked_as_often_as_the_policy_says(
    s3: FaultServer, transfer_to: Callable[..., Transfer], attempts: int
):
    """Every kind of request is sent max_attempts times under a constant 503, and the error says how often."""
    policy = RetryPolicy(max_attempts=attempts, initial_wait_s=0.001, max_wait_s=0.002)
    transfer = transfer_to(s3, retry=policy)
    s3.put(KEY, BODY)
    s3.on("*", error(503, "SlowDown"))
    store = transfer.store
    calls: dict[str, Callable[[], Any]] = {
        "PutObject": lambda: transfer.put(BODY),
        "GetObject": lambda: transfer.get(0, 100),
        "CreateMultipartUpload": lambda: transfer.send(BODY, part_bytes=100_000),
        "HeadObject": lambda: store.head(KEY),
        "DeleteObject": lambda: store.delete(KEY),
        "ListObjectsV2": lambda: list(store.list("")),
        "ListMultipartUploads": lambda: list(store.list_uploads("")),
        "AbortMultipartUpload": lambda: store.abort_upload(KEY, "id"),
    }
    for operation, call in calls.items():
        failure = refused(call, StorageUnavailableError)
        assert (failure.attempts, failure.status, failure.code, failure.rank) == (
            attempts,
            503,
            "503" if operation == "HeadObject" else "SlowDown",
            3,
        )
        assert len(s3.requests(operation)) == attempts
    before = len(s3.log)
    refused(lambda: store.put("once", b"", content_type=JSON, retry=False), StorageUnavailableError)
    assert len(s3.log) == before + 1


@pytest.mark.parametrize("kind", ["part", "complete"])
def test_a_constant_503_of_one_step_of_an_upload(plain_s3: FaultServer, plain_transfer: Transfer, kind: str):
    """A part, or Complete, is sent max_attempts times; then the upload is aborted, and nothing is left of it."""
    operation = {"part": "UploadPart", "complete": "CompleteMultipartUpload"}[kind]
    plain_s3.on(operation, error(503, "SlowDown"), **({"part": 2} if kind == "part" else {}))
    failure = refused(lambda: plain_transfer.send(BODY, part_bytes=100_000), StorageUnavailableError)
    assert (failure.status, failure.attempts) == (503, QUICK.max_attempts)
    assert failure.part == (2 if kind == "part" else None)
    sent = plain_s3.requests(operation, part=2 if kind == "part" else None)
    assert len(sent) == QUICK.max_attempts
    assert (plain_s3.objects(), plain_s3.uploads()) == ({}, {})
    assert plain_transfer.plane.budget.held == 0


def test_the_waits_grow(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Waits have full jitter below initial_wait_s * 2**n and max_wait_s: eight tries last as long as that at most."""
    policy = RetryPolicy(max_attempts=8, initial_wait_s=0.02, max_wait_s=0.1)
    transfer = transfer_to(plain_s3, retry=policy)
    plain_s3.on("PutObject", error(503, "SlowDown"))
    refused(lambda: transfer.put(BODY), StorageUnavailableError)
    records = plain_s3.requests("PutObject")
    assert len(records) == 8
    waits = [after.t_start - (before.t_end or 0) for before, after in itertools.pairwise(records)]
    bounds = [0.02, 0.04, 0.08, 0.1, 0.1, 0.1, 0.1]
    assert all(waited < bound + 0.15 for waited, bound in zip(waits, bounds, strict=True))
    assert sum(waits) > 0.02  # below that once in millions of runs


def test_retry_after_is_honoured(plain_s3: FaultServer, plain_transfer: Transfer):
    """The store's Retry-After, in seconds or as a time by its own clock, is waited for; the retry is signed anew."""
    dates = {"Date": "Mon, 06 Jul 2026 10:00:00 GMT", "Retry-After": "Mon, 06 Jul 2026 10:00:01 GMT"}
    plain_s3.on("PutObject", error(503, "SlowDown", retry_after=1), key=KEY, nth=1)
    plain_s3.on("PutObject", error(503, "SlowDown", headers=dates), key="small", nth=1)
    plain_transfer.put(BODY)
    plain_transfer.store.put("small", b"{}", content_type=JSON)
    for key in (KEY, "small"):
        first, second = plain_s3.requests("PutObject", key=key)
        assert first.t_end is not None
        assert 0.95 < second.t_start - first.t_end < 1.6
        assert second.headers["x-amz-date"] > first.headers["x-amz-date"]


def test_a_retry_after_that_is_no_time_is_ignored(plain_s3: FaultServer, plain_transfer: Transfer):
    """Nonsense in Retry-After leaves the policy's own waits."""
    for value in ("soon", "-5", "Mon, 06 Jul 2026 10:00:00", "9999999999 s"):
        plain_s3.on("PutObject", error(503, "SlowDown", retry_after=value), nth=1)
        started = time.monotonic()
        plain_transfer.put(BODY)
        assert time.monotonic() - started < 8


def test_a_retry_after_beyond_the_deadline_ends_at_once(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Who is told to come back after the deadline does not wait: the error names both the deadline and the cause."""
    transfer = transfer_to(plain_s3, deadline_s=25)
    plain_s3.on("*", error(503, "SlowDown", retry_after=30))
    for call in (lambda: transfer.put(BODY), lambda: transfer.store.get(KEY)):
        started = time.monotonic()
        failure = refused(call, DeadlineExceededError)
        assert time.monotonic() - started < 8
        assert "deadline of 25 s" in str(failure)
        assert "SlowDown" in str(failure)
        assert (failure.status, failure.code, failure.attempts) == (503, "SlowDown", 1)


def test_an_unknown_host_is_repeated(transfer_to: Callable[..., Transfer], plain_s3: FaultServer):
    """A name that does not resolve, and a port where nobody listens, are tried as often as the policy says."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for endpoint in ("http://store.invalid", nobody):
            transfer = transfer_to(plain_s3, endpoint_url=endpoint)
            for call in (
                lambda t=transfer: t.put(BODY),
                lambda t=transfer: t.get(0, 1),
                lambda t=transfer: t.store.get(KEY),
            ):
                failure = refused(call, StorageUnavailableError)
                assert failure.attempts == QUICK.max_attempts
                assert endpoint.split("//")[1] in str(failure)
    assert plain_s3.log == []


def test_a_name_that_resolves_at_the_second_try(
    plain_s3: FaultServer, plain_transfer: Transfer, monkeypatch: pytest.MonkeyPatch
):
    """One DNS failure is repeated on either plane."""
    resolve = socket.getaddrinfo
    asked: list[Any] = []

    def once_unknown(host: Any, *args: Any, **options: Any) -> Any:
        asked.append(host)
        if asked.count(host) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return resolve("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", once_unknown)
    named = [f"http://{name}:{plain_s3.ports[0]}" for name in ("data.test", "read.test", "control.test")]
    plain_s3.put(KEY, BODY)
    for endpoint in named:
        transfer = Transfer(plain_s3, endpoint_url=endpoint)
        if "data" in endpoint:
            transfer.put(BODY)
        elif "read" in endpoint:
            assert transfer.get(5, 10) == BODY[5:10]
        else:
            assert transfer.store.get(KEY).body == BODY
        assert transfer.job.counter.retries == 1
        wait(transfer.plane.close())
    assert len(plain_s3.log) == 3


@pytest.mark.parametrize("how", ["reset", "garbage"])
def test_a_connection_that_fails_before_the_request(s3: FaultServer, transfer_to: Callable[..., Transfer], how: str):
    """A reset, or garbage instead of TLS or HTTP, on a new connection is repeated: the second connection serves."""
    s3.put(KEY, BODY)
    calls: list[Callable[[Transfer], object]] = [
        lambda transfer: transfer.put(BODY),
        lambda transfer: transfer.get(0, 1000),
        lambda transfer: transfer.store.get(KEY),
    ]
    for concurrency, call in enumerate(calls, 5):  # another config has connections of its own
        transfer = transfer_to(s3, max_concurrency=concurrency)
        s3.spoil_connections(how)
        call(transfer)
        assert transfer.job.counter.retries == 1


def test_the_clock_once(s3: FaultServer, transfer: Transfer):
    """One RequestTimeTooSkewed is answered with one fresh signature."""
    s3.on("*", error(403, "RequestTimeTooSkewed"), nth=1)
    transfer.put(BODY)
    s3.on("*", error(403, "RequestTimeTooSkewed"), key="small", nth=1)
    transfer.store.put("small", b"", content_type=JSON)
    assert [r.status for r in s3.log] == [403, 200, 403, 200]


def test_a_wrong_clock(s3: FaultServer, transfer: Transfer, allowed: set[str]):
    """A real skew is refused twice and no more, and the error says that it is about the clock."""
    allowed.add("request-age")
    s3.configure(max_request_age_s=900, clock_offset_s=4000)
    for call in (
        lambda: transfer.put(BODY),
        lambda: transfer.get(0, 100),
        lambda: transfer.store.put("small", b"", content_type=JSON),
    ):
        before = len(s3.log)
        failure = refused(call, AccessDeniedError)
        assert len(s3.log) == before + 2
        assert (failure.code, failure.attempts) == ("RequestTimeTooSkewed", 2)
        assert "clock" in str(failure)


def test_failures_of_other_kinds_leave_the_fresh_signature(plain_s3: FaultServer, plain_transfer: Transfer):
    """A request that failed by 503 before still gets its one fresh signature."""
    plain_s3.on("PutObject", error(503, "SlowDown"), nth=1)
    plain_s3.on("PutObject", error(403, "RequestTimeTooSkewed"), nth=2)
    plain_s3.on("PutObject", error(503, "SlowDown"), nth=3)
    plain_transfer.put(BODY)
    assert [r.status for r in plain_s3.log] == [503, 403, 503, 200]


def test_attempts_of_a_part_never_overlap(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A part that hangs is given up, its connection closed, before it is sent again; the last ETag is the one used."""
    transfer = transfer_to(s3, read_timeout_s=1.0)
    s3.on("UploadPart", never_answer(commit=True), part=2, nth=1)
    s3.on("UploadPart", delay(reply_s=2.0) | reply_headers({"ETag": '"old"'}), part=3, nth=1)  # answered, but too late
    receipt = transfer.send(BODY, part_bytes=100_000)
    assert s3.read(KEY) == BODY
    assert receipt.size == len(BODY)
    assert [len(s3.requests("UploadPart", part=part)) for part in (1, 2, 3)] == [1, 2, 2]
    for part in (2, 3):
        first, second = s3.requests("UploadPart", part=part)
        assert first.t_end is not None
        assert second.t_start > first.t_start + 0.9
        assert first.outcome in ("client closed", "stalled", "replied")
    assert s3.violations() == []


def test_a_precondition_is_an_answer(plain_s3: FaultServer, plain_transfer: Transfer):
    """412 is not repeated, and can be told from every other refusal."""
    store = plain_transfer.store
    store.put("k", b"1", content_type=JSON, if_none_match=True)
    with pytest.raises(StorageError) as caught:
        store.put("k", b"2", content_type=JSON, if_none_match=True)
    assert is_precondition_failed(caught.value)
    assert len(plain_s3.log) == 2
    assert plain_s3.read("k") == b"1"


def test_errors_say_what_happened(plain_s3: FaultServer, plain_transfer: Transfer):
    """An error's text names what the store said, what to do, and on which object, operation and rank."""
    plain_s3.on("PutObject", error(403, "AccessDenied"))
    failure = refused(lambda: plain_transfer.put(BODY), AccessDeniedError)
    assert re.fullmatch(
        r"the store answered 403 AccessDenied: scripted: AccessDenied \(check the policy .*\) "
        rf"\[rank=3, operation=PutObject, bucket=bucket, key={KEY}, status=403, code=AccessDenied, "
        r"request_id=REQ\d+, attempts=1\]",
        str(failure),
    )
