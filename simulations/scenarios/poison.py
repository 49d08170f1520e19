"""One handler ruins every attempt, or the whole process, beside instances that have nothing to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.model.events import InstanceEnded, InstanceStarted
from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import ends, entries, not_ended_as
from understudy.simulations.script import Conduct
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, look_on, start_all
from understudy.steps import parallel, sleep
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

TIMEOUT_MS: Final = 800
KILLS: Final = "kills the process"
WAYS: Final = (
    Conduct.FAIL_FIRST,
    Conduct.FAIL_AFTER,
    Conduct.HANG,
    Conduct.UNSERIALIZABLE,
    Conduct.TOO_LARGE,
    Conduct.EXIT,
    Conduct.INTERRUPT,
    KILLS,
    KILLS,
)
OWN_TIME_MS: Final = 300  # What a healthy instance sleeps; its handlers take no time.


@task(name="poison_drink", retry=Retry(2, first="50ms"), timeout=f"{TIMEOUT_MS}ms")
def drink(n: int) -> int:
    return n


@task(name="poison_healthy_one", into="one", retry=Retry(4, first="50ms"))
def healthy_one(n: int) -> int:
    return n


@task(name="poison_healthy_two", into="two", retry=Retry(4, first="50ms"))
def healthy_two(n: int) -> int:
    return n


POISONED: Final = Process("poisoned", drink, takes={"n": int})
HEALTHY: Final = Process("healthy", parallel(healthy_one, [sleep(f"{OWN_TIME_MS}ms"), healthy_two]), takes={"n": int})


def check(world: World) -> Iterator[str]:
    """The healthy are done, the poisoned can be seen to be stuck; without other faults nobody was held up by them."""
    yield from not_ended_as(world, HEALTHY.name, "completed")
    for end in ends(world, POISONED.name):
        if end.outcome or end.incidents != 1:
            yield f"{end.id} is {end.outcome or end.status} with {end.incidents} incidents"
    if not world.counts and world.stand_ins.get(drink.name) is None:
        for end in ends(world, HEALTHY.name):
            yield from _held_up(world, end.id)


def _held_up(world: World, id_: str) -> Iterator[str]:
    moments = {type(event): entry.at_ms for entry in entries(world, id_) for event in entry.events}
    took_ms = moments[InstanceEnded] - moments[InstanceStarted]
    if took_ms > OWN_TIME_MS + TIMEOUT_MS:
        yield f"{id_} took {took_ms} ms, of which it slept {OWN_TIME_MS}: more than a handler's timeout too long"


@scenario(
    check=check,
    options={"limits": LIMITS},
    without=("handlers", "operator between two lives"),  # Handlers have one vice here, and nobody cures it.
    probes=("third_lost_attempt_incident", "handler_overran", "result_not_storable"),
)
def poison(world: World) -> None:
    """Handlers that raise, exit, hang, give what cannot be stored or kill their process, beside healthy ones."""
    world.play(POISONED, HEALTHY)
    world.haste = 0.0  # Time passes only when nobody has anything to do: else nobody could say who was held up by whom.
    random = world.stream("poison")
    way = random.choice(WAYS)
    if isinstance(way, Conduct):
        world.script.always[drink.name] = way
    else:
        world.stand_ins[drink.name] = lambda: _kill(world)
    Keeper(world).keep(world.node("a"))
    crowd = Crowd(world, "ann", "bob")
    poisoned, healthy = [f"p{n}" for n in range(4)], [f"h{n}" for n in range(25)]
    start_all(crowd, POISONED.name, poisoned, within_ms=(0, 4_000), given=lambda _id: {"n": 1})
    start_all(crowd, HEALTHY.name, healthy, within_ms=(0, 8_000), given=lambda _id: {"n": 1})
    look_on(crowd, [*poisoned, *healthy], (1, 900))
    Janitor(world, spares=lambda id_: id_.startswith("p"))


def _kill(world: World) -> None:
    life = world.owner
    if life is not None:
        world.doom(life, "its handler kills it")
