"""The S3 servers that tests run against: how they are started, and what a test must know about one."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dcp_s3 import S3Config

LOCALSTACK = Path(__file__).parent.parent / "localstack"
START_LIMIT_S = 240
STOP_LIMIT_S = 60


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An S3 endpoint and credentials for it. Plain data: it crosses to a rank or a child process by pickle."""

    name: str
    """`seaweedfs`, `ceph_rgw`, or `external` for the one that DCP_S3_TEST_ENDPOINT names."""
    endpoint_url: str
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str = "us-east-1"
    ca_bundle: str | None = None
    """Path of the CA certificates to trust, where they are not the system's."""
    bucket: str | None = None
    """An existing bucket that tests must use, because they may make none."""
    pid: int | None = None
    """Process that answers S3 requests; None for an external endpoint."""
    osd_pid: int | None = None
    """Process that holds the data, where it is another one (Ceph)."""

    def environ(self) -> dict[str, str]:
        """Environment variables that point every AWS client at this endpoint."""
        variables = {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }
        if self.session_token:
            variables["AWS_SESSION_TOKEN"] = self.session_token
        if self.ca_bundle:
            variables["AWS_CA_BUNDLE"] = self.ca_bundle
        return variables

    def config(self, **overrides: Any) -> S3Config:
        """Return the package's own configuration for this endpoint; keyword arguments win."""
        from dcp_s3 import S3Config

        settings = {
            "endpoint_url": self.endpoint_url,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "session_token": self.session_token,
            "region": self.region,
            "verify_tls": self.ca_bundle or True,
        }
        return S3Config(**{**settings, **overrides})

    def client(self, **settings: Any) -> Any:
        """Return a bare botocore S3 client, independent of the package; keyword arguments go to its Config."""
        defaults = {
            "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 5,
            "read_timeout": 30,
        }
        return _session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            aws_session_token=self.session_token,
            verify=self.ca_bundle,
            config=Config(**{**defaults, **settings}),
        )


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A place in a store that belongs to one test: a bucket of its own, or a prefix of its own in one that is given."""

    endpoint: Endpoint
    name: str
    prefix: str = ""
    """Empty, or ends with a slash."""

    def url(self, path: str = "") -> str:
        """Return the s3:// URL of a path in this place."""
        return f"s3://{self.name}/{self.prefix}{path}".rstrip("/")

    def key(self, path: str) -> str:
        """Return the object key of a path in this place."""
        return self.prefix + path

    def keys(self, path: str = "") -> list[str]:
        """Return the paths of all objects below `path`, sorted."""
        return sorted(item["Key"].removeprefix(self.prefix) for item in self._objects(path))

    def put(self, path: str, body: bytes) -> None:
        """Store an object."""
        self._client.put_object(Bucket=self.name, Key=self.key(path), Body=body)

    def get(self, path: str) -> bytes:
        """Return the bytes of an object."""
        body: bytes = self._client.get_object(Bucket=self.name, Key=self.key(path))["Body"].read()
        return body

    def delete(self, path: str) -> None:
        """Delete an object."""
        self._client.delete_object(Bucket=self.name, Key=self.key(path))

    def uploads(self) -> list[str]:
        """Return the paths of the multipart uploads that are open in this place, sorted."""
        return sorted(item["Key"].removeprefix(self.prefix) for item in self._uploads())

    def empty(self) -> None:
        """Delete every object and abort every multipart upload in this place."""
        for upload in self._uploads():
            self._client.abort_multipart_upload(Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"])
        for item in self._objects(""):
            self._client.delete_object(Bucket=self.name, Key=item["Key"])

    @property
    def _client(self) -> Any:
        return _shared_client(self.endpoint, os.getpid())

    def _objects(self, path: str) -> list[dict[str, Any]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=self.key(path))
        return [item for page in pages for item in page.get("Contents", [])]

    def _uploads(self) -> list[dict[str, Any]]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.name, Prefix=self.prefix)
        return [item for page in pages for item in page.get("Uploads", [])]


@functools.cache
def _session() -> botocore.session.Session:
    # one for all clients: reading the service's description takes it 0.1 s, once
    return botocore.session.Session()


@functools.cache
def _shared_client(endpoint: Endpoint, pid: int) -> Any:
    # keyed by process: a forked one opens its own connections
    return endpoint.client()


@contextlib.contextmanager
def fresh_bucket(endpoint: Endpoint) -> Iterator[Bucket]:
    """Make a bucket, or a prefix in the endpoint's given one, and leave nothing of it behind."""
    if endpoint.bucket is not None:
        bucket = Bucket(endpoint=endpoint, name=endpoint.bucket, prefix=f"dcp-s3-test/{uuid.uuid4().hex}/")
        try:
            yield bucket
        finally:
            bucket.empty()
        return
    bucket = Bucket(endpoint=endpoint, name=f"dcp-s3-test-{uuid.uuid4().hex[:16]}")
    client = _shared_client(endpoint, os.getpid())
    client.create_bucket(Bucket=bucket.name)
    try:
        yield bucket
    finally:
        bucket.empty()
        client.delete_bucket(Bucket=bucket.name)


def external_endpoint(environ: Mapping[str, str]) -> Endpoint | None:
    """Return the endpoint that DCP_S3_TEST_ENDPOINT names, or None."""
    url = environ.get("DCP_S3_TEST_ENDPOINT")
    if not url:
        return None

    def first(*names: str) -> str | None:
        return next((environ[name] for name in names if environ.get(name)), None)

    access_key = first("DCP_S3_TEST_ACCESS_KEY", "AWS_ACCESS_KEY_ID")
    secret_key = first("DCP_S3_TEST_SECRET_KEY", "AWS_SECRET_ACCESS_KEY")
    if access_key is None or secret_key is None:
        raise RuntimeError(
            "DCP_S3_TEST_ENDPOINT is set without credentials: set DCP_S3_TEST_ACCESS_KEY and DCP_S3_TEST_SECRET_KEY, "
            "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return Endpoint(
        name="external",
        endpoint_url=url,
        access_key=access_key,
        secret_key=secret_key,
        session_token=first("AWS_SESSION_TOKEN"),
        region=first("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1",
        ca_bundle=first("AWS_CA_BUNDLE") if url.startswith("https:") else None,
        bucket=first("DCP_S3_TEST_BUCKET"),
    )


class SeaweedFS:
    """A SeaweedFS server on free loopback ports, with its data in one directory.

    A context manager. `kill` ends it as a crash would; `start` afterwards serves the same data on the same port.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._script = [sys.executable, str(LOCALSTACK / "seaweedfs" / "server.py")]

    def __enter__(self) -> Endpoint:
        self._guard = _Guard([*self._script, "stop", "--dir", str(self.directory)])
        try:
            return self.start()
        except BaseException:
            self._guard.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._guard.release()

    def start(self) -> Endpoint:
        """Start the server where it does not run; return where it is."""
        facts = _facts([*self._script, "start", "--dir", str(self.directory)])
        return _endpoint("seaweedfs", facts, pid=int(facts["SEAWEEDFS_PID"]))

    def kill(self) -> None:
        """Kill the server with SIGKILL. Its data stay."""
        pid = self.start().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


class CephRGW:
    """A Ceph cluster of one monitor and one OSD behind a RADOS Gateway on a free loopback port. A context manager."""

    def __init__(self, directory: Path, **settings: str) -> None:
        """Take the state directory and RGW_… variables of localstack/rgw/start.sh."""
        self._environ = {**os.environ, **settings, "RGW_DIR": str(directory)}
        self._scripts = LOCALSTACK / "rgw"

    def __enter__(self) -> Endpoint:
        self._guard = _Guard([str(self._scripts / "stop.sh")], self._environ)
        try:
            facts = _facts([str(self._scripts / "start.sh")], self._environ)
        except BaseException:
            self._guard.release()
            raise
        return _endpoint("ceph_rgw", facts, pid=int(facts["CEPH_RGW_PID"]), osd_pid=int(facts["CEPH_OSD_PID"]))

    def __exit__(self, *_: object) -> None:
        self._guard.release()


def missing_seaweedfs_binaries() -> list[str]:
    """Name what is missing of SeaweedFS."""
    found = Path(sys.executable).with_name("weed").exists() or shutil.which("weed")
    return [] if found else ["weed"]


def missing_rgw_binaries() -> list[str]:
    """Name what is missing of Ceph RGW."""
    needed = ("ceph", "ceph-mon", "ceph-osd", "curl", "monmaptool", "radosgw", "radosgw-admin")
    return [binary for binary in needed if shutil.which(binary) is None]


class _Guard:
    """Runs a command when it is released, or when this process dies, however it dies.

    It is a shell that reads from a pipe which only this process holds open: servers never outlive a killed test run.
    """

    def __init__(self, command: list[str], environ: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; exec "$@"', "guard", *command],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(timeout=STOP_LIMIT_S)
        if code:
            raise RuntimeError(f"{self._process.args} ended with {code}")


def _facts(command: list[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=START_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr}")
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def _endpoint(name: str, facts: Mapping[str, str], **pids: int) -> Endpoint:
    return Endpoint(
        name=name,
        endpoint_url=facts["AWS_ENDPOINT_URL_S3"],
        access_key=facts["AWS_ACCESS_KEY_ID"],
        secret_key=facts["AWS_SECRET_ACCESS_KEY"],
        region=facts["AWS_DEFAULT_REGION"],
        **pids,
    )
