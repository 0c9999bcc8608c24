"""Saves and loads of two ranks, round after round, at a store that fails at random and with ranks that are killed."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import (
    CheckpointNotFoundError,
    RetryPolicy,
    S3Config,
    S3StorageReader,
    S3StorageWriter,
    collect_garbage,
    verify,
)
from tests.fault.server import (
    FaultServerProcess,
    cut_reply,
    delay,
    drop_reply,
    error,
    never_answer,
    reset,
)
from tests.support.ranks import RankDied, run_ranks

MIB = 1 << 20
PLACES = 3
RANK_MIB = 16
FAULTS = {
    "refused with 503": (error(503, "SlowDown"), 0.02),
    "refused with 500": (error(500, "InternalError"), 0.01),
    "done and answered with 500": (error(500, "InternalError", at="reply"), 0.01),
    "broken off": (reset("body", 1000), 0.01),
    "done and not answered": (drop_reply(), 0.01),
    "answered half": (cut_reply(1000), 0.01),
    "slow": (delay(0.3), 0.01),
    "never answered": (never_answer(), 0.001),
}
KILLED = 0.5
"""Share of the rounds in which one rank is killed."""
SCHEDULER_S = 5.0
"""Longest time, seconds, until the job's other rank is killed, too."""


@dataclasses.dataclass
class Storm:
    """What was done and found."""

    rounds: int = 0
    commits: int = 0
    bytes_saved: int = 0
    loads: int = 0
    bytes_loaded: int = 0
    saves_failed: int = 0
    kills: int = 0
    requests: int = 0
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    lost: list[str] = dataclasses.field(default_factory=list)


def _config(url: str) -> S3Config:
    return S3Config(
        endpoint_url=url,
        access_key_id="SOAK",
        secret_access_key="secret",
        part_bytes=5 * MIB,
        read_timeout_s=2.0,
        save_deadline_s=60.0,
        load_deadline_s=60.0,
        retry=RetryPolicy(max_attempts=30, initial_wait_s=0.01, max_wait_s=0.3),
    )


def _state(step: int) -> dict[str, Any]:
    """Tensors that DCP shares out over the ranks; each value is the step, so that a mixture shows."""
    return {f"t{n}": torch.full((RANK_MIB * MIB // 16,), float(step)) for n in range(8)} | {"step": step}


def _job(rank: int, url: str, first: int, seconds: float, kill_after_s: float | None, ledger: str) -> int:
    """Save in the background, step after step, until time is up; note each commit in the ledger as it is known."""
    if kill_after_s is not None:
        timer = threading.Timer(kill_after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    writer = S3StorageWriter("s3://bucket/soak", config=_config(url))
    failed = 0
    step = first
    end = torch.tensor(time.monotonic() + seconds)
    torch.distributed.broadcast(end, 0)  # the clock is one for all ranks of a machine
    more = torch.tensor(1)
    while more.item():
        state = _state(step)
        future = dcp.async_save(state, checkpoint_id=f"place-{step % PLACES}", storage_writer=writer)
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(-1.0)
        try:
            future.result(timeout=120)
        except dcp.CheckpointException:
            failed += 1
        else:
            if rank == 0:
                with Path(ledger).open("a") as file:
                    file.write(f"{step}\n")
        step += 1
        more.fill_(time.monotonic() < float(end))
        torch.distributed.broadcast(more, 0)
    return failed


def storm(seconds: float, directory: Path, *, seed: int = 0) -> Storm:
    """Run rounds until time is up; after each, what is committed must load, bit for bit, and be whole.

    Args:
        seconds: Roughly; the last round is finished.
        directory: For the ledger.
        seed: Of the faults and kills.
    """
    found, chance = Storm(), random.Random(seed)
    end = time.monotonic() + seconds
    ledger = directory / "commits"
    ledger.touch()
    step = 0
    with FaultServerProcess(min_part_bytes=0, seed=seed) as server:
        while time.monotonic() < end:
            rules = {name: server.on("*", action, probability=share) for name, (action, share) in FAULTS.items()}
            length = min(20.0, max(5.0, end - time.monotonic()))
            victim = chance.randrange(4) if chance.random() < 2 * KILLED else 2  # of 2 ranks; else nobody
            after: list[float | None] = [None, None]
            if victim < 2:  # and the other one when its scheduler has noticed
                after[victim] = chance.uniform(0.5, length)
                after[1 - victim] = after[victim] + chance.uniform(0.5, SCHEDULER_S)
            outcomes = _round(server.url, step, length, after, str(ledger))
            found.rounds += 1
            found.kills += sum(isinstance(outcome, RankDied) for outcome in outcomes)
            found.saves_failed += sum(outcome for outcome in outcomes[:1] if isinstance(outcome, int))
            for name, rule in rules.items():
                found.faults[name] = found.faults.get(name, 0) + rule.fired
            if victim > 1 and any(isinstance(outcome, BaseException) for outcome in outcomes):
                found.lost.append(f"round {found.rounds}: ranks ended with {outcomes}")
            log = server.log
            found.requests += len(log)
            server.clear(state=False)
            found.lost += _look(server, ledger, found)
            step = max([step, *map(int, ledger.read_text().split())]) + 100
        found.lost += _tidy(server, found)
        found.commits = len(ledger.read_text().split())
        if not found.commits or not found.loads:
            found.lost.append("nothing was saved or nothing was loaded: this run shows nothing")
    found.bytes_saved = found.commits * 2 * RANK_MIB * MIB
    return found


def _round(url: str, step: int, length: float, after: list[float | None], ledger: str) -> list[Any]:
    return run_ranks(2, _job_of, url, step, length, after, ledger, timeout_s=length + 120)


def _job_of(rank: int, url: str, first: int, seconds: float, after: list[float | None], ledger: str) -> int:
    return _job(rank, url, first, seconds, after[rank], ledger)


def _look(server: FaultServerProcess, ledger: Path, found: Storm) -> list[str]:
    """Load every place; what it holds must be one step's state, and no older than the last commit that is known."""
    lost = []
    steps = [int(line) for line in ledger.read_text().split()]
    for place in range(PLACES):
        known = max((step for step in steps if step % PLACES == place), default=None)
        url = f"s3://bucket/soak/place-{place}"
        template = {name: torch.empty_like(v) if torch.is_tensor(v) else -1 for name, v in _state(-1).items()}
        try:
            reader = S3StorageReader(url, config=_config(server.url))
            reader.read_metadata()
            dcp.load(template, storage_reader=reader, no_dist=True)
        except CheckpointNotFoundError:
            if known is not None:
                lost.append(f"{url} is gone; step {known} was committed")
            continue
        except BaseException as failed:
            lost.append(f"{url} does not load: {failed}")
            continue
        found.loads += 1
        found.bytes_loaded += 2 * RANK_MIB * MIB
        step = template["step"]
        if known is not None and step < known:
            lost.append(f"{url} holds step {step}, older than {known}")
        expected = _state(step)
        if any(torch.is_tensor(v) and not torch.equal(template[name], v) for name, v in expected.items()):
            lost.append(f"{url} holds a mixture, or wrong bytes, at step {step}")
    return lost


def _tidy(server: FaultServerProcess, found: Storm) -> list[str]:
    """Collect garbage; then exactly the live checkpoints' objects are there, whole, and no open upload."""
    config = _config(server.url)
    collect_garbage("s3://bucket/soak", dry_run=False, older_than_s=0, config=config, no_writer_runs=True)
    lost = [f"open uploads: {server.uploads()}"] if server.uploads() else []
    places = {key.split("/")[1] for key in server.objects("soak/") if key.endswith("/.metadata")}
    expected = 0
    for place in places:
        report = verify(f"s3://bucket/soak/{place}", deep=True, config=config)
        expected += report.objects + 2
        lost += list(report.problems)
    left = server.objects("soak/")
    return lost + ([f"{len(left)} objects are left, {expected} expected"] if len(left) != expected else [])
