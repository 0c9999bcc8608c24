"""Staging memory of this process, for tests that count it."""

from __future__ import annotations

import gc

from dcp_s3._staging import buffers
from dcp_s3._staging import stager as stagers


def close_stagers() -> None:
    """Give back the buffers that the saves of earlier tests have left with their writers' stagers."""
    buffers._received.clear()  # of a test that was both ends of the pipe
    for stager in list(stagers._stagers):
        stager.close()
    gc.collect()
