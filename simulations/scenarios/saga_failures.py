"""A saga that fails at a step which its instance was told beforehand, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.model.events import TaskCompleted, TokenCreated, TokenMoved
from understudy.model.states import Mode
from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import ends, events, not_ended_as
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, look_on, start_all, unreliable
from understudy.steps import parallel, saga, sleep
from understudy.tasks import Retry, Task, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

NAMES: Final = ("reserve", "charge", "pack", "label", "ship", "inform")  # The last two are a saga inside.
INSTANCES: Final = 3 * (len(NAMES) + 1)
RETRY: Final = Retry(6, first="20ms", factor=1)


class Declined(Exception):
    """It is of no use to try again."""


def _step(number: int, name: str) -> Task[..., int]:
    @task(name=f"saga_{name}", retry=Retry(6, first="20ms", factor=1, never=Declined), timeout="5s")
    def do(fails_at: int) -> int:
        if fails_at == number:
            raise Declined(name)
        return number

    @do.undo(name=f"saga_undo_{name}", retry=RETRY)
    def undo(fails_at: int) -> None:
        pass

    return do


reserve, charge, pack, label, ship, inform = (_step(number, name) for number, name in enumerate(NAMES))
SAGA: Final = Process(
    "saga",
    saga(reserve, charge, parallel(pack, [sleep("50ms"), label]), saga(ship, sleep("30ms"), inform)),
    takes={"fails_at": int},
)


def done_in_order(world: World, id_: str) -> list[str]:
    """The steps of the sagas that were done, as they were committed."""
    forward: dict[int, str] = {}  # Where each token is.
    done: list[str] = []
    for event in events(world, id_):
        if isinstance(event, TokenMoved) or (isinstance(event, TokenCreated) and event.mode is Mode.FORWARD):
            forward[event.token] = event.node
        elif isinstance(event, TaskCompleted) and forward.get(event.token, "").startswith("saga_"):
            done.append(forward[event.token])
    return done


def undone_in_order(world: World, id_: str) -> list[str]:
    """The steps whose undo has had an effect, by the ledger; what came again under its key counts once."""
    seen: dict[str, str] = {}
    for line in world.ledger:
        if line.instance == id_ and line.had_effect and line.handler.startswith("saga_undo_"):
            seen.setdefault(line.key, line.handler.replace("undo_", ""))
    return list(seen.values())


def check(world: World) -> Iterator[str]:
    """All or nothing: whoever has failed has taken back all that was done, the last first."""
    yield from not_ended_as(world, SAGA.name, "completed", "failed", "cancelled")
    for end in ends(world):
        done, undone = done_in_order(world, end.id), undone_in_order(world, end.id)
        if end.outcome == "completed" and (undone or sorted(done) != sorted(f"saga_{name}" for name in NAMES)):
            yield f"{end.id} is completed, with {done} done and {undone} undone"
        elif end.outcome and end.outcome != "completed" and undone != done[::-1]:
            yield f"{end.id} is {end.outcome}: it had done {done} and has undone {undone}"
        elif end.outcome == "completed" and int(end.id[1:]) % (len(NAMES) + 1) < len(NAMES):
            yield f"{end.id} is completed, although one of its steps fails"


@scenario(
    check=check,
    options={"limits": LIMITS},
    without=("handlers",),  # They have a behaviour of their own.
    probes=("undo_across_crash", "undo_interrupted_by_crash", "saga_in_saga_undone", "cancel_while_compensating"),
)
def saga_failures(world: World) -> None:
    """Sagas in sagas that fail at each of their steps, and some are cancelled while they are taken back."""
    world.play(SAGA)
    unreliable(world, failures=(0.0, 0.1))
    Keeper(world).keep(world.node("a"))
    ids = [f"s{number}" for number in range(INSTANCES)]
    crowd = Crowd(world, "ann", "bob")
    start_all(crowd, SAGA.name, ids, within_ms=(0, 6_000), given=lambda i: {"fails_at": int(i[1:]) % (len(NAMES) + 1)})
    crowd.often((1, 900), lambda: crowd.order("cancel", crowd.random.choice(ids)))
    look_on(crowd, ids, (1, 1_500))
    Janitor(world)
