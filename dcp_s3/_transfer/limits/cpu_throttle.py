"""How a save in the background leaves room for the training that it shares cores, and perhaps the GIL, with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from dcp_s3._runtime.loop_thread import loop_thread

if TYPE_CHECKING:
    from dcp_s3._transfer.http.payload import Progress
    from dcp_s3._transfer.limits.retry import Deadline

_LEAST_S: Final = 0.001
_MOST_S: Final = 1.0


class CpuThrottle:
    """Rests after each part, so that a save takes at most so much of a core. A slow network rests for it.

    Args:
        cores: CPU seconds per second, more than 0.
        progress: Of the save; knows what its sending threads have taken.
        deadline: Of the save; it is not waited beyond.
    """

    def __init__(self, cores: float, progress: Progress, deadline: Deadline) -> None:
        self._cores = cores
        self._progress = progress
        self._deadline = deadline
        self._since = time.monotonic()
        self._taken = self._cpu_s()

    def rest(self) -> None:
        """Wait until the CPU time taken since the last call is no more than the share of the time that has passed."""
        taken = self._cpu_s()
        owed = (taken - self._taken) / self._cores - (time.monotonic() - self._since)
        if owed > _LEAST_S:
            time.sleep(max(0.0, min(owed, _MOST_S, self._deadline.remaining())))
        self._taken, self._since = taken, time.monotonic()

    def _cpu_s(self) -> float:
        return time.thread_time() + self._progress.cpu_s + loop_thread().cpu_s()
