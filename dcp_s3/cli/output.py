"""What the commands print: tables and lines for people, one JSON document with stable keys for programs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dcp_s3._checkpoint.tools import CheckpointInfo, GarbageReport, VerifyReport
    from dcp_s3.errors import DcpS3Error

_SHOWN = 20
_WIDTH = 10_000


def checkpoints(found: list[CheckpointInfo], *, as_json: bool) -> None:
    """Print the result of ``ls``."""
    if as_json:
        _json([dataclasses.asdict(info) for info in found])
        return
    if not found:
        _line("no checkpoints")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("URL", "COMMITTED", "SIZE", "OBJECTS", "STATE"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("SIZE", "OBJECTS") else "left")
    for info in found:
        time = info.committed_at
        shown = time.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%SZ") if time else "-"
        table.add_row(_printable(info.url), shown, _size(info.bytes), str(info.objects), _printable(info.state))
    _console().print(table)


def verified(report: VerifyReport, *, deep: bool, as_json: bool) -> None:
    """Print the result of ``verify``."""
    if as_json:
        _json(dataclasses.asdict(report))
        return
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
        _line("on a versioned bucket old versions of deleted objects stay; this lifecycle rule lets them expire:")
        _line(report.lifecycle_rule)


def error(what: DcpS3Error) -> None:
    """Print an error as one line on stderr."""
    _console(stderr=True).print(_printable(f"dcp-s3: {' '.join(str(what).split())}"), style="red")


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


def _console(*, stderr: bool = False) -> Console:
    # keys are text, not markup; lines are for grep and are not wrapped
    # and nothing is cut to the terminal's width: a URL is there to be copied
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True, width=_WIDTH)


def _line(text: str) -> None:
    _console().print(_printable(text))


def _printable(text: str) -> str:
    """Escape what could move the cursor: keys and names may come from anybody who can write to the bucket."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _json(document: Any) -> None:  # noqa: ANN401 -- lists and dicts
    print(json.dumps(document, default=_plain, indent=2))


def _plain(value: object) -> str:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form")
