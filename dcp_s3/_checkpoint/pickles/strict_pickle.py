"""Unpickling of what anybody may have written: an allow-list of instructions and of names, and tuples that are soon hashed.

A pickle is a program. Python's own advice is to override ``find_class``; that stops calls of foreign functions, but not
a program that makes the unpickler take 32 GiB for its memo (six bytes do), nor one that sets attributes on the classes
which it was allowed to name. So its instructions are checked before it runs, with a regular expression, for a record has
millions; and what it may name are *gates*: classes that make an instance of the real class, and that refuse to be changed.

CPython hashes a tuple, as a key of a dict, without a look at the stack, and each time anew: 130,000 levels end the process, and
tuples that share one another take time that doubles with each level. So behind each instruction that makes a tuple another one
is put, BINPERSID, by which the unpickler in C hands its value to a function: it counts what the tuple holds.

Source: https://docs.python.org/3/library/pickle.html#restricting-globals, Lib/pickletools.py (the instructions),
Objects/tupleobject.c.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
import pickletools
import re
from typing import TYPE_CHECKING, Any, Final

from dcp_s3._runtime.gc_pause import gc_paused
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RefusedError", "Sealed", "StrictUnpickler", "check_depth", "gate", "load", "reason_of", "shown"]

_MOST_LEVELS: Final = 1000
"""Values within one another; as deep as Python's limit of recursion lets pickle write."""
_MOST_IN_TUPLE: Final = 10_000
"""Values in a tuple and in those that it holds, counted as often as they are met."""
_LEAST_PER_CONTAINER: Final = 4
"""Bytes of a record for each list and dict in it, of 80 bytes and more in memory; records have about 30."""


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


class RefusedError(pickle.UnpicklingError):
    """The pickle may be whole, and is made in a way that is not allowed."""


class _ForbiddenNameError(RefusedError):
    pass


def _counted(lead: bytes, width: int = 1) -> bytes:
    # one alternative per length: a regular expression has no other way to skip a counted string
    return b"(?:" + b"|".join(re.escape(lead + n.to_bytes(width, "little")) + b".{%d}" % n for n in range(256)) + b")"


_NUMBER: Final = rb"(?:K.|M..|J.{4}|\x8a\x05.{5})"
# Ordered by how often they occur. Absent on purpose: LONG_BINPUT and PUT with big numbers (the memo is an array as long as the
# number says), EXT (looks names up in a cache, past find_class), sets (200 bytes of memory by one), DUP, POP, out-of-band buffers.
_INSTRUCTION: Final = b"|".join(
    (
        rb"j.{4}|h.",  # LONG_BINGET, BINGET
        # MEMOIZE ) ( } ] NEWOBJ SETITEM(S) BUILD REDUCE None True False APPEND(S) STACK_GLOBAL
        rb"[\x94)(}\]\x81usbRN\x88\x89ea\x93]",
        # tuples of some numbers, and of one of those, which stand in torch.Size: nothing in them can come from elsewhere
        rb"(?:%b(?:\x85|%b(?:\x86|%b\x87)))(?:\x94?\x85)?" % ((_NUMBER,) * 3),
        _NUMBER,  # BININT1, BININT2, BININT, LONG1
        _counted(b"\x8c"),  # SHORT_BINUNICODE
        rb"C\x04.{4}",  # SHORT_BINBYTES of one CRC
        _counted(b"X", 4),  # BINUNICODE
        rb"q.",  # BINPUT
        rb"G.{8}",  # BINFLOAT
        _counted(b"\x8a"),  # LONG1
        _counted(b"C"),  # SHORT_BINBYTES
        rb"c[^\n]*\n[^\n]*\n",  # GLOBAL
        # What protocols 0 and 1 write. No writer uses them; they pass so that the message can name what is named.
        rb"i[^\n]*\n[^\n]*\n|[SV][^\n]*\n|p[0-9]{1,3}\n",  # INST, STRING, UNICODE, PUT
        rb"\A\x80[\x02-\x05]",  # PROTO
    )
)
_RUN: Final = re.compile(b"(?:" + _INSTRUCTION + b")*+", re.DOTALL)
_TUPLES: Final = (b"t", b"\x85", b"\x86", b"\x87")
_LONG: Final = {b"X": 4, b"B": 4, b"\x8d": 8, b"\x8e": 8}
"""BINUNICODE, BINBYTES, BINUNICODE8, BINBYTES8: size of the length that follows, bytes."""
_LONG_BINPUT, _BINPERSID, _FRAME, _STOP = b"r", b"Q", b"\x95", b"."
_OPCODES: Final = {opcode.code for opcode in pickletools.opcodes}
_NEXT_BUFFER: Final = b"\x97"
"""Pushes a value that no pickle that is let through can push."""


def _looked_at(pickled: bytes) -> bytes:
    """Check the instructions, and put the one that hands it over behind each tuple."""
    parts: list[bytes] = []
    start = position = 0
    while True:
        match = _RUN.match(pickled, position)
        position = match.end() if match else position
        code = pickled[position : position + 1]
        if code in _TUPLES:
            parts += pickled[start : position + 1], _BINPERSID
            start = position = position + 1
        elif code == _BINPERSID:
            parts += pickled[start:position], _NEXT_BUFFER + b"\x86" + _BINPERSID
            start = position = position + 1
        elif code == _FRAME:  # how long it is is no longer right
            parts.append(pickled[start:position])
            start = position = position + 9
            if int.from_bytes(pickled[start - 8 : start], "little") > len(pickled) - start:
                raise EOFError(f"a frame ends beyond byte {len(pickled)}")
        elif code == _LONG_BINPUT:
            if int.from_bytes(pickled[position + 1 : position + 5], "little") > position:
                raise RefusedError("its memo has gaps")
            position += 5
        elif width := _LONG.get(code):
            start_of_text = position + 1 + width
            position = start_of_text + int.from_bytes(pickled[position + 1 : start_of_text], "little")
        else:
            break
        if position >= len(pickled):
            raise EOFError(f"its end lies beyond byte {len(pickled)}")
    if not code:
        raise EOFError(f"cut off at byte {position}")
    if code != _STOP:
        kind = RefusedError if code.decode("latin1") in _OPCODES else ValueError
        raise kind(f"at byte {position} the pickle has 0x{code.hex()}, cut off or an instruction that is not allowed")
    if position != len(pickled) - 1:
        raise ValueError(f"it ends at byte {position + 1}, but {len(pickled)} bytes are there")
    parts.append(pickled[start:])
    # in one frame, or the unpickler asks for each byte
    return b"".join((_FRAME, sum(map(len, parts)).to_bytes(8, "little"), *parts))


class StrictUnpickler(pickle.Unpickler):
    """Runs a pickle of which the instructions are allowed, and the tuples small; subclasses say what may be named.

    Args:
        pickled: The pickle.

    Raises:
        RefusedError: An instruction is not allowed.
        EOFError: It is cut off.
        ValueError: It is damaged.
    """

    def __init__(self, pickled: bytes) -> None:
        self._storage = object()
        super().__init__(io.BytesIO(_looked_at(pickled)), fix_imports=False, buffers=itertools.repeat(self._storage))
        self._nested: dict[int, tuple[int, object]] = {}  # sizes of tuples that hold tuples, which are kept alive

    def persistent_load(self, made: tuple[object, ...]) -> object:
        """Called with each tuple when it is made, and with what stands for a storage."""
        if made and made[-1] is self._storage:
            return self.storage_of(made[0])
        size = len(made)
        if tuple in map(type, made):
            inner = (item for item in made if type(item) is tuple)
            size += sum(self._nested.get(id(item), (len(item),))[0] for item in inner)
            self._nested[id(made)] = size, made
        if size > _MOST_IN_TUPLE:
            raise RefusedError(f"it has tuples that hold or share more than {_MOST_IN_TUPLE:,} values")
        return made

    def storage_of(self, named: object) -> object:
        """What the pickle takes from elsewhere by this name."""
        raise RefusedError("it takes a value from elsewhere")


class _RecordUnpickler(StrictUnpickler):
    def __init__(self, pickled: bytes, find: Callable[[str, str], object]) -> None:
        super().__init__(pickled)
        self._find = find

    def find_class(self, module: str, name: str) -> object:
        found = self._find(module, name)
        if found is None:
            raise _ForbiddenNameError(f"{module}.{name}"[:200])
        return found


def load(data: bytes, find: Callable[[str, str], object], *, source: str) -> object:
    """Unpickle a commit record.

    Args:
        data: The pickle.
        find: Gives the gate or the immutable value that ``(module, name)`` stands for, ``None`` if it is not allowed.
        source: What the bytes were read from, for the message.

    Raises:
        CorruptCheckpointError: The pickle is damaged, names something that is not allowed, or would be many times as large.
    """
    try:
        if data.count(b"}") + data.count(b"]") > len(data) // _LEAST_PER_CONTAINER + 1000:
            raise RefusedError("it would be many times as large in memory")
        with gc_paused():
            return _RecordUnpickler(data, find).load()
    except _ForbiddenNameError as error:
        raise CorruptCheckpointError(
            f"{source} names {str(error)!r}, which no checkpoint's metadata needs: it is refused, and nothing of it was run"
        ) from None
    except RefusedError as error:
        raise CorruptCheckpointError(f"{source} is damaged, or not a checkpoint's metadata: {error}") from None
    except Exception as error:  # noqa: BLE001 -- damaged pickles raise errors of every class
        raise CorruptCheckpointError(f"{source} is damaged: {reason_of(error)}") from None


def check_depth(value: object) -> None:
    """Raise a :class:`RefusedError` if there are too many values within one another to copy, compare or print them."""
    seen: set[int] = set()
    level: list[Any] = [[value]]
    for _ in range(_MOST_LEVELS):
        held = itertools.chain.from_iterable(
            holder.values() if isinstance(holder, dict) else holder for holder in level
        )
        holders = {id(item): item for item in held if isinstance(item, (dict, list, tuple, set))}
        level = [item for place, item in holders.items() if place not in seen]
        if not level:
            return
        seen.update(holders)
    raise RefusedError(f"it has more than {_MOST_LEVELS} values within one another")


def shown(value: object) -> str:
    """A value for a message. What holds others is not printed: lists that share one another print for ever."""
    if type(value) is str:
        return repr(value[:80])
    return repr(value) if type(value) in (bool, int, type(None)) else f"<{type(value).__name__}>"


def reason_of(error: Exception) -> str:
    """An error of the unpickler or of a gate for a message. A KeyError holds the key, whatever it is."""
    text = str(error.args[0])[:200] if error.args and type(error.args[0]) is str else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
