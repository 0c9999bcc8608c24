"""What answers is not where the bucket is, or no S3 endpoint at all: few requests, a final error, and what to do about it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import AccessDeniedError, ConfigError, DcpS3Error, StorageError
from dcp_s3._transfer.http.session import ViewSession
from dcp_s3._transfer.s3.control_store import is_missing
from tests.fault.conftest import KEY, Transfer, pattern, wait
from tests.fault.server import FaultServer, error, reply_headers

BODY = pattern(1000)
NGINX = "<html>\r\n<head><title>{0}</title></head>\r\n<body>\r\n<center><h1>{0}</h1></center>\r\n<hr><center>nginx</center>\r\n</body>\r\n</html>\r\n"
CALLS: dict[str, Callable[[Transfer], Any]] = {
    "put": lambda transfer: transfer.put(BODY),
    "create": lambda transfer: transfer.send(BODY, part_bytes=100),
    "range": lambda transfer: transfer.get(0, 100),
    "head": lambda transfer: wait(transfer.plane.head_object(transfer.job, KEY)),
    "control-put": lambda transfer: transfer.store.put(KEY, b"{}", content_type="application/json"),
    "control-get": lambda transfer: transfer.store.get(KEY),
    "control-head": lambda transfer: transfer.store.head(KEY),
    "control-list": lambda transfer: list(transfer.store.list("run/")),
}


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("call", CALLS)
def test_a_redirect_is_final(plain_s3: FaultServer, plain_transfer: Transfer, call: str, status: int):
    """A balancer that wants https: one request, and the error has its status and Location, without what is behind a '?'."""
    there = "https://s3.lab.test/bucket/k"
    answer = error(
        status, body=NGINX.format(f"{status} Moved"), headers={"Location": f"{there}?X-Amz-Signature=5ec2e7"}
    )
    plain_s3.on("*", answer)
    with pytest.raises(StorageError) as caught:
        CALLS[call](plain_transfer)
    assert len(plain_s3.log) == 1
    assert caught.value.status == status
    assert there in str(caught.value)
    assert "https:// instead of http://" in str(caught.value)
    assert "5ec2e7" not in str(caught.value)


@pytest.mark.parametrize(
    "call, form",
    [(call, form) for call in CALLS for form in ("header", "body") if form == "header" or "head" not in call],
)
def test_a_wrong_region(plain_s3: FaultServer, plain_transfer: Transfer, call: str, form: str):
    """A reply that names the bucket's region says so, and which setting to change; nothing else is asked."""
    if form == "header":
        answer = error(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-9"})
    else:
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><Error><Code>AuthorizationHeaderMalformed</Code>'
            "<Message>the region is wrong</Message><Region>eu-west-9</Region></Error>"
        )
        answer = error(400, body=text)
    plain_s3.on("*", answer)
    with pytest.raises(StorageError, match="in region eu-west-9: set region='eu-west-9' in S3Config, or AWS_REGION"):
        CALLS[call](plain_transfer)
    assert len(plain_s3.log) == 1


def test_a_head_with_a_wrong_region(plain_s3: FaultServer, plain_transfer: Transfer):
    """AWS answers a HEAD that is signed for another region with a bare 400, and the region in a header."""
    plain_s3.on("HeadObject", error(400, body="", headers={"x-amz-bucket-region": "eu-west-9"}))
    for call in ("head", "control-head"):
        with pytest.raises(StorageError, match="set region='eu-west-9'"):
            CALLS[call](plain_transfer)


PAGES = [
    *((call, status) for call in CALLS if "head" not in call for status in (401, 403, 404, 405)),
    # the body of a PUT's good reply is not read, and a range is compared with what was asked for
    *((call, 200) for call in CALLS if "head" not in call and call not in ("put", "range", "control-put")),
]


@pytest.mark.parametrize("call, status", PAGES)
def test_a_web_page(plain_s3: FaultServer, plain_transfer: Transfer, call: str, status: int):
    """HTML where S3 answers in XML is a wrong endpoint, at once: neither a missing object nor a damaged one."""
    page = "<!DOCTYPE html>\n<html><head><title>Sign  in</title></head></html>"
    plain_s3.on("*", error(status, body=page, headers={"Content-Type": "text/html", "ETag": None}))
    with pytest.raises(StorageError, match=r"\('Sign in'\).* no S3 endpoint") as caught:
        CALLS[call](plain_transfer)
    assert len(plain_s3.log) == 1
    assert not is_missing(caught.value)
    assert isinstance(caught.value, AccessDeniedError) == (status in (401, 403))


def test_a_page_of_a_gateway_that_is_busy(plain_s3: FaultServer, plain_transfer: Transfer):
    """A gateway's 502 is a page too, and passes."""
    plain_s3.on("*", error(502, body=NGINX.format("502 Bad Gateway")), times=2)
    assert plain_transfer.put(BODY).size == len(BODY)
    assert plain_transfer.store.get(KEY).body == BODY


def test_a_range_that_is_a_page(plain_s3: FaultServer, plain_transfer: Transfer):
    """Data may be HTML: a range that comes with an ETag is the store's."""
    plain_s3.put(KEY, b"<html></html>")
    assert plain_transfer.store.get(KEY, byte_range=(0, 13)).body == b"<html></html>"


@pytest.mark.parametrize(
    "body",
    [
        NGINX.format("400 The plain HTTP request was sent to HTTPS port"),
        "Client sent an HTTP request to an HTTPS server.\n",
        "Reason: You're speaking plain HTTP to an SSL-enabled server port.<br />",
    ],
    ids=["nginx", "go", "apache"],
)
@pytest.mark.parametrize("call", [name for name in CALLS if "head" not in name])
def test_http_on_an_https_port(plain_s3: FaultServer, plain_transfer: Transfer, call: str, body: str):
    """A server that says so is believed: one request, and the text says what to write."""
    plain_s3.on("*", error(400, body=body))
    with pytest.raises(StorageError, match="write https:// in endpoint_url"):
        CALLS[call](plain_transfer)
    assert len(plain_s3.log) == 1


@pytest.mark.parametrize("call", CALLS)
def test_http_on_an_https_port_that_says_nothing(
    https_server: FaultServer, transfer_to: Callable[..., Transfer], call: str
):
    """A server that hangs up, or answers with a TLS alert: the error reminds of https after the usual tries."""
    transfer = transfer_to(https_server, endpoint_url=https_server.url.replace("https://", "http://"), verify_tls=True)
    with pytest.raises(StorageError, match="https:// in endpoint_url"):
        CALLS[call](transfer)


@pytest.fixture
def plain_port() -> Iterator[int]:
    """A port whose server answers whatever comes with an HTTP error, as one does that is greeted with TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.mark.parametrize("call", CALLS)
def test_https_on_an_http_port(plain_s3: FaultServer, transfer_to: Callable[..., Transfer], plain_port: int, call: str):
    """A port that does not speak TLS: two tries, and the text says what to write."""
    transfer = transfer_to(plain_s3, endpoint_url=f"https://127.0.0.1:{plain_port}")
    with pytest.raises(StorageError, match="write http:// in endpoint_url") as caught:
        CALLS[call](transfer)
    assert caught.value.attempts == 2


def test_requests_of_the_sdk_get_neither_body_nor_sink(plain_s3: FaultServer, plain_transfer: Transfer):
    """A request that the SDK makes by itself inside another one keeps its method, and touches neither the tensor nor the sink."""
    plain_s3.put(KEY, BODY)
    plain_transfer.put(BODY)
    (client,) = wait(_clients(plain_transfer))._clients
    inside: list[int] = []

    async def meddle(**_: Any) -> None:
        client.meta.events.unregister("before-send.s3", meddle)
        await client.head_bucket(Bucket="bucket")
        reply = await client.get_object(Bucket="bucket", Key="other")
        inside.append(len(await reply["Body"].read()))
        await client.put_object(Bucket="bucket", Key="another", Body=b"its own")

    plain_s3.put("other", b"x" * 50)
    try:
        client.meta.events.register("before-send.s3", meddle)
        assert plain_transfer.get(0, 100) == BODY[:100]
        client.meta.events.register("before-send.s3", meddle)
        plain_transfer.put(BODY[::-1])
    finally:
        client.meta.events.unregister("before-send.s3", meddle)
    assert inside == [50, 50]
    assert plain_s3.read(KEY) == BODY[::-1]
    assert plain_s3.read("another") == b"its own"
    assert {record.method for record in plain_s3.requests("HeadBucket")} == {"HEAD"}


async def _clients(transfer: Transfer) -> Any:
    return await transfer.plane._clients.get()


def test_a_request_that_the_sdk_addresses_otherwise(
    plain_s3: FaultServer, plain_transfer: Transfer, monkeypatch: pytest.MonkeyPatch
):
    """A GET whose sink was not taken is no success, whatever was answered."""
    plain_s3.put(KEY, BODY)
    plain = ViewSession.send

    async def elsewhere(self: ViewSession, request: Any) -> Any:
        request.url = request.url.replace(KEY, f"{KEY}.other")
        return await plain(self, request)

    plain_s3.put(f"{KEY}.other", BODY)
    monkeypatch.setattr(ViewSession, "send", elsewhere)
    with pytest.raises(StorageError, match="addressed the request otherwise"):
        plain_transfer.get(0, 100)


@pytest.mark.parametrize(
    "status, code, says",
    [
        (507, "", "the store is full"),
        (507, "XMinioStorageFull", "the store is full"),
        (507, "InsufficientStorage", "the store is full"),
        (403, "QuotaExceeded", "quota of this user or bucket is used up"),
        (400, "XMinioAdminBucketQuotaExceeded", "quota of this user or bucket is used up"),
        (400, "EntityTooLarge", "set a smaller part_bytes"),
        (413, "", "raise the proxy's limit"),
    ],
)
def test_what_ran_out(plain_s3: FaultServer, plain_transfer: Transfer, status: int, code: str, says: str):
    """A full store, a quota and a body that is too large are named, final, and nobody's permissions."""
    answer = error(status, code) if code else error(status, body=NGINX.format("413 Request Entity Too Large"))
    plain_s3.on("*", answer)
    for call in ("put", "create", "control-put"):
        before = len(plain_s3.log)
        with pytest.raises(StorageError, match=says) as caught:
            CALLS[call](plain_transfer)
        assert not isinstance(caught.value, AccessDeniedError)
        assert len(plain_s3.log) == before + 1


def test_a_head_that_is_refused(plain_s3: FaultServer, plain_transfer: Transfer):
    """The reply to a HEAD has no code: the text says what may be missing."""
    plain_s3.on("HeadObject", error(403, body=""))
    for call in ("head", "control-head"):
        with pytest.raises(AccessDeniedError, match=r"GetObject may not be permitted on this key, or ListBucket"):
            CALLS[call](plain_transfer)


@pytest.mark.parametrize("source", ["config", "environment"])
@pytest.mark.parametrize("call", ["put", "control-get"])
def test_no_such_profile(
    plain_s3: FaultServer,
    with_chain: Callable[..., Transfer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    call: str,
):
    """A profile that no file has: its name, who asked for it, and the files."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "the-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "the-credentials"))
    if source == "environment":
        monkeypatch.setenv("AWS_PROFILE", "lab")
    transfer = with_chain(**({"profile": "lab"} if source == "config" else {}))
    with pytest.raises(ConfigError) as caught:
        CALLS[call](transfer)
    text = str(caught.value)
    assert "no profile 'lab'" in text
    assert ("S3Config(profile" in text, "AWS_PROFILE" in text) == (source == "config", source == "environment")
    assert str(tmp_path / "the-config") in text
    assert str(tmp_path / "the-credentials") in text
    assert plain_s3.log == []
    assert isinstance(caught.value, DcpS3Error)


def test_a_good_reply_without_an_etag_is_no_page(plain_s3: FaultServer, plain_transfer: Transfer):
    """A gateway that strips ETags still gives its objects."""
    plain_s3.put(KEY, b"{}")
    plain_s3.on("GetObject", reply_headers({"ETag": None}))
    assert plain_transfer.store.get(KEY).body == b"{}"
