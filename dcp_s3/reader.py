"""S3StorageReader: what DCP calls to load, in the order in which it calls it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_s3._checkpoint import metadata as record_format
from dcp_s3._checkpoint.archive import load_record
from dcp_s3._checkpoint.collector import Pause
from dcp_s3._checkpoint.deadline import deadline_s
from dcp_s3._checkpoint.fetch import Batch, Piece, batches, chunk_at, raw_pieces, unpack_crcs
from dcp_s3._checkpoint.layout import (
    CheckpointUrl,
    check_relative,
    is_write_id,
    join_id,
    manifest_name,
    parse_url,
    record_name,
)
from dcp_s3._checkpoint.manifest import Manifest
from dcp_s3._transfer.dataplane import Job, data_plane
from dcp_s3._transfer.download import Downloader
from dcp_s3._transfer.payload import Progress
from dcp_s3._transfer.retry import Counter, Deadline
from dcp_s3._transfer.store import ControlStore, is_missing
from dcp_s3.config import S3Config
from dcp_s3.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigError,
    CorruptCheckpointError,
    StorageError,
)

if TYPE_CHECKING:
    import os

__all__ = ["S3StorageReader"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    """State of one load on one rank."""

    url: CheckpointUrl
    deadline: Deadline
    counter: Counter
    started: float = field(default_factory=time.monotonic)
    rank: int | None = None
    record: str = ""
    sha256: str = ""
    metadata: Metadata | None = None
    chunks: dict[str, dict[tuple[int, ...], ChunkStorageMetadata]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    pause: Pause | None = None


@dataclass(slots=True, eq=False)
class _Item:
    """One ReadItem on its way."""

    read: ReadItem
    target: torch.Tensor | None
    left: int


class S3StorageReader(StorageReader):
    """Loads DCP checkpoints from S3: ours, and those of FileSystemWriter, FsspecWriter and s3torchconnector.

    Args:
        url: ``s3://bucket/prefix`` of the checkpoint, or of the place below which relative ``checkpoint_id`` names lie.
        config: Endpoint, credentials and limits; by default all from the environment, by AWS's conventions.
        verify: Check the record against its manifest and every byte against its CRC32C.
        trust_pickle: Let the planner unpickle objects that weights-only loading refuses. They can run code.

    Raises:
        ConfigError: The URL or the config is not valid.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        config: S3Config | None = None,
        verify: bool = True,
        trust_pickle: bool = False,
    ) -> None:
        super().__init__()
        if config is not None and not isinstance(config, S3Config):
            raise ConfigError(f"config must be an S3Config, got {type(config).__name__}")
        self._base = None if url is None else parse_url(url)
        self._config = config if config is not None else S3Config.from_env()
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    # ------------------------------------------------------------------ DCP's StorageReader, in call order

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is an ``s3://`` URL (as text, or as the Path that somebody made of it)."""
        try:
            parse_url(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP when a load is given a ``checkpoint_id``: this thread's loads go there from now on."""
        self._local.url = None if checkpoint_id is None else join_id(self._base, checkpoint_id)
        self._local.load = self._local.refused = None

    @property
    def checkpoint_id(self) -> str | None:
        """URL of this thread's load."""
        url = getattr(self._local, "url", None) or self._base
        return None if url is None else str(url)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401 -- DCP's signature
        """Read and check the commit record.

        Args:
            *args: Ignored.
            **kwargs: ``rank``: read ``__<rank>.metadata`` and nothing else.

        Raises:
            CheckpointNotFoundError: There is none, or reading it is not permitted.
            CorruptCheckpointError: It is not what its manifest says, or names a global that is not allowed.
        """
        url = getattr(self._local, "url", None) or self._base
        if url is None:
            raise ConfigError("nowhere to load from: give S3StorageReader a url, or dcp.load a checkpoint_id")
        rank = kwargs.get("rank")
        refused = getattr(self._local, "refused", None)
        if rank is not None and refused is not None:
            # DCP asks for a rank's own record whatever the shared one failed of; unless it is not there, that is no answer:
            # it would cost a second deadline, and a rank that found an old record of its own would part from the others
            raise refused
        self._local.refused = None
        if (last := getattr(self._local, "load", None)) is not None and last.pause is not None:
            last.pause.end()  # only its record was read
        load = _Load(url, Deadline(deadline_s(self._config.load_deadline_s, "load_deadline_s")), Counter())
        load.record = record_name(rank)
        self._local.load = load
        load.pause = Pause()
        try:
            metadata = self._read_record(load)
        except BaseException as error:
            load.pause.end()
            if isinstance(error, Exception) and not isinstance(error, CheckpointNotFoundError):
                self._local.refused = error
            raise
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = load.sha256[:32]
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Keep the metadata that the plan will be made from."""
        load = self._current()
        load.metadata = metadata
        load.rank = kwargs.get("rank")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which record this rank has read, for the coordinator."""
        load = self._current()
        shared = load.record == record_name(None)
        return dataclasses.replace(plan, storage_data=(str(load.url), load.sha256) if shared else None)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks must have read the same record.

        Raises:
            CheckpointReplacedError: A save replaced the checkpoint while the ranks read its record.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointReplacedError(
                f"{self._current().url} was replaced while the ranks read it: they saw different checkpoints; load again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, check it, and commit it to the planner."""
        load = self._current()
        try:
            self._read(load, plan, planner)
        finally:
            if load.pause is not None:
                load.pause.end()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # ------------------------------------------------------------------ the record

    def _current(self) -> _Load:
        load: _Load | None = getattr(self._local, "load", None)
        if load is None:
            raise ConfigError("read_metadata was not called on this thread; use the reader through dcp.load")
        return load

    def _store(self, load: _Load) -> ControlStore:
        return ControlStore(self._config, load.url.bucket, deadline=load.deadline, rank=load.rank, counter=load.counter)

    def _read_record(self, load: _Load) -> Metadata:
        store = self._store(load)
        key = load.url.key(load.record)
        while True:
            body = self._get_record(store, load)
            load.sha256 = hashlib.sha256(body).hexdigest()
            metadata = record_format.loads(body, source=f"s3://{load.url.bucket}/{key}")
            try:
                self._check_manifest(store, load, metadata, len(body))
            except CorruptCheckpointError:
                # a save may have replaced the checkpoint, and deleted the old manifest, between the two reads
                if hashlib.sha256(self._get_record(store, load)).hexdigest() == load.sha256:
                    raise
                load.deadline.check("reading a checkpoint that is replaced again and again")
            else:
                return metadata

    def _get_record(self, store: ControlStore, load: _Load) -> bytes:
        key = load.url.key(load.record)
        try:
            return store.get(key).body
        except StorageError as error:
            if is_missing(error) or (isinstance(error, AccessDeniedError) and error.code == "AccessDenied"):
                why = "there is none" if is_missing(error) else "there is none, or reading it is not permitted"
                raise CheckpointNotFoundError(
                    f"no checkpoint at {load.url}: no readable {load.record} ({why}); check the URL, or list with dcp-s3 ls"
                ).with_context(
                    bucket=load.url.bucket, key=key, operation="GetObject", status=error.status, code=error.code
                ) from error
            raise

    def _check_manifest(self, store: ControlStore, load: _Load, metadata: Metadata, size: int) -> None:
        write_id = metadata.storage_meta.save_id if metadata.storage_meta is not None else None
        # two marks, so that no one damaged byte makes it pass for a stock writer's, which has nothing to be held against
        ours = is_write_id(write_id) or any("crc32c" in info.__dict__ for info in metadata.storage_data.values())
        if not self._verify or not ours:
            return
        name = load.url.key(manifest_name(write_id or ""))
        try:
            manifest = Manifest.from_json(store.get(name).body, source=f"s3://{load.url.bucket}/{name}")
        except StorageError as error:
            if not is_missing(error):
                raise
            raise CorruptCheckpointError(
                f"the manifest of {load.url} is missing, so its record cannot be trusted; verify=False loads without it"
            ).with_context(bucket=load.url.bucket, key=name) from error
        if manifest.metadata_sha256 != load.sha256 or manifest.metadata_bytes != size:
            raise CorruptCheckpointError(
                f"{load.record} of {load.url} is not the one that its manifest names: bytes were changed after the save"
            ).with_context(bucket=load.url.bucket, key=load.url.key(load.record))

    # ------------------------------------------------------------------ the data

    def _read(self, load: _Load, plan: LoadPlan, planner: LoadPlanner) -> None:
        plane = data_plane(self._config)
        job = Job(load.url.bucket, load.deadline, load.counter, Progress(), load.rank)
        pieces = [piece for item in plan.items for piece in self._pieces(load, item, planner)]
        total = sum(piece.length for piece in pieces)
        downloader: Downloader[Batch] = Downloader(plane, job)
        reads = downloader.run(batches(pieces))
        try:
            for read in reads:
                batch = read.about
                faults = batch.faults()
                if faults:
                    if read.tries == 1:  # once more: the store's copy may be good
                        downloader.again(read)
                        continue
                    raise self._corrupt(load, *faults[0])
                batch.deliver()
                for piece in batch.pieces:
                    self._piece_done(piece.item, planner)
        except StorageError as error:
            if is_missing(error):
                raise self._gone(load, error) from error
            raise
        finally:
            try:
                downloader.close()
            finally:
                downloader.close()  # what is left, where an interrupt ended the first call; else nothing
        seconds = time.monotonic() - load.started
        _log.info(
            "loaded %s: %d bytes in %.2f s (%.2f GiB/s), %d requests repeated",
            load.url, total, seconds, total / seconds / 2**30, load.counter.retries,
        )  # fmt: skip

    def _pieces(self, load: _Load, read: ReadItem, planner: LoadPlanner) -> list[Piece]:
        assert load.metadata is not None  # noqa: S101 -- set_up_storage_reader came before
        info = load.metadata.storage_data.get(read.storage_index)
        fqn = read.storage_index.fqn
        if info is None:
            raise CorruptCheckpointError(f"the record of {load.url} does not say where {read.storage_index} lies")
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(
                f"{fqn} was written through {list(info.transform_descriptors)}, which this reader does not decode; load it with "
                "the reader that belongs to its writer"
            )
        source = f"{fqn} in {load.url}"
        key = load.keys.get(info.relative_path)
        if key is None:
            key = load.keys[info.relative_path] = load.url.key(check_relative(info.relative_path, source=source))
        extra = info.__dict__
        packed = extra.get("crc32c") if self._verify else None
        raw_offset = extra.get("raw_offset")
        chunk = chunk_at(load.metadata, read.storage_index, load.chunks)
        if read.type == LoadItemType.BYTE_IO or raw_offset is None or chunk is None:
            return [self._opaque(load, read, planner, info, key, packed, source)]
        tensor = load.metadata.state_dict_metadata[fqn]
        assert isinstance(tensor, TensorStorageMetadata)  # noqa: S101 -- it has chunks
        dtype = tensor.properties.dtype
        nbytes = chunk.sizes.numel() * dtype.itemsize
        if raw_offset + nbytes > info.length:
            raise CorruptCheckpointError(f"{source}: {nbytes} bytes of data do not fit into a record of {info.length}")
        crcs = unpack_crcs(packed, nbytes, source=source)
        target = _target(read, planner)
        item = _Item(read, target, 0)
        if not target.numel():
            item.left = 1
            self._piece_done(item, planner)
            return []
        if dtype != target.dtype:
            _log.warning("%s was saved as %s and is loaded as %s", fqn, dtype, target.dtype)
        pieces = raw_pieces(
            key=key,
            data_start=info.offset + raw_offset,
            sizes=tuple(chunk.sizes),
            dtype=dtype,
            crcs=crcs,
            offsets=tuple(read.storage_offsets),
            lengths=tuple(read.lengths),
            target=target,
            item=item,
        )
        item.left = len(pieces)
        return pieces

    def _opaque(
        self,
        load: _Load,
        read: ReadItem,
        planner: LoadPlanner,
        info: Any,  # noqa: ANN401 -- torch's private _StorageInfo
        key: str,
        packed: bytes | None,
        source: str,
    ) -> Piece:
        """A record that is taken whole: an object, a tensor that is not plain memory, or a stock writer's record."""
        item = _Item(read, None, 1)

        def use(data: memoryview) -> None:
            if read.type == LoadItemType.BYTE_IO:
                if not self._trust_pickle:
                    load_record(data, source, trusted=False)
                planner.load_bytes(read, io.BytesIO(data))
                return
            target = _target(read, planner)
            saved = load_record(data, source, trusted=self._trust_pickle)
            if not isinstance(saved, torch.Tensor):
                raise CorruptCheckpointError(f"{source} holds a {type(saved).__name__}, expected a tensor")
            for dim, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
                saved = saved.narrow(dim, offset, length)
            target.copy_(saved)
            item.target = target

        return Piece(
            key=key,
            start=info.offset,
            end=info.offset + info.length,
            lead=0,
            length=info.length,
            crcs=unpack_crcs(packed, info.length, source=source),
            target=None,
            use=use,
            item=item,
        )

    @staticmethod
    def _piece_done(item: _Item, planner: LoadPlanner) -> None:
        item.left -= 1
        if item.left == 0 and item.target is not None:
            planner.commit_tensor(item.read, item.target)

    def _corrupt(self, load: _Load, piece: Piece, offset: int) -> CorruptCheckpointError:
        fqn = piece.item.read.storage_index.fqn
        error = CorruptCheckpointError(
            f"{fqn} in {load.url} is damaged: the CRC32C of the 4 MiB from byte {offset} of its data (byte "
            f"{piece.start - piece.first_byte + offset} of the object) is not the one computed at save; restore the object or load "
            "an older checkpoint"
        )
        error.with_context(rank=load.rank, bucket=load.url.bucket, key=piece.key)
        return error

    def _gone(self, load: _Load, error: StorageError) -> Exception:
        """A data object is missing: was the checkpoint replaced meanwhile, or is it broken?"""
        try:
            now = hashlib.sha256(self._get_record(self._store(load), load)).hexdigest()
        except CheckpointNotFoundError:
            now = ""
        if now != load.sha256:
            return CheckpointReplacedError(
                f"{load.url} was replaced or deleted while it was read; load again"
            ).with_context(rank=load.rank, bucket=load.url.bucket, key=error.key)
        return CorruptCheckpointError(
            f"a data object of {load.url} is missing although its record is there; dcp-s3 verify lists what is left"
        ).with_context(rank=load.rank, bucket=load.url.bucket, key=error.key, status=error.status, code=error.code)


def _target(read: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target: torch.Tensor = planner.resolve_tensor(read).detach()
    if tuple(target.shape) != tuple(read.lengths):
        raise ConfigError(
            f"{read.dest_index.fqn}: the plan wants {tuple(read.lengths)} elements, the template has {tuple(target.shape)}"
        )
    return target
