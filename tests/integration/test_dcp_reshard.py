"""Checkpoints of 4 ranks loaded on other numbers of ranks, under other placements: DTensors on 1-D and 2-D meshes, and FSDP2."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.support import LIMIT_S, assert_same, blank, checkpoint_keys, load, writer
from tests.support.ranks import run_ranks_ok

WHOLE = {
    "even": ((8, 6), torch.float32),
    "uneven": ((6, 2), torch.bfloat16),
    "one row": ((1, 4), torch.int64),
    "no row": ((0, 3), torch.float32),
    "scalar": ((), torch.float64),
    "vector": ((7,), torch.complex64),
    "cube": ((3, 5, 2), torch.uint8),
}
BIG = ((3001, 1777), torch.float32)
"""20 MiB: its shards hold more than one chunk with a CRC, the whole is more than one read."""
ONE_DIM = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
TWO_DIM = {
    "tiles": [Shard(0), Shard(1)],
    "turned tiles": [Shard(1), Shard(0)],
    "copied rows": [Replicate(), Shard(0)],
    "copied columns": [Shard(1), Replicate()],
    "rows of rows": [Shard(0), Shard(0)],
}


def _whole(name):
    shape, dtype = BIG if name == "big" else WHOLE[name]
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 7 % 251 + len(name)).to(dtype).reshape(shape)


def _part(whole, mesh, placements):
    """This rank's part of a tensor, without a collective; without a mesh, the whole of it."""
    if mesh is None:
        return whole
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        whole_dim = whole.shape[dim]
        whole = whole.narrow(dim, min(offset, whole_dim), size)
    return whole.clone()


def _tensor(whole, mesh, placements):
    if mesh is None:
        return whole
    part = _part(whole, mesh, placements)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _tree(mesh, layouts):
    """Each tensor under each layout that its number of dimensions allows."""
    tree = {}
    for name in WHOLE:
        whole = _whole(name)
        fitting = {layout: placements for layout, placements in layouts.items() if _fits(whole, placements)}
        tree[name] = {layout: _tensor(whole, mesh, placements) for layout, placements in fitting.items()}
    return tree


def _fits(whole, placements):
    return all(placement.dim < whole.dim() for placement in placements if isinstance(placement, Shard))


class Model(nn.Module):
    """Layers whose rows do not divide by 2, 3, 4 or 5."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch):
        self.seen += 1
        return self.last(torch.relu(self.norm(self.first(batch))))


def _model(mesh, seed):
    model = Model(seed)
    if mesh is not None:
        for layer in (model.first, model.last, model):
            fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        model(torch.randn(4, 10, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(model, optimizer):
    """Model and optimizer state as whole tensors, on the first rank."""
    model_state, optimizer_state = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {"model": dict(model_state), "optimizer": dict(optimizer_state)}


def _save_fsdp(mesh, bucket):
    model, optimizer = _model(mesh, seed=1)
    _train(model, optimizer, steps=2)
    expected = _full(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.async_save({"model": model_state, "optimizer": optimizer_state}, storage_writer=writer(bucket, "fsdp")).result()
    return expected


def _save_two_dimensions(bucket):
    """Tensor parallel layers under FSDP: rows of rows, in the order that DCP calls strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(seed=3)
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    dcp.save({"model": model.state_dict()}, storage_writer=writer(bucket, "fsdp-tp"))
    return _gathered(model.state_dict())


def _gathered(state):
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    return {name: value.detach().clone() for name, value in whole.items()}


def _save_all(rank, bucket):
    rows, tiles = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    metadata = dcp.save(_tree(rows, ONE_DIM), storage_writer=writer(bucket, "one"))
    dcp.save(_tree(tiles, TWO_DIM), storage_writer=writer(bucket, "two"))
    whole = _whole("big")
    big = {layout: _tensor(whole, rows, placements) for layout, placements in ONE_DIM.items()}
    dcp.save(big, storage_writer=writer(bucket, "big"))
    # back on as many ranks under other placements, from one dimension into two
    for layout in TWO_DIM:
        into = {name: {"rows": tensors[layout]} for name, tensors in _tree(tiles, TWO_DIM).items() if layout in tensors}
        assert len(into) >= 5, layout
        assert_same(load(bucket, "one", blank(into)), into)
    return metadata, _save_fsdp(rows, bucket), _save_two_dimensions(bucket)


@pytest.fixture(scope="module")
def saved(module_bucket):
    """What 4 ranks have saved: the metadata of the first save, the whole state under FSDP2, and that under FSDP2 and TP."""
    return run_ranks_ok(4, _save_all, module_bucket, timeout_s=2 * LIMIT_S)[0]


def _load_dtensors(mesh, bucket):
    for path, layouts in (("one", ONE_DIM), ("two", TWO_DIM)):
        for placements in ONE_DIM.values() if mesh is not None else [[]]:
            # every tensor as it was saved under each layout, into this one
            into = {
                name: {layout: _tensor(_whole(name), mesh, placements) for layout in saved}
                for name, saved in _tree(None, layouts).items()
                if _fits(_whole(name), placements)
            }
            assert_same(load(bucket, path, blank(into)), into)


def _load_big(mesh, bucket):
    whole = _whole("big")
    for layout, placements in (("rows", Shard(0)), ("rows", Shard(1)), ("columns", Shard(0)), ("copies", Shard(0))):
        into = {layout: _tensor(whole, mesh, [placements])}
        assert_same(load(bucket, "big", blank(into)), into)


def _load_fsdp(mesh, bucket, expected, tensor_parallel):
    model, optimizer = _model(mesh, seed=2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    template = {"model": model_state, "optimizer": optimizer_state}
    load(bucket, "fsdp", template)
    set_state_dict(model, optimizer, model_state_dict=template["model"], optim_state_dict=template["optimizer"])
    full = _full(model, optimizer)
    if mesh is None or dist.get_rank() == 0:
        assert_same(full, expected)
        assert full["model"]["seen"] == 2
    _train(model, optimizer, steps=1)  # the optimizer takes its state for its own

    load(bucket, "fsdp-tp", {"model": (state := model.state_dict())})
    assert_same(_gathered(state), tensor_parallel)


def _load_all(rank, bucket, world_size, expected, tensor_parallel):
    mesh = init_device_mesh("cpu", (world_size,)) if world_size > 1 else None
    _load_dtensors(mesh, bucket)
    _load_big(mesh, bucket)
    _load_fsdp(mesh, bucket, expected, tensor_parallel)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_load_on_other_ranks(module_bucket, saved, world_size):
    """What 4 ranks saved is bitwise the same on 1, 2, 3 and 5 ranks: uneven and empty shards, every placement into every other.

    So are an FSDP2 model and its AdamW state, and a model under FSDP2 and tensor parallelism.
    """
    _, expected, tensor_parallel = saved
    load_all = functools.partial(run_ranks_ok, world_size, _load_all, backend="gloo" if world_size > 1 else None)
    load_all(module_bucket, world_size, expected, tensor_parallel, timeout_s=2 * LIMIT_S)


def test_what_lies_in_the_bucket(module_bucket, saved):
    """Each rank has written one object; copies are written once."""
    metadata, *_ = saved
    keys = module_bucket.keys("one")
    assert keys == checkpoint_keys(module_bucket, "one", metadata)
    objects = sorted(key.rsplit("/", 1)[1] for key in keys if "data/" in key)
    assert objects == [f"__{rank}_0.distcp" for rank in range(4)]
    stored = sum(info.length for info in metadata.storage_data.values())
    plain = sum(_whole(name).nbytes * len(layouts) for name, layouts in _tree(None, ONE_DIM).items())
    assert plain <= stored < plain + 2048 * len(metadata.storage_data)
    assert {len(metadata.state_dict_metadata[f"{name}.rows"].chunks) for name in ("even", "vector")} == {4}


def _differing(rank, bucket, directory):
    state = {"x": torch.full((2,), float(rank)), "y": torch.full((3,), float(rank)), "rank": rank}
    metadata = dcp.save(state, storage_writer=writer(bucket, "differing"))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory / "differing"))
    ours, theirs = blank(state), blank(state)
    load(bucket, "differing", ours)
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(directory / "differing"))
    assert_same(ours, theirs)

    # de-duplication leaves one of the two ranks with nothing to write
    alone = dcp.save({"only": torch.ones(4)}, storage_writer=writer(bucket, "alone"))
    assert_same(load(bucket, "alone", {"only": torch.zeros(4)}), {"only": torch.ones(4)})
    nothing = dcp.save({}, storage_writer=writer(bucket, "nothing"))
    load(bucket, "nothing", {})
    return metadata, alone, nothing


def test_values_that_differ_per_rank(module_bucket, tmp_path):
    """Plain values that differ per rank are taken from the rank that stock DCP takes them from; the others write nothing.

    A rank that has nothing to write makes no empty object, and a checkpoint of nothing is one.
    """
    metadata, alone, nothing = run_ranks_ok(2, _differing, module_bucket, tmp_path, timeout_s=2 * LIMIT_S)[0]
    for path, saved_metadata, objects in (("differing", metadata, 2), ("alone", alone, 1), ("nothing", nothing, 0)):
        keys = module_bucket.keys(path)
        assert keys == checkpoint_keys(module_bucket, path, saved_metadata)
        assert len([key for key in keys if "data/" in key]) == objects
