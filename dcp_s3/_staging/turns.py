"""Background saves of one process take turns, and each one runs in the world in which it was staged.

DCP starts a thread for each ``async_save`` and lets them run side by side. Two of them in one process group mix up their
collectives and wait for one another until the group's time-out. So a save begins when the one that was staged before it has
ended: not when it has committed, but when its thread has, as only then its last collective is over on this rank.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

import torch.distributed as dist

from dcp_s3.errors import ConfigError, DeadlineExceededError

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.01
_UNUSED_S: Final = 60.0
"""What nobody has taken up for so long was staged for another purpose than a save."""

World = tuple[int, int]
"""Size of the default process group and this process's rank in it."""


def world() -> World | None:
    """The world as it is now; ``None`` without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return None


class Turn:
    """One staged save's turn.

    Args:
        before: The turn of the save that was staged before it, if that has not ended.
        limit_s: Longest wait for that, seconds.
        place: Where the save goes, for messages.
    """

    def __init__(self, before: Turn | None, limit_s: float, place: str) -> None:
        self._before = before
        self._limit_s = limit_s
        self._place = place
        self._world = world()
        self._staged_by = threading.current_thread()
        self._thread: threading.Thread | None = None
        self._shipped = self._dropped = False

    @property
    def is_running(self) -> bool:
        """Whether a thread has taken up the save, and has not ended."""
        return self._thread is not None and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the save runs in this process any more."""
        if self._thread is None or self._shipped:
            return self._dropped or (self._thread is not None and not self._thread.is_alive())
        return not self._thread.is_alive()

    def wait_until_taken_up(self, limit_s: float) -> None:
        """Wait until a thread has taken up the save, or, where it runs in another process, until it has ended there."""
        start = time.monotonic()
        while not self.has_ended and (self._thread is None or self._shipped):
            waited_s = time.monotonic() - start
            if waited_s >= (limit_s if self._shipped else min(limit_s, _UNUSED_S)):
                _log.warning("waited %.0f s for the save to %s, staged before this one", waited_s, self._place)
                return
            time.sleep(_POLL_S)

    def drop(self) -> None:
        """What was staged is gone."""
        self._dropped = True

    def begin(self, *, shipped: bool = False) -> None:
        """Take up the save on its thread: wait for the one before, and look whether the world is still the same.

        Args:
            shipped: The save runs in another process, which has a group of its own.

        Raises:
            ConfigError: The process group has been destroyed or replaced since the staging.
            DeadlineExceededError: The save before has not ended in time.
        """
        thread = threading.current_thread()
        if self._thread is not None or thread is self._staged_by:
            return
        self._thread, self._shipped = thread, shipped
        if not shipped:
            _here.turn = self
        try:
            before, self._before = self._before, None
            if before is not None:
                before.wait_until_ended(self._limit_s)
            if not shipped:
                self.check_world()
        except (ConfigError, DeadlineExceededError) as error:
            _log.error("the save to %s failed on rank %d: %s", self._place, self._world[1] if self._world else 0, error)
            raise

    def wait_until_ended(self, limit_s: float) -> None:
        """Wait for the end of the save.

        Raises:
            DeadlineExceededError: It has not come within ``limit_s`` seconds.
        """
        end = time.monotonic() + limit_s
        while not self.has_ended:
            if time.monotonic() >= end:
                raise DeadlineExceededError(
                    f"the save to {self._place}, staged before this one, has not ended after {limit_s:.0f} s; two saves in one "
                    "process group at once would hang"
                )
            time.sleep(_POLL_S)

    def check_world(self) -> None:
        """Raise if the process group is not the one that was there when the save was staged.

        Raises:
            ConfigError: Without its group DCP would save each rank's part as if it were the whole.
        """
        now = world()
        if now == self._world or max(now or (1,), self._world or (1,))[0] == 1:
            return
        was = f"rank {self._world[1]} of {self._world[0]}" if self._world else "a process without a group"
        now_is = f"rank {now[1]} of {now[0]}" if now else "in no process group any more"
        raise ConfigError(
            f"async_save was called by {was}, and this process is now {now_is}: nothing was saved. Wait for the last future "
            "(future.result()) before dist.destroy_process_group()"
        )


class _Here(threading.local):
    turn: Turn | None = None


_here = _Here()
_lock = threading.Lock()
_last: Turn | None = None


def take(limit_s: float, place: str) -> Turn:
    """Line up for a save that is about to be staged.

    Waits until the one before has been taken up by its thread, which takes milliseconds, and until it has ended where it runs
    in another process: DCP's parent side of that is not made for two at once.

    Args:
        limit_s: Longest wait, here and later for the end of the save before, seconds.
        place: Where the save goes, for messages.
    """
    global _last  # noqa: PLW0603 -- one line per process by design
    with _lock:
        before = _last
        if before is not None:
            before.wait_until_taken_up(limit_s)
        _last = Turn(before if before is not None and before.is_running else None, limit_s, place)
        return _last


def current() -> Turn | None:
    """The turn of the save that begins on this thread, once; ``None`` for one that was not staged by our stager."""
    turn, _here.turn = _here.turn, None
    return turn


def wait_for_others(limit_s: float) -> None:
    """Wait, on a thread without a turn, until no staged save runs any more.

    Raises:
        DeadlineExceededError: It has not ended in time.
    """
    last = _last
    if last is not None and last.is_running:
        last.wait_until_ended(limit_s)


def _forget() -> None:
    global _lock, _last, _here  # noqa: PLW0603 -- the parent's saves are the parent's
    _lock = threading.Lock()
    _last = None
    _here = _Here()


os.register_at_fork(after_in_child=_forget)
