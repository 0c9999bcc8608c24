"""Follows a pickle's instructions before it is loaded, with what matters of each value in place of the value.

Neither the strict loading of a commit record nor torch's weights-only loading of an object calls anything but allowed
names. What both leave unbounded, in time or memory that some hundred bytes can ask for:

* A tuple that is the key of a dict is hashed by CPython without a look at the stack, 130,000 levels end the process, and
  each time anew: tuples that share one another take time that doubles with each level.
* What torch is asked to call, and is not allowed, it names in a text that prints it; lists that share one another print in
  time and memory that double with each level: 208 bytes take 5 s.
* ``bytearray(n)``, and tensors and storages of n elements, are allowed, and take the memory at once.

Source: Lib/pickletools.py (what the instructions do), Objects/tupleobject.c, torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import pickletools
import re
from typing import Final, NamedTuple

from dcp_s3.errors import CorruptCheckpointError

__all__ = ["MOST_LEVELS", "Program", "UnknownValueError", "check_object_program"]

MOST_LEVELS: Final = 1000
"""Values within one another; as deep as Python's limit of recursion lets pickle write."""
_MOST_REPEATED: Final = 100_000_000
"""Values, counted as often as they are met, in tuples that a pickle fetches from its memo: one second of hashing."""
_BYTEARRAY: Final = re.compile(r"(?:builtins|__builtin__)\.bytearray")
_MEMORY: Final = re.compile(r"torch(?:\.cuda)?(?:\.sparse)?\.\w*Tensor|torch\.storage\.(?:Unt|T)ypedStorage")
"""Classes whose instances are as large as a number says. ``torch.save`` names them and never calls them."""


class Value(NamedTuple):
    """What is known of a value on the stack, or in the memo, of the unpickler."""

    levels: int
    """Of values within it; 0 for what holds nothing."""
    size: int
    """For a tuple the values in it, and itself, each counted as often as it is met; 1 for all else, as that is not hashed."""
    what: str
    """One of the constants below."""


_TEXT, _TEXTS, _TUPLE, _OTHER, _UNKNOWN = "text", "tuple of texts", "tuple", "other", "unknown"
_NAMED, _ENCODER, _OF_BYTES, _OF_SIZE = "named", "encoder", "bytearray", "tensor or storage"
_NOT_SEEN: Final = Value(0, 1, _UNKNOWN)
_CALLABLE: Final = (_NAMED, _ENCODER, _OF_BYTES, _OF_SIZE, _UNKNOWN)
_CONSTANTS: Final = {
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE"), Value(0, 1, _OTHER)),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"), Value(0, 1, _OTHER)),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"), Value(0, 1, _TEXT)),
    **dict.fromkeys(("STRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), Value(0, 1, _TEXT)),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), Value(1, 1, _OTHER)),
    "EMPTY_TUPLE": Value(1, 1, _TEXTS),
}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}
_FILLED: Final = {"APPEND": 1, "SETITEM": 2, "BUILD": 1, "APPENDS": None, "SETITEMS": None, "ADDITEMS": None}
"""How many values they put into the one below; ``None``: all down to the mark."""
_MADE: Final = {"REDUCE": 2, "NEWOBJ": 2, "LIST": None, "DICT": None, "FROZENSET": None, "OBJ": None, "INST": None}
_IGNORED: Final = ("PROTO", "FRAME")


class UnknownValueError(Exception):
    """A tuple holds a value that came to the stack before the part of the pickle that was followed."""


class Program:
    """The state of an unpickler that runs a pickle, or some parts of it.

    Args:
        source: What the pickle is, for messages.
        in_parts: Only parts of it are followed, and between them are no tuples but of a few numbers: what the memo holds from
            there counts as one value, and what the stack holds from there is unknown.
        weights_only: It is an object's, which torch loads.

    Attributes:
        memoized: Values that MEMOIZE has put into the memo.
        largest: Size of the largest tuple.
    """

    def __init__(self, source: str, *, in_parts: bool = False, weights_only: bool = False) -> None:
        self.memoized = 0
        self.largest = 0
        self._source = source
        self._in_parts = in_parts
        self._weights_only = weights_only
        self._stack: list[Value] = []
        self._below: list[list[Value]] = []
        self._memo: dict[int, Value] = {}
        self._repeated = 0

    def follow(self, part: bytes, *, adjoins: bool = False) -> int:
        """Run a pickle, or a part of it that begins at an instruction, up to its end or to what would end its loading.

        Args:
            part: The pickle, or the part.
            adjoins: It begins where the last part ended; otherwise what was on the stack is forgotten.

        Returns:
            Offset of the last instruction that was reached.

        Raises:
            CorruptCheckpointError: Values are too deep, or repeated too often; or the object calls what is no name, calls for
                memory by a number, or names a storage by what is no constant.
            UnknownValueError: See there; only with ``in_parts``.
        """
        if not adjoins:
            self._stack, self._below = [], []
        position = 0
        try:
            for instruction, argument, offset in pickletools.genops(part):
                position = offset or 0
                if not self._step(instruction.name, argument):
                    break
        except (IndexError, KeyError, ValueError):
            pass
        return position

    def _step(self, name: str, argument: object) -> bool:
        stack = self._stack
        if (constant := _CONSTANTS.get(name)) is not None:
            stack.append(constant)
        elif name in ("BINGET", "LONG_BINGET"):
            self._get(argument)
        elif name == "MEMOIZE":
            self._put(self.memoized if self._in_parts else len(self._memo))
            self.memoized += 1
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._put(argument)
        elif name == "MARK":
            self._below.append(stack)
            self._stack = []
        elif name == "GLOBAL":
            stack.append(Value(0, 1, _what_is_named(str(argument).replace(" ", "."))))
        elif name == "STACK_GLOBAL":
            self._pop(2)
            self._stack.append(Value(0, 1, _NAMED))
        elif name in _TUPLES:
            self._push_tuple(self._pop(_TUPLES[name]))
        elif name in _FILLED:
            items = self._pop(_FILLED[name])
            self._check_items(items, len(items))
            (filled,) = self._pop(1)
            self._push(max(filled.levels, _levels(items)), filled.size, filled.what)
        elif name in _MADE:
            if self._weights_only:
                if _MADE[name] is None:
                    return False
                self._check_call(*self._stack[-2:])
            items = self._pop(_MADE[name])
            what = _TEXT if items and items[0].what == _ENCODER else _OTHER  # how protocol 2 writes bytes
            self._push(_levels(items), sum(item.size for item in items), what)  # torch.Size is hashed like its tuple
        elif name == "BINPERSID":
            (storage,) = self._pop(1)
            if storage.levels > 1:
                raise self._refused("whose storage is named by what is no constant: no torch.save wrote it")
            stack.append(Value(0, 1, _OTHER))
        else:
            return name in _IGNORED
        return True

    def _pop(self, count: int | None) -> list[Value]:
        """The topmost values, or all down to the mark, in their order."""
        stack = self._stack
        if count is None:
            if self._below:
                self._stack = self._below.pop()
            elif self._in_parts:
                self._stack = []
                stack.insert(0, _NOT_SEEN)
            else:
                raise IndexError
            return stack
        if len(stack) < count:
            if not self._in_parts:
                raise IndexError
            stack[:0] = [_NOT_SEEN] * (count - len(stack))
        items = stack[-count:]
        del stack[-count:]
        return items

    def _push_tuple(self, items: list[Value]) -> None:
        kinds = {item.what for item in items}
        if _UNKNOWN in kinds:
            raise UnknownValueError
        self._check_items(items, 1)
        size = 1 + sum(item.size for item in items)
        self.largest = max(self.largest, size)
        self._push(_levels(items), size, _TEXTS if kinds <= {_TEXT} else _TUPLE)

    def _check_items(self, items: list[Value], named_from: int) -> None:
        """``torch._tensor._rebuild_from_type_v2`` calls the first value of a tuple, or list, with its third one."""
        if self._weights_only and any(
            item.what == _OF_BYTES or (item.what == _OF_SIZE and place < named_from) for place, item in enumerate(items)
        ):
            raise self._refused("that hands on what makes as much memory as a number says: no torch.save wrote it")

    def _push(self, levels: int, size: int, what: str) -> None:
        if levels > MOST_LEVELS:
            raise self._refused(f"with more than {MOST_LEVELS} values within one another")
        self._stack.append(Value(levels, size, what))

    def _put(self, place: object) -> None:
        assert isinstance(place, int)  # noqa: S101 -- for the type checker
        value = self._stack[-1] if self._stack or not self._in_parts else _NOT_SEEN
        if value.what == _UNKNOWN:
            raise UnknownValueError
        if value.levels or not self._in_parts:
            self._memo[place] = value

    def _get(self, place: object) -> None:
        assert isinstance(place, int)  # noqa: S101
        value = self._memo.get(place, Value(0, 1, _OTHER)) if self._in_parts else self._memo[place]
        self._stack.append(value)
        self._repeated += value.size
        if self._repeated > _MOST_REPEATED:
            raise self._refused("of tuples that share one another too often")

    def _check_call(self, called: Value, arguments: Value) -> None:
        if called.what not in _CALLABLE:
            raise self._refused("that calls what is no name: no torch.save wrote it")
        if arguments.what not in (_TUPLE, _TEXTS):
            raise self._refused("that calls with what is no tuple: no torch.save wrote it")
        if called.what == _OF_SIZE or (called.what == _OF_BYTES and arguments.what != _TEXTS):
            raise self._refused("that asks for as much memory as a number says: no torch.save wrote it")

    def _refused(self, which: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._source} holds a pickle {which}")


def _levels(items: list[Value]) -> int:
    return 1 + max((item.levels for item in items), default=0)


def _what_is_named(name: str) -> str:
    if name == "_codecs.encode":
        return _ENCODER
    if _BYTEARRAY.fullmatch(name):
        return _OF_BYTES
    return _OF_SIZE if _MEMORY.fullmatch(name) else _NAMED


def check_object_program(pickle: bytes, source: str) -> None:
    """Check an object's pickle before torch's weights-only loading runs it. Where it is no pickle the loading itself says so.

    Args:
        pickle: ``data.pkl`` of the ``torch.save`` record.
        source: What it is, for the message.

    Raises:
        CorruptCheckpointError: See :meth:`Program.follow`.
    """
    Program(source, weights_only=True).follow(pickle)
