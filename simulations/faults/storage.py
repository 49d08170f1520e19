"""A disk that is full, reads and writes that fail, a database that others have locked, a file that cannot be opened.

All of it passes. Until then callers are told so in words that say whether anything was done, and what has no caller
waits; nothing of it may be taken for damage. Crashes around a commit are in `process.py`, torn files and power cuts on
the simulated disk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final

from understudy.model.errors import Unavailable
from understudy.simulations.faults.calls import unanswered
from understudy.simulations.node import Life
from understudy.simulations.plugins import REFUSE, Fault, fault

if TYPE_CHECKING:
    from understudy.simulations.world import World

WRITES: Final = ("INSERT", "UPDATE", "DELETE", "COMMIT")
READS: Final = ("SELECT", "WITH")
LOCKS: Final = (*WRITES, "BEGIN IMMEDIATE")  # Readers wait for nobody.
SETTLED: Final = frozenset({"Damaged", "NotOurs", "NewerSchema", "OlderSchema"})  # No trouble that passes is any of it.


def is_one_of(statement: str, verbs: tuple[str, ...]) -> bool:
    return statement.lstrip().startswith(verbs)


def refused(world: World) -> Iterable[str]:
    """Whoever was refused was told that it passes; all that may be asked again was answered in the end."""
    for operation in world.operations:
        if operation.error in SETTLED:
            yield f"operation {operation.number} ({operation.call}) was told {operation.error}: {operation.reason}"
    for life in world.all_lives():
        if life.system.health.value in ("degraded", "damaged"):
            yield f"{life.name} is {life.system.health.value} ({life.system.reason}), and the trouble is over"
    yield from unanswered(world)


class Trouble(Fault):
    """Some statements fail, for so many of them."""

    kind = "storage"
    must = REFUSE
    verbs: ClassVar[tuple[str, ...]]
    words: ClassVar[str]  # Of the library.
    longest: ClassVar[int]  # How many statements fail in a row, at most.

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._left = 0

    def arm(self, world: World) -> None:
        world.tap(lambda statement, run: self._pass(world, statement, run))
        self.again(world, self._begin)

    def _begin(self) -> None:
        self._left = self.random.randrange(1, self.longest + 1)

    def _pass(self, world: World, statement: str, run: Callable[[], Any]) -> Any:
        if not self._left or world.is_settling or not is_one_of(statement, self.verbs):
            return run()
        self._left -= 1
        life = world.tapped_life
        world.fault(self.name, statement.split()[0], node="" if life is None else life.name)
        raise sqlite3.OperationalError(self.words)

    def check(self, world: World) -> Iterable[str]:
        return refused(world)


@fault
class DiskFull(Trouble):
    """Nothing can be written, for some time."""

    name = "disk full"
    verbs = WRITES
    words = "database or disk is full"
    longest = 12


@fault
class ReadFails(Trouble):
    """Reads fail: of instances, of timers, of what clients ask for."""

    name = "I/O error at a read"
    verbs = READS
    words = "disk I/O error"
    longest = 3


@fault
class WriteFails(Trouble):
    """Writes fail, and leave nothing."""

    name = "I/O error at a write"
    verbs = WRITES
    words = "disk I/O error"
    longest = 2


@fault
class BusyStorm(Trouble):
    """Somebody else holds the lock for longer than anybody waits for it, again and again."""

    name = "busy storm"
    verbs = LOCKS
    words = "database is locked"
    longest = 20


@fault
class CannotReopen(Trouble):
    """The connection breaks, and the next ones cannot be made either."""

    name = "database cannot be opened again"
    verbs = WRITES
    words = "disk I/O error"
    longest = 1

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._refusals = 0

    def arm(self, world: World) -> None:
        super().arm(world)
        world.on_opened.append(lambda life: self._stand_before(world, life))

    def _begin(self) -> None:
        super()._begin()
        self._refusals = self.random.randrange(1, 6)

    def _stand_before(self, world: World, life: Life) -> None:
        """Opening again has no statement of its own at which it could fail."""
        make = life.storage.writer

        def writer(path: str, settings: Any) -> Any:
            if self._refusals and not self._left and not world.is_settling:
                self._refusals -= 1
                world.fault(self.name, "unable to open database file", node=life.name)
                raise Unavailable(f"{path} cannot be used now (unable to open database file)")
            return make(path, settings)

        life.storage.writer = writer
