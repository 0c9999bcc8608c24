"""The S3 endpoint that is measured against: an s3sink built and started here, or one that the caller names."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOURCE = Path(__file__).with_name("s3sink.c")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuThrottle:
    """How slow the endpoint is made; zeros leave it as fast as it is."""

    latency_ms: int = 0
    """Slept before every reply, milliseconds."""
    rate_mbps: int = 0
    """Megabits per second of each connection."""
    total_mbps: int = 0
    """Megabits per second of all connections together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where checkpoints go.

    Attributes:
        endpoint: ``http(s)://host[:port]``.
        bucket: Bucket name.
        prefix: All keys begin with it.
        local: The endpoint is an s3sink, which can be paced, emptied and asked for its log.
    """

    endpoint: str
    bucket: str
    prefix: str
    local: bool

    def key(self, name: str) -> str:
        """The key that ``name`` stands for."""
        return f"{self.prefix}/{name}"

    def url(self, name: str) -> str:
        """The ``s3://`` URL that ``name`` stands for."""
        return f"s3://{self.bucket}/{self.key(name)}"

    def clear(self) -> None:
        """Delete what has been written, so that memory or money is not used up by what was measured before."""
        if self.local:
            self._control("_reset")
            return
        from benchmarks.peers import boto3_client

        client = boto3_client(self.endpoint)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/"):
            found = [{"Key": item["Key"]} for item in page.get("Contents", ())]
            if found:
                client.delete_objects(Bucket=self.bucket, Delete={"Objects": found, "Quiet": True})

    def set_pace(self, throttle: CpuThrottle) -> None:
        """Make the s3sink as slow as asked."""
        self._control("_set?" + "&".join(f"{name}={value}" for name, value in asdict(throttle).items()))

    def log(self) -> list[dict[str, Any]]:
        """The s3sink's requests since it was emptied: start and end in seconds, method, target, status."""
        return [json.loads(line) for line in self._control("_log", "GET").splitlines()]

    def _control(self, path: str, method: str = "POST") -> str:
        request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)  # noqa: S310 -- our own server
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return str(response.read().decode())


@contextlib.contextmanager
def sink(*, preallocate_mib: int) -> Iterator[Target]:
    """Build s3sink with the C compiler and run it on a free port.

    Args:
        preallocate_mib: Memory that it holds, touched, from the start.

    Raises:
        RuntimeError: There is no C compiler, or the server did not start.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("s3sink needs a C compiler (cc, gcc or clang); or measure your own store with --endpoint")
    with tempfile.TemporaryDirectory(prefix="dcp-s3-bench-") as directory:
        binary = str(Path(directory, "s3sink"))
        subprocess.run([compiler, "-O2", "-pthread", "-o", binary, str(_SOURCE)], check=True)
        command = [binary, "--port", "0", "--preallocate-mib", str(preallocate_mib)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None  # noqa: S101 -- asked for
                line = process.stdout.readline()
                if not line.startswith("listening on "):
                    raise RuntimeError("s3sink did not start")
                port = int(line.split()[-1])
                yield Target(endpoint=f"http://127.0.0.1:{port}", bucket="bench", prefix=f"run-{port}", local=True)
            finally:
                process.terminate()
