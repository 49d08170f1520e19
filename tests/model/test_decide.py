"""The rules, one by one: small processes, played by hand without actors, a store or a clock."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.model import commands as c
from understudy.model import effects as fx
from understudy.model import events as e
from understudy.model.apply import fold
from understudy.model.decide import Decision, decide, error_of, outstanding
from understudy.model.definition import Definition, Edge, Graph, Node
from understudy.model.errors import AlreadyEnded, Conflict, Rejected, UnknownIncident, UnknownInstance
from understudy.model.instance import Fault, Instance, Token, facts
from understudy.model.invariants import Subject, examine
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
from understudy.model.states import Mode, Outcome, TokenStatus

KINDS: dict[str, type[Node]] = {
    "start": Start,
    "end": End,
    "terminate": Terminate,
    "choice": Choice,
    "fork": Fork,
    "join": Join,
    "merge": Merge,
    "saga": Saga,
}


def drawn(*lines: str, nodes: tuple[Node, ...] = (), gives: str = "") -> Graph:
    """A process from lines such as "choice -> a -> end [x > 1]"; the mark is of the first arrow.

    "saga/a" is the node a in the saga of that name. A node's kind is its name without digits; all others are tasks, and
    a task in a saga can be undone.
    """
    known = {node.id: node for node in nodes}
    edges: list[Edge] = []
    for line in lines:
        way, mark = re.fullmatch(r"(.*?)(?: \[(.*)\])?", line).groups()  # type: ignore[union-attr]
        names = way.split(" -> ")
        for name in names:
            known.setdefault(name, usual(name))
        flags = {"else": {"is_default": True}, "late": {"is_late": True}, None: {}}.get(mark, {"condition": mark})
        for number, (source, target) in enumerate(pairwise(names)):
            edges.append(Edge(id=f"{source}-{target}", source=source, target=target, **({} if number else flags)))
    return Graph(Definition(name="p", nodes=tuple(known.values()), edges=tuple(edges), gives=gives, open_inputs=True))


def usual(name: str) -> Node:
    within, _, own = name.rpartition("/")
    kind = KINDS.get(re.sub(r"\d+", "", own))
    return kind(id=name, within=within) if kind else task(name)


def task(name: str, **fields: Any) -> Task:
    within = name.rpartition("/")[0]
    fields.setdefault("undo", UndoTask(handler=f"undo {name}") if within else None)
    return Task(id=name, within=within, handler=name, **fields)


class Play:
    """One instance in our hands. After every command all invariants are asked."""

    def __init__(self, graph: Graph, **variables: str) -> None:
        self.graph = graph
        self.instance = Instance()
        self.history: list[e.Entry] = []
        self.now_ms = 1_000
        self.effects: list[fx.AnyEffect] = []
        self.tell(c.Start(at_ms=self.now_ms, id="i", given_digest="d", variables=variables))

    def tell(self, command: c.AnyCommand, *, go_on: bool = True) -> Decision:
        before = facts(self.instance)
        decision = decide(self.instance, self.graph, command, go_on=go_on)
        if decision.entry is None:
            assert facts(self.instance) == before
        else:
            self.history.append(decision.entry)
        self.effects = decision.effects
        subject = Subject(instance=self.instance, graph=self.graph, history=tuple(self.history))
        assert examine(subject) == []
        return decision

    # --- what comes in ---

    def complete(self, node: str, result: str = "null") -> Decision:
        token = self.attempt(node)
        return self.tell(c.CompleteTask(at_ms=self.now_ms, **named(token), result=result))

    def fail(self, node: str, message: str = "no", *types: str, code: str = "error") -> Decision:
        token = self.attempt(node)
        return self.tell(c.FailTask(at_ms=self.now_ms, **named(token), fault=Fault(code, message, types=types)))

    def fire(self, node: str, *, late_ms: int = 0) -> Decision:
        wait = next(w for w in self.instance.waits.values() if w.node == node and w.due_ms is not None)
        assert wait.due_ms is not None
        self.now_ms = wait.due_ms + late_ms
        return self.tell(c.FireTimer(at_ms=self.now_ms, wait=wait.id))

    def send(self, name: str, payload: str = "null", **fields: Any) -> Decision:
        return self.tell(c.Send(at_ms=self.now_ms, name=name, payload=payload, **fields))

    def resolve(self, how: str, node: str, **fields: Any) -> Decision:
        incident = next(i for i in self.instance.incidents.values() if i.node == node)
        return self.tell(c.Resolve(at_ms=self.now_ms, how=how, incident=incident.id, **fields))

    def cancel(self, *, undo: bool = True) -> Decision:
        return self.tell(c.Cancel(at_ms=self.now_ms, undo=undo, reason="changed my mind"))

    def pause(self) -> Decision:
        return self.tell(c.Pause(at_ms=self.now_ms))

    def resume(self) -> Decision:
        return self.tell(c.Resume(at_ms=self.now_ms))

    def crash(self, **recorded: str) -> Decision:
        """All that is left is the history; the next life recovers from it."""
        tasks = {self.attempt(node).task: result for node, result in recorded.items()}
        self.instance = fold(self.history)
        return self.tell(c.Recover(at_ms=self.now_ms, recorded=tasks))

    # --- what can be seen ---

    def attempt(self, node: str) -> Token:
        return next(token for token in self.executing if title(token) == node)

    @property
    def executing(self) -> list[Token]:
        return [token for token in self.instance.tokens.values() if token.status is TokenStatus.EXECUTING]

    @property
    def status(self) -> str:
        return self.instance.status.value

    @property
    def running(self) -> list[str]:
        """The steps that are out; an undo is "undo <step>"."""
        return sorted(title(token) for token in self.executing)

    @property
    def at(self) -> list[str]:
        return sorted(token.node for token in self.instance.tokens.values())

    @property
    def incidents(self) -> dict[str, str]:
        return {incident.node: incident.code for incident in self.instance.incidents.values()}

    @property
    def undone(self) -> list[str]:
        nodes: dict[int, str] = {}
        done: list[str] = []
        for event in self.events:
            if isinstance(event, e.UndoRecorded):
                nodes[event.undo] = event.node
            elif isinstance(event, e.UndoFinished) and event.how == "done":
                done.append(nodes[event.undo])
        return done

    @property
    def events(self) -> list[e.AnyEvent]:
        return [event for entry in self.history for event in entry.events]

    def value(self, name: str) -> str | None:
        return self.instance.lookup(0, name)

    @property
    def outcome(self) -> Outcome | None:
        return self.instance.outcome

    @property
    def reason(self) -> str:
        fault = error_of(self.instance)
        return fault.message if fault else ""


def title(token: Token) -> str:
    return f"undo {token.node}" if token.mode is Mode.COMPENSATION else token.node


def named(token: Token) -> dict[str, Any]:
    return {"token": token.id, "task": token.task, "attempt": token.attempt}


# --- sequences --------------------------------------------------------------------------------------------------------


def test_a_sequence_runs_one_step_after_the_other() -> None:
    play = Play(drawn("start -> a -> b -> end"))
    assert play.running == ["a"]

    play.complete("a")

    assert play.running == ["b"]
    assert play.complete("b").entry is not None
    assert play.outcome is Outcome.COMPLETED


def test_a_step_without_a_way_on_ends_its_token() -> None:
    play = Play(drawn("start -> a"))

    play.complete("a")

    assert play.outcome is Outcome.COMPLETED


def test_an_instance_gives_the_variable_that_its_definition_names() -> None:
    play = Play(drawn("start -> a -> end", nodes=(task("a", into="receipt"),), gives="receipt"))

    play.complete("a", '{"id":7}')

    assert play.instance.result == '{"id":7}'


def test_a_step_is_given_the_variables_it_names_and_no_others() -> None:
    play = Play(drawn("start -> a -> end", nodes=(task("a", needs=("x",), may=("y", "z")),)), x="1", z="3", other="4")

    (effect,) = outstanding(play.instance, play.graph)

    assert isinstance(effect, fx.RunTask)
    assert effect.given == {"x": "1", "z": "3"}


def test_a_step_whose_variable_is_missing_stops_and_can_be_skipped() -> None:
    play = Play(drawn("start -> a -> b -> end", nodes=(task("a", needs=("x",), into="y"),)))
    assert play.incidents == {"a": "missing_variable"}

    play.resolve("skip", "a", result="5")

    assert play.running == ["b"]
    assert play.value("y") == "5"


# --- choices ----------------------------------------------------------------------------------------------------------

CHOICE = drawn(
    "start -> choice", "choice -> a -> end [x > 1]", "choice -> b -> end [x > 0]", "choice -> c -> end [else]"
)


@pytest.mark.parametrize(("x", "taken"), [("2", "a"), ("1", "b"), ("0", "c")])
def test_a_choice_takes_the_first_edge_whose_condition_is_true_else_the_default(x: str, taken: str) -> None:
    play = Play(CHOICE, x=x)

    assert play.running == [taken]


def test_a_choice_with_no_true_branch_and_no_default_is_an_incident_that_can_be_skipped_to_a_branch() -> None:
    play = Play(drawn("start -> choice", "choice -> a -> end [x > 1]", "choice -> b -> end [x > 5]"), x="0")
    assert play.incidents == {"choice": "no_branch"}

    refused = play.resolve("skip", "choice")
    play.resolve("skip", "choice", to="b")

    assert isinstance(refused.refusal, Rejected)
    assert "one of: a, b" in str(refused.refusal)
    assert play.running == ["b"]


def test_a_condition_that_cannot_be_evaluated_is_an_incident_and_not_false() -> None:
    play = Play(CHOICE, x='"many"')

    assert play.incidents == {"choice": "expression"}


# --- forks and joins --------------------------------------------------------------------------------------------------

FORK_JOIN = drawn("start -> fork", "fork -> left -> join", "fork -> right -> join", "join -> last -> end")


def test_a_join_waits_for_every_branch() -> None:
    play = Play(FORK_JOIN)
    assert play.running == ["left", "right"]

    play.complete("right")
    assert play.running == ["left"]
    play.complete("left")

    assert play.running == ["last"]
    assert len(play.instance.tokens) == 1


@given(st.lists(st.sampled_from(["left", "right"])))
def test_a_join_fires_once_however_often_completions_are_redelivered(order: list[str]) -> None:
    play = Play(FORK_JOIN)
    tokens = {node: named(play.attempt(node)) for node in ("left", "right")}

    for node in order:
        play.tell(c.CompleteTask(at_ms=1_000, **tokens[node]))

    assert (play.running == ["last"]) == (set(order) == {"left", "right"})


def test_forks_nest() -> None:
    play = Play(
        drawn(
            "start -> fork1",
            "fork1 -> a -> join1",
            "fork1 -> fork2",
            "fork2 -> b -> join2",
            "fork2 -> c -> join2",
            "join2 -> join1",
            "join1 -> d -> end",
        )
    )

    for node in ("c", "a", "b"):
        play.complete(node)

    assert play.running == ["d"]


def test_a_fork_and_join_in_a_loop_join_once_in_every_round() -> None:
    play = Play(
        drawn(
            "start -> merge -> fork",
            "fork -> a -> join",
            "fork -> b -> join",
            "join -> choice",
            "choice -> merge [again]",
            "choice -> end [else]",
            nodes=(task("b", into="again"),),
        )
    )

    for again in ("true", "true", "false"):
        play.complete("b", again)
        play.complete("a")

    assert play.outcome is Outcome.COMPLETED
    assert sum(isinstance(event, e.TokenEnded) and event.how == "joined" for event in play.events) == 3


def test_a_join_leaves_surplus_tokens_for_its_next_activation() -> None:
    play = Play(
        drawn(
            "start -> fork",
            "fork -> a -> merge -> join",
            "fork -> b -> merge",
            "fork -> c -> merge2 -> join",
            "fork -> d -> merge2",
            "join -> after -> end",
        )
    )

    play.complete("a")
    play.complete("b")
    assert "after" not in play.running
    play.complete("c")
    assert play.running == ["after", "d"]
    play.crash()
    play.complete("d")

    assert play.running == ["after", "after"]
    play.complete("after")
    play.complete("after")
    assert play.outcome is Outcome.COMPLETED


# --- timers -----------------------------------------------------------------------------------------------------------


def test_a_timer_that_comes_early_is_armed_again_and_changes_nothing() -> None:
    play = Play(drawn("start -> wait -> end", nodes=(Timer(id="wait", after="'3s'"),)))
    assert play.effects == [fx.ArmTimer(2, 4_000)]

    decision = play.tell(c.FireTimer(at_ms=3_999, wait=2))

    assert decision.entry is None
    assert decision.effects == [fx.ArmTimer(2, 4_000)]


def test_a_timer_fires_when_it_is_due_and_its_repetition_changes_nothing() -> None:
    play = Play(drawn("start -> wait -> a -> end", nodes=(Timer(id="wait", until="'1970-01-01T00:01:00Z'"),)))
    wait = next(iter(play.instance.waits))

    play.fire("wait")
    again = play.tell(c.FireTimer(at_ms=play.now_ms, wait=wait))

    assert play.running == ["a"]
    assert again.entry is None


def test_a_timer_without_a_length_is_an_incident() -> None:
    play = Play(drawn("start -> wait -> end", nodes=(Timer(id="wait", after="x"),)), x='"soon"')

    assert play.incidents == {"wait": "expression"}


def test_a_timer_after_a_cancel_changes_nothing() -> None:
    play = Play(drawn("start -> wait -> end", nodes=(Timer(id="wait", after="'3s'"),)))
    wait = next(iter(play.instance.waits))

    play.cancel()

    assert play.tell(c.FireTimer(at_ms=9_000, wait=wait)).entry is None


# --- messages ---------------------------------------------------------------------------------------------------------

DELIVERED = Receive(id="wait", message="delivered", key="order", into="where", timeout_ms=5_000)
RECEIVE = drawn("start -> wait -> a -> end", "wait -> late -> end [late]", nodes=(DELIVERED,))


def test_a_message_goes_to_the_wait_for_it_and_its_payload_into_the_variable() -> None:
    play = Play(RECEIVE, order='"7"')

    decision = play.send("delivered", '"door"', about="7")

    assert decision.answer["received"]
    assert play.running == ["a"]
    assert play.value("where") == '"door"'


@pytest.mark.parametrize("about", ["", "7"])
def test_a_message_sent_early_is_kept_for_the_wait_that_fits(about: str) -> None:
    play = Play(
        drawn("start -> first -> wait -> a -> end", "wait -> late -> end [late]", nodes=(DELIVERED,)), order="7"
    )

    decision = play.send("delivered", "1", about=about)
    play.send("delivered", "2", about="8")
    play.complete("first")

    assert not decision.answer["received"]
    assert play.running == ["a"]
    assert play.value("where") == "1"
    assert len(play.instance.buffer) == 1


def test_a_message_for_another_key_wakes_nobody() -> None:
    play = Play(RECEIVE, order='"7"')

    play.send("delivered", about="8")

    assert play.at == ["wait"]


def test_a_kept_message_is_not_used_after_its_time_to_live() -> None:
    play = Play(
        drawn("start -> first -> wait -> a -> end", "wait -> late -> end [late]", nodes=(DELIVERED,)), order="7"
    )
    play.send("delivered", expires_ms=2_000)

    play.now_ms = 2_000
    play.complete("first")

    assert play.at == ["wait"]
    assert not play.instance.buffer


def test_a_wait_that_takes_too_long_goes_the_late_way_and_the_message_comes_too_late() -> None:
    play = Play(RECEIVE, order='"7"')

    play.fire("wait")
    decision = play.send("delivered", about="7")

    assert play.running == ["late"]
    assert not decision.answer["received"]


def test_of_a_message_and_its_timeout_only_the_first_counts() -> None:
    play = Play(RECEIVE, order='"7"')
    timer = next(wait.id for wait in play.instance.waits.values() if wait.kind == "timer")

    play.send("delivered", about="7")
    decision = play.tell(c.FireTimer(at_ms=9_000, wait=timer))

    assert play.running == ["a"]
    assert decision.entry is None


def test_a_timeout_without_a_late_way_is_an_incident_and_a_retry_waits_anew() -> None:
    play = Play(drawn("start -> wait -> end", nodes=(Receive(id="wait", message="m", timeout_ms=5_000),)))

    play.fire("wait")
    assert play.incidents == {"wait": "timeout"}
    play.resolve("retry", "wait")

    assert {wait.due_ms for wait in play.instance.waits.values()} == {None, 11_000}


def test_a_timeout_without_a_late_way_fails_the_saga_around_it() -> None:
    wait = Receive(id="saga/wait", within="saga", message="m", timeout_ms=5_000)
    play = Play(drawn("start -> saga -> end", "saga/start -> saga/a -> saga/wait -> saga/end", nodes=(wait,)))
    play.complete("saga/a")

    play.fire("saga/wait")

    assert play.running == ["undo saga/a"]


def test_a_published_message_is_consumed_once_however_often_it_is_delivered() -> None:
    play = Play(RECEIVE, order='"7"')
    wait = next(wait.id for wait in play.instance.waits.values() if wait.kind == "message")

    play.tell(c.Deliver(at_ms=1_000, message=5, wait=wait, payload="1"))
    again = play.tell(c.Deliver(at_ms=1_000, message=5, wait=wait, payload="1"))

    assert play.instance.consumed == [5]
    assert again.entry is None


def test_a_throw_publishes_its_message_with_key_payload_and_time_to_live() -> None:
    play = Play(
        drawn("start -> throw -> end", nodes=(Throw(id="throw", message="m", key="x", payload="[x]", ttl_ms=10),)),
        x="7",
    )

    (thrown,) = play.instance.thrown

    assert (thrown.name, thrown.key, thrown.payload, thrown.expires_ms) == ("m", "7", "[7]", 1_010)


@pytest.mark.parametrize("node", [Throw(id="n", message="m", key="x"), Receive(id="n", message="m", key="x")])
def test_a_key_that_is_no_key_is_an_incident(node: Node) -> None:
    play = Play(drawn("start -> n -> end", nodes=(node,)), x="[1]")

    assert play.incidents == {"n": "expression"}


# --- retries ----------------------------------------------------------------------------------------------------------


def retried(**policy: Any) -> Graph:
    return drawn("start -> a -> end", nodes=(task("a", retry=Backoff(**policy)),))


def test_a_failed_attempt_is_repeated_after_a_growing_delay_under_the_same_key_until_the_policy_is_used_up() -> None:
    play = Play(retried(attempts=3, first_ms=100, factor=2, jitter=0))
    task_number = play.attempt("a").task

    play.fail("a")
    assert [wait.due_ms for wait in play.instance.waits.values()] == [1_100]
    play.fire("a")
    play.fail("a")
    assert [wait.due_ms for wait in play.instance.waits.values()] == [1_300]
    play.fire("a")
    assert (play.attempt("a").task, play.attempt("a").attempt) == (task_number, 3)
    play.fail("a", "out of luck")

    assert play.incidents == {"a": "error"}


def test_an_exception_that_makes_a_retry_pointless_is_final_also_as_a_base_class() -> None:
    play = Play(retried(attempts=3, never=("shop:Declined",)))

    play.fail("a", "no", "shop:CardDeclined", "shop:Declined", "builtins:Exception")

    assert play.incidents == {"a": "error"}


def test_a_retry_without_a_delay_begins_at_once() -> None:
    play = Play(retried(attempts=2, first_ms=0))

    play.fail("a")

    assert play.attempt("a").attempt == 2


@given(st.integers(1, 5_000), st.integers(0, 100_000), st.integers(0, 10_000_000), st.text(max_size=5))
def test_a_delay_is_the_same_in_every_life_and_within_its_bounds(
    tries: int, first_ms: int, maximum_ms: int, key: str
) -> None:
    policy = Backoff(attempts=9_999, first_ms=first_ms, factor=3.0, maximum_ms=maximum_ms, jitter=0.5)

    delay_ms = policy.delay_ms(tries, key)

    assert delay_ms == policy.delay_ms(tries, key)
    assert 0 <= delay_ms <= 1.5 * min(maximum_ms, first_ms * 3 ** (tries - 1)) + 1


def test_the_jitter_differs_between_keys() -> None:
    policy = Backoff(attempts=9, first_ms=1_000, jitter=0.5)

    assert len({policy.delay_ms(1, str(key)) for key in range(20)}) > 10


def test_a_missing_handler_is_an_incident_whatever_the_policy_says() -> None:
    play = Play(retried(attempts=3))

    play.fail("a", code="missing_handler")

    assert play.incidents == {"a": "missing_handler"}


def test_an_operators_retry_gives_the_whole_policy_anew() -> None:
    play = Play(retried(attempts=2, first_ms=0))
    play.fail("a")
    play.fail("a")
    assert play.incidents

    play.resolve("retry", "a")
    play.fail("a")

    assert play.attempt("a").attempt == 4
    assert not play.incidents


# --- lost attempts ----------------------------------------------------------------------------------------------------


def test_an_attempt_that_was_lost_with_its_process_runs_again_under_its_key() -> None:
    play = Play(drawn("start -> a -> end"))
    before = play.attempt("a")

    decision = play.crash()

    (effect,) = (each for each in decision.effects if isinstance(each, fx.RunTask))
    assert (effect.task, effect.attempt) == (before.task, 2)
    assert play.tell(c.CompleteTask(at_ms=1_000, **named(before))).refusal is not None


def test_the_third_attempt_lost_in_a_row_is_an_incident() -> None:
    play = Play(drawn("start -> a -> end"))

    play.crash()
    play.crash()
    assert play.running == ["a"]
    play.crash()

    assert play.incidents == {"a": "lost"}
    play.resolve("retry", "a")
    assert play.running == ["a"]


def test_lost_attempts_do_not_use_up_the_retry_policy() -> None:
    play = Play(retried(attempts=2, first_ms=0))

    play.crash()
    play.crash()
    play.fail("a")

    assert play.attempt("a").tries == 2
    assert not play.incidents
    play.crash()
    play.crash()
    assert play.running == ["a"]


def test_an_attempt_lost_during_a_pause_does_not_use_up_the_retry_policy_either() -> None:
    play = Play(retried(attempts=2, first_ms=0))
    play.pause()

    play.crash()
    assert play.running == []
    play.resume()
    play.fire("a")
    play.fail("a")

    assert not play.incidents
    assert play.attempt("a").tries == 2


def test_a_handler_that_kills_its_process_is_an_incident_also_when_pauses_come_between() -> None:
    play = Play(drawn("start -> a -> end"))

    for _ in range(2):
        play.pause()
        play.crash()
        play.resume()
        play.fire("a")
    play.crash()

    assert play.incidents == {"a": "lost"}


def test_a_recorded_result_is_used_in_place_of_another_attempt() -> None:
    play = Play(drawn("start -> a -> b -> end", nodes=(task("a", into="x", transactional=True),)))
    number = play.attempt("a").task

    play.crash(a="5")

    assert play.running == ["b"]
    assert play.value("x") == "5"
    assert play.instance.taken_work == [number]


def test_an_attempt_that_still_runs_here_is_not_lost_when_its_actor_is_replaced() -> None:
    play = Play(drawn("start -> a -> end"))
    token = play.attempt("a")
    play.instance = fold(play.history)

    decision = play.tell(c.Recover(at_ms=1_000, spared=frozenset({token.id})))

    assert decision.entry is None
    assert play.complete("a").refusal is None


# --- late results -----------------------------------------------------------------------------------------------------


def test_the_result_of_an_attempt_that_has_failed_is_a_conflict_and_changes_nothing() -> None:
    play = Play(retried(attempts=2, first_ms=0))
    first = named(play.attempt("a"))
    play.fail("a", code="timeout")

    decision = play.tell(c.CompleteTask(at_ms=1_000, **first))

    assert isinstance(decision.refusal, Conflict)
    assert play.attempt("a").attempt == 2


def test_a_late_result_of_one_step_is_not_taken_for_the_result_of_the_next() -> None:
    play = Play(drawn("start -> a -> b -> end", nodes=(task("b", into="x"),)))
    first = named(play.attempt("a"))
    play.complete("a")

    decision = play.tell(c.CompleteTask(at_ms=1_000, **first, result='"of a"'))

    assert isinstance(decision.refusal, Conflict)
    assert play.running == ["b"]


def test_a_result_after_the_end_is_a_conflict() -> None:
    play = Play(drawn("start -> a -> end"))
    first = named(play.attempt("a"))
    play.cancel()

    decision = play.tell(c.FailTask(at_ms=1_000, **first, fault=Fault("error", "late")))

    assert isinstance(decision.refusal, Conflict)


# --- failure ----------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_outside_a_saga_stops_as_an_incident_and_its_sibling_goes_on() -> None:
    play = Play(FORK_JOIN)

    play.fail("left", "no luck")

    assert play.incidents == {"left": "error"}
    assert play.running == ["right"]
    play.resolve("retry", "left")
    play.complete("left")
    play.complete("right")
    assert play.running == ["last"]


def test_a_step_that_may_fail_the_process_does() -> None:
    play = Play(
        drawn(
            "start -> fork",
            "fork -> left -> join",
            "fork -> right -> join",
            "join -> end",
            nodes=(task("left", on_failure="fail"),),
        )
    )

    play.fail("left", "no luck")

    assert (play.outcome, play.reason) == (Outcome.FAILED, "no luck")
    assert any(isinstance(effect, fx.CancelTask) for effect in play.effects)


def test_an_incident_can_be_failed_by_an_operator() -> None:
    play = Play(drawn("start -> a -> end"))
    play.fail("a", "no luck")

    play.resolve("fail", "a")

    assert (play.outcome, play.reason) == (Outcome.FAILED, "no luck")


def test_a_step_in_a_saga_may_ask_an_operator_instead_of_failing_it() -> None:
    play = Play(drawn("start -> saga -> end", "saga/start -> saga/a", nodes=(task("saga/a", on_failure="incident"),)))

    play.fail("saga/a")

    assert play.incidents == {"saga/a": "error"}
    assert play.status == "running"


# --- sagas ------------------------------------------------------------------------------------------------------------

SAGA = drawn("start -> saga -> after -> end", "saga/start -> saga/a -> saga/b -> saga/c -> saga/end")
PARALLEL_SAGA = drawn(
    "start -> saga -> end",
    "saga/start -> saga/fork",
    "saga/fork -> saga/a -> saga/join",
    "saga/fork -> saga/b -> saga/join",
    "saga/join -> saga/end",
)


def test_a_saga_that_succeeds_is_not_undone() -> None:
    play = Play(SAGA)

    for node in ("saga/a", "saga/b", "saga/c"):
        play.complete(node)

    assert play.running == ["after"]
    assert not play.instance.undos


def test_a_saga_that_fails_is_undone_in_reverse_order_and_the_instance_fails() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.complete("saga/b")

    play.fail("saga/c", "out of stock")
    assert play.status == "compensating"
    assert play.running == ["undo saga/b"]
    play.complete("undo saga/b")
    play.complete("undo saga/a")

    assert play.undone == ["saga/b", "saga/a"]
    assert (play.outcome, play.reason) == (Outcome.FAILED, "out of stock")


def test_a_step_without_an_undo_is_left_as_it_is() -> None:
    play = Play(
        drawn("start -> saga -> end", "saga/start -> saga/a -> saga/b -> saga/end", nodes=(task("saga/a", undo=None),))
    )
    play.complete("saga/a")

    play.fail("saga/b")

    assert play.outcome is Outcome.FAILED


def test_a_step_that_was_skipped_is_not_undone() -> None:
    play = Play(
        drawn("start -> saga -> end", "saga/start -> saga/a -> saga/b", nodes=(task("saga/a", on_failure="incident"),))
    )
    play.fail("saga/a")
    play.resolve("skip", "saga/a")

    play.fail("saga/b")

    assert play.outcome is Outcome.FAILED
    assert play.undone == []


def test_the_undo_sees_what_the_step_saw_and_gave() -> None:
    charge = task(
        "saga/a", into="receipt", undo=UndoTask(handler="refund", needs=("receipt", "amount"), may=("result",))
    )
    play = Play(drawn("start -> saga -> end", "saga/start -> saga/a -> saga/b", nodes=(charge,)), amount="40")
    play.complete("saga/a", '{"id":"r-1"}')

    decision = play.fail("saga/b")

    (effect,) = (each for each in decision.effects if isinstance(each, fx.RunTask))
    assert effect.is_undo
    assert effect.given == {"receipt": '{"id":"r-1"}', "amount": "40", "result": '{"id":"r-1"}'}


def test_what_an_undo_is_given_may_be_larger_than_any_one_value() -> None:
    undo = UndoTask(handler="refund", needs=("x",), may=("result",))
    play = Play(
        drawn("start -> saga -> end", "saga/start -> saga/a -> saga/b", nodes=(task("saga/a", undo=undo),)),
        x='"' + "x" * 700_000 + '"',
    )

    decision = play.complete("saga/a", '"' + "y" * 700_000 + '"')

    assert decision.refusal is None
    assert play.running == ["saga/b"]


def test_an_attempt_that_is_out_when_its_sibling_fails_is_awaited_and_its_success_undone() -> None:
    play = Play(PARALLEL_SAGA)

    decision = play.fail("saga/a")
    assert [type(effect) for effect in decision.effects] == [fx.CancelTask]
    assert play.running == ["saga/b"]
    play.complete("saga/b")
    assert play.running == ["undo saga/b"]
    play.complete("undo saga/b")

    assert play.outcome is Outcome.FAILED
    assert play.undone == ["saga/b"]


def test_an_attempt_that_is_out_when_its_sibling_fails_and_fails_too_leaves_nothing_to_undo() -> None:
    play = Play(PARALLEL_SAGA)

    play.fail("saga/a", "first")
    play.fail("saga/b", "second")

    assert play.undone == []
    assert (play.outcome, play.reason) == (Outcome.FAILED, "first")


def test_an_awaited_attempt_that_is_lost_runs_again_so_that_it_can_be_undone() -> None:
    play = Play(PARALLEL_SAGA)
    play.fail("saga/a")

    play.crash()
    play.complete("saga/b")

    assert play.running == ["undo saga/b"]


def test_giving_up_on_an_awaited_attempt_does_not_change_why_the_saga_failed() -> None:
    play = Play(PARALLEL_SAGA)
    play.fail("saga/a", "first")
    for _ in range(3):
        play.crash()
    assert play.incidents == {"saga/b": "lost"}

    play.resolve("fail", "saga/b")

    assert (play.outcome, play.reason) == (Outcome.FAILED, "first")


NESTED = drawn(
    "start -> outer -> end",
    "outer/start -> outer/a -> outer/saga -> outer/d -> outer/end",
    "outer/saga/start -> outer/saga/b -> outer/saga/c -> outer/saga/end",
    nodes=(Saga(id="outer"), Saga(id="outer/saga", within="outer")),
)


def test_the_steps_of_an_inner_saga_that_succeeded_are_undone_with_the_outer_one() -> None:
    play = Play(NESTED)
    for node in ("outer/a", "outer/saga/b", "outer/saga/c"):
        play.complete(node)

    play.fail("outer/d")
    while play.outcome is None:
        play.complete(play.running[0])

    assert play.undone == ["outer/saga/c", "outer/saga/b", "outer/a"]


def test_an_inner_saga_that_fails_is_undone_first_and_then_the_outer_one() -> None:
    play = Play(NESTED)
    play.complete("outer/a")
    play.complete("outer/saga/b")

    play.fail("outer/saga/c", "inner trouble")
    while play.outcome is None:
        play.complete(play.running[0])

    assert play.undone == ["outer/saga/b", "outer/a"]
    assert play.reason == "inner trouble"


def test_steps_of_both_sagas_are_undone_in_reverse_order_of_their_success() -> None:
    play = Play(
        drawn(
            "start -> outer -> end",
            "outer/start -> outer/fork",
            "outer/fork -> outer/a -> outer/b -> outer/join",
            "outer/fork -> outer/saga -> outer/join",
            "outer/join -> outer/last -> outer/end",
            "outer/saga/start -> outer/saga/x -> outer/saga/y -> outer/saga/end",
            nodes=(Saga(id="outer"), Saga(id="outer/saga", within="outer")),
        )
    )
    for node in ("outer/saga/x", "outer/a", "outer/saga/y", "outer/b"):
        play.complete(node)

    play.fail("outer/last")
    while play.outcome is None:
        play.complete(play.running[0])

    assert play.undone == ["outer/b", "outer/saga/y", "outer/a", "outer/saga/x"]


def test_nothing_begins_anywhere_inside_a_saga_that_fails() -> None:
    play = Play(
        drawn(
            "start -> outer -> end",
            "outer/start -> outer/fork",
            "outer/fork -> outer/a -> outer/join",
            "outer/fork -> outer/middle -> outer/join",
            "outer/join -> outer/end",
            "outer/middle/start -> outer/middle/inner -> outer/middle/next -> outer/middle/end",
            "outer/middle/inner/start -> outer/middle/inner/b -> outer/middle/inner/end",
            nodes=(
                Saga(id="outer"),
                Saga(id="outer/middle", within="outer"),
                Saga(id="outer/middle/inner", within="outer/middle"),
            ),
        )
    )
    play.fail("outer/a")

    play.complete("outer/middle/inner/b")

    assert play.running == ["undo outer/middle/inner/b"]


def test_compensation_goes_on_where_a_crash_has_stopped_it() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.complete("saga/b")
    play.fail("saga/c")
    key = play.attempt("undo saga/b").task

    play.crash()
    assert play.attempt("undo saga/b").task == key
    play.complete("undo saga/b")
    play.crash()
    play.complete("undo saga/a")

    assert play.undone == ["saga/b", "saga/a"]


# --- undos that fail --------------------------------------------------------------------------------------------------


def stuck_undo() -> Play:
    play = Play(SAGA)
    play.complete("saga/a")
    play.complete("saga/b")
    play.fail("saga/c")
    play.fail("undo saga/b", "bank is closed")
    assert play.incidents == {"saga/b": "undo_failed"}
    assert play.running == []
    return play


def test_an_undo_that_fails_stops_the_chain_until_it_is_retried() -> None:
    play = stuck_undo()

    play.resolve("retry", "saga/b")
    play.complete("undo saga/b")
    play.complete("undo saga/a")

    assert play.undone == ["saga/b", "saga/a"]
    assert play.outcome is Outcome.FAILED


def test_an_undo_that_fails_may_be_skipped_and_the_others_go_on() -> None:
    play = stuck_undo()

    play.resolve("skip", "saga/b")
    play.complete("undo saga/a")

    assert play.undone == ["saga/a"]
    assert play.outcome is Outcome.FAILED


def test_giving_up_on_an_undo_leaves_the_rest_of_its_saga_as_it_is() -> None:
    play = stuck_undo()

    play.resolve("fail", "saga/b")

    assert play.undone == []
    assert play.outcome is Outcome.FAILED
    assert [event.how for event in play.events if isinstance(event, e.UndoFinished)] == ["given up", "given up"]


def test_an_undo_has_a_retry_policy_of_its_own() -> None:
    undo = UndoTask(handler="refund", retry=Backoff(attempts=2, first_ms=0))
    play = Play(drawn("start -> saga -> end", "saga/start -> saga/a -> saga/b", nodes=(task("saga/a", undo=undo),)))
    play.complete("saga/a")
    play.fail("saga/b")

    play.fail("undo saga/a")

    assert play.attempt("undo saga/a").attempt == 2


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_a_cancel_undoes_what_its_sagas_have_done() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.complete("saga/b")

    play.cancel()
    assert play.status == "cancelling"
    assert play.running == ["saga/c"]
    play.fail("saga/c", "interrupted")
    play.complete("undo saga/b")
    play.complete("undo saga/a")

    assert (play.outcome, play.reason) == (Outcome.CANCELLED, "changed my mind")


def test_a_cancel_without_undo_ends_at_once() -> None:
    play = Play(SAGA)
    play.complete("saga/a")

    play.cancel(undo=False)

    assert play.outcome is Outcome.CANCELLED
    assert play.undone == []


def test_a_second_cancel_gets_the_same_answer_and_changes_nothing() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.cancel()

    again = play.cancel()
    assert again.entry is None
    assert again.answer == {"id": "i", "status": "cancelling"}
    play.fail("saga/b")
    play.complete("undo saga/a")

    assert play.cancel().answer == {"id": "i", "status": "ended"}


def test_a_cancel_that_undoes_can_be_cut_short_by_one_that_does_not() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.cancel()

    play.cancel(undo=False)

    assert play.outcome is Outcome.CANCELLED


def test_a_cancel_while_it_compensates_lets_the_undos_go_on_and_changes_the_outcome() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.fail("saga/b")

    play.cancel()
    play.complete("undo saga/a")

    assert play.undone == ["saga/a"]
    assert play.outcome is Outcome.CANCELLED


def test_a_cancel_closes_the_incidents_it_ends() -> None:
    play = Play(drawn("start -> a -> end"))
    play.fail("a")

    play.cancel()

    assert play.outcome is Outcome.CANCELLED
    assert not play.instance.incidents


# --- pausing ----------------------------------------------------------------------------------------------------------


def test_what_runs_may_finish_during_a_pause_and_nothing_new_begins() -> None:
    play = Play(drawn("start -> a -> b -> end"))

    play.pause()
    play.complete("a")
    assert play.running == []
    assert play.at == ["b"]
    play.resume()

    assert play.running == ["b"]


def test_a_retry_does_not_begin_during_a_pause_and_is_armed_again_after_it() -> None:
    play = Play(retried(attempts=2, first_ms=100, jitter=0))
    play.fail("a")
    play.pause()

    assert play.fire("a").entry is None
    decision = play.resume()
    assert decision.effects == [fx.ArmTimer(3, 1_100)]
    play.fire("a")

    assert play.running == ["a"]


def test_an_operators_retry_during_a_pause_begins_after_it() -> None:
    play = Play(drawn("start -> a -> end"))
    play.fail("a")
    play.pause()

    play.resolve("retry", "a")
    assert play.running == []
    assert not play.incidents
    play.resume()
    play.fire("a")

    assert play.attempt("a").tries == 1


def test_messages_and_timers_are_taken_during_a_pause() -> None:
    play = Play(RECEIVE, order='"7"')

    play.pause()
    play.send("delivered", about="7")

    assert play.at == ["a"]
    assert play.running == []


def test_pausing_and_resuming_twice_changes_nothing() -> None:
    play = Play(drawn("start -> a -> end"))

    assert play.resume().entry is None
    play.pause()
    assert play.pause().entry is None
    play.resume()
    assert play.resume().answer == {"id": "i", "status": "running"}


def test_a_saga_that_fails_during_a_pause_is_undone_after_it() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.pause()

    play.fail("saga/b")
    assert play.running == []
    assert play.status == "paused"
    play.resume()

    assert play.status == "compensating"
    assert play.running == ["undo saga/a"]


def test_a_process_that_fails_during_a_pause_stays_paused() -> None:
    play = Play(drawn("start -> a -> end", nodes=(task("a", on_failure="fail"),)))
    play.pause()

    play.fail("a", "no luck")
    assert play.status == "paused"
    play.resume()

    assert (play.outcome, play.reason) == (Outcome.FAILED, "no luck")


def test_a_cancel_ends_a_pause_and_undoes_what_had_begun_to_fail_in_it() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.pause()
    play.fail("saga/b")

    play.cancel()
    assert play.running == ["undo saga/a"]
    play.complete("undo saga/a")

    assert play.outcome is Outcome.CANCELLED


def test_what_is_being_undone_cannot_be_paused() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.fail("saga/b")

    assert isinstance(play.pause().refusal, Rejected)


# --- shutting down ----------------------------------------------------------------------------------------------------


def test_a_runtime_that_shuts_down_records_results_and_begins_nothing() -> None:
    play = Play(drawn("start -> a -> b -> end"))

    decision = play.tell(c.CompleteTask(at_ms=1_000, **named(play.attempt("a"))), go_on=False)

    assert decision.effects == []
    assert play.instance.is_runnable
    play.crash()
    assert play.running == ["b"]


def test_an_undo_that_ends_while_the_runtime_shuts_down_leaves_the_next_one_to_be_found() -> None:
    play = Play(SAGA)
    play.complete("saga/a")
    play.complete("saga/b")
    play.fail("saga/c")

    play.tell(c.CompleteTask(at_ms=1_000, **named(play.attempt("undo saga/b"))), go_on=False)

    assert play.instance.is_runnable
    play.crash()
    assert play.running == ["undo saga/a"]


# --- terminate ends ---------------------------------------------------------------------------------------------------


def test_a_terminate_end_ends_everything_with_it() -> None:
    play = Play(drawn("start -> fork", "fork -> a -> terminate", "fork -> b -> end"))

    decision = play.complete("a")

    assert play.outcome is Outcome.TERMINATED
    assert [type(effect) for effect in decision.effects] == [fx.CancelTask]


def test_a_terminate_end_in_a_saga_ends_that_saga_only_and_its_steps_stay_on_the_outer_account() -> None:
    play = Play(
        drawn(
            "start -> outer -> end",
            "outer/start -> outer/saga -> outer/last -> outer/end",
            "outer/saga/start -> outer/saga/fork",
            "outer/saga/fork -> outer/saga/a -> outer/saga/terminate",
            "outer/saga/fork -> outer/saga/b -> outer/saga/end",
            nodes=(Saga(id="outer"), Saga(id="outer/saga", within="outer")),
        )
    )

    play.complete("outer/saga/a")
    assert play.running == ["outer/last"]
    play.fail("outer/last")

    assert play.running == ["undo outer/saga/a"]


def test_steps_of_a_saga_inside_a_terminated_one_stay_on_the_outer_account_too() -> None:
    play = Play(
        drawn(
            "start -> outer -> end",
            "outer/start -> outer/saga -> outer/last -> outer/end",
            "outer/saga/start -> outer/saga/fork",
            "outer/saga/fork -> outer/saga/x -> outer/saga/terminate",
            "outer/saga/fork -> outer/saga/inner -> outer/saga/end",
            "outer/saga/inner/start -> outer/saga/inner/a -> outer/saga/inner/b -> outer/saga/inner/end",
            nodes=(
                Saga(id="outer"),
                Saga(id="outer/saga", within="outer"),
                Saga(id="outer/saga/inner", within="outer/saga"),
            ),
        )
    )
    play.complete("outer/saga/inner/a")
    play.complete("outer/saga/x")

    play.fail("outer/last")
    while play.outcome is None:
        play.complete(play.running[0])

    assert play.undone == ["outer/saga/x", "outer/saga/inner/a"]


def test_a_terminate_end_does_not_leave_a_failing_saga_half_undone() -> None:
    play = Play(
        drawn(
            "start -> fork",
            "fork -> a -> terminate",
            "fork -> saga -> end",
            "saga/start -> saga/x -> saga/y -> saga/end",
        )
    )
    play.complete("saga/x")
    play.fail("saga/y", "no luck")

    play.complete("a")
    assert play.running == ["undo saga/x"]
    play.complete("undo saga/x")

    assert (play.outcome, play.reason) == (Outcome.FAILED, "no luck")


# --- loops that never rest --------------------------------------------------------------------------------------------


def test_a_loop_that_nothing_can_end_is_an_incident() -> None:
    play = Play(drawn("start -> merge -> choice", "choice -> merge [1 == 1]", "choice -> end [else]"))

    assert list(play.incidents.values()) == ["runaway"]
    play.cancel()
    assert play.outcome is Outcome.CANCELLED


def test_skipping_a_fork_lets_every_branch_go_on() -> None:
    play = Play(drawn("start -> merge -> fork", "fork -> a -> end", "fork -> merge"))
    assert play.incidents["fork"] == "runaway"
    before = len(play.instance.tokens)

    play.resolve("skip", "fork")

    assert len(play.instance.tokens) > before


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_starting_again_with_the_same_input_is_the_same_instance_and_with_another_a_conflict() -> None:
    play = Play(drawn("start -> a -> end"))

    same = play.tell(c.Start(at_ms=2_000, id="i", given_digest="d", variables={}))
    other = play.tell(c.Start(at_ms=2_000, id="i", given_digest="e", variables={}))

    assert same.answer == {"id": "i", "new": False}
    assert isinstance(other.refusal, Conflict)


@pytest.mark.parametrize(
    "command",
    [
        c.Send(at_ms=1, name="m"),
        c.Cancel(at_ms=1),
        c.Pause(at_ms=1),
        c.Resume(at_ms=1),
        c.Resolve(at_ms=1, how="retry"),
    ],
)
def test_an_instance_that_does_not_exist_refuses_every_order(command: c.AnyCommand) -> None:
    instance = Instance()

    decision = decide(instance, FORK_JOIN, command)

    assert isinstance(decision.refusal, UnknownInstance)
    assert facts(instance) == facts(Instance())


@pytest.mark.parametrize(
    "command",
    [
        c.Send(at_ms=1, name="m"),
        c.Cancel(at_ms=1),
        c.Pause(at_ms=1),
        c.Resume(at_ms=1),
        c.Resolve(at_ms=1, how="retry"),
    ],
)
def test_an_instance_that_has_ended_refuses_every_order(command: c.AnyCommand) -> None:
    play = Play(drawn("start -> a -> end"))
    play.complete("a")

    decision = play.tell(command)

    assert isinstance(decision.refusal, AlreadyEnded)


def test_the_inside_of_an_instance_that_does_not_exist_changes_nothing() -> None:
    instance = Instance()

    for command in (
        c.FireTimer(at_ms=1, wait=1),
        c.Deliver(at_ms=1, message=1, wait=1, payload="1"),
        c.Recover(at_ms=1),
        c.CompleteTask(at_ms=1, token=1, attempt=1),
    ):
        assert decide(instance, FORK_JOIN, command).entry is None


def test_an_incident_must_be_named_when_there_is_more_than_one() -> None:
    play = Play(FORK_JOIN)
    play.fail("left")
    play.fail("right")

    decision = play.tell(c.Resolve(at_ms=1_000, how="retry"))

    assert isinstance(decision.refusal, UnknownIncident)
    assert "left" in str(decision.refusal)


def test_an_incident_that_is_not_open_and_an_unknown_word_are_refused() -> None:
    play = Play(drawn("start -> a -> end"))
    play.fail("a")

    unknown = play.tell(c.Resolve(at_ms=1_000, how="retry", incident=99))
    word = play.resolve("forget", "a")

    assert isinstance(unknown.refusal, UnknownIncident)
    assert isinstance(word.refusal, Rejected)
    assert play.incidents == {"a": "error"}


def test_skipping_where_there_is_no_way_on_is_refused() -> None:
    play = Play(drawn("start -> merge -> wait", nodes=(Timer(id="wait", after="x"),)))

    decision = play.resolve("skip", "wait")

    assert isinstance(decision.refusal, Rejected)
    assert play.incidents == {"wait": "expression"}
