"""Events in words: what happened to an instance, one line an event, for people.

A `Narrator` reads a history from its beginning, because an event names tokens, waits and undos by numbers, and people
know them by their nodes. It reads nothing else and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs

from understudy.model import events as e
from understudy.model.durations import show_moment
from understudy.model.states import Mode

LONGEST: Final = 160  # Characters of a value; `show` and --json have all of it.

# How a line is meant: mere movement, a beginning or a wait, a success, trouble.
MOVE, PLAIN, GOOD, BAD = "move", "plain", "good", "bad"


@attrs.frozen
class Line:
    text: str
    tone: str = PLAIN


class Narrator:
    """Knows where the tokens are, as far as it has been told."""

    def __init__(self) -> None:
        self.nodes: dict[int, str] = {}  # Of tokens, scopes and undos; their numbers come from one sequence.
        self.waits: dict[int, e.WaitOpened] = {}
        self.messages: dict[int, str] = {}

    def tell(self, event: e.AnyEvent) -> Line:
        told = _TELLERS[type(event)](self, event)
        return told if isinstance(told, Line) else Line(told)

    def node(self, number: int) -> str:
        return self.nodes.get(number, f"token {number}")


def brief(text: str, *, limit: int = LONGEST) -> str:
    """An encoded value, cut where it would drown everything else."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def values(named: dict[str, str]) -> str:
    return ", ".join(f"{name} = {brief(text)}" for name, text in sorted(named.items()))


Teller = Callable[[Narrator, Any], Line | str]
_TELLERS: dict[type[e.Event], Teller] = {}
T = TypeVar("T", bound=Teller)


def _tells(kind: type[e.Event]) -> Callable[[T], T]:
    def register(function: T) -> T:
        _TELLERS[kind] = function
        return function

    return register


# --- the instance -----------------------------------------------------------------------------------------------------


@_tells(e.InstanceStarted)
def _started(_narrator: Narrator, event: e.InstanceStarted) -> str:
    given = f" with {values(event.variables)}" if event.variables else ""
    return f"{event.process} v{event.process_version} starts{given}"


@_tells(e.InstancePaused)
def _paused(_narrator: Narrator, _event: e.InstancePaused) -> str:
    return "paused: nothing new begins"


@_tells(e.InstanceResumed)
def _resumed(_narrator: Narrator, _event: e.InstanceResumed) -> str:
    return "resumed"


@_tells(e.EndingBegun)
def _ending(_narrator: Narrator, event: e.EndingBegun) -> Line:
    where = f" at {event.node}" if event.node else ""
    return Line(f"it will end as {event.outcome.value}{where}: {event.message}", BAD)


@_tells(e.InstanceEnded)
def _ended(_narrator: Narrator, event: e.InstanceEnded) -> Line:
    gave = f", giving {brief(event.result)}" if event.result else ""
    return Line(f"ended: {event.outcome.value}{gave}", BAD if event.error else GOOD)


# --- tokens -----------------------------------------------------------------------------------------------------------


@_tells(e.TokenCreated)
def _created(narrator: Narrator, event: e.TokenCreated) -> Line:
    is_undo = event.mode is Mode.COMPENSATION
    narrator.nodes[event.token] = f"undo of {event.node}" if is_undo else event.node
    return Line(f"token {event.token} begins at {narrator.node(event.token)}", MOVE)


@_tells(e.TokenMoved)
def _moved(narrator: Narrator, event: e.TokenMoved) -> Line:
    narrator.nodes[event.token] = event.node
    return Line(f"token {event.token} goes to {event.node}", MOVE)


@_tells(e.TokenRested)
def _rested(narrator: Narrator, event: e.TokenRested) -> Line:
    why = "for the other branches" if event.at_join else "for the steps inside"
    return Line(f"token {event.token} waits at {narrator.node(event.token)} {why}", MOVE)


@_tells(e.TokenEnded)
def _token_ended(narrator: Narrator, event: e.TokenEnded) -> Line:
    return Line(f"token {event.token} ends at {narrator.node(event.token)}: {event.how}", MOVE)


# --- tasks ------------------------------------------------------------------------------------------------------------


@_tells(e.TaskOpened)
def _opened(narrator: Narrator, event: e.TaskOpened) -> str:
    return f"{narrator.node(event.token)}: attempt 1 begins, under key …/{event.task}"


@_tells(e.AttemptStarted)
def _attempt(narrator: Narrator, event: e.AttemptStarted) -> str:
    why = ", by an operator's order" if event.renewed else ""
    return f"{narrator.node(event.token)}: attempt {event.attempt} begins{why}"


@_tells(e.AttemptLost)
def _lost(narrator: Narrator, event: e.AttemptLost) -> Line:
    text = (
        f"{narrator.node(event.token)}: attempt {event.attempt} was lost with its process; {event.attempt + 1} is next"
    )
    return Line(text, BAD)


@_tells(e.AttemptFailed)
def _failed(narrator: Narrator, event: e.AttemptFailed) -> Line:
    return Line(f"{narrator.node(event.token)}: attempt {event.attempt} failed: {event.message}", BAD)


@_tells(e.TaskCompleted)
def _completed(narrator: Narrator, event: e.TaskCompleted) -> Line:
    gave = f", {event.into} = {brief(event.result)}" if event.into else ""
    how = "skipped by an operator" if event.skipped else "done"
    return Line(f"{narrator.node(event.token)}: {how}{gave}", PLAIN if event.skipped else GOOD)


@_tells(e.VariablesSet)
def _variables(_narrator: Narrator, event: e.VariablesSet) -> str:
    return values(event.values)


# --- waits and messages -----------------------------------------------------------------------------------------------


@_tells(e.WaitOpened)
def _wait_opened(narrator: Narrator, event: e.WaitOpened) -> str:
    narrator.waits[event.wait] = event
    node = narrator.node(event.token)
    if event.kind == "message":
        key = f" with key {event.key}" if event.key else ""
        return f"{node}: waits for message {event.name}{key}"
    due = show_moment(event.due_ms or 0)
    if event.kind == "retry":
        return f"{node}: the next attempt is due at {due}"
    # A timer in the group of another wait is the end of that one's patience.
    return f"{node}: waits {'at most ' if event.group != event.wait else ''}until {due}"


@_tells(e.WaitConsumed)
def _wait_consumed(narrator: Narrator, event: e.WaitConsumed) -> Line:
    wait = narrator.waits.pop(event.wait)
    node = narrator.node(wait.token)
    if wait.kind == "message":
        return Line(f"{node}: message {wait.name} has come")
    return Line(f"{node}: the time has come", MOVE if wait.kind == "retry" else PLAIN)


@_tells(e.MessageBuffered)
def _buffered(narrator: Narrator, event: e.MessageBuffered) -> str:
    narrator.messages[event.message] = event.name
    until = f" until {show_moment(event.expires_ms)}" if event.expires_ms is not None else ""
    return f"message {event.name} is kept{until}: nothing waits for it yet"


@_tells(e.MessageTaken)
def _taken(narrator: Narrator, event: e.MessageTaken) -> str:
    name = narrator.messages.pop(event.message, str(event.message))
    return f"the kept message {name} {'has expired' if event.expired else 'is taken'}"


@_tells(e.MessageThrown)
def _thrown(narrator: Narrator, event: e.MessageThrown) -> str:
    key = f" with key {event.key}" if event.key else ""
    return f"{narrator.node(event.token)}: publishes message {event.name}{key}"


# --- scopes, undos, incidents -----------------------------------------------------------------------------------------


@_tells(e.ScopeOpened)
def _scope_opened(narrator: Narrator, event: e.ScopeOpened) -> Line:
    narrator.nodes[event.scope] = event.node
    return Line(f"{event.node}: opens", MOVE)


@_tells(e.ScopeFailing)
def _scope_failing(narrator: Narrator, event: e.ScopeFailing) -> Line:
    where = f" at {event.node}" if event.node else ""
    return Line(f"{narrator.node(event.scope)}: fails{where}: {event.message}", BAD)


@_tells(e.ScopeCompensating)
def _scope_compensating(narrator: Narrator, event: e.ScopeCompensating) -> str:
    return f"{narrator.node(event.scope)}: what was done in it is undone"


@_tells(e.ScopeClosed)
def _scope_closed(narrator: Narrator, event: e.ScopeClosed) -> Line:
    return Line(f"{narrator.node(event.scope)}: closes: {event.how}", MOVE)


@_tells(e.UndoRecorded)
def _undo_recorded(narrator: Narrator, event: e.UndoRecorded) -> Line:
    narrator.nodes[event.undo] = event.node
    return Line(f"{event.node}: can be undone from now on", MOVE)


@_tells(e.UndoStarted)
def _undo_started(narrator: Narrator, event: e.UndoStarted) -> Line:
    return Line(f"{narrator.node(event.undo)}: is to be undone", MOVE)


@_tells(e.UndoFinished)
def _undo_finished(narrator: Narrator, event: e.UndoFinished) -> Line:
    node = narrator.node(event.undo)
    if event.how == "done":
        return Line(f"{node}: undone", GOOD)
    return Line(f"{node}: not undone ({event.how})", BAD)


@_tells(e.IncidentRaised)
def _incident(narrator: Narrator, event: e.IncidentRaised) -> Line:
    node = narrator.node(event.token)
    return Line(f"{node}: stopped by incident {event.incident} ({event.code}): {event.detail}", BAD)


@_tells(e.IncidentClosed)
def _incident_closed(_narrator: Narrator, event: e.IncidentClosed) -> str:
    return f"incident {event.incident} is closed: {event.how}"
