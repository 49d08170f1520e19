"""A step that a handler carries out, and its undo.

The handler runs outside; here are the attempt numbers, the retry policy, what it is given and what becomes of its
result. The number of a task's opening, with the instance's id, is the handler's key: the same for all attempts,
another for each round of a loop and for the undo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec

from understudy.model import effects as fx
from understudy.model import events as e
from understudy.model.definition import Node
from understudy.model.instance import Fault, Token, Wait
from understudy.model.kinds.rules import Rules
from understudy.model.retry import ONCE, Backoff
from understudy.model.states import Mode

if TYPE_CHECKING:
    from understudy.model.definition import Place
    from understudy.model.turn import Turn

LOST_LIMIT = 3  # Attempts lost in a row: a handler that kills the process must not do so for ever.
RENEWED = "renewed"  # The name of a wait for an attempt that an operator has ordered.


@attrs.frozen(kw_only=True)
class UndoTask:
    """How a success is taken back."""

    handler: str
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    retry: Backoff = ONCE
    timeout_ms: int | None = None


@attrs.frozen(kw_only=True)
class Task(Node):
    """A step: which handler, what it needs, where its result goes, how often it is tried."""

    handler: str
    needs: tuple[str, ...] = ()  # Variables that must be there.
    may: tuple[str, ...] = ()  # Variables that are passed when they are there.
    into: str = ""
    retry: Backoff = ONCE
    timeout_ms: int | None = None
    on_failure: str = ""  # "incident" or "fail"; empty: fail inside a saga, else an incident.
    undo: UndoTask | None = None
    lane: str = "local"
    transactional: bool = False
    isolation: str = ""


class TaskRules(Rules):
    name = "task"
    node_type = Task

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        missing = [] if token.undo else [n for n in place.node.needs if turn.instance.lookup(token.scope, n) is None]
        if missing:
            turn.incident(token, "missing_variable", f"{place.node.id} needs {', '.join(missing)}: not set")
            return
        turn.emit(e.TaskOpened(token.id, turn.next_id()))
        self.release(turn, turn.instance.tokens[token.id], place)

    def release(self, turn: Turn, token: Token, place: Place) -> None:
        """Order the attempt that the token's row stands for."""
        turn.effects.append(attempt_of(turn, token, place.node))

    # --- results ---

    def complete(self, turn: Turn, token: Token, place: Place, result: str, *, recorded: bool = False) -> None:
        node: Task = place.node
        if token.mode is Mode.COMPENSATION:
            turn.emit(e.TaskCompleted(token.id, token.attempt, result))
            self._undone(turn, token, "done")
            return
        turn.emit(e.TaskCompleted(token.id, token.attempt, result, node.into, recorded))
        saga = turn.saga_around(token.scope)
        if node.undo is not None and saga is not None:
            given = self._undo_given(turn, token, node, result)
            turn.emit(e.UndoRecorded(turn.next_id(), saga.id, node.id, token.task, given))
        self._go_on(turn, token, place)

    def fail_attempt(self, turn: Turn, token: Token, place: Place, fault: Fault) -> None:
        node: Task = place.node
        turn.emit(e.AttemptFailed(token.id, token.attempt, fault.code, fault.message, fault.types, fault.trace))
        token = turn.instance.tokens[token.id]
        if fault.code == "missing_handler":
            turn.incident(token, fault.code, fault.message)
        elif token.mode is Mode.FORWARD and turn.is_failing(token.scope):
            turn.end(token, "failed")  # Nothing was done, so nothing is to be undone.
        elif not self._policy(node, token).is_final(token.tries, fault.types):
            self._back_off(turn, token, node, place)
        elif token.mode is Mode.COMPENSATION:
            turn.incident(token, "undo_failed", f"undoing {node.id}: {fault.message}")
        else:
            turn.fail(token, Fault(fault.code, fault.message, node.id), policy=node.on_failure)

    def lose(self, turn: Turn, token: Token, place: Place) -> None:
        """The process ended while the attempt was out.

        Whether it had an effect is not known: it runs again, under its key.
        """
        turn.emit(e.AttemptLost(token.id, token.attempt))
        token = turn.instance.tokens[token.id]
        if token.lost >= LOST_LIMIT:
            detail = (
                f"{token.lost} attempts in a row ended with their process; look at what {place.node.handler} does to it"
            )
            turn.incident(token, "lost", detail)
        elif not turn.may_begin:
            turn.open_wait(token, "retry", due_ms=turn.at_ms)
        else:
            self.release(turn, token, place)

    # --- waits and operators ---

    def woken(self, turn: Turn, token: Token, place: Place, wait: Wait, _payload: str) -> None:
        self._begin(turn, token, place, renewed=wait.name == RENEWED)

    def retry(self, turn: Turn, token: Token, place: Place) -> None:
        if turn.may_begin:
            self._begin(turn, token, place, renewed=True)
        else:  # An attempt that is not released would count as lost: it is due, and begins with whoever may begin it.
            turn.open_wait(token, "retry", name=RENEWED, due_ms=turn.at_ms)

    def skip(self, turn: Turn, token: Token, place: Place, result: str, to: str) -> None:  # noqa: ARG002 - one way only
        if token.mode is Mode.COMPENSATION:
            self._undone(turn, token, "skipped")
            return
        turn.emit(e.TaskCompleted(token.id, token.attempt, result, place.node.into, skipped=True))
        self._go_on(turn, token, place)

    # --- helpers ---

    def _begin(self, turn: Turn, token: Token, place: Place, *, renewed: bool = False) -> None:
        """A further attempt; a step that was never opened is entered anew."""
        if token.task == 0:
            self.enter(turn, token, place)
            return
        turn.emit(e.AttemptStarted(token.id, token.attempt + 1, renewed=renewed))
        self.release(turn, turn.instance.tokens[token.id], place)

    def _go_on(self, turn: Turn, token: Token, place: Place) -> None:
        if turn.is_failing(token.scope):
            turn.end(token, "done")
        else:
            turn.leave(token, place)

    def _undone(self, turn: Turn, token: Token, how: str) -> None:
        turn.emit(e.UndoFinished(token.undo, how))
        turn.end(token, "done")

    def _policy(self, node: Task, token: Token) -> Backoff:
        return node.undo.retry if token.mode is Mode.COMPENSATION and node.undo is not None else node.retry

    def _back_off(self, turn: Turn, token: Token, node: Task, place: Place) -> None:
        delay_ms = self._policy(node, token).delay_ms(token.tries, f"{turn.instance.id}/{token.task}")
        if delay_ms == 0 and turn.may_begin:
            self._begin(turn, token, place)
        else:
            turn.open_wait(token, "retry", due_ms=turn.at_ms + delay_ms)

    def _undo_given(self, turn: Turn, token: Token, node: Task, result: str) -> str:
        """What the undo will see: the variables it names as they are now, and the step's own result."""
        assert node.undo is not None
        given: dict[str, msgspec.Raw] = {}
        for name in (*node.undo.needs, *node.undo.may):
            text = result if name in ("result", node.into) else turn.instance.lookup(token.scope, name)
            if text is not None:
                given[name] = msgspec.Raw(text)
        return _GIVEN_ENCODER.encode(given).decode()  # Each part was small enough; their sum is nobody's fault now.


_GIVEN_ENCODER = msgspec.json.Encoder()
_GIVEN_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def attempt_of(turn: Turn, token: Token, node: Task) -> fx.RunTask:
    """The effect that an executing token stands for, from its row alone."""
    if token.mode is Mode.COMPENSATION:
        assert node.undo is not None, (turn.instance.id, token)
        undo = turn.instance.undos[token.undo]
        given = {name: bytes(text).decode() for name, text in _GIVEN_DECODER.decode(undo.given).items()}
        return fx.RunTask(
            token.id,
            token.task,
            token.attempt,
            node.id,
            node.undo.handler,
            given,
            is_undo=True,
            timeout_ms=node.undo.timeout_ms,
            lane=node.lane,
            isolation=node.isolation,
        )
    seen = ((name, turn.instance.lookup(token.scope, name)) for name in (*node.needs, *node.may))
    return fx.RunTask(
        token.id,
        token.task,
        token.attempt,
        node.id,
        node.handler,
        {name: text for name, text in seen if text is not None},
        timeout_ms=node.timeout_ms,
        lane=node.lane,
        transactional=node.transactional,
        isolation=node.isolation,
    )


TASK = TaskRules()
