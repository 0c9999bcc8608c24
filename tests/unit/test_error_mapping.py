"""Every failure of the libraries below becomes one of our errors, with the right number of tries."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import socket
import ssl
from typing import Any

import aiohttp
import botocore.exceptions
import pytest
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from dcp_s3 import (
    AccessDeniedError,
    ConfigError,
    CorruptCheckpointError,
    DcpS3Error,
    StorageError,
    StorageUnavailableError,
)
from dcp_s3._transfer.limits.retry import AS_POLICY, NEVER
from dcp_s3._transfer.s3.error_mapping import (
    is_expired,
    is_missing,
    is_precondition_failed,
    is_refused_as_unknown,
    translate,
)

URL = "https://s3.test/bucket/k"


def reply(status: int, code: str = "", message: str = "text", **headers: str) -> ClientError:
    """A failure as botocore parses it from a reply."""
    response: Any = {
        "Error": {"Code": code or str(status), "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "RequestId": "R7", "HTTPHeaders": headers},
    }
    return ClientError(response, "PutObject")


def translated(error: BaseException) -> tuple[type[DcpS3Error], int]:
    """Class and number of tries of what an error becomes."""
    made = translate(error, operation="PutObject", bucket="b", key="k", part=7)
    assert isinstance(made, DcpS3Error)
    assert (made.operation, made.bucket, made.key, made.part) == ("PutObject", "b", "k", 7)
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), str(again), again.part) == (type(made), str(made), 7)
    return type(made), int(made.__dict__.get("tries", NEVER))


@pytest.mark.parametrize(
    "status, code, kind, tries",
    [
        (503, "SlowDown", StorageUnavailableError, AS_POLICY),
        (503, "", StorageUnavailableError, AS_POLICY),
        (500, "InternalError", StorageUnavailableError, AS_POLICY),
        (502, "", StorageUnavailableError, AS_POLICY),
        (504, "", StorageUnavailableError, AS_POLICY),
        (509, "BandwidthLimitExceeded", StorageUnavailableError, AS_POLICY),
        (429, "TooManyRequests", StorageUnavailableError, AS_POLICY),
        (408, "", StorageUnavailableError, AS_POLICY),
        (400, "RequestTimeout", StorageUnavailableError, AS_POLICY),
        (400, "", StorageUnavailableError, AS_POLICY),
        (400, "BadDigest", StorageUnavailableError, AS_POLICY),
        (409, "OperationAborted", StorageUnavailableError, AS_POLICY),
        (409, "ConditionalRequestConflict", StorageUnavailableError, AS_POLICY),
        (200, "InternalError", StorageUnavailableError, AS_POLICY),
        (200, "NobodyKnows", StorageUnavailableError, AS_POLICY),
        (403, "SlowDown", StorageUnavailableError, AS_POLICY),
        (403, "RequestTimeTooSkewed", AccessDeniedError, 2),
        (403, "AccessDenied", AccessDeniedError, NEVER),
        (403, "", AccessDeniedError, NEVER),
        (403, "NobodyKnows", AccessDeniedError, NEVER),
        (401, "", AccessDeniedError, NEVER),
        (400, "ExpiredToken", AccessDeniedError, NEVER),
        (403, "ExpiredTokenException", AccessDeniedError, NEVER),
        (400, "InvalidToken", AccessDeniedError, NEVER),
        (403, "InvalidAccessKeyId", AccessDeniedError, NEVER),
        (403, "SignatureDoesNotMatch", AccessDeniedError, NEVER),
        (400, "EntityTooLarge", StorageError, NEVER),
        (400, "InvalidPart", StorageError, NEVER),
        (404, "NoSuchBucket", StorageError, NEVER),
        (404, "NoSuchKey", StorageError, NEVER),
        (404, "", StorageError, NEVER),
        (412, "PreconditionFailed", StorageError, NEVER),
        (416, "InvalidRange", StorageError, NEVER),
        (501, "NotImplemented", StorageError, NEVER),
        (301, "PermanentRedirect", StorageError, NEVER),
        (507, "", StorageError, NEVER),
    ],
)
def test_replies(status: int, code: str, kind: type[DcpS3Error], tries: int):
    """Status and S3 code decide; both, and the request id, are kept."""
    error = reply(status, code)
    assert translated(error) == (kind, tries)
    made = translate(error, operation="PutObject", bucket="b")
    assert (made.status, made.code, made.request_id) == (status, code or str(status), "R7")


def of_connection() -> list[BaseException]:
    """Failures of connections, as each library raises them."""
    b = botocore.exceptions
    gaierror = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return [
        b.EndpointConnectionError(endpoint_url=URL, error=gaierror),
        b.ConnectTimeoutError(endpoint_url=URL, error=TimeoutError()),
        b.ReadTimeoutError(endpoint_url=URL, error=TimeoutError()),
        b.ConnectionClosedError(endpoint_url=URL, error=ConnectionResetError()),
        b.HTTPClientError(error=ValueError("anything")),
        b.ResponseStreamingError(error=OSError("cut")),
        b.IncompleteReadError(actual_bytes=3, expected_bytes=7),
        b.ProxyConnectionError(proxy_url="http://p", error=OSError()),
        b.SSLError(endpoint_url=URL, error=ssl.SSLError(1, "wrong version number")),
        ResponseParserError("not XML"),
        gaierror,
        ConnectionResetError(),
        BrokenPipeError(),
        TimeoutError("late"),
        asyncio.IncompleteReadError(b"", 5),
        ssl.SSLError(1, "record layer failure"),
        ssl.SSLEOFError(8, "EOF"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError("cut"),
        aiohttp.ClientOSError(104, "reset"),
        EOFError("the body ended after 1 of 2 bytes"),
    ]


@pytest.mark.parametrize("error", of_connection(), ids=lambda error: type(error).__name__)
def test_connections(error: BaseException):
    """A connection that fails, at any point and in any library, is tried again as the policy says."""
    assert translated(error) == (StorageUnavailableError, AS_POLICY)
    made = translate(error, operation="PutObject", bucket="b")
    assert type(error).__name__ in made.message
    assert made.status is None


def test_every_connection_error_of_botocore_is_mapped():
    """A class that botocore adds for connections is mapped, too: none of them counts as "could not be sent"."""
    names = {"ConnectionError", "HTTPClientError"}
    found = [
        kind
        for _, kind in inspect.getmembers(botocore.exceptions, inspect.isclass)
        if names & {base.__name__ for base in kind.__mro__ if issubclass(base, botocore.exceptions.BotoCoreError)}
    ]
    assert len(found) >= 9
    for kind in found:
        made = kind.__new__(kind)
        Exception.__init__(made, "text")
        made.kwargs = {}
        assert translated(made) == (StorageUnavailableError, AS_POLICY), kind


def of_credentials() -> list[BaseException]:
    b = botocore.exceptions
    return [
        b.NoCredentialsError(),
        b.CredentialRetrievalError(provider="process", error_msg="busy"),
        b.MetadataRetrievalError(error_msg="busy"),
        b.TokenRetrievalError(provider="sso", error_msg="busy"),
    ]


@pytest.mark.parametrize("error", of_credentials(), ids=lambda error: type(error).__name__)
def test_credentials(error: BaseException):
    """Credentials that cannot be had now are sought briefly, where there is a source of any; the text says where they may come from."""
    kind, tries = translated(error)
    assert kind is AccessDeniedError
    if isinstance(error, botocore.exceptions.NoCredentialsError):
        assert tries == NEVER  # no source has any
    else:
        assert NEVER < tries < 8
    assert "AWS_ACCESS_KEY_ID" in str(translate(error, operation="x", bucket="b"))


@pytest.mark.parametrize(
    "error, kind",
    [
        (botocore.exceptions.ProfileNotFound(profile="lab"), ConfigError),
        (botocore.exceptions.PartialCredentialsError(provider="env", cred_var="secret"), ConfigError),
        (botocore.exceptions.ParamValidationError(report="Invalid length"), StorageError),
        (ValueError("cannot be encoded"), StorageError),
        (NameError("name 'x' is not defined"), StorageError),
        (ImportError("no module"), StorageError),
        (MemoryError(), StorageError),
    ],
)
def test_what_was_never_sent(error: BaseException, kind: type[DcpS3Error]):
    """Failures on this side of the wire are not repeated."""
    assert translated(error) == (kind, NEVER)


def test_our_own_errors_come_back():
    """An error of ours is the same object, with what it lacked of the context."""
    for error in (CorruptCheckpointError("x"), StorageUnavailableError("y").with_context(key="other")):
        made = translate(error, operation="GetObject", bucket="b", key="k")
        assert made is error
        assert (made.bucket, made.key) == ("b", error.key)


def certificate_errors() -> list[BaseException]:
    refused = ssl.SSLCertVerificationError(1, "certificate verify failed")
    refused.verify_code, refused.verify_message = 10, "certificate has expired"
    chained = OSError("outer")
    chained.__cause__ = refused
    key: Any = type("Key", (), {"ssl": True, "host": "s3.test", "port": 443, "is_ssl": True})()
    wrapped = aiohttp.ClientConnectorCertificateError(key, refused)
    return [
        refused,
        chained,
        wrapped,
        botocore.exceptions.SSLError(endpoint_url=URL, error=refused),
        botocore.exceptions.SSLError(endpoint_url=URL, error=wrapped),
    ]


@pytest.mark.parametrize("error", certificate_errors(), ids=lambda error: type(error).__name__)
def test_certificates(error: BaseException):
    """A refused certificate is found however deep it lies, is never retried, and OpenSSL's reason is in the text."""
    assert translated(error) == (StorageError, NEVER)
    made = translate(error, operation="PutObject", bucket="b")
    assert "certificate was refused: certificate has expired; " in made.message


@pytest.mark.parametrize(
    "headers, seconds",
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0"}, 0),
        ({"retry-after": "100000"}, 300),
        ({}, 0),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "soon"}, 0),
        ({"retry-after": "Mon, 06 Jul 2026 10:00:09 GMT", "date": "Mon, 06 Jul 2026 10:00:00 GMT"}, 9),
        ({"retry-after": "Mon, 06 Jul 2026 09:00:00 GMT", "date": "Mon, 06 Jul 2026 10:00:00 GMT"}, 0),
        ({"retry-after": "Tue, 07 Jul 2026 10:00:00 GMT", "date": "Mon, 06 Jul 2026 10:00:00 GMT"}, 300),
        ({"retry-after": "Mon, 06 Jul 2026 10:00:09 GMT", "date": "nonsense"}, 0),
        ({"retry-after": "Mon, 06 Jul 2026 10:00:09", "date": "Mon, 06 Jul 2026 10:00:00 GMT"}, 0),
        ({"retry-after": "Mon, 06 Jul 1998 10:00:09 GMT"}, 0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float):
    """Retry-After in both of its forms, bounded; what is no time counts as none."""
    made = translate(reply(503, "SlowDown", **headers), operation="PutObject", bucket="b")
    assert made.__dict__["retry_after_s"] == seconds


def test_a_reply_that_is_almost_empty():
    """A reply without code, text or headers still makes an error that can be read."""
    empty: Any = {}
    made = translate(ClientError(empty, "PutObject"), operation="PutObject", bucket="b")
    assert isinstance(made, StorageError)
    assert made.code == "0"


@pytest.mark.parametrize(
    "status, code, answers",
    [
        (404, "NoSuchKey", ("missing",)),
        (404, "404", ("missing",)),
        (404, "NoSuchBucket", ()),
        (412, "PreconditionFailed", ("precondition",)),
        (501, "NotImplemented", ("form",)),
        (400, "InvalidRequest", ("form",)),
        (400, "MissingContentMD5", ("form",)),
        (411, "MissingContentLength", ("form",)),
        (400, "EntityTooLarge", ()),
        (400, "ExpiredToken", ("expired",)),
        (400, "TokenRefreshRequired", ("expired",)),
        (400, "RequestExpired", ("expired",)),
        (403, "InvalidAccessKeyId", ("expired",)),
        (400, "InvalidToken", ("expired",)),
        (403, "SignatureDoesNotMatch", ()),
        (403, "AccessDenied", ()),
        (503, "SlowDown", ()),
    ],
)
def test_what_an_error_is(status: int, code: str, answers: tuple[str, ...]):
    """Callers tell errors apart by status and code alone."""
    error = translate(reply(status, code), operation="PutObject", bucket="b")
    found = {
        "missing": is_missing(error),
        "precondition": is_precondition_failed(error),
        "form": is_refused_as_unknown(error),
        "expired": is_expired(error),
    }
    assert tuple(name for name, holds in found.items() if holds) == answers
    other = ValueError("404 NoSuchKey 412 501 ExpiredToken")
    assert not any(test(other) for test in (is_missing, is_precondition_failed, is_refused_as_unknown, is_expired))


def test_a_head_that_may_mean_expired():
    """A HEAD's 400, 401 or 403 has no code: it may be an expired token; another operation's may not."""
    for status in (400, 401, 403):
        for operation, expected in (("HeadObject", True), ("GetObject", False)):
            assert is_expired(translate(reply(status), operation=operation, bucket="b")) is expected
    assert not is_expired(translate(reply(404), operation="HeadObject", bucket="b"))
