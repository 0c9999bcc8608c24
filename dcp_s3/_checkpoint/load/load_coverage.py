"""Whether a record has all of what a load asks for: a part that no chunk holds would be left as it is, without a word."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from dcp_s3._checkpoint.format.coverage import flaw_of
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from dcp_s3._checkpoint.load.commit_record import CommitRecord

    _Box = tuple[Sequence[int], Sequence[int]]

_MOST_SHOWN: Final = 5
"""Tensors that an error names."""


def check_whole(
    record: CommitRecord, metadata: Metadata, plan: LoadPlan, planner: LoadPlanner, rank: int | None
) -> None:
    """Refuse a load that would leave values as they are.

    Args:
        record: The record, for the message.
        metadata: What is in it.
        plan: This rank's.
        planner: Asked for its template.
        rank: Named in errors.

    Raises:
        CorruptCheckpointError: Tensors are :func:`missing`; it names some of them.
    """
    if flaws := missing(metadata, plan, planner):
        shown = "; ".join(flaws[:_MOST_SHOWN]) + f"; and {len(flaws) - _MOST_SHOWN} more" * (len(flaws) > _MOST_SHOWN)
        raise CorruptCheckpointError(
            f"{record.url} is no whole checkpoint, and this load would leave values as they are: {shown}; load an older one"
        ).with_context(rank=rank, bucket=record.url.bucket, key=record.key)


def missing(metadata: Metadata, plan: LoadPlan, planner: LoadPlanner) -> list[str]:
    """The tensors of a load whose chunks are no exact cover of them, and which the load needs more of than is there once.

    A tensor that is not whole does not matter to a load that does not ask for it, nor to a rank that finds its own part:
    each rank's own record holds no more, and neither does a checkpoint of one rank of many.

    Args:
        metadata: The record.
        plan: This rank's.
        planner: Asked for its template, so that what has no chunk at all is missed, too.

    Returns:
        A clause for each tensor, beginning with its name.
    """
    template = getattr(planner, "state_dict", None)
    if not isinstance(template, dict):
        template = {}
    names = dict.fromkeys(read.storage_index.fqn for read in plan.items) | dict.fromkeys(template)
    flaws = {}
    for name in names:
        tensor = metadata.state_dict_metadata.get(name)
        if isinstance(tensor, TensorStorageMetadata):
            flaw = flaw_of(tensor.size, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks])
            if flaw is not None:
                flaws[name] = flaw
    if not flaws:
        return []
    reads: dict[str, dict[tuple[int, ...], list[_Box]]] = {name: defaultdict(list) for name in flaws}
    for read in plan.items:
        if read.storage_index.fqn in flaws:
            begin = tuple(read.dest_index.offset or ())
            reads[read.storage_index.fqn][begin].append((read.dest_offsets, read.lengths))
    return [f"{name} {flaw}" for name, flaw in flaws.items() if not _filled(template.get(name), reads[name])]


def _filled(target: Any, reads: dict[tuple[int, ...], list[_Box]]) -> bool:  # noqa: ANN401 -- what a template holds
    """Whether reads fill all that a rank has of a target, each element once."""
    try:
        parts = _create_chunk_list(target)
    except Exception:  # noqa: BLE001 -- whatever is in a template: what it wants is then not known
        return False
    return all(flaw_of(part.sizes, reads.get(tuple(part.offsets), ())) is None for part in parts)
