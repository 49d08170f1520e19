"""The scenarios: they hold, they come to the rare states that they are there for, and their checks can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import attrs
import msgspec
import pytest

import understudy.simulations.checkers
import understudy.simulations.faults
import understudy.simulations.scenarios  # noqa: F401  # These three fill the tables.
from understudy.model.kinds import KINDS, rules_of
from understudy.model.states import Outcome
from understudy.opening import bind
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.keeping import Keeper, Rival
from understudy.simulations.node import Life
from understudy.simulations.operations import Operation
from understudy.simulations.playing import play, silence
from understudy.simulations.plugins import PROBES, SCENARIOS
from understudy.simulations.probes import Probed
from understudy.simulations.random_process import random_process, refusing
from understudy.simulations.scenarios.fork_and_join import FORK_AND_JOIN
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, incidents, unended
from understudy.simulations.world import World

LONG = ("fan", "long_loop")
SHORT = sorted(name for name in SCENARIOS if name not in LONG)
THE_TWELVE = (
    "fork_and_join",
    "nested_joins",
    "saga_failures",
    "timer_against_cancel",
    "message_before_wait",
    "time_to_live",
    "fan",
    "long_loop",
    "handover",
    "poison",
    "deployment",
    "subscriber",
)

# --- all of them ------------------------------------------------------------------------------------------------------


def test_all_twelve_are_there_and_say_what_they_are_about() -> None:
    assert set(THE_TWELVE) < set(SCENARIOS)
    assert all(scenario.about for scenario in SCENARIOS.values())


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("name", SHORT)
def test_a_scenario_holds(name: str, seed: int) -> None:
    outcome = play(name, seed)

    assert outcome.violations == (), outcome.replay
    assert outcome.commits > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_long_scenario_holds(name: str) -> None:
    outcome = play(name, 5)

    assert outcome.violations == (), outcome.replay
    assert outcome.commits > 3_000


@pytest.mark.parametrize("name", SHORT)
def test_a_scenario_holds_without_any_fault(name: str) -> None:
    outcome = play(name, 3, faults=())

    assert outcome.violations == (), outcome.replay


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in SHORT if SCENARIOS[name].probes))
def test_a_scenario_comes_to_the_rare_states_that_it_is_there_for(name: str) -> None:
    missing = set(SCENARIOS[name].probes)

    for seed in range(150):
        missing -= set(play(name, seed).probes)
        if not missing:
            break

    assert not missing


def test_the_rare_states_that_scenarios_name_are_described() -> None:
    named = {probe for scenario in SCENARIOS.values() for probe in scenario.probes}

    assert named <= set(PROBES)


# --- their checks -----------------------------------------------------------------------------------------------------


def found_after(name: str, tamper: Callable[[World], None], *, seed: int = 3) -> list[str]:
    """What the check of a scenario says when somebody has tampered with the evidence of a quiet world."""
    scenario = SCENARIOS[name]
    found: list[str] = []

    def check(world: World) -> Iterator[str]:
        assert list(scenario.check(world)) == []
        tamper(world)
        Evidence.of(world).forget()
        found.extend(scenario.check(world))
        return iter(())

    play(attrs.evolve(scenario, check=check), seed, faults=())
    return found


def called_again(handler: str) -> Callable[[World], None]:
    def tamper(world: World) -> None:
        line = world.ledger.of(handler)[0]
        world.ledger.add(msgspec.structs.replace(line, key=f"{line.instance}/99"))

    return tamper


def statement(text: str) -> Callable[[World], None]:
    def tamper(world: World) -> None:
        world.peek(text)

    return tamper


def undone_the_other_way_round(world: World) -> None:
    lines = [line for line in world.ledger if line.handler.startswith("saga_undo_")]
    several = next(line.instance for line in lines if sum(other.instance == line.instance for other in lines) > 1)
    places = [place for place, line in enumerate(world.ledger.lines) if line in lines and line.instance == several]
    turned = [world.ledger.lines[place] for place in reversed(places)]
    for place, line in zip(places, turned, strict=True):
        world.ledger.lines[place] = line


def a_message_that_is_nowhere(world: World) -> None:
    request = {"name": "news", "about": "1", "payload": "999999", "key": "k"}
    world.operations.append(
        Operation(
            number=0, client="x", call="publish", instance="", parameters=request, invoked=1, returned=2, answer={}
        )
    )


def a_delivery_less(world: World) -> None:
    del world.subscribers[1].deliveries[-1]


@pytest.mark.parametrize(
    ("name", "tamper", "words"),
    [
        ("fork_and_join", called_again("fork_sum"), "under 2 keys"),
        ("fork_and_join", statement("UPDATE instance SET result = '1' WHERE no = 3"), "has the result 1"),
        ("nested_joins", statement("UPDATE instance SET result = '[1]' WHERE no = 3"), "has the result [1]"),
        ("saga_failures", undone_the_other_way_round, "has undone"),
        ("saga_failures", statement("UPDATE instance SET outcome = 'completed'"), "is completed"),
        ("timer_against_cancel", called_again("timer_rang"), "only a timer leads to"),
        ("message_before_wait", statement("UPDATE instance SET result = '[111, 111, 222]' WHERE no = 1"), "understood"),
        ("time_to_live", a_message_that_is_nowhere, "neither used nor there"),
        ("handover", statement("UPDATE history SET epoch = epoch + 1 WHERE seq = 5"), "after one of epoch"),
        ("poison", statement("DELETE FROM incident"), "with 0 incidents"),
        ("deployment", statement("UPDATE instance SET outcome = 'failed' WHERE no = 2"), "should have ended as"),
        ("subscriber", a_delivery_less, "has missed 1 commits"),
    ],
)
def test_a_check_sees_what_is_wrong(name: str, tamper: Callable[[World], None], words: str) -> None:
    found = found_after(name, tamper)

    assert any(words in text for text in found), found


def test_a_transactional_task_that_was_done_twice_is_seen() -> None:
    def tamper(world: World) -> None:
        world.peek("CREATE TABLE IF NOT EXISTS effects (key TEXT NOT NULL)")
        world.peek("INSERT INTO effects VALUES ('r1/1'), ('r1/1')")

    found = found_after("random_processes", tamper)

    assert found == ["the transactional task of r1/1 has left 2 effects"]


# --- processes that nobody has written --------------------------------------------------------------------------------


def test_a_drawn_process_is_always_valid_and_the_same_for_the_same_seed() -> None:
    for seed in range(120):
        process = random_process(Random(seed), "p")
        again = random_process(Random(seed), "p")

        assert process.definition.digest == again.definition.digest


def test_drawn_processes_have_every_kind_of_node() -> None:
    processes = [random_process(Random(seed), "p") for seed in range(120)]

    nodes = [node for process in processes for node in process.definition.nodes]
    assert {rules_of(node).name for node in nodes} == set(KINDS)
    assert any(getattr(node, "undo", None) for node in nodes)
    assert any(getattr(node, "transactional", False) for node in nodes)
    assert any(refusing(process) for process in processes)


def test_several_drawn_processes_go_together() -> None:
    processes = [random_process(Random(seed), f"p{seed}") for seed in range(3)]

    bound = bind(processes)

    assert len(bound.handlers) == sum(len(process.handlers) for process in processes)


# --- workloads and keepers --------------------------------------------------------------------------------------------


def a_world(seed: int = 1) -> Iterator[World]:
    world = World(seed, limits=LIMITS)
    with silence():
        yield world
    world.close()


world = pytest.fixture(a_world)


def test_a_crowd_stops_when_the_world_settles(world: World) -> None:
    Keeper(world).keep(world.node("a"))
    crowd = Crowd(world, "ann")
    crowd.often((10, 20), lambda: crowd.look("nobody"))

    world.run(100)
    asked = len(world.operations)
    world.settle()

    assert asked > 5
    assert len(world.operations) == asked


def test_what_is_asked_for_twice_is_the_same_under_the_same_key(world: World) -> None:
    world.play(FORK_AND_JOIN)
    Keeper(world).keep(world.node("a"))
    crowd = Crowd(world, "ann", "bob", twice=1.0)
    crowd.later((50, 51), lambda: crowd.start(FORK_AND_JOIN.name, "f1", n=1))
    crowd.later((100, 101), lambda: crowd.order("cancel", "f1"))

    world.run(300)

    starts = [operation.answer for operation in world.operations if operation.call == "start"]
    cancels = [operation for operation in world.operations if operation.call == "cancel"]
    assert [answer["new"] for answer in starts] == [True, False]
    assert cancels[0].key == cancels[1].key
    assert cancels[0].answer == cancels[1].answer


def test_a_janitor_ends_what_is_paused_or_stuck(world: World) -> None:
    world.play(FORK_AND_JOIN)
    Keeper(world).keep(world.node("a"))
    world.stand_ins["fork_one"] = failing_until_settled(world)
    crowd = Crowd(world, "ann", twice=0)
    for number in range(2):
        crowd.start(FORK_AND_JOIN.name, f"f{number}", n=number)
    crowd.later((50, 51), lambda: crowd.order("pause", "f1"))
    Janitor(world)

    world.run(400)
    stuck = incidents(world)
    world.settle()

    assert stuck
    assert unended(world) == []
    assert world.peek("SELECT DISTINCT outcome FROM instance") == [(Outcome.COMPLETED.value,)]


def failing_until_settled(world: World) -> Callable[[], int]:
    def fail() -> int:
        if not world.is_settling:
            raise ValueError("not yet")
        return 1

    return fail


def test_a_rival_takes_over_from_an_owner_that_stands_still_and_the_owner_steps_down(world: World) -> None:
    old, new = (world.node(name, beats=True) for name in ("old", "new"))
    Rival(world, old)
    Rival(world, new)
    world.run(60)
    before = world.owner
    old.pause()
    world.after(3 * LIMITS.lease_ms, old.resume)
    fenced: list[Life] = []
    world.on_lost.append(fenced.append)

    world.run(400)

    after = world.owner
    assert [life and life.node for life in (before, after)] == [old, new]
    assert fenced == [before]
    assert world.probes["took_over_from_a_hung_owner"] == 1


# --- rare states ------------------------------------------------------------------------------------------------------


def test_a_join_that_fires_in_a_later_life_is_recognised(world: World) -> None:
    probed = Probed()
    probed.watch(world)
    world.play(FORK_AND_JOIN)
    node = world.node("a")
    Keeper(world).keep(node)
    crowd = Crowd(world, "ann", twice=0)
    crowd.start(FORK_AND_JOIN.name, "f1", n=1)
    crowd.later((150, 151), lambda: node.kill("between two branches"))

    world.run(400)
    probed.find(world)

    assert world.probes["join_after_crash"] == 1
    assert world.probes["timer_fired_after_restart"] == 1
    assert "attempt_lost" not in world.probes


def test_a_handler_that_kills_its_process_three_times_is_recognised(world: World) -> None:
    probed = Probed()
    probed.watch(world)
    world.play(FORK_AND_JOIN)
    Keeper(world).keep(world.node("a"))
    world.stand_ins["fork_three"] = lambda: world.doom(world.owner, "its handler")  # type: ignore[arg-type]  # It is up.
    Crowd(world, "ann", twice=0).start(FORK_AND_JOIN.name, "f1", n=1)

    world.run(600)
    probed.find(world)

    assert world.lives == 4
    assert world.probes["attempt_lost"] == 3
    assert world.probes["third_lost_attempt_incident"] == 1
