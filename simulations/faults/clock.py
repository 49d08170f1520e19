"""Wall clocks that jump, differ from life to life, or stand right before a day that confuses people.

Timers go by the wall clock of whoever owns the file: one that has fired is never early by that clock, and none is lost.
Whatever only waits to try again must not care: a clock that is set back may not make it wait for as long. So the clocks
stay as they are for a while when the faults are over, somebody looks whether all writers have come back, and only then
the clocks are set to the latest time that any of them has ever shown: every timer can become due.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterable, Iterator
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final
from weakref import WeakKeyDictionary

import attrs

from understudy.actors.persistence import Health
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.faults.orders import early
from understudy.simulations.node import Life
from understudy.simulations.plugins import SURVIVE, Fault, fault

if TYPE_CHECKING:
    from understudy.simulations.world import World

SECOND_MS: Final = 1_000
DAY_MS: Final = 86_400_000
SKEW_MS: Final = 300_000
MOST_BACK: Final = 10  # Days that a clock goes back, in all: not as far as one jump goes forward.
KEPT_MS: Final = 100 * 365 * DAY_MS
RECOVERS_MS: Final = 60_000  # Within this time, once faults are over, a writer has found its database again.
EDGES: Final = tuple(
    calendar.timegm(moment) * SECOND_MS
    for moment in (
        (2026, 3, 29, 1, 0, 0),  # Summer time begins in Europe,
        (2026, 10, 25, 1, 0, 0),  # and ends.
        (2027, 1, 1, 0, 0, 0),
        (2028, 2, 29, 0, 0, 0),  # A leap day,
        (2028, 3, 1, 0, 0, 0),  # and the day after.
        (2029, 1, 1, 0, 0, 0),
        (2038, 1, 19, 3, 14, 8),  # 32 bits of seconds are over.
    )
)


class Clocks:
    """All wall clocks of a world, and the latest time that any of them has shown."""

    _all: ClassVar[WeakKeyDictionary[World, Clocks]] = WeakKeyDictionary()

    def __init__(self, world: World) -> None:
        self._world = world
        self._most_ms = 0
        self.broken: list[str] = []
        # A key is good for a day. Who asks again a moment after a jump of a month would find it expired, and rightly.
        world.limits = attrs.evolve(world.limits, keep_answers_ms=KEPT_MS)
        world.on_opened.append(lambda life: self._seen(life.clock.skew_ms))
        world.on_settle.append(lambda: world.after(RECOVERS_MS, self._set_right))

    @classmethod
    def of(cls, world: World) -> Clocks:
        found = cls._all.get(world)
        if found is None:
            found = cls._all[world] = cls(world)
        return found

    def jump(self, life: Life, ms: int) -> None:
        """Set the clock of a machine: of the process that runs there, and of those that will."""
        life.clock.jump(ms)
        life.node.skew_ms += ms
        self._seen(life.clock.skew_ms)

    def _seen(self, skew_ms: int) -> None:
        self._most_ms = max(self._most_ms, skew_ms)

    def _set_right(self) -> None:
        for node in self._world.nodes:
            life = node.life
            node.skew_ms = self._most_ms
            if life is None:
                continue
            if life.system.health is Health.DEGRADED:
                words = f"{RECOVERS_MS} ms after the last fault it has not looked for its database again"
                self.broken.append(f"{life.name}: {words}; its clock was set by {life.clock.skew_ms} ms")
            life.clock.jump(self._most_ms - life.clock.skew_ms)


class WrongTime(Fault):
    """Something is wrong with the time."""

    kind = "time"
    must = SURVIVE

    def arm(self, world: World) -> None:
        Clocks.of(world)
        self.again(world, lambda: self._strike(world))

    def _strike(self, world: World) -> None:
        life = world.owner
        if life is not None:
            ms = self.draw(life.clock.now_ms())
            if ms:
                world.fault(self.name, f"by {ms} ms", node=life.name)
                Clocks.of(world).jump(life, ms)

    def draw(self, now_ms: int) -> int:
        """By how much the clock jumps; 0 if not at all."""
        raise NotImplementedError

    def check(self, world: World) -> Iterable[str]:
        yield from Clocks.of(world).broken
        yield from early(world)
        yield from overdue(world)


def overdue(world: World) -> Iterator[str]:
    """Timers whose time is over by the owner's clock, of instances that may move."""
    owner, evidence = world.owner, Evidence.of(world)
    if owner is None:
        return
    now_ms = owner.clock.now_ms()
    for wait in evidence.waits:
        if wait.due_ms is not None and wait.due_ms < now_ms and evidence.instances[wait.instance].is_moving:
            yield f"wait {wait.id} of {wait.instance} was due {now_ms - wait.due_ms} ms ago, and is lost"


@fault
class JumpForward(WrongTime):
    """The clock jumps by 30 days."""

    name = "clock jumps forward"

    def draw(self, now_ms: int) -> int:  # noqa: ARG002  # Whatever it shows.
        return 30 * DAY_MS


@fault
class JumpBack(WrongTime):
    """The clock is set back by a day."""

    name = "clock jumps back"

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._left = MOST_BACK

    def draw(self, now_ms: int) -> int:  # noqa: ARG002  # Whatever it shows.
        self._left -= 1
        return -DAY_MS if self._left >= 0 else 0


@fault
class CalendarEdge(WrongTime):
    """The clock stands right before a moment at which calendars are odd."""

    name = "calendar edge"

    def draw(self, now_ms: int) -> int:
        ahead = [edge for edge in EDGES if edge - SECOND_MS > now_ms]
        return self.random.choice(ahead) - self.random.randrange(1, SECOND_MS) - now_ms if ahead else 0


@fault
class Skew(Fault):
    """The next life has a clock that is wrong by some minutes."""

    name = "clock skewed"
    kind = "time"
    must = SURVIVE

    def arm(self, world: World) -> None:
        Clocks.of(world)
        own: dict[str, int] = {}  # What this fault has added, by node.

        def lost(life: Life) -> None:
            if world.is_settling or self.random.random() > min(0.9, 40 * self.rate):
                return
            node = life.node
            skew_ms = self.random.randrange(-SKEW_MS, SKEW_MS)
            world.fault(self.name, f"by {skew_ms} ms", node=node.name)
            node.skew_ms += skew_ms - own.get(node.name, 0)
            own[node.name] = skew_ms

        world.on_lost.append(lost)

    def check(self, world: World) -> Iterable[str]:
        yield from Clocks.of(world).broken
        yield from early(world)
        yield from overdue(world)
