"""What clients do, in pieces that scenarios put together: start, send, publish, interfere, look, tidy up at the end.

A `Crowd` is a number of clients with one stream of random numbers. Whatever it asks for carries a key, and some of it
is asked for twice under that key, at once or later, by the same client or another. Everybody stops when the world
settles, except the `Janitor`, who begins then: it does what operators do with all that is left standing, so that
everything can end. Nothing here knows what a scenario expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from understudy.actors.system import Limits
from understudy.model.errors import UnderstudyError
from understudy.model.kinds import Receive
from understudy.model.values import encode
from understudy.process import Process
from understudy.simulations.script import Conduct

if TYPE_CHECKING:
    from understudy.simulations.clients import Client
    from understudy.simulations.operations import Operation
    from understudy.simulations.world import World

Range = tuple[int, int]  # From, and up to but not including.

YEAR_MS: Final = 365 * 24 * 3_600_000
# Answers are kept for ages: a clock that jumps forward must not make a repeated call a new one.
LIMITS: Final = Limits(resident=50, idle_ms=2_000, in_flight=200, patience_ms=0, keep_answers_ms=1_000 * YEAR_MS)
LATER_MS: Final = (0, 3_000)  # When something is asked for a second time.
TIDY_MS: Final = 2_000  # Between two rounds of a janitor.
QUIET_ROUNDS: Final = 15  # After so many without work it goes: by then also the last client has been heard.
MOST_ROUNDS: Final = 250


class Crowd:
    """Clients who act by one stream of random numbers. `twice` is how likely each of their calls is made again."""

    def __init__(self, world: World, *names: str, twice: float = 0.2) -> None:
        self.world = world
        self.random = world.stream(f"crowd {names[0]}")
        self.members = [world.client(name) for name in names]
        self.twice = twice
        self._name = names[0]
        self._count = 0

    def someone(self) -> Client:
        return self.members[self.random.randrange(len(self.members))]

    def new_key(self) -> str:
        self._count += 1
        return f"{self._name}-{self._count}"

    # --- when ---

    def later(self, within_ms: Range, act: Callable[[], object]) -> None:
        """Do something once, unless the world settles before."""
        self.world.after(self.random.randrange(*within_ms), lambda: None if self.world.is_settling else act())

    def often(self, between_ms: Range, act: Callable[[], object]) -> None:
        """Do something again and again, until the world settles."""

        def now() -> None:
            act()
            self.later(between_ms, now)

        self.later(between_ms, now)

    # --- what ---

    def start(self, process: str, id_: str, **variables: object) -> Operation:
        """Start an instance, which is idempotent by its id."""
        request = {"process": process, "id": id_, "variables": {name: encode(v) for name, v in variables.items()}}
        return self._ask("start", id_, request)

    def send(self, id_: str, name: str, payload: object = None, **more: Any) -> Operation:
        """Send to one instance; `about` and `ttl_ms` as the call takes them."""
        request = {"id": id_, "name": name, "payload": encode(payload), "key": self.new_key(), **more}
        return self._ask("send", id_, request)

    def publish(self, name: str, about: str, payload: object = None, **more: Any) -> Operation:
        request = {"name": name, "about": about, "payload": encode(payload), "key": self.new_key(), **more}
        return self._ask("publish", "", request)

    def order(self, what: str, id_: str, **more: Any) -> Operation:
        """An operator's order: pause, resume, cancel or resolve."""
        return self._ask(what, id_, {"id": id_, "key": self.new_key(), **more})

    def look(self, id_: str) -> Operation:
        return self.someone().call("read", id_, {})

    def _ask(self, call: str, id_: str, parameters: dict[str, Any]) -> Operation:
        if self.random.random() < self.twice:
            self.later(LATER_MS, lambda: self.someone().call(call, id_, parameters))
        return self.someone().call(call, id_, parameters)


# --- what crowds do ---------------------------------------------------------------------------------------------------


def start_all(
    crowd: Crowd, process: str, ids: Iterable[str], *, within_ms: Range, given: Callable[[str], dict[str, object]]
) -> None:
    """Start each of these at a moment of its own."""

    def start(id_: str) -> None:
        crowd.start(process, id_, **given(id_))

    for id_ in ids:
        crowd.later(within_ms, lambda id_=id_: start(id_))  # type: ignore[misc]  # mypy cannot infer such a lambda.


def keep_starting(
    crowd: Crowd,
    processes: Sequence[str],
    between_ms: Range,
    *,
    given: Callable[[int], dict[str, object]],
    most_open: int,
    recent: int = 12,
) -> list[str]:
    """Start one instance after the other, as long as not too many live; the ids of the last ones, kept up to date."""
    ids: list[str] = []
    number = 0

    def start() -> None:
        nonlocal number
        if len(unended(crowd.world)) < most_open:
            ids.append(f"r{number}")
            del ids[:-recent]
            crowd.start(processes[number % len(processes)], f"r{number}", **given(number))
            number += 1

    start()
    crowd.often(between_ms, start)
    return ids


def interfere(crowd: Crowd, ids: Sequence[str], between_ms: Range, *, cancel: float = 0.1) -> None:
    """Operators pause and resume, and sometimes cancel, with undo or without."""

    def act() -> None:
        id_ = crowd.random.choice(ids)
        if crowd.random.random() < cancel:
            crowd.order("cancel", id_, undo=crowd.random.random() < 0.8)
        elif crowd.random.random() < 0.5:
            crowd.order("pause", id_)
            crowd.later(LATER_MS, lambda: crowd.order("resume", id_))
        else:
            crowd.order("resume", id_)

    crowd.often(between_ms, act)


def resolve(crowd: Crowd, between_ms: Range, *, hows: Sequence[str] = ("retry", "skip", "fail")) -> None:
    """Operators settle incidents as they find them; sometimes one that another has settled meanwhile."""

    def act() -> None:
        found = incidents(crowd.world)
        if found:
            id_, incident = crowd.random.choice(found)
            crowd.order("resolve", id_, how=crowd.random.choice(hows), incident=incident, result="1")

    crowd.often(between_ms, act)


def look_on(crowd: Crowd, ids: Sequence[str], between_ms: Range) -> None:
    """Readers look at one instance after the other."""
    crowd.often(between_ms, lambda: crowd.look(crowd.random.choice(ids)))


def talk(
    crowd: Crowd, processes: Sequence[Process[Any, Any]], ids: Sequence[str], between_ms: Range, *, keys: int
) -> None:
    """Messages that processes wait for, to one instance or to whoever waits; some are good for a short time only."""
    names = [node.message for process in processes for node in process.definition.nodes if isinstance(node, Receive)]
    if not names:
        return
    random = crowd.random

    def act() -> None:
        name = random.choice(names)
        more = {} if random.random() < 0.5 else {"ttl_ms": random.randrange(1, 4_000)}
        if random.random() < 0.4:
            crowd.send(random.choice(ids), name, random.randrange(10), **more)
        else:
            crowd.publish(name, random.choice(("", str(random.randrange(keys)))), random.randrange(10), **more)

    crowd.often(between_ms, act)


def unreliable(world: World, *, failures: Sequence[float] = (0.0, 0.05, 0.2)) -> None:
    """Handlers take their time and fail now and then, in some worlds more and in some not at all.

    What a fault has decided about handlers stays.
    """
    random = world.stream("reliability")
    world.script.slow = max(world.script.slow, random.choice((0.0, 0.1, 0.5)))
    for conduct in (Conduct.FAIL_FIRST, Conduct.FAIL_AFTER):
        world.script.odds.setdefault(conduct, random.choice(failures))


# --- what is open -----------------------------------------------------------------------------------------------------


def rows(world: World, statement: str) -> list[Any]:
    """What a reader of the owner's would see now; nothing while nobody can read."""
    life = world.owner
    if life is None:
        return []
    try:
        return life.reads.rows(statement)
    except UnderstudyError:
        return []


def incidents(world: World) -> list[tuple[str, int]]:
    """Those that are open: instance and number."""
    return rows(world, "SELECT i.id, n.id FROM incident n JOIN instance i ON i.no = n.instance ORDER BY i.no, n.id")


def unended(world: World) -> list[str]:
    """The instances that live."""
    return [row[0] for row in rows(world, "SELECT id FROM instance WHERE outcome IS NULL ORDER BY no")]


_PAUSED: Final = "SELECT id FROM instance WHERE status = 'paused' ORDER BY no"
_WAITING: Final = """
SELECT i.id, w.name, w.key FROM wait w JOIN instance i ON i.no = w.instance WHERE w.kind = 'message' ORDER BY i.no, w.id
"""


class Janitor:
    """Once faults are over: resumes what is paused, settles what is stuck, says what is waited for.

    An incident is retried, and if it comes back the instance is failed there. `spares` are instances that are to stay
    as they are. One that does not talk leaves it to others to say what is waited for.
    """

    def __init__(
        self,
        world: World,
        *,
        payload: object = 1,
        spares: Callable[[str], bool] = lambda _id: False,
        talks: bool = True,
    ) -> None:
        self._world = world
        self._talks = talks
        self._client = world.client("janitor")
        self._payload = encode(payload)
        self._spares = spares
        self._tried: dict[str, int] = {}
        self._rounds = 0
        self._quiet = 0
        world.on_settle.append(lambda: world.after(1, self._tidy))

    def _tidy(self) -> None:
        self._rounds += 1
        for (id_,) in rows(self._world, _PAUSED):
            self._order("resume", id_)
        for id_, incident in incidents(self._world):
            self._settle(id_, incident)
        for id_, name, key in rows(self._world, _WAITING) if self._talks else ():
            self._order("send", id_, name=name, about=key, payload=self._payload)
        is_quiet = self._world.owner is not None and all(map(self._spares, unended(self._world)))
        self._quiet = self._quiet + 1 if is_quiet else 0
        if self._rounds < MOST_ROUNDS and self._quiet < QUIET_ROUNDS:
            self._world.after(TIDY_MS, self._tidy)

    def _settle(self, id_: str, incident: int) -> None:
        tried = self._tried[id_] = self._tried.get(id_, 0) + 1
        self._order("resolve", id_, how="retry" if tried <= 3 else "fail", incident=incident)

    def _order(self, call: str, id_: str, **more: Any) -> None:
        if not self._spares(id_):
            key = f"janitor-{self._rounds}-{call}-{id_}-{more.get('incident') or more.get('name', '')}"
            self._client.call(call, id_, {"id": id_, "key": key, **more})
