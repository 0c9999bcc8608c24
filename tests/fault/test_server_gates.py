"""The fault server's gates, which hold requests for races and crashes, and its checks of what clients do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ReadTimeoutError,
)

from tests.fault.server import (
    FaultServer,
    FaultServerProcess,
    Handle,
    error,
    never_answer,
    never_read,
    reset,
)
from tests.fault.server.client import client

MIB = 2**20
B = "bucket"
DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def s3():
    with FaultServer(min_part_bytes=0) as server:
        yield server


@pytest.fixture
def c(s3: Handle):
    with client(s3, connect_timeout=0.5, read_timeout=0.5, max_pool_connections=20) as opened:
        yield opened


def put(c: Any, key: str = "k", body: bytes = DATA) -> None:
    c.put_object(Bucket=B, Key=key, Body=body)


def test_gates_hold_requests_until_released(s3: Handle, c: Any):
    """Writers held before the operation have stored nothing; they go on one by one; held replies come after the commit."""
    gate = s3.hold("PutObject", key="^race", at="handle")
    with ThreadPoolExecutor(4) as pool, client(s3) as patient:
        writers = [pool.submit(put, patient, f"race{n}") for n in range(3)]
        gate.wait_arrived(3)
        assert s3.objects() == {}
        gate.release(1)
        s3.wait_for("PutObject", count=1)
        assert len(s3.objects()) == 1
        gate.release()
        for writer in writers:
            writer.result()
        assert len(s3.objects()) == 3
        reply_gate = s3.hold("PutObject", key="^slow", at="reply")
        writer = pool.submit(put, patient, "slow")
        reply_gate.wait_arrived()
        assert "slow" in s3.objects()
        assert not writer.done()
        reply_gate.release()
        writer.result()
    with pytest.raises(TimeoutError, match="0 of 1 requests"):
        s3.hold("GetObject").wait_arrived(timeout_s=0.05)


def test_a_write_that_lands_after_its_client_gave_up(s3: Handle, c: Any):
    """A held request is done on release though its client is gone; one answered 503 can land later, too."""
    gate = s3.hold("PutObject", key="zombie")
    with pytest.raises(ReadTimeoutError):
        put(c, "zombie")
    assert s3.objects() == {}
    (record,) = s3.wait_for("PutObject")
    assert (record.outcome, record.done) == ("client closed", False)
    gate.release()
    late = s3.hold("PutObject", key="late", at="late", then=error(503, "SlowDown"))
    with pytest.raises(ClientError, match="SlowDown"):
        put(c, "late")
    late.wait_arrived()
    assert "late" not in s3.objects()
    late.release()
    deadline = time.monotonic() + 5
    while set(s3.objects()) != {"zombie", "late"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


_CLIENT = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("PUT", "/bucket/" + sys.argv[2], body=b"x" * 100)
connection.getresponse()
"""


@pytest.mark.parametrize("reached", [True, False])
def test_a_killed_client(reached: bool):
    """kill -9 at a gate: the request counts as sent, or with ``then=reset()`` as never sent, whatever was asked."""
    with FaultServerProcess() as server:
        gate = server.hold("PutObject", key="^k$", then=None if reached else reset("handle"))
        child = subprocess.Popen([sys.executable, "-c", _CLIENT, str(server.ports[0]), "k"])
        gate.wait_arrived()
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
        server.wait_for("PutObject")
        gate.release()
        subprocess.run([sys.executable, "-c", _CLIENT, str(server.ports[0]), "last"], check=True, timeout=20)
        assert set(server.objects()) == ({"k", "last"} if reached else {"last"})


def test_violations_are_found(s3: Handle):
    """Overlapping attempts, unequal parts, wrong order, an early Complete and open uploads are each reported."""
    s3.configure(max_parts=3)
    with client(s3, max_pool_connections=20) as c, ThreadPoolExecutor(4) as pool:

        def begin(key: str) -> dict[str, Any]:
            return {"Bucket": B, "Key": key, "UploadId": c.create_multipart_upload(Bucket=B, Key=key)["UploadId"]}

        def part(same: dict[str, Any], number: int, size: int) -> dict[str, Any]:
            return {"PartNumber": number, "ETag": c.upload_part(**same, PartNumber=number, Body=bytes(size))["ETag"]}

        def checks() -> list[str]:
            return sorted(line.partition(":")[0] for line in s3.violations())

        good = begin("good")
        listed = [part(good, 1, 10), part(good, 2, 10), part(good, 3, 4)]
        c.complete_multipart_upload(**good, MultipartUpload={"Parts": listed})
        assert checks() == []

        bad = begin("bad")
        gate = s3.hold("UploadPart", key="bad", part=2)
        slow = [pool.submit(part, bad, 2, 10) for _ in range(2)]
        gate.wait_arrived(2)
        listed = [part(bad, 1, 7), part(bad, 3, 0)]
        complete_gate = s3.hold("CompleteMultipartUpload", key="bad")
        ends = [pool.submit(c.complete_multipart_upload, **bad, MultipartUpload={"Parts": listed}) for _ in range(2)]
        complete_gate.wait_arrived(2)
        complete_gate.release()
        for end in ends:
            end.result()
        gate.release()
        for attempt in slow:
            with pytest.raises(ClientError, match="NoSuchUpload"):
                attempt.result()
        found = checks()
        assert found.count("parts-in-flight") == 2  # one for each Complete
        assert set(found) == {
            "overlapping-part",
            "overlapping-complete",
            "parts-in-flight",
            "part-order",
            "empty-last-part",
        }

        s3.clear()
        uneven = begin("uneven")
        listed = [part(uneven, 1, 5), part(uneven, 2, 6)]
        with pytest.raises(ClientError, match="InvalidArgument"):
            part(uneven, 4, 1)
        assert checks() == ["open-upload", "too-many-parts"]
        c.complete_multipart_upload(**uneven, MultipartUpload={"Parts": listed})
        assert checks() == ["too-many-parts", "unequal-parts"]
        assert s3.violations(ignore=("too-many-parts", "unequal-parts")) == []


def test_a_retry_after_closing_is_no_overlap(s3: Handle, c: Any):
    """An attempt ends when its client closes the connection, so that the retry behind it is not reported."""
    upload_id = c.create_multipart_upload(Bucket=B, Key="k")["UploadId"]
    same = {"Bucket": B, "Key": "k", "UploadId": upload_id, "PartNumber": 1, "Body": DATA * 8}
    s3.on("UploadPart", never_answer(commit=True), nth=1)
    s3.on("UploadPart", never_read(), nth=2)
    for _ in range(2):
        with pytest.raises(BotoCoreError):
            c.upload_part(**same)
    c.upload_part(**same)
    assert len(s3.wait_for("UploadPart", count=3)) == 3
    assert s3.violations(ignore=("open-upload",)) == []
    assert s3.violations()[0].startswith(f"open-upload: {upload_id}")
