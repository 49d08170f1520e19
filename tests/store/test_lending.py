"""The writer's connection in a handler's hands: only the user's tables, only for a while, and one commit with the
record of the result."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from understudy import Process, Retry, task
from understudy.model import commands as c
from understudy.model.errors import Conflict, Fenced, Rejected
from understudy.store.lending import LentConnection, Loan
from understudy.store.writer import Unknown, Writer

if TYPE_CHECKING:
    from tests.store.conftest import Desk
    from understudy.rehearsal import Rehearsal

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


@pytest.fixture
def lender(desk: Desk) -> Iterator[Desk]:
    """An instance with an attempt out, and a table of the user's."""
    desk.put("one")
    desk.read("CREATE TABLE mine (id INTEGER PRIMARY KEY, text TEXT)")
    yield desk
    assert not desk.writer.connection.in_transaction
    desk.put("afterwards")  # The writer is free again, whatever happened.


def borrow(desk: Desk, *, attempt: int = 1, task: int | None = None) -> Loan:
    token = next(iter(desk.instances["one"].tokens.values()))
    return Loan(desk.writer, instance=1, task=token.task if task is None else task, attempt=attempt)


def rows(desk: Desk) -> list[Any]:
    return desk.read("SELECT text FROM mine ORDER BY id")


# --- what it may do ---------------------------------------------------------------------------------------------------


def test_what_the_handler_writes_and_the_record_of_its_result_are_one_commit(lender: Desk) -> None:
    loan = borrow(lender)
    loan.lent.execute("INSERT INTO mine (text) VALUES (?)", ("hello",))
    with closing(sqlite3.connect(lender.path)) as reader:
        before = reader.execute("SELECT (SELECT count(*) FROM mine), (SELECT count(*) FROM work)").fetchone()

        loan.commit('{"id":1}')
        after = reader.execute("SELECT (SELECT count(*) FROM mine), (SELECT count(*) FROM work)").fetchone()

    assert (before, after) == ((0, 0), (1, 1))
    (work,) = lender.loaded("one").work
    assert (work.attempt, work.result) == (1, '{"id":1}')


def test_a_handler_may_do_with_its_own_tables_what_it_likes(lender: Desk) -> None:
    loan = borrow(lender)
    execute = loan.lent.execute

    execute("CREATE TABLE other (token TEXT, instance INTEGER, message TEXT REFERENCES mine)")
    execute("CREATE INDEX by_token ON other (token)")
    execute("CREATE TRIGGER t AFTER INSERT ON other BEGIN UPDATE mine SET text = NEW.token; END")
    execute("CREATE VIEW v AS SELECT token, count(*) AS number FROM other GROUP BY token")
    execute("ALTER TABLE other ADD COLUMN wait INTEGER")
    changed = loan.lent.executemany("INSERT INTO mine (text) VALUES (:text)", ({"text": t} for t in ("a", "b")))
    execute("INSERT INTO other (token, instance) VALUES (?, ?)", iter(["x", 1]))
    found = execute("SELECT token, number FROM v WHERE number > :least", {"least": 0})
    execute("UPDATE other SET token = 'y' WHERE instance = 1")
    execute("DELETE FROM other WHERE token = 'y'")
    execute("DROP INDEX by_token")
    execute("DROP TRIGGER t")
    loan.commit("null")

    assert changed == 2
    assert found == [("x", 1)]
    assert rows(lender) == [("x",), ("x",)]


def test_what_is_rolled_back_leaves_neither_rows_nor_tables_nor_a_record(lender: Desk) -> None:
    loan = borrow(lender)
    loan.lent.execute("INSERT INTO mine (text) VALUES ('x')")
    loan.lent.execute("CREATE TABLE other (a)")

    loan.roll_back()

    assert rows(lender) == []
    assert lender.read("SELECT name FROM sqlite_master WHERE name = 'other'") == []
    assert lender.loaded("one").work == []


# --- what it may not --------------------------------------------------------------------------------------------------

DENIED = [
    "COMMIT",
    "END",
    "ROLLBACK",
    "BEGIN",
    "SAVEPOINT s",
    "RELEASE s",
    "PRAGMA foreign_keys = OFF",
    "PRAGMA writable_schema = ON",
    "PRAGMA journal_mode",
    "ATTACH ':memory:' AS other",
    "DETACH main",
    "SELECT * FROM owner",
    "SELECT count(*) FROM history",
    "SELECT text FROM mine WHERE id IN (SELECT no FROM instance)",
    "UPDATE owner SET epoch = 7",
    "UPDATE Owner SET epoch = 7",
    "INSERT INTO token (instance, id) VALUES (1, 99)",
    "INSERT INTO work VALUES (1, 1, 1, '')",
    "DELETE FROM wait",
    "DELETE FROM main.history",
    "REPLACE INTO request VALUES ('k', '', '', 1)",
    "DROP TABLE token",
    "ALTER TABLE token ADD COLUMN mine",
    "ALTER TABLE TOKEN RENAME TO mine_now",
    "CREATE INDEX slow ON token (node)",
    "DROP INDEX wait_due",
    "DROP INDEX definition_name_version",
    "CREATE TRIGGER spy AFTER INSERT ON history BEGIN DELETE FROM mine; END",
    "CREATE TEMP TABLE owner (epoch)",
    "CREATE TEMP TABLE Owner (epoch)",
    "CREATE TEMP TABLE scratch (a)",
    "CREATE TEMP VIEW scratch AS SELECT 1",
    "CREATE TEMP TRIGGER spy INSTEAD OF INSERT ON understudy_batch BEGIN SELECT 1; END",
    "DROP TRIGGER understudy_batch_insert",
    "DROP VIEW understudy_batch",
    "INSERT INTO understudy_batch (epoch) VALUES (1)",
    "SELECT * FROM temp.understudy_matched",
    "ANALYZE token",
    "VACUUM",
]


@pytest.mark.parametrize("statement", DENIED)
def test_a_handler_touches_neither_the_transaction_nor_what_is_ours(lender: Desk, statement: str) -> None:
    before = lender.dump()
    loan = borrow(lender)
    loan.lent.execute("INSERT INTO mine (text) VALUES ('x')")

    with pytest.raises((Rejected, sqlite3.OperationalError)) as refused:
        loan.lent.execute(statement)

    assert statement == "VACUUM" or refused.type is Rejected
    loan.lent.execute("INSERT INTO mine (text) VALUES ('y')")
    loan.roll_back()
    assert lender.dump() == before
    assert rows(lender) == []


def test_a_trigger_of_the_user_s_reaches_no_table_of_ours_either(lender: Desk) -> None:
    loan = borrow(lender)
    loan.lent.execute("CREATE TRIGGER t AFTER INSERT ON mine BEGIN DELETE FROM token; END")

    with pytest.raises(Rejected, match="its own tables"):
        loan.lent.execute("INSERT INTO mine (text) VALUES ('x')")

    loan.roll_back()


def test_the_refusal_says_what_is_allowed(lender: Desk) -> None:
    loan = borrow(lender)

    with pytest.raises(Rejected, match="without transaction control, PRAGMA, ATTACH or TEMP"):
        loan.lent.execute("COMMIT")

    loan.roll_back()


def test_a_handler_s_own_mistakes_are_its_own_errors(lender: Desk) -> None:
    loan = borrow(lender)
    loan.lent.execute("INSERT INTO mine VALUES (1, 'x')")

    with pytest.raises(sqlite3.IntegrityError):
        loan.lent.execute("INSERT INTO mine VALUES (1, 'x')")
    with pytest.raises(sqlite3.OperationalError):
        loan.lent.execute("SELECT nonsense FROM mine")

    loan.commit("null")
    assert rows(lender) == [("x",)]


@pytest.mark.parametrize("swallow", [True, False], ids=["swallowed", "raised"])
def test_a_conflict_that_rolls_back_ends_the_transaction_for_good(lender: Desk, swallow: bool) -> None:
    """Otherwise whatever came next would be a commit of its own."""
    loan = borrow(lender)
    loan.lent.execute("INSERT INTO mine VALUES (1, 'x')")
    with pytest.raises(sqlite3.IntegrityError):
        loan.lent.execute("INSERT OR ROLLBACK INTO mine VALUES (1, 'y')")

    with pytest.raises(Rejected, match="rolled its transaction back"):
        loan.lent.execute("INSERT INTO mine VALUES (2, 'z')")

    if swallow:
        with pytest.raises(Conflict, match="rolled its transaction back"):
            loan.commit("null")
    else:
        loan.roll_back()
    assert rows(lender) == []
    assert lender.loaded("one").work == []


def test_a_constraint_checked_at_the_commit_takes_everything_back(lender: Desk) -> None:
    lender.read("CREATE TABLE child (of INTEGER REFERENCES mine (id) DEFERRABLE INITIALLY DEFERRED)")
    loan = borrow(lender)
    loan.lent.execute("INSERT INTO mine VALUES (1, 'x')")
    loan.lent.execute("INSERT INTO child VALUES (7)")

    with pytest.raises(Conflict, match="FOREIGN KEY"):
        loan.commit("null")

    assert rows(lender) == []
    assert lender.loaded("one").work == []


def test_a_handler_may_have_tables_for_full_text_search(lender: Desk) -> None:
    loan = borrow(lender)

    loan.lent.execute("CREATE VIRTUAL TABLE document USING fts5(body)")
    loan.lent.execute("INSERT INTO document VALUES ('to be or not to be')")

    assert loan.lent.execute("SELECT count(*) FROM document WHERE document MATCH 'not'") == [(1,)]
    loan.commit("null")


# --- how long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "roll back"])
def test_a_late_use_of_the_connection_is_refused(lender: Desk, end: str) -> None:
    loan = borrow(lender)

    loan.commit("null") if end == "commit" else loan.roll_back()

    with pytest.raises(Rejected, match="over"):
        loan.lent.execute("INSERT INTO mine (text) VALUES ('late')")
    with pytest.raises(Rejected, match="over"):
        loan.lent.executemany("INSERT INTO mine (text) VALUES (?)", [("late",)])
    assert rows(lender) == []


def run_away(desk: Desk, handler: Callable[[LentConnection], None]) -> tuple[Loan, threading.Thread]:
    """Start a handler on a thread of its own, and return when a statement of it is being executed."""
    loan = borrow(desk)
    running = threading.Event()
    desk.writer.connection.set_progress_handler(running.set, 1_000)
    thread = threading.Thread(target=handler, args=(loan.lent,))
    thread.start()
    assert running.wait(30)
    return loan, thread


def test_a_statement_that_never_ends_is_interrupted_and_rolled_back(lender: Desk) -> None:
    errors: list[Exception] = []

    def handler(lent: LentConnection) -> None:
        try:
            lent.execute("INSERT INTO mine (text) VALUES ('x')")
            lent.execute(ENDLESS)
        except sqlite3.OperationalError as error:
            errors.append(error)

    loan, thread = run_away(lender, handler)

    loan.roll_back()
    thread.join(30)

    assert [str(error) for error in errors] == ["interrupted"]
    assert rows(lender) == []


def test_a_handler_that_swallows_every_error_cannot_hold_the_writer(lender: Desk) -> None:
    rejected = threading.Event()

    def handler(lent: LentConnection) -> None:
        while not rejected.is_set():
            try:
                lent.execute(ENDLESS)
            except Rejected:
                rejected.set()
            except sqlite3.OperationalError:
                pass

    loan, thread = run_away(lender, handler)

    loan.roll_back()
    thread.join(30)

    assert rejected.is_set()


def test_user_code_among_the_parameters_does_not_run_while_the_connection_is_locked(lender: Desk) -> None:
    loan = borrow(lender)

    def parameters() -> Iterator[str]:
        loan.lent.execute("INSERT INTO mine (text) VALUES ('inner')")
        yield "outer"

    loan.lent.execute("INSERT INTO mine (text) VALUES (?)", parameters())
    loan.lent.executemany("INSERT INTO mine (text) VALUES (?)", (parameters() for _ in range(2)))
    loan.commit("null")

    assert sorted(rows(lender)) == [("inner",)] * 3 + [("outer",)] * 3


# --- whether at all ---------------------------------------------------------------------------------------------------


def test_an_attempt_that_was_recorded_is_not_made_again(lender: Desk) -> None:
    loan = borrow(lender)
    loan.lent.execute("INSERT INTO mine (text) VALUES ('x')")
    loan.commit('"first"')
    lender.writer.reopen()  # As after a crash, or a commit of which nobody knew whether it had landed.

    again = borrow(lender)

    assert again.recorded == '"first"'
    again.roll_back()


@pytest.mark.parametrize(("attempt", "task"), [(2, None), (1, 999)], ids=["attempt", "task"])
def test_an_attempt_that_is_not_awaited_is_not_made(lender: Desk, attempt: int, task: int | None) -> None:
    with pytest.raises(Conflict, match="no longer awaited"):
        borrow(lender, attempt=attempt, task=task)


def test_an_attempt_of_a_cancelled_instance_is_not_made(lender: Desk) -> None:
    token = next(iter(lender.instances["one"].tokens.values()))
    lender.lands(lender.order("one", c.Cancel(at_ms=2)))

    with pytest.raises(Conflict, match="no longer awaited"):
        Loan(lender.writer, instance=1, task=token.task, attempt=1)


def test_a_fenced_owner_lends_nothing(desk: Desk) -> None:
    desk.put("one")
    rival = Writer(desk.path, desk.writer.settings)
    rival.take_over("rival")
    rival.close()

    with pytest.raises(Fenced):
        borrow(desk)

    assert not desk.writer.connection.in_transaction


@pytest.mark.parametrize("landed", [False, True], ids=["before", "after"])
def test_a_commit_that_fails_in_the_machine_is_unknown_and_its_record_tells(lender: Desk, landed: bool) -> None:
    class Faulty:
        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def execute(self, statement: str, *parameters: Any) -> Any:
            if statement != "COMMIT" or landed:
                answer = self._connection.execute(statement, *parameters)
            if statement == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return answer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    lender.writer._connection = Faulty(lender.writer.connection)
    loan = borrow(lender)
    loan.lent.execute("INSERT INTO mine (text) VALUES ('x')")

    with pytest.raises(Unknown):
        loan.commit("7")
    lender.writer.reopen()

    again = borrow(lender)
    assert again.recorded == ("7" if landed else None)
    again.roll_back()
    assert rows(lender) == ([("x",)] if landed else [])


# --- in a runtime -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Order:
    order_id: str


@task(transactional=True, into="entry", retry=Retry(3, first="1s"))
def book(order_id: str, connection: sqlite3.Connection) -> int:
    connection.execute("CREATE TABLE IF NOT EXISTS entry (order_id TEXT)")
    connection.execute("INSERT INTO entry VALUES (?)", (order_id,))
    return 1


@task
def ship(order_id: str, entry: int) -> str:
    return f"{order_id} with {entry}"


PROCESS = Process("booking", book, ship, takes=Order, gives=ship)


def entries(stage: Rehearsal) -> list[Any]:
    with closing(sqlite3.connect(stage.path)) as reader:
        return reader.execute("SELECT order_id FROM entry").fetchall()


def test_a_transactional_task_writes_its_rows_and_goes_on(rehearsal: Rehearsal) -> None:
    order = rehearsal.start(PROCESS, Order("7"))

    assert order.result() == "7 with 1"
    assert entries(rehearsal) == [("7",)]


def test_a_process_that_dies_after_the_commit_finds_the_record_and_does_not_run_the_handler_again(
    rehearsal: Rehearsal,
) -> None:
    """The result is durable, and the instance's own commit is not made yet: nothing else knows of it."""
    system = rehearsal.node.system
    assert system is not None
    system.runner._complete = lambda *_given, **_options: None  # type: ignore[method-assign]
    order = rehearsal.start(PROCESS, Order("7"))
    recorded = entries(rehearsal)

    rehearsal.crash()

    assert recorded == [("7",)]
    assert order.result() == "7 with 1"
    assert entries(rehearsal) == [("7",)]
    assert [call.handler for call in rehearsal.calls].count("book") == 1


def test_a_process_that_dies_inside_the_handler_leaves_nothing_and_runs_it_again(
    rehearsal: Rehearsal,
) -> None:
    rehearsal.crash_after(book)

    order = rehearsal.start(PROCESS, Order("7"))

    assert order.result() == "7 with 1"
    assert entries(rehearsal) == [("7",)]


def test_a_handler_that_raises_is_rolled_back_and_tried_again(rehearsal: Rehearsal) -> None:
    tries: list[int] = []

    def twice_wrong(order_id: str, connection: sqlite3.Connection) -> int:
        book(order_id, connection)
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return 5

    rehearsal.stand_in(book, twice_wrong)
    order = rehearsal.start(PROCESS, Order("7"))
    rehearsal.advance("1h")

    assert order.result() == "7 with 5"
    assert len(tries) == 3
    assert entries(rehearsal) == [("7",)]


def test_a_handler_beyond_its_limit_is_rolled_back_and_tried_again(rehearsal: Rehearsal) -> None:
    rehearsal.hang(book)
    order = rehearsal.start(PROCESS, Order("7"))

    rehearsal.stand_in(book, book.function)
    rehearsal.advance("1h")

    assert order.result() == "7 with 1"
    assert entries(rehearsal) == [("7",)]
    assert [call.handler for call in rehearsal.calls].count("book") == 2
