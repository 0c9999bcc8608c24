"""Settings as data: S3Config and RetryPolicy. The only module that reads the environment."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping  # noqa: TC003 -- typing.get_type_hints(S3Config) looks them up
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from dcp_s3._environment import settings
from dcp_s3.errors import ConfigError

__all__ = ["RetryPolicy", "S3Config"]

MIB: Final = 1 << 20
GIB: Final = 1 << 30

MIN_PART_BYTES: Final = 5 * MIB
"""Smallest part but the last that S3 accepts.
Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""
MAX_PART_BYTES: Final = GIB
"""Our own limit, below S3's 5 GiB: one request body stays far from 2**31 bytes, where TLS stacks have overflowed."""
MIN_MEMORY_BYTES: Final = 32 * MIB
LONGEST_S: Final = 7 * 24 * 3600
"""Of every time-out and wait: S3 keeps no signature longer, and no clock or poll overflows."""
MOST_ATTEMPTS: Final = 10_000
MAX_METADATA_BYTES: Final = 2048 - 256
"""S3's 2 KB, less what we need for our own.
Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html"""
DEFAULT_DEADLINE_S: Final = 1500.0
"""Deadline of a save or load for which none is set, without a process group whose time-out could be read; seconds."""

_SECRET = frozenset({"secret_access_key", "session_token", "sse_customer_key"})
_INTS: Final = ("part_bytes", "max_concurrency", "memory_bytes", "max_record_bytes", "staging_buffers")
_NUMBERS: Final = (
    "connect_timeout_s", "read_timeout_s", "save_deadline_s", "load_deadline_s", "stall_limit_s", "background_cores",
)  # fmt: skip
_TEXTS: Final = (
    "region",
    "profile",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "sse_kms_key_id",
    "storage_class",
)
_OPTIONAL: Final = (
    "endpoint_url", "region", "profile", "save_deadline_s", "load_deadline_s", "background_cores", "sse", "sse_kms_key_id",
    "storage_class",
)  # fmt: skip
"""Fields that may be ``None``, of those that are numbers or that a variable can set."""
_RETRY: Final = ("max_attempts", "initial_wait_s", "max_wait_s")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def _check_int(name: str, value: object) -> None:
    if type(value) is not int:
        raise ConfigError(f"{name} must be a whole number (int), got {value!r:.80}")


def _check_number(name: str, value: object, *, finite: bool = True) -> None:
    if value is None and name in _OPTIONAL:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or (finite and not math.isfinite(value)):
        raise ConfigError(f"{name} must be a {'finite ' * finite}number, got {value!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and how soon, one request is tried again. The only retry layer: the SDK's own is switched off.

    Waits grow as ``initial_wait_s * 2**n`` up to ``max_wait_s`` with full jitter; a ``Retry-After`` header wins when it
    is longer. A save's or load's deadline ends the retries sooner.

    Attributes:
        max_attempts: Tries in all per request, the first included; 1 to 10,000. Default: 8.
        initial_wait_s: Upper bound of the first wait, seconds; 0 to ``max_wait_s``. Default: 0.2.
        max_wait_s: Upper bound of every wait, seconds; at most 7 days. Default: 20.0.

    Raises:
        ConfigError: A value is of another type or out of its range.
    """

    max_attempts: int = 8
    initial_wait_s: float = 0.2
    max_wait_s: float = 20.0

    def __post_init__(self) -> None:
        _check_int("RetryPolicy.max_attempts", self.max_attempts)
        _check_number("RetryPolicy.initial_wait_s", self.initial_wait_s)
        _check_number("RetryPolicy.max_wait_s", self.max_wait_s)
        if not 1 <= self.max_attempts <= MOST_ATTEMPTS:
            raise ConfigError(f"RetryPolicy.max_attempts must be 1 to {MOST_ATTEMPTS:,}, got {self.max_attempts}")
        if not 0 <= self.initial_wait_s <= self.max_wait_s <= LONGEST_S:
            raise ConfigError(
                "RetryPolicy needs 0 <= initial_wait_s <= max_wait_s <= 604800 (7 days), got "
                f"initial_wait_s={self.initial_wait_s}, max_wait_s={self.max_wait_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """Everything about an endpoint and how to use it. Immutable, hashable and picklable.

    A field left at ``None`` follows the AWS conventions: ``AWS_ACCESS_KEY_ID`` and the credential chain with refresh,
    ``AWS_PROFILE``, ``AWS_REGION`` before ``AWS_DEFAULT_REGION``, ``AWS_ENDPOINT_URL_S3`` before ``AWS_ENDPOINT_URL``,
    ``AWS_CA_BUNDLE``.

    Attributes:
        endpoint_url: ``http(s)://host[:port]``; a tuple of several (data VIPs of one store) shares the requests in turn.
            Default: None, the environment's, else AWS's own.
        region: Default: None, the environment's or the profile's, else ``us-east-1``.
        profile: Profile of the AWS configuration files. Default: None.
        access_key_id: Goes with ``secret_access_key``. Default: None, the credential chain.
        secret_access_key: Default: None.
        session_token: Of temporary credentials. Default: None.
        unsigned: Send requests without a signature: reads of public buckets. Default: False.
        addressing_style: ``"path"``, ``"virtual"`` or ``"auto"``: path style on a custom endpoint, virtual-hosted style on AWS.
            Default: "auto".
        verify_tls: Check the server's certificate; a string is the path of a CA bundle, one PEM file. Default: True.
        part_bytes: Size of an upload part, bytes, 5 MiB to 1 GiB; 0 chooses 8-32 MiB by the shard's size. Grown when a shard
            would need more than 10,000 parts. Default: 0.
        max_concurrency: Requests in flight per process, 1 to 256. Default: 16.
        memory_bytes: Bound of the copies that one process holds for saves and loads in flight, bytes, 32 MiB or more. Several at
            once share it; one that would wait for itself beside others that hold all of it goes on with a part at a time.
            Contiguous CPU tensors are not copied and do not count. Default: 256 MiB.
        max_record_bytes: Largest ``.metadata`` that is unpickled, bytes, 1 or more. It takes about 10 times its size in memory, and at
            most some 40 times if somebody made it to. Default: 4 GiB.
        connect_timeout_s: Longest time to connect, seconds, up to 7 days like all times here. Default: 10.0.
        read_timeout_s: Longest silence on a connection (nothing sent, nothing received) before an attempt is given up, seconds.
            Default: 60.0.
        save_deadline_s: Longest time from the start of a save to its commit, seconds. Default: None, 0.9 x the process group's
            time-out where it can be read, else 1,500.
        load_deadline_s: The same for a load, seconds. Default: None.
        stall_limit_s: A save or load in which no byte is acknowledged for so long is given up, seconds. Default: 120.0.
        retry: A :class:`RetryPolicy`. Default: RetryPolicy().
        background_cores: CPU time that an ``async_save`` takes at most on each rank, seconds per second: it shares cores, and in
            THREAD mode the GIL, with the training. ``None``: as much as it can use. Synchronous saves are not held back.
            Default: 0.4.
        checksum: Checksum header of each part: ``"crc32c"``, ``"crc64nvme"``, ``"none"``, or ``"auto"``: CRC32C, off where the
            store refuses or ignores it. The manifest's CRC32C values are kept, and checked at load, in every case.
            Default: "auto".
        conditional_commit: Commit with If-None-Match / If-Match. ``"auto"``: where a probe shows that the store honours them,
            else with a warning and a read-back; ``"required"``: refuse to save elsewhere; ``"off"``: never. Default: "auto".
        sse: Server-side encryption of what is written: ``"AES256"``, ``"aws:kms"`` or ``"aws:kms:dsse"``. Default: None.
        sse_kms_key_id: Key of ``"aws:kms"`` and ``"aws:kms:dsse"``. Default: None, the account's.
        sse_customer_key: SSE-C: a 256-bit key (32 bytes), sent with every request that needs it; https only on AWS.
            Default: None.
        storage_class: Storage class of what is written, in the store's spelling. Default: None, the bucket's.
        tags: Object tags of what is written, a mapping or pairs: at most 10, of 128 and 256 characters. Kept as pairs.
            Default: ().
        metadata: User metadata of what is written, a mapping or pairs of printable ASCII, together at most 1,792 bytes (S3's
            2 KiB less our own). Names that start with ``dcp-s3-`` are ours. Kept as pairs. Default: ().
        staging_buffers: Buffers that async saves are staged into, 1 or more; 1: a new stage waits for the upload of the last one,
            2 overlaps. Default: 1.
        async_staging: ``stage()`` returns a future (DCP >= 2.9 then answers with an AsyncSaveResponse). Default: False.

    Raises:
        ConfigError: A value is of another type or out of its range; raised at construction, before any request.
    """

    endpoint_url: str | tuple[str, ...] | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    unsigned: bool = False
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    verify_tls: bool | str = True

    part_bytes: int = 0
    max_concurrency: int = 16
    memory_bytes: int = 256 * MIB
    max_record_bytes: int = 4096 * MIB
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    save_deadline_s: float | None = None
    load_deadline_s: float | None = None
    stall_limit_s: float = 120.0
    retry: RetryPolicy = RetryPolicy()

    background_cores: float | None = 0.4

    checksum: Literal["auto", "crc32c", "crc64nvme", "none"] = "auto"
    conditional_commit: Literal["auto", "required", "off"] = "auto"

    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    sse_kms_key_id: str | None = None
    sse_customer_key: bytes | None = None
    storage_class: str | None = None
    tags: Mapping[str, str] | Iterable[tuple[str, str]] = ()
    metadata: Mapping[str, str] | Iterable[tuple[str, str]] = ()

    staging_buffers: int = 1
    async_staging: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", _pairs("tags", self.tags))
        object.__setattr__(self, "metadata", _pairs("metadata", self.metadata))
        if isinstance(self.endpoint_url, list):
            object.__setattr__(self, "endpoint_url", tuple(self.endpoint_url))
        for name in _INTS:
            _check_int(name, getattr(self, name))
        for name in _NUMBERS:
            _check_number(name, getattr(self, name), finite=name != "background_cores")
        for name in ("unsigned", "async_staging"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in _TEXTS:
            _check_text(name, getattr(self, name))
        if not isinstance(self.retry, RetryPolicy):
            raise ConfigError(f"retry must be a RetryPolicy, got a {type(self.retry).__name__}")
        _check_endpoints(self.endpoint_url)
        _check_verify_tls(self.verify_tls)
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
        if self.max_record_bytes < 1:
            raise ConfigError(f"max_record_bytes must be 1 or more, got {self.max_record_bytes} bytes")
        if self.part_bytes > self.memory_bytes // 2:
            raise ConfigError(
                f"memory_bytes ({self.memory_bytes}) must be at least twice part_bytes ({self.part_bytes}): a part that has "
                "to be copied is held whole while the next one is filled"
            )
        for name in ("connect_timeout_s", "read_timeout_s", "stall_limit_s", "save_deadline_s", "load_deadline_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= LONGEST_S:
                raise ConfigError(f"{name} must be more than 0 seconds and at most 604800 (7 days), got {value}")
        if self.background_cores is not None and not self.background_cores > 0:
            raise ConfigError(f"background_cores must be more than 0, or None, got {self.background_cores}")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError("access_key_id and secret_access_key go together: give both or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError("session_token needs access_key_id and secret_access_key")
        if self.unsigned and self.access_key_id is not None:
            raise ConfigError("unsigned=True and access_key_id exclude each other")
        _check_customer_key(self.sse_customer_key)
        if self.sse is not None and self.sse_customer_key is not None:
            raise ConfigError("sse and sse_customer_key exclude each other")
        if self.sse_kms_key_id is not None and self.sse not in ("aws:kms", "aws:kms:dsse"):
            raise ConfigError("sse_kms_key_id needs sse='aws:kms' or 'aws:kms:dsse'")
        if self.staging_buffers < 1:
            raise ConfigError(f"staging_buffers must be 1 or more, got {self.staging_buffers}")
        _check_tags(dict(self.tags))
        _check_metadata(dict(self.metadata))

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
        ``DCP_S3_SAVE_DEADLINE_S``, ``DCP_S3_RETRY_MAX_ATTEMPTS`` … ``none`` stands for ``None``; an empty variable is one
        that is not set. Credentials stay with the AWS variables.

        Args:
            **overrides: Fields of :class:`S3Config`.

        Raises:
            ConfigError: A variable is unknown or does not parse, or a value is out of range.
        """
        values = settings(os.environ, optional=_OPTIONAL, fields=[field.name for field in fields(cls)])
        retry = {name: values.pop(f"retry_{name}") for name in _RETRY if f"retry_{name}" in values}
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


def _pairs(name: str, given: Any) -> tuple[tuple[str, str], ...]:  # noqa: ANN401 -- whatever a user gave
    try:
        pairs = given.items() if hasattr(given, "items") else given
        kept = tuple((str(key), str(value)) for key, value in pairs)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a mapping or (name, value) pairs, got {given!r:.80}") from None
    if len({key.lower() if name == "metadata" else key for key, _ in kept}) < len(kept):
        raise ConfigError(
            f"{name} names something twice (header names have no case): {', '.join(key for key, _ in kept)}"
        )
    return kept


def _check_text(name: str, value: object) -> None:
    """Texts that go into headers, and so cannot hold a line break: one from a file often ends with it. Shows no value."""
    if value is None:
        return
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a str, got a {type(value).__name__}")
    if not value or not value.isprintable() or value != value.strip():
        raise ConfigError(f"{name} is empty, or has a line break, other control characters or blanks around it")
    if not value.isascii() and name != "profile":
        raise ConfigError(f"{name} has characters beyond ASCII, which no header can carry")


def _check_customer_key(value: object) -> None:
    if value is not None and not (isinstance(value, bytes) and len(value) == 32):
        raise ConfigError("sse_customer_key must be bytes: 32 bytes (256 bits)")


def _check_verify_tls(value: object) -> None:
    if type(value) is bool:
        return
    if not isinstance(value, str) or not value:
        raise ConfigError(f"verify_tls must be True, False or the path of a CA bundle, got {value!r:.80}")
    if Path(value).is_dir():
        raise ConfigError(
            f"verify_tls names the directory {value!r}; give one file of PEM certificates: cat {value.rstrip('/')}/*.pem > ca.pem"
        )


def _check_tags(tags: dict[str, str]) -> None:
    if len(tags) > 10:
        raise ConfigError(f"an object can have 10 tags, got {len(tags)}")
    for name, value in tags.items():
        if not 1 <= len(name) <= 128 or len(value) > 256:
            raise ConfigError(
                f"a tag's name is 1 to 128 characters and its value at most 256, got {name!r:.80}={value!r:.80}"
            )
        if not (name + value).isprintable() or name.lower().startswith("aws:"):
            raise ConfigError(
                f"tag {name!r:.80}={value!r:.80} has control characters, or starts with 'aws:', which is reserved"
            )


def _check_metadata(metadata: dict[str, str]) -> None:
    if reserved := [name for name in metadata if name.lower().startswith("dcp-s3-")]:
        raise ConfigError(f"metadata names that start with 'dcp-s3-' are reserved: {', '.join(reserved)}")
    for name, value in metadata.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ConfigError(f"metadata name {name!r:.80} is no header name: letters, digits and - . _ are good")
        if not value.isascii() or (value and not value.isprintable()) or value != value.strip():
            raise ConfigError(
                f"metadata {name}={value!r:.80} must be printable ASCII without line breaks or blanks around it: it is sent as a header"
            )
    total = sum(len(name) + len(value) for name, value in metadata.items())
    if total > MAX_METADATA_BYTES:
        raise ConfigError(
            f"metadata takes {total} bytes of names and values; at most {MAX_METADATA_BYTES} fit, beside our own"
        )


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
                "and prefix belong in the checkpoint's s3:// URL"
            )
