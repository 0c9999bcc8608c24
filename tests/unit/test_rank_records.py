"""Records of single ranks (`use_collectives=False`): which of them make up the newest save, and what it costs to tell."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import Counter

import pytest

from dcp_s3 import CheckpointNotFoundError, S3Config, S3StorageReader
from dcp_s3._checkpoint.care import maintenance
from dcp_s3._checkpoint.care.inventory import read_record, read_records
from dcp_s3._checkpoint.care.ranks import check_of_newest_save, newest_save
from dcp_s3._checkpoint.care.verify import verify_checkpoint
from dcp_s3._checkpoint.format.layout import CheckpointUrl, record_rank
from tests.unit.fake_store import FakeStore, save, stock

RUN = CheckpointUrl("ckpt", "run")
SECOND = dt.timedelta(seconds=1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """An empty bucket that the tools look into."""
    fake = FakeStore()
    monkeypatch.setattr(maintenance, "_open", lambda url, config: fake)
    return fake


def save_ranks(store: FakeStore, ranks: list[int], world_size: int, *, step: int = 1, hint: bool = True) -> None:
    """Save what these ranks commit each for itself; a second after whatever was there."""
    store.now += SECOND
    for rank in ranks:
        number = 1000 * step + rank
        save(
            store, RUN, record=f"__{rank}.metadata", write_id=f"{number:032x}", token=f"{number:016x}",
            world_size=world_size, hint=hint,
        )  # fmt: skip


def looked_at(store: FakeStore) -> tuple[str, bool]:
    """What `ls` and `verify` say."""
    (info,) = maintenance.list_checkpoints("s3://ckpt/run")
    report = verify_checkpoint(store, RUN, deep=False)
    assert info.state.startswith("corrupt") == (not report.ok)
    return info.state, report.ok


def test_three_of_four(store: FakeStore) -> None:
    """A world of four ranks of which three have committed is no checkpoint, whichever is missing."""
    save_ranks(store, [0, 1, 2, 3], 4)
    assert looked_at(store)[1]
    for rank in range(4):
        kept = store.objects.pop(f"run/__{rank}.metadata")
        state, good = looked_at(store)
        assert not good
        assert f"1 of the 4 ranks' records are missing, the first is __{rank}.metadata" in state
        store.objects[f"run/__{rank}.metadata"] = kept


def test_what_an_older_and_larger_world_left(store: FakeStore) -> None:
    """Two ranks save where four did: theirs are the checkpoint, the other two count for nothing, and `verify` says so."""
    save_ranks(store, [0, 1, 2, 3], 4)
    save_ranks(store, [0, 1], 2, step=2)
    (info,) = maintenance.list_checkpoints("s3://ckpt/run")
    assert info.records == ("__0.metadata", "__1.metadata")
    assert info.objects == 2
    report = verify_checkpoint(store, RUN, deep=True)
    assert (report.ok, report.objects) == (True, 2)
    assert [note.split(" ")[0] for note in report.notes] == ["s3://ckpt/run/__2.metadata", "s3://ckpt/run/__3.metadata"]


@pytest.mark.parametrize("new", [0, 1])
def test_a_mixture_of_two_saves(store: FakeStore, new: int) -> None:
    """One rank of a save of two has committed where four had: neither checkpoint is there, whichever rank it was."""
    save_ranks(store, [0, 1, 2, 3], 4)
    save_ranks(store, [new], 2, step=2)
    state, good = looked_at(store)
    assert not good
    assert f"__{1 - new}.metadata are of another save, with 4 ranks, than __{new}.metadata with 2" in state


def test_one_rank_where_there_were_two(store: FakeStore) -> None:
    """A world of one rank is whole by itself."""
    save_ranks(store, [0, 1], 2)
    save_ranks(store, [0], 1, step=2)
    assert looked_at(store) == ("committed", True)


def test_what_another_writer_wrote(store: FakeStore) -> None:
    """Nothing says how many ranks there were: a gap is seen, and that the last ones may be missing is said."""
    for rank in range(3):
        stock(store, RUN)
        store.objects[f"run/__{rank}.metadata"] = store.objects.pop("run/.metadata")
    assert looked_at(store) == ("stock", True)
    assert "nothing says how many ranks" in verify_checkpoint(store, RUN, deep=False).notes[0]
    del store.objects["run/__1.metadata"]
    assert not looked_at(store)[1]


def test_beside_a_record_of_all(store: FakeStore) -> None:
    """A load reads `.metadata` if there is one. Ranks' records beside it are no part of it; younger ones are an error."""
    save_ranks(store, [0, 1], 2)
    store.now += SECOND
    save(store, RUN)
    assert looked_at(store) == ("committed", True)
    assert len(verify_checkpoint(store, RUN, deep=False).notes) == 2
    save_ranks(store, [0, 1], 2, step=2)
    state, good = looked_at(store)
    assert not good
    assert "every load gives the older values of .metadata" in state


@pytest.mark.parametrize("ranks", [10, 40])
def test_records_without_user_metadata_cost_no_square(store: FakeStore, ranks: int) -> None:
    """After a copy a record's own bytes tell which index is whose: each is read once, and none is listed."""
    save_ranks(store, list(range(ranks)), ranks, hint=False)
    store.log.clear()
    records = read_records(store, RUN)
    assert all(record.index is not None for record in records)
    assert Counter(operation for operation, _ in store.log) == {"get": 2 * ranks + 1, "list": 1}
    assert newest_save(records).problem == ""


@pytest.mark.parametrize("hint", [True, False])
def test_a_rank_does_not_load_what_an_older_world_left(store: FakeStore, hint: bool) -> None:
    """Ranks 2 and 3 of a load find records of a save of four ranks where the newest had two: refused, not mixed."""
    save_ranks(store, [0, 1, 2, 3], 4, hint=hint)
    save_ranks(store, [0, 1], 2, step=2, hint=hint)
    for rank, step in ((0, 2), (1, 2), (2, 1), (3, 1)):
        record = read_record(store, RUN, f"__{rank}.metadata")
        if step == 2:
            check_of_newest_save(store, RUN, record)
            continue
        with pytest.raises(CheckpointNotFoundError, match=f"rank {rank} .* with 4 ranks, and __0.metadata .* with 2"):
            check_of_newest_save(store, RUN, record)


def test_the_reader_asks(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """`read_metadata(rank=3)`, as DCP calls it, refuses the record that an older world left, also without checking CRCs."""
    save_ranks(store, [0, 1, 2, 3], 4)
    save_ranks(store, [0, 1], 2, step=2)
    monkeypatch.setattr(S3StorageReader, "_store", lambda reader, load: store)
    for verify in (True, False):
        reader = S3StorageReader("s3://ckpt/run", config=S3Config(), verify=verify)
        assert reader.read_metadata(rank=1).storage_meta.save_id == f"{2001:032x}"
        with pytest.raises(
            CheckpointNotFoundError, match=r"no checkpoint of rank 3 at s3://ckpt/run: __3\.metadata was left"
        ):
            reader.read_metadata(rank=3)


def test_where_nothing_is_known_a_rank_loads(store: FakeStore) -> None:
    """Without rank 0's record or index nothing is refused; `.metadata`, and rank 0's own, cost no request."""
    save_ranks(store, [0, 1], 2)
    save_ranks(store, [0], 1, step=2)
    first, second = (read_record(store, RUN, f"__{rank}.metadata") for rank in (0, 1))
    with pytest.raises(CheckpointNotFoundError):
        check_of_newest_save(store, RUN, second)
    del store.objects[f"run/index-{2000:032x}.safetensors.gz"]
    check_of_newest_save(store, RUN, second)
    del store.objects["run/__0.metadata"]
    check_of_newest_save(store, RUN, second)
    store.log.clear()
    check_of_newest_save(store, RUN, first)
    check_of_newest_save(store, RUN, dataclasses.replace(second, name=".metadata"))
    assert store.log == []


@pytest.mark.parametrize(
    "name, rank",
    [(".metadata", None), ("__0.metadata", 0), ("__17.metadata", 17), ("__01.metadata", None), ("x", None)],
)
def test_the_rank_in_a_name(name: str, rank: int | None) -> None:
    """Read back from the record's name."""
    assert record_rank(name) == rank
