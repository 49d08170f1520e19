"""The runtime as a service uses it: real threads, a real file, the real clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from understudy import (
    Cancelled,
    Change,
    Conflict,
    Context,
    Failed,
    Handle,
    Process,
    Rejected,
    Retry,
    Runtime,
    State,
    Stuck,
    TimedOut,
    choose,
    connect,
    saga,
    sleep,
    task,
    wait,
)
from understudy.model.events import AttemptFailed
from understudy.store.reads import Summary

WAIT_S = 10  # For events that come at once; it is never used up when all is well.
CALLERS = 8


@frozen
class Order:
    order_id: str
    amount: int = 40


@frozen
class Receipt:
    id: str
    order: Order


@task(into="receipt")
def charge(order_id: str, amount: int) -> Receipt:
    return Receipt(f"r-{order_id}", Order(order_id, amount))


@charge.undo
def refund(receipt: Receipt) -> None: ...


@task
def hand_over(order_id: str) -> None:
    raise ValueError("nobody at home")


@task
def ship(receipt: Receipt) -> Receipt:
    return receipt


@task(retry=Retry(5, first="1h"))
def phone(order_id: str) -> None:
    raise ConnectionError("engaged")


checkout = Process(
    "checkout", saga(charge), wait("delivered", key="order_id", into="at"), ship, takes=Order, gives=ship
)
doomed = Process("doomed", saga(charge, hand_over), takes=Order)
stopped = Process("stopped", hand_over, takes=Order)
waiting = Process("waiting", wait("go", into="went"), takes=dict, gives="went")
PROCESSES = (checkout, doomed, stopped, waiting)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime(tmp_path / "orders.db", *PROCESSES, durability="relaxed") as runtime:
        yield runtime


def delivered(order: Handle[Any]) -> State:
    return order.wait_until(lambda state: state.is_waiting_for("delivered"))


# --- starting ---------------------------------------------------------------------------------------------------------


def test_the_same_id_with_the_same_input_is_the_same_instance(runtime: Runtime) -> None:
    first = runtime.start(checkout, Order("7"), id="order-7")
    delivered(first)

    second = runtime.start(checkout, Order("7"), id="order-7")

    assert first.id == second.id == "order-7"
    assert second.state.version == first.state.version
    assert len(runtime.list()) == 1


def test_the_same_id_with_another_input_or_process_is_a_conflict(runtime: Runtime) -> None:
    runtime.start(checkout, Order("7"), id="order-7")

    with pytest.raises(Conflict, match="order-7 was started before with another process or input; choose another id"):
        runtime.start(checkout, Order("7", 41), id="order-7")
    with pytest.raises(Conflict, match="order-7"):
        runtime.start(doomed, Order("7"), id="order-7")


def test_an_instance_that_has_ended_is_still_the_answer_to_its_start(runtime: Runtime) -> None:
    order = runtime.start(waiting, {}, id="w")
    order.send("go")
    order.result()

    assert runtime.start(waiting, {}, id="w").result() is None


def test_many_threads_that_start_the_same_id_start_one_instance(runtime: Runtime) -> None:
    gate = threading.Barrier(CALLERS)

    def start(caller: int) -> str:
        gate.wait(WAIT_S)
        try:
            return runtime.start(checkout, Order("7", caller % 2), id="order-7").id
        except Conflict:
            return "conflict"

    with ThreadPoolExecutor(CALLERS) as pool:
        answers = list(pool.map(start, range(CALLERS)))

    assert sorted(answers) == ["conflict"] * (CALLERS // 2) + ["order-7"] * (CALLERS // 2)
    assert len(runtime.list()) == 1


def test_without_an_id_every_start_is_a_new_instance(runtime: Runtime) -> None:
    ids = {runtime.start(waiting).id for _ in range(3)}

    assert len(ids) == 3


def test_where_an_instance_comes_from_is_seen_in_its_state_and_in_lists(runtime: Runtime) -> None:
    order = runtime.start(
        waiting, {"n": 1}, id="w", title="Order 7", tags={"customer": "17"}, by="anna", caused_by="ticket-3"
    )

    (summary,) = runtime.list()
    for seen in (order.state, summary):
        assert (seen.id, seen.process, seen.process_version) == ("w", "waiting", 1)
        assert (seen.title, seen.tags, seen.by, seen.caused_by) == ("Order 7", {"customer": "17"}, "anna", "ticket-3")
        assert (seen.trigger, seen.status, seen.outcome) == ("api", "running", None)
        assert seen.created_ms <= seen.changed_ms


def test_a_process_can_be_started_by_its_name(runtime: Runtime) -> None:
    order: Handle[Any] = runtime.start("checkout", {"order_id": "7"}, id="order-7")

    order.send("delivered")

    assert order.result() == Receipt("r-7", Order("7"))
    assert runtime.start(checkout, Order("7"), id="order-7").id == order.id


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_is_received_at_once_or_kept_until_something_waits_for_it(runtime: Runtime) -> None:
    order = runtime.start(checkout, Order("7"))
    delivered(order)

    kept = order.send("returned", {"why": "too late"})
    received = order.send("delivered", {"at": "door"})

    assert (kept, received) == (False, True)
    order.result()
    assert order.variables["at"] == {"at": "door"}


def test_a_message_that_came_early_is_taken_when_it_is_waited_for(runtime: Runtime) -> None:
    process = Process("later", wait("first"), wait("second", into="got"), gives="got")
    runtime.close()
    with Runtime(runtime.path, process) as again:
        order = again.start(process)

        assert order.send("second", 2) is False
        assert order.send("first") is True
        assert order.result() == 2


def test_a_published_message_finds_who_waits_for_its_key(runtime: Runtime) -> None:
    first, second = (runtime.start(checkout, Order(number)) for number in ("1", "2"))
    delivered(first), delivered(second)

    runtime.publish("delivered", "door", key=2)  # A number meets the text of a variable.

    assert second.result() == Receipt("r-2", Order("2"))
    assert first.state.is_waiting_for("delivered")


def test_a_message_published_before_anybody_waits_is_kept_for_who_comes_later(runtime: Runtime) -> None:
    runtime.publish("delivered", "door", key="7")

    order = runtime.start(checkout, Order("7"))

    assert order.result() == Receipt("r-7", Order("7"))
    assert order.variables["at"] == "door"


def test_a_message_reaches_nobody_after_its_time(runtime: Runtime) -> None:
    runtime.publish("delivered", key="7", ttl="1ms")
    order = runtime.start(checkout, Order("8"))
    order.send("delivered", key="8", ttl="1ms")
    threading.Event().wait(0.05)  # Real time must pass: that is what is tested.

    late = runtime.start(checkout, Order("7"))

    assert delivered(late).is_waiting_for("delivered")


def test_a_repeated_command_with_its_request_key_gets_the_first_answer(runtime: Runtime) -> None:
    order = runtime.start(checkout, Order("7"))
    delivered(order)

    answers = [order.send("returned", 1, request_key="k-1") for _ in range(2)]
    with pytest.raises(Conflict, match="the key 'k-1' was used before with other content"):
        order.send("returned", 2, request_key="k-1")

    assert answers == [False, False]
    assert order.state.kept == 1


def test_a_repeated_command_gets_the_first_answer_also_when_that_has_ended_the_instance(runtime: Runtime) -> None:
    order = runtime.start(waiting)

    assert [order.send("go", 1, request_key="k-1") for _ in range(2)] == [True, True]


def test_a_repeated_publication_with_its_request_key_is_one_message(runtime: Runtime) -> None:
    for _ in range(2):
        runtime.publish("paid", 1, key="7", request_key="payment-1")

    with pytest.raises(Conflict):
        runtime.publish("paid", 2, key="7", request_key="payment-1")

    assert len(runtime.node.reads.unclaimed_messages()) == 1


def test_many_threads_with_one_request_key_send_one_message(runtime: Runtime) -> None:
    process = Process("twice", wait("go"), wait("go"))
    runtime.close()
    with Runtime(runtime.path, process) as again:
        order = again.start(process)

        with ThreadPoolExecutor(CALLERS) as pool:
            answers = list(pool.map(lambda _: order.send("go", request_key="one"), range(CALLERS)))

        assert answers == [True] * CALLERS
        assert order.state.is_waiting_for("go")


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_result_comes_back_in_the_type_that_the_task_gives(runtime: Runtime) -> None:
    order = runtime.start(checkout, Order("7"))
    order.send("delivered")

    receipt = order.result()

    assert receipt == Receipt("r-7", Order("7", 40))
    assert runtime.get(order.id).result() == receipt
    assert order.state.result == {"id": "r-7", "order": {"order_id": "7", "amount": 40}}


def test_failed_says_which_step_why_and_what_was_undone(runtime: Runtime) -> None:
    order = runtime.start(doomed, Order("7"), id="order-7")

    with pytest.raises(Failed) as failed:
        order.result()

    assert str(failed.value) == "order-7 failed at hand_over: ValueError: nobody at home; undone: charge"
    assert (order.path, order.undone) == (["charge"], ["charge"])


def test_cancelled_says_why_and_what_was_undone(runtime: Runtime) -> None:
    process = Process("cancellable", saga(charge, wait("go")), takes=Order)
    runtime.close()
    with Runtime(runtime.path, process) as again:
        order = again.start(process, Order("7"), id="order-7")
        order.wait_until(lambda state: state.is_waiting_for("go"))

        order.cancel(reason="changed my mind")

        with pytest.raises(Cancelled) as cancelled:
            order.result()
        assert str(cancelled.value) == "order-7 was cancelled: changed my mind; undone: charge"


def test_cancelling_without_undo_undoes_nothing(runtime: Runtime) -> None:
    process = Process("cancellable", saga(charge, wait("go")), takes=Order)
    runtime.close()
    with Runtime(runtime.path, process) as again:
        order = again.start(process, Order("7"))
        order.wait_until(lambda state: state.is_waiting_for("go"))

        order.cancel(undo=False)

        assert (order.state.outcome, order.undone) == ("cancelled", [])


def test_stuck_names_the_incident_that_waits_for_an_operator(runtime: Runtime) -> None:
    order = runtime.start(stopped, Order("7"), id="order-7")

    with pytest.raises(Stuck, match=r"order-7 is stopped at hand_over by incident \d+ \(error\): ValueError: nobody"):
        order.result()

    assert len(runtime.list(with_incident=True)) == 1


def test_timed_out_says_what_is_waited_for(runtime: Runtime) -> None:
    order = runtime.start(checkout, Order("7"), id="order-7")
    delivered(order)

    with pytest.raises(TimedOut, match=r"order-7: waiting since .* at delivered for message `delivered` with key 7"):
        order.result(timeout="20ms")


def test_a_wait_is_woken_by_the_commit_that_it_waits_for(runtime: Runtime) -> None:
    order = runtime.start(checkout, Order("7"))
    delivered(order)
    seen: list[State] = []
    waiter = threading.Thread(target=lambda: seen.append(order.wait_until(lambda state: state.is_ended)))
    waiter.start()

    order.send("delivered")
    waiter.join(WAIT_S)

    assert [state.outcome for state in seen] == ["completed"]


def test_waits_that_have_ended_leave_nothing_behind(runtime: Runtime) -> None:
    order = runtime.start(waiting)
    for _ in range(3):
        with pytest.raises(TimedOut):
            order.result(timeout="1ms")

    assert runtime.node.system is not None
    assert runtime.node.system.watch._of == {}


# --- looking ----------------------------------------------------------------------------------------------------------


def test_variables_are_those_of_the_last_commit(runtime: Runtime) -> None:
    order = runtime.start(checkout, Order("7"))
    delivered(order)

    assert order.variables == {
        "order_id": "7",
        "amount": 40,
        "receipt": {"id": "r-7", "order": {"order_id": "7", "amount": 40}},
    }


def test_the_history_tells_what_happened(runtime: Runtime) -> None:
    order = runtime.start(doomed, Order("7"))
    with pytest.raises(Failed):
        order.result()

    told = [told for step in order.history for told in step.told]

    assert told == [
        "doomed v1 started",
        "charge begins",
        "charge done",
        "hand_over begins",
        "attempt 1 of hand_over failed: ValueError: nobody at home",
        "what was done is undone, because of hand_over",
        "undo of charge begins",
        "undo of charge done",
        "ended: failed",
    ]
    assert [step.n for step in order.history] == list(range(1, len(order.history) + 1))
    assert str(order.history[0]).startswith("1. 20")


def test_the_history_keeps_the_traceback_of_a_failed_attempt(runtime: Runtime) -> None:
    order = runtime.start(stopped, Order("7"))
    order.wait_until(lambda state: bool(state.incidents))

    (failure,) = (
        event
        for step in order.history
        for entry in step.entries
        for event in entry.events
        if isinstance(event, AttemptFailed)
    )

    assert 'raise ValueError("nobody at home")' in failure.trace
    assert failure.types[:2] == ("builtins:ValueError", "builtins:Exception")


def test_explain_says_what_is_waited_for_and_what_would_move_it(runtime: Runtime) -> None:
    process = Process(
        "explained", saga(charge, wait("delivered", key="order_id", timeout="72h", late=ship)), takes=Order
    )
    runtime.close()
    with Runtime(runtime.path, process) as again:
        order = again.start(process, Order("7"), id="order-7")
        delivered(order)
        order.send("something else")

        head, *lines = order.explain().lines

        assert head.startswith("order-7 (explained v1) is running: started 20")
        assert lines[0].startswith("  waiting since 20")
        assert lines[0].endswith("Z at delivered for message `delivered` with key 7")
        assert lines[1].startswith(
            "    moved by send('delivered') or publish('delivered', key='7'); or by the clock at 20"
        )
        assert lines[1].endswith("(in 2d 23h), which leads to ship")
        assert lines[2:] == [
            "  1 message is kept, for which nothing has waited yet",
            "  if it fails or is cancelled now, this is undone: charge",
        ]


def test_explain_says_why_an_attempt_is_repeated(tmp_path: Path) -> None:
    process = Process("phones", phone, takes=Order)
    with Runtime(tmp_path / "p.db", process) as runtime:
        order = runtime.start(process, Order("7"))
        order.wait_until(lambda state: state.waiting[0].kind == "retry")

        text = str(order.explain())

        assert "at phone for attempt 2 of 5, due 20" in text
        assert "the last attempt failed: ConnectionError: engaged" in text
        assert "moved by the clock at 20" in text


def test_explain_says_how_an_operator_can_move_what_is_stopped(tmp_path: Path) -> None:
    process = Process("chooses", choose(("amount > 1000", phone), ("amount < 0", hand_over)), takes=Order)
    with Runtime(tmp_path / "p.db", process) as runtime:
        order = runtime.start(process, Order("7"))
        (incident,) = order.wait_until(lambda state: bool(state.incidents)).incidents

        text = str(order.explain())

        n = incident.incident
        assert f"at choice-1 by incident {n} (no_branch): no condition is true" in text
        assert f"moved by retry({n}), skip({n}, to='phone' or 'hand_over') or fail({n})" in text


def test_explain_of_an_ended_instance_says_how_it_ended(runtime: Runtime) -> None:
    order = runtime.start(doomed, Order("7"), id="order-7")
    order.wait_until(lambda state: state.is_ended)

    head, why = order.explain().lines

    assert head.startswith("order-7 (doomed v1) has ended: failed at 20")
    assert why == "  because at hand_over: ValueError: nobody at home"


# --- lists ------------------------------------------------------------------------------------------------------------


def test_lists_are_filtered(runtime: Runtime) -> None:
    orders = [runtime.start(checkout, Order(str(n)), id=f"order-{n}", tags={"even": str(n % 2 == 0)}) for n in range(4)]
    runtime.start(stopped, Order("9"), id="stopped-9", title="Ninth").wait_until(lambda state: bool(state.incidents))
    for order in orders:
        delivered(order)
    orders[0].send("delivered")
    orders[0].result()
    orders[1].pause()

    def ids(**which: Any) -> list[str]:
        return [summary.id for summary in runtime.list(**which)]

    assert ids() == ["stopped-9", "order-3", "order-2", "order-1", "order-0"]
    assert ids(process="checkout") == ["order-3", "order-2", "order-1", "order-0"]
    assert ids(outcome="completed") == ids(status="ended") == ["order-0"]
    assert ids(status="paused") == ["order-1"]
    assert ids(open_only=True, process="checkout") == ["order-3", "order-2", "order-1"]
    assert ids(with_incident=True) == ["stopped-9"]
    assert ids(tag=("even", "True")) == ["order-2", "order-0"]
    assert ids(tag=('with "quotes"', "x")) == []
    assert ids(text="inth") == ["stopped-9"]
    assert ids(text="order-") == ["order-3", "order-2", "order-1", "order-0"]
    assert ids(text="%") == []


def test_pages_meet_without_a_gap_while_instances_are_started(runtime: Runtime) -> None:
    expected = [runtime.start(waiting, id=f"w-{n:03}").id for n in range(130)]

    pages: list[list[Summary]] = []
    before = None
    while page := runtime.list(limit=40, before=before):
        pages.append(page)
        before = page[-1].no
        runtime.start(waiting)  # New ones are before the first page; they disturb nobody.

    assert [len(page) for page in pages] == [40, 40, 40, 10]
    assert [summary.id for page in pages for summary in page] == expected[::-1]


# --- moving -----------------------------------------------------------------------------------------------------------


def test_cancelling_tells_a_running_handler(tmp_path: Path) -> None:
    begun, told = threading.Event(), threading.Event()

    @task
    def patient(ctx: Context) -> None:
        begun.set()
        while not ctx.cancelled:
            threading.Event().wait(0.001)
        told.set()

    with Runtime(tmp_path / "p.db", Process("p", patient)) as runtime:
        order: Handle[Any] = runtime.start("p")
        begun.wait(WAIT_S)

        order.cancel()

        assert told.wait(WAIT_S)
        assert order.state.outcome == "cancelled"


def test_a_paused_instance_finishes_what_runs_and_begins_nothing(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()
    order_of_calls: list[str] = []

    @task
    def first() -> None:
        begun.set()
        may_end.wait(WAIT_S)
        order_of_calls.append("first")

    @task
    def second() -> None:
        order_of_calls.append("second")

    with Runtime(tmp_path / "p.db", Process("p", first, second)) as runtime:
        order: Handle[Any] = runtime.start("p")
        begun.wait(WAIT_S)
        order.pause()
        may_end.set()

        paused = order.wait_until(lambda state: state.is_waiting_at("second"))
        explained = str(order.explain())
        calls = list(order_of_calls)
        order.resume()
        order.wait_until(lambda state: state.is_ended)

        assert (paused.status, paused.waiting[0].kind) == ("paused", "ready")
        assert "nothing new begins; moved by resume()" in explained
        assert calls == ["first"]
        assert order_of_calls == ["first", "second"]


def test_a_paused_instance_keeps_its_messages(runtime: Runtime) -> None:
    order = runtime.start(waiting)
    order.pause()
    order.pause()

    order.send("go", 1)
    order.resume()

    assert order.result() == 1


@pytest.mark.parametrize(
    ("how", "outcome", "path"),
    [("retry", "completed", ["careful"]), ("skip", "completed", ["careful"]), ("fail", "failed", [])],
)
def test_an_incident_is_settled_by_retry_skip_or_fail(tmp_path: Path, how: str, outcome: str, path: list[str]) -> None:
    mended = threading.Event()

    @task(into="value")
    def careful() -> int:
        if not mended.is_set():
            raise ValueError("not mended")
        return 1

    with Runtime(tmp_path / "p.db", Process("p", careful, gives="value")) as runtime:
        order: Handle[Any] = runtime.start("p")
        (incident,) = order.wait_until(lambda state: bool(state.incidents)).incidents
        mended.set()

        match how:
            case "retry":
                order.retry(incident.incident, by="anna")
            case "skip":
                order.skip(result=2)
            case "fail":
                order.fail()

        state = order.wait_until(lambda state: state.is_ended)
        assert (state.outcome, order.path) == (outcome, path)
        assert state.result == {"retry": 1, "skip": 2, "fail": None}[how]
        assert how != "retry" or "anna" in [entry.by for step in order.history for entry in step.entries]


# --- following --------------------------------------------------------------------------------------------------------


def test_a_subscriber_gets_every_commit_of_an_instance_in_order(runtime: Runtime) -> None:
    changes: list[Change] = []
    ended = threading.Event()

    def receive(change: Change) -> None:
        changes.append(change)
        if runtime.state(change.instance).is_ended and change.n == runtime.state(change.instance).version:
            ended.set()

    runtime.subscribe("audit", receive)
    order = runtime.start(doomed, Order("7"))

    assert ended.wait(WAIT_S)
    assert [change.n for change in changes] == [step.n for step in order.history]
    assert sorted(change.seq for change in changes) == [change.seq for change in changes]


def test_a_subscriber_goes_on_where_it_has_come_to_in_the_next_life(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    heard: list[tuple[str, int]] = []
    complete = threading.Semaphore(0)

    def receive(change: Change) -> None:
        heard.append((change.instance, change.n))
        complete.release()

    with Runtime(path, waiting) as runtime:
        runtime.subscribe("audit", receive)
        runtime.start(waiting, id="first")
        complete.acquire(timeout=WAIT_S)
    with Runtime(path, waiting) as runtime:
        runtime.start(waiting, id="second")
        runtime.subscribe("audit", receive)
        complete.acquire(timeout=WAIT_S)

    assert heard == [("first", 1), ("second", 1)]


def test_a_delivery_that_fails_holds_back_its_instance_alone_until_it_is_redelivered(runtime: Runtime) -> None:
    mended = threading.Event()
    heard: list[str] = []
    came = threading.Semaphore(0)

    def receive(change: Change) -> None:
        if change.instance == "bad" and not mended.is_set():
            came.release()
            raise RuntimeError("cannot take it")
        heard.append(change.instance)
        came.release()

    runtime.subscribe("audit", receive, tries=1)
    runtime.start(waiting, id="bad")
    came.acquire(timeout=WAIT_S)
    runtime.start(waiting, id="good")
    came.acquire(timeout=WAIT_S)
    before = list(heard)
    mended.set()
    runtime.redeliver("audit", "bad")
    came.acquire(timeout=WAIT_S)

    assert (before, heard) == (["good"], ["good", "bad"])


# --- runtimes on one file ---------------------------------------------------------------------------------------------


def test_connect_gives_the_same_calls_from_elsewhere(runtime: Runtime) -> None:
    with connect(runtime.path, checkout) as client:
        order = client.start(checkout, Order("7"), id="order-7")
        delivered(order)
        kept = order.send("else")
        received = order.send("delivered")

        assert (kept, received) == (False, True)
        assert order.result() == Receipt("r-7", Order("7"))
        assert not client.is_owner
        with pytest.raises(Conflict):
            client.start(checkout, Order("8"), id="order-7")
        with pytest.raises(Stuck):
            client.start("stopped", {"order_id": "7"}).result()
    assert runtime.get("order-7").state.is_ended


def test_a_second_runtime_is_a_client_until_the_owner_closes(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    first, second = Runtime(path, waiting), Runtime(path, waiting)
    roles = (first.is_owner, second.is_owner)
    order = second.start(waiting, id="w")

    first.close()
    order.send("go", 1)
    result = order.result()
    second.close()

    assert roles == (True, False)
    assert result == 1


def test_nothing_acknowledged_is_lost_when_a_runtime_closes(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    with Runtime(path, checkout) as runtime:
        for n in range(20):
            runtime.start(checkout, Order(str(n)), id=f"order-{n}")

    with Runtime(path, checkout) as runtime:
        for n in range(20):
            runtime.publish("delivered", key=n)

        assert [runtime.result(f"order-{n}").id for n in range(20)] == [f"r-{n}" for n in range(20)]


def test_closing_lets_running_handlers_finish(tmp_path: Path) -> None:
    begun = threading.Event()

    @task(into="value")
    def slow() -> int:
        begun.set()
        threading.Event().wait(0.1)
        return 7

    process = Process("p", slow, gives="value")
    with Runtime(tmp_path / "p.db", process) as runtime:
        runtime.start(process, id="p-1")
        begun.wait(WAIT_S)

    with Runtime(tmp_path / "p.db", process) as runtime:
        assert runtime.result("p-1") == 7
        assert runtime.state("p-1").version <= 3


# --- in memory --------------------------------------------------------------------------------------------------------


def test_a_runtime_in_memory_works_and_says_that_nothing_survives(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "understudy"), Runtime(":memory:", checkout) as runtime:
        order = runtime.start(checkout, Order("7"))
        order.send("delivered")

        assert order.result() == Receipt("r-7", Order("7"))
        assert runtime.path == ":memory:"
    assert 'nothing survives a Runtime on ":memory:"' in caplog.text


def test_runtimes_in_memory_know_nothing_of_each_other_and_leave_nothing() -> None:
    with Runtime(":memory:", waiting) as first, Runtime(":memory:", waiting) as second:
        first.start(waiting, id="w")
        folder = Path(first.node.path).parent

        assert second.list() == []
    assert not folder.exists()


def test_readers_of_a_runtime_in_memory_do_not_disturb_its_writer() -> None:
    over = threading.Event()

    def read(runtime: Runtime) -> None:
        while not over.is_set():
            for summary in runtime.list(limit=5):
                assert runtime.state(summary.id).id == summary.id

    with Runtime(":memory:", checkout) as runtime, ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, runtime) for _ in range(2)]
        try:
            for n in range(50):
                order = runtime.start(checkout, Order(str(n)))
                order.send("delivered")
                order.result()
        finally:
            over.set()

        assert [reader.result() for reader in readers] == [None, None]
        assert len(runtime.list(outcome="completed", limit=100)) == 50


# --- processes and handlers -------------------------------------------------------------------------------------------


def test_a_new_version_is_used_by_new_instances_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    with Runtime(path, waiting) as runtime:
        runtime.start(waiting, id="old")
    longer = Process("waiting", wait("go"), wait("go", into="went"), takes=dict, gives="went")

    with Runtime(path, longer) as runtime:
        runtime.start(longer, id="new")
        runtime.send("old", "go", 1)
        runtime.send("new", "go", 2)

        assert runtime.result("old") == 1
        assert runtime.state("new").is_waiting_for("go")
        assert (runtime.state("old").process_version, runtime.state("new").process_version) == (1, 2)


def test_report_lists_the_handlers_that_nobody_has_bound(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    with Runtime(path, checkout, waiting) as runtime:
        everything = runtime.report()
    with Runtime(path, waiting) as runtime:
        missing = runtime.report()

    assert everything == []
    assert missing == ["checkout v1 needs charge, refund, ship: no handler of that name is bound"]


def test_two_processes_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="two processes are named 'waiting'; give one of them another name"):
        Runtime(tmp_path / "p.db", waiting, Process("waiting", sleep("1h")))


def test_two_functions_under_one_handler_name_are_refused(tmp_path: Path) -> None:
    @task(name="charge")
    def other() -> None: ...

    with pytest.raises(Rejected, match="two functions are bound to the handler name 'charge'; give one task a name="):
        Runtime(tmp_path / "p.db", checkout, Process("other", other))


def test_one_task_may_serve_many_processes(tmp_path: Path) -> None:
    processes = [Process(f"p-{n}", saga(charge), takes=Order, gives="receipt") for n in range(3)]

    with Runtime(tmp_path / "p.db", *processes) as runtime:
        results = [runtime.start(process, Order("7")).result() for process in processes]

    assert results == [Receipt("r-7", Order("7"))] * 3


# --- what was not undone, and results of other versions ---------------------------------------------------------------

cautious = Process("cautious", saga(charge, wait("go"), hand_over), takes=Order)


def test_a_failure_names_what_could_not_be_undone(tmp_path: Path) -> None:
    broken = threading.Event()

    @task(into="receipt")
    def take(order_id: str) -> str:
        return order_id

    @take.undo
    def give_back(receipt: str) -> None:
        broken.set()
        raise ValueError("the bank is closed")

    process = Process("broken", saga(take, hand_over), takes={"order_id": str})
    with Runtime(tmp_path / "p.db", process) as runtime:
        order = runtime.start(process, {"order_id": "7"})
        order.wait_until(lambda state: bool(state.incidents))
        order.fail()

        with pytest.raises(Failed, match="NOT undone: take"):
            order.result()
        assert broken.is_set()


def test_cancelling_without_undo_names_what_stays_done(tmp_path: Path) -> None:
    with Runtime(tmp_path / "p.db", cautious) as runtime:
        order = runtime.start(cautious, Order("7"))
        order.wait_until(lambda state: state.is_waiting_for("go"))

        order.cancel(undo=False)

        with pytest.raises(Cancelled, match="NOT undone: charge"):
            order.result()


def test_the_result_of_an_older_version_with_another_type_is_given_as_it_is(tmp_path: Path) -> None:
    @task
    def one() -> None: ...

    @task
    def two() -> int:
        return 2

    path = tmp_path / "p.db"
    with Runtime(path, older := Process("p", one, wait("go"))) as runtime:
        runtime.start(older, id="old").wait_until(lambda state: state.is_waiting_for("go"))
    with Runtime(path, Process("p", one, wait("go"), two, gives=two)) as runtime:
        runtime.send("old", "go")

        assert runtime.get("old").result() is None
