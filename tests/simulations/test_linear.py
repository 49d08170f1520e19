"""I12: whatever the real rules answer is accepted, however the calls overlap; every kind of lie is found."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.model import commands as c
from understudy.model import effects as fx
from understudy.model.decide import Decision, decide, outstanding
from understudy.model.definition import Definition, Edge, Graph
from understudy.model.instance import Fault, Instance
from understudy.model.kinds import End, Receive, Saga, Start, Task, UndoTask
from understudy.simulations.linear import Undecided, check_all, check_instance
from understudy.simulations.operations import Operation
from understudy.simulations.reference import Call, State, calls_of, states_after

DAY_MS = 86_400_000

# --- histories by hand ------------------------------------------------------------------------------------------------


class Told:
    """Operations as clients tell of them; each is given by its two steps."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def __call__(
        self,
        call: str,
        invoked: int,
        returned: int | None,
        answer: Any = None,
        *,
        error: str = "",
        key: str = "",
        client: str = "",
        at_ms: int = 0,
        is_unknown: bool = False,
        **parameters: Any,
    ) -> None:
        number = len(self.operations) + 1
        self.operations.append(
            Operation(
                number=number,
                client=client or f"client {number}",
                call=call,
                instance="i-1",
                parameters=parameters,
                key=key,
                invoked=invoked,
                at_ms=at_ms,
                returned=returned,
                answer=answer,
                error=error,
                is_unknown=is_unknown,
            )
        )

    def start(self, invoked: int, returned: int | None, *, new: bool = True, n: str = "1", **more: Any) -> None:
        self("start", invoked, returned, {"id": "i-1", "new": new}, process="p", variables={"n": n}, **more)

    def read(self, invoked: int, returned: int | None, version: int, status: str = "running", **more: Any) -> None:
        self("read", invoked, returned, {"version": version, "status": status, **more})

    @property
    def complaint(self) -> str:
        violation = check_instance(self.operations)
        return "" if violation is None else violation.message


@pytest.fixture
def told() -> Told:
    """Of an instance that was started by operation 1."""
    told = Told()
    told.start(0, 1)
    return told


PAUSED = {"status": "paused"}
RUNNING = {"status": "running"}
CANCELLING = {"status": "cancelling"}


# --- what must be found -----------------------------------------------------------------------------------------------


def test_an_acknowledged_start_is_not_lost(told: Told) -> None:
    told("read", 2, 3, None, error="UnknownInstance")

    assert "#1" in told.complaint
    assert "#2" in told.complaint


def test_an_acknowledged_start_is_not_lost_on_a_reader_that_gets_nothing(told: Told) -> None:
    told("read", 2, 3, None)

    assert told.complaint


def test_a_start_is_new_once(told: Told) -> None:
    told.start(2, 3, new=True)

    assert told.complaint


def test_a_start_with_other_input_is_a_conflict(told: Told) -> None:
    told.start(2, 3, new=False, n="2")

    assert told.complaint


def test_a_start_with_the_same_input_is_no_conflict(told: Told) -> None:
    told.start(2, 3, error="Conflict")

    assert told.complaint


def test_an_acknowledged_send_raises_the_version(told: Told) -> None:
    told.read(2, 3, 4)
    told("send", 4, 5, {"received": False}, name="paid")
    told.read(6, 7, 4)

    assert "these 3 of the 4 operations" in told.complaint


def test_an_acknowledged_send_is_counted(told: Told) -> None:
    told("send", 4, 5, {"received": False}, name="paid")
    told.read(6, 7, 9, sends=0)

    assert told.complaint


def test_a_send_is_counted_once(told: Told) -> None:
    told("send", 4, 5, {"received": False}, name="paid", key="k")
    told("send", 6, 7, {"received": False}, name="paid", key="k")
    told.read(8, 9, 9, sends=2)

    assert told.complaint


def test_an_acknowledged_pause_is_not_lost(told: Told) -> None:
    told("pause", 2, 3, PAUSED)
    told.read(4, 5, 8, "running")

    assert told.complaint


def test_a_pause_lasts_until_somebody_ends_it(told: Told) -> None:
    told("pause", 2, 3, PAUSED)
    told.read(4, 5, 8, "paused")
    told.read(6, 7, 9, "running")

    assert told.complaint


def test_a_paused_instance_does_not_end(told: Told) -> None:
    told("pause", 2, 3, PAUSED)
    told("send", 4, 5, error="AlreadyEnded", name="paid")

    assert told.complaint


def test_a_pause_that_nobody_has_asked_for_is_seen(told: Told) -> None:
    told.read(2, 3, 4, "paused")

    assert told.complaint


def test_nothing_happens_before_it_is_called(told: Told) -> None:
    told.read(2, 3, 4, "paused")
    told("pause", 4, 5, PAUSED)

    assert "#2" in told.complaint


def test_nothing_happens_after_it_is_answered(told: Told) -> None:
    told("pause", 2, 3, PAUSED)
    told.read(4, 5, 4, "running")
    told.read(6, 7, 5, "paused")

    assert "called by step 5" in told.complaint


def test_an_open_send_is_not_seen_before_it_is_called(told: Told) -> None:
    told.read(2, 3, 4, sends=1)
    told("send", 5, None, name="paid")

    assert told.complaint


def test_a_reader_never_reads_backwards(told: Told) -> None:
    told.read(2, 3, 4)
    told.read(4, 5, 3)

    assert told.complaint


def test_two_readers_never_read_backwards_either(told: Told) -> None:
    told.read(2, 9, 4)
    told.read(3, 5, 7)
    told.read(6, 8, 5)

    assert told.complaint


def test_one_version_is_one_content(told: Told) -> None:
    told.read(2, 3, 4, "running")
    told.read(4, 5, 4, "ended", outcome="completed")

    assert told.complaint


def test_an_acknowledged_cancel_is_not_lost(told: Told) -> None:
    told("cancel", 2, 3, CANCELLING)
    told.read(4, 5, 8, "running")

    assert told.complaint


def test_a_cancelled_instance_ends_as_cancelled(told: Told) -> None:
    told("cancel", 2, 3, CANCELLING)
    told.read(4, 5, 8, "ended", outcome="completed")

    assert told.complaint


def test_an_instance_that_nobody_cancelled_does_not_end_as_cancelled(told: Told) -> None:
    told.read(4, 5, 8, "ended", outcome="cancelled")

    assert told.complaint


def test_an_end_is_final(told: Told) -> None:
    told.read(2, 3, 8, "ended", outcome="completed")
    told.read(4, 5, 9, "running")

    assert told.complaint


def test_an_outcome_is_written_once(told: Told) -> None:
    told.read(2, 3, 8, "ended", outcome="completed")
    told.read(4, 5, 9, "ended", outcome="failed")

    assert told.complaint


@pytest.mark.parametrize(
    ("call", "answer"), [("send", {}), ("pause", PAUSED), ("resume", RUNNING), ("cancel", CANCELLING), ("resolve", {})]
)
def test_what_has_ended_takes_no_command(told: Told, call: str, answer: dict[str, str]) -> None:
    told.read(2, 3, 8, "ended", outcome="completed")
    told(call, 4, 5, answer)

    assert told.complaint


@pytest.mark.parametrize("call", ["send", "pause", "resume", "cancel", "resolve"])
def test_an_instance_that_exists_is_not_unknown(told: Told, call: str) -> None:
    told(call, 2, 3, error="UnknownInstance")

    assert told.complaint


@pytest.mark.parametrize(
    ("call", "answer"), [("send", {}), ("pause", PAUSED), ("resume", RUNNING), ("cancel", CANCELLING), ("resolve", {})]
)
def test_what_nobody_has_started_takes_no_command(call: str, answer: dict[str, str]) -> None:
    told = Told()
    told(call, 2, 3, answer)

    assert told.complaint.startswith("no order explains this one of the 1 operations called by step 3: #1 ")


def test_the_answer_under_one_key_is_always_the_same(told: Told) -> None:
    told("send", 2, 3, {"received": True}, key="k", name="paid")
    told("send", 4, 5, {"received": False}, key="k", name="paid")

    assert "#2" in told.complaint
    assert "#3" in told.complaint


def test_two_answers_under_one_key_are_found_even_when_the_first_call_was_never_answered(told: Told) -> None:
    told("cancel", 2, None, key="k")
    told("cancel", 4, 5, {"status": "cancelling"}, key="k")
    told("cancel", 6, 7, {"status": "ended"}, key="k")

    assert "#3" in told.complaint
    assert "#4" in told.complaint


def test_a_key_with_other_content_is_a_conflict(told: Told) -> None:
    told("send", 2, 3, {"received": False}, key="k", name="paid")
    told("send", 4, 5, {"received": False}, key="k", name="sent")

    assert told.complaint


def test_a_key_with_the_same_content_is_no_conflict(told: Told) -> None:
    told("send", 2, 3, {"received": False}, key="k", name="paid")
    told("send", 4, 5, error="Conflict", key="k", name="paid")

    assert told.complaint


def test_a_key_that_stood_for_an_acknowledged_command_gives_its_answer_even_after_the_end(told: Told) -> None:
    told("send", 2, 3, {"received": False}, key="k", name="paid")
    told.read(4, 5, 9, "ended", outcome="completed")
    told("send", 6, 7, error="AlreadyEnded", key="k", name="paid")

    assert told.complaint


def test_a_command_without_a_key_is_no_conflict(told: Told) -> None:
    told("send", 2, 3, error="Conflict", name="paid")

    assert told.complaint


def test_an_incident_is_settled_once(told: Told) -> None:
    told("resolve", 2, 3, {"incident": 7, "how": "retry"}, how="retry")
    told("resolve", 4, 5, {"incident": 7, "how": "skip"}, how="skip")

    assert told.complaint


def test_a_later_step_of_one_client_comes_later_even_within_one_step_of_the_world(told: Told) -> None:
    told("pause", 2, 3, PAUSED)
    told.read(3, 5, 8, "running")

    assert told.complaint


# --- what may be ------------------------------------------------------------------------------------------------------


def test_calls_at_the_same_time_happen_in_either_order(told: Told) -> None:
    told("pause", 2, 9, PAUSED)
    told("resume", 3, 8, RUNNING)
    told.read(10, 11, 8, "running")
    told("pause", 12, 19, PAUSED)
    told("resume", 13, 18, RUNNING)
    told.read(20, 21, 9, "paused")

    assert told.complaint == ""


def test_two_sends_may_share_a_commit(told: Told) -> None:
    told.read(2, 3, 4)
    told("send", 4, 9, {"received": False}, name="paid")
    told("send", 5, 8, {"received": False}, name="paid")
    told.read(10, 11, 5, sends=2)

    assert told.complaint == ""


def test_the_instance_moves_by_itself(told: Told) -> None:
    told.read(2, 3, 1, "running")
    told.read(4, 5, 7, "compensating")
    told("pause", 6, 7, error="Rejected")
    told.read(8, 9, 9, "ended", outcome="failed")
    told("send", 10, 11, error="AlreadyEnded", name="paid")

    assert told.complaint == ""


def test_a_failure_under_a_pause_shows_when_it_is_resumed(told: Told) -> None:
    told("pause", 2, 3, PAUSED)
    told("resume", 4, 5, {"status": "compensating"})
    told("pause", 6, 7, error="Rejected")

    assert told.complaint == ""


def test_a_cancel_ends_a_pause(told: Told) -> None:
    told("pause", 2, 3, PAUSED)
    told("cancel", 4, 5, CANCELLING)
    told.read(6, 7, 8, "ended", outcome="cancelled")
    told("cancel", 8, 9, {"status": "ended"})

    assert told.complaint == ""


@pytest.mark.parametrize(("status", "version"), [("running", 4), ("paused", 5)])
def test_a_call_that_died_may_have_happened_or_not(told: Told, status: str, version: int) -> None:
    told.read(2, 3, 4)
    told("pause", 4, None, error="Died", is_unknown=True)
    told.read(6, 7, version, status)

    assert told.complaint == ""


def test_a_call_with_an_unknown_outcome_may_happen_after_its_answer(told: Told) -> None:
    told("pause", 2, 3, error="OutcomeUnknown", is_unknown=True)
    told.read(4, 5, 4, "running")
    told.read(6, 7, 5, "paused")

    assert told.complaint == ""


def test_a_call_with_an_unknown_outcome_happens_only_once(told: Told) -> None:
    told("pause", 2, 3, error="TimedOut", is_unknown=True)
    told.read(6, 7, 5, "paused")
    told("resume", 8, 9, RUNNING)
    told.read(10, 11, 9, "paused")

    assert told.complaint


def test_what_was_refused_for_now_has_not_happened(told: Told) -> None:
    told("pause", 2, 3, error="Unavailable")
    told.read(4, 5, 5, "paused")

    assert told.complaint


def test_an_error_that_nobody_knows_leaves_the_outcome_open(told: Told) -> None:
    told("pause", 2, 3, error="UnderstudyError")
    told.read(4, 5, 5, "paused")

    assert told.complaint == ""


def test_a_repetition_under_a_key_gets_the_answer_that_the_first_call_never_heard(told: Told) -> None:
    told("send", 2, None, key="k", name="paid", is_unknown=True)
    told.read(4, 5, 4, sends=1)
    told("send", 6, 7, {"received": True}, key="k", name="paid")
    told.read(8, 9, 4, sends=1)

    assert told.complaint == ""


def test_a_command_that_changed_nothing_has_taken_its_key_too(told: Told) -> None:
    told("resume", 2, 3, {"status": "compensating"}, key="k")
    told("cancel", 4, 5, CANCELLING)
    told("resume", 6, 7, {"status": "cancelling"}, key="k")

    assert "#2" in told.complaint
    assert "#4" in told.complaint


def test_a_key_may_be_used_again_after_its_time(told: Told) -> None:
    told("send", 2, 3, {"received": True}, key="k", name="paid")
    told("send", 4, 5, {"received": False}, key="k", name="sent", at_ms=DAY_MS)

    assert told.complaint == ""


def test_a_key_that_another_instance_may_have_had_first_can_be_a_conflict(told: Told) -> None:
    told("send", 2, 3, error="Conflict", key="k", name="paid")
    elsewhere = msgspec.structs.replace(told.operations[-1], instance="i-2", number=9)

    alone, together = check_all(told.operations), check_all([*told.operations, elsewhere])

    assert [violation.instance for violation in alone] == ["i-1"]
    assert together == []


def test_a_runtime_in_doubt_may_find_its_own_start_and_its_own_resume() -> None:
    told = Told()
    told.start(0, 1, new=False)
    told("pause", 2, 3, PAUSED)
    told("resume", 4, 5, error="AlreadyEnded")
    told.read(6, 7, 9, "ended", outcome="completed")

    assert told.complaint == ""


def test_calls_that_are_not_about_one_instance_are_left_out(told: Told) -> None:
    told("publish", 2, 3, {"message": 1}, name="paid")

    assert check_all(told.operations) == []


def test_only_what_contradicts_is_named(told: Told) -> None:
    for step in range(10, 200, 10):
        told("send", step, step + 5, {"received": False}, name="paid")
    told("pause", 300, 301, PAUSED)
    for step in range(310, 400, 10):
        told("send", step, step + 5, {"received": False}, name="paid")
    told.read(500, 501, 60, "running")
    told.read(510, 511, 60, "running")

    assert told.complaint == (
        "no order explains these 2 of the 31 operations called by step 501: "
        '#21 client 21 pause -> {"status":"paused"} (steps 300 to 301); '
        '#31 client 31 read -> {"status":"running","version":60} (steps 500 to 501)'
    )


def test_a_history_that_is_too_wide_is_given_up_aloud() -> None:
    told = Told()
    told.start(0, 1)
    for number in range(60):
        told("send", 2, 100, {"received": bool(number % 2)}, key=f"k{number // 2}", name="paid")

    with pytest.raises(Undecided):
        check_instance(told.operations, most_visits=100)


# --- histories of the real rules --------------------------------------------------------------------------------------


def process() -> Graph:
    """A saga with two tasks, then a message, then a task that stops at an incident when it fails."""
    undo = UndoTask(handler="undo")
    nodes = (
        Start(id="start"),
        Saga(id="saga"),
        Start(id="saga/start", within="saga"),
        Task(id="saga/a", within="saga", handler="a", undo=undo),
        Task(id="saga/b", within="saga", handler="b", undo=undo),
        End(id="saga/end", within="saga"),
        Receive(id="paid", message="paid"),
        Task(id="last", handler="last"),
        End(id="end"),
    )
    outside = itertools.pairwise(["start", "saga", "paid", "last", "end"])
    inside = itertools.pairwise(["saga/start", "saga/a", "saga/b", "saga/end"])
    edges = [Edge(id=f"{source}-{target}", source=source, target=target) for source, target in (*outside, *inside)]
    return Graph(Definition(name="p", nodes=nodes, edges=tuple(edges), open_inputs=True))


GRAPH = process()


class Play:
    """The real rules, served one command at a time, while calls overlap around the moments at which they are served."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.instance = Instance()
        self.version = 0
        self.sends = 0
        self.answers: dict[str, tuple[str, Any]] = {}
        self.operations: list[Operation] = []
        self._joins_commit = False

    def run(self, calls: int, *, clients: int) -> list[Operation]:
        self._serve(1, "start")
        for number in range(2, calls + 1):
            for _ in range(self.random.randrange(3)):
                self._move()
            kinds = ["start", "send", "send", "pause", "resume", "resume", "resolve", "read", "read", "read", "read"]
            self._serve(number, self.random.choice(kinds if self.random.random() < 0.97 else ["cancel"]))
        self._let_overlap(clients)
        return self.operations

    def _serve(self, number: int, call: str) -> None:
        parameters = self._parameters(call)
        key = f"k{self.random.randrange(6)}" if call not in ("start", "read") and self.random.random() < 0.4 else ""
        operation = Operation(
            number=number, client="", call=call, instance="i-1", parameters=parameters, key=key, invoked=0
        )
        fate = self.random.random()
        if fate < 0.05:
            operation.is_unknown = True  # It was never carried out.
        elif call == "read":
            self._read(operation)
        else:
            self._answer(operation)
        if fate > 0.92:
            operation.is_unknown, operation.answer, operation.error = True, None, "Died"
        self.operations.append(operation)

    def _parameters(self, call: str) -> dict[str, Any]:
        if call == "start":
            return {"process": "p", "variables": {"n": self.random.choice("112")}}
        if call == "send":
            return {"name": self.random.choice(["paid", "sent"])}
        return {"how": self.random.choice(["retry", "skip", "fail"])} if call == "resolve" else {}

    def _answer(self, operation: Operation) -> None:
        """As the runtime promises: under a known key nothing is done again."""
        content = msgspec.json.encode([operation.call, operation.parameters]).decode()
        if operation.key in self.answers:
            first, answer = self.answers[operation.key]
            operation.answer = answer if first == content else None
            operation.error = "" if first == content else "Conflict"
            return
        decision = self._decide(self._command(operation))
        if decision.refusal is not None:
            operation.error = type(decision.refusal).__name__
            return
        operation.answer = decision.answer
        self.sends += operation.call == "send"
        if operation.key:
            self.answers[operation.key] = (content, decision.answer)

    def _command(self, operation: Operation) -> c.AnyCommand:
        given = operation.parameters
        if operation.call == "start":
            return c.Start(at_ms=0, id="i-1", given_digest=given["variables"]["n"], variables=given["variables"])
        if operation.call == "send":
            return c.Send(at_ms=0, name=given["name"])
        if operation.call == "resolve":
            return c.Resolve(at_ms=0, how=given["how"])
        kinds: dict[str, type[c.Cancel | c.Pause | c.Resume]] = {
            "cancel": c.Cancel,
            "pause": c.Pause,
            "resume": c.Resume,
        }
        return kinds[operation.call](at_ms=0)

    def _decide(self, command: c.AnyCommand) -> Decision:
        decision = decide(self.instance, GRAPH, command)
        if decision.entry is not None:
            self.version += not self._joins_commit
            self._joins_commit = self.random.random() < 0.3
        return decision

    def _read(self, operation: Operation) -> None:
        self._joins_commit = False  # What is read is committed.
        if not self.instance.exists:
            return
        outcome = self.instance.outcome
        operation.answer = {
            "version": self.version,
            "status": self.instance.status.value,
            "outcome": None if outcome is None else outcome.value,
            "sends": self.sends,
        }

    def _move(self) -> None:
        """A handler comes back."""
        if not self.instance.exists:
            return
        out = [effect for effect in outstanding(self.instance, GRAPH) if isinstance(effect, fx.RunTask)]
        if not out:
            return
        task = self.random.choice(out)
        if self.random.random() < 0.8:
            self._decide(c.CompleteTask(at_ms=0, token=task.token, task=task.task, attempt=task.attempt))
        else:
            fault = Fault("failed", "no luck")
            self._decide(c.FailTask(at_ms=0, token=task.token, task=task.task, attempt=task.attempt, fault=fault))

    def _let_overlap(self, clients: int) -> None:
        """Stretch the calls to both sides, as far as each client does one thing at a time."""
        free = [0] * clients
        for place, operation in enumerate(self.operations):
            served = 10 * (place + 1)
            client = min(range(clients), key=lambda client: (free[client], client))
            operation.client = f"client {client}"
            operation.invoked = self.random.randint(min(free[client], served), served)
            returned = self.random.randint(served, served + 8 * clients)
            free[client] = returned
            if not (operation.is_unknown and self.random.random() < 0.5):
                operation.returned = returned
        self.operations.sort(key=lambda operation: operation.invoked)
        for number, operation in enumerate(self.operations, 1):
            operation.number = number


@settings(max_examples=300, deadline=None)
@given(st.integers(), st.integers(1, 60), st.integers(1, 6))
def test_whatever_the_rules_answer_can_be_ordered(seed: int, calls: int, clients: int) -> None:
    operations = Play(Random(seed)).run(calls, clients=clients)

    violation = check_instance(operations)

    assert violation is None


@settings(max_examples=60, deadline=None)
@given(st.integers(), st.integers(10, 60), st.integers(1, 6))
def test_two_reads_whose_answers_are_exchanged_cannot_be_ordered(seed: int, calls: int, clients: int) -> None:
    operations = Play(Random(seed)).run(calls, clients=clients)
    reads = [each for each in operations if each.call == "read" and each.is_acknowledged and each.answer]
    pairs = [
        (one, two)
        for one, two in itertools.combinations(reads, 2)
        if one.answer["version"] < two.answer["version"] and one.returned is not None and one.returned < two.invoked
    ]

    for one, two in pairs[-1:]:
        one.answer, two.answer = two.answer, one.answer

    assert (check_instance(operations) is not None) == bool(pairs)


def alter(operation: Operation) -> bool:
    """Change the answer of an acknowledged operation to one that nobody could have got; False if there is none."""
    if not operation.is_acknowledged or operation.answer is None:
        return False
    answer = dict(operation.answer)
    if operation.call == "read":
        answer["sends"] += 100
    elif operation.call in ("pause", "resume", "cancel"):
        answer["status"] = {"pause": "running", "resume": "paused", "cancel": "running"}[operation.call]
    elif operation.key:
        return False
    else:
        operation.error = {"send": "Conflict", "start": "UnknownInstance", "resolve": "Conflict"}[operation.call]
    operation.answer = answer
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(), st.integers(10, 60), st.integers(1, 6))
def test_an_answer_that_is_altered_is_found(seed: int, calls: int, clients: int) -> None:
    random = Random(seed)
    operations = Play(random).run(calls, clients=clients)

    is_altered = any(alter(operation) for operation in random.sample(operations, len(operations)))

    assert (check_instance(operations) is not None) == is_altered


@settings(max_examples=40, deadline=None)
@given(st.integers(), st.integers(2, 6))
def test_an_acknowledged_command_that_is_lost_is_found_by_who_counts(seed: int, clients: int) -> None:
    operations = Play(Random(seed)).run(40, clients=clients)
    counting = next((each for each in reversed(operations) if each.call == "read" and each.is_acknowledged), None)
    sent_before = [
        each
        for each in operations
        if each.call == "send"
        and counting is not None
        and each.is_acknowledged
        and (each.returned or 0) < counting.invoked
    ]
    keyless = [each for each in sent_before if not each.key]

    if keyless and counting is not None and counting.answer is not None:
        counting.answer["sends"] = len(keyless) - 1

        assert check_instance(operations) is not None


# --- the search against trying everything -----------------------------------------------------------------------------


def can_be_ordered_by_trying_everything(operations: list[Operation]) -> bool:
    """No memory, no pruning: every order of every subset of the open calls."""
    calls = calls_of(operations, answers_kept_ms=DAY_MS, shared_keys=frozenset())
    keys = 1 + max((call.key for call in calls), default=-1)
    return _tried(calls, State(keys=(None,) * keys))


def _tried(left: list[Call], state: State) -> bool:
    if all(call.is_open for call in left):
        return True
    for call in left:
        others = [other for other in left if other is not call]
        if any(other.returned < call.invoked for other in others):
            continue
        if call.is_open and call.kind == "read":
            continue
        if any(_tried(others, after) for after in states_after(state, call)):
            return True
    return False


@st.composite
def anything(draw: st.DrawFn) -> list[Operation]:
    """Few operations with answers out of the blue."""
    told = Told()
    statuses = ["running", "paused", "compensating", "cancelling", "ended"]
    for _ in range(draw(st.integers(1, 6))):
        call = draw(st.sampled_from(["start", "start", "send", "pause", "resume", "cancel", "read"]))
        invoked = draw(st.integers(0, 12))
        returned = draw(st.one_of(st.none(), st.integers(invoked, invoked + 8)))
        key = draw(st.sampled_from(["", "k"])) if call not in ("start", "read") else ""
        error = draw(st.sampled_from(["", "", "", "AlreadyEnded", "UnknownInstance", "Conflict"]))
        status = draw(st.sampled_from(statuses))
        if call == "read":
            told.read(invoked, returned, draw(st.integers(1, 3)), status, sends=draw(st.integers(0, 1)))
        elif call == "start":
            told.start(invoked, returned, new=draw(st.booleans()), n=draw(st.sampled_from("12")))
        else:
            told(call, invoked, returned, {"status": status}, error=error, key=key)
    return told.operations


@settings(max_examples=500, deadline=None)
@given(anything())
def test_the_search_finds_an_order_exactly_when_there_is_one(operations: list[Operation]) -> None:
    expected = can_be_ordered_by_trying_everything(operations)

    found = check_instance(operations) is None

    assert found == expected


@settings(max_examples=300, deadline=None)
@given(anything())
def test_whoever_is_named_contradicts_each_other_whatever_the_rest_did(operations: list[Operation]) -> None:
    violation = check_instance(operations)
    if violation is None:
        return

    left: list[Operation] = []
    for operation in operations:
        if f"#{operation.number} " not in violation.message:
            if operation.error or operation.call == "read":
                continue
            operation.is_unknown = True
        left.append(operation)

    assert not can_be_ordered_by_trying_everything(left)


def test_a_long_history_is_no_harder_than_its_windows() -> None:
    operations = Play(Random(7)).run(1_000, clients=6)

    violation = check_instance(operations)

    assert violation is None
