"""Processes that nobody has written, and everybody who may interfere with them: the scenario for the unforeseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.random_process import random_process, refusing
from understudy.simulations.script import Conduct
from understudy.simulations.workloads import (
    LIMITS,
    Crowd,
    Janitor,
    interfere,
    keep_starting,
    look_on,
    resolve,
    rows,
    talk,
    unended,
    unreliable,
)

if TYPE_CHECKING:
    from understudy.simulations.world import World

MOST_OPEN: Final = 10
KEYS: Final = 3  # Several instances wait for the same messages.


def check(world: World) -> Iterator[str]:
    """With everybody's help everything has ended, and a transactional task was done once for each key."""
    left = unended(world)
    if left:
        yield f"{', '.join(left)}: still there, although everything was done to end them"
    if rows(world, "SELECT 1 FROM sqlite_master WHERE name = 'effects'"):
        counts = Counter(key for (key,) in rows(world, "SELECT key FROM effects"))
        for key in sorted(key for key, count in counts.items() if count > 1):
            yield f"the transactional task of {key} has left {counts[key]} effects"


@scenario(check=check, options={"limits": LIMITS}, likely=("crash",))
def random_processes(world: World) -> None:
    """Drawn processes with everything in them; clients, operators and messages from all sides."""
    random = world.stream("processes")
    processes = [random_process(random, f"p{number}") for number in range(random.randrange(1, 4))]
    world.play(*processes)
    for process in processes:
        world.script.always.update(dict.fromkeys(refusing(process), Conduct.SUCCEED))
    unreliable(world)
    Keeper(world).keep(world.node("a"))
    crowd = Crowd(world, "ann", "bob", "cleo")
    names = [process.name for process in processes]
    ids = keep_starting(crowd, names, (1, 700), given=lambda number: {"n": number % KEYS}, most_open=MOST_OPEN)
    talk(crowd, processes, ids, (1, 800), keys=KEYS)
    interfere(crowd, ids, (1, 1_000), cancel=0.15)
    resolve(crowd, (1, 1_000))
    look_on(crowd, ids, (1, 1_500))
    Janitor(world)
