"""A close begins nothing new, loses nothing, and does not wait longer than it was told to."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy import (
    Closed,
    Context,
    Limits,
    OutcomeUnknown,
    Process,
    Runtime,
    Unavailable,
    connect,
    sleep,
    task,
    wait,
)
from understudy.model.events import AttemptLost
from understudy.store.writer import Unknown, Writer

if TYPE_CHECKING:
    from tests.process.conftest import Stage

Eventually = Callable[..., Any]


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_a_running_handler_finishes_and_its_result_is_committed_and_nothing_new_begins(
    stage: Stage, eventually: Eventually
) -> None:
    play = stage.play()
    runtime = Runtime(stage.path, play)
    runtime.start(play, id="one")
    eventually(lambda: stage.begun, "the handler")

    with stage.closing(runtime) as said:
        stage.gate.set()

    assert said == [True]
    assert stage.begun == [("first", "one", 1)]
    with Runtime(stage.path, play) as next_one:
        assert next_one.result("one") == "done"
        assert stage.events(next_one, AttemptLost) == []
    assert stage.begun == [("first", "one", 1), ("second", "one", 1)]


def test_many_handlers_that_finish_at_the_last_moment_are_all_committed(
    tmp_path: Path, eventually: Eventually, stage: Stage
) -> None:
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

    with stage.closing(runtime) as said:
        gate.set()

    assert said == [True]
    with Runtime(tmp_path / "a.db", play, limits=limits) as next_one:
        states = [next_one.state(f"{number}") for number in range(32)]
        for state in states:
            next_one.wait_until(state.id, lambda state: state.is_waiting_for("never"))
        assert stage.events(next_one, AttemptLost) == []
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

    with stage.closing(runtime) as first:
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
        assert stage.events(next_one, AttemptLost) == []
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


def test_threads_that_have_ended_leave_no_open_file_behind(tmp_path: Path) -> None:
    play = Process("play", wait("go"))
    with Runtime(tmp_path / "a.db", play) as runtime:
        runtime.start(play, id="one")
        before = _descriptors()

        for _ in range(20):
            reading = threading.Thread(target=lambda: runtime.state("one"))
            reading.start()
            reading.join(60)

        assert _descriptors() <= before + 2


def _threads() -> int:
    return threading.active_count()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
