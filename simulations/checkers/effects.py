"""I3: what handlers were called for, against what history has ordered.

A commit orders an attempt, the attempt is called, its result is committed: each after the other, whatever dies between.
The ledger is the outside world's side of it, history is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from understudy.actors.handlers import key_of
from understudy.model import events as e
from understudy.model.commands import CompleteTask
from understudy.model.invariants import Violation
from understudy.simulations.checkers.evidence import Evidence, Row
from understudy.simulations.plugins import Checker, checker

if TYPE_CHECKING:
    from understudy.simulations.ledger import Line
    from understudy.simulations.node import Life
    from understudy.simulations.world import World

Attempt = tuple[str, int]  # The key, and the number of the attempt.
NEVER: Final = 1 << 62


class Result(NamedTuple):
    """A success, as it was committed."""

    row: Row
    attempt: Attempt
    value: str
    is_recorded: bool


class Orders:
    """The books of all attempts: which commit has ordered each, and which ones say how it ended."""

    def __init__(self, evidence: Evidence) -> None:
        self.ordered: dict[Attempt, Row] = {}
        self.results: list[Result] = []
        self.lost: list[tuple[Row, Attempt]] = []
        self._out: dict[tuple[str, int], Attempt] = {}  # By instance and token.
        for row, _entry, events in evidence.turns():
            self._read(row, events)

    def _read(self, row: Row, events: list[Any]) -> None:
        for place, event in enumerate(events):
            kind = type(event)
            if kind is e.TaskOpened:
                self._order(row, event.token, (key_of(row.instance, event.task), 1))
            elif kind is e.AttemptStarted:
                self._order(row, event.token, (self._out[row.instance, event.token][0], event.attempt))
            elif kind is e.AttemptLost:
                self._lose(row, event, is_next_out=not _stops(event.token, events[place + 1 :]))
            elif kind is e.TaskCompleted and not event.skipped:
                key = self._out[row.instance, event.token][0]
                self.results.append(Result(row, (key, event.attempt), event.result, event.recorded))

    def _order(self, row: Row, token: int, attempt: Attempt) -> None:
        self._out[row.instance, token] = attempt
        self.ordered[attempt] = row

    def _lose(self, row: Row, event: e.AttemptLost, *, is_next_out: bool) -> None:
        key = self._out[row.instance, event.token][0]
        self.lost.append((row, (key, event.attempt)))
        if is_next_out:
            self._order(row, event.token, (key, event.attempt + 1))


def _stops(token: int, events: list[Any]) -> bool:
    """Whether the lost attempt's successor has to wait, for the end of a pause or for an operator."""
    return any(isinstance(event, e.WaitOpened | e.IncidentRaised) and event.token == token for event in events)


@checker
class Effects(Checker):
    id = "I3"
    statement = "every committed effect is delivered at least once under its key; nothing is that was not committed"

    def __init__(self) -> None:
        self._given: dict[tuple[Attempt, str], int] = {}  # What attempts have given: when their instances were told.

    def watch(self, world: World) -> None:
        Evidence.of(world).on_told.append(self._told)

    def _told(self, life: Life, instance: str, command: Any) -> None:
        if type(command) is CompleteTask:
            attempt = (key_of(instance, command.task), command.attempt)
            self._given.setdefault((attempt, command.result), life.world.steps)

    def find(self, world: World) -> Iterable[str | Violation]:
        evidence = Evidence.of(world)
        orders = Orders(evidence)
        calls: dict[Attempt, list[Line]] = {}
        for line in world.ledger:
            calls.setdefault((line.key, line.attempt), []).append(line)
        for words, instance in (
            *self._ordered(calls, orders),
            *self._twice(calls, evidence),
            *self._earned(calls, orders),
            *self._lost(calls, orders),
            *self._out(calls, evidence),
        ):
            yield Violation(self.id, words, instance)

    def _ordered(self, calls: dict[Attempt, list[Line]], orders: Orders) -> Iterator[tuple[str, str]]:
        for attempt, lines in calls.items():
            line, row = lines[0], orders.ordered.get(attempt)
            if row is None:
                yield f"{_named(line)} was called at step {line.step}, and no commit has ordered it", line.instance
            elif row.step > line.step:
                words = f"was called at step {line.step}, before commit {row.version} of step {row.step} had ordered it"
                yield f"{_named(line)} {words}", line.instance

    def _twice(self, calls: dict[Attempt, list[Line]], evidence: Evidence) -> Iterator[tuple[str, str]]:
        """Each attempt has a number of its own. Only what is rolled back with its transaction may begin again."""
        for lines in calls.values():
            if len(lines) > 1 and lines[0].handler not in evidence.transactional:
                steps = " and ".join(f"{line.step} ({line.node})" for line in lines)
                yield f"{_named(lines[0])} was called at steps {steps}", lines[0].instance

    def _earned(self, calls: dict[Attempt, list[Line]], orders: Orders) -> Iterator[tuple[str, str]]:
        for row, (key, attempt), value, is_recorded in orders.results:
            # A recorded result may be that of an attempt before: the record was found, and nothing was called again.
            numbers = range(attempt, 0, -1) if is_recorded else (attempt,)
            made = [line for number in numbers for line in calls.get((key, number), ()) if line.had_effect]
            words = ""
            if not made:
                words = f"is done by commit {row.version}, but was never made"
            elif row.step and made[-1].step > row.step:
                words = f"is done by commit {row.version} of step {row.step}, but was made at step {made[-1].step}"
            elif not is_recorded and row.step and self._given.get(((key, attempt), value), NEVER) > row.step:
                words = f"is done by commit {row.version} with a result that it had not given by then: {value[:100]}"
            if words:
                yield f"attempt {attempt} of {key} {words}", row.instance

    def _lost(self, calls: dict[Attempt, list[Line]], orders: Orders) -> Iterator[tuple[str, str]]:
        """Who has called it and lives cannot have lost it."""
        for row, attempt in orders.lost:
            here = [line for line in calls.get(attempt, ()) if line.epoch == row.epoch]
            if here:
                words = f"counts as lost by commit {row.version}, in the life that has called it at step {here[0].step}"
                yield f"attempt {attempt[1]} of {attempt[0]} {words}", row.instance

    def _out(self, calls: dict[Attempt, list[Line]], evidence: Evidence) -> Iterator[tuple[str, str]]:
        for token in evidence.executing:
            key = key_of(token.instance, token.task)
            if evidence.instances[token.instance].is_moving and (key, token.attempt) not in calls:
                yield f"attempt {token.attempt} of {key} is out, but was never made", token.instance


def _named(line: Line) -> str:
    return f"attempt {line.attempt} of {line.key} ({line.handler})"
