"""The data planes of this process: one for all configs that need the same clients, and one byte budget for each limit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from dcp_s3._runtime.loop_thread import loop_thread, on_fork
from dcp_s3._transfer.limits.budget import ByteBudget
from dcp_s3._transfer.s3.clients import close_data_clients, connection_of
from dcp_s3._transfer.s3.data_plane import DataPlane

if TYPE_CHECKING:
    from dcp_s3.config import S3Config

_KEPT_PLANES: Final = 16
"""Planes are small: their clients are closed when they are idle."""
_lock = threading.Lock()
_planes: dict[S3Config, DataPlane] = {}
"""By what clients depend on; the last used ones come last."""
_budgets: dict[int, ByteBudget] = {}
"""By ``memory_bytes``: a bound for the process, whatever else its configs say."""


_inherited: list[dict[S3Config, DataPlane]] = []
"""A forked child's copies of its parent's planes: never used, and never closed, as their loop does not run here."""


def _forget() -> None:
    global _lock, _planes, _budgets  # noqa: PLW0603 -- a lock held during the fork would stay held in the child
    _lock = threading.Lock()
    _inherited.append(_planes)
    _planes, _budgets = {}, {}


on_fork(_forget)


def data_plane(config: S3Config) -> DataPlane:
    """The process's data plane for a config, shared with all configs that need the same clients; closed at exit."""
    place = connection_of(config)
    with _lock:
        if not _planes:
            loop_thread().on_close(close_data_clients)
        budget = _budgets.setdefault(config.memory_bytes, ByteBudget(config.memory_bytes))
        plane = _planes.pop(place, None) or DataPlane(config, budget)
        _planes[place] = plane
        while len(_planes) > _KEPT_PLANES:
            del _planes[next(iter(_planes))]
        return plane.for_config(config, budget)
