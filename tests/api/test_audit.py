"""An audit finds whatever differs from what was written, and nothing else; the doctor says what to do."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import frozen

from understudy import Process, Runtime, parallel, saga, sleep, task, wait
from understudy.audit import Report, audit
from understudy.cli import main
from understudy.doctor import Level, examine
from understudy.model.commands import Start as StartCommand
from understudy.model.decide import decide
from understudy.model.definition import Definition, Edge, Graph, decode_definition
from understudy.model.instance import Instance
from understudy.model.kinds import Choice, End, Fork, Join, Merge, Start
from understudy.store import commit
from understudy.store.connection import Settings, open_reader
from understudy.store.loading import Loaded, load
from understudy.store.migrations import LATEST
from understudy.store.operations import Deploy
from understudy.store.ownership import Address, OwnerFile
from understudy.store.reads import Readers, Reads
from understudy.store.writer import Writer


@frozen
class Order:
    order_id: str
    amount: int = 40


@task(into="receipt")
def charge(order_id: str, amount: int) -> str:
    return f"r-{order_id}"


@charge.undo
def refund(receipt: str) -> None: ...


@task
def pack(order_id: str) -> None: ...


@task
def invoice(order_id: str, amount: int) -> None:
    if amount == 13:
        raise ValueError("bad luck")


@task
def broken(order_id: str) -> None:
    raise ValueError("no paper")


checkout = Process(
    "checkout", saga(charge, parallel(pack, invoice)), wait("delivered", key="order_id", timeout="72h"), takes=Order
)
stopped = Process("stopped", broken, takes=Order)
sleeping = Process("sleeping", sleep("72h"), takes=Order)
PROCESSES = (checkout, stopped, sleeping)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Instances in every kind of state, written by a real runtime that was then closed."""
    path = tmp_path_factory.mktemp("audit") / "orders.db"
    with Runtime(path, *PROCESSES, durability="relaxed") as runtime:
        for name in ("waits", "done", "cancelled", "paused"):
            order = runtime.start(checkout, Order(name), id=name)
            order.wait_until(lambda state: state.is_waiting_for("delivered"))
        runtime.send("done", "delivered", {"at": "door"})
        runtime.cancel("cancelled", reason="changed my mind")
        runtime.pause("paused")
        runtime.start(checkout, Order("undone", 13), id="undone").wait_until(lambda state: state.outcome is not None)
        runtime.start(stopped, Order("stuck"), id="stuck").wait_until(lambda state: bool(state.incidents))
        runtime.start(sleeping, Order("asleep"), id="asleep")
        runtime.publish("nobody", key="7")
    return path


@pytest.fixture
def db(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(filled, tmp_path / "orders.db"))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Reads]:
    readers = Readers(str(path), lambda: open_reader(str(path)))
    try:
        yield Reads(readers)
    finally:
        readers.close()


def audited(path: Path) -> Report:
    with reading(path) as reads:
        return audit(reads)


def change(path: Path, statement: str, *parameters: Any) -> None:
    """What no program of ours does: write to the file from outside."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute(statement, parameters).rowcount
        connection.commit()


# --- audit ------------------------------------------------------------------------------------------------------------


def test_what_was_written_by_a_runtime_is_sound(db: Path) -> None:
    report = audited(db)

    assert report.violations == ()
    assert report.ok
    assert report.instances == 7
    assert report.commits > 20
    assert report.lines[0].startswith("Everything is as it was written: 7 instances")


def test_an_audit_may_run_beside_a_service_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    with Runtime(path, *PROCESSES, durability="relaxed") as runtime:
        reports = []
        for number in range(30):
            runtime.start(checkout, Order(str(number)), id=f"order-{number}")
            if number % 3 == 0:
                reports.append(audited(path))

    assert [report.violations for report in reports] == [()] * 10


def test_a_database_in_memory_can_be_audited_too() -> None:
    with Runtime(":memory:", *PROCESSES) as runtime:
        runtime.start(stopped, Order("7"), id="stuck").wait_until(lambda state: bool(state.incidents))

        assert audit(runtime.node.reads).ok


def test_progress_is_told_up_to_the_last_instance(db: Path) -> None:
    told: list[tuple[int, int]] = []

    with reading(db) as reads:
        audit(reads, progress=lambda done, total: told.append((done, total)))

    assert told[-1] == (7, 7)


def test_a_token_that_is_stopped_at_a_join_has_not_arrived_there_after_a_restart_either(tmp_path: Path) -> None:
    path = tmp_path / "endless.db"
    nodes = (Start(id="start"), Merge(id="loop"), Merge(id="pad"), Fork(id="fork"), Join(id="join"), Choice(id="again"))
    ways = ["start pad", "pad loop", "loop fork", "fork join", "fork  join", "join again", "again loop", "again end"]
    edges = [Edge(id=way, source=way.split()[0], target=way.split()[1]) for way in ways]
    edges[6:] = [attrs.evolve(edges[6], condition="1 == 1"), attrs.evolve(edges[7], is_default=True)]
    definition = Definition(name="endless", nodes=(*nodes, End(id="end")), edges=tuple(edges), open_inputs=True)
    writer = Writer(str(path), Settings())
    writer.take_over("test")
    no, version = writer.run(Deploy(definition))
    instance = Instance()
    start = StartCommand(at_ms=1, id="endless", given_digest="", variables={})
    entry = decide(instance, Graph(definition, version=version, no=no), start).entry
    assert entry is not None
    assert "join" in {incident.node for incident in instance.incidents.values()}
    writer.write(
        [commit.pack(instance, commit.Stored(), [entry], epoch=writer.epoch, activation=1, requests=[])], now_ms=1
    )
    writer.close()

    assert audited(path).violations == ()


WAITS = "(SELECT no FROM instance WHERE id = 'waits')"
DAMAGES = {
    "a variable": ("rows", "waits", f"UPDATE variable SET value = '41' WHERE name = 'amount' AND instance = {WAITS}"),
    "a lost wait": ("rows", "waits", f"DELETE FROM wait WHERE instance = {WAITS}"),
    "an unreadable row": ("rows", "waits", f"UPDATE token SET attempt = 'x' WHERE instance = {WAITS}"),
    "a result": ("rows", "done", "UPDATE instance SET result = '1' WHERE id = 'done'"),
    "who is runnable": ("rows", "waits", "UPDATE instance SET runnable = 1 WHERE id = 'waits'"),
    "the head": ("rows", "waits", "DELETE FROM history WHERE seq = (SELECT head FROM instance WHERE id = 'waits')"),
    "a missing commit": ("I11", "waits", f"DELETE FROM history WHERE n = 2 AND instance = {WAITS}"),
    "a changed commit": (
        "I11",
        "waits",
        f"UPDATE history SET events = replace(events, 'charge', 'egrahc') WHERE n = 1 AND instance = {WAITS}",
    ),
    "the time of a commit": (
        "I11",
        "waits",
        f"UPDATE history SET at_ms = at_ms + 1 WHERE n = 2 AND instance = {WAITS}",
    ),
    "a lost definition": ("rows", "stuck", "UPDATE instance SET definition = 99 WHERE id = 'stuck'"),
    "a foreign commit": (
        "I2",
        "",
        f"INSERT INTO history SELECT 999, partition, instance, 99, prev, at_ms, epoch, events, digest FROM history "
        f"WHERE n = 1 AND instance = {WAITS}",
    ),
    "a lost tail": ("I8", "", "INSERT INTO subscriber VALUES ('mail', 0, 9999)"),
    "a lost owner": ("I10", "", "UPDATE owner SET epoch = 0"),
    "a definition": (
        "definitions",
        "",
        "UPDATE definition SET body = replace(body, '72h', '71h') WHERE name = 'sleeping'",
    ),
    "a commit of somebody who was replaced": ("I10", "", "UPDATE history SET epoch = 99 WHERE seq = 1"),
    "a message beside its wait": (
        "I8",
        "",
        f"INSERT INTO message SELECT 999, name, key, 'null', NULL, NULL, NULL FROM wait "
        f"WHERE kind = 'message' AND instance = {WAITS}",
    ),
    "an assigned message": ("messages", "", f"UPDATE message SET instance = {WAITS}, wait = 99"),
    "a result nobody wants": (
        "results",
        "",
        "INSERT INTO work SELECT no, 3, 1, '1' FROM instance WHERE id = 'done'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_is_changed_from_outside_is_found(db: Path, damage: str) -> None:
    id_, instance, statement = DAMAGES[damage]

    change(db, statement)
    report = audited(db)

    found = {(violation.id, violation.instance) for violation in report.violations}
    assert (id_, instance) in found
    assert not report.ok


def owner_secret(path: Path) -> str:
    with OwnerFile.of(path) as file:
        address = file.address()
    assert address is not None
    return address.secret


@pytest.mark.parametrize(
    ("place", "statement"),
    [
        ("instance.title", "UPDATE instance SET title = 'see ' || ? WHERE id = 'waits'"),
        ("incident.detail", "UPDATE incident SET detail = ?"),
        ("history.events", "UPDATE history SET events = events || ? WHERE seq = 3"),
        ("message.payload", "UPDATE message SET payload = ?"),
    ],
)
def test_the_owners_control_secret_is_found_wherever_it_stands_in_the_database(
    db: Path, place: str, statement: str
) -> None:
    with Runtime(db, *PROCESSES):
        secret = owner_secret(db)

    change(db, statement, secret)
    found = [violation.message for violation in audited(db).violations if violation.id == "I17"]

    assert len(found) == 1
    assert found[0].startswith(f"the owner's control secret stands in {place}")
    assert secret not in found[0]


def test_an_audit_makes_no_owner_file_and_does_without_one(db: Path) -> None:
    assert audited(db).ok
    assert not Path(f"{db}-owner").exists()


def test_the_control_secret_is_neither_logged_nor_shown_nor_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "orders.db"
    caplog.set_level("DEBUG")
    with Runtime(path, *PROCESSES) as runtime:
        runtime.start(stopped, Order("stuck"), id="stuck").wait_until(lambda state: bool(state.incidents))
        runtime.start(checkout, Order("undone", 13), id="undone").wait_until(lambda state: state.outcome is not None)
        secret = owner_secret(path)
        for command in (["list"], ["show", "stuck"], ["doctor"], ["audit"]):
            main([command[0], str(path), *command[1:], "--json"])
        shown = capsys.readouterr().out
        assert audit(runtime.node.reads).ok

    assert len(secret) >= 32
    assert "stuck" in shown
    assert secret not in shown
    assert secret not in caplog.text
    assert all(secret.encode() not in file.read_bytes() for file in (path, *path.parent.glob("orders.db-wal")))


def test_an_instance_that_cannot_be_read_is_one_violation_and_the_others_are_read(db: Path) -> None:
    change(db, f"UPDATE token SET attempt = 'x' WHERE instance = {WAITS}")

    report = audited(db)

    assert [violation.instance for violation in report.violations] == ["waits"]
    assert report.instances == 7


def rewritten(path: Path, name: str, act: Callable[[Instance], object]) -> None:
    """Change an instance's rows and make all checksums fit: then only the history can tell."""
    with reading(path) as reads:

        def graph_of(no: int) -> Graph:
            row = reads.definition(no)
            assert row is not None
            return Graph(decode_definition(row[0]), version=row[1], no=no)

        loaded = load(reads.connection(), [name], graph_of)[name]
    assert isinstance(loaded, Loaded)
    act(loaded.instance)
    total = commit.rows_sum(loaded.instance)
    runnable = int(loaded.instance.is_runnable)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for table, rows in loaded.instance.tables().items():
            for key in [key for key in rows.changed if key not in rows]:
                connection.execute(f'DELETE FROM "{table}" WHERE instance = ? AND id = ?', (loaded.stored.no, key))
        connection.execute(
            "UPDATE instance SET checksum = ?, runnable = ? WHERE id = ?",
            (commit.checksum(loaded.instance, loaded.stored.version, total), runnable, name),
        )
        connection.commit()


def test_rows_that_were_rewritten_with_their_checksums_do_not_fit_the_history(db: Path) -> None:
    rewritten(db, "waits", lambda instance: instance.drop_waits(next(iter(instance.tokens))))

    report = audited(db)

    assert {violation.id for violation in report.violations} == {"I6", "I11", "I14"}
    assert "I14 waits: token 1 waits at delivered for nothing" in report.lines


@pytest.mark.parametrize("seed", range(12))
def test_a_file_with_broken_pages_is_audited_to_the_end_and_not_called_sound(db: Path, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(db.read_bytes())
    page = chance.randrange(3, len(data) // 4_096) * 4_096
    for place in range(page, page + 4_096):
        data[place] = chance.randrange(256)
    db.write_bytes(bytes(data))

    report = audited(db)

    assert not report.ok
    assert report.lines


def test_a_report_is_given_to_people_in_few_lines_and_to_programs_in_full(db: Path) -> None:
    change(db, "UPDATE owner SET epoch = 0")

    report = audited(db)

    assert report.lines[-1].startswith("Do not go on with this file")
    assert report.as_dict()["ok"] is False
    assert report.as_dict()["violations"][0]["id"] == "I10"


# --- doctor -----------------------------------------------------------------------------------------------------------


def levels(path: Path) -> dict[Level, str]:
    findings = examine(path).findings
    return {level: "\n".join(f"{f.what} {f.to_do}" for f in findings if f.level is level) for level in Level}


def test_the_doctor_names_each_incident_with_the_command_that_moves_it(db: Path) -> None:
    report = examine(db)

    (problem,) = (finding for finding in report.findings if finding.level is Level.PROBLEM)
    assert "of stuck at broken" in problem.what
    assert "no paper" in problem.what
    assert problem.to_do.startswith(f"understudy retry {db} stuck ")
    assert not report.ok


def test_the_doctor_of_a_sound_database_has_no_problem_and_leaves_no_trace(db: Path) -> None:
    change(db, "DELETE FROM incident")

    report = examine(db)

    assert report.ok
    assert "7 instances" in "\n".join(report.lines)
    assert "1 published messages wait" in "\n".join(report.lines)
    assert not Path(f"{db}-owner").exists()


def test_the_doctor_reaches_the_process_that_runs_the_database(db: Path) -> None:
    with Runtime(db, *PROCESSES):
        found = levels(db)[Level.OK]

    assert "runs it, and answers" in found
    assert "no process runs it now; the last one was closed in good order" in levels(db)[Level.OK]


def test_an_owner_that_neither_answers_nor_beats_is_a_problem(db: Path) -> None:
    change(db, "UPDATE owner SET epoch = 5, holder = 'host:1'")
    with OwnerFile.of(db) as file:
        file.hold(5)
        file.publish(Address(port=1, secret="x", pid=1, epoch=5))

        found = levels(db)[Level.PROBLEM]

    assert "neither answers nor shows a sign of life" in found


def test_timers_are_overdue_when_nobody_runs_the_database(db: Path) -> None:
    change(db, "UPDATE wait SET due_ms = 1000 WHERE kind = 'timer'")

    assert "timers are overdue, the oldest since 1970-01-01 00:00:01Z" in levels(db)[Level.WARNING]


def test_a_delivery_that_waits_for_an_operator_is_a_problem(db: Path) -> None:
    change(db, "INSERT INTO held SELECT 'mail', no, head, 5, NULL, 'mailbox full' FROM instance WHERE id = 'waits'")

    found = levels(db)[Level.PROBLEM]
    assert "mailbox full" in found
    assert "runtime.redeliver('mail', 'waits')" in found


def test_a_file_that_others_may_read_is_a_warning(db: Path) -> None:
    db.chmod(0o644)

    assert f"chmod 600 {db}" in levels(db)[Level.WARNING]


@pytest.mark.parametrize("path", [":memory:", "nowhere.db"])
def test_what_is_no_file_is_a_problem(path: str) -> None:
    report = examine(path)

    assert not report.ok
    assert len(report.findings) == 1


def test_a_file_of_another_program_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (x)")

    assert "another program's database" in levels(path)[Level.PROBLEM]


def test_a_file_of_another_schema_is_a_problem(db: Path) -> None:
    change_version(db, LATEST + 1)
    assert "upgrade the package" in levels(db)[Level.PROBLEM]

    change_version(db, 0)
    assert f"understudy migrate {db}" in levels(db)[Level.PROBLEM]


def change_version(path: Path, version: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


def test_the_doctors_report_is_a_document_too(db: Path) -> None:
    document = examine(db).as_dict()

    assert document["ok"] is False
    assert {"level", "what", "to_do"} == set(document["findings"][0])
