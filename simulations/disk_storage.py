"""The store's databases on a simulated disk: what a node of a world is given for its files.

Several storages may be on one disk, one for each process. `die` ends a process and leaves the disk to the others;
when the disk itself dies, all of them have.
"""

from __future__ import annotations

import functools
import sqlite3
from typing import Any, Final, cast

import apsw

from understudy.model.errors import NotOurs, Unavailable
from understudy.simulations.apsw_connection import Connection, Cursor, Tap, connections, shape_of, translated
from understudy.simulations.disk import Disk
from understudy.store.connection import LEAST_BYTES, Database, Settings, check_ours, explained, writer_pragmas
from understudy.store.writer import Writer

PATH: Final = "world.db"
READING: Final = frozenset({"SELECT", "WITH", "PRAGMA", "EXPLAIN", "BEGIN", "COMMIT", "END", "ROLLBACK"})


class DiskStorage:
    """One process's way to the databases of a disk."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._tap: Tap | None = None
        self._opened: list[Connection] = []

    @property
    def tap(self) -> Tap | None:
        """What stands between the writers and the disk: `tap(statement, run) -> cursor`."""
        return self._tap

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        self._tap = tap
        for connection in self._opened:
            connection.tap = tap

    def writer(self, path: str, settings: Settings) -> Database:
        size = len(self.disk.files[path].content) if path in self.disk.files else 0
        if 0 < size < LEAST_BYTES:
            raise NotOurs(f"{path} is not a SQLite database; nothing was changed in it. Give another path")
        database = DiskDatabase(self, path, settings)
        with explained(path):
            database.connect()
        try:
            with explained(path):
                check_ours(database, path)
                _use_wal(database, path)
        except BaseException:
            database.close()
            raise
        return database

    def reader(self, path: str) -> Database:
        return SharedDatabase(self.disk, path)

    def connect(self, path: str, settings: Settings) -> Connection:
        """A connection that may write."""
        pragmas = [("locking_mode", "EXCLUSIVE"), *writer_pragmas(settings)]
        connection = Connection(
            self.disk,
            path,
            setup=[f"PRAGMA {name} = {value}" for name, value in pragmas if name != "wal_autocheckpoint"],
            checkpoint_pages=settings.checkpoint_pages,
        )
        connection.tap = self._tap
        self._opened = [*(one for one in self._opened if not one.is_closed), connection]
        return connection

    def die(self) -> None:
        """The process ends here: nothing is closed in good order, and what was not committed is gone."""
        opened, self._opened = self._opened, []
        for connection in opened:
            connection.abandon()


class DiskDatabase(Database):
    """peewee's database on a connection to the disk."""

    def __init__(self, storage: DiskStorage, path: str, settings: Settings) -> None:
        self._storage = storage
        self._settings = settings
        super().__init__(path, autoconnect=False, thread_safe=False)

    def _connect(self) -> sqlite3.Connection:
        connection = cast(sqlite3.Connection, self._storage.connect(self.database, self._settings))
        self._add_conn_hooks(connection)  # type: ignore[attr-defined]  # peewee's stubs leave it out.
        return connection


class SharedDatabase(Database):
    """Reads on the connection that writes, because no other can see its log. It is never open nor closed itself."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._reading: Reading | None = None
        super().__init__(path, autoconnect=False, thread_safe=False)
        self._reading = Reading(disk, path)

    def connection(self) -> sqlite3.Connection:
        return cast(sqlite3.Connection, self._reading)

    def cursor(self, named_cursor: object = None) -> Any:  # noqa: ARG002  # peewee's signature.
        assert self._reading is not None
        return self._reading.cursor()

    def is_closed(self) -> bool:
        return self._reading is None  # While peewee sets itself up.

    def close(self) -> bool:
        return False


class Reading:
    """Reads of a database on whichever connection has its turn; it writes nothing and changes no turn."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path

    @property
    def in_transaction(self) -> bool:
        return self._shared().in_transaction

    def execute(self, statement: str, parameters: Any = (), /) -> Cursor:
        shared = self._shared()
        if shape_of(statement).verb not in READING:
            raise translated(apsw.SQLITE_READONLY, "attempt to write a readonly database")
        with shared.unwatched():
            return shared.execute(statement, parameters)

    def cursor(self) -> ReadingCursor:
        return ReadingCursor(self)

    def close(self) -> None:
        """It was never opened."""

    def _shared(self) -> Connection:
        self._disk.check()
        found = connections(self._disk, self._path)
        if not found:
            raise translated(apsw.SQLITE_CANTOPEN, "")
        return next((connection for connection in found if connection.has_turn), found[-1])


class ReadingCursor(Cursor):
    """For peewee, which makes a cursor before it has a statement."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading._shared())
        self._reading = reading

    def execute(self, statement: str, parameters: Any = (), /) -> Cursor:
        self.__dict__.update(self._reading.execute(statement, parameters).__dict__)
        return self


def prepared_disk(path: str = PATH, *, seed: int = 0) -> Disk:
    """A disk with an empty database of ours: making the schema takes longer than many a life."""
    return Disk({path: _template()}, seed=seed)


@functools.cache
def _template() -> bytes:
    disk = Disk()
    Writer(PATH, Settings(), storage=DiskStorage(disk)).close()
    return disk.snapshot()[PATH]


def _use_wal(database: Database, path: str) -> None:
    mode = database.connection().execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise Unavailable(f"{path} cannot use write-ahead logging (journal mode is {mode})")
