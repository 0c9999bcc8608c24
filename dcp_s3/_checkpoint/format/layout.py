"""Where everything of a checkpoint lies in the bucket: URLs, object names, and which names may be trusted.

::

    <url>/.metadata                         the commit record; __<rank>.metadata where each rank commits for itself
    <url>/index-<write_id>.safetensors.gz   written just before it
    <url>/data/<token>/__<rank>_<n>.distcp  data objects

Names are never used twice: a save draws its write id, and each rank its token, at random.
"""

from __future__ import annotations

import os
import re
import secrets
import uuid
from dataclasses import dataclass
from typing import Final

from dcp_s3.errors import ConfigError, CorruptCheckpointError

__all__ = [
    "DATA_PREFIX",
    "INDEX_FIELD",
    "RECORD_NAME",
    "WRITE_ID_FIELD",
    "CheckpointUrl",
    "check_relative",
    "data_key",
    "index_name",
    "index_write_id",
    "is_record_name",
    "is_write_id",
    "join_id",
    "new_token",
    "new_write_id",
    "owner_of",
    "parse_url",
    "record_name",
    "record_rank",
]

RECORD_NAME: Final = ".metadata"
DATA_PREFIX: Final = "data/"
WRITE_ID_FIELD: Final = "dcp-s3-write-id"
"""User metadata of a record: whose checkpoint it is, known without reading the whole record."""
INDEX_FIELD: Final = "dcp-s3-index-sha256"
"""User metadata of a record: the SHA-256 of its index, in hex."""

MAX_KEY_BYTES: Final = 1024
"""Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html"""
_ROOM_FOR_NAMES: Final = 64
"""Bytes that the longest name below a checkpoint's URL needs: ``/data/<token>/__<rank>_<n>.distcp``."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_S3 = re.compile(r"s3:/{1,2}(?=[^/])")
_BUCKET = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_WRITE_ID = re.compile(r"[0-9a-f]{32}")
_RECORD = re.compile(r"(?:__(0|[1-9][0-9]{0,8}))?\.metadata")
_INDEX = re.compile(r"index-([0-9a-f]{32})\.safetensors\.gz")
_OURS = re.compile(
    r"(?:(?P<owner>.*)/)?(?:data/[0-9a-f]{16}/__[0-9]+_[0-9]+\.distcp|index-[0-9a-f]{32}\.safetensors\.gz)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class CheckpointUrl:
    """A place in a bucket that holds a checkpoint, or checkpoints below it.

    Attributes:
        bucket: Bucket name.
        prefix: Key prefix without leading or trailing slash; may be empty.
    """

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    def key(self, relative: str) -> str:
        """The full key of a name below this URL; ``""`` gives the listing prefix (with its slash)."""
        return f"{self.prefix}/{relative}" if self.prefix else relative

    def child(self, name: str) -> CheckpointUrl:
        """The URL of a checkpoint below this one; ``name`` may hold slashes."""
        return CheckpointUrl(self.bucket, self.key(name))


def parse_url(text: str | os.PathLike[str]) -> CheckpointUrl:
    """Parse ``s3://bucket/prefix``.

    A URL that went through :class:`pathlib.Path` (``s3:/bucket/prefix``) is understood. One trailing slash is ignored.

    Args:
        text: The URL.

    Raises:
        ConfigError: Another scheme, no bucket, or a prefix that could not be a key prefix on every store.
    """
    given = os.fspath(text)
    if not isinstance(given, str):
        raise ConfigError(f"a checkpoint URL is text like s3://bucket/prefix, got {given!r}")
    start = _S3.match(given)
    if start is None:
        raise ConfigError(f"a checkpoint URL must look like s3://bucket/prefix, got {given!r}")
    bucket, _, prefix = given[start.end() :].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{given!r} has no valid bucket name: expected s3://bucket/prefix, got bucket {bucket!r}")
    prefix = prefix.removesuffix("/")
    if prefix:
        _check_prefix(prefix, given)
    return CheckpointUrl(bucket, prefix)


def join_id(base: CheckpointUrl | None, checkpoint_id: str | os.PathLike[str]) -> CheckpointUrl:
    """The URL that DCP's ``checkpoint_id`` means.

    Args:
        base: URL that the storage writer or reader was made with, or ``None``.
        checkpoint_id: A full ``s3://`` URL, or a name relative to ``base`` (``step-100``, ``run/step-100``).

    Raises:
        ConfigError: The URL is not valid, the name is relative and there is no base, or it leads out of the base.
    """
    given = os.fspath(checkpoint_id)
    if not isinstance(given, str):
        raise ConfigError(f"a checkpoint id is text, got {given!r}")
    if _SCHEME.match(given):
        return parse_url(given)
    if base is None:
        raise ConfigError(
            f"checkpoint_id {given!r} is not an s3:// URL and there is no base: pass s3://bucket/prefix, or give the "
            "writer or reader a url"
        )
    name = given.removesuffix("/")
    if not name or name.startswith("/"):
        raise ConfigError(f"checkpoint_id {given!r} must be an s3:// URL or a name relative to {base}")
    joined = base.child(name)
    _check_prefix(joined.prefix, given)
    return joined


def _check_prefix(prefix: str, given: str) -> None:
    segments = prefix.split("/")
    if "" in segments:
        raise ConfigError(f"{given!r} has an empty path segment ('//'); some stores cannot hold such keys")
    if ".." in segments or "." in segments:
        raise ConfigError(f"{given!r} has a '.' or '..' segment; an object key is not a path: write it out")
    if "?" in prefix:
        raise ConfigError(f"{given!r} has a query; settings belong in S3Config")
    if _CONTROL.search(prefix):
        raise ConfigError(f"{given!r} has a control character")
    try:
        size = len(prefix.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{given!r} cannot be written as UTF-8") from error
    if size > MAX_KEY_BYTES - _ROOM_FOR_NAMES:
        raise ConfigError(
            f"the prefix of {given[:80]!r}… has {size} bytes; at most {MAX_KEY_BYTES - _ROOM_FOR_NAMES} leave room for "
            f"the names below it (S3 keys end at {MAX_KEY_BYTES})"
        )


def record_name(rank: int | None) -> str:
    """Name of the commit record: the checkpoint's own, or one rank's where ranks commit for themselves."""
    return RECORD_NAME if rank is None else f"__{rank}{RECORD_NAME}"


def index_name(write_id: str) -> str:
    """Name of the index that belongs to a save."""
    return f"index-{write_id}.safetensors.gz"


def data_key(token: str, rank: int, n: int) -> str:
    """Name of a data object, relative to the URL: the ``n``-th (from 0) that ``rank`` wrote in one save."""
    return f"{DATA_PREFIX}{token}/__{rank}_{n}.distcp"


def new_write_id() -> str:
    """A save's identity: 32 hex digits."""
    return uuid.uuid4().hex


def new_token() -> str:
    """What makes one rank's object names in one save unique: 16 hex digits, drawn from the system's entropy."""
    return secrets.token_hex(8)


def is_record_name(name: str) -> bool:
    """Whether a name directly below a URL is that of a commit record."""
    return _RECORD.fullmatch(name) is not None


def record_rank(name: str) -> int | None:
    """The rank in the name of a commit record; ``None`` for the checkpoint's own (and what is no record's name)."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match and match[1] else None


def is_write_id(text: object) -> bool:
    """Whether this is a write id of ours: 32 lower-case hex digits."""
    return isinstance(text, str) and _WRITE_ID.fullmatch(text) is not None


def index_write_id(name: str) -> str | None:
    """The write id in an index's name, or ``None`` if it is not an index's name."""
    match = _INDEX.fullmatch(name)
    return match[1] if match else None


def owner_of(key: str) -> str | None:
    """Prefix of the checkpoint that an object of ours belongs to; ``None`` for a key that is not of our pattern.

    Only exact data and index names count: whatever else lies in the bucket is somebody else's.
    """
    match = _OURS.fullmatch(key)
    return (match["owner"] or "") if match else None


def check_relative(path: str, *, source: str) -> str:
    """Check an object name that was read out of a record or an index, and return it.

    Args:
        path: Name relative to the checkpoint's URL.
        source: What it was read from, for the message.

    Raises:
        CorruptCheckpointError: The name could lead out of the checkpoint, or cannot be a key.
    """
    if not isinstance(path, str):
        raise CorruptCheckpointError(f"{source} names an object by a {type(path).__name__}, not by text")
    segments = path.split("/")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        size = MAX_KEY_BYTES + 1
    if (
        "" in segments
        or ".." in segments
        or "." in segments
        or segments[0].endswith(":")
        or "\x00" in path
        or size > MAX_KEY_BYTES
    ):
        raise CorruptCheckpointError(
            f"{source} names the object {path[:200]!r}, which is not a plain relative name: nothing is read from it"
        )
    return path
