"""What a step can count on: each sentence that the data-flow check can say, and what it must keep silent about."""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated, Any, Literal, NewType, Protocol, TypedDict, TypeVar

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from understudy.dataflow import fits, title, unreadable
from understudy.model.commands import CompleteTask, Deliver, FireTimer, Start
from understudy.model.decide import decide
from understudy.model.definition import Graph
from understudy.model.errors import InvalidDefinition, Problem
from understudy.model.instance import Instance, Token, Wait
from understudy.model.states import TokenStatus
from understudy.process import Process
from understudy.steps import choose, end, parallel, repeat, saga, sleep, terminate, throw, wait, when
from understudy.tasks import task


@attrs.frozen
class Order:
    order_id: str
    amount: int
    ready: bool = False


@attrs.frozen
class Receipt:
    id: str


@attrs.frozen
class SignedReceipt(Receipt):
    by: str


@attrs.frozen
class Invoice:
    total: int


@task(into="receipt")
def charge(order_id: str, amount: int) -> Receipt:
    return Receipt(order_id)


@task(into="receipt")
def charge_again(order_id: str) -> Receipt:
    return Receipt(order_id)


@task(into="receipt")
def bill(amount: int) -> Invoice:
    return Invoice(amount)


@task
def ship(receipt: Receipt) -> str:
    return receipt.id


@task
def announce(receipt: Receipt | None = None) -> None: ...


@task(into="ready")
def look() -> bool:
    return True


@task
def nothing() -> None: ...


def problems(*sequence: Any, takes: Any = Order, gives: Any = None) -> list[Problem]:
    try:
        Process("p", *sequence, takes=takes, gives=gives)
    except InvalidDefinition as error:
        return list(error.problems)
    return []


def told(*sequence: Any, takes: Any = Order, gives: Any = None) -> list[str]:
    return [f"{problem.code}: {problem.message}" for problem in problems(*sequence, takes=takes, gives=gives)]


# --- what is there ----------------------------------------------------------------------------------------------------


def test_a_step_may_take_inputs_and_what_was_given_before_it() -> None:
    assert told(charge, ship) == []


def test_what_nothing_gives_is_missing() -> None:
    assert told(ship) == ["missing_variable: `ship` needs receipt: nothing before it gives one"]


def test_what_is_given_only_later_is_missing_and_the_giver_is_named() -> None:
    (problem,) = problems(ship, charge)

    assert problem.message == "`ship` needs receipt: nothing before it gives one"
    assert problem.hint == "`charge` gives it, but only later"


def test_a_name_that_is_nearly_right_is_offered() -> None:
    @task
    def read(recipt: Receipt) -> None: ...

    (problem,) = problems(charge, read)

    assert (problem.node, problem.hint) == ("read", "did you mean receipt?")


def test_a_parameter_with_a_default_may_be_missing() -> None:
    assert told(announce) == []


def test_a_second_use_of_a_step_is_named_as_such() -> None:
    @task
    def pay(receipt: Receipt) -> None: ...

    assert [problem.node for problem in problems(pay, charge, pay)] == ["pay"]
    assert [problem.node for problem in problems(nothing, nothing, pay, pay)] == ["pay", "pay#2"]


def test_with_open_inputs_any_name_may_be_one() -> None:
    assert told(ship, when("anything", nothing), wait("m", key="some_key"), takes=dict) == []


def test_with_open_inputs_types_are_still_compared() -> None:
    assert told(bill, ship, takes=dict) == ["type_clash: `ship` takes receipt as Receipt, but `bill` gives Invoice"]


# --- choices ----------------------------------------------------------------------------------------------------------


def test_what_only_one_branch_gives_is_not_sure() -> None:
    assert told(when("amount > 5", charge), ship) == [
        "uncertain_variable: `ship` needs receipt, which only one branch of choice-1 gives"
    ]
    assert told(choose(("amount > 5", charge), ("amount > 3", charge_again), otherwise=nothing), ship) == [
        "uncertain_variable: `ship` needs receipt, which only 2 branches of choice-1 give"
    ]


def test_what_is_not_sure_may_go_to_a_parameter_with_a_default() -> None:
    (problem,) = problems(when("amount > 5", charge), ship)

    assert problem.hint == "a parameter with a default is passed only when it is there"
    assert told(when("amount > 5", charge), announce) == []


def test_what_every_branch_gives_is_sure() -> None:
    assert told(choose(("amount > 5", charge), otherwise=charge_again), ship) == []
    assert told(choose(("amount > 5", charge), ("amount > 3", charge_again)), ship) == []


def test_a_branch_that_ends_does_not_count() -> None:
    assert told(choose(("amount > 5", charge), otherwise=end()), ship) == []
    assert told(choose(("amount > 5", charge), otherwise=[nothing, terminate()]), ship) == []


def test_a_branch_knows_what_was_before_the_choice() -> None:
    assert told(charge, when("amount > 5", ship)) == []


def test_a_variable_has_the_type_of_each_branch_that_gave_it() -> None:
    assert told(choose(("amount > 5", charge), otherwise=bill), ship) == [
        "type_clash: `ship` takes receipt as Receipt, but `bill` gives Invoice"
    ]


# --- parallel branches ------------------------------------------------------------------------------------------------


def test_after_a_join_all_that_its_branches_gave_is_there() -> None:
    assert told(parallel(charge, nothing), ship) == []


def test_a_branch_cannot_count_on_another() -> None:
    assert told(parallel(charge, ship)) == [
        "uncertain_variable: `ship` needs receipt, which only another branch of parallel-1 gives"
    ]


def test_two_branches_may_not_write_one_variable() -> None:
    (problem,) = problems(parallel(charge, [nothing, when("amount > 5", charge_again)]))

    assert (problem.code, problem.node) == ("parallel_writes", "fork-1")
    assert problem.message == "two branches of parallel-1 write receipt"
    assert problem.hint.startswith("`charge` and `charge_again` give it")


def test_one_branch_may_write_a_variable_twice() -> None:
    assert told(parallel([charge, charge_again], nothing), ship) == []


def test_a_branch_that_ends_only_sometimes_would_hold_up_the_join_for_ever() -> None:
    assert [problem.code for problem in problems(parallel(when("amount > 5", end()), nothing))] == ["end_in_parallel"]
    assert told(parallel([nothing, end()], nothing)) == []
    assert told(parallel(when("amount > 5", terminate()), nothing)) == []
    assert told(parallel(saga(when("amount > 5", end())), nothing)) == []


def test_what_a_branch_gives_that_nobody_awaits_is_not_sure() -> None:
    assert told(parallel([charge, end()], nothing), ship) == [
        "uncertain_variable: `ship` needs receipt, which parallel-1 gives on a way that nobody waits for"
    ]


def test_at_the_end_of_a_saga_its_unawaited_branches_are_done_too() -> None:
    assert told(saga(parallel([charge, end()], nothing), nothing), ship) == []
    assert told(saga(parallel([charge, end()], [nothing, end()])), ship) == []


# --- sagas ------------------------------------------------------------------------------------------------------------


def test_what_a_saga_gave_is_there_behind_it() -> None:
    assert told(saga(charge), ship) == []


def test_a_saga_that_may_end_early_gives_nothing_for_sure() -> None:
    for early in (end(), terminate()):
        assert told(saga(when("amount > 5", early), charge), ship) == [
            "uncertain_variable: `ship` needs receipt, which only some ways through saga-1 give"
        ]


def test_an_undo_sees_what_its_step_saw_and_gave() -> None:
    @task(into="seat")
    def reserve(order_id: str) -> str:
        return order_id

    @reserve.undo
    def release(seat: str, result: str, order_id: str, amount: int) -> None: ...

    assert told(saga(reserve)) == []


def test_an_undo_cannot_see_what_comes_after_its_step() -> None:
    @task
    def reserve() -> str:
        return "seat"

    @reserve.undo
    def release(result: int, receipt: Receipt) -> None: ...

    assert told(saga(reserve, charge)) == [
        "type_clash: `release`, the undo of `reserve`, takes result as int, but `reserve` gives str",
        "missing_variable: `release`, the undo of `reserve`, needs receipt: nothing before it gives one",
    ]


# --- loops ------------------------------------------------------------------------------------------------------------


def test_the_first_round_has_nothing_from_the_end_of_a_round() -> None:
    assert told(repeat(ship, charge, until="amount > 5")) == [
        "uncertain_variable: `ship` needs receipt, which repeat-1 gives only later in the same round"
    ]


def test_a_round_may_use_what_it_gave_and_the_test_after_it_too() -> None:
    assert told(repeat(charge, ship, until="receipt.id == 'x'"), ship) == []


def test_the_test_before_the_first_round_knows_only_what_was_before() -> None:
    @task(into="found")
    def search() -> bool:
        return True

    assert told(repeat(look, whilst="not ready")) == []
    assert told(repeat(search, whilst="not found")) == [
        "uncertain_variable: the condition 'not found' of repeat-1 needs found, "
        "which repeat-1 gives only later in the same round"
    ]


def test_a_loop_that_may_not_run_gives_nothing_for_sure() -> None:
    assert told(repeat(charge, whilst="amount > 5"), ship) == [
        "uncertain_variable: `ship` needs receipt, which repeat-1 gives only if it runs a round"
    ]


def test_a_later_round_takes_what_the_round_before_gave() -> None:
    assert told(charge, repeat(ship, bill, until="amount > 5")) == [
        "type_clash: `ship` takes receipt as Receipt, but `bill` gives Invoice"
    ]


def test_a_loop_whose_body_always_ends_is_still_walked() -> None:
    codes = [problem.code for problem in problems(repeat(ship, end(), until="ready"))]

    assert codes == ["orphan", "missing_variable"]


# --- waits, throws, sleeps and conditions -----------------------------------------------------------------------------


def test_what_a_message_brings_has_the_type_that_the_wait_names() -> None:
    assert told(wait("paid", into="receipt", gives=Receipt), ship) == []
    assert told(wait("paid", into="receipt"), ship) == []
    assert told(wait("paid", into="receipt", gives=Invoice), ship) == [
        "type_clash: `ship` takes receipt as Receipt, but `paid` gives Invoice"
    ]


def test_a_message_that_may_be_late_brings_nothing_for_sure() -> None:
    late = wait("paid", into="receipt", gives=Receipt, timeout="1h", late=nothing)

    assert told(late, ship) == ["uncertain_variable: `ship` needs receipt, which only one outcome of paid gives"]
    assert told(wait("paid", into="receipt", gives=Receipt, timeout="1h", late=charge), ship) == []
    assert told(wait("paid", into="receipt", gives=Receipt, timeout="1h", late=end()), ship) == []


@pytest.mark.parametrize(
    ("step", "subject"),
    [
        (when("amuont > 5", nothing), "the condition 'amuont > 5' of choice-1"),
        (repeat(nothing, until="amuont > 5"), "the condition 'amuont > 5' of repeat-1"),
        (wait("m", key="amuont"), "the key 'amuont' of m"),
        (throw("m", key="amuont"), "the key 'amuont' of throw m"),
        (throw("m", payload="{'x': amuont}"), "the payload \"{'x': amuont}\" of throw m"),
        (sleep(after="amuont"), "after='amuont' of sleep-1"),
        (sleep(until="amuont"), "until='amuont' of sleep-1"),
    ],
)
def test_an_expression_may_name_only_what_is_there(step: Any, subject: str) -> None:
    (problem,) = problems(step)

    assert problem.message == f"{subject} needs amuont: nothing before it gives one"
    assert problem.hint == "did you mean amount?"


def test_an_expression_may_ask_about_what_is_not_sure() -> None:
    assert told(when("amount > 5", charge), when("exists(receipt)", nothing)) == []
    assert told(when("amount > 5", charge), when("receipt.id == 'x'", nothing)) == [
        "uncertain_variable: the condition \"receipt.id == 'x'\" of choice-2 needs receipt, "
        "which only one branch of choice-1 gives"
    ]


def test_an_expression_may_not_ask_about_what_nothing_ever_gives() -> None:
    assert told(when("exists(reciept)", nothing), charge) == [
        "missing_variable: the condition 'exists(reciept)' of choice-1 asks about reciept, "
        "which nothing in this process gives"
    ]


# --- the result -------------------------------------------------------------------------------------------------------


def test_a_promised_result_must_be_given_on_every_way() -> None:
    assert told(when("amount > 5", charge), gives=charge) == [
        "uncertain_result: the result is receipt, which only one branch of choice-1 gives"
    ]
    assert told(when("amount > 5", end()), charge, gives=charge) == [
        "uncertain_result: the result is receipt, which only some ways to an end give"
    ]
    assert told(choose(("amount > 5", [charge, end()]), otherwise=charge_again), gives=charge) == []


def test_a_result_that_may_be_none_may_be_missing() -> None:
    @task(into="found")
    def search() -> Receipt | None:
        return None

    assert told(when("amount > 5", search), gives=search) == []


def test_a_result_by_name_need_only_be_given_somewhere() -> None:
    assert told(when("amount > 5", charge), gives="receipt") == []
    assert told(charge, gives="recept") == ["unknown_result: the result is recept, which no step and no input gives"]


def test_a_result_of_another_type_breaks_the_promise() -> None:
    assert told(charge, bill, gives=charge) == [
        "type_clash: the result is receipt as Receipt, but `bill` gives Invoice"
    ]


def test_a_task_that_is_no_step_cannot_give_the_result() -> None:
    assert told(nothing, gives=ship) == ["unknown_result: the result is ship, which no step and no input gives"]


def test_a_result_that_cannot_be_read_back_is_a_problem() -> None:
    @task
    def either() -> Receipt | Invoice:
        return Invoice(1)

    assert [problem.code for problem in problems(either, gives=either)] == ["bad_type"]
    assert problems(either) == []


# --- types ------------------------------------------------------------------------------------------------------------

Anything = TypeVar("Anything")
OrderId = NewType("OrderId", str)


class Colour(enum.StrEnum):
    RED = "red"


class Named(Protocol):
    name: str


class Movie(TypedDict):
    title: str


class Plain:
    pass


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Receipt, Receipt),
        (Receipt, Any),
        (Any, Receipt),
        (Receipt, object),
        (SignedReceipt, Receipt),
        (Receipt, Receipt | None),
        (None, Receipt | None),
        (int | None, None | int | str),
        (int, float),
        (list[int], list[float]),
        (list[Receipt], list[Receipt]),
        (list[Receipt], Sequence[Receipt]),
        (list[Receipt], list),
        (list, list[Receipt]),
        (dict[str, int], Mapping[str, int]),
        (tuple[int, ...], tuple[int, ...]),
        (Literal["a"], Literal["a", "b"]),
        (Literal["a"], str),
        (Annotated[int, "positive"], int),
        (int, Annotated[int, "positive"]),
        (OrderId, str),
        (OrderId, OrderId),
        (Colour, str),
        (Receipt, Named),
        (Movie, dict),
        (Receipt, Anything),
    ],
)
def test_a_type_fits(given: Any, wanted: Any) -> None:
    assert fits(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Receipt, Invoice),
        (Receipt, SignedReceipt),
        (Receipt | None, Receipt),
        (Receipt | Invoice, Receipt),
        (None, Receipt),
        (float, int),
        (bool, int),
        (int, bool),
        (str, int),
        (list[Receipt], list[Invoice]),
        (list[int], dict[str, int]),
        (str, Literal["a"]),
        (Literal["c"], Literal["a", "b"]),
        (str, OrderId),
        (str, Colour),
    ],
)
def test_a_type_does_not_fit(given: Any, wanted: Any) -> None:
    assert not fits(given, wanted)


TYPES = st.recursive(
    st.sampled_from([int, str, bool, float, None, Receipt, Invoice, Colour, OrderId]),
    lambda inner: st.one_of(
        inner.map(lambda kind: list[kind]),  # type: ignore[valid-type]
        inner.map(lambda kind: dict[str, kind]),  # type: ignore[valid-type]
        st.tuples(inner, inner).map(lambda kinds: kinds[0] | kinds[1] if None not in kinds else kinds[0]),
    ),
    max_leaves=4,
)


@given(TYPES, TYPES)
def test_every_type_fits_itself_and_any_union_with_it(kind: Any, other: Any) -> None:
    assert fits(kind, kind)
    assert fits(kind, Any)
    if None not in (kind, other):
        assert fits(kind, kind | other)
        assert fits(kind | other, kind) == fits(other, kind)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (int, "int"),
        (None, "None"),
        (Any, "Any"),
        (Receipt | None, "Receipt | None"),
        (list[Receipt], "list[Receipt]"),
        (dict[str, list[int]], "dict[str, list[int]]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Literal["a", 1], "Literal['a', 1]"),
        (OrderId, "OrderId"),
    ],
)
def test_a_type_is_named_as_its_author_would_write_it(kind: Any, name: str) -> None:
    assert title(kind) == name


@pytest.mark.parametrize(
    "kind", [int, Any, object, Receipt, list[Receipt], Receipt | None, Movie, Colour, Literal["a"]]
)
def test_a_type_that_json_can_carry_is_readable(kind: Any) -> None:
    assert unreadable(kind) == ""


@pytest.mark.parametrize("kind", [Plain, list[Plain], sqlite3.Connection, Receipt | Invoice])
def test_a_type_that_json_cannot_carry_is_not_readable(kind: Any) -> None:
    assert "cannot be made from JSON" in unreadable(kind)


# --- the check against the rules that it speaks of --------------------------------------------------------------------


@attrs.frozen
class Switches:
    p: bool
    q: bool
    turn: bool = False


@task(into="x")
def give_x() -> int:
    return 1


@task(into="y")
def give_y() -> int:
    return 1


@task
def take_x(x: int) -> None: ...


@task
def take_both(x: int, y: int) -> None: ...


@task(into="turn")
def toss() -> bool:
    return True


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    blocks = st.lists(inner, max_size=3)
    asked = st.sampled_from(["p", "q", "turn"])
    return st.one_of(
        st.builds(lambda condition, block: when(condition, block), asked, blocks),
        st.builds(lambda condition, one, other: choose((condition, one), otherwise=other), asked, blocks, blocks),
        st.builds(parallel, blocks, blocks),
        st.builds(saga, blocks),
        st.builds(lambda block: repeat(block, toss, until="turn"), blocks),
        st.builds(lambda block: repeat(block, toss, whilst="not turn"), blocks),
        st.builds(lambda block: wait("x", into="x", gives=int, timeout="1h", late=block), blocks),
    )


SIMPLE = st.sampled_from([give_x, give_y, take_x, take_both, nothing, sleep("1h"), end(), terminate()])
TREES = st.lists(st.recursive(SIMPLE, composed, max_leaves=8), min_size=1, max_size=5)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(TREES, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_a_process_that_passes_never_lacks_a_variable_and_never_hangs(
    tree: Any, p: bool, q: bool, dice: Random
) -> None:
    assume(not problems(tree, takes=Switches))
    process = Process("p", tree, takes=Switches)

    instance = performed(process, Switches(p, q), dice)

    assert [incident.detail for incident in instance.incidents.values()] == []
    assert instance.is_ended


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(TREES, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_a_promised_result_is_there_whichever_way_was_taken(tree: Any, p: bool, q: bool, dice: Random) -> None:
    assume(not problems(tree, give_x, takes=Switches, gives=give_x))
    process = Process("p", tree, give_x, takes=Switches, gives=give_x)

    instance = performed(process, Switches(p, q), dice)

    assert process.decode_result(instance.result) == 1


def performed(process: Process[Any, Any], inputs: Switches, dice: Random) -> Instance:
    """The instance after everything that could happen has happened, in the order of the dice."""
    graph, instance, now_ms = Graph(process.definition), Instance(), 0
    decide(instance, graph, Start(at_ms=0, id="i", given_digest="", variables=process.encode_input(inputs)))
    while not instance.incidents:
        tasks = [token for token in instance.tokens.values() if token.status is TokenStatus.EXECUTING]
        open_ones: list[Token | Wait] = [*tasks, *instance.waits.values()]
        if not open_ones:
            break
        chosen = dice.choice(open_ones)
        if isinstance(chosen, Token):
            result = dice.choice(["true", "false"]) if chosen.node.startswith("toss") else "1"
            decide(instance, graph, CompleteTask(at_ms=now_ms, token=chosen.id, attempt=1, result=result))
        elif chosen.due_ms is None:
            decide(instance, graph, Deliver(at_ms=now_ms, message=1, wait=chosen.id, payload="1"))
        else:
            now_ms = max(now_ms, chosen.due_ms)
            decide(instance, graph, FireTimer(at_ms=now_ms, wait=chosen.id))
    return instance


# --- all together -----------------------------------------------------------------------------------------------------


def test_every_problem_of_the_flow_is_told_at_once() -> None:
    assert told(
        ship,
        when("amuont > 5", charge),
        ship,
        parallel(bill, charge_again),
        wait("paid", key="orderid"),
        gives=ship,
    ) == [
        "missing_variable: `ship` needs receipt: nothing before it gives one",
        "missing_variable: the condition 'amuont > 5' of choice-1 needs amuont: nothing before it gives one",
        "uncertain_variable: `ship#2` needs receipt, which only one branch of choice-1 gives",
        "parallel_writes: two branches of parallel-1 write receipt",
        "missing_variable: the key 'orderid' of paid needs orderid: nothing before it gives one",
    ]
