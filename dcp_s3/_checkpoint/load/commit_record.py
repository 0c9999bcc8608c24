"""The commit record as a load reads it: held against its manifest, and asked again when data have gone."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_s3._checkpoint.care.ranks import check_of_newest_save
from dcp_s3._checkpoint.format.layout import is_write_id, manifest_name, record_name
from dcp_s3._checkpoint.format.manifest import Manifest
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
        sha256: Of its bytes, in hex; empty until :meth:`read`.
        stock: Another writer's checkpoint, which has no manifest, and whose objects have names that are used again.
        seen: The record as the store gave it, without its bytes.
    """

    url: CheckpointUrl
    name: str
    sha256: str = ""
    stock: bool = False
    seen: Fetched | None = None

    @property
    def key(self) -> str:
        """The key of its object."""
        return self.url.key(self.name)

    def read(self, store: ControlStore, deadline: Deadline, *, verify: bool) -> Metadata:
        """Read the record, of one save together with its manifest.

        Args:
            store: The bucket.
            deadline: The load's; it ends the reading of a checkpoint that is replaced again and again.
            verify: Hold it against its manifest.

        Raises:
            CheckpointNotFoundError: There is none, reading it is not permitted, or it is a rank's own of an older save.
            CorruptCheckpointError: It is not what its manifest says, or names a global that is not allowed.
            StorageError: The store failed.
        """
        while True:
            fetched = self._get(store)
            body, self.seen = fetched.body, dataclasses.replace(fetched, body=b"")
            self.sha256 = hashlib.sha256(body).hexdigest()
            metadata = record_format.loads(
                body, source=f"s3://{self.url.bucket}/{self.key}", max_bytes=store.config.max_record_bytes
            )
            try:
                self._check_manifest(store, metadata, len(body), verify=verify)
            except CorruptCheckpointError:
                # a save may have replaced the checkpoint, and deleted the old manifest, between the two reads
                if hashlib.sha256(self._get(store).body).hexdigest() == self.sha256:
                    raise
                deadline.check("reading a checkpoint that is replaced again and again")
            else:
                check_of_newest_save(store, self.url, self.name, _write_id(metadata))
                return metadata

    def missing_object_error(self, store: ControlStore, error: StorageError) -> DcpS3Error:
        """A data object is missing: was the checkpoint replaced meanwhile, or is it broken?

        Args:
            store: The bucket.
            error: What the store said of the object.

        Returns:
            The error to raise.
        """
        try:
            now = hashlib.sha256(self._get(store).body).hexdigest()
        except CheckpointNotFoundError:
            now = ""
        if now != self.sha256:
            return CheckpointReplacedError(
                f"{self.url} was replaced or deleted while it was read; load again"
            ).with_context(bucket=self.url.bucket, key=error.key)
        return CorruptCheckpointError(
            f"a data object of {self.url} is missing although its record is there; dcp-s3 verify lists what is left"
        ).with_context(bucket=self.url.bucket, key=error.key, status=error.status, code=error.code)

    def _get(self, store: ControlStore) -> Fetched:
        try:
            return store.get(self.key)
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

    def _check_manifest(self, store: ControlStore, metadata: Metadata, size: int, *, verify: bool) -> None:
        write_id = _write_id(metadata)
        # two marks, so that no one damaged byte makes it pass for a stock writer's, which has nothing to be held against
        ours = is_write_id(write_id) or any("crc32c" in info.__dict__ for info in metadata.storage_data.values())
        self.stock = not ours
        if not verify or not ours:
            return
        name = self.url.key(manifest_name(write_id or ""))
        try:
            manifest = Manifest.from_json(store.get(name).body, source=f"s3://{self.url.bucket}/{name}")
        except StorageError as error:
            if not is_missing(error):
                raise
            raise CorruptCheckpointError(
                f"the manifest of {self.url} is missing, so its record cannot be trusted; verify=False loads without it"
            ).with_context(bucket=self.url.bucket, key=name) from error
        if manifest.metadata_sha256 != self.sha256 or manifest.metadata_bytes != size:
            raise CorruptCheckpointError(
                f"{self.name} of {self.url} is not the one that its manifest names: bytes were changed after the save"
            ).with_context(bucket=self.url.bucket, key=self.key)


def _write_id(metadata: Metadata) -> str | None:
    return metadata.storage_meta.save_id if metadata.storage_meta is not None else None
