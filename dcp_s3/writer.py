"""S3StorageWriter: what DCP calls to save, in the order in which it calls it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_s3._checkpoint.care.presence import check_still_there
from dcp_s3._checkpoint.format.agreement import Place, check_one_url
from dcp_s3._checkpoint.format.index import Index
from dcp_s3._checkpoint.format.layout import (
    CheckpointUrl,
    index_name,
    join_id,
    new_token,
    new_write_id,
    parse_url,
    record_name,
)
from dcp_s3._checkpoint.group_deadline import deadline_s, outlasting_s
from dcp_s3._checkpoint.save.commit import (
    Observed,
    check_permitted,
    commit,
    condition_of,
    confirm,
    delete_replaced,
    look,
    put_index,
    usable_conditions,
)
from dcp_s3._checkpoint.save.completion import complete
from dcp_s3._checkpoint.save.loadable import Loadability
from dcp_s3._checkpoint.save.results import places, portable, results_of, take_reports, without_places
from dcp_s3._checkpoint.save.shard import ShardWriter, bytes_first, estimate, write_value
from dcp_s3._runtime.gc_pause import Pause, gc_paused
from dcp_s3._staging.buffers import lease_of
from dcp_s3._staging.stager import stager_for
from dcp_s3._staging.turn import World, take_turn, wait_for_saves
from dcp_s3._transfer.http.payload import Progress
from dcp_s3._transfer.job import Job
from dcp_s3._transfer.limits.cpu_throttle import CpuThrottle
from dcp_s3._transfer.limits.retry import Counter, Deadline
from dcp_s3._transfer.part_plan import choose_part_bytes
from dcp_s3._transfer.s3.control_store import ControlStore
from dcp_s3._transfer.s3.planes import data_plane
from dcp_s3._transfer.s3.probe import Conditions, probe_cleared
from dcp_s3.config import S3Config
from dcp_s3.errors import CheckpointExistsError, ConfigError, DcpS3Error

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from dcp_s3._checkpoint.save.results import Written
    from dcp_s3._staging.buffers import Lease
    from dcp_s3._staging.stager import Stager
    from dcp_s3._staging.turn import Turn

__all__ = ["S3StorageWriter"]

_log = logging.getLogger(__name__)

_ONE_URL: Final = "the ranks of one save must save to one URL"
_RESULTS_S: Final = 1.0
"""So long a rank's results are on their way to the coordinator; then they are dropped, without a pass of the collector."""


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
        """Tell the coordinator where this rank saves to; nothing else of one save may travel in a plan, which DCP may cache."""
        if plan.storage_data is not None and not isinstance(plan.storage_data, Place):
            return plan  # a planner's own use of it; where this rank saves to is told with its results
        return dataclasses.replace(plan, storage_data=Place(str(self._current().url)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: look at what the save will replace, before a byte is sent.

        Raises:
            ConfigError: The ranks were given different URLs.
            CheckpointExistsError: ``overwrite=False`` and a checkpoint is there, or one is there that was saved with another
                ``use_collectives``; on every rank, through DCP.
        """
        save = self._current()
        with _failure_told(save.url, save.rank, save.turn):
            check_one_url(places(plans, save.started), _ONE_URL, "Nothing was sent, and what was there before stands")
            key = save.url.key(save.record)
            save.observed = look(save.store, key, save.url.key(save.other_record))
            if save.observed.etag is not None and not self._overwrite:
                raise CheckpointExistsError(
                    f"{save.url} already holds a checkpoint and overwrite=False; choose another id or overwrite=True"
                ).with_context(rank=save.rank, bucket=save.url.bucket, key=key)
            if self._config.conditional_commit == "required" or not save.observed.certain:
                # what may be refused is refused before a byte is sent; else the probe, which leaves an object, waits for finish
                with probe_cleared(save.store, save.url.key(index_name(save.write_id))):
                    save.conditions, save.probed = self._conditions(save), True
                    check_permitted(save.store, key, save.observed, save.conditions)
        return without_places(plans)

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
        """On the coordinator: index, then the record; the checkpoint is true when its PUT has been done.

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
        """Give the staging buffers back. Optional: correctness does not depend on it."""
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
        # once more: of a rank whose plan was cached, or made anew by a planner, nothing was known before
        reports = take_reports(results)
        urls = ((rank, report.url) for rank, report in enumerate(reports) if report is not None)
        check_one_url(urls, _ONE_URL, "Nothing was committed, and what was there before stands")
        if not save.probed:
            save.conditions = self._conditions(save)
        with gc_paused():
            done = complete(metadata, results, reports, save.url, save.write_id, partial=not save.use_collectives)
            index = Index(
                write_id=save.write_id,
                record=save.record,
                record_sha256=hashlib.sha256(done.record).hexdigest(),
                record_bytes=len(done.record),
                world_size=len(results) if save.use_collectives else World.now().size,
                created_unix_s=time.time(),
                writer=f"dcp_s3 {__version__}, torch {torch.__version__}",
                version=metadata.version,
                checkpoint_id=str(save.url),
                objects=done.objects,
                columns=done.columns,
                planner_data=done.planner_data,
                conditional=any(condition_of(save.observed, save.conditions)),
            )
            packed = index.to_bytes()
        put_index(save.store, save.url.key(index_name(save.write_id)), packed, save.deadline)
        key = save.url.key(save.record)
        commit(
            save.store,
            key,
            done.record,
            write_id=save.write_id,
            index_sha256=hashlib.sha256(packed).hexdigest(),
            observed=save.observed,
            conditions=save.conditions,
            deadline=save.deadline,
            still_there=lambda: check_still_there(save.store, save.url, index, save.deadline),
        )
        confirmed = confirm(save.store, key, len(done.record), write_id=save.write_id, observed=save.observed)
        seconds = time.monotonic() - save.started
        total = sum(entry.size for entry in done.objects)
        _log.info(
            "saved %s: %d bytes in %d objects from %d ranks in %.2f s (%.2f GiB/s), %d requests repeated here",
            save.url, total, len(done.objects), len(results), seconds, total / seconds / 2**30, save.job.counter.retries,
        )  # fmt: skip
        if confirmed and save.observed.write_id is not None:
            if save.conditions is not None and save.conditions.replace is not None:
                delete_replaced(save.store, save.url, save.observed)
            else:
                # a PUT of its record that was repeated may arrive yet, over ours, and needs what it names
                _log.info("the store does not honour If-Match: what %s has replaced is left to dcp-s3 gc", save.url)

    def _conditions(self, save: _Save) -> Conditions | None:
        key = save.url.key(index_name(save.write_id))
        conditions, lacking = usable_conditions(save.store, key, self._config.conditional_commit, save.rank)
        if lacking:
            _log.warning(
                "the store does not honour %s: two writers that race for %s may overwrite each other", lacking, save.url
            )
        return conditions

    def _write(self, save: _Save, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        plane = data_plane(self._config)
        total, largest = estimate(plan.items)
        part_bytes = choose_part_bytes(
            total, largest=largest, wanted=self._config.part_bytes, memory_bytes=self._config.memory_bytes
        )
        shard = ShardWriter(
            plane,
            save.job,
            save.url,
            new_token(),
            save.rank,
            part_bytes=part_bytes,
            throttle=self._throttle(save, planner),
        )
        leases: set[Lease] = set()
        loadability = Loadability()
        try:
            items = bytes_first(plan.items)
            written = [self._write_item(shard, item, planner, leases, loadability) for item in items]
            receipts = shard.finish()
        except BaseException as error:
            try:
                shard.abort()
            finally:
                shard.abort()  # what is left, where an interrupt ended the first call; else nothing
            sent = portable(error, save.rank)
            if sent is error:
                raise
            raise sent from error
        finally:
            for lease in leases or _leases_of_planner(planner):
                lease.release()
        loadability.warn(save.url)
        seconds = time.monotonic() - save.started
        _log.debug("rank %d: %d bytes in %d objects in %.2f s", save.rank, shard.size, len(receipts), seconds)
        return results_of([item.index for item in items], written, receipts, save.url)

    def _throttle(self, save: _Save, planner: SavePlanner) -> CpuThrottle | None:
        """A throttle for what this writer's stager has staged: the training goes on beside its save."""
        values, cores = getattr(planner, "state_dict", {}).values(), self._config.background_cores
        first = next((value for value in values if isinstance(value, torch.Tensor)), None)
        staged = first is not None and lease_of(first) is not None
        return CpuThrottle(cores, save.job.progress, save.deadline) if cores is not None and staged else None

    @staticmethod
    def _write_item(
        shard: ShardWriter, item: WriteItem, planner: SavePlanner, leases: set[Lease], loadability: Loadability
    ) -> Written:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor) and (lease := lease_of(data)) is not None:
            leases.add(lease)
        return write_value(shard, item.index.fqn, data, loadability)


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
