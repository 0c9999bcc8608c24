"""Objects of a checkpoint, which anybody may have written: what of them is loaded unasked.

A short list of names, and what the program has allowed (``torch.serialization.safe_globals``). An object's pickle is first run with
stand-ins for all that it names, by the unpickler that reads records: what it would call, and with what, is seen where it would be
called, and takes neither memory nor code. Only then torch's own weights-only loading runs it.

Source: torch/_utils.py (what ``torch.save`` writes of a tensor), torch/_weights_only_unpickler.py (what that loading allows).
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from torch._utils import IMPORT_MAPPING, NAME_MAPPING
from torch._weights_only_unpickler import _get_user_allowed_globals

from dcp_s3._checkpoint.pickles.standin import MAX_DIMENSIONS
from dcp_s3._checkpoint.pickles.strict_pickle import RefusedError, Sealed, StrictUnpickler, check_depth, reason_of
from dcp_s3.errors import CorruptCheckpointError, ObjectNotLoadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

__all__ = ["check_object", "not_loadable", "user_allowed"]

_MOST_SHOWN: Final = 12
"""Names in one message, and characters of each: they are whatever the pickle says."""
_MOST_OF_A_NAME: Final = 120
_LONGEST_WORD: Final = 100
"""Characters of a device, a place or a key."""
_NEVER: Final = ("sys.", "os.", "posix.", "nt.", "exceptions.")
"""Modules from which safe_globals allows nothing; ``exceptions`` is Python 2's name for a part of ``builtins``."""
_STORAGES: Final = {f"{kind.__module__}.{kind.__name__}" for kind in torch._storage_classes}  # noqa: SLF001
_LAYOUTS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_CONSTANTS: Final = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, (torch.dtype, torch.qscheme))
}


def check_object(pickled: bytes, source: str) -> bool:
    """Check an object's pickle before it is loaded.

    Args:
        pickled: ``data.pkl`` of its ``torch.save`` archive.
        source: What it is, for the message.

    Returns:
        Whether it names something that only the program has allowed.

    Raises:
        ObjectNotLoadableError: It needs a name that is not on the list and not allowed, or does what no ``torch.save`` writes.
        CorruptCheckpointError: It is damaged.
    """
    trial: _Trial | None = None
    try:
        trial = _Trial(pickled)
        check_depth(trial.load())
    except Exception as error:  # noqa: BLE001 -- damaged pickles raise errors of every class
        if trial is not None and trial.foreign:
            raise not_loadable(source, tuple(trial.foreign), allowable=False) from None
        if isinstance(error, TypeError):  # of what is no function, or of other arguments
            error = RefusedError("it makes a call that no torch.save writes")
        if isinstance(error, RefusedError) or (trial is not None and trial.others):
            reason = str(error) if isinstance(error, RefusedError) else reason_of(error)
            raise not_loadable(source, (), reason=reason) from None
        raise CorruptCheckpointError(f"{source} holds a damaged record ({reason_of(error)})") from None
    if trial.foreign:
        raise not_loadable(source, tuple(trial.foreign), allowable=not trial.filled)
    if trial.filled:
        raise not_loadable(source, (), reason="it fills a type of which weights-only loading makes only empty ones")
    return trial.others > 0


def user_allowed() -> dict[str, object]:
    """What the program has allowed with ``safe_globals`` or ``add_safe_globals``, by the name that a pickle has for it."""
    return dict(_get_user_allowed_globals())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def not_loadable(
    source: str, names: tuple[str, ...], *, allowable: bool = True, reason: str = ""
) -> ObjectNotLoadableError:
    """The error for an object that is not unpickled without the user's word.

    Args:
        source: What it is.
        names: What of it is not allowed; may be empty.
        allowable: Whether allowing these names would be enough.
        reason: What else stands against it.
    """
    types = tuple(map(_shown, names[:_MOST_SHOWN]))
    shown = ", ".join(types) + (", …" if len(names) > _MOST_SHOWN else "")
    what = f"that needs {shown}" if names else f"that weights-only loading refuses ({_shown(reason)})"
    ways = "use S3StorageReader(trust_pickle=True)"
    if allowable and names and not any(name.startswith(_NEVER) for name in names):
        ways += f", or allow just this with torch.serialization.safe_globals([{shown}])"
    error = ObjectNotLoadableError(
        f"{source} is an object {what}: it is not loaded unasked, since unpickling could run code. If you trust whoever wrote "
        f"this checkpoint, {ways}"
    )
    error.types = types
    return error


def _shown(text: str) -> str:
    cut = text[:_MOST_OF_A_NAME]
    return cut if cut.isprintable() else ascii(cut)[1:-1]


class _Constant:
    """Stands for what may be named, and neither called nor changed: a storage class."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise RefusedError("it changes a tensor or a class")


class _Storage(_Constant):
    """Stands for a storage of the archive."""

    __slots__ = ("numel",)

    def __init__(self, numel: int) -> None:
        self.numel = numel


class _Tensor(_Constant):
    """Stands for a tensor, whose state no pickle may set: ``set_`` makes it as large as a number says."""

    __slots__ = ()


class _Other(metaclass=Sealed):
    """Stands for what is not on the list, and for what it makes."""

    __slots__ = ()
    trial: _Trial

    def __new__(cls, *_: object) -> Self:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, _: object) -> None:
        self.trial.filled = True

    def __setitem__(self, key: object, value: object) -> None:
        self.trial.filled = True


class _NumpyDtype(_Other):
    """Of ``numpy.dtype``: weights-only loading asks for the class of what it makes, though the pickle does not name it."""

    __slots__ = ()

    def __new__(cls, *arguments: object) -> Self:
        if arguments and type(arguments[0]) is str and len(arguments[0]) < 8:  # such as M8[ns]
            cls.trial.name(f"numpy.dtypes.{type(np.dtype(arguments[0])).__name__}")
        return object.__new__(cls)


class _Trial(StrictUnpickler):
    """Runs an object's pickle with stand-ins.

    Args:
        pickled: The pickle.

    Attributes:
        foreign: What it names that is not allowed, in order.
        others: How many names of those, and of the user's, it has.
        filled: It fills something else than a list or dict.
    """

    def __init__(self, pickled: bytes) -> None:
        super().__init__(pickled)
        self.foreign: dict[str, None] = {}
        self.others = 0
        self.filled = False
        self._users = user_allowed()
        self._left = 2 * len(pickled) + 1000  # values and characters that calls may copy
        self._other = Sealed("Other", (_Other,), {"__slots__": (), "trial": self})
        self._numpy_dtype = Sealed("Other", (_NumpyDtype,), {"__slots__": (), "trial": self})
        self._list: dict[str, Callable[..., object]] = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._utils._rebuild_qtensor": self._quantized,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch.Size": _size,
            "torch.device": _device,
            "torch.serialization._get_layout": _layout,
            "collections.OrderedDict": _ordered_dict,
            "collections.Counter": self._counter,
            "builtins.set": self._set,
            "builtins.bytearray": self._bytearray,
            "builtins.complex": _complex,
            "_codecs.encode": self._encode,
        }

    def find_class(self, module: str, name: str) -> object:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = f"{module}.{name}"
        if path in _CONSTANTS:
            return _CONSTANTS[path]
        if path in _STORAGES:
            return _Constant()
        if path in self._list:
            return self._list[path]
        self.name(path)
        return self._numpy_dtype if path == "numpy.dtype" else self._other

    def name(self, path: str) -> None:
        """Note something that is not on the list."""
        self.others += 1
        if path not in self._users or path.startswith(_NEVER):
            self.foreign[path] = None

    def storage_of(self, named: object) -> object:
        kinds = (str, _Constant, str, str, int)
        if type(named) is not tuple or tuple(map(type, named)) != kinds or named[0] != "storage" or named[4] < 0:
            raise RefusedError("it names a storage in a way that no torch.save does")
        # of other keys several could mean one entry of the archive, whose reader does not look at capitals
        if not (named[2].isdecimal() and named[2].isascii()) or max(len(named[2]), len(named[3])) > _LONGEST_WORD:
            raise RefusedError("it names a storage in a way that no torch.save does")
        return _Storage(named[4])

    def _copied(self, value: Sized) -> None:
        self._left -= len(value)
        if self._left < 0:
            raise RefusedError("it copies the same values again and again")

    def _tensor(self, storage: object, offset: int, size: object, stride: object, *more: object) -> _Tensor:
        _check_tensor(storage, offset, size, stride, more[:2], more[2:])
        return _Tensor()

    def _tensor_of_dtype(self, storage: object, offset: int, size: object, stride: object, *more: object) -> _Tensor:
        _check_tensor(storage, offset, size, stride, more[:2], more[3:])
        if type(more[2]) is not torch.dtype:
            raise _wrong("a tensor")
        return _Tensor()

    def _quantized(
        self, storage: _Storage, offset: int, size: tuple[int, ...], stride: object, quantizer: object, *more: object
    ) -> _Tensor:
        _check_tensor(storage, offset, size, stride, more, ())
        kinds = tuple(map(type, quantizer)) if type(quantizer) is tuple else ()
        if kinds not in _QUANTIZERS or math.prod(size) > storage.numel:  # it is made of that size, and then set
            raise _wrong("a quantized tensor")
        return _Tensor()

    def _parameter(self, tensor: object, requires_grad: object, hooks: object) -> _Tensor:
        kinds = type(requires_grad), type(hooks)
        if not isinstance(tensor, (_Tensor, _Other)) or kinds != (bool, collections.OrderedDict):
            raise _wrong("a parameter")
        return _Tensor()

    def _encode(self, text: str, encoding: object) -> bytes:
        if type(text) is not str or encoding != "latin1":
            raise _wrong("bytes")
        self._copied(text)
        return text.encode("latin1")

    def _bytearray(self, content: bytes = b"") -> bytearray:
        if type(content) is not bytes:
            raise _wrong("a bytearray")
        self._copied(content)
        return bytearray(content)

    def _set(self, items: list[Any]) -> set[Any]:
        if type(items) is not list:
            raise _wrong("a set")
        self._copied(items)
        return set(items)

    def _counter(self, counts: dict[Any, Any]) -> collections.Counter[Any]:
        if type(counts) is not dict:
            raise _wrong("a Counter")
        self._copied(counts)
        return collections.Counter(counts)


_QUANTIZERS: Final = (
    (torch.qscheme, float, int),
    (torch.qscheme, _Tensor, _Tensor, int),
)


def _wrong(what: str) -> RefusedError:
    return RefusedError(f"it makes {what} in a way that no torch.save writes")


def _check_tensor(
    storage: object, offset: object, size: object, stride: object, state: tuple[object, ...], more: tuple[object, ...]
) -> None:
    """The arguments of all rebuild functions: ``state`` is requires_grad and the hooks, ``more`` perhaps some flags."""
    good = type(storage) is _Storage and type(offset) is int and _is_shape(size) and _is_shape(stride)
    good = good and tuple(map(type, state)) == (bool, collections.OrderedDict) and len(more) <= 1
    for flags in more:
        good = good and type(flags) is dict and all(type(key) is str and type(flags[key]) is bool for key in flags)
    if not good:
        raise _wrong("a tensor")


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMENSIONS and {int}.issuperset(map(type, value))


def _size(numbers: tuple[int, ...]) -> torch.Size:
    if type(numbers) is not tuple or not _is_shape(numbers):
        raise _wrong("a size")
    return torch.Size(numbers)


def _device(kind: str, index: int | None = None) -> None:
    if type(kind) is not str or len(kind) > _LONGEST_WORD or type(index) not in (int, type(None)):
        raise _wrong("a device")


def _layout(name: str) -> torch.layout:
    if type(name) is not str:
        raise _wrong("a layout")
    return _LAYOUTS[name]


def _ordered_dict() -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict()  # filled later; with arguments it would copy what it is given


def _complex(real: float, imaginary: float) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise _wrong("a complex number")
    return complex(real, imaginary)
