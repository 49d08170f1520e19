"""How attempts have ended, by history: what faults of handlers and of processes are checked against.

The books are kept by the handler's key and the number of the attempt, as the ledger keeps its own, so that both can be
laid side by side. Nothing here judges anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from understudy.actors.handlers import key_of
from understudy.model import events as e
from understudy.simulations.checkers.evidence import Evidence, Reading

if TYPE_CHECKING:
    from understudy.simulations.world import World

DONE: Final = "done"
FAILED: Final = "failed"
LOST: Final = "lost"

Attempt = tuple[str, int]  # The handler's key, and the number of the attempt.


class Ending(NamedTuple):
    """What history says of an attempt that was out."""

    how: str
    seq: int  # Of the commit.
    step: int  # At which it was written.
    epoch: int
    code: str = ""  # Of a failure.
    message: str = ""
    is_recorded: bool = False  # The result was found in the store; it may be that of an attempt before.


_KEPT: WeakKeyDictionary[Reading, dict[Attempt, Ending]] = WeakKeyDictionary()


def endings_of(world: World) -> dict[Attempt, Ending]:
    """All attempts that have ended. An operator who skips a step ends no attempt."""
    evidence = Evidence.of(world)
    reading = evidence.reading
    found = _KEPT.get(reading)
    if found is None:
        found = _KEPT[reading] = {}
        for instance in evidence.histories:
            found.update(_endings(evidence, instance))
    return found


def _endings(evidence: Evidence, instance: str) -> dict[Attempt, Ending]:
    found: dict[Attempt, Ending] = {}
    keys: dict[int, str] = {}  # By token.
    for row, _entry, event in evidence.events(instance):
        if isinstance(event, e.TaskOpened):
            keys[event.token] = key_of(instance, event.task)
        elif isinstance(event, e.AttemptLost):
            found[keys[event.token], event.attempt] = Ending(LOST, row.seq, row.step, row.epoch)
        elif isinstance(event, e.AttemptFailed):
            ending = Ending(FAILED, row.seq, row.step, row.epoch, event.code, event.message)
            found[keys[event.token], event.attempt] = ending
        elif isinstance(event, e.TaskCompleted) and not event.skipped:
            ending = Ending(DONE, row.seq, row.step, row.epoch, is_recorded=event.recorded)
            found[keys[event.token], event.attempt] = ending
    return found


def still_out(world: World) -> set[Attempt]:
    """The attempts that instances which may move still wait for."""
    evidence = Evidence.of(world)
    return {
        (key_of(token.instance, token.task), token.attempt)
        for token in evidence.executing
        if evidence.instances[token.instance].is_moving
    }
