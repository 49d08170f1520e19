"""A timer fires, a message comes and an operator cancels, all at about the same moment: one of them is first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.model.events import EndingBegun, TaskOpened, WaitConsumed
from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import acknowledged, ends, entries, not_ended_as
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, unreliable
from understudy.steps import sleep, wait
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

NAP_MS: Final = 1_000
PATIENCE_MS: Final = 700
NEAR_MS: Final = 60  # How far from the moment at which the timer is due others act.


@task(name="timer_rang", retry=Retry(3, first="20ms"))
def rang(n: int) -> int:
    return n


@task(name="timer_late", retry=Retry(3, first="20ms"))
def late(n: int) -> int:
    return n


TIMER: Final = Process(
    "timer",
    sleep(f"{NAP_MS}ms"),
    rang,
    wait("word", timeout=f"{PATIENCE_MS}ms", late=late),
    takes={"n": int},
)


def check(world: World) -> Iterator[str]:
    """Whoever is cancelled begins nothing more; whoever was told that it is cancelled is; one cause wakes a wait."""
    yield from not_ended_as(world, TIMER.name, "completed", "cancelled")
    outcomes = {end.id: end.outcome for end in ends(world)}
    for operation in acknowledged(world, "cancel"):
        if outcomes[operation.instance] != "cancelled":
            yield f"{operation.instance} is {outcomes[operation.instance]}; its cancel was acknowledged"
    for id_ in outcomes:
        yield from _in_order(world, id_)


def _in_order(world: World, id_: str) -> Iterator[str]:
    is_cancelled = False
    fired = 0
    for entry in entries(world, id_):
        for event in entry.events:
            if isinstance(event, TaskOpened | WaitConsumed) and is_cancelled:
                yield f"{id_}: {type(event).__name__} by {entry.cause}, after it was cancelled"
            fired += isinstance(event, WaitConsumed) and entry.cause == "timer"
            is_cancelled = is_cancelled or isinstance(event, EndingBegun)
    rung = {line.key for line in world.ledger if line.instance == id_ and line.handler in (rang.name, late.name)}
    if len(rung) > fired:
        yield f"{id_} has done {len(rung)} steps that only a timer leads to, and {fired} timers have fired"


@scenario(
    check=check,
    options={"limits": LIMITS},
    probes=("timer_fired_after_restart", "clock_went_back_over_a_timer", "wait_timed_out", "cancelled_while_paused"),
)
def timer_against_cancel(world: World) -> None:
    """Timers, messages and cancels meet at the same moment."""
    world.play(TIMER)
    unreliable(world, failures=(0.0, 0.05))
    Keeper(world).keep(world.node("a"))
    crowd = Crowd(world, "ann", "bob", twice=0.3)
    random = crowd.random

    def near(due_ms: int) -> tuple[int, int]:
        at_ms = max(0, due_ms + random.randrange(-NEAR_MS, NEAR_MS))
        return at_ms, at_ms + 1

    def begin(number: int) -> None:
        id_ = f"t{number}"
        crowd.start(TIMER.name, id_, n=number)
        if random.random() < 0.5:
            crowd.later(near(random.choice((NAP_MS, NAP_MS + PATIENCE_MS))), lambda: crowd.order("cancel", id_))
        if random.random() < 0.3:
            crowd.later(near(NAP_MS - 200), lambda: crowd.order("pause", id_))
            crowd.later(near(NAP_MS + 200), lambda: crowd.order("resume", id_))
        if random.random() < 0.5:
            crowd.later(near(NAP_MS + PATIENCE_MS), lambda: crowd.send(id_, "word"))
        if random.random() < 0.2:
            crowd.later((1, 3_000), lambda: crowd.publish("word", "", None, ttl_ms=500))

    for number in range(40):
        crowd.later((0, 10_000), lambda number=number: begin(number))  # type: ignore[misc]  # As mypy has it.
    Janitor(world)
