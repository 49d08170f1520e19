"""Where an instance stands, in an operator's words: what holds it, since when, and the very command that moves it."""

from __future__ import annotations

import shlex
import time
from typing import Final

import attrs

from understudy.model.definition import Graph
from understudy.model.durations import SECOND_MS, show_duration, show_moment
from understudy.state import State, Waiting

STUCK: Final = "stuck"
# What an operator wants to know first stands first; tokens that merely wait for other tokens stand last.
_ORDER: Final = ("incident", "task", "retry", "ready", "message", "timer", "join", "scope")


@attrs.frozen
class Remedy:
    """Something that moves an instance: in words, and as a command where there is one."""

    what: str
    command: str = ""


def word_of(state: State) -> str:
    """One word: the outcome, or else what is most worth knowing."""
    if state.outcome is not None:
        return state.outcome
    if state.incidents:
        return STUCK
    is_moving = any(wait.kind in ("task", "ready") for wait in state.waiting)
    return "waiting" if state.status == "running" and not is_moving else state.status


def urgent_first(state: State) -> list[Waiting]:
    """What it waits for, without the steps that only wait for what is inside them."""
    return sorted(state.leaves, key=lambda wait: _ORDER.index(wait.kind))


def held_by(wait: Waiting) -> str:
    """What holds a token, and until when."""
    until = f", until {show_moment(wait.due_ms)}" if wait.kind == "message" and wait.due_ms is not None else ""
    return f"{wait.what}{until}"


def summary_of(state: State) -> str:
    """In one line what holds it, or how it ended."""
    if state.outcome is not None:
        if state.error is not None:
            where = f"{state.error.node}: " if state.error.node else ""
            return f"{where}{state.error.message}"
        return "" if state.encoded_result in ("", "null") else f"gave {state.encoded_result}"
    everywhere = urgent_first(state)
    leading = [wait for wait in everywhere if wait.kind != "join"] or everywhere
    shown = [wait for wait in leading if wait.kind == "incident"] or leading[:2]
    rest = len(leading) - len(shown)
    return "; ".join(f"{wait.node}: {held_by(wait)}" for wait in shown) + (f"; and {rest} more" if rest else "")


# --- what moves it ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Remedies:
    """Finds the commands for one instance of one database."""

    db: str
    id: str
    graph: Graph
    has_owner: bool | None  # Whether a service runs the database; None when that is not known.

    def of(self, wait: Waiting, *, now_ms: int) -> list[Remedy]:
        if wait.kind == "message":
            return self._message(wait, now_ms)
        if wait.kind == "incident":
            return self._incident(wait)
        if wait.kind in ("timer", "retry"):
            return [Remedy(_clock(wait, now_ms))]
        if wait.kind == "task":
            return [Remedy(self._task(wait))]
        if wait.kind == "join":
            return [Remedy(f"a token from {wait.detail}" if wait.detail else "the tokens still on their way")]
        return [
            Remedy(
                "the service that runs this database, as soon as it may"
                if wait.kind == "ready"
                else "the steps inside it"
            )
        ]

    def resume(self) -> Remedy:
        return Remedy("let it go on", self.command("resume"))

    def cancel(self) -> Remedy:
        return Remedy("end all of it", self.command("cancel"))

    def command(self, name: str, *others: str) -> str:
        return shell("understudy", name, self.db, self.id, *others)

    def _message(self, wait: Waiting, now_ms: int) -> list[Remedy]:
        found = [Remedy("send it", self.command("send", wait.name))]
        if wait.key:
            found.append(Remedy("publish it", shell("understudy", "publish", self.db, wait.name, "--key", wait.key)))
        if wait.due_ms is not None:
            found.append(Remedy(f"{_clock(wait, now_ms)}, which leads to {wait.late or 'a failure'}"))
        return found

    def _incident(self, wait: Waiting) -> list[Remedy]:
        number = str(wait.incident)
        return [
            Remedy("try it again", self.command("retry", number)),
            Remedy("go on without it", f"{self.command('skip', number)}{self._skipping(wait)}"),
            Remedy("give its undo up" if wait.is_undo else "give it up", self.command("fail", number)),
        ]

    def _task(self, wait: Waiting) -> str:
        if self.has_owner is False:
            return "the next service that opens this database: the attempt was lost with its process"
        return f"the end of its handler, which works under the key {wait.key}"

    def _skipping(self, wait: Waiting) -> str:
        if wait.ways:
            return f" --to {'|'.join(wait.ways)}"
        gives = "" if wait.is_undo else getattr(self.graph[wait.node].node, "into", "")
        return " --result JSON" if gives else ""


def shell(*words: str) -> str:
    return shlex.join(words)


# --- times ------------------------------------------------------------------------------------------------------------


def present_ms() -> int:
    return time.time_ns() // 1_000_000


def ago(moment_ms: int, now_ms: int) -> str:
    age_ms = now_ms - moment_ms
    return "just now" if age_ms < SECOND_MS else f"{_whole(age_ms)} ago"


def from_now(moment_ms: int, now_ms: int) -> str:
    left_ms = moment_ms - now_ms
    if left_ms >= SECOND_MS:
        return f"in {_whole(left_ms)}"
    return "due now" if left_ms > -SECOND_MS else f"due since {_whole(-left_ms)}"


def when(moment_ms: int, now_ms: int) -> str:
    return f"{show_moment(moment_ms)} ({ago(moment_ms, now_ms)})"


def _clock(wait: Waiting, now_ms: int) -> str:
    due_ms = wait.due_ms or 0
    return f"the clock at {show_moment(due_ms)} ({from_now(due_ms, now_ms)})"


def _whole(length_ms: int) -> str:
    return show_duration(length_ms // SECOND_MS * SECOND_MS)
