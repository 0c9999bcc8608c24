"""What a state dict holds at one moment: takes it apart, and copies its tensors into leased memory."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_s3._runtime.gc_pause import gc_paused
from dcp_s3._staging.buffers import HEADER_BYTES
from dcp_s3.errors import DcpS3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from dcp_s3._staging.buffers import Lease

_ALIGN_BYTES = 64
# Nobody can change one of these after the call, so they are shared.
_IMMUTABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size}
)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Copied:
    """The place of a tensor whose bytes will be copied."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def fill(self, copies: list[torch.Tensor]) -> torch.Tensor:
        return copies[self.index]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at one address show the same values."""
    return (
        one.device == other.device
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


class _Joined:
    """The place of a value made of others: a DTensor of its local tensor, a tuple of its items."""

    __slots__ = ("_join", "_made", "_parts")

    def __init__(self, join: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        self._join = join
        self._parts = parts
        self._made: Any = None

    def fill(self, copies: list[torch.Tensor]) -> Any:  # noqa: ANN401 -- whatever the state dict holds
        if self._made is None:  # one object in several places stays one object
            self._made = self._join([part.fill(copies) if type(part) in _PLACES else part for part in self._parts])
        return self._made


_PLACES = frozenset({_Copied, _Joined})


class Snapshot:
    """A state dict taken apart: values copied at once, tensors held until :meth:`copy` has copied them.

    A tensor, or a view equal to another in address, shape and strides, is copied once and stays one tensor. A DTensor
    keeps its spec object; a wrapper subclass is made anew of its copied inner tensors; views of large storages take
    only their own bytes; conjugate and negative bits are resolved. Everything is copied row-major.

    Args:
        state_dict: Any nesting of dicts, lists and tuples; leaves of any kind that ``copy.deepcopy`` takes.

    Raises:
        DcpS3Error: A leaf cannot be copied, or a tensor has no data; it names the leaf.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._end = HEADER_BYTES  # of the leased memory that is spoken for
        self._sources: list[torch.Tensor] = []
        self._offsets: list[int] = []
        self._places: list[tuple[Any, Any, _Copied | _Joined]] = []  # container, key, what goes there
        self._known: dict[int, tuple[Any, Any]] = {}  # id -> (the object, kept alive for its id; its copy or place)
        self._alike: dict[int, list[tuple[torch.Tensor, _Copied]]] = {}  # by address
        self._deepcopied: dict[int, Any] = {}
        self._ready: dict[torch.device, torch.cuda.Event] = {}
        self._path: list[str] = []  # to the leaf that failed, innermost key first
        try:
            with gc_paused():
                self._tree: dict[str, Any] = self._take(dict(state_dict))
        except Exception as error:
            leaf = "/".join(reversed(self._path))
            raise DcpS3Error(f"{leaf!r} cannot be staged: {first_line(error)}") from error
        # What the caller's streams hold queued now has to end before the copies begin.
        self._ready = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {source.device for source in self._sources if source.is_cuda}
        }

    @property
    def size(self) -> int:
        """Bytes of leased memory that :meth:`copy` needs, the block's header included; 0 for none."""
        return self._end if self._sources else 0

    @property
    def on_cuda(self) -> bool:
        """Whether any tensor has to be copied from a CUDA device."""
        return bool(self._ready)

    def copy(self, lease: Lease | None, buffer: memoryview | None) -> dict[str, Any]:
        """Copy the tensors into a lease's buffer, and put the state dict together again from the copies.

        Args:
            lease: A lease of at least :attr:`size` bytes; None where that is 0.
            buffer: The lease's buffer.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            copies: list[torch.Tensor] = []
            with gc_paused():
                if lease is not None and buffer is not None:
                    copies = [
                        lease.tensor(buffer, offset, source.dtype, source.shape)
                        for offset, source in zip(self._offsets, self._sources, strict=True)
                    ]
                for container, key, place in self._places:
                    container[key] = place.fill(copies)
            _copy_all(copies, self._sources, self._ready)
        return self._tree

    def _take(self, value: Any) -> Any:  # noqa: ANN401 -- whatever the state dict holds
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, torch.Tensor):
            taken: Any = self._take_tensor(value)
        elif isinstance(value, dict):
            return self._take_items(value, value.items())
        elif isinstance(value, list):
            return self._take_items(value, enumerate(value))
        elif isinstance(value, tuple):
            taken = self._take_tuple(value)
        else:
            taken = copy.deepcopy(value, self._deepcopied)
        self._known[id(value)] = (value, taken)
        return taken

    def _take_items(self, value: Any, items: Any) -> Any:  # noqa: ANN401 -- a dict or a list, or a subclass
        # A subclass keeps its class, and its attributes like its items.
        taken = copy.copy(value)
        self._known[id(value)] = (value, taken)  # before its items: it may hold itself
        attributes = getattr(taken, "__dict__", None)
        if attributes:
            self._take_into(attributes, list(attributes.items()))
        self._take_into(taken, items)
        return taken

    def _take_into(self, container: Any, items: Any) -> None:  # noqa: ANN401 -- see above
        take = self._take
        for key, item in items:
            try:
                container[key] = taken = take(item)
            except Exception:
                self._path.append(str(key))
                raise
            if type(taken) in _PLACES:
                self._places.append((container, key, taken))

    def _take_tuple(self, value: tuple[Any, ...]) -> Any:  # noqa: ANN401 -- a tuple, or the place of one
        kind = type(value)
        join: Callable[[list[Any]], Any] = getattr(kind, "_make", kind)
        parts = [self._take(item) for item in value]
        return _Joined(join, parts) if any(type(part) in _PLACES for part in parts) else join(parts)

    def _take_tensor(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 -- a tensor, or the place of one
        kind = type(tensor)
        if isinstance(tensor, DTensor):
            # to_local() and from_local() would go through autograd, and the latter would make a spec.
            local, spec = self._take(tensor._local_tensor), tensor._spec  # noqa: SLF001
            return _Joined(functools.partial(join_dtensor, type(tensor), spec), [local])
        if kind in _PLAIN:
            if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
                return self._take_plain(tensor)
        elif isinstance(tensor, AsyncCollectiveTensor):
            return self._take(tensor.trigger_wait())  # type: ignore[no-untyped-call] # torch's own has no annotations
        elif isinstance(tensor, ShardedTensor):
            return copy.deepcopy(tensor, self._deepcopied)
        elif hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            inner = [getattr(tensor, name) for name in names]
            # The outer strides are told to `__tensor_unflatten__`, and a row-major copy would belie others.
            if all(not isinstance(part, torch.Tensor) or part.is_contiguous() for part in inner):
                outer = (context, tensor.size(), tensor.stride())
                return _Joined(functools.partial(_unflatten, kind, names, outer), [self._take(part) for part in inner])
        foreign = tensor.detach()  # sparse, quantized, nested, another layout or class
        return foreign.clone() if foreign.device.type == "cpu" else foreign.to("cpu")

    def _take_plain(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 -- a tensor, or the place of one
        count = tensor.numel()
        if count == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        address = tensor.data_ptr()
        if not address:
            raise TypeError("the tensor has no data (it is on the meta device, or its storage was freed)")
        at_address = self._alike.setdefault(address, [])
        for source, place in at_address:
            if _is_same(source, tensor):
                return place
        place = _Copied(len(self._sources))
        at_address.append((tensor, place))
        self._offsets.append(self._end)
        self._sources.append(tensor)
        self._end += -(-count * tensor.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        return place


def first_line(error: BaseException) -> str:
    """Class and text of an error, without the pages that torch may append."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def join_dtensor(kind: type[DTensor], spec: DTensorSpec, parts: list[torch.Tensor]) -> DTensor:
    """A DTensor of its one local tensor, under a spec object that others may share."""
    # Without __init__, which does nothing and takes longer than all the rest.
    return DTensor.__new__(kind, parts[0], spec, requires_grad=False)


def _unflatten(kind: Any, names: list[str], outer: tuple[Any, Any, Any], parts: list[Any]) -> torch.Tensor:  # noqa: ANN401 -- a subclass with the protocol
    tensor: torch.Tensor = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), *outer)
    return tensor


@functools.cache
def _has_copy(dtype: torch.dtype) -> bool:
    """Whether ``copy_`` knows a dtype; those it does not (int1 … uint7, bit) are moved as integers of equal width."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").copy_(torch.empty(1, dtype=dtype, device="cpu"))
    except (NotImplementedError, RuntimeError):
        return False
    return True


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own has no annotations


def _copy_all(
    copies: list[torch.Tensor], sources: list[torch.Tensor], ready: dict[torch.device, torch.cuda.Event]
) -> None:
    """Copy each source into its contiguous CPU tensor, bit for bit; complete on return."""
    into: list[torch.Tensor] = []
    out_of: list[torch.Tensor] = []
    on_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {device: [] for device in ready}
    for each_copy, each_source in zip(copies, sources, strict=True):
        target, source = each_copy, each_source
        if not _has_copy(source.dtype):
            integer = _INTEGERS[source.itemsize]
            target, source = target.view(integer), source.view(integer)
        if source.is_cuda:
            on_device[source.device].append((target, source))
        elif source.is_conj() or source.is_neg():
            target.copy_(source)  # resolves both, and needs no temporary
        else:
            into.append(target)
            out_of.append(source)
    try:
        for device, pairs in on_device.items():
            stream = _side_stream(device)
            stream.wait_event(ready[device])
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    # On the device: `copy_` would conjugate the target before the bytes have arrived.
                    target.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)
        if into:
            torch._foreach_copy_(into, out_of)  # one call without the GIL, where a loop would take it for each
    finally:  # also when it fails or is interrupted: the memory may be used again soon
        for device in on_device:
            _side_stream(device).synchronize()
