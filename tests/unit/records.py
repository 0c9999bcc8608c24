"""Commit records for tests, good and evil ones."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3._checkpoint.format.index import NOWHERE, Index, ObjectEntry, Ragged
from dcp_s3._checkpoint.load.lazy_metadata import StoredRange
from dcp_s3._checkpoint.pickles.columns import columns_of
from dcp_s3._checkpoint.pickles.metadata import dumps

WRITE_ID = "ab" * 16
PATH = "data/0123456789abcdef/__0_0.distcp"


def make_metadata(tensors: int = 2, chunks: int = 2, *, path: str = PATH) -> Metadata:
    """`tensors` bfloat16 tensors of `chunks` shards of 4 x 8, and one object, as our writer describes them."""
    items: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    offset = 0
    for number in range(tensors):
        fqn = f"model.layers.{number}.weight"
        shards = []
        for chunk in range(chunks):
            place, sizes = torch.Size([4 * chunk, 0]), torch.Size([4, 8])
            shards.append(ChunkStorageMetadata(place, sizes))
            storage[MetadataIndex(fqn, place, chunk)] = _StorageInfo(path, offset, 1088)
            offset += 1088
        properties = TensorProperties(torch.bfloat16)
        items[fqn] = TensorStorageMetadata(properties, torch.Size([4 * chunks, 8]), shards)
    items["step"] = BytesStorageMetadata()
    storage[MetadataIndex("step")] = _StorageInfo(path, offset, 400)
    return Metadata(
        items,
        planner_data={fqn: tuple(fqn.split(".")) for fqn in items},
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id="s3://ckpt/run", save_id=WRITE_ID),
        version="1.0.0",
    )


def with_ranges(metadata: Metadata) -> Metadata:
    """The same with what the index adds: where the raw bytes begin, and CRCs (which are wrong)."""
    for index, info in metadata.storage_data.items():
        raw_offset = None if index.offset is None else 960
        metadata.storage_data[index] = StoredRange(
            info.relative_path, info.offset, info.length, raw_offset=raw_offset, crc32c=(1,)
        )
    return metadata


def in_two(metadata: Metadata, objects: Sequence[ObjectEntry], **header: Any) -> tuple[bytes, Index]:
    """Record and index of a checkpoint whose metadata have :func:`with_ranges`."""
    infos = list(metadata.storage_data.values())
    columns, planner = columns_of(
        metadata.state_dict_metadata,
        list(metadata.storage_data),
        infos,
        raw_offsets=np.array([NOWHERE if info.raw_offset is None else info.raw_offset for info in infos], np.int32),
        crc32c=Ragged(
            np.array([crc for info in infos for crc in info.crc32c], np.uint32),
            np.array([len(info.crc32c) for info in infos], np.uint32),
        ),
        object_names=[entry.key for entry in objects],
        planner_data=metadata.planner_data,
    )
    plain = {
        index: _StorageInfo(info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    }
    record = dumps(dataclasses.replace(metadata, storage_data=plain))
    fields = {
        "write_id": metadata.storage_meta.save_id,
        "record": ".metadata",
        "record_sha256": hashlib.sha256(record).hexdigest(),
        "record_bytes": len(record),
        "world_size": 1,
        "created_unix_s": 0.0,
        "writer": "test",
        "version": metadata.version,
        "checkpoint_id": str(metadata.storage_meta.checkpoint_id),
    }
    return record, Index(**fields | header, objects=tuple(objects), columns=columns, planner_data=planner)


def repacked(data: bytes, **changes: Any) -> bytes:
    """An index with other values in its header."""
    return dataclasses.replace(Index.from_bytes(data, source="index"), **changes).to_bytes()


def name(module: str, attribute: str) -> bytes:
    """Pickle instructions that push a global."""
    return b"".join(b"\x8c%c" % len(word) + word.encode() for word in (module, attribute)) + b"\x93"


def program(*instructions: bytes) -> bytes:
    """A pickle of protocol 4."""
    return b"\x80\x04" + b"".join(instructions) + b"."
