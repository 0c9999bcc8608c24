"""Unpickling of what anybody may have written: few instructions, few names, and no key that takes long to hash.

A pickle is a program. Python's own advice is to override ``find_class``; that stops calls of foreign functions, but not a
program that makes the unpickler take 32 GiB for its memo (six bytes do), that sets attributes of the classes which it was
allowed to name, or whose keys are tuples of tuples: CPython hashes a tuple without a look at the stack, and each time anew,
so that 130,000 levels end the process, and tuples that share one another take time that doubles with each level.

So the standard library's unpickler in Python runs it, with those instructions replaced that should look at what they are
given. What it may call are *gates*: classes and functions that take only what a writer gives them, and cannot be changed.

Source: https://docs.python.org/3/library/pickle.html#restricting-globals, Lib/pickle.py, Objects/tupleobject.c.
"""

from __future__ import annotations

import functools
import io
import pickle
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dcp_s3._runtime.gc_pause import gc_paused
from dcp_s3.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RefusedError", "Sealed", "StrictUnpickler", "check_record_size", "gate", "load", "reason_of", "shown"]

_INSTRUCTIONS: Final = (
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
)
"""What picklers of protocols 2 to 5 write for what checkpoints hold. Sets are absent: each byte could make one, of 200 bytes."""
_MOST_IN_KEY: Final = 1000
"""Values in one key, however deep."""
_WORK: Final = 4
"""Values that may be hashed in keys, and bytes that may be copied by calls, per byte of the pickle; and ``_LEAST_WORK``."""
_WORK_OF_ITEM: Final = 4
"""Of a list or dict that is copied: each takes some bytes of the pickle, and many more in memory."""
_LEAST_WORK: Final = 10_000
_LEAST_BYTES: Final = 6
"""Of a record, per list, dict, mark or tuple of one, each of which is one byte and takes up to 250 in memory; real ones have 14."""


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
    """The pickle asks for something that is not allowed.

    Attributes:
        name: What it named; empty if it was something else.
    """

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


_Base: Any = pickle._Unpickler  # noqa: SLF001 -- the one in C lets nobody look on


class StrictUnpickler(_Base):  # type: ignore[misc]  # typeshed leaves it out
    """The standard library's unpickler with a part of its instructions.

    Args:
        file: The pickle, and nothing else.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: _Base.dispatch[code] for code in (getattr(pickle, name)[0] for name in _INSTRUCTIONS)
    }

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._file = file
        self._bytes = file.getbuffer().nbytes
        self._work = _WORK * self._bytes + _LEAST_WORK

    def load(self) -> Any:  # noqa: ANN401 -- whatever was pickled
        """Run the pickle to its end, which must be that of the file."""
        # the base class reads through frames, which only say how much to read ahead, in half of its time
        self.read = read = self._file.read
        self.readline = self._file.readline
        self.memo: list[object] = []  # numbered in order, as picklers do
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        runs = {bytes((code,)): self.dispatch.get(code, StrictUnpickler._unknown).__get__(self) for code in range(256)}
        runs[b""] = self._cut_off
        try:
            while True:
                runs[read(1)]()
        except pickle._Stop as stop:  # type: ignore[attr-defined]  # noqa: SLF001 -- how the base class ends
            if self._file.tell() != self._bytes:
                raise EOFError(f"it ends at byte {self._file.tell()}, but {self._bytes} bytes are there") from None
            return stop.value

    def _unknown(self) -> None:
        place = self._file.tell() - 1
        raise RefusedError(f"at byte {place} it has 0x{self._file.getvalue()[place]:02x}, which no writer uses")

    def _cut_off(self) -> None:
        raise EOFError("it is cut off")

    def may_call(self, called: object) -> bool:
        """Whether this may be called, or asked for an instance."""
        return type(called) is Sealed

    def check_call(self, called: object, arguments: object) -> None:
        """Refuse a call of what may not be called, or one of many that copy the same again."""
        if type(arguments) is not tuple or not self.may_call(called):
            raise RefusedError("it makes a call that no writer makes")
        for item in arguments:
            if isinstance(item, (str, bytes, bytearray, tuple, list, dict)):
                self._spend(len(item) * (_WORK_OF_ITEM if isinstance(item, (list, dict)) else 1))

    def check_key(self, key: object) -> None:
        """Refuse a key that takes long to hash."""
        if not isinstance(key, (tuple, frozenset)):
            return
        count, holders = 0, [key]
        while holders:
            held = holders.pop()
            count += 1 + len(held)
            if count > _MOST_IN_KEY:
                raise RefusedError(f"a key of a dict holds more than {_MOST_IN_KEY} values")
            holders.extend(item for item in held if isinstance(item, (tuple, frozenset)))
        self._spend(count)

    def _spend(self, values: int) -> None:
        self._work -= values
        if self._work < 0:
            raise RefusedError("it hashes or copies the same values again and again")

    def _frame(self) -> None:
        if int.from_bytes(self.read(8), "little") > self._bytes - self._file.tell():
            raise EOFError("a frame reaches beyond its end")

    def _memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def _put(self, place: int) -> None:
        # in C, where DCP's planner unpickles objects once more, the memo is an array as long as the number says
        if place > len(self.memo):
            raise RefusedError("its memo has gaps")
        self.memo[place : place + 1] = self.stack[-1:]

    def _binput(self) -> None:
        self._put(self.read(1)[0])

    def _long_binput(self) -> None:
        self._put(int.from_bytes(self.read(4), "little"))

    def _binget(self) -> None:
        self.append(self.memo[self.read(1)[0]])

    def _long_binget(self) -> None:
        self.append(self.memo[int.from_bytes(self.read(4), "little")])

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key], [value])

    def _setitems(self) -> None:
        items = self.pop_mark()
        self._set(items[::2], items[1::2])

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise RefusedError("it sets items of what is no dict")
        for key in keys:
            if type(key) is not str:
                self.check_key(key)
        if type(target) is dict:
            target.update(zip(keys, values, strict=True))
        else:
            for key, value in zip(keys, values, strict=True):
                target[key] = value

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        called = self.stack[-1]
        self.check_call(called, arguments)
        self.stack[-1] = called(*arguments)

    def _newobj(self) -> None:
        arguments = self.stack.pop()
        made = self.stack[-1]
        self.check_call(made, arguments)
        if not isinstance(made, type):
            raise RefusedError("it asks for an instance of what is no class")
        self.stack[-1] = made.__new__(made, *arguments)

    dispatch |= {
        pickle.FRAME[0]: _frame,
        pickle.MEMOIZE[0]: _memoize,
        pickle.BINPUT[0]: _binput,
        pickle.LONG_BINPUT[0]: _long_binput,
        pickle.BINGET[0]: _binget,
        pickle.LONG_BINGET[0]: _long_binget,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _newobj,
    }


class _RecordUnpickler(StrictUnpickler):
    def __init__(self, data: bytes, find: Callable[[str, str], object]) -> None:
        super().__init__(io.BytesIO(data))
        self._find = find

    def find_class(self, module: str, name: str) -> object:
        found = self._find(module, name)
        if found is None:
            raise RefusedError("it names what is not allowed", f"{module}.{name}"[:200])
        return found


def check_record_size(size: int, most: int, *, source: str) -> None:
    """Refuse a record that would take too much memory; before it is read, where its size is known.

    Args:
        size: Of the record, bytes.
        most: ``S3Config.max_record_bytes``.
        source: What it is, for the message.

    Raises:
        CorruptCheckpointError: It is larger.
    """
    if size > most:
        raise CorruptCheckpointError(
            f"{source} has {size} bytes, more than max_record_bytes={most}: if it is what it should be, "
            "raise S3Config.max_record_bytes (DCP_S3_MAX_RECORD_BYTES)"
        )


def load(data: bytes, find: Callable[[str, str], object], *, source: str) -> object:
    """Unpickle a commit record.

    Args:
        data: The pickle.
        find: Gives the gate or the immutable value that ``(module, name)`` stands for, ``None`` if it is not allowed.
        source: What the bytes were read from, for the message.

    Raises:
        CorruptCheckpointError: The pickle is damaged, names or does something that no writer does, or would fill memory.
    """
    if sum(map(data.count, (b"}", b"]", b"(", b"\x85"))) > len(data) // _LEAST_BYTES + 1000:
        raise CorruptCheckpointError(f"{source} is damaged: it would take many times its size in memory")
    try:
        with gc_paused():
            return _RecordUnpickler(data, find).load()
    except RefusedError as error:
        if error.name:
            raise CorruptCheckpointError(
                f"{source} names {error.name!r}, which no checkpoint's metadata needs: it is refused, and nothing of it was run"
            ) from None
        raise CorruptCheckpointError(f"{source} is damaged, or not a checkpoint's metadata: {error}") from None
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
