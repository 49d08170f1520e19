"""One suite for every way to run an actor: pykka's thread for each, ours on one or four workers, ours on a stage.

What pykka's own actors do differently (a failed ask, a BaseException, the registry) is asked of ours alone. An upgrade
of pykka is safe when this file passes.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pykka
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.dispatcher import Dispatcher, PooledActor, PooledRef, Scheduler
from understudy.actors.promise import BlockedInsideActor, Promise
from understudy.actors.stepping import Deadlock, Livelock, Stage

TIMEOUT_S = 10.0  # Only a broken actor lets a test wait that long.


class World:
    """One way to run actors: with pykka's threads, or with a dispatcher of ours."""

    def __init__(self, dispatcher: Scheduler | None) -> None:
        self.dispatcher = dispatcher
        self._refs: list[pykka.ActorRef[Any]] = []

    def start(self, kind: type, *args: Any) -> Any:
        """A ref to a new actor of this kind, which gets the means to run from this world."""
        base = pykka.ThreadingActor if self.dispatcher is None else PooledActor
        means = {} if self.dispatcher is None else {"dispatcher": self.dispatcher}
        actor_class: Any = type(kind.__name__, (kind, base), {})
        self._refs.append(actor_class.start(*args, **means))
        return self._refs[-1]

    def promise(self) -> Promise[Any]:
        return Promise(driver=None if self.dispatcher is None else self.dispatcher.driver)

    def close(self) -> None:
        if self.dispatcher is not None:
            assert self.dispatcher.stop(TIMEOUT_S)
        else:
            for ref in self._refs:
                ref.stop(timeout=TIMEOUT_S)


def make_world(name: str) -> World:
    if name == "threading":
        return World(None)
    if name == "stage":
        return World(Stage().dispatcher("stage"))
    dispatcher = Dispatcher(name, workers=int(name[-1]), slice_size=3)
    dispatcher.start()
    return World(dispatcher)


@pytest.fixture(params=["threading", "pooled-1", "pooled-4", "stage"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = make_world(request.param)
    yield world
    world.close()


@pytest.fixture(params=["pooled-1", "pooled-4", "stage"])
def ours(request: pytest.FixtureRequest) -> Iterator[World]:
    world = make_world(request.param)
    yield world
    world.close()


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns every few instructions, so that a race has many chances to be lost."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


class Notebook(pykka.Actor):
    """Writes down what happens to it; an exception as message is raised, anything else answered with all notes."""

    def __init__(self, died: Promise[BaseException] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.notes: list[Any] = []
        self._died = died

    def on_start(self) -> None:
        self.notes.append("started")

    def on_receive(self, message: Any) -> Any:
        if isinstance(message, BaseException):
            raise message
        self.notes.append(message)
        return list(self.notes)

    def on_stop(self) -> None:
        self.notes.append("stopped")

    def on_failure(self, *exception_info: Any) -> None:
        self.notes.append("failed")
        if self._died is not None:
            self._died.resolve(exception_info[1])

    def double(self, number: int) -> int:
        return number * 2

    def read(self) -> list[Any]:
        return self.notes


class Scribe(PooledActor):
    """Writes its name into a book for every message."""

    def __init__(self, name: str, book: list[str], *, dispatcher: Scheduler) -> None:
        super().__init__(dispatcher=dispatcher)
        self._name = name
        self._book = book

    def on_receive(self, message: Any) -> Any:
        self._book.append(self._name)
        return message


# --- life -------------------------------------------------------------------------------------------------------------


def test_on_start_runs_before_the_first_message(world: World) -> None:
    ref = world.start(Notebook)

    assert ref.ask("hello", timeout=TIMEOUT_S) == ["started", "hello"]


def test_an_actor_that_is_never_told_anything_is_started_all_the_same(world: World) -> None:
    class Herald(pykka.Actor):
        def __init__(self, started: Promise[bool], **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self._herald = started

        def on_start(self) -> None:
            self._herald.resolve(True)

    started = world.promise()

    world.start(Herald, started)

    assert started.get(timeout=TIMEOUT_S)


@pytest.mark.usefixtures("hasty_threads")
def test_what_an_actor_tells_itself_while_it_is_made_is_handled_once_it_is_complete(world: World) -> None:
    class Eager(pykka.Actor):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.actor_ref.tell("early")
            sum(range(20_000))  # Many turns for a thread that would run the actor too early.
            self.handled: list[Any] = []

        def on_receive(self, message: Any) -> list[Any]:
            self.handled.append(message)
            return self.handled

    ref = world.start(Eager)

    assert ref.ask("late", timeout=TIMEOUT_S) == ["early", "late"]


def test_a_stop_lets_earlier_messages_be_handled_and_then_calls_on_stop(world: World) -> None:
    ref = world.start(Notebook)
    notes = ref.proxy().read().get(timeout=TIMEOUT_S)
    ref.tell(1)
    ref.tell(2)

    assert ref.stop(timeout=TIMEOUT_S) is True

    assert notes == ["started", 1, 2, "stopped"]
    assert not ref.is_alive()


def test_an_actor_can_stop_itself(world: World) -> None:
    class Mayfly(pykka.Actor):
        def __init__(self, stopped: Promise[bool], **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self._epilogue = stopped

        def on_receive(self, _: Any) -> None:
            self.stop()

        def on_stop(self) -> None:
            self._epilogue.resolve(True)

    stopped = world.promise()
    ref = world.start(Mayfly, stopped)

    ref.tell("go")

    assert stopped.get(timeout=TIMEOUT_S)
    assert not ref.is_alive()


def test_a_stopped_actor_refuses_everything(world: World) -> None:
    ref = world.start(Notebook)
    ref.stop(timeout=TIMEOUT_S)

    assert ref.stop(timeout=TIMEOUT_S) is False
    with pytest.raises(pykka.ActorDeadError):
        ref.tell("hello")
    with pytest.raises(pykka.ActorDeadError):
        ref.ask("hello", timeout=TIMEOUT_S)
    with pytest.raises(pykka.ActorDeadError):
        ref.proxy()


def test_messages_behind_a_stop_are_answered_with_actor_dead_error(world: World) -> None:
    class Leaver(pykka.Actor):
        def on_receive(self, _: Any) -> Any:
            first, second = self.actor_ref.stop(block=False), self.actor_ref.stop(block=False)
            self.actor_ref.tell("told behind the stop")
            return first, self.actor_ref.ask("asked behind the stop", block=False), second

    ref = world.start(Leaver)

    stopped, asked, stopped_again = ref.ask("leave", timeout=TIMEOUT_S)

    assert stopped.get(timeout=TIMEOUT_S) is True
    with pytest.raises(pykka.ActorDeadError, match="stopped before handling the message"):
        asked.get(timeout=TIMEOUT_S)
    assert stopped_again.get(timeout=TIMEOUT_S) is True


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_proxy_calls_methods_and_reads_and_writes_attributes(world: World) -> None:
    proxy = world.start(Notebook).proxy()

    proxy.notes = ["replaced"]

    assert proxy.double(21).get(timeout=TIMEOUT_S) == 42
    assert proxy.notes.get(timeout=TIMEOUT_S) == ["replaced"]


def test_a_deferred_proxy_call_is_a_tell(world: World) -> None:
    proxy = world.start(Notebook).proxy()

    proxy.on_receive.defer("noted")

    assert proxy.notes.get(timeout=TIMEOUT_S) == ["started", "noted"]


@pytest.mark.usefixtures("hasty_threads")
def test_many_senders_lose_nothing_keep_their_order_and_never_meet_inside_an_actor(world: World) -> None:
    class Register(pykka.Actor):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self._received: dict[int, list[int]] = {}
            self._inside = 0
            self._meetings = 0

        def on_receive(self, message: Any) -> Any:
            if message == "report":
                return self._received, self._meetings
            self._inside += 1
            self._meetings += self._inside != 1
            sender, number = message
            self._received.setdefault(sender, []).append(number)
            self._inside -= 1
            return None

    senders, numbers = range(5), range(200)
    refs = [world.start(Register) for _ in range(4)]

    def send(sender: int) -> None:
        for number in numbers:
            for ref in refs:
                ref.tell((sender, number))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)

    for ref in refs:
        received, meetings = ref.ask("report", timeout=TIMEOUT_S)
        assert received == {sender: list(numbers) for sender in senders}
        assert meetings == 0


def test_a_message_that_comes_just_as_the_actor_goes_to_rest_is_handled() -> None:
    class ClaimWithLatecomer:
        """The claim of an inbox into which somebody puts a message right before it is given up."""

        def __init__(self, claim: Any, late: Callable[[], object]) -> None:
            self._late: list[Callable[[], object]] = [late]
            self._claim = claim
            self.acquire = claim.acquire

        def release(self) -> None:
            if self._late:
                self._late.pop()()
            self._claim.release()

    stage, book = Stage(), list[str]()
    ref = Scribe.start_on(stage.dispatcher("stage"), "x", book)
    ref.inbox._claim = ClaimWithLatecomer(ref.inbox._claim, lambda: ref.tell("late"))  # type: ignore[assignment]
    ref.tell("early")

    stage.run_until_idle()

    assert book == ["x", "x"]


@pytest.mark.usefixtures("hasty_threads")
def test_every_ask_is_answered_even_if_the_actor_stops_meanwhile(ours: World) -> None:
    """With pykka's own actors an ask that meets the stop may never be answered."""

    def ask(ref: Any, promises: list[Any]) -> None:
        promises.extend(ref.ask(number, block=False) for number in range(30))

    for _ in range(20):
        ref, promises = ours.start(Notebook), list[Any]()
        threads = [threading.Thread(target=ask, args=(ref, promises)) for _ in range(3)]
        for thread in threads:
            thread.start()
        ref.stop(timeout=TIMEOUT_S)
        for thread in threads:
            thread.join(TIMEOUT_S)

        assert len(promises) == 90
        for promise in promises:
            try:
                assert promise.get(timeout=TIMEOUT_S)[0] == "started"
            except pykka.ActorDeadError:
                assert not ref.is_alive()


# --- failure ----------------------------------------------------------------------------------------------------------


def test_a_failed_tell_stops_the_actor_and_calls_on_failure_but_not_on_stop(world: World) -> None:
    died = world.promise()
    ref = world.start(Notebook, died)
    notes = ref.proxy().read().get(timeout=TIMEOUT_S)
    error = ValueError("boom")

    ref.tell(error)

    assert died.get(timeout=TIMEOUT_S) is error
    assert notes == ["started", "failed"]
    assert not ref.is_alive()


def test_a_failed_ask_raises_at_the_caller(world: World) -> None:
    ref = world.start(Notebook)

    with pytest.raises(ValueError, match="boom"):
        ref.ask(ValueError("boom"), timeout=TIMEOUT_S)


def test_a_failed_ask_is_as_fatal_as_a_failed_tell_and_on_failure_comes_before_the_answer(ours: World) -> None:
    ref = ours.start(Notebook)
    notes = ref.proxy().read().get(timeout=TIMEOUT_S)

    with pytest.raises(ValueError, match="boom"):
        ref.ask(ValueError("boom"), timeout=TIMEOUT_S)

    assert notes == ["started", "failed"]
    assert not ref.is_alive()


def test_a_failed_proxy_call_is_fatal_too(ours: World) -> None:
    ref = ours.start(Notebook)

    with pytest.raises(TypeError):
        ref.proxy().double(None).get(timeout=TIMEOUT_S)

    assert not ref.is_alive()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
def test_an_actor_that_cannot_start_fails_and_handles_nothing(ours: World, error: BaseException) -> None:
    class Stillborn(Notebook):
        def on_start(self) -> None:
            raise error

    died = ours.promise()
    ref = ours.start(Stillborn, died)

    with pytest.raises(pykka.ActorDeadError):
        ref.ask("hello", timeout=TIMEOUT_S)

    assert died.get(timeout=TIMEOUT_S) is error


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
def test_an_actor_that_cannot_stop_properly_is_stopped_and_has_failed(ours: World, error: BaseException) -> None:
    class Clinger(Notebook):
        def on_stop(self) -> None:
            raise error

    died = ours.promise()
    ref = ours.start(Clinger, died)

    assert ref.stop(timeout=TIMEOUT_S) is True

    assert died.get(timeout=TIMEOUT_S) is error


def test_a_failure_in_on_failure_spares_the_other_actors(ours: World) -> None:
    class Unlucky(Notebook):
        def on_failure(self, *_: Any) -> None:
            raise SystemExit(2)

    unlucky, other = ours.start(Unlucky), ours.start(Notebook)

    with pytest.raises(ValueError, match="boom"):
        unlucky.ask(ValueError("boom"), timeout=TIMEOUT_S)

    assert other.ask("hello", timeout=TIMEOUT_S) == ["started", "hello"]


# --- the host ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[pykka.ActorRef[Any]]:
    """An actor of the service that Understudy is embedded in."""
    ref = World(None).start(Notebook)
    yield ref
    ref.stop(timeout=TIMEOUT_S)


def test_our_actors_are_never_in_the_registry(ours: World) -> None:
    ref = ours.start(Notebook)

    ref.ask("hello", timeout=TIMEOUT_S)

    assert ref not in pykka.ActorRegistry.get_all()


def test_stop_all_by_the_host_does_not_touch_ours(ours: World, host: pykka.ActorRef[Any]) -> None:
    ref = ours.start(Notebook)

    pykka.ActorRegistry.stop_all(timeout=TIMEOUT_S)

    assert not host.is_alive()
    assert ref.ask("hello", timeout=TIMEOUT_S) == ["started", "hello"]


@pytest.mark.parametrize("error", [SystemExit(1), GeneratorExit(), BaseException("odd")])
@pytest.mark.parametrize("asked", [False, True])
def test_a_base_exception_stops_the_one_actor_that_raised_it(
    ours: World, host: pykka.ActorRef[Any], error: BaseException, asked: bool
) -> None:
    died = ours.promise()
    ref, other = ours.start(Notebook, died), ours.start(Notebook)

    if asked:
        with pytest.raises(pykka.ActorDeadError, match="died of") as caught:
            ref.ask(error, timeout=TIMEOUT_S)
        assert caught.value.__cause__ is error
    else:
        ref.tell(error)

    assert died.get(timeout=TIMEOUT_S) is error
    assert not ref.is_alive()
    assert other.ask("hello", timeout=TIMEOUT_S) == ["started", "hello"]
    assert host.ask("hello", timeout=TIMEOUT_S) == ["started", "hello"]


# --- waiting ----------------------------------------------------------------------------------------------------------


class Impatient(Notebook):
    """Waits for what it is given to wait for."""

    def on_receive(self, message: Any) -> Any:
        return message.get(timeout=TIMEOUT_S)


def test_an_actor_that_waits_for_another_fails(ours: World) -> None:
    class Asker(Notebook):
        def on_receive(self, message: Any) -> Any:
            return message.ask("hello")

    asker, other = ours.start(Asker), ours.start(Notebook)

    with pytest.raises(BlockedInsideActor, match="Asker"):
        asker.ask(other, timeout=TIMEOUT_S)

    assert not asker.is_alive()
    assert other.is_alive()


def test_an_actor_may_read_a_promise_that_is_settled(ours: World) -> None:
    settled = ours.promise()
    settled.resolve(7)

    assert ours.start(Impatient).ask(settled, timeout=TIMEOUT_S) == 7


def test_a_callback_that_an_actor_sets_off_is_inside_that_actor(ours: World) -> None:
    class Settler(Notebook):
        def on_receive(self, message: Any) -> Any:
            return message.resolve(True)

    pending, seen = ours.promise(), ours.promise()
    trigger = ours.promise()

    def wait_inside(_: Promise[Any]) -> None:
        try:
            pending.get(timeout=0)
        except BaseException as error:
            seen.resolve(error)

    trigger.add_done_callback(wait_inside)
    ours.start(Settler).ask(trigger, timeout=TIMEOUT_S)

    assert isinstance(seen.get(timeout=TIMEOUT_S), BlockedInsideActor)


def test_the_promise_of_a_stop_calls_back_without_being_got(ours: World) -> None:
    ref = ours.start(Notebook)
    called_back = ours.promise()

    ref.stop(block=False).add_done_callback(lambda stopped: called_back.resolve(stopped.get()))

    assert called_back.get(timeout=TIMEOUT_S) is True


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_stopped_actor_is_freed_without_a_garbage_collection(ours: World) -> None:
    ref = ours.start(Notebook)
    actor = weakref.ref(ref.inbox.actor)
    freed = ours.promise()
    weakref.finalize(ref.inbox.actor, freed.resolve, True)

    gc.disable()
    try:
        ref.stop(timeout=TIMEOUT_S)
        assert freed.get(timeout=TIMEOUT_S)
    finally:
        gc.enable()

    assert actor() is None


def test_an_inbox_can_be_measured_and_its_limit_is_for_the_door_not_for_the_teller() -> None:
    class Narrow(PooledActor):
        inbox_limit = 2

    stage = Stage()
    ref = Narrow.start_on(stage.dispatcher("stage"))
    measured = []

    for number in range(4):
        measured.append((len(ref.inbox), ref.is_full))
        ref.tell(number)
    stage.step()

    assert measured == [(0, False), (1, False), (2, True), (3, True)]
    assert len(ref.inbox) == 3


# --- dispatchers of threads -------------------------------------------------------------------------------------------


def test_an_actor_with_much_to_do_lets_others_in_between() -> None:
    dispatcher = Dispatcher("fair", slice_size=2)
    book: list[str] = []
    busy = Scribe.start_on(dispatcher, "busy", book)
    quick = Scribe.start_on(dispatcher, "quick", book)
    for _ in range(4):
        busy.tell("work")
    quick.tell("work")
    last = busy.ask("last", block=False)

    dispatcher.start()

    assert last.get(timeout=TIMEOUT_S) == "last"
    assert book == ["busy", "busy", "quick", "busy", "busy", "busy"]
    assert dispatcher.stop(TIMEOUT_S)


@pytest.mark.parametrize("name", ["pooled-1", "pooled-4", "stage"])
def test_who_waits_for_an_actor_of_a_stopped_dispatcher_is_told_that_it_is_dead(name: str) -> None:
    world = make_world(name)
    ref = world.start(Notebook)
    ref.ask("hello", timeout=TIMEOUT_S)

    world.close()

    with pytest.raises(pykka.ActorDeadError):
        ref.ask("anybody there?", timeout=TIMEOUT_S)
    with pytest.raises(pykka.ActorDeadError):
        ref.tell("hello?")


def test_a_dispatcher_that_never_started_refuses_what_waits_when_it_is_stopped() -> None:
    dispatcher = Dispatcher("idle")
    waiting = Scribe.start_on(dispatcher, "waiting", []).ask("work", block=False)

    assert dispatcher.stop(TIMEOUT_S)

    with pytest.raises(pykka.ActorDeadError):
        waiting.get(timeout=TIMEOUT_S)


def test_stopping_a_dispatcher_with_a_busy_worker_says_so_and_refuses_the_rest_later() -> None:
    class Busy(PooledActor):
        def on_receive(self, _: Any) -> Any:
            entered.set()
            return leave.wait(TIMEOUT_S)

    entered, leave = threading.Event(), threading.Event()
    dispatcher = Dispatcher("busy", slice_size=1)
    dispatcher.start()
    ref = Busy.start_on(dispatcher)
    handled, refused = ref.ask("first", block=False), ref.ask("second", block=False)
    entered.wait(TIMEOUT_S)

    assert not dispatcher.stop(0)
    leave.set()

    assert handled.get(timeout=TIMEOUT_S) is True
    with pytest.raises(pykka.ActorDeadError):
        refused.get(timeout=TIMEOUT_S)
    assert dispatcher.stop(TIMEOUT_S)


@pytest.mark.parametrize("bad", [{"workers": 0}, {"slice_size": 0}])
def test_a_dispatcher_that_could_never_run_anything_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Dispatcher("bad", **bad)


# --- the stage --------------------------------------------------------------------------------------------------------


def test_a_step_is_one_message_of_one_actor_in_the_order_of_becoming_ready() -> None:
    stage, book = Stage(), list[str]()
    first = Scribe.start_on(stage.dispatcher("instances"), "first", book)
    second = Scribe.start_on(stage.dispatcher("persistence"), "second", book)
    first.tell(1)
    first.tell(2)
    second.tell(3)

    books = []
    while stage.step():
        books.append(list(book))

    assert books == [["first"], ["first", "second"], ["first", "second", "first"]]


def test_the_schedule_chooses_among_all_dispatchers_and_jobs_of_a_stage() -> None:
    stage, book = Stage(choose=lambda number_of_ready: number_of_ready - 1), list[str]()
    Scribe.start_on(stage.dispatcher("instances"), "first", book).tell(1)
    Scribe.start_on(stage.dispatcher("persistence"), "second", book).tell(2)
    stage.post(lambda: book.append("job"), label="load")

    assert [str(item) for item in stage.ready] == ["Scribe (instances/0)", "Scribe (persistence/0)", "load"]
    assert stage.run_until_idle() == 3
    assert book == ["job", "second", "first"]


def test_every_step_is_traced_before_it_happens() -> None:
    trace: list[tuple[str, object]] = []
    stage = Stage(trace=lambda actor, message: trace.append((str(actor), message)))
    ref = World(stage.dispatcher("stage")).start(Notebook)
    ref.tell("hello")
    ref.stop(block=False)
    stage.post(lambda: None, label="load")

    stage.run_until_idle()

    actor = "Notebook (stage/0)"
    assert trace == [(actor, None), ("None", "load"), (actor, "hello"), (actor, pykka.messages._ActorStop())]


@given(st.integers(min_value=0))
def test_the_same_seed_gives_the_same_run_and_every_seed_keeps_the_order_of_each_sender(seed: int) -> None:
    class Relay(PooledActor):
        def __init__(self, peers: list[PooledRef[Any]], received: list[Any], *, dispatcher: Scheduler) -> None:
            super().__init__(dispatcher=dispatcher)
            self._peers = peers
            self._received = received

        def on_receive(self, message: Any) -> None:
            self._received.append((self.actor_urn, *message))
            _, number, hops = message
            if hops:
                self._peers[(number + hops) % len(self._peers)].tell((self.actor_urn, number, hops - 1))

    def run() -> list[Any]:
        stage = Stage(choose=random.Random(seed).randrange)
        dispatcher, peers, received = stage.dispatcher("relays"), list[PooledRef[Any]](), list[Any]()
        peers.extend(Relay.start_on(dispatcher, peers, received) for _ in range(4))
        for number in range(6):
            peers[number % 4].tell(("outside", number, 5))
        stage.run_until_idle()
        return received

    received = run()

    assert received == run()
    assert len(received) == 6 * 6
    for receiver in {entry[0] for entry in received}:
        told = [number for name, sender, number, _ in received if (name, sender) == (receiver, "outside")]
        assert told == sorted(told)


def test_a_wait_that_nothing_can_end_is_a_deadlock_or_a_timeout_if_it_is_limited() -> None:
    stage = Stage()

    with pytest.raises(Deadlock):
        Promise[int](driver=stage).get()
    with pytest.raises(pykka.Timeout):
        Promise[int](driver=stage).get(timeout=3600)


def test_actors_that_keep_each_other_busy_are_a_livelock() -> None:
    class Restless(PooledActor):
        def on_receive(self, message: Any) -> None:
            self.actor_ref.tell(message)

    stage = Stage()
    Restless.start_on(stage.dispatcher("stage")).tell("again")

    with pytest.raises(Livelock, match="Restless"):
        stage.run_until_idle(max_steps=50)
    with pytest.raises(Livelock):
        stage.run_until(lambda: False, max_steps=50)


def test_run_until_stops_as_soon_as_the_condition_holds_and_says_whether_it_does() -> None:
    stage, book = Stage(), list[str]()
    ref = Scribe.start_on(stage.dispatcher("stage"), "x", book)
    for number in range(3):
        ref.tell(number)

    assert stage.run_until(lambda: len(book) == 2, max_steps=2)
    assert len(book) == 2
    assert not stage.run_until(lambda: len(book) == 4)


def test_a_job_may_wait_for_an_actor_but_an_actor_may_not_drive_the_stage() -> None:
    class Meddler(PooledActor):
        def on_receive(self, _: Any) -> None:
            stage.step()

    stage, answers = Stage(), list[Any]()
    scribe = Scribe.start_on(stage.dispatcher("stage"), "x", [])
    meddler = Meddler.start_on(stage.dispatcher("meddlers"))
    stage.post(lambda: answers.append(scribe.ask("from a job")))

    stage.run_until_idle()

    assert answers == ["from a job"]
    with pytest.raises(BlockedInsideActor, match="Meddler"):
        meddler.ask("go")


def test_what_a_job_raises_is_raised_by_the_step() -> None:
    def fail() -> None:
        raise ValueError("job")

    stage = Stage()
    stage.post(fail)

    with pytest.raises(ValueError, match="job"):
        stage.step()
    assert not stage.step()


def test_stopping_one_dispatcher_of_a_stage_drops_its_actors_and_leaves_the_others() -> None:
    stage, book = Stage(), list[str]()
    old, new = stage.dispatcher("old"), stage.dispatcher("new")
    dropped = Scribe.start_on(old, "old", book).ask("work", block=False)
    kept = Scribe.start_on(new, "new", book).ask("work", block=False)

    old.stop(0)
    stage.run_until_idle()

    assert book == ["new"]
    assert kept.done
    assert isinstance(dropped.error, pykka.ActorDeadError)


def test_ctrl_c_during_a_step_fails_the_actor_and_reaches_whoever_drives() -> None:
    stage = Stage()
    world = World(stage.dispatcher("stage"))
    ref, other = world.start(Notebook), world.start(Notebook)
    ref.tell(KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        stage.run_until_idle()

    assert not ref.is_alive()
    assert other.ask("hello") == ["started", "hello"]


@pytest.mark.parametrize("name", ["pooled-1", "pooled-4"])
def test_a_keyboard_interrupt_on_a_worker_is_a_failure_like_any_other(name: str, host: pykka.ActorRef[Any]) -> None:
    world = make_world(name)
    died = world.promise()
    ref, other = world.start(Notebook, died), world.start(Notebook)

    ref.tell(KeyboardInterrupt())

    assert isinstance(died.get(timeout=TIMEOUT_S), KeyboardInterrupt)
    assert other.ask("hello", timeout=TIMEOUT_S) == ["started", "hello"]
    assert host.is_alive()
    world.close()
