"""A database in memory that several nodes can open, with a tap on every statement.

It is the real SQLite of the standard library on its own in-memory file system, so that guards, triggers and constraints
are the ones of a service; only the disk is missing. `simulations/disk.py` has one. The tap is where storage faults sit:
it sees each statement before it runs, and may let it fail, fail after it has run, or end the process there.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Callable
from typing import Any

from understudy.store.connection import Database, Settings, writer_pragmas
from understudy.store.writer import Writer

Run = Callable[[], sqlite3.Cursor]
Tap = Callable[[str, Run], sqlite3.Cursor]

_names = itertools.count()
_templates: list[sqlite3.Connection] = []


class Died(BaseException):
    """The process of a node has ended here. Nothing of it may happen after this."""


class TappedConnection(sqlite3.Connection):
    """A connection whose statements pass the tap of its storage."""

    storage: MemoryStorage
    lent: Any = None  # The authorizer that is set while the connection is lent to a task.

    def set_authorizer(self, authorizer: Any) -> None:
        self.lent = authorizer
        super().set_authorizer(authorizer)

    def execute(self, statement: str, parameters: Any = (), /) -> sqlite3.Cursor:
        tap = self.storage.tap
        if tap is None:
            return super().execute(statement, parameters)
        return tap(statement, lambda: super(TappedConnection, self).execute(statement, parameters))


class TappedCursor(sqlite3.Cursor):
    """What peewee runs its own statements on: they pass the tap too."""

    connection: TappedConnection

    def execute(self, statement: str, parameters: Any = (), /) -> Any:
        tap = self.connection.storage.tap
        if tap is None:
            return super().execute(statement, parameters)
        return tap(statement, lambda: super(TappedCursor, self).execute(statement, parameters))


class MemoryDatabase(Database):
    """peewee's database on such a connection."""

    def __init__(self, storage: MemoryStorage, settings: Settings) -> None:
        self.storage = storage
        super().__init__(
            storage.uri,
            pragmas=[pragma for pragma in writer_pragmas(settings) if pragma[0] not in _OF_A_DISK],
            uri=True,
            factory=TappedConnection,
            check_same_thread=False,
            autoconnect=False,
            thread_safe=False,
        )

    def _connect(self) -> sqlite3.Connection:
        # The busy timeout is zero: nobody else could move while the only thread sleeps.
        connection = sqlite3.connect(self.database, timeout=0, isolation_level=None, **self.connect_params)
        assert isinstance(connection, TappedConnection)
        connection.storage = self.storage
        self._add_conn_hooks(connection)  # type: ignore[attr-defined]  # peewee's stubs leave it out.
        return connection

    def cursor(self, named_cursor: Any = None) -> Any:  # noqa: ARG002  # As peewee has it.
        return self.connection().cursor(TappedCursor)


_OF_A_DISK = frozenset({"wal_autocheckpoint", "journal_size_limit", "cache_size", "synchronous"})


class SharedReader(Database):
    """Reads on the writer's own connection: in memory there is no log beside which others could read."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._reading: Reading | None = None
        super().__init__("shared", autoconnect=False, thread_safe=False)
        self._reading = Reading(storage)

    def connection(self) -> Any:
        return self._reading

    def cursor(self, named_cursor: Any = None) -> Any:  # noqa: ARG002  # As peewee has it.
        return self.connection().cursor()

    def is_closed(self) -> bool:
        return self._reading is None  # While peewee sets itself up.

    def close(self) -> bool:
        return False


class Reading:
    """The newest connection of a storage, for reads; while it is lent, its authorizer is put aside for the moment."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    @property
    def in_transaction(self) -> bool:
        return self._storage.connection().in_transaction

    def cursor(self) -> sqlite3.Cursor:
        return self._storage.connection().cursor(TappedCursor)

    def execute(self, statement: str, parameters: Any = (), /) -> Any:
        connection = self._storage.connection()
        authorizer = connection.lent
        if authorizer is None:
            return connection.execute(statement, parameters)
        connection.set_authorizer(None)
        try:
            return Rows(connection.execute(statement, parameters).fetchall())
        finally:
            connection.set_authorizer(authorizer)


class Rows(list[Any]):
    """What a statement gave, with the names that a cursor has."""

    def fetchall(self) -> list[Any]:
        return self

    def fetchone(self) -> Any:
        return self[0] if self else None


class MemoryStorage:
    """What one node has of the world's database: connections come and go, the database stays."""

    def __init__(self, memory: Memory) -> None:
        self.uri = memory.uri
        self.tap: Tap | None = None
        self._newest: MemoryDatabase | None = None

    def writer(self, path: str, settings: Settings) -> Database:  # noqa: ARG002  # There is one database.
        database = MemoryDatabase(self, settings)
        database.connect()
        self._newest = database
        return database

    def reader(self, path: str) -> Database:  # noqa: ARG002  # Likewise.
        return SharedReader(self)

    def connection(self) -> TappedConnection:
        if self._newest is None or self._newest.is_closed():
            raise sqlite3.OperationalError("unable to open database file")
        connection = self._newest.connection()
        assert isinstance(connection, TappedConnection)
        return connection

    def peek_inside(self, statement: str) -> list[Any] | None:
        """Read within the transaction that a task holds, past all taps; None if there is none."""
        if self._newest is None or self._newest.is_closed() or not self.connection().in_transaction:
            return None
        connection = self.connection()
        sqlite3.Connection.set_authorizer(connection, None)
        try:
            return sqlite3.Connection.execute(connection, statement).fetchall()
        finally:
            sqlite3.Connection.set_authorizer(connection, connection.lent)

    def die(self) -> None:
        """Close everything, as the end of a process does: what was not committed is rolled back."""
        if self._newest is not None and not self._newest.is_closed():
            connection = self.connection()
            connection.set_authorizer(None)
            connection.close()
        self._newest = None


class Memory:
    """The database of a world."""

    is_dead = False  # As a disk can be.

    def __init__(self) -> None:
        self.uri = f"file:/understudy-{os.getpid()}-{next(_names)}?vfs=memdb"
        # While it is open the database lives. It never sleeps: whoever holds a lock waits for the same thread.
        self._keeper = sqlite3.connect(self.uri, uri=True, isolation_level=None, timeout=0)
        _template().backup(self._keeper)

    def storage(self) -> MemoryStorage:
        return MemoryStorage(self)

    def peek(self, statement: str) -> list[Any]:
        return self._keeper.execute(statement).fetchall()

    def close(self) -> None:
        self._keeper.close()


def _template() -> sqlite3.Connection:
    """An empty database of ours, made once in a process: the schema takes longer than many a world."""
    if not _templates:
        keeper = sqlite3.connect(":memory:")
        memory = Memory.__new__(Memory)
        memory.uri = f"file:/understudy-{os.getpid()}-template?vfs=memdb"
        hold = sqlite3.connect(memory.uri, uri=True)
        writer = Writer("template", Settings(), storage=MemoryStorage(memory))
        hold.backup(keeper)
        writer.close()
        hold.close()
        _templates.append(keeper)
    return _templates[0]
