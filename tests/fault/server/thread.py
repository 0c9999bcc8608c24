"""The fault server on an event loop of its own, in a daemon thread of the test's process."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

from .certificates import Certificate, issue
from .commands import Commands
from .core import Core
from .handle import Handle
from .listener import Listener, shut_down
from .settings import Settings


class FaultServer(Handle):
    """A running server; a context manager.

    Args:
        tls: Serve HTTPS.
        certificate: The identity shown over HTTPS: "good", "expired", "wrong-host" or "unknown-ca".
        seed: Of the rules that fire by chance.
        bucket: Name of the bucket that is there from the start.
        endpoints: Number of ports that lead to the same store.
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
        self.ca_bundle: str | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="fault-server-")
        context = None
        if tls:
            context, ca_file = issue(certificate, Path(self._directory.name))
            self.ca_bundle = str(ca_file)
        self._core = Core(Settings(**settings), seed)
        self._core.store.buckets[bucket] = {}
        self._listeners = [Listener(self._core, number, self.host, context) for number in range(endpoints)]
        self._commands = Commands(self._core, self._listeners)
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fault-server", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        self.ports = tuple(listener.port for listener in self._listeners)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:  # handed to the thread that started the server
            self._failure = error
            self._started.set()
        finally:
            self._loop.close()

    async def _main(self) -> None:
        for listener in self._listeners:
            await listener.open(0)
        self._started.set()
        await self._stop.wait()
        await shut_down(self._core, self._listeners)

    def command(self, name: str, /, **arguments: Any) -> Any:
        """Run a control command on the server's loop."""
        return asyncio.run_coroutine_threadsafe(getattr(self._commands, name)(**arguments), self._loop).result()

    def close(self) -> None:
        """Stop; requests in flight are reset. Raises what went wrong inside the server itself."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._directory.cleanup()
            if self._failure is not None:
                raise self._failure
            if self._core.bugs:
                raise AssertionError("the fault server itself failed: " + "\n".join(self._core.bugs))

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop."""
        self.close()
