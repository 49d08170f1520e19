"""Nodes that split and join the way: exclusive choice, parallel fork and join, merge.

A join has no record of its own: it is the tokens that rest at it. It fires when every incoming edge has brought one,
consumes one of each and leaves the surplus for the next time, so that joins in loops and tokens that come round again
are right by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from understudy.model.definition import Edge, Node
from understudy.model.errors import BadExpression, Rejected
from understudy.model.instance import Token
from understudy.model.kinds.rules import Rules

if TYPE_CHECKING:
    from understudy.model.definition import Place
    from understudy.model.turn import Turn


@attrs.frozen(kw_only=True)
class Choice(Node):
    """Takes the first outgoing edge whose condition is true, else the default."""


@attrs.frozen(kw_only=True)
class Fork(Node):
    """One token becomes one for each outgoing edge."""


@attrs.frozen(kw_only=True)
class Join(Node):
    """Waits for one token by each incoming edge."""


@attrs.frozen(kw_only=True)
class Merge(Node):
    """Passes every token on; it gives several ways one edge."""


class ChoiceRules(Rules):
    name = "choice"
    node_type = Choice

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        try:
            edge = self._first_true(turn, token, place)
        except BadExpression as error:
            turn.incident(token, "expression", str(error))
            return
        if edge is None:
            tried = ", ".join(f"{edge.condition!r}" for _, edge in place.conditions)
            turn.incident(token, "no_branch", f"no condition is true ({tried}) and there is no default")
            return
        turn.move(token, edge)

    def _first_true(self, turn: Turn, token: Token, place: Place) -> Edge | None:
        lookup = turn.lookup(token)
        for condition, edge in place.conditions:
            if condition.holds(lookup):
                return edge
        return place.default

    def skip(self, turn: Turn, token: Token, place: Place, result: str, to: str) -> None:  # noqa: ARG002 - a choice gives nothing
        edge = next((edge for edge in place.outgoing if edge.target == to), None)
        if edge is None:
            targets = ", ".join(edge.target for edge in place.outgoing)
            raise Rejected(f"skipping the choice {place.node.id} needs to=, one of: {targets}")
        turn.move(token, edge)


class ForkRules(Rules):
    name = "fork"
    node_type = Fork

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        first, *others = place.outgoing
        for edge in others:
            turn.spawn(token.scope, edge.target, came_by=edge.id)
        turn.move(token, first)

    def skip(self, turn: Turn, token: Token, place: Place, result: str, to: str) -> None:  # noqa: ARG002 - all ways
        """A join behind it waits for every branch: there is nothing that could be left out."""
        self.enter(turn, token, place)


class JoinRules(Rules):
    name = "join"
    node_type = Join

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        turn.rest(token, at_join=True)
        edges = turn.instance.arrived[(token.scope, place.node.id)]
        if len(edges) < len(place.incoming):
            return
        # The lowest ids, not the first to come: after a restart only the ids are known.
        survivor, *others = sorted(min(edges[edge.id]) for edge in place.incoming)
        for other in others:
            turn.end(turn.instance.tokens[other], "joined")
        turn.leave(turn.instance.tokens[survivor], place)


class MergeRules(Rules):
    name = "merge"
    node_type = Merge


CHOICE, FORK, JOIN, MERGE = ChoiceRules(), ForkRules(), JoinRules(), MergeRules()
