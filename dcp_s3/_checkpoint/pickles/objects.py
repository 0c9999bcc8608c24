"""Objects of a checkpoint, which anybody may have written: a short list of names, and what the program has allowed.

What the list calls takes no more memory than the pickle and the storages beside it have: storages come from the archive and
cannot grow, a call copies what it is given at most, and what could be called for memory by a number takes here only what
``torch.save`` writes (``bytearray``), or may be named and not called (``torch.Tensor``). DCP's planner runs the same pickle
once more with the classes themselves, and so with the same arguments.

Source: torch/_utils.py and torch/_tensor.py (what torch.save writes), torch/serialization.py (storages).
"""

from __future__ import annotations

import _compat_pickle
import collections
import math
import pickle
import pickletools
import types
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._weights_only_unpickler import _get_user_allowed_globals

from dcp_s3._checkpoint.pickles.standin import MAX_DIMENSIONS
from dcp_s3._checkpoint.pickles.strict_pickle import RefusedError, StrictUnpickler
from dcp_s3.errors import ObjectNotLoadableError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable

__all__ = ["foreign_names", "load_object", "not_loadable", "user_allowed"]

_MOST_SHOWN: Final = 12
"""Names in one message, and characters of each: they are whatever the pickle says."""
_MOST_OF_A_NAME: Final = 120
_NEVER: Final = ("sys", "os", "posix", "nt")
"""Modules from which ``safe_globals`` allows nothing."""
_NO_NAME_HELPS: Final = ("builtins.getattr", *(f"{module}." for module in _NEVER))
"""How names begin that need not be allowed: what ``getattr`` gives is called, and has no name that could be allowed."""


def _of_storage(rebuild: Any) -> Callable[..., torch.Tensor]:  # noqa: ANN401 -- torch leaves its functions untyped
    """A gate for what makes a tensor of a storage: that of the archive, which does not grow, and no look-alike."""

    def tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> torch.Tensor:  # noqa: ANN401
        if type(storage) is not torch.storage.TypedStorage:
            raise RefusedError("it makes a tensor of what is no storage")
        if not {int}.issuperset(map(type, (offset, *size, *stride))) or len(size) > MAX_DIMENSIONS:
            raise RefusedError("a tensor's shape is not made of numbers")
        if any(isinstance(item, dict) and not {bool}.issuperset(map(type, item.values())) for item in more):
            raise RefusedError("a tensor has hooks")
        made: torch.Tensor = rebuild(storage, offset, size, stride, *more)
        return made

    return tensor


_tensor_v2 = _of_storage(torch._utils._rebuild_tensor_v2)  # noqa: SLF001 -- what torch.save names, here and below
_tensor_v3 = _of_storage(torch._utils._rebuild_tensor_v3)  # noqa: SLF001
_plain_qtensor = _of_storage(torch._utils._rebuild_qtensor)  # noqa: SLF001


def _qtensor(storage: Any, offset: Any, size: Any, *more: Any) -> torch.Tensor:  # noqa: ANN401
    # it is made as large as its size says, before it is given the storage
    if type(storage) is torch.storage.TypedStorage and math.prod(size) > len(storage):
        raise RefusedError("a quantized tensor is larger than its storage")
    return _plain_qtensor(storage, offset, size, *more)


def _parameter(data: Any, grad: Any, hooks: Any) -> torch.Tensor:  # noqa: ANN401
    if not isinstance(data, torch.Tensor) or hooks:  # one of nothing could grow
        raise RefusedError("it makes a parameter of what is no tensor")
    return torch.nn.Parameter(data, grad)


def _hides(name: object) -> bool:
    return type(name) is not str or hasattr(torch.Tensor, name)


def _of_type(make: Any, kind: Any, arguments: Any, state: Any) -> Any:  # noqa: ANN401
    if not any(make is gate for gate in (_tensor_v2, _tensor_v3, _qtensor, _parameter)) or type(arguments) is not tuple:
        raise RefusedError("it makes a tensor of another type of what is no tensor")
    if kind in (torch.Tensor, torch.nn.Parameter) and (type(state) is not dict or any(map(_hides, state))):
        raise RefusedError("a tensor has attributes that hide its own")
    rebuild: Any = torch._tensor._rebuild_from_type_v2  # noqa: SLF001
    return rebuild(make, kind, arguments, state)


def _encode(text: Any, encoding: Any) -> bytes:  # noqa: ANN401
    if type(text) is not str or encoding != "latin1":
        raise RefusedError("it encodes bytes in another way than torch.save")
    return text.encode("latin1")


def _bytearray(*given: Any) -> bytearray:  # noqa: ANN401
    if [type(item) for item in given] not in ([], [bytes], [str, str]) or given[1:] not in ((), ("latin-1",)):
        raise RefusedError("it makes a bytearray of what are no bytes")
    return bytearray(*given)


def _made_of(real: Callable[..., Any], *forms: tuple[type, ...]) -> Callable[..., Any]:
    """A gate that takes only arguments of these types."""

    def made(*given: Any) -> Any:  # noqa: ANN401
        if tuple(map(type, given)) not in forms:
            raise RefusedError(f"it calls {getattr(real, '__name__', '')} with other arguments than torch.save writes")
        return real(*given)

    return made


def _size(numbers: tuple[int, ...]) -> torch.Size:
    if len(numbers) > MAX_DIMENSIONS:
        raise RefusedError("a size has too many numbers")
    return torch.Size(numbers)


_set = _made_of(set, (list,))
_CALLED: Final[dict[str, Callable[..., Any]]] = {
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_qtensor": _qtensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": _made_of(_size, (tuple,)),
    "torch.device": _made_of(torch.device, (str,), (str, int)),
    "torch.serialization._get_layout": _made_of(torch.serialization._get_layout, (str,)),  # noqa: SLF001
    "collections.OrderedDict": _made_of(collections.OrderedDict, ()),
    "collections.Counter": _made_of(collections.Counter, (), (dict,)),
    "builtins.set": _set,
    "builtins.complex": _made_of(complex, (float, float)),
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _encode,
}
_NAMED: Final[dict[str, Any]] = {
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.storage.UntypedStorage": torch.UntypedStorage,
    **{
        f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, (torch.dtype, torch.qscheme))
    },
}
"""What is named where a tensor or a storage is made, and is never called."""


class _Unpickler(StrictUnpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._users = user_allowed()
        self._classes = tuple(value for value in self._users.values() if isinstance(value, type))
        self._callable = set(map(id, (*_CALLED.values(), *self._users.values())))

    def find_class(self, module: str, name: str) -> object:
        path = _path_of(module, name) if self.proto < 3 else f"{module}.{name}"
        for names in (_CALLED, _NAMED, self._users):
            if path in names and not path.startswith(_NO_NAME_HELPS):
                return names[path]
        raise RefusedError("it names what is not allowed", path)

    def may_call(self, called: object) -> bool:
        return id(called) in self._callable

    def check_call(self, called: object, arguments: Any) -> None:  # noqa: ANN401
        super().check_call(called, arguments)
        if called is _set and arguments and type(arguments[0]) is list:
            for item in arguments[0]:
                self.check_key(item)
        if called is _of_type and arguments[1:2] and not isinstance(arguments[1], type):
            raise RefusedError("it makes a tensor of what is no type")

    def _build(self) -> None:
        state, target = self.stack[-1], self.stack[-2]
        if (
            type(target) is collections.OrderedDict
        ):  # a module's state dict; other attributes would be looked up, and called
            if type(state) is not dict or list(state) != ["_metadata"]:
                raise RefusedError("it sets attributes of an OrderedDict")
        elif not isinstance(target, self._classes):
            raise RefusedError("it sets the state of what has none")
        self.load_build()

    def _persistent(self) -> None:
        named = self.stack[-1]
        if type(named) is not tuple or [type(item) for item in (named[:1], *named[2:])] != [tuple, str, str, int]:
            raise RefusedError("a storage has another name than torch.save gives")
        if named[0] != "storage" or not (named[1] is torch.UntypedStorage or isinstance(named[1], _StorageType)):
            raise RefusedError("it names something else than a storage")
        self.load_binpersid()

    dispatch = StrictUnpickler.dispatch | {pickle.BUILD[0]: _build, pickle.BINPERSID[0]: _persistent}


_StorageType: Final = torch.serialization.StorageType
_PICKLE_MODULE: Final = types.SimpleNamespace(Unpickler=_Unpickler)


def load_object(archive: Any) -> Any:  # noqa: ANN401 -- torch's untyped reader; whatever was saved
    """Unpickle an object and read its storages into memory of the CPU.

    Args:
        archive: torch's reader of the archive.

    Raises:
        RefusedError: It holds what is neither on the list nor allowed, or uses it in a way that ``torch.save`` does not.
        Exception: It is damaged.
    """
    load: Any = torch.serialization._load  # noqa: SLF001 -- torch.load's own, with its storages
    return load(archive, "cpu", _PICKLE_MODULE)


def foreign_names(data: bytes, *, users: bool = False) -> tuple[str, ...]:
    """What an object's pickle names and is not loaded unasked, in order.

    Args:
        data: ``data.pkl`` of a ``torch.save`` record, or its beginning.
        users: Also what is allowed only by ``torch.serialization.safe_globals`` or ``add_safe_globals``.
    """
    found: dict[str, None] = {}
    try:
        for instruction, argument, _ in pickletools.genops(data):
            if instruction.name == "GLOBAL":
                module, _, name = str(argument).partition(" ")
                if "Storage" not in name or module not in ("torch", "torch.storage", "torch.cuda"):
                    found[_path_of(module, name)] = None
    except ValueError:  # the end of a beginning, or no pickle
        pass
    allowed = {**_CALLED, **_NAMED, **({} if users else user_allowed())}
    return tuple(path for path in found if path not in allowed)


def user_allowed() -> dict[str, object]:
    """What the program has allowed with ``safe_globals`` or ``add_safe_globals``, by the name that a pickle has for it."""
    return dict(_get_user_allowed_globals())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def not_loadable(source: str, names: tuple[str, ...], *, reason: str = "") -> ObjectNotLoadableError:
    """The error for an object that may not be unpickled without the user's word.

    Args:
        source: What it is.
        names: What of it is not allowed; may be empty.
        reason: What else stands against it.
    """
    shown = ", ".join(_shown(name) for name in names[:_MOST_SHOWN]) + (", …" if len(names) > _MOST_SHOWN else "")
    what = f"that needs {shown}" if names else f"that is not loaded as it is ({reason})"
    ways = "use S3StorageReader(trust_pickle=True)"
    if names and not any(name.startswith(_NO_NAME_HELPS) for name in names):
        ways += f", or allow just this with torch.serialization.safe_globals([{shown}])"
    error = ObjectNotLoadableError(
        f"{source} is an object {what}: it is not loaded unasked, since unpickling could run code. If you trust whoever wrote "
        f"this checkpoint, {ways}"
    )
    error.types = tuple(map(_shown, names[:_MOST_SHOWN]))
    return error


def _path_of(module: str, name: str) -> str:
    """What pickle takes a name for: protocols 0 to 2 have those that Python 2 had."""
    known = _compat_pickle.NAME_MAPPING.get((module, name))
    module, name = known or (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
    return f"{module}.{name}"


def _shown(name: str) -> str:
    cut = name[:_MOST_OF_A_NAME]
    return cut if cut.isprintable() else ascii(cut)[1:-1]
