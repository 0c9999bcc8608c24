"""The switches of the fault server: how the imitated store behaves when no fault is scripted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

Conditional = Literal["honour", "ignore", "refuse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Behaviour of the store, changed at run time with ``configure(name=value)``.

    Every value is plain data, so that the switches also travel through the HTTP control interface.
    """

    # Limits
    min_part_bytes: int = 5 * 2**20
    """Smallest part but the last that Complete accepts; 0 turns the check off."""
    max_part_bytes: int = 5 * 2**30
    """Largest body of one PutObject or UploadPart; above it 400 EntityTooLarge."""
    max_parts: int = 10_000
    """Highest part number; above it 400 InvalidArgument and a violation."""
    list_page_size: int = 1000
    """Upper bound of max-keys, max-uploads and max-parts."""
    continuation_tokens: bool = True
    """False: a truncated ListObjectsV2 carries no NextContinuationToken (clients must use start-after)."""

    ranges: Literal["honour", "ignore"] = "honour"
    """"ignore": a GET with Range answers 200 with the whole object."""

    # Conditional requests
    conditional_put: Conditional = "honour"
    """If-Match and If-None-Match of PutObject; "refuse" answers 501 NotImplemented."""
    conditional_complete: Conditional = "honour"
    """The same for CompleteMultipartUpload."""
    conditional_delete: Conditional = "honour"
    """If-Match of DeleteObject."""
    conditional_get: Conditional = "honour"
    """If-Match and If-None-Match of GetObject and HeadObject."""
    if_match_form: Literal["any", "unquoted", "ignored", "refused"] = "any"
    """Of writes. "unquoted": an If-Match in quotes never matches (Ceph RGW 16); "ignored", "refused" (501): the store knows
    If-None-Match alone."""

    # Checksums and framing
    checksum: Literal["verify", "ignore", "refuse-501", "refuse-400"] = "verify"
    """x-amz-checksum-*: verified and echoed; not looked at and not echoed; or the request is refused."""
    strict_checksum_type: bool = False
    """Refuse a part with a checksum whose upload was created without one ("type mismatch"), as some stores do; another
    algorithm than the upload's is always refused."""
    framing: Literal["decode", "raw", "refuse"] = "decode"
    """aws-chunked bodies: decoded; stored with their framing, as some stores do; or refused with 501."""
    verify_payload_hash: bool = True
    """Compare x-amz-content-sha256 with the body where the header holds a hash."""
    etag_md5: bool = False
    """True: ETags are MD5s as on AWS (slow); False: opaque, a function of the content alone."""
    complete_etag: bool = True
    """False: Complete answers an empty ETag (Ceph RGW); HEAD still has it."""
    complete_again: Literal[200, 404, 500] = 200
    """Answer to a second Complete of an upload that is already completed."""
    complete_after_abort: Literal[404, 500] = 404
    """Answer to a Complete of an aborted upload."""

    # Buckets
    versioned: bool = False
    """Deletes leave markers, overwritten objects stay as older versions, replies carry x-amz-version-id."""
    object_lock: bool = False
    """Deletes are refused with AccessDenied."""
    content_md5_for: tuple[str, ...] = ()
    """Operations that are refused (400 InvalidRequest) without Content-MD5 or x-amz-checksum-*."""

    # Authentication
    require_signature: bool = False
    """Refuse unsigned requests with 403 AccessDenied, except reads when public_read is set."""
    public_read: bool = False
    """Unsigned GetObject, HeadObject and lists are allowed although a signature is required."""
    access_keys: tuple[str, ...] | None = None
    """Known access key ids (others: 403 InvalidAccessKeyId; implies require_signature); None: every id."""
    key_errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Access key id -> S3 code that answers each of its requests, e.g. {"OLD": "ExpiredToken"}."""
    expire_after_requests: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Access key id -> number of requests, since the server's start, after which it gets ExpiredToken."""
    expire_after_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Access key id -> seconds after its first request from which it gets ExpiredToken."""
    allowed_operations: tuple[str, ...] | None = None
    """Least privilege: anything else is 403 AccessDenied and a violation; None: everything is allowed."""
    denied_operations: tuple[str, ...] = ()
    """403 AccessDenied for these, also a violation."""
    hide_missing: bool | None = None
    """A missing key is 403 (AccessDenied), not 404; None: exactly when ListObjectsV2 is not allowed."""
    max_request_age_s: float | None = None
    """403 RequestTimeTooSkewed, and a violation, for an x-amz-date further away than this."""
    clock_offset_s: float = 0.0
    """The server's clock minus the true time; moves Date, Last-Modified and the age check."""

    # Speed and memory
    latency_s: float = 0.0
    """Wait before each request is handled, after its body was read."""
    rate_bytes_s: float | None = None
    """Upper bound of each connection's body bytes per second, both ways; None: no bound."""
    discard_bodies: str | None = None
    """Regular expression of keys whose bytes are dropped after checking; reads then give zeros."""
    virtual_host: str | None = None
    """Suffix of virtual-host addressing: with "s3.test" the host name b.s3.test means bucket b."""

    def __post_init__(self) -> None:
        """Refuse a value that its switch does not know."""
        for name, hint in get_type_hints(type(self)).items():
            choices = get_args(hint) if getattr(hint, "__origin__", None) is Literal else ()
            value = getattr(self, name)
            if choices and value not in choices:
                raise ValueError(f"{name}={value!r}: expected one of {choices}")
        for name in ("access_keys", "allowed_operations", "denied_operations", "content_md5_for"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))

    def changed(self, **changes: Any) -> Settings:  # any setting by name
        """Return a copy with some switches set; an unknown name is a TypeError."""
        return dataclasses.replace(self, **changes)

    @property
    def hides_missing(self) -> bool:
        """Whether a missing key answers 403."""
        if self.hide_missing is not None:
            return self.hide_missing
        if "ListObjectsV2" in self.denied_operations:
            return True
        return self.allowed_operations is not None and "ListObjectsV2" not in self.allowed_operations


MULTIPART = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload")

PROFILES: dict[str, dict[str, Any]] = {  # settings by name, of any type
    "aws": {},
    "ceph": {
        "conditional_complete": "ignore",
        "if_match_form": "unquoted",
        "checksum": "ignore",
        "complete_etag": False,
        "complete_after_abort": 500,
    },
    "keeps-framing": {"framing": "raw", "checksum": "ignore"},
    "refuses-checksums": {"framing": "refuse", "checksum": "refuse-501"},
    "strict-checksum-type": {"strict_checksum_type": True},
    "refuses-conditions": {
        "conditional_put": "refuse",
        "conditional_complete": "refuse",
        "conditional_delete": "refuse",
    },
    "ignores-conditions": {
        "conditional_put": "ignore",
        "conditional_complete": "ignore",
        "conditional_delete": "ignore",
    },
    "ignores-if-match": {"if_match_form": "ignored"},
    "refuses-if-match": {"if_match_form": "refused"},
    "least-privilege": {"allowed_operations": ("PutObject", "GetObject", "HeadObject", *MULTIPART)},
    "versioned": {"versioned": True},
    "object-lock": {
        "versioned": True,
        "object_lock": True,
        "content_md5_for": ("PutObject", "UploadPart", "DeleteObjects"),
    },
}
"""Sets of switches that imitate one kind of store: ``FaultServer(**PROFILES["ceph"])``."""
