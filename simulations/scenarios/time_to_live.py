"""Messages that are good for a while: after that nobody gets them, and before that nobody misses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.model.events import MessageBuffered, VariablesSet
from understudy.model.values import decode
from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import acknowledged, ends, entries, not_ended_as
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, start_all, unreliable
from understudy.steps import sleep, throw, wait
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

KEYS: Final = 3  # Several instances wait for the same.
LONGEST_MS: Final = 3_000
FIRST: Final = 1_000  # The messages of clients count from here.


@task(name="ttl_prepare", retry=Retry(4, first="200ms", factor=1))
def prepare(n: int) -> None:
    pass


@task(name="ttl_use", retry=Retry(4, first="20ms"))
def use(n: int) -> None:
    pass


TTL: Final = Process(
    "time to live",
    prepare,
    wait("news", key=f"n % {KEYS}", into="first", timeout="2s", late=sleep("10ms")),
    throw("news", key=f"(n + 1) % {KEYS}", payload="-n", ttl="900ms"),
    sleep("500ms"),
    wait("news", key=f"n % {KEYS}", into="second", timeout="2s", late=sleep("10ms")),
    use,
    takes={"n": int},
)


def check(world: World) -> Iterator[str]:
    """Nobody has got what had expired or what another had got, and what never expires is there or was used."""
    yield from not_ended_as(world, TTL.name, "completed")
    used = Counter(heard for end in ends(world) for heard in _heard(world, end.id))
    for number, count in used.items():
        if number >= FIRST and count > 1:
            yield f"message {number} was used {count} times"
    left = {payload for (payload,) in world.peek("SELECT payload FROM message")}
    for operation in acknowledged(world, "publish"):
        payload = operation.parameters["payload"]
        if "ttl_ms" not in operation.parameters and not used[int(payload)] and payload not in left:
            yield f"message {payload} never expires, and is neither used nor there"
    for end in ends(world):
        yield from _late(world, end.id)


def _heard(world: World, id_: str) -> Iterator[int]:
    """What the waits of an instance have got."""
    for entry in entries(world, id_):
        for event in entry.events:
            if isinstance(event, VariablesSet):
                yield from (decode(value) for value in event.values.values())


def _late(world: World, id_: str) -> Iterator[str]:
    """Buffered messages that were used after their time, by the clock of whoever decided it."""
    expires_ms: dict[str, int | None] = {}
    for entry in entries(world, id_):
        for event in entry.events:
            if isinstance(event, MessageBuffered):
                expires_ms[event.payload] = event.expires_ms
            elif isinstance(event, VariablesSet):
                for payload in event.values.values():
                    until_ms = expires_ms.get(payload)
                    if until_ms is not None and until_ms <= entry.at_ms:
                        yield f"{id_} has used {payload} at {entry.at_ms}, and it was good until {until_ms}"


@scenario(check=check, options={"limits": LIMITS}, probes=("message_expired", "message_matched_again"))
def time_to_live(world: World) -> None:
    """Messages with and without a time to live, for several who wait for the same, and wait only so long."""
    world.play(TTL)
    unreliable(world, failures=(0.0, 0.05))
    Keeper(world).keep(world.node("a"))
    ids = [f"l{number}" for number in range(24)]
    crowd = Crowd(world, "ann", "bob", twice=0.3)
    random = crowd.random
    start_all(crowd, TTL.name, ids, within_ms=(0, 5_000), given=lambda id_: {"n": int(id_[1:])})
    numbers = iter(range(FIRST, 1_000_000))

    def say() -> None:
        more = {} if random.random() < 0.3 else {"ttl_ms": random.randrange(1, LONGEST_MS)}
        if random.random() < 0.7:
            crowd.publish("news", str(random.randrange(KEYS)), next(numbers), **more)
        else:
            crowd.send(random.choice(ids), "news", next(numbers), **more)

    crowd.often((1, 250), say)
    Janitor(world, payload=0)
