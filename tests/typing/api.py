"""The public face as users call it. Type-checked by scripts/check, never run."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, assert_type

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from dcp_s3 import (
    CheckpointNotFoundError,
    DcpS3Error,
    RetryPolicy,
    S3Config,
    S3StorageReader,
    S3StorageWriter,
    abort_stale_uploads,
    collect_garbage,
    list_checkpoints,
    verify,
)

config = S3Config(
    endpoint_url=("http://10.0.0.1", "http://10.0.0.2"),
    part_bytes=64 << 20,
    verify_tls="/etc/ca.pem",
    retry=RetryPolicy(max_attempts=3),
    tags=(("team", "llm"),),
)
S3Config(tags={"team": "llm"}, metadata={"step": "7"})
assert_type(S3Config.from_env(region="us-east-1"), S3Config)
assert_type(config.endpoints, tuple[str, ...])

writer = S3StorageWriter("s3://bucket/run", config=config, overwrite=False)
reader = S3StorageReader("s3://bucket/run", config=config, verify=True, trust_pickle=False)
assert_type(S3StorageWriter.validate_checkpoint_id("s3://bucket/run"), bool)
assert_type(writer.checkpoint_id, str | None)

state: dict[str, Any] = {}
save(state, checkpoint_id="step-1", storage_writer=writer)
saving = async_save(state, checkpoint_id="step-2", storage_writer=writer)
if isinstance(saving, Future):
    saving.result()
load(state, checkpoint_id="step-2", storage_reader=reader)

for checkpoint in list_checkpoints("s3://bucket/run", config=config):
    print(checkpoint.url, checkpoint.state)
print(verify("s3://bucket/run/step-2", deep=True, config=config).ok)
print(collect_garbage("s3://bucket/run", dry_run=True, older_than_s=86400, config=config))
print(abort_stale_uploads("s3://bucket/run", older_than_s=86400, config=config))

try:
    load(state, checkpoint_id="step-3", storage_reader=reader)
except CheckpointNotFoundError as error:
    assert_type(error.key, str | None)
    assert_type(error.rank, int | None)
    problem: DcpS3Error = error
