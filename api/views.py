"""What the handles of both kinds of runtime share: from committed rows to states, steps, paths and outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs
import pykka

from understudy.actors.promise import Promise
from understudy.model.definition import Graph, decode_definition
from understudy.model.errors import Cancelled, Failed, Stuck, TimedOut, Unsuccessful
from understudy.model.events import Entry, TaskCompleted, TokenCreated, TokenMoved, UndoFinished, UndoRecorded
from understudy.model.instance import Token
from understudy.model.values import decode
from understudy.node import Node
from understudy.process import Process
from understudy.state import State, state_of
from understudy.store.reads import Detail, Record

R = TypeVar("R")


@attrs.frozen(kw_only=True)
class Step:
    """One commit of an instance's history."""

    n: int
    seq: int
    at_ms: int
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return f"{self.n}. " + "; ".join(entry.cause for entry in self.entries)


def step_of(record: Record) -> Step:
    return Step(n=record.n, seq=record.seq, at_ms=record.at_ms, entries=tuple(record.entries))


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
        graph = self[detail.definition]

        def missing(token: Token) -> str:
            here = {t.came_by for t in detail.tokens if t.node == token.node and t.scope == token.scope}
            return ", ".join(edge.source for edge in graph[token.node].incoming if edge.id not in here)

        return state_of(detail, missing_at_join=missing)


def path_of(steps: list[Step]) -> list[str]:
    """The nodes that were done, in the order in which they were done."""
    path: list[str] = []
    at: dict[int, str] = {}
    for step in steps:
        for entry in step.entries:
            for event in entry.events:
                if isinstance(event, TokenCreated | TokenMoved):
                    at[event.token] = event.node
                elif isinstance(event, TaskCompleted):
                    path.append(at[event.token])
    return path


def undone_of(steps: list[Step]) -> list[str]:
    """The steps that were undone, in the order of undoing."""
    nodes: dict[int, str] = {}
    undone: list[str] = []
    for step in steps:
        for entry in step.entries:
            for event in entry.events:
                if isinstance(event, UndoRecorded):
                    nodes[event.undo] = event.node
                elif isinstance(event, UndoFinished) and event.how == "done":
                    undone.append(nodes[event.undo])
    return undone


def outcome_of(state: State, process: Process[Any, R] | None, history: Callable[[], list[Step]]) -> R:
    """The result of an ended instance, or the error that says why there is none and what was undone."""
    if state.outcome in ("completed", "terminated"):
        text = state.encoded_result or "null"
        return process.decode_result(text) if process is not None else cast("R", decode(text))
    raise unsuccessful(state, undone_of(history()))


def unsuccessful(state: State, undone: list[str]) -> Unsuccessful:
    error = state.error
    where = f" at {error.node}" if error is not None and error.node else ""
    why = error.message if error is not None else "no reason is recorded"
    after = f"; undone: {', '.join(undone)}" if undone else "; nothing had to be undone"
    if state.outcome == "cancelled":
        return Cancelled(f"{state.id} was cancelled{where}: {why}{after}")
    return Failed(f"{state.id} failed{where}: {why}{after}")


def stuck(state: State) -> Stuck:
    incident = state.incidents[0]
    return Stuck(
        f"{state.id} is stopped at {incident.node} by incident {incident.incident} ({incident.name}): "
        f"{incident.detail}; retry, skip or fail it"
    )


def waited(promise: Promise[Any], timeout_s: float | None, what: str) -> Any:
    """The promise's value; a pykka timeout becomes ours."""
    try:
        return promise.get(timeout=timeout_s)
    except pykka.Timeout:
        raise TimedOut(f"{what} was not answered within {timeout_s:g} s; it may still happen, look again") from None


Predicate = Callable[[State], bool]
Steps = list[Step]
