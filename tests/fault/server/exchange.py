"""The course of one S3 request from its head to its reply, with the scripted deviations at each stage."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from . import checksums
from .actions import Stage
from .core import Core
from .journal import Record
from .request import Reply, Request, S3Error, error_reply, http_time, status_line
from .wire import BadRequestError, Connection, PeerClosedError


class _Ended(Exception):
    """The exchange was broken off as scripted."""


class Exchange:
    """One request on one connection."""

    def __init__(self, core: Core, connection: Connection, request: Request) -> None:
        self._core, self._connection, self._request = core, connection, request
        self._record: Record = core.open_record(request, connection)
        self._action, self._record.rules = core.script.decide(request, connection.endpoint)
        self._keep_alive = request.headers.get("connection", "").lower() != "close"
        self._request_id = f"REQ{self._record.index:08d}"

    async def run(self) -> bool:
        """Serve the request; return whether the connection can carry another one."""
        record = self._record
        self._connection.on_close = self._on_close
        self._connection.rate_bytes_s = self._core.settings.rate_bytes_s
        try:
            await self._stages()
        except _Ended:
            self._keep_alive = False
        except PeerClosedError:
            self._on_close()
            self._keep_alive = False
        except BadRequestError:
            record.outcome, self._keep_alive = "bad request", False
        finally:
            self._connection.on_close = None
            self._finish()
        return self._keep_alive

    def _on_close(self) -> None:
        """The attempt ends for the client when its connection ends, whatever the server still does."""
        if self._record.outcome == "in flight":
            self._record.outcome = "client closed"
        self._finish()

    def _finish(self) -> None:
        if self._record.t_end is None:
            self._record.t_end = time.monotonic()

    async def _stages(self) -> None:
        action, record, request = self._action, self._record, self._request
        await self._gates("head")
        await self._maybe_end("head")
        if action.answer is not None and action.answer_at == "head":
            self._keep_alive = False
            await self._send(action.answer.reply(request.key, self._request_id))
            record.outcome = "replied"
            self._finish()
            await self._connection.close_after_draining()
            return
        body = await self._read_body()
        record.t_body = time.monotonic()
        record.framed = checksums.is_aws_chunked(request)
        record.body_bytes = len(body)
        if record.framed:
            record.body_bytes = int(request.headers.get("x-amz-decoded-content-length", len(body)))
        wait_s = self._core.settings.latency_s + action.delay_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        await self._gates("handle")
        if action.lands_late:
            self._core.detach(self._land_late(body))
        await self._maybe_end("handle")
        if action.lands_late and action.answer is not None:
            await self._send(action.answer.reply(request.key, self._request_id))
            self._finish()
            record.outcome = "replied"
            return
        reply = self._perform(body)
        del body
        record.t_done = time.monotonic()
        if action.delay_reply_s > 0:
            await asyncio.sleep(action.delay_reply_s)
        await self._gates("reply")
        await self._maybe_end("reply")
        await self._send(reply)
        self._finish()
        record.outcome = "replied"
        await self._gates("sent")

    async def _land_late(self, body: bytearray) -> None:
        """Do the operation once the gate opens; nobody hears of its outcome."""
        await self._gates("late")
        self._do(body)
        self._record.t_done = time.monotonic()

    def _perform(self, body: bytearray) -> Reply:
        """Do the operation unless an answer is scripted in its place."""
        action, request = self._action, self._request
        if action.answer is not None and action.answer_at == "handle":
            return action.answer.reply(request.key, self._request_id)
        reply = self._do(body)
        if action.answer is not None:
            return action.answer.reply(request.key, self._request_id)
        return reply

    def _do(self, body: bytearray) -> Reply:
        """Do the operation, and damage its result where scripted."""
        action, record, request = self._action, self._record, self._request
        try:
            reply = self._core.perform(request, body, record)
        except S3Error as error:
            reply = error_reply(error.status, error.code, str(error), request.key, self._request_id)
            reply.headers |= error.headers
        record.done = reply.status < 300
        if record.done and action.tamper is not None:
            self._core.tamper(request, action.tamper, action.tamper_at)
        return reply

    async def _gates(self, stage: Stage) -> None:
        for at, name in self._action.gates:
            if at == stage and name in self._core.script.gates:
                await self._core.script.gates[name].hold()

    async def _maybe_end(self, stage: Stage) -> None:
        """Break off here if the script says so."""
        if not self._action.ending or self._action.ending_at != stage:
            return
        if self._action.ending == "stall":
            self._record.outcome = "stalled"
            if stage in ("head", "body"):
                last_seen = await self._connection.stay_unread()
                if self._record.t_end is None:
                    self._record.t_end = last_seen
                self._connection.reset()
            else:
                await self._connection.lost.wait()
        else:
            self._record.outcome = "cut" if stage == "send" else "dropped"
            if self._action.ending == "reset":
                self._connection.reset()
            else:
                self._connection.close()
        raise _Ended

    async def _read_body(self) -> bytearray:
        """Read the body; count what arrived even if the client gives up."""
        headers, connection = self._request.headers, self._connection
        if "100-continue" in headers.get("expect", "").lower():
            await connection.write([b"HTTP/1.1 100 Continue\r\n\r\n"])
        try:
            if "chunked" in headers.get("transfer-encoding", "").lower():
                if self._ends_in_body():
                    await connection.read(self._action.after_bytes)
                    self._record.wire_bytes = self._action.after_bytes
                    await self._maybe_end("body")
                body = await connection.read_chunked()
            else:
                length = int(headers.get("content-length", "0"))
                if self._ends_in_body():
                    length = min(length, self._action.after_bytes)
                body = await connection.read(length)
                if self._ends_in_body():
                    self._record.wire_bytes = length
                    await self._maybe_end("body")
        except PeerClosedError as error:
            self._record.wire_bytes = error.got
            raise
        self._record.wire_bytes = len(body)
        return body

    def _ends_in_body(self) -> bool:
        return bool(self._action.ending) and self._action.ending_at == "body"

    async def _send(self, reply: Reply) -> None:
        """Write the reply, changed as scripted."""
        action, record = self._action, self._record
        body: Any = reply.body  # a sequence of views, or one changed copy
        if action.rewrite or action.flip_reply_at is not None:
            changed = bytearray(action.apply_rewrites(b"".join(body)))
            if action.flip_reply_at is not None and changed:
                changed[action.flip_reply_at] ^= 1
            body = [changed]
        size = sum(len(piece) for piece in body)
        head = self._head(reply, size)
        if self._request.head.method == "HEAD" or reply.status in (204, 304):
            body, size = [], 0
        record.status, record.code = reply.status, reply.code
        if action.ending and action.ending_at == "send":
            body, size = _first(body, action.after_bytes), min(size, action.after_bytes)
        if action.drip_bytes > 0:
            await self._drip(head, body)
        else:
            await self._connection.write([head] if size > 2**16 else [head + b"".join(body)])
            await self._connection.write(body if size > 2**16 else [])
        record.reply_bytes = size
        await self._maybe_end("send")

    async def _drip(self, head: bytes, body: Any) -> None:  # body: pieces
        slow = b"".join(body)
        if slow:
            await self._connection.write([head])
        else:
            slow = head
        for start in range(0, len(slow), self._action.drip_bytes):
            await self._connection.write([slow[start : start + self._action.drip_bytes]])
            await asyncio.sleep(self._action.drip_every_s)

    def _head(self, reply: Reply, size: int) -> bytes:
        headers: dict[str, str | None] = {
            "Date": http_time(self._core.store.now()),
            "Server": "fault-server",
            "x-amz-request-id": self._request_id,
            "x-amz-id-2": f"HOST-{self._record.connection}",
            "Connection": "keep-alive" if self._keep_alive else "close",
        }
        if reply.status not in (204, 304):
            headers["Content-Length"] = str(size)
        names = {name.lower(): name for name in headers}
        for name, value in {**reply.headers, **self._action.reply_headers}.items():
            known = names.setdefault(name.lower(), name)
            headers[known] = value
        sent = {name: value for name, value in headers.items() if value is not None}
        self._record.reply_headers = {name.lower(): value for name, value in sent.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        return (status_line(reply.status) + lines + "\r\n").encode("latin-1")


def _first(pieces: Any, count: int) -> list[memoryview]:  # pieces: a sequence of bytes-like objects
    """Return the first ``count`` bytes of ``pieces``."""
    kept = []
    for piece in pieces:
        view = memoryview(piece)[:count]
        kept.append(view)
        count -= len(view)
    return kept
