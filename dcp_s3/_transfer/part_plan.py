"""Pure arithmetic of parts and ranges: how an upload is cut, and which reads are joined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dcp_s3.config import MAX_PART_BYTES, MIB
from dcp_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_PARTS: Final = 10_000
"""Parts of one object. Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""
MAX_OBJECT_BYTES: Final = 5 << 40
"""Of one object. Source: the same."""
DEFAULT_PART_BYTES: Final = 32 * MIB
SMALLEST_CHOSEN_PART: Final = 8 * MIB
PARTS_WANTED: Final = 32
"""A shard is cut into at least so many parts, as long as they stay at 8 MiB or more, so that all connections work."""


def choose_part_bytes(
    total: int,
    *,
    largest: int = 0,
    wanted: int = 0,
    memory_bytes: int = 256 * MIB,
    max_parts: int = MAX_PARTS,
) -> int:
    """The size of an object's parts, all but the last.

    Args:
        total: Bytes that this rank writes, or a good estimate; 0 or more.
        largest: Bytes of its largest record, which cannot go on in a further object.
        wanted: Configured part size, 0 to choose.
        memory_bytes: Parts are grown for ``total`` up to a quarter of it only, as a part that must be copied is held
            whole; data beyond ``max_parts`` such parts goes on in a further object.
        max_parts: Most parts of one object.

    Returns:
        Bytes, a multiple of 1 MiB when chosen or grown, at most 1 GiB.

    Raises:
        ConfigError: One record is larger than ``max_parts`` parts of 1 GiB, or than 5 TiB.
    """
    size = wanted or min(DEFAULT_PART_BYTES, max(SMALLEST_CHOSEN_PART, _round_up(-(-total // PARTS_WANTED), MIB)))
    ceiling = max(size, min(memory_bytes // 4, MAX_PART_BYTES) // MIB * MIB)
    if size * max_parts < total:
        size = min(_round_up(-(-total // max_parts), MIB), ceiling)
    if size * max_parts < largest:
        size = _round_up(-(-largest // max_parts), MIB)
    if size > MAX_PART_BYTES:
        raise ConfigError(
            f"a single tensor of {largest} bytes does not fit into {max_parts} parts of at most {MAX_PART_BYTES} bytes; shard it"
        )
    if largest > MAX_OBJECT_BYTES:
        raise ConfigError(
            f"a single tensor of {largest} bytes does not fit into an object, which S3 limits to 5 TiB; shard it"
        )
    return size


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def coalesce(spans: Iterable[tuple[int, int]], *, gap: int, limit: int) -> list[tuple[int, int, int, int]]:
    """Join sorted neighbouring spans into reads.

    Args:
        spans: ``(start, end)`` in ascending order of start; empty ones are not allowed.
        gap: Bytes between two spans that are rather read and dropped than asked for separately.
        limit: Longest joined read, bytes; a single longer span stays whole.

    Returns:
        ``(start, end, first, last)``: the read, and the half-open range of indices of the spans that it covers.
    """
    reads: list[tuple[int, int, int, int]] = []
    for index, (start, end) in enumerate(spans):
        if reads:
            r_start, r_end, first, _ = reads[-1]
            if start <= r_end + gap and max(end, r_end) - r_start <= limit:
                reads[-1] = (r_start, max(end, r_end), first, index + 1)
                continue
        reads.append((start, end, index, index + 1))
    return reads
