"""S3StorageReader: what DCP calls to load, in the order in which it calls it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import hashlib
import io
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

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
from dcp_s3._checkpoint.archive import fault_of as archive_fault
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
from dcp_s3._checkpoint.load_coverage import missing
from dcp_s3._checkpoint.manifest import Manifest
from dcp_s3._checkpoint.overlap import rounds
from dcp_s3._checkpoint.ranks import check_of_newest_save
from dcp_s3._transfer.dataplane import Job, data_plane
from dcp_s3._transfer.download import Downloader
from dcp_s3._transfer.payload import Progress
from dcp_s3._transfer.retry import Counter, Deadline
from dcp_s3._transfer.store import ControlStore, Fetched, is_missing
from dcp_s3.config import S3Config
from dcp_s3.errors import (
    AccessDeniedError,
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

_CLEARLY: Final = dt.timedelta(seconds=2)
"""Times of a store are whole seconds of several machines: what is younger by less may have been written before."""

_MOST_SHOWN: Final = 5
"""Tensors, URLs, and ranks of each that an error names."""

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
        stock: Another writer's checkpoint, which has no manifest, and whose objects have names that are used again.
        seen: The record as the store gave it, without its bytes.
    """

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
    stock: bool = False
    seen: Fetched | None = None


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
        return dataclasses.replace(plan, storage_data=(str(load.url), load.sha256 if shared else None))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks must have read the same record.

        Raises:
            ConfigError: The ranks were given different URLs.
            CheckpointReplacedError: A save replaced the checkpoint while the ranks read its record.
        """
        urls: dict[str, list[int]] = {}
        for rank, plan in enumerate(plans):
            urls.setdefault(plan.storage_data[0], []).append(rank)
        if len(urls) > 1:
            raise ConfigError(f"the ranks of one load must load from one URL: {_told_by_rank(urls)}")
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

    def _read_record(self, load: _Load) -> Metadata:
        store = self._store(load)
        key = load.url.key(load.record)
        while True:
            fetched = self._get_record(store, load)
            body, load.seen = fetched.body, dataclasses.replace(fetched, body=b"")
            load.sha256 = hashlib.sha256(body).hexdigest()
            metadata = record_format.loads(body, source=f"s3://{load.url.bucket}/{key}")
            try:
                self._check_manifest(store, load, metadata, len(body))
            except CorruptCheckpointError:
                # a save may have replaced the checkpoint, and deleted the old manifest, between the two reads
                if hashlib.sha256(self._get_record(store, load).body).hexdigest() == load.sha256:
                    raise
                load.deadline.check("reading a checkpoint that is replaced again and again")
            else:
                check_of_newest_save(store, load.url, load.record, _write_id(metadata))
                return metadata

    def _get_record(self, store: ControlStore, load: _Load) -> Fetched:
        key = load.url.key(load.record)
        try:
            return store.get(key)
        except StorageError as error:
            if is_missing(error) or (isinstance(error, AccessDeniedError) and error.code == "AccessDenied"):
                why = "there is none" if is_missing(error) else "there is none, or reading it is not permitted"
                if load.record != record_name(None):  # DCP puts both texts into one
                    raise CheckpointNotFoundError(f"no readable {load.record} either ({why})") from error
                raise CheckpointNotFoundError(
                    f"no checkpoint at {load.url}: no readable {load.record} ({why}); check the URL, or list with dcp-s3 ls"
                ).with_context(
                    bucket=load.url.bucket, key=key, operation="GetObject", status=error.status, code=error.code
                ) from error
            raise

    def _check_manifest(self, store: ControlStore, load: _Load, metadata: Metadata, size: int) -> None:
        write_id = _write_id(metadata)
        # two marks, so that no one damaged byte makes it pass for a stock writer's, which has nothing to be held against
        ours = is_write_id(write_id) or any("crc32c" in info.__dict__ for info in metadata.storage_data.values())
        load.stock = not ours
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
        if load.metadata is not None and (flaws := missing(load.metadata, plan, planner)):
            shown = "; ".join(flaws[:_MOST_SHOWN]) + (
                f"; and {len(flaws) - _MOST_SHOWN} more" * (len(flaws) > _MOST_SHOWN)
            )
            raise CorruptCheckpointError(
                f"{load.url} is no whole checkpoint, and this load would leave values as they are: {shown}; load an older one"
            ).with_context(rank=load.rank, bucket=load.url.bucket, key=load.url.key(load.record))
        items = [self._pieces(load, read, planner) for read in plan.items]
        total = sum(piece.length for _, pieces in items for piece in pieces)
        downloader: Downloader[Batch] = Downloader(plane, job)
        try:
            for pieces in _in_rounds(items):
                for read in downloader.run(batches(pieces)):
                    batch = read.about
                    faults = batch.faults()
                    if faults:
                        if read.tries == 1:  # once more: the store's copy may be good
                            downloader.again(read)
                            continue
                        raise self._corrupt(load, *faults[0])
                    self._check_age(load, read.key, downloader.modified.get(read.key))
                    batch.deliver()
                    for piece in batch.pieces:
                        self._piece_done(piece.item, planner)
        except StorageError as error:
            if is_missing(error):
                raise self._gone(load, error) from error
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
                _check_saved(saved, chunk, load.metadata, source, fqn)
            if saved.dtype != target.dtype:
                _log.warning("%s was saved as %s and is loaded as %s", fqn, saved.dtype, target.dtype)
            for dim, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
                saved = saved.narrow(dim, offset, length)
            target.copy_(saved)

        crcs = unpack_crcs(packed, info.length, source=source)
        piece = Piece(key, info.offset, info.offset + info.length, 0, info.length, crcs, None, use, item)
        if self._verify and load.stock:
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

    def _check_age(self, load: _Load, key: str, modified: dt.datetime | None) -> None:
        """Refuse an object that a save has overwritten in place since the record, which is written last, was.

        The objects of a copy have any age, and those of our own writer are never overwritten.
        """
        if not (self._verify and load.stock and modified is not None and load.seen is not None):
            return
        read_at, recorded = load.seen.server_time, load.seen.info.last_modified
        if read_at is not None and modified - read_at >= _CLEARLY:
            raise CheckpointReplacedError(
                f"{load.url} was overwritten while it was loaded: its record was read at {read_at:%H:%M:%S} and an object written "
                f"at {modified:%H:%M:%S}, by the store's clock; load again when that save has finished"
            ).with_context(rank=load.rank, bucket=load.url.bucket, key=key)
        if recorded is not None and modified - recorded >= _CLEARLY and _written_at(load.metadata) == str(load.url):
            raise CorruptCheckpointError(
                f"{load.url} may be a mixture of two checkpoints: its record is of {recorded:%Y-%m-%d %H:%M:%S} and an object of "
                f"{modified:%Y-%m-%d %H:%M:%S}, so that a later save, which has not finished, overwrote it in place; load an older "
                "checkpoint, or with verify=False if the object was only copied onto itself"
            ).with_context(rank=load.rank, bucket=load.url.bucket, key=key)

    def _check_record(self, load: _Load) -> None:
        """The record of a checkpoint that can be overwritten in place must be the same behind the load as before it."""
        if not (self._verify and load.stock and load.seen is not None):
            return
        key, before = load.url.key(load.record), load.seen.info
        try:
            now = self._store(load).head(key)
        except StorageError as error:
            if not is_missing(error):
                _log.info("%s was loaded, and its record not looked at again: %s", load.url, error)
                return
            now = None
        if now is None or (now.last_modified, _plain(now.etag)) != (before.last_modified, _plain(before.etag)):
            raise CheckpointReplacedError(
                f"{load.url} was replaced or deleted while it was read; load again"
            ).with_context(rank=load.rank, bucket=load.url.bucket, key=key)

    def _gone(self, load: _Load, error: StorageError) -> Exception:
        """A data object is missing: was the checkpoint replaced meanwhile, or is it broken?"""
        try:
            now = hashlib.sha256(self._get_record(self._store(load), load).body).hexdigest()
        except CheckpointNotFoundError:
            now = ""
        if now != load.sha256:
            return CheckpointReplacedError(
                f"{load.url} was replaced or deleted while it was read; load again"
            ).with_context(rank=load.rank, bucket=load.url.bucket, key=error.key)
        return CorruptCheckpointError(
            f"a data object of {load.url} is missing although its record is there; dcp-s3 verify lists what is left"
        ).with_context(rank=load.rank, bucket=load.url.bucket, key=error.key, status=error.status, code=error.code)


def _told_by_rank(urls: dict[str, list[int]]) -> str:
    told = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_SHOWN]))}{', …' * (len(ranks) > _MOST_SHOWN)}: {url}"
        for url, ranks in urls.items()
    ]
    return "; ".join(told[:_MOST_SHOWN]) + "; …" * (len(told) > _MOST_SHOWN)


def _check_saved(
    saved: torch.Tensor, chunk: ChunkStorageMetadata, metadata: Metadata | None, source: str, fqn: str
) -> None:
    """A tensor that was unpickled must be the one that the record describes, or values would be cut or converted unasked."""
    tensor = None if metadata is None else metadata.state_dict_metadata[fqn]
    dtype = tensor.properties.dtype if isinstance(tensor, TensorStorageMetadata) else saved.dtype
    if (tuple(saved.shape), saved.dtype) != (tuple(chunk.sizes), dtype):
        raise CorruptCheckpointError(
            f"{source} is not what the checkpoint's record describes: its object holds {saved.dtype} of {tuple(saved.shape)}, the "
            f"record says {dtype} of {tuple(chunk.sizes)}; restore the object or load an older checkpoint"
        )


def _written_at(metadata: Metadata | None) -> str | None:
    """The URL that a stock writer says it wrote a checkpoint to; ``None`` if it was a directory, or it does not say."""
    where = None if metadata is None or metadata.storage_meta is None else metadata.storage_meta.checkpoint_id
    try:
        return None if where is None else str(parse_url(where))
    except (ConfigError, TypeError):
        return None


def _plain(etag: str) -> str:
    """An ETag without quotes and the mark of weakness that some gateways add on one way."""
    return etag.removeprefix("W/").strip('"')


def _in_rounds(items: list[tuple[_Item, list[Piece]]]) -> list[list[Piece]]:
    """The pieces of all items; of those whose targets share memory, a later one's come when the earlier one is done.

    What stays in memory is then what DCP's own readers leave there, who take object after object, and in each item after
    item, in the plan's order.
    """
    objects: dict[str, list[tuple[_Item, list[Piece]]]] = {}
    for item, pieces in items:
        if pieces:
            objects.setdefault(pieces[0].key, []).append((item, pieces))
    ordered = [entry for group in objects.values() for entry in group]
    numbers = rounds([item.target for item, _ in ordered])
    out: list[list[Piece]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    for number, (_, pieces) in zip(numbers, ordered, strict=True):
        out[number] += pieces
    return out


def _write_id(metadata: Metadata) -> str | None:
    return metadata.storage_meta.save_id if metadata.storage_meta is not None else None


def _target(read: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target: torch.Tensor = planner.resolve_tensor(read).detach()
    if tuple(target.shape) != tuple(read.lengths):
        raise ConfigError(
            f"{read.dest_index.fqn}: the plan wants {tuple(read.lengths)} elements, the template has {tuple(target.shape)}"
        )
    return target
