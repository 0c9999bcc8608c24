"""The retry layer by itself: counting, waiting, and when it stops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest

from dcp_s3 import AccessDeniedError, ConfigError, DeadlineExceededError, RetryPolicy, StorageError
from dcp_s3._transfer.limits import retry
from dcp_s3._transfer.limits.retry import AS_POLICY, NEVER, Counter, Deadline, backoff_s, mark, unavailable

POLICY = RetryPolicy(max_attempts=5, initial_wait_s=0.001, max_wait_s=0.002)


class Failing:
    """A function that raises its failures in turn, then returns how often it was called."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return self.calls

    async def coroutine(self) -> int:
        return self()


def run(how: str, function: Failing, policy: RetryPolicy = POLICY, **options: object) -> int:
    """Call through the blocking or the asyncio form."""
    if how == "call":
        return retry.call(function, policy, **options)
    return asyncio.run(retry.acall(function.coroutine, policy, **options))


both = pytest.mark.parametrize("how", ["call", "acall"])


@both
def test_until_it_works(how: str):
    """A passing failure is repeated and counted; the value of the try that works is returned."""
    counter = Counter()
    assert run(how, Failing(unavailable("1"), unavailable("2")), counter=counter) == 3
    assert counter.retries == 2


@both
@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_as_often_as_the_policy_says(how: str, attempts: int):
    """max_attempts counts all tries; the last failure is raised, and knows how many there were."""
    policy = RetryPolicy(max_attempts=attempts, initial_wait_s=0, max_wait_s=0)
    function = Failing(*(unavailable(str(n)) for n in range(10)))
    with pytest.raises(StorageError, match=str(attempts - 1)) as caught:
        run(how, function, policy)
    assert (function.calls, caught.value.attempts) == (attempts, attempts)


@both
@pytest.mark.parametrize(
    "failure",
    [
        StorageError("unmarked"),
        mark(StorageError("marked"), tries=NEVER),
        ConfigError("not the store's"),
        ValueError("foreign"),
    ],
)
def test_what_is_not_repeated(how: str, failure: Exception):
    """Refusals, errors that are not the store's, and foreign errors go through at the first try, as they are."""
    function = Failing(failure)
    with pytest.raises(type(failure)) as caught:
        run(how, function)
    assert caught.value is failure
    assert function.calls == 1


@both
def test_a_kind_with_a_limit_of_its_own(how: str):
    """Failures with a limited number of tries are counted by themselves; others in between do not use them up."""

    def limited() -> StorageError:
        return mark(AccessDeniedError("clock"), tries=2)

    function = Failing(unavailable("1"), limited(), unavailable("2"), limited(), unavailable("3"))
    with pytest.raises(AccessDeniedError) as caught:
        run(how, function)
    assert (function.calls, caught.value.attempts) == (4, 4)
    assert run(how, Failing(unavailable("1"), limited(), unavailable("2"))) == 4


@both
def test_retry_after_is_the_least_wait(how: str):
    """A store's wish to wait is met, and nothing else of it changes."""
    started = time.monotonic()
    run(how, Failing(mark(unavailable("busy"), tries=AS_POLICY, retry_after_s=0.2)))
    assert 0.2 <= time.monotonic() - started < 1


@both
def test_the_deadline_ends_the_tries(how: str):
    """A wait that would end behind the deadline is not begun: the error is the deadline's and names the last failure."""
    function = Failing(
        *(
            mark(
                unavailable("busy").with_context(status=503, code="SlowDown", key="k"),
                tries=AS_POLICY,
                retry_after_s=0.3,
            )
            for _ in range(9)
        )
    )
    policy = RetryPolicy(max_attempts=100, initial_wait_s=0, max_wait_s=0)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"deadline of 0.5 s.*busy") as caught:
        run(how, function, policy, deadline=Deadline(0.5))
    assert time.monotonic() - started < 0.5
    assert (caught.value.status, caught.value.code, caught.value.key, caught.value.attempts) == (
        503,
        "SlowDown",
        "k",
        2,
    )
    assert isinstance(caught.value.__cause__, StorageError)


def test_cancelling_is_not_a_failure():
    """A task that is cancelled while it waits, or while it tries, is cancelled; it does not try again."""
    function = Failing(*(mark(unavailable("busy"), tries=AS_POLICY, retry_after_s=5) for _ in range(3)))

    async def main() -> None:
        task = asyncio.ensure_future(retry.acall(function.coroutine, POLICY))
        await asyncio.wait({task}, timeout=0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert function.calls == 1


def test_each_retry_is_logged_once(caplog: pytest.LogCaptureFixture):
    """A retry is a DEBUG line with its number and cause; nothing is said when nothing fails."""
    with caplog.at_level(logging.DEBUG, logger="dcp_s3"):
        retry.call(Failing(), POLICY)
        assert caplog.records == []
        retry.call(Failing(unavailable("first cause"), unavailable("second cause")), POLICY)
    assert [("attempt 1" in m, "first cause" in m) for m in caplog.messages] == [(True, True), (False, False)]
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_waits_are_jittered_below_their_bound():
    """The wait behind try n is anywhere between 0 and initial * 2**n, and never above max_wait_s."""
    policy = RetryPolicy(initial_wait_s=0.5, max_wait_s=3.0)
    for attempt, bound in ((1, 1.0), (2, 2.0), (3, 3.0), (50, 3.0), (10_000, 3.0)):
        waits = [backoff_s(policy, attempt) for _ in range(400)]
        assert 0 <= min(waits) < 0.2 * bound
        assert 0.8 * bound < max(waits) <= bound


def test_a_deadline():
    """A deadline tells what is left, never less than nothing, and raises what it was told."""
    deadline = Deadline(0.02)
    assert 0 < deadline.remaining() <= 0.02
    deadline.check("doing nothing")
    limit = time.monotonic() + 5
    while not deadline.expired:
        assert time.monotonic() < limit
        time.sleep(0.005)
    assert deadline.remaining() == 0
    with pytest.raises(DeadlineExceededError, match=r"deadline of 0.02 s passed while counting sheep"):
        deadline.check("counting sheep")


def test_a_deadline_sees_suspend(monkeypatch: pytest.MonkeyPatch):
    """The clock is one that goes on while the machine sleeps."""
    clocks: list[int] = []
    plain: Callable[[int], float] = time.clock_gettime

    def noting(clock: int) -> float:
        clocks.append(clock)
        return plain(clock)

    monkeypatch.setattr(time, "clock_gettime", noting)
    assert Deadline(5).expired is False
    assert set(clocks) == {time.CLOCK_BOOTTIME}


@pytest.mark.parametrize("longest_s", [0.02, 5.0])
def test_no_wait_outlasts_the_limit(longest_s: float):
    """Neither Retry-After nor the policy makes a wait longer than its caller can bear: half the stall limit."""
    limited = RetryPolicy(max_attempts=3, initial_wait_s=0.001, max_wait_s=0.002)
    failing = Failing(mark(unavailable("busy"), tries=AS_POLICY, retry_after_s=0.2))
    started = time.monotonic()
    retry.call(failing, limited, longest_s=longest_s)
    took = time.monotonic() - started
    assert (took < 0.15) == (longest_s < 0.2)


def test_once_repeats_only_what_was_refused():
    """A request that must go out once is sent again where its credentials were refused, never where it may have been done."""
    refused = Failing(mark(StorageError("expired"), tries=2))
    assert retry.call(refused, POLICY, once=True) == 2
    unclear = Failing(unavailable("lost"))
    with pytest.raises(StorageError, match="lost"):
        retry.call(unclear, POLICY, once=True)
    assert unclear.calls == 1


@both
def test_a_word_after_the_first_failure(how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """One WARNING for each operation, at once, however many of its requests fail and how often; after a minute one more."""
    monkeypatch.setattr(retry, "_warned", {})
    caplog.set_level(logging.WARNING, logger="dcp_s3._transfer.limits.retry")

    def failing(operation: str, times: int) -> Failing:
        return Failing(*(unavailable(f"{n}").with_context(operation=operation, key="k") for n in range(times)))

    for operation in ("UploadPart", "UploadPart", "GetObject"):
        run(how, failing(operation, 3))
    assert [record.message for record in caplog.records] == [
        "0 [operation=UploadPart, key=k]; it is sent again, up to 5 times in all",
        "0 [operation=GetObject, key=k]; it is sent again, up to 5 times in all",
    ]
    monkeypatch.setattr(retry, "_QUIET_S", 0.0)
    retry._warned.clear()
    run(how, failing("UploadPart", 2))
    assert len(caplog.records) == 4
    run(how, Failing())
    with pytest.raises(AccessDeniedError):
        run(how, Failing(mark(AccessDeniedError("no"), tries=NEVER)))
    assert len(caplog.records) == 4
