"""What a failed load prints: our text where DCP puts it, and not the chain of errors below it."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CheckpointNotFoundError, CorruptCheckpointError
from tests.fault.server import error
from tests.integration.conftest import bucket_on
from tests.integration.support import failure_of, reader, writer

PRINTED_LINES = 60
"""Of a log and a traceback in all; 44 with torch 2.13, of which 6 are ours. It was 182 with the chain of botocore's error."""


def missing(faults, _):
    """Nothing was ever saved."""


def denied(faults, _):
    """Every read is refused."""
    faults.on("GetObject", error(403, "AccessDenied"))


def spoilt(faults, bucket):
    """The record is no pickle."""
    dcp.save({"w": torch.ones(100)}, storage_writer=writer(bucket, "a"), no_dist=True)
    faults.put("a/.metadata", b"\x80\x04junk")


def gone(faults, bucket):
    """The data is deleted."""
    dcp.save({"w": torch.ones(100)}, storage_writer=writer(bucket, "a"), no_dist=True)
    for key in list(faults.objects("a/data/")):
        faults.delete(key)


@pytest.mark.parametrize(
    "what, text",
    [
        (missing, "no checkpoint at s3://bucket/a"),
        (denied, "no checkpoint at s3://bucket/a"),
        (spoilt, "s3://bucket/a/.metadata "),
        (gone, "a data object of s3://bucket/a is missing"),
    ],
)
def test_a_failed_load_prints_its_cause_once(faults, caplog, what, text):
    """DCP's warnings and its exception have our text once each, and no error of the client library; the chain is at DEBUG."""
    bucket = bucket_on(faults)
    what(faults, bucket)
    caplog.clear()
    caplog.set_level("DEBUG", logger="dcp_s3.reader")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(100)}, storage_reader=reader(bucket, "a"), no_dist=True)
    raised = "".join(traceback.format_exception(caught.value))
    failed = failure_of(caught.value, 0)
    assert str(failed).count(text) == 1
    assert failed.__cause__ is None
    warned = "\n".join(
        caplog.handler.format(r) for r in caplog.records if r.name.startswith("torch.distributed.checkpoint.state")
    )
    assert warned.count(text) <= 1
    printed = f"{warned}\n{raised}"
    assert "direct cause" not in printed
    assert "During handling" not in printed
    assert "botocore" not in printed
    assert len(printed.splitlines()) < PRINTED_LINES
    chain = [r for r in caplog.records if r.name == "dcp_s3.reader" and r.levelname == "DEBUG" and r.exc_info]
    assert chain


def test_the_second_question_has_the_class_of_the_first(faults):
    """Asked for a rank's own record after the shared one was damaged, the reader says so briefly, with the same class."""
    bucket = bucket_on(faults)
    spoilt(faults, bucket)
    asked = reader(bucket, "a")
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        asked.read_metadata()
    requests = len(faults.requests("GetObject"))
    with pytest.raises(CorruptCheckpointError, match=r"no answer to what the shared \.metadata failed of"):
        asked.read_metadata(rank=0)
    assert len(faults.requests("GetObject")) == requests
    with pytest.raises(CheckpointNotFoundError, match=r"no readable __0\.metadata"):
        reader(bucket, "b").read_metadata(rank=0)
