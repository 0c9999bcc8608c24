"""The end of a process: a save in flight is waited for, within its deadline; its failure is told; nothing else is said."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from tests.fault.conftest import config_of
from tests.fault.server import FaultServer, delay, drop_reply, error, never_answer, reset

ROOT = Path(__file__).parents[2]
FULL = bool(os.environ.get("DCP_S3_TEST_FULL"))
"""Every variant; each starts an interpreter, which imports torch."""

BEGIN = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_s3 import RetryPolicy, S3Config, S3StorageReader, S3StorageWriter

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = S3Config(
    endpoint_url=sys.argv[1], access_key_id="A", secret_access_key="secret", part_bytes=5 << 20,
    save_deadline_s=float(sys.argv[2]), retry=RetryPolicy(initial_wait_s=0.01, max_wait_s=0.1),
)
writer = S3StorageWriter("s3://bucket/run", config=config)
state = {f"t{n}": torch.full((1_000_000,), float(n)) for n in range(5)}
"""


def _run(
    s3: FaultServer, script: str, *, deadline_s: float = 60, options: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a script in a new interpreter, in which every warning is an error; return how it ended, and its seconds."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *options, "-W", "error", "-c", BEGIN + textwrap.dedent(script), s3.url, str(deadline_s)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo", "AWS_EC2_METADATA_DISABLED": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, time.monotonic() - started


@pytest.fixture
def s3(http_server: FaultServer) -> FaultServer:
    http_server.clear()
    return http_server


@pytest.mark.parametrize("group", ["destroyed", "left"] if FULL else ["left"])
def test_nothing_is_said_at_exit(s3: FaultServer, group: str):
    """A process that saved in both ways, loaded and ends says nothing: no warning, no unclosed socket, no pending task."""
    done, _ = _run(
        s3,
        f"""
        dcp.save(state, storage_writer=writer)
        dcp.async_save(state, storage_writer=writer).result()
        dcp.load({{"t4": torch.zeros(1_000_000)}}, storage_reader=S3StorageReader("s3://bucket/run", config=config))
        if {group == "destroyed"}:
            dist.destroy_process_group()
        """,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert "run/.metadata" in s3.objects()


def test_nothing_is_said_at_exit_of_failures(s3: FaultServer):
    """A process that saved and loaded while one request in twenty failed, and whose last two saves failed for good, says that the
    one in the background did, and once for each operation that it is sent again, and nothing else: in Python's development mode no exception that was never retrieved, and nothing unclosed.
    """
    faults = (error(503, "SlowDown"), reset("body", 1000), drop_reply(), error(500, "InternalError", at="reply"))
    for number in range(24):
        s3.on("*", faults[number % len(faults)], nth=3 + 20 * number)
    s3.on("UploadPart", error(403, "AccountProblem"), key="^gone/", since=3)
    done, _ = _run(
        s3,
        """
        for step in range(4):
            dcp.save(state, storage_writer=writer)
            dcp.async_save(state, storage_writer=writer).result()
            dcp.load({"t4": torch.zeros(1_000_000)}, storage_reader=S3StorageReader("s3://bucket/run", config=config))
        try:
            dcp.save(state, checkpoint_id="s3://bucket/gone", storage_writer=writer)
        except dcp.CheckpointException:
            dcp.async_save(state, checkpoint_id="s3://bucket/gone", storage_writer=writer)
        """,
        options=("-X", "dev"),
    )
    failed = sum(1 for record in s3.log if record.rules)
    assert failed > 0.04 * len(s3.log)
    # on a busy machine asyncio's development mode also tells of callbacks that took long
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    again = [line for line in lines if "it is sent again, up to" in line]
    told = [line for line in lines if line not in again]
    assert done.returncode == 0, done.stderr
    operations = [line.split("[operation=")[1].split(",")[0] for line in again]
    assert len(set(operations)) == len(operations)
    # once: who called dcp.save has the exception
    assert [line.split(" failed on rank 0: ")[0] for line in told] == ["the save of s3://bucket/gone"], done.stderr
    assert all("code=AccountProblem" in line for line in told)
    assert done.stdout == ""
    assert "run/.metadata" in s3.objects()
    assert "gone/.metadata" not in s3.objects()


@pytest.mark.parametrize("how", ["end", "sys.exit", "exception"] if FULL else ["end", "exception"])
def test_a_save_in_flight_is_waited_for(s3: FaultServer, how: str):
    """A process that ends while a save is in flight, whose future it has dropped, ends when the save has committed and has
    deleted what it replaced.
    """
    s3.on("UploadPart", delay(0.5))
    endings = {"end": "pass", "sys.exit": "sys.exit(3)", "exception": "raise ZeroDivisionError"}
    begin = "dcp.save(state, storage_writer=writer)\ndcp.async_save(state, storage_writer=writer)\n"
    done, _ = _run(s3, begin + endings[how])
    assert done.returncode == {"end": 0, "sys.exit": 3, "exception": 1}[how]
    if how == "exception":
        assert "ZeroDivisionError" in done.stderr
        assert "the save of" not in done.stderr
    else:
        assert done.stderr == ""
    assert sorted(key.split("/")[1].split("-")[0] for key in s3.objects()) == [".metadata", "data", "index"]
    assert len(s3.requests("PutObject", key=r"\.metadata$")) == 2
    assert s3.uploads() == {}


@pytest.mark.parametrize("first", [True, False] if FULL else [True])
def test_a_save_that_begins_with_the_end(s3: FaultServer, first: bool):
    """Also a save whose first request comes when the interpreter has begun to end commits: nothing that it needs is closed."""
    warm_up = "" if first else "dcp.save(state, storage_writer=writer)\n"
    done, _ = _run(
        s3,
        warm_up
        + """
import concurrent.futures.thread, time
class Late(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        while not concurrent.futures.thread._shutdown:  # until the interpreter has begun to end
            time.sleep(0.01)
        return super().resolve_data(write_item)
dcp.async_save(state, storage_writer=writer, planner=Late())
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(s3.requests("PutObject", key=r"\.metadata$")) == 2 - first


def test_the_wait_is_bounded_and_the_failure_told(s3: FaultServer):
    """A save that can never end holds the process up to its deadline, not for ever; one line at ERROR says why it failed."""
    s3.on("UploadPart", never_answer())
    done, seconds = _run(s3, "dcp.async_save(state, storage_writer=writer)", deadline_s=2)
    assert done.returncode == 0
    assert seconds < 2 + 30  # the interpreter's start included
    lines = [line for line in done.stderr.splitlines() if line.startswith("the save of")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("the save of s3://bucket/run failed on rank 0: ")
    assert "the deadline of 2 s passed" in lines[0]
    assert "operation=UploadPart" in lines[0]
    assert "run/.metadata" not in s3.objects()


STEPS = {
    "the record is not readable": ("GetObject", r"\.metadata$"),
    "a part is refused": ("UploadPart", "/data/"),
    "the index is refused": ("PutObject", "index"),
    "the commit is refused": ("PutObject", r"\.metadata$"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_background_save_is_logged(s3: FaultServer, step: str, caplog: pytest.LogCaptureFixture):
    """Whichever step of a background save fails: one record at ERROR, of a logger of dcp_s3, with rank, URL and cause."""
    operation, key = STEPS[step]
    s3.configure(min_part_bytes=0)
    s3.on(operation, error(403, "AccountProblem"), key=key)
    writer = S3StorageWriter("s3://bucket/run", config=config_of(s3, part_bytes=5 << 20))
    with caplog.at_level(logging.ERROR):
        future = dcp.async_save({"w": torch.ones(2_000_000)}, storage_writer=writer, no_dist=True)
        assert future.exception(timeout=60) is not None  # only to wait; what it holds is not looked at
    told = [record for record in caplog.records if record.name.startswith("dcp_s3")]
    assert [record.levelno for record in told] == [logging.ERROR]
    text = told[0].getMessage()
    assert text.startswith("the save of s3://bucket/run failed on rank 0: ")
    assert "code=AccountProblem" in text
    assert "\n" not in text


def test_another_error_is_logged_with_its_class(s3: FaultServer, caplog: pytest.LogCaptureFixture):
    """An error that is not the package's, as of a planner, is told by its class and text."""

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            raise ZeroDivisionError("the third tensor")

    writer = S3StorageWriter("s3://bucket/run", config=config_of(s3))
    dcp.async_save({"w": torch.ones(10)}, storage_writer=writer, planner=Planner(), no_dist=True).exception(60)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("dcp_s3")]
    assert told == ["the save of s3://bucket/run failed on rank 0: ZeroDivisionError: the third tensor"]
