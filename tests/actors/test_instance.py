"""An instance actor decides, commits, releases; and when a commit does not land, its successor reads the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from understudy import (
    Conflict,
    Context,
    Fenced,
    OutcomeUnknown,
    Process,
    UnderstudyError,
    UnknownInstance,
    saga,
    task,
    wait,
)
from understudy.actors import instance as instances
from understudy.actors.handlers import Handler
from understudy.actors.pool import HANG
from understudy.model import commands as c
from understudy.model.decide import decide
from understudy.model.errors import Rejected
from understudy.model.events import AttemptFailed, AttemptLost, MessageBuffered, TaskCompleted
from understudy.store.connection import Settings
from understudy.store.writer import Refused, Unknown, Writer

if TYPE_CHECKING:
    from tests.actors.conftest import Theatre

Make = Callable[..., "Theatre"]

waiting = Process("waiting", wait("never"))


@task
def work(ctx: Context) -> str:
    return ctx.key


@task
def book() -> None:
    pass


@book.undo
def unbook() -> None:
    pass


working = Process("working", work, wait("never"))


class Disk:
    """Stands between the persistence actor and the writer: what the next writes meet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fates: list[str] = []
        self._write = Writer.write
        fates, write = self.fates, Writer.write

        def fated(writer: Writer, changes: Any, *, now_ms: int) -> Any:
            fate = fates.pop(0) if fates else ""
            if fate == "fenced":
                raise Fenced
            if fate == "unknown":
                raise Unknown("the disk is away")
            written = write(writer, [] if fate in ("stale", "constraint") else changes, now_ms=now_ms)
            if fate == "landed":
                raise Unknown("the answer was lost")
            if fate:
                refused = Refused(fate, Conflict("moved on") if fate == "stale" else Rejected("refused"))
                written.results = [refused for _ in changes]
            return written

        monkeypatch.setattr(Writer, "write", fated)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def _hang(world: Theatre, *names: str) -> None:
    """Let these handlers never come back by themselves; the test ends them."""
    for name in names:
        handler = world.handlers[name]
        world.handlers[name] = Handler(name, lambda **_: HANG, handler.types, handler.context)


def _finish(world: Theatre, id: str) -> None:
    """What the pool says when the one handler of an instance comes back."""
    token = next(token for token in world.reads.detail(id).tokens if token.status.value == "executing")
    command = c.CompleteTask(
        at_ms=world.clock.now_ms(), token=token.id, task=token.task, attempt=token.attempt, result='"done"'
    )
    world.tell(id, command)
    world.play()


# --- the ordinary way -------------------------------------------------------------------------------------------------


def test_commands_that_come_while_one_is_committed_are_decided_into_the_next_commit(theatre: Make) -> None:
    world = theatre(waiting)
    world.start("one", "waiting")
    answers = [world.send("one", "hello", payload=f"{n}") for n in range(10)]

    world.play()

    assert [answer.get() for answer in answers] == [{"id": "one", "received": False}] * 10
    assert len(world.reads.history("one")) == 2
    assert [event.payload for event in world.events("one", MessageBuffered)] == [f"{n}" for n in range(10)]


def test_an_instance_that_is_not_there_is_an_answer(theatre: Make) -> None:
    world = theatre(waiting)

    answer = world.send("nobody", "hello")
    world.play()

    assert isinstance(answer.error, UnknownInstance)
    assert len(world.system.directory) == 0


# --- a commit is refused ----------------------------------------------------------------------------------------------


def test_a_stale_commit_is_decided_again_on_what_the_store_says(theatre: Make, disk: Disk) -> None:
    world = theatre(waiting)
    world.start("one", "waiting")
    world.play()

    disk.fates += ["stale", "stale"]
    answer = world.send("one", "hello")
    world.play()

    assert answer.get() == {"id": "one", "received": False}
    assert len(world.events("one", MessageBuffered)) == 1


def test_a_commit_that_is_stale_again_and_again_is_an_answer_and_no_endless_loop(theatre: Make, disk: Disk) -> None:
    world = theatre(waiting)
    world.start("one", "waiting")
    world.play()

    disk.fates += ["stale"] * 50
    answer = world.send("one", "hello")
    world.play()

    assert isinstance(answer.error, Conflict)
    disk.fates.clear()
    assert world.send("one", "hello").get(timeout=1) == {"id": "one", "received": False}


@pytest.mark.parametrize("fate", ["stale", "unknown", "landed"])
def test_a_handler_that_runs_meanwhile_is_neither_lost_nor_run_again(theatre: Make, disk: Disk, fate: str) -> None:
    world = theatre(working)
    _hang(world, "work")
    world.start("one", "working")
    world.play()
    assert world.system.ports.pool.running() == 1

    disk.fates += [fate]
    world.send("one", "hello", key="k")
    world.pass_ms(1_000)
    _finish(world, "one")

    assert world.events("one", AttemptLost) == []
    assert len(world.events("one", TaskCompleted)) == 1
    assert len(world.events("one", MessageBuffered)) == 1
    assert world.system.ports.pool.running() == 1  # Nobody else was called for it.


@pytest.mark.parametrize("fate", ["stale", "unknown", "landed"])
def test_a_result_whose_commit_does_not_land_at_first_counts_once(theatre: Make, disk: Disk, fate: str) -> None:
    world = theatre(working)
    _hang(world, "work")
    world.start("one", "working")
    world.play()

    disk.fates += [fate]
    _finish(world, "one")
    world.pass_ms(1_000)

    assert len(world.events("one", TaskCompleted)) == 1
    assert world.events("one", AttemptLost) == []


def test_an_attempt_whose_commit_has_landed_unheard_is_begun_and_not_lost(theatre: Make, disk: Disk) -> None:
    world = theatre(working)

    disk.fates += ["landed"]
    world.start("one", "working")
    world.pass_ms(1_000)

    assert world.events("one", AttemptLost) == []
    assert len(world.events("one", TaskCompleted)) == 1


def test_a_result_that_the_store_refuses_is_a_failure_of_its_attempt(theatre: Make, disk: Disk) -> None:
    world = theatre(working)
    _hang(world, "work")
    world.start("one", "working")
    world.play()

    disk.fates += ["constraint"]
    _finish(world, "one")

    failed = world.events("one", AttemptFailed)
    assert [event.code for event in failed] == ["refused"]
    assert world.reads.summary("one").incidents == 1


# --- keys -------------------------------------------------------------------------------------------------------------


def test_the_same_key_with_the_same_content_gives_the_first_answer(theatre: Make) -> None:
    world = theatre(Process("talking", wait("hello"), wait("never")))
    world.start("one", "talking")
    first = world.send("one", "hello", key="k", payload="1").get(timeout=1)

    again = [world.send("one", "hello", key="k", payload="1") for _ in range(3)]
    other = world.send("one", "hello", key="k", payload="2")
    plain = world.send("one", "hello", payload="3")
    world.play()

    assert first == {"id": "one", "received": True}
    assert [answer.get() for answer in again] == [first] * 3
    assert isinstance(other.error, Conflict)
    assert plain.get() == {"id": "one", "received": False}
    assert [event.payload for event in world.events("one", MessageBuffered)] == ["3"]


def test_the_same_key_gives_the_first_answer_also_when_nothing_is_left_to_do(theatre: Make) -> None:
    world = theatre(Process("booking", saga(book, wait("never"))))
    world.start("one", "booking")
    world.play()
    first = world.system.order("one", c.Cancel(at_ms=world.clock.now_ms(), key="k", digest="same"))
    world.play()

    again = world.system.order("one", c.Cancel(at_ms=world.clock.now_ms(), key="k", digest="same"))
    other = world.system.order("one", c.Cancel(at_ms=world.clock.now_ms()))
    world.play()

    assert first.get() == {"id": "one", "status": "cancelling"}
    assert again.get() == first.get()
    assert other.get() == {"id": "one", "status": "ended"}


def test_a_key_is_kept_also_for_a_command_that_changed_nothing(theatre: Make) -> None:
    world = theatre(waiting)
    world.start("one", "waiting")
    world.system.order("one", c.Pause(at_ms=world.clock.now_ms()))
    paused = c.Pause(at_ms=world.clock.now_ms(), key="k", digest="same")
    first = world.system.order("one", paused)
    world.play()
    world.system.order("one", c.Resume(at_ms=world.clock.now_ms()))
    world.play()

    again = world.system.order("one", paused)
    other = world.system.order("one", c.Pause(at_ms=world.clock.now_ms(), key="k", digest="other"))
    world.play()

    assert again.get() == first.get()
    assert isinstance(other.error, Conflict)
    assert world.status("one") == "running"


def test_the_same_key_twice_at_once_is_done_once(theatre: Make) -> None:
    world = theatre(waiting)
    world.start("one", "waiting")
    world.play()
    world.send("one", "first")  # While this one is committed, the others wait and are decided together.

    answers = [world.send("one", "hello", key="k", payload=payload) for payload in ("1", "1", "2")]
    world.play()

    assert [answer.error is None for answer in answers].count(False) == 1
    assert len([event for event in world.events("one", MessageBuffered) if event.name == "hello"]) == 1


def test_a_repeated_command_costs_a_running_handler_nothing(theatre: Make) -> None:
    world = theatre(working)
    _hang(world, "work")
    world.start("one", "working")
    for _ in range(5):
        world.send("one", "hello", key="k")
        world.play()

    _finish(world, "one")

    assert world.events("one", AttemptLost) == []
    assert len(world.events("one", TaskCompleted)) == 1


# --- whether it landed is not known -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["unknown", "landed"])
def test_who_has_no_key_is_told_that_the_outcome_is_unknown_and_who_has_one_gets_its_answer(
    theatre: Make, disk: Disk, fate: str
) -> None:
    world = theatre(waiting)
    world.start("one", "waiting")
    world.play()

    disk.fates += [fate]
    plain = world.send("one", "plain")
    started = world.start("two", "waiting")
    world.stage.run_until(lambda: not disk.fates)
    world.pass_ms(1_000)
    disk.fates += [fate]
    keyed = world.send("one", "keyed", key="k")
    world.pass_ms(1_000)

    assert isinstance(plain.error, OutcomeUnknown)
    assert started.get()["id"] == "two"
    assert keyed.get() == {"id": "one", "received": False}
    names = [event.name for event in world.events("one", MessageBuffered)]
    assert names == (["plain"] if fate == "landed" else []) + ["keyed"]


# --- the file is no longer ours ---------------------------------------------------------------------------------------


def test_when_another_has_taken_over_everybody_who_waits_is_told(theatre: Make, disk: Disk) -> None:
    world = theatre(waiting, working)
    world.start("one", "waiting")
    world.play()

    disk.fates += ["fenced"]
    answers = [world.send("one", "hello"), world.send("one", "hello", key="k"), world.start("two", "working")]
    world.play()

    assert all(isinstance(answer.error, Fenced) for answer in answers)
    with pytest.raises(Fenced):
        world.send("one", "hello")


def test_who_may_have_been_replaced_does_not_answer_from_memory(theatre: Make) -> None:
    """It has stood still for longer than a lease: what it would answer without a commit may have been true then."""
    world = theatre(waiting)
    world.start("one", "waiting")
    world.play()
    world.system.services.is_sure = lambda: False

    confirmed = [world.start("one", "waiting"), world.send("nobody", "hello")]
    world.play()
    assert confirmed[0].get() == {"id": "one", "new": False}
    assert isinstance(confirmed[1].error, UnknownInstance)

    rival = Writer(world.path, Settings(durability="relaxed"))
    rival.take_over("rival")
    rival.close()
    stale = [world.start("one", "waiting"), world.send("nobody", "hello")]
    world.play()
    assert all(isinstance(answer.error, Fenced) for answer in stale)


# --- a broken belief of ours ------------------------------------------------------------------------------------------


def test_an_internal_error_reaches_its_caller_and_nobody_else(theatre: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = theatre(waiting)
    for id in ("good", "bad"):
        world.start(id, "waiting")
    world.play()

    def break_on(instance: Any, graph: Any, command: Any, **given: Any) -> Any:
        if isinstance(command, c.Send) and command.name == "poison":
            instance.tokens.clear()  # What it leaves behind in memory must not matter.
            raise ZeroDivisionError("a bug")
        return decide(instance, graph, command, **given)

    monkeypatch.setattr(instances, "decide", break_on)
    world.send("bad", "before")
    poison = world.send("bad", "poison")
    others = [world.send("bad", "after"), world.send("good", "hello")]
    world.play()

    assert isinstance(poison.error, UnderstudyError)
    assert "ZeroDivisionError" in str(poison.error)
    assert [answer.get()["received"] for answer in others] == [False, False]
    assert [event.name for event in world.events("bad", MessageBuffered)] == ["before", "after"]


def test_an_instance_that_cannot_even_begin_is_set_aside_and_the_others_go_on(
    theatre: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = theatre(working, waiting)
    _hang(world, "work")
    for id in ("good", "bad"):
        world.start(id, "working")
    world.play()
    world.crash()

    def break_on(instance: Any, graph: Any, command: Any, **given: Any) -> Any:
        if isinstance(command, c.Recover) and instance.id == "bad":
            raise ZeroDivisionError("a bug")
        return decide(instance, graph, command, **given)

    with monkeypatch.context() as broken:
        broken.setattr(instances, "decide", break_on)
        world.open()
        _hang(world, "work")
        world.play()  # It comes to rest: nobody tries for ever.
        answer = world.send("bad", "hello")
        world.play()
        assert "ZeroDivisionError" in str(answer.error)
        _finish(world, "good")
        assert len(world.events("good", TaskCompleted)) == 1

    assert world.send("bad", "hello").get(timeout=1) == {"id": "bad", "received": False}
    _finish(world, "bad")
    assert len(world.events("bad", AttemptLost)) == 1


def test_an_effect_that_cannot_be_carried_out_leaves_nobody_waiting(
    theatre: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = theatre(working)
    broken = iter([True])

    def fail(*given: Any) -> None:
        if next(broken, False):
            raise ZeroDivisionError("a bug")
        release(*given)

    release = world.system.services.release
    monkeypatch.setattr(world.system.services, "release", fail)
    answer = world.start("one", "working")
    world.play()

    assert isinstance(answer.error, UnderstudyError)  # It has landed, and its caller cannot know that.
    assert len(world.events("one", TaskCompleted)) == 1


# --- after a clean shutdown -------------------------------------------------------------------------------------------


def test_what_was_never_begun_is_begun_as_it_is_and_what_was_left_running_is_lost(theatre: Make) -> None:
    world = theatre(working)
    _hang(world, "work")
    for id in ("queued", "running"):
        world.start(id, "working")
    world.stage.run_until(lambda: world.reads.last_seq() == 2)
    world.crash()
    task_of = {id: world.reads.detail(id).tokens[0].task for id in ("queued", "running")}

    world.open(left=frozenset({f"running/{task_of['running']}/1"}))
    _hang(world, "work")
    world.play()

    attempts = {id: world.reads.detail(id).tokens[0].attempt for id in ("queued", "running")}
    assert attempts == {"queued": 1, "running": 2}
    assert world.system.ports.pool.running() == 2


def test_a_paused_instance_begins_nothing_that_was_queued_before(theatre: Make) -> None:
    world = theatre(working)
    world.start("one", "working")
    world.stage.run_until(lambda: world.reads.last_seq() == 1)
    world.system.order("one", c.Pause(at_ms=world.clock.now_ms()))
    world.stage.run_until(lambda: world.reads.last_seq() == 2)
    world.crash()

    world.open(left=frozenset())
    world.send("one", "hello")
    world.play()
    assert world.events("one", TaskCompleted) == []

    world.system.order("one", c.Resume(at_ms=world.clock.now_ms()))
    world.pass_ms(1_000)
    assert len(world.events("one", TaskCompleted)) == 1
