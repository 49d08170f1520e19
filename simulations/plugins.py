"""The three kinds of plug-ins of a world, and the scenario that composes them.

A *workload* says what clients do, a *fault* what goes wrong, a *checker* what must hold all the same. None of them
knows another. Each fault and each checker stands in a table under its name, so that a report can say what was never
drawn and what was never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs

from understudy.model.invariants import Violation

if TYPE_CHECKING:
    from understudy.simulations.world import World

SURVIVE: Final = "survive"  # Nothing is lost, nothing is doubled, everything goes on.
REFUSE: Final = "refuse"  # A typed error to whoever asked; nothing is changed.
QUARANTINE: Final = "quarantine"  # An incident that is visible; the others go on.


class Fault:
    """One way in which things go wrong. `rate` is how often, for each step."""

    name: ClassVar[str]
    kind: ClassVar[str]  # process, handlers, messages, time, storage or change
    must: ClassVar[str]  # What it must lead to.

    def __init__(self, random: Random, rate: float) -> None:
        self.random = random
        self.rate = rate

    def arm(self, world: World) -> None:
        """Begin to strike, by the world's hooks; it must stop by itself once `world.is_settling`."""
        raise NotImplementedError

    def check(self, world: World) -> Iterable[str]:  # noqa: ARG002  # Most are covered by what must always hold.
        """After the world has come to rest: whether the fault has led to what it must."""
        return ()

    def __str__(self) -> str:
        return f"{self.name} ({self.rate:.5f})"

    def again(self, world: World, strike: Callable[[], object]) -> None:
        """Strike after a number of steps that is drawn by the rate, and again and again."""

        def now() -> None:
            if not world.is_settling:
                strike()
                self.again(world, strike)

        world.at_step(world.steps + 1 + int(self.random.expovariate(self.rate)), now)


FAULTS: Final[dict[str, type[Fault]]] = {}


def fault(cls: type[Fault]) -> type[Fault]:
    """Put a fault into the table."""
    assert cls.name not in FAULTS, cls.name
    FAULTS[cls.name] = cls
    return cls


class Checker:
    """One thing that must hold in every world, whatever was drawn."""

    id: ClassVar[str]  # Of the invariant.
    statement: ClassVar[str]

    def watch(self, world: World) -> None:
        """Look on from the beginning, by the world's hooks."""

    def find(self, world: World) -> Iterable[str | Violation]:
        """After the world has come to rest: what does not hold."""
        raise NotImplementedError


CHECKERS: Final[dict[str, type[Checker]]] = {}


def checker(cls: type[Checker]) -> type[Checker]:
    """Put a checker into the table."""
    assert cls.__name__ not in CHECKERS, cls.__name__
    CHECKERS[cls.__name__] = cls
    return cls


PROBES: Final[dict[str, str]] = {}


def probes(**descriptions: str) -> None:
    """Name rare states that worlds should reach; a report lists those that none has."""
    PROBES.update(descriptions)


def _no_words(_world: World) -> Iterable[str]:
    return ()


def _no_more(_world: World) -> None:
    pass


@attrs.frozen(kw_only=True)
class Scenario:
    """A workload, the faults that make sense beside it, and what else must hold there."""

    name: str
    about: str
    begin: Callable[[World], None]  # Plays processes, opens nodes, sets clients to work.
    faults: tuple[str, ...] | None = None  # None: all that there are.
    without: tuple[str, ...] = ()  # Kinds of faults, or single ones, that make no sense there.
    likely: tuple[str, ...] = ()  # Those that it is about: most of its worlds have each of them.
    steps: int = 2_000
    nodes: int = 1
    options: dict[str, Any] = attrs.field(factory=dict)  # For `World`.
    end: Callable[[World], None] = _no_more  # When all has come to rest, before anybody looks: what is still to happen.
    check: Callable[[World], Iterable[str]] = _no_words
    probes: tuple[str, ...] = ()  # Those that it is there to reach.


SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(**fields: Any) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Put a function that begins a scenario into the table; its docstring says what the scenario is about."""

    def register(begin: Callable[[World], None]) -> Callable[[World], None]:
        name = fields.pop("name", begin.__name__)
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(name=name, about=(begin.__doc__ or "").strip(), begin=begin, **fields)
        return begin

    return register
