"""Garbage collection removes what no record names, and never anything else."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import AccessDeniedError, ConfigError, S3Config, StorageError, StorageUnavailableError
from dcp_s3._checkpoint.care import garbage, maintenance
from dcp_s3._checkpoint.format.layout import CheckpointUrl
from tests.unit.fake_store import DAY, FakeStore, denied, flip, save, stock

RUN = CheckpointUrl("ckpt", "run")
HOUR = dt.timedelta(hours=1)
FOREIGN = [
    "run/notes.txt",
    "run/__0_0.distcp",
    "run/data/readme",
    "run/data/0123456789abcdef/__0_0.distcp.bak",
    "run/data/0123456789abcdef/x/__0_0.distcp",
    "run/data/0123456789ABCDEF/__0_0.distcp",
    "run/index.json",
    "run/index-1.json",
    "run2/data/0123456789abcdef/__0_0.distcp",
    "data/0123456789abcdef/__0_0.distcp",
    "other/.metadata",
]


def collect(store: FakeStore, url: CheckpointUrl = RUN, *, dry_run: bool = False, older_than_s: float = 86400.0):
    return garbage.collect(store, url, dry_run=dry_run, older_than_s=older_than_s)


@pytest.fixture
def store() -> FakeStore:
    """A live checkpoint, what a replaced and a failed save left, and foreign objects; all two days old."""
    fake = FakeStore()
    fake.put("run/data/1111111111111111/__0_0.distcp", b"failed")
    fake.put("run/data/1111111111111111/__12_3.distcp", b"failed")
    fake.put(f"run/index-{'11' * 16}.safetensors.gz", b"replaced")
    for key in FOREIGN:
        fake.put(key, b"foreign")
    save(fake, RUN)
    fake.now += 2 * DAY
    fake.log.clear()
    return fake


GARBAGE = (
    "run/data/1111111111111111/__0_0.distcp",
    "run/data/1111111111111111/__12_3.distcp",
    f"run/index-{'11' * 16}.safetensors.gz",
)


def test_exactly_what_no_record_names(store: FakeStore) -> None:
    """The failed save's data and the replaced index go, index last; everything else stays, byte for byte."""
    before = dict(store.objects)
    report = collect(store)
    assert report.removed == GARBAGE
    assert report.removed_bytes == 20
    assert (report.live, report.waiting, report.refused, report.skipped) == (2, 0, (), ())
    assert store.objects == {key: stored for key, stored in before.items() if key not in GARBAGE}
    deleted = [key for operation, key in store.log if operation == "delete"]
    assert sorted(deleted[:2]) == sorted(GARBAGE[:2])
    assert deleted[2] == GARBAGE[2]


def test_a_dry_run_deletes_nothing(store: FakeStore) -> None:
    """It reports the same, and sends no request that changes anything."""
    report = collect(store, dry_run=True)
    assert report.removed == GARBAGE
    assert {operation for operation, _ in store.log} <= {"list", "list_uploads", "get", "head"}


def test_a_second_run_finds_nothing(store: FakeStore) -> None:
    """What was collected is gone."""
    collect(store)
    assert collect(store).removed == ()


def test_young_objects_wait(store: FakeStore) -> None:
    """What is within the margin, to the second, may belong to a save that still runs."""
    store.now += -DAY
    assert collect(store).removed == ()
    assert collect(store).waiting == 3
    store.now += dt.timedelta(seconds=1)
    assert collect(store).removed == GARBAGE


def test_the_stores_clock_decides(store: FakeStore) -> None:
    """This machine's clock is not asked: by it the objects are of another day than by the store's."""
    made = store.objects[GARBAGE[0]].made
    assert abs(dt.datetime.now(dt.UTC) - made) > 2 * DAY
    store.now = made + HOUR
    assert collect(store).removed == ()


def test_the_clock_is_read_at_the_first_page(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that takes hours does not make the objects of its last page older."""
    store.now = store.objects[GARBAGE[0]].made + DAY
    listed = store.list

    def slow(prefix: str, **options: object):
        for info in listed(prefix, **options):
            yield info
            store.now += HOUR

    monkeypatch.setattr(store, "list", slow)
    assert collect(store).removed == ()


def test_the_clock_is_not_read_again_for_the_uploads(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of uploads that takes hours makes no object, and no upload of its last page, older."""
    made = store.objects[GARBAGE[0]].made
    store.now = made + DAY
    store.start_upload("run/data/2222222222222222/__0_0.distcp")
    store.start_upload("run/data/2222222222222222/__0_1.distcp")
    store.uploads = [dataclasses.replace(upload, initiated=made) for upload in store.uploads]
    listed = store.list_uploads

    def slow(prefix: str):
        for upload in listed(prefix):
            store.now += HOUR
            yield upload

    monkeypatch.setattr(store, "list_uploads", slow)
    report = collect(store)
    assert (report.removed, report.aborted) == ((), ())


@pytest.mark.parametrize("what", ["objects", "uploads"])
def test_what_has_no_time_is_not_old(store: FakeStore, what: str) -> None:
    """A store that does not say when something was written says nothing of its age: it stays."""
    if what == "objects":
        for stored in store.objects.values():
            stored.made = None
    else:
        store.start_upload("run/data/1111111111111111/__0_1.distcp")
        store.uploads = [dataclasses.replace(upload, initiated=None) for upload in store.uploads]
    store.now += 2 * DAY
    report = collect(store)
    assert report.removed == (() if what == "objects" else GARBAGE)
    assert report.aborted == ()


def test_a_store_without_a_clock_collects_nothing(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Date header: an error, never a guess."""

    def unknown() -> dt.datetime:
        raise StorageUnavailableError("no Date header")

    monkeypatch.setattr(store, "server_time", unknown)
    with pytest.raises(StorageUnavailableError):
        collect(store)
    assert GARBAGE[0] in store.objects


def test_a_save_that_never_committed(store: FakeStore) -> None:
    """Without any record, everything of ours that is old enough is garbage; foreign objects stay."""
    del store.objects["run/.metadata"]
    report = collect(store)
    assert len(report.removed) == 5
    assert set(store.objects) == set(FOREIGN)


def test_nothing_is_touched_beside_another_writers_record(store: FakeStore) -> None:
    """A record without an index cannot say what it needs: everything at its URL stays, and the report says why."""
    stock(store, RUN)
    store.now += 2 * DAY
    before = set(store.objects)
    report = collect(store)
    assert (set(store.objects), report.removed) == (before, ())
    assert "s3://ckpt/run has a commit record without a matching index" in report.skipped[0]


@pytest.mark.parametrize("damage", ["flipped record", "garbled record", "empty record", "lost index", "cut index"])
def test_nothing_is_touched_beside_a_damaged_record(store: FakeStore, damage: str) -> None:
    """As long as what is live cannot be told, nothing is deleted; its upload is not aborted either."""
    index = f"run/index-{'ab' * 16}.safetensors.gz"
    match damage:
        case "flipped record":
            flip(store, "run/.metadata", 300)
        case "garbled record":
            store.objects["run/.metadata"].body = b"garbage"
        case "empty record":
            store.objects["run/.metadata"].body = b""
        case "lost index":
            del store.objects[index]
        case "cut index":
            store.objects[index].body = store.objects[index].body[:-50]
    store.now -= 2 * DAY
    store.start_upload("run/data/2222222222222222/__0_0.distcp")
    store.now += 2 * DAY
    before = set(store.objects)
    report = collect(store)
    assert (set(store.objects), report.removed, report.aborted, len(store.uploads)) == (before, (), (), 1)
    assert len(report.skipped) == 1


def test_each_checkpoint_has_its_own_data(store: FakeStore) -> None:
    """Objects belong to the checkpoint directly above: a broken one protects its own only, a whole one names its own only."""
    child = RUN.child("step-2")
    save(store, child, write_id="cd" * 16, token="2222222222222222")
    orphan = store.put(child.key("data/3333333333333333/__0_0.distcp"), b"orphan")
    assert orphan
    flip(store, "run/.metadata", 300)
    store.now += 2 * DAY
    report = collect(store)
    assert report.removed == (child.key("data/3333333333333333/__0_0.distcp"),)
    assert len(report.skipped) == 1


@pytest.mark.parametrize("record", [".metadata", "__0.metadata"])
def test_another_writers_checkpoint_at_a_url_like_our_data(store: FakeStore, record: str) -> None:
    """Beside a record `__0_0.distcp` is its data, whatever the folder is called: not the garbage of the URL two above."""
    place = RUN.child("data/5555555555555555")
    store.put(place.key("__0_0.distcp"), b"theirs")
    store.put(place.key(record), b"theirs")
    store.now += 2 * DAY
    report = collect(store)
    assert report.removed == GARBAGE
    assert place.key("__0_0.distcp") in store.objects


def test_a_checkpoint_above_the_url_is_not_asked_about(store: FakeStore) -> None:
    """`gc s3://ckpt/run/data` is about checkpoints in there, not about the data of `run`."""
    assert collect(store, RUN.child("data")).removed == ()
    assert collect(store, CheckpointUrl("ckpt", "run/data/1111111111111111")).removed == ()
    assert collect(store, CheckpointUrl("ckpt", "ru")).removed == ()


def test_a_whole_bucket(store: FakeStore) -> None:
    """Without a prefix, what lies at the top is garbage of a checkpoint at the bucket's top."""
    assert set(collect(store, CheckpointUrl("ckpt", "")).removed) == {
        *GARBAGE,
        "data/0123456789abcdef/__0_0.distcp",
        "run2/data/0123456789abcdef/__0_0.distcp",
    }


def test_records_of_single_ranks_all_live() -> None:
    """Every `__<rank>.metadata` keeps what its index names, beside a `.metadata` too."""
    store = FakeStore()
    live = [
        key
        for rank in (0, 1)
        for key in save(store, RUN, record=f"__{rank}.metadata", write_id=f"{rank:032x}", token=f"{rank:016x}")
    ]
    live += save(store, RUN)
    store.put("run/data/1111111111111111/__0_0.distcp", b"")
    store.now += 2 * DAY
    assert collect(store).removed == ("run/data/1111111111111111/__0_0.distcp",)
    assert set(store.objects) == set(live)


def test_a_commit_after_the_listing_is_seen(store: FakeStore) -> None:
    """Objects are listed before records are read: a save that commits in between loses nothing."""
    late = save(FakeStore(), RUN, write_id="ef" * 16, token="4444444444444444")
    store.now -= 2 * DAY
    save(store, RUN, write_id="ef" * 16, token="4444444444444444")
    store.now += 2 * DAY
    committed = store.objects.pop("run/.metadata")

    def commit(operation: str, key: str) -> None:
        if operation == "list_uploads":
            store.objects["run/.metadata"] = committed

    store.before = commit
    report = collect(store)
    assert set(late) <= set(store.objects)
    assert not set(late) & set(report.removed)


@pytest.mark.parametrize("how", ["replaced", "created", "by a rank", "gone"])
def test_a_commit_before_the_first_deletion_stops_it(store: FakeStore, how: str) -> None:
    """The records are looked at again right before anything is deleted; any change leaves the URL to the next run."""
    record = store.objects["run/.metadata"]
    if how == "created":
        del store.objects["run/.metadata"]

    def commit(operation: str, key: str) -> None:
        if (operation, key) != ("list", "run/__") or store.log.count((operation, key)) != 2:
            return  # the second look begins with this request
        match how:
            case "replaced":
                store.put("run/.metadata", b"new")
            case "created":
                store.objects["run/.metadata"] = record
            case "by a rank":
                store.put("run/__0.metadata", b"new")
            case "gone":
                del store.objects["run/.metadata"]

    store.before = commit
    report = collect(store)
    assert report.removed == ()
    assert "was committed to while garbage was collected" in report.skipped[0]
    assert not [key for operation, key in store.log if operation == "delete"]


def test_the_records_are_looked_at_again_between_batches(store: FakeStore) -> None:
    """1,200 deletions take their time: a commit meanwhile stops the rest."""
    store.now -= 2 * DAY
    for n in range(1200):
        store.put(f"run/data/2222222222222222/__{n}_0.distcp", b"")
    store.now += 2 * DAY

    def commit(operation: str, key: str) -> None:
        if operation == "delete" and "run/.metadata" in store.objects:
            store.objects["run/.metadata"].etag = "new"

    store.before = commit
    report = collect(store)
    assert len(report.removed) == 500
    assert len(report.skipped) == 1


def test_stale_uploads_of_ours_are_aborted(store: FakeStore) -> None:
    """Old uploads of our data objects; not young ones, and not other people's."""
    store.now -= 2 * DAY
    for key in ("run/data/2222222222222222/__0_0.distcp", "run/big.bin", "run/index-" + "22" * 16 + ".safetensors.gz"):
        store.start_upload(key)
    store.now += 2 * DAY
    store.start_upload("run/data/3333333333333333/__0_0.distcp")
    report = collect(store)
    assert report.aborted == ("run/data/2222222222222222/__0_0.distcp",)
    assert [upload.key for upload in store.uploads] == [
        "run/big.bin",
        "run/index-" + "22" * 16 + ".safetensors.gz",
        "run/data/3333333333333333/__0_0.distcp",
    ]


def test_an_upload_of_a_checkpoint_above_the_url(store: FakeStore) -> None:
    """It was not asked about, nor is what only looks like ours."""
    store.start_upload("run/data/2222222222222222/__0_0.distcp")
    store.start_upload("run/data/notes.distcp")
    store.now += 2 * DAY
    for run in (garbage.collect, garbage.abort_uploads):
        for url in (RUN.child("data"), CheckpointUrl("ckpt", "run/data/2222222222222222")):
            assert run(store, url, dry_run=False, older_than_s=86400).aborted == ()
    assert len(store.uploads) == 2


def test_young_uploads_wait_where_no_writer_runs(store: FakeStore) -> None:
    """The margin that was asked for holds for uploads, too."""
    store.start_upload("run/data/2222222222222222/__0_0.distcp")
    store.now += HOUR
    for run in (garbage.collect, garbage.abort_uploads):
        assert run(store, RUN, dry_run=True, older_than_s=3600, no_writer_runs=True).aborted == ()
        assert len(run(store, RUN, dry_run=True, older_than_s=3599, no_writer_runs=True).aborted) == 1


def test_uploads_alone(store: FakeStore) -> None:
    """abort_uploads leaves the objects; with dry_run it leaves everything."""
    store.now -= 2 * DAY
    for n in range(1001):
        store.start_upload(f"run/data/2222222222222222/__{n}_0.distcp")
    store.now += 2 * DAY
    before = set(store.objects)
    assert len(garbage.abort_uploads(store, RUN, dry_run=True, older_than_s=86400).aborted) == 1001
    assert len(store.uploads) == 1001
    assert len(garbage.abort_uploads(store, RUN, dry_run=False, older_than_s=86400).aborted) == 1001
    assert (store.uploads, set(store.objects)) == ([], before)


def test_a_store_that_cannot_list_uploads(store: FakeStore) -> None:
    """The objects are collected all the same, and the report says what was left out."""

    def refuse(operation: str, key: str) -> None:
        if operation == "list_uploads":
            raise StorageError("not implemented").with_context(status=501, code="NotImplemented")

    store.before = refuse
    report = collect(store)
    assert report.removed == GARBAGE
    assert "could not be listed" in report.notes[0]


def test_uploads_that_could_be_listed_in_part(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is aborted, as the report says; the objects are collected."""
    store.start_upload("run/data/2222222222222222/__0_0.distcp")
    store.now += 2 * DAY
    listed = store.list_uploads

    def fail_half_way(prefix: str):
        yield from listed(prefix)
        raise AccessDeniedError("no").with_context(status=403, code="AccessDenied")

    monkeypatch.setattr(store, "list_uploads", fail_half_way)
    report = collect(store)
    assert (report.removed, report.aborted, len(store.uploads)) == (GARBAGE, (), 1)
    assert "so none was aborted" in report.notes[0]


def test_a_locked_object_is_reported(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """Object Lock refuses one deletion: the others are done, it is named, and the store's words are told."""
    store.before = lambda operation, key: denied(operation, key) if (operation, key) == ("delete", GARBAGE[0]) else None
    report = collect(store)
    assert report.refused == GARBAGE[:1]
    assert report.removed == GARBAGE[1:]
    assert report.notes[0].startswith("1 deletions were refused, the last with: no [")
    assert "the store refused 1 deletions" in caplog.text


def test_an_upload_that_may_not_be_aborted(store: FakeStore) -> None:
    """It is named among what was refused, and is not said to be gone."""
    keys = [f"run/data/2222222222222222/__0_{n}.distcp" for n in range(2)]
    for key in keys:
        store.start_upload(key)
    store.now += 2 * DAY
    store.before = lambda operation, key: denied(operation, key) if (operation, key) == ("abort", keys[0]) else None
    report = garbage.abort_uploads(store, RUN, dry_run=False, older_than_s=86400)
    assert (report.refused, report.aborted) == ((keys[0],), (keys[1],))
    assert report.notes[0].startswith("1 deletions were refused, the last with: no [")


@pytest.mark.parametrize("operation", ["list_uploads", "head"])
def test_a_store_that_does_not_answer_a_question(store: FakeStore, operation: str) -> None:
    """An outage is no answer: neither the uploads are taken to be unlistable, nor an object to have no deadline."""
    silent = StorageUnavailableError("503")

    def fail(asked: str, key: str) -> None:
        if asked == operation:
            raise silent

    store.before = fail
    with pytest.raises(StorageUnavailableError) as caught:
        collect(store)
    assert caught.value is silent
    assert set(GARBAGE) <= set(store.objects)


def test_how_long_it_took(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says so, in seconds."""
    clock = iter(range(1000, 2000, 7))
    monkeypatch.setattr(garbage.time, "monotonic", lambda: float(next(clock)))
    run = garbage._Run(store, RUN, dry_run=True, older_than_s=86400, no_writer_runs=False)
    assert run.report().seconds == 7.0


def test_a_store_that_fails_stops_it(store: FakeStore) -> None:
    """An outage in the middle is an error, not a report of success."""

    def fail(operation: str, key: str) -> None:
        if operation == "delete":
            raise StorageUnavailableError("503")

    store.before = fail
    with pytest.raises(StorageUnavailableError):
        collect(store)


@pytest.mark.parametrize(
    "older_than_s, deadline, fine",
    [
        (86400, None, True),
        (2400, None, True),
        (2399, None, False),
        (4500, 3600, True),
        (4499, 3600, False),
        (0, None, False),
        (-1, None, False),
        (float("nan"), None, False),
    ],
)
def test_a_margin_in_which_a_save_could_still_commit_is_refused(
    older_than_s: float, deadline: float | None, *, fine: bool
) -> None:
    """Save deadline plus 900 s is the least; the text says how to go on."""
    if fine:
        garbage.check_margin(older_than_s, deadline, no_writer_runs=False)
        return
    with pytest.raises(ConfigError, match="older_than_s"):
        garbage.check_margin(older_than_s, deadline, no_writer_runs=False)
    if older_than_s >= 0:
        garbage.check_margin(older_than_s, deadline, no_writer_runs=True)


@pytest.mark.parametrize("call", [maintenance.collect_garbage, maintenance.abort_stale_uploads])
def test_the_tools_refuse_a_small_margin(call: object) -> None:
    """Both entry points check it against the config's deadline, before any request."""
    with pytest.raises(ConfigError, match="no_writer_runs"):
        call("s3://ckpt/run", older_than_s=3600, config=S3Config(save_deadline_s=3000))


def test_the_lifecycle_rule(store: FakeStore) -> None:
    """Old versions and stale uploads below the prefix; valid JSON in S3's form."""
    rule = json.loads(collect(store).lifecycle_rule)["Rules"][0]
    assert rule["Filter"] == {"Prefix": "run/"}
    assert rule["Status"] == "Enabled"
    assert rule["NoncurrentVersionExpiration"] == {"NoncurrentDays": 7}
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}


PLACES = [RUN, RUN.child("step-1"), RUN.child("data"), RUN.child("step-1/data")]


@given(
    saves=st.lists(
        st.tuples(
            st.sampled_from(PLACES),
            st.sampled_from([".metadata", "__0.metadata"]),
            st.booleans(),
        ),
        max_size=6,
    ),
    age_days=st.integers(0, 3),
)
def test_whatever_was_saved_the_live_checkpoints_stay(saves: list, age_days: int) -> None:
    """After any sequence of saves that did or did not commit: what the last records need is there, and nothing else of age."""
    store = FakeStore()
    last: dict[tuple[CheckpointUrl, str], list[str]] = {}
    for number, (url, record, committed) in enumerate(saves):
        write_id = f"{number:032x}"
        keys = save(
            store, url, write_id=write_id, token=f"{number:016x}", record=record if committed else "uncommitted"
        )
        if committed:
            last[url, record] = keys
        else:
            del store.objects[keys[-1]]
    live = {key for keys in last.values() for key in keys}
    everything = set(store.objects)
    store.now += age_days * DAY
    report = collect(store)
    assert set(store.objects) == (live if age_days > 1 else everything)
    assert report.skipped == ()


def of_a_long_save(store: FakeStore, token: str, deadline: str, objects: int = 1) -> list[str]:
    """Put what a save with this deadline has written by now."""
    keys = [f"run/data/{token}/__0_{n}.distcp" for n in range(objects)]
    for key in keys:
        store.put(key, b"long", metadata={"dcp-s3-token": token, "dcp-s3-save-s": deadline})
    return keys


def test_a_save_tells_how_long_it_may_take(store: FakeStore) -> None:
    """Beyond the margin its objects wait for its deadline and 900 s; one request asks for all of a rank. Then they go."""
    keys = of_a_long_save(store, "4" * 16, "172800", objects=5)
    for age in (DAY + HOUR, 2 * DAY + dt.timedelta(seconds=900)):
        store.now = store.objects[keys[0]].made + age
        store.log.clear()
        report = collect(store, dry_run=True)
        assert report.waiting == 5
        assert "173700 s" in report.notes[0]
        assert [key for operation, key in store.log if operation == "head" and "4444" in key] == keys[:1]
        assert not set(keys) & set(report.removed)
    store.now += dt.timedelta(seconds=1)
    report = collect(store)
    assert set(keys) < set(report.removed)
    assert (report.waiting, report.notes) == (0, ())


def test_where_no_writer_runs_nothing_is_asked(store: FakeStore) -> None:
    """The margin alone counts then, and no object is looked at."""
    keys = of_a_long_save(store, "4" * 16, "172800")
    store.now += DAY + HOUR
    report = garbage.collect(store, RUN, dry_run=True, older_than_s=86400, no_writer_runs=True)
    assert set(keys) < set(report.removed)
    assert not [key for operation, key in store.log if operation == "head" and "/data/" in key]


@pytest.mark.parametrize("deadline", ["", "soon", "-5", "1e9", "\u0663", "9" * 400])
def test_what_is_no_deadline_is_not_taken_for_one(store: FakeStore, deadline: str) -> None:
    """Whatever stands there in place of seconds: the margin decides."""
    keys = of_a_long_save(store, "4" * 16, deadline)
    store.now += DAY + HOUR
    assert set(keys) < set(collect(store).removed)


def test_objects_that_cannot_be_asked_stay(store: FakeStore) -> None:
    """A store that refuses the question says nothing of the deadline: what it is about is left, and the report says why."""
    keys = of_a_long_save(store, "4" * 16, "60")
    store.now += DAY + HOUR
    store.before = lambda operation, key: denied(operation, key) if (operation, key) == ("head", keys[0]) else None
    report = collect(store)
    assert (report.removed, report.waiting) == (GARBAGE, 1)
    assert "could not be asked" in report.notes[0]


@pytest.mark.parametrize("beside", ["in its folder", "at its url", "nowhere"])
def test_an_upload_of_a_long_save(store: FakeStore, beside: str) -> None:
    """An upload says nothing itself: an object of the same rank, or another one at the URL, tells how long it may take."""
    for key in [key for key in store.objects if "/data/" in key or key.endswith(".metadata")]:
        del store.objects[key]
    if beside != "nowhere":
        of_a_long_save(store, "5" * 16 if beside == "in its folder" else "3" * 16, "172800")
    store.start_upload(f"run/data/{'5' * 16}/__0_1.distcp")
    store.now += DAY + HOUR
    for run in (garbage.collect, garbage.abort_uploads):
        report = run(store, RUN, dry_run=True, older_than_s=86400)
        assert len(report.aborted) == (beside == "nowhere")
    store.now += DAY
    assert len(garbage.abort_uploads(store, RUN, dry_run=False, older_than_s=86400).aborted) == 1
