"""How committing and reading the metadata of many records scales: ours on S3 against torch's files on /dev/shm."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from benchmarks.jobs import warm_up
from benchmarks.peers import PEERS, DcpPeer

if TYPE_CHECKING:
    from benchmarks.server import Target

RANKS = 64
FULL = 1_000_000
FRACTIONS = (4, 2, 1)


def measure(target: Target, subject: str, gib: float) -> dict[str, float]:
    """Time ``finish`` and ``read_metadata`` at a quarter, a half and all of the records.

    Args:
        target: Where to.
        subject: A peer.
        gib: 2 stands for 1,000,000 records, other sizes in proportion.
    """
    peer = PEERS[subject](target, distributed=False)
    assert isinstance(peer, DcpPeer)  # noqa: S101 -- the case has no others
    warm_up(peer)
    values = {}
    full = max(RANKS * 8, int(FULL * gib / 2))
    for fraction in FRACTIONS:
        name = f"{fraction}"
        url = peer.url(f"records-{name}")
        template = _write_one(peer.writer, url)
        results = _results(full // fraction, template)
        metadata = _metadata(results)
        start = time.perf_counter()
        peer.writer.finish(metadata=metadata, results=results)
        values[f"finish_{name}_s"] = time.perf_counter() - start
        records = sum(map(len, results))
        del metadata, results
        peer.reader.reset(url)
        start = time.perf_counter()
        metadata = peer.reader.read_metadata()
        values[f"read_{name}_s"] = time.perf_counter() - start
        if len(metadata.storage_data) != records:
            raise ValueError(f"{len(metadata.storage_data)} of {records} records came back")
        del metadata
        peer.clear()
    return values | {"records": float(full)}


def _write_one(writer: StorageWriter, url: str) -> WriteResult:
    """Run a save of one small tensor up to its commit, which is left to the caller."""
    state = {"x": torch.arange(1024, dtype=torch.float32)}
    planner = DefaultSavePlanner()
    writer.reset(url)
    planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = writer.prepare_global_plan(plans)[0]
    written: list[WriteResult] = writer.write_data(planner.finish_plan(plan), planner).wait()
    return written[0]


def _results(count: int, template: WriteResult) -> list[list[WriteResult]]:
    """What 64 ranks hand to ``finish``, each a row of every tensor; the first result is the one that was written."""
    results: list[list[WriteResult]] = []
    info = template.storage_data
    extra = {name: value for name, value in info.__dict__.items() if name != "objects"}
    for rank in range(RANKS):
        path = info.relative_path.replace("__0_0", f"__{rank}_0")
        one_rank = []
        for i in range(count // RANKS):
            placed: Any = copy.copy(info)
            placed.__dict__ = {**extra, "relative_path": path, "offset": i * info.length}
            index = MetadataIndex(f"layers.{i}.weight", torch.Size([64 * rank, 0]), rank)
            one_rank.append(WriteResult(index, info.length, placed))
        results.append(one_rank)
    if "objects" in info.__dict__:
        results[0][0].storage_data.__dict__["objects"] = info.__dict__["objects"]
    return results


def _metadata(results: list[list[WriteResult]]) -> Metadata:
    names = [result.index.fqn for result in results[0]]
    properties = TensorProperties(dtype=torch.float32)
    shape = torch.Size([64, 16])
    tensors: Any = {
        name: TensorStorageMetadata(
            copy.copy(properties),
            torch.Size([64 * RANKS, 16]),
            [ChunkStorageMetadata(torch.Size([64 * rank, 0]), shape) for rank in range(RANKS)],
        )
        for name in names
    }
    return Metadata(tensors, planner_data={name: (name,) for name in names})
