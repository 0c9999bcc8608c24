"""Spliced records are byte for byte what torch.save writes."""

from __future__ import annotations

import io

import pytest
import torch
from torch.utils.serialization import config as serialization_config

from dcp_s3._checkpoint.archive.tensor_archive import (
    SMALL_BYTES,
    envelope,
    memory_of,
    plain,
    row_major_slices,
    storage_alignment,
    to_contiguous_cpu,
)

SHAPES = [(), (1,), (3,), (0, 3), (5, 7), (SMALL_BYTES, 2)]


def saved(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    before = serialization_config.save.compute_crc32
    serialization_config.save.compute_crc32 = False
    try:
        torch.save(tensor, buffer)
    finally:
        serialization_config.save.compute_crc32 = before
    return buffer.getvalue()


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    nbytes = made.untyped_storage().nbytes()
    if not nbytes:
        return made
    noise = torch.randint(0, 2 if dtype == torch.bool else 255, (nbytes,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(noise.untyped_storage(), 0, shape)


def can_be_saved(dtype: torch.dtype) -> bool:
    try:
        saved(torch.empty(3, dtype=dtype))
    except (RuntimeError, NotImplementedError, KeyError, TypeError):
        return False
    return True


DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype) and "q" not in str(v) and can_be_saved(v)}, key=str
)


def test_all_common_dtypes_are_among_those_tested() -> None:
    """The filter for what torch.save refuses (int1 … uint7) does not hide what it takes."""
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    assert {
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
    } <= names
    assert {"float32", "float64", "complex32", "complex64", "complex128"} <= names
    assert {"float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"} <= names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_splice_equals_torch_save(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Head + memory + tail is the record that torch.save writes with the zip CRC off, for every dtype and shape."""
    tensor = random_tensor(shape, dtype)
    frame = envelope(dtype, shape, storage_alignment())
    assert frame.head + bytes(memory_of(tensor)) + frame.tail == saved(tensor)
    if tensor.numel():
        assert len(frame.head) % 64 == 0


def test_the_process_wide_setting_is_left_as_it_was() -> None:
    """Building a envelope does not switch anybody's zip CRC off."""
    before = serialization_config.save.compute_crc32
    envelope(torch.float32, (11, 13), storage_alignment())
    assert serialization_config.save.compute_crc32 is before


def test_memory_keeps_its_tensor_alive() -> None:
    """The view is enough: the tensor may be dropped while its bytes are on the wire."""
    tensor = torch.arange(1000, dtype=torch.int64)
    want = tensor.numpy().tobytes()
    view = memory_of(tensor)
    del tensor
    torch.zeros(1000, dtype=torch.int64)  # would take the freed block
    assert bytes(view) == want
    assert not view.readonly


@pytest.mark.parametrize("limit", [1, 64, 100, 4096])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60, dtype=torch.int32).view(3, 4, 5),
        torch.arange(60, dtype=torch.int32).view(5, 12).t(),
        torch.arange(48, dtype=torch.int16).view(1, 2, 4, 6).to(memory_format=torch.channels_last),
        torch.tensor(3.5),
    ],
)
def test_slices_follow_each_other_in_row_major_order(tensor: torch.Tensor, limit: int) -> None:
    """Joined, the slices are the tensor's row-major bytes; each is within the limit, or a single element."""
    pieces = list(row_major_slices(tensor, limit))
    joined = b"".join(bytes(memory_of(to_contiguous_cpu(piece))) for piece in pieces)
    assert joined == bytes(memory_of(tensor.contiguous()))
    assert all(piece.numel() * piece.element_size() <= limit or piece.numel() == 1 for piece in pieces)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int1, torch.uint7])
def test_a_contiguous_copy_has_the_same_bytes(dtype: torch.dtype) -> None:
    """Also of a dtype that torch cannot copy by element."""
    numbers = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    copy = to_contiguous_cpu(numbers.view(dtype).t())
    assert copy.dtype == dtype
    assert bytes(memory_of(copy)) == bytes(memory_of(numbers.t().contiguous()))


def test_lazy_bits_are_resolved() -> None:
    """A conj or neg view's memory holds other values than the view; plain() gives the view's."""
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert bytes(memory_of(plain(value.conj()))) == bytes(memory_of(torch.tensor([1 - 2j, 3 + 4j])))
    assert bytes(memory_of(plain(torch._neg_view(torch.tensor([1.0, -2.0]))))) == bytes(
        memory_of(torch.tensor([-1.0, 2.0]))
    )
