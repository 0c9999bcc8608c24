"""Kill one rank of a gloo group beside a broadcast, and see whether the other hears of it. Nothing of this package runs.

    python -m tests.fault.gloo_survivor 300

In about one trial of a hundred the survivor is not told that its peer's connection has closed, and waits for the group's
time-out. No storage backend can shorten that; a group with a time-out of its own can. docs/reliability.md says so.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 12.0
"""Of the group."""


def rank_main(rank: int, port: int, pipe: Any) -> None:
    """Gather once, then take part in DCP's kind of collectives until one fails."""
    limit = dt.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    dist.gather_object(rank, [None, None] if rank == 0 else None, dst=0)
    if rank == 0:
        pipe.send("gathered")
        time.sleep(pipe.recv())
    start = time.monotonic()
    try:
        dist.scatter_object_list([None], [1, 2] if rank == 0 else None, src=0)
        for _ in range(3):
            dist.gather_object(rank, [None, None] if rank == 0 else None, dst=0)
            dist.broadcast_object_list([1], src=0)
        error = "none"
    except RuntimeError as failure:
        error = "timed out" if "Timed out" in str(failure) else "connection closed"
    if rank == 0:
        pipe.send((time.monotonic() - start, error))
    os._exit(0)


def trial(context: Any) -> tuple[float, str]:
    """Run one group of two; return how long the survivor's collective took, in seconds, and how it ended."""
    master = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=rank_main, args=(rank, master.port, theirs)) for rank in range(2)]
    for process in ranks:
        process.start()
    assert ours.recv() == "gathered"
    time.sleep(random.choice([0.0, 0.0, 0.001, 0.003, 0.05]))
    before = random.random() < 0.5
    if before:
        os.kill(ranks[1].pid, signal.SIGKILL)
    ours.send(random.choice([0.0, 0.0005, 0.002, 0.01, 0.1]))
    if not before:
        time.sleep(random.random() * 0.003)
        os.kill(ranks[1].pid, signal.SIGKILL)
    seconds, error = ours.recv()
    for process in ranks:
        process.join()
    return seconds, error


def main() -> None:
    """Run as many trials as the command line says, and print a summary."""
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    ends: Counter[str] = Counter()
    longest = 0.0
    for _ in range(trials):
        seconds, error = trial(context)
        ends[error] += 1
        longest = max(longest, seconds)
    print(f"{trials} trials; the survivor's error: {dict(ends)}; longest wait {longest:.1f} of {TIMEOUT_S:g} s")


if __name__ == "__main__":
    main()
