"""The control commands: everything a test can ask of a running server, as plain data in and out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from .actions import Action
from .checksums import etag
from .core import Core
from .journal import Record, violations
from .listener import Listener
from .model import Store, StoredObject
from .rules import Match

Json = dict[str, Any]
"""Plain data with string keys; bytes are allowed and travel as base64."""


class Commands:
    """Called on the event loop's thread; each public coroutine is one command."""

    def __init__(self, core: Core, listeners: Sequence[Listener]) -> None:
        self._core, self._listeners = core, listeners

    # Faults

    async def add_rule(self, match: Json, action: Json, name: str | None) -> str:
        """Put a rule in force."""
        return self._core.script.add(Match(**match), Action.from_json(action), name)

    async def rule_state(self, name: str) -> tuple[int, int]:
        """Return how many requests a rule has seen, and on how many it fired."""
        rule = self._core.script.rules[name]
        return rule.seen, rule.fired

    async def remove_rule(self, name: str) -> None:
        """Take a rule out of force."""
        self._core.script.rules.pop(name, None)

    async def gate_wait(self, name: str, count: int, timeout_s: float) -> int:
        """Wait for arrivals at a gate."""
        return await self._core.script.gates[name].wait_arrived(count, timeout_s)

    async def gate_release(self, name: str, count: int | None) -> None:
        """Open a gate."""
        if name in self._core.script.gates:
            await self._core.script.gates[name].release(count)

    async def spoil_connections(self, how: Any, times: int, endpoint: int) -> None:
        """Spoil the next connections; ``how`` is one of listener.ConnectFault."""
        if how not in ("reset", "garbage", "hang"):
            raise ValueError(f"unknown connection fault {how!r}")
        self._listeners[endpoint].connect_faults.extend([how] * times)

    async def go_offline(self, endpoint: int) -> None:
        """Stop listening and reset every connection; what is stored stays."""
        await self._listeners[endpoint].close()

    async def go_online(self, endpoint: int) -> None:
        """Listen on the same port again."""
        listener = self._listeners[endpoint]
        await listener.open(listener.port)

    async def configure(self, changes: Json) -> None:
        """Set switches."""
        self._core.store.settings = self._core.settings.changed(**changes)

    # Observation

    async def log(self, since: int) -> list[Record]:
        """Return copies of the records from an index on."""
        return [copy.copy(record) for record in self._core.records[since:]]

    async def violations(self, tolerance_s: float) -> list[str]:
        """Run the built-in checks."""
        uploads = [(upload.key, upload.upload_id) for upload in self._core.store.open_uploads()]
        return violations(self._core.records, self._core.settings, uploads, tolerance_s)

    async def counters(self) -> dict[str, int]:
        """Return the connection counters."""
        return dict(self._core.counters)

    async def bugs(self) -> list[str]:
        """Return the exceptions of the server itself."""
        return list(self._core.bugs)

    async def clear(self, log: bool, rules: bool, state: bool) -> None:
        """Forget the log, the rules (gates open), or all objects and uploads (buckets stay)."""
        if log:
            self._core.records.clear()
        if rules:
            await self._core.script.clear()
            for listener in self._listeners:
                listener.connect_faults.clear()
        if state:
            old, self._core.store = self._core.store, Store(self._core.settings)
            self._core.store.buckets = {name: {} for name in old.buckets}

    # State

    async def create_bucket(self, bucket: str) -> None:
        """Make a bucket."""
        self._core.store.buckets.setdefault(bucket, {})

    async def objects(self, bucket: str, prefix: str) -> dict[str, Json]:
        """Return the current objects below a prefix, without their bytes."""
        return {key: _object(item) for key, item in self._core.store.current(bucket, prefix)}

    async def versions(self, bucket: str, key: str) -> list[Json]:
        """Return all versions of a key, oldest first."""
        return [_object(item) for item in self._core.store.bucket(bucket).get(key, [])]

    async def read(self, bucket: str, key: str) -> bytes:
        """Return an object's bytes."""
        return self._stored(bucket, key).blob.read()

    async def put(self, bucket: str, key: str, data: bytes, headers: Mapping[str, str], age_s: float) -> None:
        """Store an object without a request."""
        tag = etag([data], self._core.settings)
        self._core.put_directly(bucket, key, data, dict(headers), age_s, tag)

    async def delete(self, bucket: str, key: str) -> None:
        """Remove a key with all versions, whatever the switches say."""
        self._core.store.bucket(bucket).pop(key, None)

    async def tamper(self, bucket: str, key: str, kind: Any, at: int) -> None:
        """Damage a stored object; ``kind`` is one of model.Tamper."""
        if kind == "lose":
            await self.delete(bucket, key)
        else:
            stored = self._stored(bucket, key)
            stored.blob = stored.blob.tampered(kind, at)

    async def make_older(self, bucket: str, key: str, seconds: float) -> None:
        """Move an object's Last-Modified back."""
        self._stored(bucket, key).last_modified -= seconds

    async def uploads(self) -> dict[str, Json]:
        """Return the open multipart uploads by id."""
        return {
            upload.upload_id: {
                "bucket": upload.bucket,
                "key": upload.key,
                "initiated": upload.initiated,
                "headers": upload.headers,
                "algorithm": upload.algorithm,
                "parts": {str(number): part.size for number, part in sorted(upload.parts.items())},
            }
            for upload in self._core.store.open_uploads()
        }

    async def make_upload_older(self, upload_id: str, seconds: float) -> None:
        """Move an upload's beginning back."""
        self._core.store.uploads[upload_id].initiated -= seconds

    def _stored(self, bucket: str, key: str) -> StoredObject:
        found = self._core.store.latest(bucket, key)
        if found is None:
            raise KeyError(f"no object {key!r} in bucket {bucket!r}")
        return found


def _object(item: StoredObject) -> Json:
    return {
        "size": item.blob.size,
        "etag": item.etag,
        "last_modified": item.last_modified,
        "headers": item.headers,
        "checksums": item.checksums,
        "parts": item.parts,
        "version_id": item.version_id,
        "marker": item.marker,
    }
