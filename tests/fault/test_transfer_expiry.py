"""Credentials that expire: renewed where there are others, met once by each request, and the end of a save where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_s3 import AccessDeniedError
from dcp_s3._runtime.loop_thread import loop_thread
from dcp_s3._transfer.checksum import crc32c
from dcp_s3._transfer.upload import _QUEUED
from tests.fault.conftest import KEY, Transfer, pattern, wait
from tests.fault.provider import Provider
from tests.fault.server import FaultServer, error
from tests.fault.server.client import client

BODY = pattern(160_000)


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
def test_expiry_in_the_middle_of_an_upload(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider, code: str
):
    """The store refuses the token half-way: the provider is asked once more, and no finished part is sent again."""
    provider.answer(1, "OLD")
    provider.answer(2, "NEW")
    transfer = with_chain(max_concurrency=4)
    plain_s3.on("*", error(400, code), access_key="OLD", since=8)
    receipt = transfer.send(BODY, part_bytes=10_000)
    assert plain_s3.read(KEY) == BODY
    assert receipt.size == len(BODY)
    assert provider.calls == 2
    done = [r.part for r in plain_s3.requests("UploadPart", status=200)]
    assert sorted(part for part in done if part) == list(range(1, 17))
    refused = [r for r in plain_s3.log if r.status == 400]
    assert 1 <= len(refused) <= 4  # those on the wire
    assert {r.access_key for r in plain_s3.log[:7]} == {"OLD"}
    assert plain_s3.log[-1].access_key == "NEW"


def test_expiry_between_ranges_and_small_requests(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider
):
    """The same for reads, and for the control plane, which has a client of its own."""
    provider.answer(1, "OLD")
    transfer = with_chain()
    plain_s3.put(KEY, BODY)
    assert transfer.get(0, 10) == BODY[:10]
    assert transfer.store.get(KEY).body == BODY
    assert provider.calls == 2
    provider.answer(3, "NEW")
    plain_s3.configure(key_errors={"OLD": "ExpiredToken"})
    assert transfer.get(5, 10) == BODY[5:10]
    assert transfer.store.get(KEY).body == BODY
    assert transfer.store.head(KEY).size == len(BODY)
    assert provider.calls == 4
    assert [r.status for r in plain_s3.log] == [206, 200, 400, 206, 400, 200, 200]
    assert transfer.job.counter.retries == 2


def test_expiry_that_a_head_meets(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider):
    """The reply to a HEAD has no code to say so: a 400 is then taken for an expired token, if there is another one."""
    provider.answer(1, "OLD")
    transfer = with_chain()
    plain_s3.put(KEY, BODY)
    transfer.store.get(KEY)
    provider.answer(2, "NEW")
    plain_s3.configure(key_errors={"OLD": "ExpiredToken"})
    assert transfer.store.head(KEY).size == len(BODY)
    assert [(r.access_key, r.status) for r in plain_s3.requests("HeadObject")] == [("OLD", 400), ("NEW", 200)]


def test_expiry_twice(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider):
    """Each expiry of a long save is met anew."""
    for number in (1, 2, 3):
        provider.answer(number, f"KEY{number}")
        plain_s3.on("*", error(400, "ExpiredToken"), access_key=f"KEY{number}", since=7)
    transfer = with_chain(max_concurrency=1)
    transfer.send(BODY[:100_000], part_bytes=10_000)
    assert plain_s3.read(KEY) == BODY[:100_000]
    assert provider.calls == 3


def test_a_token_that_stays_expired(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider):
    """A provider that hands out the expired token again is not believed twice: one request, the store's own words."""
    provider.answer(1, "OLD")
    plain_s3.configure(key_errors={"OLD": "ExpiredToken"})
    transfer = with_chain()
    for call in (lambda: transfer.put(BODY), lambda: transfer.store.get(KEY)):
        before = len(plain_s3.log)
        with pytest.raises(AccessDeniedError, match="session token has expired") as caught:
            call()
        assert (caught.value.code, caught.value.attempts) == ("ExpiredToken", 1)
        assert len(plain_s3.log) == before + 1


def test_a_new_token_that_is_expired_too(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider
):
    """One renewal per request: a provider whose every token is refused does not keep a save busy."""
    for number in range(1, 30):
        provider.answer(number, f"KEY{number}")
    plain_s3.on("*", error(400, "ExpiredToken"))
    transfer = with_chain()
    with pytest.raises(AccessDeniedError) as caught:
        transfer.put(BODY)
    assert (len(plain_s3.log), caught.value.attempts) == (2, 2)
    assert provider.calls <= 3


@pytest.mark.parametrize("source", ["config", "environment"])
def test_static_credentials_that_expire(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch, source: str
):
    """Credentials that cannot change fail at once with that cause, wherever they come from."""
    keys = {"access_key_id": "STATIC", "secret_access_key": "s", "session_token": "t"}
    if source == "environment":
        for name, value in keys.items():
            monkeypatch.setenv(f"AWS_{name.upper()}", value)
    transfer = with_chain(**(keys if source == "config" else {}))
    plain_s3.configure(key_errors={"STATIC": "ExpiredToken"})
    for call in (lambda: transfer.put(BODY), lambda: transfer.get(0, 1), lambda: transfer.store.get(KEY)):
        before = len(plain_s3.log)
        with pytest.raises(AccessDeniedError, match="use credentials that refresh") as caught:
            call()
        assert len(plain_s3.log) == before + 1
        assert caught.value.code == "ExpiredToken"


def test_a_credentials_file_that_is_rewritten(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Keys that somebody rotates in the shared file are taken up when the old ones have expired."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    file.write_text("[default]\naws_access_key_id = OLD\naws_secret_access_key = s\n")
    transfer = with_chain()
    transfer.put(BODY)
    transfer.store.get(KEY)
    plain_s3.configure(key_errors={"OLD": "ExpiredToken"})
    file.write_text("[default]\naws_access_key_id = NEW\naws_secret_access_key = s\n")
    transfer.put(BODY)
    assert transfer.store.get(KEY).body == BODY
    assert [r.access_key for r in plain_s3.log] == ["OLD", "OLD", "OLD", "NEW", "OLD", "NEW"]


@pytest.mark.parametrize("refused", ["UploadPart", ("UploadPart", "AbortMultipartUpload")], ids=["parts", "all"])
def test_static_credentials_that_expire_in_the_middle_of_an_upload(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], allowed: set[str], refused: str | tuple[str, ...]
):
    """Credentials that cannot change and expire half-way end the upload at once: no part is sent twice, few are sent at all, no
    object is there, and the upload is aborted, unless that is refused too.
    """
    whole = refused != "UploadPart"
    if whole:
        allowed.add("open-upload")
    transfer = with_chain(access_key_id="STATIC", secret_access_key="s", session_token="t", max_concurrency=4)
    plain_s3.on(refused, error(400, "ExpiredToken"), access_key="STATIC", since=7)
    with pytest.raises(AccessDeniedError, match="use credentials that refresh") as caught:
        transfer.send(BODY, part_bytes=2_000)
    assert (caught.value.code, caught.value.operation, caught.value.attempts) == ("ExpiredToken", "UploadPart", 1)
    sent = plain_s3.requests("UploadPart")
    assert len({record.part for record in sent}) == len(sent)
    assert len([record for record in sent if record.status == 200]) == 6
    refusals = [record for record in sent if record.status == 400]
    assert 1 <= len(refusals) <= 4 + _QUEUED + 1  # on the wire, in line, and one that is handed over at that moment
    assert transfer.job.counter.retries == 0
    assert plain_s3.objects() == {}
    assert [record.status for record in plain_s3.requests("AbortMultipartUpload")] == [400 if whole else 204]
    assert len(plain_s3.uploads()) == whole


@pytest.mark.parametrize("left_s", [300, 720])
def test_one_refresh_for_many_parts(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider, left_s: float
):
    """16 parts that set out together with credentials that expire soon ask the provider once more, for all of them; with more than
    ten minutes left only the one that asks waits for the answer.
    """
    provider.answer(1, "OLD", life_s=left_s)
    provider.answer(2, "NEW")
    transfer = with_chain()
    with client(plain_s3) as other:
        upload_id = other.create_multipart_upload(Bucket=plain_s3.bucket, Key=KEY)["UploadId"]
    parts = [memoryview(BODY)[start : start + 10_000] for start in range(0, len(BODY), 10_000)]
    assert len(parts) == transfer.config.max_concurrency == 16
    sent = [
        loop_thread().submit(
            transfer.plane.upload_part(transfer.job, KEY, upload_id, number, [part], crc32c(part), checksums=False)
        )
        for number, part in enumerate(parts, 1)
    ]
    entries = [work.result(30) for work in sent]
    assert provider.calls == 2
    signers = {record.access_key for record in plain_s3.requests("UploadPart")}
    assert "NEW" in signers
    assert signers <= ({"NEW"} if left_s < 600 else {"OLD", "NEW"})
    wait(transfer.plane.complete_upload(transfer.job, KEY, upload_id, entries))
    assert plain_s3.read(KEY) == BODY
    assert provider.calls == 2
