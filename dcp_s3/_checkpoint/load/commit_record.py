"""The commit record as a load reads it: its index, or another writer's pickle; and asked again when data have gone."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_s3._checkpoint.care.inventory import read_record
from dcp_s3._checkpoint.care.ranks import check_of_newest_save
from dcp_s3._checkpoint.format.layout import record_name
from dcp_s3._checkpoint.load.lazy_metadata import metadata_of
from dcp_s3._checkpoint.pickles import metadata as record_format
from dcp_s3._transfer.s3.control_store import is_missing
from dcp_s3.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    StorageError,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from dcp_s3._checkpoint.care.inventory import Record
    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._transfer.limits.retry import Deadline
    from dcp_s3._transfer.s3.control_store import ControlStore, Fetched
    from dcp_s3.errors import DcpS3Error


@dataclass(slots=True)
class CommitRecord:
    """The record of a checkpoint that is loaded.

    Attributes:
        url: The checkpoint.
        name: ``.metadata``, or the name of a rank's own.
        identity: What tells it from the record of any other save; empty until :meth:`read`.
        stock: Another writer's checkpoint, which has no index, and whose objects have names that are used again.
        seen: The record as the store gave it, without its bytes.
    """

    url: CheckpointUrl
    name: str
    identity: str = ""
    stock: bool = False
    seen: Fetched | None = None

    @property
    def key(self) -> str:
        """The key of its object."""
        return self.url.key(self.name)

    def read(self, store: ControlStore, deadline: Deadline, *, verify: bool) -> Metadata:
        """Read what the checkpoint holds.

        Args:
            store: The bucket.
            deadline: The load's; it ends the reading of a checkpoint that is replaced again and again.
            verify: Refuse a checkpoint of ours without its index.

        Raises:
            CheckpointNotFoundError: There is none, reading it is not permitted, or it is a rank's own of an older save.
            CorruptCheckpointError: Record and index do not belong together, or another writer's record is damaged.
            StorageError: The store failed.
        """
        while True:
            record = self._record(store)
            if record.index is not None or not (record.ours and verify):
                break
            if _is_same(
                self._record(store).fetched, record.fetched
            ):  # no save has replaced it, and deleted the old index, meanwhile
                raise CorruptCheckpointError(
                    f"{self.name} of {self.url} cannot be trusted: {record.reason}; verify=False loads without the index"
                ).with_context(bucket=self.url.bucket, key=self.key)
            deadline.check("reading a checkpoint that is replaced again and again")
        check_of_newest_save(store, self.url, record)
        self.seen = dataclasses.replace(record.fetched, body=b"")
        self.stock = not record.ours
        if record.index is not None and record.index.planner_data != "record":
            self.identity = record.index.write_id
            return metadata_of(record.index)
        body = record.fetched.body if record.whole else store.get(self.key).body
        metadata = record_format.loads(body, source=record.source)
        if record.index is not None:
            if not record.index.describes(body):
                raise CorruptCheckpointError(
                    f"{self.name} of {self.url} is not the one that its index was written for: bytes were changed after the save"
                ).with_context(bucket=self.url.bucket, key=self.key)
            self.identity = record.index.write_id
            return metadata_of(record.index, planner_data=metadata.planner_data)
        self.identity = hashlib.sha256(body).hexdigest()
        return metadata

    def missing_object_error(self, store: ControlStore, error: StorageError) -> DcpS3Error:
        """A data object is missing: was the checkpoint replaced meanwhile, or is it broken?

        Args:
            store: The bucket.
            error: What the store said of the object.

        Returns:
            The error to raise.
        """
        assert self.seen is not None  # noqa: S101 -- it has been read
        try:
            gone = not _is_same(self._record(store).fetched, self.seen)
        except CheckpointNotFoundError:
            gone = True
        if gone:
            return CheckpointReplacedError(
                f"{self.url} was replaced or deleted while it was read; load again"
            ).with_context(bucket=self.url.bucket, key=error.key)
        return CorruptCheckpointError(
            f"a data object of {self.url} is missing although its record is there; dcp-s3 verify lists what is left"
        ).with_context(bucket=self.url.bucket, key=error.key, status=error.status, code=error.code)

    def _record(self, store: ControlStore) -> Record:
        try:
            return read_record(store, self.url, self.name)
        except StorageError as error:
            if is_missing(error) or (isinstance(error, AccessDeniedError) and error.code == "AccessDenied"):
                why = "there is none" if is_missing(error) else "there is none, or reading it is not permitted"
                if self.name != record_name(None):  # DCP puts both texts into one
                    raise CheckpointNotFoundError(f"no readable {self.name} either ({why})") from error
                raise CheckpointNotFoundError(
                    f"no checkpoint at {self.url}: no readable {self.name} ({why}); check the URL, or list with dcp-s3 ls"
                ).with_context(
                    bucket=self.url.bucket, key=self.key, operation="GetObject", status=error.status, code=error.code
                ) from error
            raise


def _is_same(now: Fetched, before: Fetched) -> bool:
    """Whether a record is still that of the same save."""
    return (now.info.etag, now.info.size, now.info.metadata) == (
        before.info.etag,
        before.info.size,
        before.info.metadata,
    )
