"""The stager: copies a state dict into kept, shared buffers, so that training may go on while it is uploaded."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from typing import Any

from dcp_s3._staging.buffers import Block, Lease, lease_of, sweep
from dcp_s3._staging.handoff import StagedStateDict, StagingFailed, failed
from dcp_s3._staging.snapshot import Snapshot
from dcp_s3._staging.turn import Turn, interruption_told, new_turn

__all__ = ["Lease", "StagedStateDict", "Stager", "StagingFailed", "lease_of", "stager_for"]

logger = logging.getLogger(__name__)

_POLL_S = 0.005


class Hold:
    """A staging that fills a block: known before it has one, so that an interrupt at any place leaves none behind."""

    __slots__ = ("lease",)

    def __init__(self) -> None:
        self.lease: Lease | None = None


class Pool:
    """Blocks that are kept, lent to one staging at a time, and given up when they do not come back.

    They are private memory until a state dict crosses to another process, and shared from then on.
    """

    def __init__(self) -> None:
        self._shared = False
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked child must."""
        self._lock = threading.Lock()
        self._blocks: dict[Block, Lease | Hold | None] = {}
        self._given_up: set[Lease] = set()

    def take(self, hold: Hold, size: int, *, pin: bool, limit: int, wait_s: float) -> tuple[Lease, memoryview]:
        """Lease ``size`` bytes, header included, of a block that nobody reads any more.

        Waits for one of the pool's own; takes a fresh one when there is no hope for them, or the time is over.

        Args:
            hold: Ends by :meth:`lend` or :meth:`take_back`.
            size: Bytes.
            pin: Page-lock them for CUDA.
            limit: Blocks to keep, from 1.
            wait_s: Longest wait, seconds.

        Raises:
            OSError: There is no memory for it.
        """
        sweep()
        deadline = time.monotonic() + wait_s
        with interruption_told():
            while (block := self._vacant(hold, limit, wait_s, time_is_over=time.monotonic() >= deadline)) is None:
                time.sleep(_POLL_S)
        region = block.reserve(size)
        if pin:
            region.pin()
        hold.lease = lease = Lease(region, block, size=size)
        return lease, lease.buffer()

    def lend(self, hold: Hold) -> None:
        """The copy is there: from now on whoever reads it decides when the block is used again."""
        with self._lock:
            for block, holder in self._blocks.items():
                if holder is hold:
                    self._blocks[block] = hold.lease

    def take_back(self, hold: Hold) -> None:
        """The copy will not be used. Its block is, when its tensors are gone. May be called again."""
        if hold.lease is not None:
            hold.lease.fail()
        with self._lock:
            for block, holder in list(self._blocks.items()):
                if holder is hold:
                    if hold.lease is None:
                        del self._blocks[block]
                    else:
                        self._blocks[block] = hold.lease

    def share(self, lease: Lease, buffers: int) -> None:
        """Have a lease that is about to cross to another process in shared memory, and further blocks made there.

        Args:
            lease: Of this pool.
            buffers: Blocks to keep; those that are missing are made in the background.

        Raises:
            OSError: There is no memory for it.
        """
        private = lease.block
        if private is None or private.fd is not None:
            return
        self._shared = True
        shared = lease.share()
        with self._lock:
            if self._blocks.get(private) is lease:
                del self._blocks[private]
                self._blocks[shared] = lease
        making = threading.Thread(target=self._make, args=(shared, buffers), name="dcp_s3-staging-blocks", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends and starts no more threads
            making.start()

    def clear(self) -> None:
        """Keep no block. Those that are still read live on until their tensors die."""
        with self._lock:
            self._settle()
            for block, holder in list(self._blocks.items()):
                self._give_up(block, holder)

    def _make(self, like: Block, buffers: int) -> None:
        """What the next stagings would otherwise wait for: the pages of shared blocks."""
        region = like.region
        if region is None:
            return
        region.populate()
        for _ in range(buffers - 1):
            try:
                block = Block(shared=True)
                block.reserve(region.size).populate()
            except OSError as error:
                logger.debug("no further staging buffer was made: %s", error)
                return
            with self._lock:
                if len(self._blocks) >= buffers or like not in self._blocks:
                    return
                self._blocks[block] = None

    def _vacant(self, hold: Hold, limit: int, wait_s: float, *, time_is_over: bool) -> Block | None:
        with self._lock:
            self._settle()
            vacant: list[Block] = []
            leased: list[tuple[Block, Lease]] = []
            for block, holder in list(self._blocks.items()):
                if isinstance(holder, Hold):
                    continue
                if holder is None or holder.handed_back():
                    if self._shared and block.fd is None:
                        self._give_up(block, None)  # private memory would have to be copied once more
                    else:
                        vacant.append(block)
                elif holder.abandoned():
                    logger.warning("the save of staging %d ended without handing its buffer back", holder.number)
                    self._give_up(block, holder)
                else:
                    leased.append((block, holder))
            if vacant:
                chosen = max(vacant, key=lambda block: block.size)
                for block in vacant:  # threads that waited in vain have added some
                    if block is not chosen and len(self._blocks) > limit:
                        self._give_up(block, None)
            elif len(self._blocks) < limit:
                chosen = Block(shared=self._shared)
            elif time_is_over:
                if leased:
                    block, lease = min(leased, key=lambda held: held[1].number)
                    logger.warning(
                        "waited %g s for the save of staging %d: using a fresh buffer beside it", wait_s, lease.number
                    )
                    self._give_up(block, lease)
                chosen = Block(shared=self._shared)
            else:
                return None
            self._blocks[chosen] = hold
            return chosen

    def _give_up(self, block: Block, holder: Lease | Hold | None) -> None:
        if isinstance(holder, Lease) and not holder.settle():
            self._given_up.add(holder)
        self._blocks.pop(block, None)

    def _settle(self) -> None:
        self._given_up = {lease for lease in self._given_up if not lease.settle()}


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
        pool: Blocks that it shares with other stagers; its own if not given.
    """

    def __init__(
        self, *, buffers: int = 1, wait_s: float = 60.0, async_staging: bool = False, pool: Pool | None = None
    ) -> None:
        if buffers < 1:
            raise ValueError(f"buffers must be at least 1, not {buffers}")
        self._buffers = buffers
        self._wait_s = wait_s
        self._async_staging = async_staging
        self._pool = pool if pool is not None else Pool()
        self._begin()
        _stagers.add(self)

    def _begin(self) -> None:
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
        hold = Hold()
        try:
            if not snapshot.size:
                return StagedStateDict(snapshot.copy(None, None), None, turn)
            lease, buffer = self._pool.take(
                hold, snapshot.size, pin=snapshot.on_cuda, limit=self._buffers, wait_s=self._wait_s
            )
            staged = StagedStateDict(
                snapshot.copy(lease, buffer),
                lease,
                turn,
                before_crossing=functools.partial(self._pool.share, lease, self._buffers),
            )
            self._pool.lend(hold)
        except BaseException as error:
            try:
                self._pool.take_back(hold)
            finally:
                self._pool.take_back(hold)  # what is left, where an interrupt ended the first call; else nothing
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            return failed(error, turn)  # raised, the other ranks would hang
        return staged


_lock = threading.Lock()
_stagers: weakref.WeakSet[Stager] = weakref.WeakSet()
_pool = Pool()
_by_key: dict[tuple[int, bool], Stager] = {}


def stager_for(*, buffers: int, async_staging: bool) -> Stager:
    """The process's stager of a kind. All of them share one pool of blocks, and whoever asks has nothing to pickle.

    Args:
        buffers: As for :class:`Stager`.
        async_staging: As for :class:`Stager`.
    """
    with _lock:
        stager = _by_key.get((buffers, async_staging))
        if stager is None:
            stager = _by_key[buffers, async_staging] = Stager(buffers=buffers, async_staging=async_staging, pool=_pool)
        return stager


def _renew() -> None:
    """In a forked child: no thread holds the locks, and the parent's buffers are the parent's."""
    global _lock  # noqa: PLW0603 -- one per process by design
    _lock = threading.Lock()
    _pool.forget()
    for stager in list(_stagers):
        stager._pool.forget()  # noqa: SLF001 -- this module's own
        stager._begin()  # noqa: SLF001


os.register_at_fork(after_in_child=_renew)
