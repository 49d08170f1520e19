"""What the real code says of a file, question by question: as the next owner asks, as users ask, and as an audit asks.

Each answer is a value that can be compared with that of an undamaged file. An error of ours is an answer too, and a
refusal; any other error is a surprise. `content_of` reads the rows by a connection of its own, which checks nothing:
it says what is there, whoever would notice.
"""

from __future__ import annotations

import sqlite3
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import attrs

from understudy.actors.definitions import Definitions
from understudy.audit import audit
from understudy.model.definition import Graph, decode_definition
from understudy.model.errors import UnderstudyError
from understudy.model.instance import facts
from understudy.rehearsal import START_MS, Rehearsal
from understudy.simulations.child import PROCESSES, Given, nap, parcel
from understudy.state import state_of
from understudy.store.connection import Database, explained, open_reader
from understudy.store.loading import Loaded, definition_row, load
from understudy.store.migrations import check_latest
from understudy.store.reads import Filter, Readers, Reads
from understudy.store.recovery import due_waits, has_expired, next_due_ms, runnable, with_messages
from understudy.store.schema import TABLES
from understudy.views import steps_of

Content = dict[str, list[Any] | str]  # The rows of each table, or why they cannot be read.

STATES: Final = 3  # Of how many instances the state is read: of the first of those that were set aside.
MOST: Final = 1_000
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
FAR_MS: Final = START_MS + 1_000 * DAY_MS


@attrs.define
class Look:
    """The answers, and who was the first to refuse: "open", "load", "read" or "audit"."""

    answers: dict[str, object] = attrs.field(factory=dict)
    refused_by: str = ""
    surprises: list[str] = attrs.field(factory=list)

    def ask(self, question: str, answer: Callable[[], object], *, who: str = "read") -> None:
        try:
            self.answers[question] = answer()
        except UnderstudyError as error:
            self.answers[question] = type(error).__name__
            self.refuse(who)
        except Exception as error:
            self.answers[question] = type(error).__name__
            self.surprises.append(f"{type(error).__name__} at {_place(error)}")

    def refuse(self, who: str) -> None:
        self.refused_by = self.refused_by or who


def look(path: Path, ids: list[str], *, closely: bool) -> Look:
    """Ask what a runtime asks when it opens and activates; closely: and what its users ask."""
    found = Look()
    with _reads(path) as reads:
        found.ask("opening", lambda: reads.rows("SELECT 1"), who="open")
        if found.answers["opening"] == [(1,)]:
            _ask_as_owner(found, reads, ids)
            if closely:
                _ask_as_user(found, reads, ids)
    return found


def look_by_audit(path: Path, found: Look) -> tuple[str, ...]:
    """Ask the audit too; the ids of what it found."""
    ids: list[str] = []

    def ask() -> None:
        with _reads(path) as reads:
            ids.extend(violation.id for violation in audit(reads).violations)

    found.ask("audit", ask, who="audit")
    if ids:
        found.refuse("audit")
    return tuple(ids)


def work_on(folder: Path) -> Look:
    """Open a whole runtime on the file in this folder, as the next owner would, and give it something to do."""
    found = Look()
    plays: list[Rehearsal] = []
    found.ask("opening", lambda: plays.append(Rehearsal(folder, *PROCESSES, start_ms=START_MS + HOUR_MS)), who="open")
    for play in plays:
        found.ask("start", lambda: play.start(nap, Given(21), id="nap-21").id)  # noqa: B023 - Asked at once.
        found.ask("start again", lambda: play.start(parcel, Given(9), id="parcel-9").id)  # noqa: B023
        found.ask("publish", lambda: play.publish("paid", "now", key=12))  # noqa: B023
        found.ask("send again", lambda: play.send("parcel-1", "paid", "card", key=1, request_key="paid/1"))  # noqa: B023
        found.ask("time passes", lambda: play.advance("10s"))  # noqa: B023
        found.ask("list", lambda: [(one.id, one.status, one.outcome, one.result) for one in play.list()])  # noqa: B023
        found.ask("report", play.report)
        found.ask("close", play.close)
    return found


def content_of(path: Path) -> Content:
    """The rows of all tables, as bytes: a text with a flipped bit may be none."""
    try:
        database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
    except sqlite3.Error as error:
        return dict.fromkeys(_STATEMENTS, str(error))
    database.text_factory = bytes
    try:
        return {table: _rows(database, statement) for table, statement in _STATEMENTS.items()}
    finally:
        database.close()


def _rows(database: sqlite3.Connection, statement: str) -> list[Any] | str:
    try:
        return database.execute(statement).fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # The latter when a damaged name is part of the message.
        return str(error)


_STATEMENTS: Final = {
    **{table._meta.table_name: f'SELECT * FROM "{table._meta.table_name}"' for table in TABLES},
    "schema": "SELECT type, name, tbl_name, sql FROM sqlite_schema",
}


# --- who asks what ----------------------------------------------------------------------------------------------------


def _ask_as_owner(found: Look, reads: Reads, ids: list[str]) -> None:
    connection = reads.connection()

    def ask(question: str, answer: Callable[[], object]) -> None:
        def explained_answer() -> object:
            with explained(reads.path):
                return answer()

        found.ask(question, explained_answer)

    ask("instances", lambda: _loaded(found, connection, ids))
    ask("timers", lambda: (due_waits(connection, FAR_MS, MOST), next_due_ms(connection, 0)))
    ask("runnable", lambda: runnable(connection, 0, MOST))
    ask("posted", lambda: with_messages(connection, 0, MOST))
    ask("expired", lambda: [has_expired(connection, START_MS + day * DAY_MS) for day in range(8)])
    ask("definitions", lambda: [(row, reads.definition(row[0])) for row in reads.definitions()])
    ask("messages", reads.unclaimed_messages)
    ask("subscribers", lambda: (reads.subscribers(), reads.held(), reads.last_seq()))
    ask("owner", reads.owner)


def _loaded(found: Look, connection: Any, ids: list[str]) -> object:
    """An instance that is set aside is a refusal, whatever becomes of the others."""
    loaded = load(connection, ids, lambda no: _graph(no, definition_row(connection, no)))
    if not all(isinstance(one, Loaded) for one in loaded.values()):
        found.refuse("load")
    return {
        id_: (facts(one.instance), one.stored, one.posted, one.work) if isinstance(one, Loaded) else "set aside"
        for id_, one in loaded.items()
    }


@lru_cache(maxsize=64)
def _graph(no: int, row: tuple[str, int, str] | None) -> Graph:
    """As an owner gets it; what was compiled once is not compiled for each case."""
    return Definitions(lambda _no: row).graph(no)


def _ask_as_user(found: Look, reads: Reads, ids: list[str]) -> None:
    loaded = found.answers["instances"]
    aside = [id_ for id_ in ids if not isinstance(loaded, dict) or loaded.get(id_) in (None, "set aside")]
    found.ask("list", lambda: reads.page(Filter(), limit=MOST))
    found.ask("count", reads.count)
    found.ask("newest", lambda: [reads.newest(process.name) for process in PROCESSES])
    for id_ in ids:
        found.ask(f"history {id_}", partial(_history, reads, id_))
    for id_ in aside[:STATES]:
        found.ask(f"state {id_}", partial(_state, Path(reads.path), id_))


def _history(reads: Reads, id_: str) -> object:
    return steps_of(reads.history(id_))


def _state(path: Path, id_: str) -> object:
    """By a connection of its own: a thread that asks for the first time opens one for it."""
    with _reads(path) as reads:
        detail = reads.detail(id_)
        body, version = reads.definition(detail.definition) or ("", 0)
        return state_of(detail, Graph(decode_definition(body), version=version, no=detail.definition))


# --- helpers ----------------------------------------------------------------------------------------------------------


@contextmanager
def _reads(path: Path) -> Iterator[Reads]:
    readers = Readers(str(path), lambda: _opened(str(path)))
    try:
        yield Reads(readers)
    finally:
        readers.close()


def _opened(path: str) -> Database:
    """As a node opens its readers."""
    database = open_reader(path)
    try:
        check_latest(database, path)
    except BaseException:
        database.close()
        raise
    return database


def _place(error: Exception) -> str:
    """The innermost line of ours, or the whole way when there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "simulations" not in frame.filename and "understudy" in frame.filename]
    frame = (ours or list(frames))[-1]
    return f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
