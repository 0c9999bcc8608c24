"""A job of two ranks that replaces its checkpoint is killed, or fails, at each of its requests: old or new, never a mixture.

The job's requests are named by rank, operation and ordinal. The normal run takes one request of each kind; with
DCP_S3_TEST_FULL set all are taken, with every choice of victims.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch.distributed.checkpoint as dcp

from dcp_s3 import AccessDeniedError, CommitConflictError, DcpS3Error
from tests.fault.crash_job import FULL, STAGES, Job, Point, points_of
from tests.fault.crash_rank import DEADLINE_S, RANKS
from tests.fault.server import FaultServerProcess, error

COUNTS = {
    (0, "GetObject"): 2,
    (0, "CreateMultipartUpload"): 1,
    (0, "UploadPart"): 2,
    (0, "CompleteMultipartUpload"): 1,
    (0, "HeadObject"): 4,
    (0, "PutObject"): 6,
    (0, "DeleteObject"): 3,
    (1, "CreateMultipartUpload"): 1,
    (1, "UploadPart"): 2,
    (1, "CompleteMultipartUpload"): 1,
    (1, "HeadObject"): 1,
}
"""How many requests of each operation a rank sends to replace the checkpoint."""
INDEX, RECORD = Point(0, "PutObject", 5), Point(0, "PutObject", 6)
CLEARING = {Point(0, "HeadObject", 4), Point(0, "GetObject", 2), *(Point(0, "DeleteObject", n) for n in (1, 2, 3))}
"""Behind the commit: the record is looked at, the replaced checkpoint's index is read, and what it names is deleted."""
LOOK = Point(0, "GetObject", 1)
"""At the record, before the save: denied, it counts as "there may be none", and it is the commit that meets the one that is there."""
OTHER = Point(0, "HeadObject", 1)
"""At a record of the other kind, behind :data:`LOOK`: denied, it counts as not there, for so is a missing key without ListBucket."""

ALL = [Point(rank, operation, n + 1) for (rank, operation), count in COUNTS.items() for n in range(count)]
OF_EACH_KIND = [
    point
    for point in ALL
    if point.ordinal == 1 or point.operation in ("HeadObject", "GetObject") or point in (INDEX, RECORD)
]
"""HEAD 3 looks at the index, HEAD 4 at the record, PUT 1 begins the probe of the store's conditions."""
POINTS = ALL if FULL else OF_EACH_KIND

Trial = tuple[Point, str, str]
KILLS: list[Trial]
if FULL:
    KILLS = [(point, stage, who) for who in ("job", "rank", "peer") for point in POINTS for stage in STAGES]
else:  # the choices of victims in turn: a period of four against three stages
    turns = zip(itertools.product(POINTS, STAGES), itertools.cycle(("job", "rank", "job", "peer")), strict=False)
    KILLS = [(point, stage, who) for (point, stage), who in turns]
FIRST: list[Trial] = [
    (point, stage, "job")
    for point in (POINTS if FULL else [Point(1, "UploadPart", 2), INDEX, RECORD])
    if point not in CLEARING
    for stage in (STAGES if FULL or point == RECORD else ("reply",))
]
IN_PROCESSES: list[Trial] = [
    (Point(1, "CompleteMultipartUpload", 1), "reply", "child"),
    (RECORD, "handle", "child"),
    (RECORD, "handle", "parent"),
    (RECORD, "reply", "job"),
]
if FULL:
    IN_PROCESSES = [(p, stage, who) for p in ALL for stage in STAGES for who in ("parent", "child", "job")]


def name_of(trial: object) -> str:
    """A trial's name in pytest's list."""
    return str(trial)


@pytest.fixture(scope="module")
def store() -> Iterator[FaultServerProcess]:
    """The store of all trials, in a process that no kill hits."""
    with FaultServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def replacing(store: FaultServerProcess) -> Job:
    """A job with a checkpoint; each trial saves over what the one before it left."""
    job = Job(store, "s3://bucket/run")
    job.check(job.run())
    assert job.value == 1
    return job


@pytest.fixture(scope="module")
def in_processes(store: FaultServerProcess) -> Job:
    """The same with DCP's checkpoint processes."""
    job = Job(store, "s3://bucket/processes", process_mode=True)
    job.check(job.run())
    return job


@pytest.fixture
def first(store: FaultServerProcess, request: pytest.FixtureRequest) -> Job:
    """A job that has no checkpoint yet."""
    return Job(store, f"s3://bucket/first/{request.node.name.encode().hex()}")


@pytest.fixture(autouse=True)
def without_rules(store: FaultServerProcess) -> Iterator[None]:
    """No gate or fault of a trial is met by the next one."""
    yield
    store.clear(log=False, state=False)


def test_the_requests_of_the_job(replacing: Job):
    """The list of requests that the matrix goes through is what the job sends."""
    outcome = replacing.run()
    replacing.check(outcome)
    assert outcome.saved
    points = points_of(outcome.log)
    assert sorted(map(str, points)) == sorted(map(str, ALL))
    zero = [point for point in points if point.rank == 0]
    assert set(zero[zero.index(RECORD) + 1 :]) == CLEARING


@pytest.mark.parametrize("point, stage, victims", KILLS, ids=name_of)
def test_killed_while_it_replaces(replacing: Job, point: Point, stage: str, victims: str):
    """kill -9: what loads is the new checkpoint exactly if its record was put, else the old one; gc leaves nothing else."""
    before = replacing.value
    outcome = replacing.kill_at(point, stage, victims)
    replacing.check(outcome)
    if stage != "sent":  # behind the reply a job goes on until the signal arrives
        assert not outcome.saved
    if victims == "job" and stage != "sent":
        done = point in CLEARING or (point == RECORD and stage != "handle")
        assert (replacing.value != before) is done


@pytest.mark.parametrize("point, stage, victims", FIRST, ids=name_of)
def test_killed_while_it_saves_for_the_first_time(first: Job, point: Point, stage: str, victims: str):
    """kill -9 where there was no checkpoint: the new one is there, or a clear "not found", and gc leaves an empty bucket."""
    outcome = first.kill_at(point, stage, victims)
    first.check(outcome)
    if stage != "sent" or point == RECORD:
        assert first.value == (1 if point == RECORD and stage != "handle" else None)
    assert bool(first.live()) is (first.value is not None)


@pytest.mark.parametrize("point, stage, victims", IN_PROCESSES, ids=name_of)
def test_killed_with_checkpoint_processes(in_processes: Job, point: Point, stage: str, victims: str):
    """With DCP's checkpoint processes: a killed child commits nothing more, an orphaned one may; never a mixture."""
    before = in_processes.value
    outcome = in_processes.kill_at(point, stage, victims)
    in_processes.check(outcome)
    if victims == "child" and stage == "handle" and point not in CLEARING:
        assert in_processes.value == before


@pytest.mark.parametrize("point", POINTS, ids=name_of)
def test_one_request_fails(replacing: Job, point: Point):
    """403 to one request of one rank: every rank raises in time, naming that request, and the old checkpoint stays; behind the commit,
    and of the look for a record of the other kind, it is no failure.
    """
    before = replacing.value
    outcome = replacing.fail_at(point, error(403, "AccessDenied"), for_ever=False)
    assert outcome.seconds < DEADLINE_S + 10
    assert replacing.open_uploads() == []
    if point in CLEARING or point == OTHER:
        assert outcome.saved
    else:
        (refused,) = (record for record in outcome.log if record.status == 403)
        assert [type(raised) for raised in outcome.ranks] == [dcp.CheckpointException] * RANKS
        for raised in outcome.ranks:
            assert list(raised.failures) == [point.rank]
            cause = raised.failures[point.rank][0]
            assert isinstance(cause, DcpS3Error)
            assert (cause.rank, cause.bucket) == (point.rank, "bucket")
            if point == LOOK:
                assert isinstance(cause, CommitConflictError)
                assert (cause.operation, cause.key) == ("PutObject", "run/.metadata")
            else:
                assert isinstance(cause, AccessDeniedError)
                assert (cause.operation, cause.status) == (point.operation, 403)
                assert cause.request_id == refused.reply_headers["x-amz-request-id"]
                assert (cause.key, cause.part) == (refused.key, refused.part)
        assert not outcome.committed
    replacing.check(outcome)
    assert (replacing.value != before) is (point in CLEARING or point == OTHER)


@pytest.mark.parametrize("point", POINTS if FULL else [Point(1, "UploadPart", 1), INDEX], ids=name_of)
def test_a_kind_of_request_fails_for_ever(replacing: Job, point: Point):
    """503 to a rank's requests of one kind from here on: the retries end, every rank raises within the deadline, nothing is lost."""
    before = replacing.value
    outcome = replacing.fail_at(point, error(503, "SlowDown"), for_ever=True)
    assert outcome.seconds < DEADLINE_S + 10
    assert replacing.open_uploads() == []
    assert outcome.saved is (point in CLEARING)
    if point not in CLEARING:
        assert [type(raised) for raised in outcome.ranks] == [dcp.CheckpointException] * RANKS
    replacing.check(outcome)
    assert (replacing.value != before) is (point in CLEARING)
