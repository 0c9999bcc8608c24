"""The HTTP session under aiobotocore: request bodies sent from views, response bodies received into views.

The views do not travel through botocore's parameters (which would copy or hash them) but beside them, in a context
variable of the task that makes the request; botocore signs, addresses and parses as ever. A request that botocore makes by
itself meanwhile inherits the variable, so what is in it says which request it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import aiohttp
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import get_cert_path

from dcp_s3._transfer.http.payload import Progress, ViewsPayload
from dcp_s3._transfer.http.pool import PlainPool, TlsPool
from dcp_s3._transfer.http.sink import HEAD_BYTES, Reply, fault_of, header_items
from dcp_s3.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from dcp_s3._transfer.http.sink import Sink


class Given:
    """What one request is given beside botocore's parameters.

    Args:
        key: Object key of the request.
        body: Views that a PUT of this object sends, and who is told of them.
        sink: Takes the body of the reply to a GET of this object.
    """

    def __init__(self, key: str, body: tuple[Sequence[memoryview], Progress] | None, sink: Sink | None) -> None:
        self._path = f"/{key}"
        self._body = body
        self._sink = sink
        self._taken = False

    def take(self, request: Any) -> tuple[tuple[Sequence[memoryview], Progress] | None, Sink | None]:  # noqa: ANN401
        """Body and sink if this is the request they are for, else none: botocore makes requests of its own, too."""
        method = "PUT" if self._body is not None else "GET"
        if request.method != method or not unquote(urlsplit(request.url).path).endswith(self._path):
            return None, None
        self._taken = True
        return self._body, self._sink

    def check_taken(self) -> None:
        """Raise if the request has ended without what it was given.

        Raises:
            StorageError: Its body was not sent, or the reply's body not received.
        """
        if not self._taken and (self._body is not None or self._sink is not None):
            raise StorageError("the SDK addressed the request otherwise than it was asked to; its body was left out")


GIVEN: ContextVar[Given | None] = ContextVar("dcp_s3_given", default=None)

_REPEATABLE: Final = {"GET", "HEAD", "PUT", "DELETE"}
_LOOK_S: Final = 0.5
_UNBOUNDED_S: Final = 86_400.0


class _Reuse:
    """Whether aiohttp sent the request of this context on a kept connection."""

    happened = False


_REUSE: ContextVar[_Reuse | None] = ContextVar("dcp_s3_reuse", default=None)


async def _note_reuse(_session: object, _context: object, _params: object) -> None:
    if (reuse := _REUSE.get()) is not None:
        reuse.happened = True


class ViewSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore's session is untyped
    """aiobotocore's aiohttp session (public hook ``http_session_cls``) with the two shortcuts for views."""

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 -- aiobotocore's own arguments, passed on
        super().__init__(**kwargs)
        self._verify_tls: bool | str = kwargs.get("verify", True)
        self._pool_limit = int(kwargs.get("max_pool_connections", 10))
        timeout = kwargs.get("timeout") or 60.0
        connect_s, read_s = timeout if isinstance(timeout, (list, tuple)) else (timeout, timeout)
        self._connect_timeout_s = float(connect_s)
        self._plain = PlainPool(
            limit=self._pool_limit, connect_timeout_s=self._connect_timeout_s, read_timeout_s=float(read_s)
        )
        self._tls: TlsPool | None = None

    async def _get_session(self, proxy_url: str | None) -> Any:  # noqa: ANN401 -- aiohttp's session
        """Make the aiohttp session one that leaves retries to us, since its own are not only for kept connections."""
        session = await super()._get_session(proxy_url)
        if session._retry_connection:  # noqa: SLF001 -- there is no public switch
            session._retry_connection = False  # noqa: SLF001
            for limit in ("_max_line_size", "_max_field_size", "_max_headers"):  # aiobotocore has no option for them
                if hasattr(session, limit):
                    setattr(session, limit, HEAD_BYTES)
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_reuse)
            tracing.freeze()
            session._trace_configs.append(tracing)  # noqa: SLF001 -- aiobotocore makes the session without any
        return _Unredirected(session)

    async def send(self, request: Any) -> Any:  # noqa: ANN401 -- botocore's AWSPreparedRequest and AWSResponse
        """Send a signed request."""
        given = GIVEN.get()
        body, sink = (None, None) if given is None else given.take(request)
        direct = self._proxy_config.proxy_url_for(request.url) is None
        if body is not None:
            if direct and request.method == "PUT" and request.url.startswith("http://"):
                address, target, headers = _parts_of(request)
                return _answer(request, await self._plain.put(address, target, headers, *body))
            # who waits for the request sees the body move, and the socket's buffer drain; aiohttp does not
            request.context = {**(getattr(request, "context", None) or {}), "read_timeout": _UNBOUNDED_S}
            async with _watched_queue(*body) as payloads:
                return await self._send_by_aiohttp(request, payloads)
        if isinstance(request.body, (bytes, bytearray)) and request.body:
            views = [memoryview(request.body)]
            return await self._send_by_aiohttp(request, lambda: ViewsPayload(views, Progress()))
        if sink is not None and direct:
            return await self._receive(request, sink)
        response = await self._send_by_aiohttp(request)
        if sink is not None:
            await _fill(sink, response, _first_byte(header_items(request.headers)))
        return response

    async def _send_by_aiohttp(self, request: Any, payloads: Callable[[], ViewsPayload] | None = None) -> Any:  # noqa: ANN401
        """Send a request; again at once if it went out on a kept connection that the server had closed by then.

        Each such try uses up one kept connection, so that they end.
        """
        while True:
            reuse = _Reuse()
            token = _REUSE.set(reuse)
            payload = None
            if payloads is not None:
                request.body = payload = payloads()
            try:
                return await super().send(request)
            except BaseException as error:
                if payload is not None:
                    payload.abort()
                if not (reuse.happened and request.method in _REPEATABLE and _is_cut(error)):
                    raise
            finally:
                _REUSE.reset(token)

    async def _receive(self, request: Any, sink: Sink) -> Any:  # noqa: ANN401
        pool: PlainPool | TlsPool = self._plain
        if request.url.startswith("https://"):
            if self._tls is None:
                context = await asyncio.to_thread(tls_context, self._verify_tls)
                made = TlsPool(limit=self._pool_limit, connect_timeout_s=self._connect_timeout_s, context=context)
                if self._tls is None:  # another request may have been faster
                    self._tls = made
            pool = self._tls
        address, target, headers = _parts_of(request)
        return _answer(request, await pool.get(address, target, headers, sink, first_byte=_first_byte(headers)))

    async def __aexit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        self._plain.close()
        if self._tls is not None:
            self._tls.close()
        await super().__aexit__(exc_type, exc_val, exc_tb)


def _is_cut(error: BaseException) -> bool:
    """Whether a connection ended before its reply began."""
    cause = getattr(error, "kwargs", {}).get("error")  # botocore's errors keep it there
    return isinstance(cause, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)) and not isinstance(
        cause, aiohttp.ClientConnectorError
    )


@contextlib.asynccontextmanager
async def _watched_queue(views: Sequence[memoryview], progress: Progress) -> AsyncIterator[Callable[[], ViewsPayload]]:
    """Makes payloads of views, and tells of what the kernel still passes on: on a slow line a slice takes long."""
    last: list[ViewsPayload] = []

    def make() -> ViewsPayload:
        last[:] = [ViewsPayload(views, progress)]
        return last[0]

    async def watch() -> None:
        queued = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            before, queued = queued, sum(payload.queued() for payload in last)
            if queued < before:
                progress.advance(0)

    watching = asyncio.ensure_future(watch())
    try:
        yield make
    finally:
        watching.cancel()


class _Unredirected:
    """An aiohttp session as aiobotocore uses it, that hands redirects out: followed, a POST would become a GET elsewhere."""

    def __init__(self, session: Any) -> None:  # noqa: ANN401 -- aiohttp's session
        self._session = session

    async def request(self, method: str, **options: Any) -> Any:  # noqa: ANN401 -- aiohttp's own
        return await self._session.request(method, allow_redirects=False, **options)


def _parts_of(request: Any) -> tuple[tuple[str, int], str, list[tuple[str, str]]]:  # noqa: ANN401
    """Where a signed request goes, its target, and its headers with ``Host``."""
    url = urlsplit(request.url)
    headers = header_items(request.headers)
    if not any(name.lower() == "host" for name, _ in headers):
        headers.insert(0, ("Host", url.netloc))
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return (url.hostname or "", url.port or (443 if url.scheme == "https" else 80)), target, headers


def _answer(request: Any, reply: Reply) -> Any:  # noqa: ANN401
    return AioAWSResponse(request.url, reply.status, reply.headers, reply)


def _first_byte(headers: Sequence[tuple[str, str]]) -> int | None:
    """Where the range that a request asks for begins; ``None`` if it asks for none."""
    asked = next((value for name, value in headers if name.lower() == "range"), None)
    return None if asked is None else int(asked.removeprefix("bytes=").partition("-")[0])


async def _fill(sink: Sink, response: Any, first_byte: int | None) -> None:  # noqa: ANN401
    """Behind a proxy aiohttp receives; its chunks are copied to where they belong."""
    sink.rewind()
    if response.status_code not in (200, 206):
        return
    reply = Reply(response.status_code, {name.lower(): value for name, value in response.headers.items()})
    try:
        fault = fault_of(reply, first_byte, sink.length)
        if fault is not None:
            raise fault
        async for chunk in response.raw.content.iter_chunked(1 << 20):
            if len(chunk) > sink.length - sink.filled:
                raise ConnectionError(f"the reply is longer than the {sink.length} bytes that were asked for")
            sink.feed(memoryview(chunk))
        if sink.filled != sink.length:
            raise ConnectionError(f"the connection ended after {sink.filled} of {sink.length} bytes")
    except BaseException:
        response.raw.close()  # nobody else will
        raise


def tls_context(verify: bool | str) -> ssl.SSLContext:
    """A client TLS context.

    Args:
        verify: ``True`` for the SDK's bundle, ``False`` for no check, a string for the path of a CA bundle.
    """
    if verify is False:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=get_cert_path(verify))
