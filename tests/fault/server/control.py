"""The control interface over HTTP, on a port of its own that no fault touches: POST /_control/<command>, JSON in and out."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import http.client
import json
from typing import Any

from .commands import Commands
from .wire import BadRequestError, Connection, Head, PeerClosedError

_PREFIX = "/_control/"


class ControlError(Exception):
    """A command failed in the server; the text is its error."""


def to_json(value: Any) -> bytes:
    """Encode plain data, dataclasses and bytes."""
    return json.dumps(value, default=_special).encode()


def from_json(data: bytes | bytearray) -> Any:
    """Decode what ``to_json`` wrote; dataclasses come back as dictionaries."""
    return json.loads(data, object_hook=_unspecial)


def _special(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} cannot travel over the control interface")


def _unspecial(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["base64"]) if value.keys() == {"base64"} else value


class ControlServer:
    """Answers commands on loopback."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> int:
        """Listen; return the port."""

        def connected() -> Connection:
            return Connection(0, 0, self._serve, lambda connection: None, self._tasks)

        self._server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, connection: Connection) -> None:
        """Answer one command and close."""
        try:
            head = Head.parse(await connection.read_until(b"\r\n\r\n"))
            body = await connection.read(int(head.headers.get("content-length", "0")))
            status, answer = await self._answer(head, body)
            line = f"HTTP/1.1 {status} Answer\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n"
            await connection.write([line.encode() + b"Connection: close\r\n\r\n", answer])
        except (PeerClosedError, BadRequestError):
            pass
        finally:
            connection.close()

    async def _answer(self, head: Head, body: bytearray) -> tuple[int, bytes]:
        name = head.target.removeprefix(_PREFIX)
        command = getattr(self._commands, name, None)
        if not head.target.startswith(_PREFIX) or name.startswith("_") or command is None:
            return 404, to_json(f"no command {head.target}")
        try:
            return 200, to_json(await command(**(from_json(body) if body else {})))
        except Exception as error:
            return 400, to_json(f"{type(error).__name__}: {error}")


def call(port: int, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
    """Run a command in a server process and return its result as plain data."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", _PREFIX + name, body=to_json(arguments))
        response = connection.getresponse()
        result = from_json(response.read())
        if response.status != 200:
            raise ControlError(result)
        return result
    finally:
        connection.close()
