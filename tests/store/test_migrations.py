"""The schema's versions: each step whole or not at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from understudy.model.errors import NewerSchema, OlderSchema
from understudy.store import migrations
from understudy.store.connection import Database, Settings, open_reader, open_writer
from understudy.store.migrations import LATEST, STEPS, check_latest, migrate, version_of
from understudy.store.schema import APPLICATION_ID, INDEXES, TABLES
from understudy.store.writer import Writer


def add_a_table(database: Database) -> None:
    database.connection().execute("CREATE TABLE further (a)")
    database.connection().execute("UPDATE owner SET holder = 'migrated'")


def break_in_the_middle(database: Database) -> None:
    database.connection().execute("CREATE TABLE unfinished (a)")
    raise KeyboardInterrupt


def run_into_the_database(database: Database) -> None:
    add_a_table(database)
    database.connection().execute("INSERT INTO token (instance, id) VALUES (1, 1)")


def grow(monkeypatch: pytest.MonkeyPatch, *steps: migrations.Step) -> None:
    monkeypatch.setattr(migrations, "STEPS", (*STEPS, *steps))
    monkeypatch.setattr(migrations, "LATEST", LATEST + len(steps))


def content(path: Path) -> tuple[int, int, list[tuple[str]], list[tuple[str]]]:
    with closing(sqlite3.connect(path)) as connection:
        return (
            connection.execute("PRAGMA application_id").fetchone()[0],
            connection.execute("PRAGMA user_version").fetchone()[0],
            connection.execute("SELECT name FROM sqlite_master ORDER BY name").fetchall(),
            connection.execute("SELECT holder FROM owner").fetchall(),
        )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


def make(path: Path) -> list[int]:
    writer = Writer(str(path), Settings())
    writer.close()
    return writer.migrated


def test_an_empty_file_is_brought_to_the_latest_schema(path: Path) -> None:
    assert make(path) == list(range(1, LATEST + 1))

    application, version, names, _ = content(path)
    assert (application, version) == (APPLICATION_ID, LATEST)
    expected = {table._meta.table_name for table in TABLES} | set(INDEXES)
    assert expected <= {name for (name,) in names}


def test_a_file_of_the_latest_schema_is_left_as_it_is(path: Path) -> None:
    make(path)
    before = content(path)

    assert make(path) == []
    assert content(path) == before


def test_a_newer_program_takes_the_steps_that_are_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    grow(monkeypatch, add_a_table)

    assert make(path) == [LATEST + 1]
    assert content(path)[1] == LATEST + 1
    assert content(path)[3] == [("migrated",)]


@pytest.mark.parametrize(
    ("step", "error"), [(break_in_the_middle, KeyboardInterrupt), (run_into_the_database, Exception)]
)
def test_a_step_that_is_interrupted_leaves_the_old_version_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: migrations.Step, error: type[BaseException]
) -> None:
    make(path)
    before = content(path)
    grow(monkeypatch, step)

    with pytest.raises(error):
        make(path)

    assert content(path) == before
    grow(monkeypatch, add_a_table)
    assert make(path) == [LATEST + 1]


def test_of_several_steps_those_before_the_interrupted_one_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    grow(monkeypatch, add_a_table, break_in_the_middle)

    with pytest.raises(KeyboardInterrupt):
        make(path)

    assert content(path)[1] == LATEST + 1


def test_an_interrupted_creation_leaves_a_file_that_can_be_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "STEPS", (lambda database: (STEPS[0](database), 1 / 0),))
    with pytest.raises(ZeroDivisionError):
        make(path)

    monkeypatch.setattr(migrations, "STEPS", STEPS)

    assert make(path) == [1]


def test_a_newer_schema_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(monkeypatch, add_a_table)
    make(path)
    monkeypatch.setattr(migrations, "LATEST", LATEST)

    with pytest.raises(NewerSchema, match="upgrade"):
        make(path)


def test_a_reader_asks_for_the_migration_it_cannot_make(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    grow(monkeypatch, add_a_table)
    reader = open_reader(str(path))

    with pytest.raises(OlderSchema, match="understudy migrate"):
        check_latest(reader, str(path))

    reader.close()


def test_an_empty_file_has_version_zero(path: Path) -> None:
    database = open_writer(str(path), Settings())

    version = version_of(database, str(path))
    taken = migrate(database, str(path))
    database.close()

    assert (version, taken) == (0, list(range(1, LATEST + 1)))
