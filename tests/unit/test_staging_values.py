"""What staging copies: every kind of tensor, container and leaf, with the values of the moment of the call."""

from __future__ import annotations

import collections
import copy
import gc
import io
import pickle
from typing import NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from dcp_s3.staging import Stager, lease_of
from tests.unit.test_staging import block_of, no_block_is_left  # noqa: F401 -- a fixture of every test


def bits(tensor):
    """The bytes of a tensor, row-major; by itself, not by copy_, for dtypes that lack it."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor).reshape(-1).view(torch.uint8)
    return tensor.detach().view(integers[tensor.itemsize]).reshape(-1).view(torch.uint8)


def test_nothing_written_afterwards_is_seen():
    """Tensors, lists, dicts, BytesIOs and objects that the caller changes after stage() keep their values in the staged dict."""
    tensor, array, stream, numbers = torch.zeros(100_000), bytearray(b"old"), io.BytesIO(b"old"), [1, {"two": 2}]
    state = {"t": tensor, "nested": {"deep": [tensor[10:20], array]}, "stream": stream, "numbers": numbers}
    staged = Stager().stage(state)
    tensor.fill_(9)
    array[:] = b"new"
    stream.write(b"new")
    numbers[1]["two"] = 3
    numbers.append(4)
    state["nested"]["deep"].clear()
    state["late"] = 1
    assert torch.equal(staged["t"], torch.zeros(100_000))
    assert torch.equal(staged["nested"]["deep"][0], torch.zeros(10))
    assert staged["nested"]["deep"][1] == b"old"
    assert staged["stream"].getvalue() == b"old"
    assert staged["numbers"] == [1, {"two": 2}]
    assert list(staged) == ["t", "nested", "stream", "numbers"]


DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and "quint" not in str(value)}
    - {torch.qint8, torch.qint32},
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_bit_for_bit(dtype):
    """Any bit pattern of any dtype that a tensor can have arrives unchanged, whatever the shape and the strides."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (24 * dtype.itemsize,), dtype=torch.uint8)
    vector = raw.view(dtype)
    forms = {"vector": vector, "matrix": vector.view(4, 6), "transposed": vector.view(4, 6).t(), "scalar": vector[5]}
    for form, staged in Stager().stage(forms).items():
        assert staged.dtype is dtype
        assert staged.shape == forms[form].shape
        assert staged.is_contiguous()
        assert torch.equal(bits(staged), bits(forms[form])), form


def test_conjugate_and_negative_views_are_resolved():
    """A lazily conjugated or negated view is staged as the values that it shows, with neither bit left on it."""
    z = torch.randn(5, 3, dtype=torch.complex64)
    views = {
        "as it is": z,
        "conj": z.conj(),
        "neg": z.conj().imag,
        "both": z.conj().t(),
        "scalar": z[0, 0].conj(),
        "half": z.to(torch.complex32).conj(),
    }
    assert views["neg"].is_neg()
    expected = {name: view.resolve_conj().resolve_neg().clone() for name, view in views.items()}
    staged = Stager().stage(views)
    z.zero_()
    for name, value in staged.items():
        assert not value.is_conj()
        assert not value.is_neg()
        assert torch.equal(bits(value), bits(expected[name])), name


def test_a_view_takes_only_its_own_bytes():
    """Ten elements of a large tensor stage, and pickle, as forty bytes; expanded and strided views show what they showed."""
    large = torch.arange(1_000_000, dtype=torch.float32)
    staged = Stager().stage({"slice": large[10:20], "every third": large[::3], "expanded": large[:1].expand(7)})
    assert staged["slice"].untyped_storage().nbytes() == 40
    assert staged["slice"].storage_offset() == 0
    assert staged["slice"].tolist() == list(range(10, 20))
    assert torch.equal(staged["every third"], torch.arange(0, 1_000_000, 3, dtype=torch.float32))
    assert staged["expanded"].tolist() == [0.0] * 7
    saved = io.BytesIO()
    torch.save({"nested": [staged["slice"]]}, saved)
    assert len(saved.getvalue()) < 3000


def test_what_is_tied_stays_tied_and_is_copied_once():
    """One tensor object, or two equal views of one storage, become one staged tensor; different views do not."""
    weight = torch.randn(8, 8)
    staged = Stager().stage(
        {
            "a": weight,
            "b": weight,
            "c": weight.view(8, 8),
            "d": {"e": weight},
            "turned": weight.t(),
            "other": weight[:4],
            "flat": weight.view(64),
        }
    )
    assert staged["a"] is staged["b"]
    assert staged["a"] is staged["d"]["e"]
    assert staged["a"].data_ptr() == staged["c"].data_ptr()
    assert len({staged[name].data_ptr() for name in ("a", "other", "flat")}) == 3
    assert torch.equal(staged["turned"], weight.t())
    assert torch.equal(staged["other"], weight[:4])
    assert torch.equal(staged["flat"], weight.view(64))


def test_scalars_empties_and_memory_formats():
    """0-dim and empty tensors keep their shape and dtype; channels_last is staged with equal values."""
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    empty = torch.empty(0, 3, dtype=torch.int16)
    staged = Stager().stage({"scalar": torch.tensor(3.5), "empty": empty, "image": image, "none": torch.empty(0)})
    assert staged["scalar"].shape == ()
    assert staged["scalar"].item() == 3.5
    assert staged["empty"].shape == (0, 3)
    assert staged["empty"].dtype is torch.int16
    assert torch.equal(staged["image"], image)
    assert staged["none"].numel() == 0


def test_parameters_and_graph_tensors_are_detached():
    """A Parameter, a non-leaf result and an inference tensor are staged as plain tensors without a graph."""
    parameter = torch.nn.Parameter(torch.randn(4))
    with torch.inference_mode():
        inference = torch.randn(4)
        expected = inference.clone()
        staged = Stager().stage({"parameter": parameter, "result": parameter * 2, "inference": inference})
    assert not staged["parameter"].requires_grad
    assert not staged["result"].requires_grad
    assert not staged["inference"].is_inference()
    assert torch.equal(staged["result"], parameter.detach() * 2)
    assert torch.equal(staged["inference"], expected)


def test_the_default_device_does_not_matter():
    """Staged tensors are CPU tensors under any default device."""
    with torch.device("meta"):
        staged = Stager().stage(
            {
                "t": torch.ones(3, 2, device="cpu"),
                "empty": torch.empty(0, device="cpu"),
                "bit": torch.ones(8, dtype=torch.uint8, device="cpu").view(torch.uint3),
            }
        )
    assert {value.device.type for value in staged.values()} == {"cpu"}
    assert torch.equal(staged["t"], torch.ones(3, 2))


class Labelled(torch.Tensor):
    """A subclass with a storage of its own, and no protocol."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")  # deprecated, and still found in state dicts
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_tensors_of_other_kinds_are_copies_of_their_kind():
    """Quantized, sparse, nested and subclassed tensors keep their class, layout and values, and share nothing with the source."""
    values = torch.tensor([[0.0, 1.0], [2.0, 0.0]])

    def build():
        return {
            "quantized": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
            "per channel": torch.quantize_per_channel(
                values, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
            ),
            "coo": values.clone().to_sparse(),
            "csr": values.clone().to_sparse_csr(),
            "two": TwoTensor(values.clone(), values + 5),
            "strided two": TwoTensor(values.clone().t(), (values + 5).t()),
            "labelled": values.clone().as_subclass(Labelled),
        }

    state, expected = build(), build()
    staged = Stager().stage(state)
    for tensor in (state["two"].a, state["two"].b, state["strided two"].a, state["strided two"].b, state["labelled"]):
        tensor.zero_()
    for tensor in (state["coo"]._values(), state["csr"].values()):
        tensor.zero_()
    for name in ("quantized", "per channel"):
        assert torch.equal(staged[name].int_repr(), expected[name].int_repr())
        assert staged[name].qscheme() == expected[name].qscheme()
        assert staged[name].data_ptr() != state[name].data_ptr()
    for name in ("coo", "csr"):
        assert staged[name].layout is expected[name].layout
        assert torch.equal(staged[name].to_dense(), values)
    for name in ("two", "strided two"):
        assert type(staged[name]) is TwoTensor
        assert torch.equal(staged[name].a, expected[name].a)
        assert torch.equal(staged[name].b, expected[name].b)
        assert staged[name].stride() == expected[name].stride()
        assert staged[name].a.stride() == expected[name].a.stride()
    assert lease_of(staged["two"].a) is not None
    assert type(staged["labelled"]) is Labelled
    assert torch.equal(staged["labelled"].as_subclass(torch.Tensor), values)


class Point(NamedTuple):
    x: object
    y: object


def test_containers_keep_their_kind():
    """Dict, list and tuple subclasses keep class, order, attributes and identity; a container may hold itself."""
    ordered = collections.OrderedDict(b=torch.ones(2), a=1)
    ordered._metadata = {"version": [1]}
    shared = [torch.ones(3)]
    loop = {"t": torch.ones(1)}
    loop["self"] = loop
    state = {
        "ordered": ordered,
        "default": collections.defaultdict(list, x=[torch.ones(1)]),
        "point": Point(torch.ones(2), "y"),
        "tuple": (torch.ones(2), (1, torch.zeros(1))),
        "plain tuple": (1, "two", Point(3, 4)),
        "shared": [shared, shared],
        "loop": loop,
        7: torch.ones(1),
    }
    staged = Stager().stage(state)
    ordered._metadata["version"].append(2)
    assert type(staged["ordered"]) is collections.OrderedDict
    assert list(staged["ordered"]) == ["b", "a"]
    assert staged["ordered"]._metadata == {"version": [1]}
    assert staged["default"]["missing"] == []
    assert type(staged["point"]) is Point
    assert torch.equal(staged["point"].x, torch.ones(2))
    assert torch.equal(staged["tuple"][1][1], torch.zeros(1))
    assert staged["plain tuple"] == (1, "two", Point(3, 4))
    assert staged["shared"][0] is staged["shared"][1]
    assert staged["loop"]["self"] is staged["loop"]
    assert torch.equal(staged[7], torch.ones(1))
    del staged
    gc.collect()


def test_copies_and_pickles_hold_the_values_alone():
    """deepcopy, pickle and torch.save of a staged dict give a dict that needs nothing of ours to load, and no buffer."""
    stager = Stager()
    staged = stager.stage({"t": torch.arange(5.0), "n": 3})
    saved = io.BytesIO()
    torch.save(staged, saved)
    saved.seek(0)
    copies = [copy.deepcopy(staged), pickle.loads(pickle.dumps(staged)), torch.load(saved, weights_only=True)]
    block = block_of(staged)
    del staged
    assert block_of(stager.stage({"t": torch.zeros(5), "n": 3})) == block
    for each in copies:
        assert type(each) is collections.OrderedDict
        assert each["n"] == 3
        assert torch.equal(each["t"], torch.arange(5.0))


@pytest.mark.usefixtures("collector_on")
def test_the_collector_is_on_again():
    """Staging holds the cyclic collector off for its own time only, and does not start one that was stopped."""
    Stager().stage({"t": torch.ones(2)})
    Stager().stage({"bad": torch.ones(2, device="meta")})
    assert gc.isenabled()
    gc.disable()
    try:
        Stager().stage({"t": torch.ones(2)})
        assert not gc.isenabled()
    finally:
        gc.enable()
