"""Whether the chunks of a tensor cover it exactly: no gap, no overlap, nothing outside. Without torch, in linear time."""

from __future__ import annotations

import math
import random
from itertools import accumulate
from operator import add, gt
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BITS: Final = 61
_PRIME: Final = (1 << _BITS) - 1
"""With it, boxes that do not cover a tensor of 8 dimensions pass for such that do once in 2**58 times."""


def flaw_of(
    sizes: Sequence[int], chunks: Iterable[tuple[Sequence[int], Sequence[int]]], *, partial: bool = False
) -> str | None:
    """What is wrong with the chunks of a tensor.

    A million tensors of one chunk each, or one that is cut into a million slices, take a second; a grid takes a few.

    Args:
        sizes: The tensor's sizes, one for each dimension; none for a scalar.
        chunks: Offsets and sizes of each chunk. Chunks without elements count for nothing, wherever they lie.
        partial: Accept chunks of a part of the tensor, as a rank's own record has them. Whether those overlap is looked
            at only so far as they cannot hold more elements than the tensor.

    Returns:
        ``None`` if they cover it exactly, else a clause to follow the tensor's name, such as
        ``"is not whole: its chunks hold 96 of its 192 elements"``.
    """
    whole, chunks = tuple(sizes), tuple(chunks)
    if _in_a_row(whole, chunks):
        return None
    boxes: list[tuple[Sequence[int], Sequence[int]]] = []
    held = 0
    for offsets, lengths in chunks:
        if not len(offsets) == len(lengths) == len(whole) or (lengths and min(lengths) < 0):
            return f"has an impossible chunk: {_shown(lengths)} at {_shown(offsets)} of {_shown(whole)}"
        if 0 in lengths:
            continue
        if (offsets and min(offsets) < 0) or any(map(gt, map(add, offsets, lengths), whole)):
            return f"has a chunk outside of it: {_shown(lengths)} at {_shown(offsets)} of {_shown(whole)}"
        boxes.append((offsets, lengths))
        held += math.prod(lengths)
    wanted = math.prod(whole)
    if held > wanted:
        return f"has chunks that overlap: they hold {held} elements, and it has {wanted}"
    if partial:
        return None
    if held < wanted:
        return f"is not whole: its chunks hold {held} of its {wanted} elements"
    if len(boxes) > 1 and not _cover(whole, boxes):
        return "has chunks that overlap, and lacks as many elements as they share"
    return None


def _in_a_row(whole: tuple[int, ...], chunks: tuple[tuple[Sequence[int], Sequence[int]], ...]) -> bool:
    """The common forms, at the speed of C: one chunk, or slices along one dimension that follow one another."""
    if len(chunks) == 1:
        offsets, lengths = chunks[0]
        return lengths == whole and offsets == (0,) * len(whole) and (not whole or min(whole) >= 0)
    if {len(whole)} != {len(numbers) for chunk in chunks for numbers in chunk}:
        return False
    end = -1
    slices: list[tuple[int, int]] = []
    for dimension, size in enumerate(whole):
        begins = [chunk[0][dimension] for chunk in chunks]
        lengths = [chunk[1][dimension] for chunk in chunks]
        if lengths.count(size) < len(chunks) or any(begins):
            if slices or min(lengths) <= 0:
                return False
            end, slices = size, sorted(zip(begins, lengths, strict=True))
    expected = list(accumulate((length for _, length in slices), initial=0))
    return [*(begin for begin, _ in slices), end] == expected


def _cover(whole: tuple[int, ...], boxes: list[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes cover a whole, each element once. Linear in boxes and dimensions.

    Each coordinate of each dimension is given a random number, and a box the product of what its dimensions' two numbers
    differ by, modulo a prime. That is the sum, over the elements of the box, of products of random numbers, one for each
    dimension. So boxes that cover each element once have the whole's value as their sum, whatever the numbers are; others
    have it with a chance of one in the prime by the number of dimensions, as a polynomial of that degree is zero (Schwartz and
    Zippel). Nobody can make a record for numbers that are drawn when it is read.
    """
    sums = [1] * len(boxes)
    wanted = 1
    draw = random.Random().getrandbits  # noqa: S311 -- seeded by the system, and nothing drawn is ever shown
    for dimension, size in enumerate(whole):
        begins = [box[0][dimension] for box in boxes]
        ends = [begin + box[1][dimension] for begin, box in zip(begins, boxes, strict=True)]
        at = {coordinate: draw(_BITS) for coordinate in {0, size, *begins, *ends}}
        wanted = wanted * (at[size] - at[0]) % _PRIME
        sums = [value * (at[end] - at[begin]) % _PRIME for value, begin, end in zip(sums, begins, ends, strict=True)]
    return sum(sums) % _PRIME == wanted


def _shown(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''}]"
