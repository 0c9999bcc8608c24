"""Before a late commit: is what the record will name still there?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dcp_s3._checkpoint.care.garbage import SLACK_S
from dcp_s3._checkpoint.format.layout import index_name
from dcp_s3._transfer.limits.attempt_timeout import call_all
from dcp_s3._transfer.s3.control_store import is_missing
from dcp_s3.errors import StorageError

if TYPE_CHECKING:
    from dcp_s3._checkpoint.format.index import Index
    from dcp_s3._checkpoint.format.layout import CheckpointUrl
    from dcp_s3._transfer.limits.retry import Deadline
    from dcp_s3._transfer.s3.control_store import ControlStore

_THREADS: Final = 16
_SHOWN: Final = 3


def check_still_there(store: ControlStore, url: CheckpointUrl, index: Index, deadline: Deadline) -> None:
    """Raise if a collector of garbage, or somebody else, has taken objects that this save is about to commit.

    No collector may take what is younger than ``SLACK_S``, unless it was told that no writer runs: before that age there is
    nothing to look for, and no request is sent. Behind it each object costs a HEAD. The clock is the deadline's, which also
    runs while the machine is suspended.

    Args:
        store: The bucket.
        url: The checkpoint.
        index: What the save has written; it is looked for as well.
        deadline: The save's, from its beginning.

    Raises:
        StorageError: Objects are gone or have another size, or the store cannot say.
    """
    took_s = deadline.seconds - deadline.remaining()
    if took_s <= SLACK_S:
        return
    sizes: dict[str, int | None] = {index_name(index.write_id): None}
    sizes |= {entry.key: entry.size for entry in index.objects}
    keys = [url.key(name) for name in sizes]
    found = call_all(lambda key: _size(store, key), keys, threads=_THREADS)
    lost = [
        key
        for key, size, wanted in zip(keys, found, sizes.values(), strict=True)
        if size is None or wanted not in (None, size)
    ]
    if not lost:
        return
    names = ", ".join(lost[:_SHOWN]) + (f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else "")
    raise StorageError(
        f"{len(lost)} of the {len(keys)} objects that this save wrote are gone or changed ({names}), {took_s:.0f} s after its "
        "beginning, so it is not committed and the checkpoint before stands: a garbage collection or a lifecycle rule took "
        f"them. Give dcp-s3 gc a margin (--older-than) of at least this save's deadline of {deadline.seconds:g} s plus "
        f"{SLACK_S:g} s, and save again"
    ).with_context(operation="HeadObject", bucket=store.bucket, key=lost[0])


def _size(store: ControlStore, key: str) -> int | None:
    try:
        return store.head(key).size
    except StorageError as error:
        if is_missing(error):
            return None
        raise
