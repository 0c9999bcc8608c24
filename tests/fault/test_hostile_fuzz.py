"""The parsers of record, index, archive and object on damaged inputs: a value or one of our errors, and nothing else.

``DCP_S3_TEST_FULL=1`` tries many more; ``scripts/soak`` goes on for as long as it is told.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest

from dcp_s3 import CorruptCheckpointError, ObjectNotLoadableError
from tests.soak.fuzz import PARSERS, corpus, fuzz

EXAMPLES = 20_000 if os.environ.get("DCP_S3_TEST_FULL") else 250


@pytest.mark.parametrize("kind", PARSERS)
def test_damaged_inputs(kind: str):
    """Kept inputs after cuts, changes and exchanges raise nothing but our error, and none takes long."""
    tried = fuzz(kind, examples=EXAMPLES)
    assert tried.inputs >= EXAMPLES / 2
    assert 0 < tried.refused < tried.inputs  # some are good still, so that the depths are reached


def test_the_kept_inputs():
    """The corpus holds, for each kind, inputs that are read and inputs that are refused."""
    for kind, parse in PARSERS.items():
        outcomes = set()
        for data in corpus(kind):
            try:
                parse(data)
            except (CorruptCheckpointError, ObjectNotLoadableError):
                outcomes.add("refused")
            else:
                outcomes.add("read")
        assert outcomes == {"refused", "read"}, kind


def test_an_input_that_takes_much_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that makes the resident memory grow beyond the limit fails, and is kept."""
    taken: list[bytearray] = []
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - psutil.Process().memory_info().rss // 1024

    def parse(data: bytes) -> Any:
        if data[:2] != b"PK" and not taken:
            taken.append(bytearray((peak << 10) + (100 << 20)))

    monkeypatch.setitem(PARSERS, "archive", parse)
    with pytest.raises(AssertionError, match="MiB for"):
        fuzz("archive", examples=200, keep=tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("archive-found-TooLarge-")


def test_what_is_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An input that raises something else is left in the corpus, shrunk, under the name of its kind and of what it raised."""

    def parse(data: bytes) -> Any:
        if data[:4] != b"PK\x03\x04":
            raise ZeroDivisionError

    monkeypatch.setitem(PARSERS, "archive", parse)
    with pytest.raises(ZeroDivisionError):
        fuzz("archive", examples=200, keep=tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("archive-found-ZeroDivisionError-")
    with pytest.raises(ZeroDivisionError):
        parse(left.read_bytes())
    assert len(left.read_bytes()) < max(map(len, corpus("archive")))
