"""The ``DCP_S3_`` variables: their texts as values for S3Config."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, Final

from dcp_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_ENV_PREFIX = "DCP_S3_"
_OF_SCRIPTS: Final = ("DCP_S3_PYTHON", "DCP_S3_TORCH", "DCP_S3_VENV")
"""What scripts/ reads, and _OF_TESTS what the tests read: no settings."""
_OF_TESTS: Final = "DCP_S3_TEST_"


def settings(environment: Mapping[str, str], *, optional: Collection[str], fields: Collection[str]) -> dict[str, Any]:
    """What the variables set, by field; those of the retry policy begin with ``retry_``.

    Args:
        environment: All variables.
        optional: Fields that may be ``None``.
        fields: All fields, for messages about those that no variable can set.

    Raises:
        ConfigError: A variable is unknown, or does not parse.
    """
    found = {name: text for name, text in environment.items() if name.startswith(_ENV_PREFIX)}
    values: dict[str, Any] = {}
    for variable, text in sorted(found.items()):
        if variable in _OF_SCRIPTS or variable.startswith(_OF_TESTS):
            continue
        name = variable.removeprefix(_ENV_PREFIX).lower()
        if variable != variable.upper() or name not in _PARSERS:
            raise ConfigError(_unknown_variable(variable, name, fields))
        if text.strip():
            is_none = name in optional and text.strip().lower() == "none"
            values[name] = None if is_none else _parse(name, text, _PARSERS[name])
    return values


def _unknown_variable(variable: str, name: str, fields: Collection[str]) -> str:
    known = ", ".join(_ENV_PREFIX + parsed.upper() for parsed in _PARSERS)
    if name in ("access_key_id", "secret_access_key", "session_token"):
        return f"{variable} is not read: credentials come from AWS_{name.upper()}, or from S3Config({name}=…)"
    if variable == variable.upper() and name != "retry" and name in fields:
        return f"{variable} cannot be set by a variable: give S3Config({name}=…); those that can are {known}"
    near = difflib.get_close_matches(name, _PARSERS, n=1)
    hint = f" (did you mean {_ENV_PREFIX}{near[0].upper()}?)" if near else ""
    return f"{variable} is no setting of dcp_s3{hint}; known are {known}"


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
    "max_record_bytes": _bytes,
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
    "retry_max_attempts": int,
    "retry_initial_wait_s": float,
    "retry_max_wait_s": float,
}
