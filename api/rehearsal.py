"""The real runtime for tests: same actors, same store, on a stage that runs one message at a time and a clock that
stands still.

A crash is a call, three days are a call, and nothing is waited for. Tasks can be played by stand-ins. After every
call everything that can move has moved.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from understudy.actors.clock import VirtualClock
from understudy.actors.handlers import Context, Handler
from understudy.actors.pool import HANG, SteppingPool
from understudy.actors.stepping import Stage
from understudy.actors.system import Limits, Ports
from understudy.model.durations import DAY_MS, duration_ms
from understudy.model.errors import Rejected, TimedOut
from understudy.model.values import check_name
from understudy.node import Node, Role
from understudy.opening import Opened, bind
from understudy.process import Process
from understudy.requests import Duration, seconds, subscriber_request
from understudy.runtime import CALL_TIMEOUT, Handle, Place, Runtime
from understudy.state import State
from understudy.store.connection import Settings
from understudy.store.operations import Hold, MoveCursor
from understudy.store.reads import Record
from understudy.store.recovery import next_due_ms
from understudy.subscriptions import Change, Subscription
from understudy.tasks import Activity
from understudy.views import Predicate

I = TypeVar("I")  # noqa: E741 - As in `Runtime`.
R = TypeVar("R")
START_MS: Final = 1_767_225_600_000  # 2026-01-01T00:00:00Z: every rehearsal begins at the same moment.
LONGEST_MS: Final = 366 * DAY_MS  # How long a rehearsal waits when it is told to wait for ever.
_CONTEXT: Final = (
    "the context"  # The parameter under which a handler that takes no context is told its key all the same.
)


@attrs.frozen(kw_only=True)
class Call:
    """One call of a handler, as it was seen."""

    handler: str
    instance: str
    key: str
    attempt: int
    given: dict[str, Any]  # The variables, without context and connection.
    at_ms: int


class Rehearsal(Runtime):
    """A runtime whose time and crashes are in the test's hands."""

    def __init__(
        self, folder: str | Path, *processes: Process[Any, Any], start_ms: int = START_MS, limits: Limits | None = None
    ) -> None:
        self.clock = VirtualClock(start_ms)
        self.calls: list[Call] = []
        self.lives = 0
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._place = Place(Path(folder) / "rehearsal.db", role="owner", durability="relaxed")
        self._limits = limits or Limits()
        self._cast: dict[str, Process[Any, Any]] = {process.name: process for process in processes}
        self._stand_ins: dict[str, Callable[..., Any]] = {}
        self._deaths: Counter[str] = Counter()
        self._is_dead = False
        self._is_delivering = False
        self._numbers = itertools.count(1)
        self._followers: dict[str, _Follower] = {}
        self._open()
        self._play()

    def _open(self) -> None:
        self.stage = Stage()
        self.lives += 1
        bound = bind(list(self._cast.values()))
        self._seat(bound.handlers)  # Before anything moves: what a former life has left begins at once.
        node = Node(
            self._place.path,
            role=Role.OWNER,
            handlers=bound.handlers,
            deployments=[process.definition.body for process in self._cast.values()],
            limits=self._limits,
            settings=Settings(durability=self._place.durability),
            ports=self._ports,
        )
        self._begin(Opened(node, bound), self._place, seconds(CALL_TIMEOUT))

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
            monotonic_s=lambda: 0.0,  # Nobody else could own the file meanwhile.
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
        """Make a process known, or a new version of one; `start` does it by itself."""
        if self._cast.get(process.name) is process:
            return
        bound = bind(list({**self._cast, process.name: process}.values()))
        self._cast[process.name] = process
        self._processes.by_name.update(bound.by_name)
        self._seat(bound.handlers)
        self._processes.handlers.update(bound.handlers)
        self._call("deploy", {"body": process.definition.body})

    def stand_in(self, task: Activity | str, function: Callable[..., Any]) -> None:
        """Play a task (or an undo) by another function; it gets those parameters of the task that it names.

        The last one counts: `stand_in(charge, charge)` lets the task play itself again.
        """
        name = _name(task)
        if not callable(function):
            raise Rejected(f"a stand-in for {name} is a function, not {type(function).__name__}")
        if isinstance(task, Activity):
            _check_fits(task, function)
        self._stand_ins[name] = function

    def hang(self, task: Activity | str) -> None:
        """Let a task never return; only its timeout ends it."""
        self.stand_in(task, lambda: HANG)

    def crash_after(self, task: Activity | str) -> None:
        """Let the process die once, when this task's handler has had its effect and its result is not committed."""
        self._deaths[_name(task)] += 1

    def calls_of(self, task: Activity | str) -> list[Call]:
        """The calls of one task, or undo."""
        name = _name(task)
        return [call for call in self.calls if call.handler == name]

    def _seat(self, handlers: dict[str, Handler]) -> None:
        for name, handler in handlers.items():
            handlers[name] = attrs.evolve(
                handler,
                function=self._played(name, handler),
                context=handler.context or _CONTEXT,
                is_async=False,
            )

    def _played(self, name: str, handler: Handler) -> Callable[..., Any]:
        ours = (handler.context or _CONTEXT, handler.connection)

        def play(**given: Any) -> Any:
            context: Context = given[ours[0]] if handler.context else given.pop(_CONTEXT)
            variables = {parameter: value for parameter, value in given.items() if parameter not in ours}
            self.calls.append(
                Call(
                    handler=name,
                    instance=context.instance,
                    key=context.key,
                    attempt=context.attempt,
                    given=variables,
                    at_ms=self.clock.now_ms(),
                )
            )
            stand_in = self._stand_ins.get(name)
            call = handler.function if stand_in is None else functools.partial(_with_fitting, stand_in)
            return self._survived(name, lambda: call(**given))

        return play

    def _survived(self, name: str, call: Callable[[], Any]) -> Any:
        """What the handler gives, unless the process is to die of it: then neither result nor failure gets further."""
        try:
            value = call()
            if inspect.iscoroutine(value):
                value = _run(value)
        except BaseException:
            if self._deaths[name] == 0:
                raise
        if self._deaths[name] == 0:
            return value
        self._deaths[name] -= 1
        self._is_dead = True
        return HANG

    # --- time and crashes ---

    def advance(self, duration: Duration) -> None:
        """Let time pass; everything that becomes due happens in its order, at its moment."""
        self._pass_until(self.clock.now_ms() + duration_ms(duration))

    def crash(self) -> None:
        """Kill the process, in effect: nothing in memory survives. A new one opens the file at once."""
        self._restart()
        self._play()

    def _restart(self) -> None:
        dead = self.node.system
        assert dead is not None
        self.node.crash()
        self.clock.stop()
        self._is_dead = False
        connection = dead.writer.connection
        if connection.in_transaction:  # It was lent to a task; a transaction ends with its process.
            connection.set_authorizer(None)
            connection.rollback()
        self._open()
        dead.close_files()  # Only now: the last connection to leave would tidy the log up, as no crash does.
        followers, self._followers = self._followers, {}
        for follower in followers.values():
            if not follower.is_closed:
                self._follow(follower.name, follower.request, from_start=False)

    def _pass_until(self, moment_ms: int) -> None:
        self._play()
        while (due_ms := self.clock.next_due_ms()) is not None and due_ms <= moment_ms:
            self.clock.set(max(due_ms, self.clock.now_ms()))
            self._play()
        self.clock.set(max(moment_ms, self.clock.now_ms()))
        self._play()

    def _play(self) -> None:
        """Let everything happen that can: a death at its very moment, and then what the subscribers make of it."""
        if self._is_delivering:
            self.stage.run_until_idle()  # Called by a subscriber; whoever delivers goes on with all the rest.
            return
        while True:
            if self.stage.run_until(lambda: self._is_dead):
                self._restart()
            elif not self._deliver():
                return

    # --- the runtime's calls, on the stage ---

    def _call(self, name: str, request: dict[str, Any]) -> Any:
        answer = super()._call(name, request)
        self._play()
        return answer

    def wait_until(self, id: str, predicate: Predicate, *, timeout: Duration | None = "30s") -> State:
        """As in `Runtime`, but the timeout counts on the rehearsal's clock, which goes on by itself meanwhile."""
        timeout_s = seconds(timeout)
        end_ms = self.clock.now_ms() + (LONGEST_MS if timeout_s is None else int(timeout_s * 1_000))
        self._play()
        while not predicate(state := self.state(id)):
            due_ms = self.clock.next_due_ms()
            if due_ms is None or due_ms > end_ms or not self._is_anything_due():
                raise TimedOut(f"nothing that is due by then changes this: {state}")
            self._pass_until(due_ms)
        return state

    def _is_anything_due(self) -> bool:
        system = self.node.system
        assert system is not None
        return system.ports.pool.running() > 0 or next_due_ms(system.writer.connection, 0) is not None

    def close(self, *, timeout: Duration = "10s") -> bool:
        if not self.node.is_closed:
            self._play()
        return super().close(timeout=timeout)

    # --- following ---

    def subscribe(
        self,
        name: str,
        receive: Callable[[Change], Any],
        *,
        from_start: bool = False,
        tries: int = 5,
        backoff: Duration = "1s",
    ) -> Subscription:
        """As in `Runtime`, without a thread: what is new is delivered whenever everything has come to rest.

        The next life subscribes again by itself, as a service does when it starts.
        """
        self.node.check()
        check_name(name, what="subscriber")
        follower = self._follow(name, subscriber_request(receive, tries, backoff), from_start=from_start)
        self._play()
        return follower

    def _follow(self, name: str, request: dict[str, Any], *, from_start: bool) -> _Follower:
        system, reads = self.node.system, self.node.reads
        assert system is not None
        cursor = reads.cursor(name)
        if cursor is None:
            cursor = 0 if from_start else reads.last_seq()
            system.run(MoveCursor(name, cursor)).get(timeout=30)
        follower = self._followers[name] = _Follower(self.node, name, request, cursor)
        return follower

    def _deliver(self) -> bool:
        """Whether anybody got anything."""
        self._is_delivering = True
        try:
            got = [follower.deliver() for follower in self._followers.values()]
        finally:
            self._is_delivering = False
        for follower in self._followers.values():
            self.clock.alarm(f"subscriber {follower.name}", follower.due_ms(), _nothing)
        return any(got)


class _Follower(Subscription):
    """A subscriber without a thread."""

    def __init__(self, node: Node, name: str, request: dict[str, Any], cursor: int) -> None:
        self.name = name
        self.cursor = cursor
        self.request = request
        self._node = node
        self._receive = request["receive"]
        self._tries = request["tries"]
        self._backoff_s = request["backoff_s"]
        self._closed = False
        self._got = False

    def deliver(self) -> bool:
        self._got = False
        while not self._closed and self._deliver_page():
            pass
        return self._got

    def _deliver(self, record: Record, instance: str, *, tries: int) -> Hold | None:
        self._got = True
        return super()._deliver(record, instance, tries=tries)

    def due_ms(self) -> int | None:
        due = [hold[5] for hold in self._node.reads.held(self.name) if hold[5] is not None]
        return min(due, default=None)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True


def _name(task: Activity | str) -> str:
    return task if isinstance(task, str) else task.name


def _check_fits(task: Activity, function: Callable[..., Any]) -> None:
    """A parameter that the task does not have would only show as a failed attempt, far from here."""
    read = task.signature
    has = [*read.needs, *read.may, *filter(None, (read.context, read.connection))]
    for parameter in inspect.signature(function).parameters.values():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in has:
            raise Rejected(
                f"the stand-in for {task.name} takes {parameter.name}, which {task.name} does not have; "
                f"it has {', '.join(has) or 'no parameters'}"
            )


def _with_fitting(function: Callable[..., Any], **given: Any) -> Any:
    """Call it with those parameters that it names."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(**given)
    return function(**{parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given})


def _run(coroutine: Any) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as beside:  # The test is itself on a loop, which cannot run another one inside.
        return beside.submit(asyncio.run, coroutine).result()


def _nothing() -> None:
    """What a subscriber's alarm rings: that time has come to it is enough."""
