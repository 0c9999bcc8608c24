"""CRC32C and CRC64NVME of buffers, without copies and without the GIL."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING, Final

from awscrt import checksums

if TYPE_CHECKING:
    from collections.abc import Iterable

Buffer = bytes | bytearray | memoryview

_MD5: Final = re.compile(r"[0-9a-f]{32}")

CRC_CHUNK_BYTES: Final = 4 << 20
"""Grid of a record's own CRCs: a row range over-reads at most to the next multiple of this."""


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC32C (Castagnoli) of ``data``, continuing from ``value``. 8-12 GiB/s; releases the GIL."""
    return int(checksums.crc32c(data, value))


def combine(crc_a: int, crc_b: int, length_b: int) -> int:
    """CRC32C of ``a + b`` from the CRCs of both and the length of ``b`` in bytes."""
    if length_b == 0:
        return crc_a
    return int(checksums.combine_crc32c(crc_a, crc_b, length_b))


def crc64nvme(data: Buffer, value: int = 0) -> int:
    """CRC64NVME of ``data``, continuing from ``value``."""
    return int(checksums.crc64nvme(data, value))


def header_value(crc: int, *, bits: int = 32) -> str:
    """A CRC as S3's checksum headers carry it: base64 of the big-endian bytes.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
    """
    return base64.b64encode(crc.to_bytes(bits // 8, "big")).decode("ascii")


def md5_header(pieces: Iterable[Buffer]) -> str:
    """The MD5 of all pieces together, as ``Content-MD5`` carries it (RFC 1864)."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode("ascii")


def is_etag_of_parts(etag: str, parts: list[str]) -> bool | None:
    """Whether an ETag is the one that AWS gives an object of these parts (MD5 of their MD5s); ``None`` if it has another form."""
    tags = [part.strip('"') for part in parts]
    digest, _, count = etag.strip('"').partition("-")
    if count != str(len(tags)) or not all(map(_MD5.fullmatch, [digest, *tags])):
        return None
    return hashlib.md5(bytes.fromhex("".join(tags)), usedforsecurity=False).hexdigest() == digest
