"""How the program meets its terminal: interrupts, encodings, output that cannot be written, warnings of the library."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED: Final = 130

_afterwards = ""


class OutputError(Exception):
    """Standard output could not be written, for another reason than that nobody reads it."""


def prepare() -> None:
    """Set up the process before its first request."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and the shell's & leave it
            signal.signal(number, _interrupted)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without a letter shows its number
    # how a request fares is worth a line while one waits; what the tools have to say is in their reports
    logging.getLogger("dcp_s3").addHandler(logging.NullHandler())
    logging.getLogger("dcp_s3._transfer").addHandler(_Warnings(logging.WARNING))


def when_interrupted(text: str) -> None:
    """Set what the line of an interrupted command adds."""
    global _afterwards  # noqa: PLW0603 -- a signal handler has no other memory
    _afterwards = text


def _interrupted(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 -- a signal handler's arguments
    # at once: requests that hang on other threads would hold an ordinary exit up to the end of their time-outs
    with contextlib.suppress(OSError):
        os.write(2, f"dcp-s3: interrupted{_afterwards}\n".encode())
    os._exit(INTERRUPTED)


def line(text: str) -> None:
    """Print a line on standard output. Where nobody reads it any more (``| head``) it is dropped.

    Raises:
        OutputError: The disk is full, or the like.
    """
    if sys.stdout is None:  # the shell closed it: >&-
        return
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        # the interpreter flushes once more at its end
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"the output could not be written: {error.strerror}") from error


def complain(text: str) -> None:
    """Print a line on standard error, in red where that is a terminal."""
    from rich.console import Console

    with contextlib.suppress(OSError):
        # text, not markup; lines are for grep and are not wrapped
        Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True).print(
            printable(f"dcp-s3: {' '.join(text.split())}"), style="red"
        )


def printable(text: str) -> str:
    """Escape what could move the cursor: keys and names may come from anybody who can write to the bucket."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(record.getMessage())
