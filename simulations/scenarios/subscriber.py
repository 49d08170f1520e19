"""Somebody who wants to hear of everything, cannot for a while, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.process import Process
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import not_ended_as
from understudy.simulations.script import Mishap
from understudy.simulations.subscriber import Subscriber
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, interfere, rows, start_all, unreliable
from understudy.steps import parallel, sleep
from understudy.subscriptions import Change
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

TRIES: Final = 3
OPERATOR_MS: Final = 2_000
ROUNDS: Final = 100
_HELD: Final = """
SELECT d.subscriber, i.id FROM held d JOIN instance i ON i.no = d.instance WHERE d.due_ms IS NULL
ORDER BY d.subscriber, d.instance
"""


@task(name="told_left", retry=Retry(4, first="50ms"))
def left(n: int) -> None:
    pass


@task(name="told_right", retry=Retry(4, first="50ms"))
def right(n: int) -> None:
    pass


TOLD: Final = Process("told", parallel(left, right), sleep("600ms"), left, takes={"n": int})


class Mirror(Subscriber):
    """A copy of all histories, kept by what it is told; a repeat changes nothing."""

    def __init__(self, world: World) -> None:
        self.known: dict[str, list[int]] = {}
        self.is_out = False  # Nothing can be told to it.
        self.sulks_at = ""  # It takes nothing about this instance.
        super().__init__(world, "mirror", self.mirror, tries=TRIES, backoff="200ms")

    def mirror(self, change: Change) -> None:
        if not self.world.is_settling and (self.is_out or change.instance == self.sulks_at):
            raise Mishap("the mirror cannot be reached")
        known = self.known.setdefault(change.instance, [])
        if change.n > len(known):
            known.append(change.n)


def check(world: World) -> Iterator[str]:
    """In the end everybody has heard of everything, in its order, and nothing is held back any more."""
    yield from not_ended_as(world, TOLD.name, "completed", "cancelled")
    evidence = Evidence.of(world)
    for hold in evidence.held:
        yield f"{hold.subscriber} still does not hear of {hold.instance}, after {hold.tries} tries"
    for subscriber in world.subscribers:
        heard = {delivery.seq for delivery in subscriber.deliveries if delivery.is_taken}
        missed = [row for row in evidence.rows if row.seq not in heard]
        if missed:
            first = missed[0]
            yield f"{subscriber.name} has missed {len(missed)} commits, first {first.version} of {first.instance}"
    known = next(each.known for each in world.subscribers if isinstance(each, Mirror))
    for instance, history in evidence.histories.items():
        if known.get(instance) != list(range(1, len(history) + 1)):
            yield f"the mirror knows {known.get(instance)} of {instance}, which has {len(history)} commits"


@scenario(
    check=check,
    options={"limits": LIMITS},
    without=("clock jumps back", "clock skewed"),  # A backoff is counted by the wall clock, and may then take a day.
    probes=("subscriber_held_and_released", "subscriber_needed_an_operator", "delivered_again"),
)
def subscriber(world: World) -> None:
    """One subscriber is out for a while or hates an instance, another one fails by chance; operators help."""
    world.play(TOLD)
    unreliable(world, failures=(0.0, 0.05))
    mirror = Mirror(world)
    Subscriber(world, "audit", tries=TRIES, backoff="100ms", failing=0.1)
    Keeper(world).keep(world.node("a"))
    ids = [f"i{number}" for number in range(16)]
    crowd = Crowd(world, "ann", "bob")
    start_all(crowd, TOLD.name, ids, within_ms=(0, 6_000), given=lambda id_: {"n": int(id_[1:])})
    interfere(crowd, ids, (1, 1_500))

    def sulk() -> None:
        mirror.is_out = crowd.random.random() < 0.4
        mirror.sulks_at = crowd.random.choice(ids)

    crowd.often((100, 2_000), sulk)
    Helper(crowd)
    Janitor(world)


class Helper:
    """An operator who has held deliveries tried again: some of them now and then, and all of them at the end."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._world = crowd.world
        self._client = crowd.world.client("operator")
        self._rounds = 0
        crowd.often((1, 3_000), self._help)
        crowd.world.on_settle.append(self._help_all)

    def _help(self) -> None:
        for name, id_ in rows(self._world, _HELD):
            if self._world.is_settling or self._crowd.random.random() < 0.3:
                self._client.call("redeliver", id_, {"subscriber": name, "id": id_})

    def _help_all(self) -> None:
        self._rounds += 1
        self._help()
        if self._rounds < ROUNDS:
            self._world.after(OPERATOR_MS, self._help_all)
