"""The control plane's clients of this process: one set for each place, closed when others are used and these are not."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Final

from dcp_s3._runtime.loop_thread import on_fork
from dcp_s3._transfer.s3.clients import KEPT_IDLE, ControlClients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcp_s3.config import S3Config


class SharedClients:
    """The clients that the control stores of one place share."""

    def __init__(self, place: S3Config) -> None:
        self._place = place
        # one per place: credentials that are slow to come must not hold up what has others
        self._making = threading.Lock()
        self.clients: ControlClients | None = None
        self.users = 0
        self.idle_since = math.inf
        self.without_checksums = False
        """The store refused a checksum header and took Content-MD5."""

    def get(self) -> ControlClients:
        """The clients to use now; made at the first call."""
        with self._making:
            if self.clients is None:
                self.clients = ControlClients(self._place)
            return self.clients

    def renew(self, used: ControlClients) -> bool:
        """Whether there are others than the ``used`` ones, with credentials that may not have expired."""
        with self._making:
            if self.clients is used:
                fresh = used.renewed()
                if fresh is None:
                    return False
                self.clients = fresh
            return True

    def close(self) -> None:
        """Close what is idle."""
        if self.clients is not None:
            self.clients.close()


_IDLE_S: Final = 8.0
"""Connections that were idle for longer are not used again. Servers close theirs after 5 s or more, some balancers without a
word; and botocore cannot tell a request that such a connection lost from one that failed."""

_lock = threading.Lock()
_shared: dict[S3Config, SharedClients] = {}
"""By what clients depend on; the last used ones come last."""


def _forget() -> None:
    global _lock  # noqa: PLW0603 -- a lock held during the fork would stay held in the child
    _lock = threading.Lock()
    _shared.clear()


on_fork(_forget)


@contextlib.contextmanager
def shared_clients(place: S3Config) -> Iterator[SharedClients]:
    """What the stores of a place share, for one request. Whoever adds a place closes idle ones, but for the last used."""
    closing: list[SharedClients] = []
    with _lock:
        shared = _shared.pop(place, None)
        if shared is None:
            idle = [key for key, other in _shared.items() if not other.users]
            closing = [_shared.pop(key) for key in idle[:-KEPT_IDLE]]
            shared = SharedClients(place)
        elif not shared.users and time.monotonic() - shared.idle_since > _IDLE_S:
            shared.close()  # nobody is at work on its connections
        _shared[place] = shared
        shared.users += 1
    try:
        for other in closing:
            other.close()
        yield shared
    finally:
        with _lock:
            shared.users -= 1
            shared.idle_since = time.monotonic()
