"""What cannot be done is refused at the door, each with its own error, and nothing of it is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy import (
    AlreadyEnded,
    AlreadyOpen,
    BadInput,
    BadValue,
    Closed,
    Conflict,
    Damaged,
    InvalidDefinition,
    Limits,
    NewerSchema,
    NotOurs,
    Process,
    Rehearsal,
    Rejected,
    Retry,
    Runtime,
    Stuck,
    Unavailable,
    UnknownIncident,
    UnknownInstance,
    UnknownProcess,
    connect,
    saga,
    sleep,
    task,
    wait,
)


@frozen
class Order:
    order_id: str
    amount: int = 40


@task(into="receipt")
def charge(order_id: str, amount: int) -> str:
    return f"r-{order_id}"


@charge.undo
def refund(receipt: str) -> None: ...


checkout = Process("checkout", saga(charge), wait("go", into="went"), takes=Order, gives="receipt")
anything = Process("anything", wait("go", into="went"), takes=dict, gives="went")


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime(tmp_path / "p.db", checkout, anything, durability="relaxed") as runtime:
        yield runtime


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# --- processes and their input ----------------------------------------------------------------------------------------


def test_an_unknown_process_is_refused_with_those_there_are(runtime: Runtime) -> None:
    with pytest.raises(UnknownProcess, match=r"no process 'chekout' is deployed here \(deployed: anything, checkout\)"):
        runtime.start("chekout")


def test_a_process_that_the_runtime_was_not_given_is_refused_with_what_to_do(runtime: Runtime) -> None:
    with pytest.raises(UnknownProcess, match=r"no process 'other' with this content .*; pass it to the Runtime"):
        runtime.start(Process("other", sleep("1h")))
    with pytest.raises(Rejected, match="start takes a Process or the name of one, not int"):
        runtime.start(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "order_id is missing (str)"),
        ({}, "order_id is missing (str)"),
        ({"order_id": 7}, "order_id: Expected `str`, got `int`"),
        ({"order_id": "7", "amount": "much"}, "amount: Expected `int`, got `str`"),
        ({"order_id": "7", "amuont": 7}, "amuont is unknown: did you mean amount?"),
        ({"order_id": "7", 5: 7}, "5 is unknown: it takes order_id, amount"),
        ({"order_id": "7", "amount": float("nan")}, "amount: NaN is not JSON"),
        ({"order_id": "\ud800"}, "order_id: lone surrogate U+D800 is not text"),
        ({"order_id": "x" * 2_000_000}, "2,000,002 bytes are over the limit of 1,048,576"),
        ("7", "checkout takes Order or a mapping, not str: 7"),
        ([("order_id", "7")], "checkout takes Order or a mapping, not list"),
    ],
)
def test_an_input_that_does_not_fit_is_refused_and_nothing_is_started(
    runtime: Runtime, by_name: bool, value: Any, text: str
) -> None:
    with pytest.raises(BadInput) as refused:
        runtime.start("checkout" if by_name else checkout, value, id="order-7")

    assert text in str(refused.value)
    assert runtime.list() == []
    assert runtime.start(checkout, Order("7"), id="order-7").id == "order-7"


def test_all_that_is_wrong_with_an_input_is_told_at_once(runtime: Runtime) -> None:
    with pytest.raises(BadInput) as refused:
        runtime.start(checkout, {"amount": "much", "colour": "red"})

    for text in ("amount: Expected `int`", "colour is unknown", "order_id is missing"):
        assert text in str(refused.value)


def test_a_client_without_the_process_is_told_what_the_process_takes(runtime: Runtime) -> None:
    with connect(runtime.path) as client:
        with pytest.raises(BadInput, match="checkout needs order_id; nothing was started"):
            client.start("checkout", {})
        with pytest.raises(BadInput, match="takes a mapping of inputs, not int"):
            client.start("checkout", 5)


def test_a_client_without_the_process_cannot_give_what_the_process_does_not_take(runtime: Runtime) -> None:
    with connect(runtime.path) as client, pytest.raises(BadInput, match="colour"):
        client.start("checkout", {"order_id": "7", "colour": "red"})


def test_a_client_without_the_process_starts_the_same_instance_as_one_with_it(runtime: Runtime) -> None:
    runtime.start(checkout, Order("7"), id="order-7")

    with connect(runtime.path) as client:
        assert client.start("checkout", {"order_id": "7"}, id="order-7").id == "order-7"


def test_a_runtime_may_allow_less_than_a_process_could_take(tmp_path: Path) -> None:
    with Runtime(tmp_path / "p.db", checkout, limits=Limits(value_bytes=1_000)) as runtime:
        with pytest.raises(BadInput, match="order_id has 1,002 bytes, over the limit of 1,000"):
            runtime.start(checkout, Order("x" * 1_000))

        assert runtime.start(checkout, Order("x" * 900)).id


def test_an_invalid_definition_is_refused_with_all_its_problems_before_there_is_a_runtime() -> None:
    with pytest.raises(InvalidDefinition) as refused:
        Process("p", charge, wait("go", key="nobody"), takes={"order_id": int})

    codes = [problem.code for problem in refused.value.problems]
    assert {"undo_without_saga", "missing_variable", "type_clash"} <= set(codes)
    assert all(problem.place for problem in refused.value.problems)


def test_what_is_no_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="a Runtime takes processes, not Task"):
        Runtime(tmp_path / "p.db", charge)  # type: ignore[arg-type]

    assert list(tmp_path.iterdir()) == []


# --- values -----------------------------------------------------------------------------------------------------------

BAD_VALUES: list[tuple[str, Any, str]] = [
    ("NaN", float("nan"), "payload: NaN is not JSON; use None or a string"),
    ("Infinity", {"a": [1, float("inf")]}, "payload.a[1]: Infinity is not JSON"),
    ("surrogate", {"a": "\ud800"}, "payload.a: lone surrogate U+D800 is not text"),
    ("key", {"a": {1: 2}}, "payload.a: a key is an int, and JSON keys are strings"),
    ("null in a key", {"a\0": 1}, "payload: the key 'a\\x00' holds U+0000; remove it"),
    ("object", [object()], "payload[0]: an object cannot be stored as JSON"),
    ("bytes", b"x", "payload: bytes is not JSON; decode it to a str"),
    ("depth", nested(101), "nested deeper than 100 levels, or within itself"),
    ("size", {"big": "x" * 10_000_000}, "(the biggest field is payload.big with 10,000,002)"),
]


@pytest.mark.parametrize(("value", "text"), [case[1:] for case in BAD_VALUES], ids=[case[0] for case in BAD_VALUES])
def test_a_payload_that_json_cannot_hold_is_refused_with_its_path(runtime: Runtime, value: Any, text: str) -> None:
    order = runtime.start(anything, {}, id="w")
    before = order.history

    for send in (lambda: order.send("go", value), lambda: runtime.publish("go", value)):
        with pytest.raises(BadValue) as refused:
            send()
        assert text in str(refused.value)

    assert order.history == before
    assert runtime.node.reads.unclaimed_messages() == []
    order.send("go", "good")
    assert order.result() == "good"


def test_a_result_given_by_an_operator_is_checked_too(rehearsal: Rehearsal) -> None:
    @task
    def fail() -> None:
        raise ValueError

    order = rehearsal.start(Process("p", fail))

    with pytest.raises(BadValue, match="result: NaN is not JSON"):
        order.skip(result=float("nan"))

    assert len(order.state.incidents) == 1


def test_a_value_within_itself_is_refused(runtime: Runtime) -> None:
    circle: list[Any] = []
    circle.append(circle)

    with pytest.raises(BadValue, match="or within itself"):
        runtime.publish("go", circle)


@pytest.mark.parametrize(
    "value", [nested(99), {"": 1}, {"a\n": "\0"}, -0.0, 2**63, "\N{GRINNING FACE}", {"z", "a"}, None]
)
def test_whatever_json_can_hold_comes_back(runtime: Runtime, value: Any) -> None:
    order = runtime.start(anything)

    order.send("go", value)

    assert order.result() == (sorted(value) if isinstance(value, set) else value)


@settings(max_examples=60)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_any_value_is_stored_faithfully_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    with Rehearsal(tmp_path_factory.mktemp("play")) as rehearsal:
        order = rehearsal.start(anything)
        try:
            order.send("go", value)
        except BadValue:
            assert order.state.is_waiting_for("go")
            return
        rehearsal.crash()

        assert order.result() == value


# --- names ------------------------------------------------------------------------------------------------------------

BAD_NAMES: list[tuple[Any, str]] = [
    ("a\0b", "holds the control character U+0000 at 1; remove it"),
    ("a\nb", "holds the control character U+000A at 1; remove it"),
    ("a\ud800", "holds the lone surrogate U+D800 at 1; remove it"),
    ("x" * 300, "has 300 characters; at most 255 are allowed"),
    (7, "must be a string, not an int"),
]


@pytest.mark.parametrize(("name", "text"), [*BAD_NAMES, ("", "must not be empty")], ids=lambda part: ascii(part)[:12])
def test_ids_and_names_that_cannot_be_stored_or_printed_are_refused(runtime: Runtime, name: Any, text: str) -> None:
    order = runtime.start(anything)
    calls: dict[str, Callable[[], Any]] = {
        "id": lambda: runtime.start(anything, id=name),
        "message": lambda: order.send(name),
        "subscriber": lambda: runtime.subscribe(name, print),
    }
    for what, call in calls.items():
        with pytest.raises(BadValue) as refused:
            call()
        assert str(refused.value).startswith(what)
        assert text in str(refused.value)

    assert len(runtime.list()) == 1


@pytest.mark.parametrize(("name", "text"), BAD_NAMES, ids=lambda part: ascii(part)[:12])
def test_keys_titles_and_tags_are_checked_alike(runtime: Runtime, name: Any, text: str) -> None:
    order = runtime.start(anything)
    calls: list[Callable[[], Any]] = [
        lambda: order.send("go", request_key=name),
        lambda: order.send("go", by=name),
        lambda: order.cancel(request_key=name),
        lambda: runtime.start(anything, title=name),
        lambda: runtime.start(anything, tags={"a": name}),
        lambda: runtime.start(anything, tags={name: "a"}),
        lambda: runtime.start(anything, caused_by=name),
    ]
    if not isinstance(name, int):  # A number is a key as good as its text.
        calls.append(lambda: order.send("go", key=name))
    for call in calls:
        with pytest.raises(BadValue) as refused:
            call()
        assert text in str(refused.value)

    assert len(runtime.list()) == 1
    assert order.state.version == 1


def test_tags_and_keys_of_another_kind_are_refused(runtime: Runtime) -> None:
    with pytest.raises(BadValue, match="tags are a mapping of names to texts"):
        runtime.start(anything, tags=["a"])  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="key must be a string or a whole number, not a float"):
        runtime.publish("go", key=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["Auftrag für Zoë", "注文-7", "заказ", "\N{PERFORMING ARTS} 7", "a/b?c=d&e", "a'b", "%_"]
)
def test_unicode_ids_and_names_work(tmp_path: Path, name: str) -> None:
    process = Process(name, wait(name, key="key", into="went"), takes={"key": str}, gives="went")
    with Runtime(tmp_path / "p.db", process) as runtime:
        order = runtime.start(process, {"key": name}, id=name, title=name, tags={name: name})
        runtime.publish(name, {name: name}, key=name)

        assert order.result() == {name: name}
        assert [summary.id for summary in runtime.list(tag=(name, name))] == [name]
        assert [summary.title for summary in runtime.list(text=name, process=name)] == [name]


def test_a_tag_may_hold_a_quotation_mark(runtime: Runtime) -> None:
    order = runtime.start(anything, tags={'the "best"': "yes"})

    assert [summary.id for summary in runtime.list(tag=('the "best"', "yes"))] == [order.id]


# --- instances and incidents ------------------------------------------------------------------------------------------


def test_an_unknown_instance_is_refused_everywhere(runtime: Runtime) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: runtime.get("nobody"),
        lambda: runtime.state("nobody"),
        lambda: runtime.history("nobody"),
        lambda: runtime.explain("nobody"),
        lambda: runtime.result("nobody"),
        lambda: runtime.send("nobody", "go"),
        lambda: runtime.cancel("nobody"),
        lambda: runtime.pause("nobody"),
        lambda: runtime.resume("nobody"),
        lambda: runtime.retry("nobody"),
        lambda: runtime.skip("nobody"),
        lambda: runtime.fail("nobody"),
    ]
    for call in calls:
        with pytest.raises(UnknownInstance, match=r"there is no instance 'nobody' in .*list"):
            call()

    assert runtime.list() == []


def test_an_ended_instance_takes_no_commands(runtime: Runtime) -> None:
    order = runtime.start(anything, id="w")
    order.send("go")
    before = order.history

    for call in (lambda: order.send("go"), order.cancel, order.pause, order.resume, order.retry):
        with pytest.raises(AlreadyEnded, match=r"w has ended \(completed\)"):
            call()

    assert order.history == before


def test_an_unknown_incident_is_refused_with_the_open_ones(rehearsal: Rehearsal) -> None:
    @task
    def fail() -> None:
        raise ValueError

    order = rehearsal.start(Process("p", fail), id="p-1")
    healthy = rehearsal.start(anything, id="w")
    (incident,) = order.state.incidents

    with pytest.raises(UnknownIncident, match=rf"p-1 has no open incident 77; open: \[{incident.incident}\]"):
        order.retry(77)
    with pytest.raises(UnknownIncident, match="say which incident of w is meant; open: none"):
        healthy.retry()


def test_an_undo_under_way_cannot_be_paused(rehearsal: Rehearsal) -> None:
    rehearsal.hang(refund)
    order = rehearsal.start(checkout, Order("7"))
    process = Process("cancelled", saga(charge, wait("go")), takes=Order)
    order = rehearsal.start(process, Order("7"))
    order.cancel()

    with pytest.raises(Rejected, match="is cancelling; what is being undone cannot be paused"):
        order.pause()


def test_a_handler_that_is_missing_at_recovery_is_an_incident_until_it_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    process = Process("later", wait("go"), saga(charge), takes=Order, gives="receipt")
    with Runtime(path, process) as runtime:
        runtime.start(process, Order("7"), id="order-7")

    with Runtime(path) as runtime:
        runtime.send("order-7", "go")
        with pytest.raises(Stuck, match=r"\(missing_handler\): no handler named 'charge' is bound; pass its process"):
            runtime.result("order-7")
        missing = runtime.report()

    with Runtime(path, process) as runtime:
        runtime.retry("order-7")

        assert missing == ["later v1 needs charge, refund: no handler of that name is bound"]
        assert runtime.result("order-7") == "r-7"


# --- numbers, durations, filters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        ("soon", "'soon' is no duration; write"),
        ("5", "'5' has no unit; write 5s if seconds are meant"),
        ("-1s", "a duration cannot be negative"),
        (float("nan"), "nan is no duration"),
        (True, "a duration cannot be a bool"),
        ("1000y", "is no duration"),
        ("P1M", "counts years or months, which differ in length"),
    ],
)
def test_bad_durations_are_refused_wherever_they_stand(
    runtime: Runtime, tmp_path: Path, duration: Any, text: str
) -> None:
    order = runtime.start(anything)
    calls: list[Callable[[], Any]] = [
        lambda: order.result(timeout=duration),
        lambda: order.wait_until(lambda _: True, timeout=duration),
        lambda: order.send("go", ttl=duration),
        lambda: runtime.publish("go", ttl=duration),
        lambda: runtime.subscribe("s", print, backoff=duration),
        lambda: Runtime(tmp_path / "other.db", call_timeout=duration),
        lambda: runtime.close(timeout=duration),
        lambda: Retry(3, first=duration),
        lambda: task(timeout=duration),
    ]
    for call in calls:
        with pytest.raises((Rejected, InvalidDefinition)) as refused:
            call()
        assert text in str(refused.value)

    assert order.state.version == 1
    assert not (tmp_path / "other.db").exists()


def test_a_message_that_would_live_for_no_time_is_refused(runtime: Runtime) -> None:
    with pytest.raises(Rejected, match="ttl=0 could reach nobody"):
        runtime.publish("go", ttl=0)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ({"status": "finished"}, "status is one of pending, running, paused, compensating, cancelling, ended"),
        ({"outcome": "done"}, "outcome is one of completed, failed, cancelled"),
        ({"limit": 0}, "limit is a number from 1 to 10,000, not 0"),
        ({"limit": "all"}, "limit is a number from 1 to 10,000, not 'all'"),
        ({"before": "order-7"}, "before is the `no` of the last instance of the page before, not 'order-7'"),
        ({"tag": "customer"}, "tag is a pair of name and value"),
        ({"text": "a\0b"}, "holds the control character U+0000"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(runtime: Runtime, which: dict[str, Any], text: str) -> None:
    with pytest.raises(Rejected) as refused:
        runtime.list(**which)

    assert text in str(refused.value)


def test_a_subscriber_that_cannot_receive_is_refused(runtime: Runtime) -> None:
    async def later(_change: object) -> None: ...

    with pytest.raises(Rejected, match="a subscriber is a function that takes a Change, not int"):
        runtime.subscribe("s", 5)  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="later is async"):
        runtime.subscribe("s", later)
    with pytest.raises(Rejected, match="tries is 1 or more, not 0"):
        runtime.subscribe("s", print, tries=0)
    with pytest.raises(Rejected, match="nothing of w is held back from s"):
        runtime.redeliver("s", "w")

    assert runtime.node.reads.subscribers() == []


# --- roles, paths and files -------------------------------------------------------------------------------------------


def test_a_bad_role_or_durability_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"role is one of owner, auto, client.*, not 'boss'"):
        Runtime(tmp_path / "p.db", role="boss")
    with pytest.raises(Rejected, match="durability is one of full, relaxed, not 'none'"):
        Runtime(tmp_path / "p.db", durability="none")
    with pytest.raises(Rejected, match="role='client' could meet"):
        Runtime(":memory:", role="client")

    assert list(tmp_path.iterdir()) == []


def test_a_path_that_can_be_no_file_is_refused_and_nothing_is_made_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    with pytest.raises(Rejected, match=r"is a folder; give the path of a file, such as .*folder/understudy.db"):
        Runtime(folder)
    with pytest.raises(Rejected, match=r"there is no folder .*missing; make it first, or choose another path"):
        Runtime(tmp_path / "missing" / "p.db")
    for path in (7, "", "a\0b", b"p.db", None):
        with pytest.raises(Rejected, match="the path of a database is a text or a Path"):
            Runtime(path)  # type: ignore[arg-type]

    assert list(tmp_path.iterdir()) == [folder]


def test_a_second_owner_is_refused(runtime: Runtime) -> None:
    with pytest.raises(AlreadyOpen, match=r'has an owner already .* use role="auto" or understudy.connect'):
        Runtime(runtime.path, role="owner")

    assert runtime.start(anything).id


def test_connecting_to_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"there is no database at .*p.db; open a Runtime on it first"):
        connect(tmp_path / "p.db")
    Runtime(tmp_path / "q.db").close()
    with pytest.raises(Unavailable, match=r"nobody owns .*q.db at the moment; open a Runtime on it"):
        connect(tmp_path / "q.db")

    assert not (tmp_path / "p.db-owner").exists()


def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (a)")
    connection.commit()
    connection.close()
    before = path.read_bytes()

    with pytest.raises(NotOurs, match=r"is another program's database; nothing was changed in it. Give another path"):
        Runtime(path)

    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, " * 1_000)

    with pytest.raises(NotOurs, match=r"is not a SQLite database; nothing was changed in it. Give another path"):
        Runtime(path)

    assert path.read_text() == "Dear reader, " * 1_000


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    Runtime(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.commit()
    connection.close()

    with pytest.raises(NewerSchema, match=r"has schema 99, this Understudy knows .*; upgrade the package"):
        Runtime(path)


@pytest.mark.parametrize("part", [0.01, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_truncated_file_is_damaged(tmp_path: Path, part: float) -> None:
    path = tmp_path / "p.db"
    with Runtime(path, checkout) as runtime:
        for n in range(20):
            runtime.start(checkout, Order(str(n)), id=f"order-{n}")
    content = path.read_bytes()
    Path(f"{path}-wal").unlink(missing_ok=True)
    Path(f"{path}-shm").unlink(missing_ok=True)
    path.write_bytes(content[: int(part * len(content))])

    with pytest.raises(Damaged, match=r"restore a backup|not a SQLite database"):
        Runtime(path, checkout)

    assert path.read_bytes()[100:] == content[100 : int(part * len(content))]


def test_a_closed_runtime_says_so(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path / "p.db", anything)
    order = runtime.start(anything, id="w")
    runtime.close()

    calls: list[Callable[[], Any]] = [
        lambda: runtime.start(anything),
        lambda: runtime.get("w"),
        lambda: runtime.list(),
        lambda: runtime.report(),
        lambda: runtime.publish("go"),
        lambda: runtime.subscribe("s", print),
        lambda: runtime.redeliver("s", "w"),
        lambda: order.state,
        lambda: order.history,
        lambda: order.explain(),
        lambda: order.send("go"),
        lambda: order.result(),
        lambda: order.cancel(),
    ]
    for call in calls:
        with pytest.raises(Closed, match="This Runtime has been closed; open a new one"):
            call()

    assert runtime.close() is True


def test_what_is_refused_is_refused_to_a_client_in_the_same_words(runtime: Runtime) -> None:
    runtime.start(anything, {"n": 1}, id="w")
    refusals: list[Callable[[Runtime], Any]] = [
        lambda r: r.start("nothing"),
        lambda r: r.start(anything, {"n": 2}, id="w"),
        lambda r: r.send("nobody", "go"),
        lambda r: r.send("w", "go", float("nan")),
        lambda r: r.retry("w"),
        lambda r: r.state("nobody"),
    ]
    with connect(runtime.path, anything) as client:
        for refusal in refusals:
            with pytest.raises((Rejected, Conflict)) as here:
                refusal(runtime)
            with pytest.raises(type(here.value)) as there:
                refusal(client)
            assert str(here.value) == str(there.value)
