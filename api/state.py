"""What an instance looks like from outside, at one committed moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from understudy.model.durations import show_moment
from understudy.model.instance import Fault, Incident, Token, Wait
from understudy.model.states import TokenStatus
from understudy.model.values import decode
from understudy.store.reads import Detail

MissingAtJoin = Callable[[Token], str]  # The branches that a token at a join still waits for, in words.


@attrs.frozen(kw_only=True)
class Waiting:
    """One thing that a token waits for."""

    node: str
    kind: str  # "message", "timer", "retry", "task", "join", "scope" or "incident"
    since_ms: int
    name: str = ""
    key: str = ""
    due_ms: int | None = None
    attempt: int = 0
    detail: str = ""
    incident: int = 0
    is_undo: bool = False

    def __str__(self) -> str:
        return f"{self.what} at {self.node} since {show_moment(self.since_ms)}"

    @property
    def what(self) -> str:
        """In words: "waiting for message delivered with key order-7"."""
        if self.kind == "message":
            key = f" with key {self.key}" if self.key else ""
            return f"waiting for message {self.name}{key}"
        if self.kind == "timer":
            return f"waiting until {show_moment(self.due_ms or 0)}"
        if self.kind == "retry":
            return f"waiting for attempt {self.attempt + 1}, due {show_moment(self.due_ms or 0)}"
        if self.kind == "task":
            return f"{'undoing' if self.is_undo else 'running'} (attempt {self.attempt})"
        if self.kind == "incident":
            return f"stopped by incident {self.incident}: {self.detail}"
        if self.kind == "join":
            return f"waiting for the other branches ({self.detail})"
        return "ready to go on" if self.kind == "ready" else "waiting for the steps inside"


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
    undoable: tuple[str, ...]  # Steps that would be undone if the instance failed now, in the order of undoing.
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

    def is_waiting_at(self, node: str) -> bool:
        return node in self.at

    def is_waiting_for(self, message: str) -> bool:
        return any(wait.kind == "message" and wait.name == message for wait in self.waiting)

    def __str__(self) -> str:
        """One line: "order-7: waiting for message delivered with key 7 at delivered since …"."""
        if self.outcome is not None:
            why = f": {self.error.message}" if self.error is not None else ""
            return f"{self.id}: {self.outcome}{why}"
        paused = "paused; " if self.status == "paused" else ""
        return f"{self.id}: {paused}" + "; ".join(str(wait) for wait in self.waiting)


def state_of(detail: Detail, *, missing_at_join: MissingAtJoin | None = None) -> State:
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
        waiting=tuple(_waiting(detail, missing_at_join)),
        undoable=tuple(undo.node for undo in sorted(detail.undos, key=lambda u: -u.id)),
        encoded_result=s.result,
        encoded_variables=detail.variables,
    )


def _waiting(detail: Detail, missing_at_join: MissingAtJoin | None) -> list[Waiting]:
    found: list[Waiting] = []
    hosts = {scope.host for scope in detail.scopes if scope.host}
    incidents = {incident.token: incident for incident in detail.incidents}
    waits: dict[int, list[Wait]] = {}
    for wait in detail.waits:
        waits.setdefault(wait.token, []).append(wait)
    for token in detail.tokens:
        if token.id in incidents:
            found.append(_stopped(token, incidents[token.id]))
        elif token.id in waits:
            found += [_awaited(token, wait) for wait in waits[token.id]]
        else:
            found.append(_resting(token, is_host=token.id in hosts, missing_at_join=missing_at_join))
    return found


def _stopped(token: Token, incident: Incident) -> Waiting:
    return Waiting(
        node=token.node,
        kind="incident",
        since_ms=incident.since_ms,
        name=incident.code,
        attempt=token.attempt,
        detail=incident.detail,
        incident=incident.id,
        is_undo=bool(token.undo),
    )


def _awaited(token: Token, wait: Wait) -> Waiting:
    return Waiting(
        node=token.node,
        kind=wait.kind,
        since_ms=wait.since_ms,
        name=wait.name,
        key=wait.key,
        due_ms=wait.due_ms,
        attempt=token.attempt,
        is_undo=bool(token.undo),
    )


def _resting(token: Token, *, is_host: bool, missing_at_join: MissingAtJoin | None) -> Waiting:
    detail = ""
    if token.status is TokenStatus.EXECUTING:
        kind = "task"
    elif token.status is TokenStatus.READY:
        kind = "ready"
    elif is_host:
        kind = "scope"
    else:
        kind = "join"
        detail = "" if missing_at_join is None else missing_at_join(token)
    return Waiting(
        node=token.node,
        kind=kind,
        since_ms=token.since_ms,
        attempt=token.attempt,
        detail=detail,
        is_undo=bool(token.undo),
    )
