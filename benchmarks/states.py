"""The state dicts that are saved and loaded, and the check that what came back is what was saved."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MIB = 1 << 20
SMALL = 1024
"""float32 elements of a small tensor: 4 KiB."""
_TILE = 20 * MIB
_COLUMNS = 256


def large_sizes(gib: float) -> list[int]:
    """Element counts of 200 float32 tensors, 1 to 64 MiB each at 2 GiB and in proportion otherwise, in mixed order."""
    # 1 + 63 x**p for x from 0 to 1 has a mean of 10.2 MiB at p = 5.8, as 2 GiB in 200 tensors have
    sizes = [int((1 + 63 * (i / 199) ** 5.8) * MIB / 4 * gib / 2) // _COLUMNS * _COLUMNS for i in range(200)]
    random.Random(0).shuffle(sizes)
    return [max(_COLUMNS, size) for size in sizes]


def dense(gib: float, rank: int = 0) -> dict[str, Any]:
    """200 tensors that sum up to ``gib``, and 2,000 of 4 KiB: the shape of a model with its optimizer."""
    tile = _tile(rank)
    state = {f"layers.{i}.weight": _slice(tile, i, size) for i, size in enumerate(large_sizes(gib))}
    state |= {f"norms.{i}.bias": _slice(tile, i, SMALL) for i in range(2000)}
    return state


def small(gib: float) -> dict[str, Any]:
    """20,000 tensors of 4 KiB at 2 GiB, and in proportion otherwise."""
    tile = _tile(0)
    return {f"layers.{i}.bias": _slice(tile, i, SMALL) for i in range(max(200, int(10_000 * gib)))}


def sharded(gib: float, mesh: DeviceMesh) -> dict[str, Any]:
    """The parameters of :func:`dense`, ``gib`` over all ranks, sharded by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Module()
    counts = large_sizes(gib) + [SMALL] * 2000
    with torch.device("meta"):
        model.layers = nn.ParameterList(nn.Parameter(torch.empty(n // _COLUMNS, _COLUMNS)) for n in counts)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    tile = _tile(mesh.get_rank())
    state = dict(model.state_dict())
    for i, value in enumerate(state.values()):
        local = value.to_local()
        local.copy_(_slice(tile, i, local.numel()).view_as(local))
    return state


def small_dtensors(count: int, mesh: DeviceMesh) -> dict[str, Any]:
    """DTensors of 4 KiB a rank."""
    tile = _tile(mesh.get_rank())
    return {
        f"layers.{i}.bias": DTensor.from_local(_slice(tile, i, SMALL), mesh, [Shard(0)], run_check=False)
        for i in range(count)
    }


def warm_up() -> dict[str, Any]:
    """64 MiB in four tensors, and 40 small ones: enough to open connections and to run every path once."""
    tile = _tile(0)
    state: dict[str, Any] = {f"large.{i}": _slice(tile, i, 4 * MIB) for i in range(4)}
    state |= {f"small.{i}": _slice(tile, i, SMALL) for i in range(40)}
    return state


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict to load into: other values, memory that has been touched."""
    return {name: torch.full_like(value, -1.0) for name, value in state.items()}


def nbytes(state: dict[str, Any]) -> int:
    """Bytes of this rank's part of a state dict."""
    return sum(_local(value).nbytes for value in state.values())


def check_equal(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Compare bit by bit.

    Raises:
        ValueError: A tensor differs.
    """
    for name, value in saved.items():
        if not torch.equal(_local(value).view(torch.int32), _local(loaded[name]).view(torch.int32)):
            raise ValueError(f"{name} is not what was saved")


def _local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _tile(rank: int) -> torch.Tensor:
    return torch.randn(_TILE, generator=torch.Generator().manual_seed(rank))


def _slice(tile: torch.Tensor, number: int, size: int) -> torch.Tensor:
    """``size`` elements that no other number has."""
    start = number * 769 % (len(tile) - size)
    return tile[start : start + size].clone()
