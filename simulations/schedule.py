"""Which of the things that could happen next does: drawn from the seed.

Two ways of drawing, because they find different errors. *Uniform* gives every ready step the same chance. *Priority*
gives every actor a rank and always lets the highest go on, except at a few points of the run where it sinks to the
bottom: a bug that needs d such turns is found with a probability that does not shrink with the length of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

LOOK_AHEAD = 64  # How many ready steps a priority schedule ranks; the rest has waited for less long.


class Schedule(Protocol):
    def choose(self, ready: Sequence[Any]) -> int:
        """The index of the one that happens; there is at least one."""


class Uniform:
    def __init__(self, random: Random) -> None:
        self._chance = random.random

    def choose(self, ready: Sequence[Any]) -> int:
        return int(self._chance() * len(ready))

    def __str__(self) -> str:
        return "uniform schedule"


class Priority:
    """Ranks by name, so that an actor keeps its rank while it sleeps."""

    def __init__(self, random: Random, *, steps: int, changes: int) -> None:
        self._random = random
        self._ranks: dict[str, float] = {}
        self._lowest = 0.0
        self._changes = sorted(random.randrange(1, max(2, steps)) for _ in range(changes))
        self._count = 0

    def choose(self, ready: Sequence[Any]) -> int:
        self._count += 1
        rank = self._rank
        best = max(range(min(len(ready), LOOK_AHEAD)), key=lambda index: rank(str(ready[index])))
        while self._changes and self._changes[0] <= self._count:
            del self._changes[0]
            self._lowest -= 1.0
            self._ranks[str(ready[best])] = self._lowest
        return best

    def _rank(self, name: str) -> float:
        found = self._ranks.get(name)
        if found is None:
            found = self._ranks[name] = self._random.random()
        return found

    def __str__(self) -> str:
        return f"priority schedule with {len(self._changes)} changes"


class Told:
    """Follows somebody else, such as a test that shrinks its choices: `pick(number of ready) -> index`."""

    def __init__(self, pick: Callable[[int], int]) -> None:
        self._pick = pick

    def choose(self, ready: Sequence[Any]) -> int:
        return self._pick(len(ready)) % len(ready)

    def __str__(self) -> str:
        return "told schedule"


def drawn_schedule(random: Random, *, steps: int) -> Schedule:
    if random.random() < 0.5:
        return Uniform(random)
    return Priority(random, steps=steps, changes=random.randrange(1, 8))
