"""The figures to reach, computed from the measurements: each a value, its spread over the rounds, and its limit."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.runner import Results

S3_PEERS = ("s3torchconnector", "s3torchconnector-4", "fsspec-s3fs", "torch.save-boto3", "multi-storage-client")
DCP_PEERS = tuple(name for name in S3_PEERS if name != "torch.save-boto3")
"""Those that save through torch.distributed.checkpoint, and pay for its planning as we do."""
OURS = "dcp_s3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One target and what was measured.

    Attributes:
        name: What it is about.
        value: Ratio of medians, or a median.
        low: Smallest of one round.
        high: Largest of one round.
        limit: What ``value`` must not exceed, or must reach with ``at_least``.
        at_least: Larger is better.
        unit: Of value and limit.
        detail: The measured values behind it.
        rounds: How many rounds it is from.
    """

    name: str
    value: float
    low: float
    high: float
    limit: float
    at_least: bool = False
    unit: str = "x"
    detail: str = ""
    rounds: int

    @property
    def met(self) -> bool:
        """Whether the limit is kept."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def share(self, value: float) -> float:
        """``value`` as a share of what is allowed: 1 is the limit, less is better."""
        return self.limit / value if self.at_least else value / self.limit


class _Figures:
    def __init__(self, results: Results) -> None:
        self._results = results
        self.found: list[Figure] = []

    def series(self, case: str, subject: str, key: str) -> list[float]:
        return [values[key] for values in self._results.values(case, subject) if key in values]

    def best(self, case: str, key: str, peers: tuple[str, ...] = S3_PEERS) -> str | None:
        """The peer with the lowest median."""
        measured = {name: found for name in peers if (found := self.series(case, name, key))}
        return min(measured, key=lambda name: statistics.median(measured[name])) if measured else None

    def absolute(self, name: str, case: str, key: str, limit: float, unit: str) -> None:
        values = self.series(case, OURS, key)
        if values:
            middle = statistics.median(values)
            self.found.append(
                Figure(
                    name=name,
                    value=middle,
                    low=min(values),
                    high=max(values),
                    limit=limit,
                    unit=unit,
                    rounds=len(values),
                )
            )

    def ratio(
        self,
        name: str,
        ours: tuple[str, str],
        theirs: tuple[str, str | None, str],
        limit: float,
        *,
        inverse: bool = False,
        base: float = 0.0,
        unit: str = "s",
    ) -> None:
        """Ours over theirs (theirs over ours with ``inverse``), each less ``base``."""
        case, subject, key = theirs
        if subject is None:
            return
        mine = [value - base for value in self.series(ours[0], OURS, ours[1])]
        other = [value - base for value in self.series(case, subject, key)]
        if not mine or not other:
            return
        divide: Callable[[float, float], float] = (lambda a, b: b / a) if inverse else (lambda a, b: a / b)
        pairs = [divide(a, b) for a, b in zip(mine, other, strict=False) if min(a, b) > 0]
        value = divide(max(statistics.median(mine), 1e-9), max(statistics.median(other), 1e-9))
        shown = f"{_number(statistics.median(mine) + base)} {unit}, {subject} {_number(statistics.median(other) + base)} {unit}"
        self.found.append(
            Figure(
                name=name,
                value=value,
                low=min(pairs, default=value),
                high=max(pairs, default=value),
                limit=limit,
                at_least=inverse,
                detail=shown,
                rounds=min(len(mine), len(other)),
            )
        )


def figures(results: Results) -> list[Figure]:
    """All targets for which there are measurements, in the order in which a save and a load meet them."""
    f = _Figures(results)
    f.ratio(
        "save, dense: wall against the best S3 peer",
        ("dense", "save_wall_s"),
        ("dense", f.best("dense", "save_wall_s"), "save_wall_s"),
        0.5,
    )
    f.absolute("save, dense: client CPU", "dense", "save_cpu_s_per_gib", 0.50, "s/GiB")
    f.absolute("save, dense: extra peak memory", "dense", "save_peak_mib", 96, "MiB")
    f.ratio(
        "load, dense: wall against the best S3 peer",
        ("dense", "load_wall_s"),
        ("dense", f.best("dense", "load_wall_s"), "load_wall_s"),
        0.5,
    )
    f.absolute("load, dense: client CPU, every byte verified", "dense", "load_cpu_s_per_gib", 0.55, "s/GiB")
    f.absolute("load, dense: extra peak memory", "dense", "load_peak_mib", 256, "MiB")
    for way, text in (("put", "upload"), ("get", "download")):
        wall, cpu = f"{way}_wall_s", f"{way}_cpu_s_per_gib"
        f.ratio(
            f"data plane, {text}: throughput against raw sockets and CRC",
            ("plane", wall),
            ("plane", "raw+crc", wall),
            0.75,
            inverse=True,
        )
        f.ratio(
            f"data plane, {text}: CPU against raw sockets and CRC",
            ("plane", cpu),
            ("plane", "raw+crc", cpu),
            1.4,
            unit="s/GiB",
        )
    f.ratio(
        "async_save, later: blocked against copy_ into touched buffers",
        ("dense", "later_blocked_s"),
        ("dense", OURS, "copy_s"),
        1.5,
    )
    f.ratio(
        "async_save, later: blocked against DCP's DefaultStager",
        ("dense", "later_blocked_s"),
        ("dense", OURS, "default_stager_s"),
        0.5,
    )
    f.absolute("async_save of 5,000 small DTensors, later: blocked", "staging", "later_blocked_s", 0.10, "s")
    for kind, limit in (("thread", 0.6), ("process", 0.8)):
        case = f"steps-{kind}"
        f.ratio(
            f"step during a save, {kind}: slow-down above 1 against s3torchconnector",
            (case, "mean_slowdown"),
            (case, "s3torchconnector", "mean_slowdown"),
            limit,
            base=1.0,
            unit="x",
        )
        f.ratio(
            f"step during a save, {kind}: time to commit against s3torchconnector",
            (case, "commit_s"),
            (case, "s3torchconnector", "commit_s"),
            1.0,
        )
    f.absolute("step during a save at 0.3 GiB/s, thread: mean slow-down", "paced-thread", "mean_slowdown", 1.20, "x")
    f.absolute("step during a save at 0.3 GiB/s, process: mean slow-down", "paced-process", "mean_slowdown", 1.05, "x")
    for way in ("save", "load"):
        key = f"{way}_wall_s"
        for peers, text in ((S3_PEERS, "the best S3 peer"), (DCP_PEERS, "the best S3 peer that uses DCP")):
            theirs = ("small", f.best("small", key, peers), key)
            f.ratio(f"{way}, small: wall against {text}", ("small", key), theirs, 0.5)
    stream = ("latency", "torch.save-put", "save_wall_s")
    f.ratio(
        "slow connections: write throughput against torch.save and one PutObject",
        ("latency", "save_wall_s"),
        stream,
        10,
        inverse=True,
    )
    f.ratio(
        "slow connections: async_save blocks less than torch.save and one PutObject",
        ("latency", "later_blocked_s"),
        stream,
        50,
        inverse=True,
    )
    f.ratio(
        "slow connections: async_save blocks less than our own save",
        ("latency", "later_blocked_s"),
        ("latency", OURS, "save_wall_s"),
        6,
        inverse=True,
    )
    records = f"{int(max(f.series('records', OURS, 'records'), default=0)):,}"
    f.absolute("last part acknowledged to checkpoint visible", "commit", "round_trips", 4, "round trips")
    f.ratio(
        f"finish of {records} records against torch's on /dev/shm",
        ("records", "finish_1_s"),
        ("records", "files", "finish_1_s"),
        1.0,
    )
    f.ratio(
        "finish of all records against a quarter of them",
        ("records", "finish_1_s"),
        ("records", OURS, "finish_4_s"),
        4.4,
    )
    f.ratio(
        f"read_metadata of {records} records against torch's on /dev/shm",
        ("records", "read_1_s"),
        ("records", "files", "read_1_s"),
        0.5,
    )
    f.ratio(
        "read_metadata of all records against a quarter of them",
        ("records", "read_1_s"),
        ("records", OURS, "read_4_s"),
        4.4,
    )
    return f.found


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
