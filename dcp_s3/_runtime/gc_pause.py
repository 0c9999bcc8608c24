"""Python's cyclic garbage collector, kept from walking through objects of which it is known that they stay."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import TYPE_CHECKING, Final

from dcp_s3._runtime.loop_thread import loop_thread, on_fork

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE_S: Final = 10.0
"""Longest time that DCP's planning, and a short save or load as a whole, run without the collector, seconds."""

_WALK_S: Final = 60.0
"""Longest time that one walk through many objects runs without it, seconds. Only an interrupt lets it come to that."""

_lock = threading.Lock()
_pauses: set[_Holder] = set()
_owed = False
"""Whether it was on when it was switched off, or was switched on by somebody since: the last pause's end switches it on."""


class _Holder:
    """Who keeps the collector off, and no longer than so many seconds, whatever becomes of who should have ended it.

    A signal handler may raise between any two steps, and a traceback may keep the frame that was to go on: so the timer
    that ends a pause runs before the pause begins, and whoever ends twice, or without having begun, changes nothing.
    """

    __slots__ = ("_over", "_pid")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._over = False

    def begin(self, limit_s: float) -> None:
        """Switch the collector off, until :meth:`end` or for ``limit_s``."""
        global _owed  # noqa: PLW0603 -- the collector is the process's
        self.end_in(limit_s)
        with _lock:
            if not self._over:  # the timer, too, may have been quicker
                _owed = gc.isenabled() or (_owed and bool(_pauses))
                _pauses.add(self)
                gc.disable()

    def end_in(self, seconds: float) -> None:
        """End it after so long, if nobody does before."""
        loop = loop_thread().loop
        try:
            loop.call_soon_threadsafe(loop.call_later, seconds, self.end)
        except RuntimeError:  # the loop is closed: the process ends
            self.end()

    def end(self) -> None:
        """Let the collector work again. Later calls do nothing, nor do those in a forked child."""
        if self._pid != os.getpid():
            return
        self._over = True
        with _lock:  # the timer and the save may end it at once
            if self in _pauses:
                if _owed and len(_pauses) == 1:
                    gc.enable()
                _pauses.discard(self)


class Pause(_Holder):
    """Keeps the collector off until :meth:`end`, or for ``limit_s`` where that does not come: DCP may fail in between.

    DCP plans with many new objects that stay: with torch imported and 20,000 tensors the collector took 0.9 s of 2.8 s of a
    save and 1.2 s of 2.6 s of a load. (``gc.freeze`` saves as much of it, but thaws into an oldest generation whose size
    the collector has forgotten: its next passes, all of them full ones, then fall into training.)

    Args:
        limit_s: Seconds.
    """

    __slots__ = ()

    def __init__(self, limit_s: float = PAUSE_S) -> None:
        super().__init__()
        self.begin(limit_s)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector off while millions of objects that stay are made, or walked through.

    Each of its passes would visit all of them: 1.4 s instead of 0.3 s for 64,000 records. Nests, and may overlap in
    several threads: the last one out switches it on again, if it was on.
    """
    holder = _Holder()
    try:
        holder.begin(_WALK_S)
        yield
    finally:
        try:
            holder.end()
        finally:
            holder.end()  # an interrupt may have ended the first call


def _after_fork_in_child() -> None:
    # the threads that paused it do not exist here, and one of them may have held the lock
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    if _pauses and _owed:
        gc.enable()
    _pauses.clear()


on_fork(_after_fork_in_child)
