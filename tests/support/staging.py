"""Staging memory of this process, for tests that count it."""

from __future__ import annotations

import gc
import threading
import time

from dcp_s3._staging import buffers
from dcp_s3._staging import stager as stagers


def await_background() -> None:
    """Wait until no shared block is being made any more."""
    end = time.monotonic() + 10
    while any(thread.name == "dcp_s3-staging-blocks" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def close_stagers() -> None:
    """Give back the buffers that the saves of earlier tests have left with their writers' stagers."""
    buffers._received.clear()  # of a test that was both ends of the pipe
    await_background()
    for stager in list(stagers._stagers):
        stager.close()
    gc.collect()
