"""The program as an operator runs it: interrupts, full disks, closed pipes, terminals of few letters, wrong endpoints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TextIO

import pytest

import dcp_s3
from dcp_s3 import RetryPolicy, S3Config, StorageError
from dcp_s3._checkpoint.format.layout import CheckpointUrl
from tests.unit.fake_store import FakeStore, save

PROGRAM = [sys.executable, "-c", "import sys; from dcp_s3.cli import main; main()"]


def environment(endpoint_url: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "PYTHONPATH")}
    given = {"AWS_ENDPOINT_URL_S3": endpoint_url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest"}
    return kept | given | {"AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1"} | more


def run(endpoint_url: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=environment(endpoint_url, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextlib.contextmanager
def web_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arguments", [("ls",), ("verify",), ("gc",), ("gc", "--delete", "--json")], ids=" ".join)
def test_an_interrupt_ends_any_command_in_a_line(number: int, arguments: tuple[str, ...]) -> None:
    """Ctrl-C and SIGTERM, while a store does not answer: one line, exit code 130, and no wait for the time-out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen(
            [*PROGRAM, arguments[0], "s3://ckpt/run", *arguments[1:]],
            env=environment(f"http://127.0.0.1:{listener.getsockname()[1]}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        listener.settimeout(30)
        connection, _ = listener.accept()  # its first request is on its way
        with connection:
            started = time.monotonic()
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    assert time.monotonic() - started < 5
    assert (process.returncode, out) == (130, "")
    (line,) = err.splitlines()
    assert line.startswith("dcp-s3: interrupted")
    assert ("what was deleted until then is gone" in line) is ("--delete" in arguments)


@pytest.fixture
def saved(server, bucket) -> tuple[str, str]:
    """An endpoint and a URL with 30 checkpoints below it, and one with a name that ASCII does not have."""
    fake = FakeStore(bucket.name)
    for name in (*(f"step-{step}" for step in range(30)), "größe-步"):
        save(fake, CheckpointUrl(bucket.name, bucket.key(f"run/{name}")))
    for key, stored in fake.objects.items():
        server.client().put_object(Bucket=bucket.name, Key=key, Body=stored.body, Metadata=stored.metadata)
    return server.endpoint_url, bucket.url("run")


def run_into(output: TextIO | int, endpoint_url: str, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The program with its standard output in a file or descriptor."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=environment(endpoint_url),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_disk_that_is_full(saved: tuple[str, str]) -> None:
    """/dev/full: one line that says so, and an exit code of its own, of every command and of its help."""
    endpoint_url, url = saved
    with Path("/dev/full").open("w") as full:
        for arguments in (("ls", url), ("verify", url), ("gc", url), ("ls", url, "--json"), ("--version",)):
            result = run_into(full, endpoint_url, arguments)
            assert result.returncode == 5
            assert result.stderr == "dcp-s3: the output could not be written: No space left on device\n"


def test_a_reader_that_has_enough(saved: tuple[str, str]) -> None:
    """`| head -1`, and a pipe that is closed from the start: no word about it, and the exit code that the command has."""
    endpoint_url, url = saved
    for arguments in (("ls", url), ("verify", url), ("verify", url, "--json")):
        reader, writer = os.pipe()
        os.close(reader)
        result = run_into(writer, endpoint_url, arguments)
        os.close(writer)
        assert (result.returncode, result.stderr) == (run(endpoint_url, *arguments).returncode, "")


@pytest.mark.parametrize(
    "more", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_terminal_with_ascii_only(saved: tuple[str, str], more: dict[str, str]) -> None:
    """A name that the terminal has no letters for is shown by their numbers, in results and in errors."""
    endpoint_url, url = saved
    shown = run(endpoint_url, "ls", url, COLUMNS="60", **more)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{url}/gr\\xf6\\xdfe-\\u6b65  " in shown.stdout
    assert len(shown.stdout.splitlines()) == 32
    none = run(endpoint_url, "verify", f"{url}/größe", COLUMNS="60", **more)
    assert none.returncode == 1
    assert len(none.stderr.splitlines()) == 1
    assert f"there is no checkpoint at {url}/gr\\xf6\\xdfe" in none.stderr


def test_a_port_with_nobody(server) -> None:
    """The first failure is told of at once, while the others are waited for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        process = subprocess.Popen(
            [*PROGRAM, "ls", "s3://ckpt/run"],
            env=environment(
                f"http://127.0.0.1:{taken.getsockname()[1]}",
                DCP_S3_RETRY_MAX_ATTEMPTS="3",
                DCP_S3_RETRY_INITIAL_WAIT_S="300",
                DCP_S3_RETRY_MAX_WAIT_S="600",
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
    assert line.startswith("dcp-s3: ListObjectsV2 did not get an answer: EndpointConnectionError")
    assert line.endswith("; it is sent again, up to 3 times in all\n")


def test_no_credentials_is_one_attempt(server) -> None:
    """A chain without a source of credentials is looked through once."""
    started = time.monotonic()
    result = run(server.endpoint_url, "ls", "s3://ckpt/run", "--json", AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    error = json.loads(result.stdout)["error"]
    assert (result.returncode, error["class"], error["attempts"]) == (4, "AccessDeniedError", 1)
    assert len(result.stderr.splitlines()) == 1
    assert time.monotonic() - started < 30


def _page(status: int, body: bytes) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Page


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize(
    "body", [b"\n<!DOCTYPE html><html><body>Welcome</body></html>", b"<html><br><p>Welcome</html>"], ids=["xml", "html"]
)
def test_a_web_server_is_no_store(status: int, body: bytes) -> None:
    """A server that answers with pages: the endpoint is wrong; no checkpoint is corrupt, and none is missing."""
    with web_server(_page(status, body)) as url:
        config = S3Config(
            endpoint_url=url,
            access_key_id="a",
            secret_access_key="b",
            region="us-east-1",
            retry=RetryPolicy(max_attempts=2, initial_wait_s=0.01),
        )
        for call in (dcp_s3.list_checkpoints, dcp_s3.verify, dcp_s3.verify_all, dcp_s3.collect_garbage):
            with pytest.raises(StorageError, match="web page") as caught:
                call("s3://ckpt/run", config=config)
            assert "endpoint_url" in caught.value.message


def test_the_version(server) -> None:
    """Of the program, and it needs no store."""
    result = run("http://127.0.0.1:1", "--version")
    assert (result.returncode, result.stdout) == (0, f"dcp-s3 {dcp_s3.__version__}\n")


def test_wrong_usage_in_json(server) -> None:
    """What the option parser refuses is a document too."""
    result = run("http://127.0.0.1:1", "ls", "s3://ckpt/run", "--json", "--nonsense")
    assert (result.returncode, json.loads(result.stdout)["error"]["class"]) == (2, "UsageError")
    assert "No such option" in result.stderr


def test_listing_is_quick(server, bucket) -> None:
    """200 checkpoints, in a process of its own, take a second of CPU at most; a busy machine may take longer by the clock."""
    fake = FakeStore(bucket.name)
    for step in range(200):
        save(fake, CheckpointUrl(bucket.name, bucket.key(f"run/step-{step}")))
    client = server.client()
    for key, stored in fake.objects.items():
        client.put_object(Bucket=bucket.name, Key=key, Body=stored.body, Metadata=stored.metadata)
    spent = []
    for _ in range(3):
        before = os.times()
        result = run(server.endpoint_url, "ls", bucket.url("run"))
        after = os.times()
        assert len(result.stdout.splitlines()) == 201
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(spent) < 1.5
