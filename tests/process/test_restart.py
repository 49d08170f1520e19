"""What was under way when a service was closed goes on in its next life, and only what had begun can be lost."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy import Closed, Context, Limits, Process, Retry, Runtime, Unavailable, parallel, task
from understudy.model.events import AttemptFailed, AttemptLost, TaskOpened

if TYPE_CHECKING:
    from tests.process.conftest import Stage, World

Eventually = Callable[..., Any]


def test_attempts_that_were_queued_and_never_begun_are_not_lost_however_often_the_service_restarts(
    stage: Stage, eventually: Eventually
) -> None:
    play = stage.play()
    limits = Limits(threads=1)  # One handler at a time: all the others are queued.

    for life in range(1, 6):
        runtime = Runtime(stage.path, play, limits=limits)
        for number in range(20):
            runtime.start(play, id=f"{number}")
        eventually(lambda life=life: stage.count("first") == life, "the next handler")
        with stage.closing(runtime) as said:
            stage.gate.set()
        stage.gate.clear()
        assert said == [True]

    stage.gate.set()
    with Runtime(stage.path, play, limits=limits) as runtime:
        assert [runtime.result(f"{number}") for number in range(20)] == ["done"] * 20
        assert stage.events(runtime, AttemptLost) == []
        assert len(stage.events(runtime, TaskOpened)) == 40
    assert len(stage.begun) == len({(name, id) for name, id, _attempt in stage.begun}) == 40


def test_only_the_attempt_that_hung_is_lost_and_not_those_queued_behind_it(
    stage: Stage, eventually: Eventually
) -> None:
    play = stage.play()
    limits = Limits(threads=1)
    runtime = Runtime(stage.path, play, limits=limits)
    for number in range(10):
        runtime.start(play, id=f"{number}")
    eventually(lambda: stage.begun, "the handler")

    assert runtime.close(timeout="50ms") is False

    stage.gate.set()
    with Runtime(stage.path, play, limits=limits) as runtime:
        assert [runtime.result(f"{number}") for number in range(10)] == ["done"] * 10
        lost = stage.events(runtime, AttemptLost)
    assert len(lost) == 1


def test_a_crash_after_a_clean_restart_counts_whatever_was_out(world: World, eventually: Eventually) -> None:
    """The mark of a clean shutdown is good for one restart: after a crash nobody knows what had begun."""
    first = world.worker()
    for number in range(12):
        first.ask("start", id=f"held-{number}", process="held")
    eventually(lambda: len(world.effects()) == 8, "as many handlers as there are threads")
    first.ask("close", timeout="50ms")
    first.leave()
    assert _times_lost(world) == 0

    second = world.worker()
    eventually(lambda: len(world.effects()) == 16, "the handlers of the second life")
    assert _times_lost(world) == 8
    second.kill()
    world.open_gate()
    third = world.worker()
    for number in range(12):
        third.ask("result", id=f"held-{number}")

    assert _times_lost(world) == 8 + 12


def _times_lost(world: World) -> int:
    events = (event for entries in world.audit().values() for entry in entries for event in entry.events)
    return sum(isinstance(event, AttemptLost) for event in events)


def test_an_operators_command_between_two_lives_leaves_the_queue_as_it_was(
    stage: Stage, eventually: Eventually
) -> None:
    play = stage.play()
    limits = Limits(threads=1)
    runtime = Runtime(stage.path, play, limits=limits)
    for number in range(5):
        runtime.start(play, id=f"{number}")
    eventually(lambda: stage.begun, "the handler")
    runtime.close(timeout="50ms")

    for _ in range(3):
        with Runtime(stage.path, play, role="operator") as operator:
            operator.send("4", "hello")

    stage.gate.set()
    with Runtime(stage.path, play, limits=limits) as runtime:
        assert [runtime.result(f"{number}") for number in range(5)] == ["done"] * 5
        assert len(stage.events(runtime, AttemptLost)) == 1


def test_a_failed_attempt_whose_next_one_is_due_at_once_is_not_lost_by_a_close(
    tmp_path: Path, eventually: Eventually, stage: Stage
) -> None:
    begun: list[int] = []
    gate = threading.Event()

    @task(retry=Retry(3, first=0))
    def fail_first(ctx: Context) -> int:
        begun.append(ctx.attempt)
        gate.wait(60)
        if ctx.attempt < 3:
            raise RuntimeError("not yet")
        return ctx.attempt

    play = Process("play", fail_first, gives=fail_first)
    for life in (1, 2):
        runtime = Runtime(tmp_path / "a.db", play)
        runtime.start(play, id="one")
        eventually(lambda life=life: len(begun) == life, "the attempt")
        with stage.closing(runtime):
            gate.set()
        gate.clear()

    gate.set()
    with Runtime(tmp_path / "a.db", play) as runtime:
        assert runtime.result("one") == 3
        assert stage.events(runtime, AttemptLost) == []
    assert begun == [1, 2, 3]


def test_async_handlers_and_parallel_branches_are_closed_and_go_on_alike(
    tmp_path: Path, eventually: Eventually, stage: Stage
) -> None:
    begun: list[str] = []
    gate = threading.Event()

    @task
    async def left(ctx: Context) -> None:
        begun.append("left")
        await asyncio.to_thread(gate.wait, 60)

    @task
    def right(ctx: Context) -> None:
        begun.append("right")
        gate.wait(60)

    @task
    def last() -> str:
        return "done"

    play = Process("play", parallel(left, right), last, gives=last)
    runtime = Runtime(tmp_path / "a.db", play)
    runtime.start(play, id="one")
    eventually(lambda: len(begun) == 2, "both branches")
    with stage.closing(runtime) as said:
        gate.set()

    assert said == [True]
    with Runtime(tmp_path / "a.db", play) as next_one:
        assert next_one.result("one") == "done"
    assert sorted(begun) == ["left", "right"]


def test_transactional_tasks_that_wait_for_their_turn_keep_it_over_a_restart(
    tmp_path: Path, eventually: Eventually, stage: Stage
) -> None:
    begun: list[str] = []
    gates = [threading.Event(), threading.Event()]

    @task(transactional=True, timeout="60s")
    def book(connection: Any, ctx: Context) -> str:
        begun.append(ctx.instance)
        gates[min(len(begun), 2) - 1].wait(60)
        connection.execute("CREATE TABLE IF NOT EXISTS booked (id TEXT)")
        connection.execute("INSERT INTO booked VALUES (?)", (ctx.instance,))
        return ctx.instance

    play = Process("play", book, gives=book)
    runtime = Runtime(tmp_path / "a.db", play)
    runtime.start(play, id="first")
    eventually(lambda: begun, "the first transaction")
    # Nothing can be committed meanwhile: these wait at the writer, and are then started together.
    others = [threading.Thread(target=_try_to_start, args=(runtime, play, f"{n}")) for n in range(5)]
    for other in others:
        other.start()
    gates[0].set()
    eventually(lambda: len(begun) == 2, "the second transaction, with others behind it")
    with stage.closing(runtime):
        gates[1].set()
    for other in others:
        other.join(60)

    with Runtime(tmp_path / "a.db", play) as next_one:
        ids = [summary.id for summary in next_one.list()]
        assert [next_one.result(id) for id in ids] == ids
        assert stage.events(next_one, AttemptLost) == []
        assert stage.events(next_one, AttemptFailed) == []
    assert begun[0] == "first"
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as database:
        assert sorted(database.execute("SELECT id FROM booked").fetchall()) == sorted((id,) for id in ids)


def _try_to_start(runtime: Runtime, play: Process[Any, Any], id: str) -> None:
    with contextlib.suppress(Closed, Unavailable):
        runtime.start(play, id=id)
