"""All actors of one owner, put together: from an open writer to a runtime that serves, and back to a closed file.

The ports (clock, dispatchers, pool, ids) are given from outside: threads for a service, one stage for rehearsals and
simulations. Everything else is the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs
import pykka

from understudy.actors.clock import Clock, SystemClock
from understudy.actors.definitions import Definitions
from understudy.actors.directory import Directory, Heritage
from understudy.actors.dispatcher import Dispatcher, PooledRef, Scheduler
from understudy.actors.handlers import Handler
from understudy.actors.instance import InstanceActor
from understudy.actors.loader import Hold, LoaderActor, Resume
from understudy.actors.messages import Barrier, Order, Run, Sweep, Tick, Write
from understudy.actors.persistence import Health, PersistenceActor
from understudy.actors.pool import Pool
from understudy.actors.promise import Driver, Promise
from understudy.actors.services import Services
from understudy.actors.supervisor import SupervisorActor
from understudy.actors.tasks import TaskRunner
from understudy.actors.threads import ThreadPool
from understudy.actors.watch import Watch
from understudy.model.commands import AnyCommand, Deliver
from understudy.model.definition import Graph
from understudy.model.errors import Closed, Damaged, Fenced, OutcomeUnknown, Unavailable, UnderstudyError
from understudy.store.loading import Loaded, definition_row
from understudy.store.operations import Beat, Leave
from understudy.store.writer import Delivery, Operation, Publish, Writer

logger = logging.getLogger("understudy")
_NO_ANSWER: Final = (pykka.Timeout, pykka.ActorDeadError, RuntimeError)  # The last when a stage has nothing left to do.
SETTLE_S: Final = 2.0  # What a close may take beyond its limit, to commit what handlers gave at the last moment.


@attrs.frozen(kw_only=True)
class Limits:
    """How much is kept, and for how long."""

    resident: int = 10_000  # Resting instances kept in memory.
    idle_ms: int = 10_000  # How long an instance rests before it leaves memory.
    in_flight: int = 10_000  # Commands from outside that may be under way at once.
    patience_ms: int = 10_000  # How long a caller waits when that many are.
    value_bytes: int = 1_048_576
    keep_answers_ms: int = 86_400_000  # How long the answer to a keyed command is kept.
    lease_ms: int = 10_000  # How long an owner may show no sign of life before another takes over.
    threads: int = 8


@attrs.define(kw_only=True)
class Ports:
    """What differs between a service and a rehearsal."""

    clock: Clock
    instances: Scheduler
    persistence: Scheduler
    reading: Scheduler
    pool: Pool
    new_id: Callable[[], str]
    driver: Driver | None = None
    monotonic_s: Callable[[], float] = time.monotonic  # By which an owner knows how long ago it was surely the owner.


def threaded_ports(limits: Limits, *, loop: Any = None) -> Ports:
    """Real threads and the real clock."""
    return Ports(
        clock=SystemClock(),
        instances=Dispatcher("instances"),
        persistence=Dispatcher("persistence", slice_size=4_096),
        reading=Dispatcher("reading"),
        pool=ThreadPool(limits.threads, loop=loop),
        new_id=new_ids(),
    )


def new_ids() -> Callable[[], str]:
    """Ids as long and as random as a UUID's, without the system call that gives up the GIL for each of them."""
    chance = random.Random(os.urandom(32))
    return lambda: f"{chance.getrandbits(128):032x}"


class System:
    """A running owner. Safe to use from any thread.

    `left` is what the former owner left running, if it left in good order: attempts that are not in it, and are out by
    the store, were never begun.
    """

    def __init__(
        self,
        writer: Writer,
        handlers: Mapping[str, Handler],
        ports: Ports,
        limits: Limits,
        *,
        left: frozenset[str] | None = None,
    ) -> None:
        self.writer = writer
        self.ports = ports
        self.limits = limits
        self.watch = Watch()
        self.health = Health.OPEN
        self.reason = ""
        self.lost: Callable[[str], None] = _nothing  # Called once when nothing can be committed here any more.
        self._closed = False
        self._beaten: Promise[Any] | None = None
        self._sure_s = ports.monotonic_s()  # When the last beat that is known to have landed was sent.
        self._activations = itertools.count(1)
        self._door = _Door(limits.in_flight, limits.patience_ms / 1_000 if ports.driver is None else 0)
        self._reader = writer.storage.reader(writer.path)
        self.definitions = Definitions(self._read_definition)
        self.directory = Directory(resident_limit=limits.resident)
        self.runner = TaskRunner(ports.pool, ports.clock, self.directory, handlers, limit_bytes=limits.value_bytes)
        self._start_actors(left)

    def _start_actors(self, left: frozenset[str] | None) -> None:
        ports, limits = self.ports, self.limits
        self.persistence: PooledRef[Any] = PersistenceActor.start_on(
            ports.persistence,
            self.writer,
            clock=ports.clock,
            pool=ports.pool,
            committed=self._committed,
            changed=self._changed,
        )
        supervisor = SupervisorActor(self._reader, idle_ms=limits.idle_ms, dispatcher=ports.reading)
        self.supervisor: PooledRef[Any] = supervisor.actor_ref
        self.loader: PooledRef[Any] = LoaderActor.start_on(
            ports.reading, self._reader, self.definitions, self.directory, clock=ports.clock
        )
        self.services = Services(
            clock=ports.clock,
            directory=self.directory,
            persistence=self.persistence,
            supervisor=self.supervisor,
            release=self.runner.release,
            withdraw=self.runner.withdraw,
            epoch=self.writer.epoch,
            keep_answers_ms=limits.keep_answers_ms,
            left=left,
            is_sure=self._is_sure,
        )
        supervisor.services = self.services
        supervisor.loader = self.loader
        supervisor._start_actor_loop()
        self.runner.persistence = self.persistence
        self.directory.connect(self._activate, self.loader.tell, lambda: self.supervisor.tell(Tick("resting")))

    def start(self, *, go_on: bool = True) -> None:
        """Serve, and bring back what a former life has left.

        Without `go_on` commands are carried out and nothing else moves: no timer fires, no token enters a node, no
        attempt begins. Whoever owns the file next finds all of it in the store.
        """
        self.services.is_draining = not go_on
        for port in (self.ports.instances, self.ports.persistence, self.ports.reading, self.ports.clock):
            port.start()
        if go_on:
            self.supervisor.tell(Sweep())

    # --- from outside ---

    def order(
        self, instance: str, command: AnyCommand, *, graph: Graph | None = None, is_new: bool = False
    ) -> Promise[Any]:
        """Send a command; the promise is settled after its commit."""
        promise = self._admitted()
        self.directory.tell(instance, Order(command, promise, graph), is_new=is_new)
        return promise

    def publish(self, message: Publish) -> Promise[Any]:
        promise = self._admitted()
        self.persistence.tell(Write(message, answer=promise))
        return promise

    def run(self, operation: Operation) -> Promise[Any]:
        self._check()
        promise = self.promise()
        self.persistence.tell(Run(operation, promise))
        return promise

    def promise(self) -> Promise[Any]:
        return Promise(driver=self.ports.driver)

    def beat(self) -> None:
        """Show those who wait to take over a sign of life, unless the last one is still on its way."""
        if self._beaten is None or self._beaten.done:
            self._beaten = self.promise()
            self._beaten.add_done_callback(partial(self._heard, self.ports.monotonic_s()))
            self.persistence.tell(Run(Beat(), self._beaten))

    def _heard(self, sent_s: float, beaten: Promise[Any]) -> None:
        if beaten.error is None:
            self._sure_s = sent_s

    def _is_sure(self) -> bool:
        """Nobody takes over from an owner whose beat they have seen move within a lease."""
        return self.ports.monotonic_s() - self._sure_s < self.limits.lease_ms / 1_000

    def _admitted(self) -> Promise[Any]:
        self._check()
        promise = self.promise()
        self._door.enter(promise)
        if self._closed:
            promise.reject(Closed())  # The door may have been closed before the promise was inside.
            raise Closed()
        return promise

    def _check(self) -> None:
        if self._closed:
            raise Closed()
        if self.health is Health.DEGRADED:
            raise Unavailable(f"the database cannot be written now ({self.reason}); nothing was done, try again")
        lost = self.services.lost
        if lost is not None:
            raise type(lost)(str(lost))  # A new one for each caller: each gets a traceback of its own.

    # --- called by actors ---

    def _activate(self, name: str, loaded: Loaded | None, heritage: Heritage | None) -> PooledRef[InstanceActor]:
        number = next(self._activations)
        return InstanceActor.start_on(self.ports.instances, self.services, name, loaded, number, heritage)

    def _committed(self, instances: list[str], deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            command = Deliver(
                at_ms=self.ports.clock.now_ms(),
                message=delivery.message,
                wait=delivery.wait,
                payload=delivery.payload,
            )
            self.directory.tell(delivery.instance, Order(command))
        self.watch.committed(instances)

    def _changed(self, health: Health, reason: str) -> None:
        before, self.health, self.reason = self.health, health, reason
        logger.warning("the writer is %s%s", health.value, f": {reason}" if reason else "")
        if health is Health.DEGRADED:
            self.loader.tell(Hold())
        elif health is Health.OPEN and before is Health.DEGRADED:
            self.loader.tell(Resume())
            if not self.services.is_draining:
                self.supervisor.tell(Sweep())
        elif health in (Health.FENCED, Health.DAMAGED):
            self.services.lost = Fenced(reason) if health is Health.FENCED else Damaged(reason)
            self.services.is_draining = True
            self.watch.wake_all()
            self.lost(reason)

    def _read_definition(self, no: int) -> tuple[str, int, str] | None:
        return definition_row(self._reader.connection(), no)

    # --- the end ---

    def stop(self, *, timeout_s: float) -> bool:
        """Begin nothing new, let handlers finish within the limit, commit what they gave, close the file.

        Whether nothing was left behind that the next owner has to do again.
        """
        if self._closed:
            return True
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        is_lost = self.services.lost is not None
        self.services.is_draining = True
        self.runner.seal()
        finished = self.ports.pool.stop(0 if is_lost else timeout_s, cancel=is_lost)
        settled = not is_lost and self._settle(max(deadline_s, time.monotonic() + SETTLE_S))
        if settled:
            self._leave()
        self.runner.close()
        self._shut()
        return finished and settled

    def _settle(self, deadline_s: float) -> bool:
        """Wait until everybody has decided and committed what it was told; False if that takes too long.

        One look is not enough: an instance may be loading, and a commit may assign a message to another one.
        """
        is_quiet = False
        while not is_quiet:
            gate = _Gate(self.promise())
            asked, loading = self.directory.drain(gate.passed)
            try:
                self.loader.tell(Barrier(partial(gate.passed, True)))
                gate.expect(asked + 1)
                is_quiet = gate.promise.get(timeout=max(0.0, deadline_s - time.monotonic())) and not loading
            except _NO_ANSWER:
                return False
        return True

    def _leave(self) -> None:
        """Say what was left running, so that whatever else is out does not count as lost."""
        unfinished = self.runner.unfinished()
        left = self.services.left
        if not self.services.is_recovered:
            if left is None:
                return  # Attempts of a former life that crashed are among those that are out.
            unfinished |= left
        promise = self.promise()
        with contextlib.suppress(UnderstudyError, *_NO_ANSWER):
            self.persistence.tell(Run(Leave(unfinished), promise))
            promise.get(timeout=SETTLE_S)

    def _shut(self) -> None:
        gone = Closed("this Runtime was closed before it came to this; nothing was done")
        self.services.lost = self.services.lost or gone
        self.directory.close()
        self.ports.clock.stop()
        self.ports.reading.stop(SETTLE_S)
        self._reader.close()  # The writer is the last to close: only then SQLite folds the log into the file.
        with contextlib.suppress(*_NO_ANSWER):
            self.persistence.stop(block=False).get(timeout=SETTLE_S)
        self.ports.instances.stop(SETTLE_S)
        self.ports.persistence.stop(SETTLE_S)
        self._door.close(OutcomeUnknown("this Runtime was closed before it could answer; look, or ask again"))
        self.watch.wake_all()

    @property
    def is_full(self) -> bool:
        """Whether the next caller has to wait at the door."""
        return self._door.is_full

    def kill(self) -> None:
        """Drop everything at once, as a crash would; for rehearsals."""
        self._closed = True
        self.services.is_draining = True
        self.ports.clock.stop()

    def close_files(self) -> None:
        """Close what a killed system has left open."""
        self.writer.close()
        self._reader.close()


class _Door:
    """Lets so many commands in and no more: callers wait outside, not in memory. Whoever is inside gets an answer."""

    def __init__(self, places: int, patience_s: float) -> None:
        self._places = places
        self._patience_s = patience_s
        self._free = threading.Semaphore(places)
        self._inside: dict[Promise[Any], None] = {}

    def enter(self, promise: Promise[Any]) -> None:
        if not self._free.acquire(blocking=False) and not (
            self._patience_s and self._free.acquire(timeout=self._patience_s)
        ):
            raise Unavailable(f"{self._places} commands are under way already; nothing was done, try again in a moment")
        self._inside[promise] = None
        promise.add_done_callback(self._leave)

    @property
    def is_full(self) -> bool:
        return len(self._inside) >= self._places

    def close(self, error: UnderstudyError) -> None:
        for promise in list(self._inside):
            promise.reject(error)

    def _leave(self, promise: Promise[Any]) -> None:
        del self._inside[promise]
        self._free.release()


class _Gate:
    """Settles a promise once so many have passed: True if none of them had anything to do."""

    def __init__(self, promise: Promise[bool]) -> None:
        self.promise = promise
        self._lock = threading.Lock()
        self._missing = 0
        self._is_quiet = True

    def expect(self, count: int) -> None:
        self._count(count, True)

    def passed(self, was_quiet: bool) -> None:
        self._count(-1, was_quiet)

    def _count(self, change: int, was_quiet: bool) -> None:
        with self._lock:
            self._missing += change
            self._is_quiet = self._is_quiet and was_quiet
            is_open = self._missing == 0  # Below zero before `expect`: who passes early is counted early.
        if is_open:
            self.promise.resolve(self._is_quiet)


def _nothing(_reason: str) -> None:
    pass
