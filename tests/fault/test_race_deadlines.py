"""A collector that knows nothing of the writers' deadline, beside a save that may take longer than its margin."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter, StorageError, abort_stale_uploads, collect_garbage
from dcp_s3._checkpoint import group_deadline
from dcp_s3._checkpoint.care.garbage import SLACK_S, GarbageReport
from dcp_s3._checkpoint.save import commit as commit_module
from dcp_s3._transfer.limits import retry
from dcp_s3._transfer.s3 import data_plane as data_plane_module
from tests.fault.conftest import config_of, failure_of
from tests.fault.server import FaultServer, GateHandle, error
from tests.fault.test_race_collector import PART, URL, load, state_of

GROUP_S = 7200.0
"""Time-out of the writers' process group: their saves have 6,480 s."""
SAVE_S = 0.9 * GROUP_S
HOUR_S = 3600.0
"""What the collector is told, which is more than it asks for without being told of the group: 2,400 s."""


@pytest.fixture(autouse=True)
def in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saves run in a process group with a time-out of two hours; the collector does not."""
    monkeypatch.setattr(group_deadline, "_group_timeout_s", lambda: GROUP_S)


def save(s3: FaultServer, value: int) -> BaseException | None:
    """Save, and return what was raised in the writer."""
    writer = S3StorageWriter(URL, config=config_of(s3, part_bytes=PART))
    return failure_of(lambda: dcp.save(state_of(value), storage_writer=writer, no_dist=True))


def collect(s3: FaultServer, **options: Any) -> GarbageReport:
    """`dcp-s3 gc --older-than 1h --delete`, with nothing configured."""
    return collect_garbage(URL, **{"older_than_s": HOUR_S, "dry_run": False, "config": config_of(s3), **options})


class Clock:
    """Moves the time of the machine (suspended time counts) and of the store."""

    def __init__(self, s3: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._s3 = s3
        self._offset_s = 0.0
        now = retry._now
        monkeypatch.setattr(retry, "_now", lambda: now() + self._offset_s)

    def at(self, seconds: float) -> None:
        self._offset_s = seconds
        self._s3.configure(clock_offset_s=seconds)


@pytest.fixture
def clock(plain_s3: FaultServer, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of both sides."""
    return Clock(plain_s3, monkeypatch)


def held(s3: FaultServer, pause: str) -> GateHandle:
    """Stop the next save, whose process knows the store's conditions, at a request."""
    s3.clear(state=False)
    if pause == "behind the data":
        return s3.hold("CompleteMultipartUpload", at="reply")
    return s3.hold("HeadObject", key="index-", at="reply", nth=1)


def begun(pool: ThreadPoolExecutor, s3: FaultServer, value: int, gate: GateHandle) -> Future[BaseException | None]:
    """Begin a save and wait until it stands at the gate."""
    saving = pool.submit(save, s3, value)
    gate.wait_arrived()
    return saving


@pytest.mark.parametrize("pause", ["behind the data", "behind the index"])
def test_what_a_save_may_need_is_known_to_the_collector(plain_s3: FaultServer, clock: Clock, pause: str) -> None:
    """Objects of a save that may take 6,480 s are left alone until it is over, by whatever smaller margin; it commits."""
    assert save(plain_s3, 10) is None
    gate = held(plain_s3, pause)
    with ThreadPoolExecutor(1) as pool:
        saving = begun(pool, plain_s3, 20, gate)
        try:
            wanted = 1 if pause == "behind the data" else 2
            for age_s in (HOUR_S + 60, SAVE_S - 60):
                clock.at(age_s)
                for dry_run in (True, False):
                    report = collect(plain_s3, dry_run=dry_run)
                    assert (report.removed, report.waiting, report.live) == ((), wanted, 2)
                    assert "7380 s" in report.notes[-1]
        finally:
            gate.release()
        assert saving.result(30) is None
    assert load(plain_s3) == 20


def test_when_its_save_is_over_it_goes(plain_s3: FaultServer, clock: Clock) -> None:
    """Past the deadline and the slack what the save wrote is garbage; where no writer runs, already past the margin."""
    assert save(plain_s3, 10) is None
    plain_s3.clear(state=False)
    plain_s3.on("PutObject", error(403, "AccessDenied"), key=r"\.metadata$")
    assert save(plain_s3, 20) is not None
    clock.at(SAVE_S + SLACK_S - 60)
    assert collect(plain_s3).removed == ()
    assert len(collect(plain_s3, no_writer_runs=True, dry_run=True).removed) == 2
    clock.at(SAVE_S + SLACK_S + 60)
    report = collect(plain_s3)
    assert (len(report.removed), report.waiting, report.notes) == (2, 0, ())
    assert load(plain_s3) == 10


@pytest.mark.parametrize("lost", ["data", "index"])
def test_a_save_that_lost_its_objects(
    plain_s3: FaultServer, clock: Clock, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """On a store that keeps no user metadata the margin stands. The save finds its objects gone, fails, and the old one stays."""
    assert save(plain_s3, 10) is None
    for module in (data_plane_module, commit_module):
        monkeypatch.setattr(module, "save_metadata", lambda _: {})
    gate = held(plain_s3, "behind the index")
    with ThreadPoolExecutor(1) as pool:
        saving = begun(pool, plain_s3, 20, gate)
        try:
            clock.at(HOUR_S + 60)
            if lost == "data":
                assert len(collect(plain_s3).removed) == 2
            else:
                (index,) = [key for key in plain_s3.objects() if "index-" in key and key not in live(plain_s3)]
                plain_s3.delete(index)
        finally:
            gate.release()
        raised = saving.result(30)
    assert isinstance(raised, StorageError)
    assert f"{2 if lost == 'data' else 1} of the 2 objects that this save wrote are gone" in str(raised)
    assert "6480 s plus 900 s" in str(raised)
    assert not plain_s3.requests("PutObject", key=r"\.metadata$")
    assert load(plain_s3) == 10


def test_it_looks_again_before_each_try(plain_s3: FaultServer, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is refused for an hour is not committed at last over objects that were collected meanwhile."""
    assert save(plain_s3, 10) is None
    for module in (data_plane_module, commit_module):
        monkeypatch.setattr(module, "save_metadata", lambda _: {})
    plain_s3.clear(state=False)
    gate = plain_s3.hold("PutObject", key=r"\.metadata$", then=error(503, "SlowDown"), nth=1)
    with ThreadPoolExecutor(1) as pool:
        saving = begun(pool, plain_s3, 20, gate)
        try:
            clock.at(HOUR_S + 60)
            assert len(collect(plain_s3).removed) == 2
        finally:
            gate.release()
        raised = saving.result(30)
    assert "are gone or changed" in str(raised)
    assert len(plain_s3.requests("PutObject", key=r"\.metadata$")) == 1
    assert load(plain_s3) == 10


def test_a_save_of_usual_length_does_not_look(plain_s3: FaultServer, clock: Clock) -> None:
    """Within the slack no collector may take anything: no request more than ever. Behind it, one HEAD for each object."""
    assert save(plain_s3, 10) is None
    counts = []
    for age_s in (SLACK_S - 60, SLACK_S + 60):
        clock.at(0)
        gate = held(plain_s3, "behind the index")
        plain_s3.clear(rules=False, state=False)
        with ThreadPoolExecutor(1) as pool:
            saving = begun(pool, plain_s3, 20, gate)
            clock.at(age_s)
            gate.release()
            assert saving.result(30) is None
        heads = [record.key for record in plain_s3.requests("HeadObject")]
        assert heads.count("run/__0.metadata") == 1  # before the first byte: a record of the other kind
        counts.append(len(heads) - 1)
    assert counts == [3, 5]


def live(s3: FaultServer) -> set[str]:
    """Keys that a collection calls live: all but those of the save that runs."""
    removed = collect(s3, older_than_s=0.0, no_writer_runs=True, dry_run=True).removed
    return set(s3.objects()) - set(removed)


def test_an_upload_waits_as_long_as_its_neighbours_tell(plain_s3: FaultServer, clock: Clock, allowed: set[str]) -> None:
    """The user metadata of an open upload cannot be read; that of objects at its URL can."""
    allowed.add("open-upload")
    assert save(plain_s3, 10) is None
    plain_s3.clear(state=False)
    gate = plain_s3.hold("UploadPart", part=2)
    with ThreadPoolExecutor(1) as pool:
        saving = begun(pool, plain_s3, 20, gate)
        try:
            clock.at(HOUR_S + 60)
            report = collect(plain_s3)
            assert (report.removed, report.aborted) == ((), ())
            assert "7380 s" in report.notes[-1]
            alone = abort_stale_uploads(URL, older_than_s=HOUR_S, config=config_of(plain_s3))
            assert alone.aborted == ()
            assert "7380 s" in alone.notes[-1]
            assert len(collect(plain_s3, no_writer_runs=True, dry_run=True).aborted) == 1
            clock.at(SAVE_S + SLACK_S + 60)
            assert len(collect(plain_s3, dry_run=True).aborted) == 1
            clock.at(HOUR_S + 60)
        finally:
            gate.release()
        assert saving.result(30) is None
    assert load(plain_s3) == 20
