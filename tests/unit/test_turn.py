"""Turns without DCP: which save waits for which, for how long, and what is said of one that nobody waits for."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest

from dcp_s3 import ConfigError, DeadlineExceededError
from dcp_s3._staging import turn as module
from dcp_s3._staging.turn import Turn, World, interruption_told, new_turn, received_turn, take_turn, wait_for_saves

LONG_S = 60.0


class Staged:
    """Stands in for a state dict that was staged."""


@pytest.fixture(autouse=True)
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of earlier tests, and no checkpoint process; the interpreter's end is as it was."""
    monkeypatch.setattr(module, "_turns", [])
    monkeypatch.setattr(module, "_here", threading.local())
    monkeypatch.setattr(module, "_watching", True)
    checkpoint_process(monkeypatch, there=False)


@pytest.fixture
def in_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of two."""
    monkeypatch.setattr(World, "now", classmethod(lambda cls: World(2, 1)))


def checkpoint_process(monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    """Say whether DCP has its checkpoint process."""
    executor = types.SimpleNamespace(_CHECKPOINT_PROCESS=object() if there else None)
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint._async_process_executor", executor)


def queued() -> tuple[Turn, Staged]:
    """A turn behind all others, and the state dict that it is of."""
    turn, staged = new_turn(), Staged()
    turn.belongs_to(staged)
    turn.queue()
    return turn, staged


@contextlib.contextmanager
def saving(turn: Turn) -> Iterator[None]:
    """A thread that has taken the state dict up, and ends behind the block."""
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (turn.begin(), begun.set(), end.wait(LONG_S)))
    thread.start()
    assert begun.wait(LONG_S)
    try:
        yield
    finally:
        end.set()
        thread.join()


class Waiting:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.cpu_s = 0.0
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.thread_time()
        try:
            self._call()
        except BaseException as error:
            self.error = error
        self.cpu_s = time.thread_time() - began

    def ends(self, within_s: float = 10.0) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()


# ---------------------------------------------------------------------- who waits for whom


def test_a_save_waits_for_those_before_it(in_group: None) -> None:
    """Until the thread of each has ended; not for itself, nor for those behind it."""
    first, _kept = queued()
    with saving(first):
        second, _also = queued()
        first.wait(LONG_S)
        waiting = Waiting(lambda: second.wait(LONG_S))
        assert not waiting.ends(0.1)
    assert waiting.ends()
    assert waiting.error is None
    second.wait(LONG_S)


def test_a_state_dict_that_nobody_holds(in_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP is through with its save, whatever has become of it: it is waited for no longer."""
    checkpoint_process(monkeypatch, there=True)
    first, staged = queued()
    second, _kept = queued()
    waiting = Waiting(lambda: second.wait(LONG_S))
    assert not waiting.ends(0.1)
    del staged
    assert waiting.ends()
    assert waiting.error is None
    assert first.over()


def test_a_staging_that_was_interrupted(in_group: None) -> None:
    """There will be no save of it, and nothing waits for one."""
    first, _kept = queued()
    assert not first.over()
    first.cancel()
    assert first.over()
    second, _also = queued()
    second.wait(LONG_S)


def test_a_lone_process_waits_for_what_has_begun() -> None:
    """A state dict that may lie about for ever holds nobody up; a save under way does."""
    first, _kept = queued()
    second, _also = queued()
    second.wait(LONG_S)
    with saving(first):
        waiting = Waiting(lambda: second.wait(LONG_S))
        assert not waiting.ends(0.1)
    assert waiting.ends()


def test_the_thread_that_saves_does_not_wait_for_itself() -> None:
    """One thread that saves two state dicts, one after the other, is through with the first."""
    first, _kept = queued()
    second, _also = queued()
    waiting = Waiting(lambda: (first.begin(), second.begin(), second.wait(LONG_S)))
    assert waiting.ends()
    assert waiting.error is None


def test_a_save_that_does_not_begin(in_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group it is waited for, and given up after a minute."""
    assert module._BEGIN_S == 60
    checkpoint_process(monkeypatch, there=True)
    first, _kept = queued()
    first.place = "s3://b/first"
    second, _also = queued()
    waiting = Waiting(lambda: second.wait(0.01))  # how long a save may take says nothing of when it begins
    assert not waiting.ends(0.2)
    monkeypatch.setattr(module, "_BEGIN_S", 0.01)
    assert waiting.ends()
    assert isinstance(waiting.error, DeadlineExceededError)
    assert "the save of s3://b/first on rank 1 has not ended, so this one cannot begin" in str(waiting.error)


def test_a_save_that_does_not_end(in_group: None) -> None:
    """What it may take counts from its own turn on: before that it waits as well."""
    first, _kept = queued()
    with saving(first):
        second, _also = queued()
        waiting = Waiting(lambda: second.wait(0.05))
        assert not waiting.ends(0.3)
        first.wait(LONG_S)
        assert waiting.ends()
        assert isinstance(waiting.error, DeadlineExceededError)


def test_the_queue_keeps_what_is_under_way() -> None:
    """And forgets the others; numbers grow with each."""
    first, _kept = queued()
    second, staged = queued()
    del staged
    third, _also = queued()
    assert module._turns == [first, third]
    assert first.number < second.number < third.number


# ---------------------------------------------------------------------- before DCP has begun


@pytest.mark.parametrize("how", ["begins", "is cancelled"])
def test_one_checkpoint_process_for_all(in_group: None, how: str) -> None:
    """A staging in a group waits until the save before it has begun: DCP would start a process for each."""
    first, _kept = queued()
    waiting = Waiting(queued)
    assert not waiting.ends(0.1)
    with saving(first) if how == "begins" else contextlib.nullcontext():
        if how == "is cancelled":
            first.cancel()
        assert waiting.ends()
    assert waiting.error is None


def test_who_need_not_wait_for_the_checkpoint_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone process, and one that has it."""
    _kept = queued(), queued()
    monkeypatch.setattr(World, "now", classmethod(lambda cls: World(2, 1)))
    checkpoint_process(monkeypatch, there=True)
    assert Waiting(queued).ends()


def test_a_checkpoint_process_that_does_not_start(
    in_group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After five minutes the next staging goes on, says so, and counts no more on that save."""
    assert module._PROCESS_S == 300
    monkeypatch.setattr(module, "_PROCESS_S", 0.05)
    first, _kept = queued()
    waiting = Waiting(queued)
    assert waiting.ends()
    assert waiting.error is None
    assert [record.getMessage() for record in caplog.records] == [
        "the save of a state dict that was staged on rank 1 has not begun for 0.05 s; the next one does not wait for that"
    ]
    assert first.over()


# ---------------------------------------------------------------------- other collectives


def test_collectives_wait_for_the_saves_in_the_background(in_group: None) -> None:
    """A save in front, say, begins when those are over."""
    first, _kept = queued()
    with saving(first):
        waiting = Waiting(lambda: wait_for_saves(LONG_S))
        assert not waiting.ends(0.1)
    assert waiting.ends()
    assert waiting.error is None


def test_a_lone_process_has_no_collectives() -> None:
    """Nothing is waited for."""
    first, _kept = queued()
    with saving(first):
        assert Waiting(lambda: wait_for_saves(LONG_S)).ends()


@pytest.mark.parametrize("settled", [False, True])
def test_collectives_of_a_save_in_its_own_turn(
    in_group: None, monkeypatch: pytest.MonkeyPatch, *, settled: bool
) -> None:
    """They wait for nobody, for the others wait for this one; when its end is told they are another's."""
    checkpoint_process(monkeypatch, there=True)
    first, _kept = queued()
    second, _also = queued()

    def work() -> None:
        first.begin()
        first.settled = settled
        wait_for_saves(LONG_S)

    with saving(second):
        waiting = Waiting(work)
        if settled:
            assert not waiting.ends(0.1)
        else:
            assert waiting.ends()
    assert waiting.ends()


@pytest.mark.parametrize("what", ["a save before", "a save that begins"])
def test_who_waits_is_idle(in_group: None, what: str) -> None:
    """The thread of a save may wait for minutes, beside the training."""
    first, _kept = queued()
    with contextlib.ExitStack() as stack:
        if what == "a save before":
            stack.enter_context(saving(first))
            waiting = Waiting(lambda: wait_for_saves(LONG_S))
        else:
            waiting = Waiting(queued)
        assert not waiting.ends(0.5)
        first.cancel()
        assert waiting.ends()
    assert waiting.cpu_s < 0.2


# ---------------------------------------------------------------------- which save it is


def test_a_turn_is_taken_once() -> None:
    """By the thread that has just taken the state dict up, and by no other; a save of something else has none."""
    turn, _kept = queued()
    turn.begin()
    taken: list[Turn | None] = []
    assert Waiting(lambda: taken.append(take_turn())).ends()
    assert taken == [None]
    assert take_turn() is turn
    assert take_turn() is None


def test_the_world_of_the_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save goes ahead in the world that it was staged in, and is refused in another."""
    monkeypatch.setattr(World, "now", classmethod(lambda cls: World(2, 1)))
    turn = new_turn()
    assert turn.rank == 1
    turn.check_world()
    for world, found in ((World(1, 0), "there is none now"), (World(3, 2), "now it has 3, and this is rank 2")):
        monkeypatch.setattr(World, "now", classmethod(lambda cls, world=world: world))
        with pytest.raises(ConfigError, match=f"rank 1 of a process group of 2 ranks, and {found}"):
            turn.check_world()
        received_turn().check_world()  # the group there is DCP's own


def test_a_crossing_is_a_turn_of_its_own(in_group: None) -> None:
    """It waits for the saves before, and leaves it to the other process to tell what becomes of it."""
    first, _kept = queued()
    with saving(first):
        second, _also = queued()
        waiting = Waiting(second.crosses)
        assert not waiting.ends(0.1)
        assert second.begun
    assert waiting.ends()
    assert (waiting.error, second.settled) == (None, True)


# ---------------------------------------------------------------------- what is said


@pytest.mark.parametrize("settled", [False, True])
def test_a_save_that_ends_unheard(caplog: pytest.LogCaptureFixture, *, settled: bool) -> None:
    """One line when its thread is gone, unless its end was told before."""
    turn, _kept = queued()
    turn.place = "s3://b/run"
    waiting = Waiting(lambda: (turn.begin(), turn.begin(), setattr(turn, "settled", settled)))
    assert waiting.ends()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if settled else 1)
    assert all(line.startswith("the save of s3://b/run on rank 0 ended between two of DCP's steps") for line in lines)
    assert turn.settled


def test_the_caller_s_own_thread_is_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    """The training thread goes on behind a save; what that raises is the caller's."""
    turn, _kept = queued()
    turn.begin()
    assert not hasattr(module._here, "watched")
    assert not caplog.records


def test_an_interrupt_of_a_wait_says_what_for(caplog: pytest.LogCaptureFixture) -> None:
    """The saves that have begun; if there is none, those that have not."""
    first, _kept = queued()
    second, _also = queued()
    first.place, second.place = "s3://b/1", "s3://b/2"

    def said() -> str:
        caplog.clear()
        with pytest.raises(KeyboardInterrupt), interruption_told():
            raise KeyboardInterrupt
        (record,) = caplog.records
        return record.getMessage().removeprefix("interrupted while async_save was waiting for ")

    assert said() == "the save of s3://b/1 on rank 0, the save of s3://b/2 on rank 0"
    with saving(second):
        assert said() == "the save of s3://b/2 on rank 0"
    first.cancel()
    assert said() == "nothing that is known"


def test_the_interpreter_s_end_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first background save on."""
    registered: list[object] = []
    monkeypatch.setattr(threading, "_register_atexit", registered.append)
    monkeypatch.setattr(module, "_watching", False)
    _kept = queued(), queued()
    assert registered == [module._at_exit]


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT is Python's own, and so again behind the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_the_interpreter_s_end(interrupts: None, caplog: pytest.LogCaptureFixture) -> None:
    """While it waits for the thread of a save the first one says so, and the next one is Python's."""
    module._at_exit()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    turn, _kept = queued()
    turn.place = "s3://b/run"
    with saving(turn):
        module._at_exit()
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert [record.getMessage() for record in caplog.records] == [
            "this process waits for the save of s3://b/run on rank 0 before it ends; interrupt it once more to give that up"
        ]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        module._at_exit()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        turn.settled = True
        module._at_exit()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
