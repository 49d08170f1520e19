"""Instances for people: the list, one instance, why it is where it is, and what happened to it.

Ids and commands are never cut, because they are there to be copied; everything else gives way to the width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from understudy.cli.output import one_line, plain, styled
from understudy.cli.standing import (
    STUCK,
    Remedies,
    Remedy,
    ago,
    from_now,
    held_by,
    summary_of,
    urgent_first,
    when,
    word_of,
)
from understudy.cli.words import BAD, GOOD, MOVE, Line, Narrator, brief
from understudy.model.durations import show_moment
from understudy.state import State, Waiting
from understudy.store.reads import Detail, Record

ROOM: Final = 44  # Columns that a reason needs beside its instance; with less it stands below.
_STYLES: Final = {
    STUCK: "bold red",
    "failed": "red",
    "compensating": "yellow",
    "cancelling": "yellow",
    "paused": "yellow",
    "cancelled": "yellow",
    "running": "cyan",
    "waiting": "cyan",
    "completed": "green",
}
_TONES: Final = {MOVE: "dim", GOOD: "green", BAD: "red"}


# --- the list ---------------------------------------------------------------------------------------------------------


def listing(states: Sequence[State], *, width: int, now_ms: int) -> RenderableType:
    id_width = max((cell_len(plain(state.id)) for state in states), default=0)
    process_width = max((cell_len(_process(state)) for state in states), default=0)
    is_wide = width - id_width - process_width - 30 >= ROOM
    table = _table("STATE", "CHANGED", "PROCESS", "INSTANCE", *(("WHAT HOLDS IT, OR HOW IT ENDED",) if is_wide else ()))
    for column in table.columns[:2]:
        column.no_wrap = True
    table.columns[2].max_width = max(12, width // 4)
    table.columns[3].no_wrap = is_wide
    for state in states:
        table.add_row(*_row(state, is_wide=is_wide, now_ms=now_ms))
    return table


def _row(state: State, *, is_wide: bool, now_ms: int) -> list[Text]:
    word = word_of(state)
    name = styled(state.id, "bold")
    if state.title:
        name.append(f"  {one_line(state.title)}" if not is_wide else f"\n{one_line(state.title)}", style="dim")
    why = Text(one_line(summary_of(state)), style="red" if word in (STUCK, "failed") else "")
    cells = [Text(word, style=_STYLES.get(word, "")), Text(ago(state.changed_ms, now_ms)), Text(_process(state)), name]
    if is_wide:
        return [*cells, why]
    if why.plain:
        name.append("\n").append_text(why)
    return cells


def _process(state: State) -> str:
    return f"{one_line(state.process)} v{state.process_version}"


# --- one instance -----------------------------------------------------------------------------------------------------


def one(detail: Detail, state: State, traces: dict[int, str], *, now_ms: int, past: str = "") -> RenderableType:
    parts: list[RenderableType] = [heading(state)]
    if past:
        parts.append(styled(f"  {past}", "bold yellow"))
    parts.append(_facts(state, now_ms))
    parts += _incidents(detail, traces, now_ms)
    parts += _tokens(detail, now_ms)
    parts += _waits(detail, now_ms)
    if state.undoable:
        text = f"  {', '.join(state.undoable)}"
        parts += [_section("UNDONE IF IT FAILS OR IS CANCELLED, IN THIS ORDER"), styled(text)]
    parts += _variables(state)
    return Group(*parts)


def heading(state: State) -> Text:
    word = word_of(state)
    text = styled(state.id, "bold").append(f"  {_process(state)}  ").append(word, style=_STYLES.get(word, ""))
    if state.status not in (word, "running", "ended"):
        text.append(f" ({state.status})", style="yellow")
    return text.append(f"  {one_line(state.title)}" if state.title else "", style="dim")


def _facts(state: State, now_ms: int, *, undone: Sequence[str] = ()) -> RenderableType:
    facts = [("started", f"{when(state.created_ms, now_ms)}{_origin(state)}")]
    facts.append(("changed", f"{when(state.changed_ms, now_ms)}, by commit {state.version}"))
    if state.ended_ms is not None:
        facts.append(("ended", when(state.ended_ms, now_ms)))
    if state.tags:
        facts.append(("tags", ", ".join(f"{name}={value}" for name, value in sorted(state.tags.items()))))
    if state.error is not None:
        where = f"at {state.error.node}: " if state.error.node else ""
        facts.append(("because", f"{where}{state.error.message}"))
    if undone:
        facts.append(("undone", ", ".join(undone)))
    if state.encoded_result:
        facts.append(("result", state.encoded_result))
    table = _grid()
    for name, value in facts:
        table.add_row(Text(name, style="dim"), styled(value, "red" if name == "because" else ""))
    return Padding(table, (0, 0, 0, 2))


def _origin(state: State) -> str:
    by = f" by {state.by}" if state.by else ""
    cause = f", caused by {state.caused_by}" if state.caused_by else ""
    return f"{by}{cause}"


def _incidents(detail: Detail, traces: dict[int, str], now_ms: int) -> Iterable[RenderableType]:
    if not detail.incidents:
        return
    yield _section("INCIDENTS: AN OPERATOR MUST DECIDE (see `understudy explain`)")
    for incident in detail.incidents:
        head = f"{incident.id} at {incident.node} ({incident.code}), {when(incident.since_ms, now_ms)}"
        yield Padding(styled(head, "bold red"), (0, 0, 0, 2))
        yield Padding(styled(incident.detail), (0, 0, 0, 4))
        if incident.id in traces:
            code = (line for line in traces[incident.id].rstrip().split("\n") if line.strip(" ^~"))
            yield Padding(styled("\n".join(code), "dim"), (0, 0, 0, 4))


def _tokens(detail: Detail, now_ms: int) -> Iterable[RenderableType]:
    if not detail.tokens:
        return
    yield _section("TOKENS")
    table = _table("ID", "NODE", "STATUS", "MODE", "ATTEMPT", "SCOPE", "SINCE")
    scopes = {scope.id: scope.node or "root" for scope in detail.scopes}
    for token in detail.tokens:
        table.add_row(
            str(token.id),
            styled(token.node, "bold"),
            token.status.value,
            token.mode.value,
            str(token.attempt) if token.attempt else "",
            plain(scopes.get(token.scope, str(token.scope))),
            ago(token.since_ms, now_ms),
        )
    yield Padding(table, (0, 0, 0, 2))


def _waits(detail: Detail, now_ms: int) -> Iterable[RenderableType]:
    if detail.waits:
        yield _section("WAITS")
        table = _table("ID", "NODE", "FOR", "KEY", "DUE")
        for wait in detail.waits:
            due = "" if wait.due_ms is None else f"{show_moment(wait.due_ms)} ({from_now(wait.due_ms, now_ms)})"
            what = f"message {wait.name}" if wait.kind == "message" else wait.kind
            table.add_row(str(wait.id), styled(wait.node, "bold"), plain(what), plain(wait.key), due)
        yield Padding(table, (0, 0, 0, 2))
    if detail.buffered:
        yield Text(f"  {detail.buffered} message(s) are kept for it, which nothing has waited for yet")


def _variables(state: State) -> Iterable[RenderableType]:
    if not state.encoded_variables:
        return
    yield _section("VARIABLES")
    table = _grid()
    for name, value in sorted(state.encoded_variables.items()):
        table.add_row(styled(name, "bold"), styled(brief(value, limit=2_000)))
    yield Padding(table, (0, 0, 0, 2))


# --- why it is where it is --------------------------------------------------------------------------------------------


def explanation(
    state: State, remedies: Remedies, traces: dict[int, str], *, undone: Sequence[str], now_ms: int
) -> RenderableType:
    parts: list[RenderableType] = [heading(state), _facts(state, now_ms, undone=undone)]
    if state.is_ended:
        return Group(*parts)
    if state.status == "paused":
        parts += ["", _place("paused", "nothing new begins until somebody resumes it"), _remedies([remedies.resume()])]
    for wait in urgent_first(state):
        parts += ["", *_holding(wait, remedies, traces, now_ms)]
    parts.append("")
    if state.undoable:
        parts.append(Padding(styled(f"undone if it fails or is cancelled: {', '.join(state.undoable)}"), (0, 0, 0, 2)))
    parts.append(_remedies([remedies.cancel()], indent=2))
    if remedies.has_owner is False:
        parts.append(ownerless(remedies.db))
    return Group(*parts)


def ownerless(db: str) -> Text:
    return styled(f"No service runs {db} at the moment: nothing in it moves until one opens it.", "bold yellow")


def _holding(wait: Waiting, remedies: Remedies, traces: dict[int, str], now_ms: int) -> Iterable[RenderableType]:
    yield _place(wait.node, held_by(wait), style="red" if wait.kind == "incident" else "")
    attempts = f", after attempt {wait.attempt}" if wait.kind == "incident" and wait.attempt else ""
    yield Padding(Text(f"since {when(wait.since_ms, now_ms)}{attempts}", style="dim"), (0, 0, 0, 4))
    frames = [line for line in traces.get(wait.incident, "").split("\n") if line.startswith('  File "')]
    if frames:
        yield Padding(styled(f"raised in {frames[-1].strip()}", "dim"), (0, 0, 0, 4))
    yield _remedies(remedies.of(wait, now_ms=now_ms))


def _place(node: str, what: str, *, style: str = "") -> RenderableType:
    return Padding(Text.assemble((plain(node), "bold"), ": ", (plain(what), style)), (0, 0, 0, 2))


def _remedies(found: Sequence[Remedy], *, indent: int = 4) -> RenderableType:
    """Commands run over the edge rather than being broken: the terminal wraps them, and they can still be copied."""
    width = max((len(remedy.what) for remedy in found if remedy.command), default=0)
    lines = []
    for remedy in found:
        line = Text(f"{' ' * indent}→ ", no_wrap=True, overflow="ignore")
        if remedy.command:
            line.append(remedy.what.ljust(width)).append("  ").append(plain(remedy.command), style="bold")
        else:
            line.append(plain(f"moved by {remedy.what}"))
        lines.append(line)
    return Group(*lines)


# --- what happened ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Told:
    """One event of a history, as it is shown: what is the same as in the line above is left out."""

    n: int
    day: str
    time: str
    cause: str
    line: Line
    opens: bool  # The first of its entry.


def told(records: Iterable[Record], narrator: Narrator) -> list[Told]:
    found: list[Told] = []
    for record in records:
        for entry in record.entries:
            day, _, clock = show_moment(entry.at_ms).partition(" ")
            time = f"{clock.removesuffix('Z')}.{entry.at_ms % 1_000:03}"
            cause = f"{entry.cause} ({entry.by})" if entry.by else entry.cause
            lines = [narrator.tell(event) for event in entry.events]
            found += [Told(record.n, day, time, cause, line, not number) for number, line in enumerate(lines)]
    return found


def history(events: Sequence[Told], *, width: int) -> RenderableType:
    table = _table("TIME (UTC)", "N", "CAUSE", "WHAT HAPPENED")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[1].justify = "right"
    table.columns[2].max_width = max(22, width // 4)
    day = ""
    for event in events:
        if event.day != day:
            day = event.day
            table.add_row(Text(day, style="bold"))
        text = toned(event.line)
        if event.opens:
            table.add_row(event.time, str(event.n), styled(event.cause, "bold"), text)
        else:
            table.add_row("", "", "", text)
    return table


def toned(line: Line) -> Text:
    return styled(line.text, _TONES.get(line.tone, ""))


# --- helpers ----------------------------------------------------------------------------------------------------------


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _grid() -> Table:
    return Table.grid(padding=(0, 2, 0, 0))


def _section(title: str) -> RenderableType:
    return Text(f"\n{title}", style="dim")
