"""Runs every subject of every case in turn, each in fresh processes, and keeps what they measured in a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers import PEERS, REGION
from benchmarks.worker import RESULT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.cases import Case
    from benchmarks.server import Target

FORMAT = 1
JOB_LIMIT_S = 300.0
"""Longest time that one subject may take for one round of one case, seconds."""
MOST_FAILURES = 2
"""A subject that has failed so often in one run is not tried again."""
_SUMMED = ("_cpu_s_per_gib",)
"""Ends of the names of values that are summed over ranks; of all others the largest counts."""


class Results:
    """The measurements so far, in a JSON file that is rewritten after each one.

    Args:
        path: The file; measurements that it holds already are kept.
        gib: Size of the dense state dict.
        endpoint: What was measured against.
        fresh: Forget what the file holds.

    Raises:
        ValueError: The file was measured with another size, or against another endpoint.
    """

    def __init__(self, path: Path, *, gib: float, endpoint: str, fresh: bool) -> None:
        self._path = path
        self.settings: dict[str, Any] = {"format": FORMAT, "gib": gib, "endpoint": endpoint}
        self.environment: dict[str, Any] = {}
        self.runs: list[dict[str, Any]] = []
        if path.exists() and not fresh:
            kept = json.loads(path.read_text())
            if kept["settings"] != self.settings:
                raise ValueError(
                    f"{path} holds results of {kept['settings']}, not {self.settings}; --fresh begins anew"
                )
            self.environment, self.runs = kept["environment"], kept["runs"]

    def adopt(self, environment: dict[str, Any]) -> None:
        """Go on in this environment. What was measured of dcp_s3 before its source changed is dropped.

        Raises:
            ValueError: The machine, or a package, is not the one that the results so far are from.
        """
        mine = {"date", "dcp_s3", "source"}
        changed = [name for name in environment if name not in mine and self.environment.get(name) != environment[name]]
        if self.runs and changed:
            raise ValueError(f"{self._path} holds results of another {', '.join(changed)}; --fresh begins anew")
        if self.runs and self.environment.get("source") != environment["source"]:
            print("dcp_s3 has changed since: its results are dropped, those of the peers are kept", flush=True)
            self.runs = [run for run in self.runs if run["subject"] != "dcp_s3"]
        self.environment = environment

    def values(self, case: str, subject: str) -> list[dict[str, float]]:
        """What was measured, one round after another."""
        return [
            run["values"] for run in self.runs if (run["case"], run["subject"]) == (case, subject) and "values" in run
        ]

    def errors(self) -> list[dict[str, Any]]:
        """The runs that failed, of which no later one has succeeded."""
        return [run for run in self.runs if "error" in run and not self.values(run["case"], run["subject"])]

    def add(self, case: str, subject: str, outcome: dict[str, Any]) -> None:
        """Note one run."""
        self.runs.append(
            {"case": case, "subject": subject, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **outcome}
        )
        self.write()

    def write(self) -> None:
        """Write the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".part")
        content = {"settings": self.settings, "environment": self.environment, "runs": self.runs}
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(self._path)


def measure(
    selection: Mapping[Case, Sequence[str]], rounds: int, target: Target, results: Results, *, minutes: float
) -> bool:
    """Measure the subjects of each case in turn, round after round, until each has been measured ``rounds`` times.

    Args:
        selection: The cases, and the subjects of each.
        rounds: How often.
        target: Where to.
        results: Grows; what it holds already is not measured again.
        minutes: Begin no further case after so long.

    Returns:
        Whether it came to the end before the time was over.
    """
    end = time.monotonic() + 60 * minutes
    failures: Counter[tuple[str, str]] = Counter()
    for number in range(rounds):
        for case, subjects in selection.items():
            missing = [
                subject
                for subject in subjects
                if len(results.values(case.name, subject)) <= number and failures[case.name, subject] < MOST_FAILURES
            ]
            if missing and time.monotonic() > end:
                return False
            if target.local:
                target.set_pace(case.throttle)
            for subject in missing:
                start = time.monotonic()
                outcome = run_job(case, subject, results.settings["gib"] * case.scale, target)
                results.add(case.name, subject, outcome)
                failures[case.name, subject] += "error" in outcome
                seconds = time.monotonic() - start
                print(
                    f"  round {number + 1}, {case.name}, {subject}: {_summary(outcome)} [{seconds:.0f} s]", flush=True
                )
    return True


def run_job(case: Case, subject: str, gib: float, target: Target) -> dict[str, Any]:
    """Run one round of one subject.

    Returns:
        ``{"values": …}``, or ``{"error": text}``.
    """
    spec = {"case": case.name, "subject": subject, "gib": gib, "group": case.group, "target": asdict(target)}
    environment = _environment(target)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, "-m", "benchmarks.worker", json.dumps(spec)]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="dcp-s3-bench-") as directory:
        outs, errs = ([Path(directory, f"{name}{rank}") for rank in range(case.world)] for name in ("out", "err"))
        try:
            for rank in range(case.world):
                ranked = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.world)}
                with outs[rank].open("wb") as out, errs[rank].open("wb") as err:
                    processes.append(
                        subprocess.Popen(command, stdout=out, stderr=err, env=ranked, start_new_session=True)
                    )
            late = _wait(processes)
        finally:
            _end(processes)
        found = [
            line.removeprefix(RESULT)
            for path in outs
            for line in path.read_text(errors="replace").splitlines()
            if line.startswith(RESULT)
        ]
        if len(found) == case.world:
            return {"values": _merge([json.loads(line) for line in found])}
        _clean(subject, target)
        tails = " / ".join(filter(None, map(_last_line, errs)))
        return {"error": f"given up after {JOB_LIMIT_S:.0f} s" if late else tails[:500]}


def _clean(subject: str, target: Target) -> None:
    """Delete what a failed job has left, as far as the endpoint lets us."""
    try:
        if subject in PEERS:
            PEERS[subject](target, distributed=False).clear()
        else:
            target.clear()
    except Exception as error:  # noqa: BLE001 -- whatever the client raises; the job's own error is what counts
        print(f"  could not delete what it left below {target.url('')}: {error}", flush=True)


def _wait(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Wait until all have ended, one has failed, or time is over. Returns whether it is."""
    end = time.monotonic() + JOB_LIMIT_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() >= end:
            return True
        if any(process.poll() for process in processes):
            return False
        time.sleep(0.05)
    return False


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, and DCP's checkpoint processes with it: each job is a session of its own."""
    for process in processes:
        if process.poll() != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(target: Target) -> dict[str, str]:
    """Environment of a measured process. A user's own endpoint keeps the user's credentials."""
    ours = {
        "AWS_ENDPOINT_URL": target.endpoint,
        "AWS_ENDPOINT_URL_S3": target.endpoint,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    if target.local:
        ours |= {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
    kept = {name: value for name, value in os.environ.items() if not (target.local and name.startswith("AWS_"))}
    return kept | ours


def _merge(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: (sum if name.endswith(_SUMMED) else max)(values[name] for values in ranks) for name in ranks[0]}


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _summary(outcome: dict[str, Any]) -> str:
    if "error" in outcome:
        return f"FAILED: {outcome['error']}"
    shown = ("wall_s", "blocked_s", "slowdown", "_trips", "finish_1_s", "read_1_s")
    return ", ".join(f"{name} {value:.2f}" for name, value in outcome["values"].items() if name.endswith(shown))
