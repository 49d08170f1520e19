"""A forked child has the parent's objects and none of its threads: it is told so, and the parent does not notice."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from understudy import Process, Runtime, UsedAfterFork, connect, task, wait

greeting = Process("greeting", wait("go"))


@task
def greet() -> str:
    return "hello"


CALLS: dict[str, Callable[[Runtime], object]] = {
    "start": lambda runtime: runtime.start(greeting),
    "send": lambda runtime: runtime.send("one", "go"),
    "publish": lambda runtime: runtime.publish("go"),
    "cancel": lambda runtime: runtime.cancel("one"),
    "pause": lambda runtime: runtime.pause("one"),
    "retry": lambda runtime: runtime.retry("one"),
    "get": lambda runtime: runtime.get("one"),
    "list": lambda runtime: runtime.list(),
    "state": lambda runtime: runtime.state("one"),
    "history": lambda runtime: runtime.history("one"),
    "explain": lambda runtime: runtime.explain("one"),
    "result": lambda runtime: runtime.result("one"),
    "wait_until": lambda runtime: runtime.wait_until("one", lambda state: True),
    "subscribe": lambda runtime: runtime.subscribe("name", print),
    "redeliver": lambda runtime: runtime.redeliver("name", "one"),
    "report": lambda runtime: runtime.report(),
}


def _in_child(work: Callable[[], bool]) -> int:
    """Fork, and let the child's exit code say whether the work said yes."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _raises_used_after_fork(call: Callable[[], object]) -> bool:
    try:
        call()
    except UsedAfterFork:
        return True
    return False


@pytest.mark.parametrize("name", CALLS)
def test_every_call_in_a_forked_child_says_so(tmp_path: Path, name: str) -> None:
    with Runtime(tmp_path / "a.db", greeting) as runtime:
        runtime.start(greeting, id="one")

        assert _in_child(lambda: _raises_used_after_fork(lambda: CALLS[name](runtime))) == 0

        runtime.send("one", "go")
        assert runtime.result("one") is None


def test_a_clients_call_in_a_forked_child_says_so(tmp_path: Path) -> None:
    with Runtime(tmp_path / "a.db", greeting), connect(tmp_path / "a.db", greeting) as client:
        assert _in_child(lambda: _raises_used_after_fork(lambda: client.start(greeting))) == 0

        assert client.start(greeting, id="one").id == "one"


def test_a_child_that_closes_the_runtime_closes_nothing_of_its_parent(tmp_path: Path) -> None:
    received: list[object] = []
    with Runtime(tmp_path / "a.db", greeting) as runtime:
        runtime.subscribe("name", received.append)

        assert _in_child(lambda: runtime.close() and runtime.close()) == 0

        runtime.start(greeting, id="one")
        runtime.send("one", "go")
        assert runtime.result("one") is None


def test_a_child_that_closes_a_runtime_in_memory_leaves_it_to_its_parent() -> None:
    with Runtime(":memory:", greeting) as runtime:
        runtime.start(greeting, id="one")

        assert _in_child(runtime.close) == 0

        assert Path(runtime.node.path).exists()
        assert [summary.id for summary in runtime.list()] == ["one"]


def test_a_child_may_open_a_runtime_of_its_own(tmp_path: Path) -> None:
    def work() -> bool:
        with Runtime(tmp_path / "a.db", greeting) as own:
            own.start(greeting, id="by the child")
            return not own.is_owner

    with Runtime(tmp_path / "a.db", greeting) as runtime:
        assert _in_child(work) == 0

        assert [summary.id for summary in runtime.list()] == ["by the child"]


def test_a_child_that_outlives_the_owner_does_not_look_like_one(tmp_path: Path) -> None:
    read, write = os.pipe()
    runtime = Runtime(tmp_path / "a.db", greeting)
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # Until the parent lets go of its end.
        os._exit(0)
    os.close(read)
    try:
        runtime.close()

        with Runtime(tmp_path / "a.db", greeting, role="owner") as next_one:
            assert next_one.is_owner
    finally:
        os.close(write)
        os.waitpid(pid, 0)


def test_a_fork_of_multiprocessing_is_a_fork(tmp_path: Path) -> None:
    with Runtime(tmp_path / "a.db", greeting) as runtime:
        runtime.start(greeting, id="one")
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()

        child = context.Process(target=_try_in_child, args=(runtime, answers))
        child.start()
        child.join(30)

        assert (answers.get(), child.exitcode) == ("UsedAfterFork", 0)
        assert runtime.get("one").id == "one"


def test_a_parent_that_forks_while_it_works_loses_nothing(tmp_path: Path) -> None:
    with Runtime(tmp_path / "a.db", Process("greeting", greet, gives=greet)) as runtime:
        done: list[str] = []
        working = threading.Thread(
            target=lambda: done.extend(runtime.start("greeting").result(timeout="50s") for _ in range(100))
        )
        working.start()

        for _ in range(10):
            assert _in_child(lambda: _raises_used_after_fork(lambda: runtime.start("greeting"))) == 0

        working.join(50)
        assert done == ["hello"] * 100


def _try_in_child(runtime: Runtime, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        runtime.start(greeting)
    except Exception as error:
        answers.put(type(error).__name__)
    else:
        answers.put("nothing was raised")
