"""What a state dict may hold: every dtype, layout and kind of value comes back as stock DCP brings it back."""

from __future__ import annotations

import copy
import functools
import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter

from tests.integration.support import (
    LIMIT_S,
    assert_same,
    bits,
    blank,
    checkpoint_keys,
    failure_of,
    load,
    reader,
    writer,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # deprecated, and still loaded

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
SHAPES = {"scalar": (), "odd": (5, 3), "empty": (0, 4), "big": (331, 257)}
"""The last one is too big to be joined with others in memory, in every dtype but those of one byte."""


def _random(dtype, shape):
    """A tensor of random bits; of random values where any bits will not do."""
    count = torch.Size(shape).numel()
    if str(dtype).startswith("torch.q"):
        return torch.quantize_per_tensor(torch.rand(shape) * 9, 0.1, 3, dtype)
    raw = bytearray(random.Random(str((dtype, shape))).randbytes(count * dtype.itemsize))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def _stock_brings_back(directory, value):
    """Whether stock DCP saves and loads this value, in a sync save, bit for bit."""
    template = {"value": blank(value)}
    try:
        dcp.save({"value": value}, storage_writer=FileSystemWriter(directory))
        dcp.load(template, storage_reader=FileSystemReader(directory))
    except dcp.CheckpointException:
        return False
    return torch.equal(bits(template["value"]), bits(value))


def _save(bucket, path, state, mode, **settings):
    store = writer(bucket, path, **settings)
    if mode == "sync":
        return dcp.save(state, storage_writer=store)
    return dcp.async_save(state, storage_writer=store).result(timeout=LIMIT_S)


@functools.cache
def _supported(directory):
    """The dtypes and shapes that stock DCP brings back, as a state dict."""
    found = {}
    for dtype in DTYPES:
        try:
            values = {name: _random(dtype, shape) for name, shape in SHAPES.items()}
        except (NotImplementedError, RuntimeError):  # a dtype that torch itself cannot fill
            continue
        if _stock_brings_back(directory / str(dtype), values["odd"]):
            found[str(dtype)] = values
    return found


@pytest.fixture(scope="module")
def supported(tmp_path_factory):
    return _supported(tmp_path_factory.mktemp("dtypes"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_dtype(module_bucket, supported, mode):
    """Every dtype that stock DCP brings back in a sync save comes back bit for bit, in sync and async saves, of every size."""
    eight_bits = {"float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"}
    recent = eight_bits | {"complex32", "uint16", "uint32", "uint64"}
    assert {f"torch.{name}" for name in recent if hasattr(torch, name)} <= set(supported)
    assert len(supported) >= 20
    metadata = _save(module_bucket, f"dtypes-{mode}", supported, mode)
    for dtype, values in supported.items():
        for name, value in values.items():
            assert metadata.state_dict_metadata[f"{dtype}.{name}"].properties.dtype == value.dtype
    assert_same(load(module_bucket, f"dtypes-{mode}", blank(supported)), supported)
    # and into tensors that are not row-major
    turned = {
        dtype: blank(values["odd"].t()).t() if not values["odd"].is_quantized else blank(values["odd"])
        for dtype, values in supported.items()
    }
    assert not turned["torch.float32"].is_contiguous()
    loaded = load(module_bucket, f"dtypes-{mode}", {dtype: {"odd": value} for dtype, value in turned.items()})
    assert_same(loaded, {dtype: {"odd": values["odd"]} for dtype, values in supported.items()})


def _views(elements):
    """Views of all kinds, of about so many elements."""
    side = int(elements**0.5)
    base = torch.randn(side, side, generator=torch.Generator().manual_seed(1))
    image = torch.randn(2, 3, side, side // 4 + 1, generator=torch.Generator().manual_seed(2))
    waves = torch.complex(base, base.flip(0))
    return {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "column": base[:, 3],
        "row": base[3],
        "slice": base[2:5],
        "offset": base.flatten()[10:20],
        "expanded": base[:1].expand(side, side),
        "expanded scalar": torch.tensor(2.5).expand(4, 5),
        "permuted": image.permute(2, 0, 3, 1),
        "channels_last": image.to(memory_format=torch.channels_last),
        "conj": waves.conj(),
        "conj transposed": waves.mH,
        "conj slice": waves.conj()[1:3, ::2],
        "neg": waves.conj().imag,
        "neg and strided": waves.conj().imag[:, ::3],
        "real": waves.real,
        "imag": waves.imag,
        "view as real": torch.view_as_real(waves),
        "bytes of floats": base.view(torch.uint8),
        "scalar": base[1, 1],
        "empty": base[:0],
        "empty in the middle": base[:, 2:2],
        "unfolded": base.flatten().unfold(0, 6, 3),
        "diagonal": base.diagonal(),
        "overlapping": base.flatten().as_strided((3, 4), (1, 1)),
        "needs grad": base.clone().requires_grad_(),
        "parameter": nn.Parameter(base.t()),
        "inference": _in_inference_mode(base),
    }


def _in_inference_mode(base):
    with torch.inference_mode():
        return base.t() + 1


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("elements", [400, 90_000])
def test_every_layout(module_bucket, elements, mode):
    """Views come back bit for bit, whatever their strides, their conj and neg bits, and what they share."""
    state = _views(elements)
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    expected = {name: (value.dtype, value.shape, bits(value).clone()) for name, value in state.items()}
    path = f"views-{mode}-{elements}"
    _save(module_bucket, path, state, mode)
    template = {name: torch.full(value.shape, 7, dtype=value.dtype) for name, value in state.items()}
    for name, value in load(module_bucket, path, template).items():
        dtype, shape, raw = expected[name]
        assert (value.dtype, value.shape) == (dtype, shape), name
        assert torch.equal(bits(value), raw), name


def _targets():
    """Templates that are views; what lies around them in their storage must stay as it is."""
    base = torch.zeros(9, 12)
    image = torch.zeros(2, 3, 4, 5)
    waves = torch.zeros(6, 4, dtype=torch.complex64)
    return {
        "transposed": base[:3, :4].t(),
        "strided": base[3:6, ::2],
        "rows": base[6:8],
        "part of a row": base[8, 3:7],
        "channels_last": image.to(memory_format=torch.channels_last),
        "conj": waves[:2].conj(),
        "conj of rows": waves.conj()[2:4, 1:3],
        "neg": waves[4:].conj().imag,
        "scalar": torch.zeros(2)[1],
        "empty": torch.zeros(0, 3),
        "needs grad": torch.zeros(2, 2, requires_grad=True),
        "parameter": nn.Parameter(torch.zeros(5)),
    }


def test_into_every_layout(module_bucket, tmp_path):
    """Templates of every layout are filled in place as stock DCP fills them, and nothing around them is touched."""
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(view.shape, dtype=view.dtype, generator=generator) for name, view in _targets().items()}
    dcp.save(state, storage_writer=writer(module_bucket, "targets"))
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path))
    ours, stock = _targets(), _targets()
    kept = dict(ours)
    load(module_bucket, "targets", ours)
    dcp.load(stock, storage_reader=FileSystemReader(tmp_path))
    for name, view in ours.items():
        assert view is kept[name], name
        assert torch.equal(view, state[name]), name
        assert torch.equal(bits(view), bits(stock[name])), name
        around, stock_around = (
            torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in (view, stock[name])
        )
        assert torch.equal(around, stock_around), name


def test_views_take_their_own_bytes(module_bucket):
    """A small view of a large storage takes its own bytes and a small constant, in sync and async saves."""
    large = torch.randn(1_000_000)
    state = {
        "slice": large[10:20],
        "rows": [large.view(1000, 1000)[row * 2] for row in range(8)],
        "bytes": large.view(torch.uint8)[:12],
        "expanded": large[:1].expand(100),
    }
    for mode in ("sync", "async"):
        metadata = _save(module_bucket, f"small-{mode}", state, mode)
        for index, info in metadata.storage_data.items():
            tensor = metadata.state_dict_metadata[index.fqn]
            assert 0 < info.length - tensor.size.numel() * tensor.properties.dtype.itemsize < 2048
        (data,) = (key for key in module_bucket.keys(f"small-{mode}") if "data/" in key)
        assert len(module_bucket.get(data)) < 40 + 32_000 + 12 + 400 + 11 * 2048
        assert_same(load(module_bucket, f"small-{mode}", blank(state)), state)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sizes_around_every_limit(bucket, mode):
    """Tensors and texts of a byte less, as much and a byte more than what is joined, checked and sent at once come back the same."""
    limits = (1, 128 << 10, 1 << 20, 4 << 20, 5 << 20)
    sizes = [limit + off for limit in limits for off in (-1, 0, 1)]
    noise = torch.randint(
        0, 255, (max(sizes) + len(sizes),), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    state = {f"{size} bytes": noise[place : place + size] for place, size in enumerate(sizes)}
    state |= {f"{size} letters": chr(97 + place) * size for place, size in enumerate(sizes)}
    metadata = _save(bucket, "a", state, mode, part_bytes=5 << 20)
    assert bucket.keys() == checkpoint_keys(bucket, "a", metadata)
    assert_same(load(bucket, "a", blank(state)), state)


def test_tied_tensors(module_bucket):
    """Tensors that share memory come back equal under every name, and into templates that share memory too."""
    weight = torch.randn(300, 400)
    state = {"embedding": weight, "head": weight, "half": weight[:150], "nested": {"again": weight.t()}}
    for mode in ("sync", "async"):
        _save(module_bucket, f"tied-{mode}", state, mode)
        assert_same(load(module_bucket, f"tied-{mode}", blank(state)), state)
        target = torch.zeros(300, 400)
        shared = {"embedding": target, "head": target, "half": target[:150], "nested": {"again": target.t()}}
        load(module_bucket, f"tied-{mode}", shared)
        assert shared["embedding"] is target
        assert_same(shared, state)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_could_not_be_loaded_is_not_saved(bucket, mode):
    """A sparse tensor, into whose like no load can copy, fails the save by its name, and nothing is committed."""
    state = {"dense": torch.ones(3), "table": torch.eye(4).to_sparse()}
    with pytest.raises(dcp.CheckpointException) as caught:
        _save(bucket, "a", state, mode)
    assert "table is a torch.sparse_coo tensor" in str(failure_of(caught.value, 0))
    assert not [key for key in bucket.keys("a") if key.endswith((".metadata", ".distcp"))]


def test_empty_objects(endpoint, bucket):
    """Scalars and empty tensors alone, nothing but plain values, and nothing at all are checkpoints too."""
    states = {
        "small": {"s": torch.tensor(3.5), "e": torch.empty(0, 3), "z": torch.empty(0)},
        "empty": {"z": torch.empty(0)},
        "plain": {"epoch": 7},
        "none": {},
    }
    for path, state in states.items():
        metadata = dcp.save(state, storage_writer=writer(bucket, path))
        assert_same(load(bucket, path, blank(state)), state)
        assert bucket.keys(path) == checkpoint_keys(bucket, path, metadata)
        for key in bucket.keys(path):
            assert bucket.get(key), f"{key} has no bytes"
    assert not [key for key in bucket.keys("none") if "data/" in key]


class Counter:
    """A Stateful object with a plain value and a tensor."""

    def __init__(self, count):
        self.count = count
        self.tensor = torch.full((4,), float(count))
        self.loads = 0

    def state_dict(self):
        return {"count": self.count, "tensor": self.tensor, "deep": {"list": [self.count, self.tensor * 2]}}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.tensor = state["tensor"]
        self.loads += 1


def _plain_values():
    return {
        "epoch": 7,
        "name": "x",
        "none": None,
        "flag": True,
        "ratio": 0.1,
        "l": [1, 2],
        "t": (3, torch.ones(2)),
        "empty list": [],
        "empty dict": {},
        "unicode é/☃": "✓",
        "bytes": b"\0\xff",
        "long text": "long enough not to be joined with others " * 8000,
        "complex": 1 + 2j,
        "shape": torch.Size([2, 3]),
        "dtype": torch.float8_e5m2,
        "opt": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "deep": [{"a": [torch.zeros(2), {"b": torch.arange(3)}]}],
    }


def test_plain_values(module_bucket, tmp_path):
    """Numbers, texts, None, nested and empty containers come back as with stock DCP, into the caller's own dicts."""
    state = _plain_values()
    results = []
    for mode in ("sync", "async"):
        _save(module_bucket, f"plain-{mode}", state, mode)
        template = blank(_plain_values())
        inner = template["opt"]
        load(module_bucket, f"plain-{mode}", template)
        assert template["opt"] is inner
        results.append(template)
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path))
    stock = blank(_plain_values())
    dcp.load(stock, storage_reader=FileSystemReader(tmp_path))
    for result in results:
        assert_same(result, stock)
    assert_same({key: stock[key] for key in ("epoch", "l", "opt")}, {key: state[key] for key in ("epoch", "l", "opt")})


def test_stateful_objects(module_bucket):
    """Stateful objects and Parameters keep their identity through a load; the former are loaded once, in place."""
    model = nn.Linear(3, 2)
    saved = {"counter": Counter(5), "model": model, "weights": dict(model.named_parameters()), "epoch": 1}
    for mode in ("sync", "async"):
        _save(module_bucket, f"stateful-{mode}", saved, mode)
        counter, fresh = Counter(0), nn.Linear(3, 2)
        parameters = dict(fresh.named_parameters())
        template = {"counter": counter, "model": fresh, "weights": dict(parameters), "epoch": 0}
        load(module_bucket, f"stateful-{mode}", template)
        assert template["counter"] is counter
        assert template["model"] is fresh
        assert (counter.count, counter.loads, template["epoch"]) == (5, 1, 1)
        assert_same(counter.tensor, torch.full((4,), 5.0))
        for name, parameter in fresh.named_parameters():
            assert parameter is parameters[name]
            assert template["weights"][name] is parameter
            assert torch.equal(parameter, model.get_parameter(name))
    rebuilt = {}
    dcp.state_dict_loader._load_state_dict(
        rebuilt,
        storage_reader=reader(module_bucket, "stateful-sync"),
        planner=dcp.default_planner._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert rebuilt["counter"]["deep"]["list"][0] == 5
    assert_same(rebuilt["counter"]["tensor"], torch.full((4,), 5.0))


def _outcome(load_into, template, *, partial=False):
    """What loading into a template gives: the template, or the class and the words of what DCP's exception holds."""
    try:
        load_into(template, planner=DefaultLoadPlanner(allow_partial_load=partial))
    except dcp.CheckpointException as error:
        inner = failure_of(error, 0)
        return type(inner).__name__, str(inner)
    return template


KEY_CHANGES = {
    "a subset": {"a": torch.zeros(3), "nested": {"one": torch.zeros(2)}},
    "a missing key": {"a": torch.zeros(3), "not saved": torch.zeros(1)},
    "a missing plain key": {"a": torch.zeros(3), "number of steps": 3},
    "a grown list": {"list": [torch.zeros(2), torch.zeros(2), torch.zeros(2)]},
    "a shorter list": {"list": [torch.zeros(2)]},
    "a list that was empty": {"was empty": [torch.zeros(2)]},
    "a list that is empty now": {"list": []},
    "another shape": {"a": torch.zeros(4)},
    "a smaller shape": {"a": torch.zeros(2)},
    "another rank": {"a": torch.zeros(3, 1)},
    "a plain value for a tensor": {"a": 5},
    "a tensor for a plain value": {"step": torch.zeros(1)},
    "a dotted key": {"nested.one": torch.zeros(2)},
    "nothing": {},
}


@pytest.fixture(scope="module")
def keyed(module_bucket, tmp_path_factory):
    """A checkpoint, ours and stock; what loads into a template from each."""
    directory = tmp_path_factory.mktemp("keyed")
    state = {
        "a": torch.arange(3.0),
        "extra": torch.ones(2),
        "nested": {"one": torch.arange(2.0), "two": 2},
        "list": [torch.ones(2), torch.full((2,), 2.0)],
        "was empty": [],
        "step": 9,
    }
    dcp.save(state, storage_writer=writer(module_bucket, "keyed"))
    dcp.save(state, storage_writer=FileSystemWriter(directory))

    def ours(template, **options):
        dcp.load(template, storage_reader=reader(module_bucket, "keyed"), **options)

    def stock(template, **options):
        dcp.load(template, storage_reader=FileSystemReader(directory), **options)

    return ours, stock


@pytest.mark.parametrize("change", KEY_CHANGES)
@pytest.mark.parametrize("partial", [False, True])
def test_key_changes(keyed, change, partial):
    """Keys, lists, shapes and kinds of values that changed since the save load, or are refused by name, as with stock DCP."""
    ours, stock = (_outcome(load_into, copy.deepcopy(KEY_CHANGES[change]), partial=partial) for load_into in keyed)
    assert_same(ours, stock)
    if change == "a missing key" and not partial:
        assert "not saved" in ours[1]


def test_a_dot_in_a_key(module_bucket, tmp_path):
    """Two values whose flattened names collide fail as in stock DCP, by name, and nothing is committed."""
    state = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}
    texts = []
    for store in (FileSystemWriter(tmp_path), writer(module_bucket, "dotted")):
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(state, storage_writer=store)
        texts.append(str(failure_of(caught.value, 0)))
    assert texts[0] == texts[1]
    assert "a.b" in texts[1]
    assert module_bucket.keys("dotted") == []


CONVERSIONS = {
    "float32 to bfloat16": (torch.randn(300), torch.bfloat16),
    "float64 to float32": (torch.randn(30, dtype=torch.float64), torch.float32),
    "int64 to int32": (torch.tensor([1, 2**40, -(2**33)]), torch.int32),
    "complex64 to float32": (torch.randn(7, dtype=torch.complex64), torch.float32),
    "float32 to bool": (torch.tensor([0.0, 0.5, 2.0]), torch.bool),
    "bfloat16 to float32": (torch.randn(9).to(torch.bfloat16), torch.float32),
    "float32 to float8": (torch.randn(40_000), torch.float8_e4m3fn),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_another_dtype(bucket, tmp_path, caplog, conversion):
    """A template of another dtype gets the values that stock DCP gives it, and a warning that names the tensor and both dtypes."""
    saved, dtype = CONVERSIONS[conversion]
    dcp.save({"some.weight": saved}, storage_writer=writer(bucket, "a"))
    dcp.save({"some.weight": saved}, storage_writer=FileSystemWriter(tmp_path))
    ours, stock = ({"some.weight": torch.zeros(saved.shape, dtype=dtype)} for _ in range(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real", UserWarning)  # torch's own, of both
        load(bucket, "a", ours)
        dcp.load(stock, storage_reader=FileSystemReader(tmp_path))
    assert_same(ours, stock)
    ours_alone = (record for record in caplog.records if record.name.startswith("dcp_s3"))
    told = [record.getMessage() for record in ours_alone if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "some.weight" in told[0]
    assert str(saved.dtype) in told[0]
    assert str(dtype) in told[0]
