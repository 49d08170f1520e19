"""Messages that are sent, in any order and long before anybody waits for them, and none of them is lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import ends, not_ended_as
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, unreliable
from understudy.steps import parallel, sleep, wait
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.operations import Operation
    from understudy.simulations.world import World

START_MS: Final = 3_000
TALK_MS: Final = 5_000
WORDS: Final = (111, 222, 333)  # Each instance is told these.
INSTANCES: Final = 24


@task(name="early_prepare", retry=Retry(4, first="300ms", factor=1))
def prepare(n: int) -> None:
    pass


@task(name="early_collect", into="all", retry=Retry(4, first="20ms"))
def collect(one: int, two: int, three: int) -> list[int]:
    return [one, two, three]


MESSAGES: Final = Process(
    "messages",
    prepare,
    parallel(
        [wait("word", key="n", into="one", gives=int), sleep("100ms"), wait("word", key="n", into="two", gives=int)],
        [sleep("200ms"), wait("word", key="n", into="three", gives=int)],
    ),
    collect,
    takes={"n": int},
    gives=collect,
)


def check(world: World) -> Iterator[str]:
    """Everybody has got exactly what was said to it; nothing is left over."""
    yield from not_ended_as(world, MESSAGES.name, "completed")
    for end in ends(world):
        if end.outcome and Counter(end.result) != Counter(WORDS):
            yield f"{end.id} was told {WORDS} and has understood {end.text}"
    left = world.peek("SELECT count(*) FROM message")[0][0]
    if left:
        yield f"{left} messages are left over, although each has somebody who waits for it"


class Talker:
    """Says a word to an instance, under one key, until somebody has heard it."""

    def __init__(self, crowd: Crowd, id_: str, word: int) -> None:
        self._crowd = crowd
        self._id = id_
        request: dict[str, object] = {"name": "word", "payload": str(word), "key": crowd.new_key()}
        if crowd.random.random() < 0.4:
            self._call, self._request = "publish", {**request, "about": id_[1:]}
        else:
            self._call, self._request = "send", {**request, "id": id_, "about": crowd.random.choice(("", id_[1:]))}
        self._later(TALK_MS)

    def _later(self, within_ms: int) -> None:
        self._crowd.world.after(self._crowd.random.randrange(1, within_ms), self._say)

    def _say(self) -> None:
        times = 2 if self._crowd.random.random() < self._crowd.twice else 1
        for _ in range(times):
            self._crowd.someone().call(self._call, self._id, self._request, then=self._heard)

    def _heard(self, operation: Operation) -> None:
        if operation.error == "UnknownInstance":
            self._later(2_000)


@scenario(
    check=check,
    options={"limits": LIMITS},
    probes=("message_before_wait", "message_taken_after_restart", "duplicate_request_answered_from_record"),
)
def message_before_wait(world: World) -> None:
    """As many messages as waits, sent and published before, while and after somebody waits."""
    world.play(MESSAGES)
    unreliable(world)
    Keeper(world).keep(world.node("a"))
    crowd = Crowd(world, "ann", "bob", "cleo", twice=0.3)

    def begin(number: int) -> None:
        crowd.start(MESSAGES.name, f"m{number}", n=number)

    for number in range(INSTANCES):
        world.after(crowd.random.randrange(START_MS), lambda number=number: begin(number))  # type: ignore[misc]
        for word in WORDS:
            Talker(crowd, f"m{number}", word)
    Janitor(world, talks=False)
