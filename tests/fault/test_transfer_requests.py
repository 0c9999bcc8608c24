"""What is in a request: encryption, tags and metadata where they belong, addresses, and the permissions it needs."""

from __future__ import annotations

import base64
import hashlib
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import boto3
import pytest
from botocore.awsrequest import AWSResponse

from dcp_s3 import AccessDeniedError, S3Config, StorageError
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.http.session import ViewSession
from dcp_s3._transfer.http.sink import Sink
from dcp_s3._transfer.job import Job
from dcp_s3._transfer.limits.retry import Counter, Deadline
from dcp_s3._transfer.s3 import client_options, shared_clients
from dcp_s3._transfer.s3.clients import connection_of
from dcp_s3._transfer.s3.control_store import ControlStore
from dcp_s3._transfer.s3.data_plane import DataPlane
from tests.fault.conftest import KEY, QUICK, Transfer, config_of, pattern, wait
from tests.fault.server import MULTIPART, PROFILES, FaultServer, error

BODY = pattern(250_000)
PART = 100_000
RECORD = "run/.metadata"
BINARY = "application/octet-stream"
CREATING = ("PutObject", "CreateMultipartUpload")


def work(transfer: Transfer) -> None:
    """Every request of a save and a load, once."""
    transfer.put(BODY, f"{KEY}.small")
    transfer.send(BODY, part_bytes=PART)
    transfer.store.put(RECORD, b"{}", content_type=BINARY, metadata={"dcp-s3-write-id": "7" * 32})
    transfer.get(0, 10)
    transfer.store.get(RECORD)
    transfer.store.head(RECORD)
    upload = transfer.upload(f"{KEY}.aborted", part_bytes=PART)
    upload.append(memoryview(BODY))
    transfer.s3.wait_for("UploadPart", key="aborted")
    upload.abort()
    transfer.store.delete(RECORD)


def carriers(s3: FaultServer, header: str) -> set[str]:
    """Operations of which every request carries a header; none may carry it only at times."""
    with_it = {r.operation for r in s3.log if header in r.headers}
    without = {r.operation for r in s3.log if header not in r.headers}
    assert not with_it & without
    return with_it


def test_sse_c(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """A customer key goes with each request that makes, fills, joins or reads an object, and with no other."""
    key = bytes(range(32))
    work(transfer_to(s3, sse_customer_key=key))
    for header, value in {
        "x-amz-server-side-encryption-customer-algorithm": "AES256",
        "x-amz-server-side-encryption-customer-key": base64.b64encode(key).decode(),
        "x-amz-server-side-encryption-customer-key-md5": base64.b64encode(hashlib.md5(key).digest()).decode(),
    }.items():
        needed = {*CREATING, "UploadPart", "CompleteMultipartUpload", "GetObject", "HeadObject"}
        assert carriers(s3, header) == needed
        assert {r.headers[header] for r in s3.log if header in r.headers} == {value}
    assert carriers(s3, "x-amz-server-side-encryption") == set()


@pytest.mark.parametrize("sse", ["AES256", "aws:kms", "aws:kms:dsse"])
def test_sse_of_the_store(s3: FaultServer, transfer_to: Callable[..., Transfer], sse: str):
    """Encryption by the store's own or KMS keys goes with what creates an object, and with nothing else."""
    kms = {} if sse == "AES256" else {"sse_kms_key_id": "arn:aws:kms:lab:1:key/7"}
    work(transfer_to(s3, sse=sse, **kms))
    assert carriers(s3, "x-amz-server-side-encryption") == set(CREATING)
    assert {r.headers["x-amz-server-side-encryption"] for r in s3.requests(CREATING)} == {sse}
    assert carriers(s3, "x-amz-server-side-encryption-aws-kms-key-id") == (set(CREATING) if kms else set())


def test_storage_class_tags_and_metadata(s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Tags and metadata are on every object; the storage class is on data objects and not on the record."""
    work(
        transfer_to(
            s3,
            storage_class="STANDARD_IA",
            tags={"team": "a b", "cost&centre": "ü=1"},
            metadata={"run": "lab 7", "owner": "x"},
        )
    )
    creating = s3.requests(CREATING)
    assert {unquote(r.headers["x-amz-tagging"].replace("+", " ")) for r in creating} == {"team=a b&cost&centre=ü=1"}
    assert {r.headers["x-amz-tagging"] for r in creating} == {"team=a+b&cost%26centre=%C3%BC%3D1"}
    assert {(r.headers["x-amz-meta-run"], r.headers["x-amz-meta-owner"]) for r in creating} == {("lab 7", "x")}
    for record in creating:
        is_record = record.key == RECORD
        assert record.headers.get("x-amz-storage-class") == (None if is_record else "STANDARD_IA")
        own = "x-amz-meta-dcp-s3-write-id" if is_record else "x-amz-meta-dcp-s3-token"
        assert own in record.headers
    assert carriers(s3, "x-amz-tagging") == set(CREATING)


def test_nothing_that_was_not_asked_for(s3: FaultServer, transfer: Transfer):
    """Without settings no encryption, class, tag or ACL header is sent at all."""
    work(transfer)
    unwanted = ("x-amz-server-side", "x-amz-storage", "x-amz-tagging", "x-amz-acl", "x-amz-grant", "x-amz-object-lock")
    assert not [name for r in s3.log for name in r.headers if name.startswith(unwanted)]


def test_the_least_privilege(s3: FaultServer, transfer: Transfer):
    """All of it, but for the delete, works with PutObject, GetObject and the multipart calls, where missing is 403."""
    s3.configure(**(PROFILES["least-privilege"] | {"min_part_bytes": 0}))
    transfer.put(BODY, f"{KEY}.small")
    s3.on("CompleteMultipartUpload", error(500, "InternalError"), nth=1)  # which a HEAD that says 403 must settle
    transfer.send(BODY, part_bytes=PART)
    transfer.store.put(RECORD, b"{}", content_type=BINARY)
    transfer.store.get(RECORD)
    transfer.get(0, 10)
    assert {r.operation for r in s3.log} <= {"PutObject", "GetObject", "HeadObject", *MULTIPART}
    assert s3.read(KEY) == BODY
    assert s3.violations() == []


@pytest.mark.parametrize("listing", ["objects", "prefixes", "uploads"])
def test_only_listing_needs_the_right_to_list(s3: FaultServer, transfer: Transfer, listing: str, allowed: set[str]):
    """A listing that is denied is one request, and an error that names the operation."""
    allowed.add("forbidden-operation")
    s3.configure(**PROFILES["least-privilege"])
    calls: dict[str, Callable[[], Any]] = {
        "objects": lambda: list(transfer.store.list("run/")),
        "prefixes": lambda: list(transfer.store.list_prefixes("run/")),
        "uploads": lambda: list(transfer.store.list_uploads("run/")),
    }
    with pytest.raises(AccessDeniedError) as caught:
        calls[listing]()
    assert caught.value.operation in ("ListObjectsV2", "ListMultipartUploads")
    assert len(s3.log) == 1


def test_who_we_are(plain_s3: FaultServer, plain_transfer: Transfer):
    """Requests of both planes name the package to the store's administrator."""
    plain_transfer.put(BODY)
    plain_transfer.store.get(KEY)
    assert all("dcp-s3" in r.headers["user-agent"] for r in plain_s3.log)


@pytest.mark.parametrize(
    "key", ["run/a b+c/é%41?x=1&y#z.distcp", "run/ünïcode-雪/__0_0.distcp", "run/..a/...", "a" * 900]
)
def test_odd_keys(s3: FaultServer, transfer: Transfer, key: str):
    """Keys with every kind of character go to the same object by all four ways."""
    transfer.put(BODY, key)
    assert transfer.get(5, 500, key) == BODY[5:500]
    assert transfer.store.get(key).body == BODY
    transfer.send(BODY[::-1], f"{key}2", part_bytes=PART)
    assert set(s3.objects()) == {key, f"{key}2"}
    assert s3.read(f"{key}2") == BODY[::-1]


# ---------------------------------------------------------------------------------------------------------------------
# Addresses


def address(config: S3Config, bucket: str = "bucket") -> tuple[str, str]:
    """Where the two planes would send a GET: their URLs, without sending it."""
    seen: list[str] = []
    with shared_clients.shared_clients(connection_of(config)) as shared:
        control = shared.get()

    def stop(request: Any, **_: Any) -> AWSResponse:
        seen.append(request.url)
        return AWSResponse(request.url, 404, {}, Raw())

    control[0].meta.events.register("before-send.s3", stop)
    with pytest.raises(StorageError):
        ControlStore(config, bucket).get("k")

    async def note(self: ViewSession, request: Any) -> Any:
        seen.append(request.url)
        raise ValueError("far enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ViewSession, "send", note)
        plane = DataPlane(config)
        job = Job(bucket, Deadline(10), Counter(), Progress())
        with pytest.raises(StorageError):
            wait(plane.get_range(job, "k", 0, Sink([memoryview(bytearray(1))], job.progress)))
        wait(plane.close())
    return seen[0], seen[1]


class Raw:
    """The body of a reply that nobody sent."""

    def stream(self) -> list[bytes]:
        return []

    def read(self, *_: Any, **__: Any) -> bytes:
        return b""


STATIC = {"access_key_id": "A", "secret_access_key": "s", "region": "eu-west-1", "retry": QUICK}


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"endpoint_url": "https://s3.lab.test"}, "https://s3.lab.test/bucket/k"),
        ({"endpoint_url": "https://s3.lab.test", "addressing_style": "virtual"}, "https://bucket.s3.lab.test/k"),
        ({"endpoint_url": "http://10.0.0.7:9000", "addressing_style": "path"}, "http://10.0.0.7:9000/bucket/k"),
        ({}, "https://bucket.s3.eu-west-1.amazonaws.com/k"),
        ({"addressing_style": "path"}, "https://s3.eu-west-1.amazonaws.com/bucket/k"),
        (
            {"endpoint_url": "https://s3.eu-west-1.amazonaws.com"},
            "https://s3.eu-west-1.amazonaws.com/bucket/k",
        ),
    ],
)
def test_addressing(settings: dict[str, Any], expected: str):
    """An endpoint that is given is addressed by path, AWS's own by virtual host, and addressing_style decides otherwise."""
    assert address(S3Config(**STATIC, **settings)) == (expected, expected)


def test_virtual_addressing_on_the_wire(plain_s3: FaultServer, transfer_to: Callable[..., Transfer]):
    """Virtual-hosted requests of both planes carry the bucket in the Host header and nowhere else."""
    plain_s3.configure(virtual_host="localhost")
    endpoint = f"http://localhost:{plain_s3.ports[0]}"
    with pytest.MonkeyPatch.context() as patch:
        resolve_here(patch)
        transfer = transfer_to(plain_s3, endpoint_url=endpoint, addressing_style="virtual")
        transfer.put(BODY)
        assert transfer.get(2, 4) == BODY[2:4]
        assert transfer.store.get(KEY).body == BODY
        transfer.send(BODY, f"{KEY}2", part_bytes=PART)
    assert {r.headers["host"] for r in plain_s3.log} == {f"bucket.localhost:{plain_s3.ports[0]}"}
    assert {r.bucket for r in plain_s3.log} == {"bucket"}
    assert plain_s3.read(f"{KEY}2") == BODY


def resolve_here(patch: pytest.MonkeyPatch) -> None:
    """Have every name mean this machine."""
    resolve = socket.getaddrinfo
    patch.setattr(socket, "getaddrinfo", lambda host, *args, **options: resolve("127.0.0.1", *args, **options))


def test_region(plain_s3: FaultServer, transfer_to: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch):
    """The region of a signature: the config's, else AWS_REGION before AWS_DEFAULT_REGION, else us-east-1."""

    def signed_for(**settings: Any) -> set[str]:
        plain_s3.clear()
        transfer = transfer_to(plain_s3, **settings)
        transfer.put(BODY)
        transfer.store.head(KEY)
        return {r.headers["authorization"].split("/")[2] for r in plain_s3.log}

    assert signed_for() == {"us-east-1"}
    monkeypatch.setenv("AWS_DEFAULT_REGION", "by-default")
    assert signed_for(max_concurrency=3) == {"by-default"}
    monkeypatch.setenv("AWS_REGION", "by-region")
    assert signed_for(max_concurrency=4) == {"by-region"}
    assert signed_for(region="by-config") == {"by-config"}


def test_one_client_for_a_config(plain_s3: FaultServer, monkeypatch: pytest.MonkeyPatch):
    """Control stores of one config, in however many saves, share one boto3 client."""
    made: list[Any] = []
    plain = boto3.session.Session.client

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        made.append(args)
        return plain(self, *args, **options)

    monkeypatch.setattr(client_options.boto3.session.Session, "client", counted)
    config = config_of(plain_s3, max_concurrency=7)
    for _ in range(5):
        with pytest.raises(StorageError):
            ControlStore(config, "bucket").head("absent")
    assert len(made) == 1
