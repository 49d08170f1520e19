"""Where each moment of a world stands in a picture: its lane, its column, and the spans between two of them.

A lane is an actor on a node; the lives of a node share their lanes, because a crash is a line, not another actor. A
column is a step, or a part of one when an actor did more than one thing in it. Nothing here draws.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from understudy.simulations.trace import Moment

MOST_LANES: Final = 40
OTHERS: Final = "others"
_AROUND: Final = ("world", "disk", "clock")
_SYSTEM: Final = ("persistence", "supervisor", "loader")
_LARGE: Final = frozenset({"fault", "crash", "pause", "resume", "open", "close", "probe", "violation"})
_DOWN: Final = frozenset({"crash", "close"})
_LEAST_JUMP_MS: Final = 1_000
_MOST_JUMPS: Final = 12


@attrs.frozen
class Lane:
    """An actor on a node, or all that have no lane of their own."""

    group: int  # 0: around everything, 1: the system's actors, 2: instances, 3: handlers and clients.
    node: str
    name: str
    label: str


@attrs.frozen
class Span:
    """What lasted from one column to another, on one node."""

    kind: str  # "down" or "paused"
    node: str
    first: int
    last: int


@attrs.frozen
class Jump:
    """Much time passed before this column."""

    column: int
    ms: int


class Layout:
    """The places of some moments."""

    def __init__(self, moments: Sequence[Moment], *, most_lanes: int = MOST_LANES) -> None:
        self.moments = moments
        self._concerned = {moment.instance for moment in moments if moment.kind == "violation"} - {""}
        self._is_plural = len({place(moment.node) for moment in moments} - {""}) > 1
        self.lanes = self._lanes(most_lanes)
        self._rows = {(lane.node, lane.name): row for row, lane in enumerate(self.lanes)}
        self.columns = list(self._columns())

    @property
    def width(self) -> int:
        """In columns."""
        return self.columns[-1] + 1 if self.columns else 1

    def row(self, moment: Moment) -> int:
        """A violation stands at its instance, if that is to be seen."""
        if moment.kind == "violation" and moment.instance:
            rows = [row for row, lane in enumerate(self.lanes) if lane.group == 2 and lane.name == moment.instance]
            if rows:
                return rows[-1]
        return self._row(place(moment.node), moment.lane)

    def joined(self, moment: Moment) -> list[int]:
        """Where a commit was made, and whose it is."""
        node = place(moment.node)
        keys = [(node, moment.instance), (node, "persistence")]
        return sorted({self.row(moment), *(self._rows[key] for key in keys if key in self._rows)})

    def is_concerned(self, lane: Lane) -> bool:
        return lane.group == 2 and lane.name in self._concerned

    def _row(self, node: str, name: str) -> int:
        found = self._rows.get((node, name))
        return self._rows["", OTHERS] if found is None else found

    # --- lanes ---

    def _lanes(self, most: int) -> list[Lane]:
        counts: Counter[Lane] = Counter(self._lane(moment) for moment in self.moments)
        lanes = list(counts)  # In the order in which they were first seen.
        if len(lanes) > most:
            ranked = sorted(lanes, key=lambda lane: (lane.group == 2, not self.is_concerned(lane), -counts[lane]))
            rest = frozenset(ranked[most - 1 :])
            lanes = [lane for lane in lanes if lane not in rest]
            lanes.append(Lane(2, "", OTHERS, f"{OTHERS} ({len(rest)})"))
        return sorted(lanes, key=lambda lane: (lane.group, _order(lane)))

    def _lane(self, moment: Moment) -> Lane:
        node, name = place(moment.node), moment.lane
        if name == "world" and node:
            return Lane(0, node, name, f"node {node}")
        label = f"{node} {name}" if node and self._is_plural else name
        return Lane(_group(name), node, name, label)

    # --- columns ---

    def _columns(self) -> Iterator[int]:
        """A step begins a column; so does what would cover another mark of its lane."""
        column, step = -1, -1
        free: dict[int, int] = {}  # The first column of a lane that is not covered, by row.
        for moment in self.moments:
            row = self.row(moment)
            size = 1 if moment.kind in _LARGE else 0
            column = max(column + (moment.step != step), free.get(row, 0) + size)
            free[row] = column + size + 1
            step = moment.step
            yield column

    def spans(self) -> Iterator[Span]:
        """When nodes were down or stood still."""
        yield from self._spans("down", _DOWN, frozenset({"open"}))
        yield from self._spans("paused", frozenset({"pause"}), _DOWN | {"open", "resume"})

    def _spans(self, kind: str, begins: frozenset[str], ends: frozenset[str]) -> Iterator[Span]:
        since: dict[str, int] = {}
        for moment, column in zip(self.moments, self.columns, strict=True):
            node = place(moment.node)
            if node in since and moment.kind in ends:
                yield Span(kind, node, since.pop(node), column)
            elif moment.kind in begins:
                since.setdefault(node, column)
        yield from (Span(kind, node, first, self.width) for node, first in since.items())

    def jumps(self) -> list[Jump]:
        """Where time passed while nothing happened; the longest ones."""
        if not self.moments:
            return []
        least_ms = max(_LEAST_JUMP_MS, (self.moments[-1].at_ms - self.moments[0].at_ms) // 20)
        jumps = [
            Jump(self.columns[number], later.at_ms - earlier.at_ms)
            for number, (earlier, later) in enumerate(zip(self.moments, self.moments[1:], strict=False), 1)
            if later.at_ms - earlier.at_ms >= least_ms
        ]
        return sorted(jumps, key=lambda jump: -jump.ms)[:_MOST_JUMPS]


def place(node: str) -> str:
    """The node of a life: "a" of "a.3"."""
    return re.sub(r"\.\d+$", "", node)


def _group(name: str) -> int:
    if name in _AROUND:
        return 0
    if name in _SYSTEM:
        return 1
    return 3 if name == "handlers" or name.startswith("client ") else 2


def _order(lane: Lane) -> tuple[int, str, str]:
    """Within the group; instances stay in the order in which they were first seen."""
    names = _AROUND if lane.group == 0 else _SYSTEM if lane.group == 1 else ()
    if names:
        return names.index(lane.name), lane.node, lane.name
    if lane.group == 3:
        return int(lane.name != "handlers"), lane.node, lane.name
    return int(lane.name == OTHERS), "", ""
