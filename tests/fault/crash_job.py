"""A job of two ranks that saves over its checkpoint on the fault server, and is killed or failed at a chosen request."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CheckpointNotFoundError, S3StorageReader, collect_garbage
from dcp_s3._checkpoint.format.index import Index
from dcp_s3._checkpoint.format.layout import index_name
from tests.fault.crash_rank import ELEMENTS, RANKS, config_for, save_rank, state_of
from tests.fault.server import Action, FaultServerProcess, GateHandle, Record, reset
from tests.support.ranks import RankTimeout, run_ranks

LIMIT_S = 150.0
"""Of one job, and the time-out of its group: a busy machine takes a minute to start the first ranks. A save has 30 s."""
FULL = bool(os.environ.get("DCP_S3_TEST_FULL"))
"""The long run: every request instead of one of each kind. Read before the environment is cleared for the tests."""

_looks = itertools.count(1)
STAGES = ("handle", "reply", "sent")
"""Before the store has done the request, after that and before its reply, after the reply."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One request of the job, by a name that is the same in every run."""

    rank: int
    operation: str
    ordinal: int
    """From 1, among the rank's requests of this operation."""

    def __str__(self) -> str:
        return f"rank{self.rank}-{self.operation}-{self.ordinal}"

    @property
    def match(self) -> dict[str, Any]:
        """What finds it on the server."""
        return {"access_key": f"RANK{self.rank}", "nth": self.ordinal}


@dataclasses.dataclass
class Outcome:
    """What became of a job."""

    ranks: list[Any]
    """Return value or exception, by rank; RankDied for a killed one."""
    seconds: float
    log: list[Record]

    @property
    def committed(self) -> bool:
        """Whether the store has done the PUT of the record."""
        return any(r.done for r in self.log if r.operation == "PutObject" and r.key.endswith("/.metadata"))

    @property
    def saved(self) -> bool:
        """Whether every rank's save returned."""
        return self.ranks == [None] * RANKS


class Job:
    """Runs one job at a time against a server, and looks at what it left behind.

    Args:
        server: Where the checkpoint is.
        url: Its URL.
        process_mode: Save in DCP's checkpoint processes.
    """

    def __init__(self, server: FaultServerProcess, url: str, *, process_mode: bool = False) -> None:
        self.server = server
        self.url = url
        self.prefix = url.removeprefix("s3://bucket/")
        self.value: int | None = None
        """Of the checkpoint that is there; None: there is none."""
        self._process_mode = process_mode
        self._saves = 0

    def run(self, at_gate: Callable[[list[int]], None] | None = None, gate: GateHandle | None = None) -> Outcome:
        """Save the next value; when a request is at the gate, call `at_gate` with the ranks' pids, and open it."""
        self._saves += 1
        self.server.clear(rules=False, state=False)
        connections = self.server.counters["open"]
        outcomes: list[Any] = []
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="dcp-s3-crash-") as name:
            scratch = Path(name)
            arguments = (self.server.url, self.url, self._saves, scratch, self._process_mode)
            job = threading.Thread(
                target=lambda: outcomes.extend(run_ranks(RANKS, save_rank, *arguments, timeout_s=LIMIT_S))
            )
            job.start()
            try:
                if gate is not None and at_gate is not None:
                    gate.wait_arrived(timeout_s=LIMIT_S)
                    at_gate([int((scratch / f"pid-{rank}").read_text()) for rank in range(RANKS)])
            finally:
                if gate is not None:
                    gate.release()
                job.join(2 * LIMIT_S)
        assert not job.is_alive()
        seconds = time.monotonic() - started
        self.settle(connections)
        assert not [outcome for outcome in outcomes if isinstance(outcome, RankTimeout)], outcomes
        outcome = Outcome(outcomes, seconds, self.server.log)
        self.server.clear(log=False, state=False)
        return outcome

    def settle(self, connections: int) -> None:
        """Wait until the job's connections are gone: what a dead client had sent before it died is done by then."""
        deadline = time.monotonic() + 20
        while self.server.counters["open"] > connections or any(record.t_end is None for record in self.server.log):
            assert time.monotonic() < deadline, "requests stay in flight"
            time.sleep(0.01)

    def kill_at(self, point: Point, stage: str, victims: str) -> Outcome:
        """Save, and kill -9 when the request is at a stage.

        Args:
            point: The request.
            stage: One of STAGES. A request that is killed at "handle" never reaches the store.
            victims: ``job``, ``rank`` (the one that sent it), ``peer`` (the other one), ``parents`` or ``children`` (of
                every rank, with DCP's checkpoint processes), ``parent`` or ``child`` of the rank that sent it.
        """
        never = victims in ("job", "rank", "children", "child") and stage == "handle"
        gate = self.server.hold(point.operation, at=stage, then=reset() if never else None, **point.match)  # type: ignore[arg-type]

        def kill(pids: list[int]) -> None:
            ranks = [psutil.Process(pid) for pid in pids]
            if victims == "job":
                chosen = [process for rank in ranks for process in (rank, *rank.children(recursive=True))]
            elif victims in ("parents", "parent"):
                chosen = ranks if victims == "parents" else [ranks[point.rank]]
            elif victims in ("children", "child"):
                from_ranks = ranks if victims == "children" else [ranks[point.rank]]
                chosen = [process for rank in from_ranks for process in rank.children(recursive=True)]
            else:
                chosen = [ranks[point.rank if victims == "rank" else 1 - point.rank]]
            assert chosen
            for process in chosen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            gone(chosen)

        return self.run(kill, gate)

    def fail_at(self, point: Point, action: Action, *, for_ever: bool) -> Outcome:
        """Save, and have the request fail: this one, or it and all of its kind that follow."""
        match = point.match
        if for_ever:
            match["since"] = match.pop("nth")
        self.server.on(point.operation, action, **match)
        return self.run()

    def check(self, outcome: Outcome) -> None:
        """Load, collect garbage, look into the bucket, load again.

        The old checkpoint is there or the new one, each tensor bit for bit; the new one exactly if its record's PUT was
        done; then the bucket holds its objects and nothing else, and no upload is open.
        """
        expected = self._saves if outcome.committed else self.value
        self.value = self.load()  # also where it is wrong: the next trial is one of its own
        assert self.value == expected
        if outcome.saved:
            assert outcome.committed
        self.collect()
        assert self.load() == expected

    def load(self) -> int | None:
        """Load and return the value of the one checkpoint that everything belongs to; None if there is none."""
        template: dict[str, Any] = {}
        for rank in range(RANKS):
            template |= {name: torch.zeros(ELEMENTS, dtype=torch.int32) for name in state_of(rank, 0) if name != "step"}
        template["step"] = -1
        reader = S3StorageReader(self.url, config=config_for(self.server.url))
        try:
            reader.read_metadata()
        except CheckpointNotFoundError:
            with pytest.raises(dcp.CheckpointException, match="no checkpoint at"):
                dcp.load(template, storage_reader=reader, no_dist=True)
            return None
        dcp.load(template, storage_reader=reader, no_dist=True)
        value: int = template["step"]
        for rank in range(RANKS):
            for name, tensor in state_of(rank, value).items():
                assert name == "step" or torch.equal(template[name], tensor), f"{name} is not of save {value}"
        return value

    def collect(self) -> None:
        """Collect garbage now, and check that exactly the live checkpoint's objects are left."""
        # what is there is some seconds old by the store's clock, whatever its resolution
        self.server.configure(clock_offset_s=10.0 * next(_looks))
        report = collect_garbage(
            self.url, older_than_s=0.0, no_writer_runs=True, dry_run=False, config=config_for(self.server.url)
        )
        assert (report.refused, report.skipped, report.notes) == ((), (), ())
        assert set(self.server.objects(f"{self.prefix}/")) == self.live()
        assert self.open_uploads() == []

    def open_uploads(self) -> list[str]:
        """Keys of the open multipart uploads."""
        return [u["key"] for u in self.server.uploads().values() if u["key"].startswith(f"{self.prefix}/")]

    def live(self) -> set[str]:
        """Keys of the live checkpoint, by its own index."""
        prefix = self.prefix
        record = self.server.objects().get(f"{prefix}/.metadata")
        if record is None:
            return set()
        name = f"{prefix}/{index_name(record['headers']['x-amz-meta-dcp-s3-write-id'])}"
        index = Index.from_bytes(self.server.read(name), source=name)
        return {f"{prefix}/.metadata", name, *(f"{prefix}/{entry.key}" for entry in index.objects)}


def gone(processes: Iterable[psutil.Process]) -> None:
    """Wait until killed processes run no more."""
    deadline = time.monotonic() + 20
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.002)


def points_of(log: Iterable[Record]) -> list[Point]:
    """The requests of a job's log, in order of arrival."""
    seen: Counter[tuple[str, str]] = Counter()
    points = []
    for record in log:
        if record.access_key is not None and record.access_key.startswith("RANK"):
            seen[record.access_key, record.operation] += 1
            ordinal = seen[record.access_key, record.operation]
            points.append(Point(int(record.access_key[4:]), record.operation, ordinal))
    return points
