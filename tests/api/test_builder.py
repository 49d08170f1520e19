"""How steps become a graph, and what is refused before they do."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import sqlite3
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, assert_type

import attrs
import msgspec
import pytest

from understudy.actors.handlers import Context
from understudy.model.definition import Graph, decode_definition
from understudy.model.errors import BadInput, BadValue, InvalidDefinition
from understudy.model.kinds import Receive, Saga, Task, Throw, Timer, UndoTask
from understudy.model.retry import ONCE, Backoff
from understudy.process import Process
from understudy.steps import choose, end, parallel, repeat, saga, sequence, sleep, terminate, throw, wait, when
from understudy.tasks import AsyncTask, Retry, task
from understudy.tasks import Task as UserTask

if TYPE_CHECKING:
    from collections import OrderedDict as OnlyForTypeCheckers

    from understudy.actors.handlers import Context as LateContext


class Declined(Exception):
    pass


@attrs.frozen
class Order:
    order_id: str
    amount: int
    vip: bool = False


@attrs.frozen
class Receipt:
    id: str


@task
def a() -> None: ...


@task
def b() -> None: ...


@task
def c() -> None: ...


@task(into="ok")
def check() -> bool:
    return True


@task(into="receipt", retry=Retry(5, first="2s", never=(Declined, ValueError)), timeout="30s")
def charge(order_id: str, amount: int, ctx: Context, note: str = "") -> Receipt:
    return Receipt(f"{order_id}/{amount}/{note}")


@charge.undo(retry=Retry(3), timeout="5s")
def refund(receipt: Receipt, ctx: Context) -> str:
    return f"took back {receipt.id}"


@task
def ship(order_id: str) -> str:
    return f"shipped {order_id}"


def drawn(*given: Any, takes: Any = dict) -> list[str]:
    """The edges of a process, one line each."""
    return lines(Process("p", *given, takes=takes))


def lines(process: Process[Any, Any]) -> list[str]:
    marks = [
        edge.condition or ("else" if edge.is_default else "late" if edge.is_late else "")
        for edge in process.definition.edges
    ]
    edges = zip(process.definition.edges, marks, strict=True)
    return [f"{edge.source} -> {edge.target}" + (f" [{mark}]" if mark else "") for edge, mark in edges]


def node(process: Process[Any, Any], name: str) -> Any:
    return Graph(process.definition)[name].node


def refused(build: Callable[[], object]) -> str:
    with pytest.raises(InvalidDefinition) as refusal:
        build()
    return str(refusal.value)


# --- the graph --------------------------------------------------------------------------------------------------------


def test_steps_follow_each_other_from_the_start_to_the_end() -> None:
    assert drawn() == ["start -> end"]
    assert drawn(a, b) == ["start -> a", "a -> b", "b -> end"]


def test_a_task_that_is_used_again_gets_a_number() -> None:
    assert drawn(a, a, a) == ["start -> a", "a -> a#2", "a#2 -> a#3", "a#3 -> end"]


def test_when_goes_straight_on_if_its_condition_is_false() -> None:
    assert drawn(when("amount > 5", a, b), c) == [
        "start -> choice-1",
        "choice-1 -> a [amount > 5]",
        "a -> b",
        "b -> c",
        "choice-1 -> c [else]",
        "c -> end",
    ]


def test_choose_tries_its_branches_in_their_order() -> None:
    assert drawn(choose(("x", a), ("y", [b, a]), otherwise=c)) == [
        "start -> choice-1",
        "choice-1 -> a [x]",
        "a -> end",
        "choice-1 -> b [y]",
        "b -> a#2",
        "a#2 -> end",
        "choice-1 -> c [else]",
        "c -> end",
    ]


def test_choose_without_otherwise_has_no_default() -> None:
    assert drawn(choose(("x", a), ("y", b))) == [
        "start -> choice-1",
        "choice-1 -> a [x]",
        "a -> end",
        "choice-1 -> b [y]",
        "b -> end",
    ]


def test_an_empty_branch_keeps_its_turn_in_the_order_of_trial() -> None:
    process = Process("p", choose(("x", []), ("y", a), ("z", ()), otherwise=()), b, takes=dict)

    tried = [edge.condition for edge in Graph(process.definition)["choice-1"].outgoing]

    assert tried == ["x", "y", "z", ""]
    assert lines(process)[1:] == [
        "choice-1 -> b [x]",
        "choice-1 -> a [y]",
        "a -> b",
        "choice-1 -> b [z]",
        "choice-1 -> b [else]",
        "b -> end",
    ]


def test_a_second_edge_between_the_same_nodes_gets_a_number() -> None:
    process = Process("p", choose(("x", []), ("y", [])), takes=dict)

    assert [edge.id for edge in process.definition.edges] == ["start->choice-1", "choice-1->end", "choice-1->end#2"]


def test_parallel_branches_are_joined() -> None:
    assert drawn(parallel(a, [b, c]), a) == [
        "start -> fork-1",
        "fork-1 -> a",
        "a -> join-1",
        "fork-1 -> b",
        "b -> c",
        "c -> join-1",
        "join-1 -> a#2",
        "a#2 -> end",
    ]


def test_a_branch_with_several_ways_out_comes_to_the_join_by_one_edge() -> None:
    assert drawn(parallel(when("x", a), b)) == [
        "start -> fork-1",
        "fork-1 -> choice-1",
        "choice-1 -> a [x]",
        "a -> merge-1",
        "choice-1 -> merge-1 [else]",
        "merge-1 -> join-1",
        "fork-1 -> b",
        "b -> join-1",
        "join-1 -> end",
    ]


def test_an_empty_parallel_branch_leads_straight_to_the_join() -> None:
    assert drawn(parallel(a, [])) == [
        "start -> fork-1",
        "fork-1 -> a",
        "a -> join-1",
        "fork-1 -> join-1",
        "join-1 -> end",
    ]


def test_nested_forks_keep_the_number_of_their_join() -> None:
    assert drawn(parallel(parallel(a, b), c)) == [
        "start -> fork-1",
        "fork-1 -> fork-2",
        "fork-2 -> a",
        "a -> join-2",
        "fork-2 -> b",
        "b -> join-2",
        "join-2 -> join-1",
        "fork-1 -> c",
        "c -> join-1",
        "join-1 -> end",
    ]


def test_a_parallel_branch_that_always_ends_is_not_awaited() -> None:
    assert drawn(parallel([a, end()], b), c) == [
        "start -> fork-1",
        "fork-1 -> a",
        "a -> end-1",
        "fork-1 -> b",
        "b -> c",
        "c -> end",
    ]


def test_a_saga_is_a_scope_with_a_start_and_an_end_of_its_own() -> None:
    process = Process("p", saga(charge, saga(b)), a, takes=Order)

    assert lines(process) == [
        "start -> saga-1",
        "saga-1/start -> charge",
        "charge -> saga-2",
        "saga-2/start -> b",
        "b -> saga-2/end",
        "saga-2 -> saga-1/end",
        "saga-1 -> a",
        "a -> end",
    ]
    assert {each.id: each.within for each in process.definition.nodes if each.within} == {
        "saga-1/start": "saga-1",
        "charge": "saga-1",
        "saga-2": "saga-1",
        "saga-2/start": "saga-2",
        "b": "saga-2",
        "saga-2/end": "saga-2",
        "saga-1/end": "saga-1",
    }
    assert node(process, "saga-1") == Saga(id="saga-1")


def test_repeat_until_asks_after_each_round() -> None:
    assert drawn(repeat(a, check, until="ok"), b) == [
        "start -> repeat-1",
        "repeat-1 -> a",
        "a -> check",
        "check -> until-1",
        "until-1 -> b [ok]",
        "until-1 -> repeat-1 [else]",
        "b -> end",
    ]


def test_repeat_whilst_asks_before_each_round() -> None:
    assert drawn(repeat(a, whilst="not ready"), b) == [
        "start -> repeat-1",
        "repeat-1 -> a [not ready]",
        "a -> repeat-1",
        "repeat-1 -> b [else]",
        "b -> end",
    ]


def test_a_loop_may_begin_with_a_fork_and_end_with_a_choice() -> None:
    assert drawn(repeat(parallel(a, b), when("x", c), until="ok")) == [
        "start -> repeat-1",
        "repeat-1 -> fork-1",
        "fork-1 -> a",
        "a -> join-1",
        "fork-1 -> b",
        "b -> join-1",
        "join-1 -> choice-1",
        "choice-1 -> c [x]",
        "c -> until-1",
        "choice-1 -> until-1 [else]",
        "until-1 -> end [ok]",
        "until-1 -> repeat-1 [else]",
    ]


def test_a_wait_that_is_late_takes_its_own_way_and_comes_back() -> None:
    process = Process("p", wait("paid", key="order_id", into="payment", timeout="72h", late=a), b, takes=Order)

    assert lines(process) == ["start -> paid", "paid -> b", "paid -> a [late]", "a -> b", "b -> end"]
    assert node(process, "paid") == Receive(
        id="paid", message="paid", key="order_id", into="payment", timeout_ms=72 * 3_600_000
    )


def test_a_throw_names_its_message() -> None:
    process = Process("p", throw("paid", key="order_id", payload="{'n': amount}", ttl="1d"), throw("paid"), takes=Order)

    assert lines(process) == ["start -> throw paid", "throw paid -> throw paid#2", "throw paid#2 -> end"]
    assert node(process, "throw paid") == Throw(
        id="throw paid", message="paid", key="order_id", payload="{'n': amount}", ttl_ms=86_400_000
    )


@pytest.mark.parametrize(
    ("build", "timer"),
    [
        (lambda: sleep("3d"), Timer(id="sleep-1", after="'3d'")),
        (lambda: sleep(timedelta(hours=1)), Timer(id="sleep-1", after="'3600000ms'")),
        (lambda: sleep(1.5), Timer(id="sleep-1", after="'1500ms'")),
        (lambda: sleep(after="patience"), Timer(id="sleep-1", after="patience")),
        (lambda: sleep(until="due.date"), Timer(id="sleep-1", until="due.date")),
        (
            lambda: sleep(until=datetime(2030, 1, 2, tzinfo=UTC)),
            Timer(id="sleep-1", until="'2030-01-02T00:00:00+00:00'"),
        ),
    ],
)
def test_a_sleep_is_a_duration_as_it_stands_or_an_expression_by_its_keyword(
    build: Callable[[], Any], timer: Timer
) -> None:
    assert node(Process("p", build(), takes=dict), "sleep-1") == timer


def test_end_and_terminate_end_their_way() -> None:
    assert drawn(when("x", a, end()), when("y", terminate()), b) == [
        "start -> choice-1",
        "choice-1 -> a [x]",
        "a -> end-1",
        "choice-1 -> choice-2 [else]",
        "choice-2 -> terminate-1 [y]",
        "choice-2 -> b [else]",
        "b -> end",
    ]


def test_a_process_whose_every_way_ends_needs_no_further_end() -> None:
    assert drawn(choose(("x", end()), otherwise=[a, end()])) == [
        "start -> choice-1",
        "choice-1 -> end-1 [x]",
        "choice-1 -> a [else]",
        "a -> end-2",
    ]


def test_a_branch_may_be_a_list_a_tuple_or_steps() -> None:
    as_list, as_tuple, as_steps = ([a, b], (a, b), sequence(a, b))

    drawings = [drawn(choose(("x", branch), otherwise=c)) for branch in (as_list, as_tuple, as_steps)]

    assert drawings[0] == drawings[1] == drawings[2]


def test_a_step_may_be_used_twice() -> None:
    both = when("x", a)

    assert drawn(both, both)[-4:] == [
        "choice-1 -> choice-2 [else]",
        "choice-2 -> a#2 [x]",
        "a#2 -> end",
        "choice-2 -> end [else]",
    ]


def test_names_of_the_authors_own_choice_never_meet_ours() -> None:
    @task(name="end")
    def last() -> None: ...

    @task(name="fork-1")
    def odd() -> None: ...

    assert drawn(last, odd, parallel(a, b)) == [
        "start -> end#2",
        "end#2 -> fork-1",
        "fork-1 -> fork-2",
        "fork-2 -> a",
        "a -> join-2",
        "fork-2 -> b",
        "b -> join-2",
        "join-2 -> end",
    ]


def test_the_same_source_gives_the_same_definition_wherever_it_stands() -> None:
    first = Process("p", when("amount > 5", a), saga(charge), takes=Order, gives="receipt")
    second = Process("p", when("amount > 5", a), saga(charge), takes=Order, gives="receipt")

    assert first.definition.places != second.definition.places
    assert first.definition.digest == second.definition.digest


def test_a_definition_comes_back_from_its_text_as_it_was() -> None:
    process = Process("p", saga(charge), repeat(check, until="ok"), sleep("1h"), takes=Order, gives="receipt")

    assert decode_definition(process.definition.body) == process.definition


# --- places -----------------------------------------------------------------------------------------------------------


def test_every_node_knows_the_line_it_was_written_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)

    process = Process("p", sleep("1s"), takes=Order)
    other = Process(
        "p",
        when(
            "vip",
            sleep("1s"),
        ),
        takes=Order,
    )

    at = line_of('process = Process("p", sleep(')
    assert process.definition.places == {name: f"{Path(__file__).name}:{at}" for name in ("start", "sleep-1", "end")}
    assert other.definition.places["choice-1"] == f"{Path(__file__).name}:{at + 3}"
    assert other.definition.places["sleep-1"] == f"{Path(__file__).name}:{at + 5}"


def test_a_line_outside_the_working_directory_has_its_whole_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    process = Process("p")

    assert process.definition.places["start"].startswith(f"{Path(__file__)}:")


def test_a_task_is_found_at_its_function() -> None:
    process = Process("p", a)

    assert process.definition.places["a"].endswith(f"{Path(__file__).name}:{line_of('def a()') - 1}")


def line_of(text: str) -> int:
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(source, 1) if line.lstrip().startswith(text))


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_a_task_is_called_like_the_function_it_was_made_from() -> None:
    context = Context("key", "instance", "charge", 1)

    receipt = charge(order_id="7", amount=40, ctx=context)

    assert receipt == Receipt("7/40/")
    assert refund(receipt, context) == "took back 7/40/"
    assert (charge.__name__, charge.name, charge.__doc__) == ("charge", "charge", None)


def test_an_async_task_is_called_like_its_coroutine_function() -> None:
    @task(into="page")
    async def fetch(url: str) -> str:
        return f"page of {url}"

    process = Process("p", fetch, takes={"url": str})

    assert isinstance(fetch, AsyncTask)
    assert asyncio.run(fetch("x")) == "page of x"
    assert process.handlers["fetch"].is_async


def test_a_task_stands_in_the_definition_with_all_its_options() -> None:
    process = Process("p", saga(charge), takes=Order)

    assert node(process, "charge") == Task(
        id="charge",
        within="saga-1",
        handler="charge",
        needs=("order_id", "amount"),
        may=("note",),
        into="receipt",
        retry=Backoff(5, first_ms=2_000, never=(f"{__name__}:Declined", "builtins:ValueError")),
        timeout_ms=30_000,
        undo=UndoTask(handler="refund", needs=("receipt",), retry=Backoff(3), timeout_ms=5_000),
    )


def test_further_options_are_handed_on() -> None:
    @task(name="bill it", on_failure="fail", isolation="", lane="printers")
    def bill() -> None: ...

    process = Process("p", bill)

    assert node(process, "bill it") == Task(id="bill it", handler="bill it", on_failure="fail", lane="printers")


def test_a_bare_task_is_tried_once_and_its_undo_too() -> None:
    @task
    def reserve() -> str:
        return "seat"

    @reserve.undo
    def release(result: str) -> None: ...

    process = Process("p", saga(reserve))

    assert node(process, "reserve").retry == ONCE
    assert node(process, "reserve").undo == UndoTask(handler="release", needs=("result",))


def test_one_exception_class_need_not_stand_in_a_tuple() -> None:
    assert Retry(2, never=Declined).backoff.never == (f"{__name__}:Declined",)


def test_handlers_are_bound_by_name_with_the_types_of_their_parameters() -> None:
    process = Process("p", saga(charge), takes=Order)

    handler = process.handlers["charge"]

    assert sorted(process.handlers) == ["charge", "refund"]
    assert handler.function is charge.function
    assert handler.types == {"order_id": str, "amount": int, "note": str}
    assert (handler.context, handler.connection, handler.is_async) == ("ctx", "", False)
    assert handler.reference == f"{__name__}:charge"


def test_the_context_is_found_by_its_type_whatever_the_parameter_is_called() -> None:
    @task
    def by_type(me: Context) -> None: ...

    @task
    def by_optional_type(me: Context | None = None) -> None: ...

    @task
    def by_name(ctx) -> None: ...  # type: ignore[no-untyped-def]

    @task
    def by_word(me: LateContext) -> None: ...

    by_word.function.__annotations__["me"] = "handlers.Context"  # As if it were imported for type checkers only.
    process = Process("p", by_type, by_optional_type, by_name, by_word)

    assert [handler.context for handler in process.handlers.values()] == ["me", "me", "ctx", "me"]
    assert [handler.types for handler in process.handlers.values()] == [{}, {}, {}, {}]


def test_a_transactional_task_is_lent_the_connection() -> None:
    @task(transactional=True)
    def by_type(db: sqlite3.Connection, order_id: str) -> None: ...

    @task(transactional=True)
    def by_name(connection: Any, order_id: str) -> None: ...

    process = Process("p", by_type, by_name, takes=Order)

    assert [handler.connection for handler in process.handlers.values()] == ["db", "connection"]
    assert node(process, "by_type").needs == ("order_id",)
    assert node(process, "by_type").transactional


def test_annotations_may_name_classes_of_the_function_around() -> None:
    @attrs.frozen
    class Local:
        x: int

    @task
    def use(local: Local) -> None: ...

    process = Process("p", use, takes={"local": Local})

    assert process.handlers["use"].types == {"local": Local}


def test_a_wrapped_function_keeps_its_parameters() -> None:
    def loudly(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**given: Any) -> Any:
            return function(**given)

        return wrapper

    @task
    @loudly
    def say(order_id: str) -> None: ...

    assert node(Process("p", say, takes=Order), "say").needs == ("order_id",)


# --- inputs and the result --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class AsDataclass:
    order_id: str
    amount: int = 5


class AsStruct(msgspec.Struct):
    order_id: str
    amount: int = 5


@attrs.frozen
class AsAttrs:
    order_id: str
    amount: int = 5


@pytest.mark.parametrize("takes", [AsAttrs, AsDataclass, AsStruct, {"order_id": str, "amount": (int, 5)}])
def test_the_fields_of_what_a_process_takes_are_its_first_variables(takes: Any) -> None:
    process = Process("p", ship, takes=takes)

    assert [attrs.astuple(given) for given in process.definition.inputs] == [
        ("order_id", "str", None),
        ("amount", "int", "5"),
    ]
    assert process.encode_input({"order_id": "7"}) == {"order_id": '"7"', "amount": "5"}
    assert process.encode_input({"order_id": "7", "amount": 6}) == {"order_id": '"7"', "amount": "6"}


@pytest.mark.parametrize("takes", [AsAttrs, AsDataclass, AsStruct])
def test_an_object_of_the_class_is_taken_as_it_is(takes: Any) -> None:
    process: Process[Any, None] = Process("p", ship, takes=takes)

    assert process.encode_input(takes("7")) == {"order_id": '"7"', "amount": "5"}


def test_a_bad_input_names_every_field_that_does_not_fit() -> None:
    process = Process("p", ship, takes=Order)

    with pytest.raises(BadInput) as refusal:
        process.encode_input({"order_id": 7, "amonut": 40})

    assert str(refusal.value).splitlines() == [
        "p cannot start; its input does not fit:",
        "  order_id: Expected `str`, got `int`; the value must fit str",
        "  amonut is unknown: did you mean amount?",
        "  amount is missing (int)",
    ]


def test_an_object_of_the_class_is_checked_too() -> None:
    wrong: Any = 7

    with pytest.raises(BadInput, match="order_id: Expected `str`, got `int`"):
        Process("p", takes=Order).encode_input(Order(wrong, 40))


def test_something_else_is_no_input() -> None:
    wrong: Any = [1, 2]

    with pytest.raises(BadInput, match="p takes Order or a mapping, not list"):
        Process("p", takes=Order).encode_input(wrong)


def test_the_class_itself_has_the_last_word_on_a_mapping() -> None:
    def doubled(given: int) -> int:
        return given * 2

    @attrs.frozen
    class Positive:
        amount: int = attrs.field(converter=doubled)

        @amount.validator
        def _check(self, _attribute: object, value: int) -> None:
            if value < 0:
                raise ValueError("below nothing")

    process = Process("p", takes=Positive)

    assert process.encode_input({"amount": 2}) == {"amount": "4"}
    with pytest.raises(BadInput, match="Positive refused its input"):
        process.encode_input({"amount": -1})


def test_a_default_that_is_made_anew_is_no_part_of_the_definition() -> None:
    made = iter(range(10))

    @attrs.frozen
    class Numbered:
        number: int = attrs.field(factory=lambda: next(made))
        tags: list[str] = attrs.field(factory=list)

    process = Process("p", takes=Numbered)

    assert [given.default for given in process.definition.inputs] == [None, "[]"]
    assert process.encode_input() == {"number": "0", "tags": "[]"}
    assert process.encode_input() == {"number": "1", "tags": "[]"}


@pytest.mark.parametrize("takes", [dict, dict[str, Any], Any])
def test_open_inputs_are_taken_as_they_come(takes: Any) -> None:
    process: Process[Any, None] = Process("p", ship, when("anything > 3", a), takes=takes)

    assert process.definition.open_inputs
    assert process.encode_input({"order_id": "7", "more": [1]}) == {"order_id": '"7"', "more": "[1]"}


def test_a_process_that_takes_nothing_is_given_nothing() -> None:
    process = Process("p", a)

    assert process.encode_input() == {}
    assert process.encode_input({}) == {}
    with pytest.raises(BadInput, match="x is unknown: it takes nothing"):
        process.encode_input({"x": 1})


def test_a_value_that_cannot_be_stored_is_a_bad_input() -> None:
    with pytest.raises(BadInput, match="amount: NaN is not JSON"):
        Process("p", takes={"amount": float}).encode_input({"amount": float("nan")})


def test_the_result_is_what_its_task_gives() -> None:
    process = Process("p", charge_only, takes=Order, gives=charge_only)

    assert process.definition.gives == "receipt"
    assert process.decode_result('{"id":"r-1"}') == Receipt("r-1")
    with pytest.raises(BadValue, match="the result of p"):
        process.decode_result("5")


@task(into="receipt")
def charge_only(order_id: str) -> Receipt:
    return Receipt(order_id)


def test_a_task_without_into_gives_the_result_under_its_own_name() -> None:
    process = Process("p", ship, takes=Order, gives=ship)
    elsewhere = Process("p", ship, takes=Order)

    assert (process.definition.gives, node(process, "ship").into) == ("ship", "ship")
    assert node(elsewhere, "ship").into == ""


def test_a_result_may_be_a_variable_which_need_not_be_there_in_the_end() -> None:
    process = Process("p", when("vip", charge_only), takes=Order, gives="receipt")

    assert process.decode_result('{"id":"r-1"}') == Receipt("r-1")
    assert process.decode_result("null") is None


def test_a_process_without_a_result_gives_none() -> None:
    assert Process("p", a).decode_result("null") is None


def test_type_checkers_know_what_a_process_takes_and_gives() -> None:
    @task
    async def weigh(order_id: str) -> int:
        return 5

    assert_type(Process("p", ship, takes=Order, gives=ship), Process[Order, str])
    assert_type(Process("p", charge_only, takes=Order, gives=charge_only), Process[Order, Receipt])
    assert_type(Process("p", ship, takes=Order), Process[Order, None])
    assert_type(Process("p", charge_only, takes=Order, gives="receipt"), Process[Order, Any])
    assert_type(Process("p", ship, takes=dict[str, Any], gives=ship), Process[dict[str, Any], str])
    assert_type(Process("p", weigh, takes=Order, gives=weigh), Process[Order, int])
    assert_type(charge("7", 1, Context("", "", "", 1)), Receipt)
    assert isinstance(charge, UserTask)


# --- at the door ------------------------------------------------------------------------------------------------------


class Shop:
    def sell(self, order_id: str) -> None: ...


def anywhere(order_id: str) -> None: ...


def everything(**given: Any) -> None: ...


def stream() -> Any:
    yield 1


# What type checkers would refuse as well must be refused by ourselves too.
Loose: Any = Process
loose: Any = SimpleNamespace(task=task, Retry=Retry, ship=ship, charge=charge, **vars(sys.modules["understudy.steps"]))


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: loose.task(lambda order_id: None), "a lambda has no name"),
        (lambda: loose.task(Shop.sell), "a method cannot be a task"),
        (lambda: loose.task(Shop().sell), "a method cannot be a task"),
        (lambda: loose.task(object()), "is not a function"),
        (lambda: loose.task("charge"), "did you mean name='charge'?"),
        (lambda: loose.task(charge), "charge is a task already"),
        (lambda: loose.task(everything), "takes `**given: 'Any'`"),
        (lambda: loose.task(stream), "stream is a generator"),
        (lambda: loose.task(into="not an identifier")(anywhere), "into='not an identifier' is no name"),
        (lambda: loose.task(into="class")(anywhere), "into='class' is no name"),
        (lambda: loose.task(name="")(task(anywhere)), "anywhere is a task already"),
        (lambda: loose.task(name=5)(anywhere), "name must be a string"),
        (lambda: loose.task(lane="")(anywhere), "lane must not be empty"),
        (lambda: loose.task(timeout="soon")(anywhere), "'soon' is no duration"),
        (lambda: loose.task(timeout="0s")(anywhere), "must be at least 1 ms"),
        (lambda: loose.task(retry=5)(anywhere), "write retry=Retry(5)"),
        (lambda: loose.task(on_failure="panic")(anywhere), "on_failure is 'incident' or 'fail', not 'panic'"),
        (lambda: loose.task(isolation="thread")(anywhere), "isolation is 'process', not 'thread'"),
        (lambda: loose.task(transactional=True, lane="gpu")(anywhere), "a transactional task runs here"),
        (lambda: loose.Retry(0), "attempts must be 1 or more, not 0"),
        (lambda: loose.Retry("3"), "attempts must be 1 or more, not '3'"),
        (lambda: loose.Retry(2, factor=0), "factor must be 1 or more"),
        (lambda: loose.Retry(2, jitter=2), "jitter must be a share from 0 to 1"),
        (lambda: loose.Retry(2, first="2h"), "the first wait (2h) is longer than the longest (1h)"),
        (lambda: loose.Retry(2, first="x"), "first: 'x' is no duration"),
        (lambda: loose.Retry(2, never=("Declined",)), "'Declined', which is not an exception class"),
        (lambda: loose.charge.undo(anywhere), "charge has an undo already: refund"),
        (lambda: loose.ship.undo(lambda: None), "a lambda has no name"),
    ],
)
def test_a_task_that_cannot_be_is_refused_with_its_likely_cause(build: Callable[[], object], told: str) -> None:
    assert told in refused(build)


def test_an_isolated_task_must_be_importable() -> None:
    def inner() -> None: ...

    assert "no other process can import it" in refused(lambda: loose.task(isolation="process")(inner))


def test_a_transactional_task_is_not_async() -> None:
    async def inner(connection: Any) -> None: ...

    assert "the connection is lent to one thread" in refused(lambda: loose.task(transactional=True)(inner))


async def coroutine_function() -> None: ...


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: loose.parallel(ship("7"), a), "did you call a task? Pass the task itself"),
        (lambda: loose.parallel(a(), b), "None is not a step"),
        (lambda: loose.saga(coroutine_function()), "did you call a task?"),
        (lambda: loose.saga(anywhere), "put @task above it"),
        (lambda: loose.saga(charge, refund), "refund is the undo of charge, not a step"),
        (lambda: Loose("p", end), "call it"),
        (lambda: loose.sequence(a, [b, 5]), "5 is not a step"),
        (lambda: loose.sequence(a, Process("p")), "a process starts another from a task"),
        (lambda: loose.sequence(a, "amount > 5"), "a condition belongs into when('amount > 5', ...)"),
        (lambda: loose.when(a, b), "condition must be an expression as text, not a"),
        (lambda: loose.when("", b), "condition must be an expression as text"),
        (lambda: loose.choose(a, b), "write each branch as a pair"),
        (lambda: loose.choose(("x", a, b)), "write each branch as a pair"),
        (lambda: loose.repeat(a), "it needs either until= or whilst="),
        (lambda: loose.repeat(a, until="x", whilst="y"), "it needs either until= or whilst="),
        (lambda: loose.repeat([], until="x"), "there is nothing to repeat"),
        (lambda: loose.sleep(), "it needs one of: a duration, after=, until="),
        (lambda: loose.sleep("3d", until="x"), "it needs one of"),
        (lambda: loose.sleep("patience"), "for the value of a variable write sleep(after='patience')"),
        (lambda: loose.sleep(after="3d"), "write sleep('3d')"),
        (lambda: loose.sleep(until="2030-01-02T00:00:00Z"), "write sleep(until=datetime.fromisoformat("),
        (lambda: loose.sleep(until=datetime(2030, 1, 2)), "has no time zone"),  # noqa: DTZ001 - that is the point
        (lambda: loose.wait(""), "the message must not be empty"),
        (lambda: loose.wait("paid", into="a b"), "into='a b' is no name"),
        (lambda: loose.wait("paid", key=7), "key must be an expression as text, not 7"),
        (lambda: loose.wait("paid", gives="Delivery"), "give the class itself: gives=Delivery"),
        (lambda: loose.wait("paid", timeout="later"), "'later' is no duration"),
        (lambda: loose.throw("paid", ttl="never"), "'never' is no duration"),
        (lambda: loose.throw("paid", payload={"a": 1}), "payload must be an expression as text"),
        (lambda: Loose(charge, ship), "the first argument is the process's name, not charge"),
        (lambda: Loose("", ship), "the name of a process must not be empty"),
        (lambda: Loose("p", takes=int), "takes=<class 'int'> has no fields"),
        (lambda: Loose("p", takes={"a": 5}), "takes['a'] is 5, which is not a type"),
        (lambda: Loose("p", takes={"a b": int}), "takes='a b' is no name"),
        (lambda: Loose("p", takes={"a": (int, "x")}), "the default of a does not fit"),
        (lambda: Loose("p", gives=anywhere), "give a task (gives=ship)"),
    ],
)
def test_a_step_that_cannot_be_is_refused_with_its_likely_cause(build: Callable[[], object], told: str) -> None:
    assert told in refused(build)


def test_a_refusal_names_the_line_of_the_mistake() -> None:
    with pytest.raises(InvalidDefinition) as refusal:
        wait("paid", into="a b")

    (problem,) = refusal.value.problems
    assert problem.code == "bad_variable"
    assert problem.place.endswith(f"{Path(__file__).name}:{line_of('wait(')}")


# --- problems of the whole --------------------------------------------------------------------------------------------


def test_two_functions_of_one_name_cannot_be_told_apart() -> None:
    @task(name="ship")
    def other_ship() -> None: ...

    with pytest.raises(InvalidDefinition) as refusal:
        Process("p", ship, other_ship, takes=Order)

    (problem,) = refusal.value.problems
    assert problem.code == "handler_twice"
    assert "give one of them another name" in problem.hint


def test_two_tasks_may_share_one_function() -> None:
    patient = task(retry=Retry(5))(ship.function)

    assert len(Process("p", ship, patient, takes=Order).handlers) == 1


def test_an_annotation_that_cannot_be_found_is_a_problem() -> None:
    @task
    def use(given: OnlyForTypeCheckers[str, str]) -> None: ...

    told = refused(lambda: Process("p", use, takes=dict))

    assert "unread_annotation" in told
    assert "not only for type checkers" in told


def test_a_type_that_cannot_be_stored_is_a_problem_before_anything_runs() -> None:
    @task
    def use(shop: Shop, db: sqlite3.Connection) -> Shop:
        return shop

    told = refused(lambda: Process("p", use, takes=dict))

    assert "`use` takes shop as Shop, which cannot be made from JSON" in told
    assert "@task(transactional=True) lends it the connection" in told
    assert "`use` gives Shop, which cannot be stored as JSON" in told


def test_a_transactional_task_needs_a_parameter_for_the_connection() -> None:
    @task(transactional=True)
    def book(order_id: str) -> None: ...

    assert "no_connection" in refused(lambda: Process("p", book, takes=Order))


def test_a_step_behind_an_end_is_a_problem() -> None:
    assert "no way leads from the start to a" in refused(lambda: Process("p", end(), a))


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (lambda: parallel(a), "fork_with_one_branch"),
        (lambda: choose(otherwise=a), "choice_without_edges"),
        (lambda: wait("paid", late=a), "late_without_timeout"),
        (lambda: when("amount >", a), "bad_expression"),
        (lambda: charge, "undo_without_saga"),
    ],
)
def test_what_only_the_graph_can_tell_is_told_by_its_rules(build: Callable[[], Any], code: str) -> None:
    with pytest.raises(InvalidDefinition) as refusal:
        Process("p", build(), takes=Order)

    assert [problem.code for problem in refusal.value.problems] == [code]


def test_all_problems_of_all_sorts_are_told_at_once_each_with_its_line() -> None:
    @task
    def invoice(reciept: Receipt) -> None: ...

    with pytest.raises(InvalidDefinition) as refusal:
        Process(
            "checkout",
            when("amount >", a),
            charge,
            parallel(invoice),
            wait("delivered", key="order", late=b),
            takes=Order,
            gives="recept",
        )

    at = line_of("def invoice(reciept") - 1
    here, there, file = line_of('"checkout",'), line_of('@task(into="receipt", retry'), Path(__file__).name
    assert [(problem.code, problem.place.rpartition("/")[2]) for problem in refusal.value.problems] == [
        ("bad_expression", f"{file}:{here + 1}"),
        ("fork_with_one_branch", f"{file}:{here + 3}"),
        ("undo_without_saga", f"{file}:{there}"),
        ("late_without_timeout", f"{file}:{here + 4}"),
        ("unknown_result", f"{file}:{here - 1}"),
        ("missing_variable", f"{file}:{at}"),
        ("missing_variable", f"{file}:{here + 4}"),
    ]
    assert "'checkout' has 7 problem(s):" in str(refusal.value)
    assert "`invoice` needs reciept: nothing before it gives one" in str(refusal.value)
    assert "did you mean receipt?" in str(refusal.value)
