"""Settings as data: S3Config and RetryPolicy. The only module that reads the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from dcp_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["RetryPolicy", "S3Config"]

MIB: Final = 1 << 20
GIB: Final = 1 << 30

MIN_PART_BYTES: Final = 5 * MIB
"""Smallest part but the last that S3 accepts.
Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""
MAX_PART_BYTES: Final = GIB
"""Our own limit, below S3's 5 GiB: one request body stays far from 2**31 bytes, where TLS stacks have overflowed."""
MIN_MEMORY_BYTES: Final = 32 * MIB
DEFAULT_DEADLINE_S: Final = 1500.0
"""Deadline of a save or load for which none is set, without a process group whose time-out could be read; seconds."""

_SECRET = frozenset({"secret_access_key", "session_token", "sse_customer_key"})
_ENV_PREFIX = "DCP_S3_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and how soon, one request is tried again. The only retry layer: the SDK's own is switched off.

    Waits grow as ``initial_wait_s * 2**n`` up to ``max_wait_s`` with full jitter; a ``Retry-After`` header wins when it
    is longer. A save's or load's deadline ends the retries sooner.
    """

    max_attempts: int = 8
    """Tries in all per request, the first included; 1 or more."""
    initial_wait_s: float = 0.2
    """Upper bound of the first wait, seconds; 0 or more."""
    max_wait_s: float = 20.0
    """Upper bound of every wait, seconds; at least ``initial_wait_s``."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"RetryPolicy.max_attempts must be 1 or more, got {self.max_attempts}")
        if self.initial_wait_s < 0 or self.max_wait_s < self.initial_wait_s:
            raise ConfigError(
                "RetryPolicy needs 0 <= initial_wait_s <= max_wait_s, got "
                f"initial_wait_s={self.initial_wait_s}, max_wait_s={self.max_wait_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """Everything about an endpoint and how to use it. Immutable, hashable and picklable.

    A field left at ``None`` follows the AWS conventions: ``AWS_ACCESS_KEY_ID`` and the credential chain with refresh,
    ``AWS_PROFILE``, ``AWS_REGION`` before ``AWS_DEFAULT_REGION``, ``AWS_ENDPOINT_URL_S3`` before ``AWS_ENDPOINT_URL``,
    ``AWS_CA_BUNDLE``.

    Raises:
        ConfigError: A value is out of its range; raised at construction, before any request.
    """

    endpoint_url: str | tuple[str, ...] | None = None
    """``http(s)://host[:port]``; several (data VIPs of one store) share the requests in turn."""
    region: str | None = None
    """Default: from the environment or profile, else ``us-east-1``."""
    profile: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    unsigned: bool = False
    """Send requests without a signature: reads of public buckets."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """``auto``: path style on a custom endpoint, virtual-hosted style on AWS."""
    verify_tls: bool | str = True
    """Check the server's certificate; a string is the path of a CA bundle (PEM)."""

    part_bytes: int = 0
    """Size of an upload part, 5 MiB to 1 GiB; 0 chooses 8-32 MiB by the shard's size. Grown when a shard would need
    more than 10,000 parts."""
    max_concurrency: int = 16
    """Requests in flight per process, 1 to 256."""
    memory_bytes: int = 256 * MIB
    """Bound of the copies that one process holds for saves and loads in flight, bytes; 32 MiB or more. Contiguous CPU
    tensors are not copied and do not count."""
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    """Longest silence on a connection (nothing sent, nothing received) before an attempt is given up, seconds."""
    save_deadline_s: float | None = None
    """Longest time from the start of a save to its commit, seconds. Default: 0.9 x the process group's time-out where it
    can be read, else 1,500."""
    load_deadline_s: float | None = None
    """The same for a load."""
    stall_limit_s: float = 120.0
    """A save or load in which no byte is acknowledged for so long is given up, seconds."""
    retry: RetryPolicy = RetryPolicy()

    background_cores: float | None = 0.4
    """CPU time that an ``async_save`` takes at most on each rank, seconds per second: it shares cores, and in THREAD mode the
    GIL, with the training. ``None``: as much as it can use. Synchronous saves are not held back."""

    checksum: Literal["auto", "crc32c", "crc64nvme", "none"] = "auto"
    """Checksum header of each part. ``auto``: CRC32C, off where the store refuses or ignores it. The manifest's CRC32C
    values are kept, and checked at load, in every case."""
    conditional_commit: Literal["auto", "required", "off"] = "auto"
    """Commit with If-None-Match / If-Match. ``auto``: where a probe shows that the store honours them, else with a
    warning and a read-back; ``required``: refuse to save elsewhere; ``off``: never."""

    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption of what is written."""
    sse_kms_key_id: str | None = None
    sse_customer_key: bytes | None = None
    """SSE-C: a 256-bit key (32 bytes), sent with every request that needs it; https only on AWS."""
    storage_class: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    """Object tags of what is written; a mapping is accepted."""
    metadata: tuple[tuple[str, str], ...] = ()
    """User metadata of what is written; a mapping is accepted. Names that start with ``dcp-s3-`` are ours."""

    staging_buffers: int = 1
    """Buffers that async saves are staged into; 1: a new stage waits for the upload of the last one, 2 overlaps."""
    async_staging: bool = False
    """``stage()`` returns a future (DCP >= 2.9 then answers with an AsyncSaveResponse)."""

    def __post_init__(self) -> None:
        _freeze_pairs(self, "tags")
        _freeze_pairs(self, "metadata")
        if isinstance(self.endpoint_url, list):
            object.__setattr__(self, "endpoint_url", tuple(self.endpoint_url))
        _check_endpoints(self.endpoint_url)
        _check_choice(self, "addressing_style", ("auto", "path", "virtual"))
        _check_choice(self, "checksum", ("auto", "crc32c", "crc64nvme", "none"))
        _check_choice(self, "conditional_commit", ("auto", "required", "off"))
        _check_choice(self, "sse", (None, "AES256", "aws:kms", "aws:kms:dsse"))
        if self.part_bytes and not MIN_PART_BYTES <= self.part_bytes <= MAX_PART_BYTES:
            raise ConfigError(f"part_bytes must be 0 (chosen) or 5 MiB to 1 GiB, got {self.part_bytes} bytes")
        if not 1 <= self.max_concurrency <= 256:
            raise ConfigError(f"max_concurrency must be 1 to 256, got {self.max_concurrency}")
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise ConfigError(f"memory_bytes must be 32 MiB or more, got {self.memory_bytes} bytes")
        if self.part_bytes > self.memory_bytes // 2:
            raise ConfigError(
                f"memory_bytes ({self.memory_bytes}) must be at least twice part_bytes ({self.part_bytes}): a part that has "
                "to be copied is held whole while the next one is filled"
            )
        for name in ("connect_timeout_s", "read_timeout_s", "stall_limit_s", "save_deadline_s", "load_deadline_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0 seconds, got {value}")
        if self.background_cores is not None and not self.background_cores > 0:
            raise ConfigError(f"background_cores must be more than 0, or None, got {self.background_cores}")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError("access_key_id and secret_access_key go together: give both or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError("session_token needs access_key_id and secret_access_key")
        if self.unsigned and self.access_key_id is not None:
            raise ConfigError("unsigned=True and access_key_id exclude each other")
        if self.sse_customer_key is not None and len(self.sse_customer_key) != 32:
            raise ConfigError(f"sse_customer_key must be 32 bytes (256 bits), got {len(self.sse_customer_key)}")
        if self.sse is not None and self.sse_customer_key is not None:
            raise ConfigError("sse and sse_customer_key exclude each other")
        if self.sse_kms_key_id is not None and self.sse not in ("aws:kms", "aws:kms:dsse"):
            raise ConfigError("sse_kms_key_id needs sse='aws:kms' or 'aws:kms:dsse'")
        if self.staging_buffers < 1:
            raise ConfigError(f"staging_buffers must be 1 or more, got {self.staging_buffers}")
        if reserved := [name for name, _ in self.metadata if name.lower().startswith("dcp-s3-")]:
            raise ConfigError(f"metadata names that start with 'dcp-s3-' are reserved: {', '.join(reserved)}")

    def __repr__(self) -> str:
        shown = (
            f"{f.name}={'***' if f.name in _SECRET else repr(value)}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default
        )
        return f"S3Config({', '.join(shown)})"

    @classmethod
    def from_env(cls, **overrides: Any) -> S3Config:  # noqa: ANN401 -- any field, of that field's type
        """Build a config from ``DCP_S3_<FIELD>`` variables; keyword arguments win.

        Every plain field can be set: ``DCP_S3_ENDPOINT_URL`` (several separated by commas), ``DCP_S3_PART_BYTES``,
        ``DCP_S3_SAVE_DEADLINE_S``, ``DCP_S3_RETRY_MAX_ATTEMPTS`` … Credentials stay with the AWS variables.

        Args:
            **overrides: Fields of :class:`S3Config`.

        Raises:
            ConfigError: A variable does not parse, or a value is out of range.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = os.environ.get(_ENV_PREFIX + field.name.upper())
            if text is not None and field.name in _PARSERS:
                values[field.name] = _parse(field.name, text, _PARSERS[field.name])
        retry = {
            field.name: _parse(f"retry_{field.name}", text, int if field.name == "max_attempts" else float)
            for field in fields(RetryPolicy)
            if (text := os.environ.get(f"{_ENV_PREFIX}RETRY_{field.name.upper()}")) is not None
        }
        if retry:
            values["retry"] = RetryPolicy(**retry)
        return cls(**{**values, **overrides})

    def resolved(self) -> S3Config:
        """This config with endpoint and region taken from the environment where they were left open.

        The profile's own ``endpoint_url`` and ``region`` are read later, by the SDK, as they lie in files.
        """
        endpoint, region = self.endpoint_url, self.region
        if endpoint is None and os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
        if region is None:
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None
        if (endpoint, region) == (self.endpoint_url, self.region):
            return self
        return replace(self, endpoint_url=endpoint, region=region)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The configured endpoints, in order; empty when AWS's own is used."""
        if self.endpoint_url is None:
            return ()
        return (self.endpoint_url,) if isinstance(self.endpoint_url, str) else self.endpoint_url


def _freeze_pairs(config: S3Config, name: str) -> None:
    given: Mapping[str, str] | Iterable[tuple[str, str]] = getattr(config, name)
    pairs = given.items() if hasattr(given, "items") else given
    object.__setattr__(config, name, tuple((str(key), str(value)) for key, value in pairs))


def _check_choice(config: S3Config, name: str, allowed: tuple[str | None, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _check_endpoints(given: str | tuple[str, ...] | None) -> None:
    if given is None:
        return
    urls = (given,) if isinstance(given, str) else given
    if not urls:
        raise ConfigError("endpoint_url is an empty tuple; leave it None for AWS")
    for url in urls:
        parts = urlsplit(url)
        try:
            port_is_good = parts.port is None or parts.port > 0
        except ValueError:
            port_is_good = False
        if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_good:
            shown = url if "@" not in url else f"***@{url.rpartition('@')[2]}"  # before it there may be a password
            raise ConfigError(f"endpoint_url must look like http(s)://host[:port], got {shown!r}")
        if parts.path not in ("", "/") or parts.query or parts.username:
            raise ConfigError(
                f"endpoint_url must not have a path, a query or credentials, got {parts.scheme}://{parts.hostname}…: bucket "
                "and prefix belong into the checkpoint's s3:// URL"
            )


def _parse(name: str, text: str, parser: Any) -> Any:  # noqa: ANN401 -- the parser decides the type
    try:
        return parser(text)
    except ValueError as error:
        raise ConfigError(f"{_ENV_PREFIX}{name.upper()}={text!r} is not valid: {error}") from error


def _bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


def _bool_or_path(text: str) -> bool | str:
    try:
        return _bool(text)
    except ValueError:
        return text


_SIZE = re.compile(r"(\d+)\s*(|B|KiB|MiB|GiB)", re.ASCII)


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a whole number of bytes, with KiB, MiB or GiB after it if you like")
    return int(match[1]) << {"": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30}[match[2]]


def _endpoints(text: str) -> str | tuple[str, ...]:
    urls = tuple(url.strip() for url in text.split(",") if url.strip())
    return urls[0] if len(urls) == 1 else urls


_PARSERS: Final[dict[str, Any]] = {
    "endpoint_url": _endpoints,
    "region": str,
    "profile": str,
    "unsigned": _bool,
    "addressing_style": str,
    "verify_tls": _bool_or_path,
    "part_bytes": _bytes,
    "max_concurrency": int,
    "memory_bytes": _bytes,
    "connect_timeout_s": float,
    "read_timeout_s": float,
    "save_deadline_s": float,
    "load_deadline_s": float,
    "background_cores": float,
    "stall_limit_s": float,
    "checksum": str,
    "conditional_commit": str,
    "sse": str,
    "sse_kms_key_id": str,
    "storage_class": str,
    "staging_buffers": int,
    "async_staging": _bool,
}
