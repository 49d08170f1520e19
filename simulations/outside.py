"""What happens in one world of a user's simulation: who starts what when, who sends the messages, who helps at the end.

Instances are started by a client that asks again when nobody answers. Whoever waits for a message gets it: before it
waits, soon after, at the very moment its patience ends, or, if it has a timeout, never. Time goes on by itself, to the
next thing that is due, however far away that is. When the faults are over an operator retries what incidents have
stopped. What each instance meets is drawn for it alone, so that it meets the same when others are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from understudy.model.events import InstanceEnded
from understudy.model.values import check_name, encode
from understudy.simulations.histories import History
from understudy.simulations.keeping import Keeper, Rival
from understudy.simulations.terms import ByName, Start, Terms, parameters_of
from understudy.simulations.verdicts import verdicts

if TYPE_CHECKING:
    from understudy.simulations.clients import Answered
    from understudy.simulations.ledger import Line
    from understudy.simulations.node import Life
    from understudy.simulations.operations import Operation
    from understudy.simulations.script import Act
    from understudy.simulations.shrinking import Case
    from understudy.simulations.world import World
    from understudy.store.commit import Commit

SPREAD_MS: Final = 5_000  # Within this time all instances are started.
SOON_MS: Final = 2_000
EDGE_MS: Final = 1_000  # How close to a timeout a message arrives that races with it.
LEAST_TO_REST: Final = 10_000  # Whoever has not come to rest within so many steps never will,
TIMES_TO_REST: Final = 10  # or within so many times the steps that the world was given.
ROUNDS: Final = 200  # How often time is moved on at the end, or somebody helps, before it is given up.
RETRIES: Final = 3  # How often an operator retries one step of one instance.
OF_RIVALS: Final = ("pause beyond the lease", "two nodes adopt at once")  # Faults that need more than one node.
UNFINISHED: Final = "unfinished"
SECRET: Final = "I17"

_WAITS: Final = """
SELECT i.id, w.id, w.name, w.key, w.since_ms, (SELECT min(t.due_ms) FROM wait t WHERE t.instance = w.instance
AND t."group" = w."group") FROM wait w JOIN instance i ON i.no = w.instance
WHERE w.kind = 'message' AND i.status = 'running' ORDER BY i.no, w.id
"""
_DUE: Final = "SELECT min(w.due_ms) FROM wait w JOIN instance i ON i.no = w.instance WHERE i.status = 'running'"
_OPEN: Final = "SELECT count(*) FROM instance WHERE outcome IS NULL"
_INCIDENTS: Final = "SELECT i.id, n.node, n.id FROM incident n JOIN instance i ON i.no = n.instance ORDER BY i.no, n.id"
_TABLES: Final = "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name"


@attrs.frozen
class Planned:
    """One instance that is to be started."""

    id: str
    process: str
    given: object
    variables: dict[str, str]


class Outside:
    """The clients, the senders and the operator of one world."""

    def __init__(self, terms: Terms, fakes: dict[str, Any], case: Case) -> None:
        """`case` with all that was drawn."""
        self._terms = terms
        self._fakes = fakes
        self._only = case.only
        self._steps = case.steps
        self._strikes = case.strikes or 0
        self._faults = case.faults or ()
        self._is_calm = case.is_calm
        self._planned: dict[str, Planned] = {}
        self._to_start: dict[str, None] = {}  # Those whose start has no final answer yet; a dict keeps their order.
        self._fed: dict[tuple[str, int], str] = {}  # Waits by instance and number, with the message's name.
        self._early: dict[tuple[str, str], None] = {}  # Messages that are there before anybody waits.
        self._retried: dict[tuple[str, str], int] = {}  # By instance and node.
        self.digest = ""

    # --- the beginning ---

    def begin(self, world: World) -> None:
        self._world = world
        world.most_steps_to_rest = max(LEAST_TO_REST, TIMES_TO_REST * self._steps)
        if self._is_calm:
            world.haste = 0.0
        world.play(*self._terms.processes)
        for name, function in self._terms.stand_ins.items():
            world.stand_ins[name] = self._seated(function, parameters_of(self._terms.handlers[name]))
        self._client, self._sender, self._operator = map(world.client, ("user", "sender", "operator"))
        world.on_landed.append(self._landed)
        world.on_idle = self._idle
        world.on_fault.append(self._struck)
        if world.trace.recording:
            world.on_called.insert(0, self._tell_call)  # Before the faults that its call brings about.
        self._open_nodes()
        self._plan()
        for planned in self._planned.values():
            self._to_start[planned.id] = None
            random = world.stream(f"start {planned.id}")
            delay_ms = 0 if random.random() < 0.5 else random.randrange(SPREAD_MS)
            world.after(delay_ms, self._starting(planned))
            if random.random() < 0.2:
                self._send_early(planned, delay_ms)

    def _open_nodes(self) -> None:
        """One, or several that lie in wait for each other, if a fault needs them: they cost many steps."""
        if any(name in OF_RIVALS for name in self._faults):
            for node in [self._world.node(name, beats=True) for name in ("node-a", "node-b")]:
                Rival(self._world, node)
        else:
            Keeper(self._world).keep(self._world.node("node"))

    def _plan(self) -> None:
        for start in self._terms.starts:
            for number, given in enumerate(_inputs(start, self._world), 1):
                id_ = f"{start.process.name}-{number}" if self._terms.ids is None else self._terms.ids(given)
                check_name(id_, what="what `ids` gave")
                if not self._only or id_ in self._only:
                    variables = start.process.encode_input(given)
                    self._planned[id_] = Planned(id_, start.process.name, given, variables)

    @property
    def planned(self) -> tuple[str, ...]:
        return tuple(self._planned)

    def _starting(self, planned: Planned) -> Callable[[], object]:
        return lambda: self._client.start(planned.process, planned.id, planned.variables, then=self._started)

    def _started(self, operation: Operation) -> None:
        self._to_start.pop(operation.instance, None)

    def _seated(self, function: ByName, parameters: tuple[str, ...]) -> Callable[..., Any]:
        def play(**given: Any) -> Any:
            return function(**self._fakes, **given)

        # Whoever calls a stand-in gives it what its signature names; it is this one that chooses.
        named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parameters]
        play.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]  # `inspect` looks for it.
        return play

    # --- messages ---

    def _send_early(self, planned: Planned, delay_ms: int) -> None:
        """Before anybody waits for it, or right then: it is kept until somebody does."""
        for name in self._terms.messages:
            if self._awaits(planned.process, name):
                self._early[planned.id, name] = None
                send = self._sending(planned.id, name, f"early {name}", then=self._sent_early)
                self._world.after(delay_ms + 1, send)

    def _sent_early(self, operation: Operation) -> None:
        """It may have been too early even to be kept; then it comes when somebody waits for it, as others do."""
        if operation.error:
            instance, name = operation.instance, operation.parameters["name"]
            self._early.pop((instance, name), None)
            self._fed = {wait: fed for wait, fed in self._fed.items() if (wait[0], fed) != (instance, name)}
            self._world.after(0, self._feed)

    def _awaits(self, process: str, message: str) -> bool:
        """Whether a process waits for a message under no key: whoever sends one early would have to guess it."""
        nodes = next(each for each in self._terms.processes if each.name == process).definition.nodes
        found = [node for node in nodes if getattr(node, "message", "") == message and hasattr(node, "timeout_ms")]
        return len(found) == 1 and not getattr(found[0], "key", "")

    def _feed(self) -> bool:
        """Whether anybody waits for a message that is not on its way yet."""
        waits = [wait for wait in self._world.peek(_WAITS) if (wait[0], wait[1]) not in self._fed]
        found = False
        for instance, number, name, key, since_ms, due_ms in waits:
            self._fed[instance, number] = name
            if name in self._terms.messages and (instance, name) not in self._early:
                found |= self._send_later(instance, number, name, key, None if due_ms is None else due_ms - since_ms)
        return found

    def _send_later(self, instance: str, number: int, name: str, key: str, patience_ms: int | None) -> bool:
        random = self._world.stream(f"message {instance} {number}")
        how = random.random()
        delay_ms = random.randrange(SOON_MS)
        is_patient = patience_ms is None or any(retried == instance for retried, _ in self._retried)
        if not is_patient and how < 0.15:
            return False  # It never comes, unless an operator asks for it.
        if patience_ms is not None and not is_patient and how < 0.3:
            delay_ms = max(0, patience_ms + random.randrange(-EDGE_MS, EDGE_MS))
        self._world.after(delay_ms, self._sending(instance, name, f"message {number}", about=key))
        return True

    def _sending(
        self, instance: str, name: str, key: str, *, about: str = "", then: Answered | None = None
    ) -> Callable[[], object]:
        payload = self._payload(instance, name)
        request = {"id": instance, "name": name, "payload": payload, "about": about, "key": f"{key} to {instance}"}
        return lambda: self._sender.call("send", instance, request, then=then)

    def _payload(self, instance: str, name: str) -> str:
        payload = self._terms.messages[name]
        if isinstance(payload, ByName):
            planned = self._planned.get(instance)
            random = self._world.stream(f"payload {instance} {name}")
            given = None if planned is None else planned.given
            payload = payload(id=instance, given=given, random=random, **self._fakes)
        return encode(payload, what=f"the payload of {name}")

    # --- while it goes on ---

    def _landed(self, _life: Life, commit: Commit, _version: int) -> None:
        if any(table == "wait" for table, _row in commit.rows):
            self._world.after(0, self._feed)
        if _ENDED in commit.events:
            self._to_start.pop(commit.id, None)
            self._look_whether_all_is_done()

    def _tell_call(self, life: Life, line: Line, _act: Act) -> None:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in line.given.items())
        text = f"{line.handler}({given}), attempt {line.attempt} under key {line.key}"
        for secret in self._terms.secrets:
            text = text.replace(secret, "***")
        self._world.tell(life.name, "handlers", "job", text, line.instance)

    def _struck(self, _name: str) -> None:
        if sum(self._world.counts.values()) >= self._strikes:
            self._world.is_finished = True

    def _look_whether_all_is_done(self) -> bool:
        if not self._to_start and self._world.peek(_OPEN)[0][0] == 0:
            self._world.is_finished = True
        return self._world.is_finished

    def _idle(self) -> bool:
        """Nothing happens soon: is there something that the hooks have not seen, or something due much later?"""
        if self._feed():
            return True
        return not self._look_whether_all_is_done() and self._pass_time()

    def _pass_time(self) -> bool:
        """Go to the next moment at which an instance goes on."""
        world = self._world
        due_ms = world.peek(_DUE)[0][0]
        if due_ms is None or world.owner is None:
            return False
        due_ms -= world.owner.clock.skew_ms
        if due_ms <= world.time.now_ms:
            return False
        world.time.now_ms = due_ms
        return True

    # --- the end ---

    def end(self, world: World) -> None:
        """Let everything come to its end that can: faults are over, time is not."""
        for _ in range(ROUNDS):
            if not (self._feed() or self._retry_incidents() or self._pass_time()):
                return
            world.rest()

    def _retry_incidents(self) -> bool:
        found = False
        for instance, node, incident in self._world.peek(_INCIDENTS):
            tries = self._retried[instance, node] = self._retried.get((instance, node), 0) + 1
            if tries <= RETRIES:
                key = f"retry {incident} of {instance}"
                request = {"id": instance, "how": "retry", "incident": incident, "key": key}
                self._operator.call("resolve", instance, request)
                found = True
        return found

    def check(self, world: World) -> Iterable[str]:
        """Say what a user's invariants find, and ours about the user's instances."""
        self.digest = world.trace.digest()
        life = world.owner
        if life is None:
            return ()  # That is a finding of its own.
        history = History(life.reads)
        if self._terms.must_end:
            for past in history.values():
                if not past.is_ended:
                    world.violate(UNFINISHED, f"it has not ended, and nothing more is to come: {past}", past.id)
        for text in self._leaked():
            world.violate(SECRET, text)
        for name, invariant in self._terms.invariants.items():
            for text in verdicts(name, lambda: invariant(history=history, ledger=world.ledger, **self._fakes)):  # noqa: B023 - Asked at once.
                world.violate(name, text)
        return ()

    def _leaked(self) -> Iterator[str]:
        if not self._terms.secrets:
            return
        for (table,) in self._world.peek(_TABLES):
            rows = self._world.peek(f'SELECT * FROM "{table}"')
            for number, secret in enumerate(self._terms.secrets, 1):
                if any(_holds(value, secret) for row in rows for value in row):
                    yield f"secret {number} stands in the table {table}"


_ENDED: Final = f'"{InstanceEnded.__struct_config__.tag}"'


def _inputs(start: Start, world: World) -> Iterator[object]:
    for number in range(start.count):
        if start.make is None:
            yield start.inputs[number % len(start.inputs)]
        else:
            random = world.stream(f"input {start.process.name} {number + 1}")
            yield start.make(random=random, number=number + 1)


def _holds(value: object, secret: str) -> bool:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return isinstance(text, str) and (secret in text or msgspec.json.encode(secret).decode()[1:-1] in text)
