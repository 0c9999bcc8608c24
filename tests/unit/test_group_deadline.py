"""Deadlines that nobody configured: 0.9 x the process group's time-out, or 1,500 s where there is no group."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3 import CheckpointNotFoundError, ConfigError, S3Config, S3StorageReader, S3StorageWriter
from dcp_s3._checkpoint import group_deadline
from dcp_s3._checkpoint.care import garbage
from dcp_s3._checkpoint.group_deadline import deadline_s
from dcp_s3._checkpoint.load.commit_record import CommitRecord

URL = "s3://bucket/run"


def _in_force(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[float, float]:
    """Begin a save and a load; return the deadlines that they have, seconds."""

    def absent(*_: object, **__: object) -> None:
        raise CheckpointNotFoundError("none")

    monkeypatch.setattr(CommitRecord, "read", absent)
    config = S3Config(**settings)
    writer, reader = S3StorageWriter(URL, config=config), S3StorageReader(URL, config=config)
    writer.set_up_storage_writer(True)
    with pytest.raises(CheckpointNotFoundError):
        reader.read_metadata()
    return writer._current().deadline.seconds, reader._current().deadline.seconds


def test_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group a save and a load have 1,500 s, which is also what gc takes for the writers' deadline."""
    assert (S3Config().save_deadline_s, S3Config().load_deadline_s) == (None, None)
    assert deadline_s(None, "save_deadline_s") == 1500.0
    assert _in_force(monkeypatch) == (1500.0, 1500.0)
    assert garbage.DEFAULT_DEADLINE_S == 1500.0


@pytest.mark.parametrize("timeout_s, expected", [(1800.0, 1620.0), (600.0, 540.0), (10_000.0, 9000.0)])
def test_within_a_group(monkeypatch: pytest.MonkeyPatch, timeout_s: float, expected: float) -> None:
    """In a process group they have nine tenths of its time-out, more or less than 1,500 s, so that the peers still hear."""
    monkeypatch.setattr(group_deadline, "_group_timeout_s", lambda: timeout_s)
    assert deadline_s(None, "save_deadline_s") == pytest.approx(expected)
    assert _in_force(monkeypatch) == pytest.approx((expected, expected))


def test_what_is_configured_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configured deadline is taken as it is, each for its own purpose; in a group only below the group's time-out."""
    assert _in_force(monkeypatch, save_deadline_s=20.0, load_deadline_s=30.0) == (20.0, 30.0)
    monkeypatch.setattr(group_deadline, "_group_timeout_s", lambda: 100.0)
    assert _in_force(monkeypatch, save_deadline_s=99.0, load_deadline_s=98.0) == (99.0, 98.0)
    with pytest.raises(
        ConfigError, match="load_deadline_s=100 s must be less than the process group's time-out of 100 s"
    ):
        deadline_s(100.0, "load_deadline_s")
