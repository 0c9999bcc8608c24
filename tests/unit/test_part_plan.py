"""Part sizes and joined reads, as pure arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import ConfigError
from dcp_s3._transfer.part_plan import MAX_PARTS, choose_part_bytes, coalesce

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


def parts(total: int, size: int) -> int:
    return -(-total // size)


@pytest.mark.parametrize(
    "total_mib, expected_mib",
    [(80_001, 9), (80_000, 8), (80_000.000001, 9)],
)
def test_a_configured_size_grows_just_enough(total_mib: float, expected_mib: int) -> None:
    """8 MiB parts hold 80,000 MiB exactly; one byte more needs larger ones, chosen before the first byte is sent."""
    total = int(total_mib * MIB) + (total_mib == 80_000.000001)
    size = choose_part_bytes(total, wanted=8 * MIB)
    assert size == expected_mib * MIB
    assert parts(total, size) <= MAX_PARTS


def test_chosen_sizes() -> None:
    """8 MiB for small shards, 32 MiB from 1 GiB on, larger when 10,000 parts would not do."""
    assert choose_part_bytes(0) == 8 * MIB
    assert choose_part_bytes(GIB // 2) == 16 * MIB
    assert choose_part_bytes(2 * GIB) == 32 * MIB
    assert choose_part_bytes(300 * GIB) == 32 * MIB
    assert choose_part_bytes(320 * GIB) == 33 * MIB


def test_parts_that_may_be_copied_stay_within_memory() -> None:
    """Beyond a quarter of the memory the data goes on in a further object instead of in larger parts."""
    assert choose_part_bytes(10 * TIB, memory_bytes=256 * MIB) == 64 * MIB
    # … unless one single record needs them
    assert choose_part_bytes(10 * TIB, largest=TIB, memory_bytes=256 * MIB) == 105 * MIB


def test_a_record_that_can_never_fit_is_refused_before_uploading() -> None:
    """10,000 parts of 1 GiB are the end; the text says what to do."""
    with pytest.raises(ConfigError, match="shard it"):
        choose_part_bytes(11 * TIB, largest=11 * TIB)


@given(st.integers(0, 20 * TIB), st.sampled_from([0, 5 * MIB, 8 * MIB, 64 * MIB]))
def test_part_sizes_are_legal(total: int, wanted: int) -> None:
    """Never below S3's 5 MiB, never above 1 GiB, never smaller than asked for."""
    size = choose_part_bytes(total, wanted=wanted)
    assert 5 * MIB <= size <= GIB
    assert size >= wanted


def test_coalesce_joins_neighbours_within_gap_and_limit() -> None:
    """A small gap is read over, a large one is not, and a read does not outgrow the limit."""
    spans = [(0, 10), (12, 20), (40, 50), (50, 120), (120, 130)]
    assert coalesce(spans, gap=5, limit=100) == [(0, 20, 0, 2), (40, 130, 2, 5)]
    assert coalesce(spans, gap=5, limit=85) == [(0, 20, 0, 2), (40, 120, 2, 4), (120, 130, 4, 5)]


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 300)), max_size=40),
    st.integers(0, 50),
    st.integers(1, 400),
)
def test_coalesce_covers_every_span_once(spans: list[tuple[int, int]], gap: int, limit: int) -> None:
    """Each span lies within exactly the read that claims it, and no read starts or ends in a gap."""
    ordered = sorted((start, start + length) for start, length in spans)
    reads = coalesce(ordered, gap=gap, limit=limit)
    assert [index for read in reads for index in range(read[2], read[3])] == list(range(len(ordered)))
    for start, end, first, last in reads:
        assert start == ordered[first][0]
        assert end == max(span[1] for span in ordered[first:last])
        assert last - first == 1 or end - start <= limit


def test_no_object_is_planned_or_written_beyond_5_tib():
    """S3's limit of an object holds beside that of parts: one tensor is refused before a byte is sent."""
    assert choose_part_bytes(6 * TIB, largest=5 * TIB, memory_bytes=8 * GIB) <= GIB
    with pytest.raises(ConfigError, match=r"5 TiB; shard it"):
        choose_part_bytes(6 * TIB, largest=5 * TIB + 1, memory_bytes=8 * GIB)
