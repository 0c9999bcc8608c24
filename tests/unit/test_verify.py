"""verify finds what is wrong, names it, and is content with what is right."""

from __future__ import annotations

import pytest

from dcp_s3 import AccessDeniedError, CheckpointNotFoundError, CheckpointReplacedError
from dcp_s3._checkpoint.care import verify as verify_module
from dcp_s3._checkpoint.care.verify import verify_checkpoint
from dcp_s3._checkpoint.format.layout import CheckpointUrl
from tests.unit.fake_store import FakeStore, denied, flip, save, stock
from tests.unit.records import repacked

RUN = CheckpointUrl("ckpt", "run")
DATA = "run/data/0123456789abcdef/__0_0.distcp"


@pytest.fixture
def store() -> FakeStore:
    fake = FakeStore()
    save(fake, RUN)
    return fake


def problems(store: FakeStore, *, deep: bool = False) -> tuple[str, ...]:
    report = verify_checkpoint(store, RUN, deep=deep)
    assert report.ok == (not report.problems)
    return report.problems


def test_a_whole_checkpoint(store: FakeStore) -> None:
    """No problem, no note; deep reads every byte once, shallow none."""
    record_bytes = len(store.objects["run/.metadata"].body)
    shallow, deep = (verify_checkpoint(store, RUN, deep=deep) for deep in (False, True))
    assert (shallow.ok, shallow.problems, shallow.notes, shallow.objects) == (True, (), (), 1)
    assert shallow.checked_bytes == record_bytes
    assert (deep.ok, deep.notes, deep.checked_bytes) == (True, (), record_bytes + 4752)


def test_slices_of_a_part_join(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part larger than one request's slice has the same CRC; no request asks for more than a slice."""
    monkeypatch.setattr(verify_module, "SLICE_BYTES", 300)
    sizes = []
    get = store.get
    monkeypatch.setattr(
        store, "get", lambda key, byte_range=None: (sizes.append((key, byte_range)), get(key, byte_range=byte_range))[1]
    )
    assert problems(store, deep=True) == ()
    of_data = [size for key, size in sizes if key == DATA]
    assert max(end - start for start, end in of_data) == 300


def test_nothing_there(store: FakeStore) -> None:
    """Without a record there is no checkpoint: an error, not a report."""
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint at s3://ckpt/run/other"):
        verify_checkpoint(store, RUN.child("other"), deep=False)


def test_a_missing_object(store: FakeStore) -> None:
    """Named with key, tensors and what to do."""
    del store.objects[DATA]
    (problem,) = problems(store)
    assert problem.startswith(
        f"s3://ckpt/{DATA} is missing (concerns model.layers.0.weight, model.layers.1.weight, step)"
    )
    assert "restore it" in problem


@pytest.mark.parametrize("deep", [False, True])
def test_a_truncated_object(store: FakeStore, *, deep: bool) -> None:
    """Size against index, and the ranges that are lost with their tensors."""
    store.objects[DATA].body = store.objects[DATA].body[:4400]
    size, ranges = problems(store, deep=deep)
    assert "has 4400 bytes, not the 4752 that were saved" in size
    assert "ends at byte 4400" in ranges
    assert "(concerns step)" in ranges


@pytest.mark.parametrize(
    "position, part, hit",
    [
        (0, "part 1 (bytes 0-999)", "model.layers.0.weight"),
        (2500, "part 3 (bytes 2000-2999)", "model.layers.0.weight, model.layers.1.weight"),
        (4751, "part 5 (bytes 4000-4751)", "model.layers.1.weight, step"),
    ],
)
def test_a_flipped_bit(store: FakeStore, position: int, part: str, hit: str) -> None:
    """Only deep sees it: object, part, byte range, both CRCs, and the tensors that it hits."""
    flip(store, DATA, position)
    assert problems(store) == ()
    (problem,) = problems(store, deep=True)
    assert problem.startswith(f"s3://ckpt/{DATA} {part} has CRC32C ")
    assert f"(concerns {hit})" in problem


def test_a_damaged_record(store: FakeStore) -> None:
    """A record that cannot be read is the one problem."""
    store.objects["run/.metadata"].body = b"\x80\x04N."
    (problem,) = problems(store, deep=True)
    assert problem.startswith("s3://ckpt/run/.metadata is not a checkpoint's metadata")


def test_a_record_with_a_flipped_bit(store: FakeStore) -> None:
    """Readable, but not what the index was written for: said so."""
    flip(store, "run/.metadata", store.objects["run/.metadata"].body.index(b"1.0.0"))
    (problem,) = problems(store)
    assert "its bytes are not those that index-" in problem


@pytest.mark.parametrize("damage", ["gone", "cut", "other"])
def test_a_lost_index(store: FakeStore, damage: str) -> None:
    """A checkpoint of ours without its index is bad: nothing vouches for the bytes."""
    key = f"run/index-{'ab' * 16}.safetensors.gz"
    match damage:
        case "gone":
            del store.objects[key]
        case "cut":
            store.objects[key].body = store.objects[key].body[:100]
        case "other":
            store.objects[key].body = repacked(store.objects[key].body, record_bytes=1)
    (problem,) = problems(store)
    assert problem.startswith("s3://ckpt/run/.metadata: ")
    assert "restore record and index together" in problem


def test_another_writers_checkpoint() -> None:
    """Ranges are checked against the objects; the content cannot be, which is a note and no problem."""
    store = FakeStore()
    stock(store, RUN)
    report = verify_checkpoint(store, RUN, deep=True)
    assert (report.ok, report.checked_bytes) == (True, 0)
    assert "content not verifiable" in report.notes[0]
    store.objects["run/__0_0.distcp"].body = bytes(4751)
    (problem,) = verify_checkpoint(store, RUN, deep=True).problems
    assert "s3://ckpt/run/__0_0.distcp ends at byte 4751" in problem


def test_a_copied_checkpoint(store: FakeStore) -> None:
    """Other ETags than at the save: a problem while the content is unread, a note when it is proven the same."""
    store.objects[DATA].etag = '"other"'
    (problem,) = problems(store)
    assert "a deep check tells which" in problem
    report = verify_checkpoint(store, RUN, deep=True)
    assert report.ok
    assert "it was copied" in report.notes[0]
    flip(store, DATA, 0)
    (problem,) = problems(store, deep=True)
    assert "part 1" in problem


def test_records_of_single_ranks() -> None:
    """Each has its own index, and each is checked."""
    store = FakeStore()
    for rank in (0, 1):
        save(store, RUN, record=f"__{rank}.metadata", write_id=f"{rank:032x}", token=f"{rank:016x}", world_size=2)
    assert verify_checkpoint(store, RUN, deep=True).ok
    flip(store, "run/data/0000000000000001/__0_0.distcp", 1)
    (problem,) = problems(store, deep=True)
    assert "data/0000000000000001/" in problem


def test_listing_need_not_be_allowed(store: FakeStore) -> None:
    """A checkpoint that is given by its URL is verified with GetObject alone."""
    store.before = lambda operation, key: denied(operation, key) if operation.startswith("list") else None
    assert problems(store, deep=True) == ()


def test_a_refusal_is_not_a_bad_checkpoint(store: FakeStore) -> None:
    """What may not be read is an error of the store, not a missing object."""
    store.before = lambda operation, key: denied(operation, key) if key == DATA else None
    with pytest.raises(AccessDeniedError):
        verify_checkpoint(store, RUN, deep=False)


def test_an_object_that_goes_while_it_is_read(store: FakeStore) -> None:
    """A replacement in the middle of a deep check is reported for the object, and nothing else breaks."""

    def vanish(operation: str, key: str) -> None:
        if operation == "get" and key == DATA:
            store.objects.pop(DATA, None)

    store.before = vanish
    found = problems(store, deep=True)
    assert len(found) == 5
    assert all("has gone while it was being checked" in problem for problem in found)


def replace(store: FakeStore) -> None:
    """Save again at the same URL, and delete what the old index names, as a save does."""
    old = [key for key in store.objects if key != "run/.metadata"]
    save(store, RUN, write_id="cd" * 16, token="2222222222222222")
    for key in old:
        del store.objects[key]


def test_a_replacement_between_record_and_index(store: FakeStore) -> None:
    """The index has gone because a save replaced the checkpoint: the new one is read, and it is good."""

    def meanwhile(operation: str, key: str) -> None:
        if (operation, key) == ("get", f"run/index-{'ab' * 16}.safetensors.gz"):
            store.before = lambda operation, key: None
            replace(store)

    store.before = meanwhile
    assert problems(store) == ()


def test_a_replacement_in_the_middle(store: FakeStore) -> None:
    """Objects that go because a save replaced the checkpoint are no damage: the error says to verify again."""

    def meanwhile(operation: str, key: str) -> None:
        if (operation, key) == ("head", DATA):
            store.before = lambda operation, key: None
            replace(store)

    store.before = meanwhile
    with pytest.raises(CheckpointReplacedError, match="verify it again"):
        problems(store)
