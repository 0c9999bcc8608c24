"""Fixtures of the contract suite, which runs over every store; also over the scripted one that the fault tests trust."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import EXTERNAL
from tests.fault.server import FaultServerProcess
from tests.servers import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def scripted() -> Iterator[Endpoint]:
    """The fault tests' own server, with no fault scripted."""
    with FaultServerProcess() as server:
        yield Endpoint(
            name="scripted", endpoint_url=server.url, access_key="test", secret_key="testtest", pid=server.pid
        )


@pytest.fixture(scope="session", params=["external"] if EXTERNAL else ["scripted", "seaweedfs", "ceph_rgw"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    """Each store in turn: the scripted one, SeaweedFS and Ceph RGW, or only the one DCP_S3_TEST_ENDPOINT names."""
    return EXTERNAL or request.getfixturevalue(request.param)


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Any]:
    """A bare botocore client for `endpoint`: the contract seen from the wire, without the package."""
    with contextlib.closing(endpoint.client()) as opened:
        yield opened
