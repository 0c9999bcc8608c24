"""A store that goes on refusing in the middle of a save: how often it is asked, and what it keeps of the save."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import RetryPolicy, S3StorageReader, S3StorageWriter, StorageUnavailableError
from dcp_s3._transfer.limits import retry
from dcp_s3._transfer.s3 import probe
from tests.fault.conftest import config_of, failure_of
from tests.fault.server import FaultServer, error

MIB = 1 << 20
PART = 5 * MIB
WRITES = ("PutObject", "UploadPart")
RECORD = r"\.metadata$"


def state_of(value: float, mib: int) -> dict[str, torch.Tensor]:
    """Four tensors of some MiB, each of another value."""
    return {f"t{n}": torch.full((mib * MIB // 4,), value + n) for n in range(4)}


def save(s3: FaultServer, state: dict[str, Any], **settings: Any) -> BaseException | None:
    """Save, and return what was raised in the writer."""
    writer = S3StorageWriter("s3://bucket/run", config=config_of(s3, part_bytes=PART, **settings))
    return failure_of(lambda: dcp.save(state, storage_writer=writer, no_dist=True))


def load(s3: FaultServer, mib: int) -> dict[str, torch.Tensor]:
    """Load all tensors."""
    template = state_of(-1.0, mib)
    dcp.load(template, storage_reader=S3StorageReader("s3://bucket/run", config=config_of(s3)), no_dist=True)
    return template


@pytest.mark.parametrize("at", ["handle", "reply"])
@pytest.mark.parametrize("mib", [1, 4])
def test_an_overwrite_that_fails_from_any_write_on(plain_s3: FaultServer, mib: int, at: Literal["handle", "reply"]):
    """From its k-th PutObject or UploadPart on, for every k, an overwrite hears 503, done or not: the old values load, all of them;
    only if the record itself was written, all the new ones.
    """
    old, new = state_of(100.0, mib), state_of(200.0, mib)
    assert save(plain_s3, old) is None
    plain_s3.clear(state=False)
    probe._known.clear()
    assert save(plain_s3, new) is None
    count = len(plain_s3.requests(WRITES))
    data = 1 if mib == 1 else 4  # one PUT, or parts
    assert count == data + 4 + 2  # the probe of the store's conditions, index, record
    for k in range(1, count + 1):
        plain_s3.clear()
        assert save(plain_s3, old) is None
        plain_s3.clear(state=False)
        probe._known.clear()
        plain_s3.on(WRITES, error(503, "SlowDown", at=at), since=k)
        with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
            saving = pool.submit(save, plain_s3, new)
            if k == count and at == "handle":  # the record's PUT is repeated until the deadline
                plain_s3.wait_for("PutObject", key=RECORD)
                now = retry._now
                patch.setattr(retry, "_now", lambda now=now: now() + 3600)
            failed = saving.result(30)
        committed = k == count and at == "reply"
        assert isinstance(failed, type(None) if committed else StorageUnavailableError), (k, failed)
        assert len(plain_s3.requests(WRITES, status=503)) >= 1
        plain_s3.clear(log=False, state=False)
        loaded, expected = load(plain_s3, mib), new if committed else old
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()), k
        assert plain_s3.uploads() == {}


ATTEMPTS = RetryPolicy(max_attempts=3, initial_wait_s=0.001, max_wait_s=0.002)


@pytest.fixture
def known(plain_s3: FaultServer) -> FaultServer:
    """A store whose conditions this process knows, with an empty log and nothing in it."""
    assert save(plain_s3, {"w": torch.ones(4)}, retry=ATTEMPTS) is None
    plain_s3.clear()
    return plain_s3


def test_a_store_that_refuses_everything(known: FaultServer):
    """A save of any number of parts sends its first request max_attempts times, and no other."""
    known.on("*", error(503, "SlowDown"))
    failed = save(known, state_of(1.0, 4), retry=ATTEMPTS)
    assert isinstance(failed, StorageUnavailableError)
    assert failed.attempts == 3
    assert [record.operation for record in known.log] == ["GetObject"] * 3


@pytest.mark.parametrize("concurrency", [1, 16])
def test_a_store_that_refuses_every_part(known: FaultServer, concurrency: int):
    """The first of N parts that was sent max_attempts times ends the save: no more than N x max_attempts UploadParts, one Abort."""
    known.on("UploadPart", error(503, "SlowDown"))
    failed = save(known, state_of(1.0, 5), retry=ATTEMPTS, max_concurrency=concurrency)
    assert isinstance(failed, StorageUnavailableError)
    assert (failed.operation, failed.attempts) == ("UploadPart", 3)
    sent = [len(known.requests("UploadPart", part=part)) for part in range(1, 6)]
    assert max(sent) == sent[(failed.part or 0) - 1] == 3
    others = [record.operation for record in known.log if record.operation != "UploadPart"]
    assert others == ["GetObject", "HeadObject", "CreateMultipartUpload", "AbortMultipartUpload"]
    assert len(known.log) == sum(sent) + 4


def test_a_store_that_refuses_each_part_until_the_last_attempt(known: FaultServer):
    """A save of N parts, each refused max_attempts - 1 times, sends N x max_attempts UploadParts and 9 requests more, and commits."""
    for part in range(1, 6):
        known.on("UploadPart", error(503, "SlowDown"), part=part, times=2)
    state = state_of(1.0, 5)
    assert save(known, state, retry=ATTEMPTS) is None
    assert [len(known.requests("UploadPart", part=part)) for part in range(1, 6)] == [3] * 5
    assert len(known.log) == 5 * 3 + 9
    loaded = load(known, 5)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
