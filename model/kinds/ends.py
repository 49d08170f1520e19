"""Where tokens begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from understudy.model.definition import Node
from understudy.model.instance import Token
from understudy.model.kinds.rules import Rules

if TYPE_CHECKING:
    from understudy.model.definition import Place
    from understudy.model.turn import Turn


@attrs.frozen(kw_only=True)
class Start(Node):
    """The first node of the process or of a scope."""


@attrs.frozen(kw_only=True)
class End(Node):
    """Ends its token; the scope ends with its last one."""


@attrs.frozen(kw_only=True)
class Terminate(Node):
    """Ends all tokens of its scope at once."""


class StartRules(Rules):
    name = "start"
    node_type = Start
    is_start = True


class EndRules(Rules):
    name = "end"
    node_type = End

    def enter(self, turn: Turn, token: Token, _place: Place) -> None:
        turn.end(token, "done")


class TerminateRules(Rules):
    name = "terminate"
    node_type = Terminate

    def enter(self, turn: Turn, token: Token, _place: Place) -> None:
        turn.terminate_scope(token)


START, END, TERMINATE = StartRules(), EndRules(), TerminateRules()
