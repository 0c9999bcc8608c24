"""Targets that share memory, and the rounds in which they are written so that the last one in the plan's order stays."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from dcp_s3._checkpoint.load.ranges import Piece

    _Span = tuple[str, int, int, int, torch.Tensor]
    """Device, first byte's address, address behind the last byte, position of its target, the memory as a strided tensor."""

_ANYWHERE: Final = 1 << 62


def rounds(targets: Sequence[torch.Tensor | None]) -> list[int]:
    """Spread targets over rounds: those of one round share no memory, and of two that do, the later one has the later round.

    Whoever writes round after round leaves in memory what one who writes target after target leaves there. Targets that
    share nothing are all in round 0, and two names of one tensor take two rounds, however many such tensors there are.

    Args:
        targets: In the order of writing: tensors of any device, strides and dtype; ``None`` for what has no memory.

    Returns:
        Each target's round, counted from 0.
    """
    spans: list[_Span] = []
    for position, target in enumerate(targets):
        if target is not None:
            _note(spans, position, target)
    spans.sort(key=operator.itemgetter(0, 1))
    places: dict[int, list[tuple[_Cluster, int]]] = {}
    first, end = 0, spans[0][2] if spans else 0
    for last in range(1, len(spans) + 1):
        if last < len(spans) and spans[last][0] == spans[first][0] and spans[last][1] < end:
            end = max(end, spans[last][2])
            continue
        if last - first > 1:
            members = sorted(spans[first:last], key=lambda span: span[3])
            cluster = _Cluster(members)
            for index, (_, _, _, position, _) in enumerate(members):
                places.setdefault(position, []).append((cluster, index))
        if last < len(spans):
            first, end = last, spans[last][2]
    out = [0] * len(targets)
    for position in sorted(places):
        out[position] = 1 + max(cluster.latest(index) for cluster, index in places[position])
        for cluster, index in places[position]:
            cluster.put(index, out[position])
    return out


def in_rounds(items: Sequence[tuple[torch.Tensor | None, list[Piece]]]) -> list[list[Piece]]:
    """The pieces of all items; of those whose targets share memory, a later one's come when the earlier one is done.

    What stays in memory is then what DCP's own readers leave there, who take object after object, and in each item after
    item, in the plan's order.

    Args:
        items: In the plan's order: the target of each, ``None`` for an object, and its pieces, all of one data object.

    Returns:
        The pieces of each round.
    """
    objects: dict[str, list[tuple[torch.Tensor | None, list[Piece]]]] = {}
    for target, pieces in items:
        if pieces:
            objects.setdefault(pieces[0].key, []).append((target, pieces))
    ordered = [entry for group in objects.values() for entry in group]
    numbers = rounds([target for target, _ in ordered])
    out: list[list[Piece]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    for number, (_, pieces) in zip(numbers, ordered, strict=True):
        out[number] += pieces
    return out


def _note(spans: list[_Span], position: int, target: torch.Tensor) -> None:
    """Add the stretch of memory of a target, of a wrapper those of what it wraps."""
    if type(target) is not torch.Tensor and hasattr(target, "__tensor_flatten__"):
        for name in target.__tensor_flatten__()[0]:
            _note(spans, position, getattr(target, name))
        return
    if target.layout != torch.strided or target.is_meta or not target.numel():
        return
    nbytes = target.nbytes
    if not target.is_contiguous():
        steps = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
        nbytes = (1 + steps) * target.itemsize
    low = target.data_ptr()
    spans.append(("" if target.is_cpu else str(target.device), low, low + nbytes, position, target))


class _Cluster:
    """Spans of which each one reaches into the next, by their bounds.

    Args:
        members: In the order of writing.
    """

    def __init__(self, members: Sequence[_Span]) -> None:
        self._same = len({(low, high) for _, low, high, _, _ in members}) == 1
        self._top = -1
        if self._same:  # names of one tensor, mostly; in any case they share their first byte
            return
        self._low = np.array([[low] for _, low, _, _, _ in members], dtype=np.int64)
        self._high = np.array([[high] for _, _, high, _, _ in members], dtype=np.int64)
        if not all(tensor.is_contiguous() for *_, tensor in members):
            low, high = _boxes(members)
            self._low, self._high = np.hstack([self._low, low]), np.hstack([self._high, high])
        self._rounds = np.full(len(members), -1, dtype=np.int64)

    def latest(self, index: int) -> int:
        """The latest round among the earlier members that share memory with this one; -1 if there is none."""
        if self._same:
            return self._top
        common = (self._low[:index] < self._high[index]) & (self._high[:index] > self._low[index])
        return int(self._rounds[:index][common.all(axis=1)].max(initial=-1))

    def put(self, index: int, its_round: int) -> None:
        """Note a member's round."""
        if self._same:
            self._top = its_round
        else:
            self._rounds[index] = its_round


def _boxes(members: Sequence[_Span]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Members as boxes, whose memory is common only if the boxes are: columns of a matrix have common bounds and no common byte.

    An address is written as digits, one per stride that occurs, as an element of a matrix is by row and column.

    Returns:
        First digits, and those behind the last; of shape ``(members, strides)``. What is no box reaches everywhere.
    """
    shapes = [_strides(tensor) for *_, tensor in members]
    strides = sorted({stride for shape in shapes for stride in shape}, reverse=True)
    base = min(low for _, low, _, _, _ in members)
    lows = np.full((len(members), len(strides)), -_ANYWHERE, dtype=np.int64)
    highs = np.full((len(members), len(strides)), _ANYWHERE, dtype=np.int64)
    if any(large % small for large, small in itertools.pairwise(strides)):
        return lows, highs
    for index, (shape, (_, low, _, _, _)) in enumerate(zip(shapes, members, strict=True)):
        counts = [shape.get(stride, 1) for stride in strides]
        digits, rest = [], low - base
        for stride in strides:
            digit, rest = divmod(rest, stride)
            digits.append(digit)
        fits = True
        for place in range(len(strides) - 1, 0, -1):
            radix = strides[place - 1] // strides[place]
            if counts[place] > radix and counts[place] % radix == 0 and counts[place - 1] == 1:
                counts[place - 1], counts[place] = counts[place] // radix, radix  # whole rows behind one another
            fits = fits and digits[place] + counts[place] <= radix
        if fits:
            lows[index] = digits
            highs[index] = [digit + count for digit, count in zip(digits, counts, strict=True)]
    return lows, highs


def _strides(tensor: torch.Tensor) -> dict[int, int]:
    """How often each stride, in bytes, is taken; the bytes of an element are steps of one, neighbours are one longer run."""
    out = {1: tensor.itemsize}
    run = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.itemsize
        if size == 1 or step == 0:
            continue
        if step == run * out[run]:
            out[run] *= size
        else:
            out[step] = out.get(step, 1) * size
            run = step
    return out
