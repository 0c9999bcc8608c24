"""Ctrl-C, or a signal handler that raises, during a save or a load: it ends, holds nothing, and the next one works.

``DCP_S3_TEST_FULL=1`` interrupts 500 saves and 500 loads, half of them at places, half at times; else 30 and 30.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3._runtime.gc_pause import PAUSE_S
from dcp_s3._transfer.s3 import planes
from tests.fault.conftest import config_of
from tests.fault.server import FaultServer
from tests.support.interrupts import Interrupt, Places, interrupted_in
from tests.support.staging import close_stagers

MIB = 1 << 20
ROUNDS = 250 if os.environ.get("DCP_S3_TEST_FULL") else 15
LIMIT_S = 15.0
"""Deadlines of 20 s are not waited for: an interrupt ends what it hits."""


@functools.lru_cache(2)
def _state(seed: int) -> dict[str, Any]:
    """Tensors that are sent as they lie, copied in slices, joined, received directly and through scratch; and objects."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(6 * MIB // 4, generator=generator),
        "strided": torch.randn(700, 900, generator=generator).t(),
        **{f"small{n}": torch.randn(50, 20, generator=generator) for n in range(20)},
        "doubles": torch.randn(100_000, generator=generator, dtype=torch.float64),
        "object": {"seed": seed, "text": "x" * 100_000},
    }


def _blank() -> dict[str, Any]:
    state = {
        key: torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, torch.Tensor)
        else {"seed": -1, "text": ""}
        for key, value in _state(0).items()
    }
    state["doubles"] = torch.zeros(100_000, dtype=torch.float32)  # goes through scratch
    return state


def _check(state: dict[str, Any], seed: int) -> None:
    for key, value in _state(seed).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[key], value.to(state[key].dtype)), key
        else:
            assert state[key] == value


class Held:
    """What the process holds behind an interrupted save or load."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.before = self._now()

    def _now(self) -> dict[str, Any]:
        return {
            # an interrupt in Thread.start may leave one in the list of threading that never runs: it is not alive
            "threads": sorted(
                t.name
                for t in threading.enumerate()
                if t.is_alive() and not t.name.startswith(("dcp_s3-call", "Thread-"))
            ),
            "budget": sum(plane.budget.held for plane in planes._planes.values()),
            "files": self._process.num_fds() // 20,  # connections come and go
        }

    def back(self, *, limit_s: float = 5.0) -> dict[str, Any]:
        """What is held, when it is as before or the time is over."""
        end = time.monotonic() + limit_s
        while (now := self._now()) != self.before and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        return now


class Job:
    """Saves and loads of one place, in this thread."""

    def __init__(self, s3: FaultServer) -> None:
        self.config = config_of(
            s3, save_deadline_s=20.0, load_deadline_s=20.0, part_bytes=5 * MIB, memory_bytes=32 * MIB, max_concurrency=4
        )
        self.s3 = s3
        self.seed = 0

    def save(self) -> None:
        dcp.save(_state(self.seed), storage_writer=S3StorageWriter("s3://bucket/run", config=self.config), no_dist=True)

    def load(self) -> dict[str, Any]:
        template = _blank()
        dcp.load(template, storage_reader=S3StorageReader("s3://bucket/run", config=self.config), no_dist=True)
        return template


@pytest.fixture
def job(plain_s3: FaultServer) -> Job:
    """A saved checkpoint, clients that are made."""
    close_stagers()
    job = Job(plain_s3)
    for _ in range(2):
        job.save()
        job.load()
    return job


def _collector_is_on() -> bool:
    """Whether Python's collector works, or does so at the latest when the longest pause is over."""
    end = time.monotonic() + PAUSE_S + 2
    while not gc.isenabled() and time.monotonic() < end:
        time.sleep(0.05)
    return gc.isenabled()


def _interrupted(work: Callable[[], Any], at: Places | float) -> str:
    """Run something that is interrupted; return where it was, or "" if it had ended before."""
    started = time.monotonic()
    where = ""
    try:
        with (
            interrupted_in(at if isinstance(at, float) else None, hang_s=LIMIT_S),
            at if isinstance(at, Places) else contextlib.nullcontext(),
        ):
            work()
    except dcp.CheckpointException as failed:
        ((error, _),) = failed.failures.values()
        assert isinstance(error, Interrupt), repr(error)
        where = str(error)
    except Interrupt as error:
        where = str(error)
    seconds = time.monotonic() - started
    assert seconds < LIMIT_S, (where, seconds)
    return where


def _places(work: Callable[[], Any]) -> int:
    with Places(None) as places:
        work()
    return places.count


def _interruptions(work: Callable[[], Any], seed: int) -> Iterator[Places | float]:
    """Interruptions spread evenly over the places of what is done, and as many over its time, in seconds."""
    count = _places(work)
    assert count > 500
    random.seed(seed)
    for number in range(ROUNDS):
        yield Places(int((number + random.random()) * count / ROUNDS))
    started = time.monotonic()
    work()
    seconds = time.monotonic() - started
    for number in range(ROUNDS):
        yield (number + random.random()) * seconds / ROUNDS + 1e-6


def test_an_interrupted_load(job: Job):
    """It ends at once, holds no budget, thread or file, leaves the collector on, and no byte lands behind its end; the next loads."""
    held = Held()
    hit = []
    target = _blank()

    def load() -> None:
        dcp.load(target, storage_reader=S3StorageReader("s3://bucket/run", config=job.config), no_dist=True)

    for at in _interruptions(load, seed=1):
        target = _blank()
        where = _interrupted(load, at)
        hit.append(where)
        left = {key: value.clone() for key, value in target.items() if isinstance(value, torch.Tensor)}
        assert held.back() == held.before, where
        assert all(torch.equal(target[key], value) for key, value in left.items()), where
        _check(job.load(), job.seed)
    assert sum(map(bool, hit)) > ROUNDS
    assert _collector_is_on()


def test_an_interrupted_save(job: Job, allowed: set[str]):
    """It ends at once and holds nothing, nor in the store, but for an upload whose Complete may be at work: that is left to gc.
    What loads is the state before or its own, and the next save works.
    """
    allowed.add("open-upload")
    held = Held()
    hit = []
    (parts,) = {-(-stored["size"] // job.config.part_bytes) for key, stored in job.s3.objects("run/data/").items()}
    undecided: set[str] = set()
    for at in _interruptions(job.save, seed=2):
        before = job.seed
        job.seed += 1
        where = _interrupted(job.save, at)
        hit.append(where)
        assert held.back() == held.before, where
        for upload_id, upload in job.s3.uploads().items():
            assert len(upload["parts"]) == parts, where  # it came to its Complete
            undecided.add(upload_id)
        loaded = job.load()
        _check(loaded, loaded["object"]["seed"])
        assert loaded["object"]["seed"] in (before, job.seed)
        job.seed += 1
        job.save()
        assert job.load()["object"]["seed"] == job.seed
    assert sum(map(bool, hit)) > ROUNDS
    assert len(undecided) < ROUNDS / 10
    assert _collector_is_on()
