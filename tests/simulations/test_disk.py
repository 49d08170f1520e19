"""A disk that loses what it may lose and nothing else, and SQLite on it, which fails as the standard library's does."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from understudy.simulations.apsw_connection import Connection
from understudy.simulations.disk import SECTOR_BYTES, Died, Disk, Failed, FaultKind
from understudy.simulations.disk_storage import PATH, DiskStorage, prepared_disk
from understudy.store.connection import Settings

# --- the disk ---------------------------------------------------------------------------------------------------------

OLD, NEW = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES


def a_disk_with(content: bytes) -> Disk:
    return Disk({"f": content})


def test_of_a_write_that_was_not_synced_a_power_cut_keeps_any_sectors_and_only_whole_ones() -> None:
    disk = a_disk_with(OLD * 3)
    disk.write(disk.open("f"), 0, NEW * 3)

    contents = [disk.power_cut(Random(seed)).snapshot()["f"] for seed in range(200)]

    sectors = {tuple(content[n : n + SECTOR_BYTES] for n in (0, 512, 1_024)) for content in contents}
    assert sectors <= {(a, b, c) for a in (OLD, NEW) for b in (OLD, NEW) for c in (OLD, NEW)}
    assert len(sectors) == 8


def test_a_power_cut_may_keep_a_later_write_and_lose_an_earlier_one() -> None:
    disk = a_disk_with(OLD)
    file = disk.open("f")
    disk.write(file, SECTOR_BYTES, NEW)
    disk.write(file, 2 * SECTOR_BYTES, NEW)

    contents = {disk.power_cut(Random(seed)).snapshot()["f"] for seed in range(200)}

    assert OLD + bytes(SECTOR_BYTES) + NEW in contents
    assert {OLD, OLD + NEW, OLD + NEW + NEW} <= contents


def test_a_truncation_that_was_not_synced_may_be_undone() -> None:
    disk = a_disk_with(OLD + NEW)
    disk.cut(disk.open("f"), SECTOR_BYTES)

    contents = {disk.power_cut(Random(seed)).snapshot()["f"] for seed in range(50)}

    assert contents == {OLD, OLD + NEW}


def test_what_was_synced_survives_every_power_cut() -> None:
    disk = a_disk_with(OLD)
    file = disk.open("f")
    disk.write(file, 100, NEW)
    disk.cut(file, 300)
    disk.sync(file)
    expected = disk.snapshot()

    assert all(disk.power_cut(Random(seed)).snapshot() == expected for seed in range(50))


def test_what_a_kill_has_kept_the_next_power_cut_may_take() -> None:
    disk = a_disk_with(OLD)
    disk.write(disk.open("f"), 0, NEW)
    second = disk.kill()
    third = second.kill()

    assert second.snapshot()["f"] == NEW
    assert {third.power_cut(Random(seed)).snapshot()["f"] for seed in range(50)} == {OLD, NEW}


def test_a_file_is_durably_there_or_gone_only_after_a_sync() -> None:
    disk = a_disk_with(OLD)
    disk.delete("f")
    disk.write(disk.open("f"), 0, NEW)

    unsynced = [disk.power_cut(Random(seed)).snapshot().get("f") for seed in range(100)]

    assert {OLD, NEW, b""} <= set(unsynced)

    disk = a_disk_with(OLD)
    disk.delete("f")
    file = disk.open("g")
    disk.sync(file)

    assert all(list(disk.power_cut(Random(seed)).snapshot()) == ["g"] for seed in range(50))


def test_the_operation_at_which_a_disk_dies_does_not_happen_and_no_later_one_does() -> None:
    disk = a_disk_with(OLD)
    file = disk.open("f")
    disk.crash_at = 2
    disk.write(file, 0, NEW)
    before = disk.snapshot()

    zombie: list[Callable[[], object]] = [
        lambda: disk.write(file, 0, OLD),
        lambda: disk.write(file, 0, OLD),
        lambda: disk.cut(file, 0),
        lambda: disk.sync(file),
        lambda: disk.delete("f"),
        lambda: disk.flip("f", 0, 0),
        lambda: disk.truncate("f", 0),
        lambda: disk.restore({}),
    ]
    for act in zombie:
        with pytest.raises(Died, match="died at operation 2, write of f"):
            act()

    assert disk.is_dead
    assert disk.snapshot() == before
    assert disk.kill().snapshot() == before


def test_a_write_at_which_a_disk_dies_may_be_torn() -> None:
    disk = a_disk_with(OLD * 3)
    disk.crash_at, disk.torn_sectors = 1, 2

    with pytest.raises(Died):
        disk.write(disk.open("f"), 100, NEW * 2)

    torn = NEW * 2
    assert disk.kill().snapshot()["f"] == OLD[:100] + torn[: 2 * SECTOR_BYTES - 100] + OLD


def test_a_fault_lasts_for_its_operations_and_strikes_those_of_its_kind() -> None:
    disk = a_disk_with(b"")
    file = disk.open("f")
    disk.fail("full", at=2, count=3)

    disk.write(file, 0, b"1")
    with pytest.raises(Failed) as refused:
        disk.write(file, 0, b"2")
    disk.sync(file)
    with pytest.raises(Failed):
        disk.write(file, 0, b"4")
    disk.write(file, 0, b"5")

    assert refused.value.kind == "full"
    assert disk.struck == {"full": 2}
    assert disk.snapshot()["f"] == b"5"
    assert [operation.kind for operation in disk.operations] == ["write", "write", "sync", "write", "write"]


def test_bits_flip_ends_are_lost_and_old_backups_come_back() -> None:
    disk = a_disk_with(b"abc")
    backup = disk.snapshot()
    disk.flip("f", 1, 0)
    disk.truncate("f", 2)

    assert disk.snapshot() == {"f": b"ac"}

    disk.restore(backup)

    assert disk.snapshot() == {"f": b"abc"}


# --- the connection ---------------------------------------------------------------------------------------------------


@pytest.fixture
def disk() -> Disk:
    return prepared_disk()


@pytest.fixture
def connection(disk: Disk) -> Iterator[Connection]:
    made = DiskStorage(disk).connect(PATH, Settings())
    yield made
    disk.kill()


SCHEMA = (
    "CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT UNIQUE NOT NULL, CHECK (b <> ''))",
    "CREATE TRIGGER guard BEFORE DELETE ON t BEGIN SELECT RAISE(ABORT, 'stale'); END",
    "INSERT INTO t VALUES (1, 'x')",
)


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        ("INSERT INTO t VALUES (2, 'x')", ()),
        ("INSERT INTO t VALUES (2, '')", ()),
        ("INSERT INTO t VALUES (2, NULL)", ()),
        ("INSERT INTO t VALUES ('text', 'y')", ()),
        ("DELETE FROM t", ()),
        ("SELECT * FROM nowhere", ()),
        ("SELECT nothing", ()),
        ("SELEC 1", ()),
        ("SELECT json_extract('{', '$')", ()),
        ("SELECT 1; SELECT 2", ()),
        ("COMMIT", ()),
        ("SELECT b FROM t; DROP TABLE t", ()),
    ],
)
def test_a_refused_statement_is_refused_as_by_the_standard_library(
    connection: Connection, statement: str, parameters: Any
) -> None:
    standard = sqlite3.connect(":memory:", isolation_level=None)
    for each in (connection, standard):
        for line in SCHEMA:
            each.execute(line)

    with pytest.raises(sqlite3.Error) as ours:
        connection.execute(statement, parameters)
    with pytest.raises(sqlite3.Error) as theirs:
        standard.execute(statement, parameters)

    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
    assert code_of(ours.value) == code_of(theirs.value)
    standard.close()


def code_of(error: sqlite3.Error) -> tuple[int, str] | None:
    """What SQLite itself has refused has one."""
    return (error.sqlite_errorcode, error.sqlite_errorname) if hasattr(error, "sqlite_errorcode") else None


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        ("SELECT ?", ()),
        ("SELECT ?", (1, 2)),
        ("SELECT :name", {}),
        ("SELECT ?", (object(),)),
        ("SELECT ?", (2**70,)),
        ("SELECT ?", ("\ud800",)),
        ("SELECT CAST(x'ff' AS TEXT)", ()),
    ],
)
def test_a_value_that_cannot_pass_raises_the_class_that_the_standard_library_raises(
    connection: Connection, statement: str, parameters: Any
) -> None:
    standard = sqlite3.connect(":memory:")

    with pytest.raises(Exception) as theirs:  # noqa: PT011  # Which one is what is asked.
        standard.execute(statement, parameters).fetchall()
    with pytest.raises(type(theirs.value)):
        connection.execute(statement, parameters).fetchall()

    standard.close()


def test_results_are_those_of_the_standard_library(connection: Connection) -> None:
    standard = sqlite3.connect(":memory:", isolation_level=None)

    def results(of: Any) -> list[Any]:
        for line in SCHEMA[::2]:
            of.execute(line)
        inserted = of.execute("INSERT INTO t (b) VALUES ('y')")
        many = of.executemany("INSERT INTO t (b) VALUES (?)", [("1",), ("2",)])
        changed = of.execute("UPDATE t SET a = a + 10")
        rows = of.execute("SELECT a, b AS name FROM t WHERE b > :least ORDER BY a", {"least": "x"})
        empty = of.execute("SELECT a FROM t WHERE 0")
        of.execute("BEGIN")
        was_in_transaction = of.in_transaction
        of.execute("DELETE FROM t")
        of.rollback()
        found = [inserted.rowcount, inserted.lastrowid, many.rowcount, changed.rowcount, rows.rowcount]
        found += [rows.description, rows.fetchone(), rows.fetchone(), rows.fetchall(), empty.description]
        found += [inserted.description, was_in_transaction, of.in_transaction, of.total_changes]
        return [*found, list(of.execute("SELECT * FROM t")), of.cursor().execute("SELECT 1").fetchmany(5)]

    assert results(connection) == results(standard)
    standard.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("full", "database or disk is full"),
        ("io", "disk I/O error"),
        ("sync", "disk I/O error"),
        ("busy", "database is locked"),
    ],
)
def test_a_refusing_disk_is_an_operational_error_and_leaves_no_transaction(
    disk: Disk, connection: Connection, kind: FaultKind, text: str
) -> None:
    disk.fail(kind, count=9)

    with pytest.raises(sqlite3.OperationalError) as refused:
        connection.execute("UPDATE owner SET epoch = 7")

    assert str(refused.value) == text
    assert not connection.in_transaction
    disk.heal()
    assert connection.execute("SELECT epoch FROM owner").fetchall() == [(0,)]


def test_a_damaged_file_and_a_strange_one_raise_database_errors() -> None:
    damaged, strange = prepared_disk(), Disk({PATH: b"x" * 4_096})
    for byte in range(4_096, len(damaged.files[PATH].content)):
        damaged.flip(PATH, byte, 3)

    with pytest.raises(sqlite3.DatabaseError, match="database disk image is malformed"):
        DiskStorage(damaged).connect(PATH, Settings()).execute("SELECT * FROM owner")
    with pytest.raises(sqlite3.DatabaseError, match="file is not a database"):
        DiskStorage(strange).connect(PATH, Settings())


def test_a_checkpoint_that_fails_is_no_failure_of_the_commit_before_it(disk: Disk) -> None:
    connection = DiskStorage(disk).connect(PATH, Settings(checkpoint_pages=1))
    connection.execute("UPDATE owner SET epoch = 1")
    operations = len(disk.operations)
    connection.execute("UPDATE owner SET epoch = 2")
    written = [operation.file for operation in disk.operations[operations:]]
    disk.fail("io", at=len(disk.operations) + written.index(PATH) + 1)

    connection.execute("UPDATE owner SET epoch = 3")

    assert disk.struck == {"io": 1}
    assert connection.execute("SELECT epoch FROM owner").fetchone() == (3,)


def test_whoever_survives_the_disk_in_memory_is_harmless_and_silent(
    disk: Disk, connection: Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    connection.execute("UPDATE owner SET epoch = 1")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE owner SET epoch = 2")
    disk.crash_at = len(disk.operations) + 1
    with pytest.raises(Died):
        connection.execute("COMMIT")
    before = disk.snapshot()

    for statement in ("ROLLBACK", "SELECT 1", "UPDATE owner SET epoch = 3"):
        with pytest.raises(Died):
            connection.execute(statement)
    connection.close()
    del connection

    assert disk.snapshot() == before
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_dies_while_it_closes_says_so_once(disk: Disk) -> None:
    connection = DiskStorage(disk).connect(PATH, Settings())
    connection.execute("UPDATE owner SET epoch = 1")
    disk.crash_at = len(disk.operations) + 1

    with pytest.raises(Died):
        connection.close()
    connection.close()

    assert disk.is_dead


def test_a_disk_that_fails_while_a_connection_closes_is_passed_over(
    disk: Disk, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = DiskStorage(disk).connect(PATH, Settings())
    connection.execute("UPDATE owner SET epoch = 1")
    disk.fail("io", count=99)

    connection.close()

    assert disk.struck["io"] > 0
    assert capfd.readouterr() == ("", "")
    disk.heal()
    assert DiskStorage(disk).connect(PATH, Settings()).execute("SELECT epoch FROM owner").fetchone() == (1,)
