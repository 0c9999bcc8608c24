"""What the commands print: tables and lines for people, one JSON document with stable keys for programs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from typing import TYPE_CHECKING, Any

from dcp_s3.cli.terminal import complain, line, printable

if TYPE_CHECKING:
    from dcp_s3._checkpoint.care.maintenance import CheckpointInfo, GarbageReport, VerifyReport
    from dcp_s3.errors import DcpS3Error

_SHOWN = 20
_CONTEXT = ("rank", "operation", "bucket", "key", "part", "status", "code", "request_id", "attempts")


def checkpoints(found: list[CheckpointInfo], *, as_json: bool) -> None:
    """Print the result of ``ls``."""
    if as_json:
        _json([dataclasses.asdict(info) for info in found])
        return
    if not found:
        _line("no checkpoints")
        return
    rows = [("URL", "COMMITTED", "SIZE", "OBJECTS", "STATE")]
    for info in found:
        time = info.committed_at
        shown = time.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%SZ") if time else "-"
        rows.append((printable(info.url), shown, _size(info.bytes), str(info.objects), printable(info.state)))
    url, time_, size, objects, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    line(
        "\n".join(
            f"{row[0]:<{url}}  {row[1]:<{time_}}  {row[2]:>{size}}  {row[3]:>{objects}}  {row[4]}" for row in rows
        )
    )


def verified(report: VerifyReport, *, deep: bool) -> None:
    """Print what ``verify`` found at one checkpoint."""
    for problem in report.problems:
        _line(f"BAD   {problem}")
    for note in report.notes:
        _line(f"note  {note}")
    depth = (
        f"{_size(report.checked_bytes)} of content read" if deep else "sizes and ranges only; --deep reads the content"
    )
    _line(
        f"{'good' if report.ok else 'BAD'}: {report.url}: {report.objects} objects, {len(report.problems)} problems, "
        f"{report.seconds:.1f} s ({depth})"
    )


def all_verified(url: str, reports: list[VerifyReport]) -> None:
    """Print the last line of a ``verify`` of several checkpoints."""
    bad = sum(not report.ok for report in reports)
    _line(f"{'BAD' if bad else 'good'}: {url}: {len(reports)} checkpoints, {bad} bad")


def verified_json(url: str, reports: list[VerifyReport]) -> None:
    """Print the result of ``verify`` as a document: of all, and of each."""
    _json(
        {
            "url": url,
            "ok": all(report.ok for report in reports),
            "problems": [problem for report in reports for problem in report.problems],
            "notes": [note for report in reports for note in report.notes],
            "objects": sum(report.objects for report in reports),
            "checked_bytes": sum(report.checked_bytes for report in reports),
            "seconds": sum(report.seconds for report in reports),
            "checkpoints": [dataclasses.asdict(report) for report in reports],
        }
    )


def garbage(report: GarbageReport, *, as_json: bool) -> None:
    """Print the result of ``gc``."""
    if as_json:
        _json(dataclasses.asdict(report))
        return
    verb = "would delete" if report.dry_run else "deleted"
    _some(verb, report.removed)
    _some("would abort the upload of" if report.dry_run else "aborted the upload of", report.aborted)
    _some("the store refuses to delete", report.refused)
    for text in (*report.skipped, *report.notes):
        _line(f"note: {text}")
    _line(
        f"{report.url}: {verb} {len(report.removed)} objects ({_size(report.removed_bytes)}) and {len(report.aborted)} "
        f"uploads; {report.waiting} more are younger than {report.older_than_s:g} s; {report.live} are in use"
    )
    if report.dry_run and (report.removed or report.aborted):
        _line("nothing was deleted: run again with --delete")
    if report.removed or report.aborted:
        _line(
            "on a versioned bucket old versions of deleted objects stay; this lifecycle configuration lets them expire:"
        )
        _line(report.lifecycle_rule)
        _line(
            "to apply it REPLACES all lifecycle rules of the bucket: get those first (aws s3api "
            "get-bucket-lifecycle-configuration) and add this one to them"
        )
        if json.loads(report.lifecycle_rule)["Rules"][0]["Filter"]["Prefix"] == "":
            _line(
                "the URL has no prefix: the rule concerns old versions and uploads of the WHOLE bucket, whoever wrote them"
            )


def error(what: DcpS3Error, *, as_json: bool) -> None:
    """Print an error as one line on stderr; for programs also as a document on stdout."""
    complain(str(what))
    if as_json:
        facts = {name: value for name in _CONTEXT if (value := getattr(what, name)) is not None}
        failed(type(what).__name__, what.message, **facts)


def failed(kind: str, message: str, **facts: object) -> None:
    """Print the document of an error."""
    _json({"error": {"class": kind, "message": message} | facts})


def _some(verb: str, keys: tuple[str, ...]) -> None:
    for key in keys[:_SHOWN]:
        _line(f"{verb} {key}")
    if len(keys) > _SHOWN:
        _line(f"{verb} {len(keys) - _SHOWN} more (--json names all)")


def _size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _line(text: str) -> None:
    line(printable(text))


def _json(document: Any) -> None:  # noqa: ANN401 -- lists and dicts
    line(json.dumps(document, default=_plain, indent=2))


def _plain(value: object) -> str:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form")
