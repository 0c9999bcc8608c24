"""What the package's data plane does on each store: objects, parts, ranges and checksums, one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from dcp_s3 import CorruptCheckpointError, RetryPolicy, StorageError, StorageUnavailableError
from dcp_s3._runtime.loop_thread import loop_thread
from dcp_s3._transfer.checksum import crc32c, crc64nvme
from dcp_s3._transfer.download import Downloader, RangeRead
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.sink import Sink
from dcp_s3._transfer.job import Head, Job
from dcp_s3._transfer.limits.retry import Counter, Deadline
from dcp_s3._transfer.s3.control_store import is_missing
from dcp_s3._transfer.s3.data_plane import DataPlane
from dcp_s3._transfer.upload import ObjectUpload
from tests.servers import Bucket, Endpoint

T = TypeVar("T")

MIB = 1 << 20
PART = 5 * MIB
TOKEN = "0123456789abcdef"
BODY = bytes(range(251)) * 100
KEEPS_CHECKSUMS = {"scripted": True, "seaweedfs": True, "ceph_rgw": False}
"""Whether a store looks at x-amz-checksum-*; Ceph RGW 16 does not."""


@pytest.fixture
def open_plane(endpoint: Endpoint) -> Iterator[Callable[..., DataPlane]]:
    """Makes data planes for `endpoint`; settings are fields of S3Config."""
    opened = []

    def make(**settings: Any) -> DataPlane:
        retry = RetryPolicy(max_attempts=2, initial_wait_s=0.01, max_wait_s=0.02)
        opened.append(DataPlane(endpoint.config(retry=retry, **settings)))
        return opened[-1]

    yield make
    for plane in opened:
        wait(plane.close())


@pytest.fixture
def plane(open_plane: Callable[..., DataPlane]) -> DataPlane:
    return open_plane()


@pytest.fixture
def job(bucket: Bucket) -> Job:
    return Job(bucket.name, Deadline(60), Counter(), Progress(), 5)


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    return loop_thread().submit(coroutine).result(60)


def put(plane: DataPlane, job: Job, key: str, body: bytes, *, crc: int | None = None) -> Head:
    views = [memoryview(body)[:1000], memoryview(body)[1000:]]
    return wait(plane.put_object(job, key, views, crc32c(body) if crc is None else crc, TOKEN))


def get(plane: DataPlane, job: Job, key: str, start: int, end: int, **options: Any) -> bytes:
    target = bytearray(end - start)
    wait(plane.get_range(job, key, start, Sink([memoryview(target)], job.progress), **options))
    return bytes(target)


def test_an_object_of_views(plane: DataPlane, job: Job, bucket: Bucket) -> None:
    """Views become one object; HEAD has its size, ETag and token; a range goes where its pieces say."""
    key = bucket.key("data/x/__0_0.distcp")
    head = put(plane, job, key, BODY)
    assert bucket.get("data/x/__0_0.distcp") == BODY
    assert head == Head(len(BODY), head.etag, TOKEN)
    seen = wait(plane.head_object(job, key))
    assert seen is not None
    assert (seen.size, seen.etag, seen.token) == (head.size, head.etag, TOKEN)

    first, last = bytearray(100), bytearray(50)
    sink = Sink([memoryview(first), 30, memoryview(last)], job.progress)
    assert wait(plane.get_range(job, key, 7, sink, etag=head.etag)) == head.etag
    assert (first, last) == (BODY[7:107], BODY[137:187])
    assert get(plane, job, key, 0, len(BODY)) == BODY  # the whole: 200 or 206
    assert get(plane, job, key, len(BODY) - 1, len(BODY)) == BODY[-1:]
    assert put(plane, job, bucket.key("empty"), b"").size == 0
    assert bucket.get("empty") == b""


def test_parts_become_an_object(plane: DataPlane, job: Job, bucket: Bucket, endpoint: Endpoint) -> None:
    """Parts sent in any order are one object in the order of their numbers, with the token that its upload was created with."""
    key = bucket.key("data/x/__0_1.distcp")
    bodies = [bytes([n]) * size for n, size in enumerate((PART, PART, 1000), start=1)]
    upload_id, checksums = wait(plane.create_upload(job, key, TOKEN))
    assert bucket.uploads() == ["data/x/__0_1.distcp"]
    entries = {
        number: wait(
            plane.upload_part(
                job,
                key,
                upload_id,
                number,
                [memoryview(bodies[number - 1])],
                crc32c(bodies[number - 1]),
                checksums=checksums,
            )
        )
        for number in (3, 1, 2)
    }
    assert wait(plane.head_object(job, key)) is None  # nothing is there before it is complete
    wait(plane.complete_upload(job, key, upload_id, [entries[number] for number in (1, 2, 3)]))
    assert bucket.uploads() == []
    head = wait(plane.head_object(job, key))
    assert head is not None
    assert (head.size, head.token) == (2 * PART + 1000, TOKEN)
    assert head.etag.strip('"')
    for seam in (PART, 2 * PART):
        assert get(plane, job, key, seam - 10, seam + 10, etag=head.etag) == b"".join(bodies)[seam - 10 : seam + 10]
    if endpoint.name in KEEPS_CHECKSUMS:
        assert plane.learnt.sends_checksums is KEEPS_CHECKSUMS[endpoint.name]


def test_an_aborted_upload(plane: DataPlane, job: Job, bucket: Bucket) -> None:
    """An aborted upload leaves nothing, cannot be completed any more, and aborting it again is no error."""
    key = bucket.key("data/x/__0_2.distcp")
    upload_id, checksums = wait(plane.create_upload(job, key, TOKEN))
    body = b"z" * 1000
    entry = wait(plane.upload_part(job, key, upload_id, 1, [memoryview(body)], crc32c(body), checksums=checksums))
    wait(plane.abort_upload(job, key, upload_id))
    assert bucket.uploads() == []
    with pytest.raises(StorageError) as refused:
        wait(plane.complete_upload(job, key, upload_id, [entry]))
    assert (refused.value.operation, refused.value.key, refused.value.rank) == ("CompleteMultipartUpload", key, 5)
    assert wait(plane.head_object(job, key)) is None
    wait(plane.abort_upload(job, key, upload_id))


def test_ranges_that_cannot_be(plane: DataPlane, job: Job, bucket: Bucket) -> None:
    """A missing object is told from a short one and from another one; bytes that are not there are never made up."""
    key = bucket.key("object")
    with pytest.raises(StorageError) as missing:
        get(plane, job, key, 0, 10)
    assert is_missing(missing.value)
    assert (missing.value.operation, missing.value.key, missing.value.rank) == ("GetObject", key, 5)

    first = put(plane, job, key, BODY)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        get(plane, job, key, len(BODY), len(BODY) + 10)
    put(plane, job, key, BODY[::-1])
    with pytest.raises(CorruptCheckpointError, match="changed while it was read"):
        get(plane, job, key, 0, 10, etag=first.etag)


def test_a_range_over_the_end(plane: DataPlane, job: Job, bucket: Bucket) -> None:
    """A range of which the store has only the beginning is an object cut short, found at the first reply."""
    key = bucket.key("object")
    put(plane, job, key, BODY)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        get(plane, job, key, len(BODY) - 5, len(BODY) + 5)
    assert job.counter.retries == 0


@pytest.mark.parametrize("algorithm", ["crc32c", "crc64nvme"])
def test_a_body_that_is_not_what_its_checksum_says(
    open_plane: Callable[..., DataPlane], job: Job, bucket: Bucket, endpoint: Endpoint, algorithm: str
) -> None:
    """Where a store checks checksums, it refuses a body whose CRC is another one; the right one is taken everywhere."""
    plane = open_plane(checksum=algorithm)
    put(plane, job, bucket.key("right"), BODY)
    assert bucket.get("right") == BODY
    if not KEEPS_CHECKSUMS.get(endpoint.name):
        return
    if algorithm == "crc32c":
        with pytest.raises(StorageUnavailableError) as refused:
            put(plane, job, bucket.key("wrong"), BODY, crc=crc32c(BODY) ^ 1)
    else:
        sums = plane.checksum_params(0, [memoryview(BODY)])
        assert sums == {"ChecksumCRC64NVME": _base64(crc64nvme(BODY), 8)}
        plane.checksum_params = lambda crc, views: {"ChecksumCRC64NVME": _base64(crc64nvme(BODY) ^ 1, 8)}  # type: ignore[method-assign]
        with pytest.raises(StorageUnavailableError) as refused:
            put(plane, job, bucket.key("wrong"), BODY)
    assert (refused.value.status, refused.value.code, refused.value.attempts) == (400, "BadDigest", 2)
    assert bucket.keys() == ["right"]


def _base64(value: int, nbytes: int) -> str:
    import base64

    return base64.b64encode(value.to_bytes(nbytes, "big")).decode()


def test_an_upload_and_many_ranges(plane: DataPlane, job: Job, bucket: Bucket) -> None:
    """A streamed object and its receipt agree with the store, and ranges read at once, in any order, bring its bytes back."""
    whole = bytes(range(256)) * (12 * MIB // 256) + b"end"
    upload = ObjectUpload(plane, job, bucket.key("data/x/__5_0.distcp"), TOKEN, part_bytes=PART)
    for start in range(0, len(whole), 3 * MIB):
        piece = memoryview(whole)[start : start + 3 * MIB]
        assert upload.append(piece) == crc32c(piece)
    receipt = upload.finish()
    head = wait(plane.head_object(job, receipt.key))
    assert head is not None
    assert (head.size, head.etag, head.token) == (len(whole), receipt.etag, TOKEN)
    assert (receipt.size, receipt.part_bytes) == (len(whole), PART)
    assert receipt.crc32c == tuple(crc32c(whole[start : start + PART]) for start in range(0, len(whole), PART))
    assert bucket.uploads() == []

    target = bytearray(len(whole))
    spans = [(start, min(start + MIB, len(whole))) for start in range(0, len(whole), MIB)]
    reads = [
        RangeRead(receipt.key, a, b - a, scratch=0, pieces=lambda a=a, b=b: [memoryview(target)[a:b]], about=a)
        for a, b in reversed(spans)
    ]
    assert sorted(read.about for read in Downloader(plane, job).run(reads)) == [a for a, _ in spans]
    assert target == whole
    assert (plane.budget.held, job.counter.retries) == (0, 0)
