"""Nodes that wait for a message, and nodes that throw one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from understudy.model import events as e
from understudy.model.definition import Node
from understudy.model.errors import BadExpression, Rejected
from understudy.model.instance import Fault, Token, Wait
from understudy.model.kinds.rules import Rules
from understudy.model.values import encode, key_text

if TYPE_CHECKING:
    from understudy.model.definition import Place
    from understudy.model.turn import Turn


@attrs.frozen(kw_only=True)
class Receive(Node):
    """Waits for a message by name and key; after `timeout_ms` the late edge is taken."""

    message: str
    key: str = ""
    into: str = ""
    timeout_ms: int | None = None


@attrs.frozen(kw_only=True)
class Throw(Node):
    """Publishes a message in the commit that passes it."""

    message: str
    key: str = ""
    payload: str = ""
    ttl_ms: int | None = None


class ReceiveRules(Rules):
    name = "receive"
    node_type = Receive

    def expressions(self, node: Node) -> dict[str, str]:
        assert isinstance(node, Receive)
        return {"key": node.key} if node.key else {}

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        try:
            key = _key(turn, token, place)
        except (BadExpression, Rejected) as error:
            turn.incident(token, "expression", str(error))
            return
        early = turn.take_buffered(place.node.message, key)
        if early is not None:
            self._received(turn, token, place, early.payload)
            return
        wait = turn.open_wait(token, "message", name=place.node.message, key=key)
        if place.node.timeout_ms is not None:
            turn.open_wait(token, "timer", due_ms=turn.at_ms + place.node.timeout_ms, group=wait)

    def woken(self, turn: Turn, token: Token, place: Place, wait: Wait, payload: str) -> None:
        if wait.kind == "message":
            self._received(turn, token, place, payload)
        elif place.late is not None:
            turn.move(token, place.late)
        else:
            turn.fail(token, Fault("timeout", f"no message {place.node.message!r} came in time", place.node.id))

    def _received(self, turn: Turn, token: Token, place: Place, payload: str) -> None:
        if place.node.into:
            turn.emit(e.VariablesSet(turn.instance.home(token.scope), {place.node.into: payload}))
        turn.leave(token, place)

    def skip(self, turn: Turn, token: Token, place: Place, result: str, to: str) -> None:  # noqa: ARG002 - one way only
        self._received(turn, token, place, result)


class ThrowRules(Rules):
    name = "throw"
    node_type = Throw

    def expressions(self, node: Node) -> dict[str, str]:
        assert isinstance(node, Throw)
        return {field: source for field in ("key", "payload") if (source := getattr(node, field))}

    def enter(self, turn: Turn, token: Token, place: Place) -> None:
        node: Throw = place.node
        try:
            key = _key(turn, token, place)
            payload = "null"
            if node.payload:
                payload = encode(place.expressions["payload"].evaluate(turn.lookup(token)), what=f"{node.id}.payload")
        except (BadExpression, Rejected) as error:
            turn.incident(token, "expression", str(error))
            return
        expires_ms = None if node.ttl_ms is None else turn.at_ms + node.ttl_ms
        turn.emit(e.MessageThrown(token.id, node.message, key, payload, expires_ms))
        turn.leave(token, place)


def _key(turn: Turn, token: Token, place: Place) -> str:
    expression = place.expressions.get("key")
    return "" if expression is None else key_text(expression.evaluate(turn.lookup(token)))


RECEIVE, THROW = ReceiveRules(), ThrowRules()
