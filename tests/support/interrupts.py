"""Interrupts of the main thread: at each place where CPython runs a signal handler, and at random times."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dis
import functools
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import dcp_s3

_OURS = str(Path(dcp_s3.__file__).parent)
_THEIRS = tuple(str(Path(module.__file__ or "")) for module in (contextlib, queue, threading))
_PACKAGES = tuple(str(Path(module.__file__ or "").parent) for module in (asyncio, concurrent.futures))
_CHECKED = ("RESUME", "CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
"""Beginnings of the names of the instructions behind which CPython looks for signals."""


class Interrupt(KeyboardInterrupt):
    """What the signal handler raises."""


def _is_followed(frame: FrameType) -> bool:
    """Our code, and what of the standard library's keeps locks; but a thread that only starts may be lost."""
    name = frame.f_code.co_filename
    if not name.startswith((_OURS, *_THEIRS, *_PACKAGES)):
        return False
    above: FrameType | None = frame
    for _ in range(5):
        if above is None:
            break
        if above.f_code is threading.Thread.start.__code__:
            return False
        above = above.f_back
    return True


@functools.lru_cache(1000)
def _handlers(code: CodeType) -> dict[int, int]:
    """Where an exception goes, by the offset of the instruction that it is raised at."""
    return {
        offset: entry.target
        for entry in dis.Bytecode(code).exception_entries
        for offset in range(entry.start, entry.end, 2)
    }


class Places:
    """Counts the places where a signal handler may run in this thread, and raises at one of them.

    Args:
        at: Number of the place, from 0; ``None`` only counts.
        files: Ends of the names of the files that count; all that are followed if empty.
    """

    def __init__(self, at: int | None, files: tuple[str, ...] = ()) -> None:
        self.at = at
        self.count = 0
        self.where = ""
        self._files = files

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not _is_followed(frame) or (self._files and not frame.f_code.co_filename.endswith(self._files)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before, last = "RESUME", 0
        code = frame.f_code.co_code
        handlers = _handlers(frame.f_code)

        def step(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
            nonlocal before, last
            if event == "opcode":
                # the interpreter raises at the instruction before, and so must a tracer, which raises at this one
                reachable = before.startswith(_CHECKED) and handlers.get(last) == handlers.get(frame.f_lasti)
                before, last = dis.opname[code[frame.f_lasti]], frame.f_lasti
                if reachable:
                    self.count += 1
                    if self.count - 1 == self.at:
                        self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                        raise Interrupt(self.where)
            return step

        return step

    def __enter__(self) -> Self:
        """Begin."""
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End."""
        sys.settrace(None)


@contextlib.contextmanager
def interrupted_in(seconds: float | None, *, hang_s: float) -> Iterator[None]:
    """Have a signal handler raise :class:`Interrupt` in the main thread after so long.

    Args:
        seconds: Until then; ``None`` for never.
        hang_s: So long after it, or after the beginning, the handler raises an AssertionError: what hangs shall fail.
    """
    pending = seconds is not None

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
        if not pending:
            raise AssertionError(f"it hangs at {where}")
        pending = False
        raise Interrupt(where)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, hang_s if seconds is None else seconds, hang_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
