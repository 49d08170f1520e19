"""What the database must say at the end: everything that `understudy audit` asks of a live one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from understudy.audit import audit
from understudy.model.invariants import Violation
from understudy.simulations.plugins import Checker, checker

if TYPE_CHECKING:
    from understudy.simulations.world import World


@checker
class Audited(Checker):
    """I1, I2, I4, I5, I6, I9, I10, I11 and I14 of every instance, as an operator would ask them."""

    id = "audit"
    statement = "every instance is what its history says, and nothing stands beside it"

    def find(self, world: World) -> Iterable[str | Violation]:
        life = world.owner
        if life is None:
            return ["no node is up at the end"]
        return audit(life.reads).violations
