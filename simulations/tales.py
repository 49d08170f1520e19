"""The life of one instance, read once from its first commit to its last, and the rare states that it has been through.

Whatever was begun under one epoch and ended under a later one has lived through the end of a process. Nothing here
judges anything: that history is right is for others to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from understudy.model import events as e
from understudy.model.states import Mode, Outcome
from understudy.simulations.checkers.evidence import Row
from understudy.store.writer import MESSAGES_OF_A_LIFE


class Tale:
    """What one instance has been through: `found` counts the states by the names of their probes."""

    def __init__(self, rows: list[Row], nested: dict[int, frozenset[str]]) -> None:
        self.found: Counter[str] = Counter()
        self.withdrawn: list[tuple[int, int, int]] = []  # Task, attempt and epoch of what was ended while it was out.
        self.keys: list[str] = []  # Under which something was done.
        self.first_seq, self.last_seq = rows[0].seq, rows[-1].seq
        self.id = self.process = ""
        self.version = 0
        self._all_nested = nested
        self._nested: frozenset[str] = frozenset()
        self._epoch = 0
        self._at_ms = 0
        self._cause = ""
        self._tokens: dict[int, _Token] = {}
        self._at_join: dict[tuple[int, str], dict[str, list[int]]] = {}  # Tokens that rest there, by edge.
        self._join_began: dict[tuple[int, str], int] = {}  # The epoch of the first token.
        self._join_rounds: Counter[tuple[int, str]] = Counter()
        self._waits: dict[int, tuple[str, int, int | None, int]] = {}  # Kind, group, due and epoch.
        self._groups: dict[int, int] = {}  # How many waits a group has.
        self._fired_ms = 0  # The latest moment for which a timer has fired.
        self._incidents: dict[int, int] = {}  # Number to epoch.
        self._sagas: dict[int, int] = {}  # Number to parent.
        self._undone_in: dict[int, int] = {}  # Saga to the epoch of its last undo.
        self._undo_scope: dict[int, int] = {}
        self._is_paused = 0  # The epoch, while it is.
        self._is_failing = False
        for row in rows:
            self._read(row)

    def _read(self, row: Row) -> None:
        self._epoch = row.epoch
        if len(row.entries) > 1:
            self.found["two_commands_in_one_commit"] += 1
        for entry in row.entries:
            if entry.key:
                self.keys.append(entry.key)
            self._at_ms, self._cause = entry.at_ms, entry.cause
            if entry.at_ms < self._fired_ms:
                self.found["clock_went_back_over_a_timer"] += 1
                self._fired_ms = 0
            for event in entry.events:
                rule = _RULES.get(type(event))
                if rule is not None:
                    rule(self, event)

    # --- tokens and joins ---

    def _started(self, event: e.InstanceStarted) -> None:
        self.id, self.process, self.version = event.id, event.process, event.process_version
        self._nested = self._all_nested[event.definition]

    def _created(self, event: e.TokenCreated) -> None:
        token = self._tokens[event.token] = _Token(event.scope, event.node, event.came_by)
        token.is_undo = event.mode is Mode.COMPENSATION

    def _moved(self, event: e.TokenMoved) -> None:
        token = self._tokens[event.token]
        place = (token.scope, token.node)
        if place in self._at_join:
            self._fired(place, event.token)
        token.node, token.came_by, token.task = event.node, event.came_by, 0

    def _rested(self, event: e.TokenRested) -> None:
        if event.at_join:
            token = self._tokens[event.token]
            place = (token.scope, token.node)
            self._join_began.setdefault(place, self._epoch)
            self._at_join.setdefault(place, {}).setdefault(token.came_by, []).append(event.token)

    def _fired(self, place: tuple[int, str], survivor: int) -> None:
        """A token leaves a join: the others of its round have ended in the events before."""
        self._leave(place, survivor)
        self._join_rounds[place] += 1
        if self._join_rounds[place] > 1:
            self.found["loop_round_two_join"] += 1
        if place[1] in self._nested:
            self.found["nested_join_fired"] += 1
        if self._join_began.pop(place, self._epoch) != self._epoch:
            self.found["join_after_crash"] += 1
        if self._at_join.get(place):
            self.found["surplus_token_left_for_next_round"] += 1
            self._join_began[place] = self._epoch

    def _leave(self, place: tuple[int, str], token: int) -> None:
        edges = self._at_join.get(place, {})
        for edge in [edge for edge, tokens in edges.items() if token in tokens]:
            edges[edge].remove(token)
            if not edges[edge]:
                del edges[edge]
        if not edges:
            self._at_join.pop(place, None)

    def _ended(self, event: e.TokenEnded) -> None:
        token = self._tokens.pop(event.token)
        self._leave((token.scope, token.node), event.token)
        if event.how == "terminated" and token.is_out:
            self.withdrawn.append((token.task, token.attempt, self._epoch))
            if self._cause != "cancel" and not self._is_failing:
                self.found["terminated_with_task_out"] += 1

    # --- tasks ---

    def _opened(self, event: e.TaskOpened) -> None:
        token = self._tokens[event.token]
        token.task, token.attempt, token.is_out, token.epoch = event.task, 1, True, self._epoch

    def _attempt(self, event: e.AttemptStarted) -> None:
        token = self._tokens[event.token]
        token.attempt, token.is_out = event.attempt, True

    def _lost(self, event: e.AttemptLost) -> None:
        token = self._tokens[event.token]
        token.attempt += 1
        self.found["undo_interrupted_by_crash" if token.is_undo else "attempt_lost"] += 1

    def _failed(self, event: e.AttemptFailed) -> None:
        self._tokens[event.token].is_out = False
        if event.code == "timeout":
            self.found["handler_overran"] += 1
        elif any(kind.endswith(":BadValue") for kind in event.types):
            self.found["result_not_storable"] += 1

    def _completed(self, event: e.TaskCompleted) -> None:
        token = self._tokens[event.token]
        token.is_out = False
        if event.recorded and self._cause == "recover":
            self.found["transactional_result_found_after_crash"] += 1
        if self._is_paused and not event.skipped:
            self.found["task_done_while_paused"] += 1

    # --- waits and messages ---

    def _wait(self, event: e.WaitOpened) -> None:
        self._waits[event.wait] = (event.kind, event.group, event.due_ms, self._epoch)
        self._groups[event.group] = self._groups.get(event.group, 0) + 1

    def _consumed(self, event: e.WaitConsumed) -> None:
        kind, group, due_ms, epoch = self._waits.pop(event.wait)
        if kind == "timer":
            self._fired_ms = max(self._fired_ms, due_ms or 0)
            if epoch != self._epoch:
                self.found["timer_fired_after_restart"] += 1
            if self._groups[group] > 1:
                self.found["wait_timed_out"] += 1
        elif event.message and event.message // MESSAGES_OF_A_LIFE != self._epoch:
            self.found["message_taken_after_restart"] += 1

    def _taken(self, event: e.MessageTaken) -> None:
        self.found["message_expired" if event.expired else "message_before_wait"] += 1

    # --- sagas, incidents, operators ---

    def _scope_opened(self, event: e.ScopeOpened) -> None:
        self._sagas[event.scope] = event.parent

    def _scope_closed(self, event: e.ScopeClosed) -> None:
        if event.how == "undone" and self._sagas[event.scope] in self._sagas:
            self.found["saga_in_saga_undone"] += 1

    def _failing(self, _event: e.ScopeFailing) -> None:
        self._is_failing = True

    def _undo_recorded(self, event: e.UndoRecorded) -> None:
        self._undo_scope[event.undo] = event.scope

    def _undo_finished(self, event: e.UndoFinished) -> None:
        """By the scope that recorded it: an heir's undos are told apart by nothing else, and need not be."""
        scope = self._undo_scope.get(event.undo, 0)
        if event.how == "done" and self._undone_in.setdefault(scope, self._epoch) != self._epoch:
            self.found["undo_across_crash"] += 1

    def _raised(self, event: e.IncidentRaised) -> None:
        token = self._tokens[event.token]
        token.is_out = False
        self._incidents[event.incident] = self._epoch
        if len(self._incidents) > 1:
            self.found["two_incidents_at_once"] += 1
        if event.code in _CODES:
            self.found[_CODES[event.code]] += 1

    def _closed(self, event: e.IncidentClosed) -> None:
        if self._incidents.pop(event.incident) != self._epoch:
            self.found["incident_across_restart"] += 1
        if event.how in _HOWS:
            self.found[_HOWS[event.how]] += 1

    def _paused(self, _event: e.InstancePaused) -> None:
        self._is_paused = self._epoch
        if any(token.is_out for token in self._tokens.values()):
            self.found["pause_with_task_out"] += 1

    def _resumed(self, _event: e.InstanceResumed) -> None:
        if self._is_paused != self._epoch:
            self.found["paused_across_restart"] += 1
        self._is_paused = 0

    def _ending(self, event: e.EndingBegun) -> None:
        if event.outcome is not Outcome.CANCELLED:
            return
        if self._is_failing:
            self.found["cancel_while_compensating"] += 1
        if self._is_paused:
            self.found["cancelled_while_paused"] += 1
            self._is_paused = 0


class _Token:
    """A token as far as a tale needs it."""

    __slots__ = ("attempt", "came_by", "epoch", "is_out", "is_undo", "node", "scope", "task")

    def __init__(self, scope: int, node: str, came_by: str) -> None:
        self.scope = scope
        self.node = node
        self.came_by = came_by
        self.task = 0
        self.attempt = 0
        self.epoch = 0
        self.is_out = False  # Whether an attempt is with a handler.
        self.is_undo = False


_CODES: Final = {"lost": "third_lost_attempt_incident", "undo_failed": "undo_failed_incident"}
_HOWS: Final = {
    "retried": "incident_resolved_by_retry",
    "skipped": "incident_resolved_by_skip",
    "failed": "incident_resolved_by_fail",
}
_RULES: Final[dict[type[e.Event], Callable[[Tale, Any], None]]] = {
    e.InstanceStarted: Tale._started,
    e.TokenCreated: Tale._created,
    e.TokenMoved: Tale._moved,
    e.TokenRested: Tale._rested,
    e.TokenEnded: Tale._ended,
    e.TaskOpened: Tale._opened,
    e.AttemptStarted: Tale._attempt,
    e.AttemptLost: Tale._lost,
    e.AttemptFailed: Tale._failed,
    e.TaskCompleted: Tale._completed,
    e.WaitOpened: Tale._wait,
    e.WaitConsumed: Tale._consumed,
    e.MessageTaken: Tale._taken,
    e.ScopeOpened: Tale._scope_opened,
    e.ScopeClosed: Tale._scope_closed,
    e.ScopeFailing: Tale._failing,
    e.UndoRecorded: Tale._undo_recorded,
    e.UndoFinished: Tale._undo_finished,
    e.IncidentRaised: Tale._raised,
    e.IncidentClosed: Tale._closed,
    e.InstancePaused: Tale._paused,
    e.InstanceResumed: Tale._resumed,
    e.EndingBegun: Tale._ending,
}
