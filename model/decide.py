"""What an instance answers to a command: events to be made durable, effects to be released after that, and an answer.

`decide` is total: every command gets a decision, and a refusal is an answer without events that leaves the instance
as it was. It reads nothing but its arguments, so the same command on the same instance always gives the same
decision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from understudy.model import commands as c
from understudy.model import effects as fx
from understudy.model import events as e
from understudy.model.apply import decode_fault
from understudy.model.definition import Graph
from understudy.model.errors import AlreadyEnded, Conflict, Rejected, UnderstudyError, UnknownIncident, UnknownInstance
from understudy.model.instance import ROOT, Fault, Incident, Instance, Token
from understudy.model.kinds.task import TASK, attempt_of
from understudy.model.states import Outcome, Status, TokenStatus
from understudy.model.turn import Turn


class Decision(msgspec.Struct):
    """What follows from one command."""

    entry: e.Entry | None = None  # To be made durable, all or nothing; None when nothing changes.
    effects: list[fx.AnyEffect] = []  # To be released only after the entry is durable.
    answer: Any = None  # Likewise.
    refusal: UnderstudyError | None = None  # In place of an answer; then there is no entry.


Rule = Callable[[Turn, Any], Any]
_RULES: dict[type[c.Command], Rule] = {}
R = TypeVar("R", bound=Rule)


def decide(instance: Instance, graph: Graph, command: c.AnyCommand, *, go_on: bool = True) -> Decision:
    """Decide a command. The instance is moved to where the decision leads; a refusal leaves it untouched.

    Without `go_on` tokens stop where they arrive and no attempt begins: so decides a runtime that shuts down, or that
    was opened for an operator's command. The next owner finds all that is left to do in the store, so that nothing
    but withdrawals is to be done now.
    """
    turn = Turn(instance, graph, command.at_ms, go_on=go_on)
    try:
        answer = _RULES[type(command)](turn, command)
    except UnderstudyError as refusal:
        return _refused(turn, refusal)
    turn.run()
    effects = turn.effects
    if not go_on:
        effects = [effect for effect in effects if type(effect) is fx.CancelTask]
    if not turn.events:
        return Decision(effects=effects, answer=answer)
    instance.changed_ms = max(instance.changed_ms, command.at_ms)
    entry = e.Entry(command.at_ms, command.cause, turn.events, command.by, command.key)
    return Decision(entry, effects, answer)


def _refused(turn: Turn, refusal: UnderstudyError) -> Decision:
    assert not turn.events, f"{turn.instance.id}: refused after {turn.events}: {refusal}"
    return Decision(refusal=refusal)


def outstanding(instance: Instance, graph: Graph) -> list[fx.AnyEffect]:
    """Every effect that the stored state still asks for: a crash between commit and effect loses nothing."""
    if instance.is_ended:
        return []
    turn = Turn(instance, graph, 0)
    effects: list[fx.AnyEffect] = [
        fx.ArmTimer(wait.id, wait.due_ms) for wait in instance.waits.values() if wait.due_ms is not None
    ]
    executing = (token for token in instance.tokens.values() if token.status is TokenStatus.EXECUTING)
    return effects + [attempt_of(turn, token, graph[token.node].node) for token in executing]


def _decides(kind: type[c.Command]) -> Callable[[R], R]:
    def register(function: R) -> R:
        _RULES[kind] = function
        return function

    return register


def _living(instance: Instance) -> None:
    if not instance.exists:
        raise UnknownInstance()
    if instance.is_ended:
        assert instance.outcome is not None
        raise AlreadyEnded(f"{instance.id} has ended ({instance.outcome.value}); it takes no further commands")


# --- from outside -----------------------------------------------------------------------------------------------------


@_decides(c.Start)
def _start(turn: Turn, command: c.Start) -> Any:
    instance, graph = turn.instance, turn.graph
    if instance.exists:
        if instance.given_digest != command.given_digest:
            raise Conflict(f"{command.id} was started before with another process or input; choose another id")
        return {"id": instance.id, "new": False}
    turn.emit(
        e.InstanceStarted(
            command.id,
            graph.definition.name,
            graph.version,
            graph.no,
            command.given_digest,
            command.variables,
            command.title,
            command.tags,
            command.trigger,
            command.by,
            command.caused_by,
        )
    )
    turn.spawn(ROOT, graph.starts[""])
    return {"id": command.id, "new": True}


@_decides(c.Send)
def _send(turn: Turn, command: c.Send) -> Any:
    instance = turn.instance
    _living(instance)
    fitting = (
        wait
        for wait in instance.waits.values()
        if wait.kind == "message" and wait.name == command.name and command.about in ("", wait.key)
    )
    wait = min(fitting, key=lambda w: w.id, default=None)
    if wait is None:
        message = turn.next_id()
        turn.emit(e.MessageBuffered(message, command.name, command.about, command.payload, command.expires_ms))
        return {"id": instance.id, "received": False}
    _wake(turn, wait.id, command.payload)
    return {"id": instance.id, "received": True}


@_decides(c.Cancel)
def _cancel(turn: Turn, command: c.Cancel) -> Any:
    instance = turn.instance
    if not instance.exists:
        raise UnknownInstance()
    if instance.outcome is Outcome.CANCELLED or (instance.ending is Outcome.CANCELLED and command.undo):
        return {"id": instance.id, "status": instance.status.value}
    _living(instance)
    fault = Fault("cancelled", command.reason or "cancelled")
    if command.undo:
        if instance.status is not Status.CANCELLING:
            turn.begin_ending(Outcome.CANCELLED, fault)
    else:
        if instance.status is not Status.CANCELLING:
            turn.emit(e.EndingBegun(Outcome.CANCELLED, fault.code, fault.message))
        turn.stop(ROOT, "terminated")
        turn.look_at(ROOT)
    return {"id": instance.id, "status": "cancelling"}


@_decides(c.Pause)
def _pause(turn: Turn, _command: c.Pause) -> Any:
    instance = turn.instance
    _living(instance)
    if instance.status in (Status.COMPENSATING, Status.CANCELLING):
        raise Rejected(f"{instance.id} is {instance.status.value}; what is being undone cannot be paused")
    if instance.status is not Status.PAUSED:
        turn.emit(e.InstancePaused())
    return {"id": instance.id, "status": "paused"}


@_decides(c.Resume)
def _resume(turn: Turn, _command: c.Resume) -> Any:
    instance = turn.instance
    _living(instance)
    if instance.status is Status.PAUSED:
        turn.emit(e.InstanceResumed())
        turn.stir()
    return {"id": instance.id, "status": instance.status.value}


@_decides(c.Resolve)
def _resolve(turn: Turn, command: c.Resolve) -> Any:
    instance = turn.instance
    _living(instance)
    incident = _incident(instance, command.incident)
    token = instance.tokens[incident.token]
    place = turn.graph[token.node]
    if command.how == "retry":
        turn.emit(e.IncidentClosed(incident.id, "retried"))
        place.rules.retry(turn, token, place)
    elif command.how == "skip":
        turn.resolution = "skipped"
        place.rules.skip(turn, token, place, command.result, command.to)
        _close_if_open(turn, incident, "skipped")
    elif command.how == "fail":
        turn.emit(e.IncidentClosed(incident.id, "failed"))
        _fail(turn, token, Fault(incident.code, incident.detail, token.node))
    else:
        raise Rejected(f"an incident can be settled by retry, skip or fail, not by {command.how!r}")
    return {"id": instance.id, "incident": incident.id, "how": command.how}


def _incident(instance: Instance, wanted: int) -> Incident:
    if wanted:
        if wanted not in instance.incidents:
            raise UnknownIncident(f"{instance.id} has no open incident {wanted}; open: {sorted(instance.incidents)}")
        return instance.incidents[wanted]
    if len(instance.incidents) != 1:
        open_ones = ", ".join(f"{i.id} at {i.node}" for i in instance.incidents.values()) or "none"
        raise UnknownIncident(f"say which incident of {instance.id} is meant; open: {open_ones}")
    return next(iter(instance.incidents.values()))


def _close_if_open(turn: Turn, incident: Incident, how: str) -> None:
    if incident.id in turn.instance.incidents:
        turn.emit(e.IncidentClosed(incident.id, how))


def _fail(turn: Turn, token: Token, fault: Fault) -> None:
    if not token.undo:
        turn.fail(token, fault, policy="fail")
        return
    # Giving up on an undo ends the chain: nothing more of this saga is taken back.
    scope = turn.instance.scopes[token.scope]
    for undo in sorted((u.id for u in turn.instance.undos.values() if u.scope == scope.id), reverse=True):
        turn.emit(e.UndoFinished(undo, "given up"))
    turn.end(token, "terminated")


# --- from inside ------------------------------------------------------------------------------------------------------


@_decides(c.CompleteTask)
def _complete(turn: Turn, command: c.CompleteTask) -> Any:
    token = _attempt(turn.instance, command)
    TASK.complete(turn, token, turn.graph[token.node], command.result, recorded=command.recorded)
    return None


@_decides(c.FailTask)
def _fail_task(turn: Turn, command: c.FailTask) -> Any:
    token = _attempt(turn.instance, command)
    TASK.fail_attempt(turn, token, turn.graph[token.node], command.fault)
    return None


def _attempt(instance: Instance, command: c.CompleteTask | c.FailTask) -> Token:
    found = instance.tokens.get(command.token)
    if (
        found is None
        or found.status is not TokenStatus.EXECUTING
        or found.attempt != command.attempt
        or command.task not in (0, found.task)
    ):
        raise Conflict(
            f"attempt {command.attempt} of token {command.token} of {instance.id} is no longer awaited; "
            "its result is not used"
        )
    return found


@_decides(c.FireTimer)
def _fire(turn: Turn, command: c.FireTimer) -> Any:
    wait = turn.instance.waits.get(command.wait)
    if wait is None or wait.due_ms is None:
        return None  # Consumed or cancelled: the timer came too late, and is not missed.
    if wait.due_ms > command.at_ms:
        turn.effects.append(fx.ArmTimer(wait.id, wait.due_ms))
        return None
    if wait.kind == "retry" and not turn.may_begin:
        return None  # A new attempt must not begin; resuming, or the next owner, arms it again.
    _wake(turn, wait.id, "null")
    return None


@_decides(c.Deliver)
def _deliver(turn: Turn, command: c.Deliver) -> Any:
    if command.wait in turn.instance.waits:
        _wake(turn, command.wait, command.payload, message=command.message)
    return None


def _wake(turn: Turn, wait_id: int, payload: str, *, message: int = 0) -> None:
    wait = turn.instance.waits[wait_id]
    turn.emit(e.WaitConsumed(wait_id, message))
    token = turn.instance.tokens[wait.token]
    place = turn.graph[token.node]
    place.rules.woken(turn, token, place, wait, payload)


@_decides(c.Recover)
def _recover(turn: Turn, command: c.Recover) -> Any:
    if turn.instance.is_ended or not turn.instance.exists:
        return None
    for token in [t for t in turn.instance.tokens.values() if t.status is TokenStatus.EXECUTING]:
        place = turn.graph[token.node]
        if token.task in command.recorded:
            TASK.complete(turn, token, place, command.recorded[token.task], recorded=True)
        elif turn.go_on and token.id not in command.spared:  # Only who can release it again counts it as lost.
            TASK.lose(turn, token, place)
    turn.stir()
    return None


def error_of(instance: Instance) -> Fault | None:
    """Why the instance failed or was cancelled."""
    return decode_fault(instance.error)
