"""The byte budget: what fits, what does not, and that nothing is lost between threads."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from dcp_s3._transfer.limits.budget import ByteBudget


def test_what_fits():
    """Bytes are taken while they fit; what was given back can be taken again; the peak is remembered."""
    budget = ByteBudget(100)
    assert budget.try_acquire("a", 60)
    assert not budget.try_acquire("b", 41)
    assert budget.try_acquire("b", 40)
    assert not budget.try_acquire("c", 1)
    budget.release("a")
    assert budget.try_acquire("c", 50)
    assert (budget.held, budget.peak) == (90, 100)


def test_more_than_the_limit_alone():
    """An amount above the limit is given when nothing else is held: it would wait for ever otherwise."""
    budget = ByteBudget(100)
    assert budget.try_acquire("a", 500)
    assert not budget.try_acquire("b", 1)
    budget.release("a")
    assert budget.try_acquire("b", 1)
    assert not budget.try_acquire("a", 500)


def test_over_the_limit_by_force():
    """Whoever would wait for itself takes bytes in any case, and gives them back like others."""
    budget = ByteBudget(100)
    assert budget.try_acquire("a", 90)
    budget.acquire_over("a", 50)
    assert (budget.held, budget.peak) == (140, 140)
    assert not budget.try_acquire("b", 1)
    budget.release("a")
    assert budget.held == 0


def test_what_is_given_back_twice_counts_once():
    """An owner gives back what it holds, all or a part of it; a second time, or without holding any, gives nothing back."""
    budget = ByteBudget(100)
    assert budget.try_acquire("a", 30)
    assert budget.try_acquire("a", 20)
    assert budget.try_acquire("b", 10)
    budget.release("a", 5)
    assert budget.held == 55
    for _ in range(2):
        budget.release("a")
        budget.release("nobody")
        assert budget.held == 10


def test_bytes_change_their_owner():
    """What is moved to another owner is given back by that one, and is held all the while."""
    budget = ByteBudget(100)
    assert budget.try_acquire("upload", 60)
    budget.move("upload", "part", 40)
    assert budget.held == 60
    budget.release("upload")
    assert budget.held == 40
    budget.release("part")
    assert budget.held == 0


@given(st.lists(st.integers(1, 60), max_size=60))
def test_never_above_the_limit(wishes: list[int]):
    """Whatever is asked for in whatever order, what is held is what was given, and no more than the limit."""
    budget, given_out = ByteBudget(100), []
    for number, wish in enumerate(wishes):
        if budget.try_acquire(number, wish):
            given_out.append((number, wish))
        elif given_out:
            budget.release(given_out.pop(0)[0])
        assert budget.held == sum(nbytes for _, nbytes in given_out) <= 100
    assert budget.peak <= 100


def test_many_threads():
    """Eight threads that take and give back leave nothing behind and never pass the limit together."""
    budget = ByteBudget(50)
    most = []
    deadline = time.monotonic() + 20

    def work(amount: int) -> None:
        done = 0
        while done < 300 and time.monotonic() < deadline:
            if budget.try_acquire(amount, amount):
                most.append(budget.held)
                budget.release(amount)
                done += 1

    threads = [threading.Thread(target=work, args=(amount,)) for amount in (1, 7, 10, 20, 25, 30, 40, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 8 * 300
    assert (budget.held, budget.peak <= 50) == (0, True)
