"""The garbage collector is left alone for a while, and always comes back."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from dcp_s3._checkpoint.collector import Pause, gc_paused


def test_the_collector_is_paused_and_resumed() -> None:
    """Off inside, on again afterwards, also after an error."""
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    """Whoever switched it off keeps it off."""
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_thread_out_resumes_the_collector() -> None:
    """Two overlapping pauses: it stays off until the later one ends."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with gc_paused():
            entered.set()
            leave.wait(30)

    with gc_paused():
        thread = threading.Thread(target=hold)
        thread.start()
        assert entered.wait(30)
    assert not gc.isenabled()
    leave.set()
    thread.join(30)
    assert gc.isenabled()


def test_a_child_forked_during_a_pause_has_its_collector() -> None:
    """A process forked while another thread unpickles does not run without a collector for ever."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with gc_paused():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(30)
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        good = gc.isenabled()
        with gc_paused():
            good = good and not gc.isenabled()
        os._exit(0 if good and gc.isenabled() else 1)
    leave.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_pause_that_is_ended() -> None:
    """Off until its end; a second end does not end somebody else's pause."""
    pause = Pause()
    assert not gc.isenabled()
    pause.end()
    assert gc.isenabled()
    with gc_paused():
        pause.end()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_that_nobody_ends() -> None:
    """A save that DCP gave up between two calls leaves the collector off for no longer than the limit."""
    pause = Pause(0.05)
    assert not gc.isenabled()
    end = time.monotonic() + 30
    while not gc.isenabled():
        assert time.monotonic() < end
        time.sleep(0.01)
    pause.end()
    assert gc.isenabled()


def test_a_child_forked_during_a_pause_of_a_save() -> None:
    """It has its collector, and the end of its parent's pause changes nothing there."""
    pause = Pause()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        good = gc.isenabled()
        pause.end()
        with gc_paused():
            good = good and not gc.isenabled()
        os._exit(0 if good and gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pause.end()
    assert gc.isenabled()
