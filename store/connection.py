"""Opening the database file, for the one writer and for readers.

Exactly one SQLite library may touch a file in a process: two of them drop each other's POSIX locks, and acknowledged
rows are lost with them. So peewee is made to use the standard library's, whatever else is installed. The writer's
connection is the only one that writes or checkpoints; all others are read-only. A file that is not ours is not
changed by a single byte.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote

import attrs
import peewee

from understudy.model.errors import Damaged, NotOurs, Unavailable, UnderstudyError
from understudy.store.schema import APPLICATION_ID

LEAST_SQLITE: Final = (3, 34, 0)
LEAST_BYTES: Final = 512  # Of a database that is not empty.
BUSY_TIMEOUT_MS: Final = 5_000
SYNCHRONOUS: Final = {"full": "FULL", "relaxed": "NORMAL"}


@attrs.frozen(kw_only=True)
class Settings:
    """How the file is kept.

    `relaxed` may lose the last acknowledged commits at a power cut, never at a crash of the process.
    """

    durability: str = "full"
    checkpoint_pages: int = 16_000
    cache_kib: int = 65_536


class Database(peewee.SqliteDatabase):
    """peewee's SQLite database on the standard library's `sqlite3`, and nothing else."""

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.database, timeout=BUSY_TIMEOUT_MS / 1_000, isolation_level=None, **self.connect_params
        )
        try:
            self._add_conn_hooks(connection)  # type: ignore[attr-defined]  # peewee's stubs leave it out.
        except BaseException:
            connection.close()
            raise
        return connection

    def connection(self) -> sqlite3.Connection:
        opened: sqlite3.Connection = super().connection()  # type: ignore[no-untyped-call]  # peewee leaves it out.
        return opened


class Storage(Protocol):
    """Where databases are kept, and how connections to them are made: the port behind which a disk can be simulated."""

    def writer(self, path: str, settings: Settings) -> Database:
        """The one connection that writes; the database is made if it is not there."""

    def reader(self, path: str) -> Database:
        """A connection that only reads."""


class Files:
    """Files on a local disk."""

    def writer(self, path: str, settings: Settings) -> Database:
        return open_writer(path, settings)

    def reader(self, path: str) -> Database:
        return open_reader(path)


FILES: Final = Files()


def writer_pragmas(settings: Settings) -> list[tuple[str, object]]:
    """How the connection that writes is set up, wherever the database is."""
    return [
        ("trusted_schema", "OFF"),
        ("cell_size_check", "ON"),
        ("foreign_keys", "ON"),
        ("synchronous", SYNCHRONOUS[settings.durability]),
        ("cache_size", -settings.cache_kib),
        ("wal_autocheckpoint", settings.checkpoint_pages),
        ("journal_size_limit", 64 * 1024 * 1024),
        ("temp_store", "MEMORY"),
    ]


def open_writer(path: str, settings: Settings) -> Database:
    """The one connection that writes. The file is made if it is not there, readable by its owner alone."""
    check_library()
    _make_private(Path(path))
    _look_first(path)
    database = Database(
        path,
        pragmas=writer_pragmas(settings),
        check_same_thread=False,
        autoconnect=False,
        thread_safe=False,  # One connection, handed from thread to thread; peewee would open one for each.
    )
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


def open_reader(path: str) -> Database:
    """A connection that cannot write."""
    check_library()
    if not Path(path).exists():
        raise Unavailable(f"there is no database at {path}; open a Runtime on it first")
    database = Database(
        f"file:{quote(str(Path(path).resolve()))}?mode=ro",
        pragmas=[("query_only", "ON"), ("trusted_schema", "OFF"), ("cell_size_check", "ON")],
        uri=True,
        check_same_thread=False,
        autoconnect=False,
        thread_safe=False,  # One connection, handed from thread to thread; peewee would open one for each.
    )
    with explained(path):
        database.connect()
    return database


def check_library() -> None:
    if sqlite3.sqlite_version_info < LEAST_SQLITE:
        least = ".".join(map(str, LEAST_SQLITE))
        raise Unavailable(f"SQLite {sqlite3.sqlite_version} is too old; Understudy needs {least} or newer")


def check_ours(database: Database, path: str) -> None:
    """Whether the file is an Understudy database, or an empty one that may become it."""
    read = database.connection().execute
    application, version = (read(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if application == APPLICATION_ID:
        return
    if application or version or read("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise NotOurs(f"{path} is another program's database; nothing was changed in it. Give another path")


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn the library's errors into ours, with the path and what to do."""
    try:
        yield
    except UnderstudyError:
        raise
    except (sqlite3.Error, peewee.PeeweeException) as error:
        raise explain(error, path) from error
    except UnicodeDecodeError as error:  # A name in the schema is no text any more.
        raise Damaged(f"{path} is damaged ({error}); restore a backup, then run `understudy audit`") from error


def explain(error: BaseException, path: str) -> UnderstudyError:
    text = str(error)
    if "decode to UTF-8" in text:  # The library quotes the bytes: no other word in it may be taken for the reason.
        return Damaged(f"{path} is damaged ({text[:200]!r}); restore a backup, then run `understudy audit`")
    if "not a database" in text:
        return NotOurs(f"{path} is not a SQLite database; nothing was changed in it. Give another path")
    if "malformed" in text or "corrupt" in text:
        return Damaged(f"{path} is damaged ({text}); restore a backup, then run `understudy audit`")
    if "readonly" in text:
        return Unavailable(f"{path} cannot be written ({text}); check the rights of the file and its folder")
    if "full" in text:
        return Unavailable(f"the disk of {path} is full; free some space, nothing acknowledged is lost")
    return Unavailable(f"{path} cannot be used now ({text}); check the disk and the rights of the file and its folder")


def _make_private(path: Path) -> None:
    """Make the file, if it is not there. One that is there must not be opened here.

    Closing any descriptor of a file drops all POSIX locks that this process has on it, those of SQLite's connections
    among them: another process would then take the log away under a reader of ours.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if path.is_dir():
            raise Unavailable(f"{path} is a folder; give the path of a file") from None
    except OSError as error:
        raise Unavailable(
            f"{path} cannot be opened for writing ({error.strerror}); check its folder and rights"
        ) from error


def _look_first(path: str) -> None:
    """Look at the file with a connection that cannot write.

    The last connection that can empties the log of its program into the file when it closes.
    """
    size = Path(path).stat().st_size
    if size == 0:
        return
    if size < LEAST_BYTES:  # SQLite takes a file of one byte for an empty one.
        raise NotOurs(f"{path} is not a SQLite database; nothing was changed in it. Give another path")
    database = open_reader(path)
    try:
        with explained(path):
            check_ours(database, path)
    except Unavailable:
        pass  # A program died while it wrote and left a journal, which only a connection that writes can clear up.
    finally:
        database.close()


def _use_wal(database: Database, path: str) -> None:
    connection = database.connection()
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    if mode == "wal":
        return
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise Unavailable(f"{path} cannot use write-ahead logging (journal mode is {mode}); use a local disk")
