"""A simulated bucket for the commit model: requests one at a time, each with the fate that the test gives it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from dcp_s3 import RetryPolicy, S3Config, StorageError, StorageUnavailableError
from dcp_s3._checkpoint.format.index import Index
from dcp_s3._checkpoint.format.layout import CheckpointUrl
from dcp_s3._transfer.limits.retry import Deadline
from dcp_s3._transfer.s3.control_store import Fetched, ObjectInfo, UploadInfo

Fate = Literal["ok", "lost reply", "not done", "late", "dies before", "dies after"]
"""Of one request. "late": the client hears 503 at once, and the write is done when it lands, perhaps never."""

URL = CheckpointUrl("bucket", "run")
RECORD = URL.key(".metadata")
EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Killed(BaseException):
    """Ends an actor as kill -9 would: nothing in the package catches it."""


@dataclasses.dataclass
class Stored:
    """An object."""

    body: bytes
    etag: str
    made_s: float
    metadata: dict[str, str]


@dataclasses.dataclass
class InFlight:
    """A write whose client was told 503 and that may still land."""

    sent_s: float
    land: Callable[[], Any]


class World:
    """The bucket, its clock, and the rules that hold in it at any moment."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, tuple[str, float]] = {}
        self.in_flight: list[InFlight] = []
        self.committed: list[str] = []
        """Write ids whose record was live, in order."""
        self.seen: dict[str, str | None] = {}
        """ETag of the record that each save saw at its beginning."""
        self.losers: set[str] = set()
        """Saves that were told CommitConflictError while no record had been removed by hand."""

    def put(self, key: str, body: bytes, metadata: dict[str, str], if_match: str | None, if_none_match: bool) -> str:
        """Do a PutObject, atomically with its condition."""
        there = self.objects.get(key)
        if (if_none_match and there is not None) or (if_match is not None and (not there or there.etag != if_match)):
            raise StorageError("the condition does not hold").with_context(status=412, code="PreconditionFailed")
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        self.objects[key] = Stored(body, etag, self.clock_s, metadata)
        if key == RECORD:
            write_id = metadata["dcp-s3-write-id"]
            replaced = there.etag if there is not None else None
            assert replaced in (self.seen[write_id], etag), f"{write_id} replaced a record that it had not seen"
            assert write_id not in self.losers, f"{write_id} was told that it had lost, and it is committed now"
            self.committed.append(write_id)
        return etag

    def live_keys(self) -> set[str]:
        """Keys that the live checkpoint needs, all of which must be there."""
        record = self.objects.get(RECORD)
        if record is None:
            return set()
        name = URL.key(f"index-{record.metadata['dcp-s3-write-id']}.safetensors.gz")
        assert name in self.objects, f"the live record has lost {name}"
        index = Index.from_bytes(self.objects[name].body, source=name)
        assert index.describes(record.body)
        for entry in index.objects:
            stored = self.objects.get(URL.key(entry.key))
            assert stored is not None, f"the live record has lost {entry.key}"
            assert (stored.etag, len(stored.body)) == (entry.etag, entry.size)
        return {RECORD, name, *(URL.key(entry.key) for entry in index.objects)}


class Actor:
    """A process that makes requests: it runs on a thread of its own, and stops before each request until it is stepped."""

    def __init__(self, work: Callable[[Actor], Any]) -> None:
        self.error: BaseException | None = None
        self.ended = False
        self._fate: Fate = "ok"
        self._turn = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._wait()

    def _run(self, work: Callable[[Actor], Any]) -> None:
        try:
            work(self)
        except BaseException as error:
            self.error = error
        self.ended = True
        self._waits.release()

    def _wait(self) -> None:
        assert self._waits.acquire(timeout=20), "an actor neither ends nor makes a request"
        if self.ended:
            self._thread.join()

    def turn(self) -> Fate:
        """Stop before a request; called on the actor's thread. Returns the fate of the request."""
        self._waits.release()
        self._turn.acquire()
        return self._fate

    def step(self, fate: Fate) -> None:
        """Let the request that waits happen, with this fate, and run until the next one."""
        self._fate = fate
        self._turn.release()
        self._wait()


class Client:
    """ControlStore's interface for one actor; without an actor every request just happens."""

    def __init__(self, world: World, actor: Actor | None = None, deadline: Deadline | None = None) -> None:
        self.bucket = URL.bucket
        self.config = S3Config(
            endpoint_url="http://store", retry=RetryPolicy(max_attempts=3, initial_wait_s=1.0, max_wait_s=4.0)
        )
        self._world = world
        self._actor = actor
        self._deadline = deadline

    def _request(self, do: Callable[[], Any], *, tries: int = 3, write: bool = False) -> Any:
        for attempt in range(1, tries + 1):
            fate = self._actor.turn() if self._actor is not None else "ok"
            if fate == "dies before":
                raise Killed
            if self._deadline is not None:
                self._deadline.check("sending a request")
            if fate == "late" and write:
                self._world.in_flight.append(InFlight(self._world.clock_s, do))
            elif fate not in ("not done", "late"):
                result = do()
                if fate == "dies after":
                    raise Killed
                if fate == "ok":
                    return result
            if attempt == tries:
                raise StorageUnavailableError("the store answers 503").with_context(status=503)
            self._world.clock_s += 1
        raise AssertionError

    def _info(self, key: str) -> ObjectInfo:
        stored = self._world.objects.get(key)
        if stored is None:
            raise StorageError("no such key").with_context(status=404, code="NoSuchKey", key=key)
        return ObjectInfo(key, len(stored.body), stored.etag, self._time(stored.made_s), dict(stored.metadata))

    def _time(self, seconds: float) -> dt.datetime:
        return EPOCH + dt.timedelta(seconds=seconds)

    def get(self, key: str, *, byte_range: tuple[int, int] | None = None) -> Fetched:
        def do() -> Fetched:
            info = self._info(key)
            start, end = byte_range or (0, info.size)
            return Fetched(self._world.objects[key].body[start:end], info, self.server_time())

        fetched: Fetched = self._request(do)
        return fetched

    def head(self, key: str) -> ObjectInfo:
        info: ObjectInfo = self._request(lambda: self._info(key))
        return info

    def put(
        self,
        key: str,
        body: bytes,
        *,
        content_type: str,
        metadata: dict[str, str] | None = None,
        if_match: str | None = None,
        if_none_match: bool = False,
        retry: bool = True,
    ) -> str:
        def do() -> str:
            return self._world.put(key, body, metadata or {}, if_match, if_none_match)

        etag: str = self._request(do, tries=3 if retry else 1, write=True)
        return etag

    def delete(self, key: str) -> None:
        self._request(lambda: self._world.objects.pop(key, None), write=True)

    def list(self, prefix: str, *, page_size: int = 1000) -> Iterator[ObjectInfo]:
        def do() -> list[ObjectInfo]:
            return [self._info(key) for key in sorted(self._world.objects) if key.startswith(prefix)]

        yield from self._request(do)

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        def do() -> list[UploadInfo]:
            found = sorted(self._world.uploads.items())
            return [UploadInfo(key, name, self._time(made)) for name, (key, made) in found if key.startswith(prefix)]

        yield from self._request(do)

    def create_upload(self, key: str) -> str:
        """Begin a multipart upload, named after its number so that each try has its own."""

        def do() -> str:
            name = f"upload-{len(self._world.uploads)}-{self._world.clock_s}"
            self._world.uploads[name] = (key, self._world.clock_s)
            return name

        name: str = self._request(do, write=True)
        return name

    def complete_upload(self, key: str, name: str, body: bytes) -> str:
        """Make the object; an upload that is gone has been aborted, or completed by an earlier try."""

        def do() -> str:
            if name in self._world.uploads:
                del self._world.uploads[name]
                return self._world.put(key, body, {}, None, False)
            return self._info(key).etag

        etag: str = self._request(do, write=True)
        return etag

    def abort_upload(self, key: str, upload_id: str) -> None:
        self._request(lambda: self._world.uploads.pop(upload_id, None), write=True)

    def server_time(self) -> dt.datetime:
        return self._time(self._world.clock_s)
