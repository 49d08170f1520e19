"""What an instance answers to its clients, one operation after the other: the reference for I12.

It is as small as what clients can know: no tokens, no timers, only status, version, keys and how many messages were
taken. The instance also moves by itself, so that more than one state may fit what was seen; the reference keeps the
earliest, because every later one can still be reached from there. It must never refuse what the runtime promises, and
never excuse what the runtime must not do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from understudy.simulations.operations import Operation

NEVER: Final = 1 << 62
Family: TypeAlias = tuple[str, str, int, int]
_UNDER_WAY_MS: Final = 3_600_000  # A key is forgotten when its call arrives, which may be so long after it was sent.
_REFUSALS: Final = frozenset({"AlreadyEnded", "Conflict", "UnknownIncident", "UnknownInstance", "Rejected"})
_NOTHING_DONE: Final = frozenset(
    {"BadExpression", "BadInput", "BadValue", "Closed", "Fenced", "Unavailable", "UnknownProcess"}
)

_ABSENT: Final = ""
_REACHES: Final[dict[str, frozenset[str]]] = {  # Where an instance can go by itself, without a command.
    _ABSENT: frozenset(),
    "running": frozenset({"running", "compensating", "ended"}),
    "paused": frozenset({"paused"}),
    "compensating": frozenset({"compensating", "ended"}),
    "cancelling": frozenset({"cancelling", "ended"}),
    "ended": frozenset({"ended"}),
}


class Taken(NamedTuple):
    """What a key stands for."""

    content: str
    answer: str | None  # None: nobody was told yet.
    at_ms: int


class State(NamedTuple):
    """An instance as its clients see it."""

    status: str = _ABSENT
    given: str = ""  # The content of its start.
    is_cancelled: bool = False
    outcome: str = ""  # Once somebody has read it.
    version: int = 0  # As it was read last.
    has_moved: bool = False  # Since that version: the next read must find a higher one.
    sends: int = 0  # Messages taken, if any read counts them.
    keys: tuple[Taken | None, ...] = ()
    settled: frozenset[int] = frozenset()  # Incidents; each can be settled once.

    def moved(self, **changes: Any) -> State:
        return self._replace(has_moved=True, **changes)

    def become(self, status: str) -> State:
        return self if status == self.status else self._replace(status=status, has_moved=True)


class Call(msgspec.Struct, kw_only=True, eq=False):
    """An operation, prepared for the search."""

    operation: Operation
    kind: str
    invoked: int  # A moment: the step, and within a step the number of the operation.
    returned: int  # Likewise; NEVER when it may have happened at any time later, or not at all.
    error: str
    content: str
    answer: str
    status: str | None
    at_ms: int
    key: int  # Which one, of the keys that stand for more than one operation; -1 when it is none of them.
    is_key_shared: bool
    counts_sends: bool
    forget_ms: int
    incident: int
    read: Read | None
    bit: int = 0

    @property
    def is_open(self) -> bool:
        return self.returned == NEVER

    @property
    def is_passive(self) -> bool:
        """Whether it can only tell something about the instance, and never change it."""
        return self.kind == "read" or self.error in _REFUSALS

    @property
    def family(self) -> Family:
        """Those of one family do the same. Of open ones the first will do: it may happen whenever a later one may."""
        if self.key >= 0:
            return self.kind, self.content, self.key, self.at_ms
        return self.kind, self.content if self.kind == "start" else "", -1, 0


class Read(NamedTuple):
    """What a client has read; what was not asked for is None."""

    exists: bool
    version: int | None
    status: str | None
    outcome: str | None
    sends: int | None


def _start(state: State, call: Call) -> State | None:
    if call.error:
        return state if call.error == "Conflict" and state.status and state.given != call.content else None
    if not state.status:
        # "new" may be False even so: a runtime that does not know whether its commit landed finds its own start.
        return state.moved(status="running", given=call.content)
    return state if state.given == call.content and call.status != "new" else None


def _send(state: State, call: Call) -> State | None:
    if call.error:
        return _refused(state, call)
    if not _is_living(state):
        return None
    return state.moved(sends=state.sends + call.counts_sends)


def _pause(state: State, call: Call) -> State | None:
    if call.error == "Rejected":
        if state.status == "running":
            return state.become("compensating")
        return state if state.status in ("compensating", "cancelling") else None
    if call.error:
        return _refused(state, call)
    fits = state.status in ("running", "paused") and call.status in (None, "paused")
    return state.become("paused") if fits else None


def _resume(state: State, call: Call) -> State | None:
    if call.error == "AlreadyEnded" and state.status == "paused":
        # It was in doubt whether the commit landed; it had, and the instance ended before the command came again.
        return state.become("ended")
    if call.error:
        return _refused(state, call)
    if not _is_living(state) or call.status in ("paused", "ended"):
        return None
    if state.status == "paused":
        return None if call.status == "cancelling" else state.become(call.status or "running")
    if call.status is None:
        return state
    return state.become(call.status) if call.status in _REACHES[state.status] else None


def _cancel(state: State, call: Call) -> State | None:
    if call.error:
        return None if state.is_cancelled else _refused(state, call)
    if call.status not in (None, "cancelling", "ended"):
        return None
    if not state.is_cancelled:
        if not _is_living(state):
            return None
        state = state.moved(status="cancelling", is_cancelled=True)
    return state.become("ended") if call.status == "ended" else state


def _resolve(state: State, call: Call) -> State | None:
    if call.error in ("UnknownIncident", "Rejected"):
        return state if _is_living(state) else None
    if call.error:
        return _refused(state, call)
    if not _is_living(state) or call.incident in state.settled:
        return None
    return state.moved(settled=state.settled | {call.incident} if call.incident else state.settled)


def _read(state: State, call: Call) -> State | None:
    read = call.read
    assert read is not None, call.operation
    if not (read.exists and state.status):
        return state if not read.exists and not state.status else None
    if read.sends is not None and read.sends != state.sends:
        return None
    if read.status is not None and read.status not in _REACHES[state.status]:
        return None
    if not _fits_outcome(state, read):
        return None
    status, outcome = read.status or state.status, read.outcome or state.outcome
    if read.version is None:
        return state.become(status)._replace(outcome=outcome)
    if read.version == state.version:  # One version is one content.
        return state if not state.has_moved and (status, outcome) == (state.status, state.outcome) else None
    if read.version < state.version:
        return None
    return state._replace(status=status, outcome=outcome, version=read.version, has_moved=False)


def _fits_outcome(state: State, read: Read) -> bool:
    if not read.outcome:
        return True
    return state.outcome in ("", read.outcome) and state.is_cancelled == (read.outcome == "cancelled")


def _refused(state: State, call: Call) -> State | None:
    if call.error == "UnknownInstance":
        return None if state.status else state
    if call.error == "AlreadyEnded":
        return state.become("ended") if "ended" in _REACHES[state.status] else None
    return state if call.error == "Rejected" else None  # By the storage: nothing was done.


def _is_living(state: State) -> bool:
    return state.status not in (_ABSENT, "ended")


RULES: Final[dict[str, Callable[[State, Call], State | None]]] = {
    "start": _start,
    "send": _send,
    "pause": _pause,
    "resume": _resume,
    "cancel": _cancel,
    "resolve": _resolve,
    "read": _read,
}


def states_after(state: State, call: Call) -> list[State]:
    """Every state in which the operation, with the answer it had, may leave the instance; none if it does not fit."""
    if call.is_key_shared and call.error == "Conflict":
        return [state]
    if call.key < 0:
        after = RULES[call.kind](state, call)
        return [] if after is None else [after]
    taken = state.keys[call.key]
    if taken is None:
        return _first(state, call)
    repeated = _repeated(state, call, taken)
    return repeated + _first(state, call) if call.at_ms - taken.at_ms >= call.forget_ms else repeated


def _first(state: State, call: Call) -> list[State]:
    after = RULES[call.kind](state, call)
    if after is None or call.error:
        return [] if after is None else [after]
    keyed = _with_key(after, call, Taken(call.content, None if call.is_open else call.answer, call.at_ms))
    return [keyed]


def _repeated(state: State, call: Call, taken: Taken) -> list[State]:
    """The same content gets the first answer, other content none."""
    if call.is_open:
        return [state]
    if call.content != taken.content:
        return [state] if call.error == "Conflict" else []
    if call.error or taken.answer not in (None, call.answer):
        return []
    return [state if taken.answer else _with_key(state, call, taken._replace(answer=call.answer))]


def _with_key(state: State, call: Call, taken: Taken) -> State:
    return state._replace(keys=(*state.keys[: call.key], taken, *state.keys[call.key + 1 :]))


# --- from operations to calls -----------------------------------------------------------------------------------------


def calls_of(operations: Sequence[Operation], *, answers_kept_ms: int, shared_keys: frozenset[str]) -> list[Call]:
    """The operations that say something about the instance; those that surely did nothing say nothing."""
    told = [operation for operation in operations if operation.error not in _NOTHING_DONE or operation.is_unknown]
    uses = Counter(operation.key for operation in told if operation.key and operation.call != "start")
    keys = [key for key, times in uses.items() if times > 1]
    reads = [_as_read(operation) for operation in told]
    counts_sends = any(read is not None and read.sends is not None for read in reads)
    return [
        Call(
            operation=operation,
            kind=operation.call,
            invoked=_moment(operation, operation.invoked),
            returned=NEVER if _is_open(operation) else _moment(operation, operation.returned),
            error="" if _is_open(operation) else operation.error,
            content=_content(operation),
            answer=plain(operation.answer),
            status=_status(operation),
            at_ms=operation.at_ms,
            key=keys.index(operation.key) if operation.key in keys and operation.call != "start" else -1,
            is_key_shared=operation.key in shared_keys,
            counts_sends=counts_sends,
            forget_ms=answers_kept_ms - _UNDER_WAY_MS,
            incident=_field(operation.answer, "incident") or 0,
            read=read,
        )
        for operation, read in zip(told, reads, strict=True)
    ]


def _moment(operation: Operation, step: int | None) -> int:
    assert step is not None, operation
    return (step << 32) + operation.number


def _is_open(operation: Operation) -> bool:
    is_clear = not operation.error or operation.error in _REFUSALS
    return operation.returned is None or operation.is_unknown or not is_clear


def _status(operation: Operation) -> str | None:
    if _is_open(operation):
        return None
    if operation.call == "start":
        return "new" if _field(operation.answer, "new") else None
    status = _field(operation.answer, "status")
    return None if status is None else str(status)


def _as_read(operation: Operation) -> Read | None:
    if operation.call != "read" or _is_open(operation):
        return None
    answer = operation.answer
    version, status, outcome, sends = (_field(answer, name) for name in ("version", "status", "outcome", "sends"))
    return Read(not operation.error and answer is not None, version, status, outcome, sends)


def _content(operation: Operation) -> str:
    """What two calls under one key must share; of a start, what two starts of one id must."""
    if operation.call == "start":
        return plain([operation.parameters.get("process"), operation.parameters.get("variables")])
    given = {name: value for name, value in operation.parameters.items() if name not in ("key", "by")}
    return plain([operation.call, given])


def _field(answer: object, name: str) -> Any:
    return answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None)


def plain(value: object) -> str:
    return msgspec.json.encode(value, order="deterministic", enc_hook=repr).decode()
