"""A connection to a simulated disk that looks like the standard library's.

It has what the store and peewee use of `sqlite3.Connection`, and raises what that would raise, with the same texts,
because the store tells failures apart by them. Rows are fetched at once, so that no statement stays open. The disk is
written by SQLite alone, never from here; when it dies, whoever called gets `Died`, whatever SQLite made of it.

A log without shared memory belongs to one connection. Several of them take turns on a file: who comes next lets the one
before close, and that one opens again when it is used. A transaction is not interrupted for that: the file is locked.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import apsw

from understudy.simulations.disk import Disk, Failed
from understudy.simulations.vfs import NAME, mounted, throw_dice

Tap = Callable[[str, Callable[[], "Cursor"]], "Cursor"]
Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]

STATEMENTS: Final = 128  # Prepared ones that are kept, as the standard library does.
WRITING: Final = 2  # A transaction's state: it may write.

# As `sqlite3` chooses its classes by SQLite's result; what is not here is a DatabaseError.
_CLASSES: Final[dict[int, type[sqlite3.Error]]] = {
    apsw.SQLITE_INTERNAL: sqlite3.InternalError,
    apsw.SQLITE_NOTFOUND: sqlite3.InternalError,
    apsw.SQLITE_ERROR: sqlite3.OperationalError,
    apsw.SQLITE_PERM: sqlite3.OperationalError,
    apsw.SQLITE_ABORT: sqlite3.OperationalError,
    apsw.SQLITE_BUSY: sqlite3.OperationalError,
    apsw.SQLITE_LOCKED: sqlite3.OperationalError,
    apsw.SQLITE_READONLY: sqlite3.OperationalError,
    apsw.SQLITE_INTERRUPT: sqlite3.OperationalError,
    apsw.SQLITE_IOERR: sqlite3.OperationalError,
    apsw.SQLITE_FULL: sqlite3.OperationalError,
    apsw.SQLITE_CANTOPEN: sqlite3.OperationalError,
    apsw.SQLITE_PROTOCOL: sqlite3.OperationalError,
    apsw.SQLITE_EMPTY: sqlite3.OperationalError,
    apsw.SQLITE_SCHEMA: sqlite3.OperationalError,
    apsw.SQLITE_TOOBIG: sqlite3.DataError,
    apsw.SQLITE_CONSTRAINT: sqlite3.IntegrityError,
    apsw.SQLITE_MISMATCH: sqlite3.IntegrityError,
    apsw.SQLITE_MISUSE: sqlite3.InterfaceError,
    apsw.SQLITE_RANGE: sqlite3.InterfaceError,
}
# For errors that come from the disk: SQLite's own text is lost on the way through the virtual file system.
_TEXTS: Final = {
    apsw.SQLITE_BUSY: "database is locked",
    apsw.SQLITE_IOERR: "disk I/O error",
    apsw.SQLITE_FULL: "database or disk is full",
    apsw.SQLITE_CANTOPEN: "unable to open database file",
    apsw.SQLITE_CORRUPT: "database disk image is malformed",
    apsw.SQLITE_NOTADB: "file is not a database",
}
_CHANGING: Final = frozenset({"INSERT", "UPDATE", "DELETE", "REPLACE"})
_WRITING: Final = _CHANGING | {"CREATE", "DROP", "ALTER", "REINDEX", "VACUUM"}


class Shape(NamedTuple):
    """What the beginning of a statement tells about it."""

    verb: str
    changes_rows: bool
    takes_lock: bool
    is_temporary: bool
    may_be_several: bool


@functools.lru_cache(maxsize=512)
def shape_of(statement: str) -> Shape:
    words = statement.split(None, 2)
    verb = words[0].upper().rstrip(";") if words else ""
    second = words[1].upper().rstrip(";") if len(words) > 1 else ""
    is_temporary = verb == "CREATE" and second in ("TEMP", "TEMPORARY")
    return Shape(
        verb=verb,
        changes_rows=verb in _CHANGING,
        takes_lock=second in ("IMMEDIATE", "EXCLUSIVE") if verb == "BEGIN" else verb in _WRITING and not is_temporary,
        is_temporary=is_temporary,
        may_be_several=";" in statement.rstrip("; \t\r\n"),
    )


class Connection:
    """One user's way to a database on a disk."""

    def __init__(self, disk: Disk, path: str, *, setup: Iterable[str] = (), checkpoint_pages: int = 0) -> None:
        self.disk = disk
        self.path = path
        self.tap: Tap | None = None
        self._setup = list(setup)  # Repeated whenever its turn comes again.
        self._functions: list[tuple[str, int, Callable[..., Any], bool]] = []
        self._checkpoint_pages = checkpoint_pages
        self._authorizer: Authorizer | None = None
        self.is_closed = False
        self._live: apsw.Connection | None = None
        disk.check()
        disk.users.append(self)
        try:
            self._take_turn()
        except BaseException:
            self.close()
            raise

    # --- statements ---

    def execute(self, statement: str, parameters: Any = (), /) -> Cursor:
        if self.tap is None:
            return Cursor(self).execute(statement, parameters)
        return self.tap(statement, lambda: Cursor(self).execute(statement, parameters))

    def executemany(self, statement: str, parameters: Iterable[Any], /) -> Cursor:
        return Cursor(self).executemany(statement, parameters)

    def cursor(self) -> Cursor:
        return Cursor(self)

    def commit(self) -> None:
        if self.in_transaction:
            self.execute("COMMIT")

    def rollback(self) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        return self._live is not None and self._live.in_transaction

    @property
    def total_changes(self) -> int:
        return self.live().total_changes()

    def interrupt(self) -> None:
        self.live().interrupt()

    # --- hooks ---

    def set_authorizer(self, authorizer: Authorizer | None) -> None:
        self._authorizer = authorizer
        if self._live is not None:
            self._live.set_authorizer(authorizer)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Put the authorizer aside, for a read that is not the one of whom it watches."""
        authorizer = self._authorizer
        if authorizer is None:
            yield
            return
        self.set_authorizer(None)
        try:
            yield
        finally:
            self.set_authorizer(authorizer)

    def create_function(
        self, name: str, narg: int, function: Callable[..., Any], *, deterministic: bool = False
    ) -> None:
        self._functions.append((name, narg, function, deterministic))
        if self._live is not None:
            self._live.create_scalar_function(name, function, narg, deterministic=deterministic)

    # --- turns ---

    @property
    def has_turn(self) -> bool:
        return self._live is not None

    def live(self) -> apsw.Connection:
        """SQLite's connection, for the moment."""
        self.disk.check()
        if self.is_closed:
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")
        if self._live is None:
            self._take_turn()
        assert self._live is not None
        return self._live

    def _take_turn(self) -> None:
        for other in connections(self.disk, self.path):
            if other is not self and other.has_turn:
                other._give_turn()
        throw_dice(self.disk)
        with self.explained():
            live = self._live = apsw.Connection(mounted(self.disk, self.path), vfs=NAME, statementcachesize=STATEMENTS)
            for statement in self._setup:
                live.execute(statement).fetchall()
            if self._checkpoint_pages > 0:
                live.set_wal_hook(_checkpoint_after(self._checkpoint_pages))
        for name, narg, function, deterministic in self._functions:
            live.create_scalar_function(name, function, narg, deterministic=deterministic)
        live.set_authorizer(self._authorizer)

    def _give_turn(self) -> None:
        if self.in_transaction:
            raise translated(apsw.SQLITE_BUSY, "")
        self._let_go()

    def _let_go(self) -> None:
        """Leave the file as it is, with its log."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(apsw.Error):
                live.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                live.close(True)

    def remember(self, statement: str) -> None:
        """What is temporary goes with the turn, and is made again with the next."""
        self._setup.append(statement)

    # --- the end ---

    def close(self) -> None:
        """In good order: SQLite empties the log into the file. It says nothing if it cannot, and neither do we."""
        if self.is_closed:
            return
        if self.disk.is_dead:
            self.abandon()
            return
        self._leave()
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(apsw.Error):
                live.close()
        self.disk.check()

    def abandon(self) -> None:
        """As the end of the process leaves it: what is not committed is nowhere."""
        self._leave()
        self._let_go()

    def _leave(self) -> None:
        self.is_closed = True
        if self in self.disk.users:
            self.disk.users.remove(self)

    # --- errors ---

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise what `sqlite3` would raise; if the disk has died on the way, that."""
        try:
            yield
        except apsw.BindingsError as error:
            raise sqlite3.ProgrammingError(str(error)) from error
        except apsw.Error as error:
            self.disk.check()
            raise translated(getattr(error, "extendedresult", apsw.SQLITE_MISUSE), str(error)) from error
        except Failed as error:
            raise translated(apsw.SQLITE_BUSY, "") from error
        except KeyError as error:
            raise sqlite3.ProgrammingError(f"You did not supply a value for binding parameter :{error}.") from error
        except TypeError as error:
            raise sqlite3.ProgrammingError(f"Error binding parameter: {error}") from error
        except UnicodeDecodeError as error:
            raise sqlite3.OperationalError(f"Could not decode to UTF-8 column ({error})") from error
        self.disk.check()


class Cursor:
    """A statement's rows and what it did."""

    def __init__(self, connection: Connection) -> None:
        self.rowcount = -1
        self.lastrowid: int | None = None
        self._connection = connection
        self._statement: tuple[str, Any] = ("", ())
        self._rows: Iterator[Any] = iter(())

    def execute(self, statement: str, parameters: Any = (), /) -> Cursor:
        connection = self._connection
        live = connection.live()
        shape = shape_of(statement)
        with connection.explained():
            if shape.takes_lock and connection.disk.has_faults and live.txn_state("main") < WRITING:
                connection.disk.lock(connection.path)
            cursor = live.cursor()
            if shape.may_be_several:
                cursor.exec_trace = functools.partial(_only_one, statement)
            self._rows = iter(cursor.execute(statement, parameters).fetchall())
        if shape.is_temporary:
            connection.remember(statement)
        self._statement = (statement, parameters)
        self.rowcount = live.changes() if shape.changes_rows else -1
        self.lastrowid = live.last_insert_rowid()
        return self

    def executemany(self, statement: str, parameters: Iterable[Any], /) -> Cursor:
        changed = 0
        for values in parameters:
            changed += self.execute(statement, values).rowcount
        self.rowcount = changed
        return self

    @property
    def description(self) -> tuple[tuple[Any, ...], ...] | None:
        """The columns' names, which are asked for so seldom that the statement is prepared again for them."""
        found: list[tuple[tuple[Any, ...], ...]] = []

        def look(cursor: apsw.Cursor, _statement: str, _parameters: Any) -> bool:
            found.append(tuple((column[0], *(None,) * 6) for column in cursor.get_description()))
            return False

        cursor = self._connection.live().cursor()
        cursor.exec_trace = look
        with contextlib.suppress(apsw.Error):
            cursor.execute(*self._statement)
        return found[0] if found and found[0] else None

    def fetchone(self) -> Any:
        return next(self._rows, None)

    def fetchmany(self, size: int = 1) -> list[Any]:
        return [row for _, row in zip(range(size), self._rows, strict=False)]

    def fetchall(self) -> list[Any]:
        return list(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return self._rows

    def __next__(self) -> Any:
        return next(self._rows)

    def close(self) -> None:
        self._rows = iter(())


def connections(disk: Disk, path: str) -> list[Connection]:
    """The open connections to a database, in the order in which they were opened."""
    return [user for user in disk.users if isinstance(user, Connection) and user.path == path]


def _checkpoint_after(pages: int) -> Callable[[apsw.Connection, str, int], int]:
    """As SQLite does by itself: a checkpoint that fails is no failure of the commit before it.

    Its own hook cannot be used: an error that passes the virtual file system would be raised for the commit.
    """

    def hook(connection: apsw.Connection, database: str, logged: int) -> int:
        if logged >= pages:
            with contextlib.suppress(apsw.Error):
                connection.wal_checkpoint(database, apsw.SQLITE_CHECKPOINT_PASSIVE)
        return apsw.SQLITE_OK

    return hook


def _only_one(whole: str, _cursor: apsw.Cursor, statement: str, _parameters: Any) -> bool:
    if len(statement.strip("; \t\r\n")) < len(whole.strip("; \t\r\n")):
        raise sqlite3.ProgrammingError("You can only execute one statement at a time.")
    return True


def translated(code: int, text: str) -> sqlite3.Error:
    error = _CLASSES.get(code & 0xFF, sqlite3.DatabaseError)(text or _TEXTS.get(code & 0xFF, "unknown error"))
    error.sqlite_errorcode = code
    error.sqlite_errorname = str(apsw.mapping_extended_result_codes.get(code) or apsw.mapping_result_codes.get(code))
    return error
