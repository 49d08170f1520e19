"""Instances are read back exactly as they were written, or not at all: damage is found, and is one instance's own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy import Process, Rehearsal, wait
from understudy.model import commands as c
from understudy.model.decide import decide
from understudy.model.errors import Damaged, Rejected
from understudy.model.instance import Fault, Instance, Variable, facts
from understudy.model.states import TokenStatus
from understudy.store.batch import COLD, COLUMNS, HISTORY, HOT
from understudy.store.commit import rows_sum
from understudy.store.loading import Loaded, load

if TYPE_CHECKING:
    from tests.store.conftest import Desk

OTHERS = ("first", "last")


@pytest.fixture
def trio(desk: Desk) -> Desk:
    """The victim between two others, all with rows in every table."""
    for name in ("first", "victim", "last"):
        desk.put_rich(name)
    return desk


def meddle(desk: Desk, *statements: str) -> None:
    """Change the file behind everybody's back: nothing is checked."""
    with closing(sqlite3.connect(desk.path, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, statement


def assert_only_the_victim_is_damaged(desk: Desk) -> None:
    found = desk.load("first", "victim", "last")

    assert isinstance(found["victim"], Damaged)
    for name in OTHERS:
        loaded = found[name]
        assert isinstance(loaded, Loaded), loaded
        assert facts(loaded.instance) == facts(desk.instances[name])


# --- what is whole ----------------------------------------------------------------------------------------------------


def test_an_instance_comes_back_with_all_that_it_was(trio: Desk) -> None:
    loaded = trio.loaded("victim")

    assert facts(loaded.instance) == facts(trio.instances["victim"])
    assert loaded.stored == trio.stored["victim"]
    assert loaded.graph is trio.graphs["rich"]


def test_what_is_derived_from_the_rows_comes_back_too(trio: Desk) -> None:
    loaded, kept = trio.loaded("victim").instance, trio.instances["victim"]

    assert loaded.moving == kept.moving
    assert {s: n for s, n in loaded.population.items() if n} == {s: n for s, n in kept.population.items() if n}
    assert loaded.arrived == kept.arrived
    assert loaded.waits_of == kept.waits_of
    assert loaded.incident_of == kept.incident_of


def test_ids_that_are_not_there_are_not_in_the_answer(trio: Desk) -> None:
    assert set(trio.load("nobody", "victim", "", "VICTIM")) == {"victim"}
    assert trio.load() == {}


def test_five_hundred_instances_are_read_by_one_statement(desk: Desk) -> None:
    names = [f"i{n}" for n in range(500)]
    desk.lands(*(desk.start(name) for name in names))
    connection = desk.writer.connection
    asked: list[str] = []

    class Counting:
        def execute(self, statement: str, parameters: Any) -> Any:
            asked.append(statement)
            return connection.execute(statement, parameters)

    found = load(Counting(), names, desk.graph)

    assert len(asked) == 1
    assert all(isinstance(loaded, Loaded) for loaded in found.values())
    assert list(found) == names


def test_assigned_messages_and_recorded_work_come_with_their_instance(desk: Desk) -> None:
    desk.put("one", "waiting", about='"k"')
    (delivery,) = desk.publish("k", payload='"hello"').deliveries
    desk.read("INSERT INTO work VALUES (1, 3, 1, '5')")

    loaded = desk.loaded("one")

    assert [(p.no, p.wait, p.payload) for p in loaded.posted] == [(delivery.message, delivery.wait, '"hello"')]
    assert [(w.task, w.attempt, w.result) for w in loaded.work] == [(3, 1, "5")]


MOVES = st.sampled_from(["complete", "fail", "send", "receive", "pause", "resume", "timer", "retry", "skip", "cancel"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(MOVES, max_size=12))
def test_after_every_commit_of_any_life_the_store_holds_what_the_actor_holds(
    new_desk: Callable[[], Desk], moves: list[str]
) -> None:
    desk = new_desk()
    desk.put("one", "rich", about='"a"')
    for moment, move in enumerate(moves, 2_000):
        instance = desk.instances["one"]
        command = _command(desk, move, moment)
        decision = None if command is None else decide(instance, desk.graphs["rich"], command)
        if decision is None or decision.entry is None:
            continue

        desk.lands(desk.pack("one", decision))

        loaded = desk.loaded("one")
        assert facts(loaded.instance) == facts(instance)
        assert loaded.stored == desk.stored["one"]
    desk.close()


def _command(desk: Desk, move: str, at_ms: int) -> c.AnyCommand | None:
    instance = desk.instances["one"]
    out = next((t for t in instance.tokens.values() if t.status is TokenStatus.EXECUTING), None)
    timer = next((wait.id for wait in instance.waits.values() if wait.kind == "timer"), 0)
    incident = next(iter(instance.incidents), 0)
    if move in ("complete", "fail") and out is not None:
        if move == "complete":
            return c.CompleteTask(at_ms=at_ms, token=out.id, task=out.task, attempt=out.attempt, result="1")
        fault = Fault("error", "no \N{DUCK}")
        return c.FailTask(at_ms=at_ms, token=out.id, task=out.task, attempt=out.attempt, fault=fault)
    commands: dict[str, c.AnyCommand] = {
        "send": c.Send(at_ms=at_ms, name="early", about="x"),
        "receive": c.Send(at_ms=at_ms, name="paid"),
        "pause": c.Pause(at_ms=at_ms),
        "resume": c.Resume(at_ms=at_ms),
        "timer": c.FireTimer(at_ms=at_ms + 4_000_000, wait=timer),
        "retry": c.Resolve(at_ms=at_ms, how="retry", incident=incident),
        "skip": c.Resolve(at_ms=at_ms, how="skip", incident=incident, to="end"),
        "cancel": c.Cancel(at_ms=at_ms),
    }
    return commands.get(move)


# --- what is not ------------------------------------------------------------------------------------------------------

_NO = "(SELECT no FROM instance WHERE id = 'victim')"
_HEAD = "(SELECT head FROM instance WHERE id = 'victim')"
_CHANGED = "CASE typeof({0}) WHEN 'integer' THEN {0} + 1000 WHEN 'text' THEN {0} || 'x' ELSE 'x' END"


def _columns() -> list[tuple[str, str]]:
    columns = [("instance", name) for name in (*COLD, *HOT, "partition") if name not in ("no", "id")]
    for table, (key, others) in COLUMNS.items():
        columns += [(table, name) for name in ("instance", *key, *others)]
    return columns + [("history", name) for name in (*HISTORY, "partition")]


@pytest.mark.parametrize(("table", "column"), _columns())
def test_a_changed_column_is_found_and_is_its_instance_s_own_damage(trio: Desk, table: str, column: str) -> None:
    whose = {"instance": "id = 'victim'", "history": f"seq = {_HEAD}"}.get(table, f"instance = {_NO}")
    change = _CHANGED.format(f'"{column}"')

    meddle(trio, f'UPDATE "{table}" SET "{column}" = {change} WHERE {whose}')

    assert_only_the_victim_is_damaged(trio)


def test_a_changed_number_of_the_instance_is_found(trio: Desk) -> None:
    meddle(trio, "UPDATE instance SET no = 999 WHERE id = 'victim'")

    assert_only_the_victim_is_damaged(trio)


def test_an_instance_under_a_changed_id_is_damaged_under_that_id(trio: Desk) -> None:
    meddle(trio, "UPDATE instance SET id = 'renamed' WHERE id = 'victim'")

    found = trio.load("victim", "renamed", "first")

    assert set(found) == {"renamed", "first"}
    assert isinstance(found["renamed"], Damaged)


@pytest.mark.parametrize("table", COLUMNS)
def test_a_row_too_few_is_found(trio: Desk, table: str) -> None:
    key = COLUMNS[table][0][-1]
    one = f'SELECT "{key}" FROM "{table}" WHERE instance = {_NO} LIMIT 1'

    meddle(trio, f'DELETE FROM "{table}" WHERE instance = {_NO} AND "{key}" = ({one})')

    assert_only_the_victim_is_damaged(trio)


@pytest.mark.parametrize("table", COLUMNS)
def test_a_row_too_many_is_found(trio: Desk, table: str) -> None:
    key, others = COLUMNS[table]
    taken = ", ".join(f'"{column}"' for column in others)
    fresh = ", ".join("'zz'" if column == "name" else "777" for column in key)
    columns = ", ".join(f'"{column}"' for column in ("instance", *key))
    same = f'SELECT instance, {fresh}, {taken} FROM "{table}" WHERE instance = {_NO} LIMIT 1'

    meddle(trio, f'INSERT INTO "{table}" ({columns}, {taken}) {same}')

    assert_only_the_victim_is_damaged(trio)


@pytest.mark.parametrize(
    ("table", "column", "key"), [("variable", "value", "name"), ("buffered", "payload", "id"), ("token", "node", "id")]
)
def test_values_swapped_between_two_rows_are_found(trio: Desk, table: str, column: str, key: str) -> None:
    rows = trio.read(f'SELECT "{key}", "{column}" FROM "{table}" WHERE instance = {_NO} LIMIT 2')
    (one, first), (two, second) = rows
    assert first != second

    meddle(
        trio,
        f"""UPDATE "{table}" SET "{column}" = CASE "{key}" WHEN '{one}' THEN '{second}' ELSE '{first}' END
        WHERE instance = {_NO} AND "{key}" IN ('{one}', '{two}')""",
    )

    assert_only_the_victim_is_damaged(trio)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=2, max_size=2, unique_by=lambda p: p[1]))
def test_no_two_rows_can_swap_a_value_unseen(rows: list[tuple[int, int]]) -> None:
    """A sum of plain CRCs would let one in some hundreds through, because they are linear."""

    def total(*pairs: tuple[str, int]) -> int:
        instance = Instance()
        for name, value in pairs:
            instance.variables.put((0, name), Variable(0, name, str(value)))
        return rows_sum(instance)

    (one, first), (two, second) = rows
    a, b = f"a{one}", f"b{two}"

    assert total((a, first), (b, second)) != total((a, second), (b, first))


def test_rows_swapped_between_two_instances_are_damage_of_both(trio: Desk) -> None:
    trio.lands(trio.order("victim", c.Send(at_ms=1, name="paid")))
    meddle(
        trio,
        f"UPDATE token SET instance = -instance WHERE instance = {_NO}",
        f"UPDATE token SET instance = {_NO} WHERE instance = (SELECT no FROM instance WHERE id = 'first')",
        "UPDATE token SET instance = (SELECT no FROM instance WHERE id = 'first') WHERE instance < 0",
    )

    found = trio.load("first", "victim", "last")

    assert isinstance(found["first"], Damaged)
    assert isinstance(found["victim"], Damaged)
    assert isinstance(found["last"], Loaded)


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("instance", "status"),
        ("instance", "resting"),
        ("instance", "outcome"),
        ("scope", "kind"),
        ("scope", "status"),
        ("token", "status"),
        ("token", "mode"),
    ],
)
def test_a_word_that_nobody_knows_is_damage_and_never_a_default(trio: Desk, table: str, column: str) -> None:
    whose = "id = 'victim'" if table == "instance" else f"instance = {_NO}"

    meddle(trio, f"UPDATE {table} SET {column} = 'nonsense' WHERE {whose}")

    assert_only_the_victim_is_damaged(trio)


@pytest.mark.parametrize(
    "value",
    ["CAST(x'ff' AS TEXT)", "x'00'", "1.5", "9e999", "CAST(x'00' AS TEXT)"],
    ids=["no text", "blob", "real", "infinity", "nul"],
)
@pytest.mark.parametrize(("table", "column"), [("variable", "value"), ("instance", "tags"), ("token", "since_ms")])
def test_a_value_of_another_kind_spoils_no_other_instance(trio: Desk, table: str, column: str, value: str) -> None:
    whose = "id = 'victim'" if table == "instance" else f"instance = {_NO}"

    meddle(trio, f"UPDATE {table} SET {column} = {value} WHERE {whose}")

    assert_only_the_victim_is_damaged(trio)


@pytest.mark.parametrize(
    "change",
    [
        f"DELETE FROM history WHERE seq = {_HEAD}",
        "UPDATE instance SET head = (SELECT head FROM instance WHERE id = 'first') WHERE id = 'victim'",
        f"UPDATE instance SET head = (SELECT prev FROM history WHERE seq = {_HEAD}) WHERE id = 'victim'",
        f"DELETE FROM history WHERE seq = (SELECT prev FROM history WHERE seq = {_HEAD})",
        "UPDATE instance SET head = 0 WHERE id = 'victim'",
    ],
    ids=["missing", "another's", "older", "predecessor missing", "none"],
)
def test_a_head_that_does_not_fit_is_found(trio: Desk, change: str) -> None:
    meddle(trio, change)

    assert_only_the_victim_is_damaged(trio)


def test_a_definition_that_is_gone_or_does_not_know_the_token_s_node_is_damage(trio: Desk) -> None:
    steps = trio.graphs["steps"].no

    meddle(trio, f"UPDATE instance SET definition = {steps} WHERE id = 'victim'")
    assert_only_the_victim_is_damaged(trio)

    meddle(trio, "UPDATE instance SET definition = 999 WHERE id = 'victim'")
    assert_only_the_victim_is_damaged(trio)


def test_a_definition_that_is_refused_is_damage_of_its_instances(trio: Desk) -> None:
    def graph_of(no: int) -> Any:
        raise Rejected("its expressions do not compile")

    found = load(trio.writer.connection, ["victim"], graph_of)

    assert isinstance(found["victim"], Damaged)


def test_a_definition_that_was_changed_behind_everybody_s_back_is_damage_of_its_instances(tmp_path: Path) -> None:
    """A flipped bit in a condition would change which way every instance goes."""
    process = Process("short", wait("paid"), takes={"amount": int})
    with Rehearsal(tmp_path, process) as before:
        before.start(process, {"amount": 1}, id="one")
    with closing(sqlite3.connect(tmp_path / "rehearsal.db", isolation_level=None)) as connection:
        connection.execute("""UPDATE definition SET body = replace(body, '"message":"paid"', '"message":"paie"')""")

    with Rehearsal(tmp_path) as after, pytest.raises(Damaged):
        after.send("one", "paid")


def test_a_file_that_cannot_be_read_now_is_no_damage(trio: Desk) -> None:
    trio.writer.connection.set_progress_handler(lambda: 1, 1)

    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        trio.load("victim")


def test_what_is_too_large_to_be_read_at_once_is_read_in_parts(trio: Desk) -> None:
    answer = sum(len(str(row)) for rows in trio.dump().values() for row in rows)
    trio.writer.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, answer // 2)

    assert all(isinstance(loaded, Loaded) for loaded in trio.load("first", "victim", "last").values())


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 17), bit=st.integers(0, 7))
def test_a_bit_flipped_in_the_file_is_found(new_desk: Callable[[], Desk], place: int, bit: int) -> None:
    """In a value that stands nowhere else: SQLite itself notices nothing."""
    desk = new_desk()
    for name in ("first", "victim", "last"):
        desk.put(name, value=f'"a needle for {name}"')
    desk.close()
    file = Path(desk.path)
    content = bytearray(file.read_bytes())
    needle = b'value"a needle for victim"'
    assert content.count(needle) == 1
    content[content.index(needle) + len(b"value") + place] ^= 1 << bit
    file.write_bytes(content)

    desk.writer.reopen()

    assert_only_the_victim_is_damaged(desk)
    desk.close()
