"""A scenario played with a seed, from the draw to the verdict."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from understudy.actors.stepping import Deadlock, Livelock
from understudy.model.invariants import Violation
from understudy.simulations.plugins import CHECKERS, SCENARIOS, Fault, Scenario
from understudy.simulations.schedule import Schedule, drawn_schedule
from understudy.simulations.swarm import draw_faults
from understudy.simulations.trace import Moment
from understudy.simulations.world import World


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of one seed."""

    scenario: str
    seed: int
    asked: int  # How many steps it was to have before it settles.
    steps: int
    drawn: tuple[str, ...]
    digest: str
    violations: tuple[Violation, ...]
    faults: Counter[str]
    probes: Counter[str]
    lives: int
    commits: int
    operations: int
    calls: int  # Of handlers.
    seconds: float
    moments: tuple[Moment, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def replay(self) -> str:
        """The command that plays it again, with every step in words."""
        return f"python -m understudy.simulations play {self.scenario} --seed {self.seed} --steps {self.asked}"


def play(
    scenario: Scenario | str,
    seed: int,
    *,
    steps: int | None = None,
    recording: bool = False,
    schedule: Schedule | None = None,
    faults: Sequence[Fault] | None = None,
    memory: Any = None,
    only: Sequence[str] | None = None,
) -> Outcome:
    """Play a scenario with everything that its seed draws, unless it is given; with `only` these checkers."""
    wanted = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    length = wanted.steps if steps is None else steps
    began_s = time.perf_counter()
    world = World(seed, recording=recording, memory=memory, **wanted.options)
    draw = world.stream("swarm")
    chosen = list(draw_faults(draw, wanted) if faults is None else faults)
    world.schedule = schedule or drawn_schedule(world.stream("order"), steps=length)
    world.haste = draw.choice((0.0, 0.0, 0.01, 0.1))
    drawn = (str(world.schedule), f"haste {world.haste}", *map(str, chosen))
    try:
        with silence():
            _live(world, wanted, chosen, length, only)
        return Outcome(
            scenario=wanted.name,
            seed=seed,
            asked=length,
            steps=world.steps,
            drawn=drawn,
            digest=world.trace.digest(),
            violations=tuple(world.violations),
            faults=world.counts,
            probes=world.probes,
            lives=world.lives,
            commits=world.commits,
            operations=len(world.operations),
            calls=len(world.ledger),
            seconds=time.perf_counter() - began_s,
            moments=tuple(world.trace.moments),
        )
    finally:
        world.close()


def _live(world: World, scenario: Scenario, faults: Sequence[Fault], steps: int, only: Sequence[str] | None) -> None:
    checkers = [checker() for name, checker in CHECKERS.items() if only is None or name in only]
    for checker in checkers:
        checker.watch(world)
    try:
        for fault in faults:
            fault.arm(world)
        scenario.begin(world)
        world.run(steps)
        world.settle()
        scenario.end(world)
    except (Deadlock, Livelock) as error:
        world.violate("I13", f"{type(error).__name__}: {error}")
        return
    for checker in checkers:
        for found in checker.find(world):
            _found(world, checker.id, found)
    for fault in faults:
        for words in fault.check(world):
            world.violate(fault.name, words)
    for words in scenario.check(world):
        world.violate(scenario.name, words)


def _found(world: World, id_: str, found: str | Violation) -> None:
    if isinstance(found, Violation):
        world.violate(found.id, found.message, found.instance)
    else:
        world.violate(id_, found)


@contextmanager
def silence() -> Iterator[None]:
    """A world is full of crashes, and each would be a page in the log."""
    loggers = [logging.getLogger(name) for name in ("understudy", "understudy.actors", "pykka")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
