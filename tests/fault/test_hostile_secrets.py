"""Secrets are told to nobody: not by logs, reprs, errors, nor by anything that is written to the bucket."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import AccessDeniedError, DcpS3Error, RetryPolicy, S3StorageReader, S3StorageWriter, verify
from tests.fault.conftest import KEY, Transfer, config_of
from tests.fault.server import FaultServer, error

SECRETS = {
    "secret_access_key": "SECRET-ACCESS-KEY-VALUE",
    "session_token": "SESSION-TOKEN-VALUE",
}
SECRET, TOKEN = SECRETS.values()
BROKEN: dict[str, bytes] = {
    "cut": f'{{"Version": 1, "AccessKeyId": "KEY", "SecretAccessKey": "{SECRET}", "SessionToken": "{TOKEN}'.encode(),
    "words before it": f'{SECRET} {{"Version": 1, "SessionToken": "{TOKEN}"}}'.encode(),
    "no object": f'["{SECRET}", "{TOKEN}"]'.encode(),
    "a key is missing": f'{{"Version": 1, "SecretAccessKey": "{SECRET}", "SessionToken": "{TOKEN}"}}'.encode(),
    "another version": f'{{"Version": 2, "SecretAccessKey": "{SECRET}", "SessionToken": "{TOKEN}"}}'.encode(),
    "not UTF-8": f'{{"Version": 1, "SecretAccessKey": "{SECRET}", "SessionToken": "{TOKEN}"'.encode() + b"\xff}",
}
"""What a credential_process may print in place of credentials."""


def told_by(failed: BaseException) -> list[str]:
    """Everything that an error may be asked for, and what is sent of it to other ranks."""
    errors = getattr(failed, "failures", {0: (failed, None)})
    pickles = [repr(pickle.dumps(failure[0])) for failure in errors.values()]
    return [str(failed), repr(failed), "".join(traceback.format_exception(failed)), *pickles]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What all loggers have said, those of the SDK below, too."""
    return [f"{record.name} {record.getMessage()} {record.args!r} {record.exc_text}" for record in caplog.records]


def test_saves_and_loads_tell_no_secret(s3: FaultServer, caplog: pytest.LogCaptureFixture):
    """Saves, loads and checks that succeed, are refused, fail and are repeated, all loggers at DEBUG: no secret is in a log record of
    anybody, a repr, an error, its causes or its pickle, an object's bytes, its user metadata, or a URL.
    """
    config = config_of(s3, retry=RetryPolicy(max_attempts=2, initial_wait_s=0.001, max_wait_s=0.01), **SECRETS)
    state = {"w": torch.arange(2_000_000.0), "epoch": 3}
    told: list[str] = []
    with caplog.at_level(logging.DEBUG):
        for fault in (None, error(503, "SlowDown"), error(403, "SignatureDoesNotMatch"), error(400, body="<<<")):
            for operation in ("*", "UploadPart", "PutObject", "GetObject"):
                s3.clear(log=False, state=False)
                if fault is not None:
                    s3.on(operation, fault)
                writer = S3StorageWriter("s3://bucket/run", config=config)
                reader = S3StorageReader("s3://bucket/run", config=config)
                told += [repr(writer), repr(reader), repr(config), str(config)]
                calls: list[Any] = [
                    lambda writer=writer: dcp.save(state, storage_writer=writer, no_dist=True),
                    lambda reader=reader: dcp.load({"w": torch.zeros(2_000_000)}, storage_reader=reader, no_dist=True),
                    lambda: verify("s3://bucket/run", deep=True, config=config),
                ]
                for call in calls:
                    try:
                        told.append(repr(call()))
                    except BaseException as failed:
                        told += told_by(failed)
                if fault is None:
                    break
    own = logged(caplog)
    assert len(own) > 20
    spoke = {text.split(" ")[0] for text in own}
    assert {"dcp_s3.writer", "dcp_s3.reader", "dcp_s3._transfer.limits.retry", "botocore.endpoint"} <= spoke
    told += own
    s3.clear(log=False, state=False)
    for key, about in s3.objects().items():
        told += [key, repr(about), repr(s3.read(key)[:200_000])]
    for record in s3.log:
        headers = {name: value for name, value in record.headers.items() if name != "x-amz-security-token"}
        told.append(f"{record.query!r} {headers!r}")
    assert len(told) > 100
    for secret in SECRETS.values():
        assert not [text[:500] for text in told if secret in text]


@pytest.mark.parametrize("answer", BROKEN)
def test_a_provider_that_prints_nonsense(
    plain_s3: FaultServer,
    transfer_to: Callable[..., Transfer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: str,
):
    """A credential_process whose output holds the secret and is no credentials: one of our errors on either plane, and the secret is
    in no text, cause or pickle of it, and in no log record of the package at DEBUG; no request is sent.
    """
    (tmp_path / "printed").write_bytes(BROKEN[answer])
    (tmp_path / "config").write_text(f"[default]\ncredential_process = /bin/cat {tmp_path / 'printed'}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    transfer = transfer_to(plain_s3, access_key_id=None, secret_access_key=None)
    writer = S3StorageWriter("s3://bucket/run", config=transfer.config)
    reader = S3StorageReader("s3://bucket/run", config=transfer.config)
    told: list[str] = []
    with caplog.at_level(logging.DEBUG):
        for call in (lambda: transfer.put(b"x"), lambda: transfer.get(0, 1), lambda: transfer.store.get(KEY)):
            with pytest.raises(DcpS3Error) as caught:
                call()
            told += told_by(caught.value)
            if answer in ("cut", "words before it"):
                assert isinstance(caught.value, AccessDeniedError)
                assert "no credentials" in str(caught.value)
        with pytest.raises(dcp.CheckpointException) as failed:
            dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
        told += told_by(failed.value)
        with pytest.raises(BaseException, match=r"s3://|GetObject") as unread:
            dcp.load({"w": torch.ones(3)}, storage_reader=reader, no_dist=True)
        told += told_by(unread.value)
    own = logged(caplog)
    assert any(text.startswith("dcp_s3.writer the save of s3://bucket/run failed") for text in own)
    for secret in SECRETS.values():
        assert not [text[:500] for text in told + own if secret in text]
    assert plain_s3.log == []
