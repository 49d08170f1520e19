"""The tables. Rows are the state, and history is how it came to be.

peewee defines tables, CHECKs and reads; the hot path writes them through `store/batch.py`. A secondary index costs
one more page for each commit that touches it, so there is one only where a question needs it. Tables of an instance's
rows are clustered by instance.
"""

from __future__ import annotations

from typing import Any, Final

import peewee

from understudy.model.states import Mode, Outcome, ScopeKind, ScopeStatus, Status, TokenStatus

APPLICATION_ID: Final = 0x556E6473  # "Unds": marks the file as ours.
PARTITION: Final = 0  # SQLite has one.


def _one_of(column: str, states: Any, *, or_null: bool = False) -> Any:
    """Written out: for IN with a list SQLite builds a table in every statement, which is a fifth of a commit's cost."""
    allowed = [f"{column} = '{state.value}'" for state in states]
    return peewee.Check(" OR ".join([f"{column} IS NULL", *allowed] if or_null else allowed))


class Table(peewee.Model):
    """The base: without a database of its own, because a process may have several open."""

    class Meta:
        legacy_table_names = False


class Owner(Table):
    """Who may write. The epoch rises with each owner and never falls."""

    partition = peewee.IntegerField(primary_key=True)
    holder = peewee.TextField()
    epoch = peewee.IntegerField()
    beat = peewee.IntegerField()
    address = peewee.TextField()

    class Meta:
        table_name = "owner"


class DefinitionRow(Table):
    no = peewee.AutoField()
    name = peewee.TextField()
    version = peewee.IntegerField()
    digest = peewee.TextField()
    body = peewee.TextField()

    class Meta:
        table_name = "definition"
        indexes = ((("name", "version"), True), (("name", "digest"), True))


class InstanceRow(Table):
    no = peewee.IntegerField(primary_key=True)
    partition = peewee.IntegerField(default=PARTITION)
    id = peewee.TextField(unique=True)
    definition = peewee.ForeignKeyField(DefinitionRow, column_name="definition", index=False)
    given_digest = peewee.TextField()
    title = peewee.TextField()
    tags = peewee.TextField()
    trigger = peewee.TextField()
    by = peewee.TextField()
    caused_by = peewee.TextField()
    created_ms = peewee.IntegerField()
    # Written by every commit:
    status = peewee.TextField(constraints=[_one_of("status", Status)])
    outcome = peewee.TextField(null=True, constraints=[_one_of("outcome", Outcome, or_null=True)])
    ending = peewee.TextField(null=True, constraints=[_one_of("ending", Outcome, or_null=True)])
    resting = peewee.TextField(constraints=[_one_of("resting", Status)])
    runnable = peewee.IntegerField(constraints=[peewee.Check("runnable IN (0, 1)")])
    version = peewee.IntegerField()
    serial = peewee.IntegerField()
    head = peewee.IntegerField()
    digest = peewee.TextField()
    checksum = peewee.IntegerField()
    changed_ms = peewee.IntegerField()
    ended_ms = peewee.IntegerField(null=True)
    error = peewee.TextField()
    result = peewee.TextField()

    class Meta:
        table_name = "instance"
        constraints = (peewee.Check("(status = 'ended') = (outcome IS NOT NULL)"),)


class _RowOfInstance(Table):
    instance = peewee.ForeignKeyField(InstanceRow, column_name="instance", index=False)


class ScopeRow(_RowOfInstance):
    id = peewee.IntegerField()
    parent = peewee.IntegerField()
    node = peewee.TextField()
    kind = peewee.TextField(constraints=[_one_of("kind", ScopeKind)])
    status = peewee.TextField(constraints=[_one_of("status", ScopeStatus)])
    host = peewee.IntegerField()
    error = peewee.TextField()

    class Meta:
        table_name = "scope"
        primary_key = peewee.CompositeKey("instance", "id")
        without_rowid = True


class TokenRow(_RowOfInstance):
    id = peewee.IntegerField()
    scope = peewee.IntegerField()
    node = peewee.TextField()
    came_by = peewee.TextField()
    status = peewee.TextField(constraints=[_one_of("status", TokenStatus)])
    mode = peewee.TextField(constraints=[_one_of("mode", Mode)])
    attempt = peewee.IntegerField()
    task = peewee.IntegerField()
    lost = peewee.IntegerField()
    tries = peewee.IntegerField()
    undo = peewee.IntegerField()
    since_ms = peewee.IntegerField()

    class Meta:
        table_name = "token"
        primary_key = peewee.CompositeKey("instance", "id")
        without_rowid = True


class VariableRow(_RowOfInstance):
    scope = peewee.IntegerField()
    name = peewee.TextField()
    value = peewee.TextField()

    class Meta:
        table_name = "variable"
        primary_key = peewee.CompositeKey("instance", "scope", "name")
        without_rowid = True


class WaitRow(_RowOfInstance):
    id = peewee.IntegerField()
    group = peewee.IntegerField()
    scope = peewee.IntegerField()
    token = peewee.IntegerField()
    node = peewee.TextField()
    kind = peewee.TextField(constraints=[peewee.Check("kind IN ('timer', 'message', 'retry')")])
    name = peewee.TextField()
    key = peewee.TextField()
    due_ms = peewee.IntegerField(null=True)
    since_ms = peewee.IntegerField()

    class Meta:
        table_name = "wait"
        primary_key = peewee.CompositeKey("instance", "id")
        without_rowid = True


class UndoRow(_RowOfInstance):
    id = peewee.IntegerField()
    scope = peewee.IntegerField()
    node = peewee.TextField()
    task = peewee.IntegerField()
    given = peewee.TextField()
    running = peewee.IntegerField()

    class Meta:
        table_name = "undo"
        primary_key = peewee.CompositeKey("instance", "id")
        without_rowid = True


class IncidentRow(_RowOfInstance):
    id = peewee.IntegerField()
    token = peewee.IntegerField()
    node = peewee.TextField()
    code = peewee.TextField()
    detail = peewee.TextField()
    since_ms = peewee.IntegerField()

    class Meta:
        table_name = "incident"
        primary_key = peewee.CompositeKey("instance", "id")
        without_rowid = True


class BufferedRow(_RowOfInstance):
    """A message sent to one instance before anything there waited for it."""

    id = peewee.IntegerField()
    name = peewee.TextField()
    key = peewee.TextField()
    payload = peewee.TextField()
    expires_ms = peewee.IntegerField(null=True)

    class Meta:
        table_name = "buffered"
        primary_key = peewee.CompositeKey("instance", "id")
        without_rowid = True


class WorkRow(_RowOfInstance):
    """The result of a transactional task, written in the task's own transaction."""

    task = peewee.IntegerField()
    attempt = peewee.IntegerField()
    result = peewee.TextField()

    class Meta:
        table_name = "work"
        primary_key = peewee.CompositeKey("instance", "task")
        without_rowid = True


class MessageRow(Table):
    """A published message; `instance` and `wait` say to whom it is assigned."""

    no = peewee.IntegerField(primary_key=True)
    name = peewee.TextField()
    key = peewee.TextField()
    payload = peewee.TextField()
    expires_ms = peewee.IntegerField(null=True)
    instance = peewee.IntegerField(null=True)
    wait = peewee.IntegerField(null=True)

    class Meta:
        table_name = "message"


class RequestRow(Table):
    """The answer to a command that carried a key."""

    key = peewee.TextField(primary_key=True)
    digest = peewee.TextField()
    answer = peewee.TextField()
    expires_ms = peewee.IntegerField()

    class Meta:
        table_name = "request"
        without_rowid = True


class SubscriberRow(Table):
    name = peewee.TextField()
    partition = peewee.IntegerField(default=PARTITION)
    cursor = peewee.IntegerField()

    class Meta:
        table_name = "subscriber"
        primary_key = peewee.CompositeKey("name", "partition")
        without_rowid = True


class HeldRow(Table):
    """An instance whose deliveries to a subscriber wait because one of them failed; the others go on."""

    subscriber = peewee.TextField()
    instance = peewee.IntegerField()
    seq = peewee.IntegerField()  # The first row that was not delivered.
    tries = peewee.IntegerField()
    due_ms = peewee.IntegerField(null=True)  # None: it is an incident and waits for an operator.
    error = peewee.TextField()

    class Meta:
        table_name = "held"
        primary_key = peewee.CompositeKey("subscriber", "instance")
        without_rowid = True


class HistoryRow(Table):
    """One row for each commit, in one sequence.

    No index: an instance's own rows are found from its head along `prev`.
    """

    seq = peewee.IntegerField(primary_key=True)
    partition = peewee.IntegerField(default=PARTITION)
    instance = peewee.IntegerField()
    n = peewee.IntegerField()  # The instance's version after this commit.
    prev = peewee.IntegerField()  # 0 for the first.
    at_ms = peewee.IntegerField()
    epoch = peewee.IntegerField()
    events = peewee.TextField()
    digest = peewee.TextField()

    class Meta:
        table_name = "history"


TABLES: Final[tuple[type[Table], ...]] = (
    Owner,
    DefinitionRow,
    InstanceRow,
    ScopeRow,
    TokenRow,
    VariableRow,
    WaitRow,
    UndoRow,
    IncidentRow,
    BufferedRow,
    WorkRow,
    MessageRow,
    RequestRow,
    SubscriberRow,
    HeldRow,
    HistoryRow,
)

# peewee's own index options cannot say WHERE in a form that is stable over its versions.
INDEXES: Final[dict[str, str]] = {
    "instance_runnable": '"instance" ("no") WHERE "runnable" = 1',
    "wait_due": '"wait" ("due_ms") WHERE "due_ms" IS NOT NULL',
    "wait_message": '"wait" ("name", "key", "since_ms") WHERE "kind" = \'message\'',
    "message_free": '"message" ("name", "key") WHERE "instance" IS NULL',
    "message_assigned": '"message" ("instance", "wait") WHERE "instance" IS NOT NULL',
    "message_expiry": '"message" ("expires_ms") WHERE "expires_ms" IS NOT NULL',
    "request_expiry": '"request" ("expires_ms")',
    "incident_since": '"incident" ("since_ms")',
}
