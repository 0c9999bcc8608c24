"""The S3 clients of both planes: made alike, one per endpoint, made anew when their credentials expire, closed when idle."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import boto3
import botocore
import botocore.loaders
import botocore.session
from botocore.config import Config as BotoConfig
from botocore.exceptions import NoCredentialsError, ProfileNotFound

from dcp_s3._transfer.faults import refuse_page, was_cut_off
from dcp_s3._transfer.portal import on_fork
from dcp_s3.config import S3Config
from dcp_s3.errors import ConfigError, DcpS3Error, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_REGION: Final = "us-east-1"
_AGENT: Final = f"dcp-s3 Botocore/{botocore.__version__}"
"""In full: botocore puts its own together anew for each request, which takes a quarter of a small request's CPU time."""
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


class _HidesTokens(logging.Filter):
    """Takes session tokens out of what botocore logs at DEBUG: it logs each request with all of its headers."""

    _TOKEN = re.compile(r"(?i)(x-amz-security-token[\"']?\s*[:=]\s*b?)([\"']?)[^\s,\"'&]+")

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        hidden = self._TOKEN.sub(r"\1\2***", text)
        if hidden != text:
            record.msg, record.args = hidden, ()
        return True


_hides_tokens: Final = _HidesTokens()


def _hide_tokens() -> None:
    for name in ("botocore.endpoint", "botocore.auth"):
        logging.getLogger(name).addFilter(_hides_tokens)  # once, however often it is added


def boto_options(config: S3Config, *, path_style: bool) -> dict[str, Any]:
    """The botocore settings that both planes share. Retries are ours alone; so are checksums."""
    style = "path" if path_style else config.addressing_style
    return {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "s3": {"addressing_style": style, "payload_signing_enabled": False},
        "connect_timeout": config.connect_timeout_s,
        "read_timeout": config.read_timeout_s,
        "max_pool_connections": config.max_concurrency + 4,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent": _AGENT,
        "tcp_keepalive": True,
        **({"signature_version": botocore.UNSIGNED} if config.unsigned else {}),
    }


def client_options(config: S3Config, endpoint: str | None, region: str) -> dict[str, Any]:
    """Arguments of ``create_client``, for boto3 and aiobotocore alike."""
    options: dict[str, Any] = {"region_name": region}
    if endpoint is not None:
        options["endpoint_url"] = endpoint
    if config.verify_tls is not True:
        options["verify"] = config.verify_tls
    if config.access_key_id is not None:
        options |= {
            "aws_access_key_id": config.access_key_id,
            "aws_secret_access_key": config.secret_access_key,
            "aws_session_token": config.session_token,
        }
    return options


@functools.lru_cache(maxsize=1)
def _loader(data_path: str | None) -> Any:  # noqa: ANN401 -- botocore is untyped
    """The SDK's descriptions of services, read once for all sessions: S3's takes 13 MiB and 0.2 s."""
    return botocore.loaders.create_loader(data_path)


@contextlib.contextmanager
def _profile_named(config: S3Config) -> Iterator[None]:
    """Say of a profile that is not there who asked for it, and where it was looked for."""
    try:
        yield
    except ProfileNotFound as error:
        bare = botocore.session.Session()
        files = " or ".join(
            str(Path(bare.get_config_variable(name)).expanduser()) for name in ("config_file", "credentials_file")
        )
        name = error.kwargs["profile"]
        source = "S3Config(profile=…)" if config.profile == name else "AWS_PROFILE (or AWS_DEFAULT_PROFILE)"
        raise ConfigError(
            f"there is no profile {name!r}, which {source} names, in {files}; correct the name, or add the profile there"
        ) from error


def _share_descriptions(session: Any) -> None:  # noqa: ANN401 -- a botocore session
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))


def _boto3_session(config: S3Config) -> boto3.session.Session:
    with _profile_named(config):
        below = botocore.session.Session(profile=config.profile)
        _share_descriptions(below)
        return boto3.session.Session(botocore_session=below)


def _aio_session(config: S3Config) -> Any:  # noqa: ANN401 -- aiobotocore is untyped
    import aiobotocore.session  # not above: the tools do without it, and it takes half of their time to start

    with _profile_named(config):
        session = aiobotocore.session.AioSession(profile=config.profile)
        _share_descriptions(session)
        return session


def _prepare(client: Any) -> Any:  # noqa: ANN401 -- made at run time
    """Keep a client to the requests that it is asked for, and to replies of S3."""
    client.meta.events.register_last("before-parameter-build.s3", _never_redirected)
    client.meta.events.register("before-parse.s3", refuse_page)
    return client


def _never_redirected(context: dict[str, Any], **_: Any) -> None:  # noqa: ANN401 -- botocore's event
    """Say that the request was redirected before: botocore then leaves its error alone.

    It would ask for the bucket's region by a HeadBucket, whose redirect it follows in the same way, hundreds of times.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True


def is_aws(endpoint: str) -> bool:
    """Whether a host is AWS's own, where virtual-hosted style is the rule."""
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _check_ca_bundle(path: str | None) -> None:
    """Read a CA bundle before a connection needs it, where a missing file would look like a failing network.

    Raises:
        ConfigError: It cannot be read, or holds no certificate.
    """
    if path is None:
        return
    try:
        # a directory fails too: connections take a file
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError as error:  # of which SSLError is one
        raise ConfigError(f"verify_tls or AWS_CA_BUNDLE names {path!r}, which is no CA bundle: {error}") from error


def _ca_bundle(config: S3Config, session: Any) -> str | None:  # noqa: ANN401 -- a botocore session
    if isinstance(config.verify_tls, str):
        return config.verify_tls
    found: str | None = session.get_config_variable("ca_bundle") if config.verify_tls else None
    return found


def _has_chain(config: S3Config) -> bool:
    """Whether credentials come from the chain of environment, files and services, and so may change."""
    return not config.unsigned and config.access_key_id is None


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
        _hide_tokens()
        self._config = config
        resolved = config.resolved()
        self._session = session if session is not None else _boto3_session(resolved)
        self._credentials = self._look_up(self._session) if _has_chain(config) else None
        if _has_chain(config) and self._credentials is None:
            raise NoCredentialsError
        _check_ca_bundle(_ca_bundle(config, self._session._session))  # noqa: SLF001 -- boto3 hides its botocore session
        region = resolved.region or self._session.region_name or DEFAULT_REGION
        endpoints: tuple[str | None, ...] = resolved.endpoints or (None,)
        self._clients = [self._create(resolved, endpoint, region) for endpoint in endpoints]
        self.rotation = Rotation(len(endpoints))

    def _look_up(self, session: boto3.session.Session) -> Any:  # noqa: ANN401 -- botocore's frozen credentials
        with _profile_named(self._config):  # where the environment names it, only this look misses it
            found = session.get_credentials()
        return None if found is None else found.get_frozen_credentials()

    def _create(self, config: S3Config, endpoint: str | None, region: str) -> Any:  # noqa: ANN401 -- made at run time
        path_style = config.addressing_style == "auto" and endpoint is not None and not is_aws(endpoint)
        options = client_options(config, endpoint, region)
        client = self._session.client("s3", config=BotoConfig(**boto_options(config, path_style=path_style)), **options)
        if config.addressing_style == "auto" and not path_style and not is_aws(client.meta.endpoint_url):
            # the endpoint came from the profile's own file
            client = self._session.client("s3", config=BotoConfig(**boto_options(config, path_style=True)), **options)
        return _prepare(client)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._clients[index]

    def renewed(self) -> ControlClients | None:
        """Clients with the credentials that the chain gives now, ``None`` if those are the same as before."""
        if not _has_chain(self._config):
            return None
        session = _boto3_session(self._config.resolved())
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
        _hide_tokens()
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
        self._session = session if session is not None else _aio_session(config)
        if _has_chain(config):
            self._credentials = await self._look_up(self._session)
            if self._credentials is None:
                raise NoCredentialsError
        await asyncio.to_thread(_check_ca_bundle, _ca_bundle(config, self._session))
        region = config.region or self._session.get_config_variable("region") or DEFAULT_REGION
        for endpoint in config.endpoints or (None,):
            path_style = config.addressing_style == "auto" and endpoint is not None and not is_aws(endpoint)
            client = await self._connect(config, endpoint, region, path_style=path_style)
            if config.addressing_style == "auto" and not path_style and not is_aws(client.meta.endpoint_url):
                client = await self._connect(config, endpoint, region, path_style=True)
            self._clients.append(client)
        return self

    async def _look_up(self, session: Any) -> Any:  # noqa: ANN401 -- botocore's frozen credentials
        with _profile_named(self._config):  # where the environment names it, only this look misses it
            found = await session.get_credentials()
        return None if found is None else await found.get_frozen_credentials()

    async def _connect(self, config: S3Config, endpoint: str | None, region: str, *, path_style: bool) -> Any:  # noqa: ANN401
        from aiobotocore.config import AioConfig

        from dcp_s3._transfer.session import ViewSession

        options = AioConfig(http_session_cls=ViewSession, **boto_options(config, path_style=path_style))
        made = self._session.create_client("s3", config=options, **client_options(config, endpoint, region))
        return _prepare(await self._stack.enter_async_context(made))

    async def renewed(self) -> DataClients | None:
        """Clients with the credentials that the chain gives now, ``None`` if those are the same as before."""
        if not _has_chain(self._config):
            return None
        session = _aio_session(self._config.resolved())
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
