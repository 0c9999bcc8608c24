"""What the integration tests share: bitwise comparison, templates, stock DCP as the judge, and looks into the bucket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as checkpoint_process
from torch.distributed.tensor import DTensor

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3._checkpoint.format.index import Index

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers import Bucket

LIMIT_S = 60
"""How long a test waits for one thing, seconds; twice that for ranks. Far above what it takes, also on a busy machine."""

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def writer(bucket: Bucket, path: str | None = None, *, overwrite: bool = True, **settings: Any) -> S3StorageWriter:
    """Return a writer for a path in a bucket (None: without a url); settings are fields of S3Config."""
    url = None if path is None else bucket.url(path)
    return S3StorageWriter(url, config=bucket.endpoint.config(**settings), overwrite=overwrite)


def reader(bucket: Bucket, path: str | None = None, **settings: Any) -> S3StorageReader:
    """Return a reader for a path in a bucket (None: without a url); settings are fields of S3Config."""
    url = None if path is None else bucket.url(path)
    return S3StorageReader(url, config=bucket.endpoint.config(**settings))


def load(bucket: Bucket, path: str, template: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Load a path of a bucket into a template, and return the template."""
    dcp.load(template, storage_reader=reader(bucket, path), **options)
    return template


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values in row-major order, shape (nbytes,), dtype uint8."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_quantized:
        plain = plain.int_repr()
    try:
        flat = plain.contiguous()
    except (NotImplementedError, RuntimeError):  # of a dtype that torch can store and not copy
        flat = plain.view(_WIDTHS[plain.itemsize]).contiguous()
    return flat.reshape(-1).view(torch.uint8)


def assert_same(actual: Any, expected: Any, at: str = "") -> None:
    """Assert that two trees have the same types, keys, shapes and dtypes, and tensors the same bits."""
    __tracebackhide__ = True
    assert type(actual) is type(expected), f"{at}: a {type(actual).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, dict):
        assert list(actual) == list(expected), f"{at}: keys {list(actual)}, not {list(expected)}"
        for key, value in expected.items():
            assert_same(actual[key], value, f"{at}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{at}: {len(actual)} items, not {len(expected)}"
        for index, (got, value) in enumerate(zip(actual, expected, strict=True)):
            assert_same(got, value, f"{at}/{index}")
    elif isinstance(expected, DTensor):
        assert actual.placements == expected.placements, at
        assert_same(actual._local_tensor, expected._local_tensor, at)
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), f"{at}: {actual} is not {expected}"
        assert torch.equal(bits(actual), bits(expected)), f"{at}: {actual} is not {expected}"
    else:
        assert actual == expected, f"{at}: {actual!r} is not {expected!r}"


def blank(value: Any) -> Any:
    """Return a template of a tree: tensors of the same shape and dtype with other values, and other plain values."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(blank(item) for item in value)
    if isinstance(value, DTensor):
        return DTensor.from_local(
            blank(value._local_tensor),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, torch.Tensor):
        if value.is_quantized:
            return torch.quantize_per_tensor(
                torch.zeros(value.shape), value.q_scale(), value.q_zero_point(), value.dtype
            )
        count = value.numel() * value.itemsize
        filled = torch.full((count,), 0 if value.dtype is torch.bool else 0x3B, dtype=torch.uint8)
        return filled.view(value.dtype).reshape(value.shape) if count else torch.empty(value.shape, dtype=value.dtype)
    return "not loaded"


def checkpoint_keys(bucket: Bucket, path: str, metadata: dcp.Metadata) -> list[str]:
    """Return what a bucket must hold for the checkpoint at a path, by the record that its save returned, sorted."""
    prefix = f"{path}/" if path else ""
    index = f"{prefix}index-{metadata.storage_meta.save_id}.safetensors.gz"
    named = [f"{prefix}{entry.key}" for entry in Index.from_bytes(bucket.get(index), source=index).objects]
    recorded = {f"{prefix}{info.relative_path}" for info in metadata.storage_data.values()}
    assert sorted(recorded) == sorted(named)
    return sorted([f"{prefix}.metadata", index, *named])


def failure_of(outcome: Any, rank: int) -> BaseException:
    """Return what DCP says that one rank raised; the outcome must be a CheckpointException."""
    assert isinstance(outcome, dcp.CheckpointException), repr(outcome)
    error: BaseException = outcome.failures[rank][0]
    return error


def wait_until(condition: Callable[[], Any], what: str, *, timeout_s: float = LIMIT_S) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def end_checkpoint_process() -> None:
    """End the process that PROCESS saves of this process run in, as DCP itself would at its interpreter's end."""
    process, checkpoint_process._CHECKPOINT_PROCESS = checkpoint_process._CHECKPOINT_PROCESS, None
    if process is not None:
        process._send(checkpoint_process._CheckpointSaveProcessControlOpts.TERMINATE)
        process._save_process.join(timeout=LIMIT_S)
        assert process._save_process.exitcode == 0
