"""One seed, one world: its nodes, its time, its order of events, and the evidence of all that happened.

Everything runs on one thread, one step at a time; a step is one message, one handler or one alarm. The seed feeds a
stream of its own to each concern (order, faults, clients, time), so that one of them can be changed or taken away
without disturbing the others. The world knows no fault, no workload and no checker: those are plug-ins that a scenario
composes.
"""

from __future__ import annotations

import heapq
import itertools
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, Final

from understudy.actors.dispatcher import PooledActor
from understudy.actors.instance import InstanceActor
from understudy.actors.messages import Committed
from understudy.actors.stepping import Livelock
from understudy.actors.system import Limits
from understudy.model.invariants import Violation
from understudy.process import Process
from understudy.simulations.clients import Client
from understudy.simulations.clocks import START_MS, Time
from understudy.simulations.ledger import Ledger, Line
from understudy.simulations.memory import Memory
from understudy.simulations.node import Life, Node
from understudy.simulations.operations import Operation
from understudy.simulations.schedule import Schedule, Uniform
from understudy.simulations.script import Act, Script
from understudy.simulations.trace import Moment, Trace
from understudy.simulations.words import describe
from understudy.store.commit import Commit
from understudy.store.connection import Settings
from understudy.store.writer import Change, Landed, Written

REST_MS: Final = 600_000  # Once faults stop, whatever can move comes to rest within this time.
MOST_STEPS_TO_REST: Final = 400_000
IDLE_MS: Final = 3_500_000  # Nobody waits that long for anything but housekeeping; a fault of time may skip it.
LANES: Final = {
    "PersistenceActor": "persistence",
    "SupervisorActor": "supervisor",
    "LoaderActor": "loader",
}

Job = Callable[[], object]


class World:
    """Made of a seed. `step` lets one thing happen, `run` so many, `settle` ends the faults and lets all rest."""

    def __init__(
        self,
        seed: int | str,
        *,
        schedule: Schedule | None = None,
        recording: bool = False,
        memory: Any = None,
        limits: Limits | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.seed = seed
        self.time = Time()
        self.trace = Trace(recording=recording)
        self.schedule: Schedule = schedule or Uniform(self.stream("order"))
        self.script = Script(f"{seed}/handlers")
        self.ledger = Ledger()
        self.cast: dict[str, Process[Any, Any]] = {}
        self.stand_ins: dict[str, Callable[..., Any]] = {}
        self.limits = limits or Limits(resident=50, idle_ms=2_000, in_flight=200, patience_ms=0)
        self.settings = settings or Settings()
        self.nodes: list[Node] = []
        self.clients: list[Client] = []
        self.operations: list[Operation] = []
        self.steps = 0
        self.lives = 0
        self.commits = 0
        self.counts: Counter[str] = Counter()  # Faults by name.
        self.probes: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.haste = 0.0  # How likely time passes although something is ready.
        self.is_settling = False
        self.may_lose = False  # Whether a power cut may take back what was acknowledged.
        self.highest_epoch = 0
        self.on_landed: list[Callable[[Life, Commit, int], None]] = []
        self.on_writing: list[Callable[[Life, Sequence[Any]], None]] = []  # Before each batch and each operation.
        self.on_written: list[Callable[[Life, Sequence[Change], Written], None]] = []  # After each batch.
        self.on_ran: list[Callable[[Life, Any], None]] = []  # After each operation.
        self.on_opened: list[Callable[[Life], None]] = []
        self.on_lost: list[Callable[[Life], None]] = []
        self.on_settle: list[Job] = []
        self.on_fault: list[Callable[[str], None]] = []
        self.on_close: list[Job] = []
        self.evidence: Any = None  # What checkers share; see `checkers/evidence.py`.
        self.subscribers: list[Any] = []
        self.secrets: list[str] = []  # What users gave as values, and what must stand nowhere but there.
        self.on_idle: Callable[[], bool] | None = None  # Asked when nothing happens soon: whether it has changed that.
        self.is_finished = False  # Set by a workload that has nothing more to do: `run` ends early.
        self.most_steps_to_rest = MOST_STEPS_TO_REST
        self.on_called: list[Callable[[Life, Line, Act], None]] = []  # After each call of a handler has begun.
        self.raised: dict[tuple[str, int], None] = {}  # Attempts whose handler has failed by itself, whatever its act.
        self.on_client: list[Callable[[Client], None]] = []
        self.taps: list[Any] = []  # What storage faults have put between the writer and its database.
        self.tapped: Any = None  # The storage whose statement is at a tap.
        self._memory = memory or Memory()
        self._agenda: list[tuple[int, int, Job, str]] = []
        self._by_step: list[tuple[int, int, Job]] = []
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self._haste = self.stream("haste").random
        self._dying: list[tuple[Life, str]] = []

    def stream(self, concern: str) -> Random:
        """The random numbers of one concern."""
        return Random(f"{self.seed}/{concern}")

    def new_id(self) -> str:
        return f"i-{next(self._ids)}"

    # --- who is there ---

    def play(self, *processes: Process[Any, Any]) -> None:
        """Make processes known; nodes that open from here on deploy them."""
        for process in processes:
            self.cast[process.name] = process

    def node(self, name: str, **options: Any) -> Node:
        node = Node(self, name, **{"limits": self.limits, "settings": self.settings, **options})
        self.nodes.append(node)
        return node

    def client(self, name: str) -> Client:
        client = Client(self, name)
        self.clients.append(client)
        for listener in self.on_client:
            listener(client)
        return client

    @property
    def owner(self) -> Life | None:
        """Whom clients talk to: the newest life that is up."""
        up = [node.life for node in self.nodes if node.life is not None and not node.is_paused]
        return max(up, key=lambda life: life.epoch, default=None)

    def new_storage(self) -> Any:
        storage = self._memory.storage()
        if self.taps:
            storage.tap = partial(self._tapped, storage)
        return storage

    # --- time and order ---

    def after(self, delay_ms: int, job: Job, *, label: str = "") -> None:
        """Do something when so much time has passed."""
        heapq.heappush(self._agenda, (self.time.now_ms + delay_ms, next(self._numbers), job, label))

    def at_step(self, step: int, job: Job) -> None:
        """Do something right before a step."""
        heapq.heappush(self._by_step, (step, next(self._numbers), job))

    def step(self) -> bool:
        """Let one thing happen. False if nothing is left that could."""
        self.steps += 1
        while self._by_step and self._by_step[0][0] <= self.steps:
            heapq.heappop(self._by_step)[2]()
        if self._dying:
            self._bury()
        stages = [node.life.stage for node in self.nodes if node.life is not None and not node.is_paused]
        ready = [stage for stage in stages if len(stage)]
        if not ready or (self.haste and self._haste() < self.haste):
            if self._pass_time():
                return True
            if not ready:
                is_changed = self.on_idle is not None and self.on_idle()
                return is_changed or bool(self._by_step and self._skip_steps())
        self._play(ready)
        if self._memory.is_dead:
            self._lose_power()
        if self._dying:
            self._bury()
        return True

    def _play(self, stages: list[Any]) -> None:
        if len(stages) == 1:
            stages[0].play(self.schedule.choose(stages[0].ready))
            return
        index = self.schedule.choose([item for stage in stages for item in stage.ready])
        for stage in stages:
            if index < len(stage):
                stage.play(index)
                return
            index -= len(stage)

    def _pass_time(self) -> bool:
        """Go to the next alarm or appointment, and let that one happen."""
        clocks = [node.life.clock for node in self.nodes if node.life is not None and not node.is_paused]
        due = [(due_ms, clock) for clock in clocks if (due_ms := clock.next_due_ms()) is not None]
        nearest = min((due_ms for due_ms, _ in due), default=None)
        if self._agenda and (nearest is None or self._agenda[0][0] <= nearest):
            due_ms, _, job, label = heapq.heappop(self._agenda)
            self.time.now_ms = max(self.time.now_ms, due_ms)
            self.trace.update(b"agenda")
            if label and self.trace.recording:
                self.tell("", "world", "job", label)
            job()
            return True
        if nearest is None or nearest - self.time.now_ms >= IDLE_MS:
            return False
        self.time.now_ms = max(self.time.now_ms, nearest)
        clock = next(clock for due_ms, clock in due if due_ms == nearest)
        ring = clock.take_due()
        self.trace.update(b"%d" % self.time.now_ms)
        if ring is not None:
            if self.trace.recording:
                self.tell("", "clock", "timer", "an alarm rings")
            ring()
        return True

    def _skip_steps(self) -> bool:
        """Nothing happens until the next step at which somebody wants to act: be there."""
        self.steps = max(self.steps, self._by_step[0][0] - 1)
        return True

    def run(self, steps: int) -> None:
        """Let so many things happen, or as many as there are."""
        end = self.steps + steps
        while self.steps < end and not self.is_finished and self.step():
            pass

    def settle(self) -> None:
        """Faults are over: everything that can move comes to rest, within its time."""
        self.is_settling = True
        self.haste = 0.0
        self._by_step.clear()
        self.script.is_over = True
        for job in self.on_settle:
            job()
        for node in self.nodes:
            node.resume()
        self.rest()

    def rest(self) -> None:
        """Let everything happen that happens by itself within its time."""
        end_ms = self.time.now_ms + REST_MS
        for _ in range(self.most_steps_to_rest):
            due_ms = self._next_ms()
            if due_ms is None or due_ms > end_ms:
                return
            self.step()
        raise Livelock(f"the world did not come to rest within {self.most_steps_to_rest} steps after the faults ended")

    def _next_ms(self) -> int | None:
        """When the next thing happens."""
        lives = [node.life for node in self.nodes if node.life is not None and not node.is_paused]
        if any(len(life.stage) for life in lives):
            return self.time.now_ms
        due = [due_ms for life in lives if (due_ms := life.clock.next_due_ms()) is not None]
        if self._agenda:
            due.append(self._agenda[0][0])
        return min(due, default=None)

    # --- deaths ---

    def doom(self, life: Life, why: str) -> None:
        """This life ends with the present step: whatever it still does in it never happened outside."""
        if not life.is_dead:
            life.is_dead = True
            self._dying.append((life, why))

    @property
    def is_without_power(self) -> bool:
        """Whether the disk has died in the present step: nobody outside hears of what is still done in it."""
        return bool(self._memory.is_dead)

    def _lose_power(self) -> None:
        """The disk has died in this step, and with it every process on it."""
        for life in self.all_lives():
            self.doom(life, "the disk has stopped")

    def _bury(self) -> None:
        dying, self._dying = self._dying, []
        for life, why in dying:
            if life.node.life is life:
                life.node.kill(why)

    # --- called by nodes ---

    def opened(self, life: Life) -> None:
        self.lives += 1
        for process in self.cast.values():
            life.service.call("deploy", {"body": process.definition.body})
        for listener in self.on_opened:
            listener(life)

    def lost(self, life: Life) -> None:
        for client in self.clients:
            client.lost(life)
        for listener in self.on_lost:
            listener(life)

    def granted(self, epoch: int) -> None:
        if epoch <= self.highest_epoch and not self.may_lose:
            self.violate("I10", f"epoch {epoch} was granted after epoch {self.highest_epoch}")
        self.highest_epoch = max(self.highest_epoch, epoch)

    def landed(self, life: Life, changes: Sequence[Change], written: Written) -> None:
        for change, result in zip(changes, written.results, strict=True):
            if isinstance(result, Landed) and isinstance(change, Commit) and result.stored is not None:
                self.commits += 1
                self.trace.update(result.stored.digest.encode())
                if life.epoch < self.highest_epoch:
                    self.violate(
                        "I10", f"epoch {life.epoch} has committed after {self.highest_epoch} was granted", change.id
                    )
                for listener in self.on_landed:
                    listener(life, change, result.stored.version)
        for look in self.on_written:
            look(life, changes, written)

    def writing(self, life: Life, changes: Sequence[Any]) -> None:
        for look in self.on_writing:
            look(life, changes)

    def ran(self, life: Life, operation: Any) -> None:
        if life.epoch < self.highest_epoch:
            what = type(operation).__name__
            self.violate("I10", f"epoch {life.epoch} has carried out {what} after {self.highest_epoch} was granted")
        for look in self.on_ran:
            look(life, operation)

    # --- evidence ---

    def note(self, life: Life, actor: PooledActor | None, message: object) -> None:
        """What every stage calls before a step of it."""
        text = str(message) if actor is None else f"{actor.actor_urn} {type(message).__name__}"
        self.trace.update(text.encode("utf-8", "replace"))
        if self.trace.recording:
            lane, instance = _lane(actor, text)
            kind = "job" if actor is None else "commit" if type(message) is Committed else "message"
            self._record(life.name, lane, kind, text if actor is None else describe(message), instance)

    def tell(self, node: str, lane: str, kind: str, text: str, instance: str = "") -> None:
        """Something happened that is rare enough to be told in words."""
        self.trace.add(Moment(self.steps, self.time.now_ms, node, lane, kind, text, instance))

    def _record(self, node: str, lane: str, kind: str, text: str, instance: str) -> None:
        self.trace.moments.append(Moment(self.steps, self.time.now_ms, node, lane, kind, text, instance))

    def probe(self, name: str) -> None:
        """A rare state was reached."""
        self.probes[name] += 1
        if self.trace.recording:
            self.tell("", "world", "probe", name)

    def fault(self, name: str, text: str = "", *, node: str = "") -> None:
        """A fault has struck."""
        self.counts[name] += 1
        self.tell(node, "world", "fault", f"{name}: {text}" if text else name)
        for listener in self.on_fault:
            listener(name)

    def violate(self, invariant: str, message: str, instance: str = "") -> None:
        violation = Violation(invariant, message, instance)
        self.violations.append(violation)
        self.tell("", "world", "violation", str(violation), instance)

    # --- storage ---

    def peek(self, statement: str) -> list[Any]:
        """What another process would read in the database now."""
        try:
            return self._memory.peek(statement)
        except sqlite3.OperationalError:
            # In memory nobody reads beside a transaction; a task that holds one cannot touch our tables in it.
            for life in self.all_lives():
                rows: list[Any] | None = life.storage.peek_inside(statement)
                if rows is not None:
                    return rows
            raise

    def tap(self, tap: Any) -> None:
        """Put a fault between writers and the database: `tap(statement, run) -> cursor`, in the order of adding."""
        self.taps.append(tap)
        for life in self.all_lives():
            life.storage.tap = partial(self._tapped, life.storage)

    def untap(self) -> None:
        self.taps.clear()
        for life in self.all_lives():
            life.storage.tap = None

    def all_lives(self) -> Iterator[Life]:
        return (node.life for node in self.nodes if node.life is not None)

    def _tapped(self, storage: Any, statement: str, run: Any) -> Any:
        before, self.tapped = self.tapped, storage
        for tap in self.taps:
            run = _through(tap, statement, run)
        try:
            return run()
        finally:
            self.tapped = before

    @property
    def tapped_life(self) -> Life | None:
        """For taps: whose statement it is; None for a process that is only about to open."""
        return next((life for life in self.all_lives() if life.storage is self.tapped), None)

    def close(self) -> None:
        for job in self.on_close:
            job()
        for node in self.nodes:
            if node.life is not None:
                life, node.life = node.life, None
                life.die()
        self._memory.close()

    @property
    def elapsed_ms(self) -> int:
        return self.time.now_ms - START_MS


def _through(tap: Any, statement: str, run: Any) -> Any:
    return lambda: tap(statement, run)


def _lane(actor: PooledActor | None, text: str) -> tuple[str, str]:
    if actor is None:
        return ("handlers", text.split(" ", 1)[-1].split("/")[0]) if text[:4] in ("run ", "end ") else ("world", "")
    if isinstance(actor, InstanceActor):
        return actor.name, actor.name
    return LANES.get(type(actor).__name__, type(actor).__name__), ""
