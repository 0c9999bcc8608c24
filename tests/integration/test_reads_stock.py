"""Checkpoints of other writers are held against all that they carry: CRC-32s, shapes, dtypes, and the store's times."""

from __future__ import annotations

import datetime as dt
import io
import pickle
import time
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils.serialization import config as serialization_config

from dcp_s3 import CheckpointReplacedError, CorruptCheckpointError, S3StorageReader
from dcp_s3._checkpoint.archive import stock_archive
from dcp_s3._checkpoint.archive.stock_archive import fault_of
from dcp_s3._checkpoint.pickles import metadata as record_format
from tests.golden.make import GOLDEN, expected
from tests.integration.conftest import bucket_on
from tests.integration.support import assert_same, blank, failure_of, load, reader, writer
from tests.integration.test_interop import DIALECTS, _environ, _stock_writes, state
from tests.support.ranks import run_ranks_ok

(GOLDEN_STOCK,) = (path for path in GOLDEN.glob("torch-*"))
OBJECT = "a/__0_0.distcp"


def _upload(bucket, directory, path="a"):
    for file in directory.iterdir():
        bucket.put(f"{path}/{file.name}", file.read_bytes())


def _saved(bucket, directory, state):
    dcp.save(state, storage_writer=FileSystemWriter(directory))
    _upload(bucket, directory)


def _flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def _failed_load(bucket, template, source=None):
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(template, storage_reader=source or reader(bucket, "a"))
    return failure_of(caught.value, 0)


# ---------------------------------------------------------------------------------------------------- CRC-32


def test_any_flipped_byte_of_a_stock_object(faults):
    """Each of some hundred single-bit faults, in all of values, pickles, names and directories, is found or changes nothing."""
    bucket = bucket_on(faults)
    _upload(bucket, GOLDEN_STOCK)
    whole = bucket.get(OBJECT)
    metadata = record_format.loads(bucket.get("a/.metadata"), source="a")
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    info = places["float32"]
    record = whole[info.offset : info.offset + info.length]
    values = record.index(expected()["float32"].numpy().tobytes())
    found = 0
    for at in [*range(0, info.length, 17), *range(values, values + 96)]:
        bucket.put(OBJECT, _flipped(whole, info.offset + at))
        template = {"float32": torch.zeros(4, 6)}
        try:
            load(bucket, "a", template)
        except dcp.CheckpointException as caught:
            error = failure_of(caught, 0)
            assert isinstance(error, CorruptCheckpointError), at
            assert "float32 in s3://bucket/a" in str(error)
            found += 1
        else:
            assert_same(template["float32"], expected()["float32"])
            assert not values <= at < values + 96
    assert found > 120


@pytest.mark.parametrize("name", ["longer", "nested.name"])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_flipped_byte_of_values(faults, name, trusted):
    """The error names item, object and entry, of tensors and of objects, and what is not asked for does not suffer."""
    bucket = bucket_on(faults)
    _upload(bucket, GOLDEN_STOCK)
    whole = bucket.get(OBJECT)
    metadata = record_format.loads(bucket.get("a/.metadata"), source="a")
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == name]
    wanted = torch.arange(20_000, 20_008, dtype=torch.int32).numpy().tobytes() if name == "longer" else b"golden"
    bucket.put(OBJECT, _flipped(whole, whole.index(wanted, info.offset) + 1))
    source = S3StorageReader(bucket.url("a"), config=bucket.endpoint.config(), trust_pickle=trusted)
    template = {"longer": torch.zeros(40_000, dtype=torch.int32)} if name == "longer" else {"nested": {"name": ""}}
    error = _failed_load(bucket, template, source)
    assert isinstance(error, CorruptCheckpointError)
    entry = "data/0" if name == "longer" else "data.pkl"
    assert f"{name} in s3://bucket/a is damaged: the CRC-32 of '{entry}'" in str(error)
    assert error.key == OBJECT
    load(bucket, "a", {"int64": torch.zeros(24, dtype=torch.int64)})
    # what verify=False means: it comes as it lies there
    dcp.load(template, storage_reader=S3StorageReader(bucket.url("a"), config=bucket.endpoint.config(), verify=False))
    assert (int(template["longer"][20_000]) != 20_000) if name == "longer" else (template["nested"]["name"] != "golden")


def test_damage_on_the_way_is_read_again(faults):
    """A reply that differs from what the store holds is asked for once more, as it is of our own checkpoints."""
    from tests.fault.server import flip_reply

    bucket = bucket_on(faults)
    _upload(bucket, GOLDEN_STOCK)
    at = bucket.get(OBJECT).index(torch.arange(20_000, 20_008, dtype=torch.int32).numpy().tobytes())
    faults.on("GetObject", flip_reply(at), key=r"\.distcp", nth=1)
    template = blank(expected())
    assert_same(load(bucket, "a", template), expected())


def test_archives_without_crcs(faults, tmp_path):
    """compute_crc32=False leaves zeros, which are no checksum of anything: nothing is held against them."""
    bucket = bucket_on(faults)
    state = {"w": torch.arange(1000.0), "step": 7}
    serialization_config.save.compute_crc32 = False
    try:
        _saved(bucket, tmp_path, state)
    finally:
        serialization_config.save.compute_crc32 = True
    assert_same(load(bucket, "a", blank(state)), state)
    bucket.put(OBJECT, _flipped(bucket.get(OBJECT), bucket.get(OBJECT).index(state["w"].numpy().tobytes()) + 100))
    assert not torch.equal(load(bucket, "a", blank(state))["w"], state["w"])


def test_what_fault_of_says():
    """Torch's own archives, large numbers of entries and 64-bit directories are good; bombs are left to the check of sizes."""
    for value in (torch.arange(7), {"a": torch.empty(0), "b": [torch.ones(300), torch.zeros(2)]}, "text", 5):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        record = buffer.getvalue()
        assert fault_of(memoryview(record)) is None
        assert [entry.crc for entry in stock_archive._entries(memoryview(record))] == [
            info.CRC for info in zipfile.ZipFile(io.BytesIO(record)).infolist()
        ]
    assert fault_of(memoryview(b"not an archive")) is None
    assert "broken" in fault_of(memoryview(record[:-1]))
    assert "broken" in fault_of(memoryview(_flipped(record, len(record) - 22)))
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as out:
        for n in range(70_000):  # more entries than 16 bits count
            out.writestr(f"archive/{n}", b"x")
    whole = many.getvalue()
    assert fault_of(memoryview(whole)) is None
    assert "'69999'" in fault_of(memoryview(whole.replace(b"archive/69999x", b"archive/69999y")))


def test_entries_of_more_than_32_bits():
    """Sizes and places that stand in the extra field, in each of its forms."""
    body = b"content"
    head = stock_archive._LOCAL.pack(b"PK\x03\x04", 45, 0, 0, 0, 0, 0, 0, 0, 3, 4) + b"a/b" + bytes(4)
    wide = 0xFFFFFFFF
    for packed, unpacked, local, values in (
        (7, 7, 0, ()),
        (wide, wide, 0, (7, 7)),
        (wide, wide, wide, (7, 7, 0)),
        (7, 7, wide, (0,)),
        (7, wide, 0, (7,)),
    ):
        extra = b"\x99\x00\x02\x00zz" + b"\x01\x00" + (8 * len(values)).to_bytes(2, "little")
        extra += b"".join(value.to_bytes(8, "little") for value in values)
        for crc, good in ((zlib.crc32(body), True), (zlib.crc32(b"other"), False)):
            entry = stock_archive._ENTRY.pack(
                b"PK\x01\x02", 45, 45, 0, 0, 0, 0, crc, packed, unpacked, 3, len(extra), 0, 0, 0, 0, local
            )
            directory = entry + b"a/b" + extra
            end = stock_archive._END.pack(b"PK\x05\x06", 0, 0, 1, 1, len(directory), len(head + body), 0)
            fault = fault_of(memoryview(head + body + directory + end))
            assert (fault is None) == good, fault
            assert good or "CRC-32 of 'b'" in fault


# ---------------------------------------------------------------------------------------------------- shape and dtype


@pytest.mark.parametrize(
    "saved",
    [
        torch.arange(12.0).reshape(4, 3),
        torch.arange(6.0),
        torch.full((2, 3), 1e300, dtype=torch.float64),
        torch.full((2, 3), 1 + 2j),
        torch.ones(2, 3, dtype=torch.int32),
    ],
    ids=["larger", "other-shape", "double", "complex", "int"],
)
def test_an_object_that_is_not_what_the_record_says(faults, tmp_path, saved):
    """A tensor of another shape or dtype than the record's is refused: nothing is narrowed or converted without a word."""
    bucket = bucket_on(faults)
    dcp.save({"w": torch.ones(2, 3)}, storage_writer=FileSystemWriter(tmp_path / "recorded"))
    dcp.save({"w": saved}, storage_writer=FileSystemWriter(tmp_path / "there"))
    metadata, there = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("recorded", "there"))
    metadata.storage_data = dict(zip(metadata.storage_data, there.storage_data.values(), strict=True))
    bucket.put("a/.metadata", pickle.dumps(metadata))
    bucket.put(OBJECT, (tmp_path / "there" / "__0_0.distcp").read_bytes())
    template = {"w": torch.zeros(2, 3)}
    error = _failed_load(bucket, template)
    assert isinstance(error, CorruptCheckpointError)
    assert f"w in s3://bucket/a is not what the checkpoint's record describes: its object holds {saved.dtype}" in str(
        error
    )
    assert "the record says torch.float32 of (2, 3)" in str(error)
    assert not template["w"].any()


def test_a_template_of_another_dtype(faults, tmp_path, caplog):
    """A template may be of another dtype than what was saved, as with DCP's readers; a warning says so."""
    bucket = bucket_on(faults)
    _saved(bucket, tmp_path, {"w": torch.arange(6.0), "same": torch.ones(2)})
    template = {"w": torch.zeros(6, dtype=torch.float64), "same": torch.zeros(2)}
    load(bucket, "a", template)
    assert torch.equal(template["w"], torch.arange(6.0, dtype=torch.float64))
    (warning,) = [
        record for record in caplog.records if record.levelname == "WARNING" and record.name == "dcp_s3.reader"
    ]
    assert warning.getMessage() == "w was saved as torch.float32 and is loaded as torch.float64"


# ---------------------------------------------------------------------------------------------------- mixtures


def _written_in_place(faults, bucket, directory, state):
    """Save as FsspecWriter does: fixed names below the URL that its record names."""
    dcp.save(state, storage_writer=FileSystemWriter(directory))
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.storage_meta.checkpoint_id = bucket.url("a")
    for file in sorted(directory.glob("*.distcp")):
        bucket.put(f"a/{file.name}", file.read_bytes())
    bucket.put("a/.metadata", pickle.dumps(metadata))


def test_an_overwrite_that_did_not_finish(faults, tmp_path):
    """An object that is clearly younger than the record of a checkpoint that was written in place: maybe a mixture, refused."""
    bucket = bucket_on(faults)
    state = {"w": torch.ones(100), "step": 1}
    _written_in_place(faults, bucket, tmp_path / "old", state)
    assert_same(load(bucket, "a", blank(state)), state)
    faults.make_older("a/.metadata", 1)  # whole seconds of two machines: no sign
    assert_same(load(bucket, "a", blank(state)), state)
    faults.make_older("a/.metadata", 60)
    error = _failed_load(bucket, blank(state))
    assert isinstance(error, CorruptCheckpointError)
    assert "may be a mixture of two checkpoints" in str(error)
    assert "verify=False" in str(error)
    assert error.key == OBJECT
    unchecked = S3StorageReader(bucket.url("a"), config=bucket.endpoint.config(), verify=False)
    template = blank(state)
    dcp.load(template, storage_reader=unchecked)
    assert_same(template, state)


def _put_clearly_later(bucket, key, *, record):
    """Write an object anew until the store says that it is more than two seconds younger than the record."""
    client = bucket.endpoint.client()

    def modified(path):
        return client.head_object(Bucket=bucket.name, Key=bucket.key(path))["LastModified"]

    deadline = time.monotonic() + 20
    while modified(key) - modified(record) < dt.timedelta(seconds=3):
        assert time.monotonic() < deadline
        time.sleep(0.2)
        bucket.put(key, bucket.get(key))


def test_the_writers_that_write_to_s3(server, bucket):
    """The records of FsspecWriter and s3torchconnector name the URL that they were written to, and a later object is found."""
    run_ranks_ok(1, _stock_writes, bucket, backend=None, env=_environ(server))
    for name in ("fsspec-1", "s3torchconnector"):
        assert_same(load(bucket, name, {"scalar": torch.zeros(())}), {"scalar": state(DIALECTS[name])["scalar"]})
        key = next(key for key in bucket.keys(f"{name}/") if key.endswith(".distcp"))
        _put_clearly_later(bucket, key, record=f"{name}/.metadata")
        with pytest.raises(dcp.CheckpointException) as caught:
            load(bucket, name, {"scalar": torch.zeros(())})
        assert "may be a mixture" in str(failure_of(caught.value, 0))


def test_a_copy_of_any_age(faults, tmp_path):
    """Objects that were copied behind their record (a sync does that) are no mixture: they were written elsewhere."""
    bucket = bucket_on(faults)
    state = {"w": torch.ones(100), "step": 1}
    _saved(bucket, tmp_path, state)
    faults.make_older("a/.metadata", 3600)
    assert_same(load(bucket, "a", blank(state)), state)
    # ours, too, wherever it was copied to
    dcp.save(state, storage_writer=writer(bucket, "b"))
    faults.make_older("b/.metadata", 3600)
    assert_same(load(bucket, "b", blank(state)), state)


def test_an_object_overwritten_during_the_load(faults, tmp_path):
    """An object that was written after this load has read the record, by the store's clock, is not that record's."""
    bucket = bucket_on(faults)
    state = {"w": torch.ones(100), "step": 1}
    _saved(bucket, tmp_path, state)
    source = reader(bucket, "a")
    read_record = source.read_metadata

    def then_overwritten(*args, **kwargs):
        found = read_record(*args, **kwargs)
        faults.configure(clock_offset_s=60.0)
        bucket.put(OBJECT, bucket.get(OBJECT))
        return found

    source.read_metadata = then_overwritten
    error = _failed_load(bucket, blank(state), source)
    assert isinstance(error, CheckpointReplacedError)
    assert "was overwritten while it was loaded" in str(error)
    assert "load again" in str(error)
    assert error.key == OBJECT


@pytest.mark.parametrize("what", ["record", "everything", "deleted"])
def test_replaced_during_the_load(faults, tmp_path, what):
    """The record is looked at again behind the last byte: another one, or none, is a CheckpointReplacedError."""
    bucket = bucket_on(faults)
    old, new = {"w": torch.zeros(100), "step": 1}, {"w": torch.ones(100), "step": 2}
    _saved(bucket, tmp_path / "old", old)
    dcp.save(new, storage_writer=FileSystemWriter(tmp_path / "new"))
    source = reader(bucket, "a")
    read_record = source.read_metadata

    def then_replaced(*args, **kwargs):
        found = read_record(*args, **kwargs)
        if what == "deleted":
            faults.delete("a/.metadata")
        else:
            for file in (tmp_path / "new").iterdir():
                if what == "everything" or file.name == ".metadata":
                    bucket.put(f"a/{file.name}", file.read_bytes())
        return found

    source.read_metadata = then_replaced
    error = _failed_load(bucket, blank(old), source)
    assert isinstance(error, CheckpointReplacedError)
    assert "replaced or deleted while it was read" in str(error)
    if what == "everything":
        assert_same(load(bucket, "a", blank(new)), new)


def _read_behind_each_other(rank, bucket):
    """Rank 0 loads before an overwrite begins, rank 1 when one of two objects is new."""
    import torch.distributed as dist

    source = reader(bucket, "a")
    read_data = source.read_data

    def in_turn(*args):
        if rank == 1:
            dist.barrier()
        done = read_data(*args)
        if rank == 0:
            bucket.endpoint.client().put_object(Bucket=bucket.name, Key=bucket.key(OBJECT), Body=bucket.get("b"))
            dist.barrier()
        return done

    source.read_data = in_turn
    try:
        dcp.load({"w": torch.zeros(100), "step": 0}, storage_reader=source)
    except dcp.CheckpointException as caught:
        return {failed: str(error[0]) for failed, error in caught.failures.items()}
    return None


def test_ranks_on_both_sides_of_an_overwrite(faults, tmp_path):
    """The rank that sees the younger object says so on all ranks, though neither has seen an ETag change."""
    bucket = bucket_on(faults)
    _written_in_place(faults, bucket, tmp_path / "old", {"w": torch.zeros(100), "step": 1})
    dcp.save({"w": torch.ones(100), "step": 2}, storage_writer=FileSystemWriter(tmp_path / "new"))
    bucket.put("b", (tmp_path / "new" / "__0_0.distcp").read_bytes())
    for key in ("a/.metadata", OBJECT):
        faults.make_older(key, 60)
    for failures in run_ranks_ok(2, _read_behind_each_other, bucket):
        assert list(failures) == [1]
        assert "may be a mixture" in failures[1]


def test_what_it_costs(faults, tmp_path):
    """One HEAD of the record; nothing of a checkpoint of ours, nor with verify=False."""
    bucket = bucket_on(faults)
    state = {"w": torch.ones(100), "step": 1}
    _saved(bucket, tmp_path, state)
    dcp.save(state, storage_writer=writer(bucket, "ours"))
    for path, verify, wanted in (("a", True, 1), ("a", False, 0), ("ours", True, 0)):
        faults.clear(rules=False, state=False)
        dcp.load(
            blank(state),
            storage_reader=S3StorageReader(bucket.url(path), config=bucket.endpoint.config(), verify=verify),
        )
        assert len(faults.requests("HeadObject")) == wanted, (path, verify)
