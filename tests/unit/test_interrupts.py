"""A signal handler that raises at any place of a download or an upload, with stores that are dictionaries: each place in turn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dcp_s3 import S3Config
from dcp_s3._runtime import gc_pause
from dcp_s3._runtime.gc_pause import Pause, gc_paused
from dcp_s3._runtime.loop_thread import LoopThread, loop_thread
from dcp_s3._transfer.limits.attempt_timeout import AttemptTimeout, call_all, call_within
from dcp_s3._transfer.limits.budget import ByteBudget
from dcp_s3._transfer.limits.retry import Deadline
from dcp_s3._transfer.s3.control_store import ControlStore
from dcp_s3._transfer.upload import ObjectUpload
from tests.support.interrupts import Interrupt, Places, interrupted_in
from tests.unit import test_download, test_upload

HANG_S = 20.0


@pytest.fixture(autouse=True)
def loop_thread_runs():
    """The loop thread is there: where an interrupt hits its making, another one is made, and a file is closed late."""
    loop_thread().submit(asyncio.sleep(0)).result(10)


def at_each_place(work: Callable[[Callable[[], Any]], Any], *, step: int = 1) -> int:
    """Run ``work`` again and again, interrupted at one place after the other, until it ends before its place comes.

    Args:
        work: Calls what it is given when the interrupted part is over, whether by an exception or not.
        step: Every so manieth place.

    Returns:
        How many places there were.
    """
    at = 0
    while True:
        places = Places(at)
        with interrupted_in(None, hang_s=HANG_S):
            try:
                with places:
                    work(places.__exit__)
            except Interrupt:
                assert places.where
        if not places.where:
            return at
        at += step


def until(condition: Callable[[], bool], where: object) -> None:
    """Wait for what other threads have to do yet."""
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, where
        time.sleep(0.0005)


def test_a_download():
    """Whatever place: close() ends all requests, no byte arrives behind it, the budget is whole and no read is left."""
    runs: list[Any] = []

    def work(over: Callable[[], Any]) -> None:
        store = test_download.Store(limit=300, concurrency=2)
        targets = [bytearray(100) for _ in range(5)]
        loading = test_download.downloader(store)
        runs.append((store, loading))
        reads = [test_download.read(n * 100 + 1, 100, into, scratch=100) for n, into in enumerate(targets)]
        try:
            try:
                for done in loading.run(reads):
                    if done.about == 101 and done.tries == 1:
                        loading.again(done)
            finally:
                try:
                    loading.close()
                finally:
                    loading.close()
        finally:
            over()
            assert (store.budget.held, store.running, loading._live) == (0, 0, {})
        for n, target in enumerate(targets):
            assert bytes(target) == test_download.BODY[n * 100 + 1 : n * 100 + 101]

    assert at_each_place(work) > 400
    assert all(store.running == 0 for store, _ in runs)


def test_an_upload():
    """Whatever place: abort() ends all requests, the budget is whole, and an upload that was begun was aborted or completed."""

    def work(over: Callable[[], Any]) -> None:
        store = test_upload.Store(limit=1000)
        upload = test_upload.upload_to(store, part_bytes=100)
        try:
            try:
                for _ in range(3):
                    upload.reserve(150)
                    upload.append(memoryview(bytes(120)), copied=True)
                    upload.give_back(30)
                    upload.append(memoryview(bytes(30)))
                assert upload.finish().size == 450
            except BaseException:
                _abort(upload)
                raise
        finally:
            over()
            assert (store.budget.held, upload._works) == (0, {})
            if "create" in store.calls:
                assert store.calls[-1] in ("abort", "complete"), store.calls

    assert at_each_place(work) > 400


def _abort(upload: ObjectUpload) -> None:
    """As a save does: what is left of it, where an interrupt ended the first call."""
    try:
        upload.abort()
    finally:
        upload.abort()


def test_a_small_upload():
    """The same of an object that goes in one request."""

    def work(over: Callable[[], Any]) -> None:
        store = test_upload.Store()
        upload: ObjectUpload = test_upload.upload_to(store, part_bytes=1000)
        try:
            try:
                upload.reserve(100)
                upload.append(memoryview(bytes(100)), copied=True)
                upload.finish()
            except BaseException:
                _abort(upload)
                raise
        finally:
            over()
            assert (store.budget.held, upload._works) == (0, {})

    assert at_each_place(work) > 100


def test_the_budget():
    """Whatever place: what one owner and those that it has given to hold is given back, and the lock is free."""

    def work(over: Callable[[], Any]) -> None:
        budget = ByteBudget(100)
        try:
            budget.try_acquire("a", 50)
            budget.acquire_over("a", 70)
            budget.move("a", "b", 20)
            budget.release("a", 30)
        finally:
            over()
            budget.release("a")
            budget.release("b")
            assert budget.held == 0
            assert budget.try_acquire("c", 100)

    assert at_each_place(work) > 10


def test_a_wait_for_work():
    """Whatever place: the loop thread goes on, and the work can be waited for by another."""
    opened = LoopThread()

    async def value() -> int:
        return 3

    def work(over: Callable[[], Any]) -> None:
        made = opened.work(value)
        try:
            made.start()
            assert made.result(5) == 3
            assert made.done()
        finally:
            over()
            assert opened.submit(value()).result(5) == 3
            made.stop()
            assert made.wait(5)

    assert at_each_place(work) > 10
    opened.close()


def test_a_call_in_a_thread():
    """Whatever place: the thread of the call ends."""

    def work(over: Callable[[], Any]) -> None:
        ended: list[int] = []
        begun: list[int] = []

        def call() -> int:
            begun.append(1)
            ended.append(1)
            return 5

        try:
            assert call_within(AttemptTimeout(5, at_most=5), call) == 5
        finally:
            over()
            until(lambda: len(begun) == len(ended), begun)

    assert at_each_place(work) > 10


def test_calls_side_by_side():
    """Whatever place: what has begun ends, and a thread of one call does not take what comes after the interrupt."""

    def work(over: Callable[[], Any]) -> None:
        begun: list[int] = []
        ended: list[int] = []

        def call(number: int) -> int:
            begun.append(number)
            time.sleep(0.001)
            ended.append(number)
            return number

        try:
            assert call_all(call, range(5), threads=2) == list(range(5))
        finally:
            over()
            until(lambda: len(begun) == len(ended), begun)

    assert at_each_place(work) > 10


def test_calls_of_which_one_fails():
    """Its error is raised when those under way have ended, and no more are begun."""
    begun: list[int] = []
    ended: list[int] = []

    def call(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise KeyError(number)
        time.sleep(0.01)
        ended.append(number)
        return number

    with pytest.raises(KeyError, match="1"):
        call_all(call, range(100), threads=3)
    assert len(begun) < 100
    assert sorted(begun) == sorted([*ended, 1])
    assert call_all(call, []) == []
    assert call_all(call, [5, 3], threads=1) == [5, 3]


def test_who_asks_a_store():
    """Whatever place: the thread that was interrupted is not taken to ask yet, by another one."""
    store = ControlStore(S3Config(), "bucket", deadline=Deadline(5))
    asking: dict[str, int] = {}

    def ask() -> None:
        with store.waiting_for(asking, "place", "waiting"):
            pass

    def work(over: Callable[[], Any]) -> None:
        try:
            ask()
        finally:
            over()

    assert at_each_place(work) > 10
    gc.collect()
    other = threading.Thread(target=ask)
    other.start()
    other.join(4)
    assert not other.is_alive()
    assert asking == {}


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector(enabled: bool):
    """Whatever place: when the pauses are over, Python's collector is as it was."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        at = 0
        while True:
            places = Places(at)
            with contextlib.suppress(Interrupt), places:
                pause = Pause(0.02)
                with gc_paused():
                    assert not gc.isenabled()
                pause.end()
            until(lambda: not gc_pause._pauses, places.where)
            assert gc.isenabled() == enabled, places.where
            if not places.where:
                break
            at += 1
        assert at > 20
    finally:
        (gc.enable if before else gc.disable)()
