"""Reading whole instances back.

All waiting activations are read by one statement that returns one JSON row: reads suffer from the GIL as writes do.
What is read is checked before anybody acts on it: the rows against their checksum, the head of history against its
digest. What does not fit is `Damaged`, for that instance alone: when a statement or its answer fails as a whole, its
halves are read, and their halves.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from understudy.model.definition import Graph
from understudy.model.errors import Damaged, UnderstudyError
from understudy.model.instance import Buffered, Incident, Instance, Scope, Token, Undo, Variable, Wait
from understudy.model.states import Outcome, Status, TokenStatus
from understudy.store.batch import COLUMNS
from understudy.store.commit import Stored, chain_digest, checksum, rows_sum
from understudy.store.schema import PARTITION

GraphOf = Callable[[int], Graph]  # A definition's number to its graph.


class Head(msgspec.Struct, frozen=True, array_like=True):
    n: int
    at_ms: int
    epoch: int
    events: str
    digest: str
    previous: str


class Posted(msgspec.Struct, frozen=True, array_like=True):
    """A published message that was matched to a wait of the instance and has not been consumed."""

    no: int
    wait: int
    payload: str


class Work(msgspec.Struct, frozen=True, array_like=True):
    """The recorded result of a transactional task."""

    task: int
    attempt: int
    result: str


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An instance as the statement returns it."""

    wanted: str  # The id under which the index has it.
    no: int
    partition: int
    id: str
    definition: int
    given_digest: str
    title: str
    tags: str
    trigger: str
    by: str
    caused_by: str
    created_ms: int
    status: Status
    outcome: Outcome | None
    ending: Outcome | None
    resting: Status
    runnable: int
    version: int
    serial: int
    head: int
    digest: str
    checksum: int
    changed_ms: int
    ended_ms: int | None
    error: str
    result: str
    top: Head | None
    scope: list[Scope]
    token: list[Token]
    variable: list[Variable]
    wait: list[Wait]
    undo: list[Undo]
    incident: list[Incident]
    buffered: list[Buffered]
    posted: list[Posted]
    work: list[Work]


class Loaded(msgspec.Struct):
    """An instance read from the store, checked, and what of it is outstanding outside its own rows."""

    instance: Instance
    graph: Graph
    stored: Stored
    posted: list[Posted]
    work: list[Work]


def _array(table: str) -> str:
    key, others = COLUMNS[table]
    columns = ", ".join(f't."{column}"' for column in (*key, *others))
    order = ", ".join(f't."{column}"' for column in key)
    return (
        f'(SELECT json_group_array(json_array({columns})) FROM (SELECT * FROM "{table}" t '
        f"WHERE t.instance = i.no ORDER BY {order}) t)"
    )


_OWN = (
    "no",
    "partition",
    "id",
    "definition",
    "given_digest",
    "title",
    "tags",
    "trigger",
    "by",
    "caused_by",
    "created_ms",
    "status",
    "outcome",
    "ending",
    "resting",
    "runnable",
    "version",
    "serial",
    "head",
    "digest",
    "checksum",
    "changed_ms",
    "ended_ms",
    "error",
    "result",
)
_HEAD = """(SELECT json_array(h.n, h.at_ms, h.epoch, h.events, h.digest,
  coalesce((SELECT p.digest FROM history p WHERE p.seq = h.prev), ''))
  FROM history h WHERE h.seq = i.head AND h.instance = i.no AND h.partition = i.partition)"""
_POSTED = """(SELECT json_group_array(json_array(m.no, m.wait, m.payload)) FROM message m
  WHERE m.instance = i.no AND m.wait IS NOT NULL)"""
_WORK = "(SELECT json_group_array(json_array(w.task, w.attempt, w.result)) FROM work w WHERE w.instance = i.no)"


def _columns() -> str:
    parts = [
        "j.value",
        *(f'i."{column}"' for column in _OWN),
        f"json({_HEAD})",
        *(f"json({_array(table)})" for table in COLUMNS),
        f"json({_POSTED})",
        f"json({_WORK})",
    ]
    return ", ".join(parts)


# As a blob, because a text with a flipped bit may not be UTF-8, and `sqlite3` would refuse it all.
LOAD = f"""
SELECT CAST(json_group_array(json_array({_columns()})) AS BLOB)
FROM json_each(?) j CROSS JOIN instance i ON i.id = j.value
"""
_DECODER = msgspec.json.Decoder(list[Row])
_TAGS = msgspec.json.Decoder(dict[str, str])


def definition_row(connection: Any, no: int) -> tuple[str, int, str] | None:
    """A definition's body, version and digest."""
    row = connection.execute("SELECT body, version, digest FROM definition WHERE no = ?", (no,)).fetchone()
    return None if row is None else (row[0], row[1], row[2])


def load(connection: Any, ids: Sequence[str], graph_of: GraphOf) -> dict[str, Loaded | Damaged]:
    """The instances of these ids; an id that is not there is not in the answer."""
    try:
        answer = connection.execute(LOAD, (msgspec.json.encode(list(ids)).decode(),)).fetchone()[0]
        rows = _DECODER.decode(answer)
    except (sqlite3.DatabaseError, msgspec.DecodeError, UnicodeDecodeError) as error:
        if isinstance(error, sqlite3.OperationalError) and "JSON" not in str(error):
            raise  # The file cannot be read now, which says nothing about what is in it.
        return _halves(connection, ids, graph_of, error)
    return {row.wanted: _checked(row, graph_of) for row in rows}


def _halves(connection: Any, ids: Sequence[str], graph_of: GraphOf, error: Exception) -> dict[str, Loaded | Damaged]:
    """Find out who is damaged, and read the others."""
    if len(ids) == 1:
        return {ids[0]: Damaged(f"the rows of {ids[0]} cannot be read ({error}); run `understudy audit`")}
    middle = len(ids) // 2
    return {**load(connection, ids[:middle], graph_of), **load(connection, ids[middle:], graph_of)}


def _checked(row: Row, graph_of: GraphOf) -> Loaded | Damaged:
    try:
        return _build(row, graph_of(row.definition))
    except Damaged as error:
        return error
    except (UnderstudyError, msgspec.DecodeError) as error:
        return Damaged(f"{row.wanted} cannot be read ({error}); run `understudy audit`")


def _build(row: Row, graph: Graph) -> Loaded:
    instance = Instance(
        id=row.id,
        process=graph.definition.name,
        process_version=graph.version,
        definition=row.definition,
        given_digest=row.given_digest,
        status=row.status,
        outcome=row.outcome,
        ending=row.ending,
        resting=row.resting,
        serial=row.serial,
        title=row.title,
        tags=_TAGS.decode(row.tags),
        trigger=row.trigger,
        by=row.by,
        caused_by=row.caused_by,
        created_ms=row.created_ms,
        changed_ms=row.changed_ms,
        ended_ms=row.ended_ms,
        error=row.error,
        result=row.result,
    )
    _fill(instance, row, graph)
    instance.settle()
    total = rows_sum(instance)
    found = (row.id, row.partition, row.runnable, row.checksum)
    if found != (row.wanted, PARTITION, instance.is_runnable, checksum(instance, row.version, total)):
        raise Damaged(f"the rows of {row.wanted} are not those that were written (checksum); run `understudy audit`")
    _check_head(row)
    return Loaded(instance, graph, Stored(row.no, row.version, row.head, row.digest, total), row.posted, row.work)


def _fill(instance: Instance, row: Row, graph: Graph) -> None:
    for scope in row.scope:
        instance.scopes.put(scope.id, scope)
    stopped = {incident.token for incident in row.incident}
    for token in row.token:
        instance.put_token(token)
        place = graph.places.get(token.node)
        if place is None:
            raise Damaged(f"{row.id} has a token at {token.node}, which its definition does not have")
        if token.status is TokenStatus.WAITING and place.rules.name == "join" and token.id not in stopped:
            instance.rest_at_join(token)
    for variable in row.variable:
        instance.variables.put((variable.scope, variable.name), variable)
    for wait in row.wait:
        instance.put_wait(wait)
    for undo in row.undo:
        instance.undos.put(undo.id, undo)
    for incident in row.incident:
        instance.put_incident(incident)
    for message in row.buffered:
        instance.buffer.put(message.id, message)


def _check_head(row: Row) -> None:
    top = row.top
    if top is None or top.n != row.version or top.digest != row.digest:
        raise Damaged(f"the head of {row.id}'s history is missing or not its own; run `understudy audit`")
    expected = chain_digest(top.previous, row.id, top.n, top.at_ms, top.epoch, top.events)
    if expected != top.digest:
        raise Damaged(f"the head of {row.id}'s history is not what was written (digest); run `understudy audit`")
