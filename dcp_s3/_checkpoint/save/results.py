"""What the ranks of a save tell its coordinator: where they save to, what they have written, or what they failed of."""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING

from dcp_s3._checkpoint.format.agreement import Place
from dcp_s3._checkpoint.format.manifest import ObjectEntry
from dcp_s3.errors import DcpS3Error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._transfer.upload import ObjectReceipt


def places(plans: Sequence[SavePlan], started: float) -> Iterator[tuple[int, str]]:
    """Where the ranks save to, so far as it has arrived since the save began: a planner's cache has plans of earlier saves.

    Args:
        plans: All ranks'.
        started: When the save began, by ``time.monotonic``.

    Yields:
        Ranks and URLs.
    """
    for rank, plan in enumerate(plans):
        if isinstance(plan.storage_data, Place) and plan.storage_data.arrived_s >= started:
            yield rank, plan.storage_data.url


def without_places(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans as DCP goes on with them: it may cache them, and where a rank saves to is of one save.

    Args:
        plans: All ranks'.
    """
    return [
        dataclasses.replace(plan, storage_data=None) if isinstance(plan.storage_data, Place) else plan for plan in plans
    ]


def attach(results: Sequence[WriteResult], receipts: Sequence[ObjectReceipt], url: CheckpointUrl) -> None:
    """Send URL and receipts to the coordinator with the first result; see :func:`take_urls` and :func:`take_entries`.

    Args:
        results: One rank's; without any, nothing is sent.
        receipts: Of the objects that it has written.
        url: The checkpoint.
    """
    if results:
        prefix = len(url.key(""))
        results[0].storage_data.__dict__["url"] = str(url)
        results[0].storage_data.__dict__["objects"] = [
            (receipt.key[prefix:], receipt.size, receipt.etag, receipt.part_bytes, receipt.crc32c)
            for receipt in receipts
        ]


def take_urls(results: Sequence[Sequence[WriteResult]]) -> list[tuple[int, str]]:
    """Where the ranks have saved to, but for those that had nothing to write.

    Args:
        results: All ranks'; what is taken is no longer in them.

    Returns:
        Ranks and URLs.
    """
    taken = [(rank, mine[0].storage_data.__dict__.pop("url", None)) for rank, mine in enumerate(results) if mine]
    return [(rank, url) for rank, url in taken if url is not None]


def take_entries(results: Sequence[Sequence[WriteResult]]) -> tuple[ObjectEntry, ...]:
    """The objects that the ranks have written, in the order of their keys.

    Args:
        results: All ranks'; what is taken is no longer in them.
    """
    found = []
    for one_rank in results:
        if one_rank:
            for key, size, etag, part_bytes, crcs in one_rank[0].storage_data.__dict__.pop("objects", ()):
                found.append(ObjectEntry(key=key, size=size, etag=etag, part_bytes=part_bytes, crc32c=crcs))
    return tuple(sorted(found, key=lambda entry: entry.key))


def portable(error: BaseException, rank: int) -> BaseException:
    """The error itself if DCP can send it to the other ranks, else one of ours that says the same.

    Args:
        error: What the rank failed of.
        rank: Named in ours.
    """
    if isinstance(error, DcpS3Error):
        return error.with_context(rank=rank)
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own bytes
    except Exception:  # noqa: BLE001 -- whatever pickle or a foreign __init__ raises
        return DcpS3Error(f"{type(error).__name__}: {error}").with_context(rank=rank)
    return error
