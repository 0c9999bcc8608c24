"""Fixtures of the contract suite, which runs over every store."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Endpoint


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Any]:
    """A bare botocore client for `endpoint`: the contract seen from the wire, without the package."""
    with contextlib.closing(endpoint.client()) as opened:
        yield opened
