"""I15: what a poison instance may do to its neighbours, for scenarios that have one.

Which instances are poison, how long a healthy one takes among its like, and how long a handler may run, only a scenario
knows: it yields from `poisoned` in its check. That no instance tries for ever is asked of every history by the audit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from understudy.model import events as e
from understudy.simulations.checkers.evidence import Evidence, Row


def poisoned(evidence: Evidence, poison: Collection[str], *, usual_ms: int, timeout_ms: int) -> Iterator[str]:
    """What is wrong: an instance that was delayed for longer than one handler may run, or poison that nobody sees."""
    for instance, rows in evidence.histories.items():
        if instance in poison:
            yield from _unseen(evidence, instance)
        else:
            yield from _delayed(instance, rows, usual_ms, timeout_ms)
    for instance in poison:
        if instance not in evidence.histories:
            yield f"I15 {instance}: the poison was never started"


def _unseen(evidence: Evidence, instance: str) -> Iterator[str]:
    if all(type(event) is not e.IncidentRaised for _, _, event in evidence.events(instance)):
        yield f"I15 {instance}: it is poison, and no incident shows it"


def _delayed(instance: str, rows: list[Row], usual_ms: int, timeout_ms: int) -> Iterator[str]:
    """By the world's time, which no node's clock can set."""
    if not any(type(event) is e.InstanceEnded for entry in rows[-1].entries for event in entry.events):
        yield f"I15 {instance}: it is healthy, and has not ended"
        return
    first, last = rows[0].landing, rows[-1].landing
    assert first is not None, f"{instance}: nobody looked on from the beginning"
    assert last is not None, f"{instance}: nobody looked on to the end"
    took_ms = last.at_ms - first.at_ms
    if took_ms > usual_ms + timeout_ms:
        yield f"I15 {instance}: it took {took_ms} ms, which is more than {usual_ms} ms and a handler's {timeout_ms} ms"
