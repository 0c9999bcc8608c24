"""What goes over the wire as a body: plain bytes, sent again whole, with the checksum that the store can use."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable

import pytest

from dcp_s3 import StorageError
from dcp_s3._transfer.checksum import crc32c, crc64nvme, header_value
from tests.fault.conftest import KEY, Transfer, pattern, wait
from tests.fault.server import (
    PROFILES,
    Action,
    FaultServer,
    drop_reply,
    error,
    never_read,
    reply_headers,
    reset,
)

MIB = 1 << 20
BODY = pattern(8 * MIB)
SMALL = BODY[:250_000]
PART = 100_000
FRAMING = (
    "x-amz-trailer",
    "x-amz-decoded-content-length",
    "content-encoding",
    "transfer-encoding",
    "x-amz-sdk-checksum",
)


def send_everything(transfer: Transfer) -> None:
    """One object in one request, one in parts, one from the control plane."""
    transfer.put(SMALL)
    transfer.send(SMALL, f"{KEY}.parts", part_bytes=PART)
    transfer.store.put("run/.metadata", SMALL, content_type="application/octet-stream")


def assert_stored(s3: FaultServer) -> None:
    for key in (KEY, f"{KEY}.parts", "run/.metadata"):
        assert s3.read(key) == SMALL


@pytest.mark.parametrize("profile", ["aws", "keeps-framing", "refuses-checksums", "ceph", "object-lock"])
@pytest.mark.parametrize("checksum", ["auto", "none"])
def test_no_framing_on_any_store(s3: FaultServer, transfer_to: Callable[..., Transfer], profile: str, checksum: str):
    """Bodies are never wrapped in aws-chunked framing or trailers, whatever the store does with checksums."""
    s3.configure(**(PROFILES[profile] | {"min_part_bytes": 0}))
    send_everything(transfer_to(s3, checksum=checksum))
    assert_stored(s3)
    for record in s3.log:
        assert not record.framed
        assert record.wire_bytes == record.body_bytes
        assert not [name for name in record.headers if name.startswith(FRAMING)]
        assert "expect" not in record.headers or record.operation == "PutObject"
    bodies = [r for r in s3.log if r.operation in ("PutObject", "UploadPart")]
    assert {r.headers["x-amz-content-sha256"] for r in bodies} == {"UNSIGNED-PAYLOAD"}


def test_each_part_has_its_crc32c(s3: FaultServer, transfer: Transfer, completes: list[bytes]):
    """Every body carries the CRC32C of its own bytes; Create names the algorithm; Complete lists each part's value."""
    send_everything(transfer)
    for record in s3.requests(("PutObject",)):
        assert record.headers["x-amz-checksum-crc32c"] == header_value(crc32c(SMALL))
    for record in s3.requests("UploadPart"):
        offset = ((record.part or 0) - 1) * PART
        assert record.headers["x-amz-checksum-crc32c"] == header_value(crc32c(SMALL[offset : offset + PART]))
    (create,) = s3.requests("CreateMultipartUpload")
    assert create.headers["x-amz-checksum-algorithm"] == "CRC32C"
    (complete,) = completes
    values = [header_value(crc32c(SMALL[i : i + PART])) for i in range(0, len(SMALL), PART)]
    assert re.findall(rb"<ChecksumCRC32C>(.*?)</ChecksumCRC32C>", complete) == [v.encode() for v in values]


def test_crc64nvme(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """checksum="crc64nvme" sends that one, computed over all views of the part."""
    transfer = transfer_to(s3, checksum="crc64nvme")
    upload = transfer.upload(part_bytes=PART)
    for offset in range(0, len(SMALL), 7000):
        upload.append(memoryview(SMALL)[offset : offset + 7000])
    upload.finish()
    for record in s3.requests("UploadPart"):
        offset = ((record.part or 0) - 1) * PART
        expected = header_value(crc64nvme(SMALL[offset : offset + PART]), bits=64)
        assert record.headers["x-amz-checksum-crc64nvme"] == expected
        assert "x-amz-checksum-crc32c" not in record.headers
    assert s3.requests("CreateMultipartUpload")[0].headers["x-amz-checksum-algorithm"] == "CRC64NVME"
    assert s3.read(KEY) == SMALL


def test_checksum_none(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """checksum="none" sends no checksum header with anything."""
    send_everything(transfer_to(s3, checksum="none"))
    assert_stored(s3)
    assert not [r for r in s3.log for name in r.headers if name.startswith("x-amz-checksum") or name == "content-md5"]


@pytest.mark.parametrize("how", ["refuse-501", "refuse-400"])
def test_a_store_that_refuses_checksum_headers(plain_s3: FaultServer, transfer_to: Callable[..., Transfer], how: str):
    """A refusal is met once per plane: afterwards no checksum header, no MD5 pass, and not one more refused request."""
    plain_s3.configure(checksum=how)
    transfer = transfer_to(plain_s3)
    send_everything(transfer)
    assert_stored(plain_s3)
    refusals = [r.operation for r in plain_s3.log if r.status in (400, 501)]
    assert refusals == ["PutObject", "PutObject"]
    before = len(plain_s3.log)
    transfer.put(SMALL)
    transfer.send(SMALL, f"{KEY}.parts", part_bytes=PART)
    later = plain_s3.log[before:]
    assert {r.status for r in later} == {200}
    assert not [r for r in later for name in r.headers if name.startswith("x-amz-checksum") or name == "content-md5"]


def test_a_store_that_refuses_checksums_of_uploads(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """The refusal of CreateMultipartUpload with an algorithm is enough to send parts without a checksum."""
    plain_s3.configure(checksum="refuse-501")
    transfer_to(plain_s3).send(SMALL, part_bytes=PART)
    assert plain_s3.read(KEY) == SMALL
    assert [r.status for r in plain_s3.log if r.operation != "UploadPart"] == [501, 200, 200, 200]
    assert {r.status for r in plain_s3.requests("UploadPart")} == {200}


def test_a_checksum_that_was_asked_for_is_not_dropped(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """checksum="crc32c" is a demand: a store that refuses it is an error, not a silent fallback."""
    plain_s3.configure(checksum="refuse-501")
    transfer = transfer_to(plain_s3, checksum="crc32c")
    for call in (lambda: transfer.put(SMALL), lambda: transfer.send(SMALL, part_bytes=PART)):
        with pytest.raises(StorageError) as caught:
            call()
        assert (caught.value.status, caught.value.code) == (501, "NotImplemented")
    assert plain_s3.objects() == {}


def test_a_store_that_ignores_checksum_headers(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], completes: list[bytes]
):
    """A reply without the checksum shows that the store ignores it: later bodies go without, and no type mismatch."""
    plain_s3.configure(checksum="ignore")
    transfer = transfer_to(plain_s3)
    transfer.send(SMALL, part_bytes=PART)
    assert b"Checksum" not in completes[0]
    before = len(plain_s3.log)
    transfer.put(SMALL)
    transfer.send(SMALL, f"{KEY}.2", part_bytes=PART)
    assert not [r for r in plain_s3.log[before:] for name in r.headers if "checksum" in name]
    assert plain_s3.read(KEY) == plain_s3.read(f"{KEY}.2") == SMALL


def test_object_lock_that_wants_md5(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A store that knows no checksum headers but wants Content-MD5 gets it, learnt once for each plane."""
    s3.configure(checksum="refuse-501", content_md5_for=("PutObject", "UploadPart"), versioned=True)
    transfer = transfer_to(s3)
    send_everything(transfer)
    assert_stored(s3)
    for record in s3.requests(("PutObject", "UploadPart"), status=200):
        start = ((record.part or 1) - 1) * PART
        body = SMALL if record.part is None else SMALL[start : start + PART]
        assert record.headers["content-md5"] == base64.b64encode(hashlib.md5(body).digest()).decode()
    before = len(s3.log)
    send_everything(transfer)
    assert {r.status for r in s3.log[before:]} == {200}


def test_object_lock_that_takes_a_checksum(s3: FaultServer, transfer: Transfer):
    """A store that wants Content-MD5 or a checksum is content with our CRC32C: no MD5 is computed."""
    s3.configure(**(PROFILES["object-lock"] | {"min_part_bytes": 0}))
    send_everything(transfer)
    assert_stored(s3)
    assert {r.status for r in s3.log} == {200}
    assert not [r for r in s3.log if "content-md5" in r.headers]


REPLAYS: dict[str, Action] = {
    "reset-after-1-of-8-MiB": reset("body", MIB),
    "reset-after-1-byte": reset("body", 1),
    "500-behind-the-body": error(500, "InternalError"),
    "500-behind-the-work": error(500, "InternalError", at="reply"),
    "503-before-the-body": error(503, "SlowDown", at="head"),
    "done-then-closed": drop_reply(),
}


@pytest.mark.parametrize("fault", REPLAYS)
def test_a_body_is_sent_again_whole(s3: FaultServer, transfer_to: Callable[..., Transfer], fault: str):
    """After a break at any point the second try carries all 8 MiB from the first byte, with the checksum of all."""
    transfer = transfer_to(s3, read_timeout_s=20.0)
    s3.on("UploadPart", REPLAYS[fault], nth=1)
    views = [memoryview(BODY)[:1], memoryview(BODY)[1 : 3 * MIB], memoryview(BODY)[3 * MIB :]]
    upload = transfer.upload(part_bytes=len(BODY))
    for view in views:
        upload.append(view)
    upload.finish()
    assert s3.read(KEY) == BODY
    first, second = s3.requests("UploadPart")
    assert second.wire_bytes == len(BODY)
    assert first.headers["x-amz-checksum-crc32c"] == second.headers["x-amz-checksum-crc32c"]
    assert second.headers["x-amz-checksum-crc32c"] == header_value(crc32c(BODY))
    assert second.headers["content-length"] == str(len(BODY))


def test_a_body_that_was_damaged_on_the_way(s3: FaultServer, transfer: Transfer):
    """BadDigest means that the bytes changed on the wire: they are sent again."""
    s3.on("UploadPart", error(400, "BadDigest"), part=1, nth=1)
    s3.on("PutObject", error(400, "XAmzContentChecksumMismatch"), nth=1)
    transfer.send(SMALL, part_bytes=PART)
    transfer.put(SMALL, "one")
    assert s3.read(KEY) == s3.read("one") == SMALL
    assert transfer.job.counter.retries == 2


def test_a_wrong_checksum_is_refused(plain_s3: FaultServer, plain_transfer: Transfer):
    """A body that is not what was checksummed is refused by the store for as long as we try: it is never stored."""
    with pytest.raises(StorageError) as caught:
        wait(plain_transfer.plane.put_object(plain_transfer.job, KEY, [memoryview(SMALL)], crc32c(SMALL) ^ 1, "0" * 16))
    assert caught.value.code == "BadDigest"
    assert plain_s3.objects() == {}


def test_a_part_that_is_not_read(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A part that the server leaves unread is given up, and sent whole on a new connection."""
    transfer = transfer_to(s3, read_timeout_s=1.0)
    s3.on("UploadPart", never_read(), part=1, nth=1)
    transfer.send(BODY, part_bytes=len(BODY))
    assert s3.read(KEY) == BODY
    first, second = s3.requests("UploadPart")
    assert first.connection != second.connection


def test_a_reply_without_an_etag(s3: FaultServer, transfer: Transfer):
    """A part or object acknowledged without an ETag counts as not acknowledged."""
    s3.on(("UploadPart", "PutObject"), reply_headers({"ETag": None}), nth=1)
    transfer.send(SMALL, part_bytes=PART)
    s3.on("PutObject", reply_headers({"ETag": None}), nth=1)
    transfer.put(SMALL, "one")
    assert transfer.job.counter.retries == 2
    assert s3.read(KEY) == s3.read("one") == SMALL


def test_no_body_above_the_part_size(plain_s3: FaultServer, plain_transfer: Transfer):
    """One view larger than many parts is cut: no request carries more than a part."""
    plain_transfer.send(BODY, part_bytes=MIB)
    assert {r.wire_bytes for r in plain_s3.requests("UploadPart")} == {MIB}
    assert plain_s3.read(KEY) == BODY
