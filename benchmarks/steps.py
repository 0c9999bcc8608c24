"""A training loop of small tensors and much Python, and how much a save in the background slows it down."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks import plane, states
from benchmarks.meter import GIB
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from benchmarks.server import Target

STEP_S = 0.2e-3
"""Length of a step, seconds; the loop's inner count is set so that an undisturbed step takes this."""
BASE_S = 1.5
"""Length of each undisturbed measurement, before and after, seconds."""


class Loop:
    """The step loop."""

    def __init__(self) -> None:
        self._weights = [torch.randn(32, 32) for _ in range(8)]
        self._input = torch.randn(4, 32)
        self._notes: dict[int, list[int]] = {}
        self.inner = 20
        best = min(self._timed() for _ in range(200))
        self.inner = max(1, round(20 * STEP_S / best))

    def _timed(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def step(self) -> None:
        """Run one step: small matrix products, dictionaries, lists."""
        hidden = self._input
        for i in range(self.inner):
            hidden = torch.tanh(hidden @ self._weights[i % 8])
            self._notes[i % 50] = [j * j for j in range(60)]

    def run(self, done: Callable[[], bool]) -> list[float]:
        """Run steps until ``done``; their lengths in seconds, the time between them included."""
        seconds = []
        last = time.perf_counter()
        while not done():
            self.step()
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return seconds

    def base(self) -> list[float]:
        """Run undisturbed steps."""
        end = time.perf_counter() + BASE_S
        return self.run(lambda: time.perf_counter() >= end)


def slow_down(target: Target, subject: str, kind: str, gib: float) -> dict[str, float]:
    """Mean and p99 of the step while a save runs, against the same without one.

    Args:
        target: Where to.
        subject: A peer, or ``raw``: the bytes alone, sent by http.client in threads.
        kind: ``thread`` or ``process``.
        gib: Size of the dense state dict, GiB.
    """
    state = states.dense(gib)
    total = states.nbytes(state) / GIB
    start, clear = _raw(target, int(total * GIB)) if subject == "raw" else _peer(target, subject, kind, state)
    start().result()  # imports, connections, buffers, and the process that DCP starts
    clear()
    loop = Loop()
    base = loop.base()
    begin = time.perf_counter()
    future = start()
    blocked = time.perf_counter() - begin
    steps = loop.run(future.done)
    commit = time.perf_counter() - begin
    future.result()
    clear()
    base += loop.base()
    return {
        "gib": total,
        "base_ms": statistics.fmean(base) * 1e3,
        "mean_ms": statistics.fmean(steps) * 1e3,
        "mean_slowdown": statistics.fmean(steps) / statistics.fmean(base),
        "p99_ms": _p99(steps) * 1e3,
        "p99_slowdown": _p99(steps) / _p99(base),
        "steps": float(len(steps)),
        "blocked_s": blocked,
        "commit_s": commit,
    }


_Job = tuple[Callable[[], Future[Any]], Callable[[], None]]
"""What starts a save, and what deletes it."""


def _raw(target: Target, size: int) -> _Job:
    return plane.RawHttp(target, size, crc=False).put_in_background, target.clear


def _peer(target: Target, subject: str, kind: str, state: dict[str, Any]) -> _Job:
    peer = PEERS[subject](target, distributed=True)
    names = (f"save-{i}" for i in itertools.count())

    def start() -> Future[Any]:
        future = peer.async_save(state, next(names), AsyncCheckpointerType[kind.upper()])
        if future is None:
            raise ValueError(f"{subject} does not save in the background")
        return future

    return start, peer.clear


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]
