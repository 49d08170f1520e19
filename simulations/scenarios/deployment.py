"""New versions of a process come while instances run, with or without a restart; everybody stays with its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from understudy.model.events import InstanceStarted
from understudy.process import Process
from understudy.simulations.keeping import Keeper
from understudy.simulations.plugins import scenario
from understudy.simulations.scenarios.outcomes import ends, events, not_ended_as, openings
from understudy.simulations.workloads import LIMITS, Crowd, Janitor, look_on, unreliable
from understudy.steps import parallel, sleep, wait
from understudy.tasks import Retry, task

if TYPE_CHECKING:
    from understudy.simulations.world import World

RETRY: Final = Retry(4, first="50ms", factor=1)
NAME: Final = "deployed"


@task(name="deploy_first", retry=RETRY)
def first(n: int) -> None:
    pass


@task(name="deploy_second", retry=RETRY)
def second(n: int) -> None:
    pass


@task(name="deploy_third", retry=RETRY)
def third(n: int) -> None:
    pass


# All versions use the same handlers: a version whose handler nobody has bound would be another story.
VERSIONS: Final[tuple[Process[Any, Any], ...]] = (
    Process(NAME, first, sleep("900ms"), second, third, takes={"n": int}),
    Process(NAME, third, wait("word", timeout="1s", late=first), second, second, takes={"n": int}),
    Process(NAME, parallel([first, second], [sleep("400ms"), third]), first, sleep("300ms"), takes={"n": int}),
)
LATE: Final = Counter({first.name: 1})  # The second version takes this step only if nobody has said the word.
STEPS: Final = {
    process.definition.digest: Counter(node.id for node in process.definition.nodes if hasattr(node, "handler"))
    for process in VERSIONS
}


def check(world: World) -> Iterator[str]:
    """Everybody has done what its own version says, which is that of its start, and nothing else."""
    yield from not_ended_as(world, NAME, "completed")
    digests: dict[int, str] = dict(world.peek("SELECT no, digest FROM definition"))
    for end in ends(world, NAME):
        started = next(event for event in events(world, end.id) if isinstance(event, InstanceStarted))
        wanted = STEPS[digests[started.definition]]
        begun = openings(world, end.id)
        if started.process_version != end.version:
            yield f"{end.id} was started with version {started.process_version}, and has {end.version}"
        missing = wanted - begun - (LATE if wanted == STEPS[VERSIONS[1].definition.digest] else Counter())
        if missing or begun - wanted:
            yield f"{end.id} of version {started.process_version} has begun {dict(begun)}"


@scenario(
    check=check,
    options={"limits": LIMITS},
    without=("new version deployed",),  # Here we do that ourselves.
    probes=("old_version_went_on", "start_repeated_same_answer"),
)
def deployment(world: World) -> None:
    """Versions are deployed in mid-flight, by a call or by a restart, and some clients still ask for old ones."""
    world.play(VERSIONS[0])
    unreliable(world)
    node = world.node("a")
    Keeper(world).keep(node)
    crowd = Crowd(world, "ann", "bob", twice=0.3)
    random = crowd.random
    ids = [f"d{number}" for number in range(24)]
    newest = 0

    def deploy() -> None:
        nonlocal newest
        newest = (newest + 1) % len(VERSIONS)  # The first one comes back: it is known already.
        if random.random() < 0.5:
            crowd.someone().call("deploy", "", {"body": VERSIONS[newest].definition.body})
        else:
            world.play(VERSIONS[newest])
            node.close()

    def begin(id_: str) -> None:
        wanted = random.choice(VERSIONS) if random.random() < 0.3 else None
        digest = {} if wanted is None else {"digest": wanted.definition.digest}
        request = {"process": NAME, "id": id_, "variables": {"n": "1"}, **digest}
        for _ in range(random.choice((1, 1, 2))):
            crowd.someone().call("start", id_, request)

    for id_ in ids:
        crowd.later((0, 8_000), lambda id_=id_: begin(id_))  # type: ignore[misc]  # mypy cannot infer such a lambda.
    crowd.often((200, 2_500), deploy)
    crowd.often((1, 500), lambda: crowd.send(random.choice(ids), "word"))
    look_on(crowd, ids, (1, 1_000))
    Janitor(world)
