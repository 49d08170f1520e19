"""I12: the operations of clients on each instance, as `linear.py` orders them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from understudy.model.invariants import Violation
from understudy.simulations.linear import Undecided, check_all
from understudy.simulations.plugins import Checker, checker

if TYPE_CHECKING:
    from understudy.simulations.world import World


@checker
class Linear(Checker):
    id = "I12"
    statement = "the operations on one instance happened one after the other, each between its call and its answer"

    def find(self, world: World) -> Iterable[str | Violation]:
        try:
            return check_all(world.operations, answers_kept_ms=world.limits.keep_answers_ms)
        except Undecided:
            world.probe("order_undecided")  # Counted, so that a scenario which asks too much of the search is seen.
            return []
