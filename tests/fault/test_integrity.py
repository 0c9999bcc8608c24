"""A store that says yes and keeps something else: found before the commit where it can be seen, and at load and verify always."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpS3Error,
    S3StorageReader,
    S3StorageWriter,
    StorageError,
    verify,
)
from dcp_s3._checkpoint.format.layout import WRITE_ID_FIELD
from dcp_s3._checkpoint.save.commit import Observed, confirm
from tests.fault.conftest import Transfer, config_of, failure_of
from tests.fault.server import Action, FaultServer, error, flip_stored, lose_stored, truncate_stored

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PART = 5 * MIB
URL = "s3://bucket/run"
BIG = 3_000_000
"""Elements of a tensor, 12 MB: it goes up in parts. A tensor of 1,000 goes up in one request."""

WHAT = {
    "part": ("UploadPart", "/data/", BIG),
    "object": ("PutObject", "/data/", 1000),
    "index": ("PutObject", "index", 1000),
    "record": ("PutObject", r"\.metadata$", 1000),
}
SEEN_BEFORE_COMMIT = {(what, damage) for what in ("part", "object", "index") for damage in ("truncate", "lose")}
"""HEAD shows the size of what lies there before the commit."""
SEEN_BEFORE_DELETION = {("record", "truncate"), ("record", "lose")}
"""HEAD shows it before anything of the replaced checkpoint is deleted."""


def _damage(kind: str, at: int) -> Action:
    return {"flip": flip_stored(at), "truncate": truncate_stored(at), "lose": lose_stored()}[kind]


def _save(s3: FaultServer, state: dict[str, Any], path: str = "run", **settings: Any) -> BaseException | None:
    """Save; return what it failed of."""
    writer = S3StorageWriter(f"s3://bucket/{path}", config=config_of(s3, part_bytes=PART, **settings))
    return failure_of(lambda: dcp.save(state, storage_writer=writer, no_dist=True))


def _load(s3: FaultServer, template: dict[str, Any], path: str = "run") -> BaseException | None:
    """Load; return what it failed of."""
    reader = S3StorageReader(f"s3://bucket/{path}", config=config_of(s3))
    return failure_of(lambda: dcp.load(template, storage_reader=reader, no_dist=True))


def _finds(s3: FaultServer, *, deep: bool = True) -> tuple[str, ...]:
    return verify(URL, deep=deep, config=config_of(s3)).problems


@pytest.mark.parametrize("damage", ["flip", "truncate", "lose"])
@pytest.mark.parametrize("what", WHAT)
def test_a_store_that_keeps_something_else(plain_s3: FaultServer, what: str, damage: str, allowed: set[str]):
    """The store acknowledges a part, an object, the index or the record, and flips a bit of it, cuts it, or loses it. Where
    the size shows it nothing is committed, and the checkpoint before is whole; else the load and `verify` both say so.
    """
    allowed.add("open-upload")
    operation, key, elements = WHAT[what]
    state = {"w": torch.arange(elements, dtype=torch.float32)}
    before = {"w": torch.full((10,), 5.0)}
    assert _save(plain_s3, before) is None
    rule = plain_s3.on(
        operation,
        _damage(damage, {"part": 3000, "object": 3000, "index": 190, "record": 300}[what]),
        key=key,
        times=1,
    )
    failed = _save(plain_s3, state)
    assert rule.fired == 1
    plain_s3.clear(log=False, state=False)
    if (what, damage) in SEEN_BEFORE_COMMIT:
        assert isinstance(failed, DcpS3Error), failed
        assert failed.key is not None
        assert ("index" if what == "index" else "/data/") in failed.key
        template = {"w": torch.zeros(10)}
        assert _load(plain_s3, template) is None
        assert torch.equal(template["w"], before["w"])
        assert _finds(plain_s3) == ()
        return
    if (what, damage) in SEEN_BEFORE_DELETION:
        assert isinstance(failed, StorageError), failed
        assert (failed.key, failed.rank) == ("run/.metadata", 0)
        assert ("keeps 300 of its" if damage == "truncate" else "has none") in failed.message
        assert plain_s3.requests("DeleteObject") == []
    else:
        assert failed is None
    loading = _load(plain_s3, {"w": torch.zeros(elements)})
    assert loading is not None
    assert "s3://bucket/run" in str(loading)
    if what in ("part", "object"):
        assert isinstance(loading, CorruptCheckpointError)
    else:  # DCP puts what read_metadata raises into an AssertionError of its own, by its text
        assert "metadata read failed" in str(loading)
    if (what, damage) == ("record", "lose"):  # an empty record is none
        with pytest.raises(CheckpointNotFoundError):
            _finds(plain_s3)
        return
    problems = _finds(plain_s3)
    assert problems
    assert all("s3://bucket/run" in text for text in problems)


@pytest.mark.parametrize("where", [0, 700, -1], ids=["first", "inside", "last"])
def test_every_place_of_a_part(plain_s3: FaultServer, where: int):
    """A bit that flips in the first, an inner or the last byte of any part is found by `verify`, which names the part."""
    state = {"w": torch.arange(BIG, dtype=torch.float32)}
    for part in (1, 2, 3):
        plain_s3.clear()
        plain_s3.on("UploadPart", flip_stored(where), part=part)
        assert _save(plain_s3, state) is None
        problems = _finds(plain_s3)
        assert len(problems) == 1
        assert f"part {part} (bytes {(part - 1) * PART}-" in problems[0]
        assert "concerns w" in problems[0]
        assert _finds(plain_s3, deep=False) == ()  # without reading the bytes nobody can know


@pytest.mark.parametrize("checksum", ["verify", "ignore"])
def test_a_body_spoiled_on_its_way_up(plain_s3: FaultServer, monkeypatch: pytest.MonkeyPatch, checksum: str):
    """Bytes that change between memory and store: a store that checks CRC32C refuses the part and gets it again, whole; with one
    that does not check, the load finds it.
    """
    from dcp_s3._transfer.http import pool

    plain_s3.configure(checksum=checksum)
    spoiled = []
    plain = pool.PlainPool.put

    async def put(self: pool.PlainPool, address: Any, target: str, headers: Any, views: Any, progress: Any) -> Any:
        if not spoiled and sum(map(len, views)) > MIB:
            spoiled.append(1)
            wrong = bytearray(b"".join(views))
            wrong[1000] ^= 4
            views = [memoryview(wrong)]
        return await plain(self, address, target, headers, views, progress)

    monkeypatch.setattr(pool.PlainPool, "put", put)
    state = {"w": torch.arange(BIG, dtype=torch.float32)}
    assert _save(plain_s3, state) is None
    assert spoiled == [1]
    template = {"w": torch.zeros(BIG)}
    failed = _load(plain_s3, template)
    if checksum == "verify":
        assert failed is None
        assert torch.equal(template["w"], state["w"])
        assert _finds(plain_s3) == ()
    else:
        assert isinstance(failed, CorruptCheckpointError)
        assert len(_finds(plain_s3)) == 1


LATER: dict[str, Callable[[FaultServer, str], None]] = {
    "flip": lambda s3, key: s3.tamper(key, "flip", 100),
    "truncate": lambda s3, key: s3.tamper(key, "truncate", 100),
    "empty": lambda s3, key: s3.tamper(key, "lose"),
    "delete": lambda s3, key: s3.delete(key),
}


def test_verify_needs_no_torch(plain_s3: FaultServer):
    """The tool finds each damage of each kind of object that a committed checkpoint has, in a process that never imports torch."""
    state = {"w": torch.arange(BIG, dtype=torch.float32)}
    cases = {}
    for what in ("/data/", "index-", ".metadata"):
        for damage, spoil in LATER.items():
            if what == ".metadata" and damage in ("empty", "delete"):
                continue  # then there is no checkpoint
            path = f"run/{len(cases)}"
            assert _save(plain_s3, state, path) is None
            (key,) = [key for key in plain_s3.objects(path + "/") if what in key]
            spoil(plain_s3, key)
            cases[f"s3://bucket/{path}"] = f"{damage} {what}"
    assert _save(plain_s3, state, "run/whole") is None
    script = """
import sys
from dcp_s3 import S3Config, verify
config = S3Config(endpoint_url=sys.argv[1], access_key_id="A", secret_access_key="secret")
for url in sys.argv[2:]:
    print(len(verify(url, deep=True, config=config).problems))
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script, plain_s3.url, *cases, "s3://bucket/run/whole"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = dict(zip(cases.values(), map(int, done.stdout.split()), strict=False))
    assert len(counts) == 10
    assert all(counts.values()), counts
    assert done.stdout.split()[-1] == "0"


def _record(write_id: str | None, size: int) -> tuple[bytes, dict[str, str]]:
    return b"x" * size, {} if write_id is None else {WRITE_ID_FIELD: write_id}


@pytest.mark.parametrize(
    "there, expected",
    [
        (("ours", 40), True),
        (("ours", 39), "keeps 39 of its 40 bytes"),
        (("before", 40), "still has the one before"),
        (("later", 7), True),  # another writer has seen ours and replaced it
        ((None, 40), True),  # a store that keeps no metadata
        ((None, 7), False),  # another library's: whether it has replaced ours nobody knows
        (None, "has none"),
    ],
)
def test_a_committed_record_is_looked_at(
    plain_s3: FaultServer, there: tuple[str | None, int] | None, expected: bool | str
):
    """After the commit: ours or a later writer's lets the replaced checkpoint go; less, or the one before, is an error."""
    transfer = Transfer(plain_s3)
    if there is not None:
        body, metadata = _record(*there)
        transfer.store.put("k", body, content_type="application/octet-stream", metadata=metadata)
    observed = Observed('"etag"', "before")
    if isinstance(expected, bool):
        assert confirm(transfer.store, "k", 40, write_id="ours", observed=observed) is expected
    else:
        with pytest.raises(StorageError, match=expected) as raised:
            confirm(transfer.store, "k", 40, write_id="ours", observed=observed)
        assert raised.value.key == "k"


@pytest.mark.parametrize("status", [403, 503])
def test_a_committed_record_that_cannot_be_looked_at(
    plain_s3: FaultServer, caplog: pytest.LogCaptureFixture, status: int
):
    """An acknowledged commit stands where the store will not show it; what it replaced is then left to gc, and said so."""
    assert _save(plain_s3, {"w": torch.zeros(10)}) is None
    old = set(plain_s3.objects("run/")) - {"run/.metadata"}
    rule = plain_s3.on("HeadObject", error(status, body=""), key=r"/\.metadata$")
    assert _save(plain_s3, {"w": torch.ones(10)}) is None
    assert rule.fired
    assert "left to dcp-s3 gc" in caplog.text
    assert plain_s3.requests("DeleteObject") == []
    assert old < set(plain_s3.objects("run/"))
    template = {"w": torch.zeros(10)}
    assert _load(plain_s3, template) is None
    assert torch.equal(template["w"], torch.ones(10))
