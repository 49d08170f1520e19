"""What the writer says of a batch, and what the file then holds: everything, nothing, or "unknown"."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.model import commands as c
from understudy.model.definition import Definition
from understudy.model.errors import Conflict, Damaged, NotOurs, Rejected, Unavailable
from understudy.model.instance import facts
from understudy.model.kinds import End, Start
from understudy.model.values import encode
from understudy.store.batch import WRITE
from understudy.store.commit import Answered
from understudy.store.operations import Beat, Deploy, MoveCursor, Purge
from understudy.store.writer import Landed, Publish, Unknown, Writer

if TYPE_CHECKING:
    from tests.store.conftest import Desk


class Faulty:
    """A connection that raises at a statement: before it is executed, or after it has done its work."""

    def __init__(self, connection: Any, error: Exception, *, at: str = WRITE, landed: bool = False) -> None:
        self._connection = connection
        self._error = error
        self._at = at
        self._landed = landed

    def execute(self, statement: str, *parameters: Any) -> Any:
        if statement != self._at:
            return self._connection.execute(statement, *parameters)
        if self._landed:
            self._connection.execute(statement, *parameters)
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Counting:
    """A connection that counts the statements it is given."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.statements = 0

    def execute(self, *given: Any) -> Any:
        self.statements += 1
        return self._connection.execute(*given)


def break_down(writer: Writer, error: Exception, *, at: str = WRITE, landed: bool = False) -> None:
    writer._connection = Faulty(writer.connection, error, at=at, landed=landed)


# --- what was written is what is read ---------------------------------------------------------------------------------


def test_a_step_is_durable_when_its_batch_returns(desk: Desk) -> None:
    desk.put("one")
    desk.lands(desk.complete("one", '{"ok":true}'))

    reader = sqlite3.connect(f"file:{desk.path}?mode=ro", uri=True)
    stored = reader.execute("SELECT version, status FROM instance").fetchall()
    reader.close()

    assert stored == [(2, "running")]


def test_an_ordinary_step_writes_three_rows_and_a_result_one_more(desk: Desk) -> None:
    """Its instance, its token, its history: each further row is a further page for every commit of every instance."""
    desk.put("one")
    commit = desk.complete("one")
    before = desk.writer.connection.total_changes

    desk.lands(commit)

    result = 1
    assert desk.writer.connection.total_changes - before == 3 + result


def test_a_start_writes_its_instance_scope_token_and_history(desk: Desk) -> None:
    commit = desk.start("one")
    before = desk.writer.connection.total_changes

    desk.lands(commit)

    assert desk.writer.connection.total_changes - before == 4


def test_a_batch_costs_one_statement(desk: Desk) -> None:
    """`sqlite3` gives up the GIL at each one."""
    commits = [desk.start(f"i{n}") for n in range(50)]
    counting = desk.writer._connection = Counting(desk.writer.connection)

    desk.lands(*commits)

    assert counting.statements == 1


def test_the_numbers_of_a_batch_that_was_repeated_have_no_gaps(desk: Desk) -> None:
    desk.lands(desk.start("a"), desk.start("b"))

    desk.write(desk.start("c"), desk.start("a", "steps", other="1"), desk.start("d"))

    assert desk.read("SELECT seq, instance FROM history") == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_one_culprit_in_a_large_batch_costs_few_further_statements(desk: Desk) -> None:
    desk.put("again")
    commits = [desk.start(f"i{n}") for n in range(127)]
    counting = desk.writer._connection = Counting(desk.writer.connection)

    desk.write(*commits, desk.start("again", "steps", other="1"))

    halvings = 7
    assert counting.statements == 1 + 2 * halvings


def test_a_batch_larger_than_sqlite_takes_at_once_is_written_in_parts(desk: Desk) -> None:
    desk.writer.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)

    desk.lands(*(Publish("paid", "", '"' + "x" * 20_000 + '"') for _ in range(10)))

    assert desk.read("SELECT count(*), min(length(payload)) FROM message") == [(10, 20_002)]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NASTY = st.one_of(
    TEXTS,
    st.sampled_from(
        ["", "007", "1e5", "null", "true", '{"a":1}', "[1,2]", "it's", '"', "\\", "\\u0000", "\0", "\x7f", "🦆", "$[0]"]
    ),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
)
VALUES = st.recursive(NASTY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    values=st.dictionaries(NAMES, VALUES, max_size=4),
    result=VALUES,
    title=st.one_of(st.just(""), NAMES),
    tags=st.dictionaries(NAMES, NAMES, max_size=2),
    key=NAMES,
)
def test_whatever_users_name_and_give_comes_back_exactly(
    new_desk: Callable[[], Desk],
    names: list[str],
    values: dict[str, object],
    result: object,
    title: str,
    tags: dict[str, str],
    key: str,
) -> None:
    desk = new_desk()
    encoded = {name: str(encode(value)) for name, value in values.items()}
    for name in names:
        desk.put(name, **encoded)
    commits = [desk.complete(name, encode(result)) for name in names]
    for commit in commits:
        commit.requests.append(Answered(commit.id, key, encode(result), 9_000))
    desk.lands(*commits)
    command = c.Start(at_ms=1, id="titled", given_digest="d", variables={}, title=title, tags=tags, by=key)
    desk.start("titled")
    desk.instances["titled"] = type(desk.instances["titled"])()
    desk.lands(desk.pack("titled", desk.decide("titled", command, "steps")))
    desk.lands(desk.order("titled", c.Send(at_ms=1, name=key, about=key, payload=encode(result))))
    desk.publish(key, name=key, payload=encode(result))

    found = desk.load(*names, "titled")

    assert {name: facts(loaded.instance) for name, loaded in found.items()} == {  # type: ignore[union-attr]
        name: facts(desk.instances[name]) for name in (*names, "titled")
    }
    assert desk.read("SELECT name, key, payload FROM message") == [(key, key, encode(result))]
    assert sorted(desk.read("SELECT key, digest, answer FROM request")) == sorted(
        (name, key, encode(result)) for name in names
    )
    desk.close()


def test_a_value_of_900_kilobytes_comes_back_exactly(desk: Desk) -> None:
    value = encode({"text": 'Größe "\\\n\0' * 47_000})
    assert len(value.encode()) > 900_000
    desk.put("one", large=value)
    desk.lands(desk.complete("one", value))

    assert facts(desk.loaded("one").instance) == facts(desk.instances["one"])


def test_every_column_of_an_instance_survives_pause_failure_and_end(desk: Desk) -> None:
    """The commits that carry all hot columns, and the usual ones after them, which reset those."""
    desk.put("paused")
    desk.lands(desk.order("paused", c.Pause(at_ms=2)))
    paused = desk.loaded("paused").instance
    desk.lands(desk.order("paused", c.Resume(at_ms=3)))
    desk.put("cancelled")
    desk.lands(desk.order("cancelled", c.Cancel(at_ms=4, reason="no")))
    desk.put("completed")
    for _ in range(5):
        desk.lands(desk.complete("completed"))

    assert (paused.status.value, paused.resting.value) == ("paused", "running")
    for name in ("paused", "cancelled", "completed"):
        assert facts(desk.loaded(name).instance) == facts(desk.instances[name])
    assert desk.loaded("cancelled").instance.error != ""
    assert desk.loaded("completed").instance.result == "null"


def test_what_was_recorded_and_not_used_goes_with_its_instance(desk: Desk) -> None:
    desk.put("one")
    desk.put("two")
    desk.read("INSERT INTO work VALUES (1, 2, 1, '5'), (2, 2, 1, '6')")

    desk.lands(desk.order("one", c.Pause(at_ms=2)), desk.order("two", c.Pause(at_ms=2)))
    paused = desk.read("SELECT instance FROM work")
    desk.lands(desk.order("one", c.Cancel(at_ms=3)))

    assert paused == [(1,), (2,)]
    assert desk.read("SELECT instance FROM work") == [(2,)]


def test_the_last_task_of_an_instance_may_be_transactional(desk: Desk) -> None:
    desk.put("one")
    for _ in range(4):
        desk.lands(desk.complete("one"))
    token = next(iter(desk.instances["one"].tokens.values()))
    desk.read(f"INSERT INTO work VALUES (1, {token.task}, 1, '5')")

    done = c.CompleteTask(at_ms=9, token=token.id, task=token.task, attempt=1, result="5", recorded=True)
    desk.lands(desk.order("one", done))

    assert desk.loaded("one").instance.is_ended
    assert desk.read("SELECT count(*) FROM work") == [(0,)]


# --- failures that leave the outcome open -----------------------------------------------------------------------------

UNKNOWN = ["disk I/O error", "database or disk is full", "database is locked", "interrupted", "unable to open database"]


@pytest.mark.parametrize("text", UNKNOWN)
@pytest.mark.parametrize("landed", [False, True], ids=["before", "after"])
def test_a_failure_of_the_machine_leaves_the_outcome_unknown(desk: Desk, text: str, landed: bool) -> None:
    desk.put("one")
    commits = [desk.complete("one"), desk.start("two")]
    break_down(desk.writer, sqlite3.OperationalError(text), landed=landed)

    with pytest.raises(Unknown, match=desk.path):
        desk.write(*commits)

    desk.writer.reopen()
    assert desk.loaded("one").stored.version == (2 if landed else 1)
    assert set(desk.load("two")) == ({"two"} if landed else set())


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.DatabaseError("database disk image is malformed"),
        sqlite3.DatabaseError("file is not a database"),
    ],
    ids=["malformed", "no database"],
)
def test_a_damaged_file_is_reported_as_such(desk: Desk, error: sqlite3.Error) -> None:
    break_down(desk.writer, error)

    with pytest.raises(Damaged):
        desk.write(desk.start("one"))


def test_a_commit_that_landed_and_raised_is_not_applied_twice(desk: Desk) -> None:
    desk.put("one")
    commit = desk.complete("one")
    break_down(desk.writer, sqlite3.OperationalError("disk I/O error"), landed=True)
    with pytest.raises(Unknown):
        desk.write(commit)
    desk.writer.reopen()
    before = desk.dump()

    (again,) = desk.write(commit).results

    assert getattr(again, "reason", "") == "stale"
    assert desk.dump() == before


def test_a_full_disk_leaves_the_outcome_unknown_and_the_file_whole(desk: Desk) -> None:
    desk.put("one")
    (pages,) = desk.read("PRAGMA page_count")[0]
    desk.read(f"PRAGMA max_page_count = {pages + 2}")
    before = desk.dump()

    with pytest.raises(Unknown, match="full"):
        desk.write(*(desk.start(f"i{n}", "steps", text='"' + "x" * 5_000 + '"') for n in range(20)))

    desk.writer.reopen()
    assert desk.dump() == before
    desk.put("two")


def test_a_lookup_that_fails_leaves_the_outcome_unknown_too(desk: Desk) -> None:
    keyed = Publish("paid", "", "1", None, [Answered("key", "d", "{}", 9_000)])
    statement = "SELECT key, digest, answer, expires_ms FROM request WHERE key IN (SELECT value FROM json_each(?))"
    break_down(desk.writer, sqlite3.OperationalError("disk I/O error"), at=statement)

    with pytest.raises(Unknown):
        desk.write(keyed)


@pytest.mark.parametrize("at", ["BEGIN IMMEDIATE", "COMMIT"])
@pytest.mark.parametrize("landed", [False, True], ids=["before", "after"])
def test_an_operation_that_fails_in_the_machine_is_unknown_and_may_be_repeated(
    desk: Desk, at: str, landed: bool
) -> None:
    break_down(desk.writer, sqlite3.OperationalError("disk I/O error"), at=at, landed=landed)

    with pytest.raises(Unknown):
        desk.writer.run(MoveCursor("audit", 7))

    desk.writer.reopen()
    desk.writer.run(MoveCursor("audit", 7))
    assert desk.read("SELECT cursor FROM subscriber") == [(7,)]


def test_a_writer_that_could_not_be_reopened_knows_nothing_and_can_be_reopened_later(desk: Desk) -> None:
    folder = desk.path
    desk.writer.path = f"{folder}-gone/x.db"
    with pytest.raises(Unavailable):
        desk.writer.reopen()

    with pytest.raises(Unknown):
        desk.write(desk.start("one"))
    with pytest.raises(Unknown):
        desk.writer.checkpoint()

    desk.writer.path = folder
    desk.writer.reopen()
    desk.put("one")


# --- lives ------------------------------------------------------------------------------------------------------------


def test_the_number_of_a_consumed_message_is_never_given_again(desk: Desk) -> None:
    desk.put("one", "waiting", about='"k"')
    (delivery,) = desk.publish("k").deliveries
    consumed = c.Deliver(at_ms=1, message=delivery.message, wait=delivery.wait, payload="1")
    desk.lands(desk.order("one", consumed))

    desk.writer.reopen()
    same_life = desk.publish("other").results[0]
    desk.read("DELETE FROM message")
    desk.writer.take_over("next life")
    next_life = desk.publish("other").results[0]

    assert isinstance(same_life, Landed)
    assert isinstance(next_life, Landed)
    assert delivery.message < same_life.answer["message"] < next_life.answer["message"]


def test_whoever_decided_on_an_older_epoch_than_expected_does_not_take_over(desk: Desk) -> None:
    with pytest.raises(Conflict, match="taken over"):
        desk.writer.take_over("late", after_epoch=0)

    assert desk.read("SELECT epoch, holder FROM owner") == [(1, "test")]


# --- operations -------------------------------------------------------------------------------------------------------


def definition(name: str, *ids: str) -> Definition:
    return Definition(name=name, nodes=(Start(id="start"), *(End(id=id) for id in ids)), edges=())


def test_the_same_content_is_the_same_definition_and_new_content_the_next_version(desk: Desk) -> None:
    first = desk.writer.run(Deploy(definition("p", "a")))
    again = desk.writer.run(Deploy(definition("p", "a")))
    second = desk.writer.run(Deploy(definition("p", "b")))

    assert first == again
    assert (first[1], second[1]) == (1, 2)


def test_an_explicit_version_with_other_content_is_a_conflict(desk: Desk) -> None:
    desk.writer.run(Deploy(definition("p", "a"), 3))

    with pytest.raises(Conflict):
        desk.writer.run(Deploy(definition("p", "b"), 3))
    with pytest.raises(Conflict):
        desk.writer.run(Deploy(definition("p", "a"), 4))


class Misfit:
    def run(self, connection: Any) -> None:
        connection.execute("UPDATE owner SET beat = 5")
        connection.execute("INSERT INTO token (instance, id) VALUES (999, 1)")


class Broken:
    def run(self, connection: Any) -> None:
        connection.execute("UPDATE owner SET beat = 5")
        raise ZeroDivisionError


def test_an_operation_that_the_tables_refuse_is_rejected_and_leaves_nothing(desk: Desk) -> None:
    with pytest.raises(Rejected):
        desk.writer.run(Misfit())

    assert desk.read("SELECT beat FROM owner") == [(0,)]


def test_an_operation_that_breaks_leaves_nothing(desk: Desk) -> None:
    with pytest.raises(ZeroDivisionError):
        desk.writer.run(Broken())

    assert desk.read("SELECT beat FROM owner") == [(0,)]
    assert not desk.writer.connection.in_transaction


def test_the_probe_writes_and_changes_nothing_that_matters(desk: Desk) -> None:
    desk.writer.probe()
    desk.writer.run(Beat())

    assert desk.read("SELECT beat FROM owner") == [(2,)]


def test_only_what_has_expired_and_belongs_to_nobody_is_purged(desk: Desk) -> None:
    desk.put("one", "waiting", about='"k"')
    desk.publish("k", expires_ms=2_000)
    desk.publish("x", expires_ms=2_000)
    desk.publish("y", expires_ms=2_001)
    desk.publish("z")
    desk.lands(Publish("z", "", "1", None, [Answered("a", "", "", 2_000), Answered("b", "", "", 2_001)]))

    purged = desk.writer.run(Purge(2_000))

    assert purged == 2
    assert [key for (key,) in desk.read("SELECT key FROM message ORDER BY no")] == ["k", "y", "z", ""]
    assert desk.read("SELECT key FROM request") == [("b",)]


def test_a_file_that_was_exchanged_for_garbage_is_not_reopened(desk: Desk) -> None:
    desk.writer.close()
    with open(desk.path, "wb") as file:  # noqa: PTH123
        file.write(b"garbage" * 1_000)

    with pytest.raises(NotOurs):
        desk.writer.reopen()
