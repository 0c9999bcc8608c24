"""How many bytes of copies a process may hold at once."""

from __future__ import annotations

import threading


class ByteBudget:
    """A counting semaphore in bytes, for any thread, that knows who holds how much.

    What is held is one dict, by owner, and each change of it is one step that no signal handler can interrupt: an owner
    that notes itself before it takes bytes can give back all that it has, whatever came in between, and twice over.

    Args:
        limit: Bytes that may be held at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._lock = threading.Lock()
        self._by_owner: dict[object, int] = {}

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return sum(self._by_owner.values())

    def try_acquire(self, owner: object, nbytes: int) -> bool:
        """Take ``nbytes`` more for an owner if they fit at once. It is hashed by identity."""
        with self._lock:
            held = self.held
            if held and held + nbytes > self.limit:
                return False
            self._take(owner, nbytes, held)
            return True

    def acquire_over(self, owner: object, nbytes: int) -> None:
        """Take ``nbytes`` whether they fit or not: for a caller that holds everything itself and would wait for itself."""
        with self._lock:
            self._take(owner, nbytes, self.held)

    def move(self, source: object, target: object, nbytes: int) -> None:
        """Make ``nbytes`` of one owner another's, who has none yet."""
        with self._lock:
            self._by_owner.update({source: self._by_owner.get(source, 0) - nbytes, target: nbytes})

    def release(self, owner: object, nbytes: int | None = None) -> None:
        """Give back ``nbytes`` of what an owner holds, or all of it; one that holds nothing gives nothing back."""
        with self._lock:
            left = 0 if nbytes is None else self._by_owner.get(owner, 0) - nbytes
            if left:
                self._by_owner[owner] = left
            else:
                self._by_owner.pop(owner, None)

    def _take(self, owner: object, nbytes: int, held: int) -> None:
        self._by_owner[owner] = self._by_owner.get(owner, 0) + nbytes
        self.peak = max(self.peak, held + nbytes)
