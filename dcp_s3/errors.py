"""Every error that leaves dcp_s3, and nothing else.

The tree, grouped by what a handler does about it::

    DcpS3Error
    ├── ConfigError                  fix the call or the configuration; nothing was sent
    ├── CheckpointNotFoundError      there is no (visible) checkpoint at the URL
    ├── CheckpointExistsError        overwrite=False and one is there
    ├── CheckpointReplacedError      another save replaced the checkpoint while it was read: load again
    ├── CommitConflictError          another save committed to this URL first; ours did not
    ├── CorruptCheckpointError       the bytes in the store are not those that were saved
    ├── ObjectNotLoadableError       the bytes are right; an object among them may not be unpickled without your word
    └── StorageError                 the store refused or failed
        ├── AccessDeniedError        credentials or permissions; never retried
        └── StorageUnavailableError  it did not answer (well) for as long as we may wait
            └── DeadlineExceededError    the save's or load's own deadline passed

DCP gathers errors by pickling them and raises ``CheckpointException``, a ``BaseException``, on every rank; ours are in
its ``failures[rank]``. A rank whose error does not pickle, or does not unpickle, makes its peers hang until the process
group's time-out: hence one positional message, and every attribute a plain value in ``__dict__``.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CommitConflictError",
    "ConfigError",
    "CorruptCheckpointError",
    "DcpS3Error",
    "DeadlineExceededError",
    "ObjectNotLoadableError",
    "StorageError",
    "StorageUnavailableError",
]

_CONTEXT = ("rank", "operation", "bucket", "key", "part", "status", "code", "request_id", "attempts")


class DcpS3Error(Exception):
    """Base of all errors of this package.

    Attributes (each ``None`` where it does not apply):
        rank: Rank of the process in its process group.
        operation: S3 operation, in the API's spelling (``UploadPart``).
        bucket: Bucket name.
        key: Object key, without the bucket.
        part: Part number, from 1.
        status: HTTP status of the last reply.
        code: S3 error code of the last reply (``SlowDown``).
        request_id: The store's id of the last request.
        attempts: How many times the request was sent.
    """

    rank: int | None = None
    operation: str | None = None
    bucket: str | None = None
    key: str | None = None
    part: int | None = None
    status: int | None = None
    code: str | None = None
    request_id: str | None = None
    attempts: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def with_context(
        self,
        *,
        rank: int | None = None,
        operation: str | None = None,
        bucket: str | None = None,
        key: str | None = None,
        part: int | None = None,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        attempts: int | None = None,
    ) -> DcpS3Error:
        """Fill in what is still unknown of the context, and return the same error."""
        given = (rank, operation, bucket, key, part, status, code, request_id, attempts)
        for name, value in zip(_CONTEXT, given, strict=True):
            if value is not None and getattr(self, name) is None:
                setattr(self, name, value)
        return self

    def __str__(self) -> str:
        facts = [f"{name}={value}" for name in _CONTEXT if (value := getattr(self, name)) is not None]
        return f"{self.message} [{', '.join(facts)}]" if facts else self.message


class ConfigError(DcpS3Error, ValueError):
    """A URL, a setting or a combination of settings is wrong. Raised locally, before the first request."""


class CheckpointNotFoundError(DcpS3Error, FileNotFoundError):
    """No commit record is readable at the URL: there is no checkpoint, or reading it is not permitted."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        # OSError.__str__ and __reduce__ look at errno and args; one positional message keeps both simple
        self.args = (message,)


class CheckpointExistsError(DcpS3Error):
    """``overwrite=False``, and the URL already holds a checkpoint. Nothing was uploaded."""


class CheckpointReplacedError(DcpS3Error):
    """Another save replaced the checkpoint while it was being read. Load again to get the new one."""


class CommitConflictError(DcpS3Error):
    """Another writer committed to the same URL after this save had looked. Its checkpoint stands, ours does not."""


class CorruptCheckpointError(DcpS3Error):
    """Bytes in the store differ from what was saved, are missing, or were never a checkpoint."""


class ObjectNotLoadableError(DcpS3Error):
    """An object in the checkpoint is of a type that is not loaded unasked, since unpickling it could run code.

    The checkpoint is not damaged. Load it with ``S3StorageReader(trust_pickle=True)``, or allow the named types with
    ``torch.serialization.safe_globals([...])``.

    Attributes:
        types: What the object's pickle names and is neither on our list nor allowed, as ``module.name``; may be empty.
    """

    types: tuple[str, ...] = ()


class StorageError(DcpS3Error):
    """The store refused a request, or answered it in a way that cannot be right. Not worth repeating as it is."""


class AccessDeniedError(StorageError):
    """Wrong, expired or missing credentials, or a permission that they lack. Never retried."""


class StorageUnavailableError(StorageError):
    """The store could not be reached, or kept failing, for as long as the retry policy allows."""


class DeadlineExceededError(StorageUnavailableError):
    """The deadline of the whole save or load passed, or nothing moved for the stall limit."""
