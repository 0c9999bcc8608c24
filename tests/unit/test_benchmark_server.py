"""The S3 server that the benchmark measures against does what its clients count on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from benchmarks.server import CpuThrottle, Target, sink
from tests.conftest import or_missing

BUCKET = "bench"
BODY = os.urandom(300_000)


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    compilers = ("cc", "gcc", "clang")
    or_missing([] if any(map(shutil.which, compilers)) else ["a C compiler"], "apt-get install gcc libc6-dev")
    with sink(preallocate_mib=8) as target:
        yield target


@pytest.fixture
def s3(server: Target):
    server.clear()
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id="a",
        aws_secret_access_key="b",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )


def code_of(call, **parameters) -> str:
    with pytest.raises(ClientError) as caught:
        call(Bucket=BUCKET, **parameters)
    return caught.value.response["Error"]["Code"]


def test_objects(s3) -> None:
    """Whole, in ranges, their metadata, copied, listed, deleted."""
    s3.put_object(Bucket=BUCKET, Key="a/1", Body=BODY, Metadata={"k": "v"}, ChecksumAlgorithm="CRC32")
    reply = s3.get_object(Bucket=BUCKET, Key="a/1")
    assert (reply["Body"].read(), reply["Metadata"]) == (BODY, {"k": "v"})
    part = s3.get_object(Bucket=BUCKET, Key="a/1", Range="bytes=1000-200000")
    assert (part["Body"].read(), part["ContentRange"]) == (BODY[1000:200_001], "bytes 1000-200000/300000")
    assert s3.head_object(Bucket=BUCKET, Key="a/1")["ContentLength"] == len(BODY)
    s3.copy_object(Bucket=BUCKET, Key="a/2", CopySource={"Bucket": BUCKET, "Key": "a/1"})
    assert s3.get_object(Bucket=BUCKET, Key="a/2")["Body"].read() == BODY
    assert [item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET, Prefix="a/")["Contents"]] == ["a/1", "a/2"]
    s3.delete_object(Bucket=BUCKET, Key="a/1")
    assert code_of(s3.get_object, Key="a/1") == "NoSuchKey"


def test_multipart(s3) -> None:
    """The parts in their order; an aborted upload is gone."""
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]
    halves = BODY[:200_000], BODY[200_000:]
    etags = {}
    for number in (2, 1):
        sent = s3.upload_part(Bucket=BUCKET, Key="m", UploadId=upload, PartNumber=number, Body=halves[number - 1])
        etags[number] = sent["ETag"]
    parts = [{"PartNumber": number, "ETag": etags[number]} for number in (1, 2)]
    s3.complete_multipart_upload(Bucket=BUCKET, Key="m", UploadId=upload, MultipartUpload={"Parts": parts})
    assert s3.get_object(Bucket=BUCKET, Key="m")["Body"].read() == BODY
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]
    s3.abort_multipart_upload(Bucket=BUCKET, Key="m", UploadId=upload)
    assert code_of(s3.upload_part, Key="m", UploadId=upload, PartNumber=1, Body=b"x") == "NoSuchUpload"


def test_conditions(s3) -> None:
    """Create only what is not there, replace only what was seen."""
    etag = s3.put_object(Bucket=BUCKET, Key="c", Body=b"1", IfNoneMatch="*")["ETag"]
    assert code_of(s3.put_object, Key="c", Body=b"2", IfNoneMatch="*") == "PreconditionFailed"
    assert code_of(s3.put_object, Key="c", Body=b"2", IfMatch='"other"') == "PreconditionFailed"
    s3.put_object(Bucket=BUCKET, Key="c", Body=b"2", IfMatch=etag)
    assert s3.get_object(Bucket=BUCKET, Key="c")["Body"].read() == b"2"


def test_pace_and_log(server: Target, s3) -> None:
    """It can be slowed down, and tells what it was asked."""
    server.set_pace(CpuThrottle(latency_ms=60))
    try:
        started = time.monotonic()
        s3.put_object(Bucket=BUCKET, Key="p", Body=b"x")
        assert time.monotonic() - started >= 0.06
    finally:
        server.set_pace(CpuThrottle())
    assert [(line["method"], line["status"]) for line in server.log()] == [("PUT", 200)]
