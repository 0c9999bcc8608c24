"""Records read without torch say the same as torch's own objects."""

from __future__ import annotations

import contextlib
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import CorruptCheckpointError
from dcp_s3._checkpoint.pickles.metadata import dumps, loads
from dcp_s3._checkpoint.pickles.standin import Entry, read_record
from tests.unit.records import PATH, WRITE_ID, make_metadata, name, program
from tests.unit.test_metadata import DTYPES, SOURCE, broken


def test_a_record_of_ours() -> None:
    """Write id, entries in order with their attributes, names, and the tensors' bytes."""
    summary = read_record(dumps(make_metadata(tensors=1)), source=SOURCE)
    assert summary.write_id == WRITE_ID
    assert summary.entries == (
        Entry("model.layers.0.weight", PATH, 0, 1088, 960, b"\x00\x00\x00\x00", (0, 0)),
        Entry("model.layers.0.weight", PATH, 1088, 1088, 960, b"\x00\x00\x00\x00", (4, 0)),
        Entry("step", PATH, 2176, 400, None, b"\x01\x00\x00\x00"),
    )
    assert summary.fqns == ("model.layers.0.weight", "step")
    assert summary.tensor_bytes == 8 * 8 * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_size_of_every_dtype(dtype: torch.dtype) -> None:
    """Without torch, the element size of every dtype of this torch is known from its name."""
    metadata = make_metadata(tensors=1)
    metadata.state_dict_metadata["model.layers.0.weight"].properties.dtype = dtype
    assert read_record(dumps(metadata), source=SOURCE).tensor_bytes == 64 * dtype.itemsize


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_stock_record(tmp_path: Path) -> None:
    """FileSystemWriter's record: its save id, and no attributes of ours."""
    state = {"w": torch.zeros(3, 4), "n": {"step": 1}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    summary = read_record(data, source=SOURCE)
    stock = pickle.loads(data)
    assert summary.write_id == stock.storage_meta.save_id
    assert {(e.fqn, e.relative_path, e.offset, e.length) for e in summary.entries} == {
        (index.fqn, info.relative_path, info.offset, info.length) for index, info in stock.storage_data.items()
    }
    assert {(e.raw_offset, e.crc32c) for e in summary.entries} == {(None, None)}
    assert summary.tensor_bytes == 48


@pytest.mark.parametrize(
    "change",
    ["items", "item", "fqn", "size", "no size", "properties", "storage", "index", "info", "no length"],
)
def test_a_wrong_shape_is_corruption(change: str) -> None:
    """The same defects are found as with torch (but those of chunks, which the tools do not use)."""
    metadata = broken(change)
    if change == "size":
        metadata.state_dict_metadata["model.layers.0.weight"].size = (-1, 8)
    with pytest.raises(CorruptCheckpointError, match=r"^s3://ckpt/run/\.metadata is damaged"):
        read_record(pickle.dumps(metadata), source=SOURCE)


@pytest.mark.parametrize(
    "attributes",
    [{"relative_path": "../x"}, {"offset": -1}, {"length": 1 << 63}, {"raw_offset": 1089}, {"crc32c": b"123"}],
)
def test_impossible_entries_are_corruption(attributes: dict[str, object]) -> None:
    """Paths and numbers are checked as for torch's own objects."""
    metadata = make_metadata()
    next(iter(metadata.storage_data.values())).__dict__.update(attributes)
    with pytest.raises(CorruptCheckpointError, match=r"^s3://ckpt/run/\.metadata "):
        read_record(pickle.dumps(metadata), source=SOURCE)


def test_a_shape_that_would_take_for_ever_to_multiply() -> None:
    """A tensor with a million dimensions is refused, not multiplied."""
    metadata = make_metadata(tensors=1)
    metadata.state_dict_metadata["model.layers.0.weight"].size = (1 << 62,) * 1_000_000
    with pytest.raises(CorruptCheckpointError, match="impossible"):
        read_record(pickle.dumps(metadata), source=SOURCE)


@pytest.mark.parametrize("module, attribute", [("posix", "system"), ("builtins", "eval"), ("torch", "load")])
def test_other_names_are_refused(module: str, attribute: str) -> None:
    """The allow-list is the same one."""
    with pytest.raises(CorruptCheckpointError, match=rf"names '{module}\.{attribute}'"):
        read_record(program(name(module, attribute), b"N\x85R"), source=SOURCE)


def test_torch_is_not_imported() -> None:
    """Reading a record in a fresh process leaves torch out."""
    code = (
        "import sys\n"
        "from dcp_s3._checkpoint.pickles.standin import read_record\n"
        "summary = read_record(sys.stdin.buffer.read(), source='s')\n"
        "assert summary.tensor_bytes == 256, summary\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], input=dumps(make_metadata()), check=True, timeout=60)


BODY = dumps(make_metadata(tensors=1, chunks=1))


@given(st.data())
def test_no_changed_byte_raises_anything_else(data: st.DataObject) -> None:
    """A real record with a few bytes changed is read, or refused with our error."""
    body = bytearray(BODY)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptCheckpointError):
        read_record(bytes(body), source=SOURCE)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    """Arbitrary bytes are refused with our error."""
    with pytest.raises(CorruptCheckpointError):
        read_record(data, source=SOURCE)


INDEX = name("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81}("
HASHED = {
    "an index in an index": b"}\x8c\x01aq\x00" + (INDEX + b"\x8c\x03fqnh\x00\x8c\x06offseth\x00ubq\x00") * 60 + b"Ns",
    "a tuple for an offset": b"}" + INDEX + b"\x8c\x03fqn\x8c\x01a\x8c\x06offsetK\x01\x85ubNs",
    "a tuple for a name": b"}" + INDEX + b"\x8c\x03fqnK\x01\x85ubNs",
    "an offset of a million numbers": b"}"
    + INDEX
    + b"\x8c\x03fqn\x8c\x01a\x8c\x06offset"
    + name("torch", "Size")
    + b"("
    + b"K\x01" * 1_000_000
    + b"t\x85RubNs",
    "a size of a list": b"]q\x00K\x01a" + name("torch", "Size") + b"h\x00\x85R",
    "a copy of a dict": b"}q\x00K\x01Ns" + name("collections", "OrderedDict") + b"h\x00\x85R",
    "a size of tuples": name("torch", "Size") + b"]K\x01\x85a\x85R",
}


@pytest.mark.parametrize("read", [read_record, loads])
@pytest.mark.parametrize("what", HASHED)
def test_what_no_dict_should_hash(what: str, read: Callable[..., object]) -> None:
    """Indexes of anything but a name and a size of some numbers are refused, by both readers, within seconds."""
    start = time.monotonic()
    with pytest.raises(CorruptCheckpointError, match=r"is damaged"):
        read(program(HASHED[what]), source="s3://b/.metadata")
    assert time.monotonic() - start < 10


def shared_lists(levels: int) -> bytes:
    """A list that holds one twice that holds one twice, and so on: printed it would fill 2**levels bytes."""
    return b"](" * levels + b"]q\x64" + b"h\x64eq\x64" * levels


def shared_texts(levels: int) -> bytes:
    """The same of tuples, around a long text."""
    return b"X\xa0\x86\x01\x00" + b"x" * 100_000 + b"q\x64" + b"h\x64\x86q\x64" * levels


RECORD = name("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81}(\x8c\x13state_dict_metadata"
PRINTED = {
    "a path": RECORD
    + b"}\x8c\x0cstorage_data}"
    + INDEX
    + b"\x8c\x03fqn\x8c\x01aub"
    + name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    + b")\x81}(\x8c\x0drelative_path"
    + shared_lists(40)
    + b"\x8c\x06offsetK\x00\x8c\x06lengthK\x01ubsub",
    "a name": RECORD + b"}" + shared_texts(20) + b"Ns\x8c\x0cstorage_data}ub",
    "an index for a name": RECORD
    + b"}"
    + INDEX
    + b"\x8c\x03fqn\x8c\x01a\x8c\x05index"
    + shared_lists(40)
    + b"ubNs\x8c\x0cstorage_data}ub",
    "a memory format": name("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    + shared_lists(40)
    + b"\x85R",
    "a layout": name("torch.serialization", "_get_layout") + shared_texts(20) + b"\x85R",
    "properties": name("torch.distributed.checkpoint.metadata", "TensorProperties")
    + b")\x81(NNN"
    + shared_lists(40)
    + b"Ntb",
    "a path of paths": name("pathlib", "PosixPath") * 20
    + b"X\x90\x5f\x01\x00"
    + b"a/b/c/d/" * 11_250
    + b"q\x64"
    + b"h\x64\x86Rq\x64" * 20,
}


@pytest.mark.parametrize("read", [read_record, loads])
@pytest.mark.parametrize("what", PRINTED)
def test_what_no_message_should_print(what: str, read: Callable[..., object]) -> None:
    """Values that are refused are not printed, nor put together, when that takes for ever: soon, in little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with pytest.raises(CorruptCheckpointError) as caught:
        read(program(PRINTED[what]), source="s3://b/.metadata")
    assert time.monotonic() - start < 2
    assert len(str(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


@pytest.mark.parametrize("read", [read_record, loads])
def test_ranges_that_overlap(read: Callable[..., object]) -> None:
    """No range may begin within another one, in whatever order they come; empty ones may, and equal ones."""
    metadata = make_metadata()
    infos = list(metadata.storage_data.values())
    infos[0].offset += 1
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        read(dumps(metadata), source="s3://b/.metadata")
    metadata.storage_data = dict(reversed(metadata.storage_data.items()))
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        read(dumps(metadata), source="s3://b/.metadata")
    infos[0].offset = infos[1].offset
    read(dumps(metadata), source="s3://b/.metadata")
    infos[0].offset, infos[0].length, infos[0].raw_offset = infos[1].offset + 5, 0, 0
    read(dumps(metadata), source="s3://b/.metadata")
