"""What is wrong in the bucket is found before a load returns: damaged, cut, missing and replaced objects, by name and place."""

from __future__ import annotations

import concurrent.futures
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CheckpointReplacedError, CorruptCheckpointError, S3StorageReader
from tests.fault.server import flip_reply
from tests.integration.conftest import bucket_on
from tests.integration.support import assert_same, blank, failure_of, load, reader, writer

MIB = 1 << 20
CHUNK = 4 * MIB


def _state():
    return {
        "big": torch.arange(5 * MIB // 8),
        "small": torch.arange(100.0),
        "object": {"epoch": 7, "text": "x" * 300},
        "strided": torch.arange(60_000.0).reshape(200, 300).t(),
    }


def _info(metadata, fqn):
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == fqn]
    return info


def _failed_load(bucket, path, template):
    with pytest.raises(dcp.CheckpointException) as caught:
        load(bucket, path, template)
    return failure_of(caught.value, 0)


def _error_of(call):
    try:
        call()
    except Exception as error:
        return error
    return None


def _flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_a_flipped_byte_of_the_data(bucket):
    """One flipped bit in a bucket's object is a CorruptCheckpointError that names key, item and place; repaired, it loads."""
    state = _state()
    dcp.save(state, storage_writer=writer(bucket, "a"))
    metadata = reader(bucket, "a").read_metadata()
    places = {}
    for name in ("big", "small", "strided"):
        info, nbytes = _info(metadata, name), state[name].nbytes
        places |= {(name, at): info.offset + info.raw_offset + at for at in (0, nbytes // 2, nbytes - 1)}
    places["big", CHUNK - 1] = places["big", 0] + CHUNK - 1
    places["big", CHUNK] = places["big", 0] + CHUNK
    for name in ("object.epoch", "object.text"):
        info = _info(metadata, name)
        places |= {(name, at): info.offset + at for at in (0, info.length // 2, info.length - 1)}
    key = f"a/{_info(metadata, 'big').relative_path}"
    whole = bucket.get(key)
    for (name, at), place in places.items():
        bucket.put(key, _flipped(whole, place))
        error = _failed_load(bucket, "a", blank(state))
        assert isinstance(error, CorruptCheckpointError), (name, at)
        assert (error.key, error.bucket) == (bucket.key(key), bucket.name)
        chunk = at // CHUNK * CHUNK
        first = place - at + chunk
        assert f"{name} in {bucket.url('a')} is damaged" in str(error), (name, at)
        assert f"from byte {chunk} of its data (byte {first} of the object)" in str(error), (name, at)
        # who does not ask for the damaged item does not suffer
        other = "small" if name != "small" else "strided"
        assert_same(load(bucket, "a", {other: blank(state[other])}), {other: state[other]})
    bucket.put(key, whole)
    assert_same(load(bucket, "a", blank(state)), state)


def test_verify_false_reads_what_is_there(bucket):
    """verify=False loads without index and checksums: what is damaged then comes as it lies there."""
    state = {"big": torch.arange(MIB)}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    metadata = reader(bucket, "a").read_metadata()
    info = _info(metadata, "big")
    key = f"a/{info.relative_path}"
    whole = bucket.get(key)
    bucket.put(key, _flipped(whole, info.offset + info.raw_offset + 8 * 1000))
    bucket.delete(f"a/index-{metadata.storage_meta.save_id}.safetensors.gz")
    unchecked = S3StorageReader(bucket.url("a"), config=bucket.endpoint.config(), verify=False)
    template = blank(state)
    dcp.load(template, storage_reader=unchecked)
    assert template["big"][1000] == 1000 ^ 0x10
    template["big"][1000] = 1000
    assert_same(template, state)
    error = _failed_load(bucket, "a", blank(state))
    assert "index of" in str(error)
    assert "is missing" in str(error)


def test_any_flipped_byte_of_the_record(faults):
    """There is no byte of .metadata whose change goes unnoticed: not one by which it would pass for a stock writer's record,
    which has no checksums to be held against.
    """
    bucket = bucket_on(faults)
    state = {"w": torch.arange(5.0), "step": 7}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    record = faults.read("a/.metadata")
    source = reader(bucket, "a")
    for at in range(len(record)):
        faults.put("a/.metadata", _flipped(record, at))
        with pytest.raises(CorruptCheckpointError) as caught:
            source.read_metadata()
        assert bucket.url("a") in str(caught.value), at
    for size in (0, 1, len(record) // 2, len(record) - 1):
        faults.put("a/.metadata", record[:size])
        with pytest.raises(CorruptCheckpointError, match=re.escape(bucket.url("a"))):
            source.read_metadata()
    faults.put("a/.metadata", record)
    assert_same(load(bucket, "a", blank(state)), state)


def test_any_flipped_byte_of_the_index(faults):
    """A changed index is an error that names the checkpoint, whichever byte it is."""
    bucket = bucket_on(faults)
    state = {"w": torch.arange(5.0), "step": 7}
    metadata = dcp.save(state, storage_writer=writer(bucket, "a"))
    key = f"a/index-{metadata.storage_meta.save_id}.safetensors.gz"
    index = faults.read(key)
    source = reader(bucket, "a")
    unnoticed = []
    for at in range(len(index)):
        faults.put(key, _flipped(index, at))
        error = _error_of(source.read_metadata)
        if error is None:
            unnoticed.append(at)
        else:
            assert isinstance(error, CorruptCheckpointError), at
            assert bucket.url("a") in str(error), at
    assert unnoticed == []  # the record has its SHA-256
    for wrong in (b"", b"{}", index[:-1], index + b"x"):
        faults.put(key, wrong)
        error = _failed_load(bucket, "a", blank(state))
        assert bucket.url("a") in str(error)
    faults.put(key, index)
    assert_same(load(bucket, "a", blank(state)), state)


def test_a_byte_flipped_on_its_way(faults):
    """Bytes that were spoiled by the way only are asked for once more, and then are right."""
    bucket = bucket_on(faults)
    state = _state()
    dcp.save(state, storage_writer=writer(bucket, "a"))
    rule = faults.on("GetObject", flip_reply(50), key="/data/", times=1)
    assert_same(load(bucket, "a", blank(state)), state)
    assert rule.fired == 1


@pytest.mark.parametrize("size", [0, 1000, 5 * MIB, -1])
def test_a_truncated_object(bucket, size):
    """An object that lost its end, or everything, is corrupt, by its name, and found in one round of requests."""
    state = {"big": torch.arange(10 * MIB // 4), "z": torch.arange(100.0)}
    dcp.save(state, storage_writer=writer(bucket, "a"))
    metadata = reader(bucket, "a").read_metadata()
    key = f"a/{_info(metadata, 'big').relative_path}"
    end = max(info.offset + info.raw_offset + state[i.fqn].nbytes for i, info in metadata.storage_data.items())
    bucket.put(key, bucket.get(key)[: size if size >= 0 else end - 1])
    error = _failed_load(bucket, "a", blank(state))
    assert isinstance(error, CorruptCheckpointError)
    assert "truncated" in str(error)
    assert (error.key, error.bucket) == (bucket.key(key), bucket.name)


def test_a_missing_object(bucket):
    """An object that is gone while its record is there is corrupt, by its name; what lies elsewhere still loads."""
    state = {"a": torch.arange(3 * MIB), "b": torch.arange(100.0)}
    metadata = dcp.save(state, storage_writer=writer(bucket, "a"))
    key = f"a/{_info(metadata, 'a').relative_path}"
    bucket.delete(key)
    error = _failed_load(bucket, "a", blank(state))
    assert isinstance(error, CorruptCheckpointError)
    assert f"a data object of {bucket.url('a')} is missing although its record is there" in str(error)
    assert error.key == bucket.key(key)


def test_replaced_while_it_was_read(faults):
    """A checkpoint that is replaced between a load's record and its data is told from a broken one: load again."""
    bucket = bucket_on(faults)
    old, new = {"w": torch.zeros(MIB)}, {"w": torch.ones(MIB)}
    dcp.save(old, storage_writer=writer(bucket, "a"))
    gate = faults.hold("GetObject", key="/data/")
    template = blank(old)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, bucket, "a", template, no_dist=True)
        gate.wait_arrived()
        dcp.save(new, storage_writer=writer(bucket, "a"))
        gate.release()
        with pytest.raises(dcp.CheckpointException) as caught:
            loading.result()
    error = failure_of(caught.value, 0)
    assert isinstance(error, CheckpointReplacedError)
    assert "load again" in str(error)
    assert_same(load(bucket, "a", template), new)


def test_replaced_between_record_and_index(faults):
    """A save that comes between a load's GETs of record and index costs the load nothing: it goes on with the new one."""
    bucket = bucket_on(faults)
    old, new = {"w": torch.zeros(10)}, {"w": torch.ones(10)}
    dcp.save(old, storage_writer=writer(bucket, "a"))
    gate = faults.hold("GetObject", key="index", nth=1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, bucket, "a", blank(old), no_dist=True)
        gate.wait_arrived()
        dcp.save(new, storage_writer=writer(bucket, "a"))
        gate.release()
        assert_same(loading.result(), new)


def test_deleted_while_it_was_read(faults):
    """A checkpoint that is deleted while it is read is not called broken."""
    bucket = bucket_on(faults)
    dcp.save({"w": torch.zeros(MIB)}, storage_writer=writer(bucket, "a"))
    gate = faults.hold("GetObject", key="/data/")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, bucket, "a", {"w": torch.ones(MIB)}, no_dist=True)
        gate.wait_arrived()
        for key in faults.objects("a/"):
            faults.delete(key)
        gate.release()
        with pytest.raises(dcp.CheckpointException) as caught:
            loading.result()
    error = failure_of(caught.value, 0)
    assert isinstance(error, CheckpointReplacedError)
    assert "replaced or deleted" in str(error)


@pytest.mark.parametrize("path", ["../b/data", "/etc/passwd", "s3://other/x", "data/../../b", "data//x"])
def test_a_record_that_leads_elsewhere(faults, path):
    """A record whose objects lie outside of its checkpoint is refused, and nothing there is asked for."""
    from dcp_s3._checkpoint.pickles import metadata as record_format

    bucket = bucket_on(faults)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer(bucket, "a"))
    metadata = record_format.loads(faults.read("a/.metadata"), source="here")
    for info in metadata.storage_data.values():
        info.relative_path = path
    faults.put("a/.metadata", record_format.dumps(metadata))
    faults.clear(rules=False, state=False)
    unchecked = S3StorageReader(bucket.url("a"), config=bucket.endpoint.config(), verify=False)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3)}, storage_reader=unchecked)
    assert path in str(caught.value)
    assert {record.key for record in faults.log} <= {"a/.metadata", "a/__0.metadata"}
