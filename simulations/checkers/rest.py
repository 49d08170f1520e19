"""I13: once faults are over and time has passed, nothing is left that could move, and nobody waits for an answer.

That the world comes to rest at all is seen by `World.settle`, which raises otherwise. Here is asked whether it rests
because it is done, and not because somebody has forgotten to go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from understudy.actors.persistence import Health
from understudy.model.invariants import Violation
from understudy.model.values import canonical
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.clients import COPY, IDEMPOTENT
from understudy.simulations.operations import Operation
from understudy.simulations.plugins import Checker, checker

if TYPE_CHECKING:
    from understudy.simulations.node import Life
    from understudy.simulations.world import World

_NOTHING_DONE = frozenset({"Fenced", "Closed", "Unavailable"})  # Whoever hears this asks again.


@checker
class AtRest(Checker):
    id = "I13"
    statement = "once faults stop, everything that can move comes to rest within 10 virtual minutes"

    def watch(self, world: World) -> None:
        Evidence.of(world)

    def find(self, world: World) -> Iterable[str | Violation]:
        evidence = Evidence.of(world)
        owner = world.owner
        if owner is None:
            yield "no node is up at the end"
        else:
            yield from _owner(owner)
        for life in world.all_lives():
            yield from _still(life)
        yield from _instances(evidence)
        yield from _messages(evidence)
        yield from _unanswered(world)


def _owner(life: Life) -> Iterator[str]:
    if life.system.health is not Health.OPEN:
        yield f"the writer of {life.name} is {life.system.health.value}: {life.system.reason}"
    if not life.system.services.is_recovered:
        yield f"{life.name} has not finished its recovery"


def _still(life: Life) -> Iterator[str]:
    if len(life.stage):
        yield f"{len(life.stage)} things are ready in {life.name}, the first is {life.stage.ready[0]}"
    if life.pool.running():
        yield f"{life.pool.running()} handlers run in {life.name}"


def _instances(evidence: Evidence) -> Iterator[Violation]:
    for instance in evidence.instances.values():
        if instance.is_runnable:
            yield Violation("I13", f"it is {instance.status}, could go on by itself, and stands still", instance.id)


def _messages(evidence: Evidence) -> Iterator[Violation]:
    for message in evidence.messages:
        if message.instance is not None:
            words = f"message {message.no} was given to wait {message.wait}, and is not used"
            yield Violation("I13", words, message.instance)


def _unanswered(world: World) -> Iterator[Violation]:
    """Everybody has an answer, or does not know and could not ask again; who could has asked until there was one."""
    last: dict[tuple[str, str, str], Operation] = {}
    for operation in world.operations:
        if operation.returned is None and not operation.is_unknown:
            yield Violation("I13", f"{_named(operation)} was never answered", operation.instance)
        if (operation.key or operation.call in IDEMPOTENT) and operation.reason != COPY:
            last[operation.client, operation.call, canonical(operation.parameters) + operation.instance] = operation
    for operation in last.values():
        if operation.is_unknown or operation.error in _NOTHING_DONE:
            words = f"{_named(operation)} has got no answer but {operation.error}, and was not repeated"
            yield Violation("I13", words, operation.instance)


def _named(operation: Operation) -> str:
    return f"{operation.call} #{operation.number} of {operation.client}, called at step {operation.invoked},"
