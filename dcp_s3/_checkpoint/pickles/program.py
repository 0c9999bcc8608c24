"""Follows a pickle's instructions before it is loaded, with what matters of each value in place of the value.

An allow-list of names bounds what a pickle can call, and not its time: CPython hashes a tuple, as a key of a dict, without a
look at the stack, so that 130,000 levels end the process; and each time anew, so that tuples that share one another take
time that doubles with each level.

Source: Lib/pickletools.py and Modules/_pickle.c (what the instructions do), Objects/tupleobject.c.
"""

from __future__ import annotations

import pickletools
from typing import Final, NamedTuple

from dcp_s3.errors import CorruptCheckpointError

__all__ = ["CALLED", "MOST_LEVELS", "NAMED", "OTHER", "TEXT", "TUPLE", "Program", "UnknownValueError", "Value"]

MOST_LEVELS: Final = 1000
"""Values within one another; as deep as Python's limit of recursion lets pickle write."""
_MOST_REPEATED: Final = 100_000_000
"""Values, counted as often as they are met, in tuples that a pickle fetches from its memo: one second of hashing."""

TEXT, TUPLE, NAMED, CALLED, OTHER, _UNKNOWN = "text", "tuple", "name", "result of a call", "other", "unknown"


class Value(NamedTuple):
    """What is known of a value on the stack, or in the memo, of the unpickler."""

    levels: int
    """Of values within it; 0 for what holds nothing."""
    size: int
    """Of a tuple, or of what was made of one: the values in it, and itself, each counted as often as it is met. 1 for all else,
    as that is not hashed."""
    what: str
    """One of the constants above."""
    name: str = ""
    """Module and name of what was fetched by them, or called."""
    held: tuple[Value, ...] = ()
    """The values of a tuple."""


_NOT_SEEN: Final = Value(0, 1, _UNKNOWN)
_ELSEWHERE: Final = Value(0, 1, OTHER)
_CONSTANTS: Final = {
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE"), Value(0, 1, OTHER)),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"), Value(0, 1, OTHER)),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"), Value(0, 1, TEXT)),
    **dict.fromkeys(("STRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), Value(0, 1, TEXT)),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), Value(1, 1, OTHER)),
    "EMPTY_TUPLE": Value(1, 1, TUPLE),
}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}
_FILLED: Final = {"APPEND": 1, "SETITEM": 2, "BUILD": 1, "APPENDS": None, "SETITEMS": None, "ADDITEMS": None}
"""How many values they put into the one below; ``None``: all down to the mark."""
_MADE: Final = {"LIST": None, "DICT": None, "FROZENSET": None, "OBJ": None, "INST": None, "REDUCE": 2, "NEWOBJ": 2}
_IGNORED: Final = ("PROTO", "FRAME")


class UnknownValueError(Exception):
    """A tuple holds a value that came to the stack before the part of the pickle that was followed."""


class Program:
    """The state of an unpickler that runs a pickle, or some parts of it.

    Args:
        source: What the pickle is, for messages.
        in_parts: Only parts of it are followed, and between them are no tuples but of a few numbers: what the memo holds from
            there counts as one value, and what the stack holds from there is unknown.

    Attributes:
        memoized: Values that MEMOIZE has put into the memo.
        largest: Size of the largest tuple.
    """

    def __init__(self, source: str, *, in_parts: bool = False) -> None:
        self.memoized = 0
        self.largest = 0
        self._source = source
        self._in_parts = in_parts
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
            CorruptCheckpointError: Values are too deep, or repeated too often.
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
            stack.append(Value(0, 1, NAMED, str(argument).replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            self._pop(2)
            self._stack.append(Value(0, 1, NAMED))
        elif name in _TUPLES:
            self._push_tuple(self._pop(_TUPLES[name]))
        elif name in _FILLED:
            items = self._pop(_FILLED[name])
            (filled,) = self._pop(1)
            self._fill(name, filled, items)
        elif name in _MADE:
            items = self._pop(_MADE[name])
            self._push(self._made(items))
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
        size = 1
        for item in items:
            if item.what == _UNKNOWN:
                raise UnknownValueError
            size += item.size
        self.largest = max(self.largest, size)
        self._push(Value(_levels(items), size, TUPLE, held=() if self._in_parts else tuple(items)))

    def _fill(self, name: str, filled: Value, items: list[Value]) -> None:
        self._push(filled._replace(levels=max(filled.levels, _levels(items))))

    def _made(self, items: list[Value]) -> Value:
        # torch.Size is hashed like its tuple
        return Value(_levels(items), sum(item.size for item in items), CALLED, items[0].name if items else "")

    def _push(self, value: Value) -> None:
        if value.levels > MOST_LEVELS:
            raise self._refused(f"with more than {MOST_LEVELS} values within one another")
        self._stack.append(value)

    def _put(self, place: object) -> None:
        assert isinstance(place, int)  # noqa: S101 -- for the type checker
        value = self._stack[-1] if self._stack or not self._in_parts else _NOT_SEEN
        if value.what == _UNKNOWN:
            raise UnknownValueError
        if value.levels or not self._in_parts:
            self._memo[place] = value

    def _get(self, place: object) -> None:
        assert isinstance(place, int)  # noqa: S101
        value = self._memo.get(place, _ELSEWHERE) if self._in_parts else self._memo[place]
        self._stack.append(value)
        self._repeated += value.size
        if self._repeated > _MOST_REPEATED:
            raise self._refused("of tuples that share one another too often")

    def _refused(self, which: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._source} holds a pickle {which}")


def _levels(items: list[Value]) -> int:
    return 1 + max((item.levels for item in items), default=0)
