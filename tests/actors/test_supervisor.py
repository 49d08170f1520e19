"""Timers are never early and never lost; what a crash has left moves again; and memory holds only what is near."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy import Limits, Process, Retry, sleep, task, wait
from understudy.actors import supervisor
from understudy.actors.supervisor import HORIZON_MS, SupervisorActor
from understudy.model import commands as c
from understudy.model.events import AttemptLost, InstanceEnded, WaitConsumed
from understudy.model.instance import Fault
from understudy.store.writer import Publish

if TYPE_CHECKING:
    from tests.actors.conftest import Theatre

Make = Callable[..., "Theatre"]
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

napping = Process("napping", sleep("30s"))
sleeping = Process("sleeping", sleep("10h"))


def _ended(theatre: Theatre, *ids: str) -> list[bool]:
    return [theatre.status(id) == "ended" for id in ids]


def _actor(theatre: Theatre) -> SupervisorActor:
    actor = theatre.system.supervisor.inbox.actor
    assert isinstance(actor, SupervisorActor)
    return actor


# --- timers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("process", "due_ms"), [(napping, 30_000), (sleeping, 10 * HOUR_MS)])
def test_a_timer_fires_at_its_moment_and_not_a_millisecond_before(
    theatre: Make, process: Process[Any, Any], due_ms: int
) -> None:
    world = theatre(process)
    world.start("one", process.name)

    world.pass_ms(due_ms - 1)
    assert _ended(world, "one") == [False]
    world.pass_ms(1)

    assert _ended(world, "one") == [True]
    assert len(world.events("one", WaitConsumed)) == 1


def test_a_far_timer_is_not_kept_in_memory_and_rings_no_alarm_before_its_time(theatre: Make) -> None:
    world = theatre(sleeping)
    for number in range(50):
        world.start(f"{number}", "sleeping")
    world.play()
    actor = _actor(world)

    end_ms = world.clock.now_ms() + 9 * HOUR_MS
    rings = 0
    while (due_ms := world.clock.next_due_ms()) is not None and due_ms < end_ms:
        world.clock.set(due_ms)
        world.play()
        rings += 1

    assert actor._timers == []
    assert rings <= 11  # For those that leave memory, and each hour for what has expired: none for timers.


def test_a_timer_that_becomes_due_while_nobody_lives_fires_once_at_the_restart(theatre: Make) -> None:
    world = theatre(napping, sleeping)
    world.start("near", "napping")
    world.start("far", "sleeping")
    world.play()
    world.crash()

    world.clock.jump(DAY_MS)
    world.open()
    world.play()

    assert _ended(world, "near", "far") == [True, True]
    assert [len(world.events(id, WaitConsumed)) for id in ("near", "far")] == [1, 1]
    world.pass_ms(DAY_MS)
    assert [len(world.events(id, WaitConsumed)) for id in ("near", "far")] == [1, 1]


def test_a_clock_that_is_set_back_fires_nothing_twice_and_nothing_early(theatre: Make) -> None:
    world = theatre(napping)
    world.start("before", "napping")
    world.pass_ms(30_000)
    world.start("after", "napping")
    world.play()

    world.clock.jump(-DAY_MS)
    world.play()
    assert _ended(world, "before", "after") == [True, False]
    world.pass_ms(DAY_MS + 29_999)
    assert _ended(world, "before", "after") == [True, False]
    world.pass_ms(1)

    assert _ended(world, "before", "after") == [True, True]
    assert len(world.events("before", WaitConsumed)) == 1


def test_a_clock_that_is_set_forward_fires_whatever_is_due_by_then(theatre: Make) -> None:
    world = theatre(napping, sleeping)
    world.start("near", "napping")
    world.start("far", "sleeping")
    world.play()

    world.clock.jump(30 * DAY_MS)
    world.play()

    assert _ended(world, "near", "far") == [True, True]


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # It makes a new world each time.
@given(steps=st.lists(st.sampled_from(["start", "pass", "crash", "back", "forward"]), min_size=4, max_size=12))
def test_no_timer_is_early_or_lost_whatever_happens_meanwhile(theatre: Make, steps: list[str]) -> None:
    world = theatre(napping)
    due_ms: dict[str, int] = {}

    for number, step in enumerate(steps):
        if step == "start":
            world.start(f"{number}", "napping")
            due_ms[f"{number}"] = world.clock.now_ms() + 30_000
        elif step == "pass":
            world.pass_ms(11_000)
        elif step == "crash":
            world.crash()
            world.open()
        else:
            world.clock.jump(-HOUR_MS if step == "back" else HOUR_MS)
        world.play()

        for id, due in due_ms.items():
            ended_ms = world.reads.summary(id).ended_ms
            assert len(world.events(id, InstanceEnded)) <= 1
            assert world.clock.now_ms() < due if ended_ms is None else ended_ms >= due

    world.pass_ms(2 * DAY_MS)
    assert all(_ended(world, *due_ms))


# --- floods -----------------------------------------------------------------------------------------------------------


def test_more_timers_than_are_read_at_once_all_fire_once(theatre: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MOST_TIMERS", 20)
    world = theatre(napping)
    for number in range(90):
        world.start(f"{number}", "napping")  # All of them are due in the same millisecond.
    world.play()
    world.crash()
    world.clock.jump(60_000)
    world.open()

    world.pass_ms(1_000)

    assert all(_ended(world, *(f"{number}" for number in range(90))))
    assert all(len(world.events(f"{number}", WaitConsumed)) == 1 for number in range(90))
    assert _actor(world).fired <= 110


@pytest.mark.slow
def test_more_than_ten_thousand_timers_of_one_minute_all_fire(theatre: Make) -> None:
    world = theatre(napping, limits=Limits(in_flight=20_000))
    count = supervisor.MOST_TIMERS + 200
    for number in range(count):
        world.start(f"{number}", "napping")
        world.clock.advance(number % 2)
    world.play()
    world.crash()
    world.clock.jump(60_000)
    world.open()

    world.pass_ms(1_000)

    assert world.reads.count() == {"completed": count}


def test_due_timers_that_nobody_can_consume_do_not_stand_in_the_way_of_the_others(
    theatre: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused instance keeps the timer of its next attempt, and that may be due for long."""
    monkeypatch.setattr(supervisor, "MOST_TIMERS", 5)

    @task(retry=Retry(9, first="1s"))
    def fail() -> None:
        raise RuntimeError("again")

    world = theatre(Process("failing", fail), napping)
    for number in range(20):
        world.start(f"paused-{number}", "failing")
        world.play()
        world.system.order(f"paused-{number}", c.Pause(at_ms=world.clock.now_ms()))
    world.start("one", "napping")
    world.play()
    world.crash()
    world.clock.jump(60_000)
    world.open()

    world.pass_ms(1_000)

    assert _ended(world, "one") == [True]


def test_near_timers_beyond_what_memory_takes_are_found_in_the_store(
    theatre: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MOST_ARMED", 10)
    world = theatre(napping)
    for number in range(40):
        world.start(f"{number}", "napping")
        world.pass_ms(10)
    assert len(_actor(world)._timers) <= 10

    world.pass_ms(HORIZON_MS)

    assert all(_ended(world, *(f"{number}" for number in range(40))))


# --- recovery ---------------------------------------------------------------------------------------------------------


def test_everything_that_moved_moves_again_however_many_pages_it_fills(theatre: Make) -> None:
    @task
    def work() -> None:
        pass

    world = theatre(Process("working", work))
    count = 2 * supervisor.PAGE + 100
    for number in range(count):
        world.start(f"{number}", "working")
    # Every start is committed and no handler has run.
    world.stage.run_until(lambda: world.reads.last_seq() == count)
    world.crash()

    world.open()
    world.play()

    assert world.reads.count() == {"completed": count}
    lost = sum(len(world.events(f"{number}", AttemptLost)) for number in range(count))
    assert lost == count - sum(len(world.reads.history(f"{number}")) == 2 for number in range(count))


def test_a_published_message_that_was_assigned_and_not_consumed_is_found_again(theatre: Make) -> None:
    world = theatre(Process("waiting", wait("go")))
    for number in range(3):
        world.start(f"{number}", "waiting")
    world.play()
    for _ in range(3):
        world.writer.write([Publish("go", "", "null")], now_ms=world.clock.now_ms())  # And nobody is told.
    world.crash()

    world.open()
    world.play()

    assert world.reads.count() == {"completed": 3}


def test_a_store_that_cannot_be_read_for_a_moment_stops_no_timer(
    theatre: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = theatre(sleeping)
    world.start("one", "sleeping")
    world.play()
    with monkeypatch.context() as broken:

        def fail(*_: Any) -> Any:
            raise sqlite3.OperationalError("disk I/O error")

        broken.setattr(supervisor, "due_waits", fail)
        world.pass_ms(10 * HOUR_MS)
        assert _ended(world, "one") == [False]

    world.pass_ms(supervisor.AGAIN_MS)

    assert _ended(world, "one") == [True]


def test_a_timer_that_was_cancelled_fires_nothing(theatre: Make) -> None:
    world = theatre(Process("waiting", wait("go", timeout="30s")))
    world.start("one", "waiting")
    world.send("one", "go")
    world.play()
    before = world.events("one")

    world.tell("one", c.FireTimer(at_ms=world.clock.now_ms() + DAY_MS, wait=2))
    world.pass_ms(DAY_MS)

    assert world.events("one") == before


def test_a_late_failure_of_a_finished_attempt_changes_nothing(theatre: Make) -> None:
    @task
    def work() -> None:
        pass

    world = theatre(Process("working", work, wait("never")))
    world.start("one", "working")
    world.play()
    before = world.events("one")

    for attempt in (0, 1, 2):
        fault = Fault("late", "too late")
        world.tell("one", c.FailTask(at_ms=world.clock.now_ms(), token=1, attempt=attempt, fault=fault))
    world.play()

    assert world.events("one") == before
