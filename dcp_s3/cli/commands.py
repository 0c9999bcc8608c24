"""The commands ``ls``, ``verify`` and ``gc``: options in, one call of a tool, exit code out."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dcp_s3.cli import output
from dcp_s3.config import S3Config
from dcp_s3.errors import ConfigError, DcpS3Error, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

GOOD: Final = 0
BAD: Final = 1
USAGE: Final = 2
STORE: Final = 3

app = typer.Typer(
    name="dcp-s3",
    help="Look after checkpoints that dcp_s3 saved. Exit codes: 0 good, 1 bad checkpoint, 2 usage, 3 store.",
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


@app.command("ls")
def ls(
    url: Url,
    *,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints at URL and below it."""
    from dcp_s3._checkpoint.tools import list_checkpoints

    with _reported():
        found = list_checkpoints(url, config=_config(endpoint_url, region, profile))
        output.checkpoints(found, as_json=as_json)
        raise typer.Exit(BAD if any(info.state.startswith("corrupt") for info in found) else GOOD)


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
    """Check that the checkpoint at URL is whole."""
    from dcp_s3._checkpoint import tools

    with _reported():
        report = tools.verify(url, deep=deep, config=_config(endpoint_url, region, profile))
        output.verified(report, deep=deep, as_json=as_json)
        raise typer.Exit(GOOD if report.ok else BAD)


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
    from dcp_s3._checkpoint.tools import collect_garbage

    with _reported():
        report = collect_garbage(
            url,
            dry_run=not delete,
            older_than_s=_seconds(older_than),
            config=_config(endpoint_url, region, profile),
            no_writer_runs=no_writer_runs,
        )
        output.garbage(report, as_json=as_json)


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
def _reported() -> Iterator[None]:
    """Turn our errors into one line on stderr and an exit code."""
    try:
        yield
    except DcpS3Error as error:
        output.error(error)
        code = USAGE if isinstance(error, ConfigError) else STORE if isinstance(error, StorageError) else BAD
        raise typer.Exit(code) from None
