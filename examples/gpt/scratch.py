"""A directory that holds all that the demo has on this machine, and that is cleared when the demo ends, however it ends.

    python scratch.py DIRECTORY

ends the processes that are noted below the directory, stops the SeaweedFS server that has its data there, and removes it.
"""
# ruff: noqa: INP001, S603 -- part of a program, which starts its own file

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

import processes

SEAWEEDFS = Path(__file__).resolve().parents[2] / "localstack" / "seaweedfs" / "server.py"


class Scratch:
    """Makes the directory; a guard clears it at the end of the `with` block, or when this process has died without it.

    The guard is a shell that reads from a pipe which only this process holds open, in a session of its own: neither
    Ctrl-C nor SIGKILL to the demo keep it from its work.
    """

    def __enter__(self) -> Self:
        self.path = Path(tempfile.mkdtemp(prefix="dcp-s3-demo-"))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; exec "$@"', "guard", sys.executable, __file__, str(self.path)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.communicate()
        if self._guard.returncode:
            raise RuntimeError(f"{self.path} could not be cleared")


def clear(directory: Path) -> int:
    """Leave nothing of the directory; return 0, or 1 when a process would not end."""
    noted = [process for run in directory.iterdir() for process in processes.noted(run)]
    left = processes.end(noted)
    if (directory / "seaweedfs").exists():
        subprocess.run([sys.executable, str(SEAWEEDFS), "stop", "--dir", str(directory / "seaweedfs")], check=True)
    shutil.rmtree(directory, ignore_errors=True)
    for process in left:
        print(f"{process} does not end", file=sys.stderr)  # noqa: T201 -- nobody else can say it any more
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(clear(Path(sys.argv[1])))
