"""How long a save or load may take: less than the process group's time-out."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from dcp_s3.config import DEFAULT_DEADLINE_S
from dcp_s3.errors import ConfigError

_OF_GROUP: Final = 0.9
"""Share of the process group's time-out that is the default deadline: peers must hear of a failure before it."""


def deadline_s(configured: float | None, name: str) -> float:
    """The deadline of a save or load: shorter than the process group's time-out, so that peers hear why it failed.

    Args:
        configured: Seconds, or ``None`` for 0.9 x the group's time-out, or 1,500 without one.
        name: Setting that is named in the error.

    Raises:
        ConfigError: The configured deadline is not shorter than the group's time-out.
    """
    group = _group_timeout_s()
    if configured is None:
        return _OF_GROUP * group if group is not None else DEFAULT_DEADLINE_S
    if group is not None and configured >= group:
        raise ConfigError(
            f"{name}={configured:g} s must be less than the process group's time-out of {group:g} s: the other ranks would "
            "give up before they hear why this one failed"
        )
    return configured


def outlasting_s(deadline: float) -> float:
    """How long a save of this deadline may take with all that DCP does around it, its waiting for other ranks included.

    Args:
        deadline: The save's own, in seconds.
    """
    return deadline + (_group_timeout_s() or deadline)


def _group_timeout_s() -> float | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]  # noqa: SLF001
        return float(backend.options._timeout.total_seconds())  # noqa: SLF001 -- torch has no public way to ask
    except (AttributeError, RuntimeError):
        return None
