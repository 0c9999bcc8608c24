"""Checksums, ETags and the aws-chunked framing, as S3 defines them.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html and
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-streaming-trailers.html
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence

from awscrt import checksums as crt

from .model import Blob
from .request import Request, S3Error
from .settings import Settings

_PREFIX = "x-amz-checksum-"
ALGORITHMS = ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")
_CRC: dict[str, tuple[Callable[..., int], int]] = {  # (data, previous) -> value; width in bytes
    "crc32": (zlib.crc32, 4),
    "crc32c": (crt.crc32c, 4),
    "crc64nvme": (crt.crc64nvme, 8),
}


def checksum(algorithm: str, pieces: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return the base64 value of ``x-amz-checksum-<algorithm>`` over ``pieces``."""
    if algorithm in _CRC:
        function, width = _CRC[algorithm]
        value = 0
        for piece in pieces:
            value = function(piece, value)
        return base64.b64encode(value.to_bytes(width, "big")).decode()
    digest = hashlib.new(algorithm)
    for piece in pieces:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def composite(algorithm: str, parts: Sequence[str]) -> str:
    """Return the checksum of checksums of a multipart object, with the number of parts."""
    return f"{checksum(algorithm, [b''.join(map(base64.b64decode, parts))])}-{len(parts)}"


def etag(pieces: Iterable[bytes | bytearray | memoryview], settings: Settings) -> str:
    """Return an ETag without quotes: an MD5, or 32 hex digits that depend on the content alone."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece if settings.etag_md5 else b"%d %d" % (crt.crc32c(piece), len(piece)))
    return digest.hexdigest()


def multipart_etag(etags: Sequence[str]) -> str:
    """Return the ETag of an object made of parts."""
    digest = hashlib.md5(b"".join(bytes.fromhex(tag) for tag in etags), usedforsecurity=False)
    return f"{digest.hexdigest()}-{len(etags)}"


@dataclasses.dataclass
class Payload:
    """A request body as it is to be stored, with its verified checksums by algorithm."""

    data: bytes | bytearray
    checksums: dict[str, str]
    etag: str

    def blob(self, request: Request, settings: Settings) -> Blob:
        """Return what the store keeps: the bytes, or their number where the key's bodies are discarded."""
        return Blob.keeping(self.data, request.key, settings.discard_bodies)


def is_aws_chunked(request: Request) -> bool:
    """Whether the body comes in aws-chunked framing."""
    headers = request.headers
    return "aws-chunked" in headers.get("content-encoding", "") or headers.get("x-amz-content-sha256", "").startswith(
        "STREAMING-"
    )


def asks_checksum(request: Request) -> bool:
    """Whether a header of the checksum family is there."""
    names = ("x-amz-trailer", "x-amz-sdk-checksum-algorithm", "x-amz-checksum-algorithm", "x-amz-checksum-type")
    return any(name in names or name[len(_PREFIX) :] in ALGORITHMS for name in request.headers)


def unframe(body: bytearray) -> tuple[bytearray, dict[str, str]]:
    """Return the data and the trailers of an aws-chunked body."""
    data, trailers, at = bytearray(), {}, 0
    view = memoryview(body)
    while True:
        end = body.find(b"\r\n", at)
        try:
            size = int(bytes(view[at:end]).split(b";")[0], 16)
        except ValueError as error:
            raise S3Error("IncompleteBody", "bad aws-chunked framing") from error
        at = end + 2
        if size == 0:
            for line in bytes(view[at:]).decode("latin-1").split("\r\n"):
                name, colon, value = line.partition(":")
                if colon:
                    trailers[name.strip().lower()] = value.strip()
            return data, trailers
        data += view[at : at + size]
        at += size + 2


def accept(request: Request, body: bytearray, settings: Settings) -> Payload:
    """Unframe and check the body of a PutObject or UploadPart; raise S3Error for what does not hold."""
    headers, fields = request.headers, dict(request.headers)
    refusal = {"refuse-501": "NotImplemented", "refuse-400": "InvalidRequest"}.get(settings.checksum)
    if refusal is not None and asks_checksum(request):
        raise S3Error(refusal, "a checksum header is not supported")
    data = body
    if is_aws_chunked(request):
        if settings.framing == "refuse":
            raise S3Error("NotImplemented", "Transfer-Encoding of aws-chunked is not supported")
        if settings.framing == "decode":
            data, trailers = unframe(body)
            fields.update(trailers)
            declared = headers.get("x-amz-decoded-content-length")
            if declared is not None and int(declared) != len(data):
                raise S3Error("IncompleteBody", f"{len(data)} bytes after decoding, {declared} declared")
    check_md5(request, data)
    claimed = headers.get("x-amz-content-sha256", "")
    if settings.verify_payload_hash and len(claimed) == 64 and claimed != hashlib.sha256(body).hexdigest():
        raise S3Error("XAmzContentSHA256Mismatch", "the body's SHA-256 is not the one that was signed")
    found = {}
    if settings.checksum == "verify":
        for algorithm in ALGORITHMS:
            value = fields.get(_PREFIX + algorithm)
            if value is not None:
                if checksum(algorithm, [data]) != value:
                    raise S3Error("BadDigest", f"the {algorithm} you specified did not match the calculated checksum")
                found[algorithm] = value
    return Payload(data, found, etag([data], settings))


def check_md5(request: Request, data: bytes | bytearray) -> None:
    """Compare Content-MD5, where it was sent, with the body."""
    sent = request.headers.get("content-md5")
    if sent is not None and sent != base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode():
        raise S3Error("BadDigest", "the Content-MD5 you specified did not match what we received")


def require_md5(request: Request, settings: Settings) -> None:
    """Refuse a request without Content-MD5 where the store demands it."""
    if request.operation in settings.content_md5_for and "content-md5" not in request.headers:
        counts = settings.checksum == "verify" and any(
            name.startswith(_PREFIX) and name[len(_PREFIX) :] in ALGORITHMS for name in request.headers
        )
        if not counts:
            raise S3Error("InvalidRequest", "Missing required header for this request: Content-MD5 OR x-amz-checksum-*")


def header_name(algorithm: str) -> str:
    """Return the header of an algorithm."""
    return _PREFIX + algorithm


def element_name(algorithm: str) -> str:
    """Return the XML element of an algorithm."""
    return "Checksum" + algorithm.upper()
