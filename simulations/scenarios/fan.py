"""A thousand instances at once, far more than are kept in memory or let through the door."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import attrs

from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import more_than_once
from understudy.simulations.workloads import LIMITS, Crowd, Janitor
from understudy.steps import sleep
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

INSTANCES: Final = 1_000
BURST: Final = 100


@task(name="fan_work", into="done", retry=Retry(5, first="100ms", factor=1))
def work(n: int) -> int:
    return 2 * n


FAN: Final = Process("fan", sleep("500ms"), work, takes={"n": int}, gives=work)


def check(world: World) -> Iterator[str]:
    """All have ended, each with its own result, and each has worked under one key."""
    rows = world.peek("SELECT id, outcome, result FROM instance ORDER BY no")
    if len(rows) != INSTANCES:
        yield f"{len(rows)} of {INSTANCES} instances are there"
    for id_, outcome, result in rows:
        if outcome != "completed" or result != str(2 * int(id_[1:])):
            yield f"{id_} is {outcome or 'not ended'} with the result {result}"
    yield from more_than_once(world, (work.name,))


@scenario(
    check=check,
    steps=16_000,
    faults=("crash", "restart", "commit lands but raises", "crash after commit", "call lost", "mailbox full"),
    options={"limits": attrs.evolve(LIMITS, resident=200, idle_ms=300)},
    probes=("batch_of_many_commits", "passivated_and_reactivated"),
)
def fan(world: World) -> None:
    """A thousand instances are started in ten bursts; whoever finds the door closed comes again."""
    world.play(FAN)
    Keeper(world).keep(world.node("a"))
    crowd = Crowd(world, "ann", "bob", "cleo", twice=0.02)

    def burst(first: int) -> None:
        for number in range(first, first + BURST):
            crowd.start(FAN.name, f"x{number}", n=number)

    for first in range(0, INSTANCES, BURST):
        world.after(first, lambda first=first: burst(first))  # type: ignore[misc]  # mypy cannot infer such a lambda.
    Janitor(world)
