"""Failures of botocore, aiohttp and the sockets below, turned into our errors. Status and S3 code decide, never texts."""

from __future__ import annotations

import datetime as dt
import http.client
import re
import ssl
from email.utils import parsedate_to_datetime
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
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

from dcp_s3._transfer.limits.retry import AS_POLICY, NEVER, mark
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
_PAGE: Final = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)
_TITLE: Final = re.compile(rb"<(title|h1)\b[^>]*>(.*?)</\1>", re.IGNORECASE | re.DOTALL)
_WANTS_TLS: Final = re.compile(rb"\bHTTPS (?:server|port)\b|\bSSL-enabled server port\b", re.IGNORECASE)
"""What nginx, Go's and Apache's servers write, with status 400, to who speaks HTTP to their HTTPS port."""
_USE_HTTPS: Final = "the endpoint's port speaks TLS and was spoken to without: write https:// in endpoint_url"
_USE_HTTP: Final = "the endpoint's port does not seem to speak TLS: write http:// in endpoint_url if it is a plain one, or correct the port"
_FULL: Final = "the store is full; delete what is not needed, or have it enlarged"
_QUOTA: Final = "the quota of this user or bucket is used up; delete what is not needed, or have the quota raised"
_NO_SPACE: Final = frozenset(
    [
        "InsufficientStorage",
        "QuotaExceeded",
        "QuotaExceededException",
        "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
    ]
)
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_ADVICE: Final = {
    "AccessDenied": "check the policy of these credentials for this bucket and prefix",
    **dict.fromkeys(_EXPIRED, "the session token has expired; use credentials that refresh, or new ones"),
    "InvalidAccessKeyId": "the store does not know this access key; check the key and the endpoint",
    "EntityTooLarge": "the store takes no object or part of this size; set a smaller part_bytes, or save from more ranks",
    "InsufficientStorage": _FULL,
    "NoSuchBucket": "create the bucket, or correct the URL",
    "NoSuchUpload": "the multipart upload is gone: aborted by somebody, or by a lifecycle rule",
    "QuotaExceeded": _QUOTA,
    "QuotaExceededException": _QUOTA,
    "SignatureDoesNotMatch": "check the secret key and the region",
    "XMinioAdminBucketQuotaExceeded": _QUOTA,
    "XMinioStorageFull": _FULL,
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
        made = _from_reply(error, operation)
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
    elif _is_not_tls(error):
        made = mark(
            StorageUnavailableError(f"{operation} did not get an answer: {_USE_HTTP} ({_brief(error)})"), tries=2
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


def _from_reply(error: ClientError, operation: str) -> StorageError:
    reply: Any = error.response
    facts = reply.get("ResponseMetadata", {})
    headers = facts.get("HTTPHeaders", {})
    status = int(facts.get("HTTPStatusCode") or 0)
    code = str(reply.get("Error", {}).get("Code") or status)
    text = str(reply.get("Error", {}).get("Message") or "no text")
    region = headers.get("x-amz-bucket-region") or reply.get("Error", {}).get("Region")
    advice = _advice(status, code, operation, region=region, location=headers.get("location"))
    message = f"the store answered {status} {code}: {text}" + (f" ({advice})" if advice else "")
    kind, tries = _classify(status, code)
    made = mark(kind(message), tries=tries, retry_after_s=_retry_after(headers))
    made.with_context(
        status=status, code=code, request_id=facts.get("RequestId") or headers.get("x-amz-request-id") or None
    )
    return made


def _advice(status: int, code: str, operation: str, *, region: str | None, location: str | None) -> str | None:
    """What to do about a reply, as far as it says so itself."""
    without_code = operation == "HeadObject" and code == str(status)
    if region is not None and (
        status in (301, 307) or code == "AuthorizationHeaderMalformed" or (without_code and status == 400)
    ):
        return f"the bucket is in region {_shown(region)}: set region='{_shown(region)}' in S3Config, or AWS_REGION"
    if status in _REDIRECTS:
        to = f" to {_shown(location)}" if location else ""
        return f"a redirect{to}, which is not followed: correct endpoint_url (https:// instead of http://, the host) or the region"
    if code == "AuthorizationHeaderMalformed":
        return "check the region: the signature names one that the store does not expect"
    if without_code and status == 403:
        return (
            "a HEAD's reply carries no code: GetObject may not be permitted on this key, or ListBucket, without which a missing "
            "key is answered so; or the keys, the region or this machine's clock are wrong"
        )
    if without_code and status == 400:
        return "a HEAD's reply carries no code: the session token may have expired, or the region be wrong"
    if status == 413 and code == "413":
        return "what answers there takes no body of this size: set a smaller part_bytes, or raise the proxy's limit"
    return _ADVICE.get(code) or (_FULL if status == 507 else None)


def _shown(text: str) -> str:
    """Foreign text for one line: no query (it may hold a signature), no control characters, bounded."""
    return "".join(character for character in text.partition("?")[0][:200] if character.isprintable())


def refuse_page(response_dict: dict[str, Any], **_: Any) -> None:  # noqa: ANN401 -- botocore's event
    """An SDK's ``before-parse`` handler: a web page where S3 answers in XML did not come from an S3 endpoint.

    Raises:
        StorageError: It is one, or says that the port speaks TLS. What gateways answer for a while (5xx) goes on, as do
            redirects and refusals by size, which have their own texts.
    """
    status, body = int(response_dict["status_code"]), response_dict.get("body")
    if not isinstance(body, (bytes, bytearray)):
        return
    head = bytes(body[:4096])
    if status == 400 and b"<Error" not in head and _WANTS_TLS.search(head):
        raise mark(StorageError(f"the server answered 400: {_USE_HTTPS}"), tries=NEVER).with_context(status=status)
    if not _PAGE.match(head) or not (200 <= status < 300 or status in (401, 403, 404, 405, 410)):
        return
    raise not_s3(status, head)


def not_s3(status: int, page: bytes) -> StorageError:
    """The error for a web page where S3's answer is due."""
    title = _TITLE.search(page[:4096])
    named = f" ({_shown(' '.join(title[2].decode('utf-8', 'replace').split()))!r})" if title else ""
    kind = AccessDeniedError if status in (401, 403) else StorageError
    made = kind(
        f"the endpoint answered {status} with a web page{named} and not as S3 does: it is no S3 endpoint, or a proxy answers in "
        "its place; check endpoint_url and its port"
    )
    # without a code: nobody must take the 404 of a page for a missing object
    return mark(made, tries=NEVER)


def is_page(body: bytes) -> bool:
    """Whether a body begins as a web page does."""
    return _PAGE.match(body[:4096]) is not None


def _classify(status: int, code: str) -> tuple[type[StorageError], int]:
    if code == _CLOCK:
        return AccessDeniedError, 2  # one fresh signature: the request may have waited too long
    if code in _DENIED or code in _EXPIRED:
        return AccessDeniedError, NEVER
    if code in _NO_SPACE:
        return StorageError, NEVER
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


def _is_not_tls(error: BaseException) -> bool:
    """Whether a TLS handshake was answered with something else than TLS."""
    return any(
        isinstance(link, ssl.SSLError)  # aiohttp's subclass has no reason of its own
        and getattr(link, "reason", None) in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
        for link in _chain(error)
    )


def was_cut_off(error: BaseException) -> bool:
    """Whether a connection that stood ended without an HTTP reply, as one to a port that speaks TLS does."""
    return any(
        isinstance(link, (ConnectionResetError, ConnectionClosedError, http.client.BadStatusLine))
        or (type(link) is ConnectionError and link.__cause__ is None)  # our own receiving side
        for link in _chain(error)
    )


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
    return isinstance(error, StorageError) and error.status == 404 and error.code not in (None, "NoSuchBucket")


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
