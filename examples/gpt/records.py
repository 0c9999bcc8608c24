"""What a training run tells whoever watches it: its process ids, and a line of JSON for each thing that happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any


class Records:
    """Writes one run's files: `pids/<pid>` of each process, which it makes, and `events.jsonl` of rank 0.

    Args:
        directory: Where to write; None writes nothing.
        rank: Rank of this process.
    """

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._lock = threading.Lock()
        self._noted: set[int] = set()

    def note_processes(self) -> None:
        """Note this process, and DCP's checkpoint process once this one has started it."""
        if self._directory is None:
            return
        for pid in {os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)} - self._noted:
            note_process(self._directory, pid, f"rank {self._rank}" if pid == os.getpid() else f"checkpoints of rank {self._rank}")
            self._noted.add(pid)

    def note(self, event: str, **facts: Any) -> None:  # noqa: ANN401 -- any value that JSON has
        """Append an event. Any thread may."""
        if self._directory is None or self._rank != 0:
            return
        with self._lock, (self._directory / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")


def note_process(directory: Path, pid: int, role: str) -> None:
    """Say that a process runs, and what it is."""
    file = directory / "pids" / str(pid)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".new").write_text(role)
    file.with_suffix(".new").rename(file)  # whoever reads it finds it whole


def noted_processes(directory: Path) -> dict[int, str]:
    """Return the roles of the processes that were noted, by pid."""
    return {int(file.name): file.read_text() for file in (directory / "pids").glob("*") if file.name.isdecimal()}


def noted_events(directory: Path, event: str) -> list[dict[str, Any]]:
    """Return the events of one kind that were noted, oldest first."""
    try:
        lines = (directory / "events.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    noted: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
    return [facts for facts in noted if facts["event"] == event]
