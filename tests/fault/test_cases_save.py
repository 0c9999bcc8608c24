"""Field cases of whole saves and loads in one process: what is raised, what is left, what is held, what is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_s3 import (
    AccessDeniedError,
    CorruptCheckpointError,
    S3StorageReader,
    S3StorageWriter,
    StorageUnavailableError,
)
from dcp_s3._checkpoint.format.layout import parse_url
from dcp_s3._checkpoint.save import shard as shard_module
from dcp_s3._checkpoint.save.shard import ShardWriter
from dcp_s3._transfer.s3 import planes
from dcp_s3._transfer.upload import ObjectUpload
from tests.fault.conftest import Transfer, config_of
from tests.fault.server import FaultServer, FaultServerProcess, Handle, delay, error, flip_reply, flip_stored

MIB = 1 << 20
URL = "s3://bucket/run"
PART = 5 * MIB


def save(s3: Handle, state: dict[str, Any], planner: Any = None, **settings: Any) -> None:
    """Save a state dict in this process alone."""
    writer = S3StorageWriter(URL, config=config_of(s3, **settings))
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def load(s3: Handle, template: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Load into a template in this process alone."""
    dcp.load(template, storage_reader=S3StorageReader(URL, config=config_of(s3, **settings)), no_dist=True)
    return template


def failure_of(call: Callable[[], Any]) -> BaseException:
    """What DCP says that this process raised."""
    with pytest.raises(dcp.CheckpointException) as caught:
        call()
    error: BaseException = caught.value.failures[0][0]
    return error


def held() -> int:
    """Bytes of copies that the planes of this process hold."""
    return sum(plane.budget.held for plane in planes._planes.values())


class Planner(DefaultSavePlanner):
    """Raises where the third tensor is asked for, once ``ready`` has returned."""

    def __init__(self, failure: BaseException, ready: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.asked = 0
        self.failure = failure
        self.ready = ready

    def resolve_data(self, write_item: Any) -> Any:
        self.asked += 1
        if self.asked == 3:
            self.ready()
            raise self.failure
        return super().resolve_data(write_item)


class Odd(Exception):
    """The caller's own exception."""


def tensors(count: int = 5, *, mib: int = 6) -> dict[str, Any]:
    """Tensors of some MiB, each of another value."""
    return {f"t{n}": torch.full((mib * MIB // 4,), float(n)) for n in range(count)}


@pytest.mark.parametrize("strides", ["contiguous", "copied"])
def test_a_producer_that_raises(s3: FaultServer, strides: str):
    """The planner fails at tensor 3 of 5: its own exception is raised, the upload is aborted, no object is published."""
    failure = Odd("tensor 3 is not ready")
    state = tensors()
    if strides == "copied":
        state = {name: tensor.view(1024, -1).t() for name, tensor in state.items()}
    # without it a quick planner fails while the first client is made, and nothing is sent that could be aborted
    planner = Planner(failure, lambda: s3.wait_for("UploadPart", ended=False))
    raised = failure_of(lambda: save(s3, state, planner, part_bytes=PART))
    assert raised is failure
    s3.wait_for("AbortMultipartUpload")
    assert len(s3.requests("AbortMultipartUpload")) == 1
    assert s3.requests("CompleteMultipartUpload") == []
    assert [key for key in s3.objects() if "manifest" not in key] == []
    assert (s3.uploads(), held()) == ({}, 0)


def test_a_producer_that_raises_before_a_part_is_full(s3: FaultServer):
    """The same when nothing has been sent yet: nothing is sent."""
    failure = Odd("no")
    state = {f"t{n}": torch.ones(1000) for n in range(5)}
    assert failure_of(lambda: save(s3, state, Planner(failure))) is failure
    assert [r.operation for r in s3.log if "/data/" in r.key] == []
    assert held() == 0


def test_create_is_throttled_for_ever(s3: FaultServer):
    """CreateMultipartUpload answers SlowDown for ever: that is the error; no part, no object, no record."""
    s3.on("CreateMultipartUpload", error(503, "SlowDown"))
    raised = failure_of(lambda: save(s3, tensors(), part_bytes=PART))
    assert isinstance(raised, StorageUnavailableError)
    assert (raised.operation, raised.code, raised.rank) == ("CreateMultipartUpload", "SlowDown", 0)
    assert not {"UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload"} & {r.operation for r in s3.log}
    assert "run/.metadata" not in s3.objects()
    assert held() == 0


def test_nothing_reads_the_tensors_after_a_failed_save(s3: FaultServer):
    """When a save fails, every request that still carried the caller's memory has ended before the caller hears of it."""
    s3.on("UploadPart", error(403, "AccessDenied"), part=3)
    s3.on("UploadPart", delay(20), part=1)
    s3.on("UploadPart", delay(20), part=2)
    raised = failure_of(lambda: save(s3, tensors(), part_bytes=PART, read_timeout_s=30.0))
    returned = time.monotonic()
    assert isinstance(raised, AccessDeniedError)
    assert (raised.part, raised.status) == (3, 403)
    parts = s3.wait_for("UploadPart", count=len(s3.requests("UploadPart")))
    assert {1, 2, 3} <= {record.part for record in parts}
    assert max(record.t_end or 0.0 for record in parts) < returned + 1  # as soon as the server saw it


@pytest.mark.parametrize("strides", ["contiguous", "copied"])
def test_failed_saves_give_their_memory_back(plain_s3: FaultServer, strides: str):
    """Saves that fail at any part, in the planner, or at the deadline hold nothing; the next has the whole budget."""
    state = tensors(4)
    if strides == "copied":
        state = {name: tensor.view(1024, -1).t() for name, tensor in state.items()}
    settings: dict[str, Any] = {"part_bytes": PART, "memory_bytes": 32 * MIB, "max_concurrency": 2}
    for part in (1, 2, 3, 4):
        plain_s3.on("UploadPart", error(403, "AccessDenied"), part=part)
        raised = failure_of(lambda: save(plain_s3, state, **settings))
        assert isinstance(raised, AccessDeniedError)
        plain_s3.clear()
        assert held() == 0
    for failing in (
        lambda: save(plain_s3, state, Planner(Odd()), **settings),
        lambda: save(plain_s3, state, **settings, save_deadline_s=0.2),
    ):
        plain_s3.on("UploadPart", delay(0.2))
        failure_of(failing)
        plain_s3.clear()
        assert held() == 0
    save(plain_s3, state, **settings)
    assert held() == 0
    assert max(plane.budget.peak for plane in planes._planes.values()) <= 32 * MIB
    template = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    loaded = load(plain_s3, template)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_empty_things(s3: FaultServer):
    """A scalar and two empty tensors: one PUT each for data, manifest and record, and not one GET for what is empty."""
    state = {"s": torch.tensor(3.5), "e": torch.empty(0, 3), "z": torch.empty(0)}
    save(s3, state, conditional_commit="off")
    puts = [r.key.split("/")[1].split("-")[0] for r in s3.requests("PutObject")]
    assert puts == ["data", "manifest", ".metadata"]
    assert not [r for r in s3.log if r.operation in ("CreateMultipartUpload", "UploadPart")]
    s3.clear(state=False)
    loaded = load(s3, {"s": torch.tensor(0.0), "e": torch.ones(0, 3), "z": torch.ones(0)})
    assert loaded["s"].item() == 3.5
    assert (loaded["e"].shape, loaded["z"].shape) == ((0, 3), (0,))
    assert len([r for r in s3.requests("GetObject") if "/data/" in r.key]) == 1
    s3.clear(state=False)
    load(s3, {"e": torch.ones(0, 3), "z": torch.ones(0)})
    assert not [r for r in s3.requests("GetObject") if "/data/" in r.key]


def test_one_tensor_of_many(plain_s3: FaultServer):
    """Asking for one tensor of 100 reads that tensor's bytes, record and manifest, and nothing else."""
    save(plain_s3, {f"t{n}": torch.full((50_000,), float(n)) for n in range(100)})
    plain_s3.clear(state=False)
    loaded = load(plain_s3, {"t77": torch.zeros(50_000)})
    assert torch.equal(loaded["t77"], torch.full((50_000,), 77.0))
    data = [r for r in plain_s3.requests("GetObject") if "/data/" in r.key]
    assert sum(r.reply_bytes for r in data) == 200_000
    assert len(plain_s3.log) == 3


def test_damage_on_the_way(s3: FaultServer):
    """A bit that flips on the way to us, once, is noticed by its CRC and the range is read again."""
    state = tensors(2)
    save(s3, state)
    s3.on("GetObject", flip_reply(1_000_000), key="/data/", nth=1)
    loaded = load(s3, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_damage_in_the_store(s3: FaultServer):
    """A bit that flips in the store behind a good answer is an error that names tensor, object and place."""
    s3.on("UploadPart", flip_stored(4_000_000), part=2)
    save(s3, tensors(2), part_bytes=PART)
    raised = failure_of(lambda: load(s3, {"t1": torch.zeros(6 * MIB // 4)}))
    assert isinstance(raised, CorruptCheckpointError)
    assert "t1 in s3://bucket/run is damaged" in str(raised)
    assert raised.key is not None
    assert "/data/" in raised.key
    assert torch.equal(load(s3, {"t0": torch.ones(6 * MIB // 4)})["t0"], torch.zeros(6 * MIB // 4))


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.fixture
def slow_store() -> Iterator[FaultServerProcess]:
    """A store in another process that takes 20 ms for a request and keeps no bytes of data objects."""
    with FaultServerProcess(latency_s=0.02, discard_bodies="/data/") as server:
        yield server


class Resident:
    """Samples this process's resident memory while it is open."""

    def __enter__(self) -> Self:
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self.extra = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.extra = max(self.extra, self._process.memory_info().rss - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


ROW = torch.arange(MIB)  # 8 MiB


@pytest.mark.parametrize(
    "state, memory_mib",
    [
        ({f"t{n}": ROW.view(1024, 1024).t() for n in range(64)}, 64),
        ({"one": ROW.expand(32, MIB)}, 64),
        ({"wide": ROW.view(2, -1).t().expand(32, MIB // 2, 2)[:, :, 0]}, 32),
    ],
    ids=["64-of-8-MiB", "one-of-256-MiB", "one-of-128-MiB"],
)
def test_memory_is_bounded(slow_store: FaultServerProcess, state: dict[str, Any], memory_mib: int):
    """Tensors that must be copied, many or one, never take more than memory_bytes, on a store slower than memory."""
    settings: dict[str, Any] = {
        "part_bytes": 8 * MIB,
        "max_concurrency": 4,
        "memory_bytes": memory_mib * MIB,
        "conditional_commit": "off",
        "read_timeout_s": 30.0,
    }
    warm = {"w": torch.ones(6 * MIB // 4).view(1024, -1).t()}
    save(slow_store, warm, **settings)
    with Resident() as resident:
        save(slow_store, state, **settings)
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert sum(r.wire_bytes for r in slow_store.requests("UploadPart")) >= total
    (plane,) = planes._planes.values()
    assert plane.budget.peak <= memory_mib * MIB
    assert plane.budget.held == 0
    # one slice is copied while its bytes are reserved already, and glibc keeps some of what was freed
    assert resident.extra < (memory_mib + 64) * MIB < total + 64 * MIB


def test_contiguous_tensors_are_not_copied(slow_store: FaultServerProcess):
    """256 MiB of contiguous memory pass without a copy: the budget holds slabs of heads and tails, nothing else."""
    state = {f"t{n}": torch.ones(16 * MIB // 4) for n in range(4)}
    settings: dict[str, Any] = {"part_bytes": 8 * MIB, "conditional_commit": "off", "read_timeout_s": 30.0}
    save(slow_store, {"w": torch.ones(10)}, **settings)
    with Resident() as resident:
        save(slow_store, state, **settings)
    (plane,) = planes._planes.values()
    assert plane.budget.peak <= 5 * MIB
    assert resident.extra < 48 * MIB


def test_two_saves_at_once_share_the_budget(slow_store: FaultServerProcess):
    """Two writers of one process at the same time stay within one memory_bytes together."""
    config = config_of(
        slow_store,
        part_bytes=8 * MIB,
        memory_bytes=48 * MIB,
        max_concurrency=4,
        conditional_commit="off",
        read_timeout_s=30.0,
    )
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            state = {f"t{n}": ROW.view(1024, 1024).t() for n in range(8)}
            dcp.save(state, storage_writer=S3StorageWriter(f"{URL}/{name}", config=config), no_dist=True)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    (plane,) = planes._planes.values()
    assert (plane.budget.peak <= 48 * MIB, plane.budget.held) == (True, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Objects of a shard


def test_a_shard_that_does_not_fit_one_object(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
):
    """A shard larger than an object's parts goes on in a further object; each record lies whole in one of them."""
    monkeypatch.setattr(
        shard_module, "ObjectUpload", lambda *args, **options: ObjectUpload(*args, **options, max_parts=5)
    )
    transfer = transfer_to(plain_s3)
    shard = ShardWriter(transfer.plane, transfer.job, parse_url(URL), "a" * 16, 0, part_bytes=100_000)
    values = {n: torch.full((40_000,), float(n)) for n in range(7)}
    infos = {n: shard.write_tensor(tensor) for n, tensor in values.items()}
    receipts = shard.finish()
    assert [r.size for r in receipts] == [
        sum(i.length for i in infos.values() if r.key.endswith(i.relative_path)) for r in receipts
    ]
    assert len(receipts) == 3
    for n, info in infos.items():
        stored = plain_s3.read(f"run/{info.relative_path}")
        assert len(stored) <= 500_000
        start = info.offset + info.__dict__["raw_offset"]
        raw = torch.frombuffer(bytearray(stored[start : start + 160_000]), dtype=torch.float32)
        assert torch.equal(raw, values[n])
    assert transfer.plane.budget.held == 0


def test_a_shard_that_is_aborted_holds_nothing(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Abort gives back what was reserved at any point: small records, copies, a record half written."""
    transfer = transfer_to(plain_s3)
    for count in range(1, 6):
        shard = ShardWriter(transfer.plane, transfer.job, parse_url(URL), f"{count:016x}", 0, part_bytes=1_000_000)
        things = [
            torch.ones(10),
            torch.ones(600, 600).t(),
            torch.ones(300_000),
            torch.ones(10),
            torch.ones(900, 900).t(),
        ]
        for tensor in things[:count]:
            shard.write_tensor(tensor)
        assert transfer.plane.budget.held > 0 or count == 3
        shard.abort()
        shard.abort()
        assert transfer.plane.budget.held == 0
    assert (plain_s3.objects(), plain_s3.uploads()) == ({}, {})
