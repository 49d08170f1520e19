"""Three nodes on one file: an owner that stands still is replaced, wakes up, and must find out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import attrs

from understudy.process import Process
from understudy.simulations.keeping import Pauses, Rival
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import ends, more_than_once, not_ended_as
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, interfere, look_on, start_all, unreliable
from understudy.steps import parallel, sleep
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

LEASE_MS: Final = 1_000
RETRY: Final = Retry(4, first="100ms", factor=1)


@task(name="handover_left", into="left", retry=RETRY)
def left(n: int) -> int:
    return n + 1


@task(name="handover_right", into="right", retry=RETRY)
def right(n: int) -> int:
    return n + 2


@task(name="handover_both", into="both", retry=RETRY)
def both(left: int, right: int) -> int:
    return left * right


HANDOVER: Final = Process(
    "handover", parallel(left, [sleep("700ms"), right]), sleep("300ms"), both, takes={"n": int}, gives=both
)


def check(world: World) -> Iterator[str]:
    """Epochs follow each other in history, whoever was replaced has stepped down, and nobody notices the difference."""
    yield from not_ended_as(world, HANDOVER.name, "completed", "cancelled")
    yield from more_than_once(world, (left.name, right.name, both.name))
    for end in ends(world):
        n = int(end.id[1:])
        if end.outcome == "completed" and end.result != (n + 1) * (n + 2):
            yield f"{end.id} has the result {end.text}"
    highest = 0
    for seq, epoch in world.peek("SELECT seq, epoch FROM history ORDER BY seq"):
        if epoch < highest:
            yield f"commit {seq} is of epoch {epoch}, after one of epoch {highest}"
        highest = max(highest, epoch)
    owners = [life for life in world.all_lives() if life.system.services.lost is None]
    if len(owners) != 1:
        yield f"{len(owners)} nodes believe that they own the file: {', '.join(life.name for life in owners)}"


@scenario(
    check=check,
    nodes=3,
    options={"limits": attrs.evolve(LIMITS, lease_ms=LEASE_MS)},
    without=("clock skewed",),  # The nodes of this scenario are on one machine.
    probes=("took_over_from_a_hung_owner", "fenced_owner_woke"),
)
def handover(world: World) -> None:
    """Owners are stopped for less than a lease, or for more, while clients go on with whomever they know."""
    world.play(HANDOVER)
    unreliable(world, failures=(0.0, 0.05))
    nodes = [world.node(name, beats=True) for name in ("a", "b", "c")]
    for node in nodes:
        Rival(world, node)
    Pauses(world, between_ms=(200, 2_500), longest_ms=4 * LEASE_MS)
    ids = [f"h{number}" for number in range(20)]
    crowd = Crowd(world, "ann", "bob", "cleo")
    for member, node in zip(crowd.members, nodes, strict=True):
        if crowd.random.random() < 0.5:
            member.prefers = node  # Whoever is used to a node asks it first, be it the owner or not.
    start_all(crowd, HANDOVER.name, ids, within_ms=(0, 8_000), given=lambda id_: {"n": int(id_[1:])})
    interfere(crowd, ids, (1, 1_500), cancel=0.1)
    look_on(crowd, ids, (1, 1_000))
    Janitor(world)
