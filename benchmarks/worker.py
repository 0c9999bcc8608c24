"""One measured process: ``python -m benchmarks.worker SPEC`` runs one case of one subject and prints its values."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from typing import Any

from benchmarks.server import Target

RESULT = "RESULT "


def run(spec: dict[str, Any]) -> dict[str, float]:
    """Run what a spec says.

    Args:
        spec: ``case``, ``subject``, ``gib``, ``group`` (whether there is a process group), ``target``.

    Returns:
        The values that were measured, by name.
    """
    target = Target(**spec["target"])
    case, subject, gib = spec["case"], spec["subject"], spec["gib"]
    if case == "plane":
        from benchmarks import plane

        return plane.measure(target, subject, gib)
    from benchmarks import jobs

    jobs.use_one_thread()
    if spec["group"]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    match case:
        case "dense" | "small" | "dtensor":
            return jobs.save_and_load(target, subject, case, gib)
        case "staging":
            return jobs.stage_dtensors(target, subject)
        case "latency":
            return jobs.latency_bound(target, subject, gib)
        case "commit":
            return jobs.round_trips(target, subject, gib)
        case "records":
            from benchmarks import records

            return records.measure(target, subject, gib)
        case _:
            from benchmarks import steps

            return steps.slow_down(target, subject, case.partition("-")[2], gib)


def main() -> None:
    """Run the spec in the first argument and leave without waiting for anybody's threads."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start = time.perf_counter()
    values = run(json.loads(sys.argv[1]))
    values["job_s"] = time.perf_counter() - start
    print(RESULT + json.dumps(values), flush=True)
    sys.stderr.flush()
    import psutil

    for child in psutil.Process().children(recursive=True):  # DCP's checkpoint process
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
