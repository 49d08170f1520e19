"""The clocks: never early, never lost, whatever the wall clock does."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.clock import SystemClock, VirtualClock
from understudy.model.errors import Rejected

PATIENCE_S = 5


def _ring(rings: list[tuple[int, Any]], clock: VirtualClock, what: object) -> None:
    rings.append((clock.now_ms(), what))


class Wall:
    """A wall clock that an operator may set, and that can be seen to be read."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.reads: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __call__(self) -> int:
        self.reads.put(self.now_ms)
        return self.now_ms

    def await_reads(self, number: int) -> None:
        while not self.reads.empty():
            self.reads.get()
        for _ in range(number):
            self.reads.get(timeout=PATIENCE_S)


@pytest.fixture
def started() -> Iterator[Callable[..., SystemClock]]:
    clocks: list[SystemClock] = []

    def start(**options: Any) -> SystemClock:
        clocks.append(SystemClock(**options))
        clocks[-1].start()
        return clocks[-1]

    yield start
    for clock in clocks:
        clock.stop()


def test_an_alarm_rings_on_the_clocks_thread_and_never_before_it_is_due(started: Callable[..., SystemClock]) -> None:
    clock = started()
    rings: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    due_ms = clock.now_ms() + 20

    clock.alarm("near", due_ms, lambda: rings.put((clock.now_ms(), threading.current_thread().name)))
    rung_ms, thread = rings.get(timeout=PATIENCE_S)

    assert rung_ms >= due_ms
    assert thread == "understudy-clock"


def test_an_alarm_set_before_the_start_is_kept() -> None:
    clock = SystemClock()
    rung = threading.Event()
    clock.alarm("early bird", clock.now_ms(), rung.set)

    clock.start()

    assert rung.wait(PATIENCE_S)
    clock.stop()


def test_setting_an_alarm_replaces_the_one_of_that_name(started: Callable[..., SystemClock]) -> None:
    clock = started()
    rings: queue.SimpleQueue[str] = queue.SimpleQueue()

    clock.alarm("one", clock.now_ms() + 60_000, lambda: rings.put("replaced"))
    clock.alarm("one", clock.now_ms() + 10, lambda: rings.put("nearer"))

    assert rings.get(timeout=PATIENCE_S) == "nearer"


def test_a_cleared_alarm_stays_silent(started: Callable[..., SystemClock]) -> None:
    wall = Wall(1_000)
    clock = started(wall=wall, reread_ms=1)
    rings: queue.SimpleQueue[str] = queue.SimpleQueue()
    clock.alarm("cleared", 1_001, lambda: rings.put("cleared"))
    clock.alarm("kept", 1_002, lambda: rings.put("kept"))

    clock.alarm("cleared", None, lambda: None)
    wall.now_ms = 2_000

    assert rings.get(timeout=PATIENCE_S) == "kept"
    assert rings.empty()


def test_a_wall_clock_that_jumps_forward_is_noticed_at_the_next_reading(started: Callable[..., SystemClock]) -> None:
    wall = Wall(1_000)
    clock = started(wall=wall, reread_ms=1)
    rung = threading.Event()
    clock.alarm("in a day", 1_000 + 86_400_000, rung.set)

    wall.now_ms += 86_400_000

    assert rung.wait(PATIENCE_S)


def test_a_wall_clock_that_jumps_back_makes_no_alarm_early_and_loses_none(started: Callable[..., SystemClock]) -> None:
    wall = Wall(100_000)
    clock = started(wall=wall, reread_ms=1)
    rung = threading.Event()
    clock.alarm("soon", 100_005, rung.set)

    wall.now_ms = 50_000
    wall.await_reads(20)
    rung_early = rung.is_set()
    wall.now_ms = 100_005

    assert not rung_early
    assert rung.wait(PATIENCE_S)


def test_a_delay_passes_whatever_becomes_of_the_wall_clock(started: Callable[..., SystemClock]) -> None:
    wall = Wall(86_400_000)
    clock = started(wall=wall, reread_ms=30_000)
    rings: queue.SimpleQueue[str] = queue.SimpleQueue()
    began_s = time.monotonic()
    clock.after("cleared", 5, lambda: rings.put("cleared"))
    clock.after("kept", 10, lambda: rings.put("kept"))
    clock.after("cleared", None, lambda: None)

    wall.now_ms = 0

    assert rings.get(timeout=PATIENCE_S) == "kept"
    assert time.monotonic() - began_s >= 0.01
    assert rings.empty()


def test_the_thread_sleeps_while_no_alarm_is_set(started: Callable[..., SystemClock]) -> None:
    wall = Wall(1_000)
    clock = started(wall=wall, reread_ms=1)
    rung = threading.Event()
    clock.alarm("only", 1_000, rung.set)
    assert rung.wait(PATIENCE_S)

    threading.Event().wait(0.05)  # A clock that polled would read the time about fifty times meanwhile.
    clock.stop()

    assert wall.reads.qsize() <= 4


def test_a_listener_that_raises_costs_nobody_else_an_alarm(
    started: Callable[..., SystemClock], caplog: pytest.LogCaptureFixture
) -> None:
    clock = started()
    rung = threading.Event()

    def raise_exit() -> None:
        raise SystemExit

    clock.alarm("bad", clock.now_ms(), raise_exit)
    clock.alarm("good", clock.now_ms() + 1, rung.set)

    assert rung.wait(PATIENCE_S)
    assert "listener raised" in caplog.text


def test_a_ring_may_set_its_own_alarm_again(started: Callable[..., SystemClock]) -> None:
    clock = started()
    rounds: queue.SimpleQueue[int] = queue.SimpleQueue()

    def again(number: int) -> None:
        rounds.put(number)
        if number < 3:
            clock.alarm("round", clock.now_ms() + 1, lambda: again(number + 1))

    clock.alarm("round", clock.now_ms(), lambda: again(1))

    assert [rounds.get(timeout=PATIENCE_S) for _ in range(3)] == [1, 2, 3]


def test_a_stopped_clock_has_forgotten_its_alarms_and_may_start_again() -> None:
    clock = SystemClock()
    rings: queue.SimpleQueue[str] = queue.SimpleQueue()
    clock.start()
    clock.alarm("forgotten", clock.now_ms() + 60_000, lambda: rings.put("forgotten"))

    clock.stop()
    clock.start()
    clock.alarm("new", clock.now_ms(), lambda: rings.put("new"))

    assert rings.get(timeout=PATIENCE_S) == "new"
    clock.stop()


def test_a_clock_may_be_stopped_by_a_ring(started: Callable[..., SystemClock]) -> None:
    clock = started()
    stopped = threading.Event()

    def stop() -> None:
        clock.stop()
        stopped.set()

    clock.alarm("last", clock.now_ms(), stop)

    assert stopped.wait(PATIENCE_S)


@given(st.lists(st.integers(min_value=0, max_value=50)), st.integers(min_value=0, max_value=60))
def test_virtual_time_rings_what_becomes_due_each_at_its_own_time_and_in_order(delays: Any, passed: Any) -> None:
    clock = VirtualClock(1_000)
    rings: list[tuple[int, Any]] = []
    for number, delay in enumerate(delays):
        clock.alarm(f"alarm {number}", 1_000 + delay, partial(_ring, rings, clock, number))

    clock.advance(passed)

    assert rings == sorted((1_000 + delay, number) for number, delay in enumerate(delays) if delay <= passed)
    assert clock.now_ms() == 1_000 + passed
    assert clock.next_due_ms() == min((1_000 + delay for delay in delays if delay > passed), default=None)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 20))), max_size=300))
def test_only_the_last_setting_of_a_name_counts(settings: Any) -> None:
    clock = VirtualClock(0)
    rings: list[tuple[int, Any]] = []
    for name, due_ms in settings:
        clock.alarm(name, due_ms, partial(_ring, rings, clock, name))

    clock.set(20)

    last = dict(settings)
    assert sorted(rings) == sorted((due_ms, name) for name, due_ms in last.items() if due_ms is not None)


def test_an_alarm_that_a_ring_clears_does_not_ring_at_the_same_moment() -> None:
    clock = VirtualClock(0)
    rings = []
    clock.alarm("first", 5, lambda: clock.alarm("second", None, lambda: None))
    clock.alarm("second", 5, lambda: rings.append("second"))

    clock.set(10)

    assert rings == []


def test_an_alarm_that_a_ring_sets_within_the_time_that_passes_rings_too() -> None:
    clock = VirtualClock(0)
    rings = []
    clock.alarm("first", 5, lambda: clock.alarm("second", 7, lambda: rings.append(clock.now_ms())))

    clock.advance(10)

    assert rings == [7]


def test_an_overdue_alarm_rings_at_the_next_move_of_virtual_time() -> None:
    clock = VirtualClock(100)
    rings = []
    clock.alarm("overdue", 50, lambda: rings.append(clock.now_ms()))

    clock.advance(0)

    assert rings == [100]


def test_a_jump_forward_rings_everything_at_the_moment_of_arrival() -> None:
    clock = VirtualClock(0)
    rings: list[tuple[int, Any]] = []
    for due_ms in (20, 10):
        clock.alarm(f"at {due_ms}", due_ms, partial(_ring, rings, clock, due_ms))

    clock.jump(1_000)

    assert rings == [(1_000, 10), (1_000, 20)]


def test_a_jump_back_rings_nothing_twice_and_nothing_early() -> None:
    clock = VirtualClock(1_000)
    rings = []
    clock.alarm("rung", 1_010, lambda: rings.append("rung"))
    clock.alarm("waiting", 1_020, lambda: rings.append("waiting"))
    clock.advance(10)

    clock.jump(-500)
    clock.set(1_019)
    before = list(rings)
    clock.set(1_020)

    assert before == ["rung"]
    assert rings == ["rung", "waiting"]


def test_virtual_time_cannot_pass_backwards() -> None:
    clock = VirtualClock(1_000)

    with pytest.raises(Rejected, match="use jump"):
        clock.set(999)


def test_a_virtual_delay_passes_whatever_becomes_of_the_wall_clock() -> None:
    clock = VirtualClock(100_000)
    rings: list[int] = []
    clock.after("again", 50, lambda: rings.append(clock.now_ms()))
    clock.alarm("moment", 100_050, lambda: rings.append(-1))

    clock.jump(-90_000)
    due_ms = clock.next_due_ms()
    clock.advance(60)

    assert due_ms == 10_050
    assert rings == [10_050]
