"""I9: nobody reads backwards, neither a client nor one client after another, and nobody reads what is not committed.

Whoever was told that something is done, and asks after that, reads a version that has it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from understudy.model.invariants import Violation
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.operations import Operation
from understudy.simulations.plugins import Checker, checker

if TYPE_CHECKING:
    from understudy.simulations.world import World


class Known(NamedTuple):
    """What is known of an instance from some moment on."""

    moment: tuple[int, int]  # The step of the answer, and in one step the number of the operation.
    version: int
    outcome: str


@checker
class Forward(Checker):
    id = "I9"
    statement = "version and epoch never decrease, and a client never reads backwards"

    def watch(self, world: World) -> None:
        Evidence.of(world)

    def find(self, world: World) -> Iterable[str | Violation]:
        evidence = Evidence.of(world)
        keyed = {(row.instance, entry.key): row.version for row in evidence.rows for entry in row.entries if entry.key}
        by_instance: dict[str, list[Operation]] = {}
        for operation in world.operations:
            if operation.is_acknowledged and (operation.call == "read" or operation.key):
                by_instance.setdefault(operation.instance, []).append(operation)
        for instance, operations in by_instance.items():
            for words in self._one(evidence, keyed, instance, operations):
                yield Violation(self.id, words, instance)

    def _one(
        self, evidence: Evidence, keyed: dict[tuple[str, str], int], instance: str, operations: list[Operation]
    ) -> Iterator[str]:
        to_come: list[Known] = []  # Answers that are later than the call that is looked at.
        newest = Known((0, 0), 0, "")
        landed = {row.version: row.step for row in evidence.histories.get(instance, ())}
        for operation in operations:  # In the order of their calls.
            while to_come and to_come[0].moment < (operation.invoked, operation.number):
                known = heapq.heappop(to_come)
                newest = Known(known.moment, max(newest.version, known.version), newest.outcome or known.outcome)
            assert operation.returned is not None, operation
            version, outcome = keyed.get((instance, operation.key), 0), ""
            if operation.call == "read":
                version, outcome = _read(operation)
                yield from _backwards(operation, version, outcome, newest)
                if version and landed.get(version, operation.returned + 1) > operation.returned:
                    yield f"version {version} was read at step {operation.returned}, before it was committed"
            heapq.heappush(to_come, Known((operation.returned, operation.number), version, outcome))


def _read(operation: Operation) -> tuple[int, str]:
    """Version and outcome; nothing is read of what is not there."""
    answer = operation.answer
    return (0, "") if answer is None else (answer["version"], answer["outcome"] or "")


def _backwards(operation: Operation, version: int, outcome: str, newest: Known) -> Iterator[str]:
    if version < newest.version:
        yield f"read #{operation.number} has found version {version}, after version {newest.version} was known"
    elif newest.outcome and outcome != newest.outcome:
        now = outcome or "not ended"
        yield f"read #{operation.number} has found it {now}, after it was known to have ended as {newest.outcome}"
