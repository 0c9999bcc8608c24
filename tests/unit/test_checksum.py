"""CRCs: the standard's own values, any cut of the same bytes, and the form that S3 wants."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3._transfer.checksum import combine, crc32c, crc64nvme, header_value


@pytest.mark.parametrize(
    "data, value",
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_of_the_standard(data: bytes, value: int):
    """The test vectors of iSCSI. Source: RFC 3720, B.4; the check value of the CRC catalogue."""
    assert crc32c(data) == value
    assert crc32c(memoryview(bytearray(data))) == value


@pytest.mark.parametrize("data, value", [(b"", 0), (b"123456789", 0xAE8B14860A799888)])
def test_crc64nvme_of_the_standard(data: bytes, value: int):
    """The check value of CRC-64/NVME."""
    assert crc64nvme(data) == value


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_pieces_are_the_whole(pieces: list[bytes]):
    """A CRC that is continued, or combined from those of the pieces, is the CRC of the whole; empty pieces too."""
    whole = b"".join(pieces)
    continued = continued64 = combined = 0
    for piece in pieces:
        continued = crc32c(piece, continued)
        continued64 = crc64nvme(piece, continued64)
        combined = combine(combined, crc32c(piece), len(piece))
    assert continued == combined == crc32c(whole)
    assert continued64 == crc64nvme(whole)


def test_a_piece_longer_than_4_gib():
    """Combining knows lengths beyond 32 bits: zeros appended in two ways give the same CRC."""
    half, step = 1 << 32, crc32c(bytes(1 << 16))
    power, length = step, 1 << 16
    while length < half:
        power, length = combine(power, power, length), length * 2
    once = combine(combine(0x12345678, power, half), power, half)
    assert once == combine(0x12345678, combine(power, power, half), 2 * half)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_bit_changes_it(data: bytes, draw: st.DataObject):
    """Any single flipped bit is seen."""
    place = draw.draw(st.integers(0, 8 * len(data) - 1))
    spoiled = bytearray(data)
    spoiled[place // 8] ^= 1 << place % 8
    assert crc32c(spoiled) != crc32c(data)
    assert crc64nvme(spoiled) != crc64nvme(data)


@pytest.mark.parametrize(
    "bits, value, text", [(32, 0xE3069283, "4waSgw=="), (32, 1, "AAAAAQ=="), (64, 1, "AAAAAAAAAAE=")]
)
def test_the_header(bits: int, value: int, text: str):
    """S3 carries the value big-endian in base64, leading zeros included."""
    assert header_value(value, bits=bits) == text
    assert int.from_bytes(base64.b64decode(text), "big") == value
