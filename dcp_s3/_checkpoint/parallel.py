"""Small requests, several at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

THREADS: Final = 8
"""Enough to hide their latency, few enough for any store."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item], *, threads: int = THREADS) -> list[Result]:
    """Do ``work``, which may be repeated, for each item; results in order. After an error, which is raised, no more are begun.

    Args:
        work: Small requests.
        items: What for.
        threads: How many at a time, at most.
    """
    items = list(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="dcp_s3-requests") as pool:
        try:
            futures = [pool.submit(work, item) for item in items]
        except RuntimeError:  # the interpreter ends, waits for a save, and starts no more threads of a pool
            pool.shutdown(wait=True, cancel_futures=True)
            return [work(item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
