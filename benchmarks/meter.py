"""Clock, CPU time and memory of a measured piece of work."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from types import TracebackType

MIB = 1 << 20
GIB = 1 << 30


def cpu_s() -> float:
    """User and system seconds of this process and its children, those that ended and those that live."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


class Meter:
    """Measures its ``with`` block: :attr:`wall_s`, :attr:`cpu_s`, and :attr:`peak_mib` over the memory at its start.

    The peak is the kernel's high-water mark of this process alone (``/proc/self/clear_refs`` resets it).
    """

    def __enter__(self) -> Self:
        self.wall_s = self.cpu_s = self.peak_mib = 0.0
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._resident = _resident("VmRSS")
        self._cpu = cpu_s()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wall_s = time.perf_counter() - self._start
        self.cpu_s = cpu_s() - self._cpu
        self.peak_mib = max(0, _resident("VmHWM") - self._resident) / MIB

    def values(self, name: str, gib: float) -> dict[str, float]:
        """What was measured, under names that begin with ``name``; CPU per GiB."""
        return {
            f"{name}_wall_s": self.wall_s,
            f"{name}_cpu_s_per_gib": self.cpu_s / gib,
            f"{name}_peak_mib": self.peak_mib,
        }
