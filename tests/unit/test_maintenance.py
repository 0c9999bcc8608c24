"""Listing checkpoints, and the tools' front: URLs, configuration, no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dcp_s3
from dcp_s3 import AccessDeniedError, ConfigError, S3Config
from dcp_s3._checkpoint.care import maintenance, survey
from dcp_s3._checkpoint.format.layout import CheckpointUrl
from tests.unit.fake_store import DAY, EPOCH, FakeStore, denied, flip, save, stock

RUN = CheckpointUrl("ckpt", "run")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    fake = FakeStore()
    monkeypatch.setattr(maintenance, "ControlStore", lambda config, bucket: fake)
    return fake


def test_checkpoints_below_a_root_in_the_order_of_their_numbers(store: FakeStore) -> None:
    """step-9 comes before step-10, whatever strings say; what was saved later has a later time."""
    for step in (10, 9, 100):
        store.now += DAY
        save(store, RUN.child(f"step-{step}"))
    found = maintenance.list_checkpoints("s3://ckpt/run")
    assert [info.url for info in found] == [f"s3://ckpt/run/step-{step}" for step in (9, 10, 100)]
    assert [info.committed_at for info in found] == [EPOCH + 2 * DAY, EPOCH + DAY, EPOCH + 3 * DAY]


def test_what_is_said_of_a_checkpoint(store: FakeStore) -> None:
    """Record, write id, size and number of objects."""
    keys = save(store, RUN)
    (info,) = maintenance.list_checkpoints("s3://ckpt/run")
    assert info == maintenance.CheckpointInfo(
        url="s3://ckpt/run",
        records=(".metadata",),
        write_id="ab" * 16,
        committed_at=EPOCH,
        bytes=4752 + len(store.objects[keys[-1]].body),
        objects=1,
        ours=True,
        state="committed",
    )


def test_a_checkpoint_at_the_url_and_others_below_it(store: FakeStore) -> None:
    """A URL can be a checkpoint and hold others; so can a bucket without a prefix."""
    for url in (CheckpointUrl("ckpt", ""), RUN, RUN.child("eval/best"), RUN.child("data"), RUN.child("data/x")):
        save(store, url)
    assert [info.url for info in maintenance.list_checkpoints("s3://ckpt")] == [
        "s3://ckpt",
        "s3://ckpt/run",
        "s3://ckpt/run/data",
        "s3://ckpt/run/data/x",
        "s3://ckpt/run/eval/best",
    ]
    assert [info.url for info in maintenance.list_checkpoints("s3://ckpt/run/eval")] == ["s3://ckpt/run/eval/best"]


def test_a_prefix_is_a_directory(store: FakeStore) -> None:
    """`run` does not list what lies in `run2`, or in `run` with something behind it."""
    save(store, CheckpointUrl("ckpt", "run2"))
    save(store, CheckpointUrl("ckpt", "run-old/step-1"))
    assert maintenance.list_checkpoints("s3://ckpt/run") == []


def test_uncommitted_saves_are_no_checkpoints(store: FakeStore) -> None:
    """Data and index without a record are nothing; neither is a stock writer's temporary record."""
    *_, record = save(store, RUN.child("step-20"))
    store.objects[RUN.child("step-20").key(".metadata.tmp")] = store.objects.pop(record)
    assert maintenance.list_checkpoints("s3://ckpt/run") == []


def test_uncommitted_saves_are_told_when_asked_for(store: FakeStore) -> None:
    """Data, or an index that is left, without a record: size and number of the data objects of all ranks."""
    data, index, record = save(store, RUN.child("step-20"))
    store.put(data.replace("0123456789abcdef/__0", "fedcba9876543210/__1"), b"x")
    del store.objects[record]
    save(store, RUN.child("step-3"))
    store.put(RUN.child("step-4").key("notes.txt"), b"")
    three, twenty = maintenance.list_checkpoints("s3://ckpt/run", uncommitted=True)
    assert three.state == "committed"
    assert twenty == maintenance.CheckpointInfo(
        url="s3://ckpt/run/step-20",
        records=(),
        write_id=None,
        committed_at=None,
        bytes=4753,
        objects=2,
        ours=True,
        state="uncommitted",
    )
    del store.objects[data], store.objects[data.replace("0123456789abcdef/__0", "fedcba9876543210/__1")]
    assert [info.bytes for info in maintenance.list_checkpoints("s3://ckpt/run", uncommitted=True)] == [three.bytes, 0]
    assert index in store.objects
    assert maintenance.list_checkpoints("s3://ckpt/run") == [three]


@pytest.mark.parametrize("page", [survey.PAGE, 3], ids=["on a page", "on several"])
def test_a_url_that_looks_like_a_saves_data(store: FakeStore, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    """`data/<16 hex digits>` can be a checkpoint's URL, ours or a stock writer's, whose objects are nobody else's."""
    monkeypatch.setattr(survey, "PAGE", page)
    ours, theirs = RUN.child("data/0123456789abcdef"), RUN.child("data/fedcba9876543210")
    save(store, ours)
    stock(store, theirs)
    assert [(info.url, info.state) for info in maintenance.list_checkpoints("s3://ckpt/run", uncommitted=True)] == [
        (str(ours), "committed"),
        (str(theirs), "stock"),
    ]
    save(store, RUN, token="0000000000000000")
    assert [(info.url, info.objects) for info in maintenance.list_checkpoints("s3://ckpt/run", uncommitted=True)] == [
        ("s3://ckpt/run", 1),
        (str(ours), 1),
        (str(theirs), 1),
    ]


def test_the_collector_leaves_a_url_that_looks_like_a_saves_data(store: FakeStore) -> None:
    """A stock checkpoint at `data/<16 hex digits>` is not the orphan of a save above it; beside it orphans go."""
    keys = stock(store, RUN.child("data/fedcba9876543210"))
    orphan = RUN.key("data/0123456789abcdef/__0_0.distcp")
    store.put(orphan, b"orphan")
    store.now += 2 * DAY
    assert maintenance.collect_garbage("s3://ckpt/run", dry_run=False).removed == (orphan,)
    assert set(keys) <= set(store.objects)


def test_what_fits_on_a_page_is_one_request(store: FakeStore) -> None:
    """200 checkpoints as saves leave them are told by one listing: no record and no index is read."""
    for step in range(200):
        save(store, RUN.child(f"step-{step}"))
    store.log.clear()
    assert len(maintenance.list_checkpoints("s3://ckpt/run")) == 200
    assert store.log == [("list", "run/")]


def test_a_large_checkpoint_costs_few_requests(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with more objects than a page, beside others: its folders of data are not looked at one by one."""
    monkeypatch.setattr(survey, "PAGE", 20)
    for step in (1, 2, 3):
        save(store, RUN.child(f"step-{step}"))
    for rank in range(1, 300):
        store.put(RUN.child("step-2").key(f"data/{rank:016x}/__{rank}_0.distcp"), b"x")
        store.put(RUN.child("step-4").key(f"data/{rank:016x}/__{rank}_0.distcp"), b"x")
    store.log.clear()
    found = {info.url[-6:]: info for info in maintenance.list_checkpoints("s3://ckpt/run", uncommitted=True)}
    assert {name: (info.state, info.objects) for name, info in found.items()} == {
        "step-1": ("committed", 1),
        "step-2": ("committed", 300),
        "step-3": ("committed", 1),
        "step-4": ("uncommitted", 299),
    }
    assert len(store.log) < 30


def test_indexes_of_other_times_are_looked_at(store: FakeStore) -> None:
    """A record that was not written right after the one index there is may be another writer's: it is read."""
    save(store, RUN)
    store.now += DAY
    stock(store, RUN)
    (info,) = maintenance.list_checkpoints("s3://ckpt/run")
    assert (info.state, info.write_id) == ("stock", None)


def test_a_run_is_verified(store: FakeStore) -> None:
    """Each checkpoint below a URL, by number, with its own problems; nothing where none is; attempts are no checkpoints."""
    for step in (10, 9):
        save(store, RUN.child(f"step-{step}"))
    store.put("run/step-11/data/0123456789abcdef/__0_0.distcp", b"x")
    flip(store, "run/step-9/data/0123456789abcdef/__0_0.distcp", 0)
    assert [(each.url, each.ok) for each in dcp_s3.verify_all("s3://ckpt/run")] == [
        ("s3://ckpt/run/step-9", True),
        ("s3://ckpt/run/step-10", True),
    ]
    assert [each.ok for each in dcp_s3.verify_all("s3://ckpt/run", deep=True)] == [False, True]
    assert dcp_s3.verify_all("s3://ckpt/other") == []


def test_what_changes_while_a_run_is_verified(store: FakeStore) -> None:
    """A checkpoint that is deleted meanwhile is left out; one that is replaced without end is not called good."""
    for step in (1, 2, 3):
        save(store, RUN.child(f"step-{step}"))
    del store.objects["run/step-3/data/0123456789abcdef/__0_0.distcp"]

    def meddle(operation: str, key: str) -> None:
        if operation == "get" and key == "run/step-1/.metadata":
            store.objects.pop(key, None)
        if operation == "head" and key == "run/step-3/.metadata":
            store.objects[key].etag += "x"

    store.before = meddle
    two, three = dcp_s3.verify_all("s3://ckpt/run")
    assert (two.url, two.ok) == ("s3://ckpt/run/step-2", True)
    assert (three.ok, three.problems) == (
        False,
        ("s3://ckpt/run/step-3 was replaced while it was verified; verify it again",),
    )


def test_records_of_single_ranks_are_one_checkpoint(store: FakeStore) -> None:
    """`use_collectives=False` leaves one record per rank: one entry that names them all."""
    for rank in range(11):
        save(store, RUN, record=f"__{rank}.metadata", write_id=f"{rank:032x}", token=f"{rank:016x}", world_size=11)
    (info,) = maintenance.list_checkpoints("s3://ckpt/run")
    assert info.records == tuple(f"__{rank}.metadata" for rank in range(11))
    assert (info.state, info.objects, info.write_id, info.ours) == ("committed", 11, None, True)


def test_another_writers_checkpoint(store: FakeStore) -> None:
    """A stock checkpoint is listed as such, with the size that its record names."""
    stock(store, RUN)
    (info,) = maintenance.list_checkpoints("s3://ckpt/run")
    assert (info.state, info.ours, info.objects) == ("stock", False, 1)
    assert info.bytes == 4752 + len(store.objects["run/.metadata"].body)
    assert info.write_id is None


def test_damage_that_listing_sees(store: FakeStore) -> None:
    """A record cut in half, one of ours that is not as its index says, and one without an index are corrupt.

    (With an index that is younger than the record: of what looks as a save leaves it, the content is verify's business.)
    """
    *_, record = save(store, RUN.child("cut"), index=False)
    store.objects[record].body = store.objects[record].body[:500]
    *_, index, record = save(store, RUN.child("flipped"))
    flip(store, record, store.objects[record].body.index(b"1.0.0"))
    store.now += DAY
    store.put(index, store.objects[index].body)
    save(store, RUN.child("lost"), index=False)
    save(store, RUN.child("lost2"), index=False, hint=False)
    found = {info.url.rpartition("/")[2]: info for info in maintenance.list_checkpoints("s3://ckpt/run")}
    assert found["cut"].state.startswith("corrupt: s3://ckpt/run/cut/.metadata ")
    assert found["flipped"].state == (
        f"corrupt: .metadata: its bytes are not those that index-{'ab' * 16}.safetensors.gz was written for"
    )
    lost = f"corrupt: .metadata: its index index-{'ab' * 16}.safetensors.gz is missing"
    assert found["lost"].state == found["lost2"].state == lost
    assert not any(info.ours for info in found.values())


def test_the_index_is_found_without_user_metadata(store: FakeStore) -> None:
    """A copy that lost the record's user metadata, beside the indexes of other saves, is still told from them."""
    *_, index, _ = save(store, RUN, write_id="01" * 16)
    store.put(index.replace("01" * 16, "00" * 16), b"{}")
    save(store, RUN, write_id="02" * 16, hint=False)
    (info,) = maintenance.list_checkpoints("s3://ckpt/run")
    assert (info.state, info.write_id) == ("committed", "02" * 16)


def test_data_objects_are_not_listed(store: FakeStore) -> None:
    """2,000 shards of one checkpoint cost no pages: listing never descends to data objects."""
    save(store, RUN)
    for rank in range(2000):
        store.objects[RUN.key(f"data/{rank:016x}/__{rank}_0.distcp")] = next(iter(store.objects.values()))
    store.log.clear()
    assert len(maintenance.list_checkpoints("s3://ckpt/run")) == 1
    assert not [key for operation, key in store.log if operation.startswith("list") and key.startswith("run/data/0")]


def test_a_refusal_is_not_an_empty_list(store: FakeStore) -> None:
    """Without permission to list there is an error, and the rest is not tried."""
    save(store, RUN)
    store.before = lambda operation, key: denied(operation, key) if operation.startswith("list") else None
    with pytest.raises(AccessDeniedError):
        maintenance.list_checkpoints("s3://ckpt/run")


@pytest.mark.parametrize(
    "call",
    [maintenance.list_checkpoints, maintenance.verify, maintenance.collect_garbage, maintenance.abort_stale_uploads],
)
def test_urls_are_checked_before_anything_is_sent(call: object) -> None:
    """A wrong URL is a ConfigError of every tool."""
    with pytest.raises(ConfigError, match="must look like s3://"):
        call("/local/run", config=S3Config())


def test_the_public_names() -> None:
    """The front door has the tools."""
    assert dcp_s3.list_checkpoints is maintenance.list_checkpoints
    assert dcp_s3.verify is maintenance.verify
    assert dcp_s3.verify_all is maintenance.verify_all
    assert dcp_s3.collect_garbage is maintenance.collect_garbage
    assert dcp_s3.abort_stale_uploads is maintenance.abort_stale_uploads


def test_torch_is_not_imported() -> None:
    """Tools and command line load without torch and without the data plane, in a process of their own."""
    code = (
        "import sys, dcp_s3, dcp_s3.cli.commands, dcp_s3.cli\n"
        "dcp_s3.list_checkpoints, dcp_s3.verify, dcp_s3.collect_garbage, dcp_s3.abort_stale_uploads\n"
        "assert not {'torch', 'aiobotocore', 'aiohttp'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
