"""Whatever request the credentials expire at: it was refused and so not done, the source is asked once, and it is sent again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import AccessDeniedError, S3Config, S3StorageReader, S3StorageWriter
from dcp_s3._runtime.loop_thread import loop_thread
from dcp_s3._transfer.checksum import crc32c
from dcp_s3._transfer.s3 import probe
from tests.fault.conftest import KEY, TOKEN, Transfer, pattern
from tests.fault.provider import Provider
from tests.fault.server import Action, FaultServer, error

MIB = 1 << 20
URL = "s3://bucket/run"
SAVE = [
    ("PutObject", r"/data/"),
    ("CreateMultipartUpload", ""),
    ("UploadPart", ""),
    ("CompleteMultipartUpload", ""),
    ("HeadObject", r"/data/"),
    ("PutObject", r"index-"),
    ("HeadObject", r"index-"),
    ("PutObject", r"\.metadata$"),
    ("HeadObject", r"\.metadata$"),
    ("GetObject", r"\.metadata$"),
    ("DeleteObject", ""),
]
LOAD = [("GetObject", r"/data/"), ("GetObject", r"\.metadata$"), ("GetObject", r"index-")]
FORMS = {
    "aws": error(400, "ExpiredToken"),
    "sts": error(403, "ExpiredTokenException"),
    "refresh": error(400, "TokenRefreshRequired"),
    "request": error(400, "RequestExpired"),
    "deleted": error(403, "InvalidAccessKeyId"),
    "invalid": error(400, "InvalidToken"),
}


@pytest.fixture
def renewing(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider
) -> Callable[[str, str, Action], None]:
    """Has one kind of request refuse the first credentials, and no other."""

    def expire(operation: str, key: str, form: Action) -> None:
        provider.answer(provider.calls + 1, "NEW")
        plain_s3.on(operation, form, access_key="OLD", **({"key": key} if key else {}))

    provider.answer(1, "OLD")
    return expire


def state(value: float) -> dict[str, torch.Tensor]:
    return {"large": torch.full((3 * MIB,), value), "small": torch.full((10,), value)}


def check_loads(saved: dict[str, torch.Tensor], config: S3Config) -> None:
    loaded = {name: torch.full_like(value, -1) for name, value in saved.items()}
    dcp.load(loaded, storage_reader=S3StorageReader(URL, config=config), no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operation, key", SAVE, ids=lambda value: value.strip("/\\.$-"))
def test_a_save_whose_credentials_expire_at(
    plain_s3: FaultServer,
    with_chain: Callable[..., Transfer],
    renewing: Callable[[str, str, Action], None],
    operation: str,
    key: str,
    form: str,
):
    """A save that replaces another commits whatever request meets the expiry, and what it wrote loads."""
    config = with_chain(part_bytes=5 * MIB).config
    few = key == "/data/" and operation == "PutObject"  # one PutObject per object instead of parts
    first = {"small": torch.zeros(10)}
    dcp.save(first, storage_writer=S3StorageWriter(URL, config=config), no_dist=True)
    probe._known.clear()  # its requests expire, too
    renewing(operation, key, FORMS[form])
    saved = {"small": torch.ones(10)} if few else state(1.0)
    dcp.save(saved, storage_writer=S3StorageWriter(URL, config=config), no_dist=True)
    refused = [record for record in plain_s3.requests(operation) if record.rules]
    assert refused
    assert {record.status for record in refused} <= {400, 403}
    plain_s3.clear(log=False, state=False)
    check_loads(saved, config)
    if operation in ("CompleteMultipartUpload", "CreateMultipartUpload"):
        assert len(refused) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operation, key", LOAD, ids=lambda value: value.strip("/\\.$-"))
def test_a_load_whose_credentials_expire_at(
    plain_s3: FaultServer,
    with_chain: Callable[..., Transfer],
    renewing: Callable[[str, str, Action], None],
    operation: str,
    key: str,
    form: str,
):
    """The same for a load."""
    config = with_chain().config
    dcp.save(state(2.0), storage_writer=S3StorageWriter(URL, config=config), no_dist=True)
    renewing(operation, key, FORMS[form])
    check_loads(state(2.0), config)
    assert [record for record in plain_s3.requests(operation) if record.rules]


@pytest.mark.parametrize("form", FORMS)
def test_an_abort_whose_credentials_expire(
    plain_s3: FaultServer,
    with_chain: Callable[..., Transfer],
    renewing: Callable[[str, str, Action], None],
    form: str,
):
    """An Abort is sent again with the new ones, on either plane: nothing is left open."""
    transfer = with_chain()
    uploads = []
    for number in (1, 2):
        upload = transfer.upload(f"{KEY}.{number}", part_bytes=1000)
        upload.append(memoryview(pattern(1500)))
        uploads.append(upload)
    plain_s3.wait_for("UploadPart", count=2)
    (first, second) = sorted(plain_s3.uploads().items(), key=lambda item: str(item[1]["key"]))
    plain_s3.put("seen", b"1")
    transfer.store.get("seen")  # both planes have their clients
    renewing("AbortMultipartUpload", "", FORMS[form])
    uploads[0].abort()
    transfer.store.abort_upload(str(second[1]["key"]), second[0])
    uploads[1].abort()
    assert first[1]["key"] == f"{KEY}.1"
    assert plain_s3.uploads() == {}
    assert len([record for record in plain_s3.requests("AbortMultipartUpload") if record.rules]) == 2


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_head_without_a_code(
    plain_s3: FaultServer,
    with_chain: Callable[..., Transfer],
    renewing: Callable[[str, str, Action], None],
    status: int,
):
    """A HEAD's refusal carries no code: where the source has other credentials now, they are tried."""
    transfer = with_chain()
    transfer.put(pattern(100))
    transfer.store.get(KEY)
    renewing("HeadObject", "", error(status, body=""))
    assert transfer.store.head(KEY).size == 100
    assert transfer.send(pattern(200), f"{KEY}.2", part_bytes=1000).size == 200


def test_a_complete_that_stays_refused(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider):
    """One renewal for a Complete: a source whose every token is refused ends the upload, with the store's word for it."""
    for number in range(1, 9):
        provider.answer(number, f"KEY{number}")
    plain_s3.on("CompleteMultipartUpload", error(400, "ExpiredToken"))
    transfer = with_chain()
    with pytest.raises(AccessDeniedError, match="session token has expired") as caught:
        transfer.send(pattern(3000), part_bytes=1000)
    assert (caught.value.operation, len(plain_s3.requests("CompleteMultipartUpload"))) == ("CompleteMultipartUpload", 2)
    assert plain_s3.uploads() == {}  # refused, and so not at work: aborted


def test_a_source_that_fails_when_it_is_asked_again(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider
):
    """Where the source has nothing to give the store's refusal is raised, not the source's trouble."""
    provider.answer(1, "OLD")
    provider.answer(2, None)
    transfer = with_chain()
    transfer.put(pattern(10))
    plain_s3.configure(key_errors={"OLD": "ExpiredToken"})
    with pytest.raises(AccessDeniedError) as caught:
        transfer.put(pattern(10))
    assert caught.value.code == "ExpiredToken"


def test_credentials_that_refreshed_themselves_meanwhile(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider
):
    """A request that was signed with the old credentials, and refused when the client had new ones already, is sent again."""
    provider.answer(1, "OLD", life_s=903)  # at 900 s the SDK asks for others
    provider.answer(2, "NEW")
    transfer = with_chain()
    body = pattern(100)
    transfer.put(body, "k0")
    gate = plain_s3.hold("PutObject", key="k1", then=error(400, "ExpiredToken"), access_key="OLD")
    plane, job = transfer.plane, transfer.job
    held = loop_thread().submit(plane.put_object(job, "k1", [memoryview(body)], crc32c(body), TOKEN))
    gate.wait_arrived()
    end = time.monotonic() + 15
    while plain_s3.log[-1].access_key != "NEW":
        assert time.monotonic() < end
        transfer.put(body, "k2")
        time.sleep(0.05)
    gate.release()
    held.result(20)
    assert plain_s3.read("k1") == body
