"""Joins inside the branches of a fork, in a loop, and everything that arrives there arrives twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import ends, not_ended_as, openings
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, start_all, unreliable
from understudy.steps import parallel, repeat, wait
from understudy.tasks import Retry, Task, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

ROUNDS: Final = 2
RETRY: Final = Retry(4, first="20ms", factor=1)


@task(name="nested_a", into="a", retry=RETRY)
def a(n: int) -> int:
    return n + 1


@task(name="nested_b", into="b", retry=RETRY)
def b(n: int) -> int:
    return n + 2


@task(name="nested_c", into="c", retry=RETRY)
def c(n: int) -> int:
    return n + 3


@task(name="nested_d", into="d", retry=RETRY)
def d(a: int, b: int) -> int:
    return a + b


@task(name="nested_count", into="count", retry=RETRY)
def count(count: int = 0) -> int:
    return count + 1


@task(name="nested_last", into="last", retry=RETRY)
def last(c: int, d: int, said: int, count: int) -> list[int]:
    return [c, d, said, count]


EACH_ROUND: Final[tuple[Task[..., int], ...]] = (a, b, c, d, count)
SAID: Final = 7
NESTED_JOINS: Final = Process(
    "nested joins",
    repeat(
        parallel([parallel(a, b), d], parallel(c, wait("word", key="n", into="said", gives=int))),
        count,
        until=f"count >= {ROUNDS}",
    ),
    last,
    takes={"n": int},
    gives=last,
)


def check(world: World) -> Iterator[str]:
    """Every step was begun once in each round, and the last one has seen what the others gave."""
    yield from not_ended_as(world, NESTED_JOINS.name, "completed")
    for end in ends(world):
        n = int(end.id[1:])
        if end.outcome and end.result != [n + 3, 2 * n + 3, SAID, ROUNDS]:
            yield f"{end.id} has the result {end.text}"
        begun = openings(world, end.id)
        if begun[last.name] != 1 or any(begun[each.name] != ROUNDS for each in EACH_ROUND):
            yield f"{end.id} has begun its steps so often: {dict(begun)}"


@scenario(
    check=check,
    options={"limits": LIMITS},
    likely=("result told twice", "message delivered twice", "call doubled"),
    probes=("nested_join_fired", "loop_round_two_join"),
)
def nested_joins(world: World) -> None:
    """Joins in joins in a loop; results, messages and calls come twice."""
    world.play(NESTED_JOINS)
    unreliable(world)
    Keeper(world).keep(world.node("a"))
    ids = [f"n{number}" for number in range(14)]
    crowd = Crowd(world, "ann", "bob", twice=0.5)
    start_all(crowd, NESTED_JOINS.name, ids, within_ms=(0, 4_000), given=lambda id_: {"n": int(id_[1:])})

    def say() -> None:
        id_ = crowd.random.choice(ids)
        if crowd.random.random() < 0.5:
            crowd.publish("word", id_[1:], SAID)
        else:
            crowd.send(id_, "word", SAID, about=id_[1:])

    crowd.often((1, 300), say)
    Janitor(world, payload=SAID)
