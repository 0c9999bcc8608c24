"""The stager on its own, for whoever passes it to ``dcp.async_save`` as ``async_stager``; the writer has one built in."""

from __future__ import annotations

from dcp_s3._staging.buffers import Lease, lease_of
from dcp_s3._staging.handoff import StagedStateDict, StagingFailed
from dcp_s3._staging.stager import Stager, stager_for

__all__ = ["Lease", "StagedStateDict", "Stager", "StagingFailed", "lease_of", "stager_for"]
