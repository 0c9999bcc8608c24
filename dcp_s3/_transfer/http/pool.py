"""Kept connections: GETs into the caller's buffers, and PUTs out of them."""

from __future__ import annotations

import abc
import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from dcp_s3._transfer.http.connection import PlainConnection
from dcp_s3._transfer.http.sink import Connection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from dcp_s3._transfer.http.payload import Progress
    from dcp_s3._transfer.http.sink import Reply, Sink

_IDLE_S: Final = 8.0
"""An idle connection older than this is not used again: servers close theirs after 5 s or more, usually 15 to 60."""

_ADDRESSES: Final = 3
"""So many addresses of a name share the time to connect; of more, those that failed come last at the next attempt."""
_LATER_S: Final = 5.0
_NEXT_ADDRESS_S: Final = 0.25
"""With TLS the next address is tried beside one that has not answered for so long (RFC 8305, section 5)."""

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

    async def _exchange(self, address: Address, exchange: Callable[[C], Awaitable[Reply]]) -> Reply:
        """One request and its reply on a kept connection, or on a new one.

        A server may close a kept connection at the moment in which a request sets out on it. The request then goes again at
        once, on a new connection: no byte of a reply has come, and GETs, and PUTs of the same bytes to the same name, may be
        repeated (RFC 9110, section 9.2.2).
        """
        connection = self._kept(address)
        reused = connection is not None
        while True:
            if connection is None:
                connection = await self._connected(address)
            try:
                reply = await exchange(connection)
            except BaseException as error:
                connection.abort()
                if not reused or connection.heard or not isinstance(error, ConnectionError):
                    raise
                reused, connection = False, None
            else:
                self._keep(address, connection)
                return reply

    def _kept(self, address: Address) -> C | None:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not connection.closed and time.monotonic() - connection.idle_since < _IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connected(self, address: Address) -> C:
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
        head = _head("GET", target, headers)

        def exchange(connection: C) -> Awaitable[Reply]:
            sink.rewind()
            return connection.request(head, sink, first_byte)

        return await self._exchange(address, exchange)


class TlsPool(_Pool[Connection]):
    """Connections with TLS, for GETs."""

    def __init__(self, *, limit: int, connect_timeout_s: float, context: ssl.SSLContext) -> None:
        super().__init__(limit=limit, connect_timeout_s=connect_timeout_s)
        self._context = context

    async def _open(self, address: Address) -> Connection:
        _, made = await asyncio.get_running_loop().create_connection(
            Connection, *address, ssl=self._context, happy_eyeballs_delay=_NEXT_ADDRESS_S
        )
        return made


class PlainPool(_Pool[PlainConnection]):
    """Connections without TLS, for GETs and PUTs.

    Args:
        limit: Most idle connections per host.
        connect_timeout_s: For all addresses of a name together, seconds.
        read_timeout_s: Silence, seconds, after which a request is given up by those who wait for it. The thread that moves
            its body gives up somewhat later, where nobody could.
    """

    def __init__(self, *, limit: int, connect_timeout_s: float, read_timeout_s: float) -> None:
        super().__init__(limit=limit, connect_timeout_s=connect_timeout_s)
        self._silence_s = read_timeout_s + _LATER_S
        self._failed: set[object] = set()

    async def _open(self, address: Address) -> PlainConnection:
        found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
        found.sort(key=lambda info: info[-1] in self._failed)  # what did not answer last time comes last
        share_s = self._connect_timeout_s / min(len(found), _ADDRESSES) if found else 0.0
        failure: OSError | None = None
        for family, kind, protocol, _, place in found:
            made = socket.socket(family, kind, protocol)
            try:
                async with asyncio.timeout(share_s):
                    await self._connect(made, place)
                self._failed.discard(place)
                return PlainConnection(made, self._silence_s)
            except OSError as error:  # TimeoutError is one
                made.close()
                self._failed.add(place)
                failure = error
            except BaseException:
                made.close()
                self._failed.add(place)
                raise
        raise failure or OSError("the name has no address")

    async def _connect(self, made: socket.socket, place: Any) -> None:  # noqa: ANN401 -- an address of any family
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await asyncio.get_running_loop().sock_connect(made, place)
        made.setblocking(True)

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
        head = _head("PUT", target, [*headers, ("Content-Length", str(sum(map(len, views))))])
        return await self._exchange(address, lambda connection: connection.send(head, views, progress))


def _head(method: str, target: str, headers: Sequence[tuple[str, str]]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")
