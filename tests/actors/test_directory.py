"""Whoever tells an instance something reaches it, whether it is in memory, on its way there, or about to leave."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy import Closed, Context, Limits, Process, Runtime, repeat, task, wait
from understudy.actors.directory import Directory, Heritage
from understudy.actors.dispatcher import PooledActor, PooledRef
from understudy.actors.messages import Drain, Load, Order, Wake
from understudy.actors.promise import Promise
from understudy.actors.stepping import Stage
from understudy.model import commands as c
from understudy.model import effects as fx
from understudy.model.events import AttemptLost, MessageBuffered

if TYPE_CHECKING:
    from tests.actors.conftest import Theatre

Make = Callable[..., "Theatre"]

waiting = Process("waiting", wait("never"))


class Stub(PooledActor):
    """In place of an instance actor: it writes down what it is told, and rests when it is told to."""

    def __init__(self, world: Small, name: str, heritage: Heritage | None, **given: Any) -> None:
        super().__init__(**given)
        self.world = world
        self.name = name
        self.heritage = heritage
        self.is_at_rest = True
        self.stored_no = 0

    def on_receive(self, message: Any) -> None:
        if isinstance(message, Drain):
            message.done(True)
        else:
            self.world.got.append((self.name, message))


class Small:
    """A directory on a stage, with stubs."""

    def __init__(self, *, resident: int = 10) -> None:
        self.stage = Stage()
        self.dispatcher = self.stage.dispatcher("stubs")
        self.directory = Directory(resident_limit=resident)
        self.got: list[tuple[str, Any]] = []
        self.loads: list[str] = []
        self.rests = 0
        self.directory.connect(self._activate, self._load, self._rest)  # type: ignore[arg-type]  # Stubs will do.

    def _activate(self, name: str, _loaded: Any, heritage: Heritage | None) -> PooledRef[Stub]:
        return Stub.start_on(self.dispatcher, self, name, heritage)

    def _load(self, load: Load) -> None:
        self.loads.append(load.id)

    def _rest(self) -> None:
        self.rests += 1

    def actor(self, name: str) -> Any:
        entry = self.directory._stripe(name)._entries[name]
        assert entry.ref is not None
        return entry.ref.inbox.actor

    def load_all(self) -> None:
        loads, self.loads = self.loads, []
        for name in loads:
            self.directory.loaded(name, None)

    def play(self) -> list[Any]:
        self.stage.run_until_idle()
        got, self.got = [message for _name, message in self.got], []
        return got


def _order() -> Order:
    return Order(c.Pause(at_ms=0), Promise())


# --- absent, loading, active ------------------------------------------------------------------------------------------


def test_messages_that_come_while_an_instance_is_read_wait_for_it_in_their_order() -> None:
    small = Small()
    orders = [_order() for _ in range(5)]

    for order in orders[:3]:
        small.directory.tell("one", order)
    assert (small.loads, small.play()) == (["one"], [])
    small.load_all()
    for order in orders[3:]:
        small.directory.tell("one", order)

    assert small.play() == orders


def test_a_new_instance_is_not_looked_for_in_the_store() -> None:
    small = Small()

    small.directory.tell("one", _order(), is_new=True)

    assert small.loads == []
    assert len(small.play()) == 1


def test_who_waits_for_an_instance_that_cannot_be_read_is_handed_back() -> None:
    small = Small()
    order = _order()
    small.directory.tell("one", order)

    assert small.directory.unreadable("one") == [order]

    small.directory.tell("one", Wake())
    assert small.loads == ["one", "one"]


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_one_that_rests_leaves_and_is_read_again_when_it_is_told_something() -> None:
    small = Small()
    small.directory.tell("one", Wake(), is_new=True)
    small.play()

    small.directory.rest("one", small.actor("one"), 5)
    assert small.directory.resting_before(4, 10) == []
    assert small.directory.resting_before(5, 10) == ["one"]
    assert small.directory.leave("one") is not None
    assert (len(small.directory), small.directory.leave("one")) == (0, None)

    small.directory.tell("one", Wake())
    assert small.loads == ["one"]


def test_one_with_a_message_in_its_inbox_neither_rests_nor_leaves() -> None:
    small = Small()
    small.directory.tell("one", Wake(), is_new=True)
    small.play()
    actor = small.actor("one")
    small.directory.rest("one", actor, 0)

    small.directory.tell("one", Wake())

    assert small.directory.leave("one") is None
    assert small.directory.rest("one", actor, 0) == []
    assert small.directory.resting == 0
    assert len(small.play()) == 1


def test_one_that_has_begun_to_work_does_not_leave() -> None:
    small = Small()
    small.directory.tell("one", Wake(), is_new=True)
    small.play()
    small.directory.rest("one", small.actor("one"), 0)

    small.actor("one").is_at_rest = False

    assert small.directory.leave("one") is None
    assert small.directory.is_active("one")


def test_the_longest_at_rest_leave_first_when_too_many_rest() -> None:
    small = Small(resident=2)
    for name in "abcd":
        small.directory.tell(name, Wake(), is_new=True)
    small.play()

    surplus = [small.directory.rest(name, small.actor(name), 0) for name in "abcd"]

    assert surplus == [[], [], ["a"], ["a", "b"]]
    assert small.rests == 1


# --- successors -------------------------------------------------------------------------------------------------------


def test_a_successor_gets_what_was_told_and_what_is_with_handlers() -> None:
    small = Small()
    small.directory.tell("one", Wake(), is_new=True)
    small.play()
    heritage = {1: fx.CancelTask(1, 2, 1)}
    orders = [_order(), _order()]

    small.directory.retire("one", small.actor("one"), [orders[0]], heritage)
    small.directory.tell("one", orders[1])
    small.load_all()

    assert small.play() == orders
    assert small.actor("one").heritage == heritage


def test_what_is_with_handlers_is_not_forgotten_when_the_successor_cannot_be_read_at_first() -> None:
    small = Small()
    small.directory.tell("one", Wake(), is_new=True)
    small.play()
    heritage = {1: fx.CancelTask(1, 2, 1)}
    small.directory.retire("one", small.actor("one"), [Wake()], heritage)
    small.loads.clear()

    for message in small.directory.unreadable("one"):
        small.directory.tell("one", message)
    small.load_all()

    assert small.actor("one").heritage == heritage


def test_one_that_was_replaced_hands_its_messages_to_its_successor() -> None:
    small = Small()
    small.directory.tell("one", Wake(), is_new=True)
    small.play()
    old = small.actor("one")
    small.directory.retire("one", old, [])
    small.load_all()
    order = _order()

    small.directory.retire("one", old, [order])

    assert small.play() == [order]


def test_one_that_has_died_of_an_error_is_replaced_by_the_next_message() -> None:
    small = Small()
    small.directory.tell("one", Wake(), is_new=True)
    small.play()
    small.actor("one").actor_stopped.set()
    order = _order()

    small.directory.tell("one", order)
    small.load_all()

    assert small.play() == [order]


# --- the whole --------------------------------------------------------------------------------------------------------


def test_only_those_that_do_not_rest_are_asked_to_come_to_an_end() -> None:
    small = Small()
    for name in "abc":
        small.directory.tell(name, Wake(), is_new=True)
    small.play()
    small.directory.rest("a", small.actor("a"), 0)
    small.directory.tell("loading", Wake())
    said: list[bool] = []

    assert small.directory.drain(said.append) == (2, 1)

    small.play()
    assert said == [True, True]


def test_after_the_end_every_message_is_refused_and_nobody_waits() -> None:
    small = Small()
    early, late = _order(), _order()
    small.directory.tell("one", early)

    small.directory.close()
    small.directory.tell("two", late)
    small.directory.tell("three", Wake())

    for order in (early, late):
        assert order.answer is not None
        assert isinstance(order.answer.error, Closed)
    small.load_all()  # Whoever reads may not have heard of it yet.
    assert small.directory.unreadable("one") == []


# --- with everything else ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_no_message_is_lost_or_counted_twice_however_fast_instances_come_and_go(tmp_path: Path, resident: int) -> None:
    threads, each, instances = 8, 40, 4
    with Runtime(tmp_path / "a.db", waiting, limits=Limits(resident=resident, idle_ms=1)) as runtime:
        for number in range(instances):
            runtime.start(waiting, id=f"{number}")

        def tell(name: int) -> None:
            for number in range(each):
                runtime.send(f"{(name + number) % instances}", "hello", f"{name}/{number}")

        tellers = [threading.Thread(target=tell, args=(name,)) for name in range(threads)]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join(60)

        got = Counter(
            event.payload
            for number in range(instances)
            for step in runtime.history(f"{number}")
            for entry in step.entries
            for event in entry.events
            if isinstance(event, MessageBuffered)
        )
        system = runtime.node.system
        assert system is not None
        assert system.directory.activations > instances
    assert got == {f'"{name}/{number}"': 1 for name in range(threads) for number in range(each)}


def test_an_instance_with_a_running_handler_stays_whatever_comes_and_goes(tmp_path: Path) -> None:
    """Results come back to the very activation that has ordered them: no attempt is lost to passivation."""
    runs: list[str] = []

    @task
    def work(ctx: Context) -> None:
        runs.append(ctx.key)

    busy = Process("busy", repeat(work, wait("more"), until="False"))
    with Runtime(tmp_path / "a.db", busy, limits=Limits(resident=0, idle_ms=1)) as runtime:
        for number in range(5):
            runtime.start(busy, id=f"{number}")
        for _ in range(20):
            for number in range(5):
                runtime.send(f"{number}", "more")
        for number in range(5):
            runtime.wait_until(f"{number}", lambda state: state.is_waiting_for("more"))
        runtime.wait_until("0", lambda state: len(runs) == 5 * 21, timeout="60s")

        lost = [
            event
            for number in range(5)
            for step in runtime.history(f"{number}")
            for entry in step.entries
            for event in entry.events
            if isinstance(event, AttemptLost)
        ]
    assert lost == []
    assert len(runs) == len(set(runs)) == 5 * 21


@pytest.mark.slow
def test_ten_thousand_instances_need_no_more_memory_than_the_limit_says(theatre: Make) -> None:
    world = theatre(waiting, limits=Limits(resident=100, in_flight=20_000))
    for number in range(10_000):
        world.start(f"{number}", "waiting")
        if number % 500 == 0:
            world.play()
    world.play()
    assert len(world.system.directory) == 100

    for number in range(0, 10_000, 7):
        world.send(f"{number}", "hello")
    world.play()

    assert len(world.system.directory) == 100
    assert sum(len(world.reads.history(f"{number}")) == 2 for number in range(10_000)) == len(range(0, 10_000, 7))
