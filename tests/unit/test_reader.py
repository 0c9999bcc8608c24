"""The reader, on a bucket in memory: which record it takes, what it holds data against, and what it says of a replacement."""

from __future__ import annotations

import dataclasses
import datetime as dt
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_s3 import (
    AccessDeniedError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigError,
    CorruptCheckpointError,
    DeadlineExceededError,
    ObjectNotLoadableError,
    S3Config,
    S3StorageReader,
    StorageError,
    StorageUnavailableError,
)
from dcp_s3 import reader as module
from dcp_s3._checkpoint.format.layout import CheckpointUrl
from dcp_s3._checkpoint.pickles.metadata import dumps, loads
from dcp_s3._runtime.gc_pause import Pause
from dcp_s3._transfer.checksum import crc32c
from dcp_s3._transfer.limits.budget import ByteBudget
from tests.unit.fake_store import FakeStore, denied, flip, save
from tests.unit.records import repacked

pytestmark = pytest.mark.usefixtures("collector_on")

URL = "s3://ckpt/run"
RUN = CheckpointUrl("ckpt", "run")
RECORD, INDEX = "run/.metadata", f"run/index-{'ab' * 16}.safetensors.gz"
DATA = "run/data/0123456789abcdef/__0_0.distcp"
NAME = "model.layers.0.weight"
SECOND = dt.timedelta(seconds=1)


@pytest.fixture(autouse=True)
def no_pause_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A load of which a test makes only the beginning leaves the garbage collector paused no longer than the test."""
    made: list[Pause] = []

    class Noted(Pause):
        def __init__(self, *limit_s: float) -> None:
            super().__init__(*limit_s)
            made.append(self)

    monkeypatch.setattr(module, "Pause", Noted)
    yield
    for pause in made:
        pause.end()


class Plane:
    """Gives ranges of what the bucket holds; the test may change what arrives."""

    def __init__(self, store: FakeStore) -> None:
        self.config = S3Config(max_concurrency=4)
        self.budget = ByteBudget(1 << 24)
        self.store = store
        self.ranges: list[tuple[str, int, int]] = []
        self.change: Callable[[bytearray], None] = lambda body: None
        self.jobs: list[Any] = []

    async def get_range(
        self, job: Any, key: str, start: int, sink: Any, *, etag: str | None = None, modified: Any = None
    ) -> str:
        self.ranges.append((key, start, sink.length))
        self.jobs.append(job)
        fetched = self.store.get(key)
        body = bytearray(fetched.body[start : start + sink.length])
        self.change(body)
        sink.rewind()
        sink.feed(memoryview(body))
        modified[key] = fetched.info.last_modified
        return fetched.info.etag


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    fake = FakeStore()
    monkeypatch.setattr(S3StorageReader, "_store", lambda self, load: fake)
    return fake


@pytest.fixture
def plane(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> Plane:
    """Where data come from."""
    plane = Plane(store)
    monkeypatch.setattr(module, "data_plane", lambda config: plane)
    return plane


def reader(url: str | None = URL, **options: Any) -> S3StorageReader:
    return S3StorageReader(url, config=S3Config(), **options)


def template(*layers: int) -> dict[str, torch.Tensor]:
    return {f"model.layers.{n}.weight": torch.zeros(8, 8, dtype=torch.bfloat16) for n in layers or (0,)}


def load(state: dict[str, Any], source: S3StorageReader | None = None) -> BaseException | None:
    """Load, and return what it failed of."""
    try:
        dcp.load(state, storage_reader=source or reader(), no_dist=True)
    except dcp.CheckpointException as caught:
        failure: BaseException = caught.failures[0][0]
        return failure
    return None


def with_crcs(store: FakeStore) -> Callable[[Any], None]:
    """Give the records of `save` the checksums of their data."""

    def change(metadata: Any) -> None:
        body = store.objects[DATA].body
        for index, info in metadata.storage_data.items():
            if index.fqn != "step":
                start = info.offset + info.raw_offset
                info.crc32c = (crc32c(body[start : start + 64]),)

    return change


def values(store: FakeStore, layer: int) -> torch.Tensor:
    """What the data hold of a tensor of two chunks."""
    body = store.objects[DATA].body
    chunks = [bytearray(body[n * 1088 + 960 : n * 1088 + 1024]) for n in (2 * layer, 2 * layer + 1)]
    return torch.cat([torch.frombuffer(chunk, dtype=torch.bfloat16).view(4, 8) for chunk in chunks])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.fixture
def saved(store: FakeStore) -> FakeStore:
    """A checkpoint of ours, with true checksums."""
    save(store, RUN)
    body = store.objects[DATA].body
    save(store, RUN, change=with_crcs(store))
    assert store.objects[DATA].body == body
    store.log.clear()
    return store


@pytest.fixture
def stock(store: FakeStore, tmp_path: Path) -> FakeStore:
    """A checkpoint as FileSystemWriter lays it out, record last; whoever copied it kept the times."""
    dcp.save({"w": torch.arange(6.0)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for path in sorted(tmp_path.iterdir(), reverse=True):
        store.put(f"run/{path.name}", path.read_bytes())
    store.log.clear()
    return store


# ---------------------------------------------------------------------- one load, one record


def plan_of(source: S3StorageReader, **options: Any) -> LoadPlan:
    source.set_up_storage_reader(source.read_metadata(**options), is_coordinator=True)
    return source.prepare_local_plan(LoadPlan([]))


def test_ranks_that_read_the_same_record(saved: FakeStore) -> None:
    """Nothing to say: the plans are as the ranks made them."""
    sources = [reader() for _ in range(3)]
    plans = [plan_of(source) for source in sources]
    assert sources[0].prepare_global_plan(plans) is plans


def test_ranks_that_read_different_records(saved: FakeStore) -> None:
    """The coordinator compares what they read: of two checkpoints not a byte is loaded."""
    sources = [reader() for _ in range(3)]
    first = [plan_of(source) for source in sources[:2]]
    save(saved, RUN, write_id="cd" * 16, token="fedcba9876543210")
    with pytest.raises(CheckpointReplacedError, match="s3://ckpt/run was replaced while the ranks read it") as caught:
        sources[0].prepare_global_plan([*first, plan_of(sources[2])])
    assert "load again" in str(caught.value)


def test_ranks_that_were_given_different_urls(saved: FakeStore) -> None:
    """That is an error of the configuration, also where the records are equal."""
    save(saved, RUN.child("other"))
    plans = [plan_of(reader()), plan_of(reader("s3://ckpt/run/other")), plan_of(reader())]
    source = reader()
    source.read_metadata()
    with pytest.raises(ConfigError, match=r"ranks 0, 2: s3://ckpt/run; rank 1: s3://ckpt/run/other$"):
        source.prepare_global_plan(plans)


def test_ranks_that_read_records_of_their_own(store: FakeStore) -> None:
    """Those differ, and need not be compared."""
    plans = []
    for rank in range(2):
        save(store, RUN, record=f"__{rank}.metadata", write_id=f"{rank:032x}", token=f"{rank:016x}", world_size=2)
        plans.append(plan_of(reader(), rank=rank))
    source = reader()
    source.read_metadata(rank=0)
    assert source.prepare_global_plan(plans) is plans


def test_each_record_has_a_name_of_its_own(saved: FakeStore) -> None:
    """DCP's load id tells one record from another, and is the same on all ranks."""
    ids = [reader().read_metadata().storage_meta.load_id for _ in range(2)]
    save(saved, RUN, write_id="cd" * 16)
    assert ids[0] == ids[1] != reader().read_metadata().storage_meta.load_id
    assert len(ids[0]) == 32


# ---------------------------------------------------------------------- where it reads


def test_nowhere_to_load_from() -> None:
    """Neither the reader nor the load was given a URL; and a reader is used in DCP's order."""
    with pytest.raises(ConfigError, match="nowhere to load from"):
        reader(None).read_metadata()
    for act in (lambda r: r.prepare_local_plan(LoadPlan([])), lambda r: r.read_data(LoadPlan([]), None)):
        with pytest.raises(ConfigError, match="read_metadata was not called on this thread"):
            act(reader())
    with pytest.raises(ConfigError, match="config must be an S3Config, got dict"):
        S3StorageReader(URL, config={})  # type: ignore[arg-type]


def test_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those that were given, or come from the environment."""
    given, found = S3Config(max_concurrency=3), S3Config(max_concurrency=5)
    monkeypatch.setattr(S3Config, "from_env", lambda: found)
    assert S3StorageReader(URL, config=given)._config is given
    assert S3StorageReader(URL)._config is found


def test_the_url_of_one_load(saved: FakeStore) -> None:
    """`reset` sends this thread's next loads elsewhere, and back."""
    source = reader("s3://ckpt")
    source.reset("run")
    assert source.checkpoint_id == URL
    source.read_metadata()
    source.reset("s3://ckpt/other")
    assert source.checkpoint_id == "s3://ckpt/other"
    with pytest.raises(ConfigError, match="read_metadata was not called"):
        source.prepare_local_plan(LoadPlan([]))
    source.reset()
    assert source.checkpoint_id == "s3://ckpt"
    assert reader(None).checkpoint_id is None


def test_what_is_a_url() -> None:
    """DCP asks before it makes a reader."""
    assert S3StorageReader.validate_checkpoint_id(URL)
    assert S3StorageReader.validate_checkpoint_id(Path("s3:/ckpt/run"))
    assert not S3StorageReader.validate_checkpoint_id("/ckpt/run")


def test_a_reader_goes_to_another_process(saved: FakeStore) -> None:
    """With its settings, without its loads."""
    source = reader(verify=False)
    source.read_metadata()
    there = pickle.loads(pickle.dumps(source))
    assert there.checkpoint_id == URL
    with pytest.raises(ConfigError, match="read_metadata was not called"):
        there.prepare_local_plan(LoadPlan([]))
    there.read_metadata()


# ---------------------------------------------------------------------- the record


def failing(on: str, answer: StorageError) -> Callable[[str, str], None]:
    def fail(operation: str, key: str) -> None:
        if key == on:
            raise answer

    return fail


def answered(status: int, code: str) -> StorageError:
    kind = {403: AccessDeniedError, 503: StorageUnavailableError}.get(status, StorageError)
    error = kind(f"the store answered {status}")
    error.with_context(status=status, code=code)
    return error


def test_no_checkpoint(store: FakeStore) -> None:
    """The error names the URL and what to do; that of a rank's own record is short, as DCP puts both into one."""
    with pytest.raises(
        CheckpointNotFoundError, match=r"no checkpoint at s3://ckpt/run: no readable \.metadata \(there is none\)"
    ) as caught:
        reader().read_metadata()
    assert (caught.value.key, caught.value.status, caught.value.code) == (RECORD, 404, "NoSuchKey")
    with pytest.raises(CheckpointNotFoundError, match=r"^no readable __3\.metadata either \(there is none\)$"):
        reader().read_metadata(rank=3)


def test_a_record_that_may_not_be_read(saved: FakeStore) -> None:
    """Without ListBucket that may also mean that there is none; other refusals say what they are."""
    saved.before = denied
    with pytest.raises(CheckpointNotFoundError, match=r"there is none, or reading it is not permitted"):
        reader().read_metadata()
    for answer in (answered(403, "InvalidAccessKeyId"), answered(503, "SlowDown"), answered(404, "NoSuchBucket")):
        saved.before = failing(RECORD, answer)
        with pytest.raises(StorageError) as caught:
            reader().read_metadata()
        assert caught.value is answer


def test_a_rank_is_not_asked_twice(saved: FakeStore) -> None:
    """DCP asks for a rank's own record behind any failure; only where the shared one is not there is that an answer."""
    save(saved, RUN, record="__1.metadata", write_id="cd" * 16)
    saved.before = failing(RECORD, answered(503, "SlowDown"))
    source = reader()
    with pytest.raises(StorageUnavailableError):
        source.read_metadata()
    saved.log.clear()
    with pytest.raises(StorageUnavailableError, match=r"no answer to what the shared \.metadata failed of"):
        source.read_metadata(rank=1)
    assert saved.log == []
    saved.before = lambda operation, key: None
    source.read_metadata()
    source.read_metadata(rank=1)
    del saved.objects[RECORD]
    with pytest.raises(CheckpointNotFoundError):
        source.read_metadata()
    source.read_metadata(rank=1)


def test_what_failed_before_is_forgotten(saved: FakeStore) -> None:
    """By the next load of this thread that is given a URL."""
    save(saved, RUN, record="__1.metadata", write_id="cd" * 16)
    saved.before = failing(RECORD, answered(503, "SlowDown"))
    source = reader()
    with pytest.raises(StorageUnavailableError):
        source.read_metadata()
    source.reset(URL)
    source.read_metadata(rank=1)


@pytest.mark.parametrize("damage", ["record", "index", "lost index", "size"])
def test_a_record_is_held_against_its_index(saved: FakeStore, damage: str) -> None:
    """One of them changed, or the index is not there: no byte of the checkpoint can be trusted, unless that is asked for."""
    if damage == "record":
        body = saved.objects[RECORD].body
        saved.objects[RECORD].body = body.replace(b"s3://ckpt/run", b"s3://ckpt/ruN")
        assert saved.objects[RECORD].body != body
    elif damage == "index":
        saved.objects[INDEX].body = repacked(saved.objects[INDEX].body, writer="somebody else")
    elif damage == "size":
        saved.objects[RECORD].body += b"x"
    else:
        del saved.objects[INDEX]
    with pytest.raises(CorruptCheckpointError) as caught:
        reader().read_metadata()
    text = {
        "lost index": "its index index-abababababababababababababababab.safetensors.gz is missing",
        "index": "is not the index that was written with it",
    }.get(damage, "its bytes are not those that index-abababababababababababababababab.safetensors.gz was written for")
    assert text in str(caught.value)
    assert caught.value.key == RECORD
    if damage == "size":
        saved.objects[RECORD].body = saved.objects[RECORD].body[:-1]
        del saved.objects[INDEX]
    reader(verify=False).read_metadata()


def test_an_index_that_cannot_be_had(saved: FakeStore) -> None:
    """A store that fails is no damage."""
    answer = answered(503, "SlowDown")
    saved.before = failing(INDEX, answer)
    with pytest.raises(StorageUnavailableError) as caught:
        reader().read_metadata()
    assert caught.value is answer


@pytest.mark.parametrize("mark", ["write id", "names of objects", "user metadata"])
def test_one_damaged_mark_makes_it_nobody_elses(saved: FakeStore, mark: str) -> None:
    """A record without one of its three marks is still ours, and is not taken for a stock writer's."""
    save(saved, RUN)
    del saved.objects[INDEX]
    stored = saved.objects[RECORD]
    if mark == "user metadata":
        stored.metadata = {}
    else:
        old, new = (
            (b"ab" * 16, b"xy" * 16) if mark == "write id" else (b"data/0123456789abcdef", b"DATA/0123456789abcdef")
        )
        assert old in stored.body
        stored.body = stored.body.replace(old, new)
    with pytest.raises(CorruptCheckpointError, match="cannot be trusted"):
        reader().read_metadata()


def test_replaced_between_record_and_index(saved: FakeStore) -> None:
    """The old index is gone, and the record is another one now: that one is read."""

    def replace(operation: str, key: str) -> None:
        if key == INDEX:
            saved.before = lambda operation, key: None
            del saved.objects[INDEX]
            save(saved, RUN, write_id="cd" * 16)

    saved.before = replace
    assert reader().read_metadata().storage_meta.save_id == "cd" * 16


def test_replaced_again_and_again(saved: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline ends it."""
    count = 0

    def replace(operation: str, key: str) -> None:
        nonlocal count
        if "index" in key and operation == "get":
            del saved.objects[key]
            count += 1
            assert count < 1000
            time.sleep(0.02)
            save(saved, RUN, write_id=f"{count:032x}")

    saved.before = replace
    monkeypatch.setattr(module, "deadline_s", lambda configured, name: 0.1)
    with pytest.raises(DeadlineExceededError, match="replaced again and again"):
        reader().read_metadata()
    assert count > 1


# ---------------------------------------------------------------------- the data of ours


def test_values_are_loaded(saved: FakeStore, plane: Plane) -> None:
    """Each wanted byte is asked for once, and the tensors hold it."""
    state = template(0, 1)
    assert load(state) is None
    assert all(same(state[f"model.layers.{n}.weight"], values(saved, n)) for n in (0, 1))
    assert len(plane.ranges) == 1
    assert {job.bucket for job in plane.jobs} == {"ckpt"}
    assert plane.budget.held == 0


class Noting(DefaultLoadPlanner):
    """Notes what it is told to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, ...]] = []

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.done.append((read_item.storage_index.fqn, *read_item.storage_index.offset, tensor.any().item()))


def test_the_planner_hears_of_each_tensor_once(saved: FakeStore, plane: Plane) -> None:
    """When all of its bytes are there."""
    planner = Noting()
    dcp.load(template(0, 1), storage_reader=reader(), planner=planner, no_dist=True)
    names = [f"model.layers.{n}.weight" for n in (0, 1)]
    assert sorted(planner.done) == [(name, row, 0, True) for name in names for row in (0, 4)]


def test_the_planner_hears_of_a_tensor_without_elements(saved: FakeStore, plane: Plane) -> None:
    """For which no byte is asked for."""
    source, planner = reader(), Noting()
    source.set_up_storage_reader(source.read_metadata(), is_coordinator=True)
    planner.resolve_tensor = lambda item: torch.zeros(0, 8)  # type: ignore[method-assign]
    origin = torch.Size([0, 0])
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(NAME, origin),
        dest_offsets=origin,
        storage_index=MetadataIndex(NAME, origin, 0),
        storage_offsets=origin,
        lengths=torch.Size([0, 8]),
    )
    source.read_data(LoadPlan([item]), planner).wait()
    assert planner.done == [(NAME, 0, 0, False)]
    assert plane.ranges == []


def test_the_rank_is_told(saved: FakeStore, plane: Plane) -> None:
    """DCP says which rank reads its own record: requests and errors bear its number."""
    source, planner = reader(), Noting()
    source.set_up_storage_reader(source.read_metadata(), is_coordinator=True, rank=3)
    planner.resolve_tensor = lambda item: torch.zeros(4, 8, dtype=torch.bfloat16)  # type: ignore[method-assign]
    origin = torch.Size([0, 0])
    place = MetadataIndex(NAME, origin, 0)
    item = ReadItem(LoadItemType.TENSOR, place, origin, place, origin, torch.Size([4, 8]))
    flip(saved, DATA, 970)
    with pytest.raises(CorruptCheckpointError) as caught:
        source.read_data(LoadPlan([item]), planner)
    assert caught.value.rank == 3
    assert {job.rank for job in plane.jobs} == {3}


def test_nothing_is_wanted(saved: FakeStore, plane: Plane) -> None:
    """An empty template is loaded at once."""
    assert load({}) is None
    assert plane.ranges == []


def test_bytes_damaged_on_the_way(saved: FakeStore, plane: Plane) -> None:
    """They are received once more, and are then right."""

    def once(body: bytearray) -> None:
        plane.change = lambda body: None
        body[3] ^= 1

    plane.change = once
    state = template()
    assert load(state) is None
    assert same(state[NAME], values(saved, 0))
    assert len(plane.ranges) == 2
    assert plane.ranges[0] == plane.ranges[1]


def test_bytes_damaged_in_the_store(saved: FakeStore, plane: Plane) -> None:
    """The error names tensor, URL and place; nothing of them reaches the template, and two tries are enough."""
    flip(saved, DATA, 970)
    state = template()
    error = load(state)
    assert isinstance(error, CorruptCheckpointError)
    assert f"{NAME} in s3://ckpt/run is damaged: the CRC32C of the 4 MiB from byte 0 of its data (byte 960" in str(
        error
    )
    assert error.key == DATA
    assert not state[NAME].any()
    assert len(plane.ranges) == 2
    assert load(state, reader(verify=False)) is None


@pytest.mark.parametrize("then", ["replaced", "deleted", "nothing"])
def test_data_that_are_gone(saved: FakeStore, plane: Plane, then: str) -> None:
    """A replacement or a deletion is told from a broken checkpoint, by the record that is there now."""
    source = reader()
    source.reset()
    read = source.read_metadata

    def and_then(*args: Any, **kwargs: Any) -> Any:
        metadata = read(*args, **kwargs)
        if then == "replaced":
            save(saved, RUN, write_id="cd" * 16, token="fedcba9876543210")
        elif then == "deleted":
            del saved.objects[RECORD]
        del saved.objects[DATA]
        return metadata

    source.read_metadata = and_then  # type: ignore[method-assign]
    error = load(template(), source)
    if then == "nothing":
        assert isinstance(error, CorruptCheckpointError)
        assert "is missing although its record is there" in str(error)
        assert (error.status, error.code) == (404, "NoSuchKey")
    else:
        assert isinstance(error, CheckpointReplacedError)
        assert "replaced or deleted while it was read; load again" in str(error)
    assert error.key == DATA


def test_data_that_cannot_be_had(saved: FakeStore, plane: Plane) -> None:
    """A store that fails is neither."""
    answer = answered(503, "SlowDown")
    saved.before = failing(DATA, answer)
    assert type(load(template())) is StorageUnavailableError


def test_our_record_is_not_read_again(saved: FakeStore, plane: Plane) -> None:
    """Its objects are never overwritten, so a load that has them all needs no second look, whatever their age."""
    saved.objects[DATA].made += dt.timedelta(hours=1)
    assert load(template()) is None
    assert [key for _, key in saved.log].count(RECORD) == 1


def damaged(what: str) -> Callable[[Any], None]:
    """Change what a record says of the first tensor."""

    def change(metadata: Any) -> None:
        infos = [info for index, info in metadata.storage_data.items() if index.fqn == NAME]
        if what == "no place":
            for index in [index for index in metadata.storage_data if index.fqn == NAME]:
                del metadata.storage_data[index]
        for info in infos:
            if what == "length":
                info.length = 960 + 63
            elif what == "just long enough":
                info.length = 960 + 64
            elif what == "crcs":
                info.crc32c = (1, 2)

    return change


@pytest.mark.parametrize(
    "what, text",
    [
        ("no place", "does not say where"),
        ("length", "64 bytes of data do not fit into a record of 1023"),
        ("crcs", "has 2 CRCs for 64 bytes of data, expected 1"),
    ],
)
def test_a_record_that_cannot_be_right(saved: FakeStore, plane: Plane, what: str, text: str) -> None:
    """It is refused before a byte of data is asked for."""
    save(saved, RUN, change=damaged(what))
    error = load(template())
    assert isinstance(error, CorruptCheckpointError)
    with pytest.raises(CorruptCheckpointError, match=text):
        raise error
    assert plane.ranges == []


def test_a_record_that_is_just_long_enough(saved: FakeStore, plane: Plane) -> None:
    """The data may end where the record ends."""

    def change(metadata: Any) -> None:
        with_crcs(saved)(metadata)
        damaged("just long enough")(metadata)

    save(saved, RUN, change=change)
    state = template()
    assert load(state) is None
    assert same(state[NAME], values(saved, 0))


def test_a_checkpoint_that_is_not_whole(saved: FakeStore, plane: Plane) -> None:
    """A tensor of which rows are missing would be left as it is there: each is named, up to five."""

    def change(metadata: Any) -> None:
        for name, tensor in metadata.state_dict_metadata.items():
            if name != "step":
                metadata.state_dict_metadata[name] = dataclasses.replace(tensor, size=torch.Size([12, 8]))

    save(saved, RUN, change=change)
    state = {f"model.layers.{n}.weight": torch.zeros(12, 8, dtype=torch.bfloat16) for n in (0, 1)}
    error = load(state, reader())
    assert isinstance(error, CorruptCheckpointError)
    assert "s3://ckpt/run is no whole checkpoint" in str(error)
    assert "; model.layers.1.weight" in str(error)
    assert "more" not in str(error).partition("load an older one")[0].partition("values as they are")[2]
    assert (error.key, plane.ranges) == (RECORD, [])


def test_a_template_of_another_shape(saved: FakeStore, plane: Plane) -> None:
    """What the plan wants and what the template has must agree."""

    class Other(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return super().resolve_tensor(read_item)[:1]

    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(template(), storage_reader=reader(), planner=Other(), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, ConfigError)
    assert f"{NAME}: the plan wants (4, 8) elements, the template has (1, 8)" in str(error)


@pytest.mark.parametrize("name", ["load", "read_metadata", "read_data"])
def test_an_error_is_told_once(saved: FakeStore, plane: Plane, name: str) -> None:
    """It leaves without what it came from, which DCP would print at each of its stops."""
    if name == "read_metadata":
        del saved.objects[INDEX]
        with pytest.raises(CorruptCheckpointError) as caught:
            reader().read_metadata()
        error: BaseException | None = caught.value
    else:
        source = reader()
        del saved.objects[DATA]
        error = load(template(), source)
    assert error is not None
    assert (error.__cause__, error.__suppress_context__) == (None, True)


@pytest.mark.parametrize("how", ["it ends", "it fails", "the record fails", "only the record is read"])
def test_the_garbage_collector_comes_back(saved: FakeStore, plane: Plane, how: str) -> None:
    """However a load ends, it leaves the collector as it was."""
    source = reader()
    if how == "it fails":
        flip(saved, DATA, 970)
    elif how == "the record fails":
        saved.objects[RECORD].body = b"garbage"
    if how == "only the record is read":
        source.read_metadata()
        assert not gc.isenabled()
        assert load(template(), source) is None
    else:
        assert (load(template(), source) is None) == (how == "it ends")
    assert gc.isenabled()


# ---------------------------------------------------------------------- the data of others


def aged(store: FakeStore, *, record: float, data: float, read: float = 100.0) -> None:
    """When record and data were written, and the store's time at the reading, in seconds."""
    start = store.now
    for key, stored in store.objects.items():
        stored.made = start + SECOND * (record if key == RECORD else data)
    store.now = start + SECOND * read


def change_record(store: FakeStore, change: Callable[[Any], None]) -> None:
    metadata = loads(store.objects[RECORD].body, source="test")
    change(metadata)
    store.objects[RECORD].body = dumps(metadata)


def of_our_url(store: FakeStore) -> None:
    """Have the record say that it was written here, as a writer of another library in place does."""

    def say_so(metadata: Any) -> None:
        metadata.storage_meta.checkpoint_id = URL

    change_record(store, say_so)


def stock_state() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(6)}


def test_a_stock_checkpoint(stock: FakeStore, plane: Plane) -> None:
    """Its record, which can be overwritten in place, is looked at again behind the last byte."""
    state = stock_state()
    assert load(state) is None
    assert torch.equal(state["w"], torch.arange(6.0))
    assert [operation for operation, key in stock.log if key == RECORD] == ["get", "head"]
    stock.log.clear()
    assert load(stock_state(), reader(verify=False)) is None
    assert [operation for operation, key in stock.log if key == RECORD] == ["get"]


def test_an_object_that_may_run_code(store: FakeStore, plane: Plane, tmp_path: Path) -> None:
    """It is not unpickled unasked, whatever the planner would do with it."""
    dcp.save({"when": SECOND}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for path in tmp_path.iterdir():
        store.put(f"run/{path.name}", path.read_bytes())
    state = {"when": None}
    error = load(state)
    assert isinstance(error, ObjectNotLoadableError)
    assert "when in s3://ckpt/run" in str(error)
    assert state == {"when": None}
    assert load(state, reader(trust_pickle=True)) is None
    assert state == {"when": SECOND}


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_an_object_that_is_not_what_the_record_says(stock: FakeStore, plane: Plane, what: str) -> None:
    """Values would be converted, or cut, unasked."""

    def change(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["w"]
        if what == "dtype":
            tensor.properties = dataclasses.replace(tensor.properties, dtype=torch.float64)
        else:
            tensor.size = tensor.chunks[0].sizes = torch.Size([5])

    change_record(stock, change)
    error = load({"w": torch.zeros(5 if what == "shape" else 6)})
    assert isinstance(error, CorruptCheckpointError)
    assert "is not what the checkpoint's record describes: its object holds torch.float32 of (6,)" in str(error)


@pytest.mark.parametrize("unknown", ["the store's clock", "the record's time", "the data's time", "who wrote it"])
def test_times_that_nobody_tells(stock: FakeStore, plane: Plane, unknown: str) -> None:
    """Of what is not known nothing is made."""
    of_our_url(stock)
    aged(stock, record=10, data=9 if unknown == "the store's clock" else 50)
    if unknown == "the store's clock":
        stock.now = None  # type: ignore[assignment]
    elif unknown == "who wrote it":

        def forget(metadata: Any) -> None:
            metadata.storage_meta = None

        change_record(stock, forget)
    else:
        stock.objects[RECORD if "record" in unknown else "run/__0_0.distcp"].made = None  # type: ignore[assignment]
    assert load(stock_state()) is None


@pytest.mark.parametrize("how", ["etag", "time", "deleted"])
@pytest.mark.parametrize("data", ["good", "damaged"])
def test_a_stock_checkpoint_that_is_replaced(stock: FakeStore, plane: Plane, how: str, data: str) -> None:
    """Another record, or none, behind the load: what was read may be a mixture; data that do not fit are explained by it."""

    def replace(body: bytearray) -> None:
        if data == "damaged":
            body[len(body) // 2] ^= 255
        if how == "deleted":
            stock.objects.pop(RECORD, None)
        elif how == "etag":
            stock.objects[RECORD].etag = '"another"'
        else:
            stock.objects[RECORD].made += SECOND

    plane.change = replace
    error = load(stock_state())
    assert isinstance(error, CheckpointReplacedError)
    assert "replaced or deleted while it was read" in str(error)
    assert error.key == RECORD
    assert load(stock_state(), reader(verify=False)) is None or how == "deleted" or data == "damaged"


def test_a_stock_checkpoint_that_is_damaged(stock: FakeStore, plane: Plane) -> None:
    """With the same record behind it the damage is what it is; the archive's own checksum tells."""

    def damage(body: bytearray) -> None:
        place = body.find(torch.arange(6.0).numpy().tobytes())
        body[place + 5] ^= 1

    plane.change = damage
    error = load(stock_state())
    assert isinstance(error, CorruptCheckpointError)
    assert "w in s3://ckpt/run is damaged" in str(error)
    assert len(plane.ranges) == 2


@pytest.mark.parametrize("answer", [answered(503, "SlowDown"), answered(403, "AccessDenied")])
def test_a_stock_record_that_cannot_be_looked_at_again(stock: FakeStore, plane: Plane, answer: StorageError) -> None:
    """What was loaded stands."""

    def fail(operation: str, key: str) -> None:
        if operation == "head":
            raise answer

    stock.before = fail
    assert load(stock_state()) is None


def test_an_etag_in_another_form(stock: FakeStore, plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes, and a gateway's mark of weakness, make no other record."""
    plain = stock.head

    def head(key: str) -> Any:
        info = plain(key)
        return dataclasses.replace(info, etag=f"W/{info.etag}")

    monkeypatch.setattr(stock, "head", head)
    assert load(stock_state()) is None


@pytest.mark.parametrize(
    "times, ours, error",
    [
        ({"record": 10, "data": 5}, True, None),
        ({"record": 10, "data": 11}, True, None),  # within what clocks may differ
        ({"record": 10, "data": 12}, True, CorruptCheckpointError),
        ({"record": 10, "data": 12}, False, None),  # a copy: its objects have any age
        ({"record": 10, "data": 101}, False, None),
        ({"record": 10, "data": 102}, False, CheckpointReplacedError),
    ],
)
def test_objects_younger_than_their_record(
    stock: FakeStore, plane: Plane, times: dict[str, float], error: type[Exception] | None, *, ours: bool
) -> None:
    """A writer that overwrites in place writes its record last: what is clearly younger is of a save that has not finished."""
    if ours:
        of_our_url(stock)
    aged(stock, **times)
    raised = load(stock_state())
    assert (None if raised is None else type(raised)) is error
    if error is not None:
        assert raised.key == "run/__0_0.distcp"  # type: ignore[union-attr]
        text = "mixture of two" if error is CorruptCheckpointError else "overwritten while it was loaded"
        assert text in str(raised)
    assert load(stock_state(), reader(verify=False)) is None
