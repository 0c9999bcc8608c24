"""What the pickle of an object may call, and with what: checked before torch's weights-only loading runs it.

That loading calls nothing but allowed names; with these a pickle of some hundred bytes can still ask for any memory, or for
time without end:

* What it is asked to call, and is not allowed, is named in a text that prints it; lists that share one another print in time
  and memory that double with each level: 208 bytes take 5 s.
* ``bytearray(n)``, tensors and storages of n elements take memory by a number; so does ``set_`` of a tensor whose storage may
  grow, which those that come out of an archive may not.
* ``encode`` to hex doubles what it is given, and copies of one value, made again and again, are as long as that value.

So each call must have the form in which ``torch.save`` writes it.

Source: torch/_weights_only_unpickler.py (what may be called), torch/_utils.py and torch/_tensor.py (what that does).
"""

from __future__ import annotations

import pickletools
import re
from typing import Final

import numpy as np
from torch._utils import IMPORT_MAPPING, NAME_MAPPING
from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals

from dcp_s3._checkpoint.pickles.program import CALLED, NAMED, OTHER, TEXT, TUPLE, Program, Value
from dcp_s3._checkpoint.pickles.standin import MAX_DIMENSIONS
from dcp_s3.errors import ObjectNotLoadableError

__all__ = ["check_object_program", "foreign_names", "not_loadable", "user_allowed"]

_SHORT_TEXT: Final = 64
"""Characters; Python has one object for all texts of one character, and so pickle fetches them from the memo."""
_SHORT, _LATIN1, _BYTES, _STORAGE, _AGAIN = "short text", "latin1", "bytes", "storage", "fetched once more"
_TEXTS: Final = {TEXT, _SHORT, _LATIN1}
_ENCODE: Final = "_codecs.encode"
_BY_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_BYTEARRAY: Final = "builtins.bytearray"
_SIZED: Final = re.compile(r"torch(?:\.cuda)?(?:\.sparse)?\.\w*Tensor|torch\.storage\.(?:Unt|T)ypedStorage")
"""Classes whose instances are as large as a number says."""
_OF_STORAGE: Final = re.compile(r"torch\._utils\._rebuild_(?:q?tensor|tensor_v[0-9]+)")
_OF_TENSOR: Final = re.compile(r"torch\.nn\.parameter\.Parameter|torch\._utils\._rebuild_parameter\w*")
_OF_DEVICE: Final = re.compile(r"torch\._utils\._rebuild_device_tensor_from_\w+")
"""Tensors of devices that have no storages: converted on the CPU, of which a shape can be far larger than its storage."""
_COPIES_MUCH: Final = "which copies as much as a shape says"
_COPIES: Final = ("builtins.set", "collections.Counter")
_NO_TENSORS: Final = re.compile(r"(?:builtins|collections|_codecs)\..*|torch\.\w+")
"""What weights-only loading may call, and does not give tensors."""
_OF_TORCH: Final = re.compile(r"torch\.(?:_utils|_tensor|nn\.parameter)\..*")
_NO_ONES: Final = "no torch.save wrote it"
_KEPT_BY_LOADING: Final = ("", "collections.OrderedDict", "collections.Counter")
"""What weights-only loading puts items into, beside lists and dicts."""
_NUMPY_DTYPE: Final = "numpy.dtype"
_NUMPY_CODE: Final = re.compile(r"[A-Za-z][0-9]{1,4}")
"""With what it is called."""
_MOST_SHOWN: Final = 12
"""Names in one message, and characters of each: they are whatever the pickle says."""
_MOST_OF_A_NAME: Final = 120
_BLOCKED: Final = ("sys.", "os.", "posix.", "nt.", "exceptions.")
"""Modules from which safe_globals allows nothing; ``exceptions`` is Python 2's name for a part of ``builtins``."""


def check_object_program(pickle: bytes, source: str) -> bool:
    """Check an object's pickle before torch's weights-only loading runs it. Where it is no pickle the loading itself says so.

    Args:
        pickle: ``data.pkl`` of the ``torch.save`` record.
        source: What it is, for the message.

    Returns:
        Whether loading can succeed once its types are allowed: it fills no deque, and no subclass of list or dict.

    Raises:
        ObjectNotLoadableError: It holds a class that could be called for memory, or is called in a way that ``torch.save``
            writes for types that are not allowed.
        CorruptCheckpointError: It calls something in another way than ``torch.save`` does; or see
            :meth:`~dcp_s3._checkpoint.pickles.program.Program.follow`.
    """
    program = _ObjectProgram(pickle, source)
    program.follow(pickle)
    return program.allowable


def foreign_names(pickle: bytes, *, users: bool = False) -> tuple[str, ...]:
    """What a pickle names and weights-only loading does not allow, in order; numpy's class of a dtype goes with the dtype.

    Args:
        pickle: ``data.pkl`` of a ``torch.save`` record, or its beginning.
        users: Also what is allowed only by ``torch.serialization.safe_globals`` or ``add_safe_globals``.
    """
    found: dict[str, None] = {}
    dtype = False
    try:
        for instruction, argument, _ in pickletools.genops(pickle):
            if instruction.name == "GLOBAL":
                path = _path_of(str(argument))
                found[path] = None
                dtype = dtype or path == _NUMPY_DTYPE
            elif dtype and instruction.name == "BINUNICODE":
                found.update(dict.fromkeys(_numpy_classes(str(argument))))
    except ValueError:  # the end of a beginning, or no pickle
        pass
    allowed = _get_allowed_globals() if users else {**_get_allowed_globals(), **user_allowed()}
    return tuple(path for path in found if path not in allowed)


def user_allowed() -> dict[str, object]:
    """What the program has allowed with ``safe_globals`` or ``add_safe_globals``, by the name that a pickle has for it."""
    return dict(_get_user_allowed_globals())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def not_loadable(source: str, names: tuple[str, ...], *, allowable: bool, reason: str = "") -> ObjectNotLoadableError:
    """The error for an object that may not be unpickled without the user's word.

    Args:
        source: What it is.
        names: What of it is not allowed; may be empty.
        allowable: Whether allowing these names would be enough.
        reason: What else stands against it.
    """
    shown = ", ".join(_shown(name) for name in names[:_MOST_SHOWN]) + (", …" if len(names) > _MOST_SHOWN else "")
    what = f"that needs {shown}" if names else f"that weights-only loading refuses ({reason})"
    ways = "use S3StorageReader(trust_pickle=True)"
    if allowable and names and not any(name.startswith(_BLOCKED) for name in names):
        ways += f", or allow just this with torch.serialization.safe_globals([{shown}])"
    error = ObjectNotLoadableError(
        f"{source} is an object {what}: it is not loaded unasked, since unpickling could run code. If you trust whoever wrote "
        f"this checkpoint, {ways}"
    )
    error.types = tuple(map(_shown, names[:_MOST_SHOWN]))
    return error


def _numpy_classes(code: str) -> tuple[str, ...]:
    """Name of the class of ``numpy.dtype(code)``: loading asks for it, though the pickle does not name it."""
    if not _NUMPY_CODE.fullmatch(code):
        return ()
    try:
        return (f"numpy.dtypes.{type(np.dtype(code)).__name__}",)
    except TypeError:
        return ()


def _shown(name: str) -> str:
    cut = name[:_MOST_OF_A_NAME]
    return cut if cut.isprintable() else ascii(cut)[1:-1]


class _ObjectProgram(Program):
    def __init__(self, pickle: bytes, source: str) -> None:
        super().__init__(source)
        self.allowable = True
        self._pickle = pickle

    def _step(self, name: str, argument: object) -> bool:
        if name == "BINUNICODE" and len(str(argument)) <= _SHORT_TEXT:
            self._push(Value(0, 1, _LATIN1 if argument == "latin1" else _SHORT))
            return True
        if name == "GLOBAL":
            self._push(Value(0, 1, NAMED, _path_of(str(argument))))
            return True
        if name == "BINPERSID":
            (storage,) = self._pop(1)
            if storage.levels > 1:
                raise self._refused(f"whose storage is named by what is no constant: {_NO_ONES}")
            self._push(Value(0, 1, _STORAGE))
            return True
        if name in ("LIST", "DICT", "FROZENSET", "OBJ", "INST"):
            return False  # torch's loading ends here, too
        return super()._step(name, argument)

    def _push_tuple(self, items: list[Value]) -> None:
        self._check_held(items, classes_from=1)
        super()._push_tuple(items)

    def _fill(self, name: str, filled: Value, items: list[Value]) -> None:
        self._check_held(items, classes_from=len(items))
        if name == "BUILD" and items[0].what == TUPLE and _OF_TORCH.fullmatch(filled.name):
            raise self._refused(f"that sets a tensor's storage: {_NO_ONES}")
        if filled.what == CALLED and name != "BUILD" and filled.name not in _KEPT_BY_LOADING:
            self.allowable = False
        super()._fill(name, filled, items)

    def _made(self, items: list[Value]) -> Value:
        called, arguments = items
        if why := _refusal(called, arguments):
            if foreign_names(self._pickle, users=True):
                # it is not torch's own, nor is it run: torch.save writes such calls of other types
                names = foreign_names(self._pickle)
                raise not_loadable(self._source, names, allowable=False, reason="" if names else f"it calls {why}")
            for made_by in (called, *arguments.held):
                if _OF_DEVICE.fullmatch(made_by.name):
                    reason = f"it calls {made_by.name}, {_COPIES_MUCH}"
                    raise not_loadable(self._source, (), allowable=False, reason=reason)
            raise self._refused(f"that calls {why}")
        made = super()._made(items)
        if called.name != _ENCODE:
            return made
        return Value(0, 1, _SHORT if arguments.held[0].what == _SHORT else _BYTES)

    def _get(self, place: object) -> None:
        super()._get(place)
        value = self._stack[-1]
        if value.what in (TEXT, OTHER, _BYTES):
            self._stack[-1] = value._replace(what=_AGAIN)

    def _check_held(self, items: list[Value], classes_from: int) -> None:
        """Classes stand where a storage is named, and behind the function in a call by type, and nowhere that could call them."""
        for place, item in enumerate(items):
            bytes_class = item.what == NAMED and item.name == _BYTEARRAY
            if bytes_class or (_is_sized(item) and place < classes_from) or any(map(_is_sized, item.held)):
                reason = f"it holds {item.name or 'a class'}, which could be called for as much memory as a number says"
                raise not_loadable(self._source, (), allowable=False, reason=reason)


def _path_of(named: str) -> str:
    """What torch takes a name for: it knows those that Python 2 had."""
    module, _, name = named.partition(" ")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _is_sized(value: Value) -> bool:
    return value.what == NAMED and _SIZED.fullmatch(value.name) is not None


def _refusal(called: Value, arguments: Value) -> str:
    """Why such a call is refused; empty if it is not."""
    name, held = called.name, arguments.held
    if called.what != NAMED:
        return f"what is no name: {_NO_ONES}"
    if arguments.what != TUPLE:
        return f"{name} with what is no tuple: {_NO_ONES}"
    if name == _BY_TYPE:
        # it calls the first with the third, and what that gives is asked for its as_subclass(the second)
        of_tensor = len(held) == 4 and held[1].what == NAMED and not _NO_TENSORS.fullmatch(held[0].name)
        good = of_tensor and not _refusal(held[0], held[2]) and not any(map(_is_sized, held[2:]))
        return "" if good else f"{name} for another call: {_NO_ONES}"
    if any(map(_is_sized, held)):
        return f"{name} with a class: {_NO_ONES}"
    if _OF_DEVICE.fullmatch(name):
        return f"{name}, {_COPIES_MUCH}"
    kinds = [item.what for item in held]
    good = True
    if _SIZED.fullmatch(name):
        good = False
    elif name == _ENCODE:
        good = len(kinds) == 2 and kinds[0] in _TEXTS and kinds[1] == _LATIN1
    elif name == _BYTEARRAY:
        good = {*_TEXTS, _BYTES}.issuperset(kinds)
    elif _OF_STORAGE.fullmatch(name):
        good = kinds[:1] == [_STORAGE]
    elif _OF_TENSOR.fullmatch(name):
        good = kinds[:1] == [CALLED]
    elif name == "torch.Size":
        good = kinds == [TUPLE] and len(held[0].held) <= MAX_DIMENSIONS
    elif name == "collections.OrderedDict":
        good = not kinds
    elif name in _COPIES:
        good = _AGAIN not in kinds
    return "" if good else f"{name} with such arguments: {_NO_ONES}"
