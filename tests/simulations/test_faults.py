"""Each fault really strikes, is survived, and has a check that would notice otherwise: shown on forged evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

import attrs
import msgspec
import pytest

import understudy.simulations.checkers
import understudy.simulations.faults  # noqa: F401  # These two fill the tables.
from understudy.actors.persistence import Health
from understudy.model import events as e
from understudy.model.commands import CompleteTask
from understudy.model.errors import UnderstudyError
from understudy.simulations.checkers.evidence import Evidence, Row, Wait
from understudy.simulations.checkers.typed import Typed
from understudy.simulations.clients import COPY
from understudy.simulations.clocks import START_MS
from understudy.simulations.faults.calls import FULL
from understudy.simulations.faults.change import ONE_MORE, NewVersion, OperatorBetweenLives, TwoAdopt, with_one_more
from understudy.simulations.faults.clock import DAY_MS, EDGES, CalendarEdge, Clocks, JumpBack
from understudy.simulations.faults.endings import DONE, LOST, endings_of
from understudy.simulations.faults.handlers import Dawdles, Hangs, Misconduct, Poison
from understudy.simulations.faults.orders import OutOfTheBlue, Stale, StaleResult
from understudy.simulations.faults.process import CrashAfterEffect, CrashWhileOpening, PauseBeyondLease
from understudy.simulations.keeping import Keeper, Rival
from understudy.simulations.ledger import Line
from understudy.simulations.operations import Operation
from understudy.simulations.playing import Outcome, play, silence
from understudy.simulations.plugins import FAULTS, QUARANTINE, REFUSE, SURVIVE, Fault, Scenario
from understudy.simulations.scenarios.mixed import MIXED
from understudy.simulations.script import Act, Conduct
from understudy.simulations.world import World

OFTEN = 1 / 20
SEEDS = range(4)
F = TypeVar("F", bound=Fault)


# --- small worlds -----------------------------------------------------------------------------------------------------


def work(world: World) -> None:
    """Twelve instances, half of which wait for a message, and somebody who looks at them."""
    ann, bob = world.client("ann"), world.client("bob")
    for number in range(12):
        given = {"n": str(number)}
        world.after(200 * number, lambda n=number, given=given: ann.start("mixed", f"m{n}", given))  # type: ignore[misc]
        message = {"name": "go", "about": str(number), "key": f"go-{number}"}
        world.after(250 * number + 900, lambda m=message: bob.call("publish", "", m))  # type: ignore[misc]
        world.after(310 * number, lambda n=number: bob.call("read", f"m{n}", {}))  # type: ignore[misc]


def alone(world: World) -> None:
    world.play(MIXED)
    Keeper(world).keep(world.node("a"))
    work(world)


def with_rivals(world: World) -> None:
    world.play(MIXED)
    limits = attrs.evolve(world.limits, lease_ms=500)
    for name in ("a", "b", "c"):
        Rival(world, world.node(name, limits=limits, beats=True))
    work(world)


ALONE = Scenario(name="alone", about="one node", begin=alone, steps=900)
WITH_RIVALS = Scenario(name="with rivals", about="three nodes", begin=with_rivals, steps=900)
HELPERS = {  # What gives a fault the occasion to strike.
    "clock skewed": "restart",
    "crash in recovery": "crash",
    "crash while opening": "crash",
    "operator between two lives": "crash",
    "stale result": "crash",
}
RIVALRY = ("pause beyond the lease", "two nodes adopt at once")


def played(name: str, seed: int) -> Outcome:
    names = [name, *([HELPERS[name]] if name in HELPERS else [])]
    faults = [FAULTS[each](Random(f"{seed}/{each}"), OFTEN) for each in names]
    return play(WITH_RIVALS if name in RIVALRY else ALONE, seed, faults=faults)


@contextmanager
def lived(*faults: Fault, seed: int = 0, scenario: Scenario = ALONE) -> Iterator[World]:
    """A world that has come to rest, still open."""
    world = World(seed)
    Evidence.of(world)
    with silence():
        for fault in faults:
            fault.arm(world)
        scenario.begin(world)
        world.run(scenario.steps)
        world.settle()
        yield world
    world.close()


def made(kind: type[F], rate: float = OFTEN) -> F:
    return kind(Random(1), rate)


def done_line(world: World) -> Line:
    """A call whose attempt has succeeded."""
    endings = endings_of(world)
    return next(line for line in world.ledger if (line.key, line.attempt) in endings and _how(world, line) == DONE)


def _how(world: World, line: Line) -> str:
    return endings_of(world)[line.key, line.attempt].how


def forge(world: World, change: Callable[[list[Row]], None]) -> None:
    """Let history say something else."""
    evidence = Evidence.of(world)
    evidence.forget()
    change(evidence.rows)


def asked(world: World, **fields: Any) -> Operation:
    """A call of which the world has a record."""
    given = {"client": "zoe", "call": "cancel", "instance": "m1", "parameters": {}, "key": "z", "invoked": 1}
    operation = Operation(number=len(world.operations) + 1, **{**given, **fields})
    world.operations.append(operation)
    return operation


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_strikes_and_is_survived(name: str) -> None:
    outcomes = [played(name, seed) for seed in SEEDS]

    assert sum(outcome.faults[name] for outcome in outcomes) > 0
    assert [str(violation) for outcome in outcomes for violation in outcome.violations] == []


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_same_seed_meets_the_same_faults(name: str) -> None:
    first, second = played(name, 1), played(name, 1)

    assert first.digest == second.digest
    assert first.faults == second.faults


def test_every_fault_says_of_which_kind_it_is_and_what_it_must_lead_to() -> None:
    kinds = {fault.kind for fault in FAULTS.values()}

    assert kinds == {"process", "handlers", "messages", "time", "storage", "change"}
    assert {fault.must for fault in FAULTS.values()} == {SURVIVE, REFUSE, QUARANTINE}
    assert all(fault.__doc__ for fault in FAULTS.values())


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_no_fault_strikes_once_the_world_settles(name: str) -> None:
    fault = FAULTS[name](Random(2), OFTEN)
    world = World(3)
    with silence():
        fault.arm(world)
        alone(world)
        world.run(300)
        late = ("handler is slow", "handler hangs", "poison", "mailbox full")  # What has begun ends on its own.
        before = world.counts[name]
        world.settle()
    world.close()

    assert name in late or world.counts[name] == before


# --- processes --------------------------------------------------------------------------------------------------------


def test_an_attempt_that_ended_although_its_process_died_after_the_effect_is_found() -> None:
    fault = made(CrashAfterEffect)
    with lived(fault) as world:
        assert list(fault.check(world)) == []
        assert {_how(world, line) for line in fault.struck if (line.key, line.attempt) in endings_of(world)} == {LOST}

        line = done_line(world)
        fault.struck.append(line)

        assert list(fault.check(world)) == [
            f"attempt {line.attempt} of {line.key} is done by commit "
            f"{endings_of(world)[line.key, line.attempt].seq}, but its process died before it could tell"
        ]


def test_a_process_that_never_came_up_after_deaths_while_opening_is_found() -> None:
    fault = made(CrashWhileOpening)
    with lived() as world:
        world.counts[fault.name] = 1
        assert list(fault.check(world)) == []

        for node in world.nodes:
            node.life = None

        assert list(fault.check(world)) == ["processes have died while opening, and none came up after them"]


def test_processes_die_at_different_statements_while_they_open() -> None:
    statements: list[str] = []
    fault = made(CrashWhileOpening)
    world = World(5)
    fault.arm(world)

    def tap(statement: str, run: Callable[[], Any]) -> Any:
        statements.append(statement)
        return run()

    world.tap(tap)
    with silence():
        for _ in range(40):
            statements.append("open")
            if world.node("a").open() is not None:
                world.nodes.pop().kill()
    world.close()

    died_at = [last for last, after in zip(statements, [*statements[1:], "open"], strict=True) if after == "open"]
    assert len(set(died_at)) > 5


def test_an_owner_that_was_replaced_and_does_not_know_is_found() -> None:
    fault = made(PauseBeyondLease)
    with lived(fault, scenario=WITH_RIVALS) as world:
        assert world.counts[fault.name] > 0
        assert list(fault.check(world)) == []

        owner = world.owner
        assert owner is not None
        fault.stopped.append(owner)
        world.highest_epoch += 1

        assert list(fault.check(world)) == [
            f"{owner.name} of epoch {owner.epoch} was replaced, and still believes that it owns the file"
        ]


# --- handlers ---------------------------------------------------------------------------------------------------------

MISCONDUCTS = [fault for fault in FAULTS.values() if issubclass(fault, Misconduct)]


@pytest.mark.parametrize("kind", MISCONDUCTS, ids=lambda kind: kind.name)
def test_a_success_that_no_handler_had_is_found(kind: type[Misconduct]) -> None:
    fault = made(kind)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        line = done_line(world)
        fault.struck = [(line, Act(kind.conduct))]

        (found,) = fault.check(world)
        assert f"attempt {line.attempt} of {line.key}" in found
        assert "is done by commit" in found


@pytest.mark.parametrize("kind", [kind for kind in MISCONDUCTS if kind is not Hangs], ids=lambda kind: kind.name)
def test_a_failure_for_another_reason_than_the_handlers_own_is_found(kind: type[Misconduct]) -> None:
    fault = made(kind)
    with lived(fault) as world:
        line, act = fault.struck[0]
        forge(world, lambda rows: _reword(rows, line.instance))

        assert any("failed as 'it rained'" in words for words in fault.check(world)), (line, act)


def _reword(rows: list[Row], instance: str) -> None:
    for row in rows:
        for entry in row.entries:
            entry.events[:] = [
                msgspec.structs.replace(event, message="it rained")
                if row.instance == instance and isinstance(event, e.AttemptFailed)
                else event
                for event in entry.events
            ]


def test_an_attempt_that_took_longer_than_it_may_and_succeeded_is_found() -> None:
    fault = made(Dawdles)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        line = next(line for line in world.ledger.of("first") if _how(world, line) == DONE)
        fault.struck.append((line, Act(Conduct.SUCCEED, 2_001)))

        (found,) = fault.check(world)
        assert f"attempt {line.attempt} of {line.key} is done" in found
        assert found.endswith("after 2001 ms of 2000")


def test_an_attempt_of_a_poisonous_handler_that_succeeded_is_found() -> None:
    fault = made(Poison)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        fault.struck.append(done_line(world))

        assert any("is done by commit" in words for words in fault.check(world))


def test_a_failure_that_nothing_follows_is_found() -> None:
    fault = made(Poison)
    with lived(fault) as world:
        instance = fault.struck[0].instance
        forge(world, lambda rows: _leave_only_failures(rows, instance))

        assert any(words.startswith(f"{instance}: an attempt has failed") for words in fault.check(world))


def _leave_only_failures(rows: list[Row], instance: str) -> None:
    for row in rows:
        for entry in row.entries:
            failures = [event for event in entry.events if isinstance(event, e.AttemptFailed)]
            if row.instance == instance and failures:
                entry.events[:] = failures


def test_an_instance_that_stands_still_beside_a_poisoned_one_is_found() -> None:
    fault = made(Poison)
    with lived(fault) as world:
        evidence = Evidence.of(world)
        evidence.instances["m99"] = evidence.instances["m1"]._replace(id="m99", status="running", is_runnable=True)

        assert f"m99 has never met {fault.handler}, and yet has not gone on" in list(fault.check(world))


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["call lost", "call late", "call doubled", "calls reordered", "answer lost"])
def test_a_caller_who_was_left_without_an_answer_is_found(name: str) -> None:
    fault = FAULTS[name](Random(1), OFTEN)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        asked(world, error="TimedOut", is_unknown=True)

        assert list(fault.check(world)) == ["zoe asked for cancel m1 z at step 1, and was left with TimedOut"]


def test_the_second_copy_of_a_call_needs_no_answer() -> None:
    fault = FAULTS["call doubled"](Random(1), OFTEN)
    with lived(fault) as world:
        copies = [operation for operation in world.operations if operation.reason == COPY]

        assert copies
        assert all(operation.is_unknown and operation.returned is None for operation in copies)
        assert list(fault.check(world)) == []


def test_what_could_happen_twice_is_neither_doubled_nor_repeated() -> None:
    faults = [FAULTS[name](Random(1), 1.0) for name in ("call lost", "call doubled")]
    with lived(*faults) as world:
        asked_for = len(world.operations)
        world.is_settling = False
        world.clients[0].call("send", "m1", {"id": "m1", "name": "go"})
        world.is_settling = True
        world.rest()

        assert len(world.operations) == asked_for + 1


def test_somebody_who_is_turned_away_with_anything_but_unavailable_is_found() -> None:
    fault = FAULTS["mailbox full"](Random(1), OFTEN)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        operation = asked(world, returned=2, error="Rejected", reason=f"2 {FULL}")

        assert f"operation {operation.number} was turned away with Rejected" in list(fault.check(world))


# --- orders -----------------------------------------------------------------------------------------------------------


def test_an_attempt_that_ended_twice_is_found() -> None:
    fault = FAULTS["result told twice"](Random(1), OFTEN)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        forge(world, lambda rows: rows.append(_with(rows, e.TaskCompleted)))

        assert any("ended again" in words for words in fault.check(world))


@pytest.mark.parametrize("name", ["timer fired twice", "message delivered twice"])
def test_a_wait_that_was_consumed_twice_is_found(name: str) -> None:
    fault = FAULTS[name](Random(1), OFTEN)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        forge(world, lambda rows: rows.append(_with(rows, e.WaitConsumed)))

        assert any("was consumed again" in words for words in fault.check(world))


def _with(rows: list[Row], kind: type[e.Event]) -> Row:
    """A second commit of the first event of a kind."""
    for row in rows:
        for entry in row.entries:
            for event in entry.events:
                if isinstance(event, kind):
                    again = msgspec.structs.replace(entry, events=[event])
                    return msgspec.structs.replace(row, seq=rows[-1].seq + 1, entries=[again])
    raise AssertionError(kind)


def test_a_result_of_a_former_life_that_was_used_is_found() -> None:
    fault = made(StaleResult)
    with lived(fault) as world:
        line = done_line(world)
        command = CompleteTask(at_ms=0, token=1, task=int(line.key.split("/")[1]), attempt=line.attempt)

        fault.stale.append(Stale(line.instance, command, line.epoch + 1))
        assert list(fault.check(world)) == []
        fault.stale.append(Stale(line.instance, command, line.epoch))

        (found,) = fault.check(world)
        assert found.endswith("with a result of a former life")


def test_an_instance_that_exists_only_because_it_was_woken_is_found() -> None:
    fault = made(OutOfTheBlue)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        world.clients[0].start("mixed", "nobody", {"n": "1"})
        world.rest()

        assert "an instance that nobody has started is there, because it was woken" in list(fault.check(world))


# --- time -------------------------------------------------------------------------------------------------------------

TIME = [name for name, fault in sorted(FAULTS.items()) if fault.kind == "time"]


@pytest.mark.parametrize("name", [*TIME, "woken out of the blue"])
def test_a_timer_that_was_consumed_early_is_found(name: str) -> None:
    fault = FAULTS[name](Random(1), OFTEN)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        forge(world, _fire_early)

        assert any("ms early, with commit" in words for words in fault.check(world))


def _fire_early(rows: list[Row]) -> None:
    for row in rows:
        row.entries[:] = [
            msgspec.structs.replace(entry, at_ms=START_MS - 100 * 365 * DAY_MS) if entry.cause == "timer" else entry
            for entry in row.entries
        ]


@pytest.mark.parametrize("name", TIME)
def test_a_timer_that_was_forgotten_is_found(name: str) -> None:
    fault = FAULTS[name](Random(1), OFTEN)
    with lived(fault) as world:
        evidence = Evidence.of(world)
        evidence.instances["m1"] = evidence.instances["m1"]._replace(status="running", outcome=None)
        evidence.waits.append(Wait("m1", 77, 1, "timer", "", "", START_MS))

        assert any(words.startswith("wait 77 of m1 was due") for words in fault.check(world))


def test_a_writer_that_waits_for_the_clock_before_it_tries_again_is_found() -> None:
    fault = made(JumpBack)
    world = World(1)
    with silence():
        fault.arm(world)
        alone(world)
        world.run(50)
        life = world.owner
        assert life is not None
        life.system.health = Health.DEGRADED
        world.settle()
    world.close()

    assert any("has not looked for its database again" in words for words in Clocks.of(world).broken)


def test_clocks_end_at_the_latest_time_that_any_has_shown() -> None:
    fault = made(JumpBack)
    with lived(fault) as world:
        life = world.owner

        assert world.counts[fault.name] > 0
        assert life is not None
        assert life.clock.skew_ms == life.node.skew_ms == 0


def test_a_clock_before_a_calendar_edge_stands_within_a_second_of_it() -> None:
    fault = made(CalendarEdge)
    moments = {START_MS + fault.draw(START_MS) for _ in range(50)}

    assert len(moments) > 20
    assert all(any(0 < edge - moment < 1_000 for edge in EDGES) for moment in moments)
    assert fault.draw(max(EDGES)) == 0


# --- storage ----------------------------------------------------------------------------------------------------------

STORAGE = [name for name, fault in sorted(FAULTS.items()) if fault.kind == "storage"]


@pytest.mark.parametrize("name", STORAGE)
def test_trouble_that_passes_and_is_told_as_damage_is_found(name: str) -> None:
    fault = FAULTS[name](Random(1), OFTEN)
    with lived(fault) as world:
        assert list(fault.check(world)) == []

        asked(world, returned=2, error="Damaged", reason="the file is damaged")

        assert any("was told Damaged: the file is damaged" in words for words in fault.check(world))


@pytest.mark.parametrize("name", STORAGE)
def test_a_writer_that_does_not_recover_is_found(name: str) -> None:
    fault = FAULTS[name](Random(1), OFTEN)
    with lived(fault) as world:
        life = world.owner
        assert life is not None
        life.system.health, life.system.reason = Health.DEGRADED, "it rained"

        assert f"{life.name} is degraded (it rained), and the trouble is over" in list(fault.check(world))


# --- change -----------------------------------------------------------------------------------------------------------


def test_a_new_version_has_one_more_step_and_is_a_valid_process() -> None:
    changed = with_one_more(MIXED.definition)

    assert changed is not None
    assert changed.digest != MIXED.definition.digest
    assert {node.id for node in changed.nodes} - {node.id for node in MIXED.definition.nodes} == {ONE_MORE}
    assert with_one_more(attrs.evolve(MIXED.definition, edges=())) is None


def test_an_instance_that_takes_a_step_of_a_version_it_was_not_started_with_is_found() -> None:
    fault = made(NewVersion, 1 / 200)
    with lived(fault) as world:
        assert list(fault.check(world)) == []
        old = world.peek("SELECT id FROM instance WHERE definition = 1 ORDER BY no")[0][0]

        world.ledger.add(msgspec.structs.replace(world.ledger.lines[0], handler=ONE_MORE, instance=old))

        assert f"{old} was started before {ONE_MORE} was part of mixed, and yet called it" in list(fault.check(world))


def test_an_instance_that_leaves_out_a_step_of_its_version_is_found() -> None:
    fault = made(NewVersion)
    with lived(fault) as world:
        new = next(line.instance for line in world.ledger.of(ONE_MORE))

        world.ledger.lines[:] = [line for line in world.ledger if line.handler != ONE_MORE]

        assert f"{new} was started with {ONE_MORE}, and has ended without it" in list(fault.check(world))


def test_two_nodes_that_both_own_the_file_are_found() -> None:
    fault = made(TwoAdopt)
    with lived(fault, scenario=WITH_RIVALS) as world:
        assert {len(granted) for _, granted in fault.contests} <= {0, 1}
        assert sum(len(granted) for _, granted in fault.contests) > 0

        fault.contests.append((7, [8, 9]))

        assert list(fault.check(world)) == ["both of two nodes that have seen epoch 7 own the file, as epochs [8, 9]"]


def test_whatever_moves_while_only_an_operator_is_there_is_found() -> None:
    fault = made(OperatorBetweenLives)
    with lived(fault, FAULTS["crash"](Random(2), OFTEN)) as world:
        assert fault.epochs
        assert list(fault.check(world)) == []

        line = world.ledger.lines[0]
        fault.epochs.append(line.epoch)

        found = list(fault.check(world))
        assert f"{line.handler} was called for {line.instance} while only an operator was there" in found
        assert any("TaskOpened with commit" in words for words in found)


# --- what clients are told --------------------------------------------------------------------------------------------


def test_an_error_that_is_none_of_ours_is_found() -> None:
    with lived() as world:
        assert list(Typed().find(world)) == []

        asked(world, returned=2, error="OperationalError", reason="disk I/O error")

        (found,) = Typed().find(world)
        assert "that is none of our errors" in str(found)


def test_an_error_that_asks_to_be_reported_is_found() -> None:
    with lived() as world:
        asked(world, returned=2, error=UnderstudyError.__name__, reason="m1 met an internal error; please report it")

        (found,) = Typed().find(world)
        assert "internal error" in str(found)


@pytest.mark.parametrize("error", ["Closed", "Fenced", "Unavailable"])
def test_a_promise_that_nothing_was_done_is_found_if_it_was(error: str) -> None:
    with lived() as world:
        start = next(operation for operation in world.operations if operation.call == "start")
        start.error, start.reason = error, "nothing was done"

        (found,) = Typed().find(world)
        assert f"operation {start.number} (start) was told {error}: nothing was done; but it was committed" in str(
            found
        )


def test_a_promise_that_nothing_was_done_is_no_lie_if_another_call_did_it() -> None:
    with lived() as world:
        start = next(operation for operation in world.operations if operation.call == "start")
        start.error = "Unavailable"
        asked(world, call="start", key="", instance=start.instance, invoked=start.invoked, returned=start.returned)

        assert list(Typed().find(world)) == []
