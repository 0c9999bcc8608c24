"""Many configs in one process: what they share, and that memory and descriptors stay as they are."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import RetryPolicy, S3Config, S3StorageReader, S3StorageWriter
from dcp_s3._runtime.loop_thread import loop_thread
from dcp_s3._transfer.http.sink import Sink
from dcp_s3._transfer.s3 import clients, planes, shared_clients
from dcp_s3._transfer.s3.clients import KEPT_IDLE, connection_of
from dcp_s3._transfer.s3.control_store import ControlStore
from dcp_s3._transfer.s3.planes import data_plane
from tests.fault.conftest import KEY, Transfer, config_of, pattern
from tests.fault.server import FaultServer, FaultServerProcess
from tests.support.ranks import run_ranks_ok

MIB = 1 << 20
CONFIGS = 50
WARM_UP = 10
SIZE = 1 << 16
"""Small: the tensors themselves must not be what comes and goes in the measured memory."""


def _by_metadata(number: int) -> dict[str, Any]:
    return {"metadata": {"step": str(number)}, "tags": {"n": str(number)}, "save_deadline_s": 100.0 + number}


def _by_keys(number: int) -> dict[str, Any]:
    return {"access_key_id": f"STS{number}", "secret_access_key": "s", "session_token": f"token{number}"}


def _by_limits(number: int) -> dict[str, Any]:
    return {"part_bytes": 5 * MIB + number, "stall_limit_s": 100.0 + number, "background_cores": 1.0 + number}


def _saves(rank: int, url: str, kind: Callable[[int], dict[str, Any]]) -> list[tuple[float, int]]:
    """Save and load with 50 configs; what the process holds behind each. Runs in a process of its own."""
    held = []
    for number in range(CONFIGS):
        keys = {"access_key_id": "RANK0", "secret_access_key": "s"}
        config = S3Config(**{"endpoint_url": url, **keys, **kind(number)})
        saved = {"w": torch.full((SIZE,), float(number)), "step": number}
        place = f"s3://bucket/run/{number % 2}"
        dcp.save(saved, storage_writer=S3StorageWriter(place, config=config), no_dist=True)
        loaded = {"w": torch.zeros(SIZE), "step": -1}
        dcp.load(loaded, storage_reader=S3StorageReader(place, config=config), no_dist=True)
        assert loaded["step"] == number
        assert torch.equal(loaded["w"], saved["w"])
        del saved, loaded
        gc.collect()
        process = psutil.Process()
        held.append((process.memory_info().rss / MIB, process.num_fds()))
    return held


@pytest.mark.parametrize("kind", [_by_metadata, _by_keys, _by_limits])
def test_fifty_configs_hold_no_more_than_one(kind: Callable[[int], dict[str, Any]]):
    """50 configs that differ in metadata, in their STS keys or in limits, each saved and loaded with: after the first ten neither
    memory nor descriptors grow.
    """
    with FaultServerProcess(min_part_bytes=0) as server:
        (held,) = run_ranks_ok(1, _saves, server.url, kind, timeout_s=240, backend=None)
    rss, fds = zip(*held, strict=True)
    print(f"rss {rss[0]:.0f} {rss[WARM_UP]:.0f} {rss[-1]:.0f} MiB, descriptors {fds[0]} {fds[WARM_UP]} {fds[-1]}")
    assert max(rss[-10:]) - max(rss[:WARM_UP]) < 10, rss
    assert max(fds[WARM_UP:]) <= max(fds[:WARM_UP]) + 2, fds


def test_what_clients_depend_on(plain_s3: FaultServer):
    """Every field of a config either changes the connection that its clients make, or is none of their business."""
    base = config_of(plain_s3)
    none_of_theirs = {
        "part_bytes": 8 * MIB,
        "memory_bytes": 64 * MIB,
        "save_deadline_s": 7.0,
        "load_deadline_s": 7.0,
        "stall_limit_s": 7.0,
        "retry": RetryPolicy(max_attempts=2),
        "background_cores": None,
        "conditional_commit": "off",
        "sse": "AES256",
        "storage_class": "STANDARD_IA",
        "tags": {"a": "b"},
        "metadata": {"a": "b"},
        "staging_buffers": 2,
        "async_staging": True,
    }
    for name, value in none_of_theirs.items():
        changed = dataclasses.replace(base, **{name: value})
        assert connection_of(changed) == connection_of(base), name
        assert data_plane(changed)._clients is data_plane(base)._clients, name
    theirs = {
        "endpoint_url": "http://127.0.0.1:1",
        "region": "eu-west-9",
        "profile": "lab",
        "access_key_id": "OTHER",
        "secret_access_key": "other",
        "session_token": "t",
        "addressing_style": "virtual",
        "verify_tls": False,
        "max_concurrency": 3,
        "connect_timeout_s": 3.0,
        "read_timeout_s": 3.0,
        "checksum": "none",
    }
    for name, value in theirs.items():
        assert connection_of(dataclasses.replace(base, **{name: value})) != connection_of(base), name


def test_each_config_writes_what_it_says(plain_s3: FaultServer):
    """Configs that share their clients keep their own metadata, tags and storage class."""
    for number in (1, 2):
        config = config_of(
            plain_s3, metadata={"step": str(number)}, storage_class=["STANDARD", "STANDARD_IA"][number - 1]
        )
        url = f"s3://bucket/run/{number}"
        dcp.save({"w": torch.ones(9)}, storage_writer=S3StorageWriter(url, config=config), no_dist=True)
    for key, stored in plain_s3.objects("run/").items():
        assert stored["headers"]["x-amz-meta-step"] == key.split("/")[1]
    data = {key.split("/")[1]: stored["headers"] for key, stored in plain_s3.objects("run/").items() if "/data/" in key}
    assert data["2"]["x-amz-storage-class"] == "STANDARD_IA"
    assert len(planes._planes) == 1


def test_idle_clients_are_closed_and_opened_again(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Of many places only the last used stay connected, one with a request under way stays open, and each works again."""
    body = pattern(1000)
    transfers = [transfer_to(plain_s3, access_key_id=f"KEY{number}") for number in range(6)]
    gate = plain_s3.hold("GetObject", access_key="KEY0", times=1)
    plain_s3.put(KEY, body)
    busy = _reading(transfers[0])
    gate.wait_arrived()
    for transfer in transfers[1:]:
        transfer.put(body, "k")
        transfer.store.get("k")
    open_now = [current for current in clients._open if current in [one.plane._clients for one in transfers]]
    assert transfers[0].plane._clients in open_now
    assert len(open_now) <= 1 + 1 + KEPT_IDLE
    assert len(shared_clients._shared) <= 1 + KEPT_IDLE
    gate.release()
    busy.result(20)
    for transfer in transfers:
        assert transfer.get(0, 1000) == body
        assert transfer.store.get(KEY).body == body


def _reading(transfer: Transfer) -> Any:
    sink = Sink([memoryview(bytearray(1000))], transfer.job.progress)
    return loop_thread().submit(transfer.plane.get_range(transfer.job, KEY, 0, sink))


def test_requests_while_places_come_and_go(plain_s3: FaultServer):
    """Threads that use many places at once, more than stay open, all get their own replies."""
    plain_s3.put(KEY, b"x" * 1000)

    def work(number: int) -> int:
        done = 0
        for turn in range(6):
            config = config_of(plain_s3, access_key_id=f"KEY{(number + turn) % 7}")
            assert ControlStore(config, "bucket").get(KEY).body == b"x" * 1000
            transfer = Transfer(plain_s3, plane=data_plane(config))
            assert transfer.get(0, 1000) == b"x" * 1000
            done += 1
        return done

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [6] * 6


def test_renewed_clients_do_not_pile_up(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Any):
    """A long job whose credentials expire again and again keeps the clients of the last two, not of all."""
    transfer = with_chain()
    for number in range(1, 8):
        provider.answer(number, f"KEY{number}")
    for number in range(1, 8):
        plain_s3.configure(key_errors={f"KEY{old}": "ExpiredToken" for old in range(1, number)})
        transfer.put(b"x" * 100)
    assert plain_s3.log[-1].access_key == "KEY7"
    assert len(transfer.plane._clients._opened) <= 2
