"""Answers that are lost at any step of a save, on stores of every habit: what was done is found out, and nothing is lost."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CheckpointNotFoundError, S3StorageReader, S3StorageWriter, StorageUnavailableError, collect_garbage
from dcp_s3._checkpoint.care.garbage import SLACK_S, GarbageReport
from dcp_s3._transfer.s3 import probe
from tests.fault.conftest import config_of
from tests.fault.crash_job import FULL
from tests.fault.server import Action, FaultServer, GateHandle, drop_reply, error

URL = "s3://bucket/run"
MIB = 1 << 20
DEADLINE_S = 60.0
RECORD = r"run/\.metadata$"

HOW: dict[str, Action] = {
    "closed": drop_reply("close"),
    "reset": drop_reply("reset"),
    "500": error(500, "InternalError", at="reply"),
}
STEPS: dict[str, dict[str, Any]] = {
    "create": {"operation": "CreateMultipartUpload"},
    "part": {"operation": "UploadPart", "part": 2},
    "complete": {"operation": "CompleteMultipartUpload"},
    "head": {"operation": "HeadObject", "key": "/data/"},
    "probe": {"operation": "PutObject", "key": "/index-", "nth": 2},
    "index": {"operation": "PutObject", "key": "/index-"},
    "record": {"operation": "PutObject", "key": RECORD},
}
PROBES = {"honour": 4, "refuse": 3, "ignore": 3}
"""How many PUTs the probe takes on a store that honours, refuses (501), or ignores conditional headers."""

Case = tuple[str, str, str, int]
LOST: list[Case] = [
    (step, how, conditions, again)
    for step, how, conditions, again in itertools.product(STEPS, HOW, PROBES, (200, 404, 500))
    if step == "complete" or (FULL and again == 200)
]
if not FULL:  # each other step under each kind of condition, the ways to lose a reply in turn
    others = itertools.product((step for step in STEPS if step != "complete"), PROBES)
    LOST += [
        (step, how, conditions, 200) for (step, conditions), how in zip(others, itertools.cycle(HOW), strict=False)
    ]


def state_of(value: int) -> dict[str, torch.Tensor]:
    """Two tensors, an upload of two parts."""
    return {f"t{n}": torch.full((3 * MIB // 4,), value + n, dtype=torch.int32) for n in range(2)}


def save(s3: FaultServer, value: int, **settings: Any) -> BaseException | None:
    """Save, and return what was raised in the writer."""
    config = config_of(s3, **{"part_bytes": 5 * MIB, "save_deadline_s": DEADLINE_S, "read_timeout_s": 10.0} | settings)
    try:
        dcp.save(state_of(value), storage_writer=S3StorageWriter(URL, config=config), no_dist=True)
    except dcp.CheckpointException as raised:
        failure: BaseException = raised.failures[0][0]
        return failure
    return None


def load(s3: FaultServer) -> int | None:
    """Load, and return which save it is of; None if there is no checkpoint."""
    reader = S3StorageReader(URL, config=config_of(s3))
    try:
        reader.read_metadata()
    except CheckpointNotFoundError:
        return None
    template = {f"t{n}": torch.zeros(3 * MIB // 4, dtype=torch.int32) for n in range(2)}
    dcp.load(template, storage_reader=reader, no_dist=True)
    value = int(template["t0"][0])
    assert all(torch.equal(template[name], tensor) for name, tensor in state_of(value).items())
    return value


def collect(s3: FaultServer, *, age_s: float, margin_s: float = DEADLINE_S + SLACK_S) -> GarbageReport:
    """Collect garbage when what is there is `age_s` seconds old by the store's clock."""
    s3.configure(clock_offset_s=age_s)
    config = config_of(s3, save_deadline_s=DEADLINE_S)
    return collect_garbage(URL, older_than_s=margin_s, dry_run=False, config=config)


def assert_nothing_else(s3: FaultServer, age_s: float = 2000.0) -> None:
    """After a garbage collection past the margin the bucket holds a record, its index, its data object, no upload."""
    collect(s3, age_s=age_s)
    kinds = sorted(key.split("/")[1].split("-")[0] for key in s3.objects())
    assert kinds == [".metadata", "data", "index"]
    assert s3.uploads() == {}


def land(s3: FaultServer, gate: GateHandle) -> list[bool]:
    """Let the held PUTs of the record arrive; return which PUTs of it have been done, in the order of their sending."""
    gate.release()
    deadline = time.monotonic() + 20
    while any(record.t_done is None for record in s3.requests("PutObject", key=RECORD)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [record.done for record in s3.requests("PutObject", key=RECORD)]


@pytest.mark.parametrize("step, how, conditions, again", LOST)
def test_a_lost_reply(plain_s3: FaultServer, step: str, how: str, conditions: str, again: int):
    """The request was done and its reply is lost: the save succeeds, loads bit for bit, and leaves nothing that gc cannot take."""
    plain_s3.configure(conditional_put=conditions, conditional_complete=conditions, complete_again=again)
    assert save(plain_s3, 10) is None
    probe._known.clear()
    match = STEPS[step] | ({"nth": PROBES[conditions] + 1} if step == "index" else {})
    rule = plain_s3.on(action=HOW[how], **({"nth": 1} | match))
    assert save(plain_s3, 20) is None
    assert rule.fired == 1
    if step != "create":
        assert plain_s3.uploads() == {}
    assert load(plain_s3) == 20
    assert_nothing_else(plain_s3)
    assert load(plain_s3) == 20


@pytest.mark.parametrize("there", ["new", "replacing"])
def test_a_record_that_lands_after_the_save_has_failed(plain_s3: FaultServer, there: str):
    """503 to every PUT of the record until the deadline: "outcome unknown", nothing is deleted, and what lands later is whole."""
    assert save(plain_s3, 10) is None  # connections are open, the conditions known, before the short deadline
    plain_s3.clear(state=there == "new")
    old = None if there == "new" else 10
    gate = plain_s3.hold("PutObject", key=RECORD, at="late", then=error(503, "SlowDown"))
    raised = save(plain_s3, 20, save_deadline_s=3.0)
    assert type(raised) is StorageUnavailableError
    assert "commit outcome unknown" in str(raised)
    assert raised.attempts is not None
    assert raised.attempts > 1
    assert (raised.operation, raised.key) == ("PutObject", "run/.metadata")
    assert load(plain_s3) == old
    report = collect(plain_s3, age_s=DEADLINE_S + SLACK_S - 10)
    assert (report.removed, report.aborted) == ((), ())
    assert not plain_s3.requests("DeleteObject")
    assert land(plain_s3, gate).count(True) == 1  # the others are identical, and meet the first
    assert load(plain_s3) == 20
    assert_nothing_else(plain_s3, 4000.0)
    assert load(plain_s3) == 20


def arrived(s3: FaultServer, failed: StorageUnavailableError) -> None:
    """Wait until the last try has come, which its save did not wait for: past the gate it would commit; 2 s at most."""
    end = time.monotonic() + 2
    while len(s3.requests("PutObject", key=RECORD)) < (failed.attempts or 0) and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("there", ["new", "replacing"])
def test_a_record_that_lands_behind_another_commit(plain_s3: FaultServer, there: str):
    """A PUT of unknown outcome that arrives after another writer's commit changes nothing: its condition holds no more."""
    assert save(plain_s3, 10) is None
    plain_s3.clear(state=there == "new")
    gate = plain_s3.hold("PutObject", key=RECORD, at="late", then=error(503, "SlowDown"))
    failed = save(plain_s3, 20, save_deadline_s=3.0)
    assert isinstance(failed, StorageUnavailableError)
    arrived(plain_s3, failed)
    gate.remove()  # the next writer is not held; what is at the gate stays there
    assert save(plain_s3, 30) is None
    *late, last = land(plain_s3, gate)
    assert last
    assert late
    assert not any(late)
    assert load(plain_s3) == 30
    assert_nothing_else(plain_s3)
    assert load(plain_s3) == 30
