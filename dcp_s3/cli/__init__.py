"""The command line: ``dcp-s3 ls | verify | gc``. The only place that prints; everything else is in the tools.

Exit codes: 0 good, 1 a bad checkpoint or none found, 2 wrong usage or configuration, 3 the store was not reached, 4 the store
refused, 5 the output could not be written, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``dcp-s3`` program."""
    from dcp_s3.cli import terminal

    terminal.prepare()
    from dcp_s3.cli.commands import run

    # keys are UTF-8, whatever the locale took the arguments for
    sys.exit(run([os.fsencode(argument).decode(errors="surrogateescape") for argument in sys.argv[1:]]))
