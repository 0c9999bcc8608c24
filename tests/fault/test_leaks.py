"""Leaks: many background saves against a store that fails at random leave memory, threads, sockets and uploads as they were.

``DCP_S3_TEST_FULL=1`` runs 200 saves of 32 MiB, as ``scripts/soak`` does; else 40 of 8 MiB.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import statistics
import threading
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import RetryPolicy, S3Config, S3StorageReader, S3StorageWriter, collect_garbage, list_checkpoints, verify
from dcp_s3._runtime.loop_thread import loop_thread
from tests.fault.server import FaultServerProcess, drop_reply, error, reset
from tests.fault.server.control import call
from tests.support.ranks import run_ranks_ok

MIB = 1 << 20
PART = 5 * MIB
SAVES, SAVE_MIB = (200, 32) if os.environ.get("DCP_S3_TEST_FULL") else (40, 8)
PARTS = SAVE_MIB * MIB // PART + 1
WARM_UP = 10
FAILING = 0.05
"""Share of the requests that the store fails."""
SLOPE_MIB = 0.5
CONFIGS = 50


@dataclasses.dataclass
class Held:
    """What a process holds after a save and a load."""

    rss_mib: float
    threads: int
    fds: int
    sockets: int
    tasks: int
    uploads: int
    """Open in the store, with a part."""


def _config(url: str, **settings: Any) -> S3Config:
    return S3Config(
        endpoint_url=url,
        access_key_id="RANK0",
        secret_access_key="secret",
        part_bytes=PART,
        retry=RetryPolicy(max_attempts=12, initial_wait_s=0.01, max_wait_s=0.05),
        **settings,
    )


async def _tasks() -> int:
    return len(asyncio.all_tasks()) - 1


def _held(control_port: int) -> Held:
    gc.collect()
    process = psutil.Process()
    return Held(
        rss_mib=process.memory_info().rss / MIB,
        threads=threading.active_count(),
        fds=process.num_fds(),
        sockets=len(process.net_connections()),
        tasks=loop_thread().submit(_tasks()).result(30),
        uploads=sum(1 for upload in call(control_port, "uploads", {}, timeout_s=30).values() if upload["parts"]),
    )


def _saves(rank: int, url: str, control_port: int, count: int, nbytes: int) -> list[Held]:
    """Save in the background `count` times, over two places in turn, and load each. Runs in a process of its own."""
    config = _config(url)
    writer = S3StorageWriter("s3://bucket/run", config=config)
    state = {f"t{n}": torch.zeros(nbytes // 16) for n in range(4)} | {"step": -1}
    template = {name: torch.zeros(nbytes // 16) for name in state if name != "step"} | {"step": -1}
    held = []
    for number in range(count):
        for n in range(4):
            state[f"t{n}"].fill_(number * 4 + n)
        state["step"] = number
        place = "ab"[number % 2]
        future = dcp.async_save(state, checkpoint_id=place, storage_writer=writer, no_dist=True)
        for n in range(4):
            state[f"t{n}"].fill_(-1.0)  # what training does next
        future.result(timeout=120)
        dcp.load(template, storage_reader=S3StorageReader(f"s3://bucket/run/{place}", config=config), no_dist=True)
        assert template["step"] == number
        for n in range(4):
            assert torch.equal(template[f"t{n}"], torch.full_like(template[f"t{n}"], float(number * 4 + n))), number
        del future
        held.append(_held(control_port))
    return held


def slope(values: list[float]) -> float:
    """By how much a series grows per step: the median of the slopes of all pairs, which no single peak moves."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)


@pytest.fixture
def failing_store() -> Any:
    """A store at which 5 % of all requests fail: refused before, broken off, or done without a reply."""
    with FaultServerProcess(min_part_bytes=0, seed=20_240_901) as running:
        share = 1 - (1 - FAILING) ** (1 / 5)
        for fault in (
            error(503, "SlowDown"),
            error(500, "InternalError"),
            error(500, "InternalError", at="reply"),
            reset("body", 1000),
            drop_reply(),
        ):
            running.on("*", fault, probability=share)
        yield running


@pytest.fixture
def store() -> Any:
    """One that works."""
    with FaultServerProcess(min_part_bytes=0) as running:
        yield running


def test_many_saves_hold_nothing(failing_store: FaultServerProcess, record_property: Any):
    """With 5 % of the requests failing every save commits and loads bit for bit; resident memory grows by less than 0.5 MiB per
    save, threads, tasks and open files do not grow, sockets are no more than a save has requests in flight, no save leaves an
    upload with a part open, and two checkpoints' objects are left.
    """
    where = failing_store.url, failing_store._control_port
    (held,) = run_ranks_ok(1, _saves, *where, SAVES, SAVE_MIB * MIB, timeout_s=10 * SAVES + 60, backend=None)
    log = failing_store.log
    failed = sum(1 for record in log if record.rules)
    assert failed > 0.03 * len(log), "the store failed too rarely for this to mean anything"
    steady = held[WARM_UP:]
    growth = slope([one.rss_mib for one in steady])
    record_property("saves", len(held))
    record_property("requests", len(log))
    record_property("requests_failed", failed)
    record_property("rss_slope_mib_per_save", round(growth, 3))
    print(f"{len(held)} saves of {SAVE_MIB} MiB, {failed} of {len(log)} requests failed, {growth:.3f} MiB per save")
    assert growth < SLOPE_MIB, [round(one.rss_mib, 1) for one in held]
    assert {one.threads for one in steady} == {steady[0].threads}
    assert {one.tasks for one in steady} == {0}
    # a connection for each part in flight, and one for the small requests of each plane; what the store broke is opened again
    assert max(one.sockets for one in steady) <= PARTS + 2, [one.sockets for one in held]
    assert {one.fds - one.sockets for one in steady} == {steady[0].fds - steady[0].sockets}
    assert {one.uploads for one in held} == {0}
    # an upload whose Create was done and not heard of has an id that nobody knows; the collector finds it by its key
    creates = [record for record in log if record.operation == "CreateMultipartUpload" and record.done]
    assert len(failing_store.uploads()) == sum(record.status != 200 for record in creates)

    failing_store.clear(log=False, state=False)
    config = _config(failing_store.url)
    collect_garbage("s3://bucket/run", dry_run=False, older_than_s=0, config=config, no_writer_runs=True)
    assert failing_store.uploads() == {}
    found = list_checkpoints("s3://bucket/run", config=config)
    assert [info.state for info in found] == ["committed", "committed"]
    assert all(verify(info.url, deep=True, config=config).ok for info in found)
    expected = sum(info.objects + 2 for info in found)  # and the record, and the index
    assert len(failing_store.objects("run/")) == expected


def _saves_with_configs(rank: int, url: str, control_port: int, nbytes: int) -> list[Held]:
    """Save in the background with a config of its own each time, as one with the step in its metadata. Runs in a process of its own."""
    state = {"t": torch.zeros(nbytes // 4)}
    held = []
    for number in range(WARM_UP + CONFIGS):
        config = _config(url, metadata={"step": str(number)}, memory_bytes=(64 + number) * MIB)
        writer = S3StorageWriter("s3://bucket/run", config=config)
        dcp.async_save(state, storage_writer=writer, no_dist=True).result(timeout=60)
        held.append(_held(control_port))
    return held


def test_a_config_per_save_holds_nothing(store: FaultServerProcess):
    """Fifty background saves of 8 MiB, each with a config of its own: memory grows by no more than four of them, descriptors
    and threads do not grow.
    """
    where = store.url, store._control_port
    (held,) = run_ranks_ok(1, _saves_with_configs, *where, 8 * MIB, timeout_s=300, backend=None)
    steady = held[WARM_UP:]
    assert steady[-1].rss_mib - steady[0].rss_mib < 32, [round(one.rss_mib, 1) for one in held]
    assert max(one.fds for one in steady) <= steady[0].fds + 2, [one.fds for one in held]
    assert max(one.threads for one in steady) <= steady[0].threads + 1  # that of a save which is ending
