"""The command line: ``dcp-s3 ls | verify | gc``. The only place that prints; everything else is in the tools.

Exit codes: 0 good, 1 a bad checkpoint or none, 2 wrong usage or configuration, 3 the store refused or was not reached.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``dcp-s3`` program."""
    from dcp_s3.cli.commands import app

    sys.exit(app())
