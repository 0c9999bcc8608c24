"""Which requests a fault hits: by operation, key, part, signer and n-th call; and the gates that hold requests."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import re

from .actions import Action
from .request import Request


@dataclasses.dataclass(kw_only=True)
class Match:
    """The requests that a rule looks at; a rule counts them and fires on some."""

    operations: tuple[str, ...] = ("*",)
    """S3 operation names; "*" is every one."""
    key: str | None = None
    """Regular expression searched in the key."""
    part: int | None = None
    """Part number of UploadPart."""
    access_key: str | None = None
    """Access key id of the signer: tells ranks apart that sign with different ids."""
    endpoint: int | None = None
    """Which of the server's endpoints (``Handle.urls``) the request came to."""
    header: tuple[str, str] | None = None
    """Lower-case header name and a regular expression searched in its value; an absent header never matches."""
    nth: int | None = None
    """Fire on this matching request only (1 is the first)."""
    since: int = 1
    """Fire from this matching request on."""
    times: int | None = None
    """Fire so often at most."""
    probability: float | None = None
    """Fire by chance, from the server's seed."""

    def __post_init__(self) -> None:
        """Take lists for tuples, as JSON brings them."""
        self.operations = tuple(self.operations)
        self.header = None if self.header is None else (self.header[0], self.header[1])
        if self.nth == 0 or self.since < 1:
            raise ValueError("nth and since count from 1")

    def covers(self, request: Request, endpoint: int) -> bool:
        """Whether the request is one that the rule counts."""
        if "*" not in self.operations and request.operation not in self.operations:
            return False
        if self.header is not None and not re.search(self.header[1], request.headers.get(self.header[0], "\0")):
            return False
        return (
            (self.key is None or re.search(self.key, request.key) is not None)
            and (self.part is None or self.part == request.part)
            and (self.access_key is None or self.access_key == request.access_key)
            and (self.endpoint is None or self.endpoint == endpoint)
        )


@dataclasses.dataclass
class Rule:
    """A fault in force."""

    name: str
    match: Match
    action: Action
    seen: int = 0
    fired: int = 0

    def fires(self, request: Request, endpoint: int, chance: random.Random) -> bool:
        """Count the request; return whether the action applies to it."""
        match = self.match
        if not match.covers(request, endpoint):
            return False
        self.seen += 1
        if match.nth is not None and self.seen != match.nth:
            return False
        if self.seen < match.since or (match.times is not None and self.fired >= match.times):
            return False
        if match.probability is not None and chance.random() >= match.probability:
            return False
        self.fired += 1
        return True


class Gate:
    """Holds requests until it is opened; an open gate lets everything through."""

    def __init__(self) -> None:
        self.arrived = 0
        self._open = False
        self._permits = 0
        self._changed = asyncio.Condition()

    async def hold(self) -> None:
        """Arrive, and wait to be let through."""
        async with self._changed:
            self.arrived += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._open or self._permits > 0)
            if not self._open:
                self._permits -= 1

    async def release(self, count: int | None) -> None:
        """Let ``count`` requests through, or (None) all, now and later."""
        async with self._changed:
            if count is None:
                self._open = True
            else:
                self._permits += count
            self._changed.notify_all()

    async def wait_arrived(self, count: int, timeout_s: float) -> int:
        """Wait until ``count`` requests have arrived since the start; return how many have, also after the time is up."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.arrived >= count)
        except TimeoutError:
            pass
        return self.arrived


class Script:
    """The rules in order of their making, and the gates by name."""

    def __init__(self, seed: int) -> None:
        self.rules: dict[str, Rule] = {}
        self.gates: dict[str, Gate] = {}
        self._chance = random.Random(seed)
        self._numbers = itertools.count(1)

    def add(self, match: Match, action: Action, name: str | None = None) -> str:
        """Put a rule in force; return its name."""
        name = name or f"rule-{next(self._numbers)}"
        self.rules[name] = Rule(name, match, action)
        for _, gate in action.gates:
            self.gates.setdefault(gate, Gate())
        return name

    def decide(self, request: Request, endpoint: int) -> tuple[Action, tuple[str, ...]]:
        """Return what happens to a request, joined from all rules that fire, and their names."""
        action, names = Action(), []
        for rule in self.rules.values():
            if rule.fires(request, endpoint, self._chance):
                action |= rule.action
                names.append(rule.name)
        return action, tuple(names)

    async def clear(self) -> None:
        """Drop all rules and open all gates."""
        self.rules.clear()
        for gate in self.gates.values():
            await gate.release(None)
        self.gates.clear()
