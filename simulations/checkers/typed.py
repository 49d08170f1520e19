"""What clients are told when something cannot be done: always one of our errors, always true, never that we are broken.

An error that is not of the family has passed a door at which it should have been explained; one that asks to be
reported is a broken belief of ours, whatever the disk, the clock or a handler has done. Some errors promise that
nothing was done, so that whoever hears them may ask for the same again in any way: then nothing may have been.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from understudy.model import events as e
from understudy.model.errors import UnderstudyError
from understudy.model.invariants import Violation
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.operations import Operation
from understudy.simulations.plugins import Checker, checker

if TYPE_CHECKING:
    from understudy.simulations.world import World

NO_ANSWER: Final = "Died"  # What stands for an answer that died with its process.
BROKEN: Final = ("internal error", "please report")
NOTHING_DONE: Final = frozenset({"Closed", "Fenced", "Unavailable"})  # As the one who asked may rely on.

Wish = tuple[str, str]  # The instance, and the key; a start needs none.


@checker
class Typed(Checker):
    id = "typed"
    statement = (
        "whoever is refused is told so by an error of ours that is true, and never by one that asks for a report"
    )

    def watch(self, world: World) -> None:
        Evidence.of(world)

    def find(self, world: World) -> Iterable[str | Violation]:
        family = frozenset(_family(UnderstudyError))
        for operation in world.operations:
            if operation.error and operation.error not in family and operation.error != NO_ANSWER:
                yield Violation(self.id, f"{_told(operation)}; that is none of our errors", operation.instance)
            elif any(words in operation.reason for words in BROKEN):
                yield Violation(self.id, _told(operation), operation.instance)
        for operation, step in _untrue(world):
            words = f"{_told(operation)}; but it was committed at step {step}"
            yield Violation(self.id, words, operation.instance)


def _family(error: type[UnderstudyError]) -> Iterator[str]:
    yield error.__name__
    for narrower in error.__subclasses__():
        yield from _family(narrower)


def _told(operation: Operation) -> str:
    return f"operation {operation.number} ({operation.call}) was told {operation.error}: {operation.reason}"


def _untrue(world: World) -> Iterator[tuple[Operation, int]]:
    """Who was told that nothing was done although it was, by this very call: no other had asked for it before."""
    landed = _landed(Evidence.of(world))
    asked: dict[Wish, list[Operation]] = {}
    for operation in world.operations:
        asked.setdefault(_wish(operation), []).append(operation)
    for wish, step in landed.items():
        by_then = [operation for operation in asked.get(wish, ()) if operation.invoked <= step]
        if len(by_then) == 1 and by_then[0].error in NOTHING_DONE and (by_then[0].returned or 0) >= step:
            yield by_then[0], step


def _wish(operation: Operation) -> Wish:
    return operation.instance, "start" if operation.call == "start" else f"key {operation.key}"


def _landed(evidence: Evidence) -> dict[Wish, int]:
    """When each wish came true for the first time."""
    found: dict[Wish, int] = {}
    for row in evidence.rows:
        for entry in row.entries:
            if entry.key:
                found.setdefault((row.instance, f"key {entry.key}"), row.step)
            elif entry.events and isinstance(entry.events[0], e.InstanceStarted):
                found.setdefault((row.instance, "start"), row.step)
    return found
