"""Processes that die or stand still, at any moment: between two messages, around a commit, while they open or come
back, right after a handler has had its effect.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any, Final, NoReturn

from understudy.model.errors import Fenced
from understudy.simulations.faults.endings import LOST, endings_of
from understudy.simulations.ledger import Line
from understudy.simulations.memory import Died
from understudy.simulations.node import Life
from understudy.simulations.plugins import SURVIVE, Fault, fault
from understudy.simulations.script import Act
from understudy.store.batch import WRITE

if TYPE_CHECKING:
    from understudy.simulations.world import World

NESTED: Final = 3  # How often in a row a process dies while it opens or recovers.
STATEMENTS_TO_OPEN: Final = 60  # A few more than a process needs until it serves.
STATEMENTS_TO_TAKE_OVER: Final = 10  # Of these the last ones, from the one that begins the transaction.
TAKES_OVER: Final = "BEGIN IMMEDIATE"


def is_commit(statement: str) -> bool:
    """Whether something becomes durable with this statement."""
    return statement is WRITE or statement == "COMMIT"


@fault
class Crash(Fault):
    """The owner dies between two messages."""

    name = "crash"
    kind = "process"
    must = SURVIVE

    def arm(self, world: World) -> None:
        def strike() -> None:
            life = world.owner
            if life is not None:
                world.fault(self.name, node=life.name)
                life.node.kill("crash")

        self.again(world, strike)


@fault
class Restart(Fault):
    """The owner is closed in good order and started again, as at a deployment."""

    name = "restart"
    kind = "process"
    must = SURVIVE

    def arm(self, world: World) -> None:
        def strike() -> None:
            life = world.owner
            if life is not None:
                world.fault(self.name, node=life.name)
                life.node.close()

        self.again(world, strike)


@fault
class CrashInRecovery(Fault):
    """A process dies again while it brings back what the last one has left."""

    name = "crash in recovery"
    kind = "process"
    must = SURVIVE

    def arm(self, world: World) -> None:
        in_a_row = 0
        odds = min(0.9, 30 * self.rate)

        def opened(life: Life) -> None:
            nonlocal in_a_row
            if world.is_settling or in_a_row >= NESTED or self.random.random() > odds:
                in_a_row = 0
                return
            in_a_row += 1
            world.at_step(world.steps + self.random.randrange(1, 60), lambda: strike(life))

        def strike(life: Life) -> None:
            if life.node.life is life and not world.is_settling:
                world.fault(self.name, node=life.name)
                world.probe("crash_in_recovery")
                life.node.kill("crash in recovery")

        world.on_opened.append(opened)


class AtCommit(Fault):
    """Something happens to one commit in so many."""

    kind = "process"
    must = SURVIVE

    def arm(self, world: World) -> None:
        odds = min(0.5, 10 * self.rate)  # There are fewer commits than steps.

        def tap(statement: str, run: Callable[[], Any]) -> Any:
            if world.is_settling or not is_commit(statement) or self.random.random() > odds:
                return run()
            return self.strike(world, run)

        world.tap(tap)

    def strike(self, world: World, run: Callable[[], Any]) -> Any:
        raise NotImplementedError

    def doom(self, world: World) -> NoReturn:
        life = world.tapped_life  # None: it is still opening.
        world.fault(self.name, node="" if life is None else life.name)
        if life is not None:
            world.doom(life, self.name)
        raise Died


@fault
class CrashBeforeCommit(AtCommit):
    """The process dies with a commit in its hands."""

    name = "crash before commit"

    def strike(self, world: World, run: Callable[[], Any]) -> Any:  # noqa: ARG002  # It never runs.
        self.doom(world)


@fault
class CrashAfterCommit(AtCommit):
    """The commit lands, and nobody lives to tell."""

    name = "crash after commit"

    def strike(self, world: World, run: Callable[[], Any]) -> Any:
        run()
        world.probe("landed_and_died")
        self.doom(world)


@fault
class CommitLandsButRaises(AtCommit):
    """The commit lands, and the writer is told of an I/O error."""

    name = "commit lands but raises"

    def strike(self, world: World, run: Callable[[], Any]) -> Any:
        run()
        world.fault(self.name)
        raise sqlite3.OperationalError("disk I/O error")


@fault
class CommitRaises(AtCommit):
    """The commit fails, and nothing of it is there."""

    name = "commit raises and did not land"

    def strike(self, world: World, run: Callable[[], Any]) -> Any:  # noqa: ARG002  # It never runs.
        world.fault(self.name)
        raise sqlite3.OperationalError("disk I/O error")


@fault
class CrashWhileOpening(Fault):
    """A process dies at some statement before it serves, and so may the next ones."""

    name = "crash while opening"
    kind = "process"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._opening: Any = None
        self._in_a_row = 0
        self._left = 0  # So many statements until it dies; none: it does not.

    def arm(self, world: World) -> None:
        def tap(statement: str, run: Callable[[], Any]) -> Any:
            if world.is_settling or world.tapped_life is not None:
                return run()
            if self._opening is not world.tapped:
                self._opening = world.tapped
                self._draw()
            elif statement == TAKES_OVER and self._left and self.random.random() < 0.5:
                self._left = self.random.randrange(1, STATEMENTS_TO_TAKE_OVER)
            self._left = max(0, self._left - 1)
            if self._left != 1:
                return run()
            self._in_a_row += 1
            world.fault(self.name)
            world.probe("died_while_opening")
            raise Died

        world.tap(tap)

    def _draw(self) -> None:
        if self._left > 1:
            self._in_a_row = 0  # The last one came up before that.
        is_hit = self._in_a_row < NESTED and self.random.random() < min(0.9, 30 * self.rate)
        if not is_hit:
            self._in_a_row = 0
        self._left = self.random.randrange(2, STATEMENTS_TO_OPEN) if is_hit else 0

    def check(self, world: World) -> Iterable[str]:
        if world.counts[self.name] and world.owner is None:
            yield "processes have died while opening, and none came up after them"


@fault
class CrashAfterEffect(Fault):
    """A handler has done its work, and the process dies before anybody hears of it."""

    name = "crash after effect"
    kind = "process"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self.struck: list[Line] = []

    def arm(self, world: World) -> None:
        odds = min(0.5, 10 * self.rate)

        def called(life: Life, line: Line, _act: Act) -> None:
            if line.had_effect and not world.is_settling and self.random.random() < odds:
                world.fault(self.name, line.key, node=life.name)
                self.struck.append(line)
                world.doom(life, self.name)

        world.on_called.append(called)

    def check(self, world: World) -> Iterable[str]:
        """Nobody can have heard of the attempt: it counts as lost, and never as done or failed."""
        endings = endings_of(world)
        for line in self.struck:
            ending = endings.get((line.key, line.attempt))
            if ending is not None and ending.how != LOST:
                words = f"is {ending.how} by commit {ending.seq}, but its process died before it could tell"
                yield f"attempt {line.attempt} of {line.key} {words}"


@fault
class PauseBeyondLease(Fault):
    """The owner's process is stopped for longer than its lease, and goes on as if nothing had happened.

    Only where rivals wait: an owner that shows no signs of life has nobody to lose the file to.
    """

    name = "pause beyond the lease"
    kind = "process"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self.stopped: list[Life] = []

    def arm(self, world: World) -> None:
        self.again(world, lambda: self._strike(world))

    def _strike(self, world: World) -> None:
        life = world.owner
        if life is None or not life.node.beats:
            return
        lease_ms = life.node.limits.lease_ms
        world.fault(self.name, node=life.name)
        self.stopped.append(life)
        life.node.pause()
        world.after(lease_ms + self.random.randrange(1, 2 * lease_ms), lambda: self._go_on(life))

    def _go_on(self, life: Life) -> None:
        if life.node.life is life:
            life.node.resume()

    def check(self, world: World) -> Iterable[str]:
        """Whoever was replaced has found out, and has stepped aside. That it wrote nothing more is I10."""
        for life in self.stopped:
            is_replaced = life.epoch < world.highest_epoch and life.node.life is life
            if is_replaced and not isinstance(life.system.services.lost, Fenced):
                yield f"{life.name} of epoch {life.epoch} was replaced, and still believes that it owns the file"
