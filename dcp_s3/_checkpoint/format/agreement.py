"""Whether the ranks of one save or load were given one URL: what a rank's save plan tells, and the comparison for both."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dcp_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_SHOWN: Final = 5
"""URLs, and ranks of each, that an error names."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank saves to, as its plan tells the coordinator.

    A planner that caches plans puts one of an earlier save in the place of one that has not changed, and the URL of that is
    an old one. So a place knows since when it is in this process, however often a planner copies it.

    Attributes:
        url: URL of the rank's save.
        arrived_s: When it was made or unpickled here, by ``time.monotonic``.
    """

    url: str
    arrived_s: float = field(default_factory=time.monotonic)

    def __reduce__(self) -> tuple[type[Place], tuple[str]]:
        return Place, (self.url,)

    def __copy__(self) -> Place:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Place:
        return self


def check_one_url(urls: Iterable[tuple[int, str]], rule: str, outcome: str = "") -> None:
    """Refuse a save or load whose ranks were given several URLs.

    Args:
        urls: Ranks, by their number in the group, and their URLs; a rank of which nothing is known is left out.
        rule: What the ranks have broken.
        outcome: What became of it.

    Raises:
        ConfigError: They differ; it names ranks and URLs.
    """
    ranks: dict[str, list[int]] = {}
    for rank, url in urls:
        ranks.setdefault(url, []).append(rank)
    if len(ranks) > 1:
        told = [
            f"rank{'s' * (len(them) > 1)} {', '.join(map(str, them[:_MOST_SHOWN]))}{', …' * (len(them) > _MOST_SHOWN)}: {url}"
            for url, them in ranks.items()
        ]
        shown = "; ".join(told[:_MOST_SHOWN]) + "; …" * (len(told) > _MOST_SHOWN)
        raise ConfigError(f"{rule}: {shown}{outcome and f'. {outcome}'}")
