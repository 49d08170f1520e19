"""Clients of a world: what they ask for, what they are told, and how they ask again when nobody answers.

A client repeats a call that carries a key, or that is idempotent by itself, until it has an answer; it never repeats
what could then happen twice. Between a client and the owner calls and answers may be lost, late or doubled: `channel`
is where such faults sit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from understudy.actors.promise import Promise
from understudy.model.errors import (
    Closed,
    Fenced,
    OutcomeUnknown,
    TimedOut,
    Unavailable,
    UnderstudyError,
    UnknownProcess,
)
from understudy.simulations.memory import Died
from understudy.simulations.operations import Operation

if TYPE_CHECKING:
    from understudy.simulations.node import Life, Node
    from understudy.simulations.world import World

AGAIN_MS: Final = (1, 500)  # How long a client waits before it asks again.
COPY: Final = "the second copy of a call"
IDEMPOTENT: Final = frozenset({"start", "read", "deploy", "subscribe"})
_DONE_NOTHING: Final = (Fenced, Closed, Unavailable, UnknownProcess)
_MAY_BE_DONE: Final = (OutcomeUnknown, TimedOut)

Answered = Callable[[Operation], None]


class Client:
    """One who calls. Its operations stay in the world's list as evidence."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.world = world
        self._random = world.stream(f"client {name}")
        self._open: dict[int, tuple[Operation, Life | None, Answered | None]] = {}  # No life: it is on its way.
        self.prefers: Node | None = None  # Whom it talks to while that one is up, be it the owner or not.
        self.channel: Callable[[Client, Operation, Callable[[], None]], None] | None = None
        self.returning: Callable[[Client, Operation], bool] | None = None  # Whether an answer arrives.

    def start(self, process: str, id: str, variables: dict[str, str] | None = None, **more: Any) -> Operation:
        then = more.pop("then", None)
        request = {"process": process, "id": id, "variables": variables or {}, **more}
        return self.call("start", id, request, then=then)

    def call(self, call: str, instance: str, parameters: dict[str, Any], *, then: Answered | None = None) -> Operation:
        """Ask; `then` is called once there is an answer that is final."""
        operation = Operation(
            number=len(self.world.operations) + 1,
            client=self.name,
            call=call,
            instance=instance,
            parameters=parameters,
            key=str(parameters.get("key", "")),
            invoked=self.world.steps,
            at_ms=self.world.time.now_ms,
        )
        self.world.operations.append(operation)
        if self.world.trace.recording:
            self.world.tell("", f"client {self.name}", "call", f"{call} {instance} {operation.key}", instance)
        self._open[operation.number] = (operation, None, then)
        if self.channel is None:
            self._send(operation, then)
        else:
            self.channel(self, operation, lambda: self._send(operation, then))
        return operation

    def _send(self, operation: Operation, then: Answered | None) -> None:
        life = self.prefers.life if self.prefers is not None and self.prefers.is_up else self.world.owner
        if life is None:
            self._later(operation, then)  # Nobody is there: it has not been sent.
            return
        if operation.returned is None and not operation.is_unknown:
            self._open[operation.number] = (operation, life, then)
        life.stage.post(lambda: self._arrive(operation, life, then), label=f"call {operation.call} {operation.number}")

    def _later(self, operation: Operation, then: Answered | None) -> None:
        self.world.after(self._random.randrange(*AGAIN_MS), lambda: self._send(operation, then))

    def _arrive(self, operation: Operation, life: Life, then: Answered | None) -> None:
        try:
            answer = self._asked(operation, life)
        except UnderstudyError as error:
            self._refused(operation, then, error)
            return
        except Died:
            return
        if isinstance(answer, Promise):
            answer.add_done_callback(lambda promise: self._settled(operation, life, then, promise))
        else:
            self._answered(operation, then, answer)

    def _asked(self, operation: Operation, life: Life) -> Any:
        if operation.call != "read":
            return life.service.call(operation.call, operation.parameters)
        found = life.reads.find(operation.instance)
        if found is None:
            return None
        return {"version": found.version, "status": found.status, "outcome": found.outcome}

    def _settled(self, operation: Operation, life: Life, then: Answered | None, promise: Promise[Any]) -> None:
        if life.is_dead or self.world.is_without_power:
            return  # The answer dies with the process.
        if promise.error is None:
            self._answered(operation, then, promise.get())
        else:
            self._refused(operation, then, promise.error)

    def _is_heard(self, operation: Operation) -> bool:
        """Not an answer that is lost, nor one that comes too late, nor the second one to a call that came twice."""
        if operation.returned is not None or operation.is_unknown:
            return False
        if self.returning is not None and not self.returning(self, operation):
            return False
        self._open.pop(operation.number, None)
        return True

    def _answered(self, operation: Operation, then: Answered | None, answer: Any) -> None:
        if not self._is_heard(operation):
            return
        operation.returned = self.world.steps
        operation.answer = answer
        if self.world.trace.recording:
            self.world.tell("", f"client {self.name}", "answer", f"{operation.call} done", operation.instance)
        if then is not None:
            then(operation)

    def _refused(self, operation: Operation, then: Answered | None, error: BaseException) -> None:
        if not self._is_heard(operation):
            return
        operation.returned = self.world.steps
        operation.error = type(error).__name__
        operation.reason = str(error)
        operation.is_unknown = isinstance(error, _MAY_BE_DONE)
        if self.world.trace.recording:
            text = f"{operation.call}: {operation.error} {operation.reason}"
            self.world.tell("", f"client {self.name}", "answer", text, operation.instance)
        if self._may_repeat(operation, error):
            self._repeat(operation, then)
        elif then is not None:
            then(operation)

    def _may_repeat(self, operation: Operation, error: BaseException) -> bool:
        if isinstance(error, _MAY_BE_DONE):
            return bool(operation.key) or operation.call in IDEMPOTENT
        return isinstance(error, _DONE_NOTHING)

    def _repeat(self, operation: Operation, then: Answered | None) -> None:
        call, instance, parameters = operation.call, operation.instance, operation.parameters
        delay_ms = self._random.randrange(*AGAIN_MS)
        self.world.after(delay_ms, lambda: self.call(call, instance, parameters, then=then))

    def lost(self, life: Life) -> None:
        """The process we talked to is gone: whatever is open there may have happened or not."""
        for operation, where, _then in list(self._open.values()):
            if where is life:
                self._unanswered(operation, "Died")

    def double(self, operation: Operation) -> Operation:
        """The same call arrives once more, and nobody hears what comes of it."""
        copy = msgspec.structs.replace(
            operation, number=len(self.world.operations) + 1, invoked=self.world.steps, at_ms=self.world.time.now_ms
        )
        copy.returned, copy.answer, copy.error, copy.reason, copy.is_unknown = None, None, "TimedOut", COPY, True
        self.world.operations.append(copy)
        self._send(copy, None)
        return copy

    def give_up(self, operation: Operation) -> None:
        """No answer has come for too long: likewise."""
        self._unanswered(operation, "TimedOut")

    def _unanswered(self, operation: Operation, error: str) -> None:
        found = self._open.pop(operation.number, None)
        if found is None:
            return  # There was an answer.
        then = found[2]
        operation.is_unknown = True
        operation.error = error
        if operation.key or operation.call in IDEMPOTENT:
            self._repeat(operation, then)
        elif then is not None:
            then(operation)
