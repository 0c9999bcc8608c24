"""Reads the pickle of a ``torch.save`` record before torch's weights-only loading runs it, for what that leaves unbounded.

That loading calls nothing but allowed names. But what else it was asked to call it names in a text that prints it, and a
list of lists that share one another prints in time and memory that double with each level: 208 bytes take 5 s. And a
tuple of tuples that is the key of a dict is hashed without a look at the stack: 130,000 levels end the process; and each
time anew, so that tuples that share one another take time that doubles with each level, too.

Source: torch/_weights_only_unpickler.py (the instructions that it knows) and Lib/pickletools.py (what they do).
"""

from __future__ import annotations

import pickletools
from typing import Final

from dcp_s3.errors import CorruptCheckpointError

__all__ = ["check_program"]

_MOST_LEVELS: Final = 1000
"""Tuples within one another; as many as Python's own functions may be."""
_MOST_REPEATED: Final = 100_000_000
"""Values, counted as often as they are met, in what a pickle fetches from its memo: one second of hashing."""
_NAME, _CONSTANT, _OTHER = -1, 0, 1
"""Kinds of values; of tuples their levels, and one that holds nothing but names and constants has 1."""
Kind = tuple[int, int]
"""Kind of a value, and how many values it is when each is counted as often as it is met."""
_PUSHED: Final = {
    "GLOBAL": _NAME,
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"), _CONSTANT),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINSTRING"), _CONSTANT),
    **dict.fromkeys(("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _OTHER),
}
_POPPED: Final = {"APPEND": 1, "BUILD": 1, "SETITEM": 2, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "BINPERSID": 1}
_TO_MARK: Final = ("APPENDS", "SETITEMS", "TUPLE")


def check_program(pickle: bytes, source: str) -> None:
    """Check what a record's pickle calls, and how deep its tuples are. Where it is no pickle the loading itself says so.

    Args:
        pickle: ``data.pkl`` of the record.
        source: What it is, for the message.

    Raises:
        CorruptCheckpointError: It calls what is no name, names a storage by what is no constant, nests tuples too deep, or
            repeats them too often.
    """
    stack: list[Kind] = []
    below: list[list[Kind]] = []
    memo: dict[object, Kind] = {}
    repeated = 0
    try:
        for instruction, argument, _ in pickletools.genops(pickle):
            name = instruction.name
            kind = _PUSHED.get(name)
            if kind is not None:
                stack.append((kind, 1))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
                repeated += stack[-1][1]
                if repeated > _MOST_REPEATED:
                    raise CorruptCheckpointError(f"{source} holds a pickle of tuples that share one another too often")
            elif name == "MARK":
                below.append(stack)
                stack = []
            elif name in ("REDUCE", "NEWOBJ"):
                _, called = stack.pop(), stack.pop()
                if called[0] != _NAME:
                    raise CorruptCheckpointError(
                        f"{source} holds a pickle that calls what is no name: no torch.save wrote it"
                    )
                stack.append((_OTHER, 1))
            elif name in _POPPED or name in _TO_MARK:
                items = stack
                if name in _TO_MARK:
                    stack = below.pop()
                else:
                    count = _POPPED[name]
                    items = [stack.pop() for _ in range(count)]
                if name.startswith("TUPLE"):
                    levels = 1 + max([0, *(level for level, _ in items)])
                    stack.append((levels, 1 + sum(size for _, size in items)))
                    if levels > _MOST_LEVELS:
                        raise CorruptCheckpointError(
                            f"{source} holds a pickle with more than {_MOST_LEVELS} tuples within one another"
                        )
                elif name == "BINPERSID":
                    if items[0][0] > 1:
                        raise CorruptCheckpointError(
                            f"{source} holds a pickle whose storage is named by what is no constant: no torch.save wrote it"
                        )
                    stack.append((_OTHER, 1))
            elif name != "PROTO":
                return  # the end, or what the loading does not know
    except (IndexError, KeyError, ValueError):
        return  # the loading ends at the same place
