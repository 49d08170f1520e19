"""A part of the process that is undone as a whole when a step in it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from understudy.model import events as e
from understudy.model.definition import Node
from understudy.model.instance import Token
from understudy.model.kinds.rules import Rules
from understudy.model.states import ScopeKind

if TYPE_CHECKING:
    from understudy.model.definition import Place
    from understudy.model.turn import Turn


@attrs.frozen(kw_only=True)
class Saga(Node):
    """Opens a scope; the nodes inside it name it in `within`."""


class SagaRules(Rules):
    name = "saga"
    node_type = Saga
    is_scope = True

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        scope = turn.next_id()
        turn.rest(token)
        turn.emit(e.ScopeOpened(scope, token.scope, place.node.id, ScopeKind.SAGA, token.id))
        turn.spawn(scope, turn.graph.starts[place.node.id])


SAGA = SagaRules()
