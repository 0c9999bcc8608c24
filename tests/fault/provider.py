"""A provider of credentials that a test scripts."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path


class Provider:
    """A credential_process: counts its calls, fails at the first ones, and hands out what the test put down.

    Args:
        directory: Where it lives.
    """

    def __init__(self, directory: Path) -> None:
        self._calls = directory / "calls"
        self._calls.touch()
        self._answers = directory / "answers"
        self._answers.mkdir()
        script = directory / "provider.sh"
        script.write_text(
            f'echo call >> "{self._calls}"\n'
            f'n=$(wc -l < "{self._calls}")\n'
            f'while [ ! -e "{self._answers}/$n" ]; do n=$((n - 1)); done\n'
            f'cat "{self._answers}/$n"\n'
            f'test -s "{self._answers}/$n" || {{ echo "metadata service is busy" >&2; exit 1; }}\n'
        )
        self.config = f"credential_process = /bin/sh {script}\n"
        self.answer(0, None)

    def answer(self, call: int, access_key: str | None, *, life_s: float = 1e9) -> None:
        """From its n-th call on (from 1) hand out this access key, which expires in so many seconds; None: fail."""
        body = ""
        if access_key is not None:
            expiration = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=life_s)
            keys = {"AccessKeyId": access_key, "SecretAccessKey": "PROCESS-SECRET", "SessionToken": f"T-{access_key}"}
            body = json.dumps({"Version": 1, **keys, "Expiration": expiration.isoformat()})
        (self._answers / str(call)).write_text(body)

    @property
    def calls(self) -> int:
        """How often it was called."""
        return len(self._calls.read_text().splitlines())
