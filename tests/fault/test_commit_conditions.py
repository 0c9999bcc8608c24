"""Conditions that do not work, or work in another form: what is replaced, what is deleted, and what is said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CheckpointExistsError, CommitConflictError, S3StorageReader, S3StorageWriter, StorageError
from dcp_s3._checkpoint.format.layout import record_name
from dcp_s3._transfer.s3 import probe
from tests.fault.conftest import config_of
from tests.fault.server import FaultServer, RuleHandle, error, reply_headers
from tests.fault.test_commit_ambiguity import RECORD, URL, assert_nothing_else, land, load, save, state_of


def _gateway(s3: FaultServer, form: str) -> RuleHandle:
    """Have GETs of the record answer with its ETag in another form than PUTs and HEADs do."""
    etag = s3.objects()["run/.metadata"]["etag"]
    return s3.on("GetObject", reply_headers({"ETag": form.format(etag)}), key=RECORD)


# ---------------------------------------------------------------------- what was replaced, where a PUT may come late


@pytest.mark.parametrize(
    "settings, first, second",
    [
        ({"conditional_put": "ignore"}, {}, {}),
        ({"conditional_put": "refuse"}, {}, {}),
        ({}, {"conditional_commit": "off"}, {"conditional_commit": "off"}),
        ({}, {"conditional_commit": "off"}, {}),  # the second has conditions, the record that comes late had none
    ],
    ids=["ignored", "refused", "off", "off, then on"],
)
def test_a_record_without_condition_that_comes_late(
    plain_s3: FaultServer, settings: dict[str, Any], first: dict[str, Any], second: dict[str, Any]
):
    """A record's first PUT, answered 503 and repeated, arrives when the next save has replaced it: it still loads, whole."""
    plain_s3.configure(**settings)
    probe._known.clear()
    gate = plain_s3.hold("PutObject", key=RECORD, at="late", then=error(503, "SlowDown"), times=1)
    assert save(plain_s3, 10, **first) is None
    assert save(plain_s3, 20, **second) is None
    assert load(plain_s3) == 20

    assert land(plain_s3, gate)[0]

    assert load(plain_s3) == 10
    assert_nothing_else(plain_s3)
    assert load(plain_s3) == 10


@pytest.mark.parametrize("form", ["unquoted", "ignored", "refused"])
def test_what_is_replaced_without_if_match(plain_s3: FaultServer, form: str):
    """Where If-None-Match is honoured alone, what was replaced is left to gc; where If-Match is, in any form, it is deleted."""
    plain_s3.configure(if_match_form=form)
    probe._known.clear()
    for value in (10, 20):
        assert save(plain_s3, value) is None
    kept = [key for key in plain_s3.objects() if "/data/" in key]
    assert len(kept) == (1 if form == "unquoted" else 2)
    assert load(plain_s3) == 20
    assert_nothing_else(plain_s3)


# ---------------------------------------------------------------------- ETags of more than one form


@pytest.mark.parametrize("form", ['W/"{}"', '"{}-gzip"', "{}", 'W/"{}-gzip"'])
def test_a_gateway_whose_gets_have_etags_of_their_own(plain_s3: FaultServer, form: str):
    """A checkpoint is replaced, by a PUT whose condition holds for that one alone; its objects are deleted."""
    assert save(plain_s3, 10) is None
    probe._known.clear()
    etag = plain_s3.objects()["run/.metadata"]["etag"]
    _gateway(plain_s3, form)
    assert save(plain_s3, 20) is None
    sent = plain_s3.requests("PutObject", key=RECORD)
    assert sent[-1].headers["if-match"] in (f'"{etag}"', etag)
    assert len(sent) == (2 if form in {'W/"{}"', "{}"} else 3)
    plain_s3.clear(state=False)
    assert load(plain_s3) == 20
    assert_nothing_else(plain_s3)


def test_another_writer_behind_such_a_gateway(plain_s3: FaultServer):
    """The ETag that HEAD gives is not taken for that of what the save saw when another writer was there in between."""
    assert save(plain_s3, 10) is None
    probe._known.clear()
    before = _gateway(plain_s3, '"{}-gzip"')
    looking = plain_s3.hold("HeadObject", key=RECORD, times=1)
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(save, plain_s3, 20)
        looking.wait_arrived()
        plain_s3.put("run/.metadata", b"another writer's")
        before.remove()
        _gateway(plain_s3, '"{}-gzip"')
        looking.release()
        assert isinstance(ours.result(timeout=60), CommitConflictError)
    assert plain_s3.read("run/.metadata") == b"another writer's"


@pytest.mark.parametrize("there", ["new", "replacing"])
def test_conditions_that_are_refused_for_ever(plain_s3: FaultServer, there: str):
    """Nobody else was there, so nobody else is blamed: the conditions do not work, and the error says which and what to do."""
    assert save(plain_s3, 10) is None
    plain_s3.clear(state=there == "new")
    refusing = plain_s3.on("PutObject", error(412, "PreconditionFailed"), key=RECORD)

    raised = save(plain_s3, 20)

    assert type(raised) is StorageError
    header = "If-None-Match" if there == "new" else "If-Match"
    assert f"refused the commit's {header} 5 times, though s3://bucket/run/.metadata is as this save found it" in str(
        raised
    )
    assert "conditional_commit='off'" in str(raised)
    assert (raised.status, raised.code, raised.attempts, refusing.fired) == (412, "PreconditionFailed", 5, 5)
    refusing.remove()
    assert load(plain_s3) == (None if there == "new" else 10)


# ---------------------------------------------------------------------- records of two kinds


def _save_alone(s3: FaultServer, value: int, *, collectives: bool, **settings: Any) -> None:
    writer = S3StorageWriter(URL, config=config_of(s3, **settings))
    dcp.save(state_of(value), storage_writer=writer, use_collectives=collectives)


@pytest.mark.parametrize("collectives", [True, False])
@pytest.mark.parametrize("listable", [True, False], ids=["may list", "may not list"])
def test_a_checkpoint_of_the_other_kind(plain_s3: FaultServer, collectives: bool, listable: bool):
    """``use_collectives=False`` where there is a ``.metadata``, and the reverse, is refused before a byte is sent: readers would
    go on loading the old one.
    """
    _save_alone(plain_s3, 10, collectives=not collectives)
    plain_s3.clear(state=False)
    if not listable:
        plain_s3.on("ListObjectsV2", error(403, "AccessDenied"))
    there = record_name(0) if collectives else record_name(None)

    with pytest.raises((CheckpointExistsError, dcp.CheckpointException)) as caught:
        _save_alone(plain_s3, 20, collectives=collectives)

    raised = caught.value.failures[0][0] if isinstance(caught.value, dcp.CheckpointException) else caught.value
    assert isinstance(raised, CheckpointExistsError)
    assert f"({there}, saved with use_collectives={not collectives})" in str(raised)
    assert "Save to another URL, or delete that checkpoint first (all below s3://bucket/run/)" in str(raised)
    assert raised.key == f"run/{there}"
    assert not [record for record in plain_s3.log if record.operation not in ("GetObject", "HeadObject")]
    template = {f"t{n}": torch.zeros_like(tensor) for n, tensor in enumerate(state_of(10).values())}
    dcp.load(template, storage_reader=S3StorageReader(URL, config=config_of(plain_s3)), no_dist=True)
    assert int(template["t0"][0]) == 10


def test_a_record_that_may_not_be_seen(plain_s3: FaultServer):
    """Without ListBucket a key that is not there is answered 403: that stops no save."""
    plain_s3.on("HeadObject", error(403, "AccessDenied"), key=r"run/__0\.metadata$")
    assert save(plain_s3, 10) is None
    assert load(plain_s3) == 10
