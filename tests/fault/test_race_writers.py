"""Several writers of one URL at the same time: one commits, the others are told, and what loads is one writer's whole state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CommitConflictError, S3StorageReader, S3StorageWriter, collect_garbage
from tests.fault.crash_job import FULL
from tests.fault.server import FaultServerProcess
from tests.servers import Bucket, Endpoint, fresh_bucket

WRITERS = 8
ROUNDS = 20 if FULL else 4
LIMIT_S = 60


@pytest.fixture(scope="module")
def scripted() -> Iterator[Endpoint]:
    """The fault tests' own server, with no fault scripted."""
    with FaultServerProcess() as server:
        yield Endpoint(name="scripted", endpoint_url=server.url, access_key="test", secret_key="testtest")


@pytest.fixture(params=["scripted", "seaweedfs", "ceph_rgw"])
def place(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """An empty bucket on each store."""
    with fresh_bucket(request.getfixturevalue(request.param)) as bucket:
        yield bucket


class Racer(S3StorageWriter):
    """A writer that waits at two places of a save: when it has looked at what is there, and before it commits."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        looked: Callable[[], Any] = lambda: None,
        to_commit: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__(bucket.url("run"), config=bucket.endpoint.config())
        self._looked = looked
        self._to_commit = to_commit

    def prepare_global_plan(self, plans: Any) -> Any:
        planned = super().prepare_global_plan(plans)
        self._looked()
        return planned

    def finish(self, metadata: Any, results: Any) -> None:
        self._to_commit()
        super().finish(metadata=metadata, results=results)


def state_of(who: int, turn: int) -> dict[str, Any]:
    """A state of which each part says whose it is."""
    return {f"t{n}": torch.arange(50) * 1000 + 10 * turn + who + n for n in range(3)} | {"who": who, "turn": turn}


def save(writer: S3StorageWriter, who: int, turn: int) -> BaseException | None:
    """Save, and return what was raised in the writer."""
    try:
        dcp.save(state_of(who, turn), storage_writer=writer, no_dist=True)
    except dcp.CheckpointException as error:
        failure: BaseException = error.failures[0][0]
        return failure
    return None


def load(bucket: Bucket) -> tuple[int, int]:
    """Load and return whose checkpoint it is and of which round; it must be theirs in every part."""
    template: dict[str, Any] = {f"t{n}": torch.zeros(50, dtype=torch.int64) for n in range(3)} | {"who": -1, "turn": -1}
    reader = S3StorageReader(bucket.url("run"), config=bucket.endpoint.config())
    dcp.load(template, storage_reader=reader, no_dist=True)
    who, turn = template["who"], template["turn"]
    for name, value in state_of(who, turn).items():
        assert torch.equal(torch.as_tensor(template[name]), torch.as_tensor(value)), f"{name} is not of writer {who}"
    return who, turn


def assert_nothing_else(bucket: Bucket) -> None:
    """After a garbage collection the bucket holds one record, its index and one data object."""
    deadline = time.monotonic() + LIMIT_S
    while True:  # a store whose clock shows whole seconds calls an object of this second young
        report = collect_garbage(
            bucket.url("run"), older_than_s=0, no_writer_runs=True, dry_run=False, config=bucket.endpoint.config()
        )
        if report.waiting == 0:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    left = bucket.keys()
    kinds = sorted(key.partition("run/")[2].partition("/")[0].partition("-")[0] for key in left)
    assert kinds == [".metadata", "data", "index"]
    assert bucket.uploads() == []


def test_eight_writers(place: Bucket):
    """In each round all writers have looked before any commits: one does, seven get CommitConflictError, and its state is whole."""
    winners = []
    with ThreadPoolExecutor(WRITERS) as pool:
        for turn in range(ROUNDS):
            together = threading.Barrier(WRITERS)
            writers = [Racer(place, looked=lambda: together.wait(LIMIT_S)) for _ in range(WRITERS)]  # noqa: B023
            outcomes = list(pool.map(save, writers, range(WRITERS), [turn] * WRITERS))
            committed = [who for who, outcome in enumerate(outcomes) if outcome is None]
            assert len(committed) == 1, outcomes
            losers = [outcome for outcome in outcomes if outcome is not None]
            assert [type(loser) for loser in losers] == [CommitConflictError] * (WRITERS - 1), losers
            assert load(place) == (committed[0], turn)
            winners.append(committed[0])
    assert_nothing_else(place)
    assert load(place) == (winners[-1], ROUNDS - 1)


@pytest.mark.parametrize("there", ["new", "replacing"])
def test_a_paused_writer(place: Bucket, there: str):
    """A writer that sleeps before its commit while another one commits cannot commit any more, garbage collection or not."""
    if there == "replacing":
        assert save(Racer(place), 5, 0) is None
    asleep, awake = threading.Event(), threading.Event()

    def sleep() -> None:
        asleep.set()
        assert awake.wait(LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(save, Racer(place, to_commit=sleep), 1, 1)
        try:
            assert asleep.wait(LIMIT_S)
            assert save(Racer(place), 2, 2) is None
        finally:
            awake.set()
        raised = paused.result(LIMIT_S)
    assert type(raised) is CommitConflictError
    assert raised.key == f"{place.prefix}run/.metadata"
    assert load(place) == (2, 2)
    assert_nothing_else(place)
    assert load(place) == (2, 2)
