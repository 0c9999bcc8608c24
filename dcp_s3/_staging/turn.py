"""The turns of a process's background saves: one after another, in the world they were staged in, never dead unheard.

DCP runs each ``async_save`` in a thread of its own, and all of them in one process group: two at once would take each
other's messages. It decides between a save of all ranks and one of a lone process when the thread begins, by whether there
is a process group then. And what a thread raises is in a future that nobody may ever read. So each staging takes a
:class:`Turn`, which travels with the staged state dict into the thread that saves it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

import torch.distributed as dist

from dcp_s3._checkpoint.group_deadline import deadline_s, outlasting_s
from dcp_s3.errors import ConfigError, DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Turn", "World", "interruption_told", "take_turn", "wait_for_saves"]

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.02
_BEGIN_S: Final = 60.0
"""So long a staged state dict may lie about before the save that DCP makes of it begins; it takes milliseconds, after the
first one in a checkpoint process, for which :data:`_PROCESS_S` is allowed."""
_PROCESS_S: Final = 300.0


class World(NamedTuple):
    """The default process group, as one of its ranks sees it. A process without a group is alone."""

    size: int
    rank: int

    @classmethod
    def now(cls) -> World:
        """The world of this moment."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(1, 0)
        return cls(dist.get_world_size(), dist.get_rank())


class Turn:
    """What one staged state dict's save waits for, and what is known of it.

    Attributes:
        place: What it saves to, as far as that is known.
        rank: Rank that saves, in its process group; that of the world until the save has begun.
        settled: Whether its end has been told, or was a good one: nobody need be told any more.
    """

    def __init__(self, number: int, world: World | None) -> None:
        self.number = number
        self.world = world
        self.place = "a state dict that was staged"
        self.rank = world.rank if world is not None else 0
        self.settled = False
        self._thread: threading.Thread | None = None
        self._staged: weakref.ref[object] | None = None
        self._since: float | None = None
        self._cancelled = False

    def __str__(self) -> str:
        return f"the save of {self.place} on rank {self.rank}"

    def belongs_to(self, staged: object) -> None:
        """Note the state dict that was staged: when nobody holds it any more, DCP has returned from its save."""
        self._staged = weakref.ref(staged)

    def queue(self) -> None:
        """Take the place behind all others. Whoever fails or is interrupted from here on calls :meth:`cancel`.

        In a group, waits until the save before has begun: while DCP starts its checkpoint process for that one, it would start
        another for this one, and each rank would decide so by itself.
        """
        if World.now().size > 1 and not _has_checkpoint_process():
            end = time.monotonic() + _PROCESS_S
            with interruption_told():
                while (late := _not_begun()) is not None:
                    if time.monotonic() >= end:
                        logger.warning(
                            "%s has not begun for %g s; the next one does not wait for that", late, _PROCESS_S
                        )
                        late.cancel()
                    time.sleep(_POLL_S)
        with _lock:
            _turns[:] = [turn for turn in _turns if not turn.over()]
            self.number = next(_numbers)
            _turns.append(self)
        _watch_over_the_end()

    def cancel(self) -> None:
        """There will be no save: the staging was interrupted."""
        self._cancelled = True

    def begin(self) -> None:
        """Note that the calling thread saves the state dict, and watch over its end."""
        self._thread = threading.current_thread()
        _here.turn = self
        if self._thread is not threading.main_thread() and getattr(_here, "watched", None) is not self:
            _here.watched = self
            _here.watch = _Watch(self)

    def crosses(self) -> None:
        """Note that the calling thread sends the state dict to another process, and wait until that is its turn.

        Raises:
            DeadlineExceededError: A save before does not end.
        """
        self._thread = threading.current_thread()
        self.settled = True  # the other process tells what becomes of it
        self.wait(outlasting_s(deadline_s(None, "save_deadline_s")))

    def check_world(self) -> None:
        """Refuse to save in another world than that of the staging.

        Raises:
            ConfigError: The process group has been destroyed, or replaced by one of another size.
        """
        now = World.now()
        if self.world is None or self.world == now:
            return
        found = "there is none now" if now.size == 1 else f"now it has {now.size}, and this is rank {now.rank}"
        raise ConfigError(
            f"async_save was called on rank {self.world.rank} of a process group of {self.world.size} ranks, and {found}: each "
            "rank would save alone what it holds, as if that were all. Nothing was sent, and what was there before stands. "
            "Wait for the future of the last async_save before dist.destroy_process_group()"
        )

    def wait(self, limit_s: float) -> None:
        """Wait until the saves before this one have ended, on this rank; so all ranks run them in one order.

        Args:
            limit_s: How long each of them may take from its own turn on, in seconds.

        Raises:
            DeadlineExceededError: One of them does not end.
        """
        _wait([turn for turn in list(_turns) if turn.number < self.number], limit_s)
        self._since = time.monotonic()

    @property
    def begun(self) -> bool:
        """Whether a thread has taken the state dict up."""
        return self._thread is not None

    def over(self) -> bool:
        """Whether DCP is through with it: its thread has ended, or the state dict is gone. Then so are its collectives."""
        if self._cancelled or (self._staged is not None and self._staged() is None):
            return True
        return self._thread is not None and (not self._thread.is_alive() or self._thread is threading.current_thread())


class _Watch:
    """Dies with the thread that holds it."""

    __slots__ = ("__weakref__",)

    def __init__(self, turn: Turn) -> None:
        weakref.finalize(self, _tell, turn).atexit = False


def _tell(turn: Turn) -> None:
    if not turn.settled:
        turn.settled = True
        logger.error(
            "%s ended between two of DCP's steps: it was not committed, and what was there before stands. Either another rank "
            "failed, or the process group was destroyed while it ran (wait for the future of the last async_save first). "
            "The future of this save holds the error",
            turn,
        )


_numbers = itertools.count(1)
_turns: list[Turn] = []  # in their order, without those that are over
_here = threading.local()
_lock = threading.Lock()


def new_turn() -> Turn:
    """A turn for a state dict that is about to be staged; :meth:`Turn.queue` puts it behind all others."""
    return Turn(0, World.now())


def received_turn() -> Turn:
    """The turn of a state dict that came from another process, which keeps the order; the group here is DCP's own."""
    return Turn(0, None)


def take_turn() -> Turn | None:
    """The turn of the state dict that this thread has just taken up; ``None`` for a save of one that was not staged here."""
    turn: Turn | None = getattr(_here, "turn", None)
    _here.turn = None
    return turn


def wait_for_saves(limit_s: float) -> None:
    """Wait until no background save of this process is under way, before other collectives begin in its group.

    Args:
        limit_s: How long each of them may take from its own turn on, in seconds.

    Raises:
        DeadlineExceededError: One of them does not end.
    """
    mine = threading.current_thread()
    turns = list(_turns)
    if World.now().size > 1 and not any(turn._thread is mine and not turn.settled for turn in turns):  # noqa: SLF001
        _wait(turns, limit_s)


@contextlib.contextmanager
def interruption_told() -> Iterator[None]:
    """Say in one line what ``async_save`` was waiting for when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        logger.warning("interrupted while async_save was waiting for %s", _under_way() or "nothing that is known")
        raise


def _wait(turns: list[Turn], limit_s: float) -> None:
    began = time.monotonic()
    for turn in turns:
        while not turn.over():
            now = time.monotonic()
            if not turn.begun:
                if World.now().size == 1:
                    break
                late = now - began > _BEGIN_S
            else:
                late = turn._since is not None and now - turn._since > limit_s  # noqa: SLF001
            if late:
                raise DeadlineExceededError(
                    f"{turn} has not ended, so this one cannot begin: both would use one process group. Nothing was sent"
                )
            time.sleep(_POLL_S)


def _not_begun() -> Turn | None:
    return next((turn for turn in list(_turns) if not turn.begun and not turn.over()), None)


def _under_way() -> str:
    turns = [turn for turn in list(_turns) if not turn.over()]
    return ", ".join(str(turn) for turn in [turn for turn in turns if turn.begun] or turns)


def _has_checkpoint_process() -> bool:
    executor = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
    return getattr(executor, "_CHECKPOINT_PROCESS", None) is not None


# ---------------------------------------------------------------------- the end of the interpreter

_watching = False


def _watch_over_the_end() -> None:
    """Have the interpreter, which waits for the threads of saves when it ends, say so when it is interrupted there."""
    global _watching  # noqa: PLW0603 -- one per process by design
    if not _watching:
        _watching = True
        with contextlib.suppress(AttributeError, RuntimeError):  # it is ending already
            threading._register_atexit(_at_exit)  # type: ignore[attr-defined]  # noqa: SLF001 -- before it waits for threads; atexit's come after


def _at_exit() -> None:
    waiting = any(not turn.settled and not turn.over() for turn in _turns)
    if waiting and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread of the main interpreter
            signal.signal(signal.SIGINT, _interrupted_at_exit)


def _interrupted_at_exit(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logger.warning(
        "this process waits for %s before it ends; interrupt it once more to give that up",
        _under_way() or "its threads",
    )


def _forget() -> None:
    """In a forked child: the parent's saves are the parent's, and no thread holds the lock."""
    global _lock, _here  # noqa: PLW0603 -- one per process by design
    _lock = threading.Lock()
    _here = threading.local()
    _turns.clear()


os.register_at_fork(after_in_child=_forget)
