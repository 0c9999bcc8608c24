"""One rank's data objects: records go in one after the other, bytes leave while later tensors are still resolved."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_s3._checkpoint.archive.tensor_archive import (
    SMALL_BYTES,
    copied,
    copy_small,
    envelope,
    is_raw,
    memory_of,
    opaque,
    plain,
    row_major_slices,
    storage_alignment,
    to_contiguous_cpu,
)
from dcp_s3._checkpoint.format.index import NOWHERE
from dcp_s3._checkpoint.format.layout import data_key
from dcp_s3._checkpoint.save.results import Written
from dcp_s3._transfer.checksum import CRC_CHUNK_BYTES, combine, crc32c
from dcp_s3._transfer.upload import ObjectReceipt, ObjectUpload
from dcp_s3.errors import ConfigError

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.planner import WriteItem

    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._checkpoint.save.loadable import Loadability
    from dcp_s3._transfer.job import Job
    from dcp_s3._transfer.limits.cpu_throttle import CpuThrottle
    from dcp_s3._transfer.s3.data_plane import DataPlane

SLAB_BYTES: Final = 1 << 20
"""Buffer in which small records, heads and tails are joined."""
COPY_BYTES: Final = 16 << 20
"""A tensor that has to be copied (device memory, other strides) goes in slices of at most this."""
_RECORD_OVERHEAD: Final = 2048
"""Upper estimate of what a record adds to its tensor's bytes; measured 1,577."""


def bytes_first(items: Sequence[WriteItem]) -> list[WriteItem]:
    """BYTE_IO items first: only resolving tells their size, and the objects they hold are the planner's copies.

    Args:
        items: A rank's, in the plan's order, which is kept within each kind.
    """
    return sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)


def estimate(items: Sequence[WriteItem]) -> tuple[int, int]:
    """Bytes of all records and of the largest, from the plan. The item's own chunk counts, not the global tensor.

    Args:
        items: A rank's.
    """
    total = largest = 0
    for item in items:
        nbytes = _RECORD_OVERHEAD
        if item.tensor_data is not None:
            nbytes += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        total += nbytes
        largest = max(largest, nbytes)
    return total, largest


class _Grid:
    """CRCs of the 4 MiB chunks of a record, from pieces of any length."""

    __slots__ = ("_crc", "_filled", "values")

    def __init__(self) -> None:
        self.values: list[int] = []
        self._crc = 0
        self._filled = 0

    def room(self) -> int:
        return CRC_CHUNK_BYTES - self._filled

    def add(self, crc: int, nbytes: int) -> None:
        self._crc = combine(self._crc, crc, nbytes) if self._filled else crc
        self._filled += nbytes
        if self._filled == CRC_CHUNK_BYTES:
            self.close()

    def close(self) -> None:
        if self._filled:
            self.values.append(self._crc)
            self._crc = self._filled = 0

    def packed(self) -> bytes:
        self.close()
        return struct.pack(f"<{len(self.values)}I", *self.values)


class ShardWriter:
    """Writes the records of one rank. Used by one thread; ends with :meth:`finish` or :meth:`abort`.

    Args:
        plane: The process's data plane.
        job: What its requests belong to.
        url: The checkpoint.
        token: 16 hex digits that no other save has.
        rank: This rank, part of the object names.
        part_bytes: Size of an upload part.
        throttle: Rests between parts; ``None`` does not.
    """

    def __init__(
        self,
        plane: DataPlane,
        job: Job,
        url: CheckpointUrl,
        token: str,
        rank: int,
        *,
        part_bytes: int,
        throttle: CpuThrottle | None = None,
    ) -> None:
        self._plane = plane
        self._job = job
        self._url = url
        self._token = token
        self._rank = rank
        self._part_bytes = part_bytes
        self._throttle = throttle
        self._alignment = storage_alignment()
        self._receipts: list[ObjectReceipt] = []
        self._upload: ObjectUpload | None = None
        self._name = ""
        self._opened = 0
        self._slab = memoryview(b"")
        self._used = 0
        self.size = 0

    def write_tensor(self, tensor: torch.Tensor) -> Written:
        """Write one tensor's record.

        Args:
            tensor: Any device, strides and dtype; its memory stays unchanged until :meth:`finish` has returned.

        Returns:
            Where it lies, with ``raw_offset`` and the CRC32C of each 4 MiB of its row-major data.
        """
        tensor = tensor.detach()
        if not is_raw(tensor):
            return self.write_bytes(memoryview(opaque(tensor)))
        frame = envelope(tensor.dtype, tuple(tensor.shape), self._alignment)
        nbytes = tensor.numel() * tensor.element_size()
        upload = self._begin(len(frame.head) + nbytes + len(frame.tail))
        start = upload.size + self._used
        if nbytes < SMALL_BYTES:
            if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
                tensor = to_contiguous_cpu(plain(tensor))
            raw = copy_small(tensor)
            self._join(frame.head + raw + frame.tail)
            crcs = crc32c(raw).to_bytes(4, "little") if raw else b""
        else:
            grid = _Grid()
            self._join(frame.head)
            self._flush()
            for view, copied in self._views(tensor):
                self._append(view, grid, copied=copied)
            self._join(frame.tail)
            crcs = grid.packed()
        return self._written(start, len(frame.head), crcs)

    def write_bytes(self, data: memoryview) -> Written:
        """Write a record that is a sequence of bytes to us.

        Args:
            data: Contiguous bytes that stay unchanged until :meth:`finish` has returned.

        Returns:
            Where it lies, with the CRC32C of each 4 MiB of it.
        """
        data = data.cast("B")
        upload = self._begin(len(data))
        start = upload.size + self._used
        grid = _Grid()
        if len(data) < SMALL_BYTES:
            self._join(bytes(data))
            grid.add(crc32c(data), len(data))
        else:
            self._flush()
            upload.reserve(len(data))  # whoever made the bytes made them for us
            self._append(data, grid, copied=True)
        return self._written(start, None, grid.packed())

    def finish(self) -> list[ObjectReceipt]:
        """Complete all objects; a rank without records has none.

        Raises:
            DcpS3Error: An object could not be completed.
        """
        self._close()
        return self._receipts

    def abort(self) -> None:
        """Cancel and abort what is open. Never raises."""
        self._slab = memoryview(b"")
        self._used = 0
        if self._upload is not None:
            self._upload.abort()
            self._upload = None

    def _begin(self, length: int) -> ObjectUpload:
        if self._upload is not None and self._upload.size + self._used + length > self._upload.capacity:
            self._close()
        if self._upload is None:
            self._name = data_key(self._token, self._rank, self._opened)
            self._opened += 1
            self._upload = ObjectUpload(
                self._plane,
                self._job,
                self._url.key(self._name),
                self._token,
                part_bytes=self._part_bytes,
                throttle=self._throttle,
            )
        return self._upload

    def _close(self) -> None:
        if self._upload is None:
            return
        self._flush()
        self._give_slab_back()
        upload = self._upload
        self.size += upload.size
        self._receipts.append(upload.finish())
        self._upload = None

    def _views(self, tensor: torch.Tensor) -> Iterator[tuple[memoryview, bool]]:
        """The row-major bytes of a tensor: its own memory where that is possible, else copies taken from the budget."""
        assert self._upload is not None  # noqa: S101 -- _begin has been called
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            yield memory_of(tensor), False
            return
        if tensor.device.type == "cuda":
            yield from self._device_views(tensor)
            return
        for piece in row_major_slices(tensor, COPY_BYTES):
            self._upload.reserve(piece.numel() * piece.element_size())
            yield copied(plain(piece)), True

    def _device_views(self, tensor: torch.Tensor) -> Iterator[tuple[memoryview, bool]]:
        """Copy slices of a CUDA tensor to pinned memory, the next one while the last is checked and sent.

        torch's caching host allocator hands the same pinned blocks out again: with the budget it is a bounded ring.
        """
        assert self._upload is not None  # noqa: S101
        stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        ready: tuple[torch.Tensor, torch.cuda.Event] | None = None
        for piece in row_major_slices(tensor, COPY_BYTES):
            self._upload.reserve(piece.numel() * piece.element_size())
            with torch.cuda.stream(stream):
                host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
                host.copy_(plain(piece), non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                event.record(stream)
            if ready is not None:
                ready[1].synchronize()
                yield memory_of(ready[0]), True
            ready = host, event
        if ready is not None:
            ready[1].synchronize()
            yield memory_of(ready[0]), True

    def _append(self, view: memoryview, grid: _Grid, *, copied: bool) -> None:
        assert self._upload is not None  # noqa: S101
        offset = 0
        while offset < len(view):
            piece = view[offset : offset + grid.room()]
            grid.add(self._upload.append(piece, copied=copied), len(piece))
            offset += len(piece)

    def _join(self, data: bytes) -> None:
        assert self._upload is not None  # noqa: S101 -- _begin has been called
        if len(self._slab) - self._used < len(data):
            self._flush()
            self._give_slab_back()
            self._upload.reserve(SLAB_BYTES)
            self._slab = memoryview(bytearray(SLAB_BYTES))
        self._slab[self._used : self._used + len(data)] = data
        self._used += len(data)

    def _give_slab_back(self) -> None:
        assert self._upload is not None  # noqa: S101
        self._upload.give_back(len(self._slab))
        self._slab = memoryview(b"")

    def _flush(self) -> None:
        """Hand the joined bytes on. What is left of the slab goes on being filled: no byte of it is written twice."""
        if not self._used:
            return
        assert self._upload is not None  # noqa: S101
        joined, self._slab, self._used = self._slab[: self._used], self._slab[self._used :], 0
        self._upload.append(joined, copied=True)

    def _written(self, start: int, raw_offset: int | None, crcs: bytes) -> Written:
        assert self._upload is not None  # noqa: S101
        info = _StorageInfo(self._name, start, self._upload.size + self._used - start)
        return Written(info, NOWHERE if raw_offset is None else raw_offset, crcs)


def write_value(shard: ShardWriter, fqn: str, value: torch.Tensor | io.BytesIO, loadability: Loadability) -> Written:
    """Write what a planner resolved an item to.

    Args:
        shard: Where to.
        fqn: The item's name in the state dict.
        value: A tensor, or an object's record.
        loadability: Looks at what a load will have to unpickle.

    Returns:
        Where it lies; of a tensor, with the ``dtype`` that was written.

    Raises:
        ConfigError: It is a tensor that DCP cannot load back.
    """
    if not isinstance(value, torch.Tensor):
        loadability.look(fqn, value.getbuffer())
        return shard.write_bytes(value.getbuffer())
    if value.layout is not torch.strided:  # loading copies into the template's values, which leaves it empty
        raise ConfigError(f"{fqn} is a {value.layout} tensor, which DCP cannot load back: save it dense")
    if is_raw(value.detach()):
        written = shard.write_tensor(value)
    else:
        record = memoryview(opaque(value))
        loadability.look(fqn, record)
        written = shard.write_bytes(record)
    return dataclasses.replace(written, dtype=value.dtype)
