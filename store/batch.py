"""A whole batch of commits as one SQL statement.

`sqlite3` gives up the GIL around every row that it steps through, and a busy thread of the host makes it wait for it
each time. One statement steps once. It is an INSERT into a TEMP view with one column for each section, a JSON array
of rows, and the view's trigger spreads the sections over the tables. A section of its own for each kind of row is
what keeps this cheap: SQLite parses a text anew for each use of it, and passes over a section that is NULL. The
trigger's guards (fenced, stale, missing) and the tables' constraints are the last line of defence: any of them takes
the whole batch back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import attrs
import msgspec

# For each table of an instance's rows: its key columns after `instance`, then the others, as the model has them.
COLUMNS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "scope": (("id",), ("parent", "node", "kind", "status", "host", "error")),
    "token": (
        ("id",),
        ("scope", "node", "came_by", "status", "mode", "attempt", "task", "lost", "tries", "undo", "since_ms"),
    ),
    "variable": (("scope", "name"), ("value",)),
    "wait": (("id",), ("group", "scope", "token", "node", "kind", "name", "key", "due_ms", "since_ms")),
    "undo": (("id",), ("scope", "node", "task", "given", "running")),
    "incident": (("id",), ("token", "node", "code", "detail", "since_ms")),
    "buffered": (("id",), ("name", "key", "payload", "expires_ms")),
}
# Written once, when the instance starts; then by every commit.
COLD: Final = (
    "no",
    "id",
    "definition",
    "given_digest",
    "title",
    "tags",
    "trigger",
    "by",
    "caused_by",
    "created_ms",
)
HOT: Final = (
    "version",
    "status",
    "runnable",
    "serial",
    "head",
    "digest",
    "checksum",
    "changed_ms",
    "outcome",
    "ending",
    "resting",
    "ended_ms",
    "error",
    "result",
)
# What the last hot columns are until the instance is paused, undone or ended: most commits need not carry them.
USUAL: Final = {
    "outcome": "NULL",
    "ending": "NULL",
    "resting": "'pending'",
    "ended_ms": "NULL",
    "error": "''",
    "result": "''",
}
BRIEF: Final = HOT[: -len(USUAL)]
HISTORY: Final = (
    "seq",
    "instance",
    "n",
    "prev",
    "at_ms",
    "epoch",
    "events",
    "digest",
)
MESSAGE: Final = (
    "no",
    "name",
    "key",
    "payload",
    "expires_ms",
)
REQUEST: Final = (
    "key",
    "digest",
    "answer",
    "expires_ms",
)
SECTIONS: Final = (
    "new",
    "moved",
    "turned",
    *(section for table in COLUMNS for section in (table, f"no_{table}")),
    "history",
    "request",
    "taken_work",
    "message",
    "consumed",
    "match",
)
PREFIX: Final = "understudy_"  # Of everything TEMP that is ours: a user's tables in the same file have plain names.

_ENCODER = msgspec.json.Encoder()
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Unwritable(ValueError):
    """SQLite would store another text than it is given."""


class Batch:
    """The rows of one statement, section by section."""

    __slots__ = ("match", "sections")

    def __init__(self) -> None:
        self.sections: dict[str, list[Any]] = {}
        self.match: dict[tuple[str, str], int] = {}  # How many messages of a name and key may find a wait now, at most.

    def add(self, section: str, row: Any) -> None:
        rows = self.sections.get(section)
        if rows is None:
            self.sections[section] = [row]
        else:
            rows.append(row)

    def expect(self, name: str, key: str) -> None:
        """There is one more message of this name and key without a wait, or one more wait without a message."""
        self.match[name, key] = self.match.get((name, key), 0) + 1

    def parameters(self, epoch: int, now_ms: int) -> tuple[Any, ...]:
        """What `WRITE` takes."""
        sections = self.sections
        if self.match:
            sections["match"] = [(name, key, most) for (name, key), most in self.match.items()]
        texts = (_text(sections[section]) if section in sections else None for section in SECTIONS)
        return (epoch, now_ms, *texts)


def _text(rows: list[Any]) -> str:
    text = _ENCODER.encode(rows).decode()
    if "\\u0000" in text and _NUL.search(text):
        raise Unwritable("SQLite cuts a text in JSON at a NUL character; replace it")
    return text


@attrs.frozen
class Part:
    """Some sections, and the statements of a trigger that writes them."""

    name: str
    sections: tuple[str, ...]
    statements: tuple[str, ...]


def parts() -> Iterator[Part]:
    """All that a batch may write, in the order in which it is written."""
    yield Part("new", ("new",), (_insert("instance", "new", [*COLD, *HOT]),))
    yield Part("moved", ("moved",), (_update("moved", BRIEF), _all_changed("moved", "stale")))
    yield Part("turned", ("turned",), (_update("turned", HOT), _all_changed("turned", "stale")))
    for table in COLUMNS:
        yield Part(table, (table, f"no_{table}"), (_upsert(table), _delete(table)))
    yield Part("history", ("history",), (_insert("history", "history", HISTORY),))
    yield Part("request", ("request",), (_insert("request", "request", REQUEST),))
    yield Part("work", ("taken_work",), (_take_work(), _all_changed("taken_work", "missing")))
    yield Part("leftovers", ("turned",), (_drop_work(),))
    yield Part("message", ("message",), (_insert("message", "message", MESSAGE),))
    yield Part("consumed", ("consumed",), (_consume(), _all_changed("consumed", "missing")))
    yield Part("matching", ("no_wait", "match"), (_free(), *_match()))


WRITE: Final = f"INSERT INTO temp.{PREFIX}batch VALUES ({', '.join('?' * (len(SECTIONS) + 2))})"
MATCHED: Final = f"""
SELECT i.id, p.message, p.wait, m.payload
FROM temp.{PREFIX}matched p CROSS JOIN message m ON m.no = p.message CROSS JOIN instance i ON i.no = p.instance
"""


@functools.cache
def statements() -> tuple[str, ...]:
    """What a connection needs once before `WRITE` writes batches on it, and `MATCHED` reads what was matched."""
    return tuple(_statements())


def _statements() -> Iterator[str]:
    yield f"CREATE TEMP TABLE {PREFIX}matched (message INTEGER, instance INTEGER, wait INTEGER)"
    yield from _view("pair", ("name", "key", "most", "now_ms"), (_pair(),))
    calls = [_fence()]
    for part in parts():
        columns = ("now_ms", *part.sections)
        given = " OR ".join(f'NEW."{section}" IS NOT NULL' for section in part.sections)
        yield from _view(part.name, columns, part.statements, when=given)
        calls.append(f"INSERT INTO {PREFIX}{part.name} VALUES ({_of_new(columns)})")
    yield from _view("batch", ("epoch", "now_ms", *SECTIONS), calls)


def _view(name: str, columns: Sequence[str], actions: Iterable[str], *, when: str = "true") -> Iterator[str]:
    """A view that runs statements for each row that is inserted into it.

    The condition stands here and not in a SELECT that inserts: for that SQLite would make a table of its rows first.
    """
    nulls = ", ".join("NULL" for _ in columns)
    body = " ".join(f"{action.strip()};" for action in actions)
    yield f"CREATE TEMP VIEW {PREFIX}{name} ({_quoted(columns)}) AS SELECT {nulls} WHERE 0"
    yield f"CREATE TEMP TRIGGER {PREFIX}{name}_insert INSTEAD OF INSERT ON {PREFIX}{name} WHEN {when} BEGIN {body} END"


def _quoted(columns: Iterable[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


def _of_new(columns: Iterable[str]) -> str:
    return ", ".join(f'NEW."{column}"' for column in columns)


def _at(*path: int) -> str:
    return f"json_extract(j.value, '${''.join(f'[{index}]' for index in path)}')"


def _each(section: str) -> str:
    return f'json_each(NEW."{section}") j'


# --- guards -----------------------------------------------------------------------------------------------------------


def _fence() -> str:
    return """SELECT RAISE(ABORT, 'fenced')
    WHERE NOT EXISTS (SELECT 1 FROM owner WHERE partition = 0 AND epoch = NEW.epoch)"""


def _all_changed(section: str, reason: str) -> str:
    """Every row of the section has changed exactly one row of the table."""
    return f"SELECT RAISE(ABORT, '{reason}') WHERE changes() <> coalesce(json_array_length(NEW.\"{section}\"), 0)"


# --- rows -------------------------------------------------------------------------------------------------------------


def _insert(table: str, section: str, columns: Sequence[str]) -> str:
    values = ", ".join(_at(n) for n in range(len(columns)))
    if table in ("instance", "history"):
        columns, values = [*columns, "partition"], f"{values}, 0"
    return f'INSERT INTO "{table}" ({_quoted(columns)}) SELECT {values} FROM {_each(section)}'


def _update(section: str, columns: Sequence[str]) -> str:
    """Each row: the instance's number, the version it was decided on, then the columns; the others are as usual."""
    values = {**USUAL, **{column: _at(n) for n, column in enumerate(columns, 2)}}
    changes = ", ".join(f'"{column}" = {value}' for column, value in values.items())
    return f"""UPDATE instance SET {changes} FROM {_each(section)}
    WHERE instance.no = {_at(0)} AND instance.version = {_at(1)}"""


def _upsert(table: str) -> str:
    """Each row: the instance's number, then the row as the model has it."""
    key, others = COLUMNS[table]
    columns = ["instance", *key, *others]
    values = ", ".join([_at(0), *(_at(1, n) for n in range(len(columns) - 1))])
    changes = ", ".join(f'"{column}" = excluded."{column}"' for column in others)
    return f"""INSERT INTO "{table}" ({_quoted(columns)}) SELECT {values} FROM {_each(table)} WHERE true
    ON CONFLICT ({_quoted(["instance", *key])}) DO UPDATE SET {changes}"""


def _delete(table: str) -> str:
    key, _others = COLUMNS[table]
    columns = ["instance", *key]
    values = ", ".join(_at(n) for n in range(len(columns)))
    return f'DELETE FROM "{table}" WHERE ({_quoted(columns)}) IN (SELECT {values} FROM {_each(f"no_{table}")})'


def _take_work() -> str:
    return f"DELETE FROM work WHERE (instance, task) IN (SELECT {_at(0)}, {_at(1)} FROM {_each('taken_work')})"


def _drop_work() -> str:
    """What was recorded and not used goes with its instance."""
    return f"""DELETE FROM work WHERE instance IN (
      SELECT {_at(0)} FROM {_each("turned")} WHERE {_at(HOT.index("status") + 2)} = 'ended')"""


# --- messages ---------------------------------------------------------------------------------------------------------


def _consume() -> str:
    """Each row: the message's number, and the instance to which it must be assigned."""
    return f"""DELETE FROM message WHERE no IN (
      SELECT m.no FROM {_each("consumed")} CROSS JOIN message m ON m.no = {_at(0)} AND m.instance = {_at(1)})"""


def _free() -> str:
    """A message whose wait went without it is there for others again."""
    return f"""UPDATE message SET instance = NULL, wait = NULL WHERE no IN (
      SELECT m.no FROM {_each("no_wait")} CROSS JOIN message m ON m.instance = {_at(0)} AND m.wait = {_at(1)})"""


def _match() -> tuple[str, ...]:
    return (
        f"DELETE FROM {PREFIX}matched",
        f"""INSERT INTO {PREFIX}pair SELECT {_at(0)}, {_at(1)}, {_at(2)}, NEW.now_ms FROM {_each("match")}""",
        f"""UPDATE message SET instance = p.instance, wait = p.wait FROM {PREFIX}matched p
        WHERE message.no = p.message""",
    )


def _pair() -> str:
    """Of one name and key: the oldest messages to the oldest waits.

    After every batch one side or the other is empty, so that the next one has no more pairs than it brings messages
    and waits: the limit keeps the cost at that, however many are there already.
    """
    return f"""INSERT INTO {PREFIX}matched SELECT m.no, w.instance, w.id FROM (
      SELECT no, row_number() OVER (ORDER BY no) AS place FROM (
        SELECT no FROM message WHERE name = NEW.name AND key = NEW.key AND instance IS NULL
        AND (expires_ms IS NULL OR expires_ms > NEW.now_ms) ORDER BY no LIMIT NEW.most)) m
    JOIN (
      SELECT instance, id, row_number() OVER (ORDER BY since_ms, instance, id) AS place FROM (
        SELECT w.since_ms, w.instance, w.id FROM wait w WHERE w.kind = 'message' AND w.name = NEW.name
        AND w.key = NEW.key AND NOT EXISTS (SELECT 1 FROM message t WHERE t.instance = w.instance AND t.wait = w.id)
        ORDER BY w.since_ms, w.instance, w.id LIMIT NEW.most)) w
    ON m.place = w.place"""
