"""The allow-list unpickler: bounded, unmoved by hostile programs, quick, and gentle to the garbage collector."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from dataclasses import dataclass

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import CorruptCheckpointError
from dcp_s3._checkpoint.pickles.strict_pickle import Sealed, gate, load
from tests.unit.records import name, program


@dataclass
class Point:
    x: int = 1


POINT = gate(Point)


def find(module: str, attribute: str) -> object:
    return {"Point": POINT, "Size": tuple}.get(attribute) if module == "m" else None


def run(data: bytes) -> object:
    return load(data, find, source="s3://b/.metadata")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(plain, st.sampled_from([4, 5]))
def test_what_picklers_write_passes(value: object, protocol: int) -> None:
    """Values of every plain kind come back equal, from both protocols that stock writers use."""
    assert run(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, 1 << 20])
def test_strings_and_bytes_of_every_length(size: int) -> None:
    """Short and long forms, inside and outside of frames."""
    value = {"a": "x" * size, "b": b"." * size, "c": ["é" * size]}
    assert run(pickle.dumps(value, protocol=4)) == value


@pytest.mark.parametrize(
    "data, named",
    [
        (program(name("posix", "system"), b"\x8c\x02id\x85R"), "posix.system"),
        (program(name("builtins", "eval"), b"\x8c\x011\x85R"), "builtins.eval"),
        (program(name("builtins", "getattr"), b"N\x85R"), "builtins.getattr"),
        (program(name("builtins", "bytearray"), b"\x8a\x05\x00\x00\x00\x00\x10\x85R"), "builtins.bytearray"),
        (program(name("m", "Point.__init__.__globals__")), "m.Point.__init__.__globals__"),
        (program(b"cposix\nsystem\n\x8c\x02id\x85R"), "posix.system"),
        (b"cposix\nsystem\n(S'id'\ntR.", "posix.system"),
        (pickle.dumps(os.system, protocol=2), "posix.system"),
    ],
)
def test_a_name_that_is_not_allowed_is_refused(data: bytes, named: str) -> None:
    """Whatever way a global is named, nothing is run, and the message has source and name."""
    with pytest.raises(CorruptCheckpointError, match=rf"^s3://b/\.metadata names '{named}'"):
        run(data)


@pytest.mark.parametrize(
    "data",
    [
        program(b"Nr\xff\xff\xff\x7f"),  # LONG_BINPUT: a memo of 2**32 slots
        b"Np2147483647\n.",
        program(b"\x8c\x01xp99999999\n"),
        program(b"\x82\x01"),  # EXT1: a name from copyreg's registry
        program(b"Pid\n"),  # PERSID
        program(b"NQ"),
        program(b"N2\x86"),  # DUP
        program(b"\x96\x00\x00\x00\x00\x00\x00\x00\x01"),  # BYTEARRAY8 of 2**56 bytes
        program(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f"),  # BINBYTES8 of 2**63 bytes
        program(b"\x8d\x00\x00\x00\x00\x00\x01\x00\x00a"),
        program(b"B\xff\xff\xff\xffa"),
        program(b"X\xff\xff\xff\x7fa"),
        program(b"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN"),  # a frame of 2**63 bytes
        program(b"\x8b\xff\xff\xff\x7f"),  # LONG4
        program(b"\x97"),
        b"(S'id'\niposix\nsystem\n.",  # no writer uses protocols 0 and 1
        pickle.dumps({1}, protocol=4),  # nor sets
        pickle.dumps(range(3), protocol=0),
        b"\x80\x06N.",
        b"",
        b".",
        b"N",
        b"N..",
        b"N.N",
        b"\x80",
        program(b"\x8c\xffabc"),
        program(b"h\x05"),
        program(b"t"),
        program(b"a"),
        program(name("m", "Point"), b"K\x01\x85\x81NK\x05\x86b"),
    ],
)
def test_lies_and_damage_are_corruption(data: bytes) -> None:
    """Sizes beyond the data, memo bombs, cut programs and empty stacks: our error, and no memory is taken."""
    before = psutil.Process().memory_info().rss
    with pytest.raises(CorruptCheckpointError, match=r"^s3://b/\.metadata "):
        run(data)
    assert psutil.Process().memory_info().rss - before < 64 << 20


DEEP = 200_000


def test_deep_nesting_does_not_end_the_process() -> None:
    """200,000 levels are built, and freed again, without exhausting the stack."""
    data = program((name("m", "Point") + b")\x81}\x8c\x01x") * 100_000, b"N", b"sb" * 100_000)
    assert type(run(data)) is Point
    data = program(b"}C\x05aaaaa" * DEEP, b"N", b"s" * DEEP)
    assert type(run(data)) is dict


@pytest.mark.parametrize(
    "data",
    [
        program(b"]" * DEEP, b"a" * (DEEP - 1)),
        program(b"}" * DEEP),
        program(b"(" * DEEP),
        program(b"\x8f" * DEEP),
    ],
    ids=["lists", "dicts", "marks", "sets"],
)
def test_values_per_byte_are_bounded(data: bytes) -> None:
    """A record that is nothing but lists, dicts or marks is refused before it is many times as large in memory."""
    before = psutil.Process().memory_info().rss
    with pytest.raises(CorruptCheckpointError, match=r"many times its size|no writer uses"):
        run(data)
    assert psutil.Process().memory_info().rss - before < 16 << 20


def shared(levels: int, gap: bytes = b"") -> bytes:
    """Tuples that hold the one before twice."""
    tuple_of = b"\x87" if gap else b"\x86"
    return b")\x94" + b"".join(b"h%ch%c" % (n, n) + gap + tuple_of + b"\x94" for n in range(levels))


@pytest.mark.parametrize(
    "tuples",
    [
        b"N" + b"\x85" * DEEP,
        b"K\x01" + b"\x85" * DEEP,
        b"(" * DEEP + b"t" * DEEP,
        b")\x94" + b"".join(b"j" + n.to_bytes(4, "little") + b"N\x86\x94" for n in range(DEEP)),
        shared(60),
        shared(60, gap=b"]" + b"K\x01a" * 40),
        b"K\x94\x8c\x02\xc2\x94" * 3 + shared(60),
        b")\x94" + b"".join(b"h%ch%c\x86\x94Nb\x94" % (n, n) + b"K\x05" * 40 for n in range(0, 120, 2)),
        b"q\x00".join((b"N\x85", b"h\x00h\x00\x86q\x00" * 60)),
        b"(" + b"N" * 300_000 + b"t\x94" + b"}(" + b"h\x00N" * 300_000 + b"u",
    ],
    ids=[
        "in one another",
        "of a number",
        "by marks",
        "by memo",
        "shared",
        "far apart",
        "bytes like MEMOIZE",
        "memoized twice",
        "by BINPUT",
        "long",
    ],
)
def test_tuples_that_no_dict_could_hash(tuples: bytes) -> None:
    """As keys they would end the process, or take it for ever: they are refused before one is hashed, within seconds."""
    last = tuples.count(b"\x94") - 1
    fetched = b"}j" + max(last, 0).to_bytes(4, "little") + b"Ns"
    start = time.monotonic()
    for data in (program(b"}", tuples, b"Ns"), program(tuples, fetched)):
        with pytest.raises(CorruptCheckpointError):
            run(data)
    assert time.monotonic() - start < 10


def test_keys_are_bounded() -> None:
    """A key of many values, or of few that share one another, is refused; so are keys that are hashed again and again."""
    many, texts = b"(" + b"N" * 1001 + b"t\x94", b"\x8c\x40" + b"x" * 64
    grown = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60)) + b"}h\x3cNs"
    for body in (many + b"}h\x00Ns", grown):
        with pytest.raises(CorruptCheckpointError, match="a key of a dict holds more than 1000 values"):
            run(program(texts * 100, body))
    with pytest.raises(CorruptCheckpointError, match="again and again"):
        run(program(b"(" + b"N" * 999 + b"t\x94}(" + b"h\x00N" * 10_000 + b"u"))


def test_tuples_that_a_planner_may_keep() -> None:
    """Tuples in tuples, long ones, and ones that are met twice come back as they were."""
    twice = ("a", ("b", 1), 2)
    value = {"nested": ((1, 2), ("x", (3.0, None))), "long": tuple(range(500)), twice: [twice, twice], (1, 2): ()}
    assert run(pickle.dumps(value, protocol=4)) == value


def test_a_gate_makes_the_real_thing() -> None:
    """Instances are of the real class, without running its __init__; arguments of the pickle are ignored."""
    made = run(program(name("m", "Point"), b"K\x07\x85\x81}\x8c\x01xK\x05sb"))
    assert made == Point(5)
    assert run(program(name("m", "Point"), b"K\x07\x85R}\x8c\x01xK\x06sb")) == Point(6)


@pytest.mark.parametrize(
    "state",
    [
        b"}\x8c\x01xK\x05s",  # a dict, for __dict__
        b"N}\x8c\x08__init__Ns\x86",  # slots: setattr
        b"N}\x8c\x09__class__" + name("m", "Size") + b"s\x86",
        b"N}\x8c\x09__bases__)s\x86",
    ],
)
def test_a_pickle_cannot_change_a_class(state: bytes) -> None:
    """BUILD on a class, instead of on an instance, is refused, and the class is as before."""
    before = dict(vars(Point)), dict(vars(POINT))
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        run(program(name("m", "Point"), state, b"b"))
    assert (dict(vars(Point)), dict(vars(POINT))) == before
    assert type(POINT) is Sealed


def test_an_instance_cannot_become_something_else() -> None:
    """Assigning __class__ through a pickle fails: gates have another layout than instances."""
    data = program(name("m", "Point"), b")\x81N}\x8c\x09__class__", name("m", "Point"), b"s\x86b")
    with pytest.raises(CorruptCheckpointError):
        run(data)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    """Arbitrary programs end as a value or as our error."""
    with contextlib.suppress(CorruptCheckpointError):
        run(b"\x80\x04" + body + b".")


INSTRUCTIONS = [bytes([op]) for op in b"\x94)(}]\x81usb\x85\x86\x87tRN\x88\x89ea\x93\x8f\x90\x91ldo"]
INSTRUCTIONS += [b"K\x01", b"h\x00", b"h\x01", b"\x8c\x01x", b"C\x01x", name("m", "Point"), name("m", "Size")]


@given(st.lists(st.sampled_from(INSTRUCTIONS), max_size=40))
def test_no_program_raises_anything_else(body: list[bytes]) -> None:
    """Programs of allowed instructions in any order end as a value or as our error; the real class stays."""
    before = dict(vars(Point))
    with contextlib.suppress(CorruptCheckpointError):
        run(program(*body))
    assert dict(vars(Point)) == before
