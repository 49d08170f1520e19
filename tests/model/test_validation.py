"""Every rule for definitions, each broken alone in a graph that is otherwise sound."""

from __future__ import annotations

import re

import attrs
import pytest

from understudy.model.definition import Definition, Edge, Graph, Input, Node
from understudy.model.errors import Problem
from understudy.model.kinds import (
    Choice,
    End,
    Fork,
    Join,
    Merge,
    Receive,
    Saga,
    Start,
    Task,
    Terminate,
    Throw,
    Timer,
    UndoTask,
)
from understudy.model.retry import Backoff
from understudy.model.validation import problems


def drawn(*lines: str, nodes: tuple[Node, ...] = (), inputs: tuple[Input, ...] = (), gives: str = "") -> Definition:
    """A definition from lines such as "choice -> a [x > 1]"; the rest are a start, an end or tasks."""
    known = {node.id: node for node in nodes}
    edges = []
    for line in lines:
        source, target, mark = re.fullmatch(r"(.*?) -> (.*?)(?: \[(.*)\])?", line).groups()  # type: ignore[union-attr]
        flags = {"else": {"is_default": True}, "late": {"is_late": True}, None: {}}.get(mark, {"condition": mark})
        edges.append(Edge(id=line, source=source, target=target, **flags))
        for name in (source, target):
            known.setdefault(name, usual(name))
    return Definition(name="p", nodes=tuple(known.values()), edges=tuple(edges), inputs=inputs, gives=gives)


def usual(name: str) -> Node:
    if name in ("start", "end"):
        return Start(id=name) if name == "start" else End(id=name)
    return Task(id=name, handler=name)


def with_node(node: Node) -> Definition:
    return drawn(f"start -> {node.id}", f"{node.id} -> end", nodes=(node,))


def found(definition: Definition) -> list[str]:
    return [f"{problem.code} {problem.node}".strip() for problem in problems(definition)]


def only(definition: Definition) -> Problem:
    (problem,) = problems(definition)
    return problem


SAGA = (
    Saga(id="saga"),
    Start(id="saga/start", within="saga"),
    Task(id="charge", within="saga", handler="charge", undo=UndoTask(handler="refund")),
    End(id="saga/end", within="saga"),
)
SAGA_LINES = ("start -> saga", "saga -> end", "saga/start -> charge", "charge -> saga/end")


# --- what is sound ----------------------------------------------------------------------------------------------------


def test_a_definition_with_every_kind_of_node_has_no_problem_and_can_be_prepared() -> None:
    definition = drawn(
        *SAGA_LINES[:1],
        *SAGA_LINES[2:],
        "saga -> fork",
        "fork -> paid",
        "fork -> nap",
        "paid -> told",
        "paid -> dun [late]",
        "told -> merge",
        "dun -> merge",
        "merge -> join",
        "nap -> join",
        "join -> choice",
        "choice -> stop [amount > 5]",
        "choice -> end [else]",
        nodes=(
            *SAGA,
            Fork(id="fork"),
            Receive(id="paid", message="paid", key="order", into="payment", timeout_ms=5),
            Throw(id="told", message="told", payload="{'order': order}", ttl_ms=5),
            Timer(id="nap", after="'3d'"),
            Merge(id="merge"),
            Join(id="join"),
            Choice(id="choice"),
            Terminate(id="stop"),
        ),
        inputs=(Input(name="order"), Input(name="amount")),
        gives="payment",
    )

    assert problems(definition) == []
    assert Graph(definition).starts == {"": "start", "saga": "saga/start"}


def test_a_fork_may_be_entered_from_several_sides() -> None:
    definition = drawn(
        "start -> choice",
        "choice -> fork [x]",
        "choice -> fork [else]",
        "fork -> a",
        "fork -> b",
        "a -> join",
        "b -> join",
        "join -> end",
        nodes=(Choice(id="choice"), Fork(id="fork"), Join(id="join")),
    )

    assert found(definition) == []


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "node",
    [
        Task(id="a", handler=""),
        Task(id="a", handler="charge", lane=""),
        Task(id="a", handler="line\nbreak"),
        Receive(id="a", message=""),
        Throw(id="a", message="\0"),
    ],
)
def test_a_name_that_cannot_be_stored_is_bad(node: Node) -> None:
    assert found(with_node(node)) == ["bad_name a"]


def test_a_process_and_a_node_need_names() -> None:
    assert found(attrs.evolve(drawn("start -> end"), name="")) == ["bad_name"]
    assert "bad_name" in found(with_node(Task(id="", handler="a")))


@pytest.mark.parametrize(
    "node",
    [
        Task(id="a", handler="a", into="not an identifier"),
        Task(id="a", handler="a", needs=("class",)),
        Task(id="a", handler="a", may=("__dunder",)),
        Receive(id="a", message="m", into="1st"),
    ],
)
def test_a_variable_is_named_like_a_parameter(node: Node) -> None:
    assert found(with_node(node)) == ["bad_variable a"]


def test_inputs_and_the_result_are_variables_too() -> None:
    definition = drawn("start -> end", inputs=(Input(name="a-b"),), gives="a-b")

    assert found(definition) == ["bad_variable", "bad_variable"]


def test_two_nodes_of_one_name_are_a_problem() -> None:
    definition = drawn("start -> a", "a -> end")
    doubled = attrs.evolve(definition, nodes=(*definition.nodes, Task(id="a", handler="other")))

    assert found(doubled) == ["duplicate_node a"]


def test_two_edges_of_one_name_are_a_problem_and_two_between_the_same_nodes_are_none() -> None:
    definition = drawn("start -> choice", "choice -> end [x]", "choice -> end [else]", nodes=(Choice(id="choice"),))
    first, *others = definition.edges
    doubled = attrs.evolve(definition, edges=(first, *(attrs.evolve(edge, id=first.id) for edge in others)))

    assert found(definition) == []
    assert found(doubled) == ["duplicate_edge start"]


def test_two_inputs_of_one_name_are_a_problem() -> None:
    assert found(drawn("start -> end", inputs=(Input(name="a"), Input(name="a")))) == ["duplicate_input"]


def test_a_result_that_nothing_gives_is_a_problem_with_the_name_that_was_probably_meant() -> None:
    problem = only(drawn("start -> end", inputs=(Input(name="receipt"),), gives="reciept"))

    assert problem.code == "unknown_result"
    assert problem.hint == "did you mean receipt?"


def test_a_result_may_be_an_open_input() -> None:
    assert found(attrs.evolve(drawn("start -> end", gives="anything"), open_inputs=True)) == []


# --- scopes and edges -------------------------------------------------------------------------------------------------


def test_the_process_and_each_scope_need_one_start() -> None:
    definition = drawn(
        "a -> end", nodes=(Saga(id="saga"), End(id="saga/end", within="saga"), Task(id="a", handler="a"))
    )

    assert found(definition) == ["no_start", "no_start saga"]


def test_several_starts_are_a_problem() -> None:
    definition = drawn("start -> end", "other -> end", nodes=(Start(id="other"),))

    assert found(definition) == ["many_starts"]


def test_the_process_and_each_scope_need_an_end() -> None:
    definition = drawn("start -> saga", nodes=(*SAGA[:2],))

    assert found(definition) == ["no_end", "no_end saga"]


def test_an_edge_to_a_node_that_does_not_exist_is_told_once() -> None:
    definition = attrs.evolve(drawn("start -> ship"), nodes=(Start(id="start"), End(id="end")))

    assert found(definition) == ["dangling_edge start", "orphan end"]


def test_an_edge_from_a_node_that_does_not_exist_is_a_problem() -> None:
    definition = drawn("start -> end")
    stray = attrs.evolve(definition, edges=(*definition.edges, Edge(id="x", source="statr", target="end")))

    assert only(stray).code == "dangling_edge"
    assert only(stray).hint == "did you mean start?"


def test_an_edge_from_a_node_to_itself_is_a_problem() -> None:
    definition = drawn("start -> choice", "choice -> choice [x]", "choice -> end [else]", nodes=(Choice(id="choice"),))

    assert found(definition) == ["self_loop choice"]


def test_an_edge_may_not_cross_the_border_of_a_scope() -> None:
    definition = drawn(*SAGA_LINES[:3], "charge -> end", nodes=SAGA[:3])

    assert "edge_crosses_scope charge" in found(definition)


def test_a_node_within_something_that_is_no_scope_is_a_problem() -> None:
    definition = drawn("start -> end", nodes=(Task(id="a", handler="a", within="nowhere"),))

    assert found(definition) == ["unknown_scope a"]


def test_a_scope_within_itself_is_a_problem() -> None:
    circle = (Saga(id="a", within="b"), Saga(id="b", within="a"))

    assert {"scope_in_itself a", "scope_in_itself b"} <= set(found(drawn("start -> end", nodes=circle)))


def test_no_edge_leaves_an_end_or_enters_a_start() -> None:
    definition = drawn("start -> a", "a -> end", "end -> start")

    assert found(definition) == ["edge_from_end end", "edge_to_start end"]


def test_only_a_choice_has_conditions_and_a_default() -> None:
    assert found(drawn("start -> a [x > 1]", "a -> end")) == ["condition_outside_choice start"]
    assert found(drawn("start -> a [else]", "a -> end")) == ["default_outside_choice start"]


def test_only_a_wait_for_a_message_can_be_late() -> None:
    assert found(drawn("start -> a", "a -> end", "a -> end [late]")) == ["late_outside_wait a"]


def test_a_bad_expression_is_reported_with_its_place_and_what_is_wrong_in_it() -> None:
    definition = drawn(
        "start -> choice", "choice -> end [amount >]", "choice -> end [else]", nodes=(Choice(id="choice"),)
    )
    placed = attrs.evolve(definition, places={"choice": "orders.py:7"})

    problem = only(placed)

    assert (problem.code, problem.place) == ("bad_expression", "orders.py:7")
    assert "amount >" in problem.message


@pytest.mark.parametrize(
    "node",
    [
        Receive(id="a", message="m", key="os.system("),
        Throw(id="a", message="m", payload="{order}"),
        Timer(id="a", until="lambda: 1"),
    ],
)
def test_the_expressions_of_a_node_are_checked(node: Node) -> None:
    assert found(with_node(node)) == ["bad_expression a"]


# --- gateways ---------------------------------------------------------------------------------------------------------


def test_a_choice_without_conditions_is_a_problem() -> None:
    assert found(drawn("start -> c", "c -> end [else]", nodes=(Choice(id="c"),))) == ["choice_without_edges c"]


def test_a_choice_has_at_most_one_default() -> None:
    definition = drawn(
        "start -> c", "c -> end [x]", "c -> a [else]", "c -> end [else]", "a -> end", nodes=(Choice(id="c"),)
    )

    assert found(definition) == ["many_defaults c"]


def test_a_default_has_no_condition() -> None:
    definition = drawn("start -> c", "c -> a [x]", "c -> end [y]", "a -> end", nodes=(Choice(id="c"),))
    edges = tuple(attrs.evolve(edge, is_default=edge.condition == "y") for edge in definition.edges)

    assert found(attrs.evolve(definition, edges=edges)) == ["default_has_condition c"]


def test_an_edge_of_a_choice_that_would_never_be_taken_is_a_problem() -> None:
    assert found(drawn("start -> c", "c -> a [x]", "c -> end", "a -> end", nodes=(Choice(id="c"),))) == [
        "edge_without_condition c"
    ]


def test_a_fork_with_one_branch_is_a_problem() -> None:
    assert found(drawn("start -> f", "f -> end", nodes=(Fork(id="f"),))) == ["fork_with_one_branch f"]


def test_a_join_with_one_input_is_a_problem() -> None:
    assert found(drawn("start -> j", "j -> end", nodes=(Join(id="j"),))) == ["join_with_one_input j"]


def test_a_step_with_two_ways_on_would_take_only_the_first() -> None:
    assert found(drawn("start -> a", "a -> b", "a -> end", "b -> end")) == ["many_ways_on a"]


# --- tasks and waits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "retry",
    [
        Backoff(0),
        Backoff(2, first_ms=-1),
        Backoff(2, factor=0.5),
        Backoff(2, jitter=1.5),
        Backoff(2, factor=float("nan")),
    ],
)
def test_a_retry_policy_that_makes_no_sense_is_a_problem(retry: Backoff) -> None:
    assert found(with_node(Task(id="a", handler="a", retry=retry))) == ["bad_retry a"]


@pytest.mark.parametrize(
    "node",
    [
        Task(id="a", handler="a", timeout_ms=0),
        Receive(id="a", message="m", timeout_ms=-1),
        Throw(id="a", message="m", ttl_ms=0),
    ],
)
def test_a_timeout_is_more_than_nothing(node: Node) -> None:
    assert found(with_node(node)) == ["bad_timeout a"]


@pytest.mark.parametrize(
    "node",
    [
        Task(id="a", handler="a", on_failure="panic"),
        Task(id="a", handler="a", isolation="thread"),
        Task(id="a", handler="a", transactional=True, isolation="process"),
        Task(id="a", handler="a", transactional=True, lane="gpu"),
    ],
)
def test_an_option_that_does_not_exist_is_a_problem(node: Node) -> None:
    assert found(with_node(node)) == ["bad_option a"]


def test_an_undo_outside_any_saga_would_never_run() -> None:
    assert found(with_node(Task(id="a", handler="a", undo=UndoTask(handler="b")))) == ["undo_without_saga a"]
    assert found(drawn(*SAGA_LINES, nodes=SAGA)) == []


def test_the_undo_has_a_policy_of_its_own() -> None:
    charge = attrs.evolve(SAGA[2], undo=UndoTask(handler="refund", retry=Backoff(0), timeout_ms=0))

    definition = drawn(*SAGA_LINES, nodes=(*SAGA[:2], charge, SAGA[3]))

    assert found(definition) == ["bad_retry charge", "bad_timeout charge"]


def test_a_way_for_being_late_needs_a_timeout() -> None:
    definition = drawn(
        "start -> paid", "paid -> end", "paid -> end [late]", nodes=(Receive(id="paid", message="paid"),)
    )

    assert found(definition) == ["late_without_timeout paid"]


def test_a_wait_can_be_late_in_one_way_only() -> None:
    wait = Receive(id="paid", message="paid", timeout_ms=5)

    definition = drawn(
        "start -> paid", "paid -> end", "paid -> a [late]", "paid -> end [late]", "a -> end", nodes=(wait,)
    )

    assert found(definition) == ["many_late paid"]


@pytest.mark.parametrize(
    "timer",
    [
        Timer(id="a"),
        Timer(id="a", after="x", until="y"),
        Timer(id="a", after="'3 dayz'"),
        Timer(id="a", until="2026-11-18"),
        Timer(id="a", until="'2026-11-18T10:00:00'"),
    ],
)
def test_a_timer_needs_one_time_that_can_be_read(timer: Timer) -> None:
    assert found(with_node(timer)) == ["bad_timer a"]


# --- ways -------------------------------------------------------------------------------------------------------------


def test_of_what_cannot_be_reached_only_the_first_is_told() -> None:
    assert found(drawn("start -> end", "a -> b", "b -> end")) == ["orphan a"]


def test_a_circle_that_cannot_be_reached_is_told() -> None:
    assert found(drawn("start -> end", "a -> b", "b -> a")) == ["orphan a", "orphan b"]


def test_a_step_without_a_way_to_an_end_is_a_problem() -> None:
    definition = drawn("start -> c", "c -> a [x]", "c -> end [else]", "a -> b", nodes=(Choice(id="c"),))

    assert found(definition) == ["no_way_out b"]


def test_a_loop_without_a_way_out_is_told_once_with_all_its_nodes() -> None:
    definition = drawn("start -> c", "c -> a [x]", "c -> end [else]", "a -> b", "b -> a", nodes=(Choice(id="c"),))

    assert only(definition).message == "no way leads from a, b to an end"


def test_a_scope_is_searched_for_itself() -> None:
    definition = drawn(*SAGA_LINES, "lost -> saga/end", nodes=(*SAGA, Task(id="lost", within="saga", handler="lost")))

    assert found(definition) == ["orphan lost"]


# --- all at once ------------------------------------------------------------------------------------------------------


def test_all_problems_are_told_at_once_each_with_the_authors_line() -> None:
    definition = drawn(
        "start -> fork",
        "fork -> charge",
        "charge -> choice",
        "choice -> end [amount >]",
        nodes=(Fork(id="fork"), Choice(id="choice"), Task(id="charge", handler="charge", timeout_ms=0)),
        gives="receipt",
    )
    places = {"fork": "orders.py:3", "charge": "orders.py:4", "choice": "orders.py:5"}

    told = [f"{problem.place} {problem.code}".strip() for problem in problems(attrs.evolve(definition, places=places))]

    assert told == [
        "orders.py:5 bad_expression",
        "orders.py:3 fork_with_one_branch",
        "orders.py:4 bad_timeout",
        "unknown_result",
    ]
