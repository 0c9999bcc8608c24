"""Secrets are told to nobody: not by logs, reprs, errors, nor by anything that is written to the bucket."""

from __future__ import annotations

import logging
import pickle
import traceback
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import RetryPolicy, S3StorageReader, S3StorageWriter, verify
from tests.fault.conftest import config_of
from tests.fault.server import FaultServer, error

SECRETS = {
    "secret_access_key": "SECRET-ACCESS-KEY-VALUE",
    "session_token": "SESSION-TOKEN-VALUE",
}


def test_saves_and_loads_tell_no_secret(s3: FaultServer, caplog: pytest.LogCaptureFixture):
    """Saves, loads and checks that succeed, are refused, fail and are repeated, logged at DEBUG: no secret is in a log record of the
    package, a repr, an error, its causes or its pickle, an object's bytes, its user metadata, or a URL.
    """
    config = config_of(s3, retry=RetryPolicy(max_attempts=2, initial_wait_s=0.001, max_wait_s=0.01), **SECRETS)
    state = {"w": torch.arange(2_000_000.0), "epoch": 3}
    told: list[str] = []
    with caplog.at_level(logging.DEBUG, logger="dcp_s3"):
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
                        told += [str(failed), repr(failed), "".join(traceback.format_exception(failed))]
                        errors = getattr(failed, "failures", {0: (failed, None)})
                        told += [repr(pickle.dumps(failure[0])) for failure in errors.values()]
                if fault is None:
                    break
    own = [record for record in caplog.records if record.name.startswith("dcp_s3")]
    assert len(own) > 20
    told += [f"{record.getMessage()} {record.args!r} {record.exc_text}" for record in own]
    s3.clear(log=False, state=False)
    for key, about in s3.objects().items():
        told += [key, repr(about), repr(s3.read(key)[:200_000])]
    for record in s3.log:
        headers = {name: value for name, value in record.headers.items() if name != "x-amz-security-token"}
        told.append(f"{record.query!r} {headers!r}")
    assert len(told) > 100
    for secret in SECRETS.values():
        assert not [text[:500] for text in told if secret in text]
