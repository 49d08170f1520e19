"""A bit of everything: several clients, several processes, operators who interfere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.steps import choose, parallel, saga, sleep, wait
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World


@task(into="a", retry=Retry(3, first="100ms"), timeout="2s")
def first(n: int) -> int:
    return n + 1


@first.undo
def undo_first(a: int) -> None:
    pass


@task(into="b", retry=Retry(2, first="100ms"), timeout="2s")
def left(a: int) -> int:
    return a + 1


@left.undo
def undo_left(b: int) -> None:
    pass


@task(into="c", retry=Retry(2, first="100ms"), timeout="2s")
def right(a: int) -> int:
    return a + 1


@task
def last(n: int) -> int:
    return n


MIXED = Process(
    "mixed",
    saga(first, parallel(left, right)),
    choose(("n > 5", [sleep("1s")]), otherwise=[wait("go", key="n", timeout="5s")]),
    last,
    takes={"n": int},
    gives=last,
)


@scenario(steps=2_000)
def mixed(world: World) -> None:
    """Several clients start, send, cancel, pause and look, all at once."""
    world.play(MIXED)
    Keeper(world).keep(world.node("a"))
    random = world.stream("workload")

    def act(number: int) -> None:
        if world.is_settling:
            return
        client = world.clients[random.randrange(len(world.clients))]
        instance = f"m{random.randrange(12)}"
        kind = random.randrange(10)
        if kind < 5:
            client.start("mixed", instance, {"n": str(int(instance[1:]))})
        elif kind == 5:
            client.call("send", instance, {"id": instance, "name": "go", "key": f"k{number}", "about": instance[1:]})
        elif kind == 6:
            client.call("publish", "", {"name": "go", "about": instance[1:], "key": f"p{number}"})
        elif kind == 7:
            client.call("read", instance, {})
        elif kind == 8:
            what = random.choice(("pause", "resume", "resume"))
            client.call(what, instance, {"id": instance, "key": f"o{number}"})
        elif random.random() < 0.3:
            client.call("cancel", instance, {"id": instance, "key": f"c{number}"})
        world.after(random.randrange(1, 400), lambda: act(number + 1))

    for name in ("ann", "bob", "cleo"):
        world.client(name)
    world.after(0, lambda: act(1))
