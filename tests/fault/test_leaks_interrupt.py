"""Ctrl-C while something waits for a save in the background: one line says for what, and a failed save is told once."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from tests.fault.server import FaultServer, error
from tests.fault.test_leaks_exit import BEGIN, ROOT


@pytest.fixture
def s3(http_server: FaultServer) -> FaultServer:
    http_server.clear()
    return http_server


@contextlib.contextmanager
def _running(s3: FaultServer, script: str, deadline_s: float = 60) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + textwrap.dedent(script), s3.url, str(deadline_s)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo", "AWS_EC2_METADATA_DISABLED": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _rest_of_stderr(process: subprocess.Popen[str]) -> str:
    """What is left behind a line that was read: it may be in the file object already, which ``communicate`` does not look at."""
    assert process.stderr is not None
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        return process.stderr.read()
    finally:
        watchdog.cancel()


@pytest.mark.parametrize("again", [False, True])
def test_at_the_end_of_the_interpreter(s3: FaultServer, again: bool):
    """The first Ctrl-C says in one line what the process waits for, and to what a second one would lead; the save commits."""
    gate = s3.hold("UploadPart", at="head")
    with _running(s3, "dcp.async_save(state, storage_writer=writer)\nprint('done', flush=True)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        gate.wait_arrived(timeout_s=60)
        time.sleep(1)  # the main thread has nothing left to do but to end; too early, Python would tell another line
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert process.poll() is None
        if again:
            process.send_signal(signal.SIGINT)
        else:
            gate.release()
        more = _rest_of_stderr(process)
    assert line == (
        "this process waits for the save of s3://bucket/run on rank 0 before it ends; interrupt it once more to give that up\n"
    )
    assert ("run/.metadata" in s3.objects()) == (not again)
    assert bool(more) == again  # then Python says where it was


def test_while_a_buffer_is_waited_for(s3: FaultServer):
    """``async_save`` waits for the buffer of the save before: interrupted, it says so in one line, and the save goes on."""
    gate = s3.hold("UploadPart", at="head")
    script = """
        import time
        dcp.async_save(state, storage_writer=writer)
        print("waiting", flush=True)
        dcp.async_save(state, storage_writer=writer)
    """
    with _running(s3, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        gate.wait_arrived(timeout_s=60)
        time.sleep(1)  # the second async_save waits; too early, no line would tell of it
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        line = process.stderr.readline()
        gate.release()
        more = _rest_of_stderr(process)
    assert line == "interrupted while async_save was waiting for the save of s3://bucket/run on rank 0\n"
    assert "KeyboardInterrupt" in more
    assert len(s3.requests("PutObject", key=r"\.metadata$")) == 1


@pytest.mark.parametrize("call", ["dcp.save", "dcp.async_save"])
def test_a_failed_save_is_told_once(s3: FaultServer, call: str):
    """On stderr: with the exception, where somebody gets that; by a line of the log, where nobody may look at the future."""
    s3.on("UploadPart", error(403, "AccountProblem"))
    with _running(s3, f"{call}(state, storage_writer=writer)") as process:
        _, told = process.communicate(timeout=60)
    assert told.count("the store answered 403 AccountProblem") == 1, told
