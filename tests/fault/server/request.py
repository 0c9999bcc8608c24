"""What one S3 request asks for, and what is answered: operation names, error codes, XML."""

from __future__ import annotations

import dataclasses
import datetime as dt
import email.utils
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

from .wire import Head

ERROR_STATUS = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "BadDigest": 400,
    "BucketAlreadyOwnedByYou": 409,
    "BucketNotEmpty": 409,
    "ConditionalRequestConflict": 409,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "ExpiredToken": 400,
    "IncompleteBody": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidToken": 400,
    "MalformedXML": 400,
    "MethodNotAllowed": 405,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NoSuchVersion": 404,
    "NotImplemented": 501,
    "OperationAborted": 409,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "RequestTimeout": 400,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "TooManyRequests": 429,
    "XAmzContentSHA256Mismatch": 400,
}
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified"}
_DEFAULT_REASON = "Answer"


class S3Error(Exception):
    """An operation ends with an S3 error code."""

    def __init__(self, code: str, message: str = "", *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message or code)
        self.code = code
        self.status = ERROR_STATUS[code]
        self.headers = dict(headers or {})


@dataclasses.dataclass
class Reply:
    """An answer before it is written: ``body`` in pieces, also for HEAD, which leaves them out on the wire."""

    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: Sequence[bytes | bytearray | memoryview] = ()
    code: str | None = None


def error_reply(status: int, code: str, message: str = "", resource: str = "", request_id: str = "") -> Reply:
    """Build the XML answer of an S3 error."""
    body = xml(
        "Error",
        {"Code": code, "Message": message or code, "Resource": resource, "RequestId": request_id},
        namespace=False,
    )
    return Reply(status, {"Content-Type": "application/xml"}, [body], code=code)


def xml_reply(root: str, content: Mapping[str, Any]) -> Reply:
    """Build a 200 with an XML document."""
    return Reply(200, {"Content-Type": "application/xml"}, [xml(root, content)])


def xml(root: str, content: Mapping[str, Any], *, namespace: bool = True) -> bytes:
    """Write an XML document: mappings nest, lists repeat their element, None leaves it out."""
    space = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"' if namespace else ""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}{space}>{_elements(content)}</{root}>'
    return text.encode()


def _elements(content: Mapping[str, Any]) -> str:
    out = []
    for name, value in content.items():
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if isinstance(item, Mapping):
                text = _elements(item)
            elif isinstance(item, bool):
                text = str(item).lower()
            else:
                text = escape(str(item))
            out.append(f"<{name}>{text}</{name}>")
    return "".join(out)


def iso_time(unix_s: float) -> str:
    """Write a time as listings do."""
    return dt.datetime.fromtimestamp(unix_s, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def http_time(unix_s: float) -> str:
    """Write a time as headers do."""
    return email.utils.formatdate(unix_s, usegmt=True)


def status_line(status: int) -> str:
    """Write the first line of an answer."""
    return f"HTTP/1.1 {status} {_REASONS.get(status, _DEFAULT_REASON)}\r\n"


_OBJECT_OPERATIONS: dict[str, list[tuple[str, str]]] = {
    "GET": [
        ("uploadId", "ListParts"),
        ("attributes", "GetObjectAttributes"),
        ("tagging", "GetObjectTagging"),
        ("", "GetObject"),
    ],
    "HEAD": [("", "HeadObject")],
    "PUT": [
        ("uploadId", "UploadPart"),
        ("tagging", "PutObjectTagging"),
        ("retention", "PutObjectRetention"),
        ("", "PutObject"),
    ],
    "POST": [("uploads", "CreateMultipartUpload"), ("uploadId", "CompleteMultipartUpload")],
    "DELETE": [("uploadId", "AbortMultipartUpload"), ("tagging", "DeleteObjectTagging"), ("", "DeleteObject")],
}
_BUCKET_OPERATIONS: dict[str, list[tuple[str, str]]] = {
    "GET": [
        ("uploads", "ListMultipartUploads"),
        ("versioning", "GetBucketVersioning"),
        ("versions", "ListObjectVersions"),
        ("location", "GetBucketLocation"),
        ("object-lock", "GetObjectLockConfiguration"),
        ("lifecycle", "GetBucketLifecycleConfiguration"),
        ("list-type", "ListObjectsV2"),
        ("", "ListObjects"),
    ],
    "HEAD": [("", "HeadBucket")],
    "PUT": [
        ("versioning", "PutBucketVersioning"),
        ("lifecycle", "PutBucketLifecycleConfiguration"),
        ("", "CreateBucket"),
    ],
    "POST": [("delete", "DeleteObjects")],
    "DELETE": [("", "DeleteBucket")],
}


@dataclasses.dataclass(frozen=True)
class Request:
    """One request, understood from its head alone."""

    head: Head
    operation: str
    bucket: str
    key: str
    query: dict[str, str]
    access_key: str | None
    signed_unix_s: float | None
    presigned_expires_s: float | None

    @property
    def headers(self) -> dict[str, str]:
        """Header values by lower-case name."""
        return self.head.headers

    @property
    def part(self) -> int | None:
        """The part number of an UploadPart."""
        text = self.query.get("partNumber", "")
        return int(text) if text.isdigit() else None

    @property
    def upload_id(self) -> str | None:
        """The upload that this request belongs to."""
        return self.query.get("uploadId")

    @classmethod
    def parse(cls, head: Head, virtual_host: str | None) -> Request:
        """Find operation, bucket, key and signer in a head."""
        path, _, raw_query = head.target.partition("?")
        query = dict(parse_qsl(raw_query, keep_blank_values=True, encoding="utf-8"))
        host = head.headers.get("host", "").rpartition(":")[0] or head.headers.get("host", "")
        if virtual_host is not None and host.endswith("." + virtual_host):
            bucket, key = host[: -len(virtual_host) - 1], unquote(path[1:])
        else:
            raw_bucket, _, raw_key = path[1:].partition("/")
            bucket, key = unquote(raw_bucket), unquote(raw_key)
        access_key, signed, expires = _signer(head.headers, query)
        return cls(head, _operation(head, bucket, key, query), bucket, key, query, access_key, signed, expires)


def _operation(head: Head, bucket: str, key: str, query: Mapping[str, str]) -> str:
    if not bucket:
        return "ListBuckets"
    table = _OBJECT_OPERATIONS if key else _BUCKET_OPERATIONS
    for parameter, operation in table.get(head.method, ()):
        if not parameter or parameter in query:
            if "x-amz-copy-source" in head.headers:
                return {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}.get(operation, operation)
            return operation
    return f"Unknown{head.method.title()}"


def _signer(headers: Mapping[str, str], query: Mapping[str, str]) -> tuple[str | None, float | None, float | None]:
    """Return access key id, signing time and, for a presigned URL, its life in seconds."""
    expires = None
    if "X-Amz-Credential" in query:
        credential, date = query["X-Amz-Credential"], query.get("X-Amz-Date", "")
        expires = float(query.get("X-Amz-Expires", "0"))
    elif "AWSAccessKeyId" in query:  # the presigned form of the older signature
        return query["AWSAccessKeyId"], float(query.get("Expires", "0")), 0.0
    else:
        found = re.search(r"Credential=([^,\s]+)", headers.get("authorization", ""))
        if found is None:
            return None, None, None
        credential, date = found.group(1), headers.get("x-amz-date", "")
    try:
        signed = dt.datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=dt.UTC).timestamp()
    except ValueError:
        signed = None
    return credential.partition("/")[0], signed, expires
