"""Bytes alone, without torch: the ceiling that http.client reaches in threads, and the project's data plane beside it."""

from __future__ import annotations

import http.client
import queue
import random
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.meter import GIB, Meter
from benchmarks.peers import boto3_client

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.server import Target

MIB = 1 << 20
PART = 16 * MIB
THREADS = 8
WARM_UP = 64 * MIB
KEY = "plane"


def random_bytes(size: int) -> bytearray:
    """Bytes of which no two MiB are alike."""
    tile = random.Random(0).randbytes(17 * MIB)
    data = bytearray(size)
    for start in range(0, size, len(tile)):
        data[start : start + len(tile)] = tile[: size - start]
    return data


def ranges(size: int) -> list[tuple[int, int]]:
    """The parts of an object."""
    return [(start, min(start + PART, size)) for start in range(0, size, PART)]


class RawHttp:
    """Parts sent and ranges received by http.client in threads, on URLs signed beforehand.

    Args:
        target: Where to.
        size: Bytes of the object.
        crc: Compute the CRC32C of every part and every range as well.
    """

    def __init__(self, target: Target, size: int, *, crc: bool) -> None:
        self._target = target
        self._spans = ranges(size)
        self._crc = crc
        self.sent = random_bytes(size)
        self.received = bytearray(b"\1") * size
        self._idle: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue()
        self._client = boto3_client(target.endpoint)
        self._key = target.key(KEY)

    def _connection(self) -> http.client.HTTPConnection:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            url = urlsplit(self._target.endpoint)
            kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            connection = kind(url.netloc)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection

    def _signed(self, operation: str, **parameters: Any) -> str:  # noqa: ANN401 -- boto3's own
        named = {"Bucket": self._target.bucket, "Key": self._key, **parameters}
        return str(self._client.generate_presigned_url(operation, Params=named))

    def _request(
        self, method: str, url: str, body: memoryview | None, headers: dict[str, str], into: memoryview
    ) -> str:
        connection = self._connection()
        parts = urlsplit(url)
        connection.request(method, f"{parts.path}?{parts.query}", body=body, headers=headers)
        answer = connection.getresponse()
        if answer.status not in (200, 206):
            raise RuntimeError(f"{method}: {answer.status} {answer.read()[:200]!r}")
        filled = 0
        while filled < len(into):
            count = answer.readinto(into[filled:])
            if not count:
                raise RuntimeError("the reply ended early")
            filled += count
        answer.read()
        self._idle.put(connection)
        return answer.headers["ETag"] or ""

    def _each(self, work: Callable[[int, tuple[int, int]], Any]) -> list[Any]:
        with ThreadPoolExecutor(THREADS) as executor:
            return list(executor.map(work, range(len(self._spans)), self._spans))

    def put(self) -> None:
        """Upload the object."""
        named = {"Bucket": self._target.bucket, "Key": self._key}
        upload = self._client.create_multipart_upload(**named)["UploadId"]
        urls = [self._signed("upload_part", UploadId=upload, PartNumber=i) for i in range(1, len(self._spans) + 1)]
        view = memoryview(self.sent)

        def send(index: int, span: tuple[int, int]) -> str:
            part = view[span[0] : span[1]]
            self._check(part)
            return self._request("PUT", urls[index], part, {}, memoryview(b""))

        parts = [{"PartNumber": i, "ETag": etag} for i, etag in enumerate(self._each(send), 1)]
        self._client.complete_multipart_upload(**named, UploadId=upload, MultipartUpload={"Parts": parts})

    def put_in_background(self) -> Future[None]:
        """Upload the object from other threads."""
        return ThreadPoolExecutor(1).submit(self.put)

    def get(self) -> None:
        """Download the object."""
        url = self._signed("get_object")
        view = memoryview(self.received)

        def receive(_: int, span: tuple[int, int]) -> None:
            into = view[span[0] : span[1]]
            self._request("GET", url, None, {"Range": f"bytes={span[0]}-{span[1] - 1}"}, into)
            self._check(into)

        self._each(receive)

    def _check(self, data: memoryview) -> None:
        if self._crc:
            from awscrt import checksums

            checksums.crc32c(data)


class DataPlane:
    """The same bytes through the project's own data plane, with its checksums.

    Args:
        target: Where to.
        size: Bytes of the object.
    """

    def __init__(self, target: Target, size: int) -> None:
        self._target = target
        self._spans = ranges(size)
        self._crcs: list[int] = []
        self.sent = random_bytes(size)
        self.received = bytearray(b"\1") * size

    def _job(self) -> tuple[Any, Any]:
        from dcp_s3 import S3Config
        from dcp_s3._transfer.http.payload import Progress
        from dcp_s3._transfer.job import Job
        from dcp_s3._transfer.limits.retry import Counter, Deadline
        from dcp_s3._transfer.s3.planes import data_plane

        return data_plane(S3Config.from_env()), Job(self._target.bucket, Deadline(600), Counter(), Progress())

    def put(self) -> None:
        """Upload the object: parts from memory, a CRC32C header each, size verified by HEAD."""
        from dcp_s3._transfer.upload import ObjectUpload

        plane, job = self._job()
        upload = ObjectUpload(plane, job, self._target.key(KEY), "0" * 16, part_bytes=PART)
        view = memoryview(self.sent)
        self._crcs = [upload.append(view[start:end]) for start, end in self._spans]
        upload.finish()

    def get(self) -> None:
        """Download the object: ranges into memory, each one checked against its CRC32C."""
        from dcp_s3._transfer.checksum import crc32c
        from dcp_s3._transfer.download import Downloader, RangeRead

        plane, job = self._job()
        view = memoryview(self.received)
        key = self._target.key(KEY)

        def read(index: int, start: int, end: int) -> RangeRead[int]:
            return RangeRead(key, start, end - start, scratch=0, pieces=lambda: [view[start:end]], about=index)

        reads = [read(i, start, end) for i, (start, end) in enumerate(self._spans)]
        downloader: Downloader[int] = Downloader(plane, job)
        for done in downloader.run(reads):
            start, end = self._spans[done.about]
            if crc32c(view[start:end]) != self._crcs[done.about]:
                raise ValueError("the bytes are not those that were sent")


def measure(target: Target, subject: str, gib: float) -> dict[str, float]:
    """Upload and download one object.

    Args:
        target: Where to.
        subject: ``raw``, ``raw+crc`` or ``dcp_s3``.
        gib: Its size, GiB.
    """

    def make(size: int) -> RawHttp | DataPlane:
        return DataPlane(target, size) if subject == "dcp_s3" else RawHttp(target, size, crc=subject == "raw+crc")

    warm = make(WARM_UP)
    warm.put()
    warm.get()
    target.clear()
    bytes_alone = make(int(gib * GIB))
    if isinstance(bytes_alone, RawHttp) and isinstance(warm, RawHttp):
        bytes_alone._idle = warm._idle
    values: dict[str, float] = {"gib": gib}
    for name, work in (("put", bytes_alone.put), ("get", bytes_alone.get)):
        with Meter() as meter:
            work()
        values |= meter.values(name, gib)
    if bytes_alone.sent != bytes_alone.received:
        raise ValueError("what was received is not what was sent")
    target.clear()
    return values
