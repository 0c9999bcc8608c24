"""The index: what is written is read back, lazily; what is damaged or hostile is refused in time and memory that its size bounds."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3 import CorruptCheckpointError
from dcp_s3._checkpoint.format.index import Index, ObjectEntry
from dcp_s3._checkpoint.load import lazy_metadata
from dcp_s3._checkpoint.load.lazy_metadata import StoredRange, metadata_of
from dcp_s3._checkpoint.pickles.columns import columns_of
from tests.unit.records import PATH, in_two, make_metadata, with_ranges

ENTRY = ObjectEntry(key=PATH, size=5000, etag='"abc-3"', part_bytes=2000, crc32c=(0, 1, 0xFFFFFFFF))


def index_of(metadata: Metadata | None = None, **header: Any) -> Index:
    return in_two(with_ranges(metadata or make_metadata()), [ENTRY], **header)[1]


def read(data: bytes) -> Index:
    return Index.from_bytes(data, source="s3://b/index")


def changed(change: Any, header: Any = lambda fields: None) -> bytes:
    """An index whose arrays, or header, somebody has changed."""
    raw = gzip.decompress(index_of().to_bytes())
    size = int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8 : 8 + size])["__metadata__"]
    arrays = {name: array.copy() for name, array in load(raw).items()}
    change(arrays)
    header(fields)
    return gzip.compress(save(arrays, metadata=fields))


def test_round_trip() -> None:
    """Header, objects and all that the metadata say come back."""
    wanted = with_ranges(make_metadata())
    index = read(index_of(conditional=True, world_size=3).to_bytes())
    assert index.objects == (ENTRY,)
    assert (index.conditional, index.world_size, index.record) == (True, 3, ".metadata")
    found = metadata_of(index)
    assert dict(found.state_dict_metadata) == wanted.state_dict_metadata
    assert dict(found.storage_data) == wanted.storage_data
    assert dict(found.planner_data) == wanted.planner_data
    assert list(found.state_dict_metadata) == list(wanted.state_dict_metadata)
    assert (found.version, found.storage_meta) == (wanted.version, wanted.storage_meta)


def test_anybody_can_read_it() -> None:
    """It is a safetensors file in gzip."""
    assert load(gzip.decompress(index_of().to_bytes()))["object_crc32c"].tolist() == [0, 1, 0xFFFFFFFF]


@pytest.mark.parametrize("few", [0, 4096])
def test_values_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """One by one in a large checkpoint, all at once in a small one; the same either way, and the same object each time."""
    monkeypatch.setattr(lazy_metadata, "_FEW", few)
    wanted = with_ranges(make_metadata(tensors=40))
    found = metadata_of(index_of(make_metadata(tensors=40)))
    name = "model.layers.7.weight"
    assert found.state_dict_metadata[name] == wanted.state_dict_metadata[name]
    assert found.state_dict_metadata[name] is found.state_dict_metadata[name]
    key = MetadataIndex(name, [4, 0])
    assert found.storage_data[key] == wanted.storage_data[key]
    assert found.storage_data[MetadataIndex("step")].raw_offset is None
    assert found.planner_data[name] == ("model", "layers", "7", "weight")
    made = [len(vars(view)["_made"]) for view in (found.state_dict_metadata, found.storage_data, found.planner_data)]
    assert made == ([1, 2, 1] if few == 0 else [41, 81, 41])
    for missing in (
        MetadataIndex(name),
        MetadataIndex(name, [1, 0]),
        MetadataIndex("step", [0]),
        MetadataIndex("x"),
        7,
    ):
        assert found.storage_data.get(missing) is None
    assert "x" not in found.state_dict_metadata
    assert found.state_dict_metadata.get("model.layers") is None
    assert (len(found.state_dict_metadata), len(found.storage_data), len(found.planner_data)) == (41, 81, 41)


def test_whoever_changes_it_has_a_dict() -> None:
    """Planners that rename keys, copy or pickle the metadata find what they find in DCP's own."""
    found = metadata_of(index_of())
    found.state_dict_metadata["new"] = found.state_dict_metadata["step"]
    del found.state_dict_metadata["step"]
    assert list(found.state_dict_metadata)[-1] == "new"
    with pytest.raises(KeyError):
        found.state_dict_metadata["step"]
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert type(other.state_dict_metadata) is dict
        assert other.state_dict_metadata == found.state_dict_metadata
        assert other.storage_data == found.storage_data


@given(
    st.dictionaries(
        st.text(max_size=6),
        st.one_of(st.none(), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_any_names_and_shapes(shapes: dict[str, list[int] | None]) -> None:
    """Empty names and names in any script, objects, scalars, tensors without elements and without chunks."""
    items: dict[str, Any] = {}
    storage: dict[MetadataIndex, StoredRange] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        place = StoredRange(PATH, 100 * number, 100, raw_offset=None, crc32c=(number,))
        if shape is None:
            items[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = place
            continue
        origin = torch.Size([0] * len(shape))
        chunks = [ChunkStorageMetadata(origin, torch.Size(shape))] if number % 3 else []
        items[name] = TensorStorageMetadata(TensorProperties(torch.float16), torch.Size(shape), chunks)
        if chunks:
            storage[MetadataIndex(name, origin, 0)] = place
    metadata = dataclasses.replace(make_metadata(), state_dict_metadata=items, storage_data=storage, planner_data={})
    found = metadata_of(read(in_two(metadata, [ENTRY])[1].to_bytes()))
    assert dict(found.state_dict_metadata) == items
    assert dict(found.storage_data) == storage


@pytest.mark.parametrize(
    "planner_data, where",
    [
        (None, "none"),
        ({}, "columns"),
        ({"step": ("step",)}, "columns"),
        ({"step": ("st", "ep")}, "record"),
        ({"another": ("another",)}, "record"),
        ({"step": ["step"]}, "record"),
        ({"step": ()}, "record"),
        ("anything else", "record"),
    ],
)
def test_planners_of_other_kinds(planner_data: object, where: str) -> None:
    """What has no column is left in the record, and the index says so."""
    metadata = make_metadata()
    _, found = columns_of(metadata.state_dict_metadata, [], [], planner_data=planner_data)
    assert found == where


@pytest.mark.parametrize("path", [("a", 0, "b"), ("a", -1, "b"), ("a", "0", "b"), ("a.0.b",), ("a", "0.b"), ("", "")])
def test_paths_of_the_planner(path: tuple[str | int, ...]) -> None:
    """Numbers stay numbers, and dots within a key stay there."""
    name = ".".join(map(str, path))
    metadata = dataclasses.replace(
        make_metadata(),
        state_dict_metadata={name: BytesStorageMetadata()},
        storage_data={MetadataIndex(name): StoredRange(PATH, 0, 10, crc32c=(1,))},
        planner_data={name: path},
    )
    found = metadata_of(read(in_two(metadata, [ENTRY])[1].to_bytes()))
    assert found.planner_data[name] == path
    assert list(map(type, found.planner_data[name])) == list(map(type, path))


def test_every_flipped_bit_is_noticed() -> None:
    """gzip's own checksum sees what the record's SHA-256 does not, which a copy may have lost."""
    data = index_of().to_bytes()
    for at in range(10, len(data)):  # behind gzip's header, of which time and system count for nothing
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            read(bytes(damaged))
        except CorruptCheckpointError:
            continue
        assert gzip.decompress(damaged) == gzip.decompress(data)  # a bit that fills up a byte
    for cut in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            read(data[:cut])
    with pytest.raises(CorruptCheckpointError, match="more bytes"):
        read(data + b"x")


CHANGES: dict[str, Any] = {
    "a column is missing": lambda a: a.pop("row_start"),
    "a column of another kind": lambda a: a.update(row_start=a["row_start"].astype(np.int32)),
    "a column of two dimensions": lambda a: a.update(row_start=a["row_start"].reshape(1, -1)),
    "a column that is too short": lambda a: a.update(row_start=a["row_start"][:-1].copy()),
    "counts that do not add up": lambda a: a["item_names.counts"].__setitem__(0, 1 << 31),
    "a name in another order twice": lambda a: a["item_order"].__setitem__(0, a["item_order"][1]),
    "an order beyond the names": lambda a: a["item_order"].__setitem__(0, 1 << 31),
    "properties that are not there": lambda a: a["item_properties"].__setitem__(0, 7),
    "an object with dimensions": lambda a: a["item_dims"].__setitem__(2, 2),
    "an object of no row": lambda a: a["item_rows"].__setitem__(slice(1, 3), [3, 0]),
    "a negative size": lambda a: a["item_sizes"].__setitem__(0, -1),
    "an object that is not there": lambda a: a["row_object"].__setitem__(0, 1),
    "a start before its object": lambda a: a["row_start"].__setitem__(0, -1),
    "a start beyond its object": lambda a: a["row_start"].__setitem__(0, 1 << 62),
    "a length beyond numbers": lambda a: a["row_length"].__setitem__(0, (1 << 63) - 1),
    "data behind the record": lambda a: a["row_raw_offset"].__setitem__(0, 1089),
    "rows that overlap": lambda a: a["row_start"].__setitem__(1, 1000),
    "a negative object size": lambda a: a["object_sizes"].__setitem__(0, -1),
    "parts of no bytes": lambda a: a["object_part_bytes"].__setitem__(0, 0),
    "fewer CRCs than parts": lambda a: a["object_part_bytes"].__setitem__(0, 1000),
    "an object outside": lambda a: a.update(
        {"object_names": np.frombuffer(b"../x", np.uint8), "object_names.counts": np.array([4], np.uint32)}
    ),
    "an object of somebody else": lambda a: a.update(
        {"object_names": np.frombuffer(b"mine", np.uint8), "object_names.counts": np.array([4], np.uint32)}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_columns_that_do_not_fit(change: str) -> None:
    """Whoever can write an index can have no load read outside of its objects, or without end."""
    with pytest.raises(CorruptCheckpointError, match="s3://b/index"):
        read(changed(CHANGES[change]))


@pytest.mark.parametrize(
    "field, value",
    [
        ("format", 0), ("format", 2), ("format", True), ("write_id", "AB" * 16), ("record", "x"), ("record_sha256", ""),
        ("record_bytes", -1), ("world_size", 0), ("created_unix_s", "now"), ("writer", ""), ("version", 3),
        ("checkpoint_id", None), ("planner_data", "elsewhere"), ("properties", [["float32"]]), ("properties", {}),
    ],
)  # fmt: skip
def test_headers_that_cannot_be(field: str, value: object) -> None:
    """Each field is of its kind, or the index is refused; a newer format says so."""
    with pytest.raises(CorruptCheckpointError) as caught:
        read(changed(lambda arrays: None, lambda fields: fields.update({field: json.dumps(value)})))
    assert ("use a newer one" if value == 2 else repr(field)) in str(caught.value)


def test_what_a_later_version_adds_is_ignored() -> None:
    """A field or a column more."""
    data = changed(lambda arrays: arrays.update(more=np.zeros(3)), lambda fields: fields.update(more='{"a": 1}'))
    assert read(data).objects == (ENTRY,)


def test_a_dtype_that_this_torch_does_not_have() -> None:
    """Said as what it is; no other attribute of torch is taken for a dtype."""
    for dtype in ("float3_e1m1", "nn", "save"):
        header = json.dumps([[dtype, "strided", False, "contiguous_format", False]])
        index = read(changed(lambda arrays: None, lambda fields: fields.update(properties=header)))  # noqa: B023
        with pytest.raises(CorruptCheckpointError, match="does not know"):
            metadata_of(index)


def test_a_bomb_is_not_unpacked() -> None:
    """A gigabyte of zeros in a megabyte: no more memory is taken than the bound."""
    bomb = gzip.compress(bytes(200 << 20), 9)
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError):
        read(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 130 * len(bomb) + (4 << 20)


def test_an_index_that_packs_too_well_is_readable() -> None:
    """What would be refused as a bomb is not packed: all that is written is read."""
    count = 200_000
    items = {f"{number}": BytesStorageMetadata() for number in range(count)}
    storage = {MetadataIndex(name): StoredRange(PATH, 0, 10, crc32c=(1,)) for name in items}
    metadata = dataclasses.replace(make_metadata(), state_dict_metadata=items, storage_data=storage, planner_data=None)
    packed = in_two(metadata, [ENTRY])[1].to_bytes()
    assert len(read(packed).columns.names) == count


@pytest.mark.parametrize("chunk", [([0], [4, 8]), ([0, 0, 0], [4, 8, 1]), ([0, 0], [4])])
def test_chunks_of_other_dimensions_are_refused(chunk: tuple[list[int], list[int]]) -> None:
    """They have no place in the columns, and no tensor has such."""
    offsets, sizes = map(torch.Size, chunk)
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([4, 8]), [ChunkStorageMetadata(offsets, sizes)])
    with pytest.raises(ValueError, match="'w' has not the dimensions"):
        columns_of({"w": tensor}, [], [])


def test_results_of_no_chunk_are_refused() -> None:
    """What the metadata do not describe could never be loaded."""
    metadata = make_metadata()
    indexes = [MetadataIndex("model.layers.0.weight", [1, 0])]
    with pytest.raises(ValueError, match="1 of the 1 records are of no chunk"):
        columns_of(metadata.state_dict_metadata, indexes, list(metadata.storage_data.values())[:1])
