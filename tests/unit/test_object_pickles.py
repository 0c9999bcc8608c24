"""What an object's pickle may call: everything that torch.save writes, and none of what asks for memory or time without end."""

from __future__ import annotations

import collections
import io
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from dcp_s3 import CorruptCheckpointError, ObjectNotLoadableError
from dcp_s3._checkpoint.archive.stock_archive import load_record
from tests.soak.fuzz import _archived

N = 1 << 30


def call(module: str, name: str) -> bytes:
    """The instruction that names something, as protocol 2 has it."""
    return b"c%b\n%b\n" % (module.encode(), name.encode())


def text(word: str) -> bytes:
    """A text."""
    return b"X" + len(word.encode()).to_bytes(4, "little") + word.encode()


NUMBER = b"\x8a\x05" + N.to_bytes(5, "little")
ENCODE = call("_codecs", "encode")
ORDERED = call("collections", "OrderedDict")
BY_TYPE = call("torch._tensor", "_rebuild_from_type_v2")
PARAMETER = call("torch.nn.parameter", "Parameter")
EMPTY = PARAMETER + b"N\x89\x86\x81"
LATER = ORDERED + text("as_subclass") + call("torch", "FloatTensor") + b"\x86\x85\x85R"
DUCK = ORDERED + b")R}(" + text("dtype") + call("torch", "float32") + text("_untyped_storage") + EMPTY
DUCK += text("device") + call("torch", "device") + text("cpu") + b"\x85Rub"
LONG = text("x" * 1000)
DICT = b"}q\x00(" + b"".join(b"M" + n.to_bytes(2, "little") + b"N" for n in range(2000)) + b"u"
ATTACKS = {
    "hex of hex": ENCODE
    + b"q\x00"
    + b"h\x00" * 40
    + text("a")
    + text("latin1")
    + b"\x86R"
    + (text("hex") + b"\x86R") * 40,
    "hex once": ENCODE + text("a") + text("hex") + b"\x86R",
    "hex by type": BY_TYPE + b"(" + ENCODE + call("torch", "Tensor") + text("a") + text("hex") + b"\x86}tR",
    "one text encoded again and again": LONG + b"q\x00]q\x02" + ENCODE + b"h\x00" + text("latin1") + b"\x86Ra",
    "one bytes copied again and again": call("builtins", "bytearray")
    + ENCODE
    + LONG
    + text("latin1")
    + b"\x86Rq\x00h\x00\x86R",
    "one dict ordered": DICT + ORDERED + b"h\x00\x85R",
    "one dict ordered, by an old name": DICT + call("UserDict", "OrderedDict") + b"h\x00\x85R",
    "a size of a list": call("torch", "Size") + b"]K\x01a\x85R",
    "a size of many": call("torch", "Size") + b"(" + b"K\x01" * 65 + b"t\x85R",
    "a class as an attribute": BY_TYPE + b"(" + BY_TYPE + NUMBER + b"(" + ORDERED + ORDERED + b")" + LATER + b"tNtR",
    "a class in a tuple in a tuple": text("x") + call("torch", "FloatTensor") + b"\x86\x85",
    "a class in a dict": b"}" + text("x") + call("torch", "FloatTensor") + b"s",
    "a list made a set, by type": BY_TYPE
    + b"("
    + BY_TYPE
    + b"("
    + ORDERED
    + ORDERED
    + b")}"
    + text("as_subclass")
    + call("builtins", "set")
    + b"stR]K\x01a)NtR",
    "an ordered dict by type": BY_TYPE + b"(" + ORDERED + ORDERED + b")}tR",
    "a parameter that grows": EMPTY + b"(" + EMPTY + b"K\x00" + NUMBER + b"\x85K\x01\x85tb",
    "a parameter of nothing": EMPTY,
    "a parameter of nothing, by type": BY_TYPE + b"(" + PARAMETER + call("torch", "Tensor") + b"N\x89\x86}tR",
    "what looks like a storage": call("torch._utils", "_rebuild_tensor")
    + b"("
    + DUCK
    + b"K\x00"
    + NUMBER
    + b"\x85K\x01\x85tR",
    "a storage that is none": call("torch._utils", "_rebuild_tensor_v2")
    + b"(N"
    + b"K\x00"
    + NUMBER
    + b"\x85K\x01\x85tR",
    "a small storage, copied as a large tensor": call("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
    + b"(N"
    + call("torch", "float64")
    + text("cpu")
    + b"\x89tR",
    "one dict copied again and again": DICT + b"](" + (call("collections", "Counter") + b"h\x00\x85R") * 2000 + b"e",
    "a key met again and again": b"(" + b"N" * 999 + b"tq\x00}(" + b"h\x00N" * 10_000 + b"u",
    "a set of keys that share": b")q\x00" + b"h\x00h\x00\x86q\x00" * 60 + call("builtins", "set") + b"]h\x00a\x85R",
    "a storage called as its attribute": ORDERED
    + b")R}"
    + text("__setstate__")
    + call("torch.storage", "UntypedStorage")
    + b"sb"
    + NUMBER
    + b"b",
    "a tensor whose methods are others": BY_TYPE
    + b"("
    + call("torch._utils", "_rebuild_parameter")
    + call("torch", "Tensor")
    + b")}"
    + text("narrow")
    + call("torch", "Tensor")
    + b"stR",
    "items of a tensor": call("torch._utils", "_rebuild_tensor_v2")
    + b"(("
    + text("storage")
    + call("torch", "FloatStorage")
    + text("0")
    + text("cpu")
    + b"K\x10tQK\x00K\x10\x85K\x01\x85\x89"
    + ORDERED
    + b")RtRK\x00K\x01s",
    "a parameter of nothing, as torch.save makes one": call("torch._utils", "_rebuild_parameter")
    + b"(N\x89"
    + ORDERED
    + b")RtR",
    "a quantized tensor without its storage": call("torch._utils", "_rebuild_qtensor")
    + b"(("
    + text("storage")
    + call("torch", "QInt8Storage")
    + text("0")
    + text("cpu")
    + b"K\x40tQK\x00"
    + NUMBER
    + b"\x85K\x01\x85("
    + call("torch", "per_tensor_affine")
    + b"G?\xf0\x00\x00\x00\x00\x00\x00K\x00t\x89"
    + ORDERED
    + b")RtR",
    "a storage larger than its bytes": b"("
    + text("storage")
    + call("torch", "FloatStorage")
    + text("0")
    + text("cpu")
    + NUMBER
    + b"tQ",
    "a memo with gaps": b"Nr\xff\xff\xff\x7f",
    "a number called": b"K\x01)R",
}


HARMLESS = {
    "one dict copied once": DICT + call("collections", "Counter") + b"h\x00\x85R",
    "a set by an old name": b"]q\x00" + call("__builtin__", "set") + b"h\x00\x85R",
    "one list made a set": b"]q\x00" + call("builtins", "set") + b"h\x00\x85R",
    "bytearray in a tuple, not called": call("builtins", "bytearray") + b"\x85",
}


def load(pickled: bytes) -> Any:
    """Load an object of this pickle, with three small storages beside it."""
    return load_record(_archived(b"\x80\x02" + pickled), "s3://b/x", trusted=False)


@pytest.mark.parametrize("name", ATTACKS)
def test_other_calls_are_refused(name: str):
    """Calls for memory by a number, copies of one value, and encodings that grow: our errors, soon, in little memory."""
    start, before = time.monotonic(), psutil.Process().memory_info().rss
    with pytest.raises((CorruptCheckpointError, ObjectNotLoadableError), match=r"^s3://b/x ") as refused:
        load(ATTACKS[name] + b".")
    assert time.monotonic() - start < 1
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", HARMLESS)
def test_what_costs_nothing_is_loaded(name: str):
    """Classes that are named and not called, and copies of what is short."""
    load(HARMLESS[name] + b".")


def test_what_is_no_program_is_damage():
    """Where the stack is empty, the pickle ends, or a word is cut, nothing else is raised."""
    for body in (b"b", b"s", b"Q", b"t", b"X\xff\xff\xff\xff", b"h\x05", b"", b"h\x00.", b"R"):
        with pytest.raises(CorruptCheckpointError):
            load(body)
    for body in (b"K\x01)R", b"(l.", b"\xff", b"r\xff\xff\xff\x7f."):
        with pytest.raises((ObjectNotLoadableError, CorruptCheckpointError)):
            load(body)


def _optimizer() -> torch.optim.Optimizer:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def _with_attribute() -> torch.Tensor:
    tensor: Any = torch.ones(3)
    tensor.extra = "kept"
    return tensor


def _loop() -> list[Any]:
    loop: list[Any] = [1]
    loop.append(loop)
    return loop


SAME = b"y" * 300
SHARED = torch.arange(6.0)
VALUES: dict[str, Callable[[], Any]] = {
    "optimizer": lambda: _optimizer().state_dict(),
    "scheduler": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(_optimizer(), 10).state_dict(),
    "model": lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict(),
    "schedulers": lambda: [
        torch.optim.lr_scheduler.OneCycleLR(_optimizer(), 0.1, total_steps=10).state_dict(),
        torch.optim.lr_scheduler.ReduceLROnPlateau(_optimizer()).state_dict(),
    ],
    "gradient scaler": lambda: torch.amp.GradScaler("cpu").state_dict(),
    "random state": torch.get_rng_state,
    "Python's random state": random.getstate,
    "numpy's bit generator": lambda: np.random.default_rng(7).bit_generator.state,
    "data loader": lambda: {
        "_snapshot": {
            "_snapshot_step": 3,
            "_worker_snapshots": {"worker_0": {"dataset_state": None, "fetcher_state": None}},
        },
        "_sampler_iter_state": {"generator": torch.Generator().get_state(), "samples_yielded": 5},
        "_iterator_finished": False,
    },
    "bytes": lambda: [SAME, bytearray(), bytearray(b"z" * 300), b"x", b"x", bytearray(b"x"), bytearray(b"x")],
    "bytes met twice": lambda: [SAME, SAME, bytearray(SAME)],
    "collections": lambda: [
        {1, "a", (2, 3)},
        collections.Counter("aab"),
        collections.OrderedDict(a=1),
        {"n": {"m": [(), [], {}]}},
    ],
    "numbers": lambda: [1 << 300, -(1 << 70), 1.5, 2j, True, None],
    "torch's own": lambda: [torch.float16, torch.strided, torch.Size([2, 3]), torch.Size([]), torch.device("cpu")],
    "tensors": lambda: [
        SHARED,
        SHARED[2:],
        SHARED.view(2, 3).T,
        SHARED.expand(4, 6),
        torch.zeros(0),
        torch.tensor(1.0),
    ],
    "dtypes of few bits": lambda: [torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.uint16)],
    "parameters": lambda: [
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    "attribute": _with_attribute,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "meta": lambda: torch.empty(3, device="meta"),
    "storage": lambda: torch.arange(4).untyped_storage(),
    "loop": _loop,
    "long": lambda: list(range(3000)),
    "shape of 64": lambda: torch.ones([1] * 64),
    "distributed": lambda: DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Replicate()]),
}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


ASKED_FOR = ("sparse", "csr", "nested", "meta", "distributed")
"""What takes a size that nothing in the archive stands for; in an object, not as a tensor of the state dict."""


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VALUES)
def test_what_torch_saves_is_loaded(name: str):
    """What torch.save writes of ordinary state is loaded, with tensors equal; unusual kinds of tensors are refused by name."""
    value, out = VALUES[name](), io.BytesIO()
    torch.save(value, out)
    if name in ASKED_FOR:
        with pytest.raises(ObjectNotLoadableError, match=r"that needs torch\._utils\._rebuild_"):
            load_record(memoryview(out.getvalue()), "s3://b/x", trusted=False)
        return
    stock = torch.load(io.BytesIO(out.getvalue()), weights_only=True)
    loaded = load_record(memoryview(out.getvalue()), "s3://b/x", trusted=False)
    assert type(loaded) is type(stock)
    assert repr(loaded) == repr(stock)


def test_every_class_that_takes_memory_by_a_number_is_refused():
    """Of what torch's weights-only loading lets be called, nothing makes a tensor or storage of as much as a number says."""
    allowed = torch._weights_only_unpickler._get_allowed_globals()
    sized = [name for name in allowed if name.endswith(("Tensor", "Storage", "bytearray"))]
    assert len(sized) > 30
    for path in sized:
        module, _, name = path.rpartition(".")
        for called in (b"\x85R.", b"\x85\x81."):
            with pytest.raises((ObjectNotLoadableError, CorruptCheckpointError)):
                load(call(module, name) + NUMBER + called)
