"""Runs a function on several ranks: real processes in one gloo group, forked from a warm parent.

Importing torch takes a process seconds. So the ranks are forked from a server process that has imported it, and that
has no threads, no process group and no state of a test: a fork of it is as good as a new interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PRELOAD = (
    "torch",
    "torch._dynamo",  # by fully_shard, at its first call: one second
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "aiobotocore.session",
    "awscrt.checksums",
    "boto3",
)
"""What the parent of all ranks has imported. Not the package itself: a rank imports that as a user's process would."""

DUMP_LIMIT_S = 3.0


class RankError(Exception):
    """Stands for what a rank raised or returned, where that itself cannot be pickled. The text holds the traceback."""


class RankDied(Exception):
    """A rank ended without a result: killed, or by os._exit.

    Attributes:
        rank: Its rank.
        exitcode: Exit status; minus the signal's number when a signal ended it.
    """

    def __init__(self, rank: int, exitcode: int | None) -> None:
        super().__init__(rank, exitcode)
        self.rank = rank
        self.exitcode = exitcode

    def __str__(self) -> str:
        return f"rank {self.rank} ended without a result, exit code {self.exitcode}"


class RankTimeout(Exception):
    """A rank had not ended when its time was up, and was killed. The text says where each of its threads was.

    Attributes:
        rank: Its rank.
        threads: Tracebacks of its threads, as faulthandler writes them.
    """

    def __init__(self, rank: int, threads: str) -> None:
        super().__init__(rank, threads)
        self.rank = rank
        self.threads = threads

    def __str__(self) -> str:
        return f"rank {self.rank} did not end in time; its threads:\n{self.threads}"


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, *args)` in `world_size` processes at once and return, by rank, what each returned or raised.

    The processes are ordinary, non-daemonic ones, so DCP can start its checkpoint process in them. They take this
    process's environment as it is now, the working directory, and torchrun's variables (RANK, MASTER_ADDR, …). The store
    of the group lives here, so it outlives any rank. A rank ends as an interpreter does, threads joined; its result
    counts only once it has ended.

    Args:
        world_size: Number of processes.
        fn: A function that another process can import: a top-level one of a test module.
        args: Its further arguments; they cross by pickle.
        timeout_s: Limit for everything together, seconds; also the group's own time-out. Ranks that are still there are
            killed, with all that they have started.
        backend: Backend of the process group; None makes no group and starts no thread.
        env: Further environment variables.

    Returns:
        A list, by rank, of the return value or the exception (of any class, also BaseException). An exception's notes
        hold its traceback in the rank. `RankDied`, `RankTimeout` and `RankError` stand for what has neither.
    """
    call = pickle.dumps((fn, args))
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-s3-ranks-")))
        port = stack.enter_context(_store()) if backend is not None else 0
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        for number in range(world_size):
            variables = _variables(number, world_size, port)
            setting = _Setting(
                call=call,
                rank=number,
                world_size=world_size,
                backend=backend,
                timeout_s=timeout_s,
                environ={**os.environ, **(variables if backend is not None else {}), **(env or {})},
                threads=scratch / f"threads-{number}",
            )
            ranks.append(_Rank(setting))
        _collect(ranks, deadline)
        return [rank.outcome() for rank in ranks]


def run_ranks_ok(world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Do as `run_ranks`, and return the values; raise AssertionError with every traceback when any rank failed."""
    outcomes = run_ranks(world_size, fn, *args, **options)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failed:
        raise AssertionError("\n".join("".join(traceback.format_exception(failure)) for failure in failed))
    return outcomes


@dataclass
class _Setting:
    call: bytes
    rank: int
    world_size: int
    backend: str | None
    timeout_s: float
    environ: dict[str, str]
    threads: Path


@dataclass
class _Rank:
    """The parent's view of one rank."""

    setting: _Setting
    body: bytes | None = None
    timed_out: str | None = None
    process: Any = field(init=False)
    pipe: Any = field(init=False)

    def __post_init__(self) -> None:
        context = _context()
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(self.setting, theirs), name=f"rank {self.setting.rank}")
        self.process.start()
        theirs.close()

    def outcome(self) -> Any:
        if self.timed_out is not None:
            return RankTimeout(self.setting.rank, self.timed_out)
        if self.body is None:
            return RankDied(self.setting.rank, self.process.exitcode)
        return pickle.loads(self.body)

    def receive(self) -> None:
        """Take the result that waits in the pipe; a rank that died leaves it empty."""
        with contextlib.suppress(EOFError, OSError):
            self.body = self.pipe.recv_bytes()
        self.pipe.close()

    def kill(self) -> None:
        """Kill the rank and what it started, unless it ended as it should."""
        if self.process.exitcode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """Serve the group's store on a free port, which is given."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank. The agent's store is this process's: no rank serves it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _collect(ranks: list[_Rank], deadline: float) -> None:
    """Wait until every rank has ended, or time is up."""
    while True:
        pipes = {rank.pipe: rank for rank in ranks if not rank.pipe.closed}
        ends = {rank.process.sentinel: rank for rank in ranks if rank.process.exitcode is None}
        if not pipes and not ends:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            break
        for ready in multiprocessing.connection.wait([*pipes, *ends], timeout=left):
            if ready in pipes:
                pipes[ready].receive()
    late = [rank for rank in ranks if rank.process.exitcode is None]
    for rank in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    for rank in late:
        rank.timed_out = _dump(rank)


def _dump(rank: _Rank) -> str:
    """Return what the rank writes about its threads; it is asked already."""
    deadline = time.monotonic() + DUMP_LIMIT_S
    text = ""
    while time.monotonic() < deadline:
        before, text = text, rank.setting.threads.read_text() if rank.setting.threads.exists() else ""
        if text and text == before:
            break
        time.sleep(0.05)
    ended = "it had returned and did not exit\n" if rank.body is not None else ""
    return ended + (text or "(it did not say where its threads were)")


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.kill()
        rank.pipe.close()


def _main(setting: _Setting, pipe: Any) -> None:
    """Run one rank. Runs in its process."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(setting.environ)
    faulthandler.register(signal.SIGUSR1, file=setting.threads.open("w"), all_threads=True)
    try:
        body = pickle.dumps(_call(setting))
    except BaseException as error:
        body = _pickled(error)
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(body)
    pipe.close()


def _call(setting: _Setting) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn, args = pickle.loads(setting.call)
    if setting.backend is None:
        return fn(setting.rank, *args)
    dist.init_process_group(setting.backend, timeout=timedelta(seconds=setting.timeout_s))
    value = fn(setting.rank, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _pickled(error: BaseException) -> bytes:
    """Return the pickle of an error, or of a RankError in its place where it would not arrive."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in the rank:\n{text}")
    try:
        body = pickle.dumps(error)
        pickle.loads(body)
    except Exception as why:
        return pickle.dumps(RankError(f"{type(error).__name__} that does not pickle ({why}):\n{text}"))
    return body
