"""A staged state dict, whole or failed, and how it crosses to another process: one file descriptor and a pickle."""

from __future__ import annotations

import io
import logging
import pickle
import traceback
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from dcp_s3._runtime.gc_pause import gc_paused
from dcp_s3._staging.buffers import Lease, Shipment, lease_of, receive
from dcp_s3._staging.snapshot import first_line, join_dtensor
from dcp_s3._staging.turn import Turn, received_turn
from dcp_s3.errors import DcpS3Error

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView

logger = logging.getLogger(__name__)

FAILURE_KEY = "dcp_s3 staging failure"


class StagingFailed:
    """The one leaf of a state dict that could not be staged: planning a save of it raises, on every rank.

    An exception out of ``stage()`` would leave the other ranks waiting in their first collective. DCP calls this hook
    inside its local step instead, whose errors it gathers.
    """

    def __init__(self, error: DcpS3Error) -> None:
        self.error = error

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        """DCP's hook for planning the items of a leaf: raises the error."""
        raise self.error

    def __reduce__(self) -> NoReturn:
        """Refuse to be saved as an object, which a foreign planner might do; crossing to a process goes another way."""
        raise self.error


def failed(error: BaseException, turn: Turn | None = None) -> StagedStateDict:
    """The state dict that stands for one that could not be staged; its save takes its turn like any other."""
    text = str(error) if isinstance(error, DcpS3Error) else first_line(error)
    logger.error("staging a state dict failed, and so will its save: %s", text)
    logger.debug("staging failed here:\n%s", "".join(traceback.format_exception(error)))
    # Only the text: a traceback would keep the buffer's tensors alive for as long as somebody keeps the error.
    failure = StagingFailed(DcpS3Error(f"staging the state dict failed, nothing was saved: {text}"))
    return StagedStateDict({FAILURE_KEY: failure}, None, turn)


class StagedStateDict(dict[str, Any]):
    """A staged state dict: its tensors lie in one leased block, which crosses to another process as one descriptor.

    Args:
        staged: The state dict.
        lease: Its block's; ``None`` where it has no tensors.
        turn: The turn of its save.
        before_crossing: Brings the block into shared memory.
    """

    __slots__ = ("__weakref__", "before_crossing", "lease", "turn")

    def __init__(
        self,
        staged: dict[str, Any],
        lease: Lease | None,
        turn: Turn | None = None,
        *,
        before_crossing: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(staged)
        self.lease = lease
        self.turn = turn
        self.before_crossing = before_crossing
        if turn is not None:
            turn.belongs_to(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override] # dict's own class of view has no public name
        """The items; whoever asks for them (DCP does first of all) is taken to be the save."""
        if self.lease is not None:
            self.lease.taken_up()
        if self.turn is not None:
            self.turn.begin()
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and ordinary pickles hold the values; a weights-only load knows this class of dict alone by name."""
        return OrderedDict, (), None, None, iter(super().items())


def _ship(staged: StagedStateDict) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a staged state dict for another process; a leaf that does not pickle fails the save, not the pipe."""
    lease = staged.lease
    try:
        if lease is not None:
            lease.taken_up()
        if staged.turn is not None:
            staged.turn.crosses()
        pickled = io.BytesIO()
        with gc_paused():
            _Shipper(pickled, lease).dump(dict(staged))
        if lease is None:
            return _receive, (None, pickled.getvalue())
        if staged.before_crossing is not None:
            staged.before_crossing()
        return _receive, (lease.ship(), pickled.getvalue())
    except Exception as error:  # noqa: BLE001 -- whatever it is, it must reach the save
        return dict, (dict(failed(error)),)


def _receive(shipment: Shipment | None, pickled: bytes) -> dict[str, Any]:
    """Rebuild a staged state dict in the process that it was sent to."""
    try:
        lease = receive(shipment) if shipment is not None else None
        with gc_paused():
            return StagedStateDict(_Receiver(io.BytesIO(pickled), lease).load(), lease, received_turn())
    except Exception as error:  # noqa: BLE001 -- DCP's process would die of it, and the other ranks wait for it
        return failed(error, received_turn())


class _Shipper(ForkingPickler):
    """Pickles leased tensors as places in their block, and DTensors by their parts; the rest as multiprocessing does."""

    def __init__(self, file: io.BytesIO, lease: Lease | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._lease = lease

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype, torch.Size] | None:  # noqa: ANN401 -- every object
        if type(value) is not torch.Tensor or self._lease is None or lease_of(value) is not self._lease:
            return None
        if not value.is_contiguous() or value.is_conj() or value.is_neg():  # a view that somebody made of ours
            return None
        return self._lease.offset(value), value.dtype, value.shape

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 -- pickle's protocol
        if type(value) is DTensor:
            return join_dtensor, (DTensor, value._spec, [value._local_tensor])  # noqa: SLF001 -- as in Snapshot
        if type(value) is torch.Tensor and (value.is_conj() or value.is_neg()):
            return _itself, (
                value.resolve_conj().resolve_neg(),
            )  # torch.multiprocessing sends the memory without the bit
        return NotImplemented


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Receiver(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, lease: Lease | None) -> None:
        super().__init__(file)
        self._lease = lease
        self._buffer = lease.buffer() if lease is not None else None
        self._made: dict[Any, torch.Tensor] = {}

    def persistent_load(self, place: Any) -> torch.Tensor:  # noqa: ANN401 -- what persistent_id gave
        made = self._made.get(place)
        if made is None:
            if self._lease is None or self._buffer is None:
                raise pickle.UnpicklingError("a staged tensor came without its block")
            made = self._made[place] = self._lease.tensor(self._buffer, *place)
        return made


ForkingPickler.register(StagedStateDict, _ship)
ForkingPickler.register(StagingFailed, lambda failed: (StagingFailed, (failed.error,)))
