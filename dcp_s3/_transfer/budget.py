"""How many bytes of copies a process may hold at once."""

from __future__ import annotations

import threading


class ByteBudget:
    """A counting semaphore in bytes, for any thread.

    Args:
        limit: Bytes that may be held at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._lock = threading.Lock()

    def try_acquire(self, nbytes: int) -> bool:
        """Take ``nbytes`` if they fit at once."""
        with self._lock:
            if self.held and self.held + nbytes > self.limit:
                return False
            self.held += nbytes
            self.peak = max(self.peak, self.held)
            return True

    def acquire_over(self, nbytes: int) -> None:
        """Take ``nbytes`` whether they fit or not: for a caller that holds everything itself and would wait for itself."""
        with self._lock:
            self.held += nbytes
            self.peak = max(self.peak, self.held)

    def release(self, nbytes: int) -> None:
        """Give ``nbytes`` back."""
        with self._lock:
            self.held -= nbytes
