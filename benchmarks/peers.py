"""Who is measured: each peer at the best settings that were found for it, and dcp_s3 with its defaults.

Endpoint, region and credentials reach all of them by AWS's environment variables. A peer keeps its writer and reader, and
with them its client and connections, from one save to the next.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import os
import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

    from benchmarks.server import Target

MIB = 1 << 20
REGION = "us-east-1"
UNSIGNED: dict[str, Any] = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": False, "addressing_style": "path"},
}
"""botocore's settings with which it does not read a body before it sends it; the fastest ones over http and https."""


@functools.cache
def boto3_client(endpoint: str) -> Any:  # noqa: ANN401 -- boto3 makes its clients at run time
    """A boto3 client of an endpoint with the settings above."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=16, **UNSIGNED))


class Peer:
    """A way to save and load a state dict.

    Args:
        target: Where to.
        distributed: There is a process group.
    """

    needs: ClassVar[str] = ""
    """The module that it cannot do without."""
    settings: ClassVar[str] = ""
    """What a reader of the results needs to know."""

    def __init__(self, target: Target, *, distributed: bool) -> None:
        self.target = target
        self.distributed = distributed

    def save(self, state: dict[str, Any], name: str) -> None:
        """Save and commit."""
        raise NotImplementedError

    def load(self, state: dict[str, Any], name: str) -> None:
        """Load into the tensors of ``state``."""
        raise NotImplementedError

    def async_save(self, state: dict[str, Any], name: str, kind: AsyncCheckpointerType) -> Future[Any] | None:
        """Begin to save in the background; ``None`` if the peer has no such thing."""
        return None

    def clear(self) -> None:
        """Delete what was saved."""
        self.target.clear()


class DcpPeer(Peer):
    """A peer that gives DCP a storage writer and reader."""

    def make_writer(self, url: str) -> StorageWriter:
        """Make the storage writer; called once."""
        raise NotImplementedError

    def make_reader(self, url: str) -> StorageReader:
        """Make the storage reader; called once."""
        raise NotImplementedError

    def url(self, name: str) -> str:
        """The checkpoint id of a name."""
        return self.target.url(name)

    @functools.cached_property
    def writer(self) -> StorageWriter:
        """The storage writer."""
        return self.make_writer(self.url("first"))

    @functools.cached_property
    def reader(self) -> StorageReader:
        """The storage reader."""
        return self.make_reader(self.url("first"))

    def save(self, state: dict[str, Any], name: str) -> None:
        """Call ``dcp.save``."""
        save(state, checkpoint_id=self.url(name), storage_writer=self.writer, no_dist=not self.distributed)

    def load(self, state: dict[str, Any], name: str) -> None:
        """Call ``dcp.load``."""
        load(state, checkpoint_id=self.url(name), storage_reader=self.reader, no_dist=not self.distributed)

    def async_save(self, state: dict[str, Any], name: str, kind: AsyncCheckpointerType) -> Future[Any] | None:
        """Call ``dcp.async_save``."""
        answer = async_save(
            state,
            checkpoint_id=self.url(name),
            storage_writer=self.writer,
            async_checkpointer_type=kind,
            no_dist=not self.distributed,
        )
        return answer if isinstance(answer, Future) else answer.upload_completion


class Ours(DcpPeer):
    """dcp_s3."""

    needs = "dcp_s3"
    settings = "defaults; CRC32C of every part and every 4 MiB, all of it verified at load"

    def make_writer(self, url: str) -> StorageWriter:
        """Make the storage writer; called once."""
        from dcp_s3 import S3StorageWriter

        return S3StorageWriter(url)

    def make_reader(self, url: str) -> StorageReader:
        """Make the storage reader; called once."""
        from dcp_s3 import S3StorageReader

        return S3StorageReader(url)


class S3TorchConnector(DcpPeer):
    """s3torchconnector's DCP writer and reader, with its defaults."""

    needs = "s3torchconnector"
    settings = "defaults (1 thread, 8 MiB parts, DCP-optimized reader)"
    threads: ClassVar[int] = 1
    part_bytes: ClassVar[int] = 8 * MIB
    gbps: ClassVar[float] = 10.0

    def _config(self) -> Any:  # noqa: ANN401 -- imported where it is installed
        from s3torchconnector import S3ClientConfig

        return S3ClientConfig(force_path_style=True, part_size=self.part_bytes, throughput_target_gbps=self.gbps)

    def make_writer(self, url: str) -> StorageWriter:
        """Make the storage writer; called once."""
        from s3torchconnector.dcp import S3StorageWriter

        writer: StorageWriter = S3StorageWriter(REGION, url, s3client_config=self._config(), thread_count=self.threads)
        return writer

    def make_reader(self, url: str) -> StorageReader:
        """Make the storage reader; called once."""
        from s3torchconnector.dcp import S3StorageReader

        reader: StorageReader = S3StorageReader(REGION, url, s3client_config=self._config())
        return reader


class S3TorchConnector4(S3TorchConnector):
    """The same with more of everything."""

    settings = "4 threads, 16 MiB parts, throughput_target_gbps=50"
    threads = 4
    part_bytes = 16 * MIB
    gbps = 50.0


class FsspecS3fs(DcpPeer):
    """torch's FsspecWriter and FsspecReader over s3fs."""

    needs = "s3fs"
    settings = "4 threads, 16 MiB blocks, unsigned payloads"

    def _options(self) -> dict[str, Any]:
        return {"config_kwargs": UNSIGNED, "default_block_size": 16 * MIB, "max_concurrency": 16}

    def make_writer(self, url: str) -> StorageWriter:
        """Make the storage writer; called once."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(url, thread_count=4, sync_files=False, **self._options())

    def make_reader(self, url: str) -> StorageReader:
        """Make the storage reader; called once."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(url, **self._options())


class Msc(DcpPeer):
    """NVIDIA's multi-storage-client."""

    needs = "multistorageclient"
    settings = "4 threads, its Rust client"

    def __init__(self, target: Target, *, distributed: bool) -> None:
        super().__init__(target, distributed=distributed)
        options = {
            "base_path": target.bucket,
            "region_name": REGION,
            "endpoint_url": target.endpoint,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "rust_client": {"allow_http": target.endpoint.startswith("http://")},
        }
        keys = {
            "access_key": os.environ.get("AWS_ACCESS_KEY_ID"),
            "secret_key": os.environ.get("AWS_SECRET_ACCESS_KEY"),
        }
        profile = {
            "storage_provider": {"type": "s3", "options": options},
            "credentials_provider": {"type": "S3Credentials", "options": keys},
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="dcp-s3-bench-", delete=False) as file:
            json.dump({"profiles": {"bench": profile}}, file)
        self._config = file.name
        os.environ["MSC_CONFIG"] = file.name

    def url(self, name: str) -> str:
        """The checkpoint id of a name."""
        return f"msc://bench/{self.target.key(name)}"

    def make_writer(self, url: str) -> StorageWriter:
        """Make the storage writer; called once."""
        from multistorageclient.contrib.torch import MultiStorageFileSystemWriter  # type: ignore[import-not-found]  # optional

        writer: StorageWriter = MultiStorageFileSystemWriter(url, sync_files=False, thread_count=4)
        return writer

    def make_reader(self, url: str) -> StorageReader:
        """Make the storage reader; called once."""
        from multistorageclient.contrib.torch import MultiStorageFileSystemReader

        reader: StorageReader = MultiStorageFileSystemReader(url, thread_count=4)
        return reader

    def clear(self) -> None:
        """Delete what was saved."""
        Path(self._config).unlink(missing_ok=True)
        super().clear()


class TorchSaveBoto3(Peer):
    """torch.save into memory and boto3's managed transfer, without DCP."""

    needs = "boto3"
    settings = "16 MiB parts, 10 threads, unsigned payloads"

    @functools.cached_property
    def _transfer(self) -> Any:  # noqa: ANN401 -- boto3 has no types
        from boto3.s3.transfer import TransferConfig

        return TransferConfig(multipart_threshold=16 * MIB, multipart_chunksize=16 * MIB, max_concurrency=10)

    def save(self, state: dict[str, Any], name: str) -> None:
        """Serialise, then upload."""
        stream = io.BytesIO()
        torch.save(state, stream)
        stream.seek(0)
        boto3_client(self.target.endpoint).upload_fileobj(
            stream, self.target.bucket, self.target.key(name), Config=self._transfer
        )

    def load(self, state: dict[str, Any], name: str) -> None:
        """Download, unpickle, copy."""
        stream = io.BytesIO()
        boto3_client(self.target.endpoint).download_fileobj(
            self.target.bucket, self.target.key(name), stream, Config=self._transfer
        )
        stream.seek(0)
        for fqn, value in torch.load(stream, weights_only=True).items():
            state[fqn].copy_(value)


class TorchSavePut(TorchSaveBoto3):
    """torch.save into memory and one PutObject: what a training script without a checkpoint library does."""

    settings = "one PutObject stream, unsigned payload"

    def save(self, state: dict[str, Any], name: str) -> None:
        """Serialise, then upload."""
        stream = io.BytesIO()
        torch.save(state, stream)
        stream.seek(0)
        boto3_client(self.target.endpoint).put_object(Bucket=self.target.bucket, Key=self.target.key(name), Body=stream)


class Files(DcpPeer):
    """torch's FileSystemWriter on /dev/shm: what the same job costs without a network."""

    settings = "/dev/shm, 1 thread, no fsync"  # noqa: S108

    def __init__(self, target: Target, *, distributed: bool) -> None:
        super().__init__(target, distributed=distributed)
        self._directory = Path(f"/dev/shm/dcp-s3-bench-{target.prefix}")  # noqa: S108 -- memory is meant

    def url(self, name: str) -> str:
        """The checkpoint id of a name."""
        return str(self._directory / name)

    def make_writer(self, url: str) -> StorageWriter:
        """Make the storage writer; called once."""
        return FileSystemWriter(url, sync_files=False)

    def make_reader(self, url: str) -> StorageReader:
        """Make the storage reader; called once."""
        return FileSystemReader(url)

    def clear(self) -> None:
        """Delete what was saved."""
        shutil.rmtree(self._directory, ignore_errors=True)


PEERS: dict[str, type[Peer]] = {
    "dcp_s3": Ours,
    "s3torchconnector": S3TorchConnector,
    "s3torchconnector-4": S3TorchConnector4,
    "fsspec-s3fs": FsspecS3fs,
    "torch.save-boto3": TorchSaveBoto3,
    "multi-storage-client": Msc,
    "files": Files,
    "torch.save-put": TorchSavePut,
}


def is_installed(name: str) -> bool:
    """Whether a peer can be measured here; subjects that are no peers always can."""
    needs = PEERS[name].needs if name in PEERS else ""
    return not needs or importlib.util.find_spec(needs) is not None
