"""The fault server as an S3 store: what a correct client sees of it, by the SDK's own word."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import hashlib
import json
import os
import urllib.request
from typing import Any

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from awscrt import checksums as crt
from botocore.exceptions import ClientError

from tests.fault.server import PROFILES, FaultServer, FaultServerProcess, Handle
from tests.fault.server.client import KEYS, arguments, client

MIB = 2**20
B = "bucket"


@pytest.fixture
def s3():
    with FaultServer(min_part_bytes=0) as server:
        yield server


def crc32c(data: bytes) -> str:
    return base64.b64encode(crt.crc32c(data).to_bytes(4, "big")).decode()


def refusal(call: Any, **wanted: Any) -> tuple[int, str]:
    """Return status and code of the error that ``call`` ends in."""
    with pytest.raises(ClientError) as caught:
        call(**wanted)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def upload(c: Any, key: str, *parts: bytes, **create: Any) -> tuple[str, list[dict[str, Any]]]:
    """Create a multipart upload and send its parts."""
    upload_id = c.create_multipart_upload(Bucket=B, Key=key, **create)["UploadId"]
    listed = []
    for number, data in enumerate(parts, 1):
        extra = {"ChecksumCRC32C": crc32c(data)} if create.get("ChecksumAlgorithm") == "CRC32C" else {}
        sent = c.upload_part(Bucket=B, Key=key, UploadId=upload_id, PartNumber=number, Body=data, **extra)
        listed.append({"PartNumber": number, "ETag": sent["ETag"], **extra})
    return upload_id, listed


@pytest.mark.parametrize("make", [FaultServer, FaultServerProcess])
@pytest.mark.parametrize("tls", [False, True])
def test_objects_come_back_as_they_were_stored(make: type[FaultServer], tls: bool):
    """Bytes, metadata, size and ETag of an object are the same in PUT, HEAD, GET, the listing and the server's memory."""
    data = os.urandom(3 * MIB + 17)
    with make(tls=tls) as server, client(server) as c:
        etag = c.put_object(
            Bucket=B, Key="a b/ü+.distcp", Body=data, Metadata={"token": "7"}, StorageClass="STANDARD_IA"
        )["ETag"]
        head = c.head_object(Bucket=B, Key="a b/ü+.distcp")
        read = c.get_object(Bucket=B, Key="a b/ü+.distcp")
        assert read["Body"].read() == data == server.read("a b/ü+.distcp")
        assert (head["ETag"], head["ContentLength"], head["Metadata"]) == (etag, len(data), {"token": "7"})
        (row,) = c.list_objects_v2(Bucket=B)["Contents"]
        assert (row["Key"], row["ETag"], row["Size"], row["StorageClass"]) == (
            "a b/ü+.distcp",
            etag,
            len(data),
            "STANDARD_IA",
        )
        c.delete_object(Bucket=B, Key="a b/ü+.distcp")
        assert refusal(c.head_object, Bucket=B, Key="a b/ü+.distcp") == (404, "404")
        assert refusal(c.get_object, Bucket=B, Key="a b/ü+.distcp") == (404, "NoSuchKey")
        assert server.violations() == []
        assert [r.wire_bytes for r in server.requests("PutObject")] == [len(data)]
        assert server.requests("GetObject", status=200)[0].reply_bytes == len(data)


def test_multipart_over_https_with_the_data_plane_client():
    """Parts sent concurrently by aiobotocore make one object with the composite CRC32C and an ETag of AWS's form."""
    parts = [os.urandom(5 * MIB), os.urandom(5 * MIB), os.urandom(123)]

    async def send(server: Handle) -> dict[str, Any]:
        config = {
            **arguments(server),
            "config": AioConfig(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        }
        async with get_session().create_client("s3", **config) as c:
            made = await c.create_multipart_upload(Bucket=B, Key="k", ChecksumAlgorithm="CRC32C")
            same = {"Bucket": B, "Key": "k", "UploadId": made["UploadId"]}
            sums = [{"ChecksumCRC32C": crc32c(part)} for part in parts]
            sent = await asyncio.gather(
                *(c.upload_part(**same, PartNumber=n, Body=parts[n - 1], **sums[n - 1]) for n in (1, 2, 3))
            )
            listed = [{"PartNumber": n, "ETag": sent[n - 1]["ETag"], **sums[n - 1]} for n in (1, 2, 3)]
            done = await c.complete_multipart_upload(**same, MultipartUpload={"Parts": listed})
            read = await c.get_object(Bucket=B, Key="k")
            assert await read["Body"].read() == b"".join(parts)
            return dict(done)

    with FaultServer(tls=True) as server:
        done = asyncio.run(send(server))
        whole = crc32c(b"".join(base64.b64decode(crc32c(part)) for part in parts))
        assert done["ChecksumCRC32C"] == f"{whole}-3"
        assert done["ETag"].strip('"').endswith("-3")
        assert server.violations() == []


def test_ranges(s3: Handle):
    """A range gives 206 with exactly those bytes, beyond the end 416, and every range of an empty object is 416."""
    s3.put("k", bytes(range(100)))
    s3.put("empty", b"")
    with client(s3) as c:
        for text, start, end in [
            ("0-0", 0, 1),
            ("10-19", 10, 20),
            ("90-500", 90, 100),
            ("40-", 40, 100),
            ("-7", 93, 100),
        ]:
            read = c.get_object(Bucket=B, Key="k", Range=f"bytes={text}")
            assert read["Body"].read() == bytes(range(start, end))
            assert read["ResponseMetadata"]["HTTPStatusCode"] == 206
            assert read["ContentRange"] == f"bytes {start}-{end - 1}/100"
        assert refusal(c.get_object, Bucket=B, Key="k", Range="bytes=100-110") == (416, "InvalidRange")
        assert refusal(c.get_object, Bucket=B, Key="empty", Range="bytes=0-0") == (416, "InvalidRange")
        s3.configure(ranges="ignore")
        assert len(c.get_object(Bucket=B, Key="k", Range="bytes=0-0")["Body"].read()) == 100


@pytest.mark.parametrize(
    "profile, create_again, replace_quoted, replace_unquoted, replace_stale, complete_again",
    [
        ("aws", 412, 200, 200, 412, 412),
        ("ceph", 412, 412, 200, 412, 200),
        ("ignores-conditions", 200, 200, 200, 200, 200),
        ("refuses-conditions", 501, 501, 501, 501, 501),
        ("ignores-if-match", 412, 200, 200, 200, 412),
        ("refuses-if-match", 412, 501, 501, 501, 412),
    ],
)
def test_conditional_writes(profile, create_again, replace_quoted, replace_unquoted, replace_stale, complete_again):
    """If-None-Match and If-Match are honoured, ignored or refused, on PUT and on Complete, as the store's profile says."""

    def status(call: Any, **wanted: Any) -> int:
        try:
            return int(call(**wanted)["ResponseMetadata"]["HTTPStatusCode"])
        except ClientError as error:
            return int(error.response["ResponseMetadata"]["HTTPStatusCode"])

    with FaultServer(**PROFILES[profile]) as server, client(server) as c:
        put = lambda body, **condition: status(c.put_object, Bucket=B, Key="k", Body=body, **condition)  # noqa: E731
        server.put("k", b"0")
        assert put(b"1", IfNoneMatch="*") == create_again
        etag = server.objects()["k"]["etag"]
        assert put(b"2", IfMatch=f'"{etag}"') == replace_quoted
        etag = server.objects()["k"]["etag"]
        assert put(b"3", IfMatch=etag) == replace_unquoted
        assert put(b"4", IfMatch="0" * 32) == replace_stale
        upload_id, parts = upload(c, "k", b"5")
        listed = {"MultipartUpload": {"Parts": parts}, "UploadId": upload_id}
        assert status(c.complete_multipart_upload, Bucket=B, Key="k", IfNoneMatch="*", **listed) == complete_again


def test_conditional_reads_and_deletes(s3: Handle):
    """If-Match pins reads and deletes; If-None-Match gives 304; a replacement of nothing is 404."""
    with client(s3) as c:
        etag = c.put_object(Bucket=B, Key="k", Body=b"x")["ETag"]
        assert c.get_object(Bucket=B, Key="k", IfMatch=etag)["Body"].read() == b"x"
        assert refusal(c.get_object, Bucket=B, Key="k", IfMatch='"0"') == (412, "PreconditionFailed")
        assert refusal(c.head_object, Bucket=B, Key="k", IfNoneMatch=etag) == (304, "304")
        assert refusal(c.delete_object, Bucket=B, Key="k", IfMatch='"0"') == (412, "PreconditionFailed")
        c.delete_object(Bucket=B, Key="k", IfMatch=etag)
        assert refusal(c.put_object, Bucket=B, Key="k", Body=b"y", IfMatch=etag) == (404, "NoSuchKey")
        assert s3.objects() == {}


def test_checksums_are_verified_ignored_or_refused(s3: Handle):
    """A wrong checksum or MD5 is BadDigest and stores nothing; a store can also ignore checksums, or refuse them."""
    right, wrong = crc32c(b"data"), crc32c(b"other")
    with client(s3) as c:
        assert c.put_object(Bucket=B, Key="k", Body=b"data", ChecksumCRC32C=right)["ChecksumCRC32C"] == right
        assert c.head_object(Bucket=B, Key="k", ChecksumMode="ENABLED")["ChecksumCRC32C"] == right
        for algorithm in ("CRC32", "CRC64NVME", "SHA1", "SHA256"):  # computed by the SDK, compared by the server
            assert f"Checksum{algorithm}" in c.put_object(
                Bucket=B, Key="sdk", Body=b"data", ChecksumAlgorithm=algorithm
            )
        assert refusal(c.put_object, Bucket=B, Key="w", Body=b"data", ChecksumCRC32C=wrong) == (400, "BadDigest")
        md5 = base64.b64encode(hashlib.md5(b"other").digest()).decode()
        assert refusal(c.put_object, Bucket=B, Key="w", Body=b"data", ContentMD5=md5) == (400, "BadDigest")
        s3.configure(checksum="ignore")
        assert "ChecksumCRC32C" not in c.put_object(Bucket=B, Key="k", Body=b"data", ChecksumCRC32C=wrong)
        s3.configure(checksum="refuse-501")
        assert refusal(c.put_object, Bucket=B, Key="w", Body=b"data", ChecksumCRC32C=right) == (501, "NotImplemented")
        s3.configure(checksum="refuse-400")
        assert refusal(c.create_multipart_upload, Bucket=B, Key="w", ChecksumAlgorithm="CRC32C") == (
            400,
            "InvalidRequest",
        )
        assert "w" not in s3.objects()


@pytest.mark.parametrize("framing", ["decode", "raw", "refuse"])
def test_trailing_checksums_over_https(framing: str):
    """The SDK's default trailers are decoded, kept inside the stored bytes, or refused; and always reported."""
    with FaultServer(tls=True, framing=framing) as server:
        with client(server, request_checksum_calculation="when_supported") as c:
            if framing == "refuse":
                assert refusal(c.put_object, Bucket=B, Key="k", Body=b"data" * 1000) == (501, "NotImplemented")
                assert server.objects() == {}
            else:
                c.put_object(Bucket=B, Key="k", Body=b"data" * 1000)
                assert (server.read("k") == b"data" * 1000) == (framing == "decode")
                assert (b"x-amz-checksum-crc32" in server.read("k")) == (framing == "raw")
        (record,) = server.log
        assert record.framed
        assert record.body_bytes == 4000 < record.wire_bytes
        assert [line.partition(":")[0] for line in server.violations()] == ["aws-chunked"]


def test_what_complete_refuses():
    """Order, size, ETag, checksum and number of parts are checked as AWS does."""
    with FaultServer(max_parts=3) as server, client(server) as c:
        upload_id, parts = upload(c, "k", b"a", b"b")
        same = {"Bucket": B, "Key": "k", "UploadId": upload_id}
        complete = lambda *listed: refusal(c.complete_multipart_upload, **same, MultipartUpload={"Parts": listed})  # noqa: E731
        assert complete(parts[1], parts[0]) == (400, "InvalidPartOrder")
        assert complete(*parts) == (400, "EntityTooSmall")
        assert complete({"PartNumber": 1, "ETag": '"0"'}) == (400, "InvalidPart")
        assert complete(parts[0], {"PartNumber": 3, "ETag": parts[0]["ETag"]}) == (400, "InvalidPart")
        assert complete() == (400, "MalformedXML")
        part = {"Body": b"c", "PartNumber": 4}
        assert refusal(c.upload_part, **same, **part) == (400, "InvalidArgument")
        part = {"Body": b"c", "PartNumber": 1, "ChecksumCRC32C": crc32c(b"c")}
        etag = c.upload_part(**same, **part)["ETag"]
        assert complete({"PartNumber": 1, "ETag": etag, "ChecksumCRC32C": crc32c(b"d")}) == (400, "InvalidPart")
        server.configure(**PROFILES["strict-checksum-type"])
        assert refusal(c.upload_part, **same, **part) == (400, "InvalidRequest")  # type mismatch: null against crc32c
        upload_id, parts = upload(c, "summed", b"a", ChecksumAlgorithm="CRC32C")
        del parts[0]["ChecksumCRC32C"]
        same |= {"Key": "summed", "UploadId": upload_id}
        other = {"Body": b"c", "PartNumber": 1, "ChecksumCRC64NVME": "AAAAAAAAAAA="}
        assert refusal(c.upload_part, **same, **other | {"Body": b""}) == (400, "InvalidRequest")
        assert complete(*parts) == (400, "InvalidRequest")
        assert server.objects() == {}


def test_an_upload_that_has_ended(s3: Handle):
    """Complete again answers as the switch says, Complete after Abort is NoSuchUpload or 500, parts come too late."""
    with client(s3) as c:
        upload_id, parts = upload(c, "k", b"a", b"b")
        same = {"Bucket": B, "Key": "k", "UploadId": upload_id}
        listed = {"MultipartUpload": {"Parts": parts}}
        first = c.complete_multipart_upload(**same, **listed)
        assert c.complete_multipart_upload(**same, **listed)["ETag"] == first["ETag"]
        s3.configure(complete_again=404)
        assert refusal(c.complete_multipart_upload, **same, **listed) == (404, "NoSuchUpload")
        s3.configure(complete_again=500)
        assert refusal(c.complete_multipart_upload, **same, **listed) == (500, "InternalError")
        assert refusal(c.upload_part, **same, PartNumber=1, Body=b"z") == (404, "NoSuchUpload")
        same["UploadId"], _ = upload(c, "k", b"a", b"b")
        c.abort_multipart_upload(**same)
        assert refusal(c.complete_multipart_upload, **same, **listed) == (404, "NoSuchUpload")
        s3.configure(complete_etag=False)
        same["UploadId"], parts = upload(c, "k", b"c")
        assert c.complete_multipart_upload(**same, MultipartUpload={"Parts": parts})["ETag"] == ""
        assert s3.read("k") == b"c"


def test_listings_come_in_pages(s3: Handle):
    """Keys, common prefixes, uploads and parts are complete over several pages, also by start-after without a token."""
    s3.configure(list_page_size=3)
    keys = sorted([f"run/step-{n}/.metadata" for n in range(10)] + ["run/a", "run/é"], key=str.encode)
    for key in keys:
        s3.put(key, b"x")
    with client(s3) as c:
        pages = list(c.get_paginator("list_objects_v2").paginate(Bucket=B, Prefix="run/"))
        assert [row["Key"] for page in pages for row in page["Contents"]] == keys
        pages = list(c.get_paginator("list_objects_v2").paginate(Bucket=B, Prefix="run/", Delimiter="/"))
        assert [p["Prefix"] for page in pages for p in page.get("CommonPrefixes", [])] == [
            f"run/step-{n}/" for n in range(10)
        ]
        pages = list(c.get_paginator("list_objects").paginate(Bucket=B))
        assert [row["Key"] for page in pages for row in page["Contents"]] == keys
        s3.configure(continuation_tokens=False)
        page = c.list_objects_v2(Bucket=B)
        assert page["IsTruncated"]
        assert "NextContinuationToken" not in page
        assert c.list_objects_v2(Bucket=B, StartAfter=keys[2])["Contents"][0]["Key"] == keys[3]
        uploads = [c.create_multipart_upload(Bucket=B, Key=f"u{n // 3}")["UploadId"] for n in range(8)]
        pages = list(c.get_paginator("list_multipart_uploads").paginate(Bucket=B))
        assert [row["UploadId"] for page in pages for row in page["Uploads"]] == uploads == list(s3.uploads())
        upload_id, _ = upload(c, "k", *[b"p"] * 7)
        pages = list(c.get_paginator("list_parts").paginate(Bucket=B, Key="k", UploadId=upload_id))
        assert [row["PartNumber"] for page in pages for row in page["Parts"]] == [1, 2, 3, 4, 5, 6, 7]


def test_versions_locks_and_multi_delete(s3: Handle):
    """A versioned delete leaves the old version; a locked object survives both deletes; MD5 can be demanded."""
    s3.configure(versioned=True)
    with client(s3) as c:
        old = c.put_object(Bucket=B, Key="k", Body=b"old")["VersionId"]
        c.put_object(Bucket=B, Key="k", Body=b"new")
        assert c.delete_object(Bucket=B, Key="k")["DeleteMarker"]
        assert [version["marker"] for version in s3.versions("k")] == [False, False, True]
        assert c.get_object(Bucket=B, Key="k", VersionId=old)["Body"].read() == b"old"
        assert c.get_bucket_versioning(Bucket=B)["Status"] == "Enabled"
        s3.put("locked", b"x")
        s3.configure(object_lock=True)
        assert refusal(c.delete_object, Bucket=B, Key="locked") == (403, "AccessDenied")
        reply = c.delete_objects(Bucket=B, Delete={"Objects": [{"Key": "locked"}, {"Key": "none"}]})
        assert [row["Key"] for row in reply["Deleted"]] == ["none"]
        assert [(row["Key"], row["Code"]) for row in reply["Errors"]] == [("locked", "AccessDenied")]
        s3.configure(content_md5_for=("PutObject",))
        assert refusal(c.put_object, Bucket=B, Key="n", Body=b"x") == (400, "InvalidRequest")
        c.put_object(Bucket=B, Key="n", Body=b"x", ContentMD5=base64.b64encode(hashlib.md5(b"x").digest()).decode())


def test_customer_keys_are_needed_to_read_back():
    """An object made with SSE-C is read with its key only; the key itself is not kept."""
    key = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}
    with FaultServer(tls=True, min_part_bytes=0) as server, client(server) as c:
        upload_id = c.create_multipart_upload(Bucket=B, Key="k", **key)["UploadId"]
        part = {"Bucket": B, "Key": "k", "UploadId": upload_id, "PartNumber": 1, "Body": b"x"}
        assert refusal(c.upload_part, **part) == (400, "InvalidRequest")
        parts = [{"PartNumber": 1, "ETag": c.upload_part(**part, **key)["ETag"]}]
        c.complete_multipart_upload(Bucket=B, Key="k", UploadId=upload_id, MultipartUpload={"Parts": parts})
        assert c.get_object(Bucket=B, Key="k", **key)["Body"].read() == b"x"
        assert refusal(c.head_object, Bucket=B, Key="k") == (400, "400")
        assert refusal(c.get_object, Bucket=B, Key="k", **key | {"SSECustomerKey": "q" * 32}) == (403, "AccessDenied")
        assert not any(name.endswith("customer-key") for name in server.objects()["k"]["headers"])


def test_who_may_do_what(s3: Handle):
    """Unknown, expired and skewed signers, unsigned requests and operations beyond the rights are told apart."""
    s3.put("k", b"x")
    get = {"Bucket": B, "Key": "k"}
    with client(s3) as c, client(s3, access_key=None) as unsigned, client(s3, access_key="OTHER") as other:
        s3.configure(access_keys=("RANK0",))
        assert refusal(other.get_object, **get) == (403, "InvalidAccessKeyId")
        assert refusal(unsigned.get_object, **get) == (403, "AccessDenied")
        s3.configure(public_read=True)
        assert unsigned.get_object(**get)["Body"].read() == b"x"
        assert refusal(unsigned.put_object, **get, Body=b"y") == (403, "AccessDenied")
        s3.configure(key_errors={"RANK0": "SignatureDoesNotMatch"})
        assert refusal(c.get_object, **get) == (403, "SignatureDoesNotMatch")
        s3.configure(key_errors={}, expire_after_requests={"RANK0": 2})
        c.get_object(**get)["Body"].read()
        assert refusal(c.get_object, **get) == (400, "ExpiredToken")
        s3.configure(expire_after_requests={}, expire_after_s={"RANK0": 0.0})
        assert refusal(c.get_object, **get) == (400, "ExpiredToken")
        s3.configure(expire_after_s={}, max_request_age_s=60.0, clock_offset_s=3600.0)
        assert refusal(c.get_object, **get) == (403, "RequestTimeTooSkewed")
        assert s3.violations()[0].startswith("request-age: GetObject 'k'")
        s3.configure(max_request_age_s=None, **PROFILES["least-privilege"])
        assert refusal(c.head_object, Bucket=B, Key="missing") == (403, "403")
        assert refusal(c.get_object, Bucket=B, Key="missing") == (403, "AccessDenied")
        assert refusal(c.list_objects_v2, Bucket=B) == (403, "AccessDenied")
        assert "forbidden-operation: ListObjectsV2" in s3.violations()[-1]


def test_presigned_urls_and_the_stores_clock(s3: Handle):
    """A presigned GET works without headers until it has expired by the store's clock, which is also Last-Modified's."""
    with client(s3) as c:
        c.put_object(Bucket=B, Key="k", Body=b"x")
        url = c.generate_presigned_url("get_object", Params={"Bucket": B, "Key": "k"}, ExpiresIn=60)
        with urllib.request.urlopen(url, timeout=5) as reply:
            assert reply.read() == b"x"
        s3.configure(clock_offset_s=7200.0)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url, timeout=5).close()
        before = c.head_object(Bucket=B, Key="k")["LastModified"]
        c.put_object(Bucket=B, Key="k", Body=b"x")
        assert c.head_object(Bucket=B, Key="k")["LastModified"] - before > dt.timedelta(seconds=7000)
        s3.make_older("k", 86400)
        assert c.head_object(Bucket=B, Key="k")["LastModified"] < before


def test_buckets_and_unknown_operations(s3: Handle):
    """Missing buckets are NoSuchBucket, made ones are there, and what the server does not know is 501."""
    with client(s3) as c:
        assert refusal(c.put_object, Bucket="none", Key="k", Body=b"") == (404, "NoSuchBucket")
        assert refusal(c.head_bucket, Bucket="none") == (404, "404")
        c.create_bucket(Bucket="none")
        c.head_bucket(Bucket="none")
        assert refusal(c.create_bucket, Bucket="none") == (409, "BucketAlreadyOwnedByYou")
        assert [row["Name"] for row in c.list_buckets()["Buckets"]] == [B, "none"]
        assert refusal(c.copy_object, Bucket=B, Key="k", CopySource="bucket/x") == (501, "NotImplemented")


def test_virtual_hosts(s3: Handle):
    """With a suffix set, the bucket comes from the host name; without a match, from the path."""
    s3.put("k/l", b"x")
    s3.configure(virtual_host="s3.test")
    for host, path in [("bucket.s3.test:9000", "/k/l"), ("s3.test", "/bucket/k/l")]:
        request = urllib.request.Request(s3.url + path, headers={"Host": host})
        with urllib.request.urlopen(request, timeout=5) as reply:
            assert reply.read() == b"x"


def test_discarded_bodies_and_shared_endpoints():
    """Bodies that need not be kept are checked and counted only; all endpoints lead to one store."""
    with FaultServer(discard_bodies="^data/", endpoints=2) as server, client(server) as c:
        assert refusal(c.put_object, Bucket=B, Key="data/k", Body=b"x" * 9, ChecksumCRC32C=crc32c(b"")) == (
            400,
            "BadDigest",
        )
        c.put_object(Bucket=B, Key="data/k", Body=b"x" * 3 * MIB)
        c.put_object(Bucket=B, Key="k", Body=b"kept")
        assert server.read("data/k") == bytes(3 * MIB)
        assert server.read("k") == b"kept"
        with client(server) as again, urllib.request.urlopen(f"{server.urls[1]}/bucket/k", timeout=5) as reply:
            assert reply.read() == again.get_object(Bucket=B, Key="k")["Body"].read()
        assert [record.endpoint for record in server.requests("GetObject")] == [1, 0]


def test_the_process_is_steered_with_plain_json():
    """Any program can set a rule and read the log by POSTing JSON to the control port."""
    with FaultServerProcess() as server:

        def post(command: str, **fields: Any) -> Any:
            url = f"http://127.0.0.1:{server._control_port}/_control/{command}"
            with urllib.request.urlopen(url, data=json.dumps(fields).encode(), timeout=5) as reply:
                return json.loads(reply.read())

        action = {"answer": {"status": 418, "code": "Teapot"}}
        assert post("add_rule", match={"operations": ["GetObject"]}, action=action, name="teapot") == "teapot"
        with client(server) as c:
            assert refusal(c.get_object, Bucket=B, Key="k") == (418, "Teapot")
        (record,) = post("log", since=0)
        assert (record["operation"], record["status"], record["rules"]) == ("GetObject", 418, ["teapot"])
        assert KEYS["aws_access_key_id"] == record["access_key"]
