"""From a world that fails to a short one that fails in the same way.

A shorter world has fewer faults, fewer instances, fewer steps, a quieter order; each is tried in turn and kept if the
same invariant is still violated. At the end other seeds are tried with what is left: one of them may need less.
The effort is bounded by worlds and steps, not by a clock: the same failure is always shortened to the same case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from understudy.simulations.playing import Outcome

MOST_WORLDS: Final = 150
MOST_STEPS: Final = 150_000
NEIGHBOURS: Final = 60  # Other seeds that are tried.


@attrs.frozen(kw_only=True)
class Case:
    """One world of a simulation, by everything that decides about it."""

    seed: int
    steps: int
    strikes: int | None = None  # How often faults strike before they are over; None: drawn from the seed.
    faults: tuple[str, ...] | None = None  # None: drawn from the seed.
    only: tuple[str, ...] = ()  # The instances that are started; empty: all.
    is_calm: bool = False  # Whether things happen in the order in which they become possible.


@attrs.frozen(kw_only=True)
class Played:
    """What became of a case, and what was drawn for it."""

    case: Case  # With all that was drawn.
    outcome: Outcome
    instances: tuple[str, ...]
    digest: str  # Of all that happened before anybody looked at it.


class _Enough(Exception):
    """The effort is used up."""


class Shrinker:
    """Plays one case after the other, and remembers the shortest that still fails."""

    def __init__(
        self, play: Callable[[Case], Played], found: Played, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self._play = play
        self._is_wanted = is_wanted
        self._wanted = found.outcome.violations[0].id
        self._worlds = MOST_WORLDS
        self._steps = MOST_STEPS
        self.best = found

    def shrink(self) -> Played:
        try:
            while self._once():
                pass
            self._try_neighbours()
            while self._once():
                pass
        except _Enough:
            pass
        return self.best

    def _once(self) -> bool:
        """Whether any of it was made simpler."""
        before = self.best.case
        self._fewer_strikes()
        self._calmer()
        self._fewer_faults()
        self._fewer_instances()
        self._fewer_steps()
        return self.best.case != before

    def _calmer(self) -> None:
        if not self.best.case.is_calm:
            self._try(attrs.evolve(self.best.case, is_calm=True))

    def _fewer_instances(self) -> None:
        instances = self.best.instances
        if len(instances) > 1 and not any(self._try(attrs.evolve(self.best.case, only=(one,))) for one in instances):
            for name in instances:
                left = tuple(other for other in self.best.instances if other != name)
                if left:
                    self._try(attrs.evolve(self.best.case, only=left))

    def _fewer_faults(self) -> None:
        for name in self.best.case.faults or ():
            left = tuple(other for other in self.best.case.faults or () if other != name)
            self._try(attrs.evolve(self.best.case, faults=left))

    def _fewer_strikes(self) -> None:
        case = self.best.case
        struck = sum(self.best.outcome.faults.values())
        self._least(lambda strikes: attrs.evolve(case, strikes=strikes), 0, struck, case.strikes or 0)

    def _fewer_steps(self) -> None:
        case = self.best.case
        self._least(lambda steps: attrs.evolve(case, steps=steps), 1, self.best.outcome.steps, case.steps)

    def _least(self, with_number: Callable[[int], Case], least: int, most: int, present: int) -> None:
        """The smallest number that will do, by halving; the very least first, because it often does."""
        most = min(most, present)
        if least < most and self._try(with_number(least)):
            return
        while least + 1 < most:
            middle = (least + most) // 2
            if self._try(with_number(middle)):
                most = middle
            else:
                least = middle
        if most < present and self.best.case != with_number(most):
            self._try(with_number(most))

    def _try_neighbours(self) -> None:
        case = attrs.evolve(self.best.case, is_calm=True, only=self.best.instances[:1])
        for seed in range(NEIGHBOURS):
            for name in case.faults or ():
                if max(_length(self.best)[:-1]) <= 1 and self.best.case.is_calm:
                    return  # One fault that strikes one instance once: there is nothing simpler.
                self._try(attrs.evolve(case, seed=seed, faults=(name,)), shorter=True)

    def _try(self, case: Case, *, shorter: bool = False) -> bool:
        if self._worlds <= 0 or self._steps <= 0 or not self._is_wanted():
            raise _Enough
        played = self._play(case)
        self._worlds -= 1
        self._steps -= played.outcome.steps
        is_same = any(violation.id == self._wanted for violation in played.outcome.violations)
        if is_same and (not shorter or _length(played) < _length(self.best)):
            self.best = played
            return True
        return False


def _length(played: Played) -> tuple[int, int, int, int]:
    """One crash more is harder to understand than a few steps more."""
    struck = sum(played.outcome.faults.values())
    return struck, len(played.case.faults or ()), len(played.instances), played.outcome.steps
