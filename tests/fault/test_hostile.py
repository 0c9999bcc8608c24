"""A checkpoint made by an attacker who can write to the bucket: nothing of it runs, and it is refused in bounded memory and time."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import io
import json
import pickle
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CorruptCheckpointError, ObjectNotLoadableError, S3StorageReader, S3StorageWriter
from dcp_s3._checkpoint.pickles import metadata as record_format
from dcp_s3._transfer.checksum import CRC_CHUNK_BYTES, crc32c
from tests.fault.conftest import config_of, failure_of
from tests.fault.server import FaultServer, FaultServerProcess, Handle
from tests.support.ranks import run_ranks_ok

MIB = 1 << 20
STATE = {"a": torch.arange(3000.0), "b": torch.arange(3000.0) + 5, "object": {"epoch": 7, "text": "x" * 300}}


def _save(s3: Handle) -> None:
    dcp.save(STATE, storage_writer=S3StorageWriter("s3://bucket/run", config=config_of(s3)), no_dist=True)


def _info(metadata: Any, fqn: str) -> Any:
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == fqn]
    return info


def _stretch(metadata: Any, fqn: str, length: int) -> None:
    """Let an item be this long, and what lies behind it the same, since ranges that overlap would be refused at once."""
    info = _info(metadata, fqn)
    for other in metadata.storage_data.values():
        if other.offset >= info.offset:
            other.offset, other.length = info.offset, length


def _forge(s3: Handle, change: Callable[[Any], None]) -> None:
    """Change the record, and make the manifest agree with it: the attacker can write both."""
    metadata = record_format.loads(s3.read("run/.metadata"), source="here")
    change(metadata)
    body = pickle.dumps(metadata, protocol=4)
    (name,) = [key for key in s3.objects("run/") if "manifest" in key]
    manifest = json.loads(s3.read(name))
    manifest["metadata_sha256"], manifest["metadata_bytes"] = hashlib.sha256(body).hexdigest(), len(body)
    s3.put(name, json.dumps(manifest).encode())
    s3.put("run/.metadata", body)


def _put_record(s3: Handle, fqn: str, record: bytes) -> None:
    """Let an item's record be these bytes, with CRCs that are right."""
    s3.put("run/data/0123456789abcdef/__9_9.distcp", record)

    def change(metadata: Any) -> None:
        info = _info(metadata, fqn)
        info.relative_path, info.offset, info.length = "data/0123456789abcdef/__9_9.distcp", 0, len(record)
        info.__dict__.pop("raw_offset", None)
        parts = [record[at : at + CRC_CHUNK_BYTES] for at in range(0, len(record), CRC_CHUNK_BYTES)]
        info.crc32c = struct.pack(f"<{len(parts)}I", *map(crc32c, parts))

    _forge(s3, change)


def _load(s3: Handle | str, template: dict[str, Any], **options: Any) -> BaseException | None:
    """Load; return what it failed of."""
    config = config_of(s3) if isinstance(s3, Handle) else s3
    reader = S3StorageReader("s3://bucket/run", config=config, **options)
    return failure_of(lambda: dcp.load(template, storage_reader=reader, no_dist=True))


def _template() -> dict[str, Any]:
    return {"a": torch.zeros(3000), "b": torch.zeros(3000), "object": {"epoch": 0, "text": ""}}


HUGE = (1 << 63) - 1
PLACES: dict[str, Callable[[Any], None]] = {
    "another checkpoint": lambda m: setattr(_info(m, "a"), "relative_path", "../other/data/x"),
    "an absolute path": lambda m: setattr(_info(m, "a"), "relative_path", "/etc/passwd"),
    "another bucket": lambda m: setattr(_info(m, "a"), "relative_path", "s3://other/x"),
    "dots inside": lambda m: setattr(_info(m, "a"), "relative_path", "data/../../x"),
    "a NUL": lambda m: setattr(_info(m, "a"), "relative_path", "data/\0"),
    "nothing": lambda m: setattr(_info(m, "a"), "relative_path", ""),
    "a negative offset": lambda m: setattr(_info(m, "a"), "offset", -1),
    "an offset at the end of numbers": lambda m: setattr(_info(m, "a"), "offset", HUGE),
    "an offset beyond them": lambda m: setattr(_info(m, "a"), "offset", 1 << 64),
    "a negative length": lambda m: setattr(_info(m, "a"), "length", -1),
    "a length beyond numbers": lambda m: setattr(_info(m, "a"), "length", 1 << 64),
    "data behind the record": lambda m: setattr(_info(m, "a"), "raw_offset", _info(m, "a").length + 1),
    "data that do not fit": lambda m: setattr(_info(m, "a"), "raw_offset", _info(m, "a").length - 4),
    "an offset that is no number": lambda m: setattr(_info(m, "a"), "offset", "0"),
    "overlapping its neighbour": lambda m: setattr(_info(m, "a"), "offset", _info(m, "b").offset - 64),
    "too few CRCs": lambda m: setattr(_info(m, "a"), "crc32c", b""),
    "too many CRCs": lambda m: setattr(_info(m, "a"), "crc32c", bytes(4000)),
}
DATA: dict[str, Callable[[Any], None]] = {
    "beyond the object": lambda m: setattr(_info(m, "a"), "offset", 10 * MIB),
    "a terabyte on": lambda m: setattr(_info(m, "a"), "offset", 1 << 40),
    "its neighbour's": lambda m: setattr(_info(m, "a"), "offset", _info(m, "b").offset),
    "an object of a terabyte": lambda m: _stretch(m, "object.text", 1 << 40),
    "an object of all bytes": lambda m: _stretch(m, "object.text", HUGE - (1 << 30)),
}


@pytest.mark.parametrize("lie", PLACES)
def test_places_that_cannot_be(plain_s3: FaultServer, lie: str):
    """A record whose paths leave the checkpoint, or whose numbers cannot be, is refused before any data are asked for."""
    _save(plain_s3)
    _forge(plain_s3, PLACES[lie])
    plain_s3.clear(state=False)
    failed = _load(plain_s3, _template())
    assert failed is not None
    assert isinstance(failed, CorruptCheckpointError) or "metadata read failed" in str(failed), repr(failed)
    assert "s3://bucket/run" in str(failed)
    assert {record.key.split("-")[0] for record in plain_s3.log} <= {
        "run/.metadata",
        "run/manifest",
        "run/__0.metadata",
    }


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _measured(rank: int, config: Any, names: list[str], urls: dict[str, str]) -> dict[str, Any]:
    """Load each forged checkpoint; return what it failed of, its seconds, and by how much resident memory grew at its peak."""
    found = {}
    reader = S3StorageReader("s3://bucket/good", config=config)
    dcp.load(_template(), storage_reader=reader, no_dist=True)  # imports and clients
    for name in names:
        template = _template()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        before = _resident("VmRSS")
        started = time.monotonic()
        error = None
        try:
            dcp.load(template, storage_reader=S3StorageReader(urls[name], config=config), no_dist=True)
        except dcp.CheckpointException as failed:
            error = failed.failures[0][0]
        found[name] = error, time.monotonic() - started, (_resident("VmHWM") - before) / MIB
    return found


def _archive(pickled: bytes, *more: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A torch.save archive made by hand, laid out as torch does it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        for name, body in more:
            archive.writestr(f"archive/{name}", body)
        archive.writestr("archive/version", b"3\n")
    return out.getvalue()


def _same_bytes_many_times(times: int, nbytes: int) -> bytes:
    """An archive whose directory names one stored entry over and over, under many names."""
    body = bytearray(_archive(b"N.", ("data/0", bytes(nbytes))))
    end = len(body) - 22
    count, size, start = struct.unpack_from("<HLL", body, end + 10)
    directory = bytes(body[start:end])
    at = directory.index(b"archive/data/0") - 46
    entry = directory[at : at + 46 + len(b"archive/data/0")]
    more = b"".join(entry[:46] + b"archive/data/%d" % (n % 10) for n in range(times))
    body[start:end] = directory + more
    struct.pack_into("<HHLL", body, len(body) - 22 + 8, count + times, count + times, size + len(more), start)
    return bytes(body)


def _two_directories() -> bytes:
    """An archive whose end leads to another directory than the one before it: two readers may see two archives."""
    good = _archive(b"N.")
    bomb = _archive(pickle.dumps("x" * (300 * MIB), 2), method=zipfile.ZIP_DEFLATED)
    return bomb + good


DEEP = 200_000
GIB = b"\x8a\x05" + (1 << 30).to_bytes(5, "little")
SHARED = b"]Naq\x00" + b"](h\x00h\x00eq\x00" * 60
"""Lists that hold the one before twice, 60 levels: printed they would fill 2**60 bytes."""
PROGRAMS = {
    "lists in lists": b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "dicts in dicts": b"\x80\x02" + b"}K\x00" * (DEEP - 1) + b"}" + b"s" * (DEEP - 1) + b".",
    "tuples in tuples": b"\x80\x02N" + b"\x85" * DEEP + b".",
    "a key of tuples in tuples": b"\x80\x02})" + b"\x85" * DEEP + b"Ns.",
    "tuples in tuples by memo": b"\x80\x02)q\x00" + b"h\x00N\x86q\x00" * DEEP + b".",
    "tuples in tuples by marks": b"\x80\x02" + b"(" * DEEP + b"t" * DEEP + b".",
    "a key of tuples that share": b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"Ns.",
    "a call of lists that share": b"\x80\x02" + SHARED + b")R.",
    "an instance of lists that share": b"\x80\x02" + SHARED + b")\x81.",
    "a storage named by lists that share": b"\x80\x02]"
    + SHARED.replace(b"]Naq\x00", b"(]Naq\x00", 1)
    + b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nh\x00X\x03\x00\x00\x00cpuK\x01tQe.",
    "bytes by their number": b"\x80\x02cbuiltins\nbytearray\n" + GIB + b"\x85R.",
    "bytes by their number, from the memo": b"\x80\x02c__builtin__\nbytearray\n" + GIB + b"\x85q\x00h\x00R.",
    "bytes by their number, in a list": b"\x80\x02cbuiltins\nbytearray\n]" + GIB + b"aR.",
    "bytes by their number, an instance": b"\x80\x02cbuiltins\nbytearray\n" + GIB + b"\x85\x81.",
    "bytes by their number, called by a call": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\n"
    b"ctorch\nTensor\n" + GIB + b"\x85}tR.",
    "a storage by its number": b"\x80\x02ctorch.storage\nUntypedStorage\n" + GIB + b"\x85R.",
    "a tensor by its number": b"\x80\x02ctorch\nTensor\n" + GIB + b"\x85R.",
    "a tensor by its number, called by a call": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nFloatTensor\n"
    b"ctorch\nTensor\n" + GIB + b"\x85}tR.",
    "a tensor that grows": b"\x80\x02ctorch\nTensor\n)R(ctorch\nTensor\n)RK\x00" + GIB + b"\x85K\x01\x85tb.",
}
"""Pickles that would end the process, take it for ever, or fill its memory, if they were run; and those that are only deep:"""
HARMLESS = (
    "lists in lists",
    "dicts in dicts",
    "tuples in tuples",
    "tuples in tuples by memo",
    "tuples in tuples by marks",
)


class Runs:
    """What runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_hostile_records_and_sizes(tmp_path: Path):
    """Zip bombs of every making, code in a pickle, keys too deep, calls for memory, texts too long, noise, and ranges that lead
    nowhere: each is refused with a CorruptCheckpointError (what a pickle does with an ObjectNotLoadableError) that names the item, in less
    than 32 MiB and 30 s, and nothing of it is run. What is only deep is loaded.
    """
    marker = tmp_path / "run by the pickle"
    bomb = pickle.dumps("x" * (300 * MIB), protocol=2)
    records = {
        "compressed": _archive(bomb, method=zipfile.ZIP_DEFLATED),
        "compressed storage": _archive(b"N.", ("data/0", bytes(300 * MIB)), method=zipfile.ZIP_DEFLATED),
        "the same bytes many times": _same_bytes_many_times(2000, MIB),
        "two directories": _two_directories(),
        "code": _saved(Runs(str(marker))),
        "code, by hand": _archive(b"cposix\nsystem\n(X\x05\x00\x00\x00touchtR."),
        "cut": _saved([1, 2, 3])[:-30],
        "noise": bytes(range(256)) * 10,
        "no pickle": _archive(b""),
        "a pickle that ends nowhere": _archive(b"\x80\x02]("),
        "safetensors": struct.pack("<Q", 2) + b"{}" + bytes(100),
        **{name: _archive(pickled) for name, pickled in PROGRAMS.items()},
    }
    with FaultServerProcess(min_part_bytes=0) as server:
        urls = {}
        _save(server)
        for key in list(server.objects("run/")):
            server.put(key.replace("run/", "good/", 1), server.read(key))
        for kind, cases in (("record", records), ("range", DATA)):
            for number, name in enumerate(cases):
                _again(server)
                if kind == "record":
                    _put_record(server, "object.text", records[name])
                else:
                    _forge(server, DATA[name])
                place = f"{kind}-{number}"
                for key in list(server.objects("run/")):
                    server.put(key.replace("run/", f"{place}/", 1), server.read(key))
                urls[name] = f"s3://bucket/{place}"
        config = dataclasses.replace(config_of(server), memory_bytes=64 * MIB)
        (found,) = run_ranks_ok(1, _measured, config, list(urls), urls, timeout_s=200, backend=None)
    assert len(found) == len(records) + len(DATA)
    for name, (failed, seconds, grown) in found.items():
        assert seconds < 30, (name, seconds)
        if name in HARMLESS:
            assert failed is None, (name, repr(failed))
            continue
        refused = name.startswith("code") or name in PROGRAMS  # well-formed, and not loaded as it is
        kind = ObjectNotLoadableError if refused else CorruptCheckpointError
        assert isinstance(failed, kind), (name, repr(failed))
        assert len(str(failed)) < 2000, name
        assert grown < 32, (name, grown)
        if name in records:
            assert "object.text" in str(failed), (name, str(failed))
    assert not marker.exists()


def _again(server: Handle) -> None:
    """Put the good checkpoint back where the forged one was made."""
    for key in list(server.objects("run/")):
        server.delete(key)
    for key in list(server.objects("good/")):
        server.put(key.replace("good/", "run/", 1), server.read(key))


def test_good_records_pass(plain_s3: FaultServer):
    """What torch.save writes is let through: nested objects with tensors of every kind, also where the object is stored by hand."""
    _save(plain_s3)
    for value in (
        "text",
        {"b": bytearray(b"x" * 300), "e": bytearray(), "c": b"y"},
        {"t": torch.ones(5), "n": [1, (2, None)]},
        [torch.ones(3).expand(4, 3), torch.zeros(0)],
    ):
        _put_record(plain_s3, "object.text", _saved(value))
        template = _template()
        assert _load(plain_s3, template) is None
        loaded = template["object"]["text"]
        assert repr(loaded) == repr(value)


def test_ranges_that_overlap_with_crcs_that_are_right(plain_s3: FaultServer):
    """A record that lets one tensor lie across another is refused before any data are asked for, though the CRCs are of what is there."""
    _save(plain_s3)

    def change(metadata: Any) -> None:
        a, b = _info(metadata, "a"), _info(metadata, "b")
        a.offset = b.offset - 64
        start = a.offset + a.raw_offset
        a.crc32c = struct.pack("<I", crc32c(plain_s3.read(f"run/{a.relative_path}")[start : start + 12_000]))

    _forge(plain_s3, change)
    plain_s3.clear(state=False)
    failed = _load(plain_s3, _template())
    assert failed is not None
    assert isinstance(failed, CorruptCheckpointError) or "metadata read failed" in str(failed), repr(failed)
    assert "overlap" in str(failed)
    assert not any(record.key.startswith("run/data/") for record in plain_s3.log)


def test_the_same_range_for_two(plain_s3: FaultServer):
    """Two items may lie in the same place, and in any order: such a record is read."""
    _save(plain_s3)

    def change(metadata: Any) -> None:
        a, b = _info(metadata, "a"), _info(metadata, "b")
        a.offset, a.crc32c = b.offset, b.crc32c
        metadata.storage_data = dict(reversed(metadata.storage_data.items()))

    _forge(plain_s3, change)
    template = _template()
    assert _load(plain_s3, template) is None
    assert torch.equal(template["a"], STATE["b"])
    assert torch.equal(template["b"], STATE["b"])
