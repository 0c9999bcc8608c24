"""The operations on single objects and on buckets."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

from . import checksums, conditions
from .model import Store, StoredObject, stored_headers
from .request import Reply, Request, S3Error, http_time, xml_reply

_SSE_C_MD5 = "x-amz-server-side-encryption-customer-key-md5"
_SSE_C = "x-amz-server-side-encryption-customer-algorithm"


def put_object(store: Store, request: Request, body: bytearray) -> Reply:
    """PutObject."""
    if len(body) > store.settings.max_part_bytes:
        raise S3Error("EntityTooLarge", "Your proposed upload exceeds the maximum allowed size")
    checksums.require_md5(request, store.settings)
    payload = checksums.accept(request, body, store.settings)
    current = store.latest(request.bucket, request.key)
    conditions.check_write(request, current, store.settings.conditional_put, store.settings)
    blob = payload.blob(request, store.settings)
    kept = stored_headers(request.headers)
    item = StoredObject(blob, payload.etag, store.now(), kept, payload.checksums)
    store.put(request.bucket, request.key, item)
    echoed = {checksums.header_name(name): value for name, value in payload.checksums.items()}
    return Reply(200, {"ETag": f'"{payload.etag}"', **echoed, **encryption_headers(kept), **version_header(item)})


def get_object(store: Store, request: Request, body: bytearray) -> Reply:
    """GetObject and HeadObject."""
    item = store.version(request.bucket, request.key, request.query.get("versionId"))
    if item is None:
        code = "AccessDenied" if store.settings.hides_missing else "NoSuchKey"
        raise S3Error(code, "Access Denied" if code == "AccessDenied" else "The specified key does not exist.")
    check_customer_key(request, item.headers)
    headers = {
        "ETag": f'"{item.etag}"',
        "Last-Modified": http_time(item.last_modified),
        "Accept-Ranges": "bytes",
        "Content-Type": "binary/octet-stream",
        **_shown(item),
        **version_header(item),
    }
    if conditions.check_read(request, item, store.settings.conditional_get):
        return Reply(304, headers)
    size, span = item.blob.size, _span(_range(store, request), item.blob.size)
    start, end = (0, size) if span is None else span
    whole = span is None
    if not whole:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    if (
        whole
        and store.settings.checksum == "verify"
        and request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
    ):
        headers |= {checksums.header_name(name): value for name, value in item.checksums.items()}
        if item.checksums:
            headers["x-amz-checksum-type"] = item.checksum_type
    return Reply(200 if whole else 206, headers, list(item.blob.slices(start, end)))


def _range(store: Store, request: Request) -> str | None:
    return request.headers.get("range") if store.settings.ranges == "honour" else None


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the [start, end) that a Range header asks for; None for no or an unknown range."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip()) if header is not None else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last) + 1, size) if first and last else size
    if start >= size or start >= end:
        raise S3Error(
            "InvalidRange", "The requested range is not satisfiable", headers={"Content-Range": f"bytes */{size}"}
        )
    return start, end


def _shown(item: StoredObject) -> dict[str, str]:
    """Return the stored headers that a read gives back."""
    hidden = ("x-amz-tagging",)
    return {
        name.title() if not name.startswith("x-amz") else name: value
        for name, value in item.headers.items()
        if name not in hidden
    }


def version_header(item: StoredObject) -> dict[str, str]:
    """Return x-amz-version-id where there is one."""
    return {} if item.version_id is None else {"x-amz-version-id": item.version_id}


def encryption_headers(kept: dict[str, str]) -> dict[str, str]:
    """Return the encryption headers that a write's answer repeats."""
    return {name: value for name, value in kept.items() if name.startswith("x-amz-server-side-encryption")}


def check_customer_key(request: Request, kept: dict[str, str]) -> None:
    """Refuse a request that lacks the SSE-C key which ``kept`` was made with, or brings another."""
    wanted, given = kept.get(_SSE_C_MD5), request.headers.get(_SSE_C_MD5)
    if wanted is None and request.headers.get(_SSE_C) is not None:
        raise S3Error("InvalidRequest", "The encryption parameters are not applicable to this object.")
    if wanted is not None and given is None:
        raise S3Error(
            "InvalidRequest",
            "The object was stored using a form of Server Side Encryption. Its parameters are missing.",
        )
    if wanted is not None and given != wanted:
        raise S3Error("AccessDenied", "Access Denied")


def delete_object(store: Store, request: Request, body: bytearray) -> Reply:
    """DeleteObject."""
    current = store.latest(request.bucket, request.key)
    if request.headers.get("if-match") is not None and current is not None:
        conditions.check_write(request, current, store.settings.conditional_delete, store.settings)
    marker = store.delete(request.bucket, request.key, request.query.get("versionId"))
    return Reply(204, {} if marker is None else {"x-amz-delete-marker": "true", "x-amz-version-id": marker})


def delete_objects(store: Store, request: Request, body: bytearray) -> Reply:
    """DeleteObjects: many keys, each with its own outcome."""
    store.bucket(request.bucket)
    checksums.require_md5(request, store.settings)
    checksums.check_md5(request, body)
    root = parse_xml(body)
    quiet = text_of(root, "Quiet") == "true"
    deleted: list[dict[str, Any]] = []  # XML elements
    errors: list[dict[str, Any]] = []
    entries = [child for child in root if local_name(child) == "Object"]
    if not 1 <= len(entries) <= 1000:
        raise S3Error("MalformedXML", "1 to 1000 keys are allowed")
    for entry in entries:
        key, version_id = text_of(entry, "Key") or "", text_of(entry, "VersionId")
        try:
            marker = store.delete(request.bucket, key, version_id)
            deleted.append({"Key": key, "VersionId": version_id, "DeleteMarkerVersionId": marker})
        except S3Error as error:
            errors.append({"Key": key, "Code": error.code, "Message": str(error)})
    return xml_reply("DeleteResult", {"Deleted": [] if quiet else deleted, "Error": errors})


def create_bucket(store: Store, request: Request, body: bytearray) -> Reply:
    """CreateBucket."""
    if request.bucket in store.buckets:
        raise S3Error("BucketAlreadyOwnedByYou", "The bucket exists")
    store.buckets[request.bucket] = {}
    return Reply(200, {"Location": f"/{request.bucket}"})


def delete_bucket(store: Store, request: Request, body: bytearray) -> Reply:
    """DeleteBucket."""
    if store.bucket(request.bucket):
        raise S3Error("BucketNotEmpty", "The bucket you tried to delete is not empty")
    del store.buckets[request.bucket]
    return Reply(204)


def head_bucket(store: Store, request: Request, body: bytearray) -> Reply:
    """HeadBucket."""
    store.bucket(request.bucket)
    return Reply(200)


def list_buckets(store: Store, request: Request, body: bytearray) -> Reply:
    """ListBuckets."""
    names = [{"Name": name} for name in sorted(store.buckets)]
    return xml_reply("ListAllMyBucketsResult", {"Buckets": {"Bucket": names}})


def bucket_versioning(store: Store, request: Request, body: bytearray) -> Reply:
    """GetBucketVersioning."""
    store.bucket(request.bucket)
    return xml_reply("VersioningConfiguration", {"Status": "Enabled" if store.settings.versioned else None})


def bucket_location(store: Store, request: Request, body: bytearray) -> Reply:
    """GetBucketLocation: us-east-1 is the empty location."""
    store.bucket(request.bucket)
    return xml_reply("LocationConstraint", {})


def object_lock_configuration(store: Store, request: Request, body: bytearray) -> Reply:
    """GetObjectLockConfiguration."""
    store.bucket(request.bucket)
    return xml_reply(
        "ObjectLockConfiguration", {"ObjectLockEnabled": "Enabled" if store.settings.object_lock else None}
    )


def parse_xml(body: bytes | bytearray) -> ET.Element:
    """Parse a request's document."""
    try:
        return ET.fromstring(bytes(body))
    except ET.ParseError as error:
        raise S3Error("MalformedXML", str(error)) from error


def local_name(element: ET.Element) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


def text_of(element: ET.Element, name: str) -> str | None:
    """Return the text of a child, None if it is not there."""
    return next((child.text or "" for child in element if local_name(child) == name), None)
