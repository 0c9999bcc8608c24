"""Objects of many types: which load as they are, which once their types are allowed, which only when the writer is trusted."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import importlib
import io
import ipaddress
import logging
import pathlib
import random
import re
import types
import uuid
import zoneinfo
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CorruptCheckpointError, ObjectNotLoadableError
from dcp_s3._checkpoint.archive.stock_archive import load_record
from dcp_s3._checkpoint.save import loadable
from dcp_s3._checkpoint.save.loadable import Loadability
from tests.integration.conftest import bucket_on
from tests.integration.support import failure_of, reader, writer


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Point:
    x: int = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int = 1


class Progress:
    def __init__(self, step: int = 3) -> None:
        self.step = step

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Progress) and other.step == self.step

    __hash__ = None


class Listed(list):
    pass


class Keyed(dict):
    pass


class Counted(int):
    pass


class Marked(torch.Tensor):
    pass


class Pair(NamedTuple):
    a: int
    b: int


def function() -> None:
    """Something to be named."""


PLAIN: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 3,
    "large int": 1 << 1000,
    "huge int": 1 << 5000,
    "float": 1.5,
    "text": "x",
    "text like a name": "Music\nfrom\nposix\nsystem\n",
    "bytes": b"ab",
    "bytearray": bytearray(b"ab"),
    "complex": 1j,
    "tuple": (1, ("a", None)),
    "list": [1, "a"],
    "set": {1, 2},
    "Counter": (collections.Counter("aab"),),
    "OrderedDict": (collections.OrderedDict(a=1),),
    "random.getstate": random.Random(7).getstate(),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "Size": torch.Size([2, 3]),
    "layout": torch.strided,
}
ALLOWED: dict[str, Any] = {
    "frozenset": frozenset({1}),
    "range": range(3),
    "slice": slice(1, 2),
    "namedtuple": Pair(1, 2),
    "SimpleNamespace": types.SimpleNamespace(a=1),
    "datetime": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
    "date": dt.date(2026, 1, 2),
    "timedelta": dt.timedelta(days=1),
    "Decimal": decimal.Decimal("1.5"),
    "Fraction": fractions.Fraction(1, 2),
    "UUID": uuid.UUID(int=5),
    "Path": pathlib.PosixPath("/x/y"),
    "pattern": re.compile("a+"),
    "enum": Colour.RED,
    "IntEnum": Level.LOW,
    "dataclass": Point(5),
    "dataclass with slots": Slotted(5),
    "frozen dataclass": Frozen(5),
    "class": Progress(7),
    "subclass of int": Counted(7),
    "type": Progress,
    "function": function,
    "ip address": ipaddress.ip_address("10.0.0.1"),
    "array": array.array("i", [1, 2]),
    "empty deque": collections.deque(),
    "deque": collections.deque([1, 2], 3),
    "defaultdict": (collections.defaultdict(int, a=1),),
    "subclass of list": (Listed([1]),),
    "subclass of dict": (Keyed(a=1),),
    "exception": (ValueError,),
    "tensor type": (torch.FloatTensor,),
    "np.float64": np.float64(1.5),
    "np.float32": np.float32(1.5),
    "np.int64": np.int64(3),
    "np.bool_": np.bool_(True),
    "np.str_": np.str_("a"),
    "np.datetime64": np.datetime64("2026-01-02"),
    "np.dtype": np.dtype("float32"),
    "ndarray": (np.arange(3),),
    "ndarrays of two dtypes": (np.arange(3), np.ones(2, np.float32)),
    "np.random.get_state": np.random.RandomState(7).get_state(),
}
TRUSTED: dict[str, Any] = {"ZoneInfo": zoneinfo.ZoneInfo("UTC")}
WAYS = [(name, "plain") for name in PLAIN] + [(name, "allowed") for name in ALLOWED]
WAYS += [(name, "trusted") for name in TRUSTED]
ALL = {**PLAIN, **ALLOWED, **TRUSTED}


@pytest.fixture(scope="module")
def saved(scripted_store):
    """A checkpoint of them all, and what was logged while it was saved."""
    scripted_store.clear()
    bucket, records = bucket_on(scripted_store), []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("dcp_s3").addHandler(handler)
    dcp.save({"w": torch.ones(3), **ALL}, storage_writer=writer(bucket, "a"), no_dist=True)
    logging.getLogger("dcp_s3").removeHandler(handler)
    return bucket, records


def fetched(bucket, name, *, trust=False):
    """Load one object of the checkpoint; what a rank fails of is raised."""
    template, source = {name: "not loaded"}, reader(bucket, "a")
    source._trust_pickle = trust
    try:
        dcp.load(template, storage_reader=source, no_dist=True)
    except dcp.CheckpointException as error:
        raise failure_of(error, 0) from None
    return template[name]


def same(value, expected):
    """Whether two objects are of one type, and are equal or print alike."""
    return type(value) is type(expected) and (repr(value) == repr(expected) or value == expected)


def named(path):
    """What a name of an error stands for."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name, way", WAYS)
def test_how_a_type_is_loaded(saved, name, way):
    """Plain values load; the others are refused as such, naming key, types and ways out, and each way out works."""
    bucket, _ = saved
    expected = ALL[name]
    if way == "plain":
        assert fetched(bucket, name) == expected
        return
    with pytest.raises(ObjectNotLoadableError) as refused:
        fetched(bucket, name)
    text = str(refused.value)
    assert not isinstance(refused.value, CorruptCheckpointError)
    assert text.startswith(f"{name} in s3://")
    assert "trust_pickle=True" in text
    assert text.isprintable()
    assert ("safe_globals" in text) is (way == "allowed")
    if way == "allowed":
        assert ", ".join(refused.value.types) in text
        with torch.serialization.safe_globals([named(path) for path in refused.value.types]):
            assert same(fetched(bucket, name), expected)
        with pytest.raises(ObjectNotLoadableError):
            fetched(bucket, name)
    assert same(fetched(bucket, name, trust=True), expected)


def test_one_warning_per_save(saved):
    """A save says once which objects will be refused, how many they are, and of which types; and each of them is refused."""
    _, records = saved
    (warning,) = [record for record in records if record.levelno == logging.WARNING]
    text = warning.getMessage()
    assert text.startswith(f"{len(ALLOWED) + len(TRUSTED)} of the objects saved to s3://")
    assert "frozenset (builtins.frozenset)" in text
    assert f"and {len(ALLOWED) + len(TRUSTED) - 5} more" in text


def test_nothing_is_said_of_what_will_load(scripted_store, caplog):
    """Plain objects, and those whose types the program has allowed, are saved without a word."""
    bucket = bucket_on(scripted_store)
    with torch.serialization.safe_globals([Point]), caplog.at_level(logging.WARNING, logger="dcp_s3"):
        dcp.save({"w": torch.ones(3), **PLAIN, "p": Point()}, storage_writer=writer(bucket, "b"), no_dist=True)
    assert [record for record in caplog.records if record.name.startswith("dcp_s3")] == []


def test_a_tensor_of_a_type_that_is_not_allowed(scripted_store, caplog):
    """A tensor's subclass is named at save, too, if it will be refused; the refusal names it, and allowing it is enough."""
    bucket = bucket_on(scripted_store)
    value = torch.ones(3).as_subclass(Marked)
    dcp.save({"w": value}, storage_writer=writer(bucket, "c"), no_dist=True)
    assert [record.levelname for record in caplog.records if "w (" in record.getMessage()] == ["WARNING"]
    template = {"w": torch.zeros(3)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(template, storage_reader=reader(bucket, "c"), no_dist=True)
    error = failure_of(caught.value, 0)
    assert isinstance(error, ObjectNotLoadableError)
    assert error.types == (f"{__name__}.Marked",)
    with torch.serialization.safe_globals([Marked]):
        dcp.load(template, storage_reader=reader(bucket, "c"), no_dist=True)
    assert torch.equal(template["w"], torch.ones(3))


def record_of(value: object) -> memoryview:
    """Return the record of an object."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getbuffer()


def test_a_class_that_can_no_longer_be_rebuilt():
    """What an allowed class raises when it is rebuilt is not called damage of the checkpoint."""
    with torch.serialization.safe_globals([Colour]):
        data = record_of(Colour.RED)
        member = Colour._value2member_map_.pop(1)
        try:
            with pytest.raises(ObjectNotLoadableError, match=r"1 is not a valid Colour"):
                load_record(data, "x", trusted=False)
        finally:
            Colour._value2member_map_[1] = member


def test_what_many_objects_cost(monkeypatch):
    """Numbers and texts are never loaded for a try, a sort of objects is loaded once, and bad ones up to a bound."""
    tried = []
    monkeypatch.setattr(
        loadable, "load_record", lambda *args, **kwargs: tried.append(1) or load_record(*args, **kwargs)
    )
    monkeypatch.setattr(loadable, "_good", set())
    looks = Loadability()
    for value in [*range(1000), *(step / 7 for step in range(1000)), *map(str, range(1000)), (0.9, 0.999), [None] * 9]:
        looks.look("x", record_of(value))
    assert tried == []
    for step in range(100):
        looks.look("x", record_of({"step": step, "seen": {step}}))
    assert len(tried) == 1
    bad = record_of(collections.deque([1]))
    for _ in range(3000):
        looks.look("x", bad)
    assert len(tried) < 1100


def test_a_large_object_is_known_by_its_names(caplog):
    """Of what is too large to be loaded for a try the names at its beginning are looked at."""
    looks = Loadability()
    looks.look("big", record_of((functools.partial(function), torch.ones(1 << 20))))
    looks.warn("s3://b/x")
    assert "big (functools.partial, " in caplog.text
