"""One run of train.py under torchrun: started, watched by its records, stopped, killed."""
# ruff: noqa: INP001, S603, T201, TID251 -- part of a program, which starts another and says what it does

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import processes
from records import events

if TYPE_CHECKING:
    from collections.abc import Callable

TRAIN = Path(__file__).with_name("train.py")
LIMIT_S = 600.0
"""Longest time that any one thing is waited for."""
END_LIMIT_S = 30.0


class JobError(Exception):
    """The job ended, or did not end, against expectation."""


class Job:
    """Starts torchrun, and shows what it prints. At the end of a `with` block it is ended, if it has not.

    Args:
        directory: New directory for its records.
        ranks: How many ranks to train on, all on this machine.
        arguments: Those of train.py.
    """

    def __init__(self, directory: Path, ranks: int, arguments: list[str]) -> None:
        self.directory = directory
        directory.mkdir()
        self._launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
                # all on this machine, on a free port, whatever its name resolves to
                *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
                *(str(TRAIN), *arguments, f"--records={directory}"),
            ],
            env={
                **os.environ,
                "TMPDIR": str(directory),  # what torch would leave in the machine's
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # not the warnings of a machine without name service
                "OMP_NUM_THREADS": "1",
                "DCP_USE_PREFIX_STORE": "1",  # else the checkpoint processes meet at a port that anybody may have taken
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the demo, which ends the job
        )
        processes.note(directory, self._launcher.pid, processes.LAUNCHER)
        self._shown = True
        self._output = threading.Thread(target=self._show, daemon=True)
        self._output.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shown = False
        left = processes.end(self.processes())
        if left:
            raise JobError(f"would not end: {', '.join(map(str, left))}")
        self._launcher.wait(END_LIMIT_S)
        self._output.join(END_LIMIT_S)

    def _show(self) -> None:
        assert self._launcher.stdout is not None  # noqa: S101 -- it is a pipe
        for line in self._launcher.stdout:
            if self._shown and " - INFO - " not in line:  # DCP's checkpoint processes log those of every library
                print(f"   | {line}", end="", flush=True)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return what has happened so far, of one kind if it is given, oldest first."""
        return [event for event in events(self.directory) if name is None or event["event"] == name]

    def processes(self) -> list[processes.Process]:
        """Return the processes that the job has noted."""
        return processes.noted(self.directory)

    def wait_for(self, condition: Callable[[], object], what: str, *, poll_s: float = 0.1) -> None:
        """Wait until the condition holds.

        Raises:
            JobError: The job ended before it did, or it does not come to hold.
        """
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self._launcher.poll() is not None:
                raise JobError(f"the job ended with exit code {self._launcher.returncode} before {what}")
            if time.monotonic() > deadline:
                raise JobError(f"waited {LIMIT_S:g} s for {what}")
            time.sleep(poll_s)

    def finish(self) -> None:
        """Wait for the end of the job, which must be a good one."""
        try:
            code = self._launcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise JobError(f"the job has not ended in {LIMIT_S:g} s") from None
        if code:
            raise JobError(f"the job ended with exit code {code}")

    def freeze(self) -> None:
        """Stop every process of the job where it is."""
        # the launcher first, which would end the job if it saw a rank go
        for process in sorted(self.processes(), key=lambda process: process.role != processes.LAUNCHER):
            process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the job go on."""
        for process in self.processes():
            process.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process of the job: the ranks outlive a launcher that is killed, and are killed by their own pid."""
        killed = self.processes()
        for process in killed:
            process.signal(signal.SIGKILL)
        self._launcher.wait(END_LIMIT_S)
        left = processes.wait_until_gone(killed, END_LIMIT_S)
        if left:
            raise JobError(f"survived SIGKILL: {', '.join(map(str, left))}")
