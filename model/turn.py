"""One command's work on an instance: the moves that the rules of the node kinds are made of.

A turn emits events, and each is applied at once, so that the next rule sees what the last one did. It never refuses
after its first event: refusals come before, in `decide`. Tokens that arrive are entered in a loop, not by recursion,
and a loop that never rests is stopped as an incident.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from understudy.model import effects as fx
from understudy.model import events as e
from understudy.model.apply import apply, decode_fault
from understudy.model.definition import Edge, Graph, Place
from understudy.model.instance import ROOT, Buffered, Fault, Instance, Scope, Token
from understudy.model.states import Mode, Outcome, ScopeKind, ScopeStatus, Status, TokenStatus
from understudy.model.values import decode

MOST_MOVES = 10_000  # Moves in one turn without a rest: more is a loop that nothing in it can end.


class Turn:
    """The work of one command."""

    def __init__(self, instance: Instance, graph: Graph, at_ms: int, *, go_on: bool = True) -> None:
        self.instance = instance
        self.graph = graph
        self.at_ms = at_ms
        self.go_on = go_on  # Otherwise tokens stop where they arrive, and whoever owns the instance next enters them.
        self.events: list[e.AnyEvent] = []
        self.effects: list[fx.AnyEffect] = []
        self.resolution = "dropped"  # How an incident ends whose token moves on in this turn.
        self._ready: deque[int] = deque()
        self._scopes: dict[int, None] = {}  # Scopes to look at once the tokens rest; a dict keeps their order.

    def emit(self, event: e.AnyEvent) -> None:
        apply(self.instance, event, self.at_ms)
        self.events.append(event)

    def next_id(self) -> int:
        return self.instance.serial + 1

    @property
    def may_begin(self) -> bool:
        """Whether an attempt may begin in this turn."""
        return self.go_on and self.instance.status is not Status.PAUSED

    def run(self) -> None:
        """Let everything that can move come to rest.

        Scopes are settled even when tokens do not go on: a scope without tokens is nothing that recovery would find.
        """
        moves = 0
        while self.instance.status is not Status.PAUSED and ((self.go_on and self._ready) or self._scopes):
            if self.go_on and self._ready:
                token = self.instance.tokens.get(self._ready.popleft())
                if token is None or token.status is not TokenStatus.READY:
                    continue
                moves += 1
                if moves > MOST_MOVES:
                    self.incident(token, "runaway", f"{MOST_MOVES} moves without a rest: this loop has no way out")
                    continue
                place = self.graph[token.node]
                place.rules.enter(self, token, place)
            else:
                scope = next(iter(self._scopes))
                del self._scopes[scope]
                self._settle(scope)

    # --- tokens ---

    def spawn(self, scope: int, node: str, *, came_by: str = "") -> None:
        token = self.next_id()
        self.emit(e.TokenCreated(token, scope, node, came_by))
        self._ready.append(token)

    def move(self, token: Token, edge: Edge) -> None:
        self.emit(e.TokenMoved(token.id, edge.target, edge.id))
        self._ready.append(token.id)

    def leave(self, token: Token, place: Place) -> None:
        """Go on by the plain edge; a node without one ends its token."""
        if place.onward is None:
            self.end(token, "done")
        else:
            self.move(token, place.onward)

    def rest(self, token: Token, *, at_join: bool = False) -> None:
        self.emit(e.TokenRested(token.id, at_join))

    def end(self, token: Token, how: str) -> None:
        if how == "terminated" and token.status is TokenStatus.EXECUTING:
            self.effects.append(fx.CancelTask(token.id, token.task, token.attempt))
        incident = self.instance.incident_of.get(token.id)
        if incident is not None:
            self.emit(e.IncidentClosed(incident, self.resolution))
        self.emit(e.TokenEnded(token.id, how))
        for scope in self.instance.chain(token.scope):  # A failing scope waits for the tokens of the scopes inside it.
            self.look_at(scope.id)

    def stir(self) -> None:
        """Let everything go on that a pause or a crash has stopped."""
        self._ready += [token.id for token in self.instance.tokens.values() if token.status is TokenStatus.READY]
        for scope in self.instance.scopes:
            self.look_at(scope)
        for wait in self.instance.waits.values():
            if wait.due_ms is not None:
                self.effects.append(fx.ArmTimer(wait.id, wait.due_ms))

    def look_at(self, scope: int) -> None:
        self._scopes[scope] = None

    # --- waits ---

    def open_wait(
        self, token: Token, kind: str, *, name: str = "", key: str = "", due_ms: int | None = None, group: int = 0
    ) -> int:
        wait = self.next_id()
        self.emit(e.WaitOpened(wait, group or wait, token.id, kind, name, key, due_ms))
        if due_ms is not None:
            self.effects.append(fx.ArmTimer(wait, due_ms))
        return wait

    def take_buffered(self, name: str, key: str) -> Buffered | None:
        """The oldest message that was sent before this wait, if one fits and has not expired."""
        for message in list(self.instance.buffer.values()):
            if message.expires_ms is not None and message.expires_ms <= self.at_ms:
                self.emit(e.MessageTaken(message.id, expired=True))
            elif message.name == name and message.key in ("", key):
                self.emit(e.MessageTaken(message.id))
                return message
        return None

    def incident(self, token: Token, code: str, detail: str) -> None:
        self.emit(e.IncidentRaised(self.next_id(), token.id, code, detail))

    # --- variables ---

    def lookup(self, token: Token) -> Mapping[str, object]:
        return Variables(self.instance, token.scope)

    # --- failure, compensation, ends ---

    def saga_around(self, scope: int) -> Scope | None:
        return next((s for s in self.instance.chain(scope) if s.kind is ScopeKind.SAGA), None)

    def is_failing(self, scope: int) -> bool:
        """Whether nothing new may begin in the scope, because it or one around it is being taken back."""
        return any(s.status is not ScopeStatus.OPEN for s in self.instance.chain(scope))

    def fail(self, token: Token, fault: Fault, *, policy: str = "") -> None:
        """The step at the token has failed for good: undo the saga around it, or stop and ask an operator."""
        saga = self.saga_around(token.scope)
        if self.is_failing(token.scope):
            self.end(token, "failed")  # Nothing was done here, so nothing is to be undone.
        elif policy == "incident" or (saga is None and policy != "fail"):
            self.incident(token, fault.code, fault.message)
        elif saga is None:
            self.begin_ending(Outcome.FAILED, fault)
        else:
            self.begin_failing(saga, fault)

    def begin_failing(self, scope: Scope, fault: Fault) -> None:
        """Stop what is in the scope. Attempts that may yet succeed, and would then have to be undone, are awaited."""
        self.emit(e.ScopeFailing(scope.id, fault.code, fault.message, fault.node))
        inside = self.instance.within(scope.id)
        open_scopes = {s for s in inside if s == scope.id or self.instance.scopes[s].status is ScopeStatus.OPEN}
        hosts = {self.instance.scopes[s].host for s in inside if s != scope.id}
        for token in [t for t in self.instance.tokens.values() if t.scope in open_scopes and t.id not in hosts]:
            if token.status is TokenStatus.EXECUTING and self.graph[token.node].node.undo is not None:
                self.effects.append(fx.CancelTask(token.id, token.task, token.attempt))
            else:
                self.end(token, "terminated")
        self.look_at(scope.id)

    def begin_ending(self, outcome: Outcome, fault: Fault) -> None:
        """The instance's outcome is settled: stop everything, and undo what its sagas have done."""
        was_paused = self.instance.status is Status.PAUSED
        self.emit(e.EndingBegun(outcome, fault.code, fault.message, fault.node))
        outermost = [s for s in self.instance.scopes.values() if s.id != ROOT and s.parent == ROOT]
        hosts = {scope.host for scope in outermost}
        for token in [t for t in self.instance.tokens.values() if t.scope == ROOT and t.id not in hosts]:
            self.end(token, "terminated")
        for scope in outermost:
            if scope.status is ScopeStatus.OPEN:
                self.begin_failing(scope, fault)
        self.look_at(ROOT)
        if was_paused:
            self.stir()  # A cancel ends the pause, under which a saga may have begun to fail.

    def stop(self, scope: int, how: str) -> None:
        """End all that lives in the scope and inside it, undoing nothing. What was done stays on a saga's account."""
        inside = self.instance.within(scope)
        heir = None if scope == ROOT else scope
        for token in [t for t in self.instance.tokens.values() if t.scope in inside]:
            self.end(token, how)
        for inner in sorted(inside - {scope}, reverse=True):
            self.emit(e.ScopeClosed(inner, "terminated", heir))
            self._scopes.pop(inner, None)

    def terminate_scope(self, token: Token) -> None:
        """End everything in the token's scope. A saga in there that fails is not left half undone: it goes on to fail,
        and the scope with it."""
        self.end(token, "done")
        inside = self.instance.within(token.scope)
        if any(self.instance.scopes[inner].status is not ScopeStatus.OPEN for inner in inside):
            return
        self.stop(token.scope, "terminated")
        if token.scope == ROOT:
            self.finish(Outcome.TERMINATED)

    def finish(self, outcome: Outcome, *, error: str = "") -> None:
        result = ""
        if outcome in (Outcome.COMPLETED, Outcome.TERMINATED):
            gives = self.graph.definition.gives
            result = (self.instance.lookup(ROOT, gives) if gives else None) or "null"
        self.emit(e.InstanceEnded(outcome, result, error))
        self._scopes.clear()
        self._ready.clear()

    # --- scopes that have come to rest ---

    def _settle(self, scope_id: int) -> None:
        scope = self.instance.scopes.get(scope_id)
        if scope is None or self.instance.is_ended:
            return
        if scope.status is ScopeStatus.FAILING:
            self._compensate_when_still(scope)
        elif scope.status is ScopeStatus.COMPENSATING:
            self._undo_next(scope)
        elif self.instance.population.get(scope.id, 0) == 0:
            if scope.id == ROOT:
                self.finish(self.instance.ending or Outcome.COMPLETED, error=self.instance.error)
            else:
                self._close(scope)

    def _close(self, scope: Scope) -> None:
        host = self.instance.tokens[scope.host]
        heir = self.saga_around(scope.parent)
        self.emit(e.ScopeClosed(scope.id, "done", None if heir is None else heir.id))
        if self.is_failing(scope.parent):
            self.end(host, "done")
        else:
            self.leave(host, self.graph[host.node])

    def _compensate_when_still(self, scope: Scope) -> None:
        inner = self.instance.within(scope.id) - {scope.id}
        living = sum(self.instance.population.get(s, 0) for s in inner | {scope.id})
        if living > len(inner):  # Each inner scope has one host among them; whoever else lives is awaited.
            return
        for inside in sorted(inner, reverse=True):
            host = self.instance.tokens[self.instance.scopes[inside].host]
            self.emit(e.ScopeClosed(inside, "terminated", scope.id))
            self.emit(e.TokenEnded(host.id, "terminated"))
        self.emit(e.ScopeCompensating(scope.id))
        self._undo_next(self.instance.scopes[scope.id])

    def _undo_next(self, scope: Scope) -> None:
        pending = [undo for undo in self.instance.undos.values() if undo.scope == scope.id]
        if any(undo.running for undo in pending):
            return
        if not pending:
            self._undone(scope)
            return
        undo = max(pending, key=lambda u: u.id)
        self.emit(e.UndoStarted(undo.id))
        token = self.next_id()
        self.emit(e.TokenCreated(token, scope.id, undo.node, mode=Mode.COMPENSATION, undo=undo.id))
        self._ready.append(token)

    def _undone(self, scope: Scope) -> None:
        """All is taken back: the failure goes on to whatever is around the saga."""
        host = self.instance.tokens[scope.host]
        fault = decode_fault(scope.error)
        assert fault is not None, (self.instance.id, scope)
        around = self.saga_around(scope.parent)
        self.emit(e.ScopeClosed(scope.id, "undone"))
        self.end(host, "terminated")
        if self.instance.ending is not None:
            return
        if around is None:
            self.begin_ending(Outcome.FAILED, fault)
        elif around.status is ScopeStatus.OPEN:
            self.begin_failing(around, fault)


class Variables(Mapping[str, object]):
    """The variables that a scope sees, decoded when they are read."""

    def __init__(self, instance: Instance, scope: int) -> None:
        self._instance = instance
        self._scope = scope

    def __getitem__(self, name: str) -> object:
        text = self._instance.lookup(self._scope, name)
        if text is None:
            raise KeyError(name)
        return decode(text)

    def __iter__(self) -> Iterator[str]:
        return iter(self._instance.visible(self._scope))

    def __len__(self) -> int:
        return len(self._instance.visible(self._scope))
