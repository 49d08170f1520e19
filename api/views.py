"""What the handles of both kinds of runtime share: from committed rows to states, steps, paths and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias, TypeVar, cast

import attrs
import msgspec
import pykka

from understudy.actors.clock import utc_ms
from understudy.actors.promise import Promise
from understudy.explain import Story
from understudy.model.definition import Graph, decode_definition
from understudy.model.durations import show_moment
from understudy.model.errors import BadValue, Cancelled, Failed, Stuck, TimedOut, Unsuccessful
from understudy.model.events import (
    AnyEvent,
    AttemptFailed,
    Entry,
    ScopeClosed,
    TaskCompleted,
    UndoFinished,
    UndoRecorded,
)
from understudy.model.values import decode
from understudy.node import Node
from understudy.process import Process
from understudy.state import State, state_of
from understudy.store.reads import Detail, Record

R = TypeVar("R")
Predicate: TypeAlias = Callable[[State], bool]
Steps: TypeAlias = "list[Step]"
RECENT: Final = 50  # Commits that are read to say why something was tried again.


@attrs.frozen(kw_only=True)
class Step:
    """One commit of an instance's history."""

    n: int
    seq: int
    at_ms: int
    entries: tuple[Entry, ...]
    told: tuple[str, ...]  # What happened, in words.

    def __str__(self) -> str:
        causes = ", ".join(dict.fromkeys(entry.cause for entry in self.entries))
        return f"{self.n}. {show_moment(self.at_ms)} {causes}: {'; '.join(self.told)}"


def steps_of(records: list[Record]) -> Steps:
    """The whole history of an instance, told."""
    story = Story()
    steps = []
    for record in records:
        entries = tuple(record.entries)
        told = (story.tell(event) for entry in entries for event in entry.events)
        steps.append(
            Step(n=record.n, seq=record.seq, at_ms=record.at_ms, entries=entries, told=tuple(filter(None, told)))
        )
    return steps


class Graphs:
    """Definitions as the reading side sees them, each read once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: dict[int, Graph] = {}

    def __getitem__(self, no: int) -> Graph:
        found = self._known.get(no)
        if found is None:
            row = self._node.reads.definition(no)
            assert row is not None, f"definition {no}"
            found = self._known[no] = Graph(decode_definition(row[0]), version=row[1], no=no)
        return found

    def state(self, detail: Detail) -> State:
        return state_of(detail, self[detail.definition])


def now_ms(node: Node) -> int:
    """The time where the instances run, if that is here."""
    return utc_ms() if node.system is None else node.system.ports.clock.now_ms()


def last_failures(node: Node, state: State) -> dict[int, str]:
    """Why the attempts before those that are out or due have failed, by token."""
    if not any(wait.kind == "retry" or wait.attempt > 1 for wait in state.waiting):
        return {}
    failures: dict[int, str] = {}
    for record in node.reads.history(state.id, limit=RECENT):
        for event in _events(record.entries):
            if isinstance(event, AttemptFailed):
                failures[event.token] = event.message
            elif isinstance(event, TaskCompleted):
                failures.pop(event.token, None)
    return failures


def path_of(steps: Steps) -> list[str]:
    """The steps that were done, in the order in which they were done; what was undone later is still on it."""
    story = Story()
    path = []
    for event in (event for step in steps for event in _events(step.entries)):
        story.hear(event)
        if isinstance(event, TaskCompleted) and not story.is_undo(event.token):
            path.append(story.place(event.token))
    return path


def undone_of(steps: Steps) -> list[str]:
    """The steps that were undone, in the order of undoing."""
    story = Story()
    undone = []
    for event in (event for step in steps for event in _events(step.entries)):
        story.hear(event)
        if isinstance(event, UndoFinished) and event.how == "done":
            undone.append(story.undo_of(event.undo))
    return undone


def left_of(steps: Steps) -> list[str]:
    """The steps of failed or cancelled sagas that were done and not undone: skipped, given up, or not tried at all."""
    left: list[str] = []
    recorded: dict[int, UndoRecorded] = {}
    for event in (event for step in steps for event in _events(step.entries)):
        if isinstance(event, UndoRecorded):
            recorded[event.undo] = event
        elif isinstance(event, UndoFinished):
            node = recorded.pop(event.undo).node
            left += [] if event.how == "done" else [node]
        elif isinstance(event, ScopeClosed):
            for undo in [u for u in recorded.values() if u.scope == event.scope]:
                if event.heir is not None:
                    recorded[undo.undo] = msgspec.structs.replace(undo, scope=event.heir)
                else:
                    del recorded[undo.undo]
                    left += [] if event.how == "done" else [undo.node]
    return left + [undo.node for undo in recorded.values()]


def _events(entries: Iterable[Entry]) -> Iterator[AnyEvent]:
    return (event for entry in entries for event in entry.events)


def outcome_of(state: State, process: Process[Any, R] | None, history: Callable[[], Steps]) -> R:
    """The result of an ended instance, or the error that says why there is none and what was undone."""
    if state.outcome in ("completed", "terminated"):
        return _result(state, state.encoded_result or "null", process)
    raise unsuccessful(state, history())


def _result(state: State, text: str, process: Process[Any, R] | None) -> R:
    if process is None:
        return cast("R", decode(text))
    try:
        return process.decode_result(text)
    except BadValue:
        if state.definition == process.definition.digest:
            raise
        return cast("R", decode(text))  # It ran another version of the process, which gave another type.


def unsuccessful(state: State, steps: Steps) -> Unsuccessful:
    error = state.error
    where = f" at {error.node}" if error is not None and error.node else ""
    why = error.message if error is not None else "no reason is recorded"
    undone, left = undone_of(steps), left_of(steps)
    after = f"; undone: {', '.join(undone)}" if undone else ""
    after += f"; NOT undone: {', '.join(left)}" if left else ""
    after = after or "; nothing had to be undone"
    if state.outcome == "cancelled":
        return Cancelled(f"{state.id} was cancelled{where}: {why}{after}")
    return Failed(f"{state.id} failed{where}: {why}{after}")


def stuck(state: State) -> Stuck:
    incident, *others = state.incidents
    more = f" ({len(others)} more: see explain)" if others else ""
    return Stuck(
        f"{state.id} is stopped at {incident.node} by incident {incident.incident} ({incident.name}): "
        f"{incident.detail}; retry, skip or fail it{more}"
    )


def late(state: State, timeout_s: float | None) -> TimedOut:
    return TimedOut(f"not so within {timeout_s:g} s, and nothing was cancelled. {state}")


def waited(promise: Promise[Any], timeout_s: float | None, what: str) -> Any:
    """The promise's value; a pykka timeout becomes ours."""
    try:
        return promise.get(timeout=timeout_s)
    except pykka.Timeout:
        raise TimedOut(f"{what} was not answered within {timeout_s:g} s; it may still happen, look again") from None
