"""What becomes of a save's global metadata before it is its commit record: completed, corrected, or refused."""

from __future__ import annotations

import collections
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from dcp_s3._checkpoint.format.coverage import flaw_of
from dcp_s3._checkpoint.format.index import Ragged
from dcp_s3._checkpoint.pickles import metadata as record_format
from dcp_s3._checkpoint.pickles.columns import columns_of
from dcp_s3._checkpoint.save.results import plain_infos
from dcp_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    from dcp_s3._checkpoint.format.index import Columns, ObjectEntry
    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._checkpoint.save.results import RankReport


@dataclass(frozen=True, slots=True, eq=False)
class Completed:
    """What a save commits.

    Attributes:
        record: The bytes of the commit record.
        columns: The same for its index.
        planner_data: Where the index has the planner's data; see :class:`~dcp_s3._checkpoint.format.index.Index`.
        objects: All ranks', in the order of their keys.
    """

    record: bytes
    columns: Columns
    planner_data: str
    objects: tuple[ObjectEntry, ...]


def complete(
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    reports: Sequence[RankReport | None],
    url: CheckpointUrl,
    write_id: str,
    *,
    partial: bool,
) -> Completed:
    """Put into the metadata where everything lies, and refuse what could not be loaded.

    Args:
        metadata: The global metadata, completed in place.
        results: All ranks' write results.
        reports: What the ranks told beside them.
        url: The checkpoint.
        write_id: Of the save.
        partial: It is one rank's own, which need hold no more than that rank's shards.

    Raises:
        ConfigError: A tensor has elements that nobody has saved, or that several have; or the record could not be read back.
    """
    indexes = [result.index for one_rank in results for result in one_rank]
    infos = plain_infos(results)
    told = [report for report in reports if report is not None]
    objects = tuple(sorted((entry for report in told for entry in report.objects), key=lambda entry: entry.key))
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_data = dict(zip(indexes, infos, strict=True))
    metadata.storage_meta = StorageMeta(checkpoint_id=str(url), save_id=write_id)
    _check_coverage(metadata, partial=partial)
    _correct_dtypes(metadata, indexes, [dtype for report in told for dtype in report.dtypes])
    try:
        columns, planner_data = columns_of(
            metadata.state_dict_metadata,
            indexes,
            infos,
            raw_offsets=np.concatenate([np.zeros(0, np.int32), *(report.raw_offsets for report in told)]),
            crc32c=Ragged(
                np.concatenate([np.zeros(0, np.uint32), *(report.crc32c.values for report in told)]),
                np.concatenate([np.zeros(0, np.uint32), *(report.crc32c.counts() for report in told)]),
            ),
            object_names=[entry.key for entry in objects],
            planner_data=metadata.planner_data,
        )
    except ValueError as error:
        raise ConfigError(f"this checkpoint could not be read back: {error}; nothing was committed") from error
    return Completed(record_format.dumps(metadata), columns, planner_data, objects)


def _check_coverage(metadata: Metadata, *, partial: bool) -> None:
    """Refuse to commit tensors that could not be loaded whole. DCP looks at this only if several ranks save together.

    Args:
        metadata: The global metadata.
        partial: It is one rank's own, which need hold no more than that rank's shards.

    Raises:
        ConfigError: A tensor has elements that nobody has saved, or that several have.
    """
    flawed = []
    written = collections.Counter(index.fqn for index in metadata.storage_data)
    for name, item in metadata.state_dict_metadata.items():
        flaw, records = None, 1
        if isinstance(item, TensorStorageMetadata):
            flaw = flaw_of(item.size, [(chunk.offsets, chunk.sizes) for chunk in item.chunks], partial=partial)
            records = len(item.chunks)
        if flaw is None and written[name] < records:
            flaw = f"is not whole: {written[name]} of its {records} records were written"
        if flaw is not None:
            flawed.append(f"{name} {flaw}")
    if flawed:
        more = f" (and {len(flawed) - 1} other tensors have such faults)" if len(flawed) > 1 else ""
        raise ConfigError(
            f"{flawed[0]}{more}; nothing was committed, and what was there before stands. Save the shards of all ranks in one "
            "save of their process group (without no_dist), or each rank's own with use_collectives=False"
        )


def _correct_dtypes(metadata: Metadata, indexes: Sequence[MetadataIndex], dtypes: Sequence[torch.dtype | None]) -> None:
    """Put the dtypes that were really written into the metadata, where plan caching has kept an earlier save's."""
    for index, dtype in zip(indexes, dtypes, strict=True):
        tensor = metadata.state_dict_metadata[index.fqn]
        if dtype is not None and isinstance(tensor, TensorStorageMetadata) and tensor.properties.dtype != dtype:
            tensor.properties = dataclasses.replace(tensor.properties, dtype=dtype)
