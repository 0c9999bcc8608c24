"""The memory under a staging: its mapping, its pages, its registration with CUDA, and what a receiver keeps mapped."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import platform
import re
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3._staging import buffers
from dcp_s3._staging.buffers import Block, Lease, Region
from dcp_s3.staging import Stager
from tests.conftest import or_missing
from tests.support.staging import await_background
from tests.unit.test_handoff import cross, no_block_is_left, ones  # noqa: F401 -- a fixture of every test
from tests.unit.test_staging import block_of, release

MIB = 1 << 20


def descriptors_of(file: int) -> int:
    """How many descriptors of a file, by its inode, this process holds."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            count += fd.stat().st_ino == file
    return count


class Cudart:
    """Stands in for torch's binding of the CUDA runtime."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append(("unregister", address))


def test_pages_that_are_asked_for_ahead() -> None:
    """All of them are there before the copy, which would otherwise stop at each."""
    old = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2]) < (5, 14)
    or_missing(["MADV_POPULATE_WRITE"] if old else [], "a kernel of Linux 5.14 or newer")
    region = Region(None, MIB)
    pages = MIB // mmap.PAGESIZE
    there = (ctypes.c_ubyte * pages)()
    region.populate()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(region.address), ctypes.c_size_t(MIB), there) == 0
    assert sum(page & 1 for page in there) == pages


def test_shared_pages_are_had_or_refused_beforehand() -> None:
    """A page that is missing when it is written to would be the end of the process."""
    block = Block(shared=True)
    block.reserve(3 * MIB)
    assert os.fstat(block.fd or 0).st_blocks * 512 >= 3 * MIB


def test_room_that_is_there_is_not_mapped_anew() -> None:
    """A mapping that is large enough stays, up to its last byte."""
    block = Block()
    region = block.reserve(3 * MIB)
    assert region.size > 3 * MIB
    assert block.reserve(region.size) is region
    assert block.reserve(1) is region


def test_a_lease_is_released_by_its_own_process_and_once() -> None:
    """Neither a forked child's copy of it, nor an older lease of the same block, changes what the owner sees."""
    block = Block()
    region = block.reserve(MIB)
    older, newer = Lease(region, block), Lease(region, block)
    newer._pid += 1
    newer.release()
    assert not newer.handed_back()
    newer._pid -= 1
    newer.release()
    older.release()
    assert newer.handed_back()
    assert not older.handed_back()


def test_the_largest_block_is_used() -> None:
    """Of those that are free: what fits into it need not be mapped anew."""
    stager = Stager(buffers=3, wait_s=0)
    held = [stager.stage({"t": torch.zeros(n * MIB, dtype=torch.uint8)}) for n in (1, 8, 3)]
    largest = block_of(held[1])
    for staged in held:
        release(staged)
    assert block_of(stager.stage({"t": torch.zeros(2)})) == largest


def test_what_crosses_is_what_is_leased() -> None:
    """Of a large block that holds a small state dict, only that is copied into shared memory."""
    stager = Stager(buffers=1, wait_s=0)
    release(stager.stage({"t": torch.zeros(16 * MIB, dtype=torch.uint8)}))
    staged = stager.stage(ones())
    assert staged.lease.block.size > 16 * MIB
    received = cross(staged)
    assert staged.lease.block.size < 16 * MIB
    assert torch.equal(received["t"], staged["t"])


def test_page_locking(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once for a mapping, for every context, and undone when the mapping goes: CUDA must not know memory that is not there."""
    cudart = Cudart(0)
    monkeypatch.setattr(buffers, "_cudart", lambda: cudart)
    region = Region(None, MIB)
    address, portable = region.address, 1
    region.pin()
    region.pin()
    assert cudart.calls == [("register", address, MIB, portable)]
    del region
    assert cudart.calls[1:] == [("unregister", address)]
    assert not caplog.records


def test_page_locking_that_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, not asked for again, and not undone; staging goes on unpinned."""
    cudart = Cudart(2)
    monkeypatch.setattr(buffers, "_cudart", lambda: cudart)
    region = Region(None, MIB)
    region.pin()
    region.pin()
    assert [record.getMessage() for record in caplog.records] == [
        f"cudaHostRegister refused {MIB} bytes (error 2): staging copies unpinned"
    ]
    del region
    assert [call[0] for call in cudart.calls] == ["register"]


def test_page_locking_is_its_own_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child, whose copy of a mapping goes, does not tell CUDA: it has no context of its own."""
    cudart = Cudart(0)
    monkeypatch.setattr(buffers, "_cudart", lambda: cudart)
    buffers._unpin(os.getpid() + 1, 4096)
    assert cudart.calls == []


def test_what_the_sender_keeps_stays_mapped() -> None:
    """A receiver maps a block once for all saves, and lets go of it when the sender has."""
    stager = Stager(buffers=2, wait_s=0)
    first = stager.stage(ones())
    one = cross(first)
    await_background()  # which holds the block for as long as it works
    token = first.lease.block.token
    region = buffers._received[os.getpid(), token]
    second = stager.stage(ones(2.0))
    other = cross(second)
    assert buffers._received.get((os.getpid(), token)) is region
    assert second.lease.block.token != token
    assert (one["t"][0], other["t"][0]) == (1.0, 2.0)
    del one, first, region
    stager.close()
    third = stager.stage(ones(3.0))
    cross(third)
    assert (os.getpid(), token) not in buffers._received


def test_a_crossing_that_arrived_is_settled() -> None:
    """Until then its descriptor may be asked for, as long as the sender's tensors live; afterwards nothing is left to do."""
    staged = Stager(wait_s=0).stage(ones())
    assert staged.lease.settle()
    sent = bytes(ForkingPickler.dumps(staged))
    assert not staged.lease.settle()
    received = pickle.loads(sent)
    assert staged.lease.settle()
    assert torch.equal(received["t"], staged["t"])


def test_a_crossing_that_nobody_took() -> None:
    """When the sender's tensors are dead its descriptor is taken back: the memory would be held for ever."""
    stager = Stager(wait_s=0)
    staged = stager.stage(ones())
    ForkingPickler.dumps(staged)
    lease = staged.lease
    file = os.fstat(lease.block.fd).st_ino
    before = descriptors_of(file)
    del staged
    assert lease.settle()
    end = time.monotonic() + 10  # the thread that passes descriptors on closes its own
    while descriptors_of(file) != before - 1:
        assert time.monotonic() < end
        time.sleep(0.005)
