"""Kept connections: GETs into the caller's buffers, and PUTs out of them."""

from __future__ import annotations

import abc
import asyncio
import socket
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from dcp_s3._transfer.plain import PlainConnection
from dcp_s3._transfer.receive import Connection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from dcp_s3._transfer.payload import Progress
    from dcp_s3._transfer.receive import Reply, Sink

_IDLE_S: Final = 8.0
"""An idle connection older than this is not used again: servers close theirs after 5 s or more, usually 15 to 60."""

C = TypeVar("C", bound=Connection)
Address = tuple[str, int]


class _Pool(abc.ABC, Generic[C]):
    """Connections of one kind, kept per host. Lives on one event loop."""

    def __init__(self, *, limit: int, connect_timeout_s: float) -> None:
        self._limit = limit
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Address, list[C]] = {}

    @abc.abstractmethod
    async def _open(self, address: Address) -> C:
        """Connect."""

    async def _take(self, address: Address) -> C:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not connection.closed and time.monotonic() - connection.idle_since < _IDLE_S:
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._open(address)
        except TimeoutError as error:
            raise ConnectionError(
                f"no connection to {address[0]}:{address[1]} within {self._connect_timeout_s:g} s"
            ) from error
        except OSError as error:
            raise ConnectionError(f"no connection to {address[0]}:{address[1]}: {error}") from error

    def _keep(self, address: Address, connection: C) -> None:
        idle = self._idle.setdefault(address, [])
        if connection.reusable and not connection.closed and len(idle) < self._limit:
            connection.idle_since = time.monotonic()
            idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        """Close all idle connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    async def get(
        self, address: Address, target: str, headers: Sequence[tuple[str, str]], sink: Sink, *, first_byte: int | None
    ) -> Reply:
        """Send one signed GET and receive its body.

        Args:
            address: Host name or address, and TCP port.
            target: Path and query as signed.
            headers: All headers as signed, ``Host`` included.
            sink: Takes the body of a 206, or of a 200 when the range is the whole object.
            first_byte: Where the asked range starts; ``None`` if the whole object is asked for.

        Raises:
            OSError: The connection failed, ended early, or the reply is not the asked range.
            CorruptCheckpointError: The object ends before the range does.
        """
        sink.rewind()
        connection = await self._take(address)
        try:
            reply = await connection.request(_head("GET", target, headers), sink, first_byte)
        except BaseException:
            connection.abort()
            raise
        self._keep(address, connection)
        return reply


class TlsPool(_Pool[Connection]):
    """Connections with TLS, for GETs."""

    def __init__(self, *, limit: int, connect_timeout_s: float, context: ssl.SSLContext) -> None:
        super().__init__(limit=limit, connect_timeout_s=connect_timeout_s)
        self._context = context

    async def _open(self, address: Address) -> Connection:
        _, made = await asyncio.get_running_loop().create_connection(Connection, *address, ssl=self._context)
        return made


class PlainPool(_Pool[PlainConnection]):
    """Connections without TLS, for GETs and PUTs."""

    async def _open(self, address: Address) -> PlainConnection:
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        for family, kind, protocol, _, place in await loop.getaddrinfo(*address, type=socket.SOCK_STREAM):
            made = socket.socket(family, kind, protocol)
            try:
                made.setblocking(False)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                await loop.sock_connect(made, place)
                made.setblocking(True)
                return PlainConnection(made)
            except OSError as error:
                made.close()
                failure = error
            except BaseException:
                made.close()
                raise
        raise failure or OSError("the name has no address")

    async def put(
        self,
        address: Address,
        target: str,
        headers: Sequence[tuple[str, str]],
        views: Sequence[memoryview],
        progress: Progress,
    ) -> Reply:
        """Send one signed PUT, its body from ``views``.

        Args:
            address: Host name or address, and TCP port.
            target: Path and query as signed.
            headers: All headers as signed, ``Host`` included, without the length.
            views: The body.
            progress: Told of every byte that the socket took.

        Raises:
            OSError: The connection failed or ended.
        """
        connection = await self._take(address)
        head = _head("PUT", target, [*headers, ("Content-Length", str(sum(map(len, views))))])
        try:
            reply = await connection.send(head, views, progress)
        except BaseException:
            connection.abort()
            raise
        self._keep(address, connection)
        return reply


def _head(method: str, target: str, headers: Sequence[tuple[str, str]]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")
