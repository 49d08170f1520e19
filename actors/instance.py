"""The actor that owns one instance: it decides, commits, releases.

Three phases: *ready* (no commit is in flight: a command is decided at once), *committing* (commands wait, and are
decided together into the next commit), *retired* (its memory may be wrong or another owns the instance: everything
goes to the successor, which reads the store). Answers and effects are released when what they rest on is durable,
never before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import msgspec

from understudy.actors.clock import Clock
from understudy.actors.directory import Directory
from understudy.actors.dispatcher import PooledActor, PooledRef, Scheduler
from understudy.actors.messages import Arm, Committed, Drain, Forget, NotCommitted, Order, Unsure, Wake, Write
from understudy.model import commands as c
from understudy.model import effects as fx
from understudy.model.decide import Decision, decide
from understudy.model.definition import Graph
from understudy.model.errors import Conflict, OutcomeUnknown, UnderstudyError, UnknownInstance
from understudy.model.events import Entry
from understudy.model.instance import Fault, Instance
from understudy.store.commit import Answered, Stored, pack
from understudy.store.loading import Loaded, Posted
from understudy.store.writer import Refused

TOGETHER: Final = 64  # Commands decided into one commit.
MOST_TRIES: Final = 3  # Activations that may fail on a command before its sender is told.


@attrs.define(eq=False)
class Services:
    """What all instance actors of a runtime share."""

    clock: Clock
    directory: Directory
    persistence: PooledRef[Any]
    supervisor: PooledRef[Any]
    release: Callable[[str, fx.RunTask, int], None]  # Hand an attempt to its handler.
    withdraw: Callable[[str, fx.CancelTask], None]
    epoch: int
    keep_answers_ms: int
    is_draining: bool = False
    beat: Callable[[], None] = lambda: None  # Called with every sign of life, to renew what else shows that we live.


class InstanceActor(PooledActor):
    """Owns one instance for as long as its epoch is the highest."""

    def __init__(
        self, services: Services, name: str, loaded: Loaded | None, activation: int, *, dispatcher: Scheduler
    ) -> None:
        super().__init__(dispatcher=dispatcher)
        self._services = services
        self._name = name
        self._activation = activation
        self._instance = Instance() if loaded is None else loaded.instance
        self._stored = Stored() if loaded is None else loaded.stored
        self._graph: Graph | None = None if loaded is None else loaded.graph
        self._waiting: list[Order] = [] if loaded is None else self._outstanding(loaded)
        self._in_flight: list[tuple[Order, Decision]] | None = None
        self._out: dict[int, fx.CancelTask] = {}  # Tokens whose attempt is with a handler, and how to withdraw it.
        self._retired = False

    @property
    def is_at_rest(self) -> bool:
        return not self._retired and self._in_flight is None and not self._waiting and not self._out

    # --- messages ---

    def on_receive(self, message: Any) -> None:
        kind = type(message)
        if kind is Committed:
            self._release(message)
        elif kind is Order:
            self._take(message)
        elif kind is NotCommitted:
            self._refused(message.refused)
        elif kind is Unsure:
            self._unsure(message.reason)
        elif kind is Wake:
            self._go_on()
        else:
            assert kind is Drain, message

    def on_failure(self, _kind: Any, failure: BaseException | None, _trace: Any) -> None:
        """A broken belief of ours: nobody waits for ever, and the successor reads the store."""
        error = UnderstudyError(f"{self._name} met an internal error ({failure!r}); please report it")
        orders = [order for order, _ in self._in_flight or ()] + self._waiting
        for order in orders:
            _answer(order, error)
        self._retire([])

    def _take(self, order: Order) -> None:
        if self._retired:
            self._services.directory.tell(self._name, order)
            return
        self._waiting.append(order)
        self._go_on()

    # --- deciding ---

    def _go_on(self) -> None:
        """Decide what waits, as far as one commit takes it."""
        while self._waiting and self._in_flight is None and not self._retired:
            orders, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
            if orders[0].tries:  # It may be what the last activation failed on: nobody else should suffer with it.
                orders, self._waiting = orders[:1], orders[1:] + self._waiting
            self._decide(orders)
        if self.is_at_rest:
            self._rest()

    def _decide(self, orders: list[Order]) -> None:
        decided: list[tuple[Order, Decision]] = []
        entries: list[Entry] = []
        requests: list[Answered] = []
        for order in orders:
            decision = self._decision(order)
            decided.append((order, decision))
            if decision.entry is not None:
                entries.append(decision.entry)
                if order.command.key:
                    requests.append(self._answered(order.command, decision))
        if not entries:
            self._settle(decided)
            return
        commit = pack(
            self._instance,
            self._stored,
            entries,
            epoch=self._services.epoch,
            activation=self._activation,
            requests=requests,
        )
        self._in_flight = decided
        self._services.persistence.tell(Write(commit, self.actor_ref))

    def _decision(self, order: Order) -> Decision:
        command = order.command
        if isinstance(command, c.CompleteTask | c.FailTask):
            self._returned(command)
        graph = self._graph or order.graph
        if graph is None:
            return Decision(refusal=UnknownInstance(f"there is no instance {self._name!r} in this database"))
        decision = decide(self._instance, graph, command, go_on=not self._services.is_draining)
        if decision.entry is not None:
            self._graph = graph
        return decision

    def _returned(self, command: c.CompleteTask | c.FailTask) -> None:
        out = self._out.get(command.token)
        if out is not None and out.attempt == command.attempt:
            del self._out[command.token]

    def _answered(self, command: c.AnyCommand, decision: Decision) -> Answered:
        answer = msgspec.json.encode(decision.answer).decode()
        return Answered(command.key, command.digest, answer, command.at_ms + self._services.keep_answers_ms)

    # --- after the commit ---

    def _release(self, message: Committed) -> None:
        if self._retired:
            return
        decided, self._in_flight = self._in_flight, None
        assert decided is not None, self._name
        self._stored = message.stored
        self._settle(decided)
        self._go_on()

    def _settle(self, decided: list[tuple[Order, Decision]]) -> None:
        for order, decision in decided:
            for effect in decision.effects:
                self._carry_out(effect)
            _answer(order, decision.refusal, decision.answer)

    def _carry_out(self, effect: fx.AnyEffect) -> None:
        services = self._services
        if type(effect) is fx.RunTask:
            token = self._instance.tokens.get(effect.token)
            if token is None or token.attempt != effect.attempt or token.task != effect.task:
                return  # A later command of the same commit has ended it.
            self._out[effect.token] = fx.CancelTask(effect.token, effect.task, effect.attempt)
            services.release(self._name, effect, self._stored.no)
        elif type(effect) is fx.ArmTimer:
            services.supervisor.tell(Arm(self._name, effect.wait, effect.due_ms))
        elif type(effect) is fx.CancelTask:
            if effect.token not in self._instance.tokens:
                self._out.pop(effect.token, None)
            services.withdraw(self._name, effect)

    def _rest(self) -> None:
        directory = self._services.directory
        if not self._instance.exists or self._instance.is_ended:
            directory.rest(self._name, self, 0)
            leaving = [self._name]
        else:
            leaving = directory.rest(self._name, self, self._services.clock.now_ms())
        for name in leaving:
            dismiss(self._services, name)

    @property
    def stored_no(self) -> int:
        return self._stored.no

    # --- when a commit did not land ---

    def _refused(self, refused: Refused) -> None:
        if self._retired:
            return
        decided = self._in_flight or []
        again = [order for order, _ in decided if not self._is_culprit(order, refused, alone=len(decided) == 1)]
        for order in again:
            order.tries += 1
        self._retire(again + self._waiting)

    def _is_culprit(self, order: Order, refused: Refused, *, alone: bool) -> bool:
        """Whether the order has had its answer now; the others are decided again, on what the store says."""
        command = order.command
        first = refused.first.get(command.key) if command.key else None
        if first is not None:
            if first.digest == command.digest:
                _answer(order, None, msgspec.json.decode(first.answer))
            else:
                _answer(order, Conflict(f"the key {command.key!r} was used before with other content"))
            return True
        if refused.reason == "missing":
            return type(command) is c.Deliver  # The message went elsewhere; the store says where.
        if order.tries < MOST_TRIES and not (refused.reason == "constraint" and alone):
            return False
        if type(command) is c.CompleteTask:  # Its result cannot be stored: that is a failure of the attempt.
            fault = Fault("refused", f"the result cannot be stored ({refused.error})")
            order.command = c.FailTask(at_ms=command.at_ms, token=command.token, attempt=command.attempt, fault=fault)
            return False
        _answer(order, refused.error)
        return True

    def _unsure(self, reason: str) -> None:
        if self._retired:
            return
        again = []
        for order, _ in self._in_flight or ():
            command = order.command
            if type(command) in (c.Send, c.Resolve) and not command.key:
                text = f"{reason}; whether it landed is not known: look at {self._name} first, or repeat it with a key"
                _answer(order, OutcomeUnknown(text))
            else:
                again.append(order)
        self._retire(again + self._waiting)

    def _retire(self, messages: list[Order]) -> None:
        self._retired = True
        self._in_flight = None
        self._waiting = []
        for out in self._out.values():
            self._services.withdraw(self._name, out)
        forget(self._services, self._stored.no)
        self._services.directory.retire(self._name, self, [*messages, Wake()])

    # --- beginning ---

    def _outstanding(self, loaded: Loaded) -> list[Order]:
        """What the store asks for beside the messages that have activated it."""
        now_ms = self._services.clock.now_ms()
        orders: list[Order] = []
        if self._instance.moving or loaded.work:
            recorded = {work.task: work.result for work in loaded.work}
            orders.append(Order(c.Recover(at_ms=now_ms, recorded=recorded)))
        return orders + [Order(_deliver(posted, now_ms)) for posted in loaded.posted]


def dismiss(services: Services, name: str) -> None:
    """Let an instance leave memory, if it still rests."""
    actor = services.directory.leave(name)
    if actor is not None:
        forget(services, actor.stored_no)


def forget(services: Services, no: int) -> None:
    if no:
        services.persistence.tell(Forget(no))


def _deliver(posted: Posted, now_ms: int) -> c.Deliver:
    return c.Deliver(at_ms=now_ms, message=posted.no, wait=posted.wait, payload=posted.payload)


def _answer(order: Order, error: UnderstudyError | None, value: Any = None) -> None:
    if order.answer is None:
        return
    if error is not None:
        order.answer.reject(error)
    else:
        order.answer.resolve(value)
