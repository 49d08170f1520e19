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
from understudy.actors.isolated import Isolation
from understudy.actors.messages import Lend, Order
from understudy.actors.pool import HANG, Abandoned, CancelSignal, Job, Outcome, Overran, Pool, Returned, ThreadPool
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
        # On a stage nothing runs beside the one thread, so that there is nothing to kill either.
        self._isolation = Isolation(limit_bytes=limit_bytes) if isinstance(pool, ThreadPool) else None

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
        self._pool.cancel(_job_key(instance, order.task, order.attempt))

    # --- ordinary handlers ---

    def _submit(self, instance: str, order: RunTask, handler: Handler) -> None:
        signal = CancelSignal()
        isolation = self._isolation if order.isolation == "process" else None
        job = Job(
            key=_job_key(instance, order.task, order.attempt),
            run=(
                self._call(instance, order, handler, signal)
                if isolation is None
                else lambda: isolation(handler, order, instance, signal)
            ),
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

        def run(connection: Any) -> Any:
            return self._encoded(order, handler.function(**arguments(handler, order, instance, None, connection)))

        def done(result: str | BaseException) -> None:
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
            at_ms=self._clock.now_ms(), token=order.token, attempt=order.attempt, result=result, recorded=recorded
        )
        self._directory.tell(instance, Order(command))

    def _fail(self, instance: str, order: RunTask, fault: Fault) -> None:
        command = FailTask(at_ms=self._clock.now_ms(), token=order.token, attempt=order.attempt, fault=fault)
        self._directory.tell(instance, Order(command))


def _job_key(instance: str, task: int, attempt: int) -> str:
    return f"{key_of(instance, task)}/{attempt}"


def _timeout(text: str, order: RunTask) -> Fault:
    return Fault("timeout", text, order.node, ("builtins:TimeoutError",))  # So that `never=TimeoutError` means it too.
