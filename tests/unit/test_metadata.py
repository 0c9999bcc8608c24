"""The commit record as torch's Metadata: stock readers read ours, we read stock writers', and nothing else."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex, StorageMeta

from dcp_s3 import ConfigError, CorruptCheckpointError
from dcp_s3._checkpoint.pickles.metadata import dumps, loads
from dcp_s3._runtime.gc_pause import gc_paused
from tests.unit.records import PATH, make_metadata, name, program

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
SOURCE = "s3://ckpt/run/.metadata"

DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=repr)


def shown(metadata: Metadata) -> str:
    return repr(metadata) + repr([info.__getstate__() for info in metadata.storage_data.values()])


def test_round_trip() -> None:
    """What is written is read back, the attributes that ride along included."""
    metadata = make_metadata()
    assert shown(loads(dumps(metadata), source=SOURCE)) == shown(metadata)


def test_the_stock_unpickler_reads_ours() -> None:
    """`pickle.load` of any DCP reader gives the same object; the protocol is one that every Python in use reads."""
    metadata = make_metadata()
    data = dumps(metadata)
    assert data[:2] == b"\x80\x04"
    assert shown(pickle.loads(data)) == shown(metadata)


def saved(writer_class: type, path: Path) -> bytes:
    state = {
        "model": {"w": torch.zeros(3, 4), "cl": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)},
        "dtypes": [torch.empty(2, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.complex32, torch.uint16)],
        "scalar": torch.tensor(1.5),
        "step": 3,
        "nested": [{"name": "x"}, None],
    }
    dcp.save(state, storage_writer=writer_class(str(path)), no_dist=True)
    return (path / ".metadata").read_bytes()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("writer_class", [dcp.FileSystemWriter, FsspecWriter])
def test_records_of_stock_writers_are_read(writer_class: type, tmp_path: Path) -> None:
    """FileSystemWriter's and FsspecWriter's records come back as `pickle.load` gives them."""
    data = saved(writer_class, tmp_path)
    ours, stock = loads(data, source=SOURCE), pickle.loads(data)
    assert repr(ours.state_dict_metadata) == repr(stock.state_dict_metadata)
    assert ours.storage_data == stock.storage_data
    assert ours.planner_data == stock.planner_data
    assert ours.storage_meta.save_id == stock.storage_meta.save_id
    assert str(ours.storage_meta.checkpoint_id) == str(stock.storage_meta.checkpoint_id)


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_allowed(dtype: torch.dtype, protocol: int) -> None:
    """Every dtype of this torch can be in a record."""
    metadata = make_metadata(tensors=1)
    metadata.state_dict_metadata["model.layers.0.weight"].properties.dtype = dtype
    loaded = loads(pickle.dumps(metadata, protocol=protocol), source=SOURCE)
    assert loaded.state_dict_metadata["model.layers.0.weight"].properties.dtype is dtype


def test_old_and_foreign_forms_are_read() -> None:
    """Records without storage_meta and version, with paths of pathlib, layouts, memory formats, prefixes."""
    metadata = make_metadata()
    properties = metadata.state_dict_metadata["model.layers.0.weight"].properties
    properties.layout, properties.memory_format = torch.sparse_coo, torch.channels_last
    metadata.storage_meta.checkpoint_id = Path("/somewhere/run")
    loaded = loads(pickle.dumps(metadata), source=SOURCE)
    assert str(loaded.storage_meta.checkpoint_id) == "/somewhere/run"
    assert loaded.state_dict_metadata["model.layers.0.weight"].properties == properties
    of_python_3_13 = dumps(metadata).replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    of_python_3_13 = of_python_3_13[:2] + of_python_3_13[11:]  # the frame's length no longer fits; frames are optional
    assert str(loads(of_python_3_13, source=SOURCE).storage_meta.checkpoint_id) == "/somewhere/run"
    del metadata.storage_meta, metadata.version
    assert loads(pickle.dumps(metadata), source=SOURCE).storage_meta is None


@pytest.mark.parametrize(
    "module, attribute",
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("builtins", "bytearray"),
        ("builtins", "range"),
        ("posix", "system"),
        ("torch", "load"),
        ("torch", "Tensor"),
        ("torch", "hub.load"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("torch.serialization", "load"),
        ("pathlib", "Path"),
        ("pathlib", "os.system"),
        (METADATA, "torch.load"),
        (METADATA, "os"),
        (FILESYSTEM, "FileSystemWriter"),
        (FILESYSTEM, "pickle"),
        ("collections", "namedtuple"),
        ("functools", "partial"),
    ],
)
def test_other_names_are_refused(module: str, attribute: str) -> None:
    """A record that names anything else is refused, the message has source and name."""
    with pytest.raises(CorruptCheckpointError, match=rf"^s3://ckpt/run/\.metadata names '{module}\.{attribute}'"):
        loads(program(name(module, attribute), b"N\x85R"), source=SOURCE)


@pytest.mark.parametrize(
    "attributes",
    [{"relative_path": "../other/x"}, {"relative_path": "/etc/passwd"}, {"relative_path": "s3://other/x"}]
    + [{"relative_path": None}, {"relative_path": ("a",)}]
    + [{"offset": value} for value in (-1, 1 << 63, 1.0, True, None, "0")]
    + [{"length": value} for value in (-1, 1 << 63, (1 << 63) - 1, None)]
    + [{"raw_offset": value} for value in (-1, 1089, 1.5, True)]
    + [{"crc32c": value} for value in (b"123", "1234", [1], bytearray(4))]
    + [{"transform_descriptors": value} for value in ("zstd", 1, [1])],
)
def test_impossible_entries_are_corruption(attributes: dict[str, object]) -> None:
    """An entry that leads out of the checkpoint, overflows or has the wrong kind of value is refused."""
    metadata = make_metadata()
    if isinstance(attributes.get("crc32c"), bytearray):
        attributes = {"crc32c": [1, 2]}
    info = next(reversed(metadata.storage_data.values()))
    info.__dict__.update({"offset": 8} | attributes)
    with pytest.raises(CorruptCheckpointError, match=r"^s3://ckpt/run/\.metadata "):
        loads(pickle.dumps(metadata), source=SOURCE)


def broken(change: str) -> Metadata:
    metadata = make_metadata()
    tensor = metadata.state_dict_metadata["model.layers.0.weight"]
    index = next(iter(metadata.storage_data))
    match change:
        case "items":
            metadata.state_dict_metadata = []
        case "item":
            metadata.state_dict_metadata["x"] = 1
        case "fqn":
            metadata.state_dict_metadata[1] = tensor
        case "size":
            tensor.size = (8, 8)
        case "no size":
            del tensor.size
        case "properties":
            tensor.properties = None
        case "chunk":
            tensor.chunks[0] = None
        case "chunks":
            tensor.chunks = 1
        case "chunk size":
            tensor.chunks[0].sizes = [4, 8]
        case "storage":
            metadata.storage_data = None
        case "index":
            metadata.storage_data["x"] = metadata.storage_data[index]
        case "info":
            metadata.storage_data[index] = StorageMeta()
        case "no length":
            del metadata.storage_data[index].length
        case "meta":
            metadata.storage_meta = "x"
    return metadata


@pytest.mark.parametrize(
    "change",
    [
        *("items", "item", "fqn", "size", "no size", "properties", "chunk", "chunks", "chunk size"),
        *("storage", "index", "info", "no length", "meta"),
    ],
)
def test_a_wrong_shape_is_corruption(change: str) -> None:
    """A record that is not built like one is refused before any planner sees it."""
    with pytest.raises(CorruptCheckpointError, match=r"^s3://ckpt/run/\.metadata is damaged"):
        loads(pickle.dumps(broken(change)), source=SOURCE)


@pytest.mark.parametrize("thing", [None, {}, StorageMeta("x"), MetadataIndex("x"), torch.Size([1]), torch.float32])
def test_another_object_is_not_metadata(thing: object) -> None:
    """A pickle of something else is refused with the kind that was found."""
    with pytest.raises(CorruptCheckpointError, match="is not a checkpoint's metadata"):
        loads(pickle.dumps(thing, protocol=4), source=SOURCE)


def test_every_cut_is_corruption() -> None:
    """A record that is cut at any byte is refused."""
    data = dumps(make_metadata(tensors=1, chunks=1))
    for end in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            loads(data[:end], source=SOURCE)
    with pytest.raises(CorruptCheckpointError, match="bytes are there"):
        loads(data + b"\x00", source=SOURCE)


def test_torch_stays_as_it_was() -> None:
    """A program that sets attributes on torch's classes or constants is refused, and has changed nothing."""
    member = name(METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"
    attacks = [
        member + b"}\x8c\x07_value_K\x05sb",
        member + b"N}\x8c\x06_name_\x8c\x01xs\x86b",
        *(name(METADATA, real) + b"N}\x8c\x0b__setstate__Ns\x86b" for real in ("TensorProperties", "Metadata")),
        name(METADATA, "Metadata") + b"}\x8c\x01xNsb",
        name("torch", "Size") + b"N}\x8c\x01xNs\x86b",
        name("torch", "float32") + b"N}\x8c\x01xNs\x86b",
        name("collections", "OrderedDict") + b"N}\x8c\x05clearNs\x86b",
    ]
    before = {member: dict(vars(member)) for member in _MEM_FORMAT_ENCODING}, dict(vars(Metadata))
    for attack in attacks:
        with pytest.raises(CorruptCheckpointError):
            loads(program(attack), source=SOURCE)
    assert ({member: dict(vars(member)) for member in _MEM_FORMAT_ENCODING}, dict(vars(Metadata))) == before
    assert loads(dumps(make_metadata()), source=SOURCE).version == "1.0.0"


def test_what_could_not_be_read_back_is_not_written() -> None:
    """A planner whose data the reader would refuse is found out before the commit, not at the next load."""
    metadata = make_metadata()
    metadata.planner_data = {"w": Path}
    with pytest.raises(ConfigError, match=r"planner_data: .*pathlib"):
        dumps(metadata)
    metadata.planner_data = {"w": {"own": [1, 2.5, None]}}
    assert loads(dumps(metadata), source=SOURCE).planner_data == {"w": {"own": [1, 2.5, None]}}


BODY = dumps(make_metadata(tensors=1, chunks=1))


@given(st.data())
def test_no_changed_byte_raises_anything_else(data: st.DataObject) -> None:
    """A real record with a few bytes changed is read, or refused with our error."""
    body = bytearray(BODY)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptCheckpointError):
        loads(bytes(body), source=SOURCE)


@given(st.data())
def test_no_moved_piece_raises_anything_else(data: st.DataObject) -> None:
    """A real record with a piece cut out, repeated or put elsewhere."""
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(BODY)), st.integers(0, len(BODY)))))
    rest = BODY[:start] + BODY[end:]
    place = data.draw(st.integers(0, len(rest)))
    with contextlib.suppress(CorruptCheckpointError):
        loads(rest[:place] + BODY[start:end] * data.draw(st.integers(0, 3)) + rest[place:], source=SOURCE)


@pytest.mark.usefixtures("collector_on")
def test_reading_20_000_records_is_no_large_multiple_of_stock() -> None:
    """Checks included it stays near `pickle.load`'s own time, most of which the collector takes: here, without it, about 8 times."""
    data = dumps(make_metadata(tensors=1_250, chunks=16))

    def seconds(read: object) -> float:
        start = time.process_time()
        read()
        return time.process_time() - start

    with gc_paused():
        ours = min(seconds(lambda: loads(data, source=SOURCE)) for _ in range(3))
        stock = min(seconds(lambda: pickle.loads(data)) for _ in range(3))
    assert ours < 16 * stock
    assert gc.isenabled()


def test_a_loaded_record_is_the_callers_own() -> None:
    """Two loads share nothing mutable, and a loaded record can be copied and saved again."""
    first, second = loads(BODY, source=SOURCE), loads(BODY, source=SOURCE)
    first.storage_data.clear()
    assert len(second.storage_data) == 2
    assert shown(copy.deepcopy(second)) == shown(second)
    assert dumps(second) == BODY
    (info, _) = second.storage_data.values()
    assert type(info) is _StorageInfo
    assert info.relative_path == PATH


def test_planner_data_may_be_nested() -> None:
    """What a custom planner keeps is the caller's own, of plain containers, however deep."""
    metadata = make_metadata()
    for value in (5, {"kept": [1, (2, {3: [4]})]}, [[1], [2]], {("a", 1): (("b",), ("c", (2.5, None)))}):
        metadata.planner_data = value
        assert loads(dumps(metadata), source="x").planner_data == value
    metadata.planner_data = {"sets": {4}}
    with pytest.raises(ConfigError, match="planner_data"):
        dumps(metadata)


def test_shared_lists_are_checked_once() -> None:
    """A list of chunks that a hostile record has in each of its tensors, and texts that all entries share, take no longer."""
    metadata = make_metadata(tensors=1, chunks=20_000)
    tensor = metadata.state_dict_metadata["model.layers.0.weight"]
    metadata.state_dict_metadata |= {f"w{n}": tensor for n in range(20_000)}
    texts = ["x"] * 20_000
    for info in metadata.storage_data.values():
        info.transform_descriptors = texts
    start = time.monotonic()
    loads(pickle.dumps(metadata), source="x")
    assert time.monotonic() - start < 30  # 400,000,000 looks take minutes


def test_a_record_that_is_too_large_is_refused() -> None:
    """Before it is parsed, with what to do if it is good."""
    data = dumps(make_metadata())
    assert loads(data, source=SOURCE, max_bytes=len(data))
    with pytest.raises(CorruptCheckpointError, match=r"more than max_record_bytes=\d+: .*DCP_S3_MAX_RECORD_BYTES"):
        loads(data, source=SOURCE, max_bytes=len(data) - 1)


def test_indexes_are_found() -> None:
    """The indexes of a record that was read are torch's own, equal to new ones and of the same hash."""
    metadata = loads(dumps(make_metadata()), source="x")
    for index in metadata.storage_data:
        assert type(index) is MetadataIndex
        assert MetadataIndex(index.fqn, index.offset) in metadata.storage_data
