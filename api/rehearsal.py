"""The real runtime for tests: same actors, same store, on a stage that runs one message at a time and a clock that
stands still.

A crash is a call, three days are a call, and nothing is waited for. Tasks can be played by stand-ins. After every
call everything that can move has moved.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from understudy.actors.clock import VirtualClock
from understudy.actors.handlers import Context, Handler
from understudy.actors.pool import HANG, SteppingPool
from understudy.actors.stepping import Stage
from understudy.actors.system import Limits, Ports
from understudy.model.durations import duration_ms
from understudy.model.errors import Rejected, TimedOut
from understudy.opening import bind, open_node
from understudy.process import Process
from understudy.requests import Duration, seconds
from understudy.runtime import CALL_TIMEOUT, Handle, Runtime
from understudy.state import State
from understudy.tasks import Activity, Task
from understudy.views import Predicate

I = TypeVar("I")  # noqa: E741 - As in `Runtime`.
R = TypeVar("R")
START_MS: Final = 1_767_225_600_000  # 2026-01-01T00:00:00Z: every rehearsal begins at the same moment.


@attrs.frozen
class Call:
    """One call of a handler, as it was seen."""

    handler: str
    key: str
    attempt: int
    given: dict[str, Any]


class Rehearsal(Runtime):
    """A runtime whose time and crashes are in the test's hands."""

    def __init__(
        self, folder: str | Path, *processes: Process[Any, Any], start_ms: int = START_MS, limits: Limits | None = None
    ) -> None:
        self.clock = VirtualClock(start_ms)
        self.calls: list[Call] = []
        self._file = str(Path(folder) / "rehearsal.db")
        self._limits = limits or Limits()
        self._cast: dict[str, Process[Any, Any]] = {process.name: process for process in processes}
        self._stand_ins: dict[str, Callable[..., Any]] = {}
        self._dies_after: set[str] = set()
        self._died = False
        self._numbers = itertools.count(1)
        self.lives = 0
        self._open()

    def _open(self) -> None:
        self.stage = Stage()
        self.lives += 1
        opened = open_node(
            self._file,
            list(self._cast.values()),
            role="owner",
            durability="relaxed",
            limits=self._limits,
            ports=self._ports,
        )
        self._begin(opened, CALL_TIMEOUT)
        self._seat(opened.processes.handlers)
        self._play()

    def _ports(self) -> Ports:
        stage = self.stage
        return Ports(
            clock=self.clock,
            instances=stage.dispatcher("instances"),
            persistence=stage.dispatcher("persistence"),
            reading=stage.dispatcher("reading"),
            pool=SteppingPool(stage, self.clock),
            new_id=lambda: f"rehearsal-{next(self._numbers)}",
            driver=stage,
        )

    # --- casting ---

    def start(
        self,
        process: Process[I, R] | str,
        input: I | Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        title: str = "",
        tags: Mapping[str, str] | None = None,
        by: str = "",
        caused_by: str = "",
    ) -> Handle[R]:
        if isinstance(process, Process):
            self.add(process)
        return super().start(process, input, id=id, title=title, tags=tags, by=by, caused_by=caused_by)

    def add(self, process: Process[Any, Any]) -> None:
        """Make a process known; `start` does it by itself."""
        if self._cast.get(process.name) is process:
            return
        self._cast[process.name] = process
        bound = bind(list(self._cast.values()))
        self._processes.by_name.update(bound.by_name)
        self._seat(bound.handlers)
        self._call("deploy", {"body": process.definition.body})

    def stand_in(self, task: Activity | str, function: Callable[..., Any]) -> None:
        """Play a task (or an undo) by another function; it gets those parameters of the task that it names."""
        name = task if isinstance(task, str) else task.name
        if not callable(function):
            raise Rejected(f"a stand-in for {name} is a function, not {type(function).__name__}")
        self._stand_ins[name] = function

    def hang(self, task: Activity | str) -> None:
        """Let a task never return; only its timeout ends it."""
        self.stand_in(task, lambda: HANG)

    def crash_after(self, task: Task[..., Any] | str) -> None:
        """Let the process die once, when this task's handler has had its effect and its result is not committed."""
        self._dies_after.add(task if isinstance(task, str) else task.name)

    def _seat(self, handlers: dict[str, Handler]) -> None:
        for name, handler in handlers.items():
            self._processes.handlers[name] = attrs.evolve(handler, function=self._played(name, handler), is_async=False)

    def _played(self, name: str, handler: Handler) -> Callable[..., Any]:
        def play(**given: Any) -> Any:
            context = given.get(handler.context)
            if isinstance(context, Context):
                self.calls.append(Call(name, context.key, context.attempt, dict(given)))
            else:
                self.calls.append(Call(name, "", 0, dict(given)))
            stand_in = self._stand_ins.get(name)
            value = handler.function(**given) if stand_in is None else stand_in(**_fitting(stand_in, given))
            if inspect.iscoroutine(value):
                value = _run(value)
            if name in self._dies_after:
                self._dies_after.discard(name)
                self._died = True
                return HANG
            return value

        return play

    # --- time and crashes ---

    def advance(self, duration: Duration) -> None:
        """Let time pass; everything that becomes due happens in its order, at its moment."""
        self._pass_until(self.clock.now_ms() + duration_ms(duration))

    def crash(self) -> None:
        """Kill the process, in effect: nothing in memory survives. A new one opens the file at once."""
        self.node.crash()
        self.clock.stop()
        self._open()

    def _pass_until(self, moment_ms: int) -> None:
        self._play()
        while (due_ms := self.clock.next_due_ms()) is not None and due_ms <= moment_ms:
            self.clock.set(max(due_ms, self.clock.now_ms()))
            self._play()
        self.clock.set(max(moment_ms, self.clock.now_ms()))
        self._play()

    def _play(self) -> None:
        self.stage.run_until_idle()
        while self._died:
            self._died = False
            self.crash()

    # --- the runtime's calls, on the stage ---

    def _call(self, name: str, request: dict[str, Any]) -> Any:
        answer = super()._call(name, request)
        self._play()
        return answer

    def wait_until(self, id: str, predicate: Predicate, *, timeout: Duration | None = "30s") -> State:
        """As in `Runtime`, but the timeout counts on the rehearsal's clock, which goes on by itself meanwhile."""
        timeout_s = seconds(timeout)
        end_ms = None if timeout_s is None else self.clock.now_ms() + int(timeout_s * 1_000)
        self._play()
        while not predicate(state := self.state(id)):
            due_ms = self.clock.next_due_ms()
            if due_ms is None or (end_ms is not None and due_ms > end_ms):
                raise TimedOut(f"nothing that is due by then changes this: {state}")
            self._pass_until(due_ms)
        return state

    def close(self, *, timeout: Duration = "10s") -> bool:
        self._play()
        return super().close(timeout=timeout)


def _fitting(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    return {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}


def _run(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)
