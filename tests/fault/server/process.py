"""The fault server in a process of its own, for tests that fork or kill their clients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from .certificates import Certificate
from .control import ControlError, call
from .handle import Handle

_ROOT = Path(__file__).resolve().parents[3]


class FaultServerProcess(Handle):
    """The same server and interface as FaultServer, in a child process; a context manager.

    The test's process holds neither a thread nor an event loop for it. A forked child may use the handle, too:
    each command is one HTTP request of its own.

    Args:
        tls: As for FaultServer.
        certificate: As for FaultServer.
        seed: As for FaultServer.
        bucket: As for FaultServer.
        endpoints: As for FaultServer.
        **settings: Switches, see ``settings.Settings``.
    """

    def __init__(
        self,
        *,
        tls: bool = False,
        certificate: Certificate = "good",
        seed: int = 0,
        bucket: str = "bucket",
        endpoints: int = 1,
        **settings: Any,
    ) -> None:
        self.scheme, self.bucket, self.seed = ("https" if tls else "http"), bucket, seed
        arguments = [
            "--seed",
            str(seed),
            "--bucket",
            bucket,
            "--settings",
            json.dumps(settings),
            "--until-stdin-closes",
        ]
        arguments += ["--endpoints", str(endpoints)]
        if tls:
            arguments += ["--tls", certificate]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.server", *arguments],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._stop()
            raise ControlError(f"the fault server did not start: exit status {self._process.returncode}")
        started = json.loads(line)
        self.ports, self._control_port = tuple(started["ports"]), int(started["control_port"])
        self.ca_bundle: str | None = started["ca_bundle"]

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def command(self, name: str, /, **arguments: Any) -> Any:
        """Run a control command over HTTP."""
        return call(self._control_port, name, arguments, timeout_s=30.0 + float(arguments.get("timeout_s", 0.0)))

    def close(self) -> None:
        """Stop the process. Raises what went wrong inside the server itself."""
        if self._process.poll() is not None:
            return
        try:
            bugs = self.command("bugs")
        finally:
            self._stop()
        if bugs:
            raise AssertionError("the fault server itself failed: " + "\n".join(bugs))

    def _stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=10)

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop."""
        self.close()
