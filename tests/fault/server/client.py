"""A plain boto3 client for a fault server: one attempt for each call, short timeouts, nothing of the product in between."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import boto3
import botocore
from botocore.config import Config

from .handle import Handle

KEYS = {"aws_access_key_id": "RANK0", "aws_secret_access_key": "secret"}


def arguments(server: Handle, *, access_key: str | None = "RANK0", **config: Any) -> dict[str, Any]:
    """Return the arguments of ``client("s3", …)`` for boto3; ``access_key=None`` sends unsigned requests."""
    fields: dict[str, Any] = {  # of botocore's Config
        "retries": {"total_max_attempts": 1},
        "s3": {"addressing_style": "path"},
        "connect_timeout": 5,
        "read_timeout": 5,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **config,
    }
    if access_key is None:
        fields["signature_version"] = botocore.UNSIGNED
    return {
        "endpoint_url": server.url,
        "region_name": "us-east-1",
        "verify": server.ca_bundle or True,
        "config": Config(**fields),
        **({} if access_key is None else KEYS | {"aws_access_key_id": access_key}),
    }


@functools.cache
def _session() -> boto3.session.Session:
    """One session, so that the description of S3 is parsed once."""
    return boto3.session.Session()


@contextlib.contextmanager
def client(server: Handle, **changes: Any) -> Iterator[Any]:
    """Yield a boto3 client and close it; ``changes`` are those of ``arguments``."""
    opened = _session().client("s3", **arguments(server, **changes))
    try:
        yield opened
    finally:
        opened.close()
