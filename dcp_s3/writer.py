"""S3StorageWriter: what DCP calls to save, in the order in which it calls it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import logging
import pickle
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_s3._checkpoint import metadata as record_format
from dcp_s3._checkpoint.collector import Pause, gc_paused
from dcp_s3._checkpoint.commit import (
    Observed,
    check_permitted,
    commit,
    condition_of,
    confirm,
    delete_replaced,
    look,
    put_manifest,
)
from dcp_s3._checkpoint.coverage import flaw_of
from dcp_s3._checkpoint.deadline import deadline_s, outlasting_s
from dcp_s3._checkpoint.layout import (
    CheckpointUrl,
    join_id,
    manifest_name,
    new_token,
    new_write_id,
    parse_url,
    record_name,
)
from dcp_s3._checkpoint.loadable import Loadability
from dcp_s3._checkpoint.manifest import Manifest, ObjectEntry
from dcp_s3._checkpoint.presence import check_still_there
from dcp_s3._checkpoint.record import is_raw, opaque
from dcp_s3._checkpoint.shard import ShardWriter
from dcp_s3._staging.buffers import lease_of
from dcp_s3._staging.stager import stager_for
from dcp_s3._staging.turn import World, take_turn, wait_for_saves
from dcp_s3._transfer.dataplane import Job, data_plane
from dcp_s3._transfer.pace import Pace
from dcp_s3._transfer.payload import Progress
from dcp_s3._transfer.plan import choose_part_bytes
from dcp_s3._transfer.probe import Conditions, conditions_of, probe_cleared
from dcp_s3._transfer.retry import Counter, Deadline
from dcp_s3._transfer.store import ControlStore
from dcp_s3.config import S3Config
from dcp_s3.errors import CheckpointExistsError, ConfigError, DcpS3Error, StorageError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from dcp_s3._staging.buffers import Lease
    from dcp_s3._staging.stager import Stager
    from dcp_s3._staging.turn import Turn
    from dcp_s3._transfer.upload import ObjectReceipt

__all__ = ["S3StorageWriter"]

_log = logging.getLogger(__name__)

_RESULTS_S: Final = 1.0
"""So long a rank's results are on their way to the coordinator; then they are dropped, without a pass of the collector."""
_RECORD_OVERHEAD: Final = 2048
"""Upper estimate of what a record adds to its tensor's bytes; measured 1,577."""


@dataclass(slots=True)
class _Save:
    """State of one save on one rank, from set_up_storage_writer to finish."""

    url: CheckpointUrl
    rank: int
    coordinator: bool
    use_collectives: bool
    deadline: Deadline
    store: ControlStore
    job: Job
    pause: Pause
    turn: Turn | None = None
    write_id: str = field(default_factory=new_write_id)
    started: float = field(default_factory=time.monotonic)
    observed: Observed | None = None
    conditions: Conditions | None = None
    probed: bool = False

    @property
    def record(self) -> str:
        return record_name(None if self.use_collectives else self.rank)

    @property
    def other_record(self) -> str:
        """A record that is there if the last save to this URL was of the other kind."""
        return record_name(0 if self.use_collectives else None)


class S3StorageWriter(StorageWriter):
    """Saves DCP checkpoints to S3, streaming and atomic. Also DCP's ``AsyncStager`` for ``async_save``.

    One writer serves any number of saves, ids and threads, and can be pickled at any time: it holds nothing but its URL,
    its config and its flags.

    Args:
        url: ``s3://bucket/prefix`` of the checkpoint, or of the place below which relative ``checkpoint_id`` names lie.
        config: Endpoint, credentials and limits; by default all from the environment, by AWS's conventions.
        overwrite: Replace an existing checkpoint. It stays loadable until the new one is committed.

    Raises:
        ConfigError: The URL or the config is not valid.
    """

    _synchronize_after_execute = True

    def __init__(self, url: str | None = None, *, config: S3Config | None = None, overwrite: bool = True) -> None:
        super().__init__()
        if config is not None and not isinstance(config, S3Config):
            raise ConfigError(f"config must be an S3Config, got {type(config).__name__}")
        self._base = None if url is None else parse_url(url)
        self._config = config if config is not None else S3Config.from_env()
        self._overwrite = overwrite
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def __repr__(self) -> str:
        return f"S3StorageWriter({str(self._base) if self._base else None!r}, config={self._config!r})"

    # ------------------------------------------------------------------ DCP's StorageWriter, in call order

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is an ``s3://`` URL (as text, or as the Path that somebody made of it)."""
        try:
            parse_url(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP when a save is given a ``checkpoint_id``: the next save of this thread goes there."""
        self._local.next_url = None if checkpoint_id is None else join_id(self._base, checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """What the planner may know of the storage."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """URL of this thread's save: the coming one, else the present or last one."""
        url = getattr(self._local, "next_url", None)
        if url is None:
            save = getattr(self._local, "save", None)
            url = save.url if save is not None else self._base
        return None if url is None else str(url)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Begin a save: everything that belongs to one save is made here, since DCP does not always call ``reset``."""
        rank = int(kwargs.get("rank") or 0)
        url = getattr(self._local, "next_url", None) or self._base
        self._local.next_url = None
        turn = take_turn()
        if turn is not None:
            turn.place, turn.rank = str(url), rank
        with _failure_told(url, rank, turn):
            if url is None:
                raise ConfigError(
                    "nowhere to save to: give S3StorageWriter a url, or dcp.save / dcp.async_save a checkpoint_id"
                )
            limit_s = deadline_s(self._config.save_deadline_s, "save_deadline_s")
            if turn is None:
                wait_for_saves(outlasting_s(limit_s))
            else:
                turn.wait(outlasting_s(limit_s))
                turn.check_world()
            deadline = Deadline(limit_s)
            counter = Counter()
            self._local.save = _Save(
                url=url,
                rank=rank,
                coordinator=is_coordinator,
                use_collectives=bool(kwargs.get("use_collectives", True)),
                deadline=deadline,
                store=ControlStore(self._config, url.bucket, deadline=deadline, rank=rank, counter=counter),
                job=Job(url.bucket, deadline, counter, Progress(), rank),
                pause=Pause(),
                turn=turn,
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add: no per-save value may travel in a plan that DCP may have cached."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: look at what the save will replace, before a byte is sent.

        Raises:
            CheckpointExistsError: ``overwrite=False`` and a checkpoint is there, or one is there that was saved with another
                ``use_collectives``; on every rank, through DCP.
        """
        save = self._current()
        with _failure_told(save.url, save.rank, save.turn):
            key = save.url.key(save.record)
            save.observed = look(save.store, key, save.url.key(save.other_record))
            if save.observed.etag is not None and not self._overwrite:
                raise CheckpointExistsError(
                    f"{save.url} already holds a checkpoint and overwrite=False; choose another id or overwrite=True"
                ).with_context(rank=save.rank, bucket=save.url.bucket, key=key)
            if self._config.conditional_commit == "required" or not save.observed.certain:
                # what may be refused is refused before a byte is sent; else the probe, which leaves an object, waits for finish
                with probe_cleared(save.store, save.url.key(manifest_name(save.write_id))):
                    save.conditions, save.probed = self._conditions(save), True
                    check_permitted(save.store, key, save.observed, save.conditions)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream this rank's items. Returns when every object is complete and verified."""
        save = self._current()
        with _failure_told(save.url, save.rank, save.turn):
            try:
                results = self._write(save, plan, planner)
            finally:
                save.pause.end_in(_RESULTS_S)
        if save.turn is not None and save.use_collectives and not save.coordinator:
            save.turn.settled = True  # the rest is the coordinator's, and so is telling what becomes of it
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: manifest, then the record; the checkpoint is true when its PUT has been done.

        Args:
            metadata: The global metadata, completed in place; ``dcp.save`` returns the same object.
            results: All ranks' write results.
        """
        save = self._current()
        with _failure_told(save.url, save.rank, save.turn):
            try:
                self._finish(save, metadata, results)
            finally:
                save.pause.end()
        if save.turn is not None:
            save.turn.settled = True

    # ------------------------------------------------------------------ DCP's AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> Any:  # noqa: ANN401 -- a state dict, or a future of one
        """Copy a state dict so that training may go on at once. Never raises: a failure is raised in the save."""
        return self._stager().stage(state_dict, place=None if self._base is None else str(self._base))

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` waits for the staging before it returns."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Wait for a staging that runs in the background."""
        self._stager().synchronize()

    def close(self) -> None:
        """Give the staging buffers back. Needs not be called for correctness."""
        self._stager().close()

    def _stager(self) -> Stager:
        config = self._config
        return stager_for(buffers=config.staging_buffers, async_staging=config.async_staging)

    # ------------------------------------------------------------------ inside

    def _current(self) -> _Save:
        save: _Save | None = getattr(self._local, "save", None)
        if save is None:
            raise ConfigError("set_up_storage_writer was not called on this thread; use the writer through dcp.save")
        return save

    def _finish(self, save: _Save, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        from dcp_s3 import __version__

        if save.observed is None:
            raise ConfigError("finish was called without prepare_global_plan; this DCP version is not supported")
        if not save.probed:
            save.conditions = self._conditions(save)
        with gc_paused():
            entries = _take_entries(results)
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = {result.index: result.storage_data for one_rank in results for result in one_rank}
            metadata.storage_meta = StorageMeta(checkpoint_id=str(save.url), save_id=save.write_id)
            _check_coverage(metadata, partial=not save.use_collectives)
            _correct_dtypes(metadata)
            body = record_format.dumps(metadata)
        manifest = Manifest(
            write_id=save.write_id,
            record=save.record,
            metadata_sha256=hashlib.sha256(body).hexdigest(),
            metadata_bytes=len(body),
            world_size=len(results) if save.use_collectives else World.now().size,
            created_unix_s=time.time(),
            writer=f"dcp_s3 {__version__}",
            objects=entries,
            conditional=any(condition_of(save.observed, save.conditions)),
        )
        put_manifest(save.store, save.url.key(manifest_name(save.write_id)), manifest.to_json(), save.deadline)
        key = save.url.key(save.record)
        commit(
            save.store,
            key,
            body,
            write_id=save.write_id,
            observed=save.observed,
            conditions=save.conditions,
            deadline=save.deadline,
            still_there=lambda: check_still_there(save.store, save.url, manifest, save.deadline),
        )
        confirmed = confirm(save.store, key, len(body), write_id=save.write_id, observed=save.observed)
        seconds = time.monotonic() - save.started
        total = sum(entry.size for entry in entries)
        _log.info(
            "saved %s: %d bytes in %d objects from %d ranks in %.2f s (%.2f GiB/s), %d requests repeated here",
            save.url, total, len(entries), len(results), seconds, total / seconds / 2**30, save.job.counter.retries,
        )  # fmt: skip
        if confirmed and save.observed.write_id is not None:
            if save.conditions is not None and save.conditions.replace is not None:
                delete_replaced(save.store, save.url, save.observed)
            else:
                # a PUT of its record that was repeated may arrive yet, over ours, and needs what it names
                _log.info("the store does not honour If-Match: what %s has replaced is left to dcp-s3 gc", save.url)

    def _conditions(self, save: _Save) -> Conditions | None:
        mode = self._config.conditional_commit
        if mode == "off":
            return None
        conditions = conditions_of(save.store, save.url.key(manifest_name(save.write_id)))
        if conditions.create and conditions.replace is not None:
            return conditions
        lacking = "If-None-Match and If-Match" if not conditions.create else "If-Match"
        if mode == "required":
            raise StorageError(
                f"the store does not honour {lacking} and conditional_commit='required': two writers could overwrite each other"
            ).with_context(rank=save.rank, bucket=save.url.bucket)
        _log.warning(
            "the store does not honour %s: two writers that race for %s may overwrite each other", lacking, save.url
        )
        return conditions

    def _write(self, save: _Save, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        plane = data_plane(self._config)
        total, largest = _estimate(plan.items)
        part_bytes = choose_part_bytes(
            total, largest=largest, wanted=self._config.part_bytes, memory_bytes=self._config.memory_bytes
        )
        shard = ShardWriter(
            plane, save.job, save.url, new_token(), save.rank, part_bytes=part_bytes, pace=self._pace(save, planner)
        )
        leases: set[Lease] = set()
        loadability = Loadability()
        try:
            results = [self._write_item(shard, item, planner, leases, loadability) for item in _bytes_first(plan.items)]
            receipts = shard.finish()
        except BaseException as error:
            try:
                shard.abort()
            finally:
                shard.abort()  # what is left, where an interrupt ended the first call; else nothing
            portable = _portable(error, save.rank)
            if portable is error:
                raise
            raise portable from error
        finally:
            for lease in leases or _leases_of_planner(planner):
                lease.release()
        _attach(results, receipts, save.url)
        loadability.warn(save.url)
        seconds = time.monotonic() - save.started
        _log.debug("rank %d: %d bytes in %d objects in %.2f s", save.rank, shard.size, len(receipts), seconds)
        return results

    def _pace(self, save: _Save, planner: SavePlanner) -> Pace | None:
        """A pace for what this writer's stager has staged: the training goes on beside its save."""
        values, cores = getattr(planner, "state_dict", {}).values(), self._config.background_cores
        first = next((value for value in values if isinstance(value, torch.Tensor)), None)
        staged = first is not None and lease_of(first) is not None
        return Pace(cores, save.job.progress, save.deadline) if cores is not None and staged else None

    @staticmethod
    def _write_item(
        shard: ShardWriter, item: WriteItem, planner: SavePlanner, leases: set[Lease], loadability: Loadability
    ) -> WriteResult:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            lease = lease_of(data)
            if lease is not None:
                leases.add(lease)
            if data.layout is not torch.strided:  # loading copies into the template's values, which leaves it empty
                raise ConfigError(
                    f"{item.index.fqn} is a {data.layout} tensor, which DCP cannot load back: save it dense"
                )
            if is_raw(data.detach()):
                info = shard.write_tensor(data)
            else:
                record = memoryview(opaque(data))
                loadability.look(item.index.fqn, record)
                info = shard.write_bytes(record)
            info.__dict__["dtype"] = data.dtype  # a cached plan, and its metadata, know an earlier save's
        else:
            loadability.look(item.index.fqn, data.getbuffer())
            info = shard.write_bytes(data.getbuffer())
        return WriteResult(index=item.index, size_in_bytes=info.length, storage_data=info)


@contextlib.contextmanager
def _failure_told(url: CheckpointUrl | None, rank: int, turn: Turn | None) -> Iterator[None]:
    """Log what a save in the background fails of: nobody may ever ask its future. Others hear of it by the exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, DcpS3Error):
            error.with_context(rank=rank)
        told = str(error) if isinstance(error, DcpS3Error) else f"{type(error).__name__}: {error}"
        background = turn is not None or threading.current_thread() is not threading.main_thread()
        _log.log(
            logging.ERROR if background else logging.DEBUG, "the save of %s failed on rank %d: %s", url, rank, told
        )
        if turn is not None:
            turn.settled = True
        raise


def _leases_of_planner(planner: SavePlanner) -> set[Lease]:
    """Leases of a rank that had nothing to write, since its replicas are written elsewhere: they end with its save too."""
    values = getattr(planner, "state_dict", {}).values()
    return {lease for value in values if isinstance(value, torch.Tensor) and (lease := lease_of(value)) is not None}


def _bytes_first(items: list[WriteItem]) -> list[WriteItem]:
    """BYTE_IO items first: only resolving tells their size, and the objects they hold are the planner's copies."""
    return sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)


def _estimate(items: list[WriteItem]) -> tuple[int, int]:
    """Bytes of all records and of the largest, from the plan. The item's own chunk counts, not the global tensor."""
    total = largest = 0
    for item in items:
        nbytes = _RECORD_OVERHEAD
        if item.tensor_data is not None:
            nbytes += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        total += nbytes
        largest = max(largest, nbytes)
    return total, largest


def _attach(results: list[WriteResult], receipts: list[ObjectReceipt], url: CheckpointUrl) -> None:
    """Send the receipts to the coordinator with the first result; :func:`_take_entries` takes them off again."""
    if results:
        prefix = len(url.key(""))
        results[0].storage_data.__dict__["objects"] = [
            (receipt.key[prefix:], receipt.size, receipt.etag, receipt.part_bytes, receipt.crc32c)
            for receipt in receipts
        ]


def _take_entries(results: list[list[WriteResult]]) -> tuple[ObjectEntry, ...]:
    found = []
    for one_rank in results:
        if one_rank:
            for key, size, etag, part_bytes, crcs in one_rank[0].storage_data.__dict__.pop("objects", ()):
                found.append(ObjectEntry(key=key, size=size, etag=etag, part_bytes=part_bytes, crc32c=crcs))
    return tuple(sorted(found, key=lambda entry: entry.key))


def _check_coverage(metadata: Metadata, *, partial: bool) -> None:
    """Refuse to commit tensors that could not be loaded whole. DCP looks at this only if several ranks save together.

    Args:
        metadata: The global metadata.
        partial: It is one rank's own, which need hold no more than that rank's shards.

    Raises:
        ConfigError: A tensor has elements that nobody has saved, or that several have.
    """
    flawed = []
    written = collections.Counter(index.fqn for index in metadata.storage_data)
    for name, item in metadata.state_dict_metadata.items():
        flaw, records = None, 1
        if isinstance(item, TensorStorageMetadata):
            flaw = flaw_of(item.size, [(chunk.offsets, chunk.sizes) for chunk in item.chunks], partial=partial)
            records = len(item.chunks)
        if flaw is None and written[name] < records:
            flaw = f"is not whole: {written[name]} of its {records} records were written"
        if flaw is not None:
            flawed.append(f"{name} {flaw}")
    if flawed:
        more = f" (and {len(flawed) - 1} other tensors have such faults)" if len(flawed) > 1 else ""
        raise ConfigError(
            f"{flawed[0]}{more}; nothing was committed, and what was there before stands. Save the shards of all ranks in one "
            "save of their process group (without no_dist), or each rank's own with use_collectives=False"
        )


def _correct_dtypes(metadata: Metadata) -> None:
    """Put the dtypes that were really written into the metadata, where plan caching has kept an earlier save's."""
    for index, info in metadata.storage_data.items():
        dtype = info.__dict__.pop("dtype", None)
        tensor = metadata.state_dict_metadata[index.fqn]
        if dtype is not None and isinstance(tensor, TensorStorageMetadata) and tensor.properties.dtype != dtype:
            tensor.properties = dataclasses.replace(tensor.properties, dtype=dtype)


def _portable(error: BaseException, rank: int) -> BaseException:
    """The error itself if DCP can send it to the other ranks, else one of ours that says the same."""
    if isinstance(error, DcpS3Error):
        return error.with_context(rank=rank)
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own bytes
    except Exception:  # noqa: BLE001 -- whatever pickle or a foreign __init__ raises
        return DcpS3Error(f"{type(error).__name__}: {error}").with_context(rank=rank)
    return error
