"""What an instance is told a second time, too late, or for no reason: results, timers, messages, wake-ups.

Commands from inside carry no key. They are recognised by what they are about (task and attempt, wait, message), and a
second delivery changes nothing. These faults stand between the actors of a life and its directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from understudy.actors.handlers import key_of
from understudy.actors.messages import Order, Sweep, Tick, Wake
from understudy.model import events as e
from understudy.model.commands import AnyCommand, CompleteTask, Deliver, FailTask, FireTimer
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.faults.endings import LOST, endings_of
from understudy.simulations.node import Life
from understudy.simulations.plugins import SURVIVE, Fault, fault

if TYPE_CHECKING:
    from understudy.simulations.world import World

LATER_MS: Final = (0, 10_000)
MOST_KEPT: Final = 30  # Results of a former life.

Told = Callable[[Life, str, AnyCommand], None]


def listen(world: World, told: Told) -> None:
    """Hear every command that comes from inside a life, right after its instance was told."""

    def opened(life: Life) -> None:
        directory: Any = life.system.directory
        tell = directory.tell

        def telling(instance: str, message: Any, *, is_new: bool = False) -> None:
            tell(instance, message, is_new=is_new)
            if type(message) is Order and message.answer is None:
                told(life, instance, message.command)

        directory.tell = telling

    world.on_opened.append(opened)


def tell_again(life: Life, instance: str, command: AnyCommand) -> None:
    """Past all who listen: what was told again is not told again once more."""
    type(life.system.directory).tell(life.system.directory, instance, Order(command))


class ToldTwice(Fault):
    """One kind of command is told twice: the second time at once, or later."""

    kind = "messages"
    must = SURVIVE
    commands: ClassVar[tuple[type[AnyCommand], ...]]

    def arm(self, world: World) -> None:
        odds = min(0.5, 10 * self.rate)

        def told(life: Life, instance: str, command: AnyCommand) -> None:
            if isinstance(command, self.commands) and not world.is_settling and self.random.random() < odds:
                delay_ms = 0 if self.random.random() < 0.5 else self.random.randrange(*LATER_MS)
                world.after(delay_ms, lambda: self._again(world, life, instance, command))

        listen(world, told)

    def _again(self, world: World, life: Life, instance: str, command: AnyCommand) -> None:
        if life.node.is_up and life.node.life is life and not world.is_settling:
            world.fault(self.name, f"{type(command).__name__} to {instance}", node=life.name)
            tell_again(life, instance, command)


@fault
class ResultTwice(ToldTwice):
    """What a handler gave arrives twice."""

    name = "result told twice"
    commands = (CompleteTask, FailTask)

    def check(self, world: World) -> Iterable[str]:
        """No attempt ends twice."""
        evidence = Evidence.of(world)
        for instance in evidence.histories:
            tasks: dict[int, int] = {}
            ended: set[tuple[int, int]] = set()
            for row, _entry, event in evidence.events(instance):
                if isinstance(event, e.TaskOpened):
                    tasks[event.token] = event.task
                elif isinstance(event, e.TaskCompleted | e.AttemptFailed) and not getattr(event, "skipped", False):
                    attempt = (tasks[event.token], event.attempt)
                    if attempt in ended:
                        yield f"attempt {attempt[1]} of {key_of(instance, attempt[0])} ended again with {row.seq}"
                    ended.add(attempt)


class WaitsOnce(ToldTwice):
    """Whatever wakes a token is told twice."""

    def check(self, world: World) -> Iterable[str]:
        """No wait is consumed twice."""
        evidence = Evidence.of(world)
        for instance in evidence.histories:
            consumed: set[int] = set()
            for row, _entry, event in evidence.events(instance):
                if isinstance(event, e.WaitConsumed):
                    if event.wait in consumed:
                        yield f"wait {event.wait} of {instance} was consumed again with commit {row.seq}"
                    consumed.add(event.wait)


@fault
class TimerTwice(WaitsOnce):
    """A timer fires twice."""

    name = "timer fired twice"
    commands = (FireTimer,)


@fault
class MessageTwice(WaitsOnce):
    """A published message is handed over twice."""

    name = "message delivered twice"
    commands = (Deliver,)


class Stale(NamedTuple):
    """A result of a former life, as it was told to a later one."""

    instance: str
    command: CompleteTask | FailTask
    epoch: int  # Of the life that was told.


@fault
class StaleResult(Fault):
    """Results of a process that has died reach the one that came after it."""

    name = "stale result"
    kind = "messages"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._told: dict[str, list[tuple[str, CompleteTask | FailTask]]] = {}  # By life.
        self._left: list[tuple[str, CompleteTask | FailTask]] = []
        self.stale: list[Stale] = []

    def arm(self, world: World) -> None:
        def told(life: Life, instance: str, command: AnyCommand) -> None:
            if isinstance(command, CompleteTask | FailTask):
                kept = self._told.setdefault(life.name, [])
                kept.append((instance, command))
                del kept[:-MOST_KEPT]

        listen(world, told)
        world.on_lost.append(lambda life: self._left.extend(self._told.pop(life.name, ())))
        world.on_opened.append(lambda life: self._come(world, life))

    def _come(self, world: World, life: Life) -> None:
        if life.system.services.is_draining:
            return  # It was opened for a command only, and counts nothing as lost.
        left, self._left = self._left, []
        for instance, command in left:
            if not world.is_settling and self.random.random() < min(0.5, 20 * self.rate):
                self._later(world, life, instance, command)

    def _later(self, world: World, life: Life, instance: str, command: CompleteTask | FailTask) -> None:
        def arrive() -> None:
            if life.node.is_up and life.node.life is life and not world.is_settling:
                world.fault(self.name, f"{type(command).__name__} to {instance}", node=life.name)
                self.stale.append(Stale(instance, command, life.epoch))
                tell_again(life, instance, command)

        delay_ms = 0 if self.random.random() < 0.5 else self.random.randrange(*LATER_MS)
        world.after(delay_ms, arrive)

    def check(self, world: World) -> Iterable[str]:
        """They change nothing: the attempt has ended in its own life, or counts as lost."""
        endings = endings_of(world)
        for instance, command, epoch in self.stale:
            key = key_of(instance, command.task)
            ending = endings.get((key, command.attempt))
            is_used = ending is not None and ending.how != LOST and ending.epoch >= epoch
            if ending is not None and is_used and not ending.is_recorded:
                words = (
                    f"is {ending.how} by commit {ending.seq} of epoch {ending.epoch}, with a result of a former life"
                )
                yield f"attempt {command.attempt} of {key} {words}"


@fault
class OutOfTheBlue(Fault):
    """An instance is woken, a timer is looked for, all is gone through again: for no reason."""

    name = "woken out of the blue"
    kind = "messages"
    must = SURVIVE

    def arm(self, world: World) -> None:
        def strike() -> None:
            life = world.owner
            if life is not None:
                what = self.random.choice(("instance", "instance", "timers", "idle", "purge", "sweep"))
                world.fault(self.name, what, node=life.name)
                self._wake(world, life, what)

        self.again(world, strike)

    def _wake(self, world: World, life: Life, what: str) -> None:
        if what == "instance":
            ids = list(dict.fromkeys(each.instance for each in world.operations if each.instance))
            life.system.directory.tell(self.random.choice([*ids, "nobody"]), Wake())
        elif what == "sweep":
            life.system.supervisor.tell(Sweep())
        else:
            life.system.supervisor.tell(Tick(what))

    def check(self, world: World) -> Iterable[str]:
        if world.peek("SELECT count(*) FROM instance WHERE id = 'nobody'")[0][0]:
            yield "an instance that nobody has started is there, because it was woken"
        yield from early(world)


def early(world: World) -> Iterator[str]:
    """Timers that were consumed before they were due, by the moment of whoever decided it."""
    evidence = Evidence.of(world)
    for instance in evidence.histories:
        due: dict[int, int] = {}
        for row, entry, event in evidence.events(instance):
            if isinstance(event, e.WaitOpened) and event.due_ms is not None:
                due[event.wait] = event.due_ms
            elif isinstance(event, e.WaitConsumed) and entry.cause == "timer" and entry.at_ms < due[event.wait]:
                early_ms = due[event.wait] - entry.at_ms
                yield f"wait {event.wait} of {instance} was consumed {early_ms} ms early, with commit {row.seq}"
