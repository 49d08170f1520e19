"""What an event does to an instance.

`decide` says what should happen; `apply` says what has happened. Recovery and audit run only this, so it reads
nothing but the event, its moment and the instance, and it never refuses: what is in history was true. An event that
does not fit is a broken belief.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from understudy.model import events as e
from understudy.model.instance import (
    ROOT,
    Buffered,
    Fault,
    Incident,
    Instance,
    Scope,
    Thrown,
    Token,
    Undo,
    Variable,
    Wait,
)
from understudy.model.states import (
    INSTANCE_TRANSITIONS,
    TOKEN_TRANSITIONS,
    Outcome,
    ScopeKind,
    ScopeStatus,
    Status,
    TokenStatus,
)

replace = msgspec.structs.replace
Applier = Callable[[Instance, Any, int], None]
_APPLIERS: dict[type[e.Event], Applier] = {}
F = TypeVar("F", bound=Applier)


def apply(instance: Instance, event: e.AnyEvent, at_ms: int) -> Instance:
    """Change the instance as the event says; who needs the old one has copied it."""
    _APPLIERS[type(event)](instance, event, at_ms)
    return instance


def fold(entries: Iterable[e.Entry], instance: Instance | None = None) -> Instance:
    """The instance that a history leads to."""
    state = Instance() if instance is None else instance
    for entry in entries:
        for event in entry.events:
            apply(state, event, entry.at_ms)
        if entry.events:
            state.changed_ms = max(state.changed_ms, entry.at_ms)
    return state


def _applies(kind: type[e.Event]) -> Callable[[F], F]:
    def register(function: F) -> F:
        _APPLIERS[kind] = function
        return function

    return register


def _becomes(instance: Instance, status: Status) -> None:
    assert status in INSTANCE_TRANSITIONS[instance.status], (instance.id, instance.status, status)
    instance.status = status


def _token(instance: Instance, token: int, status: TokenStatus, **changes: Any) -> None:
    before = instance.tokens[token]
    assert status in TOKEN_TRANSITIONS[before.status], (instance.id, token, before.status, status)
    instance.put_token(replace(before, status=status, **changes))


# --- the instance -----------------------------------------------------------------------------------------------------


@_applies(e.InstanceStarted)
def _started(instance: Instance, event: e.InstanceStarted, at_ms: int) -> None:
    _becomes(instance, Status.RUNNING)
    instance.id = event.id
    instance.process = event.process
    instance.process_version = event.process_version
    instance.definition = event.definition
    instance.given_digest = event.given_digest
    instance.title = event.title
    instance.tags = event.tags
    instance.trigger = event.trigger
    instance.by = event.by
    instance.caused_by = event.caused_by
    instance.created_ms = at_ms
    instance.scopes.put(ROOT, Scope(ROOT, ROOT, "", ScopeKind.ROOT))
    _set(instance, ROOT, event.variables)


@_applies(e.InstancePaused)
def _paused(instance: Instance, _event: e.InstancePaused, _at_ms: int) -> None:
    instance.resting = instance.status
    _becomes(instance, Status.PAUSED)


@_applies(e.InstanceResumed)
def _resumed(instance: Instance, _event: e.InstanceResumed, _at_ms: int) -> None:
    _becomes(instance, instance.resting)
    instance.resting = Status.PENDING


@_applies(e.EndingBegun)
def _ending(instance: Instance, event: e.EndingBegun, _at_ms: int) -> None:
    instance.ending = event.outcome
    instance.error = encode_fault(Fault(event.code, event.message, event.node))
    if event.outcome is not Outcome.CANCELLED:
        _compensates(instance)
    elif instance.status is not Status.CANCELLING:
        instance.resting = Status.PENDING  # Who cancels also ends a pause.
        _becomes(instance, Status.CANCELLING)


def _compensates(instance: Instance) -> None:
    """A failure does not end a pause: nothing is undone before the instance is resumed."""
    if instance.status is Status.RUNNING:
        _becomes(instance, Status.COMPENSATING)
    elif instance.status is Status.PAUSED:
        instance.resting = Status.COMPENSATING


@_applies(e.InstanceEnded)
def _ended(instance: Instance, event: e.InstanceEnded, at_ms: int) -> None:
    assert not instance.tokens, (instance.id, sorted(instance.tokens))
    _becomes(instance, Status.ENDED)
    instance.outcome = event.outcome
    instance.ending = None
    instance.result = event.result
    instance.error = event.error
    instance.ended_ms = at_ms
    for message in list(instance.buffer):
        instance.buffer.drop(message)
    for undo in list(instance.undos):
        instance.undos.drop(undo)


# --- tokens -----------------------------------------------------------------------------------------------------------


@_applies(e.TokenCreated)
def _created(instance: Instance, event: e.TokenCreated, at_ms: int) -> None:
    instance.serial = max(instance.serial, event.token)
    instance.put_token(
        Token(
            event.token,
            event.scope,
            event.node,
            event.came_by,
            TokenStatus.READY,
            event.mode,
            undo=event.undo,
            since_ms=at_ms,
        )
    )


@_applies(e.TokenMoved)
def _moved(instance: Instance, event: e.TokenMoved, at_ms: int) -> None:
    before = instance.tokens[event.token]
    assert TokenStatus.READY in TOKEN_TRANSITIONS[before.status], (instance.id, before)
    if before.status is TokenStatus.WAITING:
        instance.leave_join(before)
    instance.put_token(
        Token(before.id, before.scope, event.node, event.came_by, TokenStatus.READY, before.mode, since_ms=at_ms)
    )


@_applies(e.TokenRested)
def _rested(instance: Instance, event: e.TokenRested, at_ms: int) -> None:
    _token(instance, event.token, TokenStatus.WAITING, since_ms=at_ms)
    if event.at_join:
        instance.rest_at_join(instance.tokens[event.token])


@_applies(e.TokenEnded)
def _token_ended(instance: Instance, event: e.TokenEnded, _at_ms: int) -> None:
    gone = instance.drop_token(event.token)
    if gone.status is TokenStatus.WAITING:
        instance.leave_join(gone)
    instance.drop_waits(event.token)


# --- tasks ------------------------------------------------------------------------------------------------------------


@_applies(e.TaskOpened)
def _opened(instance: Instance, event: e.TaskOpened, at_ms: int) -> None:
    instance.serial = max(instance.serial, event.task)
    _token(instance, event.token, TokenStatus.EXECUTING, task=event.task, attempt=1, tries=1, lost=0, since_ms=at_ms)


@_applies(e.AttemptStarted)
def _attempt(instance: Instance, event: e.AttemptStarted, at_ms: int) -> None:
    before = instance.tokens[event.token]
    tries, lost = before.tries + 1, 0
    if event.renewed:
        tries = 1
    elif before.lost:  # The last attempt was not failed but lost, and its successor had to wait for the end of a pause.
        tries, lost = before.tries, before.lost
    _token(instance, event.token, TokenStatus.EXECUTING, attempt=event.attempt, tries=tries, lost=lost, since_ms=at_ms)


@_applies(e.AttemptLost)
def _lost(instance: Instance, event: e.AttemptLost, at_ms: int) -> None:
    lost = instance.tokens[event.token].lost + 1
    _token(instance, event.token, TokenStatus.EXECUTING, attempt=event.attempt + 1, lost=lost, since_ms=at_ms)


@_applies(e.AttemptFailed)
def _failed(instance: Instance, event: e.AttemptFailed, at_ms: int) -> None:
    _token(instance, event.token, TokenStatus.WAITING, lost=0, since_ms=at_ms)


@_applies(e.TaskCompleted)
def _completed(instance: Instance, event: e.TaskCompleted, _at_ms: int) -> None:
    token = instance.tokens[event.token]
    if event.recorded:
        instance.taken_work.append(token.task)
    if event.into:
        _set(instance, instance.home(token.scope), {event.into: event.result})


@_applies(e.VariablesSet)
def _variables(instance: Instance, event: e.VariablesSet, _at_ms: int) -> None:
    _set(instance, event.scope, event.values)


def _set(instance: Instance, scope: int, values: dict[str, str]) -> None:
    for name, value in values.items():
        instance.variables.put((scope, name), Variable(scope, name, value))


# --- waits and messages -----------------------------------------------------------------------------------------------


@_applies(e.WaitOpened)
def _wait_opened(instance: Instance, event: e.WaitOpened, at_ms: int) -> None:
    token = instance.tokens[event.token]
    instance.serial = max(instance.serial, event.wait)
    if token.status is not TokenStatus.WAITING:
        _token(instance, token.id, TokenStatus.WAITING, since_ms=at_ms)
    instance.put_wait(
        Wait(
            event.wait,
            event.group,
            token.scope,
            token.id,
            token.node,
            event.kind,
            event.name,
            event.key,
            event.due_ms,
            at_ms,
        )
    )


@_applies(e.WaitConsumed)
def _wait_consumed(instance: Instance, event: e.WaitConsumed, _at_ms: int) -> None:
    instance.drop_waits(instance.waits[event.wait].token)
    if event.message:
        instance.consumed.append(event.message)


@_applies(e.MessageBuffered)
def _buffered(instance: Instance, event: e.MessageBuffered, _at_ms: int) -> None:
    instance.serial = max(instance.serial, event.message)
    message = Buffered(event.message, event.name, event.key, event.payload, event.expires_ms)
    instance.buffer.put(event.message, message)


@_applies(e.MessageTaken)
def _taken(instance: Instance, event: e.MessageTaken, _at_ms: int) -> None:
    instance.buffer.drop(event.message)


@_applies(e.MessageThrown)
def _thrown(instance: Instance, event: e.MessageThrown, _at_ms: int) -> None:
    instance.thrown.append(Thrown(event.name, event.key, event.payload, event.expires_ms))


# --- scopes and undos -------------------------------------------------------------------------------------------------


@_applies(e.ScopeOpened)
def _scope_opened(instance: Instance, event: e.ScopeOpened, _at_ms: int) -> None:
    instance.serial = max(instance.serial, event.scope)
    instance.scopes.put(event.scope, Scope(event.scope, event.parent, event.node, event.kind, host=event.host))


@_applies(e.ScopeFailing)
def _scope_failing(instance: Instance, event: e.ScopeFailing, _at_ms: int) -> None:
    scope = instance.scopes[event.scope]
    fault = encode_fault(Fault(event.code, event.message, event.node))
    instance.scopes.put(scope.id, replace(scope, status=ScopeStatus.FAILING, error=fault))
    _compensates(instance)


@_applies(e.ScopeCompensating)
def _scope_compensating(instance: Instance, event: e.ScopeCompensating, _at_ms: int) -> None:
    scope = instance.scopes[event.scope]
    instance.scopes.put(scope.id, replace(scope, status=ScopeStatus.COMPENSATING))


@_applies(e.ScopeClosed)
def _scope_closed(instance: Instance, event: e.ScopeClosed, _at_ms: int) -> None:
    instance.scopes.drop(event.scope)
    instance.population.pop(event.scope, None)
    for undo in [u for u in instance.undos.values() if u.scope == event.scope]:
        if event.heir is None:
            instance.undos.drop(undo.id)
        else:
            instance.undos.put(undo.id, replace(undo, scope=event.heir))


@_applies(e.UndoRecorded)
def _undo_recorded(instance: Instance, event: e.UndoRecorded, _at_ms: int) -> None:
    instance.serial = max(instance.serial, event.undo)
    instance.undos.put(event.undo, Undo(event.undo, event.scope, event.node, event.task, event.given))


@_applies(e.UndoStarted)
def _undo_started(instance: Instance, event: e.UndoStarted, _at_ms: int) -> None:
    instance.undos.put(event.undo, replace(instance.undos[event.undo], running=1))


@_applies(e.UndoFinished)
def _undo_finished(instance: Instance, event: e.UndoFinished, _at_ms: int) -> None:
    instance.undos.drop(event.undo)


# --- incidents --------------------------------------------------------------------------------------------------------


@_applies(e.IncidentRaised)
def _incident(instance: Instance, event: e.IncidentRaised, at_ms: int) -> None:
    token = instance.tokens[event.token]
    instance.serial = max(instance.serial, event.incident)
    if token.status is not TokenStatus.WAITING:
        _token(instance, token.id, TokenStatus.WAITING, since_ms=at_ms)
    instance.put_incident(Incident(event.incident, token.id, token.node, event.code, event.detail, at_ms))


@_applies(e.IncidentClosed)
def _incident_closed(instance: Instance, event: e.IncidentClosed, _at_ms: int) -> None:
    instance.drop_incident(event.incident)


# --- faults -----------------------------------------------------------------------------------------------------------

_FAULT_ENCODER = msgspec.json.Encoder()
_FAULT_DECODER = msgspec.json.Decoder(Fault)


def encode_fault(fault: Fault) -> str:
    return _FAULT_ENCODER.encode(fault).decode()


def decode_fault(text: str) -> Fault | None:
    return _FAULT_DECODER.decode(text) if text else None
