"""What the package's control plane gives on each store: one set of claims, the scripted store and the real ones."""

from __future__ import annotations

import concurrent.futures
import datetime as dt
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_s3 import AccessDeniedError, RetryPolicy, S3Config, StorageError, StorageUnavailableError
from dcp_s3._transfer.s3.control_store import ControlStore, is_missing, is_precondition_failed
from dcp_s3._transfer.s3.probe import Conditions, conditions_of
from tests.conftest import EXTERNAL
from tests.fault.server import FaultServer
from tests.servers import Bucket, Endpoint

BODY = bytes(range(256)) * 40
JSON = "application/json"
ODD_NAMES = ("a b", "a+b", "a%20b", "a&b=c", "ümläut-雪", "quote'\"", "~tilde", "(parens)")
"""Names that are easily spoiled between a URL, a signature and a listing in XML."""


@pytest.fixture
def store(bucket: Bucket, endpoint: Endpoint) -> ControlStore:
    return ControlStore(endpoint.config(), bucket.name, rank=3)


class TestEveryStore:
    """Claims about each store alike."""

    def test_put_get_and_head(self, store: ControlStore, bucket: Bucket) -> None:
        """What is put comes back: bytes, size, user metadata, one ETag in all replies, and the store's clock."""
        key = bucket.key("run/.metadata")
        before = dt.datetime.now(dt.UTC)
        etag = store.put(key, BODY, content_type="application/octet-stream", metadata={"dcp-s3-write-id": "0f" * 16})
        fetched = store.get(key)
        assert fetched.body == BODY == bucket.get("run/.metadata")
        for info in (fetched.info, store.head(key)):
            assert (info.key, info.size, info.etag) == (key, len(BODY), etag)
            assert info.metadata == {"dcp-s3-write-id": "0f" * 16}
            assert info.last_modified is not None
            assert abs(info.last_modified - before) < dt.timedelta(minutes=5)
        assert etag.strip('"')
        assert fetched.server_time is not None
        assert abs(fetched.server_time - before) < dt.timedelta(minutes=5)
        assert store.server_time() >= fetched.server_time
        store.put(key, b"", content_type=JSON)
        assert (store.get(key).body, store.head(key).size) == (b"", 0)

    def test_ranges(self, store: ControlStore, bucket: Bucket) -> None:
        """A range gives its bytes and the size of the whole object; one that begins behind the end is refused with 416."""
        key = bucket.key("object")
        store.put(key, BODY, content_type=JSON)
        for start, end in ((0, 1), (0, len(BODY)), (300, 310), (len(BODY) - 1, len(BODY))):
            fetched = store.get(key, byte_range=(start, end))
            assert (fetched.body, fetched.info.size) == (BODY[start:end], len(BODY))
        with pytest.raises(StorageError) as refused:
            store.get(key, byte_range=(len(BODY), len(BODY) + 1))
        assert refused.value.status == 416
        assert not is_missing(refused.value)

    def test_what_is_missing(self, store: ControlStore, bucket: Bucket, endpoint: Endpoint) -> None:
        """A missing key is told from a missing bucket; the error names operation, place, rank and what was answered."""
        key = bucket.key("absent")
        for name, call in (("GetObject", store.get), ("HeadObject", store.head)):
            with pytest.raises(StorageError) as missing:
                call(key)
            error = missing.value
            assert is_missing(error)
            assert (error.operation, error.bucket, error.key, error.rank) == (name, bucket.name, key, 3)
            assert error.status == 404
        store.delete(key)  # no error
        if endpoint.bucket is None:  # with a given bucket, permission may end at that bucket
            with pytest.raises(StorageError) as no_bucket:
                ControlStore(endpoint.config(), f"{bucket.name}-absent").get(key)
            assert not is_missing(no_bucket.value)
            assert (no_bucket.value.status, no_bucket.value.code) == (404, "NoSuchBucket")
            assert "create the bucket" in str(no_bucket.value)

    def test_delete(self, store: ControlStore, bucket: Bucket) -> None:
        """What is deleted is gone, and its neighbours are not."""
        for name in ("a", "a/b", "ab"):
            store.put(bucket.key(name), BODY, content_type=JSON)
        store.delete(bucket.key("a/b"))
        assert bucket.keys() == ["a", "ab"]

    def test_a_key_is_created_once(self, store: ControlStore, bucket: Bucket) -> None:
        """Of many that create one key at the same time exactly one succeeds, and its bytes stay; the others hear 412."""
        key = bucket.key("once")
        start = threading.Barrier(4)
        outcomes: dict[int, Any] = {}

        def create(number: int) -> None:
            start.wait(timeout=20)
            try:
                outcomes[number] = store.put(key, b"%d" % number, content_type=JSON, if_none_match=True, retry=False)
            except StorageError as error:
                outcomes[number] = error

        threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [number for number, outcome in outcomes.items() if isinstance(outcome, str)]
        assert len(winners) == 1, outcomes
        assert bucket.get("once") == b"%d" % winners[0]
        assert all(is_precondition_failed(outcomes[number]) for number in outcomes if number not in winners), outcomes

    def test_a_key_is_replaced_by_who_saw_it_last(
        self, store: ControlStore, bucket: Bucket, endpoint: Endpoint
    ) -> None:
        """The probe finds the form of ETag that If-Match understands here; in it only the ETag that is there replaces."""
        conditions = conditions_of(store, bucket.key("index"))
        known = {"scripted": "quoted", "seaweedfs": "quoted", "ceph_rgw": "bare"}
        assert conditions == Conditions(True, known.get(endpoint.name, conditions.replace))
        assert bucket.get("index") == b"{}"  # all that the probe leaves, at a key that the caller owns

        key = bucket.key("record")
        seen = store.put(key, b"old", content_type=JSON)
        new = store.put(key, b"new", content_type=JSON, if_match=conditions.match_value(seen))
        assert new != seen
        with pytest.raises(StorageError) as late:
            store.put(key, b"late", content_type=JSON, if_match=conditions.match_value(seen))
        assert is_precondition_failed(late.value)
        assert bucket.get("record") == b"new"
        store.delete(key)
        with pytest.raises(StorageError) as gone:
            store.put(key, b"late", content_type=JSON, if_match=conditions.match_value(new))
        assert gone.value.status in (404, 412)
        assert bucket.keys("record") == []

    def test_listing_in_pages(self, store: ControlStore, bucket: Bucket) -> None:
        """A listing is complete and in key order whatever the page size, and ends at its prefix."""
        names = [f"run/step-{n}/{leaf}" for n in range(5) for leaf in (".metadata", "data/x/__0_0.distcp")]
        for name in [*names, "run.txt", "runaway/.metadata"]:
            bucket.put(name, b"12345")
        for page_size in (1, 3, 1000):
            found = list(store.list(bucket.key("run/"), page_size=page_size))
            assert [info.key for info in found] == [bucket.key(name) for name in sorted(names)]
            assert {info.size for info in found} == {5}
            assert all(info.etag and info.last_modified for info in found)
            prefixes = list(store.list_prefixes(bucket.key("run/"), page_size=page_size))
            assert prefixes == [bucket.key(f"run/step-{n}/") for n in range(5)]
        assert list(store.list(bucket.key("absent/"))) == []

    def test_odd_names(self, store: ControlStore, bucket: Bucket) -> None:
        """Keys with blanks, signs and letters beyond ASCII are written, read, listed and deleted as they are."""
        keys = [bucket.key(f"odd/{name}/.metadata") for name in ODD_NAMES]
        for key in keys:
            store.put(key, key.encode(), content_type=JSON)
        assert [info.key for info in store.list(bucket.key("odd/"))] == sorted(keys)
        assert [store.get(key).body for key in keys] == [key.encode() for key in keys]
        for key in keys:
            store.delete(key)
        assert list(store.list(bucket.key("odd/"))) == []

    def test_uploads_are_listed_and_aborted(self, store: ControlStore, bucket: Bucket, client: Any) -> None:
        """Open uploads are listed with id and beginning; an aborted one is gone, and aborting it again is no error."""
        keys = [bucket.key(f"run/data/x/__{n}_0.distcp") for n in range(3)]
        made = {}
        for key in [*keys, keys[0]]:  # two of one key
            made[client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"]] = key
        found = list(store.list_uploads(bucket.key("run/")))
        assert {upload.upload_id: upload.key for upload in found} == made
        now = dt.datetime.now(dt.UTC)
        assert all(u.initiated is not None and abs(u.initiated - now) < dt.timedelta(minutes=5) for u in found)
        for upload_id, key in made.items():
            store.abort_upload(key, upload_id)
        assert list(store.list_uploads(bucket.key("run/"))) == []
        store.abort_upload(keys[0], found[0].upload_id)

    # the scripted store computes no signatures
    @pytest.mark.parametrize("endpoint", ["external"] if EXTERNAL else ["seaweedfs", "ceph_rgw"], indirect=True)
    def test_wrong_credentials(self, bucket: Bucket, endpoint: Endpoint) -> None:
        """An unknown key and a wrong secret are refusals with S3's codes, of the class that is never tried again."""
        wrong = {
            "InvalidAccessKeyId": {"access_key_id": "NOBODYKNOWSTHISKEYID"},
            "SignatureDoesNotMatch": {"secret_access_key": "not-the-secret"},
        }
        for code, overrides in wrong.items():
            with pytest.raises(AccessDeniedError) as denied:
                ControlStore(endpoint.config(**overrides), bucket.name).get(bucket.key("a"))
            assert (denied.value.status, denied.value.code) == (403, code)


@pytest.fixture
def faults() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


def _store(server: FaultServer, **settings: Any) -> ControlStore:
    retry = RetryPolicy(max_attempts=3, initial_wait_s=0.01, max_wait_s=0.02)
    config = S3Config(
        endpoint_url=server.url, access_key_id="RANK0", secret_access_key="secret", retry=retry, **settings
    )
    return ControlStore(config, server.bucket)


def test_listings_beyond_a_page(faults: FaultServer) -> None:
    """1,201 objects and 1,201 uploads come in two pages each; also where a truncated listing carries no token."""
    keys = [f"run/{n:04d}" for n in range(1201)]
    for key in keys:
        faults.put(key, b"")
    store = _store(faults)
    assert [info.key for info in store.list("run/")] == keys
    faults.configure(continuation_tokens=False)
    assert [info.key for info in store.list("run/")] == keys
    assert len(faults.requests("ListObjectsV2")) == 4

    faults.configure(continuation_tokens=True, list_page_size=4)
    config = store.config
    client = Endpoint(
        name="scripted", endpoint_url=faults.url, access_key=config.access_key_id or "", secret_key="secret"
    ).client()
    made = {client.create_multipart_upload(Bucket=faults.bucket, Key=f"up/{n % 5}")["UploadId"] for n in range(11)}
    client.close()
    found = [upload.upload_id for upload in store.list_uploads("up/")]
    assert sorted(found) == sorted(made)
    assert len(faults.requests("ListMultipartUploads")) == 3


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"conditional_put": "honour"}, Conditions(True, "quoted")),
        ({"conditional_put": "honour", "if_match_form": "unquoted"}, Conditions(True, "bare")),
        ({"conditional_put": "ignore"}, Conditions(False, None)),
        ({"conditional_put": "refuse"}, Conditions(False, None)),
        ({"if_match_form": "ignored"}, Conditions(True, None)),
        ({"if_match_form": "refused"}, Conditions(True, None)),
    ],
    ids=["honours", "honours-bare", "ignores", "refuses", "ignores-if-match", "refuses-if-match"],
)
def test_the_probe_tells_stores_apart(faults: FaultServer, settings: dict[str, Any], expected: Conditions) -> None:
    """What a store does with conditional PUTs is found out with PutObject alone, once, and leaves one object of two bytes."""
    faults.configure(**settings)
    store = _store(faults)
    assert conditions_of(store, "run/index") == expected
    assert {record.operation for record in faults.log} == {"PutObject"}
    assert {key: item["size"] for key, item in faults.objects().items()} == {"run/index": 2}
    asked = len(faults.log)
    assert conditions_of(store, "run/other") == expected
    assert len(faults.log) == asked


def test_a_probe_that_fails_is_no_answer(faults: FaultServer) -> None:
    """A store that is down during the probe is not taken for one without conditional PUTs: the next save asks again."""
    store = _store(faults)
    faults.go_offline()
    with pytest.raises(StorageUnavailableError):
        conditions_of(store, "run/index")
    faults.go_online()
    assert conditions_of(store, "run/index") == Conditions(True, "quoted")


def test_one_probe_for_many_saves(faults: FaultServer) -> None:
    """Eight saves that ask at once, each for an index of its own, wait for one probe and hear the same."""
    store = _store(faults)
    start = threading.Barrier(8)
    gate = faults.hold("PutObject", nth=1)

    def ask(number: int) -> Conditions:
        start.wait(timeout=20)
        return conditions_of(store, f"run/index-{number}")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        try:
            gate.wait_arrived()
            assert not concurrent.futures.wait(asking, timeout=0.2).done
        finally:
            gate.release()
        assert {asked.result(timeout=20) for asked in asking} == {Conditions(True, "quoted")}
    assert len(faults.log) == 4
    assert len(faults.objects()) == 1


def test_a_probe_that_hangs_holds_up_no_other_store(faults: FaultServer) -> None:
    """While the probe of one store gets no answer, that of another is made; the first goes on when its store does."""
    gate = faults.hold("PutObject", nth=1)
    with FaultServer() as other, concurrent.futures.ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(conditions_of, _store(faults), "run/index")
        try:
            gate.wait_arrived()
            asked = pool.submit(conditions_of, _store(other), "run/index")
            assert asked.result(timeout=20) == Conditions(True, "quoted")
            assert not hanging.done()
        finally:
            gate.release()
        assert hanging.result(timeout=20) == Conditions(True, "quoted")
