"""Unpickling of records that anybody may have written: an allow-list of instructions and of names, in bounded memory.

A pickle is a program. Python's own advice is to override ``find_class``; that stops calls of foreign functions, but not
a program that makes the unpickler take 32 GiB for its memo (six bytes do), nor one that sets attributes on the classes
which it was allowed to name. So its instructions are checked before it runs (:mod:`.instructions`), and what it may name
are *gates*: classes that make an instance of the real class, and that refuse to be changed.

Source: https://docs.python.org/3/library/pickle.html#restricting-globals.
"""

from __future__ import annotations

import functools
import io
import pickle
from typing import TYPE_CHECKING

from dcp_s3._checkpoint.pickles.instructions import check_record_instructions
from dcp_s3._runtime.gc_pause import gc_paused
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
    check_record_instructions(data, source)
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
