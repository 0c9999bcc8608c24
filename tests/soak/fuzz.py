"""Feeds the parsers with damaged and mixed inputs: each must give a value or one of our errors, soon, in little memory."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from dcp_s3 import CorruptCheckpointError, ObjectNotLoadableError
from dcp_s3._checkpoint.archive.stock_archive import check_archive, load_record
from dcp_s3._checkpoint.format.index import Index
from dcp_s3._checkpoint.pickles import metadata, standin

CORPUS = Path(__file__).parents[1] / "fault" / "corpus"
LARGEST_MIB = 64
"""By so much one input may let the process's peak of resident memory grow."""
LONGEST_S = 5.0
"""For one input of some KiB. Far above what one takes, also on a busy machine."""


def _archived(pickled: bytes) -> memoryview:
    """A pickle in an archive as torch.save lays it out, with three small storages for its tensors."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        for number in range(3):
            archive.writestr(f"archive/data/{number}", bytes(64))
        archive.writestr("archive/version", b"3\n")
    return memoryview(out.getvalue())


PARSERS: dict[str, Callable[[bytes], Any]] = {
    "record": lambda data: metadata.loads(data, source="s3://b/.metadata"),
    "record without torch": lambda data: standin.read_record(data, source="s3://b/.metadata"),
    "index": lambda data: Index.from_bytes(data, source="s3://b/index"),
    "archive": lambda data: check_archive(memoryview(data), source="s3://b/x"),
    "object": lambda data: load_record(memoryview(data), "s3://b/x", trusted=False),
    "pickle in an object": lambda data: load_record(_archived(data), "s3://b/x", trusted=False),
}
_FILES = {kind: kind for kind in PARSERS} | {
    "record without torch": "record",
    "object": "archive",
    "pickle in an object": "pickle",
}

# Instructions, numbers and words on which parsers have tripped.
_TOKENS = [
    *(bytes([op]) for op in b"\x94)(}]\x81usb\x85\x86\x87tRN\x88\x89ea\x93\x8f\x90\x91ldo.0"),
    *(n.to_bytes(4, "little") for n in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)),
    *(n.to_bytes(8, "little") for n in (1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)),
    *(b"%d" % n for n in (0, -1, 1 << 31, 1 << 63, 10**40)),
    b"1e999",
    b"NaN",
    b"null",
    b'"',
    b"[" * 50,
    b"{",
    b"..",
    b"/",
    b"data/",
    b"\x00",
    b"\x80\x04",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8c\x05posix\x8c\x06system\x93",
    b"\x8c\x08builtins\x8c\x04eval\x93",
    b"cos\nsystem\n",
    b"PK\x01\x02",
    b"PK\x05\x06",
]


def corpus(kind: str) -> list[bytes]:
    """The kept inputs of a kind: good ones, and what once was trouble."""
    return [path.read_bytes() for path in sorted(CORPUS.glob(f"{_FILES[kind]}-*"))]


@st.composite
def damaged(draw: st.DrawFn, kept: list[bytes]) -> bytes:
    """A kept input after some cuts, changes, repeats and exchanges with another one."""
    data = bytearray(draw(st.sampled_from(kept)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from([0, 1, 2, 4, 16, 200])))
        how = draw(st.sampled_from(["flip", "cut", "end", "token", "repeat", "splice"]))
        if how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at:end]
        elif how == "end":
            del data[at:]
        elif how == "token":
            data[at:end] = draw(st.sampled_from(_TOKENS))
        elif how == "repeat":
            data[at:at] = bytes(data[at:end]) * draw(st.sampled_from([1, 2, 50]))
        elif how == "splice":
            other = draw(st.sampled_from(kept))
            start = draw(st.integers(0, len(other)))
            data[at:end] = other[start : start + draw(st.sampled_from([1, 8, 64, 400]))]
    return bytes(data)


@dataclasses.dataclass
class Tried:
    """What was fed to one parser."""

    inputs: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    largest_mib: float = 0.0


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fuzz(kind: str, *, examples: int, seed: int | None = None, keep: Path | None = None) -> Tried:
    """Feed one parser.

    Args:
        kind: Of `PARSERS`.
        examples: How many inputs.
        seed: Of the choice; None repeats the same ones in each run.
        keep: Directory in which an input that raises or takes too long is left, shrunk, as a part of the corpus.

    Returns:
        What was tried. An input that raises anything but our errors, or takes too long, raises, shrunk; and, as it is,
        one that takes too much memory: a peak is reached but once.
    """
    parse, kept, tried = PARSERS[kind], corpus(kind), Tried()
    found: dict[str, bytes] = {}
    good: list[bytes] = []  # as often as the others: what is damaged gets deeper from there
    for data in kept:
        with contextlib.suppress(CorruptCheckpointError, ObjectNotLoadableError):
            parse(data)
            good.append(data)
    assert good, f"no corpus for {kind}"

    def feed(data: bytes) -> None:
        started, peak = time.monotonic(), _peak_mib()
        tried.inputs += 1
        try:
            parse(data)
        except (CorruptCheckpointError, ObjectNotLoadableError):
            tried.refused += 1
        except Exception as error:
            found[type(error).__name__] = data  # the last one is the smallest
            raise
        finally:
            tried.largest_mib = max(tried.largest_mib, grown := _peak_mib() - peak)
            if grown > LARGEST_MIB:
                found["TooLarge"] = data
        seconds = time.monotonic() - started
        tried.slowest_s = max(tried.slowest_s, seconds)
        if seconds >= LONGEST_S:
            found["TooLong"] = data
            raise AssertionError(f"{seconds:.1f} s for {len(data)} bytes")

    test = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )(hypothesis.given(damaged(good * (1 + (len(kept) - len(good)) // len(good)) + kept))(feed))
    if seed is not None:
        test = hypothesis.seed(seed)(test)
    try:
        test()
    finally:
        if keep is not None:
            for what, data in found.items():
                digest = hashlib.sha256(data).hexdigest()[:8]
                (keep / f"{_FILES[kind]}-found-{what}-{digest}").write_bytes(data)
    assert "TooLarge" not in found, f"{tried.largest_mib:.0f} MiB for {len(found['TooLarge'])} bytes"
    return tried


def fuzz_for(seconds: float, *, seed: int = 0) -> dict[str, Tried]:
    """Feed all parsers in turn for some time.

    Returns:
        What was tried, by parser. Raises at the first wrong answer, which then lies in the corpus, and when memory has grown by
        more than 300 MiB.
    """
    end = time.monotonic() + seconds
    total = {kind: Tried() for kind in PARSERS}
    before = _peak_mib()
    while time.monotonic() < end:
        for kind, sum_of in total.items():
            tried = fuzz(kind, examples=500, seed=seed, keep=CORPUS)
            sum_of.inputs += tried.inputs
            sum_of.refused += tried.refused
            sum_of.slowest_s = max(sum_of.slowest_s, tried.slowest_s)
            sum_of.largest_mib = max(sum_of.largest_mib, tried.largest_mib)
            seed += 1
    grown = _peak_mib() - before
    assert grown < 300, f"resident memory peaked {grown:.0f} MiB higher"
    return total
