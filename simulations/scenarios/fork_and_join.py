"""Three branches at once, and a step that needs what all of them gave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import ends, more_than_once, not_ended_as, openings
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, look_on, start_all, unreliable
from understudy.steps import parallel, sleep
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

RETRY: Final = Retry(3, first="50ms")


@task(name="fork_one", into="one", retry=RETRY, timeout="2s")
def one(n: int) -> int:
    return n + 1


@task(name="fork_two", into="two", retry=RETRY)
def two(n: int) -> int:
    return n + 20


@task(name="fork_three", into="three", timeout="1s", retry=RETRY)
def three(n: int) -> int:
    return n + 300


@task(name="fork_sum", into="total")
def total(one: int, two: int, three: int) -> int:
    return one + two + three


STEPS: Final = ("fork_one", "fork_two", "fork_three", "fork_sum")
FORK_AND_JOIN: Final = Process(
    "fork and join", parallel(one, [sleep("300ms"), two], three), total, takes={"n": int}, gives=total
)


def check(world: World) -> Iterator[str]:
    """Everybody has the right sum, and no step was begun twice."""
    yield from not_ended_as(world, FORK_AND_JOIN.name, "completed")
    yield from more_than_once(world, STEPS)
    for end in ends(world):
        expected = 3 * int(end.id[1:]) + 321
        if end.outcome and end.result != expected:
            yield f"{end.id} has the result {end.text}, not {expected}"
        begun = openings(world, end.id)
        if any(begun[step] != 1 for step in STEPS):
            yield f"{end.id} has begun its steps so often: {dict(begun)}"


@scenario(check=check, options={"limits": LIMITS}, probes=("join_after_crash",))
def fork_and_join(world: World) -> None:
    """A join fires once, after all its branches, whatever dies between them."""
    world.play(FORK_AND_JOIN)
    unreliable(world)
    Keeper(world).keep(world.node("a"))
    ids = [f"f{number}" for number in range(24)]
    crowd = Crowd(world, "ann", "bob")
    start_all(crowd, FORK_AND_JOIN.name, ids, within_ms=(0, 6_000), given=lambda id_: {"n": int(id_[1:])})
    look_on(crowd, ids, (1, 600))
    Janitor(world)
