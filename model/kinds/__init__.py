"""The kinds of node, each one module: what it looks like in a definition, and what a token does there.

A kind is found by its name in `KINDS`; adding one adds a module and a line here, nothing else. In a definition a node
is stored as `[kind, version, body]`.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from understudy.model.definition import Node
from understudy.model.kinds.ends import END, START, TERMINATE, End, Start, Terminate
from understudy.model.kinds.gateways import CHOICE, FORK, JOIN, MERGE, Choice, Fork, Join, Merge
from understudy.model.kinds.messages import RECEIVE, THROW, Receive, Throw
from understudy.model.kinds.rules import Rules
from understudy.model.kinds.saga import SAGA, Saga
from understudy.model.kinds.task import TASK, Task, UndoTask
from understudy.model.kinds.timer import TIMER, Timer

__all__ = [
    "KINDS",
    "Choice",
    "End",
    "Fork",
    "Join",
    "Merge",
    "Receive",
    "Rules",
    "Saga",
    "Start",
    "Task",
    "Terminate",
    "Throw",
    "Timer",
    "UndoTask",
    "decode_node",
    "encode_node",
    "rules_of",
]

KINDS: dict[str, Rules] = {
    rules.name: rules for rules in (START, END, TERMINATE, TASK, CHOICE, FORK, JOIN, MERGE, TIMER, RECEIVE, THROW, SAGA)
}
# msgspec learns a class when it is first used, and crashes the process when two threads let it learn one at once: the
# loader and a deployment did. So it learns them all while this module is imported.
_LEARNED = [msgspec.json.Decoder(rules.node_type) for rules in KINDS.values()]
_BY_TYPE: dict[type[Node], Rules] = {rules.node_type: rules for rules in KINDS.values()}


def rules_of(node: Node) -> Rules:
    return _BY_TYPE[type(node)]


def encode_node(node: Node) -> list[Any]:
    return [rules_of(node).name, 1, attrs.asdict(node)]


def decode_node(raw: list[Any]) -> Node:
    kind, _version, body = raw
    node: Node = msgspec.convert(body, KINDS[kind].node_type)
    return node
