"""What of a checkpoint cannot be loaded whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dcp_s3._checkpoint.format.coverage import flaw_of
from dcp_s3._checkpoint.format.index import NOWHERE

if TYPE_CHECKING:
    from dcp_s3._checkpoint.format.index import Columns, Numbers


def flaws_of(columns: Columns, *, partial: bool) -> list[str]:
    """What cannot be loaded whole: a clause for each item, which begins with its name.

    Args:
        columns: What the checkpoint holds.
        partial: The record is one rank's own, and may have a part of each tensor.
    """
    found = []
    for item in np.flatnonzero(~_plainly_whole(columns)).tolist():
        flaw = _flaw(columns, item, partial=partial)
        if flaw is not None:
            found.append(f"{columns.item_names.text(item)[:200]} {flaw}")
    return found


def _plainly_whole(columns: Columns) -> Numbers:
    """Which items have one row that is all of them, and lies somewhere: nearly all, and there may be a million."""
    one: Numbers = columns.item_rows == 1
    rows = np.minimum(columns.row_ends - 1, len(columns.row_object) - 1)
    whole: Numbers = one & (columns.row_object[rows] != NOWHERE) if len(rows) and len(columns.row_object) else one
    dims = columns.item_sizes.counts()
    wanted = columns.item_sizes.values
    for column, is_offset in ((columns.row_offsets, True), (columns.row_sizes, False)):
        first = column.taken(rows[one])
        if not np.array_equal(first.counts(), dims[one]):
            return np.zeros(len(one), bool)
        differs = first.values != (0 if is_offset else wanted[one.repeat(dims)])
        owner = np.flatnonzero(one).repeat(first.counts())
        whole[owner[differs]] = False
    return whole


def _flaw(columns: Columns, item: int, *, partial: bool) -> str | None:
    rows = columns.rows(item)
    if columns.is_object(item):
        return "is named and lies nowhere" if columns.row_object[rows[0]] == NOWHERE else None
    chunks = [(columns.row_offsets.numbers(row), columns.row_sizes.numbers(row)) for row in rows]
    flaw = flaw_of(columns.item_sizes.numbers(item), chunks, partial=partial)
    if flaw is not None:
        return flaw
    nowhere = sum(
        columns.row_object[row] == NOWHERE and 0 not in sizes for row, (_, sizes) in zip(rows, chunks, strict=True)
    )
    return f"is not whole: {nowhere} of its {len(chunks)} chunks lie nowhere" if nowhere else None
