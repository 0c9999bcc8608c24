"""Conditional headers: If-Match and If-None-Match, honoured, ignored or refused."""

from __future__ import annotations

from .model import StoredObject
from .request import Request, S3Error
from .settings import Conditional, Settings


def check_write(request: Request, current: StoredObject | None, mode: Conditional, settings: Settings) -> None:
    """Raise S3Error if a write or delete may not go on over ``current``."""
    match, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
    if (match is None and none_match is None) or mode == "ignore":
        return
    if mode == "refuse" or (match is not None and settings.if_match_form == "refused"):
        raise S3Error("NotImplemented", "A header you provided implies functionality that is not implemented")
    if none_match is not None and current is not None and (none_match == "*" or _same(none_match, current.etag)):
        raise S3Error("PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
    if match is not None and settings.if_match_form != "ignored":
        if current is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.")
        quoted_refused = settings.if_match_form == "unquoted" and match.startswith('"')
        weak = match.startswith("W/")  # compares equal to nothing, RFC 9110, section 13.1.1
        if quoted_refused or weak or not (match == "*" or _same(match, current.etag)):
            raise S3Error("PreconditionFailed", "At least one of the pre-conditions you specified did not hold")


def check_read(request: Request, item: StoredObject, mode: Conditional) -> bool:
    """Return whether to answer 304; raise S3Error for a failed If-Match."""
    match, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
    if (match is None and none_match is None) or mode == "ignore":
        return False
    if mode == "refuse":
        raise S3Error("NotImplemented", "A header you provided implies functionality that is not implemented")
    if match is not None and not (match == "*" or _same(match, item.etag)):
        raise S3Error("PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
    return none_match is not None and (none_match == "*" or _same(none_match, item.etag))


def _same(header: str, etag: str) -> bool:
    return etag in [value.strip().removeprefix("W/").strip('"') for value in header.split(",")]
