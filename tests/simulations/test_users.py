"""What a user of `simulate` may rely on: bugs are found and shortened, always the same, and mistakes are told."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from understudy import Context, Process, Retry, choose, parallel, repeat, saga, sleep, task, throw, wait
from understudy.model.errors import Rejected, UnderstudyError
from understudy.simulations import Failure, History, Ledger, Report, Simulation, SimulationFailed, simulate


class Bank:
    """The outside world: it knows keys, if anybody gives it one."""

    def __init__(self) -> None:
        self.charged: list[str] = []
        self.refunded: list[str] = []
        self._known: dict[str, str] = {}

    def charge(self, order_id: str, *, key: str = "") -> str:
        if key not in self._known or not key:
            self.charged.append(order_id)
            self._known[key] = f"receipt-{order_id}"
        return self._known[key]

    def refund(self, order_id: str) -> None:
        if order_id not in self.refunded:
            self.refunded.append(order_id)


bank = Bank()


@frozen
class Order:
    order_id: str
    amount: int = 40


@task(into="receipt")
def charge(order_id: str) -> str:
    return bank.charge(order_id)


@task(into="receipt")
def charge_once(order_id: str, ctx: Context) -> str:
    return bank.charge(order_id, key=ctx.key)


@task
def ship(order_id: str) -> None:
    pass


@task(isolation="process")
def isolated(order_id: str) -> None:
    pass


naive = Process("naive", charge, ship, takes=Order)
careful = Process("careful", charge_once, ship, takes=Order)
ORDERS = [Order("7"), Order("8")]


def never_charged_twice(bank: Bank) -> None:
    for order_id in bank.charged:
        assert bank.charged.count(order_id) == 1, f"order {order_id} was charged {bank.charged.count(order_id)} times"


def charges(process: Process[Any, Any], **arguments: Any) -> Report:
    wanted: dict[str, Any] = {
        "start": ORDERS,
        "fakes": {"bank": Bank},
        "invariants": [never_charged_twice],
        "faults": ["crash after effect"],
    }
    return simulate(process, **{**wanted, "seeds": 60, **arguments})


@pytest.fixture(scope="module")
def found() -> Report:
    """The naive process, played until its bug is found."""
    return charges(naive)


# --- finding ----------------------------------------------------------------------------------------------------------


def test_a_handler_that_charges_without_a_key_charges_twice(found: Report) -> None:
    assert not found.ok
    assert found.failures[0].invariant == "never_charged_twice"
    assert "was charged 2 times" in found.failures[0].violations[0].message


def test_a_handler_that_hands_its_key_on_never_does() -> None:
    report = charges(careful, seeds=25)

    assert report.ok, report
    assert (report.worlds, report.failures) == (25, [])
    assert report.lives > 25
    assert report.faults["crash after effect"] > 10


def test_a_failure_is_shortened_to_one_crash_of_one_instance(found: Report) -> None:
    (failure,) = found.failures

    assert len(failure.case.only) == 1
    assert failure.case.is_calm
    assert failure.faults == {"crash after effect": 1}
    assert failure.steps < 100


def test_the_replay_line_plays_the_very_same_world(found: Report) -> None:
    (failure,) = found.failures
    arguments: dict[str, Any] = eval(failure.replay.replace("simulate(..., ", "dict("))

    (again,) = charges(naive, shrink=False, **arguments).failures

    assert again.trace == failure.trace
    assert (again.violations, again.drawn) == (failure.violations, failure.drawn)


def test_without_shrinking_the_world_is_shown_as_it_was_found(found: Report) -> None:
    (failure,) = charges(naive, shrink=False).failures

    assert failure.seed == failure.found == found.failures[0].found
    assert len(failure.trace) > len(found.failures[0].trace)


def test_a_report_says_what_was_played_drawn_and_found(found: Report) -> None:
    text = str(found)

    assert f"naive: FAILED with seed {found.failing_seeds[0]}, {found.worlds} of 60 worlds played" in text
    assert "never_charged_twice: order" in text
    assert "crash after effect (" in text
    assert found.failures[0].replay in text
    assert found.as_dict()["failures"][0]["invariant"] == "never_charged_twice"


def test_raise_if_failed_shows_the_transcript(found: Report) -> None:
    with pytest.raises(SimulationFailed, match=r"(?s)CRASH: .*attempt 2 under key naive-.*VIOLATION: never_charged"):
        found.raise_if_failed()


def test_raise_if_failed_is_silent_when_everything_held() -> None:
    charges(careful, seeds=2).raise_if_failed()


def test_keeping_on_counts_all_seeds_that_fail_and_tells_each_invariant_once() -> None:
    report = charges(naive, keep_on=True, seeds=30, shrink=False)

    assert report.worlds == 30
    assert len(report.failing_seeds) > 1
    assert [failure.invariant for failure in report.failures] == ["never_charged_twice"]


def test_shortening_keeps_to_the_invariant_that_was_found() -> None:
    def shipped(history: History) -> Iterator[str]:
        for past in history.values():
            if past.variables["order_id"] == "8" and past.is_ended:
                yield "it was to be kept"

    (failure,) = charges(naive, invariants=[shipped, never_charged_twice], seeds=1, shrink=True).failures

    assert failure.invariant == "shipped"
    assert failure.case.only == ("naive-2",)
    assert failure.case.faults == ()
    assert "struck:  no fault" in "\n".join(failure.lines)


def test_our_own_invariants_are_asked_too() -> None:
    report = simulate(careful, start=Order("7"), seeds=3, limits=None)

    assert report.ok
    assert report.commits > 0


# --- the same always --------------------------------------------------------------------------------------------------


SCRIPT = """
import sys
sys.path[:] = {path!r}
import importlib.util
spec = importlib.util.spec_from_file_location("told", {file!r})
module = importlib.util.module_from_spec(spec)
sys.modules["told"] = module
spec.loader.exec_module(module)
report = module.charges(module.naive, faults=None, seeds=6, keep_on=True)
print([(failure.found, failure.case, failure.trace) for failure in report.failures], report.steps)
"""


def test_another_process_with_other_hashes_finds_the_same() -> None:
    script = SCRIPT.format(path=sys.path, file=__file__)
    told = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]

    assert told[0] == told[1]


def test_several_jobs_give_the_same_report(found: Report) -> None:
    other = charges(naive, jobs=2, shrink=False)

    assert (other.failing_seeds, other.worlds, other.steps) == (found.failing_seeds, found.worlds, found.steps)
    assert other.failures[0].found == found.failures[0].found


def test_an_error_in_a_job_comes_out_with_its_seed() -> None:
    def broken(ledger: Ledger) -> None:
        raise KeyError("nobody")

    with pytest.raises(KeyError, match="nobody") as caught:
        charges(careful, invariants=[broken], seeds=4, jobs=2)

    assert "in the world of seed 0, 2000 steps" in caught.value.__notes__


def test_a_handler_with_real_random_numbers_is_told_so() -> None:
    @task(into="number")
    def dice() -> int:
        return random.SystemRandom().randrange(10**9)

    report = simulate(Process("game", dice, ship, takes=Order), start=Order("7"), seeds=3)

    (failure,) = report.failures
    assert failure.invariant == "I16"
    assert "your handlers are not deterministic" in failure.violations[0].message
    assert "commit 2 of game-1" in failure.violations[0].message


def test_a_global_that_outlives_its_world_is_told_so() -> None:
    counter = itertools.count()

    @task(into="number")
    def count() -> int:
        return next(counter)

    def small(history: History) -> bool:
        return all(past.variables.get("number", 0) < 1 for past in history.values())

    report = simulate(Process("counting", count), seeds=3, faults=(), invariants=small)

    assert report.failures[0].violations[0].id == "I16"
    assert "make them fakes" in report.failures[0].violations[0].message


# --- what surrounds the processes -------------------------------------------------------------------------------------


def test_fakes_are_new_in_every_world_and_the_real_thing_is_back_afterwards() -> None:
    made = []

    def make() -> Bank:
        made.append(Bank())
        return made[-1]

    real, before = bank, list(bank.charged)
    charges(careful, fakes={"bank": make}, seeds=3, faults=())

    assert [len(each.charged) for each in made] == [2] * len(made)
    assert len(made) >= 3
    assert bank is real
    assert bank.charged == before


def test_a_stand_in_plays_a_task_and_takes_what_it_names() -> None:
    calls = []

    def fake(ctx: Context, bank: Bank, **others: Any) -> str:
        calls.append((ctx.instance, others))
        return bank.charge(str(others["order_id"]), key=ctx.key)

    charges(careful, stand_ins={charge_once: fake}, seeds=1, faults=(), start=Order("7"))

    assert calls[0] == ("careful-1", {"order_id": "7"})


def test_a_stand_in_may_be_async() -> None:
    async def fake(order_id: str) -> str:
        await asyncio.sleep(0)
        return order_id

    def paid(history: History) -> None:
        for past in history.values():
            assert past.variables["receipt"] == past.variables["order_id"]

    assert simulate(careful, start=ORDERS, stand_ins={"charge_once": fake}, invariants=paid, seeds=2, faults=()).ok


def test_inputs_can_be_made_from_random_numbers() -> None:
    seen: dict[str, Any] = {}

    def make(random: random.Random, number: int) -> Order:
        return Order(f"{number}-{random.randrange(10**6)}")

    def look(history: History) -> None:
        seen.update({past.variables["order_id"]: past.id for past in history.values()})

    simulate(careful, start=make, instances=4, invariants=look, seeds=2, faults=(), fakes={"bank": Bank})

    assert sorted(seen.values()) == [f"careful-{number}" for number in (1, 1, 2, 2, 3, 3, 4, 4)]


def test_ids_may_be_any_text() -> None:
    orders = [Order("Ω-7 é/\N{PILE OF POO}"), Order("日本")]

    def named(history: History) -> None:
        assert sorted(history) == sorted(order.order_id for order in orders)

    report = charges(careful, start=orders, ids=lambda order: order.order_id, invariants=named, seeds=10)

    assert report.ok, report


def test_a_failure_of_an_instance_with_any_text_as_id_is_shown() -> None:
    orders = [Order("\N{RIGHT-TO-LEFT OVERRIDE}Ω"), Order("日本")]

    report = charges(naive, start=orders, ids=lambda order: order.order_id, shrink=False)

    text = report.failures[0].transcript(last=10_000)
    assert "日本" in text
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in text


# --- messages and time ------------------------------------------------------------------------------------------------


@task
def remind(order_id: str) -> None:
    pass


@task
def thank(order_id: str, at: str) -> None:
    pass


parcel = Process(
    "parcel",
    wait("delivered", key="order_id", into="at", gives=str, timeout="72h", late=[remind, sleep("30d")]),
    takes=Order,
)
payment = Process("payment", wait("paid", into="at", gives=str), thank, takes=Order)


def ways(process: Process[Any, Any], **arguments: Any) -> dict[str, int]:
    """How often each way through a process was taken, by whether the step `remind` was on it."""
    taken: dict[str, int] = {}

    def look(history: History) -> None:
        for past in history.values():
            assert past.outcome == "completed", str(past)
            taken[",".join(past.path)] = taken.get(",".join(past.path), 0) + 1

    simulate(process, start=Order("7"), invariants=look, seeds=30, faults=(), **arguments).raise_if_failed()
    return taken


def test_a_message_comes_early_late_or_never_and_time_passes_by_itself() -> None:
    taken = ways(parcel, messages={"delivered": "the door"})

    assert taken[""] > 10
    assert taken["remind"] > 1


def test_a_message_that_nobody_sends_makes_its_wait_late() -> None:
    taken = ways(parcel)

    assert list(taken) == ["remind"]


def test_a_payload_can_be_made_for_each_instance() -> None:
    def place(id: str, given: Order) -> str:
        return f"{id} at {given.order_id}"

    def arrived(history: History) -> None:
        for past in history.values():
            assert past.variables["at"] == f"{past.id} at {past.variables['order_id']}"

    report = simulate(payment, start=ORDERS, messages={"paid": place}, invariants=arrived, seeds=12)

    assert report.ok, report


def test_processes_can_send_messages_to_each_other() -> None:
    sender = Process("sender", throw("paid", key="order_id", payload="order_id"), takes=Order)
    receiver = Process("receiver", wait("paid", key="order_id", into="at", gives=str), thank, takes=Order)

    report = simulate([sender, receiver], start={sender: ORDERS, receiver: ORDERS}, seeds=10)

    assert report.ok, report


def test_nodes_that_replace_each_other_are_played_where_a_fault_needs_them() -> None:
    report = charges(careful, faults=["pause beyond the lease", "two nodes adopt at once"], seeds=12)

    assert report.ok, report
    assert report.probes["took_over_from_a_hung_owner"] > 0


def test_an_operator_retries_what_faults_have_stopped() -> None:
    report = simulate(careful, start=ORDERS, faults=["handler fails before its effect"], seeds=15)

    assert report.ok, report
    assert report.faults["handler fails before its effect"] > 0


def test_several_instances_that_are_stopped_alike_are_all_helped() -> None:
    report = simulate(careful, start=[Order(str(number)) for number in range(5)], faults=["poison"], seeds=8)

    assert report.ok, report
    assert report.faults["poison"] > 8


def test_a_handler_that_fails_by_itself_is_no_fault_of_ours() -> None:
    @task(on_failure="fail")
    def refuse(order_id: str) -> None:
        raise ValueError("never")

    report = simulate(Process("refusing", refuse, takes=Order), start=ORDERS, faults=["handlers"], seeds=12)

    assert report.ok, report


def test_tasks_of_every_kind_are_played() -> None:
    @task
    async def wait_a_bit(order_id: str) -> None:
        await asyncio.sleep(0)

    @task(transactional=True)
    def note(order_id: str, connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS note (order_id TEXT)")
        connection.execute("INSERT INTO note VALUES (?)", (order_id,))

    report = simulate(
        Process("kinds", wait_a_bit, note, isolated, takes=Order), start=ORDERS, faults=["process"], seeds=20
    )

    assert report.ok, report


# --- invariants -------------------------------------------------------------------------------------------------------


def verdict(invariant: Callable[..., object]) -> list[str]:
    report = charges(careful, invariants=invariant, seeds=1, faults=())
    return [violation.message for failure in report.failures for violation in failure.violations]


def test_an_invariant_that_holds_says_nothing_or_true() -> None:
    assert verdict(lambda: None) == []
    assert verdict(lambda: True) == []
    assert verdict(lambda: iter(())) == []


def test_an_invariant_that_does_not_hold_asserts_or_says_so() -> None:
    def asserts() -> None:
        assert [bank, "in pytest's words"] == ["anything"]

    def explains() -> None:
        raise AssertionError("in these\n   words")

    def tells() -> Iterator[str]:
        yield "first"
        yield "second"

    assert re.search(r"== \['anything'\].*Bank object at 0x…> != 'anything'", verdict(asserts)[0])
    assert verdict(explains) == ["in these words"]
    assert verdict(tells) == ["first", "second"]
    assert verdict(lambda: "a text") == ["a text"]
    assert verdict(lambda: False) == ["it does not hold"]


def test_an_invariant_that_is_broken_is_no_finding() -> None:
    def broken(history: History) -> None:
        history["nobody"]

    def wrong() -> int:
        return 3

    with pytest.raises(
        KeyError, match=r"no instance 'nobody' was started in this world; there are: careful-2, careful-1"
    ) as caught:
        verdict(broken)
    assert caught.value.__notes__ == ["in the world of seed 0, 2000 steps"]
    with pytest.raises(TypeError, match="the invariant wrong gave 3"):
        verdict(wrong)


def test_history_shows_what_became_of_each_instance() -> None:
    @task(into="place")
    def reserve(order_id: str) -> str:
        return "shelf 1"

    @reserve.undo
    def release(place: str) -> None:
        pass

    @task
    def pack(order_id: str) -> None:
        raise ValueError("no box is large enough")

    shown: list[Any] = []

    def look(history: History, ledger: Ledger) -> None:
        (past,) = history.of("packing")
        shown.clear()
        shown.extend([past.outcome, past.is_ended, past.is_stuck, past.path, past.undone, past.left])
        shown.extend([past.variables, past.error.message if past.error else "", past.process, past.result])
        shown.extend([len(past.events) > 5, len(past.steps) > 2, past.waiting, len(ledger.of("release"))])
        assert str(past).startswith("packing-1: failed: ")

    simulate(
        Process("packing", saga(reserve, pack), takes=Order), start=Order("7"), invariants=look, seeds=[1], faults=()
    ).raise_if_failed()

    assert shown[:6] == ["failed", True, False, ["reserve"], ["reserve"], []]
    assert shown[6:] == [
        {"order_id": "7", "amount": 40, "place": "shelf 1"},
        "ValueError: no box is large enough",
        "packing",
        None,
        True,
        True,
        (),
        1,
    ]


def test_a_secret_that_is_stored_is_found_and_not_told() -> None:
    report = charges(careful, start=Order("hunter2"), secrets="hunter2", seeds=1, faults=())

    assert {violation.id for violation in report.failures[0].violations} == {"I17"}
    assert "hunter2" not in str(report) + report.failures[0].transcript()


def test_a_secret_that_is_not_stored_is_fine() -> None:
    assert charges(careful, secrets=["hunter2"], seeds=1).ok


# --- processes that do not end ----------------------------------------------------------------------------------------


def test_an_instance_that_never_ends_is_a_finding_unless_that_is_meant() -> None:
    @task
    def refuse(order_id: str) -> None:
        raise ValueError("never")

    stubborn = Process("stubborn", refuse, takes=Order)

    report = simulate(stubborn, start=Order("7"), seeds=1)

    (failure,) = report.failures
    assert failure.invariant == "unfinished"
    assert "stopped since" in failure.violations[0].message
    assert simulate(stubborn, start=Order("7"), seeds=1, must_end=False).ok


def test_a_process_that_sleeps_for_ever_is_given_up() -> None:
    report = simulate(Process("sleepy", repeat(sleep("30d"), whilst="1 == 1")), seeds=1, faults=())

    assert report.failures[0].invariant == "unfinished"


@pytest.mark.slow
def test_a_process_that_turns_for_ever_is_given_up() -> None:
    @task
    def turn() -> None:
        pass

    report = simulate(Process("wheel", repeat(turn, whilst="1 == 1")), seeds=1, faults=(), steps=100)

    assert report.failures[0].invariant == "I13"
    assert "did not come to rest" in report.failures[0].violations[0].message


def test_a_result_that_is_far_too_large_is_refused_and_nothing_breaks() -> None:
    @task(into="data", on_failure="fail")
    def load() -> str:
        return "x" * 10_000_000

    def refused(history: History) -> None:
        for past in history.values():
            assert past.error is not None
            assert "10,000,002 bytes" in past.error.message

    report = simulate(Process("loading", load), seeds=4, invariants=refused, faults=["process"])

    assert report.ok, report


def test_parallel_branches_choices_and_retries_are_played() -> None:
    @task(into="a", retry=Retry(3, first="1m"))
    def left(order_id: str) -> int:
        return 1

    @task(into="b")
    def right(order_id: str) -> int:
        return 2

    process = Process("both", parallel(left, right), choose(("a + b == 3", [ship]), otherwise=[remind]), takes=Order)

    report = simulate(process, start=ORDERS, seeds=12)

    assert report.ok, report


# --- what is printed --------------------------------------------------------------------------------------------------


@task
def talk() -> None:
    print("hello")  # noqa: T201 - What handlers do.


def test_handlers_print_only_in_a_world_that_is_played_alone(capsys: pytest.CaptureFixture[str]) -> None:
    talking = Process("talking", talk)

    simulate(talking, seeds=2, faults=())
    assert capsys.readouterr().out == ""

    simulate(talking, seeds=[1], faults=())
    assert "hello" in capsys.readouterr().out


def test_progress_is_told_and_can_end_it() -> None:
    seen = []

    def tell(report: Report) -> bool:
        seen.append(report.worlds)
        return report.worlds < 3

    report = charges(careful, progress=tell)

    assert report.worlds == 3
    assert seen == [1, 2, 3]


# --- in pytest --------------------------------------------------------------------------------------------------------


USERS_TEST = """
import pytest
from attrs import frozen
from understudy import Process, task

@frozen
class Order:
    order_id: str

@task
def charge(order_id: str) -> None: ...

checkout = Process("checkout", charge, takes=Order)

def called_once(ledger):
    for line in ledger:
        assert len(ledger.under(line.key)) == 1, f"{line.handler} was called twice"

pytestmark = pytest.mark.simulation(seeds=30, start=Order("7"))

@pytest.mark.simulation(faults=())
def test_it_holds(simulation):
    assert simulation(checkout, invariants=called_once).worlds == WORLDS
    assert simulation(checkout, seeds=[5]).worlds == 1

@pytest.mark.simulation(faults=["crash after effect"])
def test_it_fails(simulation):
    simulation(checkout, invariants=called_once)
"""


def users_tests(folder: Path, worlds: int, *options: str) -> str:
    (folder / "test_of_a_user.py").write_text(USERS_TEST.replace("WORLDS", str(worlds)), encoding="utf-8")
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "pytest", "-p", "understudy.pytest_plugin", "--strict-markers", *options, "."]
    told = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, check=False).stdout


def test_the_fixture_takes_what_markers_say_and_fails_with_the_transcript(tmp_path: Path) -> None:
    out = users_tests(tmp_path, 30)

    assert "1 failed, 1 passed" in out
    assert "SimulationFailed: checkout: FAILED with seed" in out
    assert "VIOLATION: called_once: charge was called twice" in out
    assert "replay: simulate(..., seeds=[" in out
    assert "def raise_if_failed" not in out


def test_an_option_raises_the_number_of_seeds(tmp_path: Path) -> None:
    out = users_tests(tmp_path, 40, "--simulation-seeds=40", "--simulation-jobs=2", "-k", "holds")

    assert "1 passed" in out


# --- at the door ------------------------------------------------------------------------------------------------------


def nobody_takes(banque: Bank) -> None:
    pass


async def later(history: History) -> None:
    pass


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seeds": 0}, "no seed would be played"),
    ({"seeds": -3}, "no seed would be played"),
    ({"seeds": []}, "no seed would be played"),
    ({"seeds": "7"}, "seeds is how many to play, or which"),
    ({"seeds": 1.5}, "seeds is how many to play, or which"),
    ({"seeds": ["7"]}, "a seed is a whole number, not '7'"),
    ({"seeds": True}, "seeds is how many to play"),
    ({"steps": 0}, "steps is a number from 1"),
    ({"steps": "many"}, "steps is a number from 1"),
    ({"jobs": 0}, "jobs is a number from 1"),
    ({"strikes": -1}, "strikes is a number from 1"),
    ({"start": []}, "start has no inputs for careful"),
    ({"start": Order}, "start is the class Order; give one or several objects of it"),
    ({"start": 7}, "careful takes Order or a mapping, not int: 7"),
    ({"start": {"order": "7"}}, "order is unknown: did you mean order_id?"),
    ({"start": lambda rng: Order("7")}, "takes rng, which nobody gives it: it may take random, number"),
    ({"start": {naive: Order("7")}}, "inputs for naive, which is not among the processes"),
    ({"instances": 0}, "instances is a number from 1 to 10,000, not 0"),
    ({"ids": "order_id"}, "ids is a function"),
    ({"stand_ins": {"chrage_once": never_charged_twice}}, "no task is called 'chrage_once': did you mean charge_once?"),
    ({"stand_ins": {remind: never_charged_twice}}, "no task is called 'remind'"),
    ({"stand_ins": {"ship": "done"}}, "the stand-in for ship is a function, not str 'done'"),
    ({"stand_ins": {"ship": lambda parcel: None}}, "the stand-in for ship takes parcel, which nobody gives it"),
    ({"stand_ins": [charge]}, "stand_ins is a mapping of tasks to functions, not list"),
    ({"messages": {"delivered": None}}, "nobody waits for 'delivered'"),
    ({"fakes": {"bank": Bank()}}, "give the class, or a function that makes a new one for every world"),
    ({"fakes": {"bank": Bank, "till": Bank}}, "nobody takes 'till'"),
    ({"fakes": {"history": dict}}, "'history' cannot be the name"),
    (
        {"fakes": {"bank": Bank, "order_id": dict}, "stand_ins": {"ship": lambda order_id: None}},
        "has the name of a param",
    ),
    ({"invariants": "never"}, "invariants are functions"),
    ({"invariants": [3]}, "invariant 1 is a function, not int 3"),
    ({"invariants": [nobody_takes]}, "nobody_takes takes banque, which nobody gives it: did you mean bank?"),
    ({"invariants": [later]}, "later is async; an invariant only looks"),
    ({"invariants": [never_charged_twice, never_charged_twice]}, "two invariants are called never_charged_twice"),
    ({"faults": ["crahs"]}, "there is no fault 'crahs': did you mean crash?"),
    ({"faults": 3}, "faults are names or kinds of faults"),
    ({"secrets": [b"x"]}, "secrets are texts"),
    ({"limits": 3}, "limits is a Limits"),
    ({"only": ["careful-9"]}, "no instance of careful is called careful-9"),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSED, ids=lambda part: str(part)[:40])
def test_a_wrong_argument_is_refused_with_the_likely_cause(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnderstudyError) as caught:
        charges(careful, **{"seeds": 1, **arguments})

    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        ((), "simulate takes a process"),
        ((charge,), "simulate takes processes, not Task <task charge"),
        (("careful",), "simulate takes processes, not str 'careful'"),
        ((naive, careful), "several processes are played: say which one takes what"),
        ((payment,), r"waits for message 'paid', and nobody would ever send it: give its payload, as in messages="),
    ],
)
def test_what_cannot_be_simulated_is_refused(processes: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        simulate(*processes, start=Order("7"), seeds=1)


def test_a_simulation_can_be_kept_and_run_again() -> None:
    simulation = Simulation(careful, start=ORDERS, fakes={"bank": Bank}, invariants=[never_charged_twice])

    first, second = simulation.run(5), simulation.run(5)

    assert (first.steps, first.commits) == (second.steps, second.commits)
    assert simulation.run(3, faults=()).faults == {}


def test_the_public_names_of_the_package_are_these_and_importing_it_costs_nothing() -> None:
    source = (
        f"import sys; sys.path[:] = {sys.path!r}; import understudy.simulations as s; "
        "print(*s.__all__); print(*sorted({'peewee', 'pykka', 'attrs', 'msgspec'} & set(sys.modules)))"
    )

    names, heavy = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout.splitlines()

    assert names == "Failure History Ledger Line Past Report Simulation SimulationFailed World simulate"
    assert heavy == ""


def test_a_failure_is_drawn(found: Report, tmp_path: Path) -> None:
    failure: Failure = found.failures[0]

    assert "<svg" in failure.svg()
    page = failure.html(tmp_path / "failure.html").read_text(encoding="utf-8")
    assert "never_charged_twice" in page
