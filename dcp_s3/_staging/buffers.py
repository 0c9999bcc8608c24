"""The memory that staged tensors lie in: blocks, who holds them, and when they may be written to again.

A :class:`Block` is one large piece of memory. It is private at first: the first touch of shared pages takes two to five
times as long. When a state dict crosses to another process, it is copied into a block that is shared, a memfd mapped here
and there; from then on stagings begin in such blocks.
A :class:`Lease` is one staging's hold on a block. The block is handed back, and only then written to again, when

* ``Lease.release()`` ran for it, in whichever process reads the tensors: it stamps the lease's number into a word at the
  start of the block. Numbers only grow and the owner compares for equality, so a late stamp never frees a newer lease; or
* every tensor of the lease is dead in the owning process, and its state dict was never sent to another one.

The owner gives a block up (never writes to it again; its memory goes when its tensors do) when the thread that took its
state dict up has ended without handing it back, which is what a failed save looks like, or after waiting for it in vain.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import math
import mmap
import os
import secrets
import struct
import threading
import weakref
from multiprocessing import reduction, resource_sharer
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

HEADER_BYTES = 4096  # one page, so that nothing else shares the line that both processes write to
_HANDED_BACK, _RECEIVED = 0, 1  # its words: the number of the last lease released, and of the last one that arrived
_GROWTH_BYTES = 2 << 20  # a block's size is a multiple of this
_ALLOCATION_BYTES = 256 << 20  # one call's worth: a signal makes the kernel start a call over
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on

_numbers = itertools.count(1)
_owned: weakref.WeakSet[Block] = weakref.WeakSet()
_regions: weakref.WeakSet[Region] = weakref.WeakSet()
_leases: dict[int, Lease] = {}  # by the address of a live StorageImpl, which no other storage can have
_received: dict[tuple[int, str], Region] = {}  # by the sender's pid and the block's token
_received_lock = threading.Lock()


class Region:
    """One mapping of a block's memory in this process; unmapped when the last tensor in it has died.

    Args:
        fd: The block's file, which may be closed afterwards; ``None`` for private memory.
        size: Bytes to map.
    """

    def __init__(self, fd: int | None, size: int) -> None:
        self.memory = (
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if fd is None else mmap.mmap(fd, size)
        )
        self.size = size
        _regions.add(self)
        self.address: int = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()
        self.pinned = False

    def word(self, place: int) -> int:
        """Read one of the header's 64-bit words."""
        value: int = struct.unpack_from("=Q", self.memory, 8 * place)[0]
        return value

    def set_word(self, place: int, value: int) -> None:
        """Store one of the header's 64-bit words, in one aligned write."""
        struct.pack_into("=Q", self.memory, 8 * place, value)

    def populate(self) -> None:
        """Have its pages mapped, so that no copy into it stops at each of them. Best effort; lets other threads work."""
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), _POPULATE_WRITE)

    def pin(self) -> None:
        """Page-lock the region for CUDA; without effect when that was done, or is refused."""
        if self.pinned:
            return
        self.pinned = True
        status = _cudart().cudaHostRegister(self.address, self.size, _REGISTER_PORTABLE)
        if int(status) != 0:
            logger.warning("cudaHostRegister refused %d bytes (error %s): staging copies unpinned", self.size, status)
            return
        # A lease keeps its region while its tensors live, so this runs before the memory is unmapped.
        weakref.finalize(self, _unpin, os.getpid(), self.address).atexit = False


def _unpin(pid: int, address: int) -> None:
    if os.getpid() == pid:  # a forked child has no CUDA context to tell
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:  # noqa: ANN401 -- torch's binding has no annotations
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Block:
    """Memory that keeps its pages: what later stagings of the same size cost is the copy alone.

    Args:
        shared: It can be mapped by another process, too, and grows in its place: a memfd.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.token = secrets.token_hex(8)
        self.fd: int | None = None
        if shared:
            self.fd = os.memfd_create("dcp_s3-staging", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.fd).atexit = False
        self.region: Region | None = None
        self._allocated = 0
        _owned.add(self)

    @property
    def size(self) -> int:
        """Bytes mapped, the header included."""
        return self.region.size if self.region is not None else 0

    def reserve(self, size: int) -> Region:
        """Give the block at least ``size`` bytes of memory, and return its mapping.

        Raises:
            OSError: The memory is not there. (Asked for beforehand if shared: a page missing later would be a SIGBUS.)
        """
        while self.fd is not None and self._allocated < size:
            step = min(size - self._allocated, _ALLOCATION_BYTES)
            os.posix_fallocate(self.fd, self._allocated, step)
            self._allocated += step
        if self.region is None or size > self.region.size:
            # Room to grow a little without mapping anew; pages beyond `_allocated` cost no memory.
            rounded = -(-(size + size // 16) // _GROWTH_BYTES) * _GROWTH_BYTES
            if self.fd is None:
                self.region = None  # its pages go first
            else:
                os.ftruncate(self.fd, rounded)
            self.region = Region(self.fd, rounded)
        return self.region

    def fill(self, source: Region, size: int) -> Region:
        """Begin a shared block with the first ``size`` bytes of other memory; other threads work meanwhile.

        Raises:
            OSError: There is no memory for them.
        """
        assert self.fd is not None  # noqa: S101 -- it is shared
        with memoryview(source.memory) as memory:
            while self._allocated < size:
                with memory[self._allocated : min(size, self._allocated + _ALLOCATION_BYTES)] as piece:
                    self._allocated += os.pwrite(self.fd, piece, self._allocated)
        return self.reserve(size)


class Shipment(NamedTuple):
    """What another process needs to map a leased block: one file descriptor, however many tensors lie in it.

    Attributes:
        fd: The block's file, as multiprocessing passes it.
        sender: Pid of the process that owns the block.
        token: The block's name among those of the sender.
        size: Bytes to map.
        number: The lease's number.
        kept: Tokens of the blocks that the sender still has; mappings of its other blocks can go.
    """

    fd: Any
    sender: int
    token: str
    size: int
    number: int
    kept: tuple[str, ...]


class Lease:
    """One staging's hold on a block, from the copy until it is handed back.

    Args:
        region: The mapping that the tensors lie in.
        block: The block, in the process that owns it. A lease received from another process has none: there, the
            death of the last tensor hands the block back.
        number: Number of the staging; each process that stages counts its own, over all its blocks.
        size: Bytes of the region that are leased; all by default.
    """

    def __init__(
        self, region: Region, block: Block | None, number: int | None = None, *, size: int | None = None
    ) -> None:
        self.number = next(_numbers) if number is None else number
        self.block = block
        self._region = region
        self._size = region.size if size is None else size
        self._words = region  # whose header tells the state: the shared copy's, when there is one
        self._failed = False
        self._pid = os.getpid()
        self._storages: list[int] = []
        self._buffer: weakref.ref[memoryview] | None = None
        self._shipped: list[resource_sharer.DupFd] = []
        self._crossings = 0
        self._reader: threading.Thread | None = None

    def release(self) -> None:
        """Hand the block back. May be called again, in any thread, and late: a newer lease of the block is not touched."""
        # A forked process reads its parent's tensors as they are; handing them back is the parent's to do.
        words = self._words
        if self._pid == os.getpid() and words.word(_HANDED_BACK) < self.number:
            words.set_word(_HANDED_BACK, self.number)

    def taken_up(self) -> None:
        """Note that the calling thread reads the tensors (or sends them on): if it ends without release, the save failed."""
        self._reader = threading.current_thread()

    def handed_back(self) -> bool:
        """Whether the block may be written to again."""
        if self._crossings == 0 and self.is_over():
            return True
        # Of several receivers, the first to release would speak for the others: such a block is given up instead.
        return self._crossings <= 1 and self._words.word(_HANDED_BACK) == self.number

    def is_over(self) -> bool:
        """Whether all its tensors are dead in this process."""
        return self._buffer is not None and self._buffer() is None

    def fail(self) -> None:
        """Note that nobody will have its tensors: the copy has failed, or was interrupted."""
        self._failed = True

    def abandoned(self) -> bool:
        """Whether it will not be handed back: the thread that took it up has ended. Ask :meth:`handed_back` first."""
        return self._failed or (self._reader is not None and not self._reader.is_alive())

    def buffer(self) -> memoryview:
        """The leased memory. It lives as long as the tensors made from it, and they alone must keep it."""
        buffer = memoryview(self._region.memory)
        self._buffer = weakref.ref(buffer)
        weakref.finalize(buffer, self._end_of_tensors).atexit = False
        return buffer

    def tensor(self, buffer: memoryview, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor in the leased memory, with a storage of its own: what pickles it takes just its bytes.

        Args:
            buffer: What :meth:`buffer` returned.
            offset: First byte, from the start of the block.
            dtype: Any but the quantized ones.
            shape: Without a zero.
        """
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=offset)
        storage = flat.untyped_storage()._cdata  # noqa: SLF001 -- the one name of a storage that outlives no other
        self._storages.append(storage)
        _leases[storage] = self
        # In place, and without touching the storage: a view would be a second tensor for each.
        return flat if len(shape) == 1 else flat.resize_(shape)

    def covers(self, address: int) -> bool:
        """Whether an address lies in the leased memory."""
        return 0 <= address - self._region.address < self._region.size

    def offset(self, tensor: torch.Tensor) -> int:
        """Where in the block a tensor of this lease begins, in bytes."""
        return tensor.data_ptr() - self._region.address

    def share(self) -> Block:
        """Copy what private memory holds into a shared block, which is the lease's from now on.

        Raises:
            OSError: There is no memory for it.
        """
        shared = Block(shared=True)
        self._words = shared.fill(self._region, self._size)
        self.block = shared
        return shared

    def ship(self) -> Shipment:
        """Make ready for the process that the current pickle goes to. From now on it is the one that hands back."""
        if self.block is None or self.block.fd is None:
            raise ValueError("a received state dict cannot be sent on: stage it again")
        handle = reduction.DupFd(self.block.fd)
        self._crossings += 1
        if isinstance(handle, resource_sharer.DupFd):
            self._shipped.append(handle)
        kept = tuple(block.token for block in _owned)
        return Shipment(handle, self._pid, self.block.token, self._words.size, self.number, kept)

    def settle(self) -> bool:
        """For a block given up: take back a descriptor that nobody received (it would keep the memory for ever).

        Returns:
            Whether nothing is left to do.
        """
        if self._shipped and self._words.word(_RECEIVED) != self.number:
            if not self.is_over():
                return False  # the sender may still be waiting for its reply
            for handle in self._shipped:
                with contextlib.suppress(OSError, EOFError):
                    os.close(handle.detach())
        return True

    def _end_of_tensors(self) -> None:
        # Runs in the garbage collector, in any thread: it takes no lock. An interrupt may end it: see `sweep`.
        for storage in self._storages:
            if _leases.get(storage) is self:
                _leases.pop(storage, None)
        self._region = self._words  # a shared copy does not keep what it was made of
        if self.block is None:
            self.release()


def lease_of(tensor: torch.Tensor) -> Lease | None:
    """The lease that a staged tensor lies under, here or in the process that it was sent to; None for other tensors."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor  # noqa: SLF001 -- to_local() would go through autograd
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and the like have no storage
        return None
    lease = _leases.get(storage._cdata)  # noqa: SLF001 -- see Lease.tensor
    return lease if lease is not None and lease.covers(storage.data_ptr()) else None


def sweep() -> None:
    """Let go of leases whose tensors are dead, where an interrupt has kept them from doing so."""
    for storage, lease in list(_leases.items()):
        if lease.is_over():
            _leases.pop(storage, None)


def receive(shipment: Shipment) -> Lease:
    """Map a leased block that another process sent; a block that was mapped before is not mapped again."""
    fd = shipment.fd.detach()
    try:
        with _received_lock:
            region = _received.get((shipment.sender, shipment.token))
            if region is None or region.size < shipment.size:
                region = Region(fd, shipment.size)
            for sender, token in list(_received):
                if sender == shipment.sender and token not in shipment.kept:
                    del _received[sender, token]
            _received[shipment.sender, shipment.token] = region
    finally:
        os.close(fd)
    region.set_word(_RECEIVED, shipment.number)
    return Lease(region, None, shipment.number)


def _forget() -> None:
    """In a forked child: nothing of the parent's is lent, received or owned here, and no thread holds the lock."""
    global _received_lock  # noqa: PLW0603 -- one per process by design
    _received_lock = threading.Lock()
    _owned.clear()
    _leases.clear()
    _received.clear()


os.register_at_fork(after_in_child=_forget)
