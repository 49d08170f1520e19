"""Opening files: ours, nobody's, others', broken ones, and places where there can be no file.

What is not ours stays as it is, to the byte. Every refusal is typed and names the path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from understudy.model.errors import Damaged, NewerSchema, NotOurs, Unavailable, UnderstudyError
from understudy.store import connection as module
from understudy.store.connection import Settings, explain, explained, open_reader, open_writer
from understudy.store.migrations import LATEST, check_latest
from understudy.store.operations import Beat
from understudy.store.writer import Publish, Unknown, Writer

NOBODY = 65_534


def ours(path: Path) -> Path:
    writer = Writer(str(path), Settings())
    writer.take_over("test")
    writer.write([Publish("paid", "", '"' + "x" * 20_000 + '"')], now_ms=1)
    writer.close()
    return path


def pragma(database: module.Database, name: str) -> object:
    return database.connection().execute(f"PRAGMA {name}").fetchone()[0]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Rights do not stop root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


# --- ours -------------------------------------------------------------------------------------------------------------


def test_a_new_file_and_its_side_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        writer = Writer(str(tmp_path / "new.db"), Settings())
        writer.take_over("test")
    finally:
        os.umask(before)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    writer.close()

    assert modes == {"new.db": 0o600, "new.db-wal": 0o600, "new.db-shm": 0o600}


def test_the_writer_s_connection_is_as_safe_as_sqlite_can_be(tmp_path: Path) -> None:
    database = open_writer(str(tmp_path / "new.db"), Settings())

    found = {name: pragma(database, name) for name in ("journal_mode", "synchronous", "foreign_keys", "trusted_schema")}
    database.close()

    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "trusted_schema": 0}


def test_relaxed_durability_is_the_only_way_to_less(tmp_path: Path) -> None:
    database = open_writer(str(tmp_path / "new.db"), Settings(durability="relaxed"))

    assert pragma(database, "synchronous") == 1
    database.close()


@pytest.mark.parametrize("name", ["with space.db", "what?.db", "50%.db", "a#b.db", "größe-🦆.db", "file:odd.db", "'"])
def test_any_name_a_file_may_have_will_do(tmp_path: Path, name: str) -> None:
    path = ours(tmp_path / name)

    reader = open_reader(str(path))
    count = reader.connection().execute("SELECT count(*) FROM message").fetchone()[0]
    reader.close()

    assert count == 1


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    reader = open_reader(str(ours(tmp_path / "a.db")))

    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.connection().execute("DELETE FROM message")

    reader.close()


def test_a_reader_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no database"):
        open_reader(str(tmp_path / "none.db"))

    assert list(tmp_path.iterdir()) == []


def test_a_file_with_a_log_that_was_never_emptied_is_whole(tmp_path: Path) -> None:
    """As a killed process leaves it: what marks it as ours may be nowhere but in the log."""
    writer = Writer(str(tmp_path / "killed.db"), Settings())
    writer.take_over("killed")
    for suffix in ("", "-wal"):
        shutil.copy(f"{tmp_path}/killed.db{suffix}", f"{tmp_path}/copy.db{suffix}")
    writer.close()

    successor = Writer(str(tmp_path / "copy.db"), Settings())

    assert successor.take_over("next") == 2
    successor.close()


def test_an_old_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 33, 0))

    with pytest.raises(Unavailable, match="too old"):
        open_writer(str(tmp_path / "new.db"), Settings())


# --- not ours ---------------------------------------------------------------------------------------------------------


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Without the shared memory of a log: every reader makes one, and the next one makes it anew."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")}


def refusing(path: Path) -> type[UnderstudyError]:
    with pytest.raises(UnderstudyError, match=path.name) as refused:
        Writer(str(path), Settings())
    return refused.type


@pytest.mark.parametrize("content", [b"x", b"hello\n", b"SQLite format 3\0", b"\0" * 100, b"text " * 1_000])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)

    assert refusing(path) is NotOurs
    assert folder_bytes(tmp_path) == {"notes.txt": content}


@pytest.mark.parametrize(
    "made",
    [
        "CREATE TABLE theirs (a)",
        "PRAGMA application_id = 7",
        "PRAGMA user_version = 3",
        "CREATE TABLE instance (no INTEGER PRIMARY KEY)",
    ],
)
def test_another_program_s_database_is_refused_and_left_alone(tmp_path: Path, made: str) -> None:
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as theirs:
        theirs.execute(made)
    before = folder_bytes(tmp_path)

    assert refusing(path) is NotOurs
    assert folder_bytes(tmp_path) == before


def test_another_program_s_log_is_not_emptied_into_its_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    with closing(sqlite3.connect(tmp_path / "theirs.db", isolation_level=None)) as theirs:
        theirs.execute("PRAGMA journal_mode = WAL")
        theirs.execute("CREATE TABLE theirs (a)")
        for suffix in ("", "-wal"):
            shutil.copy(f"{tmp_path}/theirs.db{suffix}", f"{kept}/theirs.db{suffix}")
    before = folder_bytes(kept)

    assert refusing(kept / "theirs.db") is NotOurs
    assert folder_bytes(kept) == before


def test_another_program_s_unfinished_write_does_not_hide_whose_file_it_is(tmp_path: Path) -> None:
    """Only SQLite itself can roll it back, as it would for that program."""
    kept = tmp_path / "kept.db"
    with closing(sqlite3.connect(tmp_path / "theirs.db", isolation_level=None)) as theirs:
        theirs.execute("CREATE TABLE theirs (a)")
        theirs.execute("PRAGMA cache_size = 1")
        theirs.execute("BEGIN")
        for _ in range(50):
            theirs.execute("INSERT INTO theirs VALUES (randomblob(4000))")
        for suffix in ("", "-journal"):
            shutil.copy(f"{tmp_path}/theirs.db{suffix}", f"{kept}{suffix}")

    assert refusing(kept) is NotOurs
    with closing(sqlite3.connect(kept)) as theirs:
        assert theirs.execute("SELECT count(*) FROM theirs").fetchone() == (0,)
        assert theirs.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_newer_schema_is_refused_by_writers_and_readers_and_left_alone(tmp_path: Path) -> None:
    path = ours(tmp_path / "newer.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {LATEST + 1}")
    before = path.read_bytes()

    assert refusing(path) is NewerSchema
    reader = open_reader(str(path))
    with pytest.raises(NewerSchema):
        check_latest(reader, str(path))
    reader.close()
    assert path.read_bytes() == before


# --- broken -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [1, 5, 20])
def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path, pages: int) -> None:
    path = ours(tmp_path / "cut.db")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - pages * 4_096])

    with pytest.raises(Damaged):
        read_all(path)


def read_all(path: Path) -> None:
    writer = Writer(str(path), Settings())
    try:
        for table in ("owner", "message", "instance", "history"):
            with explained(str(path)):
                writer.connection.execute(f"SELECT * FROM {table}").fetchall()
    finally:
        writer.close()


def test_pages_of_noise_are_damage(tmp_path: Path) -> None:
    path = ours(tmp_path / "noise.db")
    content = bytearray(path.read_bytes())
    content[4_096:] = bytes(range(256)) * ((len(content) - 4_096) // 256)
    path.write_bytes(content)

    assert issubclass(refusing(path), Damaged)


# --- no place for a file ----------------------------------------------------------------------------------------------


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="is a folder"):
        Writer(str(tmp_path), Settings())


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert refusing(tmp_path / "none" / "new.db") is Unavailable
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_be_written_is_refused(open_folder: Path) -> None:
    path = ours(open_folder / "readonly.db")
    path.chmod(0o444)

    with as_nobody():
        assert refusing(path) is Unavailable


def test_a_folder_that_may_not_be_written_is_refused(open_folder: Path) -> None:
    """The file alone would do for reading; the log needs a place beside it."""
    path = ours(open_folder / "fixed.db")
    path.chmod(0o666)
    open_folder.chmod(0o555)

    with as_nobody():
        assert refusing(path) is Unavailable


def test_a_path_that_cannot_be_a_path_is_refused(tmp_path: Path) -> None:
    assert refusing(tmp_path / ("x" * 300)) is Unavailable


# --- words ------------------------------------------------------------------------------------------------------------


def _readonly(path: Path) -> None:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.execute("DELETE FROM message")


def _full(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        connection.execute("CREATE TABLE more AS SELECT zeroblob(100000)")


def _locked(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(path, timeout=0)) as connection:
            connection.execute("DELETE FROM message")


def _foreign(path: Path) -> None:
    path.write_text("not a database at all, whatever it is called " * 10)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT * FROM message")


def _malformed(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT * FROM message, history, owner").fetchall()


@pytest.mark.parametrize(
    ("trouble", "kind", "advice"),
    [
        (_readonly, Unavailable, "rights"),
        (_full, Unavailable, "free some space"),
        (_locked, Unavailable, "locked"),
        (_foreign, NotOurs, "another path"),
        (_malformed, Damaged, "backup"),
    ],
    ids=["readonly", "full", "locked", "foreign", "malformed"],
)
def test_what_the_library_says_becomes_an_error_that_says_what_to_do(
    tmp_path: Path, trouble: Callable[[Path], None], kind: type[UnderstudyError], advice: str
) -> None:
    path = ours(tmp_path / "a.db")

    with pytest.raises(sqlite3.Error) as raised:
        trouble(path)
    explanation = explain(raised.value, str(path))

    assert type(explanation) is kind
    assert str(path) in str(explanation)
    assert advice in str(explanation)


def test_while_another_program_holds_the_file_the_outcome_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_TIMEOUT_MS", 1)
    writer = Writer(str(tmp_path / "busy.db"), Settings())
    writer.take_over("test")

    with closing(sqlite3.connect(writer.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unknown, match="locked"):
            writer.write([Publish("paid", "", "1")], now_ms=1)
        with pytest.raises(Unknown, match="locked"):
            writer.run(Beat())

    writer.reopen()
    assert writer.connection.execute("SELECT count(*) FROM message").fetchone() == (0,)
    writer.close()


def test_opening_a_file_again_keeps_the_locks_that_this_process_has_on_it(tmp_path: Path) -> None:
    """Another process that closes the file believes to be the last one otherwise, and takes the log away under us."""
    path = str(tmp_path / "play.db")
    first = Writer(path, Settings())
    second = Writer(path, Settings())

    look = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM owner'); c.close()"
    subprocess.run([sys.executable, "-c", look, path], check=True)

    assert Path(f"{path}-wal").exists()
    second.close()
    first.close()


def test_a_text_that_is_no_text_any_more_is_damage_whatever_its_bytes_say(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (text TEXT)")
    connection.execute("INSERT INTO t VALUES (CAST(x'66756c6cff' AS TEXT))")  # "full", and a byte that is no text.

    with pytest.raises(Damaged, match="restore a backup"), explained(str(path)):
        connection.execute("SELECT text FROM t").fetchall()

    connection.close()
