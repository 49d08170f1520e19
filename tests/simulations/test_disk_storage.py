"""The real writer on a simulated disk: at every boundary of its work the disk dies, fails, and is opened again."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from understudy.model import commands as c
from understudy.model.decide import decide
from understudy.model.definition import Definition, Edge, Graph
from understudy.model.errors import Fenced, Rejected, Unavailable
from understudy.model.instance import Instance
from understudy.model.kinds import End, Receive, Start
from understudy.simulations.disk import Died, Disk, FaultKind
from understudy.simulations.disk_storage import PATH, DiskStorage, prepared_disk
from understudy.store.batch import WRITE
from understudy.store.commit import Commit, Stored, pack
from understudy.store.connection import Settings
from understudy.store.lending import Loan
from understudy.store.loading import Loaded, load
from understudy.store.operations import Deploy
from understudy.store.schema import MessageRow
from understudy.store.writer import Landed, Publish, Unknown, Writer

WAITING = Definition(
    name="waiting",
    nodes=(Start(id="start"), Receive(id="paid", message="paid", key="about"), End(id="end")),
    edges=(Edge(id="a", source="start", target="paid"), Edge(id="b", source="paid", target="end")),
    open_inputs=True,
)
MESSAGES = ("m1", "m2", "m3", "m4", "m5")
WORK = ("epoch", "definition", *MESSAGES[:3], "instance", *MESSAGES[3:])
SMALL_LOG = 8  # Pages after which the log is emptied into the file: several times in a piece of work.


class Clerk:
    """Does the same work in every life, and notes what was acknowledged."""

    def __init__(self, disk: Disk, *, durability: str = "full") -> None:
        self.storage = DiskStorage(disk)
        self.settings = Settings(durability=durability, checkpoint_pages=SMALL_LOG)
        self.writer: Writer | None = None
        self.acknowledged: list[str] = []

    def open(self) -> Writer:
        if self.writer is None:
            self.writer = Writer(PATH, self.settings, storage=self.storage)
        return self.writer

    def work(self) -> None:
        for fact in WORK:
            self.do(fact)
        self.open().checkpoint()
        self.open().close()

    def do(self, fact: str) -> None:
        writer = self.open()
        match fact:
            case "epoch":
                writer.take_over("clerk")
            case "definition":
                writer.run(Deploy(WAITING))
            case "instance":
                self._write(_started(writer.epoch))
            case message:
                self._write(Publish("paid", message, "1"))
        self.acknowledged.append(fact)

    def _write(self, change: Commit | Publish) -> None:
        result = self.open().write([change], now_ms=1).results[0]
        assert isinstance(result, Landed), result


def _started(epoch: int) -> Commit:
    instance = Instance()
    command = c.Start(at_ms=1, id="i", given_digest="", variables={"about": '"nothing"'})
    decision = decide(instance, _graph(1), command)
    assert decision.entry is not None
    return pack(instance, Stored(), [decision.entry], epoch=epoch, activation=1, requests=[])


def _graph(no: int) -> Graph:
    return Graph(WAITING, version=1, no=no)


def found_on(disk: Disk) -> list[str]:
    """What the next life finds, in the order in which it was to be done. Its database must be sound."""
    writer = Writer(PATH, Settings(), storage=DiskStorage(disk))
    read = writer.connection.execute
    assert read("PRAGMA integrity_check").fetchall() == [("ok",)]
    there = {"epoch"} if read("SELECT epoch FROM owner").fetchone()[0] > 0 else set()
    there |= {"definition" for _row in read("SELECT 1 FROM definition")}
    there |= {key for (key,) in read("SELECT key FROM message")}
    instances = load(writer.connection, ["i"], _graph)
    assert all(isinstance(one, Loaded) for one in instances.values()), instances
    there |= {"instance" for _id in instances}
    writer.close()
    return [fact for fact in WORK if fact in there]


def boundaries(new_disk: Callable[[], Disk], durability: str = "full") -> range:
    disk = new_disk()
    Clerk(disk, durability=durability).work()
    return range(1, len(disk.operations) + 1)


def died_at(disk: Disk, number: int, *, durability: str = "full") -> list[str]:
    """Work until the disk dies; what was acknowledged before."""
    clerk = Clerk(disk, durability=durability)
    disk.crash_at = number
    with pytest.raises(Died):
        clerk.work()
    return clerk.acknowledged


def is_prefix(found: list[str]) -> bool:
    return tuple(found) == WORK[: len(found)]


both_disks = pytest.mark.parametrize("new_disk", [Disk, prepared_disk], ids=["empty", "prepared"])


# --- the writer at every boundary -------------------------------------------------------------------------------------


@both_disks
def test_a_kill_at_any_boundary_loses_nothing_acknowledged(new_disk: Callable[[], Disk]) -> None:
    for number in boundaries(new_disk):
        disk = new_disk()
        acknowledged = died_at(disk, number)

        found = found_on(disk.kill())

        assert is_prefix(found), (number, found)
        assert len(acknowledged) <= len(found) <= len(acknowledged) + 1, (number, acknowledged, found)


@both_disks
def test_a_power_cut_at_any_boundary_loses_nothing_acknowledged(new_disk: Callable[[], Disk]) -> None:
    for number in boundaries(new_disk):
        disk = new_disk()
        disk.torn_sectors = number % 4
        acknowledged = died_at(disk, number)

        for seed in range(4):
            found = found_on(disk.power_cut(Random(seed)))

            assert is_prefix(found), (number, seed, found)
            assert len(acknowledged) <= len(found) <= len(acknowledged) + 1, (number, seed, acknowledged, found)


def test_relaxed_durability_loses_nothing_at_a_kill() -> None:
    for number in boundaries(prepared_disk, "relaxed"):
        disk = prepared_disk()
        acknowledged = died_at(disk, number, durability="relaxed")

        found = found_on(disk.kill())

        assert is_prefix(found), (number, found)
        assert len(found) >= len(acknowledged), (number, acknowledged, found)


def test_relaxed_durability_loses_the_last_commits_at_some_power_cuts_and_never_one_in_between() -> None:
    lost = 0
    for number in boundaries(prepared_disk, "relaxed"):
        disk = prepared_disk()
        acknowledged = died_at(disk, number, durability="relaxed")

        for seed in range(4):
            found = found_on(disk.power_cut(Random(seed)))

            assert is_prefix(found), (number, seed, found)
            lost += len(found) < len(acknowledged)
    assert lost > 0


def test_a_power_cut_after_a_kill_still_loses_nothing_acknowledged() -> None:
    for number in boundaries(prepared_disk):
        disk = prepared_disk()
        acknowledged = died_at(disk, number)
        second = disk.kill()
        clerk = Clerk(second)
        clerk.do("epoch")

        found = found_on(second.power_cut(Random(number)))

        assert set(acknowledged) | {"epoch"} <= set(found), (number, acknowledged, found)


@pytest.mark.parametrize("kind", ["full", "io", "sync"])
@pytest.mark.parametrize("count", [1, 12])
def test_a_refused_operation_is_never_a_success_and_costs_nothing_acknowledged(kind: FaultKind, count: int) -> None:
    struck = 0
    for number in boundaries(prepared_disk):
        disk = prepared_disk()
        clerk = Clerk(disk)
        disk.fail(kind, at=number, count=count)
        work_on(clerk)
        struck += disk.struck.get(kind, 0)

        for heir in (disk.power_cut(Random(number)), disk.kill()):
            found = found_on(heir)

            assert set(clerk.acknowledged) <= set(found), (number, clerk.acknowledged, found)
    assert struck >= (len(boundaries(prepared_disk)) if kind == "io" else 1)


@pytest.mark.parametrize("kind", ["full", "io", "sync"])
def test_a_power_cut_right_after_a_refused_operation_costs_nothing_acknowledged(kind: FaultKind) -> None:
    struck = 0
    for number in boundaries(prepared_disk):
        disk = prepared_disk()
        clerk = Clerk(disk)
        disk.fail(kind, at=number)
        for fact in WORK:
            if not is_done(clerk, fact) or disk.struck:
                break
        struck += bool(disk.struck)

        for seed in range(3):
            found = found_on(disk.power_cut(Random(seed)))

            assert set(clerk.acknowledged) <= set(found), (number, seed, clerk.acknowledged, found)
    assert struck > 0


@pytest.mark.parametrize("count", [1, 5])
def test_an_unreadable_place_is_never_taken_for_an_empty_one(count: int) -> None:
    quiet = prepared_disk()
    work_on(Clerk(quiet))
    for number in range(1, quiet.reads + 1):
        disk = prepared_disk()
        clerk = Clerk(disk)
        disk.fail("read", at=number, count=count)
        work_on(clerk)

        found = found_on(disk.kill())

        assert disk.struck["read"] > 0
        assert set(clerk.acknowledged) <= set(found), (number, clerk.acknowledged, found)


def test_while_the_disk_is_busy_nothing_is_written_and_after_it_everything_is() -> None:
    disk = prepared_disk()
    clerk = Clerk(disk)
    clerk.do("epoch")
    before = disk.snapshot()
    disk.fail("busy", count=2)

    for _attempt in range(2):
        with pytest.raises(Unknown, match="database is locked"):
            clerk.do("m1")

    assert disk.snapshot() == before
    clerk.do("m1")
    assert found_on(disk.kill()) == ["epoch", "m1"]


def work_on(clerk: Clerk) -> None:
    """Do the work, whatever is refused on the way. Only what all the rest needs is tried again."""
    for fact in WORK:
        while not is_done(clerk, fact) and fact in ("epoch", "definition"):
            pass
    with contextlib.suppress(Unknown):
        clerk.open().checkpoint()
    clerk.open().close()


def is_done(clerk: Clerk, fact: str) -> bool:
    """A refusal may only be one of these two; the file is opened again then, as the persistence actor does."""
    try:
        clerk.do(fact)
    except (Unknown, Unavailable):
        if clerk.writer is not None:
            reopen(clerk)
        return False
    return True


def reopen(clerk: Clerk) -> None:
    writer = clerk.writer
    assert writer is not None
    if writer.epoch == 0:  # It is not the owner yet, and has nothing to lose.
        writer.close()
        clerk.writer = None
        return
    for _attempt in range(50):
        try:
            writer.reopen()
        except (Unknown, Unavailable):
            continue
        return
    raise AssertionError("the disk has recovered, and the writer has not")


def test_the_same_work_leaves_the_same_bytes() -> None:
    images = []
    for seed in (1, 1, 2):
        disk = Disk(seed=seed)
        Clerk(disk).work()
        second = disk.kill()
        Clerk(second).do("epoch")
        images.append(second.snapshot())

    assert images[0] == images[1]
    assert images[0] != images[2]  # By the salts of the log alone.


@pytest.fixture
def disk() -> Disk:
    return prepared_disk()


# --- several processes ------------------------------------------------------------------------------------------------


def test_two_writers_on_one_disk_take_turns_and_the_older_is_fenced(disk: Disk) -> None:
    old, new = Clerk(disk), Clerk(disk)
    old.do("epoch")
    old.do("m1")
    new.do("epoch")
    new.do("m2")

    with pytest.raises(Fenced):
        old.do("m3")
    new.do("m4")

    assert set(found_on(disk.kill())) == {"epoch", "m1", "m2", "m4"}


def test_a_file_with_a_transaction_is_locked_for_all_others(disk: Disk) -> None:
    one, two = (DiskStorage(disk).connect(PATH, Settings()) for _ in range(2))
    one.execute("BEGIN IMMEDIATE")
    one.execute("UPDATE owner SET epoch = 1")

    with pytest.raises(sqlite3.OperationalError, match="database is locked"):
        two.execute("UPDATE owner SET epoch = 2")
    one.execute("COMMIT")
    two.execute("UPDATE owner SET epoch = epoch + 10")

    assert one.execute("SELECT epoch FROM owner").fetchone() == (11,)


def test_a_process_that_dies_leaves_the_disk_to_the_others(disk: Disk) -> None:
    dying, other = Clerk(disk), Clerk(disk)
    dying.do("epoch")
    dying.open().connection.execute("BEGIN IMMEDIATE")
    dying.open().connection.execute("DELETE FROM owner")
    operations = len(disk.operations)

    dying.storage.die()

    assert len(disk.operations) == operations
    other.do("epoch")
    assert other.open().epoch == 2


# --- readers ----------------------------------------------------------------------------------------------------------


def test_a_reader_follows_the_writer_through_its_reopening(disk: Disk) -> None:
    clerk = Clerk(disk)
    clerk.do("epoch")
    reader = clerk.storage.reader(PATH)
    clerk.do("m1")
    clerk.open().reopen()
    clerk.do("m2")

    assert reader.connection().execute("SELECT key FROM message").fetchall() == [("m1",), ("m2",)]
    assert MessageRow.select().count(reader) == 2

    reader.close()
    assert not reader.is_closed()


def test_a_reader_reads_while_the_connection_is_lent(disk: Disk) -> None:
    clerk = Clerk(disk)
    for fact in WORK:
        clerk.do(fact)
    connection = clerk.open().connection
    connection.execute("INSERT INTO work (instance, task, attempt, result) VALUES (1, 1, 1, '1')")
    loan = Loan(clerk.open(), instance=1, task=1, attempt=1)
    reader = clerk.storage.reader(PATH)

    assert reader.connection().execute("SELECT count(*) FROM message").fetchone() == (5,)
    with pytest.raises(Rejected, match="may not run"):
        loan.lent.execute("SELECT * FROM message")

    loan.roll_back()


def test_a_reader_cannot_write_and_without_a_writer_it_cannot_read(disk: Disk) -> None:
    clerk = Clerk(disk)
    reader = clerk.storage.reader(PATH)

    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        reader.connection().execute("SELECT 1")
    clerk.do("epoch")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.connection().execute("UPDATE owner SET epoch = 9")


def test_a_tap_sees_each_statement_and_may_let_it_fail_after_it_ran(disk: Disk) -> None:
    clerk = Clerk(disk)
    clerk.do("epoch")
    seen = []

    def lost_answer(statement: str, run: Any) -> Any:
        seen.append(statement)
        run()
        raise sqlite3.OperationalError("disk I/O error")

    clerk.storage.tap = lost_answer
    with pytest.raises(Unknown):
        clerk.do("m1")
    clerk.storage.tap = None

    assert seen == [WRITE]
    assert found_on(disk.kill()) == ["epoch", "m1"]
