"""A process as data: nodes, ordered edges, inputs.

A definition's identity is the digest of its content; where the author wrote a node is kept beside it and is no part
of that. `Graph` is the same definition prepared for the rules: conditions compiled, edges by node. Both are values:
nobody changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from understudy.model.errors import Damaged
from understudy.model.expressions import Expression, compile_expression
from understudy.model.values import canonical, digest

if TYPE_CHECKING:
    from understudy.model.kinds import Rules


@attrs.frozen(kw_only=True)
class Node:
    """What all kinds of node share; each kind adds its own in `model/kinds/`."""

    id: str
    within: str = ""  # The scope node around it; empty in the process itself.


@attrs.frozen(kw_only=True)
class Edge:
    """From one node to another. The order of a node's outgoing edges is the order of their trial."""

    id: str
    source: str
    target: str
    condition: str = ""
    is_default: bool = False
    is_late: bool = False  # Taken when a wait runs out of time.


@attrs.frozen(kw_only=True)
class Input:
    """A first variable: its name, what its type is called, and its value if the caller gives none."""

    name: str
    type: str = "Any"
    default: str | None = None  # Encoded; None means that the caller must give it.


@attrs.frozen(kw_only=True)
class Definition:
    """A process. `places` maps node ids to the author's "file:line"."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    inputs: tuple[Input, ...] = ()
    open_inputs: bool = False  # Whether further inputs are taken as they come.
    gives: str = ""  # The variable that is the result.
    places: dict[str, str] = attrs.field(factory=dict, eq=False, hash=False, repr=False)

    @cached_property
    def body(self) -> str:
        """The content as JSON text: what is stored, and what the digest is made of."""
        from understudy.model.kinds import encode_node

        return canonical(
            {
                "name": self.name,
                "nodes": [encode_node(node) for node in self.nodes],
                "edges": [attrs.asdict(edge) for edge in self.edges],
                "inputs": [attrs.asdict(given) for given in self.inputs],
                "open_inputs": self.open_inputs,
                "gives": self.gives,
            }
        )

    @cached_property
    def digest(self) -> str:
        return digest(self.body)


def decode_definition(body: str) -> Definition:
    """A definition from its stored text."""
    from understudy.model.kinds import decode_node

    try:
        raw = msgspec.json.decode(body)
        return Definition(
            name=raw["name"],
            nodes=tuple(decode_node(node) for node in raw["nodes"]),
            edges=tuple(Edge(**edge) for edge in raw["edges"]),
            inputs=tuple(Input(**given) for given in raw["inputs"]),
            open_inputs=raw["open_inputs"],
            gives=raw["gives"],
        )
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise Damaged(f"a stored definition cannot be read ({error}); restore a backup") from error


@attrs.frozen(eq=False)
class Place:
    """A node in its graph: what a token finds when it arrives there."""

    node: Any
    rules: Rules
    outgoing: tuple[Edge, ...]
    incoming: tuple[Edge, ...]
    onward: Edge | None  # The one edge that is neither conditional nor late.
    late: Edge | None
    conditions: tuple[tuple[Expression, Edge], ...]
    default: Edge | None
    expressions: dict[str, Expression]  # Those of the node itself, by field.


class Graph:
    """A definition prepared for the rules."""

    def __init__(self, definition: Definition, *, version: int = 1, no: int = 0) -> None:
        self.definition = definition
        self.version = version
        self.no = no
        outgoing = _grouped(definition.edges, "source")
        incoming = _grouped(definition.edges, "target")
        self.places = {
            node.id: _place(node, outgoing.get(node.id, ()), incoming.get(node.id, ())) for node in definition.nodes
        }
        self.starts = {node.within: node.id for node in definition.nodes if self.places[node.id].rules.is_start}

    def __getitem__(self, node: str) -> Place:
        return self.places[node]

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places.values())


def _grouped(edges: Iterable[Edge], by: str) -> dict[str, tuple[Edge, ...]]:
    groups: dict[str, list[Edge]] = {}
    for edge in edges:
        groups.setdefault(getattr(edge, by), []).append(edge)
    return {node: tuple(group) for node, group in groups.items()}


def _place(node: Node, outgoing: tuple[Edge, ...], incoming: tuple[Edge, ...]) -> Place:
    from understudy.model.kinds import rules_of

    rules = rules_of(node)
    plain = [edge for edge in outgoing if not edge.is_late and not edge.condition]
    return Place(
        node=node,
        rules=rules,
        outgoing=outgoing,
        incoming=incoming,
        onward=plain[0] if plain else None,
        late=next((edge for edge in outgoing if edge.is_late), None),
        conditions=tuple((compile_expression(edge.condition), edge) for edge in outgoing if edge.condition),
        default=next((edge for edge in outgoing if edge.is_default), None),
        expressions={name: compile_expression(source) for name, source in rules.expressions(node).items()},
    )
