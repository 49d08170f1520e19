"""A wait for a moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from understudy.model.definition import Node
from understudy.model.durations import duration_ms, moment_ms
from understudy.model.errors import BadExpression, Rejected
from understudy.model.instance import Token, Wait
from understudy.model.kinds.rules import Rules

if TYPE_CHECKING:
    from understudy.model.definition import Place
    from understudy.model.turn import Turn


@attrs.frozen(kw_only=True)
class Timer(Node):
    """Waits for a time (`after`) or until a date (`until`): expressions whose value is a duration or a date as text."""

    after: str = ""
    until: str = ""


class TimerRules(Rules):
    name = "timer"
    node_type = Timer

    def expressions(self, node: Node) -> dict[str, str]:
        assert isinstance(node, Timer)
        return {field: source for field in ("after", "until") if (source := getattr(node, field))}

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        try:
            due_ms = self._due_ms(turn, token, place)
        except (BadExpression, Rejected) as error:
            turn.incident(token, "expression", str(error))
            return
        turn.open_wait(token, "timer", due_ms=due_ms)

    def _due_ms(self, turn: Turn, token: Token, place: Place) -> int:
        lookup = turn.lookup(token)
        if "after" in place.expressions:
            return turn.at_ms + duration_ms(place.expressions["after"].evaluate(lookup))  # type: ignore[arg-type]
        return moment_ms(place.expressions["until"].evaluate(lookup))  # type: ignore[arg-type]

    def woken(self, turn: Turn, token: Token, place: Place, _wait: Wait, _payload: str) -> None:
        turn.leave(token, place)


TIMER = TimerRules()
