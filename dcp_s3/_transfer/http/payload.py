"""A request body made of memoryviews, written to the socket slice by slice without being joined or copied whole."""

from __future__ import annotations

import fcntl
import sys
import termios
import time
from typing import TYPE_CHECKING, Any, Final

from aiohttp import payload

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from aiohttp.abc import AbstractStreamWriter

SLICE_BYTES: Final = 256 << 10
"""Bytes handed to the transport between two waits for it to drain: asyncio then never buffers more than one slice.
Measured: 256 KiB to 1 MiB make no difference, less costs CPU; a whole part would be copied into asyncio's buffer."""


def unacknowledged(connected: socket.socket) -> int:
    """Bytes that a socket has taken and its peer has not acknowledged; 0 for a closed one."""
    try:
        return int.from_bytes(fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        return 0


class Progress:
    """When a byte last moved, for whoever watches over stalls. Written by the thread that moves the bytes, read from any.

    Args:
        parent: Told too; the progress of the save or load that an attempt belongs to.
    """

    __slots__ = ("_parent", "cpu_s", "last", "moved")

    def __init__(self, parent: Progress | None = None) -> None:
        self.last = time.monotonic()
        self.moved = 0
        self.cpu_s = 0.0
        self._parent = parent

    def touch(self) -> None:
        """Begin to wait: what was before is no stall."""
        self.last = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Note that ``nbytes`` went out or came in just now."""
        self.last = time.monotonic()
        self.moved += nbytes
        if self._parent is not None:
            self._parent.advance(nbytes)

    def spend(self, seconds: float) -> None:
        """Note the CPU time that a thread took to move bytes."""
        self.cpu_s += seconds
        if self._parent is not None:
            self._parent.spend(seconds)


class ViewsPayload(payload.Payload):
    """An aiohttp payload over views of the caller's memory. Can be written again: a retry starts at the first byte.

    Args:
        views: Contiguous byte views, in order. They must stay unchanged until the request has ended.
        progress: Told of every slice that the transport took.
    """

    def __init__(self, views: Sequence[memoryview], progress: Progress) -> None:
        super().__init__(views, content_type="application/octet-stream")
        self._views = views
        self._progress = progress
        self._total = sum(len(view) for view in views)
        self._size = self._total
        self._transport: Any = None

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Bodies of this kind are never text."""
        raise TypeError("a body of views cannot be decoded")

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write all views."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write the views, at most ``content_length`` bytes of them."""
        self._transport = getattr(writer, "transport", None)  # which aiohttp forgets when it closes it
        left = self._total if content_length is None else min(self._total, content_length)
        for view in self._views:
            for offset in range(0, min(len(view), left), SLICE_BYTES):
                piece = view[offset : min(offset + SLICE_BYTES, left)]
                await writer.write(piece)
                await writer.drain()
                self._progress.advance(len(piece))
            left -= min(len(view), left)

    def abort(self) -> None:
        """Cut the connection that the body goes over: an attempt given up must not overlap its successor.

        Closing it would not do: asyncio keeps a closed connection until the peer has read what is buffered.
        """
        if self._transport is not None:
            self._transport.abort()

    def queued(self) -> int:
        """Bytes that the kernel has taken and the peer has not acknowledged."""
        connected = None if self._transport is None else self._transport.get_extra_info("socket")
        return 0 if connected is None else unacknowledged(connected)

    def __deepcopy__(self, memo: dict[int, Any]) -> ViewsPayload:
        return self
