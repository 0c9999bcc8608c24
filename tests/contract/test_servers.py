"""What the package builds on, asked of each store by a bare client: the fixtures give real S3 servers."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.servers import Bucket, Endpoint, SeaweedFS, fresh_bucket


def _refusal(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    response = error.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def test_bytes_come_back_as_they_were_put(bucket: Bucket, endpoint: Endpoint, client: Any) -> None:
    """An object's bytes, size and user metadata come back; a range is answered with 206 and exactly that range."""
    body = bytes(range(256)) * 40
    client.put_object(
        Bucket=bucket.name, Key=bucket.key("a/b"), Body=body, Metadata={"dcp-s3-token": "0123456789abcdef"}
    )

    whole = client.get_object(Bucket=bucket.name, Key=bucket.key("a/b"))
    assert whole["Body"].read() == body
    assert whole["Metadata"] == {"dcp-s3-token": "0123456789abcdef"}

    part = client.get_object(Bucket=bucket.name, Key=bucket.key("a/b"), Range="bytes=300-309")
    assert part["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert part["ContentRange"] == f"bytes 300-309/{len(body)}"
    assert part["Body"].read() == body[300:310]


def test_a_key_is_created_once(bucket: Bucket, endpoint: Endpoint, client: Any) -> None:
    """PUT with If-None-Match:* creates; the second one is refused with 412 and the first one's bytes stay."""
    client.put_object(Bucket=bucket.name, Key=bucket.key("once"), Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket=bucket.name, Key=bucket.key("once"), Body=b"second", IfNoneMatch="*")
    assert _refusal(refused) == (412, "PreconditionFailed")
    assert bucket.get("once") == b"first"


def test_a_key_is_replaced_by_who_saw_it_last(bucket: Bucket, endpoint: Endpoint, client: Any) -> None:
    """PUT with If-Match replaces exactly the ETag it names: the unquoted form is understood by every store."""
    client.put_object(Bucket=bucket.name, Key=bucket.key("record"), Body=b"old")
    seen = client.head_object(Bucket=bucket.name, Key=bucket.key("record"))["ETag"].strip('"')
    client.put_object(Bucket=bucket.name, Key=bucket.key("record"), Body=b"new", IfMatch=seen)
    assert bucket.get("record") == b"new"
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket=bucket.name, Key=bucket.key("record"), Body=b"late", IfMatch=seen)
    assert _refusal(refused) == (412, "PreconditionFailed")
    assert bucket.get("record") == b"new"


def test_ceph_does_not_understand_a_quoted_etag(bucket: Bucket, ceph_rgw: Endpoint) -> None:
    """Ceph RGW 16 compares If-Match with the bare ETag: the standard's quoted form never matches."""
    client = ceph_rgw.client()
    client.put_object(Bucket=bucket.name, Key="record", Body=b"old")
    quoted = client.head_object(Bucket=bucket.name, Key="record")["ETag"]
    assert quoted.startswith('"')
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket=bucket.name, Key="record", Body=b"new", IfMatch=quoted)
    assert _refusal(refused) == (412, "PreconditionFailed")
    assert bucket.get("record") == b"old"


def test_multipart_upload(bucket: Bucket, endpoint: Endpoint, client: Any) -> None:
    """Parts become one object of the summed size; until then there is no object, and the upload is listed as open."""
    key = bucket.key("parts")
    bodies = [b"x" * (5 << 20), b"y" * 1000]
    upload = client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"]
    parts = []
    for number, body in enumerate(bodies, start=1):
        reply = client.upload_part(Bucket=bucket.name, Key=key, UploadId=upload, PartNumber=number, Body=body)
        parts.append({"PartNumber": number, "ETag": reply["ETag"]})
    assert bucket.keys() == []
    assert bucket.uploads() == ["parts"]
    client.complete_multipart_upload(Bucket=bucket.name, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
    assert bucket.uploads() == []
    assert bucket.get("parts") == b"".join(bodies)


def test_what_is_absent_is_said_to_be(endpoint: Endpoint, client: Any, bucket: Bucket) -> None:
    """A missing key, a missing bucket and wrong credentials are refused with S3's own codes."""
    with pytest.raises(ClientError) as no_key:
        client.get_object(Bucket=bucket.name, Key=bucket.key("absent"))
    assert _refusal(no_key) == (404, "NoSuchKey")
    if endpoint.bucket is None:  # with a given bucket, permission may end at that bucket
        with pytest.raises(ClientError) as no_bucket:
            client.put_object(Bucket=f"{bucket.name}-absent", Key="a", Body=b"1")
        assert _refusal(no_bucket) == (404, "NoSuchBucket")


def test_a_place_is_left_empty(server: Endpoint) -> None:
    """A bucket of the suite goes away with its objects and its open uploads."""
    with fresh_bucket(server) as place:
        place.put("a", b"1")
        client = server.client()
        client.create_multipart_upload(Bucket=place.name, Key=place.key("open"))
        assert (place.keys(), place.uploads()) == (["a"], ["open"])
        client.close()
    with pytest.raises(ClientError) as gone:
        place.get("a")
    assert _refusal(gone)[0] == 404


def test_an_endpoint_is_plain_data(endpoint: Endpoint) -> None:
    """An endpoint crosses to another process and keeps its secret out of its repr."""
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint
    assert endpoint.secret_key not in repr(endpoint)
    assert endpoint.environ()["AWS_ENDPOINT_URL_S3"] == endpoint.endpoint_url


def test_a_killed_seaweedfs_comes_back_with_its_data(tmp_path: Path) -> None:
    """SIGKILL and a new start leave the acknowledged bytes readable at the same endpoint."""
    server = SeaweedFS(tmp_path / "weed")
    with server as endpoint, fresh_bucket(endpoint) as place:
        place.put("kept", b"acknowledged")
        server.kill()
        again = server.start()
        assert again.endpoint_url == endpoint.endpoint_url
        assert again.pid != endpoint.pid
        assert place.get("kept") == b"acknowledged"
    assert not (tmp_path / "weed").exists()


RUN_THAT_IS_KILLED = """
import os, pathlib, signal, sys
from tests.servers import SeaweedFS
with SeaweedFS(pathlib.Path(sys.argv[1])) as endpoint:
    print(endpoint.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_no_server(tmp_path: Path) -> None:
    """When the test run dies by SIGKILL, its servers and their data go too."""
    data = tmp_path / "weed"
    run = subprocess.run(
        [sys.executable, "-c", RUN_THAT_IS_KILLED, str(data)], capture_output=True, text=True, timeout=90, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    status = Path(f"/proc/{int(run.stdout)}/status")
    deadline = time.monotonic() + 30
    while data.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not data.exists()
    assert not status.exists() or "State:\tZ" in status.read_text()
