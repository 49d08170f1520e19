"""The actor that owns one instance: it decides, commits, releases.

Three phases: *ready* (no commit is in flight: a command is decided at once), *committing* (commands wait, and are
decided together into the next commit), *retired* (its memory may be wrong or another owns the instance: everything
goes to the successor, which reads the store and inherits what is with handlers). Answers and effects are released when
what they rest on is durable, never before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from understudy.actors.answers import answer, answer_as_before, answer_recalled
from understudy.actors.directory import Heritage
from understudy.actors.dispatcher import PooledActor, Scheduler
from understudy.actors.handlers import attempt_key
from understudy.actors.messages import Arm, Committed, Drain, NotCommitted, Order, Run, Unsure, Wake, Write
from understudy.actors.promise import Promise
from understudy.actors.services import Services, dismiss, forget
from understudy.model import commands as c
from understudy.model import effects as fx
from understudy.model.decide import Decision, decide, outstanding
from understudy.model.definition import Graph
from understudy.model.errors import Closed, Fenced, OutcomeUnknown, UnderstudyError, UnknownInstance
from understudy.model.events import Entry
from understudy.model.instance import Fault, Instance, Token
from understudy.model.states import Status, TokenStatus
from understudy.store.commit import Answered, Stored, pack
from understudy.store.loading import Loaded, Posted
from understudy.store.operations import Recall
from understudy.store.writer import Refused

TOGETHER: Final = 64  # Commands decided into one commit.
MOST_TRIES: Final = 3  # Activations that may fail on a command before its sender is told.
MOST_TROUBLES: Final = 5  # Activations in a row that may fail on the same instance before it is set aside.

logger = logging.getLogger("understudy")


class InstanceActor(PooledActor):
    """Owns one instance for as long as its epoch is the highest."""

    def __init__(
        self,
        services: Services,
        name: str,
        loaded: Loaded | None,
        activation: int,
        heritage: Heritage | None = None,
        *,
        dispatcher: Scheduler,
    ) -> None:
        super().__init__(dispatcher=dispatcher)
        self._services = services
        self.name = name
        self._activation = activation
        self._instance = Instance() if loaded is None else loaded.instance
        self._stored = Stored() if loaded is None else loaded.stored
        self._graph: Graph | None = None if loaded is None else loaded.graph
        self._heritage = heritage
        self._out: dict[int, fx.CancelTask] = dict(heritage or {})  # Tokens whose attempt is with a handler.
        self._unbegun: set[int] = set()  # Tokens whose attempt is to be released as it is, once recovery is decided.
        self._recovered = True  # Whether every attempt that the store calls executing is in one of the two above.
        self._waiting: list[Order] = [] if loaded is None else self._outstanding(loaded)
        self._in_flight: list[tuple[Order, Decision]] | None = None
        self._under_way: list[Order] = []  # The orders taken last; who is not answered must be, if something breaks.
        self._drained: list[Callable[[bool], None]] = []
        self._retired = False

    @property
    def is_at_rest(self) -> bool:
        return not self._retired and self._in_flight is None and not self._waiting and not self._out

    @property
    def stored_no(self) -> int:
        return self._stored.no

    # --- messages ---

    def on_receive(self, message: Any) -> None:
        try:
            self._handle(message)
        except Exception as error:
            # Not left to pykka: an actor that dies drops its inbox, and whoever is in there would wait for ever.
            self._break(error)

    def on_failure(self, _kind: Any, failure: BaseException | None, _trace: Any) -> None:
        self._break(failure)

    def _handle(self, message: Any) -> None:
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
            self._drain(message)

    def _take(self, order: Order) -> None:
        if self._services.lost is not None:
            answer(order, self._services.lost)
        elif self._retired:
            self._services.directory.tell(self.name, order)
        else:
            self._waiting.append(order)
            self._go_on()

    def _drain(self, message: Drain) -> None:
        if self._retired or (self._in_flight is None and not self._waiting):
            message.done(not self._retired)
        else:
            self._drained.append(message.done)

    # --- deciding ---

    def _go_on(self) -> None:
        """Decide what waits, as far as one commit takes it."""
        while self._waiting and self._in_flight is None and not self._retired:
            orders, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
            if orders[0].tries:  # It may be what the last activation failed on: nobody else should suffer with it.
                orders, self._waiting = orders[:1], orders[1:] + self._waiting
            self._decide(orders)
        if self._drained and self._in_flight is None:
            self._say_drained()
        if self.is_at_rest:
            self._rest()

    def _decide(self, orders: list[Order]) -> None:
        decided: list[tuple[Order, Decision]] = []
        entries: list[Entry] = []
        requests: list[Answered] = []
        self._under_way = orders
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
        graph = self._graph or order.graph
        if graph is None:
            text = f"there is no instance {self.name!r} in this database; list() shows all"
            return Decision(refusal=UnknownInstance(text))
        decision = decide(self._instance, graph, order.command, go_on=not self._services.is_draining)
        if decision.entry is not None:
            self._graph = graph
        return decision

    def _answered(self, command: c.AnyCommand, decision: Decision) -> Answered:
        answer = msgspec.json.encode(decision.answer).decode()
        return Answered(command.key, command.digest, answer, command.at_ms + self._services.keep_answers_ms)

    # --- after the commit ---

    def _release(self, message: Committed) -> None:
        if self._retired:
            return
        decided = self._in_flight
        assert decided is not None, self.name
        self._stored = message.stored
        if self._services.troubles:
            self._services.troubles.pop(self.name, None)
        self._settle(decided)
        self._in_flight = None
        self._go_on()

    def _settle(self, decided: list[tuple[Order, Decision]]) -> None:
        for order, decision in decided:
            command = order.command
            if isinstance(command, c.CompleteTask | c.FailTask):
                self._returned(command)
            for effect in decision.effects:
                self._carry_out(effect)
            if type(command) is c.Recover:
                self._begin_unbegun()
            if decision.entry is None and order.answer is not None and self._must_ask(order):
                self._answer_after(order, decision)
            else:
                answer(order, decision.refusal, decision.answer)

    def _must_ask(self, order: Order) -> bool:
        """Whether an answer that rests on no commit is to be confirmed by the writer.

        A command that changes nothing now may have been carried out under its key before: then its first answer stands.
        And whoever may have been replaced while it stood still must not answer from memory.
        """
        return bool(order.command.key) or not self._services.is_sure()

    def _answer_after(self, order: Order, decision: Decision) -> None:
        recalled: Promise[Any] = Promise()
        recalled.add_done_callback(lambda _: answer_recalled(order, decision, recalled))
        # What changes nothing has no commit that could hold its key: repeated later, it might change something.
        first = self._answered(order.command, decision) if order.command.key and decision.refusal is None else None
        self._services.persistence.tell(Run(Recall(order.command.key, first), recalled))

    def _returned(self, command: c.CompleteTask | c.FailTask) -> None:
        out = self._out.get(command.token)
        if out is not None and out.attempt == command.attempt and command.task in (0, out.task):
            del self._out[command.token]

    def _carry_out(self, effect: fx.AnyEffect) -> None:
        services = self._services
        if type(effect) is fx.RunTask:
            if not self._is_awaited(effect):
                return  # A later command of the same commit has ended it.
            services.release(self.name, effect, self._stored.no)
            self._out[effect.token] = fx.CancelTask(effect.token, effect.task, effect.attempt)
        elif type(effect) is fx.ArmTimer:
            services.supervisor.tell(Arm(self.name, effect.wait, effect.due_ms))
        elif type(effect) is fx.CancelTask:
            if effect.token not in self._instance.tokens:
                self._out.pop(effect.token, None)
            services.withdraw(self.name, effect)

    def _is_awaited(self, attempt: fx.RunTask | fx.CancelTask) -> bool:
        token = self._instance.tokens.get(attempt.token)
        return token is not None and token.attempt == attempt.attempt and token.task == attempt.task

    def _rest(self) -> None:
        directory = self._services.directory
        if not self._instance.exists or self._instance.is_ended:
            directory.rest(self.name, self, 0)
            leaving = [self.name]
        else:
            leaving = directory.rest(self.name, self, self._services.clock.now_ms())
        for name in leaving:
            dismiss(self._services, name)

    def _say_drained(self) -> None:
        drained, self._drained = self._drained, []
        for done in drained:
            done(False)

    # --- when a commit did not land ---

    def _refused(self, refused: Refused) -> None:
        if self._retired:
            return
        decided = self._in_flight or []
        again: list[Order] = []
        gone: list[Order] = []
        for order, _ in decided:
            if self._is_culprit(order, refused, alone=len(decided) == 1):
                gone.append(order)
            else:
                order.tries += 1
                again.append(order)
        self._retire(again + self._waiting, gone=gone, trouble=refused.error)

    def _is_culprit(self, order: Order, refused: Refused, *, alone: bool) -> bool:
        """Whether the order has had its answer now; the others are decided again, on what the store says."""
        command = order.command
        first = refused.first.get(command.key) if command.key else None
        if first is not None:
            answer_as_before(order, first)
            return True
        if refused.reason == "missing":
            return type(command) is c.Deliver  # The message went elsewhere; the store says where.
        if order.tries < MOST_TRIES and not (refused.reason == "constraint" and alone):
            return False
        if type(command) is c.CompleteTask:  # Its result cannot be stored: that is a failure of the attempt.
            fault = Fault("refused", f"the result cannot be stored ({refused.error})")
            order.command = c.FailTask(
                at_ms=command.at_ms, token=command.token, task=command.task, attempt=command.attempt, fault=fault
            )
            return False
        answer(order, refused.error)
        return True

    def _unsure(self, reason: str) -> None:
        if self._retired:
            return
        again: list[Order] = []
        lost = self._services.lost
        is_open = not isinstance(lost, Fenced)  # Whoever is fenced has surely written nothing.
        is_last = isinstance(lost, Closed)  # There is no successor who would read the store.
        for order, _ in self._in_flight or ():
            command = order.command
            if is_last or (is_open and type(command) in (c.Send, c.Resolve) and not command.key):
                text = f"{reason}; whether it landed is not known: look at {self.name} first, or repeat it with a key"
                answer(order, OutcomeUnknown(text))
            else:
                order.may_be_done = order.may_be_done or is_open
                again.append(order)
        self._retire(again + self._waiting)

    def _break(self, failure: BaseException | None) -> None:
        """A broken belief of ours: nobody waits for ever, and the successor reads the store."""
        logger.error("instance %s met an internal error", self.name, exc_info=failure)
        if self._retired:
            return
        error = UnderstudyError(f"{self.name} met an internal error ({failure!r}); please report it")
        again: list[Order] = []
        gone: list[Order] = []
        for order in self._under_way:
            order.tries += 1
            if self._in_flight is None and order.tries < MOST_TRIES:
                again.append(order)
            else:  # What was sent to the writer may have landed: a second time could be once too often.
                answer(order, error)
                gone.append(order)
        self._retire(again + self._waiting, gone=gone, trouble=error)

    def _retire(
        self, orders: list[Order], *, gone: list[Order] | None = None, trouble: UnderstudyError | None = None
    ) -> None:
        services = self._services
        self._retired = True
        self._in_flight = None
        self._waiting = []
        self._say_drained()
        if services.lost is None:
            forget(services, self._stored.no)
        final = services.lost or self._last_straw(gone or [], trouble)
        if final is None:
            heritage = self._out if self._recovered else self._heritage
            others = [order for order in orders if type(order.command) is not c.Recover]  # The successor has its own.
            services.directory.retire(self.name, self, [*others, Wake()], heritage)
            return
        for order in orders:
            answer(order, final)
        for out in self._out.values():
            services.withdraw(self.name, out)
        services.directory.drop(self.name, self)

    def _last_straw(self, gone: list[Order], trouble: UnderstudyError | None) -> UnderstudyError | None:
        """What is wrong with the instance itself, if its activations fail whatever they are told."""
        if trouble is None or any(type(order.command) is not c.Recover for order in gone):
            return None
        troubles = self._services.troubles
        troubles[self.name] = troubles.get(self.name, 0) + 1
        if troubles[self.name] <= MOST_TROUBLES:
            return None
        logger.error("instance %s is set aside until somebody tells it something: %s", self.name, trouble)
        return trouble

    # --- beginning ---

    def _outstanding(self, loaded: Loaded) -> list[Order]:
        """What the store asks for beside the messages that have activated it."""
        now_ms = self._services.clock.now_ms()
        orders: list[Order] = []
        for out in list(self._out.values()):
            if not self._is_awaited(out):
                del self._out[out.token]
                self._services.withdraw(self.name, out)
        if self._instance.moving or loaded.work:
            self._recovered = False
            self._unbegun = {token.id for token in self._instance.tokens.values() if self._was_never_begun(token)}
            recorded = {work.task: work.result for work in loaded.work}
            spared = frozenset(self._unbegun.union(self._out))
            orders.append(Order(c.Recover(at_ms=now_ms, recorded=recorded, spared=spared)))
        return orders + [Order(_deliver(posted, now_ms)) for posted in loaded.posted]

    def _was_never_begun(self, token: Token) -> bool:
        """Whether an executing token's attempt has never been with a handler."""
        if token.status is not TokenStatus.EXECUTING or token.id in self._out or self._instance.status is Status.PAUSED:
            return False
        if self._heritage is not None:
            return True  # The predecessor's commit has landed after all, and nothing of it was released.
        left = self._services.left
        return left is not None and attempt_key(self.name, token.task, token.attempt) not in left

    def _begin_unbegun(self) -> None:
        self._recovered = True
        unbegun, self._unbegun = self._unbegun, set()
        if not unbegun or self._services.is_draining:
            return
        assert self._graph is not None, self.name
        for effect in outstanding(self._instance, self._graph):
            if type(effect) is fx.RunTask and effect.token in unbegun:
                self._carry_out(effect)


def _deliver(posted: Posted, now_ms: int) -> c.Deliver:
    return c.Deliver(at_ms=now_ms, message=posted.no, wait=posted.wait, payload=posted.payload)
