"""The garbage collector is left alone for a while, and always comes back."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest

from dcp_s3._runtime import gc_pause
from dcp_s3._runtime.gc_pause import Pause, gc_paused

pytestmark = pytest.mark.usefixtures("collector_on")


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


def test_a_collector_that_is_switched_on_in_a_pause_stays_on() -> None:
    """Also where another pause begins before that one has ended: it was on when this one came."""
    gc.disable()
    pause = Pause()
    gc.enable()
    with gc_paused():
        assert not gc.isenabled()
    pause.end()
    assert gc.isenabled()


def test_a_pause_that_is_over_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is held up behind its timer, or has no loop any more, does not switch the collector off for good."""
    monkeypatch.setattr(Pause, "end_in", lambda pause, _: pause.end())
    Pause()
    assert gc.isenabled()


def test_a_walk_whose_frame_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt at the edge of the block, whose traceback somebody keeps, leaves the collector off for the limit only."""
    monkeypatch.setattr(gc_pause, "_WALK_S", 0.05)
    walk = gc_paused()
    walk.__enter__()
    assert not gc.isenabled()
    end = time.monotonic() + 30
    while not gc.isenabled():
        assert time.monotonic() < end
        time.sleep(0.01)
    walk.__exit__(None, None, None)
    assert gc.isenabled()


@contextlib.contextmanager
def paused_elsewhere() -> Iterator[Callable[[], None]]:
    """Another thread holds a pause until what this gives is called, or the block ends."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with gc_paused():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)

    def end() -> None:
        leave.set()
        thread.join(30)

    thread.start()
    assert entered.wait(30)
    yield end
    end()


def exit_code_of(child: Callable[[], bool]) -> int:
    """Of a forked child: 0 if what it looks at is so."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        os._exit(0 if child() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_last_thread_out_resumes_the_collector() -> None:
    """Two overlapping pauses: it stays off until the later one ends."""
    with contextlib.ExitStack() as stack:
        with gc_paused():
            end = stack.enter_context(paused_elsewhere())
        assert not gc.isenabled()
        end()
        assert gc.isenabled()


def pauses_and_resumes() -> bool:
    """Whether the collector is on, off in a pause, and on again."""
    good = gc.isenabled()
    with gc_paused():
        good = good and not gc.isenabled()
    return good and gc.isenabled()


def test_a_child_forked_during_a_pause_has_its_collector() -> None:
    """A process forked while another thread unpickles does not run without a collector for ever."""
    with paused_elsewhere():
        assert exit_code_of(pauses_and_resumes) == 0


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

    def child() -> bool:
        pause.end()
        return pauses_and_resumes()

    assert exit_code_of(child) == 0
    pause.end()
    assert gc.isenabled()


def test_a_pause_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the process ends there is no timer that could end a pause: there is none, then."""

    class Closed:
        def call_soon_threadsafe(self, *_: object) -> None:
            raise RuntimeError("Event loop is closed")

        def call_later(self, *_: object) -> None:
            """Never comes to it."""

    monkeypatch.setattr(gc_pause, "loop_thread", lambda: types.SimpleNamespace(loop=Closed()))
    with gc_paused():
        assert gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("during", [True, False])
def test_a_forked_child_of_a_process_without_collector(monkeypatch: pytest.MonkeyPatch, *, during: bool) -> None:
    """Has none either, whether or not a pause is under way, and whatever a pause before has switched on again."""
    monkeypatch.setattr(gc_pause, "_lock", gc_pause._lock)
    if not during:
        with gc_paused():
            pass
    gc.disable()
    try:
        with gc_paused() if during else contextlib.nullcontext():
            gc_pause._after_fork_in_child()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_pause_ended_by_many_at_once() -> None:
    """The timer and the save may both come: it ends once, and leaves another's pause alone."""
    for _ in range(200):
        with gc_paused():
            pause, start = Pause(), threading.Barrier(4)

            def end(pause: Pause = pause, start: threading.Barrier = start) -> None:
                start.wait(30)
                pause.end()

            threads = [threading.Thread(target=end) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert not gc.isenabled()
        assert gc.isenabled()
