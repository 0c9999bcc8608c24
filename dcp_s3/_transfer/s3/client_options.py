"""How a client is made: sessions, credentials' chain, certificates, and the settings of botocore that both planes share."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import boto3
import botocore
import botocore.loaders
import botocore.session
from botocore.exceptions import ProfileNotFound

from dcp_s3._transfer.s3.error_mapping import refuse_page
from dcp_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcp_s3.config import S3Config

_AGENT: Final = f"dcp-s3 Botocore/{botocore.__version__}"
"""In full: botocore puts its own together anew for each request, which takes a quarter of a small request's CPU time."""


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


def hide_tokens() -> None:
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
def profile_named(config: S3Config) -> Iterator[None]:
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


def boto3_session(config: S3Config) -> boto3.session.Session:
    with profile_named(config):
        below = botocore.session.Session(profile=config.profile)
        _share_descriptions(below)
        return boto3.session.Session(botocore_session=below)


def aio_session(config: S3Config) -> Any:  # noqa: ANN401 -- aiobotocore is untyped
    import aiobotocore.session  # not above: the tools do without it, and it takes half of their time to start

    with profile_named(config):
        session = aiobotocore.session.AioSession(profile=config.profile)
        _share_descriptions(session)
        return session


def prepare(client: Any) -> Any:  # noqa: ANN401 -- made at run time
    """Keep a client to the requests that it is asked for, and to replies of S3."""
    client.meta.events.register_last("before-parameter-build.s3", _never_redirected)
    # so named it comes before botocore's own handler of "before-parse.s3.*", to which what is no XML is a passing 500
    client.meta.events.register("before-parse.*.*", refuse_page)
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


def check_ca_bundle(path: str | None) -> None:
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


def ca_bundle(config: S3Config, session: Any) -> str | None:  # noqa: ANN401 -- a botocore session
    if isinstance(config.verify_tls, str):
        return config.verify_tls
    found: str | None = session.get_config_variable("ca_bundle") if config.verify_tls else None
    return found


def has_chain(config: S3Config) -> bool:
    """Whether credentials come from the chain of environment, files and services, and so may change."""
    return not config.unsigned and config.access_key_id is None
