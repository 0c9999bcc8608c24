"""The tools on real stores: what real saves leave, real damage, real clocks, real pages, and the program itself."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import (
    AccessDeniedError,
    CheckpointNotFoundError,
    RetryPolicy,
    StorageUnavailableError,
    abort_stale_uploads,
    collect_garbage,
    list_checkpoints,
    verify,
)
from dcp_s3._checkpoint.format.index import Index
from tests.integration.support import wait_until, writer

MIB = 1 << 20


def _state(value: int) -> dict[str, object]:
    return {"weight": torch.full((2 * MIB,), float(value)), "bias": torch.arange(9.0) + value, "step": value}


def _save(bucket, path: str, value: int = 1) -> None:
    dcp.save(_state(value), storage_writer=writer(bucket, path, part_bytes=5 * MIB), no_dist=True)


def _data_of(bucket, path: str) -> str:
    (key,) = (key for key in bucket.keys(f"{path}/data/") if key.endswith(".distcp"))
    return key


def _stock(bucket, path: str, directory) -> None:
    dcp.save(_state(1), checkpoint_id=directory, no_dist=True)
    for file in directory.iterdir():
        bucket.put(f"{path}/{file.name}", file.read_bytes())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_real_checkpoints_are_listed(endpoint, bucket, tmp_path) -> None:
    """Saves of ours and of FileSystemWriter, by number, with size and state; a replaced one is listed once, as it is now."""
    for step in (10, 9):
        _save(bucket, f"run/step-{step}")
    _save(bucket, "run/step-9", 2)
    _stock(bucket, "run/stock", tmp_path)
    bucket.put("run/step-11/data/0123456789abcdef/__0_0.distcp", b"never committed")
    nine, ten, stock = list_checkpoints(bucket.url("run"), config=endpoint.config())
    assert [info.url for info in (nine, ten, stock)] == [bucket.url(f"run/{n}") for n in ("step-9", "step-10", "stock")]
    assert [info.state for info in (nine, ten, stock)] == ["committed", "committed", "stock"]
    index = Index.from_bytes(bucket.get(f"run/step-9/index-{nine.write_id}.safetensors.gz"), source="index")
    assert nine.bytes == index.record_bytes + sum(entry.size for entry in index.objects)
    assert nine.bytes > 8 * MIB
    assert nine.committed_at >= ten.committed_at


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_real_checkpoints_are_good(endpoint, bucket, tmp_path) -> None:
    """A save verifies, shallow and deep, every byte of it; a stock one is good with a note."""
    _save(bucket, "run")
    _stock(bucket, "stock", tmp_path)
    shallow, deep = (verify(bucket.url("run"), deep=deep, config=endpoint.config()) for deep in (False, True))
    assert (shallow.ok, shallow.problems, shallow.notes) == (True, (), ())
    assert (deep.ok, deep.problems, deep.notes) == (True, (), ())
    assert deep.checked_bytes == len(bucket.get("run/.metadata")) + len(bucket.get(_data_of(bucket, "run")))
    stock = verify(bucket.url("stock"), deep=True, config=endpoint.config())
    assert stock.ok
    assert "content not verifiable" in stock.notes[0]


def test_real_damage_is_found(endpoint, bucket) -> None:
    """One flipped bit, a truncated and a missing object, each named; and no checkpoint is an error."""
    _save(bucket, "run")
    key = _data_of(bucket, "run")
    good = bucket.get(key)
    flipped = bytearray(good)
    flipped[6 * MIB] ^= 0x10
    bucket.put(key, bytes(flipped))
    (problem,) = verify(bucket.url("run"), deep=True, config=endpoint.config()).problems
    assert problem.startswith(f"{bucket.url(key)} part 2 (bytes {5 * MIB}-{len(good) - 1}) has CRC32C ")
    assert "(concerns weight" in problem
    bucket.put(key, good[:-1])
    assert any(
        f"has {len(good) - 1} bytes, not the {len(good)}" in problem
        for problem in verify(bucket.url("run"), config=endpoint.config()).problems
    )
    bucket.delete(key)
    (problem,) = verify(bucket.url("run"), config=endpoint.config()).problems
    assert problem.startswith(f"{bucket.url(key)} is missing (concerns ")
    with pytest.raises(CheckpointNotFoundError):
        verify(bucket.url("run/step-1"), config=endpoint.config())


def test_garbage_of_real_saves(endpoint, bucket) -> None:
    """Orphans and a stale upload go, by the store's clock; live checkpoints load bit for bit, foreign objects stay."""
    for step in (1, 2):
        _save(bucket, f"run/step-{step}", step)
    live = bucket.keys("run/")
    orphans = [
        "run/step-1/data/0123456789abcdef/__0_0.distcp",
        "run/step-3/data/0123456789abcdef/__1_0.distcp",
        "run/step-3/index-" + "ab" * 16 + ".safetensors.gz",
    ]
    foreign = ["run/notes.txt", "run/step-1/data/readme", "run2/data/0123456789abcdef/__0_0.distcp"]
    for path in (*orphans, *foreign):
        bucket.put(path, b"x")
    stale = "run/step-1/data/1111111111111111/__0_0.distcp"
    client = endpoint.client()
    client.create_multipart_upload(Bucket=bucket.name, Key=bucket.key(stale))
    client.create_multipart_upload(Bucket=bucket.name, Key=bucket.key("run/foreign.bin"))
    assert collect_garbage(bucket.url("run"), config=endpoint.config()).removed == ()

    def look():
        return collect_garbage(bucket.url("run"), older_than_s=0, no_writer_runs=True, config=endpoint.config())

    wait_until(lambda: len(look().removed) == 3 and look().aborted, "the store's clock moves on by a second")
    found = look()
    assert sorted(found.removed) == sorted(bucket.key(path) for path in orphans)
    assert bucket.keys("run/") == sorted([*live, *orphans, *foreign[:2]])
    report = collect_garbage(
        bucket.url("run"), dry_run=False, older_than_s=0, no_writer_runs=True, config=endpoint.config()
    )
    assert report.removed == found.removed
    assert report.aborted == (bucket.key(stale),)
    assert bucket.keys("run/") == sorted([*live, *foreign[:2]])
    assert bucket.keys("run2/") == foreign[2:]
    assert bucket.uploads() == ["run/foreign.bin"]
    assert all(verify(bucket.url(f"run/step-{step}"), deep=True, config=endpoint.config()).ok for step in (1, 2))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stock_and_broken_checkpoints_are_left_alone(endpoint, bucket, tmp_path) -> None:
    """Beside a record without its index nothing is deleted, and the report says where and why."""
    _stock(bucket, "run/stock", tmp_path)
    _save(bucket, "run/broken")
    bucket.put("run/broken/.metadata", bucket.get("run/broken/.metadata")[:-10])
    for path in ("run/stock", "run/broken"):
        bucket.put(f"{path}/data/0123456789abcdef/__0_0.distcp", b"x")
    before = bucket.keys()

    def collect():
        return collect_garbage(
            bucket.url("run"), dry_run=False, older_than_s=0, no_writer_runs=True, config=endpoint.config()
        )

    wait_until(lambda: len(collect().skipped) == 2, "both checkpoints are skipped")
    assert collect().removed == ()
    assert bucket.keys() == before


def test_uploads_alone(endpoint, bucket) -> None:
    """abort_stale_uploads aborts old uploads of ours, here by more than one request's worth of them; objects stay."""
    _save(bucket, "run")
    client = endpoint.client(max_pool_connections=8)
    keys = [bucket.key(f"run/data/0123456789abcdef/__{n}_0.distcp") for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: client.create_multipart_upload(Bucket=bucket.name, Key=key), keys))
    assert abort_stale_uploads(bucket.url("run"), config=endpoint.config()).aborted == ()

    def abort(*, dry_run):
        return abort_stale_uploads(
            bucket.url("run"), older_than_s=0, no_writer_runs=True, dry_run=dry_run, config=endpoint.config()
        )

    wait_until(lambda: len(abort(dry_run=True).aborted) == 40, "the store's clock moves on by a second")
    assert sorted(abort(dry_run=False).aborted) == sorted(keys)
    assert bucket.uploads() == []
    assert verify(bucket.url("run"), config=endpoint.config()).ok


def test_the_newest_checkpoint_is_beyond_the_first_page(server, bucket) -> None:
    """With more than 1,000 directories before it, a checkpoint is found, and its garbage too."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bucket.put(f"run/log-{n:04}/x", b""), range(1010)))
    _save(bucket, "run/step-1")
    (info,) = list_checkpoints(bucket.url("run"), config=server.config())
    assert info.url == bucket.url("run/step-1")
    assert collect_garbage(bucket.url("run"), config=server.config()).live == 2


def test_wrong_credentials_are_said(endpoint, bucket) -> None:
    """A refusal is an AccessDeniedError of every tool, neither "nothing there" nor "nothing to do"."""
    config = endpoint.config(secret_access_key="wrong")
    for call in (list_checkpoints, verify, collect_garbage, abort_stale_uploads):
        with pytest.raises(AccessDeniedError):
            call(bucket.url("run"), config=config)


def _program(endpoint, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from dcp_s3.cli import main; main()"
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "PYTHONPATH", "LANG")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | endpoint.environ() | {"AWS_EC2_METADATA_DISABLED": "true"} | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_program(server, bucket) -> None:
    """dcp-s3 in a process of its own: text and JSON, exit codes 0 and 1, configured by the environment alone."""
    _save(bucket, "run/step-1")
    listed = _program(server, "ls", bucket.url("run"))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert re.search(rf"^{re.escape(bucket.url('run/step-1'))} .* committed$", listed.stdout, re.MULTILINE)
    checked = _program(server, "verify", bucket.url("run/step-1"), "--deep", "--json")
    assert (checked.returncode, json.loads(checked.stdout)["ok"]) == (0, True)
    assert _program(server, "gc", bucket.url("run"), "--json").returncode == 0
    bucket.delete(_data_of(bucket, "run/step-1"))
    bad = _program(server, "verify", bucket.url("run/step-1"))
    assert bad.returncode == 1
    assert "is missing" in bad.stdout


def test_the_program_without_a_store(server) -> None:
    """An endpoint that does not answer is exit code 3, a bucket that does not exist 4: a line with the facts, no traceback.

    That a request failed and is sent again is told in a line of its own.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
        dead = _program(server, "ls", "s3://ckpt/run", "--endpoint-url", nowhere, DCP_S3_RETRY_MAX_ATTEMPTS="2")
    missing = _program(server, "ls", "s3://no-such-bucket-here/run")
    assert (dead.returncode, dead.stdout, missing.returncode, missing.stdout) == (3, "", 4, "")
    first, last = dead.stderr.splitlines()
    assert first.endswith("; it is sent again, up to 2 times in all")
    assert last.endswith(", attempts=2]")
    (refused,) = missing.stderr.splitlines()
    assert "no-such-bucket-here" in refused
    assert all(line.startswith("dcp-s3: ") for line in (first, last, refused))


def test_an_unreachable_store_ends_in_bounded_time(server) -> None:
    """The retry policy bounds every tool: two tries, then StorageUnavailableError from the first request."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        config = server.config(
            endpoint_url=f"http://127.0.0.1:{taken.getsockname()[1]}", retry=RetryPolicy(max_attempts=2)
        )
        for call in (list_checkpoints, verify, collect_garbage, abort_stale_uploads):
            with pytest.raises(StorageUnavailableError) as failure:
                call("s3://ckpt/run", config=config)
            assert failure.value.attempts == 2
