"""How handlers behave: succeed, fail, take their time, hang, give what cannot be stored.

What an attempt does is drawn from the seed, the key and the attempt alone, not from the order of things: the same
attempt does the same under every schedule, so that a shorter run of a failing world still fails.
"""

from __future__ import annotations

from enum import Enum
from random import Random
from typing import Final

import msgspec


class Conduct(Enum):
    """What a handler does."""

    SUCCEED = "succeed"
    FAIL_FIRST = "fail before any effect"
    FAIL_AFTER = "fail after its effect"
    HANG = "never return"
    UNSERIALIZABLE = "return what cannot be stored"
    TOO_LARGE = "return more than may be stored"
    EXIT = "raise SystemExit"
    INTERRUPT = "raise KeyboardInterrupt"


class Act(msgspec.Struct, frozen=True):
    """What one attempt does, and how long it takes."""

    conduct: Conduct = Conduct.SUCCEED
    delay_ms: int = 0  # Between its effect and its return.


PLAIN: Final = Act()


class Mishap(Exception):
    """What a handler of the world raises when it is to fail."""


class Script:
    """Draws what attempts do, by how likely each conduct is. Without odds every handler succeeds at once."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self.odds: dict[Conduct, float] = {}
        self.slow: float = 0.0  # How likely an attempt takes long.
        self.slowest_ms = 1_000
        self.always: dict[str, Conduct] = {}  # Handlers by name that never do anything else.
        self.drawn: dict[str, Act] = {}
        self.is_over = False  # Every attempt that begins from here on succeeds.

    def act(self, handler: str, key: str, attempt: int) -> Act:
        known = self.drawn.get(f"{key}/{attempt}")
        if known is None:
            known = self.drawn[f"{key}/{attempt}"] = self._draw(handler, key, attempt)
        return known

    def _draw(self, handler: str, key: str, attempt: int) -> Act:
        if handler in self.always:
            return Act(self.always[handler])
        if self.is_over or not (self.odds or self.slow):
            return PLAIN
        random = Random(f"{self._seed}/{key}/{attempt}")
        chance = random.random()
        delay_ms = random.randrange(1, self.slowest_ms) if random.random() < self.slow else 0
        for conduct, odds in self.odds.items():
            chance -= odds
            if chance < 0:
                return Act(conduct, delay_ms)
        return Act(Conduct.SUCCEED, delay_ms)
