"""What is measured: the cases, their subjects, and how the endpoint is paced for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.server import CpuThrottle

ALL_PEERS = (
    "dcp_s3",
    "s3torchconnector",
    "s3torchconnector-4",
    "fsspec-s3fs",
    "torch.save-boto3",
    "multi-storage-client",
    "files",
)
NETWORK_MBPS = round(0.3 * 2**30 * 8 / 1e6)
"""0.3 GiB/s in megabits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A set of measurements that are compared with one another.

    Attributes:
        name: For ``--cases`` and the results.
        title: Heading of its table.
        subjects: What is measured in turn.
        quick: The subjects that ``--quick`` keeps: ours and those that targets are set against.
        scale: Its state dict's share of ``--size``.
        world: Ranks.
        group: There is a process group even with one rank.
        throttle: How the endpoint is paced; anything but zeros needs the s3sink.
        sink: It needs the s3sink for another reason.
    """

    name: str
    title: str
    subjects: tuple[str, ...]
    quick: tuple[str, ...]
    scale: float = 1.0
    world: int = 1
    group: bool = False
    throttle: CpuThrottle = field(default_factory=CpuThrottle)
    sink: bool = False

    @property
    def needs_sink(self) -> bool:
        """Whether it cannot be measured against an endpoint of the user's."""
        return self.sink or self.throttle != CpuThrottle()


_STEPS = ("dcp_s3", "s3torchconnector", "fsspec-s3fs", "files")
_PACED = ("dcp_s3", "s3torchconnector", "raw")

CASES = (
    Case(
        name="plane",
        title="Bytes alone: one object in 16 MiB parts from memory, and back in ranges into memory",
        subjects=("raw", "raw+crc", "dcp_s3"),
        quick=("raw", "raw+crc", "dcp_s3"),
    ),
    Case(
        name="dense",
        title="Save and load, one process: 200 tensors of 1 to 64 MiB and 2,000 of 4 KiB",
        subjects=ALL_PEERS,
        quick=("dcp_s3", "s3torchconnector", "s3torchconnector-4", "torch.save-boto3", "files"),
    ),
    Case(
        name="small",
        title="Save and load, one process: 20,000 tensors of 4 KiB",
        subjects=ALL_PEERS,
        quick=("dcp_s3", "s3torchconnector", "torch.save-boto3", "files"),
    ),
    Case(
        name="dtensor",
        title="Save and load, two ranks: the dense parameters sharded by FSDP2",
        subjects=("dcp_s3", "s3torchconnector", "s3torchconnector-4", "fsspec-s3fs", "files"),
        quick=("dcp_s3", "s3torchconnector"),
        world=2,
        group=True,
    ),
    Case(
        name="staging",
        title="async_save of 5,000 DTensors of 4 KiB",
        subjects=("dcp_s3", "s3torchconnector", "files", "DefaultStager"),
        quick=("dcp_s3", "DefaultStager"),
        group=True,
    ),
    Case(
        name="steps-thread",
        title="A Python-heavy step of 0.2 ms during an async_save in a thread",
        subjects=_STEPS,
        quick=("dcp_s3", "s3torchconnector"),
        scale=0.5,
        group=True,
    ),
    Case(
        name="steps-process",
        title="A Python-heavy step of 0.2 ms during an async_save in a process",
        subjects=_STEPS,
        quick=("dcp_s3", "s3torchconnector"),
        scale=0.5,
        group=True,
    ),
    Case(
        name="paced-thread",
        title="The same in a thread, the network limited to 0.3 GiB/s",
        subjects=_PACED,
        quick=("dcp_s3", "s3torchconnector", "raw"),
        scale=0.5,
        group=True,
        throttle=CpuThrottle(total_mbps=NETWORK_MBPS),
    ),
    Case(
        name="paced-process",
        title="The same in a process, the network limited to 0.3 GiB/s",
        subjects=("dcp_s3", "s3torchconnector"),
        quick=("dcp_s3",),
        scale=0.5,
        group=True,
        throttle=CpuThrottle(total_mbps=NETWORK_MBPS),
    ),
    Case(
        name="latency",
        title="An endpoint of 20 ms and 700 Mbit/s per connection",
        subjects=("dcp_s3", "torch.save-put"),
        quick=("dcp_s3", "torch.save-put"),
        throttle=CpuThrottle(latency_ms=20, rate_mbps=700),
    ),
    Case(
        name="commit",
        title="From the last part's acknowledgement to the visible checkpoint (50 ms per request)",
        subjects=("dcp_s3", "s3torchconnector"),
        quick=("dcp_s3", "s3torchconnector"),
        scale=0.0625,
        throttle=CpuThrottle(latency_ms=50),
        sink=True,
    ),
    Case(
        name="records",
        title="finish and read_metadata of many records, 64 ranks; torch's own on /dev/shm",
        subjects=("dcp_s3", "files"),
        quick=("dcp_s3", "files"),
    ),
)
