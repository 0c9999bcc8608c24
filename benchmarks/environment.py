"""What the figures depend on: the machine and the versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "aiobotocore",
    "aiohttp",
    "awscrt",
    "boto3",
    "s3torchconnector",
    "s3fs",
    "multi-storage-client",
)


def describe() -> dict[str, Any]:
    """Processor, memory, kernel, date and versions; nothing that names the machine or its owner."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "dcp_s3": _version_of_ours(),
        "source": _source(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source() -> str:
    """A digest of the package's own files: what was measured before it changed is not comparable."""
    import dcp_s3

    digest = hashlib.sha256()
    for path in sorted(Path(next(iter(dcp_s3.__path__))).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version_of_ours() -> str:
    from dcp_s3 import __version__

    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{__version__} ({commit})"
