"""Why an instance is where it is, and what would move it: for the operator at three in the morning."""

from __future__ import annotations

import attrs

from understudy.model.durations import show_moment
from understudy.state import State, Waiting


@attrs.frozen
class Explanation:
    """The answer, as lines for people; `str()` gives the text."""

    state: State
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def explain(state: State) -> Explanation:
    head = f"{state.id} ({state.process} v{state.process_version})"
    if state.outcome is not None:
        return Explanation(state, tuple(_ended(head, state)))
    lines = [
        f"{head} is {state.status} since {show_moment(state.created_ms)}, last changed {show_moment(state.changed_ms)}"
    ]
    if state.status == "paused":
        lines.append("  nothing new begins; moved by: resume()")
    for wait in state.waiting:
        lines += [
            f"  at {wait.node}: {wait.what}, since {show_moment(wait.since_ms)}",
            f"    moved by: {_moved_by(wait)}",
        ]
    if state.undoable:
        lines.append(f"  if it fails or is cancelled now, these are undone: {', '.join(state.undoable)}")
    return Explanation(state, tuple(lines))


def _ended(head: str, state: State) -> list[str]:
    lines = [f"{head} has ended: {state.outcome}, at {show_moment(state.ended_ms or 0)}"]
    if state.error is not None:
        where = f" at {state.error.node}" if state.error.node else ""
        lines.append(f"  because{where}: {state.error.message}")
    return lines


def _moved_by(wait: Waiting) -> str:
    if wait.kind == "message":
        key = f" or publish({wait.name!r}, key={wait.key!r})" if wait.key else ""
        return f"send({wait.name!r}){key}"
    if wait.kind in ("timer", "retry"):
        return f"the clock, at {show_moment(wait.due_ms or 0)}"
    if wait.kind == "task":
        return "its handler's return, failure or timeout"
    if wait.kind == "incident":
        return f"retry({wait.incident}), skip({wait.incident}) or fail({wait.incident})"
    if wait.kind == "join":
        return f"a token from {wait.detail}" if wait.detail else "the tokens that are still on their way"
    if wait.kind == "ready":
        return "resume(), or the next owner"
    return "the steps inside it"
