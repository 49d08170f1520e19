"""Handlers in child processes: killed when they must be, and honest about how they ended."""

import importlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.isolation import ProcessRunner, beat
from understudy.actors.pool import CancelSignal, Job, Overran
from understudy.actors.threads import ThreadPool
from understudy.model.errors import Cancelled, Closed, Rejected, TimedOut, UnderstudyError

PATIENCE_S = 10

HANDLERS = """
import os, signal, subprocess, sys, threading
from understudy.actors.isolation import beat

class Declined(Exception):
    pass

class Nested:
    @staticmethod
    def upper(payload):
        return payload.upper()

def echo(payload):
    return payload

def pid(payload):
    return str(os.getpid()).encode()

def chatter(payload):
    print("to standard output", flush=True)
    os.write(1, b"and past the buffer")
    return payload

def read_input(payload):
    return sys.stdin.read().encode() + b"."

def decline(payload):
    raise Declined("card", 7)

def leave(payload):
    sys.exit("enough")

def raise_own(payload):
    class Local(Exception):
        pass
    raise Local("nobody else knows this class")

def die(payload):
    os._exit(3)

def die_by_signal(payload):
    os.kill(os.getpid(), signal.SIGSEGV)

def number(payload):
    return 7

def hang(payload):
    announce(payload)
    signal.pause()

def hang_with_grandchild(payload):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    announce(payload, child.pid)
    signal.pause()

def announce(fifo, pid=None):
    with open(fifo.decode(), "w") as file:
        file.write(str(pid or os.getpid()))

def beat_then_return(payload):
    for _ in range(5):
        threading.Event().wait(0.1)
        beat()
    return payload
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessRunner]:
    (tmp_path / "isolated_handlers.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    runner = ProcessRunner()
    yield runner
    runner.close()
    sys.modules.pop("isolated_handlers", None)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A pipe through which a handler that never returns says who it is: reading it waits until then."""
    path = tmp_path / "announcements"
    os.mkfifo(path)
    return path


def run(runner: ProcessRunner, name: str, payload: bytes = b"", *, timeout_ms: int | None = None) -> bytes:
    return runner.run(f"isolated_handlers:{name}", payload, timeout_ms=timeout_ms, signal=CancelSignal())


def is_gone(pid: int) -> bool:
    """Of a child: it is dead, and its parent has taken note."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ends(pid: int) -> bool:
    """Of somebody else's child: it dies, now or soon."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE_S)[0])
    finally:
        os.close(handle)


def test_a_handler_gets_bytes_and_gives_bytes_from_another_process(runner: Any) -> None:
    megabytes = os.urandom(3_000_000)

    assert run(runner, "echo", megabytes) == megabytes
    assert run(runner, "Nested.upper", b"abc") == b"ABC"
    assert int(run(runner, "pid")) != os.getpid()


def test_a_child_is_used_again(runner: Any) -> None:
    assert run(runner, "pid") == run(runner, "pid")


def test_what_a_handler_prints_or_reads_does_not_touch_the_frames(runner: Any, capfd: Any) -> None:
    assert run(runner, "chatter", b"result") == b"result"
    assert run(runner, "read_input") == b"."

    assert capfd.readouterr().out == "to standard output\nand past the buffer"


def test_an_exception_keeps_its_class_where_that_is_loaded(runner: Any) -> None:
    handlers = importlib.import_module("isolated_handlers")

    with pytest.raises(handlers.Declined) as caught:
        run(runner, "decline")

    assert caught.value.args == ("card", 7)
    assert "in decline" in caught.value.__notes__[0]
    assert run(runner, "echo", b"the child lives on") == b"the child lives on"


def test_an_exit_of_the_handler_is_an_exception_like_others(runner: Any) -> None:
    with pytest.raises(SystemExit, match="enough"):
        run(runner, "leave")


def test_an_exception_of_an_unknown_class_still_says_what_it_was(runner: Any) -> None:
    with pytest.raises(UnderstudyError, match="nobody else knows this class"):
        run(runner, "raise_own")


@pytest.mark.parametrize(("name", "how"), [("die", "exited with code 3"), ("die_by_signal", "ended by SIGSEGV")])
def test_the_death_of_a_child_is_reported_with_its_cause_and_it_is_replaced(runner: Any, name: Any, how: Any) -> None:
    with pytest.raises(UnderstudyError, match=how):
        run(runner, name)

    assert run(runner, "echo", b"a new child") == b"a new child"


def test_a_handler_that_runs_too_long_is_killed(runner: Any, fifo: Any) -> None:
    pids = []
    reader = threading.Thread(target=lambda: pids.append(int(fifo.read_text())))
    reader.start()
    run(runner, "echo")  # The time that a child needs to start is not what is tested.

    with pytest.raises(TimedOut, match="ran over 300 ms"):
        run(runner, "hang", str(fifo).encode(), timeout_ms=300)

    reader.join(PATIENCE_S)
    assert is_gone(pids[0])


def test_a_cancelled_handler_is_killed_with_what_it_started(runner: Any, fifo: Any) -> None:
    signal = CancelSignal()
    errors = []

    def call() -> None:
        with pytest.raises(Cancelled) as caught:
            runner.run("isolated_handlers:hang_with_grandchild", str(fifo).encode(), timeout_ms=None, signal=signal)
        errors.append(caught.value)

    caller = threading.Thread(target=call)
    caller.start()
    grandchild = int(fifo.read_text())
    signal.cancel()
    caller.join(PATIENCE_S)

    assert "was cancelled" in str(errors[0])
    assert ends(grandchild)


def test_the_pool_kills_an_isolated_handler_at_its_timeout_and_gets_its_thread_back(runner: Any, fifo: Any) -> None:
    pool = ThreadPool(1)
    signal = CancelSignal()
    outcomes, ended = [], threading.Event()

    def done(outcome: object) -> None:
        outcomes.append(outcome)
        ended.set()

    def handler() -> bytes:
        try:
            given: bytes = runner.run("isolated_handlers:hang", str(fifo).encode(), timeout_ms=None, signal=signal)
            return given
        finally:
            returned.set()

    returned = threading.Event()
    pool.submit(Job(key="isolated", run=handler, done=done, signal=signal, timeout_ms=500))
    pid = int(fifo.read_text())

    assert ended.wait(PATIENCE_S)
    assert returned.wait(PATIENCE_S)
    assert outcomes == [Overran(500)]
    assert is_gone(pid)
    pool.stop(1)


def test_heartbeats_of_the_handler_extend_its_time(runner: Any) -> None:
    run(runner, "echo")

    assert run(runner, "beat_then_return", b"still here", timeout_ms=450) == b"still here"


def test_a_heartbeat_outside_of_a_child_does_nothing() -> None:
    beat()


def test_an_idle_child_that_died_is_not_used(runner: Any) -> None:
    pid = int(run(runner, "pid"))
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    assert int(run(runner, "pid")) != pid


def test_closing_kills_the_children_and_takes_no_more_calls(runner: Any) -> None:
    pid = int(run(runner, "pid"))

    runner.close()

    assert is_gone(pid)
    with pytest.raises(Closed, match="was not called"):
        run(runner, "echo")


PARENT = """
import sys
sys.path[:] = sys.argv[2:]
from understudy.actors.isolation import ProcessRunner
from understudy.actors.pool import CancelSignal
fifo = sys.argv[1].encode()
ProcessRunner().run("isolated_handlers:hang", fifo, timeout_ms=None, signal=CancelSignal())
"""


def test_a_child_dies_with_its_parent(tmp_path: Path, fifo: Any) -> None:
    (tmp_path / "isolated_handlers.py").write_text(HANDLERS)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(fifo), str(tmp_path), *sys.path])
    child = int(fifo.read_text())

    parent.kill()
    parent.wait()

    assert ends(child)


def test_a_result_that_is_not_bytes_and_a_handler_of_the_main_script_are_refused(runner: Any) -> None:
    with pytest.raises(Rejected, match="must be bytes"):
        run(runner, "number")
    with pytest.raises(Rejected, match="into a module of its own"):
        runner.run("__main__:handler", b"", timeout_ms=None, signal=CancelSignal())
