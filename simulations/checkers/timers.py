"""I6, by the world's evidence: by whose clock a timer was fired, whether any was forgotten, and whether a message was
handed over after its time.

History alone cannot tell: an entry says at which moment a timer fired, and whoever fires early may as well write down a
later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from understudy.model import events as e
from understudy.model.commands import FireTimer
from understudy.model.invariants import Violation
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.plugins import Checker, checker

if TYPE_CHECKING:
    from understudy.simulations.node import Life
    from understudy.simulations.world import World
    from understudy.store.writer import Change, Written


@checker
class Timers(Checker):
    id = "I6"
    statement = "no timer is lost, none is early by the deciding node's clock, no message is used after its time"

    def __init__(self) -> None:
        self._fired: dict[tuple[str, int], set[int]] = {}  # Moments by instance and wait.
        self._found: list[Violation] = []

    def watch(self, world: World) -> None:
        Evidence.of(world).on_told.append(self._told)
        world.on_written.append(lambda life, changes, written: self._handed_over(world, life, changes, written))

    def find(self, world: World) -> Iterable[str | Violation]:
        evidence = Evidence.of(world)
        yield from self._found
        yield from self._by_itself(evidence)
        owner = world.owner
        if owner is not None:
            yield from self._forgotten(evidence, owner.clock.now_ms())

    # --- looking on ---

    def _told(self, life: Life, instance: str, command: Any) -> None:
        if type(command) is FireTimer:
            self._fire(life, instance, command)

    def _fire(self, life: Life, instance: str, command: FireTimer) -> None:
        known = self._fired.setdefault((instance, command.wait), set())
        now_ms = life.clock.now_ms()
        # One that is told again, to a successor, keeps its moment, and the clock may have gone back since.
        if command.at_ms > now_ms and command.at_ms not in known:
            early_ms = command.at_ms - now_ms
            self._found.append(
                Violation(self.id, f"wait {command.wait} was fired {early_ms} ms ahead of its node's clock", instance)
            )
        known.add(command.at_ms)

    def _handed_over(self, world: World, life: Life, _changes: Sequence[Change], written: Written) -> None:
        for delivery in written.deliveries:
            (expires_ms,) = world.peek(f"SELECT expires_ms FROM message WHERE no = {delivery.message}")[0]
            if expires_ms is not None and expires_ms <= life.clock.now_ms():
                words = f"message {delivery.message} was given to wait {delivery.wait} after its time"
                self._found.append(Violation(self.id, words, delivery.instance))

    # --- at the end ---

    def _by_itself(self, evidence: Evidence) -> Iterator[Violation]:
        for row, entry, events in evidence.turns():
            for event in events if entry.cause == "timer" else ():
                is_fired = type(event) is e.WaitConsumed
                if is_fired and entry.at_ms not in self._fired.get((row.instance, event.wait), ()):
                    words = f"wait {event.wait} was consumed by a timer of {entry.at_ms}, which nobody has fired"
                    yield Violation(self.id, words, row.instance)

    def _forgotten(self, evidence: Evidence, now_ms: int) -> Iterator[Violation]:
        for wait in evidence.waits:
            is_due = wait.due_ms is not None and wait.due_ms <= now_ms
            if is_due and evidence.instances[wait.instance].is_moving:
                words = f"wait {wait.id} ({wait.kind}) was due {now_ms - (wait.due_ms or 0)} ms ago and is still open"
                yield Violation(self.id, words, wait.instance)
