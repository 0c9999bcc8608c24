"""What the package writes, stock readers read; what stock writers write, the package reads; bitwise, at the same URLs."""

from __future__ import annotations

import io
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner, dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

from dcp_s3 import CorruptCheckpointError, ObjectNotLoadableError
from tests.golden.make import GOLDEN, expected
from tests.integration.support import assert_same, blank, failure_of, load, reader, writer
from tests.support.ranks import run_ranks_ok

DIALECTS = {"ours": 0, "fsspec-1": 1, "fsspec-2": 2, "s3torchconnector": 3}


def state(seed):
    """Return what a checkpoint may hold, in all the forms that a stock sync save keeps."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "weight": rand(1000, 777),
        "big": rand(5_000_000),
        "half": rand(64, 64).bfloat16(),
        "fp8": rand(33).to(torch.float8_e4m3fn),
        "complex": torch.complex(rand(7), rand(7)),
        "scalar": rand(()),
        "empty": torch.empty(0, 3),
        "transposed": rand(400, 500).t(),
        "view": rand(100_000)[10:20],
        "channels_last": rand(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "uint16": torch.arange(9).to(torch.uint16),
        "bool": torch.tensor([True, False]),
        "nested": {
            "epoch": 7,
            "list": [1, rand(3)],
            "name": "x",
            "opt": {"state": {"weight": {"step": torch.tensor(1.0)}}},
        },
        "none": None,
    }


def _stock_reads(rank, bucket):
    """Read our checkpoint at its own URL with every stock reader."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader as ConnectorReader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    want = state(DIALECTS["ours"])
    url = bucket.url("ours")
    path_style = S3ClientConfig(force_path_style=True)
    for stock in (FsspecReader(url), ConnectorReader(bucket.endpoint.region, url, s3client_config=path_style)):
        got = blank(want)
        dcp.load(got, storage_reader=stock)
        assert_same(got, want, type(stock).__name__)


def _stock_writes(rank, bucket):
    """Write one checkpoint with every stock writer that writes to S3."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter as ConnectorWriter
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    path_style = S3ClientConfig(force_path_style=True)
    writers = {
        "fsspec-1": FsspecWriter(bucket.url("fsspec-1"), thread_count=1),
        "fsspec-2": FsspecWriter(bucket.url("fsspec-2"), thread_count=2),
        "s3torchconnector": ConnectorWriter(
            bucket.endpoint.region, bucket.url("s3torchconnector"), s3client_config=path_style
        ),
    }
    for name, stock in writers.items():
        dcp.save(state(DIALECTS[name]), storage_writer=stock)


def _environ(server):
    """What points s3fs and s3torchconnector, which knows only the general variable, at a server."""
    return server.environ() | {"AWS_ENDPOINT_URL": server.endpoint_url}


def test_stock_readers_read_ours(server, bucket, tmp_path):
    """FsspecReader and s3torchconnector's reader at the same URL, FileSystemReader and dcp_to_torch_save after a download."""
    want = state(DIALECTS["ours"])
    dcp.save(want, storage_writer=writer(bucket, "ours", part_bytes=5 << 20))
    assert any(key.endswith(".distcp") for key in bucket.keys("ours"))
    run_ranks_ok(1, _stock_reads, bucket, backend=None, env=_environ(server))

    _download(bucket, "ours", tmp_path / "ours")
    got = blank(want)
    dcp.load(got, storage_reader=FileSystemReader(tmp_path / "ours"))
    assert_same(got, want)
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "whole.pt")
    assert_same(torch.load(tmp_path / "whole.pt", weights_only=True), want)


def test_we_read_what_stock_writers_wrote(server, bucket, tmp_path):
    """FsspecWriter's (one thread and two), s3torchconnector's, and FileSystemWriter's files uploaded as they are."""
    run_ranks_ok(1, _stock_writes, bucket, backend=None, env=_environ(server))
    dcp.save(state(0), storage_writer=FileSystemWriter(tmp_path / "files", thread_count=2))
    _upload(bucket, "files", tmp_path / "files")
    assert len([key for key in bucket.keys("fsspec-2") if key.endswith(".distcp")]) == 2
    for name, seed in {**DIALECTS, "files": 0}.items():
        if name != "ours":
            want = state(seed)
            assert_same(load(bucket, name, blank(want)), want, name)
            # without a template: what format_utils.dcp_to_torch_save does, with our reader
            assert_same(_without_template(bucket, name), want, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized:UserWarning")
def test_loads_without_a_template(bucket):
    """format_utils' planner and _load_state_dict_from_keys rebuild the whole state, and a part of it, from our checkpoint."""
    want = state(5)
    dcp.save(want, storage_writer=writer(bucket, "ours"))
    assert_same(_without_template(bucket, "ours"), want)
    part = _load_state_dict_from_keys(
        {"nested.opt", "scalar"}, checkpoint_id=bucket.url("ours"), storage_reader=reader(bucket)
    )
    assert_same(part, {"scalar": want["scalar"], "nested": {"opt": want["nested"]["opt"]}})


def _without_template(bucket, path):
    loaded = {}
    _load_state_dict(loaded, storage_reader=reader(bucket, path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {key: loaded[key] for key in state(0)}


@pytest.mark.parametrize(
    "name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name[0] != "_")
)
def test_golden_checkpoints(bucket, name):
    """Checkpoints of earlier versions, kept as bytes, load with the values they were made of."""
    _upload(bucket, name, GOLDEN / name)
    assert_same(load(bucket, name, blank(expected())), expected())


def test_golden_checkpoints_are_there():
    """Both dialects of the format are kept: ours with its index and CRCs, and the stock one with neither."""
    names = [path.name for path in GOLDEN.iterdir()]
    for kind, indexes in (("dcp_s3-", 1), ("torch-", 0)):
        kept = [name for name in names if name.startswith(kind)]
        assert kept
        for name in kept:
            assert (GOLDEN / name / ".metadata").is_file()
            assert len(list((GOLDEN / name).glob("index-*.json"))) == indexes


# ---------------------------------------------------------------------------------------------------- refusals


class Inverted(StreamTransformExtension):
    """Stores each byte inverted: DCP's way to compress or encrypt records, of which its ZStandard is another."""

    @staticmethod
    def registry_name():
        return "stream.inverted"

    @staticmethod
    def from_descriptor(version):
        return Inverted()

    def get_descriptor(self):
        return "stream.inverted/1"

    def transform_to(self, output):
        class Stream(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                return output.write(bytes(255 - byte for byte in bytes(data)))

        return Stream()

    def transform_from(self, stream):
        raise NotImplementedError


def test_a_transformed_record_is_refused(bucket, tmp_path):
    """A checkpoint written through a stream transform (zstd is DCP's own) is refused by its name, and not read as it lies."""
    saved = {"w": torch.ones(1000), "step": 7}
    dcp.save(saved, storage_writer=FileSystemWriter(tmp_path / "inverted", _extensions=[Inverted()]))
    _upload(bucket, "a", tmp_path / "inverted")
    for template in ({"w": torch.zeros(1000)}, {"step": 0}):
        before = dict(template)
        with pytest.raises(dcp.CheckpointException) as caught:
            load(bucket, "a", template)
        error = failure_of(caught.value, 0)
        assert isinstance(error, CorruptCheckpointError)
        assert f"{next(iter(template))} was written through ['stream.inverted/1']" in str(error)
        assert "does not decode" in str(error)
        assert_same(template, before)


def _safetensors(tensors, metadata):
    """Return tensors as a file of the safetensors format: header length, JSON header, bytes.

    Source: https://github.com/huggingface/safetensors#format
    """
    import json

    header, body = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize("count", [2, 1000])
def test_a_safetensors_file_is_refused(bucket, tmp_path, monkeypatch, count):
    """A SAFETENSORS checkpoint of FileSystemWriter, whose record gives no byte's place, is refused by that name."""
    if "safetensors" not in sys.modules:
        module = types.ModuleType("safetensors.torch")
        module.save = _safetensors
        monkeypatch.setitem(sys.modules, "safetensors", types.ModuleType("safetensors"))
        monkeypatch.setitem(sys.modules, "safetensors.torch", module)
    stock = FileSystemWriter(tmp_path / "st", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": torch.ones(count), "step": 7}, storage_writer=stock)
    _upload(bucket, "st", tmp_path / "st")
    template = {"w": torch.zeros(count)}
    with pytest.raises(dcp.CheckpointException) as caught:
        load(bucket, "st", template)
    error = failure_of(caught.value, 0)
    assert isinstance(error, CorruptCheckpointError)
    assert "w in s3://" in str(error)
    assert "safetensors" in str(error)
    assert_same(template, {"w": torch.zeros(count)})
    assert_same(load(bucket, "st", {"step": None}), {"step": 7})  # objects are torch.save records there, too


class Marker:
    """An object whose unpickling leaves a trace."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return _touch, (self.path,)

    def __eq__(self, other):
        return isinstance(other, Marker) and other.path == self.path

    __hash__ = None


def _touch(path):
    Path(path).touch()
    return Marker(path)


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_an_object_that_could_run_code(bucket, tmp_path, stock):
    """An object that weights-only loading refuses is refused, and nothing of it runs, unless trust_pickle=True."""
    trace = tmp_path / "trace"
    saved = {"w": torch.ones(3), "object": Marker(str(trace))}
    if stock:
        dcp.save(saved, storage_writer=FileSystemWriter(tmp_path / "files"))
        _upload(bucket, "a", tmp_path / "files")
    else:
        dcp.save(saved, storage_writer=writer(bucket, "a"))
    trace.unlink(missing_ok=True)
    with pytest.raises(dcp.CheckpointException) as caught:
        load(bucket, "a", {"w": torch.zeros(3), "object": None})
    error = failure_of(caught.value, 0)
    assert isinstance(error, ObjectNotLoadableError)
    assert str(error).startswith("object in s3://")
    assert "trust_pickle=True" in str(error)
    assert not trace.exists()
    # what else is there can be had without it
    assert_same(load(bucket, "a", {"w": torch.zeros(3)}), {"w": torch.ones(3)})

    trusting = reader(bucket, "a")
    trusting._trust_pickle = True
    template = {"w": torch.zeros(3), "object": None}
    dcp.load(template, storage_reader=trusting)
    assert template["object"] == Marker(str(trace))
    assert trace.exists()


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return _touch, (self.path,)


def test_a_record_that_could_run_code(bucket, tmp_path):
    """A .metadata that names anything but the parts of a checkpoint's metadata is refused by that name, before it runs."""
    dcp.save({"w": torch.ones(3)}, storage_writer=writer(bucket, "a"))
    trace = tmp_path / "trace"
    metadata = pickle.loads(bucket.get("a/.metadata"))
    metadata.planner_data["w"] = _Runs(str(trace))
    for planted in (
        pickle.dumps(metadata),
        pickle.dumps(_Runs(str(trace))),
        pickle.dumps(print),
        b"cos\nsystem\n(S'id'\ntR.",
    ):
        bucket.put("a/.metadata", planted)
        with pytest.raises(CorruptCheckpointError, match="nothing of it was run") as caught:
            reader(bucket, "a").read_metadata()
        assert f"{bucket.url('a')}/.metadata names" in str(caught.value)
        with pytest.raises(dcp.CheckpointException, match="nothing of it was run"):
            load(bucket, "a", {"w": torch.zeros(3)})
    assert not trace.exists()
    for junk in (b"", b"not a pickle", pickle.dumps({"state_dict_metadata": {}}), pickle.dumps(metadata.storage_meta)):
        bucket.put("a/.metadata", junk)
        with pytest.raises(CorruptCheckpointError, match=r"a/\.metadata"):
            reader(bucket, "a").read_metadata()


# ---------------------------------------------------------------------------------------------------- moving files


def _download(bucket, path, directory):
    for key in bucket.keys(f"{path}/"):
        target = directory / key.removeprefix(f"{path}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bucket.get(key))


def _upload(bucket, path, directory):
    for file in directory.rglob("*"):
        if file.is_file():
            bucket.put(f"{path}/{file.relative_to(directory)}", file.read_bytes())


def test_stock_records_are_what_we_write(bucket):
    """Each record of ours is a torch.save file of its own, for whoever reads the object without DCP."""
    want = state(6)
    dcp.save(want, storage_writer=writer(bucket, "a"))
    metadata = reader(bucket, "a").read_metadata()
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "weight")
    data = bucket.get(f"a/{info.relative_path}")[info.offset : info.offset + info.length]
    assert_same(torch.load(io.BytesIO(data), weights_only=True), want["weight"])
    raw = info.offset + info.raw_offset
    whole = bucket.get(f"a/{info.relative_path}")
    assert whole[raw : raw + want["weight"].nbytes] == want["weight"].numpy().tobytes()
    assert info.raw_offset % 64 == 0
