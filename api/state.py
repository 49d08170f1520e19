"""What an instance looks like from outside, at one committed moment.

Everything here is made of rows that were read together, and of the definition that the instance runs. Nothing here
reads, asks or changes anything.
"""

from __future__ import annotations

from typing import Any

import attrs

from understudy.model.definition import Graph
from understudy.model.durations import show_moment
from understudy.model.instance import Fault, Incident, Token, Wait
from understudy.model.kinds import Choice
from understudy.model.kinds import Task as TaskNode
from understudy.model.states import TokenStatus
from understudy.model.values import decode
from understudy.store.reads import Detail


@attrs.frozen(kw_only=True)
class Waiting:
    """One thing that a token waits for. A wait with a timeout is one thing: its `due_ms` is when it is late."""

    node: str
    kind: str  # "message", "timer", "retry", "task", "join", "scope", "ready" or "incident"
    since_ms: int
    token: int = 0
    name: str = ""  # Of the message; of an incident, its code.
    key: str = ""  # Of the message; of a task, what its handler gets as `ctx.key`.
    due_ms: int | None = None  # When the clock moves it, if nothing else does.
    late: str = ""  # Where the clock then leads it, if not straight on.
    attempt: int = 0
    attempts: int = 0  # How many there may be.
    detail: str = ""  # Of a join, the branches that are missing; of an incident, what happened.
    incident: int = 0
    ways: tuple[str, ...] = ()  # Where an operator can send it on, if there is a choice.
    is_undo: bool = False

    def __str__(self) -> str:
        """With time and place: "waiting since … at delivered for message `delivered` with key order-7"."""
        verb, what = self._words()
        return f"{verb} since {show_moment(self.since_ms)} at {self.node} {what}".rstrip()

    @property
    def what(self) -> str:
        """Without: "waiting for message `delivered` with key order-7"."""
        return " ".join(self._words()).rstrip()

    def _words(self) -> tuple[str, str]:
        if self.kind == "message":
            return "waiting", f"for message `{self.name}`" + (f" with key {self.key}" if self.key else "")
        if self.kind == "timer":
            return "waiting", f"until {show_moment(self.due_ms or 0)}"
        if self.kind == "retry":
            what = "for its undo, attempt" if self.is_undo else "for attempt"
            return "waiting", f"{what} {self._of(self.attempt + 1)}, due {show_moment(self.due_ms or 0)}"
        if self.kind == "task":
            return "undoing" if self.is_undo else "running", f"(attempt {self._of(self.attempt)})"
        if self.kind == "incident":
            return "stopped", f"by incident {self.incident} ({self.name}): {self.detail}"
        if self.kind == "join":
            return "waiting", f"for {self.detail or 'the other branches'}"
        return ("ready", "to go on") if self.kind == "ready" else ("waiting", "for the steps inside")

    def _of(self, attempt: int) -> str:
        # A retry by an operator, or an attempt lost to a crash, goes beyond what the policy grants.
        return f"{attempt} of {self.attempts}" if attempt <= self.attempts > 1 else str(attempt)


@attrs.frozen(kw_only=True)
class State:
    """An instance, from its committed rows. `version` counts its commits."""

    id: str
    process: str
    process_version: int
    status: str
    outcome: str | None
    version: int
    title: str
    tags: dict[str, str]
    trigger: str
    by: str
    caused_by: str
    created_ms: int
    changed_ms: int
    ended_ms: int | None
    error: Fault | None
    waiting: tuple[Waiting, ...]
    kept: int  # Messages that came before anything waited for them.
    undoable: tuple[str, ...]  # Steps that would be undone if the instance failed now, in the order of undoing.
    definition: str  # The digest of the definition that it runs.
    encoded_result: str  # JSON text, as it is stored; empty while there is none.
    encoded_variables: dict[str, str]

    @property
    def variables(self) -> dict[str, Any]:
        return {name: decode(text) for name, text in self.encoded_variables.items()}

    @property
    def result(self) -> Any:
        return decode(self.encoded_result) if self.encoded_result else None

    @property
    def is_ended(self) -> bool:
        return self.outcome is not None

    @property
    def incidents(self) -> tuple[Waiting, ...]:
        return tuple(wait for wait in self.waiting if wait.kind == "incident")

    @property
    def at(self) -> tuple[str, ...]:
        """The nodes where its tokens are."""
        return tuple(dict.fromkeys(wait.node for wait in self.waiting))

    @property
    def leaves(self) -> tuple[Waiting, ...]:
        """What it waits for, without the steps that only wait for what is inside them."""
        return tuple(wait for wait in self.waiting if wait.kind != "scope") or self.waiting

    def is_waiting_at(self, node: str) -> bool:
        return node in self.at

    def is_waiting_for(self, message: str) -> bool:
        return any(wait.kind == "message" and wait.name == message for wait in self.waiting)

    def __str__(self) -> str:
        """One line: "order-7: waiting since … at delivered for message `delivered` with key 7"."""
        if self.outcome is not None:
            why = f": {self.error.message}" if self.error is not None else ""
            return f"{self.id}: {self.outcome}{why}"
        status = "" if self.status == "running" else f"{self.status}; "
        return f"{self.id}: {status}" + "; ".join(str(wait) for wait in self.leaves)


def state_of(detail: Detail, graph: Graph) -> State:
    """The public state of what was read."""
    s = detail.summary
    return State(
        id=s.id,
        process=s.process,
        process_version=s.process_version,
        status=s.status,
        outcome=s.outcome,
        version=s.version,
        title=s.title,
        tags=s.tags,
        trigger=s.trigger,
        by=s.by,
        caused_by=s.caused_by,
        created_ms=s.created_ms,
        changed_ms=s.changed_ms,
        ended_ms=s.ended_ms,
        error=s.fault,
        waiting=tuple(_waiting(detail, graph)),
        kept=detail.buffered,
        undoable=tuple(undo.node for undo in sorted(detail.undos, key=lambda u: -u.id)),
        definition=graph.definition.digest,
        encoded_result=s.result,
        encoded_variables=detail.variables,
    )


def _waiting(detail: Detail, graph: Graph) -> list[Waiting]:
    hosts = {scope.host for scope in detail.scopes if scope.host}
    incidents = {incident.token: incident for incident in detail.incidents}
    waits: dict[int, list[Wait]] = {}
    for wait in detail.waits:
        waits.setdefault(wait.token, []).append(wait)
    found = []
    for token in detail.tokens:
        if token.id in incidents:
            found.append(_stopped(token, incidents[token.id], graph))
        elif token.id in waits:
            found.append(_awaited(token, waits[token.id], graph))
        else:
            found.append(_resting(token, detail, graph, is_host=token.id in hosts))
    return found


def _stopped(token: Token, incident: Incident, graph: Graph) -> Waiting:
    place = graph[token.node]
    return Waiting(
        node=token.node,
        kind="incident",
        since_ms=incident.since_ms,
        token=token.id,
        name=incident.code,
        attempt=token.attempt,
        attempts=_attempts(token, graph),
        detail=incident.detail,
        incident=incident.id,
        ways=tuple(edge.target for edge in place.outgoing) if isinstance(place.node, Choice) else (),
        is_undo=bool(token.undo),
    )


def _awaited(token: Token, waits: list[Wait], graph: Graph) -> Waiting:
    """The waits of a token are alternatives: the first is what it waits for, and a timer beside it is its timeout."""
    first = min(waits, key=lambda wait: wait.id)
    due = [wait.due_ms for wait in waits if wait.due_ms is not None]
    late = graph[token.node].late if len(waits) > 1 else None
    return Waiting(
        node=token.node,
        kind=first.kind,
        since_ms=first.since_ms,
        token=token.id,
        name=first.name,
        key=first.key,
        due_ms=min(due, default=None),
        late="" if late is None else late.target,
        attempt=token.attempt,
        attempts=_attempts(token, graph),
        is_undo=bool(token.undo),
    )


def _resting(token: Token, detail: Detail, graph: Graph, *, is_host: bool) -> Waiting:
    is_out = token.status is TokenStatus.EXECUTING
    if is_out:
        kind = "task"
    elif token.status is TokenStatus.READY:
        kind = "ready"
    else:
        kind = "scope" if is_host else "join"
    return Waiting(
        node=token.node,
        kind=kind,
        since_ms=token.since_ms,
        token=token.id,
        key=f"{detail.summary.id}/{token.task}" if is_out else "",
        attempt=token.attempt,
        attempts=_attempts(token, graph),
        detail=_missing(token, detail, graph) if kind == "join" else "",
        is_undo=bool(token.undo),
    )


def _attempts(token: Token, graph: Graph) -> int:
    node = graph[token.node].node
    if not isinstance(node, TaskNode):
        return 0
    return node.undo.retry.attempts if token.undo and node.undo is not None else node.retry.attempts


def _missing(token: Token, detail: Detail, graph: Graph) -> str:
    """The branches that have not come to the join where the token rests."""
    here = {other.came_by for other in detail.tokens if (other.node, other.scope) == (token.node, token.scope)}
    return ", ".join(edge.source for edge in graph[token.node].incoming if edge.id not in here)
