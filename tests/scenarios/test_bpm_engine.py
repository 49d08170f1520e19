"""What a small BPM engine must get right, scenario by scenario; the numbers are those of the acceptance list.

Where others let workers claim tokens, here the instance gives an attempt out: the race is between the results, and
between the commits.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy import (
    AlreadyEnded,
    Conflict,
    Context,
    Failed,
    Handle,
    InvalidDefinition,
    Process,
    Rehearsal,
    Retry,
    Runtime,
    Stuck,
    Subscription,
    choose,
    parallel,
    repeat,
    saga,
    sleep,
    task,
    wait,
)
from understudy.actors import supervisor
from understudy.actors.promise import Promise
from understudy.model.apply import fold
from understudy.model.commands import CompleteTask, FireTimer
from understudy.model.events import Entry, TaskCompleted, TokenEnded
from understudy.model.instance import facts
from understudy.model.retry import Backoff
from understudy.requests import instance_request, message_request
from understudy.store.loading import load
from understudy.store.recovery import due_waits
from understudy.store.writer import Refused

CLAIMERS = 16


@frozen
class Order:
    order_id: str
    amount: int = 40


@task
def a() -> None: ...


@task
def b() -> None: ...


@task
def c() -> None: ...


@task
def d() -> None: ...


@task(retry=Retry(3, first="1s", jitter=0))
def flaky(ctx: Context) -> int:
    if ctx.attempt < 3:
        raise ConnectionError("not yet")
    return ctx.attempt


def complete(runtime: Runtime, order: Handle[Any], token: int, *, result: str = "null") -> Promise[Any]:
    """A worker's result for the first attempt, from outside of the pool."""
    system = runtime.node.system
    assert system is not None
    command = CompleteTask(at_ms=system.ports.clock.now_ms(), token=token, attempt=1, result=result)
    return system.order(order.id, command)


def token_at(order: Handle[Any], node: str) -> int:
    return next(waiting.token for waiting in order.state.waiting if waiting.node == node)


def events_of(order: Handle[Any]) -> list[Any]:
    return [event for step in order.history for entry in step.entries for event in entry.events]


# --- 1 ----------------------------------------------------------------------------------------------------------------


def test_01_a_token_executing_at_a_kill_gets_the_next_attempt_and_the_instance_completes(rehearsal: Rehearsal) -> None:
    rehearsal.crash_after(b)

    order = rehearsal.start(Process("p", a, b, c))

    assert order.state.outcome == "completed"
    assert [(call.handler, call.attempt) for call in rehearsal.calls] == [("a", 1), ("b", 1), ("b", 2), ("c", 1)]


# --- 2 and 3 ----------------------------------------------------------------------------------------------------------


def test_02_of_many_concurrent_results_of_one_attempt_exactly_one_wins(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @task
    def slow() -> None:
        begun.set()
        may_end.wait(10)

    with Runtime(tmp_path / "p.db", Process("p", slow, wait("go"))) as runtime:
        order: Handle[None] = runtime.start("p")
        begun.wait(10)
        token = token_at(order, "slow")

        gate = threading.Barrier(CLAIMERS)
        promises: list[Promise[Any]] = []

        def claim() -> None:
            gate.wait(10)
            promises.append(complete(runtime, order, token))

        threads = [threading.Thread(target=claim) for _ in range(CLAIMERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [promise for promise in promises if _error_of(promise) is not None]
        may_end.set()

        assert len(refused) == CLAIMERS - 1
        assert all(isinstance(promise.error, Conflict) for promise in refused)
        assert sum(isinstance(event, TaskCompleted) for event in events_of(order)) == 1
        assert order.state.is_waiting_for("go")


def _error_of(promise: Promise[Any]) -> BaseException | None:
    try:
        promise.get(timeout=10)
    except Conflict as error:
        return error
    return None


@pytest.mark.parametrize("who_sees_it", ["the writer", "the statement"])
def test_02_a_commit_decided_on_a_stale_version_is_refused(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, who_sees_it: str
) -> None:
    order = rehearsal.start(Process("p", a, wait("go"), b))
    system = rehearsal.node.system
    assert system is not None
    writer, commits = system.writer, []
    write = writer.write

    def spy(changes: Any, *, now_ms: int) -> Any:
        commits.extend(changes)
        return write(changes, now_ms=now_ms)

    monkeypatch.setattr(writer, "write", spy)
    order.send("go")
    before = order.history
    if who_sees_it == "the statement":
        writer.forget(commits[0].stored.no)

    (result,) = write([commits[0]], now_ms=rehearsal.clock.now_ms()).results

    assert isinstance(result, Refused)
    assert (result.reason, type(result.error)) == ("stale", Conflict)
    assert order.history == before


def test_03_a_token_that_has_ended_cannot_be_moved_again(rehearsal: Rehearsal) -> None:
    rehearsal.hang(a)
    order = rehearsal.start(Process("p", parallel(a, sleep("1h")), wait("go")))
    token, timer = token_at(order, "a"), order.state.waiting[1]
    complete(rehearsal, order, token).get()
    rehearsal.advance("1h")
    before = order.history

    with pytest.raises(Conflict, match=f"attempt 1 of token {token} of {order.id} is no longer awaited"):
        complete(rehearsal, order, token).get()
    assert rehearsal.node.system is not None
    rehearsal.node.system.order(order.id, FireTimer(at_ms=rehearsal.clock.now_ms(), wait=timer.token + 1)).get()

    assert order.history == before


def test_03_an_instance_that_has_ended_takes_no_commands_and_no_results(rehearsal: Rehearsal) -> None:
    rehearsal.hang(a)
    order = rehearsal.start(Process("p", a))
    token = token_at(order, "a")
    order.cancel()
    before = order.history

    with pytest.raises(Conflict):
        complete(rehearsal, order, token).get()
    for command in (lambda: order.send("x"), order.pause, order.resume, order.retry):
        with pytest.raises(AlreadyEnded):
            command()

    assert order.history == before
    assert order.state.outcome == "cancelled"


# --- 4, 5 and 6 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", list(itertools.permutations("abc")), ids="".join)
def test_04_a_join_of_three_fires_once_at_the_third_arrival_in_whatever_order(
    rehearsal: Rehearsal, arrivals: tuple[str, ...]
) -> None:
    for branch in (a, b, c):
        rehearsal.hang(branch)
    order = rehearsal.start(Process("p", parallel(a, b, c), d))
    tokens = {name: token_at(order, name) for name in arrivals}

    joined = []
    for name in arrivals:
        joined.append(len(rehearsal.calls_of(d)))
        complete(rehearsal, order, tokens[name]).get()
        rehearsal.stage.run_until_idle()
    with pytest.raises(Conflict):  # A fourth arrival.
        complete(rehearsal, order, tokens[arrivals[0]]).get()

    assert joined == [0, 0, 0]
    assert len(rehearsal.calls_of(d)) == 1
    assert order.state.outcome == "completed"
    assert [event.how for event in events_of(order) if isinstance(event, TokenEnded)] == ["joined", "joined", "done"]


def test_05_two_joins_in_one_instance_stay_independent(rehearsal: Rehearsal) -> None:
    for branch in (a, b, c, d):
        rehearsal.hang(branch)
    process = Process("p", parallel([parallel(a, b), wait("left")], [parallel(c, d), wait("right")]))
    order = rehearsal.start(process)

    for name in ("a", "c", "b"):
        complete(rehearsal, order, token_at(order, name)).get()

    assert order.state.is_waiting_for("left")
    assert not order.state.is_waiting_for("right")


def test_05_the_same_join_works_again_in_the_next_round_of_a_loop(rehearsal: Rehearsal) -> None:
    left = [0]

    @task(into="rounds")
    def count() -> int:
        left[0] += 1
        return left[0]

    order = rehearsal.start(Process("p", repeat(parallel(a, b), count, until="rounds == 3")))

    assert order.state.outcome == "completed"
    assert Counter(order.path) == {"a": 3, "b": 3, "count": 3}
    assert len({call.key for call in rehearsal.calls}) == 9


def test_06_a_failing_branch_keeps_the_join_waiting_and_the_explanation_names_it(rehearsal: Rehearsal) -> None:
    rehearsal.stand_in(b, _sold_out)

    order = rehearsal.start(Process("p", parallel(a, b, c), d))
    rehearsal.advance("30d")

    text = str(order.explain())
    assert rehearsal.calls_of(d) == []
    assert "at join-1 for b\n    moved by the end of b" in text
    assert "at b by incident" in text
    assert "ValueError: sold out" in text
    with pytest.raises(Stuck, match="stopped at b by incident"):
        order.result()


def _sold_out() -> None:
    raise ValueError("sold out")


# --- 7 and 8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passed", "fires"), [("59m 59s 999ms", False), ("1h", True), ("30d", True)], ids=["future", "now", "overdue"]
)
def test_07_a_timer_fires_when_it_is_due_and_not_before(rehearsal: Rehearsal, passed: str, fires: bool) -> None:
    order = rehearsal.start(Process("p", sleep("1h"), a))

    rehearsal.advance(passed)

    assert order.state.is_ended is fires
    assert len(rehearsal.calls_of(a)) == fires


def test_07_a_timer_that_has_fired_is_never_listed_again(rehearsal: Rehearsal) -> None:
    rehearsal.start(Process("p", sleep("1h"), wait("go")))
    listed = _due(rehearsal, within="2h")

    rehearsal.advance("1h")

    assert len(listed) == 1
    assert _due(rehearsal, within="30d") == []


def test_07_timers_are_read_in_pages_and_none_is_missed(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MOST_TIMERS", 3)
    process = Process("p", sleep("1h"), a)
    orders = [rehearsal.start(process) for _ in range(10)]
    rehearsal.crash()  # The next life knows them from the store alone.

    rehearsal.advance("1h 1s")

    assert all(order.state.outcome == "completed" for order in orders)
    assert len(rehearsal.calls_of(a)) == 10
    assert len(due_waits(_connection(rehearsal), 1 << 60, 3)) == 0


def _due(rehearsal: Rehearsal, *, within: str) -> list[tuple[int, str, int]]:
    from understudy.model.durations import duration_ms

    return due_waits(_connection(rehearsal), rehearsal.clock.now_ms() + duration_ms(within), 100)


def _connection(rehearsal: Rehearsal) -> Any:
    assert rehearsal.node.system is not None
    return rehearsal.node.system.writer.connection


def test_08_a_timer_that_became_due_during_downtime_fires_once_at_restart(tmp_path: Path) -> None:
    process = Process("p", sleep("1h"), a, wait("go"))
    with Rehearsal(tmp_path, process) as before:
        order_id = before.start(process).id
        down_ms = before.clock.now_ms()

    with Rehearsal(tmp_path, process, start_ms=down_ms + 86_400_000) as after:
        first = len(after.calls_of(a))
        after.crash()
        after.advance("30d")

        assert (first, len(after.calls_of(a))) == (1, 1)
        assert after.state(order_id).is_waiting_for("go")


# --- 9 ----------------------------------------------------------------------------------------------------------------


def test_09_a_handler_that_fails_twice_succeeds_on_the_same_token_after_its_backoff(rehearsal: Rehearsal) -> None:
    order = rehearsal.start(Process("p", flaky, gives=flaky))
    token = token_at(order, "flaky")
    rehearsal.advance("1s")
    second_token = token_at(order, "flaky")

    assert order.result() == 3
    first_ms, second_ms, third_ms = (call.at_ms for call in rehearsal.calls)
    assert (second_ms - first_ms, third_ms - second_ms) == (1_000, 2_000)
    assert token == second_token
    assert len({call.key for call in rehearsal.calls}) == 1


@given(tries=st.integers(1, 20), key=st.text(max_size=20))
def test_09_the_backoff_grows_up_to_its_limit_and_is_the_same_in_every_life(tries: int, key: str) -> None:
    backoff = Backoff(attempts=20, first_ms=1_000, factor=2, maximum_ms=60_000, jitter=0.1)
    plain_ms = min(1_000 * 2 ** (tries - 1), 60_000)

    assert 0.9 * plain_ms - 1 <= backoff.delay_ms(tries, key) <= 1.1 * plain_ms + 1
    assert backoff.delay_ms(tries, key) == backoff.delay_ms(tries, key)


# --- 10, 11 and 12 ----------------------------------------------------------------------------------------------------


@task(into="receipt")
def charge(order_id: str) -> str:
    return f"receipt {order_id}"


@charge.undo
def refund(receipt: str) -> None: ...


@task
def reserve(order_id: str) -> None: ...


@reserve.undo
def unreserve(order_id: str) -> None: ...


@task
def label(order_id: str) -> None: ...


@label.undo
def unlabel(order_id: str) -> None: ...


@task
def hand_over(order_id: str) -> None:
    raise ValueError("nobody at home")


def test_10_a_saga_is_undone_in_reverse_order_of_success(rehearsal: Rehearsal) -> None:
    # Steps without an undo leave gaps between those that have one.
    order = rehearsal.start(Process("p", saga(charge, a, reserve, b, c, label, hand_over), takes=Order), Order("7"))

    assert order.path == ["charge", "a", "reserve", "b", "c", "label"]
    assert order.undone == ["label", "reserve", "charge"]
    with pytest.raises(
        Failed, match=r"failed at hand_over: ValueError: nobody at home; undone: label, reserve, charge"
    ):
        order.result()


def test_10_the_order_is_that_of_success_and_not_that_of_the_definition(rehearsal: Rehearsal) -> None:
    rehearsal.hang(charge)
    process = Process("p", saga(parallel(charge, reserve), hand_over), takes=Order)
    order = rehearsal.start(process, Order("7"))

    complete(rehearsal, order, token_at(order, "charge"), result='"receipt"').get()
    rehearsal.stage.run_until_idle()

    assert order.undone == ["charge", "reserve"]


def test_11_the_first_undo_that_fails_stops_the_chain(rehearsal: Rehearsal) -> None:
    rehearsal.stand_in(unreserve, _jammed)

    order = rehearsal.start(Process("p", saga(charge, reserve, label, hand_over), takes=Order), Order("7"))
    rehearsal.advance("30d")

    assert order.undone == ["label"]
    assert rehearsal.calls_of(refund) == []
    (incident,) = order.state.incidents
    assert (incident.node, incident.name) == ("reserve", "undo_failed")
    assert "undoing reserve: RuntimeError: the door is jammed" in incident.detail


def test_11_undos_that_were_done_are_not_done_again_when_the_chain_goes_on(rehearsal: Rehearsal) -> None:
    rehearsal.stand_in(unreserve, _jammed)
    order = rehearsal.start(Process("p", saga(charge, reserve, label, hand_over), takes=Order), Order("7"))

    rehearsal.crash()
    rehearsal.stand_in(unreserve, unreserve)
    order.retry()

    assert order.undone == ["label", "reserve", "charge"]
    assert len(rehearsal.calls_of(unlabel)) == 1
    assert order.state.outcome == "failed"


def _jammed() -> None:
    raise RuntimeError("the door is jammed")


def test_12_only_the_branches_that_completed_are_undone(rehearsal: Rehearsal) -> None:
    process = Process("p", saga(parallel(charge, [sleep("1h"), reserve], hand_over)), takes=Order)

    order = rehearsal.start(process, Order("7"))

    assert order.state.outcome == "failed"
    assert order.undone == ["charge"]
    assert rehearsal.calls_of(reserve) == []


def test_12_a_branch_that_is_under_way_is_awaited_and_then_undone(rehearsal: Rehearsal) -> None:
    rehearsal.hang(reserve)
    process = Process("p", saga(parallel(reserve, hand_over)), takes=Order)
    order = rehearsal.start(process, Order("7"))
    awaited = order.state.at

    complete(rehearsal, order, token_at(order, "reserve")).get()
    rehearsal.stage.run_until_idle()

    assert "reserve" in awaited
    assert order.undone == ["reserve"]
    assert order.state.outcome == "failed"


def test_12_what_one_instance_undoes_is_nothing_to_another(rehearsal: Rehearsal) -> None:
    process = Process("p", saga(charge, reserve, wait("go"), hand_over), takes=Order)
    first, second = rehearsal.start(process, Order("1")), rehearsal.start(process, Order("2"))

    first.send("go")

    assert first.undone == ["reserve", "charge"]
    assert second.undone == []
    assert second.state.undoable == ("reserve", "charge")
    assert [call.given for call in rehearsal.calls_of(refund)] == [{"receipt": "receipt 1"}]


# --- 13 ---------------------------------------------------------------------------------------------------------------


def test_13_what_was_committed_before_a_crash_reaches_subscribers_after_it_in_order(rehearsal: Rehearsal) -> None:
    heard: list[tuple[str, int]] = []
    rehearsal.subscribe("audit", lambda _change: None).close()
    process = Process("p", a, b, wait("go"))
    orders = [rehearsal.start(process) for _ in range(3)]
    rehearsal.crash()

    rehearsal.subscribe("audit", lambda change: heard.append((change.instance, change.n)))

    for order in orders:
        assert [n for instance, n in heard if instance == order.id] == [step.n for step in order.history]
    assert len(heard) == sum(len(order.history) for order in orders)


def test_13_a_delivery_that_a_crash_has_cut_off_comes_again(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    order = rehearsal.start(Process("p", a, b, wait("go")))

    def dies(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Subscription, "_move", dies)  # Delivered, and not yet noted.
        with pytest.raises(KeyboardInterrupt):
            rehearsal.subscribe("audit", lambda change: heard.append(change.n), from_start=True)
    before = list(heard)
    rehearsal.crash()

    assert before == [step.n for step in order.history]
    assert heard == 2 * before


@pytest.mark.parametrize("steps", range(12))
def test_13_a_published_message_is_consumed_once_wherever_the_crash_comes(rehearsal: Rehearsal, steps: int) -> None:
    order = rehearsal.start(Process("p", wait("paid", key="order_id"), a, takes=Order), Order("7"))
    request = message_request("paid", None, about="7", ttl=None, request_key="payment-1", by="", limit_bytes=1_000_000)

    rehearsal.node.submit("publish", request)
    for _ in range(steps):
        rehearsal.stage.step()
    rehearsal.crash()
    rehearsal.publish("paid", key="7", request_key="payment-1")

    assert order.state.outcome == "completed"
    assert len({call.key for call in rehearsal.calls}) == 1
    assert rehearsal.node.reads.unclaimed_messages() == []


# --- 17 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("amount", "way"), [(2_000, "a"), (700, "b"), (10, "c")])
def test_17_a_choice_takes_the_first_true_way_and_else_the_default(rehearsal: Rehearsal, amount: int, way: str) -> None:
    process = Process("p", choose(("amount > 1000", a), ("amount > 500", b), otherwise=c), takes=Order)

    order = rehearsal.start(process, Order("7", amount))

    assert order.path == [way]


def test_17_a_choice_without_a_true_way_or_a_default_asks_an_operator(rehearsal: Rehearsal) -> None:
    order = rehearsal.start(Process("p", choose(("amount > 1000", a), ("amount < 0", b)), takes=Order), Order("7"))

    (incident,) = order.state.incidents
    assert (incident.name, incident.ways) == ("no_branch", ("a", "b"))
    assert "no condition is true ('amount > 1000', 'amount < 0') and there is no default" in incident.detail
    order.skip(to="b")
    assert order.path == ["b"]


# --- 19 ---------------------------------------------------------------------------------------------------------------


@task
def needs_receipt(receipt: str) -> None: ...


@task(into="amount")
def other_amount() -> int:
    return 1


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("missing_variable", lambda: Process("p", needs_receipt)),
        ("bad_expression", lambda: Process("p", choose(("amount >", a)), takes=Order)),
        ("undo_without_saga", lambda: Process("p", charge, takes=Order)),
        ("parallel_writes", lambda: Process("p", parallel(other_amount, other_amount), takes=Order)),
        ("bad_step", lambda: Process("p", "amount > 1000", takes=Order)),  # type: ignore[arg-type]
        ("bad_name", lambda: Process("a\0b", a)),
        ("bad_duration", lambda: Process("p", sleep("-1h"))),
        ("bad_retry", lambda: Retry(0)),
    ],
)
def test_19_each_kind_of_invalid_definition_has_its_own_code(code: str, make: Any) -> None:
    with pytest.raises(InvalidDefinition) as refused:
        make()

    assert [problem.code for problem in refused.value.problems] == [code]
    assert refused.value.problems[0].place.startswith("tests/scenarios/test_bpm_engine.py:")


def test_19_all_that_is_wrong_with_a_definition_is_reported_together(rehearsal: Rehearsal) -> None:
    with pytest.raises(InvalidDefinition) as refused:
        rehearsal.start(
            Process("p", charge, parallel(other_amount, other_amount), choose(("amount >", a)), takes=Order)
        )

    codes = {problem.code for problem in refused.value.problems}
    assert codes >= {"undo_without_saga", "parallel_writes", "bad_expression"}
    assert rehearsal.list() == []
    assert rehearsal.node.reads.definitions() == []


# --- 20 ---------------------------------------------------------------------------------------------------------------


def test_20_replaying_the_history_gives_the_live_state_and_a_seek_the_state_at_the_cursor(
    rehearsal: Rehearsal,
) -> None:
    rehearsal.crash_after(reserve)
    process = Process("p", saga(charge, parallel(reserve, [sleep("1h"), label]), wait("go"), hand_over), takes=Order)
    order = rehearsal.start(process, Order("7"))
    order.pause()
    order.resume()
    order.send("early")

    seen = {order.state.version: _live(rehearsal, order)}
    for move in (lambda: rehearsal.advance("1h"), lambda: order.send("go"), rehearsal.crash):
        move()
        seen[order.state.version] = _live(rehearsal, order)

    assert order.state.outcome == "failed"
    assert len(seen) >= 3
    for version, live in seen.items():
        assert facts(fold(_entries(order)[:version])) == live


def _entries(order: Handle[Any]) -> Any:
    """One item for each commit; `fold` takes them flattened."""

    class Commits(list[tuple[Entry, ...]]):
        def __getitem__(self, part: Any) -> Any:
            return [entry for commit in list.__getitem__(self, part) for entry in commit]

    return Commits(step.entries for step in order.history)


def _live(rehearsal: Rehearsal, order: Handle[Any]) -> dict[str, object]:
    system = rehearsal.node.system
    assert system is not None
    found = load(system.writer.connection, [order.id], system.definitions.graph)[order.id]
    return facts(found.instance)  # type: ignore[union-attr]


# --- 21 ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(lives=st.lists(st.integers(0, 25), max_size=6))
def test_21_however_many_steps_each_life_has_the_final_state_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, lives: list[int]
) -> None:
    process = Process("p", saga(charge, parallel(reserve, label)), a, wait("go"), b, takes=Order)
    with Rehearsal(tmp_path_factory.mktemp("play"), process) as rehearsal:
        order = rehearsal.start(process, Order("7"))
        message = message_request("go", None, about=None, ttl=None, request_key="go-1", by="", limit_bytes=1_000_000)
        rehearsal.node.submit("send", {**instance_request(order.id), **message})
        for steps in lives:
            for _ in range(steps):
                rehearsal.stage.step()
            rehearsal._restart()
        rehearsal._play()
        if not order.state.is_ended:
            order.send("go", request_key="go-1")
        while order.state.incidents:  # Three lives in a row may have lost the same attempt.
            order.retry(order.state.incidents[0].incident)

        assert order.state.outcome == "completed"
        assert Counter(order.path) == {"charge": 1, "reserve": 1, "label": 1, "a": 1, "b": 1}
        assert len({call.key for call in rehearsal.calls}) == 5


SERVICE = """
import sys
from understudy import Context, Process, Runtime, task

def told(step, ctx):
    sys.stdout.write(f"{step} {ctx.key}\\n")
    sys.stdout.flush()

@task(into="x")
def one(n: int, ctx: Context) -> int:
    told("one", ctx)
    return n + 1

@task(into="y")
def two(x: int, ctx: Context) -> int:
    told("two", ctx)
    return x * 2

@task(into="z")
def three(y: int, ctx: Context) -> int:
    told("three", ctx)
    return y + 1

chain = Process("chain", one, two, three, takes={"n": int}, gives=three)

with Runtime(sys.argv[1], chain) as runtime:
    handles = [runtime.start(chain, {"n": n}, id=f"chain-{n}") for n in range(20)]
    for handle in handles:
        state = handle.wait_until(lambda state: state.is_ended or state.incidents)
        if not state.is_ended:  # Killed three times in the same attempt: an operator says that it may go on.
            handle.retry()
    print("results", [handle.result() for handle in handles], flush=True)
"""


@pytest.mark.slow
def test_21_a_service_that_is_killed_again_and_again_comes_to_the_same_results(tmp_path: Path) -> None:
    script, database = tmp_path / "service.py", tmp_path / "chain.db"
    script.write_text(SERVICE)
    chance = random.Random(21)
    calls: Counter[str] = Counter()
    results = ""

    for life in range(6):
        patience = chance.randint(1, 15) if life < 5 else None
        with subprocess.Popen(
            [sys.executable, script, database], stdout=subprocess.PIPE, env=_environment()
        ) as service:
            assert service.stdout is not None
            for number, line in enumerate(service.stdout, 1):
                calls[line.decode().strip()] += 1
                if number == patience:
                    service.send_signal(signal.SIGKILL)
                    break
                results = line.decode()

    assert results.strip() == f"results {[(n + 1) * 2 + 1 for n in range(20)]}"
    del calls[results.strip()]
    assert len(calls) == 60  # Each step of each instance under one key, however often it was called.


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
