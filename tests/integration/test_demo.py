"""scripts/demo, the first command of the README: that it works, fails as it should, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.servers import fresh_bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.servers import Endpoint

ROOT = Path(__file__).parents[2]
MARK = "DCP_S3_TEST_MARK"
LIMIT_S = 240


class Demo:
    """A run of scripts/demo in this environment, whose processes and files are known from all others.

    Its temporary files lie in a short path: sockets are among them, whose names may have 107 characters.
    """

    def __init__(self, output: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="demo-"))
        self.mark = uuid.uuid4().hex
        self.output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [ROOT / "scripts" / "demo", "--small", *arguments],
                env={
                    **os.environ,
                    **(environ or {}),
                    "DCP_S3_VENV": sys.prefix,
                    "PYTHONPATH": str(ROOT),
                    "TMPDIR": str(self.directory),
                    MARK: self.mark,
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        return self.process.wait(LIMIT_S)

    def text(self) -> str:
        """Return what it has printed."""
        return self.output.read_text()

    def alive(self) -> dict[int, str]:
        """Return the command lines of everything that it has started and that still runs, by pid."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def demo(output: Path, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[Demo]:
    run = Demo(output, *arguments, environ=environ)
    try:
        yield run
    finally:
        run.end()


def until(condition: Callable[[], object], run: Demo) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {LIMIT_S} s; {run.alive()}\n{run.text()}")
        time.sleep(0.05)


@pytest.mark.usefixtures("seaweedfs")
def test_it_trains_is_killed_in_an_upload_and_resumes_the_committed_bits(tmp_path: Path) -> None:
    """The demo ends well: a kill in an open upload, a resume with the digest that was saved, a table, and no trace."""
    with demo(tmp_path / "output", "--resume-ranks", "1") as run:
        code = run.wait()
        text = run.text()
        assert code == 0, text
        killed = re.search(r"Killed with SIGKILL in the middle of step-(\d+): (.*)", text)
        assert killed, text
        assert [process.rpartition(" ")[0] for process in killed[2].split(", ")] == [
            *("checkpoint process of rank 0", "checkpoint process of rank 1", "rank 0", "rank 1", "torchrun"),
        ]
        uploads = re.findall(rf"open upload step-{killed[1]}/data/\S+: (\d+) of its parts are there", text)
        assert sum(map(int, uploads)) >= 1, text
        (resumed,) = re.findall(r"step-(\d+) was resumed bit for bit: SHA-256 [0-9a-f]{16}", text)
        assert int(resumed) == int(killed[1]) - 5, text
        for call in ("dcp.save", "async_save, process", "async_save, thread"):
            row = re.search(rf"{call} +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)", text)
            assert row, text
            assert 20 < float(row[5]) < 30, "the checkpoint's size in MiB"
        assert re.search(r"collect_garbage \(a dry run\): [1-9] open uploads", text), text
        assert run.alive() == {}
        assert list(run.directory.iterdir()) == []


@pytest.mark.usefixtures("seaweedfs")
def test_killed_itself_it_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    """SIGKILL to the demo ends its server, and the ranks too that have not yet said who they are."""
    with demo(tmp_path / "output") as run:
        until(
            lambda: any("train.py" in line and "torch.distributed.run" not in line for line in run.alive().values()),
            run,
        )
        run.process.kill()
        until(lambda: not run.alive() and not list(run.directory.iterdir()), run)


def test_interrupted_it_empties_its_place_in_a_bucket_of_yours(seaweedfs: Endpoint, tmp_path: Path) -> None:
    """SIGTERM in the middle of the training leaves the given bucket as it was, and no process."""
    with (
        fresh_bucket(seaweedfs) as bucket,
        demo(
            tmp_path / "output",
            "--endpoint",
            seaweedfs.endpoint_url,
            "--bucket",
            bucket.name,
            environ=seaweedfs.environ(),
        ) as run,
    ):
        bucket.put("mine", b"not the demo's")
        until(lambda: any(key.endswith("/.metadata") for key in bucket.keys()), run)  # noqa: SIM118 -- no dict
        run.process.terminate()
        assert run.wait() == 128 + signal.SIGTERM
        assert bucket.keys() == ["mine"]
        assert bucket.uploads() == []
        assert run.alive() == {}
        assert list(run.directory.iterdir()) == []


def test_a_store_that_is_not_there_is_a_failure_in_plain_words(tmp_path: Path) -> None:
    """An endpoint that nobody listens on: exit code 1 and a sentence that names it, no traceback."""
    with (
        socket.socket() as listener
    ):  # bound and not listening: connections are refused, and nobody else takes the port
        listener.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        with demo(tmp_path / "output", "--endpoint", endpoint, "--bucket", "b", environ=credentials) as run:
            assert run.wait() == 1
            assert "The demo failed: " in run.text()
            assert endpoint in run.text()
            assert "Traceback" not in run.text()
            assert list(run.directory.iterdir()) == []
