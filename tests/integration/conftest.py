"""Fixtures of the integration tests: a scripted store of its own for each module, afresh for each test."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from tests.fault.server import FaultServer, Settings
from tests.servers import Bucket, Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fault.server import Handle


def bucket_on(server: Handle, access_key: str = "RANK0", name: str | None = None) -> Bucket:
    """Return a bucket of a scripted store, as whoever signs with an access key sees it.

    What a process has learnt of a store (its clients, which conditions it honours) it keeps per endpoint, signer and bucket:
    a test that changes what the store honours takes a bucket of another name.
    """
    if name is not None:
        server.create_bucket(name)
    endpoint = Endpoint(name="scripted", endpoint_url=server.url, access_key=access_key, secret_key="secret")
    return Bucket(endpoint=endpoint, name=name or server.bucket)


@pytest.fixture(scope="module")
def scripted_store() -> Iterator[FaultServer]:
    """The server behind `faults`: clients for a new endpoint would cost each test most of a second."""
    with FaultServer() as server:
        yield server


@pytest.fixture
def faults(scripted_store: FaultServer) -> FaultServer:
    """A scripted store: empty, without faults, with its switches as they are by default."""
    scripted_store.clear()
    scripted_store.configure(**dataclasses.asdict(Settings()))
    return scripted_store
