"""The S3 clients of a config, for both planes: made alike, one per endpoint, made anew when their credentials expire."""

from __future__ import annotations

import asyncio
import contextlib
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
from botocore.config import Config as BotoConfig
from botocore.exceptions import NoCredentialsError

from dcp_s3.errors import ConfigError, DcpS3Error, StorageUnavailableError

if TYPE_CHECKING:
    from dcp_s3.config import S3Config

DEFAULT_REGION: Final = "us-east-1"
_AGENT: Final = f"dcp-s3 Botocore/{botocore.__version__}"
"""In full: botocore puts its own together anew for each request, which takes a quarter of a small request's CPU time."""
_AVOID_S: Final = 30.0
"""So long an endpoint that could not be reached is passed over, as long as another one is left."""


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
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            **{"capath" if Path(path).is_dir() else "cafile": path}
        )
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

    def note(self, index: int, error: DcpS3Error) -> None:
        """Pass an endpoint over for a while if it gave no answer at all."""
        if isinstance(error, StorageUnavailableError) and error.status is None:
            with self._lock:
                self._avoided_until[index] = time.monotonic() + _AVOID_S


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
        self._session = session if session is not None else boto3.session.Session(profile_name=resolved.profile)
        if _has_chain(config) and self._session.get_credentials() is None:
            raise NoCredentialsError
        _check_ca_bundle(_ca_bundle(config, self._session._session))  # noqa: SLF001 -- boto3 hides its botocore session
        region = resolved.region or self._session.region_name or DEFAULT_REGION
        endpoints: tuple[str | None, ...] = resolved.endpoints or (None,)
        self._clients = [self._create(resolved, endpoint, region) for endpoint in endpoints]
        self.rotation = Rotation(len(endpoints))

    def _create(self, config: S3Config, endpoint: str | None, region: str) -> Any:  # noqa: ANN401 -- made at run time
        path_style = config.addressing_style == "auto" and endpoint is not None and not is_aws(endpoint)
        options = client_options(config, endpoint, region)
        client = self._session.client("s3", config=BotoConfig(**boto_options(config, path_style=path_style)), **options)
        if config.addressing_style == "auto" and not path_style and not is_aws(client.meta.endpoint_url):
            # the endpoint came from the profile's own file
            client = self._session.client("s3", config=BotoConfig(**boto_options(config, path_style=True)), **options)
        return client

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._clients[index]

    def renewed(self) -> ControlClients | None:
        """Clients with the credentials that the chain gives now, ``None`` if those are the same as before."""
        if not _has_chain(self._config):
            return None
        session = boto3.session.Session(profile_name=self._config.resolved().profile)
        fresh, used = session.get_credentials(), self._session.get_credentials()
        if fresh is None or used is None or fresh.get_frozen_credentials() == used.get_frozen_credentials():
            return None
        return ControlClients(self._config, session)


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
        self.rotation = Rotation(max(1, len(config.resolved().endpoints)))

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 -- aiobotocore makes its clients at run time
        return self._clients[index]

    async def open(self, session: Any = None) -> DataClients:  # noqa: ANN401 -- aiobotocore is untyped
        """Look the credentials up, once, and make the clients.

        Args:
            session: Where the credentials come from; made if not given.

        Raises:
            NoCredentialsError: The chain has none yet. Nothing is kept of that: a later try looks again.
        """
        import aiobotocore.session  # not above: the tools do without it, and it takes half of their time to start

        config = self._config.resolved()
        self._session = session if session is not None else aiobotocore.session.AioSession(profile=config.profile)
        if _has_chain(config) and await self._session.get_credentials() is None:
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

    async def _connect(self, config: S3Config, endpoint: str | None, region: str, *, path_style: bool) -> Any:  # noqa: ANN401
        from aiobotocore.config import AioConfig

        from dcp_s3._transfer.session import ViewSession

        options = AioConfig(http_session_cls=ViewSession, **boto_options(config, path_style=path_style))
        made = self._session.create_client("s3", config=options, **client_options(config, endpoint, region))
        return await self._stack.enter_async_context(made)

    async def renewed(self) -> DataClients | None:
        """Clients with the credentials that the chain gives now, ``None`` if those are the same as before."""
        if not _has_chain(self._config):
            return None
        import aiobotocore.session

        session = aiobotocore.session.AioSession(profile=self._config.resolved().profile)
        fresh, used = await session.get_credentials(), await self._session.get_credentials()
        if fresh is None or used is None:
            return None
        if await fresh.get_frozen_credentials() == await used.get_frozen_credentials():
            return None
        return await DataClients(self._config).open(session)

    async def close(self) -> None:
        """Close all connections."""
        self._clients.clear()
        await self._stack.aclose()


class CurrentDataClients:
    """The data clients that are in use, opened at the first request and replaced when their credentials have expired.

    Args:
        config: Endpoints, credentials and limits.
    """

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._current: DataClients | None = None
        self._opened: list[DataClients] = []
        self._changing = asyncio.Lock()

    async def get(self) -> DataClients:
        """The clients to use now."""
        if self._current is None:
            async with self._changing:
                if self._current is None:
                    made = DataClients(self._config)
                    self._opened.append(made)
                    self._current = await made.open()
        return self._current

    async def renew(self, used: DataClients) -> bool:
        """Whether there are others than the ``used`` ones, with credentials that may not have expired.

        The old ones are kept until :meth:`close`: other requests are still at work on them.
        """
        async with self._changing:
            if self._current is used:
                fresh = await used.renewed()
                if fresh is None:
                    return False
                self._opened.append(fresh)
                self._current = fresh
            return True

    async def close(self) -> None:
        """Close all connections."""
        self._current = None
        for clients in self._opened:
            await clients.close()
        self._opened.clear()
