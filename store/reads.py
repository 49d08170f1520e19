"""What people and programs may know of instances, read from committed rows. Nothing here writes, and nothing here
asks an actor.

Every list is paged by key: a page is found by an index however far it is from the first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec
import peewee

from understudy.model.errors import Damaged, UnknownInstance
from understudy.model.events import Entry
from understudy.model.instance import Fault, Incident, Scope, Token, Undo, Wait
from understudy.store.batch import COLUMNS
from understudy.store.commit import chain_digest
from understudy.store.connection import Database, explained
from understudy.store.schema import DefinitionRow, IncidentRow, InstanceRow

_ENTRIES = msgspec.json.Decoder(list[Entry])
_FAULT = msgspec.json.Decoder(Fault)
_LEARNED = [msgspec.json.Decoder(kind) for kind in (Incident, Scope, Token, Undo, Wait)]  # As in `model.kinds`.


@attrs.frozen(kw_only=True)
class Summary:
    """An instance in a list."""

    no: int
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
    fault: Fault | None
    result: str  # Encoded; empty while there is none.
    incidents: int


@attrs.frozen(kw_only=True)
class Detail:
    """An instance with its live rows."""

    summary: Summary
    definition: int
    head: int
    digest: str
    tokens: tuple[Token, ...]
    scopes: tuple[Scope, ...]
    waits: tuple[Wait, ...]
    incidents: tuple[Incident, ...]
    undos: tuple[Undo, ...]
    variables: dict[str, str]  # Encoded.
    buffered: int


@attrs.frozen(kw_only=True)
class Filter:
    """Which instances a list shows; what is not given is not asked."""

    process: str = ""
    status: str = ""
    outcome: str = ""
    with_incident: bool = False
    tag: tuple[str, str] | None = None
    text: str = ""  # In the id or the title.
    open_only: bool = False


class Record(msgspec.Struct, frozen=True):
    """One row of history."""

    seq: int
    instance: int
    n: int
    prev: int
    at_ms: int
    epoch: int
    events: str
    digest: str

    @property
    def entries(self) -> list[Entry]:
        with _sound(f"commit {self.n} of instance {self.instance}"):
            return _ENTRIES.decode(self.events)


@contextlib.contextmanager
def _sound(what: str) -> Iterator[None]:
    """Whatever cannot be decoded was not written by us as it stands there."""
    try:
        yield
    except (msgspec.MsgspecError, TypeError, UnicodeError, ValueError) as error:
        raise Damaged(f"{what} cannot be read ({error}); run `understudy audit`, then restore a backup") from error


class Readers:
    """A read-only connection for each thread that asks."""

    def __init__(self, path: str, open_: Callable[[], Database]) -> None:
        self.path = path
        self._open = open_
        self._own = threading.local()
        self._all: weakref.WeakSet[Database] = weakref.WeakSet()
        self._lock = threading.Lock()

    def database(self) -> Database:
        seat: _Seat | None = getattr(self._own, "seat", None)
        if seat is None or seat.database.is_closed():
            seat = self._own.seat = _Seat(self._open())
            with self._lock:
                self._all.add(seat.database)
        return seat.database

    def close(self) -> None:
        with self._lock:
            databases = list(self._all)
            self._all.clear()
        for database in databases:
            database.close()


class _Seat:
    """A thread's connection, which is closed when the thread has ended."""

    def __init__(self, database: Database) -> None:
        self.database = database
        weakref.finalize(self, _close, database, os.getpid())


_not_ours: list[Database] = []  # A forked child has copies of its parent's connections, which it must never close.


def _close(database: Database, maker: int) -> None:
    if os.getpid() == maker:
        database.close()
    else:
        _not_ours.append(database)


class Reads:
    """The questions."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    @property
    def path(self) -> str:
        return self._readers.path

    def connection(self) -> Any:
        """The calling thread's connection, for reads that have no question of their own here."""
        return self._readers.database().connection()

    def rows(self, statement: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        """The rows that a statement gives."""
        with explained(self._readers.path):
            rows: list[Any] = self._readers.database().connection().execute(statement, parameters).fetchall()
        return rows

    def _query(self, query: Any) -> list[Any]:
        with explained(self._readers.path):
            return list(query.tuples().execute(self._readers.database()))

    # --- instances ---

    def find(self, id_: str) -> Summary | None:
        rows = self.rows(_summary_by_id(), (id_,))
        return _summary(rows[0]) if rows else None

    def summary(self, id_: str) -> Summary:
        found = self.find(id_)
        if found is None:
            raise UnknownInstance(f"there is no instance {id_!r} in {self._readers.path}; `understudy list` shows all")
        return found

    def page(self, which: Filter, *, limit: int = 50, before: int | None = None) -> list[Summary]:
        """Newest first; `before` is the `no` of the last one of the page before."""
        query = _summaries().order_by(InstanceRow.no.desc()).limit(limit)
        if before is not None:
            query = query.where(InstanceRow.no < before)
        for condition in _conditions(which):
            query = query.where(condition)
        return [_summary(row) for row in self._query(query)]

    def count(self) -> dict[str, int]:
        """How many instances there are, by status or outcome."""
        rows = self.rows("SELECT coalesce(outcome, status), count(*) FROM instance GROUP BY 1 ORDER BY 1")
        return dict(rows)

    def detail(self, id_: str) -> Detail:
        database = self._readers.database()
        with explained(self._readers.path):
            connection = database.connection()
            own_transaction = not connection.in_transaction
            if own_transaction:
                connection.execute("BEGIN")  # All rows of one moment.
            try:
                return self._detail(id_)
            finally:
                if own_transaction:
                    connection.execute("ROLLBACK")

    def _detail(self, id_: str) -> Detail:
        summary = self.summary(id_)
        definition, head, digest = self.rows(
            "SELECT definition, head, digest FROM instance WHERE no = ?", (summary.no,)
        )[0]
        variables = self.rows("SELECT name, value FROM variable WHERE instance = ? ORDER BY scope, name", (summary.no,))
        return Detail(
            summary=summary,
            definition=definition,
            head=head,
            digest=digest,
            tokens=self._of("token", Token, summary.no),
            scopes=self._of("scope", Scope, summary.no),
            waits=self._of("wait", Wait, summary.no),
            incidents=self._of("incident", Incident, summary.no),
            undos=self._of("undo", Undo, summary.no),
            variables=dict(variables),
            buffered=self.rows("SELECT count(*) FROM buffered WHERE instance = ?", (summary.no,))[0][0],
        )

    def _of(self, table: str, kind: Any, no: int) -> tuple[Any, ...]:
        key, others = COLUMNS[table]
        columns = ", ".join(f'"{column}"' for column in (*key, *others))
        order = ", ".join(f'"{column}"' for column in key)
        rows = self.rows(f'SELECT {columns} FROM "{table}" WHERE instance = ? ORDER BY {order}', (no,))
        with _sound(f"a row of {table}"):
            return tuple(msgspec.convert(list(row), kind) for row in rows)

    # --- definitions ---

    def definition(self, no: int) -> tuple[str, int] | None:
        """A definition's body and version."""
        rows = self.rows("SELECT body, version FROM definition WHERE no = ?", (no,))
        return rows[0] if rows else None

    def definitions(self) -> list[tuple[int, str, int, str]]:
        """All of them: number, name, version, digest."""
        return self.rows("SELECT no, name, version, digest FROM definition ORDER BY name, version")

    def newest(self, name: str) -> tuple[int, int, str] | None:
        """The newest definition of a name: number, version, body."""
        rows = self.rows(
            "SELECT no, version, body FROM definition WHERE name = ? ORDER BY version DESC LIMIT 1", (name,)
        )
        return rows[0] if rows else None

    # --- history ---

    def history(self, id_: str, *, limit: int | None = None, before: int | None = None) -> list[Record]:
        """An instance's commits, oldest first. With a limit the newest ones, or those before the row of a `seq`."""
        rows = self.rows(_CHAIN, (id_, before, -1 if limit is None else limit))
        return [Record(*row) for row in reversed(rows)]

    def check_chain(self, id_: str) -> list[Record]:
        """The whole history, after its digests were recomputed."""
        records = self.history(id_)
        previous = ""
        for number, record in enumerate(records, 1):
            expected = chain_digest(previous, id_, record.n, record.at_ms, record.epoch, record.events)
            if record.n != number or record.digest != expected:
                raise Damaged(f"history of {id_}: row {record.n} is not what was written; restore a backup")
            previous = record.digest
        return records

    def after(self, cursor: int, limit: int) -> list[tuple[Record, str]]:
        """All commits of all instances behind a cursor, in the one sequence, with the instances' ids."""
        rows = self.rows(
            "SELECT h.seq, h.instance, h.n, h.prev, h.at_ms, h.epoch, h.events, h.digest, i.id "
            "FROM history h JOIN instance i ON i.no = h.instance WHERE h.seq > ? ORDER BY h.seq LIMIT ?",
            (cursor, limit),
        )
        return [(Record(*row[:8]), row[8]) for row in rows]

    def last_seq(self) -> int:
        return int(self.rows("SELECT coalesce(max(seq), 0) FROM history")[0][0])

    # --- messages, subscribers, owner ---

    def unclaimed_messages(self, *, limit: int = 100, after: int = 0) -> list[tuple[int, str, str, int | None]]:
        """Published messages that nobody waits for: number, name, key, expiry; `after` is the last number before."""
        return self.rows(
            "SELECT no, name, key, expires_ms FROM message WHERE instance IS NULL AND no > ? ORDER BY no LIMIT ?",
            (after, limit),
        )

    def cursor(self, subscriber: str) -> int | None:
        rows = self.rows("SELECT cursor FROM subscriber WHERE name = ? AND partition = 0", (subscriber,))
        return int(rows[0][0]) if rows else None

    def subscribers(self) -> list[tuple[str, int]]:
        return self.rows("SELECT name, cursor FROM subscriber ORDER BY name")

    def held(self, subscriber: str | None = None) -> list[tuple[str, int, str, int, int, int | None, str]]:
        """Deliveries held back: subscriber, instance's number and id, first row, tries, due, error."""
        return self.rows(
            "SELECT d.subscriber, d.instance, i.id, d.seq, d.tries, d.due_ms, d.error FROM held d JOIN instance i "
            "ON i.no = d.instance WHERE ?1 IS NULL OR d.subscriber = ?1 ORDER BY d.subscriber, d.instance",
            (subscriber,),
        )

    def rows_of(self, instance: int, from_seq: int, until_seq: int) -> list[Record]:
        """An instance's commits between two places of the sequence, oldest first."""
        rows = self.rows(_BETWEEN, (instance, from_seq, until_seq))
        return [Record(*row) for row in reversed(rows)]

    def owner(self) -> tuple[str, int, int]:
        """Holder, epoch, beat."""
        row = self.rows("SELECT holder, epoch, beat FROM owner WHERE partition = 0")[0]
        return row[0], row[1], row[2]

    def ids(self, *, page: int = 1_000) -> Iterator[str]:
        """All instances, oldest first, page by page."""
        after = 0
        while True:
            rows = self.rows("SELECT no, id FROM instance WHERE no > ? ORDER BY no LIMIT ?", (after, page))
            yield from (row[1] for row in rows)
            if len(rows) < page:
                return
            after = rows[-1][0]


_CHAIN = """
WITH RECURSIVE chain(seq, instance, n, prev, at_ms, epoch, events, digest) AS (
  SELECT h.seq, h.instance, h.n, h.prev, h.at_ms, h.epoch, h.events, h.digest
  FROM instance i
  JOIN history h ON h.seq = CASE WHEN ?2 IS NULL THEN i.head ELSE (SELECT b.prev FROM history b WHERE b.seq = ?2) END
  WHERE i.id = ?1 AND h.instance = i.no
  UNION ALL
  SELECT h.seq, h.instance, h.n, h.prev, h.at_ms, h.epoch, h.events, h.digest
  FROM chain c JOIN history h ON h.seq = c.prev AND h.instance = c.instance WHERE c.prev > 0)
SELECT * FROM chain LIMIT ?3
"""
_BETWEEN = """
WITH RECURSIVE chain(seq, instance, n, prev, at_ms, epoch, events, digest) AS (
  SELECT h.seq, h.instance, h.n, h.prev, h.at_ms, h.epoch, h.events, h.digest
  FROM instance i JOIN history h ON h.seq = i.head WHERE i.no = ?1
  UNION ALL
  SELECT h.seq, h.instance, h.n, h.prev, h.at_ms, h.epoch, h.events, h.digest
  FROM chain c JOIN history h ON h.seq = c.prev WHERE c.prev >= ?2)
SELECT * FROM chain WHERE seq >= ?2 AND seq <= ?3
"""


@functools.cache
def _summary_by_id() -> str:
    """Made once: to put the question together takes longer than to answer it."""
    statement: str = _summaries().where(InstanceRow.id == "").sql()[0]
    return statement


def _summaries() -> Any:
    i, d = InstanceRow, DefinitionRow
    incidents = IncidentRow.select(peewee.fn.COUNT(IncidentRow.id)).where(IncidentRow.instance == i.no)
    return i.select(
        i.no, i.id, d.name, d.version, i.status, i.outcome, i.version, i.title, i.tags, i.trigger, i.by, i.caused_by,
        i.created_ms, i.changed_ms, i.ended_ms, i.error, i.result, incidents,
    ).join(d, on=(i.definition == d.no))  # fmt: skip


def _summary(row: tuple[Any, ...]) -> Summary:
    with _sound(f"instance {row[1]}"):
        return _made(row)


def _made(row: tuple[Any, ...]) -> Summary:
    return Summary(
        no=row[0],
        id=row[1],
        process=row[2],
        process_version=row[3],
        status=row[4],
        outcome=row[5],
        version=row[6],
        title=row[7],
        tags=msgspec.json.decode(row[8]),
        trigger=row[9],
        by=row[10],
        caused_by=row[11],
        created_ms=row[12],
        changed_ms=row[13],
        ended_ms=row[14],
        fault=_FAULT.decode(row[15]) if row[15] else None,
        result=row[16],
        incidents=row[17],
    )


def _conditions(which: Filter) -> list[Any]:
    i = InstanceRow
    found: list[Any] = []
    if which.process:
        found.append(DefinitionRow.name == which.process)
    if which.status:
        found.append(i.status == which.status)
    if which.outcome:
        found.append(i.outcome == which.outcome)
    if which.open_only:
        found.append(i.outcome.is_null())
    if which.with_incident:
        found.append(i.no.in_(IncidentRow.select(IncidentRow.instance)))
    if which.tag is not None:
        found.append(peewee.SQL('EXISTS (SELECT 1 FROM json_each("t1"."tags") WHERE key = ? AND value = ?)', which.tag))
    if which.text:
        found.append(i.id.contains(which.text) | i.title.contains(which.text))
    return found
