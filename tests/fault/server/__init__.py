r"""A scripted, in-memory S3 server for fault tests: HTTP and HTTPS, a request log, faults by operation and n-th call.

Start
    ``FaultServer`` runs on an event loop of its own in a daemon thread; ``FaultServerProcess`` is the same in a child
    process (use it when the test forks: a forked child would keep copies of the thread's sockets). Both are context
    managers with the same blocking interface (``Handle``), usable from any thread::

        with FaultServer(tls=True, **PROFILES["ceph"], latency_s=0.02) as s3:
            s3.url, s3.ca_bundle, s3.bucket  # bucket "bucket" is there
            s3.configure(checksum="ignore")  # any switch of settings.Settings, at any time

    ``certificate=`` "expired", "wrong-host" or "unknown-ca" shows an identity to be refused; ``endpoints=3`` opens
    three ports (``s3.urls``) on one store; ``seed=`` feeds the rules that fire by chance. By hand:
    ``python -m tests.fault.server --tls good`` prints its ports and takes ``POST /_control/<command>`` with JSON.

Faults
    ``s3.on(operation, action, **match)`` returns a rule (``.seen``, ``.fired``, ``.remove()``)::

        s3.on("UploadPart", error(503, "SlowDown", retry_after=1), part=2, nth=1)
        s3.on(("PutObject", "UploadPart"), s3_error("InternalError"), key="/data/", since=5)
        s3.on("*", error(500, "InternalError"), probability=0.05)
        s3.on("PutObject", drop_reply(), key=r"\.metadata$", times=1)  # commit, then no reply

    match: ``key`` (regular expression), ``part``, ``access_key`` (give each rank its own id), ``endpoint``,
    ``header=(name, regex)``; of the matching requests: ``nth``, ``since``, ``times``, ``probability``.
    Actions (joined with ``|``): ``error``, ``s3_error``, ``delay``, ``reset``, ``drop_reply``, ``never_read``,
    ``never_answer``, ``cut_reply``, ``drip``, ``reply_headers``, ``rewrite``, ``flip_reply``, ``flip_stored``,
    ``truncate_stored``, ``lose_stored``; ``ODD_COMPLETES`` are answers of Complete with status 200. Of several rules
    that fire, the later one wins field by field. Below HTTP: ``s3.spoil_connections("reset" | "garbage" | "hang")``,
    ``s3.go_offline()``, ``s3.go_online()``.

Gates
    A gate holds requests at a stage until the test lets them go, for races and crashes::

        gate = s3.hold("PutObject", key=r"\.metadata$", at="reply")  # done, not yet answered
        gate.wait_arrived(count=2)
        os.kill(pid, signal.SIGKILL)
        gate.release()  # or release(1): one request

    ``at="handle"``: read, not yet done; it IS done on release, even if the client is gone: add ``then=reset()`` for a
    request that never reached the store. ``at="sent"``: after the reply. ``at="late", then=error(503)``: the client
    hears the error at once, the write lands on release.

Looking
    ``s3.log`` / ``s3.requests(operation, key=, part=, access_key=, status=)`` give ``Record``s (times on
    CLOCK_MONOTONIC, connection, headers, wire and decoded bytes, status, outcome, whether the operation was done);
    ``peak_in_flight(records)``; ``s3.wait_for(operation, count=n)``; ``s3.counters`` for connections.
    ``s3.violations(ignore=("aws-chunked",))`` lists what a client must never do: overlapping attempts of a part or of
    Complete, parts in flight at Complete or Abort, part order and sizes, forbidden operations, old signatures,
    aws-chunked framing, uploads left open. ``s3.objects()``, ``s3.read(key)``, ``s3.uploads()``, ``s3.versions(key)``
    show the store; ``s3.put``, ``s3.delete``, ``s3.tamper``, ``s3.make_older``, ``s3.make_upload_older``,
    ``s3.clear()`` change it without a request.

Limits: SigV4 signatures are not computed (access key id, date and rights are checked); ETags are opaque unless
``etag_md5=True``; copy operations answer 501.
"""

from __future__ import annotations

from .actions import (
    ODD_COMPLETES,
    Action,
    Answer,
    cut_reply,
    delay,
    drip,
    drop_reply,
    error,
    flip_reply,
    flip_stored,
    lose_stored,
    never_answer,
    never_read,
    reply_headers,
    reset,
    rewrite,
    s3_error,
    truncate_stored,
)
from .handle import GateHandle, Handle, RuleHandle
from .journal import Record, peak_in_flight, select
from .process import FaultServerProcess
from .settings import MULTIPART, PROFILES, Settings
from .thread import FaultServer

__all__ = [
    "MULTIPART",
    "ODD_COMPLETES",
    "PROFILES",
    "Action",
    "Answer",
    "FaultServer",
    "FaultServerProcess",
    "GateHandle",
    "Handle",
    "Record",
    "RuleHandle",
    "Settings",
    "cut_reply",
    "delay",
    "drip",
    "drop_reply",
    "error",
    "flip_reply",
    "flip_stored",
    "lose_stored",
    "never_answer",
    "never_read",
    "peak_in_flight",
    "reply_headers",
    "reset",
    "rewrite",
    "s3_error",
    "select",
    "truncate_stored",
]
