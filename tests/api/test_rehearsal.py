"""A play in a test: time and crashes are calls, tasks can be played by others, and nothing is waited for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy import (
    Change,
    Closed,
    Context,
    Failed,
    Process,
    Rehearsal,
    Rejected,
    Retry,
    Runtime,
    Stuck,
    TimedOut,
    parallel,
    saga,
    sleep,
    task,
    wait,
)
from understudy.actors.clock import utc_ms
from understudy.tasks import Activity, Task


@frozen
class Order:
    order_id: str
    amount: int = 40


@frozen
class Receipt:
    id: str


class Bank:
    """The world outside: it counts an effect once for each key, as a bank does."""

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.effects: Counter[str] = Counter()
        self.seen: set[str] = set()

    def once(self, effect: str, key: str) -> None:
        if key not in self.seen:
            self.seen.add(key)
            self.effects[effect] += 1


bank = Bank()


@pytest.fixture(autouse=True)
def _a_new_bank() -> None:
    bank.open()


@task(into="receipt", timeout="10s", retry=Retry(3, first="1s", jitter=0))
def charge(order_id: str, amount: int, ctx: Context) -> Receipt:
    bank.once("charge", ctx.key)
    return Receipt(f"receipt of {order_id}")


@charge.undo
def refund(receipt: Receipt, ctx: Context) -> None:
    bank.once("refund", ctx.key)


@task
def pack(order_id: str, ctx: Context) -> None:
    bank.once("pack", ctx.key)


@pack.undo
def unpack(order_id: str, ctx: Context) -> None:
    bank.once("unpack", ctx.key)


@task
def invoice(receipt: Receipt, ctx: Context) -> None:
    bank.once("invoice", ctx.key)


@task
def refuse(amount: int, ctx: Context) -> None:
    bank.once("refuse", ctx.key)
    raise ValueError("sold out")


@task
async def announce(order_id: str) -> str:
    return f"announced {order_id}"


@task
def escalate(order_id: str) -> None: ...


@task
def ship(order_id: str, receipt: Receipt) -> str:
    return f"shipped {order_id}, {receipt.id}"


checkout = Process(
    "checkout",
    saga(charge, parallel(pack, invoice)),
    wait("delivered", key="order_id", timeout="72h", late=escalate),
    ship,
    takes=Order,
    gives=ship,
)
doomed = Process("doomed", saga(charge, pack, refuse), takes=Order)
naps = Process("naps", sleep("3d"), announce, takes=Order, gives=announce)


# --- reading well -----------------------------------------------------------------------------------------------------


def test_a_late_parcel_is_escalated(rehearsal: Rehearsal) -> None:
    rehearsal.stand_in(charge, lambda order_id, amount, ctx: Receipt("r-1"))
    order = rehearsal.start(checkout, Order("7"))

    rehearsal.crash()
    rehearsal.advance("3d")

    assert order.path[-2:] == ["escalate", "ship"]
    assert order.result() == "shipped 7, r-1"


def test_after_every_call_everything_that_can_move_has_moved(rehearsal: Rehearsal) -> None:
    order = rehearsal.start(checkout, Order("7"))

    assert order.state.is_waiting_for("delivered")
    assert order.send("delivered") is True
    assert order.state.is_ended


def test_a_process_need_not_be_announced_before_it_is_started(rehearsal: Rehearsal) -> None:
    assert rehearsal.start(naps, Order("7")).state.at == ("sleep-1",)
    assert rehearsal.start("naps", {"order_id": "8"}).state.at == ("sleep-1",)


def test_an_instance_explains_itself(rehearsal: Rehearsal) -> None:
    rehearsal.stand_in(refund, Mock(side_effect=OSError("the bank is closed")))
    order = rehearsal.start(checkout, Order("7"), id="order-7")
    rehearsal.advance("2h")

    waiting = str(order.explain())
    stopped = rehearsal.start(doomed, Order("8"), id="order-8").explain()
    number = stopped.state.incidents[0].incident
    order.send("delivered")
    ended = order.explain()

    assert waiting.splitlines() == [
        "order-7 (checkout v1) is running: started 2026-01-01 00:00:00Z (2h ago), "
        "last changed 2026-01-01 00:00:00Z (2h ago)",
        "  waiting since 2026-01-01 00:00:00Z at delivered for message `delivered` with key 7",
        "    moved by send('delivered') or publish('delivered', key='7'); "
        "or by the clock at 2026-01-04 00:00:00Z (in 2d 22h), which leads to escalate",
    ]
    assert str(stopped).splitlines() == [
        "order-8 (doomed v1) is compensating: started 2026-01-01 02:00:00Z (just now), "
        "last changed 2026-01-01 02:00:00Z (just now)",
        "  stopped since 2026-01-01 02:00:00Z at charge by incident "
        f"{number} (undo_failed): "
        "undoing charge: OSError: the bank is closed",
        f"    moved by retry({number}), skip({number}) or fail({number})",
        "  still to be undone: charge",
    ]
    assert str(ended) == "order-7 (checkout v1) has ended: completed at 2026-01-01 02:00:00Z, 2h after its start"


def test_the_history_of_an_instance_is_its_story(rehearsal: Rehearsal) -> None:
    rehearsal.crash_after(pack)
    order = rehearsal.start(doomed, Order("7"))

    assert [str(step) for step in order.history] == [
        "1. 2026-01-01 00:00:00Z start: doomed v1 started; charge begins",
        "2. 2026-01-01 00:00:00Z task done: charge done; pack begins",
        "3. 2026-01-01 00:00:00Z recover: attempt 1 of pack was lost with its process",
        "4. 2026-01-01 00:00:00Z task done: pack done; refuse begins",
        "5. 2026-01-01 00:00:00Z task failed: attempt 1 of refuse failed: ValueError: sold out; "
        "what was done is undone, because of refuse; undo of pack begins",
        "6. 2026-01-01 00:00:00Z task done: undo of pack done; undo of charge begins",
        "7. 2026-01-01 00:00:00Z task done: undo of charge done; ended: failed",
    ]


# --- the clock --------------------------------------------------------------------------------------------------------


def test_time_passes_only_when_told_to(rehearsal: Rehearsal) -> None:
    nap = rehearsal.start(naps, Order("7"))

    rehearsal.advance("2d 23h 59m 59s 999ms")
    before = nap.state.is_ended
    rehearsal.advance("1ms")

    assert (before, nap.state.outcome) == (False, "completed")


def test_every_rehearsal_begins_at_the_same_moment(tmp_path: Path) -> None:
    moments = []
    for folder in ("first", "second"):
        with Rehearsal(tmp_path / folder) as rehearsal:
            moments.append(rehearsal.clock.now_ms())

    assert moments[0] == moments[1]


def test_what_becomes_due_happens_at_its_own_moment_and_in_its_order(rehearsal: Rehearsal) -> None:
    start_ms = rehearsal.clock.now_ms()
    short = Process("short", sleep("1h"), escalate, takes=Order)
    rehearsal.start(naps, Order("long"))
    rehearsal.start(short, Order("short"))

    rehearsal.advance("30d")

    assert [(call.given["order_id"], call.at_ms - start_ms) for call in rehearsal.calls] == [
        ("short", 3_600_000),
        ("long", 3 * 86_400_000),
    ]


def test_waiting_lets_the_clock_go_on_to_what_is_due(rehearsal: Rehearsal) -> None:
    nap = rehearsal.start(naps, Order("7"))

    assert nap.result(timeout="4d") == "announced 7"


def test_waiting_ends_when_nothing_that_is_due_can_help(rehearsal: Rehearsal) -> None:
    order = rehearsal.start(checkout, Order("7"))
    nap = rehearsal.start(naps, Order("7"))

    with pytest.raises(TimedOut, match="for message `delivered` with key 7"):
        order.result(timeout="1h")
    with pytest.raises(TimedOut, match="until 2026-01-04"):
        nap.result(timeout="1d")


def test_waiting_for_ever_ends_too_when_nothing_is_due(rehearsal: Rehearsal) -> None:
    forgotten = rehearsal.start(Process("forgotten", wait("never"), takes=Order), Order("7"))

    with pytest.raises(TimedOut, match="for message `never`"):
        forgotten.result(timeout=None)


# --- stand-ins --------------------------------------------------------------------------------------------------------


def test_a_stand_in_gets_the_parameters_that_it_names(rehearsal: Rehearsal) -> None:
    rehearsal.stand_in(charge, lambda order_id: Receipt(f"for {order_id}"))

    order = rehearsal.start(checkout, Order("7"))

    assert order.variables["receipt"] == {"id": "for 7"}


def test_a_stand_in_may_be_async_and_a_mock(rehearsal: Rehearsal) -> None:
    async def charge_later(order_id: str) -> Receipt:
        return Receipt("later")

    packed, announced = Mock(return_value=None), AsyncMock(return_value="by a mock")
    rehearsal.stand_in(charge, charge_later)
    rehearsal.stand_in(pack, packed)
    rehearsal.stand_in(announce, announced)

    order = rehearsal.start(checkout, Order("7"))
    nap = rehearsal.start(naps, Order("7"))

    assert order.variables["receipt"] == {"id": "later"}
    assert packed.call_args.kwargs["order_id"] == "7"
    assert nap.result(timeout="4d") == "by a mock"


async def _on_a_loop(folder: Path) -> str:
    with Rehearsal(folder) as rehearsal:
        return rehearsal.start(naps, Order("7")).result(timeout="4d")


def test_an_async_test_can_rehearse_async_tasks(tmp_path: Path) -> None:
    import asyncio

    assert asyncio.run(_on_a_loop(tmp_path)) == "announced 7"


def test_a_stand_in_that_raises_is_a_failed_attempt(rehearsal: Rehearsal) -> None:
    declined = Mock(side_effect=ValueError("declined"))
    rehearsal.stand_in(charge, declined)
    order = rehearsal.start(checkout, Order("7"))

    with pytest.raises(Failed, match="failed at charge: ValueError: declined; nothing had to be undone"):
        order.result()

    assert declined.call_count == 3


def test_an_undo_can_be_played_too(rehearsal: Rehearsal) -> None:
    undone: list[Receipt] = []
    rehearsal.stand_in(refund, lambda receipt: undone.append(receipt))

    order = rehearsal.start(doomed, Order("7"))

    assert order.undone == ["pack", "charge"]
    assert undone == [Receipt("receipt of 7")]


def test_a_task_can_play_itself_again(rehearsal: Rehearsal) -> None:
    rehearsal.hang(charge)
    order = rehearsal.start(checkout, Order("7"))

    rehearsal.stand_in(charge, charge)
    rehearsal.advance("11s")

    assert order.variables["receipt"] == {"id": "receipt of 7"}


def test_a_stand_in_for_parameters_that_the_task_lacks_is_refused_where_it_is_written(rehearsal: Rehearsal) -> None:
    with pytest.raises(Rejected, match="takes amuont, which charge does not have; it has order_id, amount, ctx"):
        rehearsal.stand_in(charge, lambda amuont: Receipt("1"))
    with pytest.raises(Rejected, match="a stand-in for charge is a function, not Receipt"):
        rehearsal.stand_in(charge, Receipt("1"))  # type: ignore[arg-type]


def test_a_task_that_hangs_is_ended_by_its_timeout_alone(rehearsal: Rehearsal) -> None:
    rehearsal.hang(charge)
    order = rehearsal.start(checkout, Order("7"))

    running = order.state.waiting[-1].what
    with pytest.raises(Failed, match="failed at charge: charge was not done after 10000 ms"):
        order.result(timeout="1m")

    assert running == "running (attempt 1 of 3)"
    assert [call.attempt for call in rehearsal.calls_of(charge)] == [1, 2, 3]


def test_a_task_that_hangs_without_a_timeout_hangs_until_a_crash(rehearsal: Rehearsal) -> None:
    rehearsal.hang(pack)
    order = rehearsal.start(checkout, Order("7"))
    rehearsal.advance("30d")
    hanging = order.state.is_waiting_at("pack")

    rehearsal.stand_in(pack, pack)
    rehearsal.crash()

    assert hanging
    assert order.state.is_waiting_for("delivered")


# --- calls ------------------------------------------------------------------------------------------------------------


def test_calls_tell_who_was_called_with_what_and_when(rehearsal: Rehearsal) -> None:
    order = rehearsal.start(doomed, Order("7"))

    first, *_ = rehearsal.calls_of(charge)
    assert [call.handler for call in rehearsal.calls] == ["charge", "pack", "refuse", "unpack", "refund"]
    assert (first.instance, first.attempt, first.given) == (order.id, 1, {"order_id": "7", "amount": 40})
    assert len({call.key for call in rehearsal.calls}) == 5


def test_calls_of_handlers_without_a_context_have_their_keys_too(rehearsal: Rehearsal) -> None:
    nap = rehearsal.start(naps, Order("7"))
    rehearsal.crash_after(announce)

    nap.result(timeout="4d")

    keys = [call.key for call in rehearsal.calls_of("announce")]
    assert len(keys) == 2
    assert keys[0] == keys[1] != ""


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_nothing_acknowledged_is_lost_in_a_crash(rehearsal: Rehearsal) -> None:
    order = rehearsal.start(checkout, Order("7"), id="order-7")
    order.send("something else", {"kept": True})
    before = order.state

    rehearsal.crash()

    assert order.state == before
    assert rehearsal.lives == 2


def test_a_crash_after_a_task_lets_it_run_again_under_its_key(rehearsal: Rehearsal) -> None:
    rehearsal.crash_after(charge)

    order = rehearsal.start(checkout, Order("7"))

    assert rehearsal.lives == 2
    assert order.state.is_waiting_for("delivered")
    assert [call.attempt for call in rehearsal.calls_of(charge)] == [1, 2]
    assert len({call.key for call in rehearsal.calls_of(charge)}) == 1
    assert bank.effects["charge"] == 1


def test_the_process_dies_at_the_very_moment_and_not_when_all_is_quiet(rehearsal: Rehearsal) -> None:
    rehearsal.crash_after(invoice)

    order = rehearsal.start(checkout, Order("7"))

    lost = [told for step in order.history for told in step.told if "lost" in told]
    assert lost == ["attempt 1 of pack was lost with its process", "attempt 1 of invoice was lost with its process"]


def test_crashes_add_up_and_the_third_in_a_row_is_an_incident(rehearsal: Rehearsal) -> None:
    for _ in range(3):
        rehearsal.crash_after(charge)

    order = rehearsal.start(checkout, Order("7"))

    assert rehearsal.lives == 4
    with pytest.raises(Stuck, match="3 attempts in a row ended with their process; look at what charge does to it"):
        order.result()


def test_a_crash_in_the_middle_of_undoing_goes_on_undoing(rehearsal: Rehearsal) -> None:
    rehearsal.crash_after(unpack)
    rehearsal.crash_after(refund)

    order = rehearsal.start(doomed, Order("7"))

    assert rehearsal.lives == 3
    assert order.undone == ["pack", "charge"]
    assert order.state.outcome == "failed"
    assert bank.effects == {"charge": 1, "pack": 1, "refuse": 1, "unpack": 1, "refund": 1}


@pytest.mark.parametrize("crashed", [charge, pack, refuse, unpack, refund], ids=lambda activity: activity.name)
def test_a_crash_after_any_handler_of_a_saga_leads_to_the_same_end(rehearsal: Rehearsal, crashed: Activity) -> None:
    quiet = rehearsal.start(doomed, Order("quiet"))
    without, bank.effects = bank.effects, Counter()

    rehearsal.crash_after(crashed)
    order = rehearsal.start(doomed, Order("7"))

    assert rehearsal.lives == 2
    assert (order.path, order.undone, order.state.outcome) == (quiet.path, quiet.undone, "failed")
    assert order.state.error == quiet.state.error
    assert bank.effects == without


@settings(max_examples=31)  # As many as there are.
@given(deaths=st.lists(st.sampled_from([charge, pack, invoice, ship, escalate]), max_size=2))
def test_wherever_it_crashes_each_effect_counts_once(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[Task[..., Any]]
) -> None:
    bank.open()  # Hypothesis plays many examples in one test.
    with Rehearsal(tmp_path_factory.mktemp("play")) as rehearsal:
        for dead in deaths:
            rehearsal.crash_after(dead)

        order = rehearsal.start(checkout, Order("7"))

        assert order.result(timeout="73h") == "shipped 7, receipt of 7"
        assert rehearsal.lives == 1 + len(deaths)
        assert bank.effects == {"charge": 1, "pack": 1, "invoice": 1}


def test_a_crash_after_a_transactional_task_leaves_nothing_of_its_transaction(rehearsal: Rehearsal) -> None:
    make = task(transactional=True, name="make")(_make_table)
    count = task(transactional=True, name="count")(_insert_and_count)
    process = Process("counting", make, count, gives=count)
    rehearsal.crash_after(count)

    order = rehearsal.start(process)

    assert rehearsal.lives == 2
    assert order.result() == 1


def _make_table(connection: object) -> None:
    connection.execute("CREATE TABLE stock (item)")  # type: ignore[attr-defined]


def _insert_and_count(connection: object) -> int:
    connection.execute("INSERT INTO stock VALUES (1)")  # type: ignore[attr-defined]
    return int(connection.execute("SELECT count(*) FROM stock")[0][0])  # type: ignore[attr-defined]


def test_what_stood_in_before_a_crash_stands_in_after_it(rehearsal: Rehearsal) -> None:
    rehearsal.stand_in(charge, lambda: Receipt("stand-in"))
    rehearsal.crash_after(charge)

    order = rehearsal.start(checkout, Order("7"))

    assert order.variables["receipt"] == {"id": "stand-in"}
    assert bank.effects["charge"] == 0


def test_a_hundred_crashes_leave_no_files_open(rehearsal: Rehearsal) -> None:
    order = rehearsal.start(checkout, Order("7"))
    rehearsal.crash()
    before = len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(100):
        rehearsal.crash()

    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert order.state.is_waiting_for("delivered")


# --- versions, neighbours, and the end --------------------------------------------------------------------------------


def test_a_new_version_of_a_process_leaves_running_instances_where_they_are(rehearsal: Rehearsal) -> None:
    old = rehearsal.start(checkout, Order("old"))
    shorter = Process("checkout", saga(charge), ship, takes=Order, gives=ship)

    new = rehearsal.start(shorter, Order("new"))
    old.send("delivered")

    assert (old.state.process_version, new.state.process_version) == (1, 2)
    assert (old.path, new.path) == (["charge", "invoice", "pack", "ship"], ["charge", "ship"])


def test_two_rehearsals_in_one_test_know_nothing_of_each_other(rehearsal: Rehearsal, tmp_path: Path) -> None:
    with Rehearsal(tmp_path / "second", checkout) as second:
        first_order = rehearsal.start(checkout, Order("7"), id="order")
        second_order = second.start(checkout, Order("8"), id="order")
        rehearsal.advance("1h")
        second.crash()

        assert first_order.variables["order_id"] == "7"
        assert second_order.variables["order_id"] == "8"
        assert rehearsal.clock.now_ms() > second.clock.now_ms()


def test_a_service_goes_on_with_what_a_rehearsal_has_left(tmp_path: Path) -> None:
    with Rehearsal(tmp_path, start_ms=utc_ms()) as rehearsal:  # Otherwise its timeout is long past for the service.
        rehearsal.start(checkout, Order("7"), id="order-7")

    with Runtime(tmp_path / "rehearsal.db", checkout) as runtime:
        runtime.send("order-7", "delivered")

        assert runtime.result("order-7") == "shipped 7, receipt of 7"


def test_a_closed_rehearsal_says_so(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path)
    rehearsal.close()

    assert rehearsal.close() is True
    with pytest.raises(Closed):
        rehearsal.start("checkout")


# --- subscribers on the stage -----------------------------------------------------------------------------------------


def test_subscribers_have_heard_everything_after_each_call(rehearsal: Rehearsal) -> None:
    heard: list[Change] = []
    rehearsal.subscribe("audit", heard.append)

    order = rehearsal.start(checkout, Order("7"))
    waiting = len(heard)
    order.send("delivered")

    assert waiting > 0
    assert [change.n for change in heard] == [step.n for step in order.history]


def test_a_subscriber_is_back_after_a_crash_and_begins_where_it_has_come_to(rehearsal: Rehearsal) -> None:
    heard: list[int] = []
    rehearsal.subscribe("audit", lambda change: heard.append(change.n))
    order = rehearsal.start(checkout, Order("7"))

    rehearsal.crash()
    order.send("delivered")

    assert heard == [step.n for step in order.history]


def test_a_subscriber_that_fails_is_tried_again_when_time_has_come_to_it(rehearsal: Rehearsal) -> None:
    heard: list[int] = []
    failing = True

    def receive(change: Change) -> None:
        if failing:
            raise RuntimeError("not now")
        heard.append(change.n)

    rehearsal.subscribe("audit", receive, backoff="1m")
    order = rehearsal.start(checkout, Order("7"))

    failing = False
    before = list(heard)
    rehearsal.advance("1m")

    assert before == []
    assert heard == [step.n for step in order.history]


def test_a_subscriber_may_use_the_runtime(rehearsal: Rehearsal) -> None:
    def deliver_at_once(change: Change) -> None:
        if rehearsal.state(change.instance).is_waiting_for("delivered"):
            rehearsal.send(change.instance, "delivered")

    rehearsal.subscribe("courier", deliver_at_once)

    order = rehearsal.start(checkout, Order("7"))

    assert order.state.outcome == "completed"
