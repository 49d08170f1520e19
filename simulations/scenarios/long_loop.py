"""One instance that takes ten thousand steps, round after round, through whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import ends, not_ended_as, openings
from understudy.simulations.workloads import LIMITS, Crowd, Janitor
from understudy.steps import repeat
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

STEPS_IN_A_ROUND: Final = 4  # Two tasks, and the two gateways of the loop.
ROUNDS: Final = 10_000 // STEPS_IN_A_ROUND


@task(name="loop_count", into="count", retry=Retry(5, first="10ms"))
def count(count: int = 0) -> int:
    return count + 1


@task(name="loop_add", into="total", retry=Retry(5, first="10ms"))
def add(count: int, total: int = 0) -> int:
    return total + count


LOOP: Final = Process("loop", repeat(count, add, until=f"count >= {ROUNDS}"), takes={}, gives=add)


def check(world: World) -> Iterator[str]:
    """No round is missing, and none was taken twice."""
    yield from not_ended_as(world, LOOP.name, "completed")
    for end in ends(world):
        if end.outcome and end.result != ROUNDS * (ROUNDS + 1) // 2:
            yield f"{end.id} has the sum {end.text}"
        begun = openings(world, end.id)
        if end.outcome and (begun[count.name], begun[add.name]) != (ROUNDS, ROUNDS):
            yield f"{end.id} has begun its steps so often: {dict(begun)}"


@scenario(
    check=check,
    steps=20_000,
    faults=("crash", "restart", "crash before commit", "commit lands but raises", "crash after effect"),
    options={"limits": LIMITS},
)
def long_loop(world: World) -> None:
    """A loop of ten thousand steps, of which somebody reads now and then how far it is."""
    world.play(LOOP)
    Keeper(world).keep(world.node("a"))
    crowd = Crowd(world, "ann", twice=0)
    crowd.start(LOOP.name, "round and round")
    crowd.often((1, 2_000), lambda: crowd.look("round and round"))
    Janitor(world)
