"""``python -m tests.soak``: the storm and the fuzzers for so many minutes, then the long forms of the fault tests; a report."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from tests.soak.fuzz import Tried, fuzz_for
from tests.soak.storm import Storm, storm

ROOT = Path(__file__).parents[2]
SUITES = (
    "test_crash_*.py",
    "test_race*.py",
    "test_commit_*.py",
    "test_leaks*.py",
    "test_real_servers.py",
    "test_*_fuzz.py",
)
"""Fault tests whose long form is asked for with DCP_S3_TEST_FULL=1."""
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"


def main() -> int:
    """Run, print the report, and return the exit status: 0 if nothing was lost."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument(
        "minutes", type=float, nargs="?", default=60.0, help="for storm (2/3) and fuzzers (1/3); default 60"
    )
    parser.add_argument("--no-suites", action="store_true", help="leave the long forms of the fault tests out")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of faults, kills and inputs")
    parser.add_argument("--json", type=Path, help="also write all values there")
    parser.add_argument("--update", type=Path, help="replace the table between the soak marks of this document")
    options = parser.parse_args()
    started = time.monotonic()
    seconds = options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="dcp-s3-soak-") as directory:
        print(f"storm: {seconds * 2 / 3:.0f} s, seed {options.seed}", flush=True)
        found = storm(seconds * 2 / 3, Path(directory), seed=options.seed)
        print(f"fuzzers: {seconds / 3:.0f} s", flush=True)
        tried = fuzz_for(seconds / 3, seed=options.seed)
        suites = [] if options.no_suites else [_suite(path, Path(directory)) for path in _suites()]
    table = _table(found, tried, suites, options, time.monotonic() - started)
    print(table)
    for what in found.lost:
        print(f"LOST: {what}")
    if options.json:
        values = {
            "storm": vars(found),
            "fuzz": {kind: vars(one) for kind, one in tried.items()},
            "suites": suites,
            "seed": options.seed,
        }
        options.json.write_text(json.dumps(values, indent=1))
    if options.update:
        text = options.update.read_text()
        between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
        if len(between.findall(text)) != 1:
            parser.error(f"{options.update} has no soak marks")
        options.update.write_text(between.sub(lambda _: f"{BEGIN}\n{table}\n{END}", text))
    return 1 if found.lost or any(suite["failed"] for suite in suites) else 0


def _suites() -> list[Path]:
    return sorted({path for name in SUITES for path in (ROOT / "tests" / "fault").glob(name)})


def _suite(path: Path, directory: Path) -> dict[str, Any]:
    """Run one test module in its long form."""
    print(f"{path.name}, long form", flush=True)
    report = directory / f"{path.stem}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", f"--junit-xml={report}", str(path)]
    command += ["-o", "junit_family=xunit1"]  # the form that holds what a test measured
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "DCP_S3_TEST_FULL": "1"}, check=False)
    tests = ET.parse(report).getroot().iter("testcase") if report.exists() else []
    outcomes = [[child.tag for child in test] for test in tests]
    skipped = sum("skipped" in tags for tags in outcomes)
    failed = sum("failure" in tags or "error" in tags for tags in outcomes)
    return {
        "name": path.name,
        "passed": len(outcomes) - failed - skipped,
        "failed": failed or int(done.returncode not in (0, 5)),
        "skipped": skipped,
        "seconds": round(time.monotonic() - started),
    }


def _table(
    found: Storm, tried: dict[str, Tried], suites: list[dict[str, Any]], options: argparse.Namespace, seconds: float
) -> str:
    gib = 1 << 30
    faults = sum(found.faults.values())
    rows = {
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}, seed {options.seed}",
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "length": f"{seconds / 60:.0f} min, of which {options.minutes:g} min storm and fuzzers",
        "load held": f"{found.commits} commits of 2 ranks ({found.bytes_saved / gib:.1f} GiB) in {found.rounds} rounds, "
        f"{found.loads} loads ({found.bytes_loaded / gib:.1f} GiB), {found.requests} requests",
        "faults survived": f"{faults} ({', '.join(f'{count} {name}' for name, count in found.faults.items())}); "
        f"{found.kills} ranks killed; {found.saves_failed} saves failed with an error on every rank",
        "inputs tried": ", ".join(f"{one.inputs} {kind}" for kind, one in tried.items())
        + f"; slowest {max(one.slowest_s for one in tried.values()):.2f} s, largest {max(one.largest_mib for one in tried.values()):.0f} MiB",
        "long fault tests": "; ".join(
            f"{one['name']}: {one['passed']} passed, {one['failed']} failed, {one['skipped']} skipped, {one['seconds']} s"
            for one in suites
        )
        or "left out",
        "**lost**": f"**{len(found.lost)}**",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


if __name__ == "__main__":
    sys.exit(main())
