"""What every kind of node answers. The defaults fit a node that only passes tokens on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.model.definition import Node
from understudy.model.errors import Rejected
from understudy.model.instance import Token, Wait

if TYPE_CHECKING:
    from understudy.model.definition import Place
    from understudy.model.turn import Turn


class Rules:
    """The rules of one kind of node; without state, one object for all nodes of the kind."""

    name: str
    node_type: type[Node]
    is_start = False
    is_scope = False

    def expressions(self, _node: Node) -> dict[str, str]:
        """The node's own expressions, by field, to be compiled with the graph."""
        return {}

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        """A token has arrived."""
        turn.leave(token, place)

    def woken(self, turn: Turn, token: Token, place: Place, wait: Wait, payload: str) -> None:
        """A wait of the token was consumed."""
        raise AssertionError(
            f"nothing waits at {place.node.id} ({wait.kind}, {payload[:20]}, token {token.id}, {turn})"
        )

    def retry(self, turn: Turn, token: Token, place: Place) -> None:
        """An operator wants the token's incident tried again."""
        self.enter(turn, token, place)

    def skip(self, turn: Turn, token: Token, place: Place, result: str, to: str) -> None:  # noqa: ARG002 - kinds differ in what they use
        """An operator wants the token to go on as if the node were done."""
        if place.onward is None:
            raise Rejected(f"{place.node.id} has no edge to skip along; fail or cancel the instance instead")
        turn.leave(token, place)
