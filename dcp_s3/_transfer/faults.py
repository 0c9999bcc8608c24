"""Failures of botocore, aiohttp and the sockets below, turned into our errors. Status and S3 code decide, never texts."""

from __future__ import annotations

import datetime as dt
import ssl
from email.utils import parsedate_to_datetime
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as UnconnectedError
from botocore.parsers import ResponseParserError

from dcp_s3._transfer.retry import AS_POLICY, NEVER, mark
from dcp_s3.errors import (
    AccessDeniedError,
    ConfigError,
    DcpS3Error,
    StorageError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_DENIED: Final = frozenset(
    [
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "Forbidden",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "InvalidToken",
        "NotSignedUp",
        "SignatureDoesNotMatch",
        "UnauthorizedAccess",
        "UnrecognizedClientException",
    ]
)
_PASSING: Final = frozenset(
    [
        "BadDigest",
        "BandwidthLimitExceeded",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentChecksumMismatch",
    ]
)
_THROTTLED: Final = frozenset(
    [
        "BandwidthLimitExceeded",
        "RequestLimitExceeded",
        "RequestThrottled",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    ]
)
_FORM: Final = frozenset(
    {"InvalidArgument", "InvalidHeader", "InvalidRequest", "MissingContentMD5", "NotImplemented", "UnsupportedHeader"}
)
_PASSING_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_CLOCK: Final = "RequestTimeTooSkewed"
_EXPIRED: Final = frozenset(["ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"])
_OUTDATED: Final = frozenset(
    ["InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", "UnrecognizedClientException"]
)
"""What stores say of keys and tokens that were deleted when their time had come; or of such as were never right."""
_CREDENTIAL_TRIES: Final = 4
_MISTAKES: Final = (ImportError, MemoryError, NameError)
"""A mistake in a program, or memory that is full: no network is to blame, and no further try helps."""
_LONGEST_RETRY_AFTER_S: Final = 300.0
_ADVICE: Final = {
    "AccessDenied": "check the policy of these credentials for this bucket and prefix",
    **dict.fromkeys(_EXPIRED, "the session token has expired; use credentials that refresh, or new ones"),
    "InvalidAccessKeyId": "the store does not know this access key; check the key and the endpoint",
    "NoSuchBucket": "create the bucket, or correct the URL",
    "NoSuchUpload": "the multipart upload is gone: aborted by somebody, or by a lifecycle rule",
    "SignatureDoesNotMatch": "check the secret key and the region",
    _CLOCK: "the clocks of this machine and of the store differ too much; set this machine's clock (NTP)",
}


def translate(
    error: BaseException, *, operation: str, bucket: str, key: str | None = None, part: int | None = None
) -> DcpS3Error:
    """The public error for a failed request, marked with how often it may be tried.

    Args:
        error: What botocore, aiobotocore, aiohttp or a socket raised; our own errors come back as they are.
        operation: S3 operation, in the API's spelling.
        bucket: Bucket of the request.
        key: Object key of the request.
        part: Part number, from 1.
    """
    if isinstance(error, DcpS3Error):
        made: DcpS3Error = error
    elif isinstance(error, ClientError):
        made = _from_reply(error)
    elif isinstance(error, (NoCredentialsError, CredentialRetrievalError, MetadataRetrievalError, TokenRetrievalError)):
        made = mark(
            AccessDeniedError(
                f"no credentials: {error}; set AWS_ACCESS_KEY_ID …, a profile, or S3Config(unsigned=True)"
            ),
            # where there is no source of any, a second look finds none either; one that fails may only be busy
            tries=NEVER if isinstance(error, NoCredentialsError) else _CREDENTIAL_TRIES,
        )
    elif isinstance(error, JSONDecodeError):  # nothing else that is asked for is JSON
        made = mark(
            AccessDeniedError(
                f"no credentials: what their source gave, as credential_process does, is no JSON: {_brief(error)}"
            ),
            tries=_CREDENTIAL_TRIES,
        )
    elif isinstance(error, (PartialCredentialsError, ProfileNotFound)):
        made = ConfigError(str(error))
    elif (refused := _certificate_error(error)) is not None:
        made = mark(
            StorageError(
                f"the server's TLS certificate was refused: {refused}; check the endpoint's name, or give its CA with "
                "S3Config(verify_tls='/path/ca.pem') or AWS_CA_BUNDLE"
            ),
            tries=NEVER,
        )
    elif isinstance(
        error, (HTTPClientError, UnconnectedError, IncompleteReadError, OSError, ResponseParserError, EOFError)
    ):
        made = mark(StorageUnavailableError(f"{operation} did not get an answer: {_brief(error)}"), tries=AS_POLICY)
    elif isinstance(error, (BotoCoreError, ValueError, TypeError, *_MISTAKES)):
        made = mark(StorageError(f"{operation} could not be sent: {_brief(error)}"), tries=NEVER)
    else:
        # aiohttp's own classes, which aiobotocore does not map: the connection failed in one more way
        made = mark(StorageUnavailableError(f"{operation} failed: {_brief(error)}"), tries=AS_POLICY)
    if made is not error:
        made.__cause__ = error
    return made.with_context(operation=operation, bucket=bucket, key=key, part=part)


def _from_reply(error: ClientError) -> StorageError:
    reply: Any = error.response
    facts = reply.get("ResponseMetadata", {})
    headers = facts.get("HTTPHeaders", {})
    status = int(facts.get("HTTPStatusCode") or 0)
    code = str(reply.get("Error", {}).get("Code") or status)
    text = str(reply.get("Error", {}).get("Message") or "no text")
    advice = _ADVICE.get(code)
    # to a HEAD some stores give the content type of their framework
    web_page = (
        code == str(status)
        and error.operation_name != "HeadObject"
        and str(headers.get("content-type", "")).startswith("text/html")
    )
    if web_page:
        advice = "with a web page, not S3's XML: is endpoint_url that of an S3 service?"
    message = f"the store answered {status} {code}: {text}" + (f" ({advice})" if advice else "")
    kind, tries = _classify(status, code)
    made = mark(kind(message), tries=tries, retry_after_s=_retry_after(headers))
    made.__dict__["web_page"] = web_page
    made.with_context(
        status=status, code=code, request_id=facts.get("RequestId") or headers.get("x-amz-request-id") or None
    )
    return made


def _classify(status: int, code: str) -> tuple[type[StorageError], int]:
    if code == _CLOCK:
        return AccessDeniedError, 2  # one fresh signature: the request may have waited too long
    if code in _DENIED or code in _EXPIRED:
        return AccessDeniedError, NEVER
    if code in _PASSING or status in _PASSING_STATUS:
        return StorageUnavailableError, AS_POLICY
    if status in (401, 403):
        return AccessDeniedError, NEVER
    if status == 400 and code == "400":
        return StorageUnavailableError, AS_POLICY  # not S3's XML: something in between answered
    if status == 200:
        return StorageUnavailableError, AS_POLICY  # an <Error> behind a good status line
    return StorageError, NEVER


def _retry_after(headers: Any) -> float:  # noqa: ANN401 -- a mapping of header names
    """Seconds that the store asks to wait; given as such or as a time by its own clock (RFC 9110, 10.2.3)."""
    value = str(headers.get("retry-after", ""))
    if value.isdigit():
        return min(float(value), _LONGEST_RETRY_AFTER_S)
    try:
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else dt.datetime.now(dt.UTC)
        return min(max(0.0, (parsedate_to_datetime(value) - now).total_seconds()), _LONGEST_RETRY_AFTER_S)
    except (ValueError, TypeError):  # not a date, or one without a zone
        return 0.0


def _certificate_error(error: BaseException) -> str | None:
    """Why a certificate was refused, in the words of whoever checked it: OpenSSL, or urllib3 for the host's name."""
    found = None
    for link in _chain(error):
        if isinstance(link, ssl.SSLCertVerificationError):
            found = str(getattr(link, "verify_message", "") or found or link)
        elif type(link).__name__ == "CertificateError":  # urllib3's own, which has no public home
            found = str(link)
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    queue: list[Any] = [error]
    while queue:
        link = queue.pop()
        if isinstance(link, BaseException) and id(link) not in seen:
            seen.add(id(link))
            yield link
            # aiohttp and botocore keep the error below in attributes, not only in the chain
            queue += [link.__cause__, link.__context__, getattr(link, "certificate_error", None)]
            queue += [getattr(link, "kwargs", {}).get("error") if isinstance(link, BotoCoreError) else None]
            queue += [getattr(link, "reason", None), *link.args]


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_missing(error: BaseException) -> bool:
    """Whether the store said that the object (not the bucket) does not exist."""
    if not isinstance(error, StorageError) or error.__dict__.get("web_page"):
        return False
    return error.status == 404 and error.code != "NoSuchBucket"


def is_precondition_failed(error: BaseException) -> bool:
    """Whether a conditional request was refused because its condition did not hold."""
    return isinstance(error, StorageError) and error.status == 412


def is_throttled(error: BaseException) -> bool:
    """Whether the store refused a request for want of capacity, and so did nothing of it."""
    return isinstance(error, StorageError) and (error.status == 429 or error.code in _THROTTLED)


def is_expired(error: BaseException) -> TypeGuard[StorageError]:
    """Whether the store said, or to a HEAD could only hint, that the credentials are no longer good: there may be others."""
    if not isinstance(error, StorageError):
        return False
    if error.operation == "HeadObject" and error.status in (400, 401, 403):
        return error.code in (str(error.status), *_EXPIRED, *_OUTDATED)
    return error.code in _EXPIRED or error.code in _OUTDATED


def is_refused_as_unknown(error: BaseException) -> bool:
    """Whether the store refused the form of a request (a header it does not know, or misses) rather than its content."""
    return isinstance(error, StorageError) and (error.status in (411, 501) or error.code in _FORM)
