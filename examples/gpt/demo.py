#!/usr/bin/env python3
"""The main job of dcp_s3, on real input: train, save while training goes on, die in the middle of an upload, resume.

scripts/demo                                   with a SeaweedFS server of its own
scripts/demo --endpoint URL --bucket BUCKET    on any S3 store; credentials by AWS's conventions
"""
# ruff: noqa: S603, T201, TID251 -- a program, which starts servers and says what it does

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError
from bucket import Bucket
from job import Job, JobError
from scratch import SEAWEEDFS, Scratch

from dcp_s3 import DcpS3Error, collect_garbage, list_checkpoints, verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SYNC_SAVES = 3
ASYNC_SAVES = 4
"""Of each kind the first is not measured: it opens connections, and starts DCP's checkpoint processes."""
FIRST_RANKS = 2


class DemoError(Exception):
    """Something is not as it should be."""


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What the kill has left in the bucket."""

    committed: list[str]
    """Names of the checkpoints that were committed, in order."""
    uploads: list[str]
    """Paths of the uploads that were open."""


def main() -> int:
    """Run the demo; return its exit code."""
    options = parse_options()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with Scratch() as scratch:
            if options.bucket is None:
                demonstrate(embedded_store(scratch.path / "seaweedfs"), scratch.path, options)
            else:
                with given_store(options.endpoint, options.bucket) as bucket:
                    demonstrate(bucket, scratch.path, options)
    except (DemoError, JobError, DcpS3Error, BotoCoreError, ClientError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument(
        "--endpoint", metavar="URL", help="S3 endpoint (default: a SeaweedFS server, started for the demo)"
    )
    parser.add_argument("--bucket", help="an existing bucket; without --endpoint, where AWS's conventions point")
    parser.add_argument(
        "--resume-ranks", type=int, default=3, help="ranks after the kill (default 3; before it there are 2)"
    )
    parser.add_argument("--small", action="store_true", help="a smaller model: sooner over, less to see")
    options = parser.parse_args()
    if options.endpoint is not None and options.bucket is None:
        parser.error("--endpoint needs --bucket")
    if options.resume_ranks < 1:
        parser.error("--resume-ranks must be 1 or more")
    if options.endpoint is not None:
        os.environ["AWS_ENDPOINT_URL_S3"] = options.endpoint
    options.endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return options


def chapter(text: str) -> None:
    """Announce what comes."""
    print(f"\n== {text}", flush=True)


def ranks(count: int) -> str:
    """Say how many ranks."""
    return f"{count} rank{'s'[: count != 1]}"


def embedded_store(directory: Path) -> Bucket:
    """Start SeaweedFS, point this process and its children at it, and make a bucket."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            del os.environ[name]
    command = [sys.executable, str(SEAWEEDFS), "start", "--dir", str(directory)]
    started = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if started.returncode:
        raise DemoError("SeaweedFS did not start")
    facts = dict(line.split("=", 1) for line in started.stdout.splitlines())
    os.environ.update({name: value for name, value in facts.items() if name.startswith("AWS_")})
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    bucket = Bucket(facts["AWS_ENDPOINT_URL_S3"], "demo", "run/")
    bucket.create()
    chapter(f"The store is a SeaweedFS server of our own at {facts['AWS_ENDPOINT_URL_S3']}; the run is {bucket.url}")
    return bucket


@contextmanager
def given_store(endpoint: str | None, name: str) -> Iterator[Bucket]:
    """Use a place of its own in a bucket that is there, and empty it at the end."""
    bucket = Bucket(endpoint, name, f"dcp-s3-demo-{uuid.uuid4().hex[:8]}/")
    bucket.sizes()  # the bucket must be there
    chapter(f"The store is {endpoint or 'AWS S3'}; everything is below {bucket.url}, and removed at the end")
    try:
        yield bucket
    except BaseException:
        with suppress(BotoCoreError, ClientError):  # what went wrong first is what has to be told
            bucket.empty()
        raise
    bucket.empty()


def demonstrate(bucket: Bucket, scratch: Path, options: argparse.Namespace) -> None:
    """Tell the whole story."""
    size, every = ("small", 5) if options.small else ("demo", 8)
    if options.small:
        os.environ["DCP_S3_PART_BYTES"] = "5 MiB"  # several parts, of the smaller shards too
    common = [bucket.url, f"--size={size}", f"--save-every={every}"]

    chapter(f"Training on {ranks(FIRST_RANKS)}, from the start. dcp.save at first, then dcp.async_save in a process")
    until = SYNC_SAVES * every
    with Job(
        scratch / "first", FIRST_RANKS, [*common, "--mode=process", f"--sync-until={until}", "--steps=1000000"]
    ) as first:
        first.wait_for(lambda: len(saves(first, "process")) >= ASYNC_SAVES, f"{ASYNC_SAVES} async saves were committed")
        killed = kill_in_upload(first, bucket)

    resumed_from = killed.committed[-1]
    chapter(f"Training on {ranks(options.resume_ranks)}, from {resumed_from}. dcp.async_save in a thread")
    last_step = step_of(resumed_from) + ASYNC_SAVES * every
    with Job(scratch / "second", options.resume_ranks, [*common, "--resume", f"--steps={last_step}"]) as second:
        second.finish()

    chapter("What there is now")
    digest = check_resumed(first, second, step_of(resumed_from))
    checkpoints = check_bucket(bucket, f"step-{last_step:06d}")
    show_garbage(bucket, killed)
    show_table(bucket, [saves(first, "sync"), saves(first, "process"), saves(second, "thread")])
    print(f"{checkpoints} checkpoints, {ranks(FIRST_RANKS)} before the kill and {ranks(options.resume_ranks)} after it")
    print(f"{resumed_from} was resumed bit for bit: SHA-256 {digest[:16]}… of all parameters and optimizer state")


def kill_in_upload(job: Job, bucket: Bucket) -> Killed:
    """Kill the job with SIGKILL while a multipart upload of its next checkpoint is open."""
    expected = 1 + 2 * FIRST_RANKS
    job.wait_for(lambda: len(job.processes()) == expected, f"{expected} processes were noted")
    while True:
        job.wait_for(lambda: any(open_uploads(bucket).values()), "an open upload was seen", poll_s=0.01)
        # Seen is not yet caught: it may be completed while the signals are on their way. So the job is stopped first, and
        # killed if an upload is still open after the requests that were under way.
        job.freeze()
        time.sleep(0.3)
        uploads = open_uploads(bucket)
        committed = committed_names(bucket)
        if any(uploads.values()) and not {path.split("/")[0] for path in uploads} & set(committed):
            break
        job.thaw()
    names = ", ".join(str(process) for process in job.processes())
    job.kill()
    chapter(f"Killed with SIGKILL in the middle of {next(iter(uploads)).split('/')[0]}: {names}")
    for path, parts in uploads.items():
        print(f"   open upload {path}: {len(parts)} of its parts are there, {sum(parts) / 2**20:.1f} MiB")
    print(f"   committed: {', '.join(committed)}")
    return Killed(committed=committed, uploads=list(uploads))


def open_uploads(bucket: Bucket) -> dict[str, list[int]]:
    """Return the multipart uploads that are open, with the sizes of the parts that each has, in bytes."""
    return {path: bucket.parts(path, upload_id) for path, upload_id in bucket.uploads().items()}


def committed_names(bucket: Bucket) -> list[str]:
    """Return the names of the committed checkpoints, in order."""
    return [checkpoint.url.rsplit("/", 1)[-1] for checkpoint in list_checkpoints(bucket.url)]


def step_of(name: str) -> int:
    """Return the step of a checkpoint."""
    return int(name.removeprefix("step-"))


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One committed save."""

    step: int
    mode: str
    blocked_s: float
    """How long the call held the training up."""
    waited_s: float
    """How long the training was held up before, because the last save was not committed."""
    committed_s: float
    """From the call to the commit."""
    steps_meanwhile: int
    """Training steps that ended in this time."""


def saves(job: Job, mode: str) -> list[Saved]:
    """Return the job's committed saves of one mode."""
    noted = job.events()
    committed = {event["step"]: (index, event) for index, event in enumerate(noted) if event["event"] == "committed"}
    found = []
    for index, event in enumerate(noted):
        if event["event"] == "blocked" and event["mode"] == mode and event["step"] in committed:
            end, commit = committed[event["step"]]
            found.append(
                Saved(
                    step=event["step"],
                    mode=mode,
                    blocked_s=event["blocked_s"],
                    waited_s=event["waited_s"],
                    committed_s=commit["seconds"],
                    steps_meanwhile=sum(other["event"] == "step" for other in noted[index:end]),
                )
            )
    return found


def check_resumed(first: Job, second: Job, step: int) -> str:
    """Compare what was loaded with what was saved, by the digests that both jobs took; return the digest."""
    (loaded,) = second.events("loaded")
    (saved,) = (event["sha256"] for event in first.events("blocked") if event["step"] == step)
    if loaded["step"] != step:
        raise DemoError(f"step {loaded['step']} was resumed, but {step} is the last that was committed")
    if not saved == loaded["saved_sha256"] == loaded["loaded_sha256"]:
        raise DemoError(f"step {step} was saved with the digest {saved} and loaded as {loaded}")
    return str(saved)


def check_bucket(bucket: Bucket, expected: str) -> int:
    """Read the last checkpoint back and compare every byte with its checksum; return how many checkpoints there are."""
    names = committed_names(bucket)
    if names[-1] != expected:
        raise DemoError(f"{expected} should be the last checkpoint, but {names[-1]} is")
    report = verify(f"{bucket.url}/{expected}", deep=True)
    if not report.ok:
        raise DemoError(f"{expected} is not whole: {'; '.join(report.problems)}")
    print(f"   verify: {expected} is whole, {report.checked_bytes / 2**20:.1f} MiB read and compared")
    return len(names)


def show_garbage(bucket: Bucket, killed: Killed) -> None:
    """Show that what the kill left behind is known for what it is."""
    report = collect_garbage(bucket.url, older_than_s=0, no_writer_runs=True)
    known = {key.removeprefix(bucket.prefix) for key in (*report.aborted, *report.removed)}
    if missed := set(killed.uploads) - known:
        raise DemoError(f"collect_garbage does not know {', '.join(sorted(missed))}")
    print(
        f"   collect_garbage (a dry run): {len(report.aborted)} open uploads and {len(report.removed)} objects are of no"
        f" checkpoint, {report.live} objects are"
    )


def show_table(bucket: Bucket, measured: list[list[Saved]]) -> None:
    """Print what a save costs, by kind."""
    print("\nMedians; the first save of each kind is not counted:\n")
    print(f"{'':<20}{'saves':>6}{'blocked s':>11}{'waited s':>10}{'commit s':>10}{'MiB':>8}{'GiB/s':>7}{'steps':>7}")
    names = {"sync": "dcp.save", "process": "async_save, process", "thread": "async_save, thread"}
    for group in measured:
        kept = group[1:]
        blocked_s = statistics.median(save.blocked_s for save in kept)
        waited_s = statistics.median(save.waited_s for save in kept)
        committed_s = statistics.median(save.committed_s for save in kept)
        steps = statistics.median(save.steps_meanwhile for save in kept)
        nbytes = statistics.median(sum(bucket.sizes(f"step-{save.step:06d}/").values()) for save in kept)
        print(
            f"{names[kept[0].mode]:<20}{len(kept):>6}{blocked_s:>11.3f}{waited_s:>10.3f}{committed_s:>10.2f}"
            f"{nbytes / 2**20:>8.1f}{nbytes / committed_s / 2**30:>7.3f}{steps:>7g}"
        )
    print("\nblocked: training stood still during the call; waited: before it, for the last save to be committed;")
    print("commit: from the call to the commit; steps: training steps done in that time.\n")


if __name__ == "__main__":
    sys.exit(main())
