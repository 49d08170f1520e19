"""A close begins nothing new, loses nothing, and does not wait longer than it was told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy import (
    Closed,
    Context,
    Limits,
    OutcomeUnknown,
    Process,
    Retry,
    Runtime,
    Unavailable,
    connect,
    parallel,
    sleep,
    task,
    wait,
)
from understudy.actors.pool import ThreadPool
from understudy.model.events import AttemptFailed, AttemptLost, TaskOpened
from understudy.store.writer import Unknown, Writer

if TYPE_CHECKING:
    from tests.process.conftest import World

Eventually = Callable[..., Any]


class Stage:
    """What the handlers of one test do and have done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun: list[tuple[str, str, int]] = []
        self.gate = threading.Event()

    def enter(self, name: str, ctx: Context) -> None:
        self.begun.append((name, ctx.instance, ctx.attempt))

    def count(self, name: str) -> int:
        return sum(begun == name for begun, _instance, _attempt in self.begun)

    def play(self) -> Process[Any, Any]:
        """Two steps, of which the first waits for the gate."""

        @task
        def first(ctx: Context) -> None:
            self.enter("first", ctx)
            assert self.gate.wait(60)

        @task
        def second(ctx: Context) -> str:
            self.enter("second", ctx)
            return "done"

        return Process("play", first, second, gives=second)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "a.db")
    yield made
    made.gate.set()  # Whoever still hangs goes with the test.


def _events(runtime: Runtime, kind: type) -> list[Any]:
    return [
        event
        for summary in runtime.list(limit=1_000)
        for step in runtime.history(summary.id)
        for entry in step.entries
        for event in entry.events
        if isinstance(event, kind)
    ]


@contextmanager
def _closing(runtime: Runtime) -> Iterator[list[bool]]:
    """Close on another thread; the block runs as soon as no handler begins any more.

    What the close said stands in the list afterwards.
    """
    said: list[bool] = []
    system = runtime.node.system
    assert system is not None
    assert isinstance(system.ports.pool, ThreadPool)
    thread = threading.Thread(target=lambda: said.append(runtime.close(timeout="60s")))
    thread.start()
    try:
        while not system.ports.pool.closed:
            thread.join(0.001)
        yield said
    finally:
        thread.join(60)
        assert not thread.is_alive()


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_a_running_handler_finishes_and_its_result_is_committed_and_nothing_new_begins(
    stage: Stage, eventually: Eventually
) -> None:
    play = stage.play()
    runtime = Runtime(stage.path, play)
    runtime.start(play, id="one")
    eventually(lambda: stage.begun, "the handler")

    with _closing(runtime) as said:
        stage.gate.set()

    assert said == [True]
    assert stage.begun == [("first", "one", 1)]
    with Runtime(stage.path, play) as next_one:
        assert next_one.result("one") == "done"
        assert _events(next_one, AttemptLost) == []
    assert stage.begun == [("first", "one", 1), ("second", "one", 1)]


def test_many_handlers_that_finish_at_the_last_moment_are_all_committed(tmp_path: Path, eventually: Eventually) -> None:
    begun: list[str] = []
    gate = threading.Event()

    @task
    def first(ctx: Context) -> None:
        begun.append(ctx.instance)
        gate.wait(60)

    play = Process("play", first, wait("never"))
    limits = Limits(threads=32)
    runtime = Runtime(tmp_path / "a.db", play, limits=limits)
    for number in range(32):
        runtime.start(play, id=f"{number}")
    eventually(lambda: len(begun) == 32, "the handlers")

    with _closing(runtime) as said:
        gate.set()

    assert said == [True]
    with Runtime(tmp_path / "a.db", play, limits=limits) as next_one:
        states = [next_one.state(f"{number}") for number in range(32)]
        for state in states:
            next_one.wait_until(state.id, lambda state: state.is_waiting_for("never"))
        assert _events(next_one, AttemptLost) == []
    assert len(begun) == 32


def test_a_hung_handler_does_not_hold_up_the_close_and_its_attempt_is_made_again(
    stage: Stage, eventually: Eventually
) -> None:
    play = stage.play()
    runtime = Runtime(stage.path, play)
    runtime.start(play, id="one")
    eventually(lambda: stage.begun, "the handler")

    assert runtime.close(timeout="50ms") is False

    with Runtime(stage.path, play) as next_one:
        eventually(lambda: len(stage.begun) == 2, "the second attempt")
        stage.gate.set()
        assert next_one.result("one") == "done"
    assert stage.begun[:2] == [("first", "one", 1), ("first", "one", 2)]


def test_a_hung_handler_does_not_hold_up_the_end_of_the_interpreter(tmp_path: Path) -> None:
    script = f"""
import threading
from understudy import Process, Runtime, task

begun = threading.Event()

@task
def hang() -> None:
    begun.set()
    threading.Event().wait()

with Runtime({str(tmp_path / "a.db")!r}, Process("hanging", hang)) as runtime:
    runtime.start("hanging")
    begun.wait()
    print(runtime.close(timeout="50ms"))
"""

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\n", "")


# --- attempts that never began ----------------------------------------------------------------------------------------


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
        with _closing(runtime) as said:
            stage.gate.set()
        stage.gate.clear()
        assert said == [True]

    stage.gate.set()
    with Runtime(stage.path, play, limits=limits) as runtime:
        assert [runtime.result(f"{number}") for number in range(20)] == ["done"] * 20
        assert _events(runtime, AttemptLost) == []
        assert len(_events(runtime, TaskOpened)) == 40
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
        lost = _events(runtime, AttemptLost)
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
        assert len(_events(runtime, AttemptLost)) == 1


def test_a_failed_attempt_whose_next_one_is_due_at_once_is_not_lost_by_a_close(
    tmp_path: Path, eventually: Eventually
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
        with _closing(runtime):
            gate.set()
        gate.clear()

    gate.set()
    with Runtime(tmp_path / "a.db", play) as runtime:
        assert runtime.result("one") == 3
        assert _events(runtime, AttemptLost) == []
    assert begun == [1, 2, 3]


def test_async_handlers_and_parallel_branches_are_closed_and_go_on_alike(
    tmp_path: Path, eventually: Eventually
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
    with _closing(runtime) as said:
        gate.set()

    assert said == [True]
    with Runtime(tmp_path / "a.db", play) as next_one:
        assert next_one.result("one") == "done"
    assert sorted(begun) == ["left", "right"]


def test_transactional_tasks_that_wait_for_their_turn_keep_it_over_a_restart(
    tmp_path: Path, eventually: Eventually
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
    with _closing(runtime):
        gates[1].set()
    for other in others:
        other.join(60)

    with Runtime(tmp_path / "a.db", play) as next_one:
        ids = [summary.id for summary in next_one.list()]
        assert [next_one.result(id) for id in ids] == ids
        assert _events(next_one, AttemptLost) == []
        assert _events(next_one, AttemptFailed) == []
    assert begun[0] == "first"
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as database:
        assert sorted(database.execute("SELECT id FROM booked").fetchall()) == sorted((id,) for id in ids)


def _try_to_start(runtime: Runtime, play: Process[Any, Any], id: str) -> None:
    with contextlib.suppress(Closed, Unavailable):
        runtime.start(play, id=id)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_after_a_close_every_call_says_so(tmp_path: Path) -> None:
    play = Process("play", wait("go"))
    runtime = Runtime(tmp_path / "a.db", play)
    runtime.start(play, id="one")

    assert runtime.close() is True
    assert runtime.close() is True

    for call in (
        lambda: runtime.start(play),
        lambda: runtime.send("one", "go"),
        lambda: runtime.publish("go"),
        lambda: runtime.state("one"),
        lambda: runtime.get("one"),
        lambda: runtime.list(),
        lambda: runtime.result("one"),
        lambda: runtime.subscribe("name", print),
    ):
        with pytest.raises(Closed):
            call()


def test_two_who_close_at_once_both_wait_until_it_is_done(stage: Stage, eventually: Eventually) -> None:
    play = stage.play()
    runtime = Runtime(stage.path, play)
    runtime.start(play, id="one")
    eventually(lambda: stage.begun, "the handler")

    with _closing(runtime) as first:
        second = threading.Thread(target=lambda: first.append(runtime.close()))
        second.start()
        stage.gate.set()
    second.join(60)

    assert first == [True, True]


def test_a_block_that_raises_closes_the_runtime(tmp_path: Path) -> None:
    play = Process("play", wait("go"))

    def fail() -> None:
        with Runtime(tmp_path / "a.db", play) as runtime:
            runtime.start(play, id="one")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    with Runtime(tmp_path / "a.db", play, role="owner") as next_one:
        assert next_one.get("one").id == "one"


def test_whoever_waits_for_a_result_is_told_of_the_close(tmp_path: Path, eventually: Eventually) -> None:
    play = Process("play", wait("go"))
    runtime = Runtime(tmp_path / "a.db", play)
    runtime.start(play, id="one")
    outcomes: list[str] = []

    def wait_for_it() -> None:
        try:
            runtime.result("one", timeout="60s")
        except Closed:
            outcomes.append("closed")

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    runtime.close()
    waiting.join(60)

    assert outcomes == ["closed"]


@pytest.mark.parametrize("is_client", [False, True])
def test_calls_made_while_the_runtime_closes_are_done_or_refused_and_nobody_waits_for_ever(
    tmp_path: Path, is_client: bool
) -> None:
    play = Process("play", wait("go"))
    owner = Runtime(tmp_path / "a.db", play)
    runtime = connect(tmp_path / "a.db", play) if is_client else owner
    barrier = threading.Barrier(9)
    done: list[str] = []
    unknown: list[str] = []

    def call(name: str) -> None:
        barrier.wait()
        for number in range(10_000):
            try:
                done.append(runtime.start(play, id=f"{name}-{number}").id)
            except OutcomeUnknown:
                unknown.append(f"{name}-{number}")
                return
            except (Closed, Unavailable):
                return

    threads = [threading.Thread(target=call, args=(f"{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    barrier.wait()
    while len(done) < 50:
        pass
    owner.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    runtime.close()

    with Runtime(tmp_path / "a.db", play) as next_one:
        stored = {summary.id for summary in next_one.list(limit=10_000)}
    assert set(done) <= stored <= set(done) | set(unknown)


# --- storage ----------------------------------------------------------------------------------------------------------


def test_a_close_while_the_disk_cannot_be_written_ends_and_the_next_life_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise Unknown("the disk is gone")

    play = stage.play()
    runtime = Runtime(stage.path, play)
    runtime.start(play, id="one")
    eventually(lambda: stage.begun, "the handler")
    with monkeypatch.context() as broken:
        broken.setattr(Writer, "write", fail)
        broken.setattr(Writer, "reopen", fail)
        stage.gate.set()
        eventually(lambda: _raises_unavailable(runtime), "the writer is degraded")

        assert runtime.close(timeout="100ms") is False

    with Runtime(stage.path, play) as next_one:
        assert next_one.result("one") == "done"
    assert ("first", "one", 2) in stage.begun


def _raises_unavailable(runtime: Runtime) -> bool:
    try:
        runtime.publish("nothing")
    except Unavailable:
        return True
    return False


def test_what_could_not_be_written_is_committed_if_the_disk_is_back_before_the_limit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise Unknown("the disk is away")

    play = stage.play()
    runtime = Runtime(stage.path, play)
    runtime.start(play, id="one")
    eventually(lambda: stage.begun, "the handler")
    with monkeypatch.context() as broken:
        broken.setattr(Writer, "write", fail)
        broken.setattr(Writer, "reopen", fail)
        stage.gate.set()
        eventually(lambda: _raises_unavailable(runtime), "the writer is degraded")
        closing = threading.Thread(target=runtime.close)
        closing.start()
        eventually(lambda: runtime.node.is_closed, "the close")
    closing.join(60)

    with Runtime(stage.path, play) as next_one:
        assert next_one.result("one") == "done"
        assert _events(next_one, AttemptLost) == []
    assert stage.begun == [("first", "one", 1), ("second", "one", 1)]


# --- leaks ------------------------------------------------------------------------------------------------------------


def test_a_close_leaves_no_thread_and_no_open_file_behind(tmp_path: Path, eventually: Eventually) -> None:
    @task
    def plain() -> None:
        pass

    @task
    async def coroutine() -> None:
        pass

    play = Process("play", plain, coroutine, sleep("1ms"), wait("go"))

    def live() -> None:
        with Runtime(tmp_path / "a.db", play) as owner, connect(tmp_path / "a.db", play) as client:
            owner.subscribe("name", lambda change: None)
            handle = client.start(play)
            client.send(handle.id, "go")
            client.result(handle.id)

    live()  # Whatever is made once, such as the resolver's thread, is there now.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = (_threads(), _descriptors())
        for _ in range(5):
            live()
        gc.collect()
        eventually(lambda: _threads() <= before[0], "all threads have ended")

    assert _descriptors() == before[1]
    assert [str(warning.message) for warning in caught] == []


def _threads() -> int:
    return threading.active_count()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
