"""The instructions of a commit record's pickle, read with regular expressions: a record has millions.

One regular expression knows the instructions which picklers of protocol 4 and 5 emit for a checkpoint's metadata. It runs
over all but the tuples that could hold others; only those are followed (:mod:`.program`), which shows that no tuple holds
more than some names and numbers. Where it cannot be shown so, each instruction is followed.

Source: Lib/pickletools.py (the instructions).
"""

from __future__ import annotations

import re

from dcp_s3._checkpoint.pickles.program import Program, UnknownValueError
from dcp_s3.errors import CorruptCheckpointError

__all__ = ["are_tuples_small", "check_record_instructions"]


def check_record_instructions(data: bytes, source: str) -> None:
    """Check a record's pickle before it is loaded.

    Args:
        data: The pickle.
        source: What it was read from, for the message.

    Raises:
        CorruptCheckpointError: It is damaged, has an instruction that no checkpoint writer uses, or builds values that are nested
            too deep, or tuples that take too long to hash.
    """
    if not are_tuples_small(data, source):
        _check_known(data, source)
        Program(source).follow(data)


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


def _check_known(data: bytes, source: str) -> None:
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
def _instruction(byte: bytes) -> bytes:
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


_RUN = re.compile(rb"(?:((?:%b){32}+))*+(?:%b)*+" % ((_instruction(rb"[^\x94]"),) * 2), re.DOTALL)
"""Without a MEMOIZE in an argument, so that counting bytes counts those; its group is the last 32 of them."""
_WITH_ANY_ARGUMENT = re.compile(
    rb"([hK].|M..|[jJ].{4}|[\x95G].{8}|%b)|(%b|%b)\x94?" % tuple(map(_counted, (rb"\x8a", rb"\x8c", b"C"))), re.DOTALL
)
_TUPLE = re.compile(rb"[t\x85\x86\x87]\x94?")
_MOST_IN_TUPLE = 66  # torch.Size of 64 numbers
"""Values in a tuple that is only looked at where it is made, and may be hashed as often as an instruction says so."""


def are_tuples_small(data: bytes, source: str) -> bool:
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
