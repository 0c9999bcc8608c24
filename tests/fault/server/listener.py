"""The sockets: accepting connections (or spoiling them), serving each, and going offline and online."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from .core import Core
from .exchange import Exchange
from .request import Request
from .wire import BadRequestError, Connection, Head, PeerClosedError, reset_socket

ConnectFault = Literal["reset", "garbage", "hang"]


class Listener:
    """Listens on one address and serves S3 on each connection."""

    def __init__(self, core: Core, endpoint: int, host: str, tls: ssl.SSLContext | None) -> None:
        self.core, self.endpoint, self.host, self.port = core, endpoint, host, 0
        self.connect_faults: deque[ConnectFault] = deque()
        self._tls = tls
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._welcoming: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> None:
        """Bind and accept; port 0 takes a free one, which is kept when going online again."""
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind((self.host, port))
        listening.listen(1024)
        self._socket, self.port = listening, listening.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(listening))

    async def close(self) -> None:
        """Stop accepting; break the connections and the requests in flight."""
        if self._accepting is not None:
            await _cancelled([self._accepting])
            self._accepting = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        await _cancelled(list(self._welcoming))
        for connection in list(self._connections):
            connection.reset()
        await _cancelled(list(self._tasks))
        for connection in list(self._connections):
            await connection.lost.wait()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(listening)
            counters = self.core.counters
            counters["accepted"] += 1
            if self.connect_faults:
                counters["refused"] += 1
                task = loop.create_task(self._spoil(accepted, self.connect_faults.popleft()))
            else:
                task = loop.create_task(self._welcome(accepted, counters["accepted"]))
            self._welcoming.add(task)
            task.add_done_callback(self._welcoming.discard)

    async def _spoil(self, accepted: socket.socket, fault: ConnectFault) -> None:
        """Answer the client's first bytes with a reset or with garbage, or never."""
        accepted.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            if fault == "hang":
                await loop.create_future()
            await loop.sock_recv(accepted, 1)
            if fault == "reset":
                reset_socket(accepted)
            else:
                await loop.sock_sendall(accepted, b"\x00this is neither TLS nor HTTP\r\n\r\n")
        except OSError:
            pass  # the client was quicker
        finally:
            accepted.close()

    async def _welcome(self, accepted: socket.socket, number: int) -> None:
        loop, counters = asyncio.get_running_loop(), self.core.counters

        def connected() -> Connection:
            return Connection(number, self.endpoint, self._serve, self._lost, self._tasks)

        timeouts: dict[str, Any] = (
            {} if self._tls is None else {"ssl_handshake_timeout": 10.0, "ssl_shutdown_timeout": 1.0}
        )
        try:
            _, connection = await loop.connect_accepted_socket(connected, accepted, ssl=self._tls, **timeouts)
        except OSError:
            counters["failed_handshakes"] += 1
            accepted.close()
            return
        if not connection.lost.is_set():
            self._connections.add(connection)
            counters["open"] += 1
            counters["peak_open"] = max(counters["peak_open"], counters["open"])

    def _lost(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self.core.counters["open"] -= 1

    async def _serve(self, connection: Connection) -> None:
        """Serve requests until the connection ends."""
        try:
            while await self._serve_one(connection):
                pass
        except (PeerClosedError, BadRequestError):
            pass
        except Exception as error:
            self.core.note_bug(error)
        finally:
            connection.close()

    async def _serve_one(self, connection: Connection) -> bool:
        head = Head.parse(await connection.read_until(b"\r\n\r\n"))
        request = Request.parse(head, self.core.settings.virtual_host)
        return await Exchange(self.core, connection, request).run()


async def shut_down(core: Core, listeners: Sequence[Listener]) -> None:
    """Stop serving: open the gates, break what is in flight."""
    await core.script.clear()
    for listener in listeners:
        await listener.close()
    await _cancelled(list(core.detached))


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
