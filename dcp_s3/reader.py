"""S3StorageReader: what DCP calls to load, in the order in which it calls it."""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

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

from dcp_s3._checkpoint.archive.stock_archive import fault_of as archive_fault
from dcp_s3._checkpoint.archive.stock_archive import load_record
from dcp_s3._checkpoint.format.agreement import check_one_url
from dcp_s3._checkpoint.format.layout import CheckpointUrl, check_relative, join_id, parse_url, record_name
from dcp_s3._checkpoint.group_deadline import deadline_s
from dcp_s3._checkpoint.load.commit_record import CommitRecord
from dcp_s3._checkpoint.load.load_coverage import check_whole
from dcp_s3._checkpoint.load.overlap import in_rounds
from dcp_s3._checkpoint.load.ranges import Batch, Piece, batches, chunk_at, raw_pieces, unpack_crcs
from dcp_s3._checkpoint.load.stock_rules import check_age, check_saved, check_unchanged
from dcp_s3._runtime.gc_pause import Pause
from dcp_s3._transfer.download import Downloader
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.job import Job
from dcp_s3._transfer.limits.retry import Counter, Deadline
from dcp_s3._transfer.s3.control_store import ControlStore, is_missing
from dcp_s3._transfer.s3.planes import data_plane
from dcp_s3.config import S3Config
from dcp_s3.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigError,
    CorruptCheckpointError,
    DcpS3Error,
    StorageError,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["S3StorageReader"]

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _told_once(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have our errors leave without what they came from: DCP prints the chain at each of its stops, and their text says it.

    The chain is in the log at DEBUG.
    """

    @functools.wraps(method)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except DcpS3Error as error:
            _log.debug("%s failed", method.__name__, exc_info=True)
            raise error.with_traceback(None) from None

    return told


@dataclass(slots=True)
class _Load:
    """State of one load on one rank.

    Attributes:
        record: What is read first, and what the data are held against.
    """

    record: CommitRecord
    deadline: Deadline
    counter: Counter
    started: float = field(default_factory=time.monotonic)
    rank: int | None = None
    metadata: Metadata | None = None
    chunks: dict[str, dict[tuple[int, ...], ChunkStorageMetadata]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    pause: Pause | None = None

    @property
    def url(self) -> CheckpointUrl:
        return self.record.url


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
        trust_pickle: Let the planner unpickle objects of any type. They can run code.

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

    @_told_once
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
            raise type(refused)(f"no answer to what the shared {record_name(None)} failed of")
        self._local.refused = None
        if (last := getattr(self._local, "load", None)) is not None and last.pause is not None:
            last.pause.end()  # only its record was read
        deadline = Deadline(deadline_s(self._config.load_deadline_s, "load_deadline_s"))
        load = _Load(CommitRecord(url, record_name(rank)), deadline, Counter())
        self._local.load = load
        load.pause = Pause()
        try:
            metadata = load.record.read(self._store(load), load.deadline, verify=self._verify)
        except BaseException as error:
            load.pause.end()
            if isinstance(error, Exception) and not isinstance(error, CheckpointNotFoundError):
                self._local.refused = error
            raise
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = load.record.sha256[:32]
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Keep the metadata that the plan will be made from."""
        load = self._current()
        load.metadata = metadata
        load.rank = kwargs.get("rank")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which record this rank has read, for the coordinator."""
        load = self._current()
        shared = load.record.name == record_name(None)
        return dataclasses.replace(plan, storage_data=(str(load.url), load.record.sha256 if shared else None))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks must have read the same record.

        Raises:
            ConfigError: The ranks were given different URLs.
            CheckpointReplacedError: A save replaced the checkpoint while the ranks read its record.
        """
        urls = ((rank, plan.storage_data[0]) for rank, plan in enumerate(plans))
        check_one_url(urls, "the ranks of one load must load from one URL")
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointReplacedError(
                f"{self._current().url} was replaced while the ranks read it: they saw different checkpoints; load again"
            )
        return plans

    @_told_once
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

    # ------------------------------------------------------------------ the data

    def _read(self, load: _Load, plan: LoadPlan, planner: LoadPlanner) -> None:
        plane = data_plane(self._config)
        job = Job(load.url.bucket, load.deadline, load.counter, Progress(), load.rank)
        if load.metadata is not None:
            check_whole(load.record, load.metadata, plan, planner, load.rank)
        items = [self._pieces(load, read, planner) for read in plan.items]
        total = sum(piece.length for _, pieces in items for piece in pieces)
        guarded = self._verify and load.record.stock
        downloader: Downloader[Batch] = Downloader(plane, job)
        try:
            for pieces in in_rounds([(item.target, pieces) for item, pieces in items]):
                for read in downloader.run(batches(pieces)):
                    batch = read.about
                    faults = batch.faults()
                    if faults:
                        if read.tries == 1:  # once more: the store's copy may be good
                            downloader.again(read)
                            continue
                        raise self._corrupt(load, *faults[0])
                    if guarded and (modified := downloader.modified.get(read.key)) is not None:
                        check_age(load.record, load.metadata, read.key, modified, load.rank)
                    batch.deliver()
                    for piece in batch.pieces:
                        self._piece_done(piece.item, planner)
        except StorageError as error:
            if is_missing(error):
                raise load.record.missing_object_error(self._store(load), error).with_context(rank=load.rank) from error
            raise
        except CorruptCheckpointError:
            self._check_record(load)
            raise
        finally:
            try:
                downloader.close()
            finally:
                downloader.close()  # what is left, where an interrupt ended the first call; else nothing
        self._check_record(load)
        seconds = time.monotonic() - load.started
        _log.info(
            "loaded %s: %d bytes in %.2f s (%.2f GiB/s), %d requests repeated",
            load.url, total, seconds, total / seconds / 2**30, load.counter.retries,
        )  # fmt: skip

    def _pieces(self, load: _Load, read: ReadItem, planner: LoadPlanner) -> tuple[_Item, list[Piece]]:
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
            return self._opaque(load, read, planner, info, key, packed, chunk, source)
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
            return item, []
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
        return item, pieces

    def _opaque(
        self,
        load: _Load,
        read: ReadItem,
        planner: LoadPlanner,
        info: Any,  # noqa: ANN401 -- torch's private _StorageInfo
        key: str,
        packed: bytes | None,
        chunk: ChunkStorageMetadata | None,
        source: str,
    ) -> tuple[_Item, list[Piece]]:
        """A record that is taken whole: an object, a tensor that is not plain memory, or a stock writer's record."""
        fqn = read.storage_index.fqn
        target = None if read.type == LoadItemType.BYTE_IO else _target(read, planner)
        item = _Item(read, target, 1)

        def use(data: memoryview) -> None:
            if target is None:
                if not self._trust_pickle:
                    load_record(data, source, trusted=False)
                planner.load_bytes(read, io.BytesIO(data))
                return
            saved = load_record(data, source, trusted=self._trust_pickle)
            if not isinstance(saved, torch.Tensor):
                raise CorruptCheckpointError(f"{source} holds a {type(saved).__name__}, expected a tensor")
            if chunk is not None:
                check_saved(saved, chunk, load.metadata, source, fqn)
            if saved.dtype != target.dtype:
                _log.warning("%s was saved as %s and is loaded as %s", fqn, saved.dtype, target.dtype)
            for dim, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
                saved = saved.narrow(dim, offset, length)
            target.copy_(saved)

        crcs = unpack_crcs(packed, info.length, source=source)
        piece = Piece(key, info.offset, info.offset + info.length, 0, info.length, crcs, None, use, item)
        if self._verify and load.record.stock:
            piece.check = archive_fault
        return item, [piece]

    @staticmethod
    def _piece_done(item: _Item, planner: LoadPlanner) -> None:
        item.left -= 1
        if item.left == 0 and item.target is not None:
            planner.commit_tensor(item.read, item.target)

    def _corrupt(self, load: _Load, piece: Piece, fault: str) -> CorruptCheckpointError:
        fqn = piece.item.read.storage_index.fqn
        error = CorruptCheckpointError(
            f"{fqn} in {load.url} is damaged: {fault}; restore the object or load an older checkpoint"
        )
        error.with_context(rank=load.rank, bucket=load.url.bucket, key=piece.key)
        return error

    def _check_record(self, load: _Load) -> None:
        if not (self._verify and load.record.stock):
            return
        try:
            check_unchanged(load.record, self._store(load), load.rank)
        except StorageError as error:
            _log.info("%s was loaded, and its record not looked at again: %s", load.url, error)


def _target(read: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target: torch.Tensor = planner.resolve_tensor(read).detach()
    if tuple(target.shape) != tuple(read.lengths):
        raise ConfigError(
            f"{read.dest_index.fqn}: the plan wants {tuple(read.lengths)} elements, the template has {tuple(target.shape)}"
        )
    return target
