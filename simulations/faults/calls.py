"""What goes wrong between a client and the owner: calls and answers that are lost, late, doubled or out of order, and a
door at which too many stand.

A client that hears nothing gives up after some time; it asks again only for what may be repeated. Whatever may have
arrived stays in the world's list of operations as one whose outcome is not known, also the second copy of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any, Final

import attrs

from understudy.model.errors import Unavailable
from understudy.simulations.clients import COPY, IDEMPOTENT, Client
from understudy.simulations.node import Life
from understudy.simulations.operations import Operation
from understudy.simulations.plugins import REFUSE, SURVIVE, Fault, fault

if TYPE_CHECKING:
    from understudy.simulations.world import World

Send = Callable[[], None]

PATIENCE_MS: Final = (500, 5_000)  # After which a client gives up.
DELAY_MS: Final = (1, 20_000)  # Of a late call: before the client gives up, or long after.
FULL: Final = "commands are under way already"  # What one is told who stands at the door of a full house.
TRANSIENT: Final = frozenset({"Unavailable", "OutcomeUnknown", "TimedOut", "Died"})  # After which a client asks again.


def may_come_twice(operation: Operation) -> bool:
    return bool(operation.key) or operation.call in IDEMPOTENT


def unanswered(world: World) -> Iterator[str]:
    """Who may ask again has asked until there was an answer: of whatever was asked for, the last word is one."""
    last: dict[tuple[str, str, str, str], Operation] = {}
    for operation in world.operations:
        if operation.reason != COPY:
            last[operation.client, operation.call, operation.instance, operation.key] = operation
    for operation in last.values():
        if may_come_twice(operation) and (operation.returned is None or operation.error in TRANSIENT):
            asked = f"{operation.client} asked for {operation.call} {operation.instance} {operation.key}".rstrip()
            yield f"{asked} at step {operation.invoked}, and was left with {operation.error or 'nothing'}"


class OnTheWay(Fault):
    """Something happens to one call in so many."""

    kind = "messages"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self.odds = min(0.4, 10 * rate)  # There are fewer calls than steps.

    def arm(self, world: World) -> None:
        world.on_client.append(self._join)

    def _join(self, client: Client) -> None:
        before = client.channel

        def passes(client: Client, operation: Operation, send: Send) -> None:
            on = send if before is None else lambda: before(client, operation, send)
            if client.world.is_settling or self.random.random() >= self.odds:
                on()
            else:
                self.strike(client, operation, on)

        client.channel = passes

    def strike(self, client: Client, operation: Operation, send: Send) -> None:
        raise NotImplementedError

    def note(self, client: Client, operation: Operation) -> None:
        client.world.fault(self.name, f"{operation.call} {operation.number}")

    def check(self, world: World) -> Iterable[str]:
        return unanswered(world)


@fault
class CallLost(OnTheWay):
    """A call never arrives."""

    name = "call lost"

    def strike(self, client: Client, operation: Operation, send: Send) -> None:  # noqa: ARG002  # That is the fault.
        self.note(client, operation)
        client.world.after(self.random.randrange(*PATIENCE_MS), lambda: client.give_up(operation))


@fault
class CallLate(OnTheWay):
    """A call takes its time; the client may have given up and asked again before it arrives."""

    name = "call late"

    def strike(self, client: Client, operation: Operation, send: Send) -> None:
        self.note(client, operation)
        client.world.after(self.random.randrange(*DELAY_MS), send)
        client.world.after(self.random.randrange(*PATIENCE_MS), lambda: client.give_up(operation))


@fault
class CallDoubled(OnTheWay):
    """A call that may be repeated arrives a second time, now or later."""

    name = "call doubled"

    def strike(self, client: Client, operation: Operation, send: Send) -> None:
        send()
        if may_come_twice(operation):
            self.note(client, operation)
            client.world.after(self.random.randrange(*DELAY_MS), lambda: client.double(operation))


@fault
class CallsReordered(OnTheWay):
    """A call waits until the next one, of whomever, has gone ahead of it."""

    name = "calls reordered"

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._held: list[Send] = []

    def strike(self, client: Client, operation: Operation, send: Send) -> None:
        if self._held:
            send()
            self._let_go()
            return
        self.note(client, operation)
        self._held.append(send)
        client.world.after(self.random.randrange(*PATIENCE_MS), self._let_go)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for send in held:
            send()


@fault
class AnswerLost(Fault):
    """The call was carried out, or refused, and nobody hears of it."""

    name = "answer lost"
    kind = "messages"
    must = SURVIVE

    def arm(self, world: World) -> None:
        world.on_client.append(self._join)

    def _join(self, client: Client) -> None:
        world, odds = client.world, min(0.4, 10 * self.rate)

        def returns(client: Client, operation: Operation) -> bool:
            if world.is_settling or self.random.random() >= odds:
                return True
            world.fault(self.name, f"{operation.call} {operation.number}")
            world.after(self.random.randrange(*PATIENCE_MS), lambda: client.give_up(operation))
            return False

        client.returning = returns

    def check(self, world: World) -> Iterable[str]:
        return unanswered(world)


@fault
class FullHouse(Fault):
    """Only so few commands may be under way at once that callers are turned away."""

    name = "mailbox full"
    kind = "messages"
    must = REFUSE

    def arm(self, world: World) -> None:
        world.limits = attrs.evolve(world.limits, in_flight=self.random.randrange(1, 4))
        world.on_opened.append(lambda life: self._stand_at_the_door(world, life))

    def _stand_at_the_door(self, world: World, life: Life) -> None:
        service: Any = life.service
        ask = service.call

        def call(name: str, parameters: dict[str, Any]) -> Any:
            try:
                return ask(name, parameters)
            except Unavailable as error:
                if FULL in str(error):
                    world.fault(self.name, name, node=life.name)
                raise

        service.call = call

    def check(self, world: World) -> Iterable[str]:
        """Turned away means that nothing was done and that it can be asked for again, no more and no less."""
        for operation in world.operations:
            if FULL in operation.reason and (operation.error != "Unavailable" or operation.is_unknown):
                yield f"operation {operation.number} was turned away with {operation.error}"
        yield from unanswered(world)
