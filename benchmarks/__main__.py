"""The command line of scripts/bench."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cases import CASES
from benchmarks.environment import describe
from benchmarks.peers import PEERS, is_installed
from benchmarks.report import markdown
from benchmarks.runner import Results, measure
from benchmarks.server import Target, sink

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

EPILOG = """
Without --endpoint an in-memory S3 server is built with the C compiler and run on the loopback interface; the cases that
slow it down on purpose need it. With --endpoint credentials and region come by AWS's conventions; what is written lies
under dcp-s3-bench-*/ and is deleted after each measurement.

Results are kept after each single measurement: a run that was stopped, or limited by --cases or --minutes, is continued by
the next one with the same file. All cases take their turn in each round, so that a run of any length has something of
each. --quick leaves out the peers that no target is set against. `scripts/bench --quick --minutes 25` makes a useful table
of every target; five whole rounds take about an hour and a half on two cores.
"""


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint", help="URL of your S3 store; default: a server of its own")
    parser.add_argument("--bucket", help="an existing bucket on it")
    parser.add_argument("--cases", default=".", metavar="REGEX", help="measure only these cases")
    parser.add_argument("--only", default=".", metavar="REGEX", help="measure only these subjects")
    parser.add_argument("--quick", action="store_true", help="only the subjects that targets are set against")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turn (default 5)")
    parser.add_argument("--minutes", type=float, default=600, metavar="N", help="begin nothing after so long")
    parser.add_argument("--size", type=float, default=2.0, metavar="GiB", help="of the dense state dict (default 2)")
    parser.add_argument("--json", type=Path, default=Path("bench-results/bench.json"), metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an .svg or .png; default: beside the JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="default: beside the JSON")
    parser.add_argument("--fresh", action="store_true", help="measure again what the JSON file holds already")
    parser.add_argument("--report-only", action="store_true", help="measure nothing; write plot and tables")
    parser.add_argument("--list", action="store_true", help="name the cases and their subjects")
    options = parser.parse_args()
    if (options.endpoint is None) != (options.bucket is None):
        parser.error("--endpoint and --bucket go together")
    if options.rounds < 1 or options.size <= 0:
        parser.error("--rounds and --size must be positive")
    return options


def main() -> int:
    """Measure and report; returns the exit code."""
    options = parse_options()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that server and jobs end too
    if options.list:
        for case in CASES:
            marked = (name if name in case.quick else f"({name})" for name in case.subjects)
            print(f"{case.name:14} {case.title}\n{'':14} {', '.join(marked)}")
        print("\nin brackets: left out by --quick")
        return 0
    endpoint = options.endpoint or "s3sink on the loopback interface"
    try:
        results = Results(options.json, gib=options.size, endpoint=endpoint, fresh=options.fresh)
        if not options.report_only:
            results.adopt(describe())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.report_only:
        start = time.monotonic()
        run(options, results)
        print(f"measured in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    table = options.markdown or options.json.with_suffix(".md")
    plot = options.plot or options.json.with_suffix(".svg")
    text = markdown(results)
    table.write_text(text)
    print(f"\n{text}\n{options.json}, {table}")
    try:
        from benchmarks.plot import draw
    except ModuleNotFoundError as error:
        print(f"no plot: {error}", file=sys.stderr)
    else:
        draw(results, plot)
        print(plot)
    return 0


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure what is asked for and not there yet."""
    for name in PEERS:
        if not is_installed(name):
            print(f"{name} is not installed ({PEERS[name].needs}): left out", flush=True)
    with endpoint_of(options) as target:
        selection = {}
        for case in CASES:
            if not re.search(options.cases, case.name):
                continue
            if case.needs_sink and not target.local:
                print(f"{case.name}: needs the server that --endpoint replaces: left out", flush=True)
                continue
            subjects = case.quick if options.quick else case.subjects
            selection[case] = [name for name in subjects if re.search(options.only, name) and is_installed(name)]
        if not measure(selection, options.rounds, target, results, minutes=options.minutes):
            print(f"the {options.minutes:g} minutes are over; the same command goes on from here", flush=True)


def endpoint_of(options: argparse.Namespace) -> AbstractContextManager[Target]:
    """The store to measure against."""
    if options.endpoint is None:
        return sink(preallocate_mib=int(options.size * 1024 * 1.1))
    prefix = f"dcp-s3-bench-{uuid.uuid4().hex[:12]}"
    return nullcontext(Target(endpoint=options.endpoint.rstrip("/"), bucket=options.bucket, prefix=prefix, local=False))


if __name__ == "__main__":
    sys.exit(main())
