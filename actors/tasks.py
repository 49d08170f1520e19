"""From a released attempt to its handler and back: an attempt becomes a job of the pool, its outcome a command.

Arguments are decoded and results encoded on the handler's thread, so that an instance actor never meets a user's
object. Whatever a handler does, it ends as `CompleteTask` or `FailTask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from understudy.actors.clock import Clock
from understudy.actors.directory import Directory
from understudy.actors.dispatcher import PooledRef
from understudy.actors.handlers import Handler, arguments, attempt_key, encode_result, fault_of
from understudy.actors.isolated import Isolation
from understudy.actors.messages import Lend, Order
from understudy.actors.pool import (
    HANG,
    Abandoned,
    CancelSignal,
    Job,
    Outcome,
    Overran,
    Pool,
    Raised,
    Returned,
)
from understudy.actors.threads import ThreadPool
from understudy.model.commands import CompleteTask, FailTask
from understudy.model.effects import CancelTask, RunTask
from understudy.model.errors import Closed, Conflict, TimedOut, Unavailable, UnderstudyError
from understudy.model.instance import Fault

TRANSACTION_MS = 1_000  # The limit of a transactional task that names none: all commits wait for it.


class TaskRunner:
    """Releases attempts. `handlers` is looked up at each release, so that a process deployed later is served too."""

    def __init__(
        self, pool: Pool, clock: Clock, directory: Directory, handlers: Mapping[str, Handler], *, limit_bytes: int
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._directory = directory
        self._handlers = handlers
        self._limit_bytes = limit_bytes
        self.persistence: PooledRef[Any] | None = None
        self._begun: set[str] = set()  # Attempts whose handler was called and has not come back.
        self._sealed = False
        # On a stage nothing runs beside the one thread, so that there is nothing to kill either.
        self._isolation = Isolation(limit_bytes=limit_bytes) if isinstance(pool, ThreadPool) else None

    def seal(self) -> None:
        """Let no handler begin any more, whoever was about to call it."""
        self._sealed = True

    def unfinished(self) -> frozenset[str]:
        """The keys of the attempts that have begun and not ended; after `seal` no more come."""
        return frozenset(self._begun)

    def close(self) -> None:
        """Kill what still runs in processes of its own; the pool has been stopped."""
        if self._isolation is not None:
            self._isolation.close()

    def release(self, instance: str, order: RunTask, no: int) -> None:
        handler = self._handlers.get(order.handler)
        if handler is None:
            text = f"no handler named {order.handler!r} is bound; pass its process to the Runtime, then retry"
            self._fail(instance, order, Fault("missing_handler", text, order.node))
        elif order.transactional and not order.is_undo:
            self._lend(instance, order, handler, no)
        else:
            self._submit(instance, order, handler)

    def withdraw(self, instance: str, order: CancelTask) -> None:
        self._pool.cancel(attempt_key(instance, order.task, order.attempt))

    # --- ordinary handlers ---

    def _submit(self, instance: str, order: RunTask, handler: Handler) -> None:
        signal = CancelSignal()
        isolation = self._isolation if order.isolation == "process" else None
        key = attempt_key(instance, order.task, order.attempt)
        if isolation is None:
            call = self._call(instance, order, handler, signal)
        else:
            call = lambda: isolation(handler, order, instance, signal)  # noqa: E731  # As short as the other.
        job = Job(
            key=key,
            run=lambda: self._begin(key, call),
            done=lambda outcome: self._done(instance, order, outcome),
            lane=order.lane,
            is_async=handler.is_async and isolation is None,
            timeout_ms=order.timeout_ms if isolation is None else None,
            signal=signal,
        )
        try:
            self._pool.submit(job)
        except Conflict:
            pass  # This very attempt is running already: its outcome will come.
        except UnderstudyError:
            pass  # The pool has stopped: the state says that the attempt is outstanding, and the next owner finds it.

    def _begin(self, key: str, call: Callable[[], Any]) -> Any:
        self._begun.add(key)
        if self._sealed:  # Looked at after the key was written, as the other side does it the other way round.
            self._begun.discard(key)
            raise _NotBegun
        return call()

    def _call(self, instance: str, order: RunTask, handler: Handler, signal: CancelSignal) -> Callable[[], Any]:
        if handler.is_async:

            async def call_async() -> object:
                return self._encoded(order, await handler.function(**arguments(handler, order, instance, signal)))

            return call_async

        return lambda: self._encoded(order, handler.function(**arguments(handler, order, instance, signal)))

    def _encoded(self, order: RunTask, value: object) -> object:
        # What hangs on a stage has no result; the pool there must hear of it.
        return value if value is HANG else encode_result(order, value, limit_bytes=self._limit_bytes)

    def _done(self, instance: str, order: RunTask, outcome: Outcome) -> None:
        self._begun.discard(attempt_key(instance, order.task, order.attempt))
        if self._sealed and isinstance(outcome, Raised) and isinstance(outcome.error, _NotBegun):
            return
        if isinstance(outcome, Returned):
            self._complete(instance, order, str(outcome.value))
        elif isinstance(outcome, Abandoned):
            self._fail(instance, order, Fault("abandoned", outcome.reason, order.node))
        elif isinstance(outcome, Overran):
            text = f"{order.node} was not done after {outcome.timeout_ms} ms"
            self._fail(instance, order, _timeout(text, order))
        elif order.isolation and isinstance(outcome.error, TimedOut):
            self._fail(instance, order, _timeout(str(outcome.error), order))
        else:
            self._fail(instance, order, fault_of(outcome.error, order.node))

    # --- transactional handlers ---

    def _lend(self, instance: str, order: RunTask, handler: Handler, no: int) -> None:
        assert self.persistence is not None
        key = attempt_key(instance, order.task, order.attempt)

        def call(connection: Any) -> Any:
            return self._encoded(order, handler.function(**arguments(handler, order, instance, None, connection)))

        def run(connection: Any) -> Any:
            return self._begin(key, lambda: call(connection))

        def done(result: str | BaseException) -> None:
            self._begun.discard(key)
            if self._sealed and isinstance(result, Closed | Unavailable | _NotBegun):
                return  # It did not begin, or was rolled back with the writer: the next owner begins it.
            if isinstance(result, str):
                self._complete(instance, order, result, recorded=True)
            elif isinstance(result, TimedOut):
                self._fail(instance, order, _timeout(str(result), order))
            else:
                self._fail(instance, order, fault_of(result, order.node))

        timeout_ms = order.timeout_ms or TRANSACTION_MS
        self.persistence.tell(Lend(no, order.task, order.attempt, timeout_ms, run, done))

    # --- outcomes ---

    def _complete(self, instance: str, order: RunTask, result: str, *, recorded: bool = False) -> None:
        command = CompleteTask(
            at_ms=self._clock.now_ms(),
            token=order.token,
            task=order.task,
            attempt=order.attempt,
            result=result,
            recorded=recorded,
        )
        self._directory.tell(instance, Order(command))

    def _fail(self, instance: str, order: RunTask, fault: Fault) -> None:
        command = FailTask(
            at_ms=self._clock.now_ms(), token=order.token, task=order.task, attempt=order.attempt, fault=fault
        )
        self._directory.tell(instance, Order(command))


class _NotBegun(Exception):
    """The runtime was closed before the handler was called; the next owner begins the attempt."""


def _timeout(text: str, order: RunTask) -> Fault:
    return Fault("timeout", text, order.node, ("builtins:TimeoutError",))  # So that `never=TimeoutError` means it too.
