"""The listings: objects (both versions of the call) and open multipart uploads, in pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from .model import Store
from .request import Reply, Request, S3Error, iso_time, xml_reply


def list_objects(store: Store, request: Request, body: bytearray) -> Reply:
    """ListObjectsV2, and ListObjects where list-type is absent."""
    query, second = request.query, request.query.get("list-type") == "2"
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit = _limit(store, query.get("max-keys"))
    after = (
        _decode(query["continuation-token"])
        if "continuation-token" in query
        else query.get("start-after" if second else "marker", "")
    )
    encode = _encoder(query)
    contents: list[dict[str, Any]] = []  # XML elements
    prefixes: list[str] = []
    last, truncated = "", False
    for key, item in store.current(request.bucket, prefix):
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        group = key[: cut + len(delimiter)] if cut >= 0 else None
        name = key if group is None else group
        if name.encode() <= after.encode() or (group is not None and prefixes and prefixes[-1] == group):
            continue
        if len(contents) + len(prefixes) == limit:
            truncated = True
            break
        last = name
        if group is not None:
            prefixes.append(group)
            continue
        row = {"Key": encode(key), "LastModified": iso_time(item.last_modified), "ETag": f'"{item.etag}"'}
        contents.append(
            {**row, "Size": item.blob.size, "StorageClass": item.headers.get("x-amz-storage-class", "STANDARD")}
        )
    content: dict[str, Any] = {
        "Name": request.bucket,
        "Prefix": encode(prefix),
        "Delimiter": encode(delimiter) if delimiter else None,
        "MaxKeys": limit,
        "EncodingType": query.get("encoding-type"),
        "IsTruncated": truncated and limit > 0,
        "Contents": contents,
        "CommonPrefixes": [{"Prefix": encode(group)} for group in prefixes],
    }
    if second:
        token = _encode(last) if truncated and store.settings.continuation_tokens else None
        content |= {"KeyCount": len(contents) + len(prefixes), "NextContinuationToken": token}
        content |= {"ContinuationToken": query.get("continuation-token"), "StartAfter": query.get("start-after")}
    else:
        content |= {"Marker": encode(after), "NextMarker": encode(last) if truncated and delimiter else None}
    return xml_reply("ListBucketResult", content)


def list_uploads(store: Store, request: Request, body: bytearray) -> Reply:
    """ListMultipartUploads."""
    store.bucket(request.bucket)
    query, encode = request.query, _encoder(request.query)
    prefix, limit = query.get("prefix", ""), _limit(store, query.get("max-uploads"))
    key_marker, id_marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
    found = [upload for upload in store.open_uploads(request.bucket) if upload.key.startswith(prefix)]
    if key_marker:
        found = [
            upload
            for upload in found
            if upload.key.encode() > key_marker.encode()
            or (upload.key == key_marker and id_marker and upload.upload_id > id_marker)
        ]
    page, truncated = found[:limit], len(found) > limit
    content: dict[str, Any] = {  # XML elements
        "Bucket": request.bucket,
        "KeyMarker": encode(key_marker),
        "UploadIdMarker": id_marker,
        "Prefix": encode(prefix),
        "MaxUploads": limit,
        "EncodingType": query.get("encoding-type"),
        "IsTruncated": truncated,
        "NextKeyMarker": encode(page[-1].key) if truncated else None,
        "NextUploadIdMarker": page[-1].upload_id if truncated else None,
        "Upload": [
            {"Key": encode(upload.key), "UploadId": upload.upload_id, "Initiated": iso_time(upload.initiated)}
            for upload in page
        ],
    }
    return xml_reply("ListMultipartUploadsResult", content)


def _limit(store: Store, asked: str | None) -> int:
    try:
        return min(int(asked or 1000), store.settings.list_page_size)
    except ValueError as error:
        raise S3Error("InvalidArgument", f"not a number: {asked!r}") from error


def _encoder(query: dict[str, str]) -> Callable[[str], str]:
    return (lambda text: quote(text, safe="/")) if query.get("encoding-type") == "url" else (lambda text: text)


def _encode(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _decode(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except (binascii.Error, ValueError) as error:
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from error
