"""What the requests of one save or load have in common, and what the store says of a data object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dcp_s3._transfer.http.payload import Progress
    from dcp_s3._transfer.limits.retry import Counter, Deadline

TOKEN_FIELD: Final = "dcp-s3-token"  # noqa: S105 -- the name of a user metadata field


@dataclass(frozen=True, slots=True)
class Head:
    """What HEAD says of a data object.

    Attributes:
        size: Bytes.
        etag: Verbatim, with its quotes.
        token: The token in its user metadata, ``None`` where there is none.
        age_s: Seconds since it was written, by the store's clock; for an object of parts that may be since its Create.
        crc32c: The store's checksum of it, where it was asked for.
    """

    size: int
    etag: str
    token: str | None
    age_s: float | None = field(default=None, compare=False)
    crc32c: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Job:
    """What all requests of one save or load have in common.

    Attributes:
        bucket: Bucket name.
        deadline: Ends retries and attempts.
        counter: Counts retries.
        progress: Told of every byte that moves.
        rank: Named in errors.
    """

    bucket: str
    deadline: Deadline
    counter: Counter
    progress: Progress
    rank: int | None = None
