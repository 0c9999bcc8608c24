"""Where the package does not run it says so when it is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "change, shown",
    [("sys.platform = 'darwin'", "darwin"), ("sys.platform = 'win32'", "win32"), ("del time.CLOCK_BOOTTIME", "linux")],
)
def test_another_platform_is_refused_in_one_sentence(change: str, shown: str) -> None:
    """ImportError at import, not an AttributeError in the middle of a save; before torch is imported."""
    code = f"import json, re, sys, time; import dataclasses, urllib.parse, pathlib; {change}; import dcp_s3"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: dcp_s3 runs on Linux only, not on {shown}: ")
