"""Whether the chunks of a tensor cover it exactly: no gap, no overlap, nothing outside. Without torch, in linear time."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, product
from operator import add, gt
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST_CORNERS: Final = 1 << 24
"""Shards of no real job have more; a record made to keep its reader busy would."""


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
    return _mismatch(whole, boxes) if len(boxes) > 1 else None


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


def _mismatch(whole: tuple[int, ...], boxes: list[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Whether boxes that lie within a whole, and are as large as it together, cover it.

    They do just if their corners cancel out but for the whole's own, each counted as positive or negative by how many of
    its coordinates are ends of the box: that is the mixed difference of "how many boxes cover this element", which no two
    functions have in common.
    """
    edges = []  # begins, ends, and the whole's end, of the dimensions in which the boxes differ
    by_dimension = zip(
        zip(*(box[0] for box in boxes), strict=True), zip(*(box[1] for box in boxes), strict=True), strict=True
    )
    for (begins, lengths), end in zip(by_dimension, whole, strict=True):
        if begins.count(begins[0]) < len(boxes) or lengths.count(lengths[0]) < len(boxes):
            edges.append((begins, tuple(map(add, begins, lengths)), end))
    if len(boxes) << len(edges) > _MOST_CORNERS:
        return f"is cut into {len(boxes)} chunks in {len(edges)} dimensions, which is more than can be checked"
    plus: Counter[tuple[int, ...]] = Counter()
    minus: Counter[tuple[int, ...]] = Counter()
    for corner in product((0, 1), repeat=len(edges)):
        same, other = (minus, plus) if sum(corner) % 2 else (plus, minus)
        same.update(zip(*(edge[side] for edge, side in zip(edges, corner, strict=True)), strict=True))
        other[tuple(edge[2] * side for edge, side in zip(edges, corner, strict=True))] += 1
    if edges and plus == minus:
        return None
    return "has chunks that overlap, and lacks as many elements as they share"


def _shown(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''}]"
