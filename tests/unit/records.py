"""Commit records for tests, good and evil ones."""

from __future__ import annotations

import struct
from typing import Any

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
            info = _StorageInfo(path, offset, 1088)
            info.raw_offset, info.crc32c = 960, struct.pack("<I", number)
            storage[MetadataIndex(fqn, place, chunk)] = info
            offset += 1088
        properties = TensorProperties(torch.bfloat16)
        items[fqn] = TensorStorageMetadata(properties, torch.Size([4 * chunks, 8]), shards)
    items["step"] = BytesStorageMetadata()
    info = _StorageInfo(path, offset, 400)
    info.crc32c = b"\x01\x00\x00\x00"
    storage[MetadataIndex("step")] = info
    return Metadata(
        items,
        planner_data={fqn: tuple(fqn.split(".")) for fqn in items},
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id="s3://ckpt/run", save_id=WRITE_ID),
        version="1.0.0",
    )


def name(module: str, attribute: str) -> bytes:
    """Pickle instructions that push a global."""
    return b"".join(b"\x8c%c" % len(word) + word.encode() for word in (module, attribute)) + b"\x93"


def program(*instructions: bytes) -> bytes:
    """A pickle of protocol 4."""
    return b"\x80\x04" + b"".join(instructions) + b"."
