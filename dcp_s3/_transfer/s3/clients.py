"""The S3 clients of both planes: made alike, one per endpoint, made anew when their credentials expire, closed when idle."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from botocore.config import Config as BotoConfig
from botocore.exceptions import NoCredentialsError

from dcp_s3._runtime.loop_thread import on_fork
from dcp_s3._transfer.s3.client_options import (
    aio_session,
    boto3_session,
    boto_options,
    ca_bundle,
    check_ca_bundle,
    client_options,
    has_chain,
    hide_tokens,
    is_aws,
    prepare,
    profile_named,
)
from dcp_s3._transfer.s3.error_mapping import was_cut_off
from dcp_s3.config import S3Config
from dcp_s3.errors import DcpS3Error, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import boto3

DEFAULT_REGION: Final = "us-east-1"
_AVOID_S: Final = 30.0
"""So long an endpoint that could not be reached is passed over, as long as another one is left."""
KEPT_IDLE: Final = 2
"""So many places' clients stay open while no request uses them: a job loads from one and saves to another."""
_CLOSE_S: Final = 2.0
_CONNECTION: Final = (
    "endpoint_url",
    "region",
    "profile",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "unsigned",
    "addressing_style",
    "verify_tls",
    "max_concurrency",
    "connect_timeout_s",
    "read_timeout_s",
    "checksum",
)


def connection_of(config: S3Config) -> S3Config:
    """What clients depend on, and what is learnt of a store: a config of these fields alone, with the environment's endpoint.

    Configs that differ in nothing else (metadata, tags, limits of a save) share their clients.
    """
    resolved = config.resolved()
    return S3Config(**{name: getattr(resolved, name) for name in _CONNECTION})


class Rotation:
    """Whose turn it is among several endpoints: each in turn, but for those that could not be reached lately.

    Args:
        count: Number of endpoints, 1 or more.
    """

    def __init__(self, count: int) -> None:
        self._avoided_until = [0.0] * count
        self._heard = [False] * count
        self._turn = -1
        self._lock = threading.Lock()

    def take(self) -> int:
        """Index of the next endpoint; of those that all failed, the one whose failure is the oldest."""
        count = len(self._avoided_until)
        now = time.monotonic()
        with self._lock:
            for _ in range(count):
                self._turn = (self._turn + 1) % count
                if self._avoided_until[self._turn] <= now:
                    return self._turn
            return min(range(count), key=self._avoided_until.__getitem__)

    def has_heard(self, index: int) -> bool:
        """Whether an endpoint has ever answered in HTTP."""
        return self._heard[index]

    def heard(self, index: int) -> None:
        """Note that an endpoint has answered in HTTP."""
        self._heard[index] = True

    def note(self, index: int, error: DcpS3Error) -> None:
        """Pass an endpoint over for a while if it gave no answer at all."""
        if isinstance(error, StorageError) and error.status is not None:
            self.heard(index)
        if isinstance(error, StorageUnavailableError) and error.status is None:
            with self._lock:
                self._avoided_until[index] = time.monotonic() + _AVOID_S


def remind_of_tls(clients: ControlClients | DataClients, index: int, error: DcpS3Error) -> None:
    """Add to an error that an endpoint's ``http://`` may be wrong, where connections to it have only ever been cut off."""
    plain = str(clients[index].meta.endpoint_url).startswith("http://")
    if plain and not clients.rotation.has_heard(index) and was_cut_off(error):
        error.message += "; if the port speaks TLS, write https:// in endpoint_url"


class ControlClients:
    """boto3 clients, one per endpoint; thread-safe.

    Args:
        config: Endpoints, credentials and limits.
        session: Where the credentials come from; made if not given.

    Raises:
        NoCredentialsError: The chain has none yet. Nothing is kept of that: a later try looks again.
    """

    def __init__(self, config: S3Config, session: boto3.session.Session | None = None) -> None:
        hide_tokens()
        self._config = config
        resolved = config.resolved()
        self._session = session if session is not None else boto3_session(resolved)
        self._credentials = self._look_up(self._session) if has_chain(config) else None
        if has_chain(config) and self._credentials is None:
            raise NoCredentialsError
        check_ca_bundle(ca_bundle(config, self._session._session))  # noqa: SLF001 -- boto3 hides its botocore session
        region = resolved.region or self._session.region_name or DEFAULT_REGION
        endpoints: tuple[str | None, ...] = resolved.endpoints or (None,)
        self._clients = [self._create(resolved, endpoint, region) for endpoint in endpoints]
        self.rotation = Rotation(len(endpoints))

    def _look_up(self, session: boto3.session.Session) -> Any:  # noqa: ANN401 -- botocore's frozen credentials
        with profile_named(self._config):  # where the environment names it, only this look misses it
            found = session.get_credentials()
        return None if found is None else found.get_frozen_credentials()

    def _create(self, config: S3Config, endpoint: str | None, region: str) -> Any:  # noqa: ANN401 -- made at run time
        path_style = config.addressing_style == "auto" and endpoint is not None and not is_aws(endpoint)
        options = client_options(config, endpoint, region)
        client = self._session.client("s3", config=BotoConfig(**boto_options(config, path_style=path_style)), **options)
        if config.addressing_style == "auto" and not path_style and not is_aws(client.meta.endpoint_url):
            # the endpoint came from the profile's own file
            client = self._session.client("s3", config=BotoConfig(**boto_options(config, path_style=True)), **options)
        return prepare(client)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._clients[index]

    def renewed(self) -> ControlClients | None:
        """Clients with the credentials that the chain gives now, ``None`` if those are the same as before."""
        if not has_chain(self._config):
            return None
        session = boto3_session(self._config.resolved())
        fresh = self._look_up(session)
        # compared with those at the start, not of now: they may have refreshed themselves since the request was signed
        return None if fresh is None or fresh == self._credentials else ControlClients(self._config, session)

    def close(self) -> None:
        """Close all connections that are idle; one in use is closed by its request."""
        for client in self._clients:
            client.close()


class DataClients:
    """aiobotocore clients, one per endpoint, on the loop thread. Opened by :meth:`open`.

    Args:
        config: Endpoints, credentials and limits.
    """

    def __init__(self, config: S3Config) -> None:
        hide_tokens()
        self._config = config
        self._session: Any = None
        self._clients: list[Any] = []
        self._stack = contextlib.AsyncExitStack()
        self._credentials: Any = None
        self._users = 0
        self.rotation = Rotation(max(1, len(config.resolved().endpoints)))

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 -- aiobotocore makes its clients at run time
        return self._clients[index]

    @property
    def busy(self) -> bool:
        """Whether a request uses them."""
        return self._users > 0

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count as busy."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    async def open(self, session: Any = None) -> DataClients:  # noqa: ANN401 -- aiobotocore is untyped
        """Look the credentials up, once, and make the clients.

        Args:
            session: Where the credentials come from; made if not given.

        Raises:
            NoCredentialsError: The chain has none yet. Nothing is kept of that: a later try looks again.
        """
        config = self._config.resolved()
        self._session = session if session is not None else aio_session(config)
        if has_chain(config):
            self._credentials = await self._look_up(self._session)
            if self._credentials is None:
                raise NoCredentialsError
        await asyncio.to_thread(check_ca_bundle, ca_bundle(config, self._session))
        region = config.region or self._session.get_config_variable("region") or DEFAULT_REGION
        for endpoint in config.endpoints or (None,):
            path_style = config.addressing_style == "auto" and endpoint is not None and not is_aws(endpoint)
            client = await self._connect(config, endpoint, region, path_style=path_style)
            if config.addressing_style == "auto" and not path_style and not is_aws(client.meta.endpoint_url):
                client = await self._connect(config, endpoint, region, path_style=True)
            self._clients.append(client)
        return self

    async def _look_up(self, session: Any) -> Any:  # noqa: ANN401 -- botocore's frozen credentials
        with profile_named(self._config):  # where the environment names it, only this look misses it
            found = await session.get_credentials()
        return None if found is None else await found.get_frozen_credentials()

    async def _connect(self, config: S3Config, endpoint: str | None, region: str, *, path_style: bool) -> Any:  # noqa: ANN401
        from aiobotocore.config import AioConfig

        from dcp_s3._transfer.http.session import ViewSession

        options = AioConfig(http_session_cls=ViewSession, **boto_options(config, path_style=path_style))
        made = self._session.create_client("s3", config=options, **client_options(config, endpoint, region))
        return prepare(await self._stack.enter_async_context(made))

    async def renewed(self) -> DataClients | None:
        """Clients with the credentials that the chain gives now, ``None`` if those are the same as before."""
        if not has_chain(self._config):
            return None
        session = aio_session(self._config.resolved())
        fresh = await self._look_up(session)
        # compared with those at the start, not of now: they may have refreshed themselves since the request was signed
        return None if fresh is None or fresh == self._credentials else await DataClients(self._config).opened(session)

    async def opened(self, session: Any = None) -> DataClients:  # noqa: ANN401 -- aiobotocore is untyped
        """:meth:`open`, and nothing left open if that fails."""
        try:
            return await self.open(session)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all connections."""
        self._clients.clear()
        await self._stack.aclose()


_open: list[CurrentDataClients] = []
"""Those with connections; touched by the loop thread alone."""
on_fork(_open.clear)  # the parent's: never used here, and never closed, as their loop does not run here


class CurrentDataClients:
    """The data clients that are in use, opened at the first request and replaced when their credentials have expired.

    Whoever opens some closes those of other places that are idle, but for the ``KEPT_IDLE`` last used. What was closed is
    opened again by the next request.

    Args:
        config: Endpoints, credentials and limits.
    """

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._current: DataClients | None = None
        self._opened: list[DataClients] = []
        self._changing = asyncio.Lock()
        self.used_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a request uses them, or they are just being opened."""
        return self._changing.locked() or any(clients.busy for clients in self._opened)

    async def get(self) -> DataClients:
        """The clients to use now."""
        if self._current is None:
            async with self._changing:
                if self._current is None:
                    made = await DataClients(self._config).opened()
                    self._opened.append(made)
                    self._current = made
                    _open.append(self)
                    await self._close_others()
        self.used_at = time.monotonic()
        return self._current

    async def renew(self, used: DataClients) -> bool:
        """Whether there are others than the ``used`` ones, with credentials that may not have expired.

        The old ones are kept while requests are at work on them, and closed at the next renewal or by :meth:`close`.
        """
        async with self._changing:
            if self._current is used:
                fresh = await used.renewed()
                if fresh is None:
                    return False
                idle = [clients for clients in self._opened if clients is not used and not clients.busy]
                self._opened = [clients for clients in self._opened if clients not in idle] + [fresh]
                self._current = fresh
                for clients in idle:
                    await clients.close()
            return True

    async def _close_others(self) -> None:
        idle = sorted(
            (other for other in _open if other is not self and not other.busy), key=lambda other: other.used_at
        )
        for other in idle[:-KEPT_IDLE]:
            # a peer that does not let go of a connection is not this request's failure
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_S):
                    await other.close()

    async def close(self) -> None:
        """Close all connections."""
        self._current = None
        opened, self._opened = self._opened, []
        if self in _open:
            _open.remove(self)
        for clients in opened:
            await clients.close()


async def close_data_clients() -> None:
    """Close all connections of all data clients."""
    while _open:
        await _open[-1].close()
