"""What users' functions may do: whatever it is, it ends as a result, a retry or an incident, and harms nobody else."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import select
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from understudy import (
    Context,
    Failed,
    Handle,
    Limits,
    Process,
    Rehearsal,
    Retry,
    Runtime,
    State,
    Stuck,
    task,
    wait,
)
from understudy.actors.handlers import TEXT_LIMIT, Handler, arguments, fault_of
from understudy.model.effects import RunTask
from understudy.model.errors import BadValue

WAIT_S = 10  # For events that come at once; it is never used up when all is well.


@frozen
class Box:
    items: tuple[str, ...]


class Colour(Enum):
    RED = "red"


@dataclasses.dataclass
class Paint:
    colour: Colour


@task(into="healthy")
def healthy() -> int:
    return 1


def stopped(order: Handle[Any]) -> State:
    return order.wait_until(lambda state: bool(state.incidents))


# --- handlers that misbehave ------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Rude(BaseException):
    pass


def _raise(error: BaseException) -> Callable[[], object]:
    def raises() -> object:
        raise error

    return raises


def _nested() -> object:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


MISBEHAVIOUR: dict[str, tuple[Callable[[], object], str]] = {
    "raises": (_raise(ValueError("sold out")), "ValueError: sold out"),
    "raises without words": (_raise(ValueError()), "ValueError"),
    "raises the unspeakable": (_raise(Unspeakable()), "Unspeakable: (its text could not be made: RuntimeError)"),
    "raises a surrogate": (_raise(ValueError("\ud800")), "ValueError: ?"),
    "raises a null character": (_raise(ValueError("a\0b")), "ValueError: a\N{SYMBOL FOR NULL}b"),
    "raises SystemExit": (_raise(SystemExit(3)), "SystemExit: 3"),
    "raises KeyboardInterrupt": (_raise(KeyboardInterrupt()), "KeyboardInterrupt"),
    "raises a BaseException": (_raise(Rude("out")), "Rude: out"),
    "raises CancelledError": (_raise(asyncio.CancelledError()), "CancelledError"),
    "returns NaN": (lambda: float("nan"), "BadValue: the result of misbehave: NaN is not JSON; use None or a string"),
    "returns an object": (object, "BadValue: the result of misbehave: an object cannot be stored as JSON"),
    "returns bytes": (lambda: b"x", "BadValue: the result of misbehave: bytes is not JSON"),
    "returns 10 MB": (lambda: "x" * 10_000_000, "BadValue: the result of misbehave: 10,000,002 bytes are over"),
    "returns what is too deep": (_nested, "nested deeper than 100 levels"),
    "returns a function": (lambda: _raise, "BadValue: the result of misbehave: a function cannot be stored as JSON"),
}


@pytest.mark.parametrize("how", MISBEHAVIOUR)
def test_a_handler_that_misbehaves_is_an_incident_and_its_neighbours_complete(tmp_path: Path, how: str) -> None:
    misdeed, text = MISBEHAVIOUR[how]

    @task
    def misbehave() -> object:
        return misdeed()

    bad, good = Process("bad", misbehave), Process("good", healthy, gives="healthy")
    with Runtime(tmp_path / "p.db", bad, good) as runtime:
        before, order, after = runtime.start(good), runtime.start(bad), runtime.start(good)

        (incident,) = stopped(order).incidents

        assert text in incident.detail
        assert (before.result(), after.result()) == (1, 1)
        assert runtime.start(good).result() == 1


@pytest.mark.parametrize("how", MISBEHAVIOUR)
def test_an_async_handler_that_misbehaves_is_an_incident_too(tmp_path: Path, how: str) -> None:
    misdeed, text = MISBEHAVIOUR[how]

    @task
    async def misbehave() -> object:
        return misdeed()

    @task(into="healthy")
    async def healthy_too() -> int:
        return 1

    bad, good = Process("bad", misbehave), Process("good", healthy_too, gives="healthy")
    with Runtime(tmp_path / "p.db", bad, good) as runtime:
        order = runtime.start(bad)

        (incident,) = stopped(order).incidents

        assert text in incident.detail
        assert runtime.start(good).result() == 1


@pytest.mark.parametrize("how", MISBEHAVIOUR)
def test_what_a_misbehaving_handler_leaves_behind_can_be_read_after_a_crash(rehearsal: Rehearsal, how: str) -> None:
    misdeed, _ = MISBEHAVIOUR[how]

    @task
    def misbehave() -> object:
        return misdeed()

    order = rehearsal.start(Process("bad", misbehave, wait("go")))
    before = order.state

    rehearsal.crash()
    rehearsal.stand_in(misbehave, lambda: None)
    order.retry()

    assert before.incidents
    assert order.state.is_waiting_for("go")


def test_a_handler_that_hangs_is_given_up_at_its_timeout_and_its_late_result_is_not_used(tmp_path: Path) -> None:
    may_end = threading.Event()
    came_back = threading.Event()

    @task(timeout="50ms", into="value")
    def hang() -> int:
        may_end.wait(WAIT_S)
        came_back.set()
        return 1

    bad, good = Process("bad", hang, gives="value"), Process("good", healthy, gives="healthy")
    with Runtime(tmp_path / "p.db", bad, good, limits=Limits(threads=1)) as runtime:
        order = runtime.start(bad)
        (incident,) = stopped(order).incidents
        meanwhile = runtime.start(good).result()  # Its only thread hangs, and has been replaced.
        may_end.set()
        came_back.wait(WAIT_S)
        order.skip(result=2)

        assert (incident.name, incident.detail) == ("timeout", "hang was not done after 50 ms")
        assert meanwhile == 1
        assert order.result() == 2


def test_a_heartbeat_counts_the_timeout_anew(tmp_path: Path) -> None:
    @task(timeout="150ms", into="beats")
    def slow(ctx: Context) -> int:
        for _ in range(6):
            threading.Event().wait(0.05)
            ctx.heartbeat()
        return 6

    process = Process("slow", slow, gives="beats")
    with Runtime(tmp_path / "p.db", process) as runtime:
        assert runtime.start(process).result() == 6


def test_a_failing_handler_is_retried_by_its_policy_and_some_errors_never(tmp_path: Path) -> None:
    class Declined(Exception):
        pass

    calls: list[int] = []

    @task(retry=Retry(10, first="1ms", never=Declined))
    def fail(ctx: Context) -> None:
        calls.append(ctx.attempt)
        raise Declined("card") if ctx.attempt == 3 else ConnectionError("line")

    process = Process("p", fail)
    with Runtime(tmp_path / "p.db", process) as runtime, pytest.raises(Stuck, match="Declined: card"):
        runtime.start(process).result()

    assert calls == [1, 2, 3]


def test_on_failure_decides_between_an_operator_and_the_end(tmp_path: Path) -> None:
    @task(on_failure="fail")
    def fail() -> None:
        raise ValueError("for good")

    process = Process("p", fail)
    with Runtime(tmp_path / "p.db", process) as runtime, pytest.raises(Failed, match="failed at fail: ValueError"):
        runtime.start(process).result()


def test_results_may_be_anything_that_json_can_hold_and_come_back_by_their_types(rehearsal: Rehearsal) -> None:
    @task(into="box")
    def pack() -> Box:
        return Box(("a", "b"))

    @task(into="paint")
    def mix(box: Box) -> Paint:
        assert box == Box(("a", "b"))
        return Paint(Colour.RED)

    @task(into="tags")
    def tag(paint: Paint) -> set[str]:
        assert paint == Paint(Colour.RED)
        return {"z", "a"}

    @task
    def check(tags: set[str]) -> bool:
        return tags == {"a", "z"}

    order = rehearsal.start(Process("p", pack, mix, tag, check, gives=check))

    assert order.result() is True
    assert order.variables["tags"] == ["a", "z"]  # A set is stored in order, so that the same set is the same text.


def test_a_variable_that_no_longer_fits_its_parameter_is_named(rehearsal: Rehearsal) -> None:
    @task
    def read(box: Box) -> None: ...

    process = Process("p", wait("go", into="box"), read)
    order = rehearsal.start(process)

    order.send("go", {"items": 5})

    (incident,) = order.state.incidents
    assert "BadValue: read: parameter box: " in incident.detail
    assert "Expected `array`, got `int`" in incident.detail


def test_handlers_of_many_instances_run_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    @task
    def meet() -> None:
        together.wait(WAIT_S)

    process = Process("p", meet)
    with Runtime(tmp_path / "p.db", process) as runtime:
        orders = [runtime.start(process) for _ in range(4)]

        assert [order.wait_until(lambda state: state.is_ended).outcome for order in orders] == ["completed"] * 4


def test_a_handler_that_hangs_without_a_timeout_does_not_keep_the_runtime_from_closing(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @task
    def hang() -> None:
        begun.set()
        may_end.wait(WAIT_S)

    process = Process("p", hang, wait("go"))
    with Runtime(tmp_path / "p.db", process) as runtime:
        runtime.start(process, id="p-1")
        begun.wait(WAIT_S)
        finished = runtime.close(timeout="50ms")
    may_end.set()

    assert not finished
    with Runtime(tmp_path / "p.db", process) as runtime:
        assert runtime.wait_until("p-1", lambda state: state.is_waiting_for("go")).version > 1


# --- words that can be stored -----------------------------------------------------------------------------------------


def test_a_fault_keeps_a_long_text_short_and_says_how_long_it_was() -> None:
    fault = fault_of(ValueError("x" * 1_000_000), "step")

    assert len(fault.message) < TEXT_LIMIT + 100
    assert fault.message.endswith("... (1,000,000 characters)")


def test_a_fault_names_all_classes_of_the_error() -> None:
    fault = fault_of(FileNotFoundError("gone"), "step")

    assert fault.types == (
        "builtins:FileNotFoundError",
        "builtins:OSError",
        "builtins:Exception",
        "builtins:BaseException",
    )


def test_arguments_are_what_the_handler_names_and_nothing_else() -> None:
    handler = Handler("h", print, {"n": int}, context="who")
    order = RunTask(1, 5, 2, "step", "h", {"n": "7", "unasked": '"x"'})

    given = arguments(handler, order, "order-7", None)

    assert given["n"] == 7
    assert set(given) == {"n", "who"}
    assert (given["who"].key, given["who"].attempt, given["who"].cancelled) == ("order-7/5", 2, False)


def test_an_argument_that_does_not_fit_is_refused_with_its_name() -> None:
    handler = Handler("h", print, {"n": int})
    order = RunTask(1, 5, 1, "step", "h", {"n": '"seven"'})

    with pytest.raises(BadValue, match="step: parameter n: value: Expected `int`, got `str`"):
        arguments(handler, order, "order-7", None)


# --- in a process of their own ----------------------------------------------------------------------------------------

ISOLATED = """
import asyncio, os, pathlib, time
from attrs import frozen
from understudy import Context, Process, Retry, saga, task

class Declined(Exception):
    pass

@frozen
class Box:
    n: int
    pid: int
    folder: str

@task(isolation="process", into="box")
def pack(n: int, ctx: Context, folder: str = "") -> Box:
    return Box(n, os.getpid(), folder)

@pack.undo
def unpack(box: Box, ctx: Context) -> None:
    pathlib.Path(box.folder, "unpacked").write_text(f"{type(box).__name__} {ctx.is_undo} {os.getpid()}")

@task(isolation="process", into="label")
async def label(box: Box, ctx: Context) -> str:
    await asyncio.sleep(0)
    return f"{type(box).__name__} {box.n} {ctx.key} {ctx.attempt} {ctx.cancelled}"

@task(isolation="process", timeout="300ms")
def hang(fifo: str) -> None:
    wait_long.function(fifo)

@task(isolation="process")
def wait_long(fifo: str) -> None:
    pathlib.Path(fifo).write_text(str(os.getpid()))
    time.sleep(60)

@task(isolation="process", timeout="300ms", into="beats")
def beat(ctx: Context) -> int:
    for _ in range(8):
        time.sleep(0.05)
        ctx.heartbeat()
    return 8

@task(isolation="process", retry=Retry(3, first="1ms"), into="tries")
def die_once(ctx: Context) -> int:
    if ctx.attempt == 1:
        os._exit(3)
    return ctx.attempt

@task(isolation="process", retry=Retry(3, first="1ms", never=Declined))
def decline() -> None:
    raise Declined("card")

@task(isolation="process")
def too_much() -> str:
    return "x" * 2_000_000

@task(isolation="process")
def leave() -> None:
    raise SystemExit(4)

def plain(n: int, ctx: Context) -> int:
    return n + ctx.attempt

increase = task(isolation="process", into="increased")(plain)

packing = Process("packing", saga(pack), label, takes={"n": int}, gives=label)
undoing = Process("undoing", saga(pack, decline), takes={"n": int, "folder": str})
hanging = Process("hanging", hang, takes={"fifo": str})
waiting = Process("waiting", wait_long, takes={"fifo": str})
beating = Process("beating", beat, gives=beat)
dying = Process("dying", die_once, gives=die_once)
declining = Process("declining", decline)
bragging = Process("bragging", too_much)
leaving = Process("leaving", leave)
increasing = Process("increasing", increase, takes={"n": int}, gives=increase)
"""


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A module that a child process can import."""
    folder = tmp_path_factory.mktemp("isolated")
    (folder / "isolated_tasks.py").write_text(ISOLATED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("isolated_tasks")


@pytest.fixture(scope="module")
def isolating(isolated: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    processes = [value for value in vars(isolated).values() if isinstance(value, Process)]
    with Runtime(tmp_path_factory.mktemp("isolating") / "p.db", *processes) as runtime:
        yield runtime


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A pipe through which a handler that never returns says who it is: reading it waits until then."""
    path = tmp_path / "announcements"
    os.mkfifo(path)
    return path


def ends(pid: int) -> bool:
    """Of our child or another's: it dies, now or soon."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], WAIT_S)[0])
    finally:
        os.close(handle)


def test_an_isolated_handler_gets_its_types_and_its_context_in_another_process(
    isolated: Any, isolating: Runtime
) -> None:
    order = isolating.start(isolated.packing, {"n": 7}, id="order-7")

    text = order.result()

    task_number = text.split("/")[1].split(" ")[0]
    assert text == f"Box 7 order-7/{task_number} 1 False"
    assert order.variables["box"]["pid"] != os.getpid()


def test_the_undo_of_an_isolated_task_is_isolated_too(isolated: Any, isolating: Runtime, tmp_path: Path) -> None:
    order = isolating.start(isolated.undoing, {"n": 7, "folder": str(tmp_path)})

    with pytest.raises(Failed, match="Declined: card; undone: pack"):
        order.result()

    kind, is_undo, pid = (tmp_path / "unpacked").read_text().split()
    assert (kind, is_undo) == ("Box", "True")
    assert int(pid) != os.getpid()


def test_an_isolated_handler_that_hangs_is_really_killed(isolated: Any, isolating: Runtime, fifo: Path) -> None:
    order = isolating.start(isolated.hanging, {"fifo": str(fifo)})
    pid = int(fifo.read_text())

    (incident,) = stopped(order).incidents

    assert incident.name == "timeout"
    assert "'isolated_tasks:hang' ran over 300 ms" in incident.detail
    assert ends(pid)


def test_cancelling_kills_an_isolated_handler(isolated: Any, isolating: Runtime, fifo: Path) -> None:
    order = isolating.start(isolated.waiting, {"fifo": str(fifo)})
    pid = int(fifo.read_text())

    order.cancel()

    assert ends(pid)
    assert order.state.outcome == "cancelled"


def test_the_heartbeat_of_an_isolated_handler_counts(isolated: Any, isolating: Runtime) -> None:
    assert isolating.start(isolated.beating).result() == 8


def test_the_death_of_an_isolated_handler_is_a_failed_attempt(isolated: Any, isolating: Runtime) -> None:
    order = isolating.start(isolated.dying)

    assert order.result() == 2
    assert any("exited with code 3 before it gave a result" in told for step in order.history for told in step.told)


@pytest.mark.parametrize(
    ("process", "text"),
    [
        ("declining", "Declined: card"),
        ("bragging", "BadValue: the result of too_much: 2,000,002 bytes are over the limit"),
        ("leaving", "SystemExit: 4"),
    ],
)
def test_what_an_isolated_handler_raises_is_what_it_would_raise_here(
    isolating: Runtime, process: str, text: str
) -> None:
    order: Handle[Any] = isolating.start(process)

    (incident,) = stopped(order).incidents

    assert text in incident.detail
    assert incident.attempt == 1  # Also the retry rules know its class.


def test_a_plain_function_made_a_task_can_be_isolated(isolated: Any, isolating: Runtime) -> None:
    assert isolating.start(isolated.increasing, {"n": 6}).result() == 7


def test_an_isolated_handler_that_cannot_be_imported_says_where_to_put_it(tmp_path: Path) -> None:
    def scripted() -> None: ...

    scripted.__qualname__, scripted.__module__ = "scripted", "__main__"
    process = Process("p", task(isolation="process")(scripted))
    with Runtime(tmp_path / "p.db", process) as runtime:
        (incident,) = stopped(runtime.start(process)).incidents

    assert (
        "no other process can import '__main__:scripted'; move the handler into a module of its own" in incident.detail
    )


def test_in_a_rehearsal_an_isolated_task_runs_like_any_other(isolated: Any, rehearsal: Rehearsal) -> None:
    order = rehearsal.start(isolated.packing, {"n": 7})

    assert order.variables["box"] == {"n": 7, "pid": os.getpid(), "folder": ""}
    assert len(rehearsal.calls_of("pack")) == 1


def test_no_child_outlives_its_runtime(isolated: Any, tmp_path: Path, fifo: Path) -> None:
    with Runtime(tmp_path / "p.db", isolated.waiting) as runtime:
        runtime.start(isolated.waiting, {"fifo": str(fifo)})
        pid = int(fifo.read_text())

        finished = runtime.close(timeout="50ms")

    assert not finished
    assert ends(pid)
