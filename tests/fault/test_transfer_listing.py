"""Listings of the control plane: complete, in order, page by page, or an error; never a silent part of the truth."""

from __future__ import annotations

import http.client
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from dcp_s3 import StorageError
from dcp_s3._transfer.s3.control_store import ControlStore
from tests.fault.conftest import Transfer, config_of
from tests.fault.server import FaultServer, cut_reply, error, rewrite

KEYS = [f"run/step-{step}/data/{n}" for step in (9, 10, 20, 100) for n in range(3)]
ODD = ["run/a b", "run/a+b", "run/a&b<c>", "run/ü/1", "run/雪/1", "run/%41", "run/z"]


@pytest.fixture(params=["tokens", "no-tokens"])
def listed(request: pytest.FixtureRequest, plain_s3: FaultServer) -> FaultServer:
    """A store with and without continuation tokens."""
    plain_s3.configure(continuation_tokens=request.param == "tokens")
    return plain_s3


def test_more_than_a_page(listed: FaultServer, plain_transfer: Transfer):
    """1,201 keys in pages of 1,000: all of them, once, in key order, with size and ETag."""
    for n in range(1201):
        listed.put(f"run/{n:05d}", b"x" * (n % 7))
    found = list(plain_transfer.store.list("run/"))
    assert [info.key for info in found] == [f"run/{n:05d}" for n in range(1201)]
    assert [info.size for info in found] == [n % 7 for n in range(1201)]
    assert all(info.etag.startswith('"') and info.last_modified is not None for info in found)
    assert len(listed.requests("ListObjectsV2")) == 2


@pytest.mark.parametrize("page", [1, 2, 5, 1000])
def test_any_page_size(listed: FaultServer, plain_transfer: Transfer, page: int):
    """The result does not depend on the size of a page."""
    for key in [*KEYS, *ODD]:
        listed.put(key, b"1")
    store = plain_transfer.store
    found = [info.key for info in store.list("run/", page_size=page)]
    assert found == sorted([*KEYS, *ODD], key=str.encode)
    assert [info.key for info in store.list("run/step-1", page_size=page)] == sorted(k for k in KEYS if "step-1" in k)
    assert list(store.list("nothing/", page_size=page)) == []


@pytest.mark.parametrize("page", [1, 2, 3, 1000])
def test_prefixes(listed: FaultServer, plain_transfer: Transfer, page: int):
    """The folders below a prefix, each once, however many keys and pages they have; keys themselves are left out."""
    for key in [*KEYS, *ODD, "run/step-10", "run/step-100.txt", "other/x"]:
        listed.put(key, b"1")
    found = list(plain_transfer.store.list_prefixes("run/", page_size=page))
    assert sorted(found) == sorted([*(f"run/step-{n}/" for n in (9, 10, 20, 100)), "run/ü/", "run/雪/"])
    assert len(listed.requests("ListObjectsV2")) <= (len(KEYS) + len(ODD)) // page + 2


class LikeAws(ControlStore):
    """Lists as AWS does without tokens: keys behind start-after, also those of a prefix that was given already."""

    pages = 0

    def _call(self, operation: str, method: str, key: str | None, params: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.pages += 1
        page: dict[str, Any] = {"Contents": [], "CommonPrefixes": [], "IsTruncated": False}
        for name in sorted(key for key in KEYS if key.startswith(params["Prefix"])):
            if name <= params.get("StartAfter", ""):
                continue
            group = name[: name.index("/", len(params["Prefix"])) + 1]
            if {"Prefix": group} in page["CommonPrefixes"]:
                continue
            if len(page["CommonPrefixes"]) == params["MaxKeys"]:
                page["IsTruncated"] = True
                break
            page["CommonPrefixes"].append({"Prefix": group})
        return page


@pytest.mark.parametrize("page", [1, 2, 3])
def test_prefixes_without_tokens_as_aws_does_it(plain_s3: FaultServer, page: int):
    """start-after a prefix means its keys, so the next page would begin with it again: each is given once, all are."""
    store = LikeAws(config_of(plain_s3), "bucket")
    assert list(store.list_prefixes("run/", page_size=page)) == [f"run/step-{n}/" for n in (10, 100, 20, 9)]
    assert store.pages == -(-4 // page)


def test_shards_do_not_fill_the_pages(plain_s3: FaultServer, plain_transfer: Transfer):
    """Finding the steps of a run takes one request, though each has hundreds of objects."""
    for step, n in itertools.product(range(5), range(300)):
        plain_s3.put(f"run/step-{step}/data/{n}", b"")
    assert len(list(plain_transfer.store.list_prefixes("run/"))) == 5
    assert len(plain_s3.log) == 1


def begin_uploads(s3: FaultServer, keys: list[str]) -> None:
    """Open an upload for each key, without the package."""
    connection = http.client.HTTPConnection("127.0.0.1", s3.ports[0], timeout=10)
    for key in keys:
        connection.request("POST", f"/bucket/{key}?uploads")
        assert connection.getresponse().read()
    connection.close()
    s3.clear(state=False)


def test_uploads(plain_s3: FaultServer, plain_transfer: Transfer):
    """1,001 open uploads, three of each key, are all found, and can be aborted one by one."""
    keys = [f"run/{n // 3:05d}" for n in range(1001)]
    begin_uploads(plain_s3, keys)
    store = plain_transfer.store
    found = list(store.list_uploads("run/"))
    assert sorted(upload.key for upload in found) == keys
    assert len({upload.upload_id for upload in found}) == 1001
    assert all(upload.initiated is not None for upload in found)
    assert len(plain_s3.requests("ListMultipartUploads")) == 2
    for upload in found:
        if upload.key < "run/00003":
            store.abort_upload(upload.key, upload.upload_id)
    assert len(list(store.list_uploads("run/"))) == 1001 - 9
    plain_s3.clear()


def test_uploads_without_markers(plain_s3: FaultServer, plain_transfer: Transfer):
    """A store that says "truncated" and names no marker is asked on from the last upload it gave."""
    begin_uploads(plain_s3, [f"run/{n}" for n in range(7)])
    plain_s3.configure(list_page_size=2)
    for name in ("NextKeyMarker", "NextUploadIdMarker"):
        plain_s3.on("ListMultipartUploads", rewrite(f"<{name}>.*?</{name}>", ""))
    assert [upload.key for upload in plain_transfer.store.list_uploads("run/")] == [f"run/{n}" for n in range(7)]
    plain_s3.clear()


@pytest.mark.parametrize("call", ["list", "list_prefixes", "list_uploads"])
def test_a_list_that_never_ends(plain_s3: FaultServer, plain_transfer: Transfer, call: str):
    """A store that gives the same page again and again is an error, not an endless loop nor a short answer."""
    page = (
        "<R><IsTruncated>true</IsTruncated><Contents><Key>run/a</Key><Size>1</Size></Contents>"
        "<CommonPrefixes><Prefix>run/a/</Prefix></CommonPrefixes><Upload><Key>run/a</Key><UploadId>7</UploadId></Upload></R>"
    )
    plain_s3.on("*", error(200, body=page))
    with pytest.raises(StorageError, match="pagination is broken"):
        list(getattr(plain_transfer.store, call)("run/"))
    assert len(plain_s3.log) <= 3


@pytest.mark.parametrize(
    "fault", [error(503, "SlowDown"), error(500, body=""), cut_reply(200), error(200, body="<ListBucketResult><Conte")]
)
def test_a_page_that_fails_once(s3: FaultServer, transfer: Transfer, fault: object):
    """A page that fails, or is cut in the middle of its XML, is asked for again: nothing is missing, nothing double."""
    for key in KEYS:
        s3.put(key, b"1")
    s3.on("ListObjectsV2", fault, nth=2)
    assert [info.key for info in transfer.store.list("run/", page_size=5)] == sorted(KEYS)
    assert len(s3.log) == 4


def test_an_empty_listing_is_no_error(s3: FaultServer, transfer: Transfer):
    """A prefix with nothing below it gives nothing, of all three kinds."""
    calls: list[Callable[[], object]] = [
        lambda: list(transfer.store.list("x/")),
        lambda: list(transfer.store.list_prefixes("x/")),
        lambda: list(transfer.store.list_uploads("x/")),
    ]
    assert [call() for call in calls] == [[], [], []]
    assert len(s3.log) == 3
