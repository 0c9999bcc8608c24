"""The README's programs, run as they stand there, each to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_s3 import list_checkpoints
from tests.servers import Bucket

ROOT = Path(__file__).parents[2]
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py): [^\n]*\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
LIMIT_S = 120.0


def torchrun(program: str, ranks: int, bucket: Bucket, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the README on some ranks, against a bucket of the test's."""
    text = PROGRAMS[program]
    assert "s3://checkpoints/run-7" in text
    script = scratch / program
    script.write_text(text.replace("s3://checkpoints/run-7", bucket.url("run-7")))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]
    environ = {**os.environ, **bucket.endpoint.environ(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environ, cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_and_resume(bucket: Bucket, tmp_path: Path, ranks: int):
    """The training loop commits its steps, the last one too, and a fresh process on another number of ranks resumes from it."""
    trained = torchrun("train.py", ranks, bucket, tmp_path)
    assert trained.returncode == 0, trained.stderr
    found = list_checkpoints(bucket.url("run-7"), config=bucket.endpoint.config())
    assert [info.url.rpartition("/")[2] for info in found] == ["step-5", "step-10"]

    resumed = torchrun("resume.py", 3 - ranks, bucket, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("resumed at step 10") == 3 - ranks
