"""Reads a ``torch.save`` record without trust: what its zip directory promises is checked before anything is unpacked.

``torch.save`` writes zip archives and never compresses; whoever reads one allocates what the directory says. A record that
somebody else made could promise a thousand times its size (a compressed entry), or name the same bytes many times.

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.12 to 4.3.16 (the directory and its end).
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_s3._checkpoint.pickles.objects import foreign_names, load_object, not_loadable
from dcp_s3._checkpoint.pickles.strict_pickle import RefusedError, reason_of
from dcp_s3.errors import CorruptCheckpointError

__all__ = ["check_archive", "fault_of", "load_record"]

_ZIP_MAGIC: Final = b"PK\x03\x04"
"""How what ``torch.save`` writes begins."""
_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_IN_EXTRA: Final = 0xFFFFFFFF
"""A number that stands in the entry's extra field, since it takes more than 32 bits."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the directory says of one entry."""

    name: bytes
    size: int
    crc: int
    start: int


def check_archive(data: memoryview, *, source: str) -> None:
    """Check a ``torch.save`` archive's directory.

    Exactly the layout that is written is let through (directory, its end, nothing behind), so that no two readers can take
    another place for the directory.

    Args:
        data: The whole record, bytes.
        source: What it is, for the message.

    Raises:
        CorruptCheckpointError: An entry is compressed, the entries together are larger than the record, or the directory is
            not where ``torch.save`` puts it.
    """
    try:
        total = sum(entry.size for entry in _entries(data))
    except (struct.error, ValueError) as error:
        raise CorruptCheckpointError(
            f"{source} holds a damaged record: its zip directory is broken ({error})"
        ) from None
    if total > len(data):
        raise CorruptCheckpointError(
            f"{source} holds a record of {len(data)} bytes that claims to unpack to {total}: no torch.save wrote it"
        )


def fault_of(data: memoryview) -> str | None:
    """What in a ``torch.save`` record is not what was saved, by the CRC-32 that the archive keeps of each entry.

    An archive that was written with ``torch.utils.serialization.config.save.compute_crc32 = False`` keeps zeros, which say
    nothing: only its directory is looked at. What is no archive at all is left to :func:`load_record`.

    Args:
        data: The whole record, bytes.

    Returns:
        What is wrong, or ``None``.
    """
    if bytes(data[:4]) != _ZIP_MAGIC:
        return None
    try:
        entries = _entries(data)
        if sum(entry.size for entry in entries) > len(data):
            return None  # check_archive refuses it, before anything is read time and again
        for entry in entries:
            if entry.crc and zlib.crc32(_content(data, entry)) != entry.crc:
                name = entry.name.decode("utf-8", "replace").partition("/")[2]
                return f"the CRC-32 of {name!r} in its torch.save record is not the one computed at save"
    except (struct.error, ValueError) as error:
        return f"the zip directory of its torch.save record is broken ({error})"
    return None


def _content(data: memoryview, entry: _Entry) -> memoryview:
    head = _LOCAL.unpack_from(data, entry.start)
    start = entry.start + _LOCAL.size + head[9] + head[10]
    if head[0] != _ZIP_MAGIC or start + entry.size > len(data):
        raise ValueError("an entry that is not where it should be")
    return data[start : start + entry.size]


def _entries(data: memoryview) -> list[_Entry]:
    end = len(data) - _END.size
    signature, _, _, _, count, size, start, comment = _END.unpack_from(data, max(end, 0))
    if signature != b"PK\x05\x06" or comment:
        raise ValueError("no end at the end")
    locator = end - _LOCATOR.size
    if locator >= 0 and bytes(data[locator : locator + 4]) == b"PK\x06\x07":
        end = locator - _END64.size
        if end < 0 or _LOCATOR.unpack_from(data, locator)[2] != end:
            raise ValueError("its end lies elsewhere")
        signature, _, _, _, _, _, _, count, size, start = _END64.unpack_from(data, end)
        if signature != b"PK\x06\x06":
            raise ValueError("no end of 64 bits")
    if start + size != end:
        raise ValueError(f"its {size} bytes from {start} do not reach its end at {end}")
    entries = []
    position = start
    for _ in range(count):
        head = _ENTRY.unpack_from(data[:end], position)
        signature, method = head[0], head[4]
        crc, packed, unpacked, name, extra, remark = head[7:13]
        local = head[16]
        if signature != b"PK\x01\x02":
            raise ValueError("no entry where one should be")
        if method:
            raise ValueError("a compressed entry")
        named = bytes(data[position + _ENTRY.size : position + _ENTRY.size + name])
        position += _ENTRY.size + name
        if _IN_EXTRA in (packed, unpacked, local):
            packed, unpacked, local = _in_extra(data[position : position + extra], packed, unpacked, local)
        if packed != unpacked:
            raise ValueError("an entry of two sizes")
        entries.append(_Entry(named, unpacked, crc, local))
        position += extra + remark
    if position != end:
        raise ValueError("its entries do not fill it")
    return entries


def _in_extra(extra: memoryview, packed: int, unpacked: int, local: int) -> tuple[int, int, int]:
    """Put in what does not fit into 32 bits: it is in the extra field with the number 1, in the order unpacked, packed, local."""
    position = 0
    while position < len(extra):
        number, length = struct.unpack_from("<2H", extra, position)
        if number == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra[: position + 4 + length], position + 4))
            wide = [int(next(values, -1)) if value == _IN_EXTRA else value for value in (unpacked, packed, local)]
            if min(wide) < 0:
                break
            return wide[1], wide[0], wide[2]
        position += 4 + length
    raise ValueError("a number that is not there")


def load_record(data: memoryview, source: str, *, trusted: bool) -> Any:  # noqa: ANN401 -- whatever was saved
    """What a torch.save record holds. Nothing that could run code is unpickled, unless the writer is trusted."""
    if bytes(data[:4]) != _ZIP_MAGIC:
        raise CorruptCheckpointError(
            f"{source} does not hold a torch.save record, which is all that this reader reads; a file in safetensors format is "
            "for DCP's HuggingFaceStorageReader"
        )
    check_archive(data, source=source)
    program = b""
    try:
        if trusted:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        archive = torch._C.PyTorchFileReader(io.BytesIO(data))  # noqa: SLF001 -- torch.load's own
        program = archive.get_record("data.pkl")
        return load_object(archive)
    except RefusedError as error:
        raise not_loadable(
            source, foreign_names(program) or (error.name,) * bool(error.name), reason=str(error)
        ) from None
    except Exception as error:
        reason = " ".join(reason_of(error).split())
        if foreign_names(program, users=True):  # what was called is the user's, and so is what it raised
            raise not_loadable(source, (), reason=reason) from error
        raise CorruptCheckpointError(f"{source} holds a damaged record ({reason})") from error
