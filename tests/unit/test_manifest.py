"""The manifest: what is written is read back, and what is damaged is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import CorruptCheckpointError
from dcp_s3._checkpoint.format.manifest import FORMAT, Manifest, ObjectEntry

RECORD = b"the record"
KEY = "data/0123456789abcdef/__0_0.distcp"
ENTRY = ObjectEntry(key=KEY, size=20, etag='"abc-3"', part_bytes=8, crc32c=(0, 1, 0xFFFFFFFF))
MANIFEST = Manifest(
    write_id="ab" * 16,
    record=".metadata",
    metadata_sha256=hashlib.sha256(RECORD).hexdigest(),
    metadata_bytes=len(RECORD),
    world_size=2,
    created_unix_s=1234.5,
    writer="dcp_s3 0.1.0",
    objects=(ENTRY,),
)


def document(**changes: object) -> bytes:
    fields = json.loads(MANIFEST.to_json()) | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


def with_entry(**changes: object) -> bytes:
    entry = json.loads(MANIFEST.to_json())["objects"][0] | changes
    return document(objects=[{name: value for name, value in entry.items() if value is not ...}])


def test_round_trip() -> None:
    """What is written is read back, CRCs bit for bit."""
    assert Manifest.from_json(MANIFEST.to_json(), source="m") == MANIFEST


def test_the_stored_form() -> None:
    """The field names and the CRC digits are those of format 1; other programs may rely on them."""
    assert json.loads(MANIFEST.to_json()) == {
        "format": 1,
        "writer": "dcp_s3 0.1.0",
        "write_id": "ab" * 16,
        "record": ".metadata",
        "created_unix_s": 1234.5,
        "metadata_sha256": hashlib.sha256(RECORD).hexdigest(),
        "metadata_bytes": 10,
        "world_size": 2,
        "conditional": False,
        "objects": [{"key": KEY, "size": 20, "etag": '"abc-3"', "part_bytes": 8, "crc32c": "0000000000000001ffffffff"}],
    }


def test_it_describes_one_record_only() -> None:
    """The live manifest is the one with the record's hash."""
    assert MANIFEST.describes(RECORD)
    assert not MANIFEST.describes(RECORD + b"x")
    assert not MANIFEST.describes(b"The record")


def test_parts() -> None:
    """The CRC of part i covers bytes i*part_bytes up to the next part or the end."""
    assert list(ENTRY.parts()) == [(0, 8, 0), (8, 16, 1), (16, 20, 0xFFFFFFFF)]


def test_fields_of_the_future_are_tolerated() -> None:
    """An unknown field, at the top or in an entry, does not matter."""
    assert Manifest.from_json(document(new={"a": [1]}), source="m") == MANIFEST
    assert Manifest.from_json(with_entry(new=1), source="m") == MANIFEST


def test_a_newer_format_is_refused_with_its_number() -> None:
    """A format that this version does not know is never read by half; the text says what to do."""
    with pytest.raises(CorruptCheckpointError, match=rf"^m has manifest format {FORMAT + 1}.*use a newer one"):
        Manifest.from_json(document(format=FORMAT + 1), source="m")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        MANIFEST.to_json()[:-20],
        document(format=...),
        document(format=True),
        document(format=0),
        document(format="1"),
        document(write_id="AB" * 16),
        document(write_id=None),
        document(record="x/.metadata"),
        document(record="../.metadata"),
        document(metadata_sha256="0" * 63),
        document(metadata_bytes=-1),
        document(metadata_bytes=10.0),
        document(metadata_bytes=1 << 63),
        document(world_size=0),
        document(created_unix_s=float("nan")),
        document(created_unix_s=float("inf")),
        document(created_unix_s=10**400),
        document(created_unix_s=True),
        document(writer=...),
        document(objects=...),
        document(objects={}),
        document(objects=[1]),
        document(objects=[json.loads(MANIFEST.to_json())["objects"][0]] * 2),
        with_entry(key="../data/x"),
        with_entry(key="/data/x"),
        with_entry(key="other/x"),
        with_entry(key="data/../../x"),
        with_entry(key=...),
        with_entry(size=-1),
        with_entry(size=25),
        with_entry(size=1 << 62, part_bytes=1),
        with_entry(part_bytes=0),
        with_entry(etag=...),
        with_entry(crc32c=""),
        with_entry(crc32c="0" * 16 + "        "),
        with_entry(crc32c="0" * 23 + "g"),
        with_entry(crc32c=[0, 0, 0]),
    ],
)
def test_damage_is_corruption(data: bytes) -> None:
    """Every defect ends as our error, and it names the object."""
    with pytest.raises(CorruptCheckpointError, match=r"^s3://b/m\.json "):
        Manifest.from_json(data, source="s3://b/m.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    """Arbitrary bytes: our error or a manifest."""
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_json(data, source="m")


@given(st.sampled_from(sorted(json.loads(MANIFEST.to_json()))), json_values)
def test_no_value_raises_anything_else(name: str, value: object) -> None:
    """Any JSON value in any field: our error, or a manifest that reads back as itself."""
    try:
        manifest = Manifest.from_json(document(**{name: value}), source="m")
    except CorruptCheckpointError:
        return
    assert Manifest.from_json(manifest.to_json(), source="m") == manifest


@given(st.sampled_from(["key", "size", "etag", "part_bytes", "crc32c"]), json_values)
def test_no_entry_value_raises_anything_else(name: str, value: object) -> None:
    """The same in an entry."""
    try:
        manifest = Manifest.from_json(with_entry(**{name: value}), source="m")
    except CorruptCheckpointError:
        return
    (entry,) = manifest.objects
    assert sum(end - start for start, end, _ in entry.parts()) == entry.size


@given(st.data())
def test_no_flipped_byte_raises_anything_else(data: st.DataObject) -> None:
    """A real manifest with one byte changed or cut."""
    body = bytearray(MANIFEST.to_json())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    with contextlib.suppress(CorruptCheckpointError):
        Manifest.from_json(bytes(body), source="m")
