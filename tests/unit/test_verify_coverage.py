"""verify and ls name tensors that are not whole, whoever wrote the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3 import CorruptCheckpointError
from dcp_s3._checkpoint.care import maintenance
from dcp_s3._checkpoint.care.verify import verify_checkpoint
from dcp_s3._checkpoint.format.layout import CheckpointUrl
from dcp_s3._checkpoint.pickles.metadata import dumps
from dcp_s3._checkpoint.pickles.standin import read_record
from tests.unit.fake_store import FakeStore, save, stock
from tests.unit.records import make_metadata

RUN = CheckpointUrl("ckpt", "run")
NAME = "model.layers.1.weight"


def repr_short(value: object) -> str:
    """Names a parameter."""
    return repr(value)[:12]


def half(metadata: Metadata) -> None:
    """As one of two ranks saves its shards alone: the other half is neither named nor stored."""
    del metadata.state_dict_metadata[NAME].chunks[1]
    del metadata.storage_data[MetadataIndex(NAME, torch.Size([4, 0]), 1)]


def overlap(metadata: Metadata) -> None:
    """The second chunk begins a row too soon, and there is a row that nobody has."""
    chunk = metadata.state_dict_metadata[NAME].chunks[1]
    info = metadata.storage_data.pop(MetadataIndex(NAME, chunk.offsets, 1))
    chunk.offsets = torch.Size([3, 0])
    metadata.storage_data[MetadataIndex(NAME, chunk.offsets, 1)] = info


def outside(metadata: Metadata) -> None:
    """A chunk lies beyond the tensor."""
    metadata.state_dict_metadata[NAME].size = torch.Size([7, 8])


def nowhere(metadata: Metadata) -> None:
    """A chunk is named, and no object has it."""
    del metadata.storage_data[MetadataIndex(NAME, torch.Size([4, 0]), 1)]


FAULTS = {
    half: f"{NAME} is not whole: its chunks hold 32 of its 64 elements",
    overlap: f"{NAME} has chunks that overlap, and lacks as many elements as they share",
    outside: f"{NAME} has a chunk outside of it",
    nowhere: f"{NAME} is not whole: 1 of its 2 chunks lie nowhere",
}


@pytest.mark.parametrize("write", [save, stock])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_is_not_whole(
    write: Callable[..., object], fault: Callable[[Metadata], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with what is wrong, in our checkpoints and in those of other writers; `ls`, which reads theirs, says it too."""
    store = FakeStore()
    write(store, RUN, change=fault)
    report = verify_checkpoint(store, RUN, deep=True)
    assert not report.ok
    assert any(FAULTS[fault] in problem for problem in report.problems)
    if write is stock:
        monkeypatch.setattr(maintenance, "_open", lambda url, config: store)
        (info,) = maintenance.list_checkpoints("s3://ckpt/run")
        assert info.state.startswith(f"corrupt: .metadata: {FAULTS[fault]}")


def test_an_object_that_lies_nowhere() -> None:
    """An item that the record names and does not place."""
    store = FakeStore()
    save(store, RUN, change=lambda metadata: metadata.storage_data.pop(MetadataIndex("step")))
    (problem,) = verify_checkpoint(store, RUN, deep=False).problems
    assert "step is named and lies nowhere" in problem


def test_a_rank_of_its_own_need_have_no_more_than_its_shards() -> None:
    """`__<rank>.metadata` describes the whole tensor and the rank's part of it."""
    store = FakeStore()
    for rank in range(2):
        save(
            store, RUN, record=f"__{rank}.metadata", write_id=f"{rank:032x}", token=f"{rank:016x}", world_size=2, change=half
        )  # fmt: skip
    assert verify_checkpoint(store, RUN, deep=True).problems == ()


def test_empty_chunks_are_no_gap() -> None:
    """A rank with nothing of a tensor leaves a chunk without elements, which lies nowhere."""

    def empty(metadata: Metadata) -> None:
        metadata.state_dict_metadata[NAME].chunks.append(ChunkStorageMetadata(torch.Size([8, 0]), torch.Size([0, 8])))

    store = FakeStore()
    save(store, RUN, change=empty)
    assert verify_checkpoint(store, RUN, deep=False).problems == ()


def test_many_are_counted() -> None:
    """Of hundreds twenty are named."""
    metadata = make_metadata(tensors=300, chunks=2)
    for item in list(metadata.state_dict_metadata.values())[:-1]:
        item.chunks.pop()
    flaws = read_record(dumps(metadata), source="s3://b/.metadata").flaws(partial=False)
    assert len(flaws) == 300


@pytest.mark.parametrize("offsets", [{}, "00", 0, (0, "0"), ((0,), 0), (0, True), (10**300, 0)], ids=repr_short)
def test_chunks_that_cannot_be(offsets: object) -> None:
    """What is no sequence of numbers, or has one that no tensor has, is a damaged record."""
    metadata = make_metadata()
    metadata.state_dict_metadata[NAME].chunks[0].offsets = offsets
    with pytest.raises(CorruptCheckpointError, match=f"the chunks of '{NAME}' are impossible"):
        read_record(dumps(metadata), source="s3://b/.metadata")


@pytest.mark.parametrize("kind", [tuple, list])
def test_sequences_of_other_planners(kind: type) -> None:
    """A planner of somebody's own may have put a tuple or a list in place of torch.Size."""
    metadata = make_metadata()
    for chunk in metadata.state_dict_metadata[NAME].chunks:
        chunk.offsets, chunk.sizes = kind(chunk.offsets), kind(chunk.sizes)
    assert read_record(dumps(metadata), source="s3://b/.metadata").flaws(partial=False) == []


def test_a_large_record_takes_seconds() -> None:
    """20,000 tensors, and one of 20,000 rows saved row by row."""
    items, storage = {}, {}
    for number in range(20_000):
        name, place = f"t{number}", torch.Size([0])
        items[name] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([4]), [ChunkStorageMetadata(place, torch.Size([4]))]
        )
        storage[MetadataIndex(name, place)] = _StorageInfo("x", 16 * number, 16)
    rows = [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([1, 8])) for n in range(20_000)]
    items["rows"] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([20_000, 8]), rows)
    storage |= {MetadataIndex("rows", row.offsets): _StorageInfo("y", 32 * n, 32) for n, row in enumerate(rows)}
    summary = read_record(dumps(Metadata(items, storage_data=storage)), source="s3://b/.metadata")
    start = time.process_time()
    assert summary.flaws(partial=False) == []
    assert time.process_time() - start < 1
