"""The one retry layer: which failures are tried again, how often, how soon, and until when."""

from __future__ import annotations

import logging
import math
import random
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import tenacity

from dcp_s3.errors import DcpS3Error, DeadlineExceededError, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dcp_s3.config import RetryPolicy, S3Config

_log = logging.getLogger(__name__)

T = TypeVar("T")

NEVER: Final = 1
"""``tries`` of a failure that repeating cannot mend."""
AS_POLICY: Final = 1 << 30
"""``tries`` of a failure that is repeated for as long as the policy and the deadline allow."""


_QUIET_S: Final = 60.0
"""So long a failing operation is not warned of again, however many of its requests fail."""
_warned: dict[str | None, float] = {}


def _warn(error: DcpS3Error, policy: RetryPolicy) -> None:
    """Say that an operation fails and is repeated: until the policy gives up, seconds or minutes pass in silence."""
    if _now() >= _warned.get(error.operation, 0.0):
        _warned[error.operation] = _now() + _QUIET_S
        _log.warning("%s; it is sent again, up to %d times in all", error, policy.max_attempts)


def _now() -> float:
    """Seconds on a clock that also runs while the machine is suspended: a job that slept did let time pass."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Deadline:
    """A point in time by which a whole save or load must be over.

    Args:
        seconds: From now; more than 0.
    """

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = _now() + seconds

    def remaining(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self._end - _now())

    @property
    def expired(self) -> bool:
        """Whether the point in time has passed."""
        return _now() >= self._end

    def check(self, doing: str) -> None:
        """Raise if the deadline has passed.

        Raises:
            DeadlineExceededError: It has; the text names ``doing``.
        """
        if self.expired:
            raise self.error(doing)

    def error(self, doing: str) -> DeadlineExceededError:
        """The error for a deadline that passed while ``doing``."""
        return DeadlineExceededError(
            f"the deadline of {self.seconds:g} s passed while {doing}; raise save_deadline_s / load_deadline_s, or look why "
            "the store is slow"
        )


class Counter:
    """Requests sent again, for the one log line of a save or load. Incremented on one thread at a time."""

    __slots__ = ("retries",)

    def __init__(self) -> None:
        self.retries = 0


def mark(error: StorageError, *, tries: int, retry_after_s: float = 0.0) -> StorageError:
    """Note on a failure how often a request may fail so (failures of other kinds do not count), and how long to wait."""
    error.__dict__["tries"] = tries
    error.__dict__["retry_after_s"] = retry_after_s
    return error


def _options(
    policy: RetryPolicy, deadline: Deadline | None, counter: Counter | None, longest_s: float, *, once: bool
) -> dict[str, Any]:
    backoff = tenacity.wait_random_exponential(multiplier=policy.initial_wait_s, max=policy.max_wait_s)
    limited = 0

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = float(error.__dict__.get("retry_after_s", 0.0)) if error else 0.0
        return min(max(backoff(state), asked), longest_s)

    def repeat(state: tenacity.RetryCallState) -> bool:
        nonlocal limited
        error = state.outcome.exception() if state.outcome else None
        if not isinstance(error, StorageError):
            return False
        tries = int(error.__dict__.get("tries", NEVER))
        if once and tries == AS_POLICY:
            return False  # it may have been done
        limited += tries < AS_POLICY
        if tries == AS_POLICY or limited < tries:
            return True
        if not once:
            error.with_context(attempts=state.attempt_number)
        return False

    def stop(state: tenacity.RetryCallState) -> bool:
        if state.attempt_number >= policy.max_attempts:
            return True
        return deadline is not None and deadline.remaining() <= state.upcoming_sleep

    def note(state: tenacity.RetryCallState) -> None:
        if counter is not None:
            counter.retries += 1
        error = state.outcome.exception() if state.outcome else None
        _log.debug("attempt %d failed, next in %.2f s: %s", state.attempt_number, state.upcoming_sleep, error)
        if isinstance(error, DcpS3Error):
            _warn(error, policy)

    def give_up(state: tenacity.RetryCallState) -> Any:  # noqa: ANN401 -- always raises
        assert state.outcome is not None  # noqa: S101 -- tenacity calls this behind an attempt
        error = state.outcome.exception()
        assert isinstance(error, DcpS3Error)  # noqa: S101 -- nothing else is repeated
        if not once:
            error.with_context(attempts=state.attempt_number)
        if deadline is not None and deadline.remaining() <= state.upcoming_sleep:
            late = deadline.error(f"repeating a failing request ({error.message})")
            copy_context(error, late)
            raise late from error
        raise error

    return {"wait": wait, "retry": repeat, "stop": stop, "before_sleep": note, "retry_error_callback": give_up}


def backoff_s(policy: RetryPolicy, attempt: int) -> float:
    """A wait behind the ``attempt``-th try (from 1) for the loops that settle more than one request: full jitter."""
    ceiling = min(policy.max_wait_s, policy.initial_wait_s * 2.0 ** min(attempt, 30))
    return random.uniform(0.0, ceiling)  # noqa: S311 -- jitter


def longest_wait_s(config: S3Config) -> float:
    """Longest wait between two tries, seconds: within the stall limit, and with room for the try behind it."""
    return config.stall_limit_s / 2


def copy_context(source: DcpS3Error, target: DcpS3Error) -> DcpS3Error:
    """Give ``target`` the request facts of ``source`` that it lacks."""
    return target.with_context(
        rank=source.rank,
        operation=source.operation,
        bucket=source.bucket,
        key=source.key,
        part=source.part,
        status=source.status,
        code=source.code,
        request_id=source.request_id,
        attempts=source.attempts,
    )


def call(
    function: Callable[[], T],
    policy: RetryPolicy,
    *,
    deadline: Deadline | None = None,
    counter: Counter | None = None,
    longest_s: float = math.inf,
    once: bool = False,
) -> T:
    """Call ``function`` until it returns, fails for good, or the policy or the deadline ends it.

    Args:
        function: What may fail.
        policy: How often, and how soon.
        deadline: No wait outlasts it.
        counter: Counts the repetitions.
        longest_s: Longest wait between two tries, seconds, whatever the policy or the store says.
        once: Repeat only what was certainly not done, as the store refused its credentials: the failures with few ``tries``.

    Raises:
        StorageError: The last failure, with ``attempts`` filled in, unless ``once``: who settles it counts them.
        DeadlineExceededError: The next wait would have ended behind the deadline.
    """
    return tenacity.Retrying(**_options(policy, deadline, counter, longest_s, once=once))(function)


async def acall(
    function: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    *,
    deadline: Deadline | None = None,
    counter: Counter | None = None,
    longest_s: float = math.inf,
    once: bool = False,
) -> T:
    """:func:`call` for coroutine functions: each attempt has ended, and its connection is closed, before the next."""
    options = _options(policy, deadline, counter, longest_s, once=once)
    result: T = await tenacity.AsyncRetrying(**options)(function)
    return result


def unavailable(message: str) -> StorageError:
    """A failure that is repeated as the policy says."""
    return mark(StorageUnavailableError(message), tries=AS_POLICY)
