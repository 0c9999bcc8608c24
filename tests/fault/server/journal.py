"""The log of requests, and the built-in checks of what a client must never do."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .settings import Settings


@dataclasses.dataclass(kw_only=True)
class Record:
    """One S3 request as the server saw it. Times are CLOCK_MONOTONIC seconds, comparable across processes."""

    index: int
    """Position in the log, from 0, in order of arrival."""
    t_start: float
    """The head was complete."""
    t_body: float | None = None
    """The body was complete."""
    t_done: float | None = None
    """The operation was done."""
    t_end: float | None = None
    """The reply was written, or the connection ended; None while in flight."""
    connection: int
    """Number of the connection, from 1."""
    endpoint: int = 0
    """Which of the server's endpoints it came to."""
    method: str
    operation: str
    bucket: str
    key: str
    part: int | None = None
    upload_id: str | None = None
    query: dict[str, str] = dataclasses.field(default_factory=dict)
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Request headers, names in lower case."""
    access_key: str | None = None
    age_s: float | None = None
    """Least age of the signature at arrival by the server's clock (signed by header only)."""
    wire_bytes: int = 0
    """Body bytes received, with any aws-chunked framing."""
    body_bytes: int = 0
    """Body bytes after unframing."""
    framed: bool = False
    """The body came in aws-chunked framing."""
    listed: list[int] = dataclasses.field(default_factory=list)
    """Part numbers of a Complete, in the order sent."""
    status: int | None = None
    """Status whose reply was begun; None if nothing was sent."""
    code: str | None = None
    """S3 error code sent."""
    reply_bytes: int = 0
    """Body bytes sent."""
    reply_headers: dict[str, str] = dataclasses.field(default_factory=dict)
    done: bool = False
    """The operation was carried out with success, whatever was then sent."""
    forbidden: bool = False
    """The operation is not among the allowed ones."""
    outcome: str = "in flight"
    """"replied", "cut", "dropped", "stalled", "client closed", "bad request" or "in flight"."""
    rules: tuple[str, ...] = ()
    """Names of the rules that fired."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Rebuild a record from plain data."""
        return cls(**{**data, "rules": tuple(data["rules"])})


def select(
    records: Iterable[Record],
    operation: str | tuple[str, ...] | None = None,
    *,
    key: str | None = None,
    part: int | None = None,
    upload_id: str | None = None,
    access_key: str | None = None,
    status: int | None = None,
) -> list[Record]:
    """Return the records that match all that is given (``key`` is a regular expression to search for)."""
    names = (operation,) if isinstance(operation, str) else operation
    return [
        record
        for record in records
        if (names is None or record.operation in names)
        and (key is None or re.search(key, record.key))
        and (part is None or record.part == part)
        and (upload_id is None or record.upload_id == upload_id)
        and (access_key is None or record.access_key == access_key)
        and (status is None or record.status == status)
    ]


def peak_in_flight(records: Iterable[Record]) -> int:
    """Return the largest number of records that were in flight at one time."""
    edges = [(record.t_start, 1) for record in records]
    edges += [(record.t_end, -1) for record in records if record.t_end is not None]
    return max(itertools.accumulate(step for _, step in sorted(edges)), default=0)


def violations(
    records: list[Record], settings: Settings, open_uploads: Iterable[tuple[str, str]], tolerance_s: float
) -> list[str]:
    """Return what the client did wrong; each line begins with the name of its check and a colon."""
    found: list[str] = []
    found += _overlaps(select(records, "UploadPart"), "overlapping-part", lambda r: (r.upload_id, r.part), tolerance_s)
    found += _overlaps(
        select(records, "CompleteMultipartUpload"), "overlapping-complete", lambda r: (r.upload_id,), tolerance_s
    )
    for upload_id in {record.upload_id for record in records if record.upload_id is not None}:
        found += _one_upload(select(records, upload_id=upload_id), settings, tolerance_s)
    for record in records:
        where = f"{record.operation} {record.key!r} (request {record.index})"
        if record.forbidden:
            found.append(f"forbidden-operation: {where}")
        if record.framed:
            found.append(f"aws-chunked: {where} came in aws-chunked framing")
        if settings.max_request_age_s is not None and abs(record.age_s or 0.0) > settings.max_request_age_s:
            found.append(f"request-age: {where} was signed {record.age_s:.2f} s before it arrived")
    found += [
        f"open-upload: {upload_id} of {key!r} was neither completed nor aborted" for key, upload_id in open_uploads
    ]
    return found


def _overlaps(
    records: list[Record], check: str, identity: Callable[[Record], tuple[Any, ...]], tolerance_s: float
) -> list[str]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[identity(record)].append(record)
    return [
        f"{check}: {first.key!r} {group}: request {second.index} began before request {first.index} had ended"
        for group, members in groups.items()
        for first, second in itertools.combinations(members, 2)
        if first.t_end is None or first.t_end > second.t_start + _slack(first, tolerance_s)
    ]


def _slack(record: Record, tolerance_s: float) -> float:
    """Return by how much the end of a record may be seen late: only a close by the client races with other requests."""
    return tolerance_s if record.outcome in ("client closed", "stalled") else 0.0


def _one_upload(records: list[Record], settings: Settings, tolerance_s: float) -> list[str]:
    """Check the parts of one upload against each other and against its Complete or Abort."""
    found = []
    parts = select(records, "UploadPart")
    name = f"{records[0].key!r} ({records[0].upload_id})"
    numbers = {record.part for record in parts if record.part is not None}
    if numbers and max(numbers) > settings.max_parts:
        found.append(f"too-many-parts: {name} has part {max(numbers)} of at most {settings.max_parts}")
    sizes = {record.part: record.body_bytes for record in parts if record.done and record.part is not None}
    for record in select(records, ("CompleteMultipartUpload", "AbortMultipartUpload")):
        still = [
            r.part
            for r in parts
            if r.t_start < record.t_start and (r.t_end is None or r.t_end > record.t_start + _slack(r, tolerance_s))
        ]
        if still:
            found.append(f"parts-in-flight: {record.operation} of {name} while parts {still} were on their way")
    for record in select(records, "CompleteMultipartUpload"):
        if record.listed != list(range(1, len(record.listed) + 1)):
            found.append(f"part-order: Complete of {name} lists {record.listed[:20]}")
        listed = [sizes[number] for number in record.listed if number in sizes]
        if len(set(listed[:-1])) > 1 or (len(listed) > 1 and listed[-1] > listed[0]):
            found.append(f"unequal-parts: {name} has parts of {listed[:20]} bytes")
        if len(listed) > 1 and listed[-1] == 0:
            found.append(f"empty-last-part: {name}")
    return found
