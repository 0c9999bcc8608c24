"""What became of a request without a clear answer: whose object is there, and what must not be sent behind it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dcp_s3 import StorageError, StorageUnavailableError
from tests.fault.conftest import KEY, TOKEN, Transfer, pattern
from tests.fault.server import (
    Action,
    FaultServer,
    drop_reply,
    error,
    never_answer,
    reply_headers,
    reset,
)

BODY = pattern(250_000)
OTHER = pattern(250_000)
PART = 100_000
NO_TOKEN = reply_headers({"x-amz-meta-dcp-s3-token": None})
"""A store that keeps no user metadata."""
OPAQUE = reply_headers({"ETag": '"an-opaque-tag"'})
LONG_AGO = reply_headers({"Last-Modified": "Mon, 06 Jul 2020 10:00:00 GMT"})


@pytest.mark.parametrize(
    "head, checksum",
    [
        (NO_TOKEN, "auto"),
        (NO_TOKEN | LONG_AGO, "none"),
        (NO_TOKEN | OPAQUE | LONG_AGO, "auto"),
        (NO_TOKEN | OPAQUE, "none"),
    ],
    ids=["all", "etag", "checksum", "time"],
)
@pytest.mark.parametrize("answer", [drop_reply(), error(500, "InternalError", at="reply")], ids=["lost", "500"])
def test_an_object_without_token_is_ours_where_something_proves_it(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], head: Action, checksum: str, answer: Action
):
    """A Complete that was done and not heard of, on a store that keeps no metadata: ETag, checksum or time show that it is ours."""
    transfer = transfer_to(plain_s3, checksum=checksum)
    plain_s3.on("HeadObject", head)
    plain_s3.on("CompleteMultipartUpload", answer)
    assert transfer.send(BODY, part_bytes=PART).size == len(BODY)
    assert plain_s3.read(KEY) == BODY
    assert len(plain_s3.requests("CompleteMultipartUpload")) == 1


@pytest.mark.parametrize("checksum", ["auto", "none"])
@pytest.mark.parametrize("answer", [error(500, "InternalError"), error(404, "NoSuchUpload"), reset("handle")])
def test_an_object_without_token_that_nothing_proves(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], allowed: set[str], answer: Action, checksum: str
):
    """An object of the right size and of another time is not taken for ours behind a Complete that was not done."""
    allowed.add("open-upload")
    transfer = transfer_to(plain_s3, checksum=checksum)
    plain_s3.put(KEY, OTHER, age_s=3600)
    plain_s3.on("CompleteMultipartUpload", answer)
    with pytest.raises(StorageError, match="neither token, ETag, checksum nor time") as caught:
        transfer.send(BODY, part_bytes=PART)
    assert (caught.value.operation, caught.value.key) == ("CompleteMultipartUpload", KEY)


def test_an_etag_of_other_parts_is_no_proof(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], allowed: set[str]
):
    """An object of as many parts whose ETag is that of others is not ours, however young it is."""
    allowed.add("open-upload")
    transfer = transfer_to(plain_s3, checksum="none")
    plain_s3.put(KEY, OTHER)
    plain_s3.on("HeadObject", reply_headers({"ETag": f'"{"0" * 32}-3"'}))
    plain_s3.on("CompleteMultipartUpload", reset("handle"))
    with pytest.raises(StorageError, match="neither token"):
        transfer.send(BODY, part_bytes=PART)


def test_success_needs_no_proof(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A Complete that was clearly answered is believed on a store that keeps no metadata and has ETags of its own."""
    transfer = transfer_to(plain_s3, checksum="none")
    plain_s3.on("HeadObject", NO_TOKEN | OPAQUE | LONG_AGO)
    assert transfer.send(BODY, part_bytes=PART).etag == '"an-opaque-tag"'


def test_a_small_object_of_somebody_else(plain_s3: FaultServer, plain_transfer: Transfer):
    """An object written in one request that carries another token, when HEAD looks at it, is not ours."""
    plain_s3.on("HeadObject", reply_headers({"x-amz-meta-dcp-s3-token": "f" * 16}))
    with pytest.raises(StorageError, match=rf"another writer's \(token {'f' * 16}, not {TOKEN}\)"):
        plain_transfer.send(BODY, part_bytes=len(BODY) + 1)


@pytest.mark.parametrize(
    "answer", [reset("handle"), error(500, "InternalError"), error(504, body=""), error(200, body="")]
)
@pytest.mark.parametrize("then", [None, error(403, "AccessDenied")], ids=["for-ever", "then-refused"])
def test_no_abort_behind_a_complete_that_head_does_not_show(
    plain_s3: FaultServer, plain_transfer: Transfer, allowed: set[str], answer: Action, then: Action | None
):
    """HEAD says 404 behind a Complete without a clear answer: it may still be at work, so no Abort is sent when the save is given
    up, also if a later Complete is refused.
    """
    allowed.add("open-upload")
    if then is None:
        plain_s3.on("CompleteMultipartUpload", answer)
    else:
        plain_s3.on("CompleteMultipartUpload", answer, nth=1)
        plain_s3.on("CompleteMultipartUpload", then, nth=2)
    with pytest.raises(StorageError):
        plain_transfer.send(BODY, part_bytes=PART)
    assert len(plain_s3.requests("CompleteMultipartUpload")) == (5 if then is None else 2)
    assert plain_s3.requests("HeadObject", status=404) != []
    assert plain_s3.requests("AbortMultipartUpload") == []


def test_a_complete_that_is_done_behind_the_last_look(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], allowed: set[str]
):
    """A Complete that the store carries out when the save has given up finds its parts: nothing took them away."""
    allowed |= {"open-upload", "overlapping-complete"}
    transfer = transfer_to(plain_s3, read_timeout_s=0.3)
    gate = plain_s3.hold("CompleteMultipartUpload", at="late", then=error(500, "InternalError"), nth=1)
    plain_s3.on("CompleteMultipartUpload", never_answer(), since=2)
    with pytest.raises(StorageUnavailableError):
        transfer.send(BODY, part_bytes=PART)
    gate.release()
    end = time.monotonic() + 5
    while KEY not in plain_s3.objects():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert plain_s3.read(KEY) == BODY


@pytest.mark.parametrize("code", ["SlowDown", "TooManyRequests"])
def test_an_abort_behind_a_complete_that_was_throttled(plain_s3: FaultServer, plain_transfer: Transfer, code: str):
    """A store that throttles has refused the Complete: nothing is at work, and the upload is aborted."""
    plain_s3.on("CompleteMultipartUpload", error(503 if code == "SlowDown" else 429, code))
    with pytest.raises(StorageUnavailableError):
        plain_transfer.send(BODY, part_bytes=PART)
    assert len(plain_s3.requests("AbortMultipartUpload")) == 1
    assert plain_s3.uploads() == {}


@pytest.mark.parametrize("plane", ["data", "control"])
def test_a_retry_after_longer_than_the_stall_limit(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], plane: str
):
    """A store that asks for five minutes once is asked again before the stall limit gives the save up."""
    transfer = transfer_to(plain_s3, stall_limit_s=1.0)
    if plane == "data":
        plain_s3.on("UploadPart", error(503, "SlowDown", retry_after=300), part=1, nth=1)
        assert transfer.send(BODY, part_bytes=PART).size == len(BODY)
    else:
        plain_s3.put(KEY, BODY)
        plain_s3.on("GetObject", error(503, "SlowDown", retry_after=300), nth=1)
        assert transfer.store.get(KEY).body == BODY
    assert transfer.job.counter.retries == 1
