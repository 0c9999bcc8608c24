"""Run the fault server by itself: ``python -m tests.fault.server``; prints its ports as one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from .certificates import issue
from .commands import Commands
from .control import ControlServer
from .core import Core
from .listener import Listener, shut_down
from .settings import PROFILES, Settings


async def _main(arguments: argparse.Namespace, directory: Path) -> None:
    context, ca_file = (None, None) if arguments.tls is None else issue(arguments.tls, directory)
    core = Core(Settings(**PROFILES[arguments.profile] | json.loads(arguments.settings)), arguments.seed)
    core.store.buckets[arguments.bucket] = {}
    listeners = [Listener(core, number, "127.0.0.1", context) for number in range(arguments.endpoints)]
    for listener in listeners:
        await listener.open(arguments.port if listener.endpoint == 0 else 0)
    control = ControlServer(Commands(core, listeners))
    control_port = await control.open(arguments.control_port)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if arguments.until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), lambda: stop.set() if not os.read(sys.stdin.fileno(), 4096) else None)
    started = {
        "ports": [listener.port for listener in listeners],
        "control_port": control_port,
        "ca_bundle": None if ca_file is None else str(ca_file),
    }
    sys.stdout.write(json.dumps(started) + "\n")
    sys.stdout.flush()
    await stop.wait()
    control.close()
    await shut_down(core, listeners)


def main() -> None:
    """Parse the command line and serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="S3 port; 0 takes a free one")
    parser.add_argument("--endpoints", type=int, default=1, help="number of S3 ports that lead to the same store")
    parser.add_argument(
        "--control-port", type=int, default=0, help="port of POST /_control/<command>; 0 takes a free one"
    )
    parser.add_argument(
        "--tls", choices=["good", "expired", "wrong-host", "unknown-ca"], help="serve HTTPS, with this identity"
    )
    parser.add_argument("--profile", choices=sorted(PROFILES), default="aws", help="kind of store to imitate")
    parser.add_argument("--settings", default="{}", help="switches as JSON")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rules that fire by chance")
    parser.add_argument("--bucket", default="bucket", help="bucket that is there from the start")
    parser.add_argument("--until-stdin-closes", action="store_true", help="stop when standard input ends")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fault-server-") as directory:
        asyncio.run(_main(arguments, Path(directory)))


if __name__ == "__main__":
    main()
