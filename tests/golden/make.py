"""Makes the golden checkpoints: ``python -m tests.golden.make`` adds one of this version of the package and one of torch.

A folder that is there is never made anew: it stands for what that version wrote.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

GOLDEN = Path(__file__).parent


def expected() -> dict[str, Any]:
    """Return what every golden checkpoint holds; a function of nothing but arithmetic on small integers."""
    counting = torch.arange(24)
    return {
        "float32": counting.reshape(4, 6) / 8,
        "bfloat16": (counting / 4).bfloat16(),
        "int64": counting - 7,
        "uint8": counting.to(torch.uint8),
        "bool": counting % 3 == 0,
        "complex64": torch.complex(counting / 2, -counting / 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": counting.reshape(4, 6).t() * 3,
        "longer": torch.arange(40_000, dtype=torch.int32),
        "nested": {"step": 1234, "name": "golden", "list": [1, None, True, torch.tensor([1.5, 2.5])], "rate": 0.125},
    }


def make() -> None:
    """Write the folders that are not there."""
    import dcp_s3
    from tests.fault.server import FaultServer

    stock = GOLDEN / f"torch-{torch.__version__.split('+')[0]}"
    if not stock.exists():
        with contextlib.chdir(GOLDEN):  # the record keeps the path that the writer was given
            dcp.save(expected(), storage_writer=FileSystemWriter(stock.name))
    ours = GOLDEN / f"dcp_s3-{dcp_s3.__version__}"
    if not ours.exists():
        with FaultServer() as server:
            config = dcp_s3.S3Config(endpoint_url=server.url, access_key_id="test", secret_access_key="testtest")
            dcp.save(expected(), storage_writer=dcp_s3.S3StorageWriter(f"s3://{server.bucket}", config=config))
            for key in server.objects():
                file = ours / key
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(server.read(key))


if __name__ == "__main__":
    sys.exit(make())
