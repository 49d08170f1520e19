"""Change in mid-flight: a process gets a new version, two nodes adopt the file at once, an operator uses it between two
lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any, Final

import attrs
import pykka

from understudy.actors.handlers import Handler
from understudy.model import events as e
from understudy.model.definition import Definition, Edge, decode_definition
from understudy.model.errors import OutcomeUnknown, UnderstudyError
from understudy.model.kinds import End, Task, Terminate
from understudy.model.validation import problems
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.faults.calls import TRANSIENT
from understudy.simulations.node import Life, Node
from understudy.simulations.operations import Operation
from understudy.simulations.plugins import SURVIVE, Fault, fault

if TYPE_CHECKING:
    from understudy.simulations.world import World

ONE_MORE: Final = "one_more"  # The step that new versions have, and its handler.
OPERATOR: Final = "operator"
AGAIN_MS: Final = 100
STATEMENTS: Final = 60  # About as many as it takes to open.


def with_one_more(definition: Definition) -> Definition | None:
    """The same process with one more step before it ends; None if it has no end that allows for one."""
    ends = [node for node in definition.nodes if isinstance(node, End | Terminate) and not node.within]
    arriving = [edge for edge in definition.edges if edge.target == ends[0].id]
    if len(ends) != 1 or not isinstance(ends[0], End) or len(arriving) != 1:
        return None
    onward = Edge(id=f"{ONE_MORE}-onward", source=ONE_MORE, target=ends[0].id)
    edges = [attrs.evolve(edge, target=ONE_MORE) if edge is arriving[0] else edge for edge in definition.edges]
    nodes = (*definition.nodes, Task(id=ONE_MORE, handler=ONE_MORE))
    changed = attrs.evolve(definition, nodes=nodes, edges=(*edges, onward))
    return None if problems(changed) else changed


@fault
class NewVersion(Fault):
    """A process is deployed with one more step while instances of it run."""

    name = "new version deployed"
    kind = "change"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._deployed: list[str] = []

    def arm(self, world: World) -> None:
        world.on_opened.append(_bind)
        self.again(world, lambda: self._strike(world))

    def _strike(self, world: World) -> None:
        life, names = world.owner, sorted(name for name in world.cast if name not in self._deployed)
        if life is None or not names:
            return
        name = self.random.choice(names)
        changed = with_one_more(world.cast[name].definition)
        if changed is None:
            return
        try:
            answer = life.service.call("deploy", {"body": changed.body})
        except UnderstudyError:
            return  # Degraded, or fenced: whoever deploys tries another time.
        world.fault(self.name, name, node=life.name)
        answer.add_done_callback(lambda promise: None if promise.error else self._deployed.append(name))

    def check(self, world: World) -> Iterable[str]:
        """Each instance stays with the version it was started with, whatever that is."""
        evidence = Evidence.of(world)
        new = {no for no, body in world.peek("SELECT no, body FROM definition") if _has_one_more(body)}
        called = {line.instance for line in world.ledger.of(ONE_MORE)}
        for instance, standing in evidence.instances.items():
            started = next(event for _, _, event in evidence.events(instance) if isinstance(event, e.InstanceStarted))
            is_new = started.definition in new
            if instance in called and not is_new:
                yield f"{instance} was started before {ONE_MORE} was part of {standing.process}, and yet called it"
            skipped = any(
                isinstance(event, e.TaskCompleted) and event.skipped for *_, event in evidence.events(instance)
            )
            if is_new and standing.outcome == "completed" and instance not in called and not skipped:
                yield f"{instance} was started with {ONE_MORE}, and has ended without it"


def _bind(life: Life) -> None:
    life.handlers[ONE_MORE] = life.seat(ONE_MORE, Handler(ONE_MORE, _nothing))


def _nothing() -> None:
    pass


def _has_one_more(body: str) -> bool:
    return any(node.id == ONE_MORE for node in decode_definition(body).nodes)


@fault
class TwoAdopt(Fault):
    """The owner dies, and two nodes that have seen it die take over at the same moment. Only where there are rivals."""

    name = "two nodes adopt at once"
    kind = "change"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._between: Callable[[], object] | None = None
        self._left = 0
        self.contests: list[tuple[int, list[int]]] = []  # The epoch that both have seen, and those that were granted.

    def arm(self, world: World) -> None:
        def tap(_statement: str, run: Callable[[], Any]) -> Any:
            if self._between is not None and world.tapped_life is None:
                self._left -= 1
                if self._left < 0:
                    between, self._between = self._between, None
                    between()
            return run()

        world.tap(tap)
        self.again(world, lambda: self._strike(world))

    def _strike(self, world: World) -> None:
        owner = world.owner
        rivals = [node for node in world.nodes if node.beats]
        if len(rivals) < 2 or any(node.is_paused for node in rivals):
            return
        if owner is not None:
            owner.node.kill("dies, and two take over")
        down = [node for node in rivals if node.life is None]
        if len(down) < 2:
            return
        world.fault(self.name)
        one, two = self.random.sample(down, 2)
        epoch = world.peek("SELECT epoch FROM owner WHERE partition = 0")[0][0]
        granted: list[int] = []
        self._between, self._left = lambda: _adopt(two, epoch, granted), self.random.randrange(STATEMENTS)
        _adopt(one, epoch, granted)
        if self._between is not None:
            self._between = None
            _adopt(two, epoch, granted)
        self.contests.append((epoch, granted))

    def check(self, world: World) -> Iterable[str]:  # noqa: ARG002  # All of it was seen when it happened.
        for epoch, granted in self.contests:
            if len(granted) > 1:
                yield f"both of two nodes that have seen epoch {epoch} own the file, as epochs {granted}"


def _adopt(node: Node, epoch: int, granted: list[int]) -> None:
    if node.life is None:
        life = node.open(after_epoch=epoch)
        if life is not None:
            granted.append(life.epoch)


@fault
class OperatorBetweenLives(Fault):
    """Nobody owns the file, and an operator opens it for one command: nothing else may move."""

    name = "operator between two lives"
    kind = "change"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._visits = 0
        self.epochs: list[int] = []

    def arm(self, world: World) -> None:
        def lost(life: Life) -> None:
            is_ours = life.node.name.startswith(OPERATOR)
            if not is_ours and not world.is_settling and self.random.random() < min(0.9, 40 * self.rate):
                world.after(0, lambda: self._visit(world))

        world.on_lost.append(lost)

    def _visit(self, world: World) -> None:
        ids = [row[0] for row in world.peek("SELECT id FROM instance ORDER BY no")]
        if any(node.life is not None for node in world.nodes) or not ids:
            return
        self._visits += 1
        node = Node(world, f"{OPERATOR} {self._visits}", limits=world.limits, settings=world.settings)
        world.nodes.append(node)
        try:
            life = node.open(go_on=False)
            if life is not None:
                world.fault(self.name, node=life.name)
                self.epochs.append(life.epoch)
                self._command(world, life, self.random.choice(ids))
        finally:
            world.nodes.remove(node)

    def _command(self, world: World, life: Life, instance: str) -> None:
        call = self.random.choice(("resume", "resume", "retry"))
        parameters = {"id": instance, "key": f"{OPERATOR}-{self._visits}"}
        if call == "retry":
            call, parameters = "resolve", {**parameters, "how": "retry"}
        operation = Operation(
            number=len(world.operations) + 1,
            client=OPERATOR,
            call=call,
            instance=instance,
            parameters=parameters,
            key=parameters["key"],
            invoked=world.steps,
            at_ms=world.time.now_ms,
        )
        world.operations.append(operation)
        try:
            operation.answer = life.service.call(call, parameters).get(timeout=0)
        except pykka.Timeout:
            operation.error, operation.is_unknown = "TimedOut", True
        except UnderstudyError as error:
            operation.error, operation.reason = type(error).__name__, str(error)
            operation.is_unknown = isinstance(error, OutcomeUnknown)
        operation.returned = world.steps
        if operation.error in TRANSIENT or life.is_dead:
            world.after(AGAIN_MS, lambda: self._again(world, operation))
        if life.is_dead:  # By another fault, in the middle of it: nobody was told anything.
            operation.returned, operation.error, operation.reason, operation.is_unknown = None, "Died", "", True
            life.node.kill("dies with the operator's command")
        else:
            life.node.close()

    def _again(self, world: World, operation: Operation) -> None:
        """Somebody who was left without an answer asks the next owner, under the same key."""
        client = next((client for client in world.clients if client.name == OPERATOR), None)
        if client is None:
            client = world.client(OPERATOR)
        client.call(operation.call, operation.instance, operation.parameters)

    def check(self, world: World) -> Iterable[str]:
        """No handler was called, no timer fired, no step begun."""
        for line in world.ledger:
            if line.epoch in self.epochs:
                yield f"{line.handler} was called for {line.instance} while only an operator was there"
        for row in Evidence.of(world).rows:
            for entry in row.entries:
                begun = [event for event in entry.events if isinstance(event, _BEGINNINGS)]
                if row.epoch in self.epochs and (begun or entry.cause == "timer"):
                    what = type(begun[0]).__name__ if begun else "a timer"
                    yield f"{row.instance}: {what} with commit {row.seq}, while only an operator was there"


_BEGINNINGS: Final = (e.TaskOpened, e.AttemptStarted, e.AttemptLost)
