"""What one measured process does for the cases that go through torch.distributed.checkpoint."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import states
from benchmarks.meter import GIB, Meter
from benchmarks.peers import PEERS, TorchSavePut

if TYPE_CHECKING:
    from benchmarks.peers import Peer
    from benchmarks.server import Target

Values = dict[str, float]

DTENSORS = 5000
AS_ASYNC_SAVE = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
"""The options of the DefaultStager that ``async_save`` makes by itself."""


def save_and_load(target: Target, subject: str, case: str, gib: float) -> Values:
    """Save, load, and save twice in the background; what is loaded is compared with what was saved.

    Args:
        target: Where to.
        subject: A peer.
        case: ``dense``, ``small`` or ``dtensor``.
        gib: Size of the state dict, GiB over all ranks.
    """
    distributed = dist.is_initialized()
    peer = PEERS[subject](target, distributed=distributed)
    warm_up(peer)
    if case == "dtensor":
        state = states.sharded(gib, init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        state = states.small(gib) if case == "small" else states.dense(gib)
    total = states.nbytes(state) / GIB * (dist.get_world_size() if distributed else 1)
    values: Values = {"gib": total}
    _barrier()
    with Meter() as meter:
        peer.save(state, "sync")
    values |= meter.values("save", total)
    loaded = states.empty_like(state)
    _barrier()
    with Meter() as meter:
        peer.load(loaded, "sync")
    values |= meter.values("load", total)
    states.check_equal(state, loaded)
    del loaded
    _clear(peer)
    if case == "dense":
        values |= _async_saves(peer, state, total)
        if subject == "dcp_s3":
            values |= staging_references(state)
    return values


def _async_saves(peer: Peer, state: dict[str, Any], gib: float) -> Values:
    values: Values = {}
    for name in ("first", "later"):
        with Meter() as meter:
            start = time.perf_counter()
            future = peer.async_save(state, name, AsyncCheckpointerType.THREAD)
            if future is None:
                return {}
            values[f"{name}_blocked_s"] = time.perf_counter() - start
            future.result()
        values[f"{name}_commit_s"] = meter.wall_s
        values[f"{name}_cpu_s_per_gib"] = meter.cpu_s / gib
        _clear(peer)
    return values


def staging_references(state: dict[str, Any]) -> Values:
    """What staging could cost: ``copy_`` into buffers that have been touched; and what DCP's DefaultStager costs."""
    buffers = states.empty_like(state)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for name, value in state.items():
            buffers[name].copy_(value)
        seconds.append(time.perf_counter() - start)
    del buffers
    start = time.perf_counter()
    stager = DefaultStager(AS_ASYNC_SAVE)
    staged = stager.stage(state)
    default_s = time.perf_counter() - start
    del staged
    stager.close()
    return {"copy_s": statistics.median(seconds), "default_stager_s": default_s}


def stage_dtensors(target: Target, subject: str) -> Values:
    """How long ``async_save`` of 5,000 small DTensors blocks its caller, the first time and later."""
    mesh = init_device_mesh("cpu", (1,))
    tensors = states.small_dtensors(DTENSORS, mesh)
    state = {
        "model": tensors
    }  # as a training script gives it: DCP writes two log records for each entry of the top level
    values: Values = {"gib": states.nbytes(tensors) / GIB}
    if subject == "DefaultStager":
        start = time.perf_counter()
        DefaultStager(AS_ASYNC_SAVE).stage(state)
        return values | {"first_blocked_s": time.perf_counter() - start}
    peer = PEERS[subject](target, distributed=True)
    warm_up(peer)
    return values | _async_saves(peer, state, values["gib"])


def latency_bound(target: Target, subject: str, gib: float) -> Values:
    """Save to an endpoint whose connections are slow: by a training script's usual way, and by ours."""
    peer = PEERS[subject](target, distributed=False)
    warm_up(peer)
    state = states.dense(gib)
    total = states.nbytes(state) / GIB
    with Meter() as meter:
        peer.save(state, "sync")
    values = {"gib": total} | meter.values("save", total)
    _clear(peer)
    return values if isinstance(peer, TorchSavePut) else values | _async_saves(peer, state, total)


def round_trips(target: Target, subject: str, gib: float) -> Values:
    """Count the round trips between the last part's acknowledgement and the commit, in the server's log.

    Requests that overlap in time count as one trip.
    """
    peer = PEERS[subject](target, distributed=False)
    warm_up(peer)
    state = states.dense(gib)
    target.clear()  # the log starts here
    peer.save(state, "sync")
    log = sorted(target.log(), key=lambda request: request["start"])
    acknowledged = max(request["end"] for request in log if "partNumber=" in request["target"])
    records = [request for request in log if request["method"] == "PUT" and request["target"].endswith("/.metadata")]
    visible = max(request["end"] for request in records)
    trips, busy_until = 0, acknowledged
    for request in log:
        if acknowledged <= request["start"] < visible:
            trips += request["start"] >= busy_until
            busy_until = max(busy_until, request["end"])
    _clear(peer)
    return {
        "gib": states.nbytes(state) / GIB,
        "round_trips": float(trips),
        "last_part_to_visible_s": visible - acknowledged,
        "requests": float(len(log)),
    }


def warm_up(peer: Peer) -> None:
    """Save and load a little: imports, clients and connections are not what is measured."""
    state = states.warm_up()
    peer.save(state, "warm-up")
    loaded = states.empty_like(state)
    peer.load(loaded, "warm-up")
    _clear(peer)


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _clear(peer: Peer) -> None:
    """Delete what was saved, when no rank needs it any more."""
    _barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        peer.clear()
    _barrier()


def use_one_thread() -> None:
    """As torchrun does by default: the other cores belong to other ranks."""
    torch.set_num_threads(1)
