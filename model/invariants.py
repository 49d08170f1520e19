"""What must hold of every instance, whatever happened to it: each statement is a function, found in a table by its id.

`understudy audit` asks them of a database, the simulator and the property tests ask them after every step. They
keep their own books of the events and do not use those of `apply`, because `apply` is under examination too; only I11
runs it. Nothing here mends anything, and nothing here raises for what it finds: a finding is a `Violation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import attrs

from understudy.model import events as e
from understudy.model.apply import fold
from understudy.model.definition import Graph
from understudy.model.instance import ROOT, Instance, Token, facts
from understudy.model.kinds.task import LOST_LIMIT
from understudy.model.retry import Backoff
from understudy.model.states import (
    INSTANCE_TRANSITIONS,
    MOVING,
    TOKEN_TRANSITIONS,
    Mode,
    Outcome,
    ScopeKind,
    ScopeStatus,
    Status,
    TokenStatus,
)

ANSWERS_KEPT_MS: Final = 86_400_000  # After this time a command's key may be used for another command.


@attrs.frozen
class Violation:
    """One thing that is not as it must be."""

    id: str  # Of the invariant.
    message: str
    instance: str = ""  # Empty: it concerns the whole database.

    def __str__(self) -> str:
        return f"{self.id} {self.instance}: {self.message}" if self.instance else f"{self.id}: {self.message}"


class Mark(NamedTuple):
    """The number and the epoch of a commit."""

    n: int
    epoch: int


@attrs.frozen(kw_only=True)
class Subject:
    """An instance to be examined: as it is stored, and how it is said to have come there."""

    instance: Instance
    graph: Graph
    history: tuple[e.Entry, ...]
    marks: tuple[Mark, ...] = ()  # One for each commit; entries of one commit share one.
    sizes: tuple[int, ...] = ()  # How many entries each commit has; without them every entry is a commit of its own.
    version: int | None = None  # As stored; None when nothing is stored.
    answers_kept_ms: int = ANSWERS_KEPT_MS

    def turns(self) -> Iterator[tuple[e.Entry, list[Any]]]:
        """Each entry, and its events."""
        return ((entry, entry.events) for entry in self.history)

    def events(self) -> Iterator[Any]:
        for entry in self.history:
            yield from entry.events

    def commits(self) -> Iterator[tuple[int, list[Any]]]:
        """The events of each entry, with the number of its commit."""
        events = (entry.events for entry in self.history)
        if not self.sizes:
            return enumerate(events, 1)
        numbers = (number for number, size in enumerate(self.sizes, 1) for _ in range(size))
        return zip(numbers, events, strict=True)


@attrs.frozen
class Invariant:
    """A statement, and how to find out whether it holds."""

    id: str
    statement: str
    find: Callable[[Subject], Iterable[str]]

    def check(self, subject: Subject) -> list[Violation]:
        """All violations. A history so wrong that it cannot even be followed is one."""
        found: list[str] = []
        try:
            found.extend(self.find(subject))
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            found.append(f"its history makes no sense ({type(error).__name__}: {error})")
        return [Violation(self.id, message, subject.instance.id) for message in found]


INVARIANTS: Final[dict[str, Invariant]] = {}


def examine(subject: Subject) -> list[Violation]:
    """Ask everything."""
    return [violation for invariant in INVARIANTS.values() for violation in invariant.check(subject)]


Find = Callable[[Subject], Iterable[str]]


def _invariant(id_: str, statement: str) -> Callable[[Find], Find]:
    def register(find: Find) -> Find:
        INVARIANTS[id_] = Invariant(id_, statement, find)
        return find

    return register


# --- tokens -----------------------------------------------------------------------------------------------------------


@_invariant("I1", "token conservation: created minus ended is what lives, for each scope, and nothing lives at the end")
def _conservation(subject: Subject) -> Iterator[str]:
    scope_of: dict[int, int] = {}
    created: set[int] = set()
    living: Counter[int] = Counter()
    scopes = {ROOT}
    for event in subject.events():
        kind = type(event)
        if kind is e.TokenCreated:
            if event.token in created:
                yield f"token {event.token} was created twice"
            if event.scope not in scopes:
                yield f"token {event.token} was created in scope {event.scope}, which is not open"
            created.add(event.token)
            scope_of[event.token] = event.scope
            living[event.scope] += 1
        elif kind is e.TokenEnded:
            if event.token not in scope_of:
                yield f"token {event.token} has ended without living"
            else:
                living[scope_of.pop(event.token)] -= 1
        elif kind is e.ScopeOpened:
            scopes.add(event.scope)
        elif kind is e.ScopeClosed:
            scopes.discard(event.scope)
            if living[event.scope]:
                yield f"scope {event.scope} was closed while {living[event.scope]} token(s) lived in it"
    yield from _living(subject.instance, scope_of)


def _living(instance: Instance, scope_of: dict[int, int]) -> Iterator[str]:
    stored = {token.id: token.scope for token in instance.tokens.values()}
    if stored != scope_of:
        yield f"tokens {_pairs(stored)} live, but by its events {_pairs(scope_of)} should"
    if instance.is_ended and stored:
        yield f"it has ended, but tokens {_pairs(stored)} live"
    counted = Counter(stored.values())
    if {scope: count for scope, count in instance.population.items() if count} != dict(counted):
        yield f"its count of tokens for each scope is {instance.population}, not {dict(counted)}"
    moving = sum(token.status in MOVING for token in instance.tokens.values())
    if instance.moving != moving:
        yield f"its count of moving tokens is {instance.moving}, not {moving}"


def _pairs(scope_of: dict[int, int]) -> str:
    return "{" + ", ".join(f"{token} in scope {scope}" for token, scope in sorted(scope_of.items())) + "}"


@_invariant("I4", "a join fires once for each activation, and only after all its inputs")
def _joins(subject: Subject) -> Iterator[str]:
    joins = {
        place.node.id: sorted(edge.id for edge in place.incoming)
        for place in subject.graph
        if place.rules.name == "join"
    }
    at: dict[int, tuple[int, str, str]] = {}
    resting: set[int] = set()
    stopped: set[int] = set()
    for _, events in subject.turns():
        taken: dict[tuple[int, str], list[str]] = {}
        for event in events:
            kind = type(event)
            if kind is e.TokenCreated:
                at[event.token] = (event.scope, event.node, event.came_by)
            elif kind is e.TokenRested and event.at_join:
                resting.add(event.token)
            elif kind is e.IncidentRaised:
                stopped.add(event.token)
            elif kind is e.TokenMoved or kind is e.TokenEnded:
                scope, node, edge = at[event.token]
                how = getattr(event, "how", "done")
                if how == "joined":
                    if event.token not in resting:
                        yield f"token {event.token} was joined at {node} without resting there"
                    taken.setdefault((scope, node), []).append(edge)
                elif node in joins and how == "done" and event.token not in stopped:
                    inputs = sorted([*taken.pop((scope, node), []), edge])
                    if event.token not in resting:
                        yield f"token {event.token} has passed the join {node} without waiting there"
                    elif inputs != joins[node]:
                        yield f"the join {node} let token {event.token} go for {inputs}, not for {joins[node]}"
                resting.discard(event.token)
                stopped.discard(event.token)
                if kind is e.TokenMoved:
                    at[event.token] = (scope, event.node, event.came_by)
        if taken:
            yield f"tokens were taken at {sorted(taken)}, and no join fired there"
    yield from _arrivals(subject.instance, joins, resting)


def _arrivals(instance: Instance, joins: dict[str, list[str]], resting: set[int]) -> Iterator[str]:
    arrived: dict[tuple[int, str], dict[str, list[int]]] = {}
    for token in instance.tokens.values():
        if token.id in resting:
            arrived.setdefault((token.scope, token.node), {}).setdefault(token.came_by, []).append(token.id)
    if arrived != {
        place: {edge: sorted(ids) for edge, ids in edges.items()} for place, edges in instance.arrived.items()
    }:
        yield f"its joins are at {instance.arrived}, not at {arrived}"
    for (scope, node), edges in arrived.items():
        if sorted(edges) == joins.get(node):
            yield f"the join {node} in scope {scope} has all its inputs and has not fired"


@_invariant(
    "I14", "every resting token has a live cause, its waits are one group, and every scope has something to come"
)
def _causes(subject: Subject) -> Iterator[str]:
    instance, graph = subject.instance, subject.graph
    hosts = {scope.host for scope in instance.scopes.values() if scope.id != ROOT}
    waits: dict[int, set[int]] = {}
    for wait in instance.waits.values():
        waits.setdefault(wait.token, set()).add(wait.group)
        token = instance.tokens.get(wait.token)
        if token is None or (token.scope, token.node) != (wait.scope, wait.node):
            yield f"wait {wait.id} is of token {wait.token}, which is not there"
    stopped = {incident.token for incident in instance.incidents.values()}
    for token in instance.tokens.values():
        at_join = graph[token.node].rules.name == "join" and token.id not in stopped
        causes = [name for name, is_one in (
            ("wait", token.id in waits),
            ("incident", token.id in stopped),
            ("join", at_join and token.status is TokenStatus.WAITING),
            ("inner scope", token.id in hosts),
        ) if is_one]  # fmt: skip
        yield from _cause(token, causes, waits.get(token.id, set()))
    for owner in stopped | hosts:
        if owner not in instance.tokens:
            yield f"token {owner} has an incident or a scope, but does not live"
    yield from _scopes_go_on(instance)


def _cause(token: Token, causes: list[str], groups: set[int]) -> Iterator[str]:
    if token.status is TokenStatus.WAITING and len(causes) != 1:
        yield f"token {token.id} waits at {token.node} for {' and '.join(causes) or 'nothing'}"
    elif token.status in MOVING and causes:
        yield f"token {token.id} is {token.status.value} at {token.node}, yet has {' and '.join(causes)}"
    elif token.status not in (*MOVING, TokenStatus.WAITING):
        yield f"token {token.id} lives, but is {token.status.value}"
    if len(groups) > 1:
        yield f"token {token.id} has waits of the groups {sorted(groups)}"
    if token.status is TokenStatus.EXECUTING and not (token.task and token.attempt):
        yield f"token {token.id} executes at {token.node} without a task"


def _scopes_go_on(instance: Instance) -> Iterator[str]:
    """A scope is settled when the last token that it waits for is gone; one that was not would stand still for ever."""
    if not instance.exists or instance.is_ended or instance.status is Status.PAUSED:
        return
    own = Counter(token.scope for token in instance.tokens.values())
    living, inner = Counter(own), Counter[int]()
    for scope in sorted(instance.scopes.values(), key=lambda s: -s.id):  # A child's id is higher than its parent's.
        if scope.status is ScopeStatus.OPEN and own[scope.id] == 0:
            yield f"scope {scope.id} is open, but nothing lives in it"
        elif scope.status is ScopeStatus.FAILING and living[scope.id] <= inner[scope.id]:
            yield f"scope {scope.id} is failing, but nothing is awaited in it"
        elif scope.status is ScopeStatus.COMPENSATING and own[scope.id] != 1:
            yield f"scope {scope.id} is compensating with {own[scope.id]} tokens in it"
        if scope.id != ROOT:
            living[scope.parent] += living[scope.id]
            inner[scope.parent] += inner[scope.id] + 1


# --- commits and ids --------------------------------------------------------------------------------------------------


@_invariant("I2", "each transition is committed once: numbers are dense, and a command's key appears at most once")
def _once(subject: Subject) -> Iterator[str]:
    numbers = [mark.n for mark in subject.marks]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"its commits are numbered {_short(numbers)}"
    if subject.version is not None and subject.version != len(numbers):
        yield f"it is at version {subject.version}, but has {len(numbers)} commits"
    used: dict[str, int] = {}
    for entry in subject.history:
        if not entry.events:
            yield f"an entry ({entry.cause}) has no events"
        if entry.key:
            before_ms = used.get(entry.key)
            if before_ms is not None and entry.at_ms - before_ms < subject.answers_kept_ms:
                yield f"the key {entry.key!r} was used twice ({entry.cause})"
            used[entry.key] = entry.at_ms


@_invariant("I9", "versions, epochs and ids never go back")
def _forward(subject: Subject) -> Iterator[str]:
    for before, after in zip(subject.marks, subject.marks[1:], strict=False):
        if after.n <= before.n or after.epoch < before.epoch:
            yield f"commit {before.n} of epoch {before.epoch} is followed by {after.n} of epoch {after.epoch}"
    last = 0
    for event in subject.events():
        field = _GIVES_ID.get(type(event))
        if field is None:
            continue
        given = getattr(event, field)
        if given <= last:
            yield f"{type(event).__name__} gives the id {given} after {last}"
        last = max(last, given)
    if last != subject.instance.serial:
        yield f"the last id given is {last}, but its counter stands at {subject.instance.serial}"


_GIVES_ID: Final[dict[type[e.Event], str]] = {
    e.TokenCreated: "token",
    e.TaskOpened: "task",
    e.WaitOpened: "wait",
    e.MessageBuffered: "message",
    e.ScopeOpened: "scope",
    e.UndoRecorded: "undo",
    e.IncidentRaised: "incident",
}


@_invariant("I11", "the history leads to the stored state")
def _folds(subject: Subject) -> Iterator[str]:
    stored, told = facts(subject.instance), facts(fold(subject.history))
    for name in stored:
        if stored[name] != told[name]:
            yield f"{name} is {_short(stored[name])}, but its history leads to {_short(told[name])}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# --- attempts ---------------------------------------------------------------------------------------------------------


@_invariant("I3", "a result is that of an attempt which an earlier commit has ordered")
def _orders(subject: Subject) -> Iterator[str]:
    ordered: dict[int, tuple[int, int]] = {}  # Token to its attempt, and to the commit that has ordered it.
    for number, events in subject.commits():
        for event in events:
            kind = type(event)
            if kind not in _ATTEMPTS:
                continue
            if kind is e.TaskOpened:
                ordered[event.token] = (1, number)
            elif kind is e.AttemptStarted:
                ordered[event.token] = (event.attempt, number)
            elif kind is e.AttemptLost:
                ordered[event.token] = (event.attempt + 1, number)
            elif kind is e.AttemptFailed or not event.skipped:
                attempt, by = ordered.get(event.token, (0, 0))
                if attempt != event.attempt:
                    yield f"token {event.token} has a result of attempt {event.attempt}, which was not ordered"
                elif by == number:
                    yield f"token {event.token} has a result of attempt {attempt} in commit {by}, which has ordered it"


class _Tries:
    """The books of one step's attempts."""

    def __init__(self, retry: Backoff) -> None:
        self.retry = retry
        self.tries = 1
        self.lost = 0
        self.is_final = False  # The last failure was one after which the policy allows no further attempt.


@_invariant("I15", "nothing is tried for ever: what the retry policy gives up, and what is lost again and again, stops")
def _patience(subject: Subject) -> Iterator[str]:
    at: dict[int, tuple[str, Mode]] = {}
    steps: dict[int, _Tries] = {}
    if not any(type(event) in _TROUBLES for event in subject.events()):
        return
    for _, events in subject.turns():
        lost: dict[int, int] = {}  # Tokens that have just lost one too many.
        for event in events:
            kind = type(event)
            if kind is e.TokenCreated:
                at[event.token] = (event.node, event.mode)
            elif kind is e.TokenMoved:
                at[event.token] = (event.node, at[event.token][1])
            elif kind is e.TaskOpened:
                steps[event.token] = _Tries(_policy(subject.graph, *at[event.token]))
            elif kind is e.AttemptLost:
                step = steps[event.token]
                step.lost += 1
                if step.lost >= LOST_LIMIT:
                    lost[event.token] = step.lost
            elif kind is e.AttemptFailed:
                step = steps[event.token]
                step.lost = 0
                step.is_final = step.tries >= step.retry.attempts or any(t in step.retry.never for t in event.types)
            elif kind is e.AttemptStarted:
                yield from _tried_again(steps[event.token], event)
            elif kind is e.IncidentRaised:
                lost.pop(event.token, None)
        for token, count in lost.items():
            yield f"token {token} has lost {count} attempts in a row and goes on without an incident"


_ATTEMPTS: Final = frozenset({e.TaskOpened, e.AttemptStarted, e.AttemptLost, e.AttemptFailed, e.TaskCompleted})
_TROUBLES: Final = frozenset({e.AttemptFailed, e.AttemptLost, e.AttemptStarted})


def _policy(graph: Graph, node: str, mode: Mode) -> Backoff:
    task: Any = graph[node].node
    retry: Backoff = task.undo.retry if mode is Mode.COMPENSATION else task.retry
    return retry


def _tried_again(step: _Tries, event: e.AttemptStarted) -> Iterator[str]:
    if event.renewed:
        step.tries, step.lost = 1, 0
    elif not step.lost:  # Else it was lost, not failed, and its successor had to wait for the end of a pause.
        if step.is_final:
            yield f"token {event.token} got attempt {event.attempt}, after {step.tries} of {step.retry.attempts} tries"
        step.tries += 1
    step.is_final = False


# --- compensation -----------------------------------------------------------------------------------------------------


class _Undos:
    """The books of compensation: which scopes there are, and what each would have to take back, oldest first."""

    def __init__(self) -> None:
        self.scopes: dict[int, e.ScopeOpened] = {}
        self.failing: set[int] = set()
        self.compensating: set[int] = set()
        self.pending: dict[int, list[int]] = {}
        self.scope_of: dict[int, int] = {}
        self.started: dict[int, int] = {}  # Scope to its running undo.
        self.at: dict[int, tuple[int, str, Mode]] = {}
        self.task_of: dict[int, int] = {}
        self.executing: set[int] = set()

    def saga(self, scope: int) -> int | None:
        return next((s for s in self.around(scope) if self.scopes[s].kind is ScopeKind.SAGA), None)

    def around(self, scope: int) -> Iterator[int]:
        """The scope and those around it, without the root."""
        while scope in self.scopes:
            yield scope
            scope = self.scopes[scope].parent

    def is_failing(self, scope: int) -> bool:
        return not self.failing.isdisjoint(self.around(scope))

    def add(self, scope: int, undos: list[int]) -> None:
        pending = self.pending.setdefault(scope, [])
        is_sorted = not (pending and undos) or pending[-1] < undos[0]
        pending.extend(undos)
        if not is_sorted:
            pending.sort()
        self.scope_of.update(dict.fromkeys(undos, scope))


@_invariant("I5", "compensation runs exactly the completed compensable steps, in reverse order of completion")
def _compensation(subject: Subject) -> Iterator[str]:
    books = _Undos()
    for _, events in subject.turns():
        owed: list[tuple[int, str, int]] = []  # Completed in this entry: scope, node, task.
        ends = any(type(event) is e.InstanceEnded for event in events)
        for event in events:
            kind = type(event)
            if kind is e.TaskCompleted:
                scope, node, mode = books.at[event.token]
                saga = books.saga(scope)
                can_be_undone = mode is Mode.FORWARD and subject.graph[node].node.undo is not None
                if saga is not None and can_be_undone and not event.skipped:
                    owed.append((saga, node, books.task_of[event.token]))
            elif kind is e.UndoRecorded:
                if (event.scope, event.node, event.task) in owed:
                    owed.remove((event.scope, event.node, event.task))
                else:
                    yield f"undo {event.undo} of {event.node} was recorded without a success"
                books.add(event.scope, [event.undo])
            else:
                yield from _undoing(books, subject.graph, event, ends=ends)
        if owed:
            yield f"{', '.join(node for _, node, _ in owed)}: done, but no undo was recorded"
    kept = {} if subject.instance.is_ended else books.scope_of
    stored = {undo.id: undo.scope for undo in subject.instance.undos.values()}
    if stored != kept:
        yield f"its undos are {_pairs(stored)}, but by its events {_pairs(kept)}"


def _undoing(books: _Undos, graph: Graph, event: Any, *, ends: bool) -> Iterator[str]:
    kind = type(event)
    if kind is e.TokenCreated:
        books.at[event.token] = (event.scope, event.node, event.mode)
    elif kind is e.TokenMoved:
        scope, _node, mode = books.at[event.token]
        books.at[event.token] = (scope, event.node, mode)
        yield from _must_not_begin(books, event)
    elif kind is e.TokenEnded:
        scope, node, mode = books.at.pop(event.token)
        is_awaited = event.token in books.executing and mode is Mode.FORWARD and graph[node].node.undo is not None
        if is_awaited and event.how == "terminated" and books.is_failing(scope) and not ends:
            yield f"token {event.token} was ended at {node}, where an attempt may yet succeed and had to be undone"
    elif kind is e.TaskOpened:
        books.task_of[event.token] = event.task
        yield from _must_not_begin(books, event)
    elif kind is e.ScopeOpened:
        books.scopes[event.scope] = event
    elif kind is e.ScopeFailing:
        books.failing.add(event.scope)
    elif kind is e.ScopeCompensating:
        busy = sorted(token for token, (scope, _, _) in books.at.items() if event.scope in books.around(scope))
        if busy:
            yield f"scope {event.scope} is taken back while tokens {busy} live in it"
        books.compensating.add(event.scope)
    elif kind is e.UndoStarted:
        yield from _undo_started(books, event.undo)
    elif kind is e.UndoFinished:
        scope = books.scope_of.pop(event.undo)
        if books.started.pop(scope, None) != event.undo and event.how != "given up":
            yield f"undo {event.undo} was finished without being started"
        books.pending[scope].remove(event.undo)
    elif kind is e.ScopeClosed:
        yield from _scope_closed(books, event, ends=ends)
    if kind in _EXECUTES:
        books.executing.add(event.token)
    elif kind in _STOPS:
        books.executing.discard(event.token)


_EXECUTES: Final = frozenset({e.TaskOpened, e.AttemptStarted, e.AttemptLost})
_STOPS: Final = frozenset({e.AttemptFailed, e.IncidentRaised, e.WaitOpened, e.TokenMoved, e.TokenEnded})


def _must_not_begin(books: _Undos, event: Any) -> Iterator[str]:
    scope, node, mode = books.at[event.token]
    if mode is Mode.FORWARD and books.is_failing(scope):
        yield f"token {event.token} went on to {node}, in a saga that fails"


def _undo_started(books: _Undos, undo: int) -> Iterator[str]:
    scope = books.scope_of[undo]
    if scope not in books.compensating:
        yield f"undo {undo} was started, but scope {scope} is not compensating"
    if scope in books.started:
        yield f"undo {undo} was started while undo {books.started[scope]} of scope {scope} runs"
    if books.pending[scope][-1] != undo:
        yield f"undo {undo} was started before {books.pending[scope][-1]}, whose step was done later"
    books.started[scope] = undo


def _scope_closed(books: _Undos, event: e.ScopeClosed, *, ends: bool) -> Iterator[str]:
    parent = books.scopes.pop(event.scope).parent
    books.compensating.discard(event.scope)
    books.started.pop(event.scope, None)
    left = books.pending.pop(event.scope, [])
    for undo in left:
        del books.scope_of[undo]
    if event.heir is not None:
        books.add(event.heir, left)
    elif left and event.how == "undone":
        yield f"scope {event.scope} was closed as undone, but undos {left} are left"
    elif left and books.saga(parent) is not None and not ends:
        yield f"scope {event.scope} was closed inside a saga, and its undos {left} are lost"


# --- waits ------------------------------------------------------------------------------------------------------------


@_invariant("I6", "no timer fires early, twice or after a cancel, and no message is used after its time to live")
def _timers(subject: Subject) -> Iterator[str]:
    of_token: dict[int, dict[int, e.WaitOpened]] = {}
    owner: dict[int, int] = {}
    expires_ms: dict[int, int | None] = {}
    undoing: set[int] = set()  # Tokens that take something back: a cancel does not stop them.
    cancelled: set[int] = set()  # Waits that a cancel has to end.
    for entry, events in subject.turns():
        for event in events:
            kind = type(event)
            if kind is e.TokenCreated:
                if event.mode is Mode.COMPENSATION:
                    undoing.add(event.token)
            elif kind is e.EndingBegun:
                if event.outcome is Outcome.CANCELLED:
                    cancelled.update(w for token, waits in of_token.items() if token not in undoing for w in waits)
            elif kind is e.WaitOpened:
                of_token.setdefault(event.token, {})[event.wait] = event
                owner[event.wait] = event.token
            elif kind is e.WaitConsumed:
                wait = of_token.pop(owner.get(event.wait, 0), {}).get(event.wait)
                if wait is None:
                    yield f"wait {event.wait} was consumed, but was not open"
                elif wait.due_ms is not None and wait.due_ms > entry.at_ms:
                    yield f"wait {event.wait} fired at {entry.at_ms}, {wait.due_ms - entry.at_ms} ms early"
                if event.wait in cancelled:
                    yield f"wait {event.wait} was consumed after its instance had been cancelled"
            elif kind is e.TokenMoved or kind is e.TaskOpened or kind is e.AttemptStarted:
                if event.token in of_token:
                    yield f"token {event.token} went on although none of its waits was consumed"
            elif kind is e.TokenEnded:
                of_token.pop(event.token, None)
            elif kind is e.MessageBuffered:
                expires_ms[event.message] = event.expires_ms
            elif kind is e.MessageTaken:
                until_ms = expires_ms.pop(event.message)
                if event.expired != (until_ms is not None and until_ms <= entry.at_ms):
                    yield f"message {event.message} was taken at {entry.at_ms}, and was good until {until_ms}"
    told = {wait for waits in of_token.values() for wait in waits}
    if told != set(subject.instance.waits):
        yield f"waits {sorted(subject.instance.waits)} are open, but by its events {sorted(told)}"


@_invariant("I8", "no message that was sent to it lies unused while something waits for it")
def _unused(subject: Subject) -> Iterator[str]:
    lasting = [message for message in subject.instance.buffer.values() if message.expires_ms is None]
    for wait in subject.instance.waits.values() if lasting else ():
        for message in lasting:
            if wait.kind == "message" and wait.name == message.name and message.key in ("", wait.key):
                yield f"message {message.id} ({message.name}) lies unused while wait {wait.id} waits for it"


# --- states -----------------------------------------------------------------------------------------------------------


@_invariant("S1", "status, outcome and scopes agree")
def _agreement(subject: Subject) -> Iterator[str]:
    instance = subject.instance
    is_failing = any(scope.status is not ScopeStatus.OPEN for scope in instance.scopes.values())
    rests_as = instance.resting if instance.status is Status.PAUSED else instance.status
    if instance.is_ended != (instance.outcome is not None) or instance.is_ended != (instance.ended_ms is not None):
        yield f"it is {instance.status.value} with the outcome {instance.outcome}, ended at {instance.ended_ms}"
    if (instance.status is Status.PAUSED) != (instance.resting is not Status.PENDING):
        yield f"it is {instance.status.value}, and was {instance.resting.value} before it was paused"
    if rests_as is Status.RUNNING and (instance.ending or is_failing):
        yield f"it is running, although it is going to end as {instance.ending} or a saga of it fails"
    if rests_as is Status.COMPENSATING and not (instance.ending is Outcome.FAILED or is_failing):
        yield "it is compensating, but nothing in it fails"
    if (rests_as is Status.CANCELLING) != (instance.ending is Outcome.CANCELLED):
        yield f"it is {rests_as.value} and going to end as {instance.ending}"
    if instance.is_ended:
        left = [name for name, rows in instance.tables().items() if rows and name not in ("variable", "scope")]
        if left or set(instance.scopes) != {ROOT} or instance.ending:
            yield f"it has ended, but still has {', '.join(left) or 'open scopes'}"
    yield from _outcome(subject)


def _outcome(subject: Subject) -> Iterator[str]:
    begun: Outcome | None = None
    fails = False
    ended: Outcome | None = None
    for event in subject.events():
        if ended is not None:
            yield f"{type(event).__name__} stands behind its end"
            return
        kind = type(event)
        if kind is e.EndingBegun:
            begun = event.outcome
        elif kind is e.ScopeFailing:
            fails = True
        elif kind is e.InstanceEnded:
            ended = event.outcome
            due = {begun} if begun else {Outcome.COMPLETED, Outcome.TERMINATED}
            if ended not in due:
                yield f"it ended as {ended.value}, not as {' or '.join(sorted(outcome.value for outcome in due))}"
            elif fails and begun is None:
                yield f"it ended as {ended.value}, although a saga of it has failed"
    if ended is not subject.instance.outcome:
        yield f"its outcome is {subject.instance.outcome}, but by its events {ended}"


# What an event makes of its token. A completed task's token is moved or ended by the next event.
_MAKES: Final[dict[type[e.Event], TokenStatus]] = {
    e.TokenCreated: TokenStatus.READY,
    e.TokenMoved: TokenStatus.READY,
    e.TokenRested: TokenStatus.WAITING,
    e.TokenEnded: TokenStatus.COMPLETED,
    e.TaskOpened: TokenStatus.EXECUTING,
    e.AttemptStarted: TokenStatus.EXECUTING,
    e.AttemptLost: TokenStatus.EXECUTING,
    e.AttemptFailed: TokenStatus.WAITING,
    e.WaitOpened: TokenStatus.WAITING,
    e.IncidentRaised: TokenStatus.WAITING,
}
# From which states each of them may come; a tuple, because a state is found in it without its slow hash.
_FITS: Final[dict[type[e.Event], tuple[TokenStatus, ...]]] = {
    kind: tuple(status for status in TokenStatus if after in TOKEN_TRANSITIONS[status])
    for kind, after in _MAKES.items()
}
_RESULTS: Final = (e.AttemptLost, e.AttemptFailed, e.TaskCompleted)
_BEGINNINGS: Final = frozenset({e.TaskOpened, e.AttemptStarted, e.ScopeCompensating, e.UndoStarted})
_LIVES: Final = frozenset({*_MAKES, *_RESULTS})
_TURNS: Final = frozenset(
    {e.InstanceStarted, e.InstancePaused, e.InstanceResumed, e.InstanceEnded, e.EndingBegun, e.ScopeFailing}
)
_NEW: Final = (TokenStatus.CREATED, 0)


@_invariant("S2", "only listed transitions happen, attempts count up, and nothing begins while it is paused")
def _transitions(subject: Subject) -> Iterator[str]:
    lives: dict[int, tuple[TokenStatus, int]] = {}  # Status and attempt.
    status = resting = Status.PENDING
    for event in subject.events():
        kind = type(event)
        if kind in _TURNS:
            before = status
            status, resting = _status_after(status, resting, event)
            if status is not before and status not in INSTANCE_TRANSITIONS[before]:
                yield f"{kind.__name__} made it {status.value} when it was {before.value}"
        elif status is Status.PAUSED and kind in _BEGINNINGS:
            yield f"{kind.__name__} happened while it was paused"
        if kind in _LIVES:
            yield from _token_life(lives, event)
    if status is not subject.instance.status:
        yield f"it is {subject.instance.status.value}, but by its events {status.value}"
    stored = {token.id: (token.status, token.attempt) for token in subject.instance.tokens.values()}
    if stored != lives:
        yield f"its tokens are {_short(stored)}, but by its events {_short(lives)}"


def _status_after(status: Status, resting: Status, event: Any) -> tuple[Status, Status]:
    """The status, and the one that a resume would bring back."""
    kind = type(event)
    if kind is e.InstanceStarted:
        return Status.RUNNING, Status.PENDING
    if kind is e.InstancePaused:
        return Status.PAUSED, status
    if kind is e.InstanceResumed:
        return resting, Status.PENDING
    if kind is e.InstanceEnded:
        return Status.ENDED, Status.PENDING
    if kind is e.EndingBegun and event.outcome is Outcome.CANCELLED:
        return Status.CANCELLING, Status.PENDING
    if kind is e.EndingBegun or kind is e.ScopeFailing:
        if status is Status.PAUSED:
            return status, Status.COMPENSATING
        return (Status.COMPENSATING if status is Status.RUNNING else status), Status.PENDING
    return status, resting


def _token_life(lives: dict[int, tuple[TokenStatus, int]], event: Any) -> Iterator[str]:
    kind = type(event)
    token = event.token
    status, attempt = lives.get(token, _NEW)
    if kind in _RESULTS and (event.attempt != attempt or not (status is TokenStatus.EXECUTING or _is_skip(event))):
        words = f"is about attempt {event.attempt}, when it was {status.value} in {attempt}"
        yield f"{kind.__name__} of token {token} {words}"
    if kind is e.AttemptStarted and event.attempt != attempt + 1:
        yield f"{kind.__name__} of token {token} gives it attempt {event.attempt} after {attempt}"
    after = _MAKES.get(kind)
    if after is None:
        return
    if status not in _FITS[kind] and not (status is TokenStatus.CREATED and kind is e.TokenCreated):
        yield f"{kind.__name__} of token {token} made it {after.value} when it was {status.value}"
    if kind is e.TokenEnded:
        lives.pop(token, None)
    elif kind in (e.TokenCreated, e.TokenMoved):
        lives[token] = (after, 0)
    elif kind in (e.TaskOpened, e.AttemptStarted, e.AttemptLost):
        lives[token] = (after, 1 if kind is e.TaskOpened else attempt + 1)
    else:
        lives[token] = (after, attempt)


def _is_skip(event: Any) -> bool:
    return type(event) is e.TaskCompleted and event.skipped
