"""What becomes of a save's global metadata before it is its commit record: completed, corrected, or refused."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from dcp_s3._checkpoint.format.coverage import flaw_of
from dcp_s3._checkpoint.pickles import metadata as record_format
from dcp_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from dcp_s3._checkpoint.format.layout import CheckpointUrl


def complete(
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    url: CheckpointUrl,
    write_id: str,
    *,
    partial: bool,
) -> bytes:
    """Put into the metadata where everything lies, and refuse what could not be loaded.

    Args:
        metadata: The global metadata, completed in place.
        results: All ranks' write results.
        url: The checkpoint.
        write_id: Of the save.
        partial: It is one rank's own, which need hold no more than that rank's shards.

    Returns:
        The bytes of the commit record.

    Raises:
        ConfigError: A tensor has elements that nobody has saved, or that several have; or the record could not be read back.
    """
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_data = {result.index: result.storage_data for one_rank in results for result in one_rank}
    metadata.storage_meta = StorageMeta(checkpoint_id=str(url), save_id=write_id)
    _check_coverage(metadata, partial=partial)
    _correct_dtypes(metadata)
    return record_format.dumps(metadata)


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


def _correct_dtypes(metadata: Metadata) -> None:
    """Put the dtypes that were really written into the metadata, where plan caching has kept an earlier save's."""
    for index, info in metadata.storage_data.items():
        dtype = info.__dict__.pop("dtype", None)
        tensor = metadata.state_dict_metadata[index.fqn]
        if dtype is not None and isinstance(tensor, TensorStorageMetadata) and tensor.properties.dtype != dtype:
            tensor.properties = dataclasses.replace(tensor.properties, dtype=dtype)
