"""dcp_s3: the S3 object-store checkpoint backend for torch.distributed.checkpoint.

Hand :class:`S3StorageWriter` to ``dcp.async_save`` and :class:`S3StorageReader` to ``dcp.load``. Names that need torch
are imported at first use, so that the tools and the command line start without it.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import TYPE_CHECKING, Any

from dcp_s3.config import RetryPolicy, S3Config
from dcp_s3.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CommitConflictError,
    ConfigError,
    CorruptCheckpointError,
    DcpS3Error,
    DeadlineExceededError,
    ObjectNotLoadableError,
    StorageError,
    StorageUnavailableError,
)

if sys.platform != "linux" or not hasattr(time, "CLOCK_BOOTTIME"):
    raise ImportError(
        f"dcp_s3 runs on Linux only, not on {sys.platform}: it stages in memfd memory and keeps its deadlines by CLOCK_BOOTTIME"
    )

if TYPE_CHECKING:
    from dcp_s3._checkpoint.care.garbage import GarbageReport
    from dcp_s3._checkpoint.care.maintenance import (
        CheckpointInfo,
        abort_stale_uploads,
        collect_garbage,
        list_checkpoints,
        verify,
        verify_all,
    )
    from dcp_s3._checkpoint.care.verify import VerifyReport
    from dcp_s3.reader import S3StorageReader
    from dcp_s3.writer import S3StorageWriter

__version__ = "0.1.0"

__all__ = [
    "AccessDeniedError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CommitConflictError",
    "ConfigError",
    "CorruptCheckpointError",
    "DcpS3Error",
    "DeadlineExceededError",
    "GarbageReport",
    "ObjectNotLoadableError",
    "RetryPolicy",
    "S3Config",
    "S3StorageReader",
    "S3StorageWriter",
    "StorageError",
    "StorageUnavailableError",
    "VerifyReport",
    "abort_stale_uploads",
    "collect_garbage",
    "list_checkpoints",
    "verify",
    "verify_all",
]

_LAZY = {
    "CheckpointInfo": "dcp_s3._checkpoint.care.maintenance",
    "GarbageReport": "dcp_s3._checkpoint.care.garbage",
    "S3StorageReader": "dcp_s3.reader",
    "S3StorageWriter": "dcp_s3.writer",
    "VerifyReport": "dcp_s3._checkpoint.care.verify",
    "abort_stale_uploads": "dcp_s3._checkpoint.care.maintenance",
    "collect_garbage": "dcp_s3._checkpoint.care.maintenance",
    "list_checkpoints": "dcp_s3._checkpoint.care.maintenance",
    "verify": "dcp_s3._checkpoint.care.maintenance",
    "verify_all": "dcp_s3._checkpoint.care.maintenance",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- PEP 562: the type is that of the named object
    """Import a lazily loaded public name at its first use."""
    module = _LAZY.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, loaded or not."""
    return sorted({*globals(), *__all__})
