"""What an endpoint really does with conditional PUTs, found out once per endpoint, bucket and process."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from dcp_s3._runtime.loop_thread import on_fork
from dcp_s3._transfer.s3.error_mapping import is_precondition_failed, is_refused_as_unknown
from dcp_s3.errors import DcpS3Error, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcp_s3._transfer.s3.control_store import ControlStore

_log = logging.getLogger(__name__)

_BODY: Final = b"{}"
_TYPE: Final = "application/json"
_WRONG: Final = '"00000000000000000000000000000000"'


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditional PUTs that a store honours.

    Attributes:
        create: ``If-None-Match: *`` refuses to replace an object.
        replace: The form of ETag with which ``If-Match`` replaces the right object and refuses another: ``quoted`` as
            the store gave it, ``bare`` without quotes (Ceph RGW 16), ``None`` if neither.
    """

    create: bool
    replace: Literal["quoted", "bare"] | None

    def match_value(self, etag: str) -> str | None:
        """An ETag in the form that ``If-Match`` wants here; ``None`` if the store does not honour it."""
        if self.replace is None:
            return None
        return etag.strip('"') if self.replace == "bare" else etag


_known: dict[tuple[object, ...], Conditions] = {}
_asking: dict[tuple[object, ...], int] = {}
"""The thread that asks, by place: a store that hangs must not hold up the saves to another one."""


def _forget() -> None:
    _asking.clear()  # the thread that asks does not exist in the child
    _known.clear()


on_fork(_forget)


def _place(store: ControlStore) -> tuple[object, ...]:
    """What the answer depends on: not the credentials, which may be new ones for each save."""
    return (store.config.resolved().endpoint_url, store.bucket)


def conditions_of(store: ControlStore, key: str) -> Conditions:
    """Which conditional PUTs the store of a bucket honours.

    Args:
        store: The bucket.
        key: An object that this process owns and will write anyway (a save's index): the probe leaves a two-byte
            object there, so that no other permission than PutObject is needed and nothing has to be cleaned up.

    Raises:
        StorageError: The store fails for another reason than a condition.
    """
    place = _place(store)
    with store.waiting_for(_asking, place, "waiting for another save that probes the store"):
        known = _known.get(place)
        if known is None:
            known = _known[place] = _probe(store, key)
            _log.info(
                "conditional PUTs at %s/%s: create=%s replace=%s",
                place[0] or "AWS",
                store.bucket,
                known.create,
                known.replace,
            )
        return known


@contextlib.contextmanager
def probe_cleared(store: ControlStore, key: str) -> Iterator[None]:
    """Where a save is refused for what the probe has just found, delete the probe's object, if that is permitted.

    Args:
        store: The bucket.
        key: What ``conditions_of`` is given inside.
    """
    before = _known.get(_place(store))
    try:
        yield
    except DcpS3Error:
        if before is None and _known.get(_place(store)) is not None:
            with contextlib.suppress(DcpS3Error):
                store.delete(key)
        raise


def _probe(store: ControlStore, key: str) -> Conditions:
    etag = store.put(key, _BODY, content_type=_TYPE)
    create = _put(store, key, create=True) is False
    if not etag or _put(store, key, match=_WRONG) is not False:
        return Conditions(create, None)
    if _put(store, key, match=etag):
        return Conditions(create, "quoted")
    if _put(store, key, match=etag.strip('"')):
        return Conditions(create, "bare")
    return Conditions(create, None)


def _put(store: ControlStore, key: str, *, create: bool = False, match: str | None = None) -> bool | None:
    """Whether a conditional PUT was done; ``None`` if the store refuses the header itself."""
    try:
        store.put(key, _BODY, content_type=_TYPE, if_none_match=create, if_match=match)
    except StorageUnavailableError:
        raise
    except StorageError as error:
        if is_precondition_failed(error):
            return False
        if is_refused_as_unknown(error):
            return None
        raise
    return True
