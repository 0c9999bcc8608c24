"""What the ranks of a save tell its coordinator: where they save to, what they have written, or what they failed of."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3._checkpoint.format.agreement import Place
from dcp_s3._checkpoint.format.index import ObjectEntry, Ragged
from dcp_s3.errors import ConfigError, DcpS3Error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan

    from dcp_s3._checkpoint.format.index import Numbers
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


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """One record that a rank has written.

    Attributes:
        info: Where it lies, as stock readers need it.
        raw_offset: Where the raw tensor bytes begin in it; ``NOWHERE`` if it has none.
        crc32c: CRC32C of each 4 MiB of them, or of the record: little-endian uint32.
        dtype: Of the tensor that was written; a cached plan, and its metadata, know an earlier save's.
    """

    info: _StorageInfo
    raw_offset: int
    crc32c: bytes
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RankReport:
    """What a rank tells the coordinator beside its write results, in their order.

    Attributes:
        url: Where it has saved to.
        objects: What it has written.
        raw_offsets: See :class:`Written`.
        crc32c: For each result, the CRCs.
        dtypes: For each result.
    """

    url: str
    objects: tuple[ObjectEntry, ...]
    raw_offsets: Numbers
    crc32c: Ragged
    dtypes: tuple[torch.dtype | None, ...]


@dataclass
class _Reported(_StorageInfo):
    """The first of a rank's results carries its report: nothing else of a rank's own reaches the coordinator."""

    report: RankReport | None = None


def results_of(
    indexes: Sequence[MetadataIndex], written: Sequence[Written], receipts: Sequence[ObjectReceipt], url: CheckpointUrl
) -> list[WriteResult]:
    """What a rank hands to DCP; see :func:`take_reports`.

    Args:
        indexes: Of its items.
        written: What they became.
        receipts: Of the objects that it has written.
        url: The checkpoint.
    """
    results = [
        WriteResult(index=index, size_in_bytes=one.info.length, storage_data=one.info)
        for index, one in zip(indexes, written, strict=True)
    ]
    if results:
        prefix = len(url.key(""))
        report = RankReport(
            url=str(url),
            objects=tuple(
                ObjectEntry(
                    key=receipt.key[prefix:],
                    size=receipt.size,
                    etag=receipt.etag,
                    part_bytes=receipt.part_bytes,
                    crc32c=receipt.crc32c,
                )
                for receipt in receipts
            ),
            raw_offsets=np.array([one.raw_offset for one in written], np.int32),
            crc32c=Ragged(
                np.frombuffer(b"".join(one.crc32c for one in written), "<u4"),
                np.array([len(one.crc32c) // 4 for one in written], np.uint32),
            ),
            dtypes=tuple(one.dtype for one in written),
        )
        first = written[0].info
        results[0] = dataclasses.replace(
            results[0], storage_data=_Reported(first.relative_path, first.offset, first.length, report=report)
        )
    return results


def take_reports(results: Sequence[Sequence[WriteResult]]) -> list[RankReport | None]:
    """The ranks' reports; ``None`` of a rank that had nothing to write.

    Args:
        results: All ranks'.

    Raises:
        ConfigError: These are not the results of :func:`results_of`.
    """
    reports = []
    for rank, mine in enumerate(results):
        first = mine[0].storage_data if mine else None
        report = first.report if isinstance(first, _Reported) else None
        if mine and (report is None or len(report.dtypes) != len(mine)):
            raise ConfigError(
                f"the results of rank {rank} are not those that its S3StorageWriter returned: something between writer and "
                "coordinator has changed them, so nothing was committed"
            )
        reports.append(report)
    return reports


def plain_infos(results: Sequence[Sequence[WriteResult]]) -> list[_StorageInfo]:
    """Where all records lie, without the reports."""
    return [
        _StorageInfo(info.relative_path, info.offset, info.length) if isinstance(info, _Reported) else info
        for one_rank in results
        for info in (result.storage_data for result in one_rank)
    ]


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
