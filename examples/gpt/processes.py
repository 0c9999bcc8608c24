"""Processes that are known by pid: noted in a directory by whoever starts one, signalled and awaited by whoever ends them."""
# ruff: noqa: INP001 -- part of a program, not of a package

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LAUNCHER = "torchrun"
"""Role of the process that starts the ranks."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, and what it is for."""

    pid: int
    started: str
    """When it started, in ticks since the machine did: the same pid with another start is another process."""
    role: str

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return _started(self.pid) == self.started

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it is gone."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __str__(self) -> str:
        return f"{self.role} ({self.pid})"


def _started(pid: int) -> str | None:
    """Return a process's start time, or None when it is gone or a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else fields[18]


def note(directory: Path, pid: int, role: str) -> None:
    """Note in `directory` that a process runs."""
    started = _started(pid)
    if started is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{pid}.new"
    unfinished.write_text(json.dumps(asdict(Process(pid=pid, started=started, role=role))))
    unfinished.rename(directory / f"{pid}.pid")  # whoever reads it finds it whole


def noted(directory: Path) -> list[Process]:
    """Return the processes that were noted in `directory`, by role."""
    found = [Process(**json.loads(file.read_text())) for file in directory.glob("*.pid")]
    return sorted(found, key=lambda process: process.role)


def wait_until_gone(processes: list[Process], limit_s: float) -> list[Process]:
    """Wait until none of the processes runs, or `limit_s` seconds are over; return those that still do."""
    deadline = time.monotonic() + limit_s
    while (left := [process for process in processes if process.alive]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def end(ended: list[Process], limit_s: float = 20.0) -> list[Process]:
    """End the processes of a job; return those that would not end in `limit_s` seconds."""
    launchers = [process for process in ended if process.role == LAUNCHER]
    for process in ended:
        if process not in launchers:
            process.signal(signal.SIGKILL)
    # a launcher may have started ranks that have not noted themselves yet: it ends those, if it is asked to end
    for process in launchers:
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGTERM)
    for process in wait_until_gone(launchers, limit_s):
        process.signal(signal.SIGKILL)
    return wait_until_gone(ended, limit_s)
