"""The HTTP/1.1 client without TLS: bodies move between the caller's memory and the socket by blocking calls in threads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

from dcp_s3._runtime.loop_thread import ended
from dcp_s3._transfer.http.payload import unacknowledged
from dcp_s3._transfer.http.sink import Connection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_s3._transfer.http.payload import Progress
    from dcp_s3._transfer.http.sink import Reply, Sink

_CALL_BYTES: Final = 8 << 20
"""Most bytes of one call."""
_CALL_S: Final = 0.5
"""Longest time of one call on the socket: what it has moved by then is progress, however slow the line is."""
_GRACE_S: Final = 0.5
"""A store may refuse a body, reply and close while it is sent: its reply is waited for a little when the sending fails."""
_LOOP_BYTES: Final = 256 << 10
"""A body of which no more than this is missing is received on the loop thread: not worth a thread."""
_SETTLE_S: Final = 0.05
"""A reply may be here before the thread has seen that the socket took the last bytes."""
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_TIMEOUT: Final = struct.pack("@ll", 0, int(_CALL_S * 1e6))
"""A struct timeval."""
_MORE: Final = getattr(socket, "MSG_MORE", 0)


class PlainConnection(Connection):
    """A connection whose bodies are sent and received by a few calls each.

    Each time that a thread of ours comes back from the kernel it takes the GIL from whoever computes: an asyncio transport
    does so for every 256 KiB it sends, and copies what the socket does not take at once.

    Args:
        connected: Its socket, in blocking mode, which it owns from now on.
        silence_s: A call in a thread gives up when nothing has moved for so long; whoever waits for the request should
            have done so before.
    """

    def __init__(self, connected: socket.socket, silence_s: float) -> None:
        super().__init__()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEOUT)
        self._socket = connected
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._in_request = self._sent = False
        self._moving: asyncio.Future[None] | None = None
        self._loop.add_reader(connected, self._readable)

    async def send(self, head: bytes, views: Sequence[memoryview], progress: Progress) -> Reply:
        """Send a request with a body and have its reply, which may come before all has been sent.

        When this returns or raises, no thread reads the views any more.

        Args:
            head: Request line and headers, with ``Content-Length``.
            views: The body.
            progress: Told of every byte of it that the socket took.

        Raises:
            OSError: The connection failed or ended.
        """
        self._begin(None, None)
        self._moving = self._loop.run_in_executor(None, self._send, head, views, progress)
        self._moving.add_done_callback(self._sending_ended)
        try:
            reply = await self._reply_to_body(progress)
            await asyncio.wait({self._moving}, timeout=_SETTLE_S)
            self._in_request = not self._sent
            self.reusable = self.reusable and not self._in_request
            return reply
        finally:
            await self._end()

    async def request(self, head: bytes, sink: Sink, first_byte: int | None) -> Reply:
        """Send a GET and have its reply, the body in ``sink``. When this returns or raises, no thread writes there."""
        self._begin(sink, first_byte)
        try:
            if self._socket.send(head, socket.MSG_DONTWAIT) != len(head):
                raise ConnectionError("the connection does not take a request")
            assert self._waiter is not None  # noqa: S101 -- just begun
            reply = await self._waiter
            self._in_request = False
            return reply
        finally:
            await self._end()

    def abort(self) -> None:
        """Close the connection; within a request nothing of what the socket still holds arrives any more."""
        self.closed = True
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        if self._in_request:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        if self._moving is not None and not self._moving.done():
            self._interrupt()  # closing does not wake the call in the thread; the request ends with it, and closes then
        else:
            self._socket.close()

    def _begin(self, sink: Sink | None, first_byte: int | None) -> None:
        self._reset()
        self._sink = sink
        self._first_byte = first_byte
        self._waiter = self._loop.create_future()
        self._in_request, self._sent = True, False

    async def _end(self) -> None:
        """Leave no thread behind."""
        self._waiter = None
        moving = self._moving
        try:
            if moving is not None and not moving.done():
                self._interrupt()
                await ended(moving)
        finally:
            self._moving = self._sink = None
            if self.closed:
                self.abort()

    def _interrupt(self) -> None:
        """Have the call in the thread return."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------ in a thread

    def _send(self, head: bytes, views: Sequence[memoryview], progress: Progress) -> None:
        taken = time.thread_time()  # 0 in a thread of its own
        try:
            self._send_all(memoryview(head), _MORE if views else 0, None)
            for view in views:
                self._send_all(view, 0, progress)
            self._sent = True
        finally:
            progress.spend(time.thread_time() - taken)

    def _send_all(self, view: memoryview, flags: int, progress: Progress | None) -> None:
        """Send bytes by as few calls as they take; each returns within ``_CALL_S`` with what the socket took."""
        offset = 0
        moved = time.monotonic()
        while offset < len(view):
            called = time.monotonic()
            try:
                count = self._socket.send(view[offset : offset + _CALL_BYTES], flags)
            except BlockingIOError:
                self._check_silence(called, moved)
                continue
            moved = time.monotonic()
            offset += count
            if progress is not None:
                progress.advance(count)

    def _receive(self, sink: Sink) -> None:
        moved = time.monotonic()
        while sink.filled < sink.length:
            room = sink.buffer()[:_CALL_BYTES]
            called = time.monotonic()
            try:
                count = self._socket.recv_into(room, len(room), socket.MSG_WAITALL)
            except BlockingIOError:
                self._check_silence(called, moved)
                continue
            if not count:
                break
            moved = time.monotonic()
            sink.advance(count)

    def _check_silence(self, called: float, moved: float) -> None:
        now = time.monotonic()
        if now - called < _CALL_S / 2:
            raise ConnectionError("a call on the socket did not wait: something has made the socket non-blocking")
        if now - moved > self._silence_s:
            raise TimeoutError(f"nothing moved for {self._silence_s:g} s")

    # ------------------------------------------------------------------ on the loop

    async def _reply_to_body(self, progress: Progress) -> Reply:
        """Wait for the reply. What the kernel has taken and still passes on is progress, too, on a slow line."""
        waiter = self._waiter
        assert waiter is not None  # noqa: S101 -- just begun
        queued = 0
        while not waiter.done():
            await asyncio.wait({waiter}, timeout=_CALL_S)
            before, queued = queued, unacknowledged(self._socket)
            if queued < before:
                progress.advance(0)
        return waiter.result()

    def _sending_ended(self, sending: asyncio.Future[None]) -> None:
        """Whatever ends the sending early ends the request: at once, but for a reply that is on its way."""
        error = None if sending.cancelled() else sending.exception()
        waiter = self._waiter
        if error is not None and waiter is not None and not waiter.done():
            self._loop.call_later(_GRACE_S, self._fail_sending, waiter, error)

    def _fail_sending(self, waiter: asyncio.Future[Reply], error: BaseException) -> None:
        if not waiter.done():
            failure = error if isinstance(error, OSError) else ConnectionError(f"sending failed: {error!r}")
            waiter.set_exception(failure)

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(self.get_buffer(-1), 0, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        if not count:
            self._lost(None)
            return
        self.buffer_updated(count)
        sink = self._sink
        if self._into_sink and not self.closed and sink is not None and sink.length - sink.filled > _LOOP_BYTES:
            self._loop.remove_reader(self._socket)
            self._moving = self._loop.run_in_executor(None, self._receive, sink)
            self._moving.add_done_callback(self._received)

    def _received(self, moving: asyncio.Future[None]) -> None:
        error = moving.exception()
        if self.closed or self._waiter is None:
            return
        self._loop.add_reader(self._socket, self._readable)
        if isinstance(error, Exception) or (self._sink is not None and self._sink.filled < self._sink.length):
            self._lost(error if isinstance(error, Exception) else None)
        else:
            self._done()

    def _lost(self, error: Exception | None) -> None:
        self._loop.remove_reader(self._socket)
        self.connection_lost(error)
        if not self._in_request:
            self.abort()
