"""What stands in for an index where another writer kept none: the times and ETags of its objects, and what they hold."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Final

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3._checkpoint.format.layout import parse_url
from dcp_s3._transfer.s3.control_store import is_missing
from dcp_s3.errors import CheckpointReplacedError, ConfigError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

    from dcp_s3._checkpoint.load.commit_record import CommitRecord
    from dcp_s3._transfer.s3.control_store import ControlStore

_CLEARLY: Final = dt.timedelta(seconds=2)
"""Times of a store are whole seconds of several machines: what is younger by less may have been written before."""


def check_age(
    record: CommitRecord, metadata: Metadata | None, key: str, modified: dt.datetime, rank: int | None
) -> None:
    """Refuse an object that a save has overwritten in place since the record, which is written last, was.

    The objects of a copy have any age, and those of our own writer are never overwritten.

    Args:
        record: A stock writer's, as it was read.
        metadata: What is in it.
        key: The object's.
        modified: When the object was written, by the store's clock.
        rank: Named in errors.

    Raises:
        CheckpointReplacedError: It was written after the record was read.
        CorruptCheckpointError: It was written after the record, at the URL at which the record was written, too.
    """
    assert record.seen is not None  # noqa: S101 -- it has been read
    read_at, recorded = record.seen.server_time, record.seen.info.last_modified
    if read_at is not None and modified - read_at >= _CLEARLY:
        raise CheckpointReplacedError(
            f"{record.url} was overwritten while it was loaded: its record was read at {read_at:%H:%M:%S} and an object written "
            f"at {modified:%H:%M:%S}, by the store's clock; load again when that save has finished"
        ).with_context(rank=rank, bucket=record.url.bucket, key=key)
    if recorded is not None and modified - recorded >= _CLEARLY and _written_at(metadata) == str(record.url):
        raise CorruptCheckpointError(
            f"{record.url} may be a mixture of two checkpoints: its record is of {recorded:%Y-%m-%d %H:%M:%S} and an object of "
            f"{modified:%Y-%m-%d %H:%M:%S}, so that a later save, which has not finished, overwrote it in place; load an older "
            "checkpoint, or with verify=False if the object was only copied onto itself"
        ).with_context(rank=rank, bucket=record.url.bucket, key=key)


def check_unchanged(record: CommitRecord, store: ControlStore, rank: int | None) -> None:
    """The record of a checkpoint that can be overwritten in place must be the same behind the load as before it.

    Args:
        record: A stock writer's, as it was read.
        store: The bucket.
        rank: Named in errors.

    Raises:
        CheckpointReplacedError: It is another one, or gone.
        StorageError: The store cannot say.
    """
    assert record.seen is not None  # noqa: S101 -- it has been read
    before = record.seen.info
    try:
        now = store.head(record.key)
    except StorageError as error:
        if not is_missing(error):
            raise
        now = None
    if now is None or (now.last_modified, _plain(now.etag)) != (before.last_modified, _plain(before.etag)):
        raise CheckpointReplacedError(
            f"{record.url} was replaced or deleted while it was read; load again"
        ).with_context(rank=rank, bucket=record.url.bucket, key=record.key)


def check_saved(
    saved: torch.Tensor, chunk: ChunkStorageMetadata, metadata: Metadata | None, source: str, fqn: str
) -> None:
    """A tensor that was unpickled must be the one that the record describes, or values would be cut or converted unasked.

    Args:
        saved: The tensor.
        chunk: What the record says of it.
        metadata: The record.
        source: What the tensor was read from, for the message.
        fqn: The whole tensor's name in the state dict.

    Raises:
        CorruptCheckpointError: It is of another dtype or shape.
    """
    tensor = None if metadata is None else metadata.state_dict_metadata[fqn]
    dtype = tensor.properties.dtype if isinstance(tensor, TensorStorageMetadata) else saved.dtype
    if (tuple(saved.shape), saved.dtype) != (tuple(chunk.sizes), dtype):
        raise CorruptCheckpointError(
            f"{source} is not what the checkpoint's record describes: its object holds {saved.dtype} of {tuple(saved.shape)}, the "
            f"record says {dtype} of {tuple(chunk.sizes)}; restore the object or load an older checkpoint"
        )


def _written_at(metadata: Metadata | None) -> str | None:
    """The URL that a stock writer says it wrote a checkpoint to; ``None`` if it was a directory, or it does not say."""
    where = None if metadata is None or metadata.storage_meta is None else metadata.storage_meta.checkpoint_id
    try:
        return None if where is None else str(parse_url(where))
    except (ConfigError, TypeError):
        return None


def _plain(etag: str) -> str:
    """An ETag without quotes and the mark of weakness that some gateways add on one way."""
    return etag.removeprefix("W/").strip('"')
