"""dcp.save and dcp.load: without ranks and with, over groups, ids, threads, event loops and cached plans."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_s3 import CheckpointNotFoundError, ConfigError, S3StorageReader, S3StorageWriter
from tests.integration.support import (
    LIMIT_S,
    assert_same,
    blank,
    checkpoint_keys,
    failure_of,
    load,
    reader,
    wait_until,
    writer,
)
from tests.support.ranks import run_ranks_ok


def _state(value):
    return {
        "weight": torch.full((300, 7), float(value)),
        "nested": {"step": torch.tensor(value), "name": f"run {value}", "list": [torch.arange(value), value]},
    }


def _sharded(mesh, value):
    return {
        "sharded": distribute_tensor(torch.arange(35.0).reshape(7, 5) + value, mesh, [Shard(0)]),
        "plain": torch.full((3,), float(value)),
        "step": value,
    }


def test_without_ranks(endpoint, bucket):
    """A process without a group saves, loads and saves over what it saved; the bucket then holds the new one and nothing else."""
    store = writer(bucket, "run/step")
    for value in (1, 2):
        metadata = dcp.save(_state(value), storage_writer=store)
        assert bucket.keys() == checkpoint_keys(bucket, "run/step", metadata)
        assert_same(load(bucket, "run/step", blank(_state(value))), _state(value))
    assert bucket.uploads() == []
    assert metadata.storage_meta.checkpoint_id == bucket.url("run/step")


def _save_and_load(rank, bucket, directory):
    here = directory / str(rank)
    here.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        mesh = init_device_mesh("cpu", (2,))
        store = writer(bucket)
        kept = []
        for value in (1, 2):
            kept.append(dcp.save(_sharded(mesh, value), checkpoint_id=bucket.url("job"), storage_writer=store))
            assert_same(load(bucket, "job", blank(_sharded(mesh, value))), _sharded(mesh, value))
        future = dcp.async_save(_sharded(mesh, 3), checkpoint_id=bucket.url("job"), storage_writer=store)
        kept.append(future.result())
        assert_same(load(bucket, "job", blank(_sharded(mesh, 3))), _sharded(mesh, 3))
        assert list(here.iterdir()) == []
    return kept


def test_two_ranks(endpoint, bucket, tmp_path):
    """Two ranks save, replace, save in the background and load, each in an empty directory of its own that stays empty.

    Nothing of what was replaced is left, and all ranks are told the same.
    """
    bucket.put("job/notes.txt", b"somebody else's")
    first, second = run_ranks_ok(2, _save_and_load, bucket, tmp_path, timeout_s=2 * LIMIT_S)
    assert [kept.storage_meta for kept in first] == [kept.storage_meta for kept in second]
    assert len({kept.storage_meta.save_id for kept in first}) == 3
    assert bucket.keys() == sorted([*checkpoint_keys(bucket, "job", first[-1]), "job/notes.txt"])
    assert bucket.uploads() == []


def _subgroup(rank, bucket):
    group = dist.new_group([1, 2], backend="gloo")
    if rank == 0:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    store = writer(bucket)
    for value in (1, 2):
        url = bucket.url(f"step-{value}")
        if value == 1:
            dcp.save(_sharded(mesh, value), checkpoint_id=url, storage_writer=store, process_group=group)
        else:
            dcp.async_save(_sharded(mesh, value), checkpoint_id=url, storage_writer=store, process_group=group).result()
        template = blank(_sharded(mesh, value))
        dcp.load(template, checkpoint_id=url, storage_reader=reader(bucket), process_group=group)
        assert_same(template, _sharded(mesh, value))
    with pytest.raises(dcp.CheckpointException) as caught:
        absent = bucket.url("elsewhere")
        dcp.load({"plain": torch.ones(3)}, checkpoint_id=absent, storage_reader=reader(bucket), process_group=group)
    assert "no checkpoint at" in str(failure_of(caught.value, 0))


def test_a_group_without_global_rank_0(bucket):
    """A process group whose coordinator is not global rank 0 saves and loads while that rank does something else."""
    run_ranks_ok(3, _subgroup, bucket, timeout_s=2 * LIMIT_S)
    objects = [key for key in bucket.keys("step-1") if key.endswith(".distcp")]
    assert {key.rsplit("/", 1)[1] for key in objects} == {"__0_0.distcp", "__1_0.distcp"}


def _each_alone(rank, bucket):
    path = f"rank-{rank}"
    state = {"x": torch.full((4,), float(rank)), "rank": rank}
    dcp.save(state, storage_writer=writer(bucket, path), no_dist=True)
    assert_same(load(bucket, path, blank(state), no_dist=True), state)
    # and without waiting for each other: a rank that saves more often than another hangs nobody
    for _ in range(rank):
        dcp.async_save(state, storage_writer=writer(bucket, path), no_dist=True).result()


def test_no_dist(bucket):
    """With no_dist=True each rank of a group saves and loads a checkpoint of its own."""
    run_ranks_ok(2, _each_alone, bucket, timeout_s=2 * LIMIT_S)
    assert {key.split("/")[0] for key in bucket.keys("rank-")} == {"rank-0", "rank-1"}
    assert_same(load(bucket, "rank-1", {"x": torch.zeros(4), "rank": None}), {"x": torch.ones(4), "rank": 1})


def _cached_plans(rank, bucket, ranks):
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def state(value, dtype, extra):
        whole = (torch.arange(24, dtype=torch.float64).reshape(6, 4) * 3 + value).to(dtype)
        tensors = {"w": distribute_tensor(whole, mesh, [Shard(0)]) if mesh else whole, "v": whole[0] * 2}
        return tensors | extra | {"step": value}

    float32 = torch.float32
    more = {"bias": torch.arange(5.0)}
    saves = [
        state(1, float32, {}),
        state(2, float32, {}),  # other values
        state(3, torch.bfloat16, {}),  # another dtype, of which plan caching sees nothing
        state(4, torch.int32, {}),
        state(5, float32, {}),  # and the first one again
        state(6, float32, more),  # another structure
        state(7, torch.float16, more),
        state(8, float32, {}),
    ]
    store = writer(bucket)
    for index, saved in enumerate(saves):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(saved, checkpoint_id=bucket.url(f"step-{index}"), storage_writer=store, planner=planner)
    # only now: no later save has touched what an earlier one wrote, or what its record says
    for index, saved in enumerate(saves):
        assert_same(load(bucket, f"step-{index}", blank(saved)), saved)
    for saved in saves:  # and over one another, in the background
        planner = DefaultSavePlanner(enable_plan_caching=True)
        saving = dcp.async_save(saved, checkpoint_id=bucket.url("fixed"), storage_writer=store, planner=planner)
        metadata = saving.result()
        assert_same(load(bucket, "fixed", blank(saved)), saved)
    return metadata


@pytest.mark.parametrize("ranks", [1, 2])
def test_cached_plans(bucket, ranks):
    """With plan caching every save holds its own values, dtypes and keys, also where the cached plan knows others."""
    backend = "gloo" if ranks > 1 else None
    metadata, *_ = run_ranks_ok(ranks, _cached_plans, bucket, ranks, backend=backend, timeout_s=2 * LIMIT_S)
    assert bucket.keys("fixed") == checkpoint_keys(bucket, "fixed", metadata)


def test_one_writer_and_many_ids(bucket):
    """One writer and one reader serve any number of ids: its own url, names below it, full URLs, and paths of both kinds."""
    store, source = writer(bucket, "run"), reader(bucket, "run")
    ids = {
        "run/step-1": "step-1",
        "run/deep/step-2": "deep/step-2",
        "run/step-3": PurePosixPath("step-3"),
        "other/step-4": bucket.url("other/step-4"),
        "other/step-5": Path(bucket.url("other/step-5")),
    }
    dcp.save(_state(0), storage_writer=store)
    for value, given in enumerate(ids.values(), start=1):
        dcp.save(_state(value), checkpoint_id=given, storage_writer=store)
    for value, (path, given) in enumerate(ids.items(), start=1):
        template = blank(_state(value))
        dcp.load(template, checkpoint_id=given, storage_reader=source)
        assert_same(template, _state(value))
        assert f"{path}/.metadata" in bucket.keys(path)
    assert_same(load(bucket, "run", blank(_state(0))), _state(0))
    # a save without an id goes to the writer's own url again, and not to the last one's place
    dcp.save(_state(9), storage_writer=store)
    assert_same(load(bucket, "run", blank(_state(9))), _state(9))
    assert_same(load(bucket, "other/step-5", blank(_state(5))), _state(5))


def test_where_an_id_may_lead():
    """s3:// URLs are valid ids, as text and as paths; other schemes, local paths, and ids that lead out of the url are not."""
    for kind in (S3StorageWriter, S3StorageReader):
        for good in (
            "s3://bucket",
            "s3://bucket/a/b",
            "s3://bucket/a/",
            Path("s3://bucket/a"),
            PurePosixPath("s3:/bucket/a"),
        ):
            assert kind.validate_checkpoint_id(good), good
        for bad in (
            "/tmp/a",
            "a/b",
            "gs://bucket/a",
            "file:///tmp/a",
            "s3://",
            "s3:///a",
            "s3://bucket/../a",
            Path("/tmp/a"),
        ):
            assert not kind.validate_checkpoint_id(bad), bad
    store = S3StorageWriter("s3://bucket/run")
    for bad in ("../other", "/absolute", "a/../../b", "gs://bucket/a", ""):
        with pytest.raises(ConfigError):
            dcp.save({"x": torch.ones(1)}, checkpoint_id=bad, storage_writer=store)
    with pytest.raises(ConfigError, match="no base"):
        dcp.save({"x": torch.ones(1)}, checkpoint_id="step-1", storage_writer=S3StorageWriter())
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"x": torch.ones(1)}, storage_writer=S3StorageWriter())
    assert isinstance(failure_of(caught.value, 0), ConfigError)


def test_a_missing_checkpoint(bucket):
    """Loading where nothing was saved fails with a text that names the place, and leaves the template as it was."""
    template = {"x": torch.ones(2), "step": 3}
    with pytest.raises(dcp.CheckpointException) as caught:
        load(bucket, "step-7", template)
    # DCP wraps what read_metadata raises into an AssertionError of its own, by its text
    assert f"no checkpoint at {bucket.url('step-7')}" in str(failure_of(caught.value, 0))
    assert_same(template, {"x": torch.ones(2), "step": 3})
    with pytest.raises(CheckpointNotFoundError):
        reader(bucket, "step-7").read_metadata()


def _without_collectives(rank, bucket):
    state = {"x": torch.full((5,), float(rank)), "rank": rank, "nested": {"y": [torch.tensor(rank), "text"]}}
    store = writer(bucket, "local")
    metadata = dcp.save(state, storage_writer=store, use_collectives=False)
    assert len(metadata.storage_data) == 4
    assert_same(load(bucket, "local", blank(state)), state)
    again = {**state, "x": state["x"] + 10}
    dcp.async_save(again, storage_writer=store, use_collectives=False).result()
    assert_same(load(bucket, "local", blank(again)), again)
    return metadata.storage_meta.save_id


def test_without_collectives(bucket):
    """With use_collectives=False each rank commits and replaces its own record, and loads its own values back."""
    ids = run_ranks_ok(2, _without_collectives, bucket, timeout_s=2 * LIMIT_S)
    assert ids[0] != ids[1]
    keys = bucket.keys("local")
    assert [key for key in keys if key.endswith(".metadata")] == ["local/__0.metadata", "local/__1.metadata"]
    assert sorted(key.rsplit("/", 1)[1] for key in keys if "data/" in key) == ["__0_0.distcp", "__1_0.distcp"]
    assert len(keys) == 6  # each one's record, index and object: what was replaced is gone


def test_pickled_before_and_after_use(bucket):
    """Writers and readers can be pickled in any state, and the copies save and load as the originals do."""
    store, source = writer(bucket, "fresh"), reader(bucket, "fresh")
    for name in ("fresh", "used"):
        copy, copied_source = pickle.loads(pickle.dumps((store, source)))
        assert repr(copy) == repr(store)
        url = bucket.url(name)
        dcp.save(_state(1), checkpoint_id=url, storage_writer=copy)
        dcp.save(_state(2), checkpoint_id=url, storage_writer=store)
        for each in (source, copied_source):
            template = blank(_state(2))
            dcp.load(template, checkpoint_id=url, storage_reader=each)
            assert_same(template, _state(2))


def test_pickles_hold_no_live_objects(bucket):
    """A used writer pickles to what an unused one pickles to: no save, client or thread goes with it."""
    store = writer(bucket, "a")
    before = pickle.dumps(store)
    dcp.save(_state(1), storage_writer=store)
    dcp.async_save(_state(1), storage_writer=store).result()
    assert pickle.dumps(store) == before


def test_under_a_running_event_loop(bucket):
    """Saves and loads can be called from a coroutine, as in a notebook, and the future of an async save awaited there."""

    async def main():
        dcp.save(_state(1), storage_writer=writer(bucket, "a"))
        future = dcp.async_save(_state(2), storage_writer=writer(bucket, "b"))
        ticks = 0
        waiting = asyncio.wrap_future(future)
        while not waiting.done():
            await asyncio.sleep(0)
            ticks += 1
        assert (await waiting).storage_data
        assert ticks
        assert_same(load(bucket, "a", blank(_state(1))), _state(1))
        assert_same(load(bucket, "b", blank(_state(2))), _state(2))

    asyncio.run(main())


class _Meeting(DefaultSavePlanner):
    """Holds a save in write_data until the other ones are there too."""

    def __init__(self, barrier):
        super().__init__()
        self._barrier = barrier
        self._met = False

    def resolve_data(self, write_item):
        if not self._met:
            self._barrier.wait(timeout=LIMIT_S)
            self._met = True
        return super().resolve_data(write_item)


def test_two_threads_and_one_writer(bucket):
    """Threads that save different ids with one writer at the same time do not touch each other's saves, nor do loads."""
    store, source = writer(bucket, "run"), reader(bucket, "run")
    barrier = threading.Barrier(3)

    def save_and_load(value):
        path = f"step-{value}"
        metadata = dcp.save(
            _state(value), checkpoint_id=path, storage_writer=store, planner=_Meeting(barrier), no_dist=True
        )
        barrier.wait(timeout=LIMIT_S)
        template = blank(_state(value))
        dcp.load(template, checkpoint_id=path, storage_reader=source, no_dist=True)
        assert_same(template, _state(value))
        assert metadata.storage_meta.checkpoint_id == bucket.url(f"run/{path}")
        return checkpoint_keys(bucket, f"run/{path}", metadata)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        kept = list(pool.map(save_and_load, (1, 2, 3)))
    assert bucket.keys() == sorted(key for keys in kept for key in keys)


def test_the_record_comes_last(bucket):
    """While a save is writing there is no checkpoint; it is there, with all that it names, as soon as its record is."""
    gate = threading.Event()

    class Gated(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if write_item.index.fqn == "last":
                assert gate.wait(timeout=LIMIT_S)
            return super().resolve_data(write_item)

    state = {"first": torch.ones(3 << 20), "last": torch.ones(3)}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        saving = pool.submit(
            dcp.save, state, storage_writer=writer(bucket, "a", part_bytes=5 << 20), planner=Gated(), no_dist=True
        )
        try:
            wait_until(bucket.uploads, "the first part's upload is open")
            with pytest.raises(CheckpointNotFoundError):
                reader(bucket, "a").read_metadata()
        finally:
            gate.set()
        metadata = saving.result()
    assert bucket.keys() == checkpoint_keys(bucket, "a", metadata)
    assert_same(load(bucket, "a", blank(state)), state)
