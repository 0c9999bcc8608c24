"""CRC32C and CRC64NVME of buffers, without copies and without the GIL."""

from __future__ import annotations

import base64
from typing import Final

from awscrt import checksums

Buffer = bytes | bytearray | memoryview

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
