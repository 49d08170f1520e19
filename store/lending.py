"""The writer's connection in a user's hands, for one task.

A transactional task runs in a transaction of its own on the writer's connection, so that what it writes to the user's
tables and the record of its result are one commit. The wrapper can be revoked at any moment; an authorizer denies
transaction control, PRAGMA, ATTACH, TEMP and our tables. Whether the attempt is still wanted is asked inside the
transaction: between its order and its turn the instance may have lost it, or found its record.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from understudy.model.errors import Conflict, Rejected
from understudy.store.batch import PREFIX
from understudy.store.schema import TABLES
from understudy.store.writer import Writer

_OURS: Final = frozenset(table._meta.table_name for table in TABLES)
_DENIED: Final = frozenset(
    {
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_PRAGMA,
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        # What is TEMP would stay on the writer's connection, and hide a table of ours that has its name.
        sqlite3.SQLITE_CREATE_TEMP_INDEX,
        sqlite3.SQLITE_CREATE_TEMP_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
        sqlite3.SQLITE_DROP_TEMP_INDEX,
        sqlite3.SQLITE_DROP_TEMP_TABLE,
        sqlite3.SQLITE_DROP_TEMP_TRIGGER,
        sqlite3.SQLITE_DROP_TEMP_VIEW,
    }
)
# Actions whose second name is a table; for the others it is a column, a function or nothing.
_ON_TABLE: Final = frozenset(
    {
        sqlite3.SQLITE_ALTER_TABLE,
        sqlite3.SQLITE_CREATE_INDEX,
        sqlite3.SQLITE_CREATE_TRIGGER,
        sqlite3.SQLITE_DROP_INDEX,
        sqlite3.SQLITE_DROP_TRIGGER,
    }
)
_INTERRUPT_S: Final = 0.01


class LentConnection:
    """What a transactional handler gets: `execute`, `executemany`, and rows. It works until its task is over."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._is_over = False
        self._lock = threading.Lock()  # Held during each call: who revokes waits for the call that it has interrupted.

    def execute(self, statement: str, parameters: Any = (), /) -> list[Any]:
        """Run one statement; its rows."""
        values = _plain(parameters)
        with self._lock, _explained(statement):
            return self._live().execute(statement, values).fetchall()

    def executemany(self, statement: str, parameters: Iterable[Any], /) -> int:
        """Run one statement for each set of parameters; the number of rows changed."""
        rows = [_plain(row) for row in parameters]
        with self._lock, _explained(statement):
            return self._live().executemany(statement, rows).rowcount

    def _live(self) -> sqlite3.Connection:
        if self._is_over:
            raise Rejected("the transaction of this task is over; use the connection only inside the handler")
        if not self._connection.in_transaction:
            # What a conflict with OR ROLLBACK or a full disk leaves: each further statement would be a commit.
            raise Rejected("a statement of this task has rolled its transaction back; let the handler raise")
        return self._connection

    def authorize(
        self, action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None
    ) -> int:
        """For SQLite: whether a statement may do this."""
        if action == sqlite3.SQLITE_PRAGMA and first == "data_version":
            return sqlite3.SQLITE_OK  # It changes nothing, and full-text search asks for it.
        if action in _DENIED or _is_ours(first) or (action in _ON_TABLE and _is_ours(second)):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def revoke(self) -> None:
        """Let no further call through, and end the one that runs."""
        self._is_over = True
        while not self._lock.acquire(timeout=_INTERRUPT_S):
            # Again and again: an interrupt is lost on a call that has not reached SQLite yet.
            self._connection.interrupt()
        self._lock.release()


class Loan:
    """One transaction lent out.

    Exactly one of `commit` and `roll_back` ends it; after that the writer is free again. `recorded` is the result if
    the attempt has been made before: then there is nothing to run.
    """

    def __init__(self, writer: Writer, *, instance: int, task: int, attempt: int) -> None:
        self._writer = writer
        self._instance, self._task, self._attempt = instance, task, attempt
        self._connection: sqlite3.Connection = writer.connection
        self.lent = LentConnection(self._connection)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                writer.check_fence()
                self.recorded = self._find()
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise writer.failure(error) from error
        self._connection.set_authorizer(self.lent.authorize)

    def commit(self, result: str) -> None:
        """Make the user's writes and the record of the result durable, together."""
        self._take_back()
        if not self._connection.in_transaction:
            raise Conflict("a statement of this task has rolled its transaction back; nothing of it was stored")
        try:
            self._connection.execute(
                "INSERT INTO work (instance, task, attempt, result) VALUES (?, ?, ?, ?)",
                (self._instance, self._task, self._attempt, result),
            )
            self._connection.execute("COMMIT")
        except (sqlite3.IntegrityError, sqlite3.DataError) as error:
            self._undo()
            raise Conflict(f"the database refuses this transaction ({error}); nothing of it was stored") from error
        except sqlite3.Error as error:
            raise self._writer.failure(error) from error

    def roll_back(self) -> None:
        self._take_back()
        self._undo()

    def _find(self) -> str | None:
        """The recorded result, if there is one; else the attempt must be the one that its token waits for."""
        row = self._connection.execute(
            "SELECT result FROM work WHERE instance = ? AND task = ?", (self._instance, self._task)
        ).fetchone()
        if row is not None:
            return str(row[0])
        awaited = self._connection.execute(
            "SELECT 1 FROM token WHERE instance = ? AND task = ? AND attempt = ? AND status = 'executing'",
            (self._instance, self._task, self._attempt),
        ).fetchone()
        if awaited is None:
            raise Conflict(f"attempt {self._attempt} of this task is no longer awaited; it was not made")
        return None

    def _undo(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise self._writer.failure(error) from error

    def _take_back(self) -> None:
        self.lent.revoke()
        self._connection.set_authorizer(None)


@contextlib.contextmanager
def _explained(statement: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if "not authorized" not in str(error) and "is prohibited" not in str(error):
            raise
        allowed = "it may use its own tables, without transaction control, PRAGMA, ATTACH or TEMP"
        raise Rejected(f"a transactional task may not run {statement[:100]!r} ({error}): {allowed}") from error


def _plain(parameters: Any) -> Any:
    """A copy: the user's own code must not run under the lock."""
    return dict(parameters) if isinstance(parameters, Mapping) else tuple(parameters)


def _is_ours(name: str | None) -> bool:
    """Names are compared as SQLite does it, without regard to case."""
    lowered = (name or "").lower()
    return lowered in _OURS or lowered.startswith(PREFIX)
