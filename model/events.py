"""What has happened to an instance, in the past tense.

History keeps these for ever, so an event's tag carries its version: a changed meaning gets a new class with the next
number, and the old class stays decodable, with an `upcast`. One commit is one history row: a list of entries, each
with the moment and the command it came from.
"""

from __future__ import annotations

import msgspec

from understudy.model.states import Mode, Outcome, ScopeKind


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=lambda name: f"{name}.1"):
    """The base of all events; the tag is the class name and a version."""


class InstanceStarted(Event, frozen=True):
    id: str
    process: str
    process_version: int
    definition: int
    given_digest: str
    variables: dict[str, str]
    title: str = ""
    tags: dict[str, str] = {}
    trigger: str = ""
    by: str = ""
    caused_by: str = ""


class TokenCreated(Event, frozen=True):
    token: int
    scope: int
    node: str
    came_by: str = ""
    mode: Mode = Mode.FORWARD
    undo: int = 0


class TokenMoved(Event, frozen=True):
    """It left its node by an edge and has arrived at the next one."""

    token: int
    node: str
    came_by: str


class TokenRested(Event, frozen=True):
    """It waits at its node: for the rest of a join, or for the scope it has opened."""

    token: int
    at_join: bool = False


class TokenEnded(Event, frozen=True):
    token: int
    how: str  # "done", "joined", "terminated", "interrupted"


class TaskOpened(Event, frozen=True):
    """The first attempt of a task is out, under a key that all its attempts share."""

    token: int
    task: int


class AttemptStarted(Event, frozen=True):
    """A further attempt, after a backoff or by an operator's order."""

    token: int
    attempt: int
    renewed: bool = False  # An operator's retry: the policy counts from one again.


class AttemptLost(Event, frozen=True):
    """The process ended while the attempt was out; the next number is out now."""

    token: int
    attempt: int


class AttemptFailed(Event, frozen=True):
    token: int
    attempt: int
    code: str
    message: str
    types: tuple[str, ...] = ()
    trace: str = ""


class TaskCompleted(Event, frozen=True):
    token: int
    attempt: int
    result: str = "null"
    into: str = ""
    recorded: bool = False  # The result was in the store already: a transactional task.
    skipped: bool = False  # An operator gave the result.


class VariablesSet(Event, frozen=True):
    scope: int
    values: dict[str, str]


class WaitOpened(Event, frozen=True):
    wait: int
    group: int
    token: int
    kind: str
    name: str = ""
    key: str = ""
    due_ms: int | None = None


class WaitConsumed(Event, frozen=True):
    """This wait has woken its token; the other waits of its group are gone with it."""

    wait: int
    message: int = 0  # The number of the published message that was taken, if one was.


class MessageBuffered(Event, frozen=True):
    message: int
    name: str
    key: str
    payload: str
    expires_ms: int | None = None


class MessageTaken(Event, frozen=True):
    """A buffered message was used, or had expired."""

    message: int
    expired: bool = False


class MessageThrown(Event, frozen=True):
    token: int
    name: str
    key: str
    payload: str
    expires_ms: int | None = None


class ScopeOpened(Event, frozen=True):
    scope: int
    parent: int
    node: str
    kind: ScopeKind
    host: int


class ScopeFailing(Event, frozen=True):
    """Nothing new begins in it; attempts that may still succeed, and must then be undone, are awaited."""

    scope: int
    code: str
    message: str
    node: str = ""


class ScopeCompensating(Event, frozen=True):
    scope: int


class ScopeClosed(Event, frozen=True):
    """Its undos go to the nearest saga around it, or are given up when there is none."""

    scope: int
    how: str  # "done", "undone", "terminated"
    heir: int | None = None


class UndoRecorded(Event, frozen=True):
    undo: int
    scope: int
    node: str
    task: int
    given: str


class UndoStarted(Event, frozen=True):
    undo: int


class UndoFinished(Event, frozen=True):
    undo: int
    how: str  # "done", "skipped", "given up"


class IncidentRaised(Event, frozen=True):
    incident: int
    token: int
    code: str
    detail: str


class IncidentClosed(Event, frozen=True):
    incident: int
    how: str  # "retried", "skipped", "failed", "dropped"


class InstancePaused(Event, frozen=True):
    pass


class InstanceResumed(Event, frozen=True):
    pass


class EndingBegun(Event, frozen=True):
    """Its outcome is settled; what its sagas have done is undone first."""

    outcome: Outcome
    code: str = ""
    message: str = ""
    node: str = ""


class InstanceEnded(Event, frozen=True):
    outcome: Outcome
    result: str = ""
    error: str = ""


AnyEvent = (
    InstanceStarted
    | TokenCreated
    | TokenMoved
    | TokenRested
    | TokenEnded
    | TaskOpened
    | AttemptStarted
    | AttemptLost
    | AttemptFailed
    | TaskCompleted
    | VariablesSet
    | WaitOpened
    | WaitConsumed
    | MessageBuffered
    | MessageTaken
    | MessageThrown
    | ScopeOpened
    | ScopeFailing
    | ScopeCompensating
    | ScopeClosed
    | UndoRecorded
    | UndoStarted
    | UndoFinished
    | IncidentRaised
    | IncidentClosed
    | InstancePaused
    | InstanceResumed
    | EndingBegun
    | InstanceEnded
)


class Entry(msgspec.Struct, frozen=True):
    """What one command did."""

    at_ms: int
    cause: str  # The command's name, and what it was about: "send delivered".
    events: list[AnyEvent]
    by: str = ""
    key: str = ""
