"""An instance in words: why it is where it is, what would move it, and how it came there.

For the operator at three in the morning. Whoever calls has read the rows; nothing here reads anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from understudy.model import events as e
from understudy.model.durations import SECOND_MS, show_duration, show_moment
from understudy.model.states import Mode
from understudy.state import State, Waiting

_NOTHING_FAILED: Mapping[int, str] = {}


@attrs.frozen
class Explanation:
    """The answer, as lines for people; `str()` gives the text."""

    state: State
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def explain(state: State, *, now_ms: int | None = None, failures: Mapping[int, str] = _NOTHING_FAILED) -> Explanation:
    """With `now_ms` it also says how long ago and how soon; `failures` are the last ones, by token."""
    head = f"{state.id} ({state.process} v{state.process_version})"
    if state.outcome is not None:
        return Explanation(state, tuple(_ended(head, state)))
    lines = [
        f"{head} is {state.status}: started {_ago(state.created_ms, now_ms)}, "
        f"last changed {_ago(state.changed_ms, now_ms)}"
    ]
    if state.status == "paused":
        lines.append("  nothing new begins; moved by resume()")
    for wait in state.leaves:
        lines.append(f"  {wait}")
        if wait.kind in ("task", "retry") and wait.token in failures:
            lines.append(f"    the last attempt failed: {failures[wait.token]}")
        lines.append(f"    moved by {_moved_by(wait, now_ms)}")
    return Explanation(state, (*lines, *_asides(state)))


def _ended(head: str, state: State) -> list[str]:
    ended_ms = state.ended_ms or 0
    lasted = _whole(ended_ms - state.created_ms)
    lines = [f"{head} has ended: {state.outcome} at {show_moment(ended_ms)}, {lasted} after its start"]
    if state.error is not None:
        where = f" at {state.error.node}" if state.error.node else ""
        lines.append(f"  because{where}: {state.error.message}")
    return lines


def _asides(state: State) -> list[str]:
    lines = []
    if state.kept:
        kept = "1 message is" if state.kept == 1 else f"{state.kept} messages are"
        lines.append(f"  {kept} kept, for which nothing has waited yet")
    if state.undoable:
        is_ending = state.status in ("compensating", "cancelling")
        when = "still to be undone" if is_ending else "if it fails or is cancelled now, this is undone"
        lines.append(f"  {when}: {', '.join(state.undoable)}")
    return lines


def _moved_by(wait: Waiting, now_ms: int | None) -> str:
    clock = "" if wait.due_ms is None else f"the clock at {_in(wait.due_ms, now_ms)}"
    if wait.kind == "message":
        key = f", key={wait.key!r}" if wait.key else ""
        late = f"; or by {clock}, which leads to {wait.late or 'a failure'}" if clock else ""
        return f"send({wait.name!r}) or publish({wait.name!r}{key}){late}"
    if wait.kind in ("timer", "retry"):
        return clock
    if wait.kind == "task":
        return f"the end of its handler, which works under the key {wait.key}"
    if wait.kind == "incident":
        to = f", to={' or '.join(map(repr, wait.ways))}" if wait.ways else ""
        return f"retry({wait.incident}), skip({wait.incident}{to}) or fail({wait.incident})"
    if wait.kind == "join":
        return f"the end of {wait.detail}" if wait.detail else "the tokens that are still on their way"
    return "the next owner, or resume()" if wait.kind == "ready" else "the steps inside it"


def _ago(moment_ms: int, now_ms: int | None) -> str:
    if now_ms is None or now_ms < moment_ms:
        return show_moment(moment_ms)
    ago = "just now" if now_ms - moment_ms < SECOND_MS else f"{_whole(now_ms - moment_ms)} ago"
    return f"{show_moment(moment_ms)} ({ago})"


def _in(moment_ms: int, now_ms: int | None) -> str:
    if now_ms is None:
        return show_moment(moment_ms)
    when = f"in {_whole(moment_ms - now_ms)}" if moment_ms > now_ms else "due now"
    return f"{show_moment(moment_ms)} ({when})"


def _whole(length_ms: int) -> str:
    """A duration without its broken seconds, which nobody reads."""
    return show_duration(length_ms - length_ms % SECOND_MS if length_ms > SECOND_MS else length_ms)


# --- how it came there ------------------------------------------------------------------------------------------------


class Story:
    """Tells events in words. It remembers where each token is: it must hear all of an instance's, in their order."""

    def __init__(self) -> None:
        self._at: dict[int, str] = {}
        self._undoing: set[int] = set()
        self._undo_of: dict[int, str] = {}

    def is_undo(self, token: int) -> bool:
        return token in self._undoing

    def place(self, token: int) -> str:
        return self._at[token]

    def undo_of(self, undo: int) -> str:
        return self._undo_of[undo]

    def hear(self, event: e.AnyEvent) -> None:
        if isinstance(event, e.TokenCreated):
            self._at[event.token] = event.node
            if event.mode is Mode.COMPENSATION:
                self._undoing.add(event.token)
        elif isinstance(event, e.TokenMoved):
            self._at[event.token] = event.node
        elif isinstance(event, e.UndoRecorded):
            self._undo_of[event.undo] = event.node

    def tell(self, event: e.AnyEvent) -> str:
        """Empty for what is no news to people."""
        self.hear(event)
        token = getattr(event, "token", 0)
        node = self._at.get(token, "")
        if token in self._undoing:
            node = f"undo of {node}"
        return _told(event, node, self._undo_of)


def _told(event: e.AnyEvent, node: str, undo_of: Mapping[int, str]) -> str:
    match event:
        case e.InstanceStarted():
            return f"{event.process} v{event.process_version} started"
        case e.TaskOpened():
            return f"{node} begins"
        case e.AttemptStarted():
            return f"{node} begins attempt {event.attempt}"
        case e.AttemptLost():
            return f"attempt {event.attempt} of {node} was lost with its process"
        case e.AttemptFailed():
            return f"attempt {event.attempt} of {node} failed: {event.message}"
        case e.TaskCompleted():
            return f"{node} {'skipped' if event.skipped else 'done'}"
        case e.WaitOpened():
            return _told_wait(event, node)
        case e.MessageBuffered():
            return f"message `{event.name}` is kept"
        case e.MessageTaken():
            return "a kept message had expired" if event.expired else "a kept message is taken"
        case e.MessageThrown():
            return f"message `{event.name}` is published"
        case e.ScopeFailing():
            return f"what was done is undone, because of {event.node or event.code}"
        case e.UndoFinished() if event.how != "done":
            return f"undo of {undo_of[event.undo]} {event.how}"
        case e.IncidentRaised():
            return f"{node} is stopped by incident {event.incident}: {event.detail}"
        case e.IncidentClosed():
            return f"incident {event.incident} is {event.how}"
        case e.InstancePaused():
            return "paused"
        case e.InstanceResumed():
            return "resumed"
        case e.InstanceEnded():
            return f"ended: {event.outcome.value}"
    return ""


def _told_wait(event: e.WaitOpened, node: str) -> str:
    if event.kind == "message":
        return f"{node} waits for message `{event.name}`" + (f" with key {event.key}" if event.key else "")
    if event.kind == "retry":
        return f"{node} is tried again at {show_moment(event.due_ms or 0)}"
    # A timer in the group of another wait is the timeout of that.
    return "" if event.group != event.wait else f"{node} waits until {show_moment(event.due_ms or 0)}"
