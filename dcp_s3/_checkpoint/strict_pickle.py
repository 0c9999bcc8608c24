"""Unpickling of records that anybody may have written: an allow-list of instructions and of names, in bounded memory.

A pickle is a program. Python's own advice is to override ``find_class``; that stops calls of foreign functions, but not
a program that makes the unpickler take 32 GiB for its memo (six bytes do), nor one that sets attributes on the classes
which it was allowed to name. So, before it runs, the program is read once by a regular expression that knows the
instructions which picklers of protocol 4 and 5 emit for a checkpoint's metadata; and what it may name are *gates*:
classes that make an instance of the real class, and that refuse to be changed. The same reading shows that no tuple
holds more than some names and numbers; where it does not show it, each instruction is followed (:mod:`.program`).

Source: https://docs.python.org/3/library/pickle.html#restricting-globals and Lib/pickletools.py (the instructions).
"""

from __future__ import annotations

import functools
import io
import pickle
import re
from typing import TYPE_CHECKING

from dcp_s3._checkpoint.collector import gc_paused
from dcp_s3._checkpoint.program import Program, UnknownValueError
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Sealed", "gate", "load", "reason_of", "shown"]


class Sealed(type):
    """Metaclass of what a pickle may name: its classes cannot be changed, neither by a BUILD instruction."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__} must not be changed")


def gate(real: type) -> type:
    """A class whose instances are new, empty instances of ``real``; arguments are ignored, ``__init__`` is not run.

    Args:
        real: A class without ``__new__`` of its own and with an ``__init__``: every dataclass is one.
    """
    # object.__new__ ignores further arguments for such a class; no Python frame per instance
    return Sealed(
        real.__name__, (), {"__slots__": (), "__new__": staticmethod(functools.partial(object.__new__, real))}
    )


def _counted(lead: bytes, byte: bytes = b".") -> bytes:
    # one alternative per length: a regular expression has no other way to skip a counted string
    return lead + b"(?:" + b"|".join(re.escape(bytes([n])) + byte + b"{%d}" % n for n in range(256)) + b")"


# Ordered by how often they occur. Absent on purpose: LONG_BINPUT and PUT with big numbers (the memo is an array as long
# as the number says), EXT (looks names up in a cache, past find_class), DUP, POP, persistent ids, out-of-band buffers.
_WITH_ARGUMENT = b"|".join(
    (
        rb"j.{4}",  # LONG_BINGET
        rb"[hK].",  # BINGET, BININT1
        rb"M..",  # BININT2
        rb"J.{4}",  # BININT
        _counted(rb"\x8c"),  # SHORT_BINUNICODE
        rb"C\x04.{4}",  # SHORT_BINBYTES of one CRC
        rb"\x95.{8}",  # FRAME
        _counted(rb"\x8a"),  # LONG1
        _counted(rb"C"),  # SHORT_BINBYTES
        rb"G.{8}",  # BINFLOAT
        # What protocols 0 to 3 write. No stock writer uses them; they pass so that the message can name what is named.
        rb"c[^\n]*\n[^\n]*\n",  # GLOBAL
        rb"i[^\n]*\n[^\n]*\n",  # INST
        rb"[SV][^\n]*\n",  # STRING, UNICODE
        rb"q.|p[0-9]{1,3}\n",  # BINPUT, PUT
    )
)
# MEMOIZE ) ( } ] NEWOBJ SETITEM(S) BUILD TUPLE1-3 TUPLE REDUCE None True False APPEND(S) STACK_GLOBAL sets LIST DICT OBJ
_PLAIN = rb"[\x94)(}\]\x81usb\x85\x86\x87tRN\x88\x89ea\x93\x8f\x90\x91ldo]"
_HEAD = re.compile(rb"(?:\x80[\x02-\x05])?" + _PLAIN + rb"*+", re.DOTALL)
_BODY = re.compile(rb"(?:(?:" + _WITH_ARGUMENT + rb")" + _PLAIN + rb"*+)*+", re.DOTALL)
_PLAIN_RUN = re.compile(_PLAIN + rb"*+")
_LONG = {b"X": 4, b"B": 4, b"\x8d": 8, b"\x8e": 8}
"""BINUNICODE, BINBYTES, BINUNICODE8, BINBYTES8: size of the length that follows, bytes."""
_STOP = b"."


def _check_instructions(data: bytes, source: str) -> None:
    """Raise unless ``data`` is, to its last byte, a sequence of the instructions above."""
    position = _end_of(_HEAD, data, 0)
    while True:
        position = _end_of(_BODY, data, position)
        instruction = data[position : position + 1]
        width = _LONG.get(instruction)
        if width is None:
            break
        start = position + 1 + width
        position = start + int.from_bytes(data[position + 1 : start], "little")
        if position >= len(data):
            raise CorruptCheckpointError(f"{source} is cut off: its end lies beyond byte {len(data)}")
        position = _end_of(_PLAIN_RUN, data, position)
    if instruction == _STOP and position == len(data) - 1:
        return
    if not instruction:
        raise CorruptCheckpointError(f"{source} is cut off at byte {position}")
    if instruction == _STOP:
        raise CorruptCheckpointError(f"{source} ends at byte {position + 1}, but {len(data)} bytes are there")
    raise CorruptCheckpointError(
        f"{source} is damaged, or not a checkpoint's metadata: at byte {position} the pickle has 0x{instruction.hex()}, which "
        "is cut off or an instruction that no checkpoint writer uses"
    )


def _end_of(pattern: re.Pattern[bytes], data: bytes, start: int) -> int:
    match = pattern.match(data, start)
    return match.end() if match else start


# What the picklers of protocol 4 and 5 write, but for tuples other than those of a few numbers, which stand in torch.Size:
# literally, so that nothing in them can come from the memo. A MEMOIZE only behind what has just been made and is no other
# tuple: so no other one comes to the memo, but behind the instruction that made it.
def _step(byte: bytes) -> bytes:
    """One instruction, or some that often come together; ``byte``: what its argument may be made of."""
    numbers = [lead + byte + b"{%d}" % size for lead, size in ((b"K", 1), (b"M", 2), (b"J", 4), (b"\\x8a\\x05", 5))]
    number = b"(?:" + b"|".join(numbers) + b")"
    in_size = rb"(?:\x94?\x85\x94?R)?"
    behind = rb"(?:\x85%b|%b(?:\x86%b|%b\x87%b))?\x94?" % (in_size, number, in_size, number, in_size)
    return b"|".join(
        (
            rb"j%b{4}|h%b" % (byte, byte),
            rb"\)\x81\x94}\x94\(",
            *(lead + behind for lead in numbers),
            rb"[usbeaN\x88\x89]++",
            rb"[}\]\x81R\x93]\x94?",
            rb"C\x04%b{4}\x94?" % byte,
            b"(?:" + _counted(rb"\x8c", byte) + rb")\x94?",
            rb"\)(?:\x85\x94?R)?\x94?",
            rb"\((?:" + number + rb"{4,16}t" + in_size + rb"\x94?)?",
            b"(?:" + _counted(b"C", byte) + rb")\x94?",
            _counted(rb"\x8a", byte),
            rb"[\x95G]%b{8}" % byte,
        )
    )


_RUN = re.compile(rb"(?:((?:%b){32}+))*+(?:%b)*+" % ((_step(rb"[^\x94]"),) * 2), re.DOTALL)
"""Without a MEMOIZE in an argument, so that counting bytes counts those; its group is the last 32 of them."""
_WITH_ANY_ARGUMENT = re.compile(
    rb"([hK].|M..|[jJ].{4}|[\x95G].{8}|%b)|(%b|%b)\x94?" % tuple(map(_counted, (rb"\x8a", rb"\x8c", b"C"))), re.DOTALL
)
_TUPLE = re.compile(rb"[t\x85\x86\x87]\x94?")
_MOST_IN_TUPLE = 66  # torch.Size of 64 numbers
"""Values in a tuple that is only looked at where it is made, and may be hashed as often as an instruction says so."""


def _are_tuples_small(data: bytes, source: str) -> bool:
    """Whether no tuple can hold more than some values; without that they may, and the instructions may not be right."""
    program = Program(source, in_parts=True)
    position = followed = start = 2 if data[:1] == b"\x80" else 0
    no_memoize = 0  # bytes that look like one, from where it was followed to the start of what is followed next
    since_start = 0
    while True:
        match = _RUN.match(data, position)
        assert match  # noqa: S101 -- it matches nothing, too
        if match.start(1) >= 0:
            start = match.start(1)
            no_memoize, since_start = no_memoize + since_start, 0
        position = match.end()
        instruction = data[position : position + 1]
        if made := _TUPLE.match(data, position):
            program.memoized += data.count(b"\x94", followed, start) - no_memoize
            try:
                reached = program.follow(data[start : made.end()], adjoins=start == followed)
            except UnknownValueError:
                return False
            position = followed = made.end()
            if program.largest > _MOST_IN_TUPLE or start + reached != position - 1:
                return False
            start, no_memoize, since_start = position, 0, 0
        elif one := _WITH_ANY_ARGUMENT.match(data, position):
            since_start += data.count(b"\x94", position + 1, one.end(one.lastindex or 0))
            position = one.end()
        elif width := _LONG.get(instruction):
            text = position + 1 + width
            position = min(text + int.from_bytes(data[position + 1 : text], "little"), len(data))
            since_start += data.count(b"\x94", text - width, position)
            position += data[position : position + 1] == b"\x94"
        else:
            return instruction == _STOP and position == len(data) - 1


class _Forbidden(pickle.UnpicklingError):
    pass


class _StrictUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, find: Callable[[str, str], object]) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False)
        self._find = find

    def find_class(self, module: str, name: str) -> object:
        found = self._find(module, name)
        if found is None:
            raise _Forbidden(f"{module}.{name}"[:200])
        return found


def load(data: bytes, find: Callable[[str, str], object], *, source: str) -> object:
    """Unpickle ``data``.

    Args:
        data: The pickle.
        find: Gives the gate or the immutable value that ``(module, name)`` stands for, ``None`` if it is not allowed.
        source: What the bytes were read from, for the message.

    Raises:
        CorruptCheckpointError: The pickle is damaged, or names something that is not allowed.
    """
    if not _are_tuples_small(data, source):
        _check_instructions(data, source)
        Program(source).follow(data)
    try:
        with gc_paused():
            return _StrictUnpickler(data, find).load()
    except _Forbidden as error:
        raise CorruptCheckpointError(
            f"{source} names {str(error)!r}, which no checkpoint's metadata needs: it is refused, and nothing of it was run"
        ) from None
    except Exception as error:  # noqa: BLE001 -- damaged pickles raise errors of every class
        raise CorruptCheckpointError(f"{source} is damaged: {reason_of(error)}") from None


def shown(value: object) -> str:
    """A value for a message. What holds others is not printed: lists that share one another print for ever."""
    if type(value) is str:
        return repr(value[:80])
    return repr(value) if type(value) in (bool, int, type(None)) else f"<{type(value).__name__}>"


def reason_of(error: Exception) -> str:
    """An error of the unpickler or of a gate for a message. A KeyError holds the key, whatever it is."""
    text = str(error.args[0])[:200] if error.args and type(error.args[0]) is str else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
