"""The writer's connection in a user's hands, for one task.

A transactional task runs in a transaction of its own on the writer's connection, so that what it writes to the user's
tables and the record of its result are one commit. The wrapper can be revoked at any moment; an authorizer denies
transaction control, PRAGMA, ATTACH and our tables.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable
from typing import Any, Final

from understudy.model.errors import Conflict, Rejected
from understudy.store.schema import TABLES
from understudy.store.writer import Unknown, Writer

_OURS: Final = frozenset(table._meta.table_name for table in TABLES) | {"batch"}
_DENIED: Final = frozenset(
    {
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_PRAGMA,
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
    }
)


class LentConnection:
    """What a transactional handler gets: `execute`, `executemany`, and rows. It works until its task is over."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection: sqlite3.Connection | None = connection
        self._lock = threading.Lock()  # Held during each call: who revokes waits for the call that it has interrupted.

    def execute(self, statement: str, parameters: Any = (), /) -> list[Any]:
        """Run one statement; its rows."""
        with self._lock:
            return self._live().execute(statement, parameters).fetchall()

    def executemany(self, statement: str, parameters: Iterable[Any], /) -> int:
        """Run one statement for each set of parameters; the number of rows changed."""
        rows = list(parameters)  # The user's iterator must not run under the lock.
        with self._lock:
            return self._live().executemany(statement, rows).rowcount

    def _live(self) -> sqlite3.Connection:
        if self._connection is None:
            raise Rejected("the transaction of this task is over; use the connection only inside the handler")
        return self._connection

    def revoke(self) -> None:
        with self._lock:
            self._connection = None


class Loan:
    """One transaction lent out.

    Exactly one of `commit` and `roll_back` ends it; after that the writer is free again.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._connection: sqlite3.Connection = writer.connection
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            writer.check_fence()
        except sqlite3.Error as error:
            raise Unknown(str(error)) from error
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.set_authorizer(_authorize)
        self.lent = LentConnection(self._connection)

    def commit(self, *, instance: int, task: int, attempt: int, result: str) -> None:
        """Make the user's writes and the record of the result durable, together."""
        self._take_back()
        try:
            self._connection.execute(
                "INSERT INTO work (instance, task, attempt, result) VALUES (?, ?, ?, ?)",
                (instance, task, attempt, result),
            )
            self._connection.execute("COMMIT")
        except sqlite3.IntegrityError as error:
            self._connection.execute("ROLLBACK")
            raise Conflict(f"the transaction was refused by the database ({error})") from error
        except sqlite3.Error as error:
            raise Unknown(str(error)) from error

    def roll_back(self) -> None:
        self._connection.interrupt()
        self._take_back()
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _take_back(self) -> None:
        self.lent.revoke()
        self._connection.set_authorizer(None)


def _authorize(action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None) -> int:
    if action in _DENIED:
        return sqlite3.SQLITE_DENY
    if first in _OURS and action != sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_DENY
    if action in (sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_DELETE) and first == "sqlite_master":
        return sqlite3.SQLITE_OK  # What CREATE TABLE does; our own entries cannot be named, see the line above.
    return sqlite3.SQLITE_DENY if second in _OURS and action == sqlite3.SQLITE_ALTER_TABLE else sqlite3.SQLITE_OK
