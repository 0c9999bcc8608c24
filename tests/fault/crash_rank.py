"""What one rank of a crash trial does: it saves its part of a state in which every element tells which save it is of."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import botocore.session
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_s3 import RetryPolicy, S3Config, S3StorageWriter

RANKS = 2
DEADLINE_S = 30.0
"""Of a save: less than the group's time-out, so that the ranks hear why a save failed."""
GROUP_S = 45.0
"""Time-out of the save's own group: gloo does not always tell a rank that its peer was killed (see gloo_survivor)."""
PART = 5 << 20
ELEMENTS = 3 << 18
"""Of one int32 tensor: 3 MiB, so that the two of a rank are an upload of two parts."""


def config_for(url: str, key_id: str = "TEST") -> S3Config:
    """The config of a rank, or of the test: each signs with its own key id."""
    return S3Config(
        endpoint_url=url,
        access_key_id=key_id,
        secret_access_key="secret",
        part_bytes=PART,
        read_timeout_s=10.0,
        save_deadline_s=DEADLINE_S,
        load_deadline_s=DEADLINE_S,
        retry=RetryPolicy(max_attempts=3, initial_wait_s=0.01, max_wait_s=0.05),
    )


def state_of(rank: int, value: int) -> dict[str, Any]:
    """What a rank saves: tensors of its own, whose every element depends on `value`, and an object."""
    base = torch.arange(ELEMENTS, dtype=torch.int32)
    return {f"w{rank}.{n}": base + (1000 * value + 10 * rank + n) for n in range(2)} | {"step": value}


def save_rank(rank: int, endpoint: str, url: str, value: int, scratch: Path, process_mode: bool) -> None:
    """Save as one rank of the job. Runs in that rank's process."""
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    (scratch / f"pid-{rank}").write_text(str(os.getpid()))
    writer = S3StorageWriter(url, config=config_for(endpoint, f"RANK{rank}"))
    state = state_of(rank, value)
    if process_mode:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        assert not isinstance(future, dict)
        future.result()
    else:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_S))
        dcp.save(state, storage_writer=writer, process_group=group)
