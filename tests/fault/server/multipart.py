"""The operations of a multipart upload."""

from __future__ import annotations

from typing import Any

from . import checksums, conditions
from .model import Blob, Part, Store, StoredObject, Upload, stored_headers
from .objects import check_customer_key, encryption_headers, local_name, parse_xml, text_of, version_header
from .request import Reply, Request, S3Error, iso_time, xml_reply


def create(store: Store, request: Request, body: bytearray) -> Reply:
    """CreateMultipartUpload."""
    store.bucket(request.bucket)
    if store.settings.checksum.startswith("refuse") and checksums.asks_checksum(request):
        raise S3Error(
            "NotImplemented" if store.settings.checksum == "refuse-501" else "InvalidRequest", "no checksums here"
        )
    algorithm = request.headers.get("x-amz-checksum-algorithm", "").lower() or None
    if store.settings.checksum != "verify":
        algorithm = None
    if algorithm is not None and algorithm not in checksums.ALGORITHMS:
        raise S3Error("InvalidRequest", f"Checksum algorithm provided is unsupported: {algorithm}")
    kind = request.headers.get("x-amz-checksum-type") or ("FULL_OBJECT" if algorithm == "crc64nvme" else "COMPOSITE")
    upload = Upload(
        store.unique("upload-"),
        request.bucket,
        request.key,
        stored_headers(request.headers),
        algorithm,
        kind,
        store.now(),
    )
    store.uploads[upload.upload_id] = upload
    reply = xml_reply(
        "InitiateMultipartUploadResult", {"Bucket": request.bucket, "Key": request.key, "UploadId": upload.upload_id}
    )
    reply.headers |= encryption_headers(upload.headers)
    if algorithm is not None:
        reply.headers |= {"x-amz-checksum-algorithm": algorithm.upper(), "x-amz-checksum-type": kind}
    return reply


def _open_upload(store: Store, request: Request) -> Upload:
    store.bucket(request.bucket)
    upload = store.uploads.get(request.upload_id or "")
    if upload is None or upload.state != "open" or (upload.bucket, upload.key) != (request.bucket, request.key):
        raise S3Error("NoSuchUpload", "The specified upload does not exist.")
    return upload


def upload_part(store: Store, request: Request, body: bytearray) -> Reply:
    """UploadPart: the last acknowledged attempt of a number counts."""
    settings, number = store.settings, request.part
    upload = _open_upload(store, request)
    if number is None or not 1 <= number <= settings.max_parts:
        raise S3Error(
            "InvalidArgument", f"Part number must be an integer between 1 and {settings.max_parts}, inclusive"
        )
    if len(body) > settings.max_part_bytes:
        raise S3Error("EntityTooLarge", "Your proposed upload exceeds the maximum allowed size")
    check_customer_key(request, upload.headers)
    checksums.require_md5(request, settings)
    payload = checksums.accept(request, body, settings)
    for algorithm in payload.checksums:
        if algorithm != upload.algorithm and (upload.algorithm is not None or settings.strict_checksum_type):
            expected = upload.algorithm or "null"
            raise S3Error(
                "InvalidRequest",
                f"Checksum Type mismatch occurred, expected checksum Type: {expected}, actual checksum Type: {algorithm}",
            )
    blob = payload.blob(request, settings)
    if upload.algorithm is not None and upload.algorithm not in payload.checksums:
        payload.checksums[upload.algorithm] = checksums.checksum(upload.algorithm, [payload.data])
    upload.parts[number] = Part(blob, blob.size, payload.etag, payload.checksums, store.now())
    echoed = {checksums.header_name(name): value for name, value in payload.checksums.items()}
    return Reply(200, {"ETag": f'"{payload.etag}"', **echoed, **encryption_headers(upload.headers)})


def complete(store: Store, request: Request, body: bytearray) -> Reply:
    """CompleteMultipartUpload."""
    settings = store.settings
    ended = store.uploads.get(request.upload_id or "")
    if ended is not None and (ended.bucket, ended.key) == (request.bucket, request.key) and ended.state != "open":
        answer = settings.complete_again if ended.state == "completed" else settings.complete_after_abort
        if answer == 200:
            return xml_reply("CompleteMultipartUploadResult", ended.result)
        raise S3Error("InternalError" if answer == 500 else "NoSuchUpload", "The upload is not open any more.")
    upload = _open_upload(store, request)
    numbers, parts = _listed(parse_xml(body), upload)
    if any(part.size < settings.min_part_bytes for part in parts[:-1]):
        raise S3Error("EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
    declared = request.headers.get("x-amz-mp-object-size")
    if declared is not None and int(declared) != sum(part.size for part in parts):
        raise S3Error("InvalidRequest", "The provided 'x-amz-mp-object-size' header does not match the parts")
    current = store.latest(request.bucket, request.key)
    conditions.check_write(request, current, settings.conditional_complete, settings)
    blob = Blob.joined(part.blob for part in parts)
    sums = _object_checksums(upload, parts, blob)
    for name, value in sums.items():
        if request.headers.get(checksums.header_name(name), value).partition("-")[0] != value.partition("-")[0]:
            raise S3Error("BadDigest", f"The {name} you specified did not match the calculated checksum.")
    etag = checksums.multipart_etag([part.etag for part in parts])
    item = StoredObject(blob, etag, store.now(), upload.headers, sums, upload.checksum_type, parts=len(numbers))
    store.put(request.bucket, request.key, item)
    upload.state, upload.parts = "completed", {}
    upload.result = {
        "Location": f"/{request.bucket}/{request.key}",
        "Bucket": request.bucket,
        "Key": request.key,
        "ETag": f'"{etag}"' if settings.complete_etag else "",
        **{checksums.element_name(name): value for name, value in sums.items()},
    }
    reply = xml_reply("CompleteMultipartUploadResult", upload.result)
    reply.headers |= encryption_headers(upload.headers) | version_header(item)
    return reply


def _listed(root: Any, upload: Upload) -> tuple[list[int], list[Part]]:  # root: an XML element
    """Return numbers and parts that a Complete lists; raise S3Error if the list does not hold."""
    numbers: list[int] = []
    parts = []
    for entry in root:
        if local_name(entry) != "Part":
            continue
        number_text, etag = text_of(entry, "PartNumber") or "", text_of(entry, "ETag") or ""
        if not number_text.isdigit():
            raise S3Error("MalformedXML", "a part has no number")
        number = int(number_text)
        if numbers and number <= numbers[-1]:
            raise S3Error("InvalidPartOrder", "The list of parts was not in ascending order.")
        part = upload.parts.get(number)
        if part is None or etag.strip('"') != part.etag:
            raise S3Error("InvalidPart", f"Part {number} could not be found, or its entity tag did not match.")
        for algorithm, own in part.checksums.items():
            value = text_of(entry, checksums.element_name(algorithm))
            if value is None and algorithm == upload.algorithm and upload.checksum_type == "COMPOSITE":
                message = f"The upload was created using a {algorithm} checksum. The complete request must include the checksum for each part. It was missing for part {number} in the request."
                raise S3Error("InvalidRequest", message)
            if value is not None and value != own:
                raise S3Error("InvalidPart", f"The checksum of part {number} did not match.")
        numbers.append(number)
        parts.append(part)
    if not numbers:
        raise S3Error("MalformedXML", "The XML you provided was not well-formed or did not validate: no part")
    return numbers, parts


def _object_checksums(upload: Upload, parts: list[Part], blob: Blob) -> dict[str, str]:
    """Return the checksum of the whole object, of the kind that its upload asked for."""
    if upload.algorithm is None or blob.discarded or any(part.blob.size != part.size for part in parts):
        return {}
    if upload.checksum_type == "FULL_OBJECT":
        return {upload.algorithm: checksums.checksum(upload.algorithm, blob.slices())}
    return {
        upload.algorithm: checksums.composite(upload.algorithm, [part.checksums[upload.algorithm] for part in parts])
    }


def abort(store: Store, request: Request, body: bytearray) -> Reply:
    """AbortMultipartUpload."""
    upload = _open_upload(store, request)
    upload.state, upload.parts = "aborted", {}
    return Reply(204)


def list_parts(store: Store, request: Request, body: bytearray) -> Reply:
    """ListParts, in pages."""
    upload = _open_upload(store, request)
    limit = min(int(request.query.get("max-parts", 1000)), store.settings.list_page_size)
    marker = int(request.query.get("part-number-marker") or 0)
    numbers = [number for number in sorted(upload.parts) if number > marker]
    page = numbers[:limit]
    rows = [
        {
            "PartNumber": number,
            "LastModified": iso_time(upload.parts[number].last_modified),
            "ETag": f'"{upload.parts[number].etag}"',
            "Size": upload.parts[number].size,
            **{checksums.element_name(name): value for name, value in upload.parts[number].checksums.items()},
        }
        for number in page
    ]
    content: dict[str, Any] = {  # XML elements
        "Bucket": upload.bucket,
        "Key": upload.key,
        "UploadId": upload.upload_id,
        "PartNumberMarker": marker,
        "MaxParts": limit,
        "IsTruncated": len(numbers) > limit,
        "NextPartNumberMarker": page[-1] if page else None,
        "Part": rows,
    }
    return xml_reply("ListPartsResult", content)
