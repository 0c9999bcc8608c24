"""Chunks cover their tensor exactly, or what is wrong is told."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc

import numpy as np
import pytest

from dcp_s3._checkpoint.format.coverage import flaw_of

WHOLE = [
    ((), [((), ())]),
    ((4,), [((0,), (4,))]),
    ((0,), []),
    ((0, 3), [((0, 0), (0, 3))]),
    ((4,), [((2,), (2,)), ((0,), (2,)), ((4,), (0,)), ((9,), (0,))]),
    ((4, 6), [((0, 0), (4, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 4))]),
    # no cut through the whole tensor separates these
    ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]),
]

FLAWED = [
    ((), [], "is not whole: its chunks hold 0 of its 1 elements"),
    ((), [((), ()), ((), ())], "has chunks that overlap: they hold 2 elements, and it has 1"),
    ((4,), [((0,), (2,))], "is not whole: its chunks hold 2 of its 4 elements"),
    ((4,), [((0,), (2,)), ((3,), (1,))], "is not whole: its chunks hold 3 of its 4 elements"),
    ((4,), [((0,), (2,)), ((0,), (2,))], "has chunks that overlap, and lacks as many elements as they share"),
    ((4,), [((0,), (3,)), ((2,), (1,))], "has chunks that overlap, and lacks as many elements as they share"),
    ((4,), [((0,), (3,)), ((2,), (2,))], "has chunks that overlap: they hold 5 elements, and it has 4"),
    ((4,), [((1,), (4,))], "has a chunk outside of it: [4] at [1] of [4]"),
    ((4,), [((-1,), (4,))], "has a chunk outside of it: [4] at [-1] of [4]"),
    ((4,), [((4,), (-1,)), ((0,), (4,))], "has an impossible chunk: [-1] at [4] of [4]"),
    ((4, 1), [((0,), (4,))], "has an impossible chunk: [4] at [0] of [4, 1]"),
    ((2, 2), [((0, 0), (1, 2)), ((0, 0), (2, 1))], "has chunks that overlap, and lacks as many elements as they share"),
]


@pytest.mark.parametrize("sizes, chunks", WHOLE)
def test_chunks_that_cover_their_tensor(sizes, chunks):
    """Whatever their order and form."""
    for order in itertools.islice(itertools.permutations(chunks), 24):
        assert flaw_of(sizes, order) is None


@pytest.mark.parametrize("sizes, chunks, told", FLAWED)
def test_chunks_that_do_not(sizes, chunks, told):
    """A gap, an overlap, both in one, or a chunk outside."""
    assert flaw_of(sizes, chunks) == told


def test_a_part_is_enough_for_a_rank_by_itself():
    """What a rank saves alone covers what it holds."""
    assert flaw_of((4,), [((2,), (2,))], partial=True) is None
    assert flaw_of((4,), [((2,), (3,))], partial=True) == "has a chunk outside of it: [3] at [2] of [4]"
    assert flaw_of((4,), [((0,), (3,)), ((2,), (2,))], partial=True) is not None


def _cuts(chance, sizes, count, *, empty=False):
    """Cut a tensor into up to `count` chunks, one of them in two at a time, anywhere."""
    chunks = [(tuple(0 for _ in sizes), tuple(sizes))]
    for _ in range(count - 1):
        place = chance.randrange(len(chunks))
        offsets, lengths = chunks[place]
        dimension = chance.randrange(len(sizes))
        least = 0 if empty else 1
        if lengths[dimension] < 2 * least:
            continue
        cut = chance.randint(least, lengths[dimension] - least)
        first = (*lengths[:dimension], cut, *lengths[dimension + 1 :])
        rest = (*lengths[:dimension], lengths[dimension] - cut, *lengths[dimension + 1 :])
        moved = (*offsets[:dimension], offsets[dimension] + cut, *offsets[dimension + 1 :])
        chunks[place] = (offsets, first)
        chunks.append((moved, rest))
    return chunks


@pytest.mark.parametrize("seed", range(600))
def test_it_says_what_counting_says(seed):
    """Random cuts of small tensors, left whole or spoiled by moving, resizing, dropping or doubling a chunk."""
    chance = random.Random(seed)
    dimensions = chance.randint(1, 5)
    sizes = tuple(chance.randint(1, 6 if dimensions < 4 else 3) for _ in range(dimensions))
    chunks = _cuts(chance, sizes, chance.randint(1, 9), empty=True)
    for _ in range(chance.choice((0, 1, 2))):
        place = chance.randrange(len(chunks))
        other = chance.choice(chunks)
        chunks[place] = chance.choice(((other[0], chunks[place][1]), (chunks[place][0], other[1]), other))
    chance.shuffle(chunks)

    covered = np.zeros(sizes, dtype=int)
    outside = False
    for offsets, lengths in chunks:
        if 0 in lengths:
            continue
        outside |= any(start + length > size for start, length, size in zip(offsets, lengths, sizes, strict=True))
        covered[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))] += 1
    exact = not outside and (covered == 1).all()

    assert (flaw_of(sizes, chunks) is None) == exact


@pytest.mark.parametrize("seed", range(100))
def test_an_overlap_and_a_gap_of_one_size(seed):
    """Chunks that hold as many elements as their tensor, in up to 5 dimensions: one is moved onto others by one element."""
    chance = random.Random(seed)
    sizes = tuple(chance.randint(4, 9) for _ in range(1 + seed % 5))
    chunks = _cuts(chance, sizes, chance.randint(2, 3000))
    assert flaw_of(sizes, chunks) is None
    where = [
        (place, dimension, step)
        for place, (offsets, lengths) in enumerate(chunks)
        for dimension, size in enumerate(sizes)
        for step in (-1, 1)
        if 0 <= offsets[dimension] + step <= size - lengths[dimension]
    ]
    place, dimension, step = chance.choice(where)
    offsets, lengths = chunks[place]
    chunks[place] = ((*offsets[:dimension], offsets[dimension] + step, *offsets[dimension + 1 :]), lengths)
    assert flaw_of(sizes, chunks) == "has chunks that overlap, and lacks as many elements as they share"


def _cost_of(sizes, chunks):
    """Return what is told, CPU seconds, and the most memory that was held meanwhile, MiB."""
    began = time.process_time()
    told = flaw_of(sizes, chunks)
    seconds = time.process_time() - began
    tracemalloc.start()
    try:
        flaw_of(sizes, chunks)
        return told, seconds, tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count, dimensions", [(136, 16), (4000, 16), (1000, 60)])
def test_many_dimensions_cost_what_they_hold(count, dimensions):
    """A record can be made for its reader's time: chunks of 16 dimensions have 65,536 corners each. They are judged as any."""
    sizes = (4,) * dimensions
    chunks = _cuts(random.Random(count), sizes, count)
    told, seconds, mib = _cost_of(sizes, chunks)
    assert told is None
    assert seconds < 0.5
    assert mib < 64

    offsets, lengths = chunks[-1]
    other = next(k for k in range(dimensions) if lengths[k] < 4)
    moved = (*offsets[:other], 0 if offsets[other] else 1, *offsets[other + 1 :])
    told, seconds, mib = _cost_of(sizes, [*chunks[:-1], (moved, lengths)])
    assert told == "has chunks that overlap, and lacks as many elements as they share"
    assert seconds < 0.5
    assert mib < 64


def test_chunks_of_impossible_forms_in_many_dimensions():
    """They are refused before they are counted."""
    chunks = [(tuple(n >> bit & 1 for bit in range(30)), (1,) * 30) for n in range(1000)]

    assert "is not whole" in flaw_of((2,) * 30, chunks + chunks)
    assert "outside of it" in flaw_of((1000,) + (1,) * 29, [((n, *o[1:]), s) for n, (o, s) in enumerate(chunks)])
    assert flaw_of((2,) * 40, [((bit,) * 40, (1,) * 40) for bit in (0, 1)], partial=True) is None


def test_many_chunks_are_looked_at_in_no_time():
    """In one tensor, in a grid, and in as many tensors."""
    began = time.process_time()

    assert flaw_of((10**5, 8), [((n, 0), (1, 8)) for n in range(10**5)]) is None
    assert flaw_of((300, 300), [((n, m), (1, 1)) for n in range(300) for m in range(300)]) is None
    assert flaw_of((6,) * 5, [(place, (1,) * 5) for place in itertools.product(range(6), repeat=5)]) is None
    assert not any(flaw_of((8, 8), [((0, 0), (8, 8))]) for _ in range(10**5))
    assert time.process_time() - began < 5
