"""Reading whole instances back.

All waiting activations are read by one statement that returns one JSON row: reads suffer from the GIL as writes do.
What is read is checked before anybody acts on it: the rows against their checksum, the head of history against its
digest. What does not fit is `Damaged`, for that instance alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from understudy.model.definition import Graph
from understudy.model.errors import Damaged
from understudy.model.instance import Buffered, Incident, Instance, Scope, Token, Undo, Variable, Wait
from understudy.model.states import Outcome, Status, TokenStatus
from understudy.store.batch import COLUMNS
from understudy.store.commit import Stored, chain_digest, checksum, rows_sum

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


class Row(msgspec.Struct, frozen=True, array_like=True):
    """An instance as the statement returns it."""

    no: int
    id: str
    definition: int
    given_digest: str
    title: str
    tags: dict[str, str]
    trigger: str
    by: str
    caused_by: str
    created_ms: int
    status: Status
    outcome: Outcome | None
    ending: Outcome | None
    resting: Status
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
  FROM history h WHERE h.seq = i.head AND h.instance = i.no)"""
_POSTED = """(SELECT json_group_array(json_array(m.no, m.wait, m.payload)) FROM message m
  WHERE m.instance = i.no AND m.wait IS NOT NULL)"""
_WORK = "(SELECT json_group_array(json_array(w.task, w.attempt, w.result)) FROM work w WHERE w.instance = i.no)"


def _columns() -> str:
    own = (f'json(i."{c}")' if c == "tags" else f'i."{c}"' for c in _OWN)
    parts = [
        *own,
        f"json({_HEAD})",
        *(f"json({_array(table)})" for table in COLUMNS),
        f"json({_POSTED})",
        f"json({_WORK})",
    ]
    return ", ".join(parts)


LOAD = f"""
SELECT coalesce(json_group_array(json_array({_columns()})), '[]')
FROM json_each(?) j CROSS JOIN instance i ON i.id = j.value
"""
_DECODER = msgspec.json.Decoder(list[Row])
_LENIENT = msgspec.json.Decoder(list[msgspec.Raw])
_ROW = msgspec.json.Decoder(Row)


def load(connection: Any, ids: Sequence[str], graph_of: GraphOf) -> dict[str, Loaded | Damaged]:
    """The instances of these ids; an id that is not there is not in the answer."""
    text = connection.execute(LOAD, (msgspec.json.encode(list(ids)).decode(),)).fetchone()[0]
    try:
        rows: list[Row | msgspec.Raw] = list(_DECODER.decode(text))
    except msgspec.ValidationError:
        rows = list(_LENIENT.decode(text))  # One of them is damaged: find out which.
    found: dict[str, Loaded | Damaged] = {}
    for row in rows:
        name, result = _checked(row, graph_of)
        found[name] = result
    return found


def _checked(row: Row | msgspec.Raw, graph_of: GraphOf) -> tuple[str, Loaded | Damaged]:
    if not isinstance(row, Row):
        try:
            row = _ROW.decode(row)
        except msgspec.ValidationError as error:
            name = str(msgspec.json.decode(row)[1])  # type: ignore[arg-type]  # Still the raw text.
            return name, Damaged(f"the rows of {name} cannot be read ({error}); run `understudy audit`")
    try:
        return row.id, _build(row, graph_of(row.definition))
    except Damaged as error:
        return row.id, error


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
        tags=row.tags,
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
    if checksum(instance, row.version, total) != row.checksum:
        raise Damaged(f"the rows of {row.id} are not those that were written (checksum); run `understudy audit`")
    _check_head(row)
    return Loaded(instance, graph, Stored(row.no, row.version, row.head, row.digest, total), row.posted, row.work)


def _fill(instance: Instance, row: Row, graph: Graph) -> None:
    for scope in row.scope:
        instance.scopes.put(scope.id, scope)
    for token in row.token:
        instance.put_token(token)
        place = graph.places.get(token.node)
        if place is None:
            raise Damaged(f"{row.id} has a token at {token.node}, which its definition does not have")
        if token.status is TokenStatus.WAITING and place.rules.name == "join":
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
