"""Credentials: looked up once, sought again when there are none, never told to anybody. What expires is in test_transfer_expiry.py."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import (
    AccessDeniedError,
    ConfigError,
    DcpS3Error,
    DeadlineExceededError,
    RetryPolicy,
    S3Config,
    S3StorageReader,
    S3StorageWriter,
)
from dcp_s3._runtime.loop_thread import loop_thread
from dcp_s3._transfer.checksum import crc32c
from tests.fault.conftest import KEY, TOKEN, Transfer, config_of, pattern
from tests.fault.provider import Provider
from tests.fault.server import FaultServer, error, reset

BODY = pattern(160_000)
JSON = "application/json"


def put_at_once(transfer: Transfer, count: int) -> list[BaseException | None]:
    """Send many objects at the same time; return what became of each."""
    sent = [
        loop_thread().submit(transfer.plane.put_object(transfer.job, f"k{n}", [memoryview(BODY)], crc32c(BODY), TOKEN))
        for n in range(count)
    ]
    return [work.exception(30) for work in sent]


def test_one_lookup_for_many_requests(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider):
    """16 requests that set out together ask the provider once, and so do all later ones together with them."""
    provider.answer(1, "KEY1")
    transfer = with_chain()
    assert put_at_once(transfer, 16) == [None] * 16
    assert provider.calls == 1
    transfer.send(BODY, part_bytes=10_000)
    assert provider.calls == 1
    assert {r.access_key for r in plain_s3.log} == {"KEY1"}
    assert plain_s3.log[0].headers["x-amz-security-token"] == "T-KEY1"


def test_two_lookups_in_a_process(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider):
    """A process asks the provider twice: once for the data plane and once for the control plane, which are clients of two libraries.
    Any number of saves and loads asks no more.
    """
    provider.answer(1, "KEY1")
    config = with_chain().config
    for step in range(3):
        url = f"s3://bucket/run/{step}"
        dcp.save({"w": torch.full((10,), step)}, storage_writer=S3StorageWriter(url, config=config), no_dist=True)
        loaded = {"w": torch.full((10,), -1)}
        dcp.load(loaded, storage_reader=S3StorageReader(url, config=config), no_dist=True)
        assert loaded["w"].tolist() == [step] * 10
        assert provider.calls == 2
    assert {record.access_key for record in plain_s3.log} == {"KEY1"}


def test_a_provider_that_fails_at_first(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider):
    """A provider that is busy twice is asked again, shortly after, by whoever comes next; nothing of it is cached."""
    provider.answer(3, "KEY1")
    transfer = with_chain()
    assert put_at_once(transfer, 16) == [None] * 16
    assert provider.calls == 3
    store = transfer.store
    store.put("small", b"{}", content_type=JSON)
    assert provider.calls == 4  # the control plane's own, one for the process
    for _ in range(3):
        store.get("small")
    assert provider.calls == 4


def test_a_provider_that_fails_for_ever(plain_s3: FaultServer, with_chain: Callable[..., Transfer], provider: Provider):
    """No credentials after four tries: an error that says so, with the provider's words; no request was sent."""
    transfer = with_chain()
    for call in (lambda: transfer.put(BODY), lambda: transfer.get(0, 1), lambda: transfer.store.get(KEY)):
        before = provider.calls
        with pytest.raises(AccessDeniedError, match=r"no credentials: .*metadata service is busy") as caught:
            call()
        assert provider.calls == before + 4
        assert (caught.value.attempts, caught.value.key) == (4, KEY)
    assert plain_s3.log == []
    provider.answer(provider.calls + 1, "KEY1")
    transfer.put(BODY)
    transfer.store.get(KEY)


def test_a_provider_that_hangs(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A provider that never answers holds a request to its deadline and no longer, on either plane."""
    pids = tmp_path / "pids"
    script = tmp_path / "hangs.sh"
    script.write_text(f'echo $$ >> "{pids}"\nexec sleep 60\n')
    (tmp_path / "config").write_text(f"[default]\ncredential_process = /bin/sh {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    transfer = with_chain(deadline_s=0.8)
    started = time.monotonic()
    try:
        with pytest.raises(DeadlineExceededError, match=r"deadline of 0.8 s"):
            transfer.put(BODY)
        transfer = with_chain(deadline_s=0.8)
        with pytest.raises(DeadlineExceededError, match=r"deadline of 0.8 s"):
            transfer.store.get(KEY)
        assert time.monotonic() - started < 15
    finally:
        for pid in pids.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert plain_s3.log == []


def test_a_chain_that_was_empty(
    plain_s3: FaultServer, with_chain: Callable[..., Transfer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A chain that gives nothing is asked once. The client is not kept: credentials that appear later are found."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    transfer = with_chain()
    plain_s3.put(KEY, BODY)
    calls = [lambda: transfer.put(BODY, "k"), lambda: transfer.get(0, 1), lambda: transfer.store.get(KEY)]
    for call in calls:
        with pytest.raises(AccessDeniedError, match=r"no credentials.*AWS_ACCESS_KEY_ID") as caught:
            call()
        assert caught.value.attempts == 1
    assert plain_s3.log == []
    file.write_text("[default]\naws_access_key_id = FILE\naws_secret_access_key = s\n")
    for call in calls:
        call()
    assert {r.access_key for r in plain_s3.log} == {"FILE"}


def test_a_profile_that_is_not_there(plain_s3: FaultServer, with_chain: Callable[..., Transfer]):
    """A profile that no file knows is a ConfigError that names it, at once, on either plane."""
    transfer = with_chain(profile="lab")
    for call in (lambda: transfer.put(BODY), lambda: transfer.store.get(KEY)):
        with pytest.raises(ConfigError, match="lab"):
            call()
    assert plain_s3.log == []
    assert transfer.job.counter.retries == 0


def test_half_of_a_pair(plain_s3: FaultServer, with_chain: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch):
    """An access key without its secret in the environment is a ConfigError on either plane."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "HALF")
    transfer = with_chain()
    for call in (lambda: transfer.put(BODY), lambda: transfer.store.get(KEY)):
        with pytest.raises(ConfigError, match=r"(?i)secret"):
            call()
    assert plain_s3.log == []


def test_unsigned_requests(plain_s3: FaultServer, with_chain: Callable[..., Transfer]):
    """unsigned=True sends no Authorization and no token, and asks no provider; a write is then refused by the store."""
    plain_s3.configure(public_read=True)
    plain_s3.put(KEY, BODY)
    transfer = with_chain(unsigned=True)
    assert transfer.get(0, 10) == BODY[:10]
    assert transfer.store.get(KEY).body == BODY
    assert transfer.store.head(KEY).size == len(BODY)
    with pytest.raises(AccessDeniedError):
        transfer.put(BODY)
    for record in plain_s3.log:
        assert not {"authorization", "x-amz-security-token", "x-amz-date"} & set(record.headers)


@pytest.mark.parametrize("where", ["profile", "services", "environment", "environment-s3"])
def test_an_endpoint_from_outside(
    plain_s3: FaultServer,
    transfer_to: Callable[..., Transfer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
):
    """Endpoint, region and keys of a profile, its services section, or the environment serve both planes, path style."""
    keys = "region = lab-1\naws_access_key_id = LAB\naws_secret_access_key = s\n"
    url = f"endpoint_url = {plain_s3.url}\n"
    profile = {
        "profile": f"[profile lab]\n{keys}{url}",
        "services": f"[profile lab]\n{keys}services = lab-services\n[services lab-services]\ns3 =\n  {url}",
    }.get(where, f"[profile lab]\n{keys}")
    (tmp_path / "config").write_text(profile)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    if where == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", plain_s3.url)
    if where == "environment-s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", plain_s3.url)
    settings: dict[str, Any] = {"endpoint_url": None, "access_key_id": None, "secret_access_key": None}
    transfer = transfer_to(plain_s3, **settings)
    transfer.put(BODY)
    assert transfer.get(3, 9) == BODY[3:9]
    assert transfer.store.get(KEY).body == BODY
    assert {(r.bucket, r.access_key) for r in plain_s3.log} == {("bucket", "LAB")}
    assert all("/lab-1/s3/aws4_request" in r.headers["authorization"] for r in plain_s3.log)
    assert all(r.headers["host"] == plain_s3.url.removeprefix("http://") for r in plain_s3.log)


SECRETS = (
    "SECRET-KEY-VALUE",
    "SESSION-TOKEN-VALUE",
    "sse-customer-key-of-32-bytes-xyz",
    "c3NlLWN1c3RvbWVyLWtleS1vZi0z",
)


def test_no_secret_is_told(s3: FaultServer, transfer_to: Callable[..., Transfer], caplog: pytest.LogCaptureFixture):
    """Secrets are in no log line of ours at DEBUG, no error, its causes or their pickles, no repr; nor on the wire."""
    transfer = transfer_to(
        s3,
        secret_access_key=SECRETS[0],
        session_token=SECRETS[1],
        sse_customer_key=SECRETS[2].encode(),
        retry=RetryPolicy(max_attempts=2, initial_wait_s=0.001, max_wait_s=0.001),
    )
    faults = [
        error(403, "SignatureDoesNotMatch"),
        error(403, "AccessDenied"),
        error(503, "SlowDown"),
        error(400, body="<<<"),
        reset("body", 10),
        error(404, "NoSuchKey"),
    ]
    told: list[str] = []
    with caplog.at_level(logging.DEBUG, logger="dcp_s3"):
        for fault in faults:
            s3.clear()
            s3.on("*", fault)
            for call in (
                lambda: transfer.put(BODY),
                lambda: transfer.send(BODY, part_bytes=50_000),
                lambda: transfer.get(0, 100),
                lambda: transfer.store.get(KEY),
                lambda: transfer.store.put(KEY, b"{}", content_type=JSON),
            ):
                with pytest.raises(DcpS3Error) as caught:
                    call()
                told += [str(caught.value), repr(caught.value), "".join(traceback.format_exception(caught.value))]
                told.append(repr(pickle.dumps(caught.value)))
        s3.clear()
        transfer.put(BODY)
        transfer.send(BODY, f"{KEY}.2", part_bytes=50_000)
    told += [f"{record.getMessage()} {record.args!r}" for record in caplog.records if record.name.startswith("dcp_s3")]
    told += [
        repr(transfer.config),
        str(transfer.config),
        repr(transfer.plane),
        repr(transfer.job),
        repr(transfer.store),
    ]
    told += [
        repr(r.query) + repr({k: v for k, v in r.headers.items() if "customer-key" not in k and "token" not in k})
        for r in s3.log
    ]
    told += [repr(kind("s3://bucket/run", config=transfer.config)) for kind in (S3StorageWriter, S3StorageReader)]
    assert len(told) > 100
    for secret in SECRETS:
        assert not [text for text in told if secret in text]


def test_keys_of_the_config_win(
    plain_s3: FaultServer, transfer_to: Callable[..., Transfer], provider: Provider, monkeypatch: pytest.MonkeyPatch
):
    """Credentials in the config are used before any of the environment; the chain is not even asked."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    transfer = transfer_to(plain_s3, access_key_id="CONFIG")
    transfer.put(BODY)
    transfer.store.get(KEY)
    assert {r.access_key for r in plain_s3.log} == {"CONFIG"}
    assert provider.calls == 0
    assert isinstance(config_of(plain_s3), S3Config)
