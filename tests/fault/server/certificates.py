"""TLS identities made at run time: a good one, and the ones that a client must refuse."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path
from typing import Literal

import trustme

Certificate = Literal["good", "expired", "wrong-host", "unknown-ca"]
HOSTS = ("127.0.0.1", "localhost")


def issue(kind: Certificate, directory: Path) -> tuple[ssl.SSLContext, Path]:
    """Make a server context and the file of the CA that a client is told to trust.

    Args:
        kind: "expired" ended in 2001, "wrong-host" is for another name, "unknown-ca" is signed by a CA that is not
            in the file.
        directory: Where the CA's file is written.
    """
    trusted = trustme.CA()
    signer = trustme.CA() if kind == "unknown-ca" else trusted
    hosts = ("other.invalid",) if kind == "wrong-host" else HOSTS
    not_after = dt.datetime(2001, 1, 1, tzinfo=dt.UTC) if kind == "expired" else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    signer.issue_cert(*hosts, not_after=not_after).configure_cert(context)
    ca_file = directory / "ca.pem"
    trusted.cert_pem.write_to_path(str(ca_file))
    return context, ca_file
