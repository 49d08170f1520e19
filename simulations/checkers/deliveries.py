"""I7: what subscribers were told, against what was committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from understudy.model.invariants import Violation
from understudy.simulations.checkers.evidence import Evidence, Held
from understudy.simulations.plugins import Checker, checker
from understudy.simulations.subscriber import Delivery, Subscriber

if TYPE_CHECKING:
    from understudy.simulations.world import World


@checker
class Deliveries(Checker):
    id = "I7"
    statement = (
        "deliveries to a subscriber, for each instance: first ones in order and without gaps, each at least once"
    )

    def watch(self, world: World) -> None:
        Evidence.of(world)

    def find(self, world: World) -> Iterable[str | Violation]:
        evidence = Evidence.of(world)
        now_ms = 0 if world.owner is None else world.owner.clock.now_ms()
        for subscriber in world.subscribers:
            for words, instance in (
                *_committed(subscriber, evidence),
                *_in_order(subscriber, evidence),
                *_all(subscriber, evidence, now_ms),
            ):
                yield Violation(self.id, f"subscriber {subscriber.name}: {words}", instance)


def _committed(subscriber: Subscriber, evidence: Evidence) -> Iterator[tuple[str, str]]:
    rows = {row.seq: row for row in evidence.rows}
    for delivery in subscriber.deliveries:
        row = rows.get(delivery.seq)
        if row is None or (row.instance, row.version) != (delivery.instance, delivery.n):
            yield f"was told of {_named(delivery)}, which is not in history", delivery.instance
        elif row.step > delivery.step:
            yield f"was told of {_named(delivery)}, which was committed at step {row.step}", delivery.instance


def _in_order(subscriber: Subscriber, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Nothing is even offered before all that came before it, of the same instance, was taken."""
    begin = subscriber.begin or 0
    taken = {
        instance: sum(row.seq <= begin for row in rows)  # What is before its beginning it never hears of.
        for instance, rows in evidence.histories.items()
    }
    for delivery in subscriber.deliveries:
        before = taken.get(delivery.instance, 0)
        if delivery.n > before + 1:
            yield f"was told of {_named(delivery)}, and had taken {before} of it before", delivery.instance
        if delivery.is_taken:
            taken[delivery.instance] = max(before, delivery.n)


def _all(subscriber: Subscriber, evidence: Evidence, now_ms: int) -> Iterator[tuple[str, str]]:
    taken = {delivery.seq for delivery in subscriber.deliveries if delivery.is_taken}
    held = {hold.instance: hold for hold in evidence.held if hold.subscriber == subscriber.name}
    if subscriber.begin is None:
        yield "has never begun", ""
        return
    for row in evidence.rows:
        if row.seq <= subscriber.begin or row.seq in taken:
            continue
        hold = held.get(row.instance)
        if hold is None or hold.seq > row.seq or not _may_wait(hold, subscriber, now_ms):
            words = f"commit {row.version} (place {row.seq})"
            yield f"has never taken {words}; its cursor is at {evidence.cursors.get(subscriber.name)}", row.instance


def _may_wait(hold: Held, subscriber: Subscriber, now_ms: int) -> bool:
    """Whether a held delivery waits for an operator, after all its tries, or for its time."""
    return hold.tries >= subscriber.tries if hold.due_ms is None else hold.due_ms > now_ms


def _named(delivery: Delivery) -> str:
    return f"commit {delivery.n} (place {delivery.seq}) at step {delivery.step}"
