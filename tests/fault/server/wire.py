"""HTTP/1.1 on one accepted connection: reading heads and bodies, writing replies, breaking off."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

_SCRATCH_BYTES = 64 * 2**10
_PENDING_LIMIT_BYTES = 2**20
_SLICE_BYTES = 256 * 2**10
_HEAD_LIMIT_BYTES = 64 * 2**10


class PeerClosedError(Exception):
    """The client closed or reset the connection; ``got`` counts the bytes of the unfinished read."""

    def __init__(self, message: str = "peer closed", got: int = 0) -> None:
        super().__init__(message)
        self.got = got


class BadRequestError(Exception):
    """What arrived is not an HTTP/1.1 request that this server understands."""


@dataclasses.dataclass(frozen=True)
class Head:
    """Request line and headers (names in lower case)."""

    method: str
    target: str
    headers: dict[str, str]

    @classmethod
    def parse(cls, raw: bytes) -> Head:
        """Split a head that ends in an empty line."""
        lines = raw.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise BadRequestError(f"request line {lines[0][:80]!r}")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            if line:
                name, colon, value = line.partition(":")
                if not colon:
                    raise BadRequestError(f"header line {line[:80]!r}")
                headers[name.strip().lower()] = value.strip()
        return cls(words[0], words[1], headers)


class Connection(asyncio.BufferedProtocol):
    """One client connection: bodies are received straight into their final buffer.

    Only the task made from ``serve`` reads and writes; the event loop fills the buffers. The task is kept in ``tasks``, as it
    may outlive the connection.
    """

    def __init__(
        self,
        number: int,
        endpoint: int,
        serve: Callable[[Connection], Coroutine[Any, Any, None]],
        on_lost: Callable[[Connection], None],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self.number, self.endpoint = number, endpoint
        self.rate_bytes_s: float | None = None
        self.lost = asyncio.Event()
        self.on_close: Callable[[], None] | None = None
        self._serve, self._on_lost, self._tasks = serve, on_lost, tasks
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._pending = bytearray()
        self._target: memoryview | None = None
        self._filled = 0
        self._paused = self._unread = False
        self._waiter: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def transport(self) -> asyncio.Transport:
        """The transport, once connected."""
        assert self._transport is not None
        return self._transport

    # Callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start serving."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_SLICE_BYTES)
        task = self._loop.create_task(self._serve(self))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake whoever waits on this connection."""
        self.lost.set()
        self._writable.set()
        self._wake()
        if self.on_close is not None:
            self.on_close()
        self._on_lost(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Hand out the body's buffer, or the scratch buffer between bodies."""
        view = self._scratch if self._target is None else self._target[self._filled :]
        if self.rate_bytes_s is not None:
            view = view[: max(1, int(self.rate_bytes_s / 50))]
        return view

    def buffer_updated(self, nbytes: int) -> None:
        """Account for received bytes."""
        if self._target is not None:
            self._filled += nbytes
            if self._filled == len(self._target):
                self._target = None
                self._wake()
        else:
            self._pending += self._scratch[:nbytes]
            if len(self._pending) > _PENDING_LIMIT_BYTES:
                self.pause()
            self._wake()
        if self.rate_bytes_s is not None and not self._paused:
            self.pause()
            self._loop.call_later(nbytes / self.rate_bytes_s, self.resume)

    def pause_writing(self) -> None:
        """Stop the writer until the peer has read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let the writer go on."""
        self._writable.set()

    # Reading

    def pause(self) -> None:
        """Stop receiving; the peer's sends then fill the kernel's buffers and block."""
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Receive again."""
        if self._paused and not self._unread and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        """Wait for received bytes or the end of the connection."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def read_until(self, separator: bytes) -> bytes:
        """Return the bytes up to and with ``separator``."""
        searched = 0
        while (found := self._pending.find(separator, searched)) < 0:
            if self.lost.is_set():
                raise PeerClosedError(got=len(self._pending))
            searched = max(0, len(self._pending) - len(separator) + 1)
            if searched > _HEAD_LIMIT_BYTES:
                raise BadRequestError(f"no {separator!r} within {_HEAD_LIMIT_BYTES} bytes")
            self.resume()
            await self._wait()
        end = found + len(separator)
        line = bytes(self._pending[:end])
        del self._pending[:end]
        return line

    async def read(self, count: int) -> bytearray:
        """Return exactly ``count`` bytes."""
        body = bytearray(count)
        at_hand = min(count, len(self._pending))
        body[:at_hand] = self._pending[:at_hand]
        del self._pending[:at_hand]
        if at_hand == count:
            return body
        view = memoryview(body)[at_hand:]
        self._target, self._filled = view, 0
        self.resume()
        try:
            while self._filled < len(view):
                if self.lost.is_set():
                    raise PeerClosedError(got=at_hand + self._filled)
                await self._wait()
        finally:
            self._target = None
        return body

    async def read_chunked(self) -> bytearray:
        """Return a body sent with ``Transfer-Encoding: chunked``, without that framing."""
        body = bytearray()
        while True:
            line = await self.read_until(b"\r\n")
            try:
                size = int(line.split(b";")[0], 16)
            except ValueError as error:
                raise BadRequestError(f"chunk size {line[:40]!r}") from error
            if size == 0:
                while await self.read_until(b"\r\n") != b"\r\n":
                    pass
                return body
            try:
                body += await self.read(size)
            except PeerClosedError as error:
                raise PeerClosedError(got=len(body) + error.got) from None
            await self.read(2)

    # Writing

    async def write(self, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send ``pieces``, never far ahead of what the peer takes."""
        for piece in pieces:
            view = memoryview(piece)
            step = _SLICE_BYTES if self.rate_bytes_s is None else max(1, int(self.rate_bytes_s / 50))
            for start in range(0, len(view), step):
                if self.lost.is_set() or self.transport.is_closing():
                    raise PeerClosedError
                part = view[start : start + step]
                self.transport.write(part)
                if self.rate_bytes_s is not None:
                    await asyncio.sleep(len(part) / self.rate_bytes_s)
                await self._writable.wait()

    # Ending

    def reset(self) -> None:
        """End with a TCP reset, at once."""
        reset_socket(self.transport.get_extra_info("socket"))
        self.transport.abort()

    def close(self) -> None:
        """End in good order after what was written is out."""
        if self._transport is not None:
            self._transport.close()

    async def close_after_draining(self, limit_s: float = 1.0) -> None:
        """Close without resetting: take and drop what the peer still sends, for a bounded time."""
        with contextlib.suppress(TimeoutError, PeerClosedError):
            async with asyncio.timeout(limit_s):
                while True:
                    await self.read(_SCRATCH_BYTES)
        self.close()

    async def stay_unread(self) -> float:
        """Take nothing from the socket until the peer has closed its end; return when it was last seen open.

        A close behind a full receive window never reaches this side, so the state of the peer's socket is
        looked up in the kernel's table (both ends are on this machine); without it, wait for ever.
        """
        self._unread = True
        self.pause()
        local, peer = (self.transport.get_extra_info(name)[1] for name in ("sockname", "peername"))
        last_seen = None
        while not self.lost.is_set():
            now = time.monotonic()
            if _is_established(peer, local):
                last_seen = now
            elif last_seen is not None:
                return last_seen
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), 0.02)
        return time.monotonic()


def reset_socket(sock: Any) -> None:  # socket.socket or asyncio's TransportSocket
    """Make the next close of ``sock`` send RST."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _is_established(local_port: int, remote_port: int) -> bool:
    """Whether the kernel has an established socket with these ports."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                ports = [int(address.rpartition(":")[2], 16) for address in fields[1:3]]
                if ports == [local_port, remote_port] and fields[3] == "01":
                    return True
    return False
