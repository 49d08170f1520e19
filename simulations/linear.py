"""I12: the operations on one instance happened one after the other, each between its call and its answer.

A search looks for an order that the reference and real time both allow (Wing and Gong, with a memory of what was
tried). Whoever got no answer, or one that leaves it open, may have been served at any time after the call, or never.
A step of the world is one thing: who is called in the step that answered an earlier call comes after that one.

Forty operations are the usual size, but none is the limit. Where no operation is open, all orders of what lies before
differ only in the states they lead to: the memory carries this set over, and no order is ever tried twice from one of
them. So a long history costs no more than its windows between such quiet points.

Every command that the instance was given must be among the operations. Nothing here knows actors or a store: it
believes clients only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from understudy.model.errors import UnderstudyError
from understudy.model.invariants import ANSWERS_KEPT_MS, Violation
from understudy.simulations.operations import Operation
from understudy.simulations.reference import NEVER, RULES, Call, Family, State, calls_of, plain, states_after

MOST_VISITS: Final = 300_000  # Of the search: more means far more calls at once than a scenario has.
_VISITS_TO_SHORTEN: Final = 500  # A shorter message is worth this much, so many times.
_TRIES_TO_SHORTEN: Final = 60
_MOST_NAMED: Final = 12


class Undecided(UnderstudyError):
    """The search for an order of operations was given up; record fewer clients that call at the same time."""


def check_all(operations: Iterable[Operation], *, answers_kept_ms: int = ANSWERS_KEPT_MS) -> list[Violation]:
    """Check each instance by itself. Of the instances only those that a command or a read names are looked at."""
    by_instance: dict[str, list[Operation]] = {}
    users: dict[str, set[str]] = {}
    for operation in operations:
        users.setdefault(operation.key, set()).add(operation.instance)
        if operation.call in RULES:
            by_instance.setdefault(operation.instance, []).append(operation)
    shared = frozenset(key for key, instances in users.items() if key and len(instances) > 1)
    found = (check_instance(each, answers_kept_ms=answers_kept_ms, shared_keys=shared) for each in by_instance.values())
    return [violation for violation in found if violation is not None]


def check_instance(
    operations: Sequence[Operation],
    *,
    answers_kept_ms: int = ANSWERS_KEPT_MS,
    shared_keys: frozenset[str] = frozenset(),
    most_visits: int = MOST_VISITS,
) -> Violation | None:
    """None, or the shortest beginning, by the time of answers, that no order explains.

    `shared_keys` are those that were used for other instances too: nobody here knows who came first.
    """
    calls = calls_of(operations, answers_kept_ms=answers_kept_ms, shared_keys=shared_keys)
    if _can_be_ordered(calls, most_visits):
        return None
    calls = _shortest(calls, most_visits)
    core = _core(calls)
    told = "; ".join([_tell(call.operation) for call in core[:_MOST_NAMED]])
    more = f"; and {len(core) - _MOST_NAMED} more" if len(core) > _MOST_NAMED else ""
    last = max(call.operation.returned or 0 for call in core)
    message = f"no order explains {_count(core)} of the {len(calls)} operations called by step {last}: {told}{more}"
    return Violation("I12", message, core[0].operation.instance)


# --- the search -------------------------------------------------------------------------------------------------------


def _can_be_ordered(calls: list[Call], most_visits: int) -> bool:
    """Whether there is an order of all calls that have an answer, with any of those that have none among them."""
    answered = sorted((call for call in calls if not call.is_open), key=lambda call: call.invoked)
    unanswered = sorted((call for call in calls if call.is_open and _matters(call)), key=lambda call: call.invoked)
    for place, call in enumerate((*answered, *unanswered)):
        call.bit = 1 << place
    everything = (1 << len(answered)) - 1
    keys = 1 + max((call.key for call in calls), default=-1)
    beginning = (0, State(keys=(None,) * keys))
    stack, seen = [beginning], {beginning}
    while stack:
        done, state = stack.pop()
        if done & everything == everything:
            return True
        if len(seen) > most_visits:
            raise Undecided()
        for following in _followers(done, state, answered, unanswered, everything):
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def _followers(
    done: int, state: State, answered: list[Call], unanswered: list[Call], everything: int
) -> list[tuple[int, State]]:
    """What may come next, the most promising last: whoever was answered first."""
    left = everything & ~done
    place = (left & -left).bit_length() - 1
    deadline = NEVER
    ready: list[Call] = []
    while place < len(answered) and (call := answered[place]).invoked <= deadline:
        if not done & call.bit:
            deadline = min(deadline, call.returned)
            ready.append(call)
        place += 1
    ready.sort(key=lambda call: -call.returned)
    following: list[tuple[int, State]] = []
    families: set[Family] = set()
    for call in unanswered:
        if call.invoked > deadline:
            break
        if done & call.bit or call.family in families:
            continue
        families.add(call.family)
        following += [(done | call.bit, after) for after in states_after(state, call) if after != state]
    for call in ready:
        after_it = states_after(state, call)
        if call.is_passive and after_it == [state]:
            return [(done | call.bit, state)]  # It fits here and changes nothing: no later place is better.
        following += [(done | call.bit, after) for after in after_it]
    return following


def _matters(call: Call) -> bool:
    """Whether anybody could see that an open call was carried out."""
    is_seen = call.kind not in ("send", "resolve") or call.counts_sends or call.key >= 0
    return is_seen and not call.is_passive


# --- the shortest proof -----------------------------------------------------------------------------------------------


def _shortest(calls: list[Call], most_visits: int) -> list[Call]:
    """The shortest beginning that cannot be ordered; whoever had no answer by then is open."""
    ends = sorted({call.returned for call in calls if not call.is_open})
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if _can_be_ordered(_until(calls, ends[middle]), most_visits):
            low = middle + 1
        else:
            high = middle
    return _until(calls, ends[low])


def _until(calls: list[Call], end: int) -> list[Call]:
    return [call if call.returned <= end else _opened(call) for call in calls if call.invoked <= end]


def _core(calls: list[Call]) -> list[Call]:
    """Those whose answers contradict each other: of all others, not even that they happened is needed.

    Many are let go at once as long as that helps, then fewer and fewer; the last answer is the one that did not fit.
    """
    needed = sorted(calls, key=lambda call: (call.returned, call.invoked))
    size = len(needed) // 2
    tries = _TRIES_TO_SHORTEN
    while size and tries:
        for first in range(0, len(needed), size):
            shorter = [*needed[:first], *map(_relaxed, needed[first : first + size]), *needed[first + size :]]
            if tries and any(not call.is_open for call in needed[first : first + size]):
                tries -= 1
                needed = needed if _may_be_ordered(shorter) else shorter
        size //= 2
    return sorted((call for call in needed if not call.is_open), key=lambda call: call.invoked)


def _may_be_ordered(calls: list[Call]) -> bool:
    try:
        return _can_be_ordered(calls, _VISITS_TO_SHORTEN)
    except Undecided:
        return True


def _opened(call: Call) -> Call:
    return msgspec.structs.replace(call, returned=NEVER, error="", answer="", status=None, incident=0)


def _relaxed(call: Call) -> Call:
    """Without its answer; who was refused, or only looked, then says nothing at all."""
    may_have_done_something = call.kind == "resume" and call.error == "AlreadyEnded"
    if call.is_passive and not may_have_done_something:
        return msgspec.structs.replace(call, returned=NEVER)
    return _opened(call)


def _count(core: list[Call]) -> str:
    return f"these {len(core)}" if len(core) > 1 else "this one"


def _tell(operation: Operation) -> str:
    key = f" under {operation.key!r}" if operation.key else ""
    given = operation.error or plain(operation.answer)
    steps = f"steps {operation.invoked} to {operation.returned}"
    return f"#{operation.number} {operation.client} {operation.call}{key} -> {given} ({steps})"
