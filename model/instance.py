"""What one instance is at a moment: its rows, and what can be derived from them.

An `Instance` is changed only by `apply`, in place: it belongs to exactly one actor, a refused command never touches
it, and after a failed commit it is thrown away and read anew. Copying it for each step would cost its whole size each
time. `Rows` remember what changed since the last commit, so that the store writes just that. Nothing here knows a
clock, a database or a thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from understudy.model.states import MOVING, Mode, Outcome, ScopeKind, ScopeStatus, Status, TokenStatus

ROOT = 0  # The id of the root scope.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One thread of control. The same token goes along a sequence; forks make new ones and joins consume them."""

    id: int
    scope: int
    node: str
    came_by: str = ""  # The edge; empty for the first token of a scope.
    status: TokenStatus = TokenStatus.CREATED
    mode: Mode = Mode.FORWARD
    attempt: int = 0
    task: int = 0  # The number of the task's opening: with the instance's id it is the handler's key.
    lost: int = 0  # Attempts lost in a row to crashes.
    tries: int = 0  # Attempts that count against the retry policy.
    undo: int = 0  # In compensation mode: which undo it carries out.
    since_ms: int = 0


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """A part of the token tree: the root, or a saga that is undone as a whole."""

    id: int
    parent: int
    node: str
    kind: ScopeKind
    status: ScopeStatus = ScopeStatus.OPEN
    host: int = 0  # The token of the parent scope that waits for this one.
    error: str = ""  # Encoded `Fault`, once it fails.


class Variable(msgspec.Struct, frozen=True, array_like=True):
    """A named value of a scope, as JSON text: memory equals disk, and nobody shares a mutable dict with us."""

    scope: int
    name: str
    value: str


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """What may wake a token. Waits of one group are alternatives: exactly one of them is consumed."""

    id: int
    group: int
    scope: int
    token: int
    node: str
    kind: str  # "timer", "message" or "retry"
    name: str = ""
    key: str = ""
    due_ms: int | None = None
    since_ms: int = 0


class Undo(msgspec.Struct, frozen=True, array_like=True):
    """How to take back one step that succeeded; written with its success, used in reverse order of `id`."""

    id: int
    scope: int
    node: str
    task: int
    given: str  # Encoded mapping: what the step saw and gave.
    running: int = 0


class Incident(msgspec.Struct, frozen=True, array_like=True):
    """A token that only an operator can move: retry, skip or fail it."""

    id: int
    token: int
    node: str
    code: str
    detail: str
    since_ms: int


class Buffered(msgspec.Struct, frozen=True, array_like=True):
    """A message sent to this instance before anything waited for it."""

    id: int
    name: str
    key: str
    payload: str
    expires_ms: int | None = None


class Thrown(msgspec.Struct, frozen=True, array_like=True):
    """A message that leaves with the commit; the writer publishes it in the same transaction."""

    name: str
    key: str
    payload: str
    expires_ms: int | None = None


class Fault(msgspec.Struct, frozen=True):
    """Why something did not work, in words that survive the process that met it."""

    code: str
    message: str
    node: str = ""
    types: tuple[str, ...] = ()  # The exception's classes, most special first, as "module:Name".
    trace: str = ""


class Rows(dict[K, V], Generic[K, V]):
    """A table of the instance that remembers what each changed row was at the last commit."""

    __slots__ = ("changed",)

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[K, V | None] = {}

    def put(self, key: K, value: V) -> None:
        if key not in self.changed:
            self.changed[key] = self.get(key)
        self[key] = value

    def drop(self, key: K) -> V:
        if key not in self.changed:
            self.changed[key] = self[key]
        return self.pop(key)

    def settle(self) -> None:
        """Forget what changed: it is durable now."""
        self.changed.clear()


class Instance(msgspec.Struct):
    """The whole state of one process instance.

    `version` counts its commits and is the compare-and-set of all its rows.
    """

    id: str = ""
    process: str = ""
    process_version: int = 0
    definition: int = 0  # The number of the definition's row.
    given_digest: str = ""
    status: Status = Status.PENDING
    outcome: Outcome | None = None
    ending: Outcome | None = None  # What it will end as, while it compensates or cancels.
    resting: Status = Status.PENDING  # What it was before it was paused.
    serial: int = 0  # The last id given to a token, scope, wait, task, undo, incident or message.
    title: str = ""
    tags: dict[str, str] = {}
    trigger: str = ""
    by: str = ""
    caused_by: str = ""
    created_ms: int = 0
    changed_ms: int = 0
    ended_ms: int | None = None
    error: str = ""  # Encoded `Fault`.
    result: str = ""  # Encoded value.

    tokens: Rows[int, Token] = msgspec.field(default_factory=Rows)
    scopes: Rows[int, Scope] = msgspec.field(default_factory=Rows)
    variables: Rows[tuple[int, str], Variable] = msgspec.field(default_factory=Rows)
    waits: Rows[int, Wait] = msgspec.field(default_factory=Rows)
    undos: Rows[int, Undo] = msgspec.field(default_factory=Rows)
    incidents: Rows[int, Incident] = msgspec.field(default_factory=Rows)
    buffer: Rows[int, Buffered] = msgspec.field(default_factory=Rows)

    # What leaves with the next commit, beside the rows.
    thrown: list[Thrown] = []
    consumed: list[int] = []  # Numbers of published messages that this instance has taken.
    taken_work: list[int] = []  # Openings of transactional tasks whose recorded results were used.

    # Derived from the rows, never stored.
    moving: int = 0  # Tokens that are ready or executing.
    population: dict[int, int] = {}  # Live tokens for each scope.
    arrived: dict[tuple[int, str], dict[str, list[int]]] = {}  # Joins: token ids by (scope, node), then by edge.
    waits_of: dict[int, list[int]] = {}  # Wait ids for each token.
    incident_of: dict[int, int] = {}  # The open incident of a token.

    @property
    def is_ended(self) -> bool:
        return self.status is Status.ENDED

    @property
    def exists(self) -> bool:
        return self.status is not Status.PENDING

    @property
    def is_runnable(self) -> bool:
        """Whether it moves by itself after a restart."""
        return self.moving > 0 and self.status is not Status.PAUSED

    # --- tokens ---

    def put_token(self, token: Token) -> None:
        before = self.tokens.get(token.id)
        if before is None:
            self.population[token.scope] = self.population.get(token.scope, 0) + 1
        elif before.status in MOVING:
            self.moving -= 1
        if token.status in MOVING:
            self.moving += 1
        self.tokens.put(token.id, token)

    def drop_token(self, token: int) -> Token:
        gone = self.tokens.drop(token)
        self.population[gone.scope] -= 1
        if gone.status in MOVING:
            self.moving -= 1
        return gone

    def rest_at_join(self, token: Token) -> None:
        edges = self.arrived.setdefault((token.scope, token.node), {})
        edges.setdefault(token.came_by, []).append(token.id)

    def leave_join(self, token: Token) -> None:
        place = (token.scope, token.node)
        edges = self.arrived.get(place)
        if edges is None or token.id not in edges.get(token.came_by, ()):
            return
        edges[token.came_by].remove(token.id)
        if not edges[token.came_by]:
            del edges[token.came_by]
        if not edges:
            del self.arrived[place]

    # --- waits and incidents ---

    def put_wait(self, wait: Wait) -> None:
        self.waits.put(wait.id, wait)
        self.waits_of.setdefault(wait.token, []).append(wait.id)

    def drop_waits(self, token: int) -> None:
        for wait in self.waits_of.pop(token, ()):
            self.waits.drop(wait)

    def put_incident(self, incident: Incident) -> None:
        self.incidents.put(incident.id, incident)
        self.incident_of[incident.token] = incident.id

    def drop_incident(self, incident: int) -> None:
        gone = self.incidents.drop(incident)
        self.incident_of.pop(gone.token, None)

    # --- scopes and variables ---

    def chain(self, scope: int) -> Iterator[Scope]:
        """The scope and those around it, from the inside out."""
        while True:
            here = self.scopes[scope]
            yield here
            if here.id == ROOT:
                return
            scope = here.parent

    def within(self, scope: int) -> set[int]:
        """The scope and all scopes inside it."""
        inside = {scope}
        for candidate in sorted(self.scopes):  # A child's id is higher than its parent's.
            if candidate != ROOT and self.scopes[candidate].parent in inside:
                inside.add(candidate)
        return inside

    def home(self, scope: int) -> int:
        """The scope that owns variables for whoever writes in `scope`."""
        return next(s.id for s in self.chain(scope) if s.kind is ScopeKind.ROOT)

    def lookup(self, scope: int, name: str) -> str | None:
        """The encoded value that `name` has for whoever reads in `scope`."""
        for here in self.chain(scope):
            found = self.variables.get((here.id, name))
            if found is not None:
                return found.value
        return None

    def visible(self, scope: int) -> dict[str, str]:
        """All variables as seen from `scope`, encoded."""
        seen: dict[str, str] = {}
        chain = {s.id: depth for depth, s in enumerate(self.chain(scope))}
        for (owner, name), variable in sorted(self.variables.items(), key=lambda item: -chain.get(item[0][0], -1)):
            if owner in chain:
                seen[name] = variable.value
        return seen

    # --- commits ---

    def tables(self) -> dict[str, Rows[Any, Any]]:
        """The rows by the name of their table; the order is the order in which they are written."""
        return {
            "scope": self.scopes,
            "token": self.tokens,
            "variable": self.variables,
            "wait": self.waits,
            "undo": self.undos,
            "incident": self.incidents,
            "buffered": self.buffer,
        }

    def settle(self) -> None:
        """Forget what was to be written: it is durable now."""
        for rows in self.tables().values():
            rows.settle()
        self.thrown.clear()
        self.consumed.clear()
        self.taken_work.clear()


_FACTS = (
    "id",
    "process",
    "process_version",
    "definition",
    "given_digest",
    "status",
    "outcome",
    "ending",
    "resting",
    "serial",
    "title",
    "tags",
    "trigger",
    "by",
    "caused_by",
    "created_ms",
    "changed_ms",
    "ended_ms",
    "error",
    "result",
)


def facts(instance: Instance) -> dict[str, object]:
    """All that is stored of an instance, comparable: two are the same if and only if their facts are."""
    plain = {name: getattr(instance, name) for name in _FACTS}
    return {**plain, **{name: dict(rows) for name, rows in instance.tables().items()}}
