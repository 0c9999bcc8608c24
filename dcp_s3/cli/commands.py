"""The commands ``ls``, ``verify`` and ``gc``: options in, one call of a tool, exit code out."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import dcp_s3
from dcp_s3.cli import output, terminal
from dcp_s3.config import S3Config
from dcp_s3.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    ConfigError,
    DcpS3Error,
    StorageError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcp_s3._checkpoint.care.verify import VerifyReport

GOOD: Final = 0
BAD: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
REFUSED: Final = 4
UNWRITTEN: Final = 5

app = typer.Typer(
    name="dcp-s3",
    help="Look after checkpoints that dcp_s3 saved. Exit codes: 0 good, 1 bad checkpoint or none found, 2 usage, "
    "3 store unreachable, 4 store refused, 5 output not written, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix")]
EndpointUrl = Annotated[str | None, typer.Option(help="http(s)://host[:port] of the store")]
Region = Annotated[str | None, typer.Option(help="Region name")]
Profile = Annotated[str | None, typer.Option(help="Profile of ~/.aws/config")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of text")]


def _show_version(wanted: bool) -> None:
    if wanted:
        terminal.line(f"dcp-s3 {dcp_s3.__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options of the program itself."""


@app.command("ls")
def ls(
    url: Url,
    *,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints at URL and below it, and what was not committed. Whether they are whole: verify."""
    from dcp_s3._checkpoint.care.maintenance import list_checkpoints

    with _reported(as_json):
        found = list_checkpoints(url, config=_config(endpoint_url, region, profile), uncommitted=True)
        output.checkpoints(found, as_json=as_json)
        raise typer.Exit(BAD if not found or any(info.state.startswith("corrupt") for info in found) else GOOD)


@app.command("verify")
def verify(
    url: Url,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and compare its CRC")] = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Check that the checkpoints at URL and below it are whole."""
    with _reported(as_json):
        reports = []
        for report in _reports(url, deep=deep, config=_config(endpoint_url, region, profile)):
            reports.append(report)
            if not as_json:
                output.verified(report, deep=deep)
        if not reports:
            raise CheckpointNotFoundError(
                f"there is no checkpoint at {url} or below it: no .metadata, no __<rank>.metadata"
            )
        if as_json:
            output.verified_json(url, reports)
        elif len(reports) > 1:
            output.all_verified(url, reports)
        raise typer.Exit(GOOD if all(report.ok for report in reports) else BAD)


def _reports(url: str, *, deep: bool, config: S3Config) -> Iterator[VerifyReport]:
    from dcp_s3._checkpoint.care import maintenance

    each = maintenance.verify_each(url, deep=deep, config=config)
    try:
        first = next(each, None)
    except AccessDeniedError:
        # who may read one by its name need not be allowed to list
        first = maintenance.verify(url, deep=deep, config=config)
    if first is not None:
        yield first
        yield from each


@app.command("gc")
def gc(
    url: Url,
    *,
    delete: Annotated[bool, typer.Option("--delete", help="Delete; without it only report")] = False,
    older_than: Annotated[str, typer.Option(help="Margin, such as 24h, 90m, 3600s or 2d", metavar="TIME")] = "24h",
    no_writer_runs: Annotated[
        bool, typer.Option("--no-writer-runs", help="No save is running: a small margin is safe")
    ] = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Collect what failed and replaced saves left at URL and below it."""
    from dcp_s3._checkpoint.care.maintenance import collect_garbage

    with _reported(as_json):
        if delete:
            terminal.when_interrupted("; what was deleted until then is gone, the rest is left to the next run")
        report = collect_garbage(
            url,
            dry_run=not delete,
            older_than_s=_seconds(older_than),
            config=_config(endpoint_url, region, profile),
            no_writer_runs=no_writer_runs,
        )
        output.garbage(report, as_json=as_json)
        raise typer.Exit(REFUSED if report.refused else GOOD)


def _config(endpoint_url: str | None, region: str | None, profile: str | None) -> S3Config:
    given: dict[str, Any] = {"endpoint_url": endpoint_url, "region": region, "profile": profile}
    return S3Config.from_env(**{name: value for name, value in given.items() if value is not None})


_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", re.ASCII)


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--older-than must be a time such as 24h, 90m, 3600s or 2d, got {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@contextmanager
def _reported(as_json: bool) -> Iterator[None]:
    """Turn our errors into one line on stderr, with ``--json`` also a document on stdout, and an exit code."""
    try:
        try:
            yield
        except DcpS3Error as error:
            output.error(error, as_json=as_json)
            raise typer.Exit(_code(error)) from None
    except terminal.OutputError as error:
        terminal.complain(str(error))
        raise typer.Exit(UNWRITTEN) from None


def _code(error: DcpS3Error) -> int:
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, StorageUnavailableError):
        return UNREACHABLE
    if isinstance(error, StorageError):
        # without a status there was no reply: a certificate that was refused, an endpoint that does not speak S3
        return REFUSED if isinstance(error, AccessDeniedError) or error.status is not None else UNREACHABLE
    return BAD


def run(arguments: list[str]) -> int:
    """Run the program with these arguments and return its exit code."""
    try:
        return app(arguments, prog_name="dcp-s3", standalone_mode=False) or GOOD
    except terminal.OutputError as error:
        terminal.complain(str(error))
        return UNWRITTEN
    except Exception as error:
        if not hasattr(error, "format_message"):  # Typer's class for wrong usage has no public name
            raise
        error.show()  # type: ignore[attr-defined]
        if "--json" in arguments:
            output.failed("UsageError", error.format_message())
        return USAGE
