"""How instances have ended and what they did on their way, as the checks of scenarios ask it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from understudy.model.events import Entry, TaskOpened, TokenCreated, TokenMoved
from understudy.model.values import decode
from understudy.simulations.checkers.evidence import Evidence

if TYPE_CHECKING:
    from understudy.simulations.ledger import Line
    from understudy.simulations.operations import Operation
    from understudy.simulations.world import World

_INSTANCES: Final = """
SELECT i.id, d.name, d.version, i.status, i.outcome, i.result,
  (SELECT count(*) FROM incident n WHERE n.instance = i.no)
FROM instance i JOIN definition d ON d.no = i.definition ORDER BY i.no
"""


class End(NamedTuple):
    """Where an instance stands when all has come to rest."""

    id: str
    process: str
    version: int
    status: str
    outcome: str | None
    text: str  # Of the result.
    incidents: int

    @property
    def result(self) -> Any:
        return decode(self.text) if self.text else None


def ends(world: World, process: str = "") -> list[End]:
    """All instances, or those of one process, oldest first."""
    return [End(*row) for row in world.peek(_INSTANCES) if process in ("", row[1])]


def entries(world: World, id_: str) -> Iterator[Entry]:
    """Everything that was ever decided about an instance, oldest first."""
    for row in Evidence.of(world).histories.get(id_, ()):
        yield from row.entries


def events(world: World, id_: str) -> Iterator[Any]:
    for entry in entries(world, id_):
        yield from entry.events


def acknowledged(world: World, call: str) -> list[Operation]:
    """The calls of a kind that somebody was told are done."""
    return [operation for operation in world.operations if operation.call == call and operation.is_acknowledged]


def not_ended_as(world: World, process: str, *outcomes: str) -> Iterator[str]:
    """Instances that have not ended, or in another way, and starts that are nowhere to be found."""
    found = {end.id: end for end in ends(world, process)}
    for end in found.values():
        if end.outcome not in outcomes:
            state = end.outcome or f"{end.status}, with {end.incidents} incidents"
            yield f"{end.id} is {state}; it should have ended as {' or '.join(outcomes)}"
    for operation in acknowledged(world, "start"):
        if operation.parameters["process"] == process and operation.instance not in found:
            yield f"the start of {operation.instance} was acknowledged, but it is not there"


def openings(world: World, id_: str) -> Counter[str]:
    """How often each step of an instance was begun; a further attempt is no new beginning."""
    at: dict[int, str] = {}
    opened: Counter[str] = Counter()
    for event in events(world, id_):
        if isinstance(event, TaskOpened):
            opened[at[event.token]] += 1
        elif isinstance(event, TokenCreated | TokenMoved):
            at[event.token] = event.node
    return opened


def more_than_once(world: World, handlers: Iterable[str]) -> Iterator[str]:
    """Steps that stand once in their process, and were done under two keys: whoever trusts the key does them twice."""
    wanted = set(handlers)
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for line in world.ledger:
        if line.had_effect and line.handler in wanted:
            found.setdefault((line.instance, line.handler), {}).setdefault(line.key, line)
    for (instance, handler), lines in found.items():
        if len(lines) > 1:
            yield f"{handler} of {instance} was called under {len(lines)} keys: {', '.join(lines)}"
