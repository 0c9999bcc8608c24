"""How an upload of parts ends: Complete and its odd answers, Abort, the order of parts, and what is left behind."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from dcp_s3 import AccessDeniedError, DeadlineExceededError, StorageError, StorageUnavailableError
from dcp_s3._transfer import upload as upload_module
from dcp_s3._transfer.checksum import crc32c
from tests.fault.conftest import KEY, QUICK, TOKEN, Transfer, pattern
from tests.fault.server import (
    MULTIPART,
    ODD_COMPLETES,
    PROFILES,
    FaultServer,
    delay,
    drip,
    drop_reply,
    error,
    lose_stored,
    never_answer,
    reply_headers,
    reset,
    truncate_stored,
)

BODY = pattern(250_000)
PART = 100_000
DONE_AT_ONCE = {"blanks-then-result", "empty", "cut-at-60", "no-etag", "empty-etag", "foreign-etag"}
"""Odd answers behind which the object is there: nothing is sent again."""


def count_completes(s3: FaultServer) -> int:
    return len(s3.requests("CompleteMultipartUpload"))


def test_an_upload(s3: FaultServer, transfer: Transfer):
    """An object of parts: one Create, each part once, one Complete, one HEAD; the receipt says what is there."""
    receipt = transfer.send(BODY, part_bytes=PART)
    assert s3.read(KEY) == BODY
    assert [r.operation for r in s3.log if r.operation != "UploadPart"] == [
        "CreateMultipartUpload",
        "CompleteMultipartUpload",
        "HeadObject",
    ]
    assert sorted((r.part, r.wire_bytes) for r in s3.requests("UploadPart")) == [(1, PART), (2, PART), (3, 50_000)]
    assert receipt.crc32c == tuple(crc32c(BODY[i : i + PART]) for i in range(0, len(BODY), PART))
    assert (receipt.key, receipt.size, receipt.part_bytes) == (KEY, len(BODY), PART)
    stored = s3.objects()[KEY]
    assert receipt.etag == f'"{stored["etag"]}"'
    assert stored["headers"]["x-amz-meta-dcp-s3-token"] == TOKEN


@pytest.mark.parametrize("odd", ODD_COMPLETES)
def test_an_odd_complete_then_a_good_one(s3: FaultServer, transfer: Transfer, odd: str):
    """Whatever a first Complete answers with status 200: the object is there in the end, and its ETag is HEAD's."""
    s3.on("CompleteMultipartUpload", ODD_COMPLETES[odd], nth=1)
    receipt = transfer.send(BODY, part_bytes=PART)
    assert s3.read(KEY) == BODY
    assert receipt.etag == f'"{s3.objects()[KEY]["etag"]}"'
    assert count_completes(s3) == (1 if odd in DONE_AT_ONCE else 2)
    assert s3.requests("AbortMultipartUpload") == []
    assert s3.uploads() == {}


def test_a_store_that_never_gives_the_etag(plain_s3: FaultServer, plain_transfer: Transfer):
    """Ceph answers Complete with an empty ETag: that is a success, and HEAD has the ETag; also behind an odd answer."""
    plain_s3.configure(**(PROFILES["ceph"] | {"min_part_bytes": 0}))
    for number, (odd, action) in enumerate([("none", None), *ODD_COMPLETES.items()]):
        key = f"{KEY}.{number}"
        if action is not None:
            plain_s3.on("CompleteMultipartUpload", action, key=key, nth=1)
        receipt = plain_transfer.send(BODY, key, part_bytes=PART)
        assert receipt.etag == f'"{plain_s3.objects()[key]["etag"]}"', odd
        assert plain_s3.read(key) == BODY


@pytest.mark.parametrize("odd", ["internal-error", "slow-down", "blanks-then-error", "empty-not-done"])
def test_an_odd_complete_for_ever(s3: FaultServer, transfer: Transfer, allowed: set[str], odd: str):
    """Complete is tried as often as the policy says. Then the upload is aborted where the store throttled, and so did nothing; one
    that may still be at work is left alone.
    """
    if odd != "slow-down":
        allowed.add("open-upload")
    s3.on("CompleteMultipartUpload", ODD_COMPLETES[odd])
    with pytest.raises(StorageUnavailableError) as caught:
        transfer.send(BODY, part_bytes=PART)
    assert count_completes(s3) == QUICK.max_attempts
    assert caught.value.attempts == QUICK.max_attempts
    assert (caught.value.operation, caught.value.key, caught.value.rank) == ("CompleteMultipartUpload", KEY, 3)
    assert s3.objects() == {}
    ended = ["AbortMultipartUpload"] if odd == "slow-down" else ["CompleteMultipartUpload", "HeadObject"]
    assert [r.operation for r in s3.log][-len(ended) :] == ended


@pytest.mark.parametrize(
    "fault",
    [drop_reply("close"), drop_reply("reset"), never_answer(commit=True), error(500, "InternalError", at="reply")],
)
@pytest.mark.parametrize("again", [404, 500])
def test_a_complete_whose_answer_is_lost(
    s3: FaultServer, transfer_to: Callable[..., Transfer], fault: object, again: int
):
    """A Complete that was done and not heard of is settled by HEAD and our token: it is not sent again."""
    transfer = transfer_to(s3, read_timeout_s=0.8)
    s3.configure(complete_again=again)
    s3.on("CompleteMultipartUpload", fault, nth=1)
    receipt = transfer.send(BODY, part_bytes=PART)
    assert s3.read(KEY) == BODY
    assert receipt.size == len(BODY)
    assert count_completes(s3) == 1
    assert s3.requests("AbortMultipartUpload") == []


@pytest.mark.parametrize("fault", [reset("head"), reset("handle"), error(503, "SlowDown"), error(400, body="<<<")])
def test_a_complete_that_was_not_done(s3: FaultServer, transfer: Transfer, fault: object):
    """A Complete that failed and left no object is sent again, behind the HEAD that showed it."""
    s3.on("CompleteMultipartUpload", fault, nth=1)
    transfer.send(BODY, part_bytes=PART)
    assert s3.read(KEY) == BODY
    ends = [r.operation for r in s3.log if r.operation in ("CompleteMultipartUpload", "HeadObject")]
    assert ends == ["CompleteMultipartUpload", "HeadObject"] * 2


@pytest.mark.parametrize("code", ["NoSuchUpload", "InvalidPart", "InvalidPartOrder", "MalformedXML", "AccessDenied"])
def test_a_complete_that_is_refused(plain_s3: FaultServer, plain_transfer: Transfer, code: str):
    """A refused Complete is not repeated; the upload is aborted, and the error names the refusal."""
    status = {"NoSuchUpload": 404, "AccessDenied": 403}.get(code, 400)
    plain_s3.on("CompleteMultipartUpload", error(status, code))
    with pytest.raises(StorageError) as caught:
        plain_transfer.send(BODY, part_bytes=PART)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert count_completes(plain_s3) == 1
    assert (plain_s3.objects(), plain_s3.uploads()) == ({}, {})


def test_a_complete_that_takes_long(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A store that sends blanks while it joins the parts is at work: it is waited for beyond read_timeout_s."""
    transfer = transfer_to(s3, read_timeout_s=1.5)
    s3.on("CompleteMultipartUpload", ODD_COMPLETES["blanks-then-result"] | drip(0.2, 40))
    started = time.monotonic()
    transfer.send(BODY, part_bytes=PART)
    assert time.monotonic() - started > 1.8
    assert count_completes(s3) == 1


@pytest.mark.parametrize("end", [{"deadline_s": 3.0}, {"stall_limit_s": 2.0, "read_timeout_s": 30.0}])
def test_no_abort_behind_an_unclear_complete(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], allowed: set[str], end: dict[str, float]
):
    """A Complete that may be at work when the save is given up is not overtaken by an Abort; the rest is left to gc."""
    allowed.add("open-upload")
    transfer = transfer_to(plain_s3, **end)
    gate = plain_s3.hold("CompleteMultipartUpload", at="handle")
    with pytest.raises(StorageUnavailableError):
        transfer.send(BODY, part_bytes=PART)
    assert count_completes(plain_s3) == 1  # it came to that: before its Complete an upload is aborted
    assert plain_s3.requests("AbortMultipartUpload") == []
    gate.release()  # and so the late Complete finds its parts
    plain_s3.wait_for("CompleteMultipartUpload")
    deadline = time.monotonic() + 5
    while KEY not in plain_s3.objects():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert plain_s3.read(KEY) == BODY


def test_no_abort_when_head_cannot_settle_it(plain_s3: FaultServer, plain_transfer: Transfer, allowed: set[str]):
    """Complete's answer is lost and HEAD fails for ever: nobody knows, so nothing is aborted and the error is raised."""
    allowed.add("open-upload")
    plain_s3.on("CompleteMultipartUpload", drop_reply())
    plain_s3.on("HeadObject", error(503, body=""))
    with pytest.raises(StorageUnavailableError):
        plain_transfer.send(BODY, part_bytes=PART)
    assert plain_s3.requests("AbortMultipartUpload") == []
    assert plain_s3.read(KEY) == BODY


def test_parts_that_are_lost_behind_their_answer(plain_s3: FaultServer, plain_transfer: Transfer):
    """A store that joins fewer bytes than it took is found out by HEAD: an error with both sizes, no receipt."""
    plain_s3.on("UploadPart", truncate_stored(70_000), part=2)
    with pytest.raises(StorageError, match=r"has 220000 bytes .* expected 250000"):
        plain_transfer.send(BODY, part_bytes=PART)
    plain_s3.clear()
    plain_s3.on("CompleteMultipartUpload", lose_stored())
    with pytest.raises(StorageUnavailableError, match="the object is not there"):
        plain_transfer.send(BODY, part_bytes=PART)


def test_an_object_of_somebody_else(plain_s3: FaultServer, plain_transfer: Transfer, allowed: set[str]):
    """HEAD shows another token behind a failed Complete: that object is not taken for ours, and ours not aborted."""
    allowed.add("open-upload")
    plain_s3.put(KEY, BODY, headers={"x-amz-meta-dcp-s3-token": "f" * 16})
    plain_s3.on("CompleteMultipartUpload", error(500, "InternalError"))
    with pytest.raises(StorageError, match=rf"token {'f' * 16}, expected .* {TOKEN}"):
        plain_transfer.send(BODY, part_bytes=PART)


def test_parts_that_end_in_reverse(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """12 parts that end in reverse order are completed in numeric order from 1, each with its own ETag."""
    transfer = transfer_to(s3, max_concurrency=12)
    gates = [s3.hold("UploadPart", part=part) for part in range(1, 13)]
    body = pattern(12_000)
    upload = transfer.upload(part_bytes=1000)
    upload.append(memoryview(body))
    for gate in reversed(gates):
        gate.wait_arrived()
        gate.release()
        s3.wait_for("UploadPart", count=13 - gates.index(gate) - 1)
    upload.finish()
    ended = [r.part for r in sorted(s3.requests("UploadPart"), key=lambda r: r.t_end or 0)]
    assert ended == list(range(12, 0, -1))
    (complete,) = s3.requests("CompleteMultipartUpload")
    assert complete.listed == list(range(1, 13))
    assert s3.read(KEY) == body


def test_1001_parts(plain_s3: FaultServer, plain_transfer: Transfer):
    """More than 1,000 parts are listed all, in order."""
    body = pattern(1001 * 50)
    receipt = plain_transfer.send(body, part_bytes=50)
    (complete,) = plain_s3.requests("CompleteMultipartUpload")
    assert complete.listed == list(range(1, 1002))
    assert len(receipt.crc32c) == 1001
    assert plain_s3.read(KEY) == body


@pytest.mark.parametrize("form", ['"{}"', "{}", '"{}-1"', '"{}-99"'])
def test_etags_go_back_verbatim(plain_s3: FaultServer, plain_transfer: Transfer, completes: list[bytes], form: str):
    """A part's ETag is sent back as the store gave it, quoted or not, with or without a suffix."""
    etags = {part: form.format(f"{part:032x}") for part in (1, 2, 3)}
    for part, etag in etags.items():
        plain_s3.on("UploadPart", reply_headers({"ETag": etag}), part=part)
    plain_s3.on("CompleteMultipartUpload", error(400, "InvalidPart"))
    with pytest.raises(StorageError):
        plain_transfer.send(BODY, part_bytes=PART)
    (body,) = completes
    listed = [f"<ETag>{etags[part]}</ETag>".encode() for part in (1, 2, 3)]
    positions = [body.find(element) for element in listed]
    assert -1 not in positions
    assert positions == sorted(positions)


def test_too_many_parts(plain_s3: FaultServer, plain_transfer: Transfer):
    """An object that would need an eleventh of ten parts is refused before that part, not at the end, nor cut short."""
    plain_s3.configure(max_parts=10)
    upload = plain_transfer.upload(part_bytes=1000, max_parts=10)
    assert upload.capacity == 10_000
    upload.append(memoryview(pattern(10_000)))
    with pytest.raises(StorageError, match="more than 10 parts of 1000 bytes"):
        upload.append(memoryview(b"x"))
    upload.abort()
    assert (plain_s3.objects(), plain_s3.uploads()) == ({}, {})
    plain_transfer.upload(part_bytes=1000, max_parts=10)
    full = plain_transfer.upload("full", part_bytes=1000, max_parts=10)
    full.append(memoryview(bytes(10_000)))
    assert full.finish().size == 10_000


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART])
def test_sizes_at_the_edge_of_a_part(plain_s3: FaultServer, plain_transfer: Transfer, size: int):
    """Below a part one PutObject, from there parts, all equal but the last, which is never empty."""
    body = pattern(size)
    receipt = plain_transfer.send(body, part_bytes=PART)
    assert plain_s3.read(KEY) == body
    assert receipt.size == size
    assert len(receipt.crc32c) == max(1, -(-size // PART))
    used = {r.operation for r in plain_s3.log}
    assert used == {"HeadObject"} | ({"PutObject"} if size < PART else set(MULTIPART) - {"AbortMultipartUpload"})


def test_the_caller_stops_half_way(s3: FaultServer, transfer: Transfer):
    """An upload that is aborted with parts on the wire: they end first, then one Abort; no object, no upload."""
    s3.on("UploadPart", delay(0.2))
    upload = transfer.upload(part_bytes=1000)
    upload.append(memoryview(pattern(5500)))
    s3.wait_for("UploadPart", count=3, ended=False)
    upload.abort()
    upload.abort()  # once is enough
    assert len(s3.requests("AbortMultipartUpload")) == 1
    assert (s3.objects(), s3.uploads()) == ({}, {})


def test_abort_while_create_is_on_its_way(s3: FaultServer, transfer: Transfer):
    """An upload whose id is not known yet is waited for and aborted: an unknown id could not be aborted by anybody."""
    gate = s3.hold("CreateMultipartUpload", at="reply")
    upload = transfer.upload(part_bytes=1000)
    upload.append(memoryview(pattern(1500)))
    gate.wait_arrived()
    aborting = threading.Thread(target=upload.abort)
    aborting.start()
    assert s3.requests("AbortMultipartUpload") == []
    gate.release()
    aborting.join(10)
    assert not aborting.is_alive()
    assert len(s3.requests("AbortMultipartUpload")) == 1
    assert (s3.uploads(), s3.requests("UploadPart")) == ({}, [])


def test_an_abort_that_fails_hides_nothing(
    plain_s3: FaultServer, plain_transfer: Transfer, allowed: set[str], caplog: pytest.LogCaptureFixture
):
    """The first error is the one that is raised; a failed Abort is retried, logged, and left to gc."""
    allowed.add("open-upload")
    plain_s3.on("UploadPart", error(403, "AccessDenied"), part=2)
    plain_s3.on("AbortMultipartUpload", error(503, "SlowDown"))
    with pytest.raises(AccessDeniedError) as caught:
        plain_transfer.send(BODY, part_bytes=PART)
    assert (caught.value.part, caught.value.operation) == (2, "UploadPart")
    assert len(plain_s3.requests("AbortMultipartUpload")) == QUICK.max_attempts
    assert "could not abort the upload" in caplog.text
    assert plain_transfer.plane.budget.held == 0


def test_an_upload_that_is_gone_needs_no_abort(plain_s3: FaultServer, plain_transfer: Transfer):
    """An Abort that is answered with NoSuchUpload has what it wanted."""
    plain_s3.on("UploadPart", error(404, "NoSuchUpload"), part=1)
    plain_s3.on("AbortMultipartUpload", error(404, "NoSuchUpload", at="reply"))
    with pytest.raises(StorageError) as caught:
        plain_transfer.send(BODY, part_bytes=PART)
    assert (caught.value.code, caught.value.part) == ("NoSuchUpload", 1)
    assert "lifecycle" in str(caught.value)


def test_create_fails_for_ever(plain_s3: FaultServer, plain_transfer: Transfer):
    """CreateMultipartUpload answers SlowDown for ever: its own error, no part, no Complete, no Abort, no object."""
    plain_s3.on("CreateMultipartUpload", error(503, "SlowDown"))
    with pytest.raises(StorageUnavailableError) as caught:
        plain_transfer.send(BODY, part_bytes=PART)
    assert (caught.value.operation, caught.value.attempts) == ("CreateMultipartUpload", QUICK.max_attempts)
    assert {r.operation for r in plain_s3.log} == {"CreateMultipartUpload"}
    assert plain_s3.objects() == {}


def test_a_dead_store_does_not_hold_the_failure(
    plain_s3: FaultServer,
    transfer_to: Callable[..., Transfer],
    allowed: set[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """When the deadline passes with a store that never answers, the abort is bounded: the ranks hear within seconds."""
    allowed.add("open-upload")
    assert upload_module._LATE_ABORT_S == 5
    monkeypatch.setattr(upload_module, "_LATE_ABORT_S", 0.5)
    transfer = transfer_to(plain_s3, deadline_s=1.0, read_timeout_s=30)
    plain_s3.on(("UploadPart", "AbortMultipartUpload"), never_answer())
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="deadline of 1 s"):
        transfer.send(BODY, part_bytes=PART)
    assert time.monotonic() - started < 10


def test_a_last_reference_that_is_dropped(plain_s3: FaultServer, plain_transfer: Transfer, allowed: set[str]):
    """An upload that is neither finished nor aborted makes no object when it is garbage."""
    allowed.add("open-upload")
    upload = plain_transfer.upload(part_bytes=1000)
    upload.append(memoryview(pattern(2500)))
    plain_s3.wait_for("UploadPart", count=2)
    del upload
    assert plain_s3.objects() == {}
    assert count_completes(plain_s3) == 0


def test_two_uploads_at_once(plain_s3: FaultServer, plain_transfer: Transfer):
    """Uploads of one plane share its connections, and each gets its own bytes."""
    bodies = {f"{KEY}.{n}": pattern(20_000 + n) for n in range(4)}
    uploads = {key: plain_transfer.upload(key, part_bytes=1000) for key in bodies}
    for offset, key in itertools.product(range(0, 21_000, 700), bodies):
        uploads[key].append(memoryview(bodies[key])[offset : offset + 700])
    for key, upload in uploads.items():
        assert upload.finish().size == len(bodies[key])
        assert plain_s3.read(key) == bodies[key]


@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_a_small_object_that_is_not_what_was_acknowledged(plain_s3: FaultServer, plain_transfer: Transfer, damage: str):
    """A store that keeps fewer bytes than it acknowledged, or none, is found out by HEAD: an error, no receipt."""
    plain_s3.on("PutObject", truncate_stored(7) if damage == "cut" else lose_stored())
    with pytest.raises(StorageError, match="has 7 bytes, not 250000" if damage == "cut" else "is not there") as caught:
        plain_transfer.send(BODY, part_bytes=len(BODY) + 1)
    assert (caught.value.key, caught.value.operation, caught.value.rank) == (KEY, "PutObject", 3)
