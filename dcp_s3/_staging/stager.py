"""The stager: copies a state dict into kept, shared buffers, so that training may go on while it is uploaded."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from dcp_s3._staging.buffers import Block, Lease, lease_of
from dcp_s3._staging.crossing import StagedStateDict, StagingFailed, failed
from dcp_s3._staging.snapshot import Snapshot
from dcp_s3._staging.turn import Turn, interruption_told, new_turn

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Lease", "StagedStateDict", "Stager", "StagingFailed", "lease_of", "stager_for"]

logger = logging.getLogger(__name__)

_POLL_S = 0.005


class Pool:
    """The blocks of one stager: kept, lent to one staging at a time, and given up when they do not come back.

    Args:
        limit: Blocks to keep, from 1.
        wait_s: How long a staging waits for one of them, in seconds.
    """

    def __init__(self, limit: int, wait_s: float) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._blocks: dict[Block, Lease | None] = {}  # None: being filled right now
        self._given_up: list[Lease] = []

    def take(self, size: int, *, pin: bool) -> tuple[Lease, memoryview]:
        """Lease ``size`` bytes, header included, of a block that nobody reads any more.

        Waits for one of the pool's own; takes a fresh one when there is no hope for them, or the time is over.

        Raises:
            OSError: There is no memory for it.
        """
        deadline = time.monotonic() + self._wait_s
        with interruption_told():
            while (block := self._vacant(time_is_over=time.monotonic() >= deadline)) is None:
                time.sleep(_POLL_S)
        try:
            region = block.reserve(size)
            if pin:
                region.pin()
            lease = Lease(region, block)
            buffer = lease.buffer()  # at once: its end is what hands a staging that fails back
            with self._lock:
                self._blocks[block] = lease
        except BaseException:
            with self._lock:
                self._blocks.pop(block, None)
            raise
        return lease, buffer

    def clear(self) -> None:
        """Keep no block. Those that are still read live on until their tensors die."""
        with self._lock:
            self._settle()
            for block, lease in list(self._blocks.items()):
                self._give_up(block, lease)

    def _vacant(self, *, time_is_over: bool) -> Block | None:
        with self._lock:
            self._settle()
            vacant: list[Block] = []
            leased: list[tuple[Block, Lease]] = []
            for block, lease in list(self._blocks.items()):
                if lease is None:
                    continue
                if lease.handed_back():
                    vacant.append(block)
                elif lease.abandoned():
                    logger.warning("the save of staging %d ended without handing its buffer back", lease.number)
                    self._give_up(block, lease)
                else:
                    leased.append((block, lease))
            if vacant:
                chosen = max(vacant, key=lambda block: block.size)
                for block in vacant:  # threads that waited in vain have added some
                    if block is not chosen and len(self._blocks) > self._limit:
                        self._give_up(block, None)
            elif len(self._blocks) < self._limit:
                chosen = Block()
            elif time_is_over:
                if leased:
                    block, lease = min(leased, key=lambda held: held[1].number)
                    logger.warning(
                        "waited %g s for the save of staging %d: using a fresh buffer beside it",
                        self._wait_s,
                        lease.number,
                    )
                    self._give_up(block, lease)
                chosen = Block()
            else:
                return None
            self._blocks[chosen] = None
            return chosen

    def _give_up(self, block: Block, lease: Lease | None) -> None:
        del self._blocks[block]
        if lease is not None and not lease.settle():
            self._given_up.append(lease)

    def _settle(self) -> None:
        self._given_up = [lease for lease in self._given_up if not lease.settle()]


class Stager:
    """Copies a state dict into kept buffers so that training may go on.

    ``stage()`` never raises (a rank that fails there leaves the others waiting): its errors come out of planning the
    save. It never writes to a buffer that was not handed back, see :mod:`dcp_s3._staging.buffers`. Safe to call from
    several threads; after a fork the child begins with buffers of its own.

    Args:
        buffers: Buffers to keep, from 1, each as large as a staged state dict. With 1, staging waits for the upload of
            the previous one; with 2, they overlap.
        wait_s: How long to wait for a buffer to be handed back before a fresh one is used beside it, in seconds.
        async_staging: Copy in a thread, and return a future; the caller must not write to the tensors before it is done.
    """

    def __init__(self, *, buffers: int = 1, wait_s: float = 60.0, async_staging: bool = False) -> None:
        if buffers < 1:
            raise ValueError(f"buffers must be at least 1, not {buffers}")
        self._buffers = buffers
        self._wait_s = wait_s
        self._async_staging = async_staging
        self._begin()
        _stagers.add(self)

    def _begin(self) -> None:
        self._pool = Pool(self._buffers, self._wait_s)
        self._lock = threading.Lock()
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: set[concurrent.futures.Future[dict[str, Any]]] = set()

    def stage(
        self, state_dict: dict[str, Any], *, place: str | None = None
    ) -> dict[str, Any] | concurrent.futures.Future[dict[str, Any]]:
        """Copy a state dict.

        Args:
            state_dict: What is to be saved.
            place: Where to, as far as that is known; for messages.

        Returns:
            The staged state dict, or a future of it with ``async_staging``. Where staging failed it holds one leaf, a
            :class:`StagingFailed`.
        """
        turn = new_turn()
        turn.place = place or turn.place
        try:
            turn.queue()
            try:
                snapshot = Snapshot(state_dict)
                if self._async_staging:
                    return self._submit(snapshot, turn)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 -- the other ranks would hang
                failure = failed(error, turn)
                if not self._async_staging:
                    return failure
                future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
                future.set_result(failure)
                return future
            return self._copy(snapshot, turn)
        except (KeyboardInterrupt, SystemExit):
            turn.cancel()
            raise

    def synchronize(self) -> None:
        """Wait until nothing is being copied any more by an async staging."""
        with self._lock:
            pending = list(self._pending)
        concurrent.futures.wait(pending)

    def close(self) -> None:
        """Finish what is being copied and keep no buffer. The stager may be used again, with fresh ones."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        self._pool.clear()

    def _submit(self, snapshot: Snapshot, turn: Turn) -> concurrent.futures.Future[dict[str, Any]]:
        with self._lock:
            if self._executor is None:
                self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dcp_s3-staging")
            future = self._executor.submit(self._copy, snapshot, turn)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _copy(self, snapshot: Snapshot, turn: Turn) -> dict[str, Any]:
        try:
            if not snapshot.size:
                return StagedStateDict(snapshot.copy(None, None), None, turn)
            lease, buffer = self._pool.take(snapshot.size, pin=snapshot.on_cuda)
            return StagedStateDict(snapshot.copy(lease, buffer), lease, turn)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- the other ranks would hang
            return failed(error, turn)


_lock = threading.Lock()
_stagers: weakref.WeakSet[Stager] = weakref.WeakSet()
_by_key: dict[Hashable, Stager] = {}


def stager_for(key: Hashable, *, buffers: int, async_staging: bool) -> Stager:
    """The process's stager for a key: whoever asks with the same key shares its buffers, and has nothing to pickle.

    Args:
        key: What tells users apart. A key per URL or step would keep buffers for each of them.
        buffers: As for :class:`Stager`; part of the key.
        async_staging: As for :class:`Stager`; part of the key.
    """
    with _lock:
        whole_key = (key, buffers, async_staging)
        stager = _by_key.get(whole_key)
        if stager is None:
            stager = _by_key[whole_key] = Stager(buffers=buffers, async_staging=async_staging)
        return stager


def _renew() -> None:
    """In a forked child: no thread holds the locks, and the parent's buffers are the parent's."""
    global _lock  # noqa: PLW0603 -- one per process by design
    _lock = threading.Lock()
    for stager in list(_stagers):
        stager._begin()  # noqa: SLF001 -- this module's own


os.register_at_fork(after_in_child=_renew)
