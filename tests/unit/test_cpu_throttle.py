"""A save beside the training takes its share of a core and no more; other saves are not held back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_s3 import ConfigError, S3Config, S3StorageWriter
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.limits.cpu_throttle import CpuThrottle
from dcp_s3._transfer.limits.retry import Deadline
from tests.support.staging import close_stagers


def burn(seconds: float) -> None:
    """Take CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def seconds_of(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


@pytest.mark.parametrize("cores", [0.25, 0.5])
def test_it_rests_for_what_was_taken(cores: float) -> None:
    """Of this thread, and of the threads that send."""
    progress = Progress()
    started = time.monotonic()
    throttle = CpuThrottle(cores, progress, Deadline(60))
    burn(0.03)
    progress.spend(0.03)
    throttle.rest()
    assert time.monotonic() - started >= 0.06 / cores
    assert seconds_of(throttle.rest) < 0.05


def test_a_slow_network_rests_for_it() -> None:
    """Where time has passed by itself nothing is added."""
    throttle = CpuThrottle(0.25, Progress(), Deadline(60))
    burn(0.01)
    time.sleep(0.06)
    assert seconds_of(throttle.rest) < 0.03


def test_it_does_not_save_up() -> None:
    """Time that passed without work is not made up for by a burst."""
    progress = Progress()
    throttle = CpuThrottle(0.25, progress, Deadline(60))
    time.sleep(0.2)
    throttle.rest()
    progress.spend(0.02)
    assert seconds_of(throttle.rest) >= 0.06


def test_a_deadline_ends_the_rest() -> None:
    """Nobody rests beyond the end of the save, nor for ever."""
    progress = Progress()
    throttle = CpuThrottle(0.001, progress, Deadline(0.05))
    progress.spend(10.0)
    assert seconds_of(throttle.rest) < 0.5
    patient = CpuThrottle(0.001, progress, Deadline(60))
    progress.spend(10.0)
    assert 0.9 < seconds_of(patient.rest) < 3


@pytest.mark.parametrize(
    "staged, cores, paced", [(True, 0.4, True), (True, None, False), (False, 0.4, False), (False, None, False)]
)
def test_who_is_paced(staged: bool, cores: float | None, paced: bool) -> None:
    """A save of what was staged, and only that; ``None`` paces nothing."""
    config = S3Config(
        endpoint_url="http://127.0.0.1:9", access_key_id="a", secret_access_key="b", background_cores=cores
    )
    writer = S3StorageWriter("s3://bucket/a", config=config)
    state: dict[str, Any] = {"step": 3, "w": torch.ones(1000)}
    if staged:
        state = writer.stage(state)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    save = writer._current()
    save.pause.end()
    assert (writer._throttle(save, planner) is not None) is paced
    del state, planner
    close_stagers()


def test_the_setting() -> None:
    """A number above 0, or None; in the environment ``inf`` is no limit."""
    with pytest.raises(ConfigError, match="background_cores must be more than 0"):
        S3Config(background_cores=0)


def test_no_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``inf`` rests for nothing."""
    monkeypatch.setenv("DCP_S3_BACKGROUND_CORES", "inf")
    cores = S3Config.from_env().background_cores
    assert cores is not None
    progress = Progress()
    throttle = CpuThrottle(cores, progress, Deadline(60))
    progress.spend(5.0)
    assert seconds_of(throttle.rest) < 0.1
