"""A whole batch of commits as one SQL statement with one JSON parameter.

`sqlite3` gives up the GIL around every row that it steps through, and a busy thread of the host makes it wait for it
each time. One statement steps once. It is an INSERT into a TEMP view whose trigger spreads the parameter over the
tables; the trigger's guards (fenced, stale, missing) and the tables' constraints are the last line of defence: any of
them takes the whole batch back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

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
    "outcome",
    "ending",
    "resting",
    "runnable",
    "serial",
    "head",
    "digest",
    "checksum",
    "changed_ms",
    "ended_ms",
    "error",
    "result",
)
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

_ENCODER = msgspec.json.Encoder()


class Batch:
    """The rows of one statement, section by section."""

    __slots__ = ("match", "sections")

    def __init__(self) -> None:
        self.sections: dict[str, list[Any]] = {}
        self.match: dict[tuple[str, str], None] = {}  # Names and keys whose messages and waits are to be matched anew.

    def add(self, section: str, row: Any) -> None:
        rows = self.sections.get(section)
        if rows is None:
            self.sections[section] = [row]
        else:
            rows.append(row)

    def body(self, epoch: int, now_ms: int) -> str:
        document: dict[str, Any] = {"epoch": epoch, "now": now_ms, **self.sections}
        if self.match:
            document["match"] = list(self.match)
        return _ENCODER.encode(document).decode()


def statements() -> tuple[str, ...]:
    """What makes the view and its trigger on a connection; `WRITE` then writes a batch."""
    return (
        "CREATE TEMP VIEW batch(body) AS SELECT NULL WHERE 0",
        f"CREATE TEMP TRIGGER batch_apply INSTEAD OF INSERT ON batch BEGIN {_trigger()} END",
    )


WRITE: Final = "INSERT INTO temp.batch(body) VALUES (?)"

MATCHED: Final = """
SELECT m.no, m.wait, m.payload, i.id
FROM json_each(?) p
CROSS JOIN message m ON m.name = json_extract(p.value, '$[0]') AND m.key = json_extract(p.value, '$[1]')
CROSS JOIN instance i ON i.no = m.instance
"""


def _trigger() -> str:
    parts = [_fence(), _insert("instance", "new", [*COLD, *HOT]), *_updates()]
    for table in COLUMNS:
        parts += [_upsert(table), _delete(table)]
    parts += [
        _insert("history", "history", HISTORY),
        *_messages(),
        _insert("request", "request", REQUEST),
        *_work(),
    ]
    return " ".join(part.strip().rstrip(";") + ";" for part in parts)


def _fence() -> str:
    return """
    SELECT RAISE(ABORT, 'fenced') WHERE NOT EXISTS (
      SELECT 1 FROM owner WHERE partition = 0 AND epoch = json_extract(NEW.body, '$.epoch'))"""


def _at(path: str, *, row: str = "j.value") -> str:
    return f"json_extract({row}, '$[{path}]')" if path.isdigit() else f"json_extract({row}, '$.{path}')"


def _each(section: str) -> str:
    return f"json_each(NEW.body, '$.{section}') j"


def _quoted(columns: Any) -> str:
    return ", ".join(f'"{column}"' for column in columns)


def _insert(table: str, section: str, columns: Sequence[str]) -> str:
    values = ", ".join(_at(str(n)) for n in range(len(columns)))
    if table in ("instance", "history"):
        columns, values = [*columns, "partition"], f"{values}, 0"
    return f'INSERT INTO "{table}" ({_quoted(columns)}) SELECT {values} FROM {_each(section)}'


def _updates() -> list[str]:
    """Each row: the instance's number, the version it was decided on, then the hot columns."""
    columns = ", ".join(f'"{column}" = {_at(str(n))}' for n, column in enumerate(HOT, 2))
    return [
        f"""UPDATE instance SET {columns} FROM {_each("moved")}
        WHERE instance.no = {_at("0")} AND instance.version = {_at("1")}""",
        """SELECT RAISE(ABORT, 'stale') WHERE changes() <> coalesce(json_array_length(NEW.body, '$.moved'), 0)
        AND json_array_length(NEW.body, '$.moved') > 0""",
    ]


def _upsert(table: str) -> str:
    """Each row: the instance's number, then the row as the model has it."""
    key, others = COLUMNS[table]
    columns = ["instance", *key, *others]
    values = ", ".join([_at("0"), *(f"json_extract(j.value, '$[1][{n}]')" for n in range(len(columns) - 1))])
    changes = ", ".join(f'"{column}" = excluded."{column}"' for column in others)
    return f"""
    INSERT INTO "{table}" ({_quoted(columns)}) SELECT {values} FROM {_each(table)} WHERE true
    ON CONFLICT ({_quoted(["instance", *key])}) DO UPDATE SET {changes}"""


def _delete(table: str) -> str:
    key, _others = COLUMNS[table]
    columns = ["instance", *key]
    values = ", ".join(_at(str(n)) for n in range(len(columns)))
    return f'DELETE FROM "{table}" WHERE ({_quoted(columns)}) IN (SELECT {values} FROM {_each("no_" + table)})'


def _messages() -> list[str]:
    """Consumed ones go, those whose wait went first are free again, and what fits is matched, oldest to oldest."""
    pair = "json_each(NEW.body, '$.match') p"
    name, key = "json_extract(p.value, '$[0]')", "json_extract(p.value, '$[1]')"
    return [
        _insert("message", "message", MESSAGE),
        f"""DELETE FROM message
        WHERE no IN (SELECT {_at("0")} FROM {_each("consumed")} WHERE message.instance = {_at("1")})""",
        """SELECT RAISE(ABORT, 'missing') WHERE changes() <> coalesce(json_array_length(NEW.body, '$.consumed'), 0)
        AND json_array_length(NEW.body, '$.consumed') > 0""",
        f"""UPDATE message SET instance = NULL, wait = NULL
        WHERE (instance, wait) IN (SELECT {_at("0")}, {_at("1")} FROM {_each("no_wait")})""",
        f"""UPDATE message SET instance = pairs.instance, wait = pairs.wait FROM (
          SELECT m.no AS no, w.instance AS instance, w.id AS wait FROM (
            SELECT m.no, m.name, m.key, row_number() OVER (PARTITION BY m.name, m.key ORDER BY m.no) AS rank
            FROM {pair} CROSS JOIN message m ON m.name = {name} AND m.key = {key}
            WHERE m.instance IS NULL AND (m.expires_ms IS NULL OR m.expires_ms > json_extract(NEW.body, '$.now'))) m
          JOIN (
            SELECT w.instance, w.id, w.name, w.key,
              row_number() OVER (PARTITION BY w.name, w.key ORDER BY w.since_ms, w.instance, w.id) AS rank
            FROM {pair} CROSS JOIN wait w ON w.name = {name} AND w.key = {key} AND w.kind = 'message'
            WHERE NOT EXISTS (SELECT 1 FROM message t WHERE t.instance = w.instance AND t.wait = w.id)) w
          ON m.name = w.name AND m.key = w.key AND m.rank = w.rank) pairs
        WHERE message.no = pairs.no""",
    ]


def _work() -> list[str]:
    return [
        f"DELETE FROM work WHERE (instance, task) IN (SELECT {_at('0')}, {_at('1')} FROM {_each('taken_work')})",
        """SELECT RAISE(ABORT, 'missing') WHERE changes() <> coalesce(json_array_length(NEW.body, '$.taken_work'), 0)
        AND json_array_length(NEW.body, '$.taken_work') > 0""",
    ]
