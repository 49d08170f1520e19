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
from understudy.actors.handlers import Handler, arguments, encode_result, fault_of, key_of
from understudy.actors.messages import Lend, Order
from understudy.actors.pool import Abandoned, CancelSignal, Job, Outcome, Pool, Raised, Returned
from understudy.model.commands import CompleteTask, FailTask
from understudy.model.effects import CancelTask, RunTask
from understudy.model.errors import Conflict, TimedOut, UnderstudyError
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
        self.isolated: Callable[[Handler, RunTask, str, CancelSignal], str] | None = None

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
        self._pool.cancel(_job_key(instance, order.task, order.attempt))

    # --- ordinary handlers ---

    def _submit(self, instance: str, order: RunTask, handler: Handler) -> None:
        signal = CancelSignal()
        job = Job(
            key=_job_key(instance, order.task, order.attempt),
            run=self._call(instance, order, handler, signal),
            done=lambda outcome: self._done(instance, order, outcome),
            lane=order.lane,
            is_async=handler.is_async,
            timeout_ms=order.timeout_ms,
            signal=signal,
        )
        try:
            self._pool.submit(job)
        except Conflict:
            pass  # This very attempt is running already: its outcome will come.
        except UnderstudyError:
            pass  # The pool has stopped: the state says that the attempt is outstanding, and the next owner finds it.

    def _call(self, instance: str, order: RunTask, handler: Handler, signal: CancelSignal) -> Callable[[], Any]:
        limit = self._limit_bytes
        if order.isolation == "process" and self.isolated is not None:
            isolated = self.isolated
            return lambda: isolated(handler, order, instance, signal)
        if handler.is_async:

            async def call_async() -> str:
                value = await handler.function(**arguments(handler, order, instance, signal))
                return encode_result(order, value, limit_bytes=limit)

            return call_async

        def call() -> str:
            value = handler.function(**arguments(handler, order, instance, signal))
            return encode_result(order, value, limit_bytes=limit)

        return call

    def _done(self, instance: str, order: RunTask, outcome: Outcome) -> None:
        if isinstance(outcome, Returned):
            self._complete(instance, order, str(outcome.value))
        elif isinstance(outcome, Raised):
            self._fail(instance, order, fault_of(outcome.error, order.node))
        elif isinstance(outcome, Abandoned):
            self._fail(instance, order, Fault("abandoned", outcome.reason, order.node))
        else:
            text = f"{order.node} was not done after {outcome.timeout_ms} ms"
            self._fail(instance, order, Fault("timeout", text, order.node, ("builtins:TimeoutError",)))

    # --- transactional handlers ---

    def _lend(self, instance: str, order: RunTask, handler: Handler, no: int) -> None:
        assert self.persistence is not None

        def run(connection: Any) -> str:
            value = handler.function(**arguments(handler, order, instance, None, connection))
            return encode_result(order, value, limit_bytes=self._limit_bytes)

        def done(result: str | BaseException) -> None:
            if isinstance(result, str):
                self._complete(instance, order, result, recorded=True)
            elif isinstance(result, TimedOut):
                self._fail(instance, order, Fault("timeout", str(result), order.node, ("builtins:TimeoutError",)))
            else:
                self._fail(instance, order, fault_of(result, order.node))

        timeout_ms = order.timeout_ms or TRANSACTION_MS
        self.persistence.tell(Lend(no, order.task, order.attempt, timeout_ms, run, done))

    # --- outcomes ---

    def _complete(self, instance: str, order: RunTask, result: str, *, recorded: bool = False) -> None:
        command = CompleteTask(
            at_ms=self._clock.now_ms(), token=order.token, attempt=order.attempt, result=result, recorded=recorded
        )
        self._directory.tell(instance, Order(command))

    def _fail(self, instance: str, order: RunTask, fault: Fault) -> None:
        command = FailTask(at_ms=self._clock.now_ms(), token=order.token, attempt=order.attempt, fault=fault)
        self._directory.tell(instance, Order(command))


def _job_key(instance: str, task: int, attempt: int) -> str:
    return f"{key_of(instance, task)}/{attempt}"
