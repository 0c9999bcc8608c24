"""Garbage collection beside a save that runs, is paused, or slept past its deadline."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from botocore.exceptions import ReadTimeoutError
from botocore.httpsession import URLLib3Session

from dcp_s3 import (
    DcpS3Error,
    DeadlineExceededError,
    S3StorageReader,
    S3StorageWriter,
    StorageUnavailableError,
    collect_garbage,
)
from dcp_s3._checkpoint.care.garbage import SLACK_S, GarbageReport
from dcp_s3._transfer.limits import retry
from tests.fault.conftest import config_of
from tests.fault.server import FaultServer

URL = "s3://bucket/run"
MIB = 1 << 20
PART = 5 * MIB
DEADLINE_S = 60.0
MARGIN_S = DEADLINE_S + SLACK_S
"""The least that is allowed beside a running writer."""

PAUSES: dict[str, dict[str, Any]] = {
    "a-part": {"operation": "UploadPart", "part": 2},
    "before-complete": {"operation": "CompleteMultipartUpload"},
    "behind-complete": {"operation": "CompleteMultipartUpload", "at": "reply"},
    "behind-the-index": {"operation": "PutObject", "key": "index-", "at": "reply", "nth": 5},
    "the-record": {"operation": "PutObject", "key": r"\.metadata$"},
}
"""Where a save sleeps. The index is put behind four probes of the store's conditions under the same key."""


def state_of(value: int) -> dict[str, torch.Tensor]:
    """Two tensors, an upload of two parts."""
    return {f"t{n}": torch.full((3 * MIB // 4,), value + n, dtype=torch.int32) for n in range(2)}


def save(s3: FaultServer, value: int) -> BaseException | None:
    """Save, and return what was raised in the writer."""
    config = config_of(s3, part_bytes=PART, save_deadline_s=DEADLINE_S, read_timeout_s=20.0)
    try:
        dcp.save(state_of(value), storage_writer=S3StorageWriter(URL, config=config), no_dist=True)
    except dcp.CheckpointException as error:
        failure: BaseException = error.failures[0][0]
        return failure
    return None


def load(s3: FaultServer) -> int:
    """Load, and return which save it is of."""
    template = {f"t{n}": torch.zeros(3 * MIB // 4, dtype=torch.int32) for n in range(2)}
    dcp.load(template, storage_reader=S3StorageReader(URL, config=config_of(s3)), no_dist=True)
    value = int(template["t0"][0])
    assert all(torch.equal(template[name], tensor) for name, tensor in state_of(value).items())
    return value


def collect(s3: FaultServer, margin_s: float = MARGIN_S, **options: Any) -> GarbageReport:
    """Collect garbage with the least margin."""
    config = config_of(s3, save_deadline_s=DEADLINE_S)
    return collect_garbage(URL, older_than_s=margin_s, dry_run=False, config=config, **options)


@pytest.mark.parametrize("pause", PAUSES)
def test_a_paused_save_within_the_margin(plain_s3: FaultServer, pause: str):
    """What a save that can still commit has written is not collected, nor is its upload aborted; it commits and loads."""
    assert save(plain_s3, 10) is None
    gate = plain_s3.hold(**PAUSES[pause])
    if pause == "behind-the-index":  # this process knows the store's conditions by now: no probe
        plain_s3.clear(log=False, state=False)
        gate = plain_s3.hold(**{**PAUSES[pause], "nth": 1})
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, plain_s3, 20)
        try:
            gate.wait_arrived()
            before = (set(plain_s3.objects()), set(plain_s3.uploads()))
            for age_s in (0.0, MARGIN_S - 5):  # by the store's clock
                plain_s3.configure(clock_offset_s=age_s)
                report = collect(plain_s3)
                assert (report.removed, report.aborted, report.skipped) == ((), (), ())
            assert (set(plain_s3.objects()), set(plain_s3.uploads())) == before
        finally:
            gate.release()
        assert saving.result(30) is None
    assert load(plain_s3) == 20


@pytest.mark.parametrize("pause", [name for name in PAUSES if name != "the-record"])
def test_a_save_that_slept_past_its_deadline(
    plain_s3: FaultServer, monkeypatch: pytest.MonkeyPatch, allowed: set[str], pause: str
):
    """Past the margin its objects are collected; when it wakes it commits nothing, says so, and the old checkpoint stays."""
    allowed.add("parts-in-flight")  # the collector aborts the upload whose part sleeps
    assert save(plain_s3, 10) is None
    plain_s3.clear(state=False)
    gate = plain_s3.hold(**{**PAUSES[pause], **({"nth": 1} if pause == "behind-the-index" else {})})
    now = retry._now
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, plain_s3, 20)
        try:
            gate.wait_arrived()
            monkeypatch.setattr(retry, "_now", lambda: now() + MARGIN_S + 60)
            plain_s3.configure(clock_offset_s=MARGIN_S + 60)
            report = collect(plain_s3)
            assert len(report.removed) == {"behind-complete": 1, "behind-the-index": 2}.get(pause, 0)
            assert len(report.aborted) == (0 if report.removed else 1)
            assert report.live == 2
        finally:
            gate.release()
        raised = saving.result(30)
    assert isinstance(raised, DcpS3Error)
    if pause.startswith("behind"):
        assert isinstance(raised, DeadlineExceededError)
    assert not plain_s3.requests("PutObject", key=r"\.metadata$")
    assert load(plain_s3) == 10
    plain_s3.configure(clock_offset_s=2 * MARGIN_S + 120)
    collect(plain_s3, 0.0, no_writer_runs=True)
    assert load(plain_s3) == 10
    assert len(plain_s3.objects()) == 3
    assert plain_s3.uploads() == {}


def test_a_record_that_is_delayed_on_its_way(plain_s3: FaultServer, monkeypatch: pytest.MonkeyPatch):
    """A PUT of the record that the network delivers when its save is over and its objects have been collected is refused by a store
    that takes no signature older than 900 s: the old checkpoint stays, and loads.
    """
    assert save(plain_s3, 10) is None
    on_their_way: list[tuple[URLLib3Session, Any]] = []
    send, now = URLLib3Session.send, retry._now

    def delayed(session: URLLib3Session, request: Any) -> Any:
        if request.method != "PUT" or not request.url.endswith("/.metadata"):
            return send(session, request)
        on_their_way.append((session, request))
        monkeypatch.setattr(retry, "_now", lambda: now() + MARGIN_S + 60)
        raise ReadTimeoutError(endpoint_url=request.url)

    monkeypatch.setattr(URLLib3Session, "send", delayed)
    raised = save(plain_s3, 20)
    assert isinstance(raised, StorageUnavailableError)
    assert "commit outcome unknown" in str(raised)
    plain_s3.configure(clock_offset_s=MARGIN_S + 60)
    assert len(collect(plain_s3).removed) == 2
    plain_s3.configure(max_request_age_s=SLACK_S)
    (answer,) = [send(session, request) for session, request in on_their_way]
    plain_s3.configure(max_request_age_s=None)  # this process's clock stands where it did
    assert (answer.status_code, b"RequestTimeTooSkewed" in answer.content) == (403, True)
    assert load(plain_s3) == 10
    assert len(plain_s3.objects()) == 3


@pytest.mark.parametrize("when", ["listed", "read"])
def test_a_save_that_commits_beside_a_collection(plain_s3: FaultServer, when: str):
    """A collection that sleeps between its steps while a save replaces the checkpoint takes nothing of the new one."""
    assert save(plain_s3, 10) is None
    plain_s3.put("run/data/00000000000000aa/__0_0.distcp", b"of a save that failed", age_s=2 * MARGIN_S)
    operation, key = ("ListObjectsV2", None) if when == "listed" else ("GetObject", "index-")
    gate = plain_s3.hold(operation, at="reply", nth=1, **({} if key is None else {"key": key}))
    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(collect, plain_s3)
        try:
            gate.wait_arrived()
            plain_s3.clear(rules=False, state=False)
            assert save(plain_s3, 20) is None
        finally:
            gate.release()
        report = collecting.result(30)
    assert load(plain_s3) == 20
    assert set(report.removed) <= {"run/data/00000000000000aa/__0_0.distcp"}
    assert len(report.removed) + len(report.skipped) == 1
    plain_s3.configure(clock_offset_s=MARGIN_S + 60)
    collect(plain_s3)
    assert load(plain_s3) == 20
    assert len(plain_s3.objects()) == 3
