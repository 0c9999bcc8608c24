"""What the demo sees of a bucket through a client of its own, which knows nothing of dcp_s3."""
# ruff: noqa: INP001 -- part of a program, not of a package

from __future__ import annotations

from typing import Any

import botocore.session
from botocore.config import Config


class Bucket:
    """A prefix in a bucket.

    Args:
        endpoint: URL of the store, None for AWS.
        name: Name of the bucket.
        prefix: Ends with a slash.
    """

    def __init__(self, endpoint: str | None, name: str, prefix: str) -> None:
        self.name = name
        self.prefix = prefix
        session = botocore.session.Session()
        self._client = session.create_client(
            "s3",
            endpoint_url=endpoint,
            region_name=session.get_config_variable("region") or "us-east-1",
            config=Config(
                s3={"addressing_style": "path" if endpoint else "auto"},
                request_checksum_calculation="when_required",
                connect_timeout=10,
                read_timeout=30,
                retries={"total_max_attempts": 3, "mode": "standard"},
            ),
        )

    @property
    def url(self) -> str:
        """The prefix as an s3:// URL."""
        return f"s3://{self.name}/{self.prefix}".rstrip("/")

    def create(self) -> None:
        """Make the bucket."""
        self._client.create_bucket(Bucket=self.name)

    def sizes(self, path: str = "") -> dict[str, int]:
        """Return the objects below `path`, with their sizes in bytes."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=self.prefix + path)
        return {self._path(item): item["Size"] for page in pages for item in page.get("Contents", [])}

    def uploads(self) -> dict[str, str]:
        """Return the multipart uploads that are open: path and upload id."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.name, Prefix=self.prefix)
        return {self._path(item): item["UploadId"] for page in pages for item in page.get("Uploads") or ()}

    def parts(self, path: str, upload_id: str) -> list[int]:
        """Return the sizes of the parts that an open upload has so far, in bytes; none if it has been completed meanwhile."""
        pages = self._client.get_paginator("list_parts").paginate(
            Bucket=self.name, Key=self.prefix + path, UploadId=upload_id
        )
        try:
            return [part["Size"] for page in pages for part in page.get("Parts") or ()]
        except self._client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "NoSuchUpload":
                raise
            return []

    def empty(self) -> None:
        """Abort every open upload and delete every object."""
        for path, upload_id in self.uploads().items():
            self._client.abort_multipart_upload(Bucket=self.name, Key=self.prefix + path, UploadId=upload_id)
        for path in self.sizes():
            self._client.delete_object(Bucket=self.name, Key=self.prefix + path)

    def _path(self, item: dict[str, Any]) -> str:
        key: str = item["Key"]
        return key.removeprefix(self.prefix)
