"""What a training run tells whoever watches it: the processes it is made of, and what happened, as lines of JSON."""
# ruff: noqa: INP001, T201 -- part of a program, which says what it does

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import processes

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path


class Records:
    """One rank's side of it.

    Args:
        directory: Where to write `<pid>.pid` files and, on rank 0, `events.jsonl`; None writes nothing.
        rank: Rank of this process.
    """

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._lock = threading.Lock()
        self._noted: set[int] = set()

    def processes(self) -> None:
        """Note this process and, once it has started one, DCP's checkpoint process."""
        if self._directory is None:
            return
        roles = {os.getpid(): f"rank {self._rank}"}
        roles |= {
            child.pid: f"checkpoint process of rank {self._rank}"
            for child in multiprocessing.active_children()
            if child.pid
        }
        for pid in roles.keys() - self._noted:
            processes.note(self._directory, pid, roles[pid])
            self._noted.add(pid)

    def event(self, name: str, **facts: Any) -> None:  # noqa: ANN401 -- any value that JSON has
        """Note that something happened. Any thread may call it."""
        if self._directory is None or self._rank != 0:
            return
        with self._lock, (self._directory / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": name, **facts}) + "\n")

    def save(self, step: int, loss: float, mode: str, sha256: str) -> Save:
        """Begin to time a save. The digest is that of what is saved."""
        return Save(self, self._rank, step, loss, mode, sha256)


class Save:
    """Times one save, and notes it. Within a `with` block the training is held up."""

    def __init__(self, records: Records, rank: int, step: int, loss: float, mode: str, sha256: str) -> None:
        self._mode = mode
        self._records = records
        self._rank = rank
        self._step = step
        self._loss = loss
        self._sha256 = sha256
        self._stopped = self._begun = time.perf_counter()

    def begun(self) -> None:
        """The wait for the save before this one is over."""
        self._begun = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        waited = self._begun - self._stopped
        blocked = time.perf_counter() - self._begun
        self._records.event(
            "blocked", step=self._step, mode=self._mode, waited_s=waited, blocked_s=blocked, sha256=self._sha256
        )
        if self._rank == 0:
            wait = f", after {waited:.3f} s of waiting for the last save" if waited > 0.01 else ""
            print(
                f"step {self._step:3d}  loss {self._loss:.3f}  save ({self._mode}) held the training up for {blocked:.3f} s{wait}",
                flush=True,
            )

    def ended(self, pending: Future[Any]) -> None:
        """The upload has ended, well or badly."""
        if pending.exception() is None:
            self.committed()

    def committed(self) -> None:
        """The checkpoint is there."""
        self._records.event("committed", step=self._step, mode=self._mode, seconds=time.perf_counter() - self._begun)


def events(directory: Path) -> list[dict[str, Any]]:
    """Return what has happened so far, oldest first."""
    try:
        lines = (directory / "events.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]
