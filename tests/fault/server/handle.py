"""What a test holds in its hand: the blocking interface, the same for a server in a thread and in a process."""

from __future__ import annotations

import abc
import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

from .actions import Action, Stage
from .commands import Json
from .journal import Record, select
from .listener import ConnectFault
from .model import Tamper


class RuleHandle:
    """A fault in force."""

    def __init__(self, server: Handle, name: str) -> None:
        self.name, self._server = name, server

    @property
    def seen(self) -> int:
        """Requests that the rule has counted."""
        return int(self._server.command("rule_state", name=self.name)[0])

    @property
    def fired(self) -> int:
        """Requests that the rule has acted on."""
        return int(self._server.command("rule_state", name=self.name)[1])

    def remove(self) -> None:
        """Take the rule out of force."""
        self._server.command("remove_rule", name=self.name)


class GateHandle(RuleHandle):
    """A rule whose requests wait at a gate until the test lets them through."""

    def wait_arrived(self, count: int = 1, timeout_s: float = 20.0) -> None:
        """Block until ``count`` requests in all have arrived; TimeoutError if they do not."""
        arrived = self._server.command("gate_wait", name=self.name, count=count, timeout_s=timeout_s)
        if arrived < count:
            raise TimeoutError(f"{arrived} of {count} requests arrived at gate {self.name} within {timeout_s} s")

    def release(self, count: int | None = None) -> None:
        """Let ``count`` requests through; None opens the gate for good."""
        self._server.command("gate_release", name=self.name, count=count)


class Handle(abc.ABC):
    """The interface of a running fault server. All methods block; any thread may call them."""

    scheme: str
    host: str = "127.0.0.1"
    ports: tuple[int, ...]
    """One port for each endpoint; all lead to the same store."""
    ca_bundle: str | None
    """File of the CA to trust; None over plain HTTP."""
    bucket: str
    """The bucket that is there from the start, and the default of the methods below."""
    seed: int
    _gate_numbers = itertools.count(1)

    @abc.abstractmethod
    def command(self, name: str, /, **arguments: Any) -> Any:
        """Run a control command with plain-data arguments; what it returns depends on the command."""

    @property
    def url(self) -> str:
        """The (first) endpoint."""
        return self.urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """All endpoints."""
        return tuple(f"{self.scheme}://{self.host}:{port}" for port in self.ports)

    # Faults

    def on(
        self, operation: str | tuple[str, ...], action: Action, *, name: str | None = None, **match: Any
    ) -> RuleHandle:
        """Script a fault.

        Args:
            operation: S3 operation name or names, "*" for every one.
            action: What happens, see ``actions``.
            name: The rule's name in ``Record.rules``.
            **match: Fields of ``rules.Match``: ``key`` (regular expression), ``part``, ``access_key``, ``header``,
                and which matching requests: ``nth``, ``since``, ``times``, ``probability``.
        """
        return RuleHandle(self, self._add(operation, action, name, match))

    def hold(
        self, operation: str | tuple[str, ...], *, at: Stage = "handle", then: Action | None = None, **match: Any
    ) -> GateHandle:
        """Hold matching requests at a stage ("head", "handle", "late", "reply" or "sent"); afterwards do ``then``.

        A request held at "handle" is carried out once released, even if its client is gone by then.
        At "late" the client gets ``then`` (an error or an ending) at once, and the operation is carried out on release.
        """
        if at not in ("head", "handle", "late", "reply", "sent"):
            raise ValueError(f"no gate at stage {at!r}")
        if at == "late" and (then is None or (then.answer is None and then.ending_at != "handle")):
            raise ValueError("a gate at 'late' needs an answer, or an ending at 'handle', for the client")
        name = f"gate-{os.getpid()}-{next(self._gate_numbers)}"  # forked users of one server do not collide
        self._add(operation, Action(gates=((at, name),)) | (then or Action()), name, match)
        return GateHandle(self, name)

    def _add(self, operation: str | tuple[str, ...], action: Action, name: str | None, match: Mapping[str, Any]) -> str:
        operations = (operation,) if isinstance(operation, str) else tuple(operation)
        fields = {"operations": operations, **match}
        return str(self.command("add_rule", match=fields, action=action.to_json(), name=name))

    def spoil_connections(self, how: ConnectFault, times: int = 1, *, endpoint: int = 0) -> None:
        """Answer the first bytes of the next connections with a "reset" or "garbage", or never ("hang")."""
        self.command("spoil_connections", how=how, times=times, endpoint=endpoint)

    def go_offline(self, endpoint: int = 0) -> None:
        """Refuse connections and reset the open ones, keeping what is stored."""
        self.command("go_offline", endpoint=endpoint)

    def go_online(self, endpoint: int = 0) -> None:
        """Serve again on the same port."""
        self.command("go_online", endpoint=endpoint)

    def configure(self, **changes: Any) -> None:
        """Change switches, see ``settings.Settings``."""
        self.command("configure", changes=changes)

    def clear(self, *, log: bool = True, rules: bool = True, state: bool = True) -> None:
        """Start afresh: forget the log, the rules (gates open), all objects and uploads; buckets and switches stay."""
        self.command("clear", log=log, rules=rules, state=state)

    # Observation

    @property
    def log(self) -> list[Record]:
        """Copies of all records, in order of arrival."""
        found = self.command("log", since=0)
        return [item if isinstance(item, Record) else Record.from_json(item) for item in found]

    def requests(self, operation: str | tuple[str, ...] | None = None, **wanted: Any) -> list[Record]:
        """Return the records that match; the arguments are those of ``journal.select``."""
        return select(self.log, operation, **wanted)

    def wait_for(
        self,
        operation: str | tuple[str, ...] | None = None,
        *,
        count: int = 1,
        ended: bool = True,
        timeout_s: float = 20.0,
        **wanted: Any,
    ) -> list[Record]:
        """Block until ``count`` matching requests have ended (or, not ``ended``, arrived), and return them."""

        def enough() -> list[Record]:
            found = self.requests(operation, **wanted)
            return [record for record in found if record.t_end is not None or not ended]

        deadline = time.monotonic() + timeout_s
        while len(found := enough()) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {count} {operation or 'requests'} within {timeout_s} s")
            time.sleep(0.02)
        return found

    def violations(self, ignore: tuple[str, ...] = (), tolerance_s: float = 0.02) -> list[str]:
        """Return what the client did wrong.

        Args:
            ignore: Checks to leave out, of: overlapping-part, overlapping-complete, parts-in-flight, too-many-parts,
                part-order, unequal-parts, empty-last-part, forbidden-operation, aws-chunked, request-age, open-upload.
            tolerance_s: By how much an attempt that the client closed may overlap its retry: closing one connection
                and sending on another reach the server in either order.
        """
        found: list[str] = self.command("violations", tolerance_s=tolerance_s)
        return [line for line in found if line.partition(":")[0] not in ignore]

    @property
    def counters(self) -> dict[str, int]:
        """Connections: accepted, open, peak_open, failed_handshakes, refused (spoiled)."""
        return dict(self.command("counters"))

    # State

    def create_bucket(self, bucket: str) -> None:
        """Make a bucket."""
        self.command("create_bucket", bucket=bucket)

    def objects(self, prefix: str = "", bucket: str | None = None) -> dict[str, Json]:
        """Return key -> size, etag, last_modified, headers, checksums, parts, version_id of the current objects."""
        return dict(self.command("objects", bucket=bucket or self.bucket, prefix=prefix))

    def versions(self, key: str, bucket: str | None = None) -> list[Json]:
        """Return all versions of a key, oldest first; delete markers have ``marker`` set."""
        return list(self.command("versions", bucket=bucket or self.bucket, key=key))

    def read(self, key: str, bucket: str | None = None) -> bytes:
        """Return an object's stored bytes."""
        return bytes(self.command("read", bucket=bucket or self.bucket, key=key))

    def put(
        self,
        key: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        age_s: float = 0.0,
        bucket: str | None = None,
    ) -> None:
        """Store an object without a request; ``headers`` in lower case, e.g. x-amz-meta-…."""
        self.command("put", bucket=bucket or self.bucket, key=key, data=data, headers=dict(headers or {}), age_s=age_s)

    def delete(self, key: str, bucket: str | None = None) -> None:
        """Remove a key without a request."""
        self.command("delete", bucket=bucket or self.bucket, key=key)

    def tamper(self, key: str, kind: Tamper, at: int = 0, bucket: str | None = None) -> None:
        """Damage a stored object: "flip" a bit of byte ``at``, "truncate" to ``at`` bytes, or "lose" it."""
        self.command("tamper", bucket=bucket or self.bucket, key=key, kind=kind, at=at)

    def make_older(self, key: str, seconds: float, bucket: str | None = None) -> None:
        """Move an object's Last-Modified back."""
        self.command("make_older", bucket=bucket or self.bucket, key=key, seconds=seconds)

    def uploads(self) -> dict[str, Json]:
        """Return upload id -> bucket, key, initiated, headers, algorithm, parts (number -> size) of the open uploads."""
        return dict(self.command("uploads"))

    def make_upload_older(self, upload_id: str, seconds: float) -> None:
        """Move an upload's beginning back."""
        self.command("make_upload_older", upload_id=upload_id, seconds=seconds)
