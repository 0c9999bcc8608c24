"""Who may do what: signers, expiry, clock skew, least privilege."""

from __future__ import annotations

import time

from .model import Store
from .request import Request, S3Error

_READS = ("GetObject", "HeadObject", "ListObjectsV2", "ListObjects")


class Policy:
    """Checks a request's signer and rights; counts what each signer has sent."""

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._first_seen: dict[str, float] = {}

    @staticmethod
    def forbids(store: Store, operation: str) -> bool:
        """Whether the operation is outside the least-privilege list."""
        allowed, denied = store.settings.allowed_operations, store.settings.denied_operations
        return operation in denied or (allowed is not None and operation not in allowed)

    @staticmethod
    def age_s(store: Store, request: Request) -> float | None:
        """Return how long ago at least the request was signed by the store's clock; None if presigned or unsigned.

        x-amz-date has whole seconds, so a positive age may be shorter by up to one second than the difference.
        """
        if request.signed_unix_s is None or request.presigned_expires_s is not None:
            return None
        age_s = store.now() - request.signed_unix_s
        return max(0.0, age_s - 1.0) if age_s > 0 else age_s

    def check(self, store: Store, request: Request, age_s: float | None) -> None:
        """Raise S3Error if the request is refused."""
        settings, signer = store.settings, request.access_key
        if signer is None:
            must_sign = settings.require_signature or settings.access_keys is not None
            if must_sign and not (settings.public_read and request.operation in _READS):
                raise S3Error("AccessDenied", "Access Denied")
        else:
            self._requests[signer] = self._requests.get(signer, 0) + 1
            if settings.access_keys is not None and signer not in settings.access_keys:
                raise S3Error("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
            if signer in settings.key_errors:
                raise S3Error(settings.key_errors[signer])
            self._expire(store, signer)
        signed, life = request.signed_unix_s, request.presigned_expires_s
        if signed is not None and life is not None and store.now() > signed + life:
            raise S3Error("AccessDenied", "Request has expired")
        if settings.max_request_age_s is not None and age_s is not None and abs(age_s) > settings.max_request_age_s:
            message = "The difference between the request time and the current time is too large."
            raise S3Error("RequestTimeTooSkewed", message)
        if self.forbids(store, request.operation):
            raise S3Error("AccessDenied", "Access Denied")

    def _expire(self, store: Store, signer: str) -> None:
        settings = store.settings
        count = self._requests[signer]
        first = self._first_seen.setdefault(signer, time.monotonic())
        limit, life = settings.expire_after_requests.get(signer), settings.expire_after_s.get(signer)
        if (limit is not None and count > limit) or (life is not None and time.monotonic() - first > life):
            raise S3Error("ExpiredToken", "The provided token has expired.")
