"""All actors of one owner, put together: from an open writer to a runtime that serves, and back to a closed file.

The ports (clock, dispatchers, pool, ids) are given from outside: threads for a service, one stage for rehearsals and
simulations. Everything else is the same code.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from understudy.actors.clock import Clock, SystemClock
from understudy.actors.definitions import Definitions
from understudy.actors.directory import Directory
from understudy.actors.dispatcher import Dispatcher, PooledRef, Scheduler
from understudy.actors.handlers import Handler
from understudy.actors.instance import InstanceActor, Services
from understudy.actors.loader import Hold, LoaderActor, Resume
from understudy.actors.messages import Order, Run, Sweep, Tick, Write
from understudy.actors.persistence import Health, PersistenceActor
from understudy.actors.pool import Pool, ThreadPool
from understudy.actors.promise import Driver, Promise
from understudy.actors.supervisor import SupervisorActor
from understudy.actors.tasks import TaskRunner
from understudy.actors.watch import Watch
from understudy.model.commands import AnyCommand, Deliver
from understudy.model.definition import Graph
from understudy.model.errors import Closed, Damaged, Fenced, Unavailable, UnderstudyError
from understudy.store.connection import MEMORY, open_reader
from understudy.store.loading import Loaded
from understudy.store.writer import Delivery, Operation, Publish, Writer

logger = logging.getLogger("understudy")


@attrs.frozen(kw_only=True)
class Limits:
    """How much is kept, and for how long."""

    resident: int = 10_000  # Resting instances kept in memory.
    idle_ms: int = 10_000  # How long an instance rests before it leaves memory.
    in_flight: int = 10_000  # Commands from outside that may be under way at once.
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


def threaded_ports(limits: Limits, *, loop: Any = None) -> Ports:
    """Real threads and the real clock."""
    return Ports(
        clock=SystemClock(),
        instances=Dispatcher("instances"),
        persistence=Dispatcher("persistence", slice_size=4_096),
        reading=Dispatcher("reading"),
        pool=ThreadPool(limits.threads, loop=loop),
        new_id=lambda: uuid.uuid4().hex,
    )


class System:
    """A running owner. Safe to use from any thread."""

    def __init__(self, writer: Writer, handlers: Mapping[str, Handler], ports: Ports, limits: Limits) -> None:
        self.writer = writer
        self.ports = ports
        self.limits = limits
        self.watch = Watch()
        self.health = Health.OPEN
        self.reason = ""
        self.lost: Callable[[str], None] = _nothing  # Called once when the file is no longer ours.
        self._closed = False
        self._activations = itertools.count(1)
        self._places = threading.BoundedSemaphore(limits.in_flight)
        self._reader = writer.database if writer.path == MEMORY else open_reader(writer.path)
        self.definitions = Definitions(self._read_definition)
        self.directory = Directory(resident_limit=limits.resident)
        self.runner = TaskRunner(ports.pool, ports.clock, self.directory, handlers, limit_bytes=limits.value_bytes)
        self._start_actors()

    def _start_actors(self) -> None:
        ports, limits = self.ports, self.limits
        self.persistence: PooledRef[Any] = PersistenceActor.start_on(
            ports.persistence,
            self.writer,
            clock=ports.clock,
            pool=ports.pool,
            committed=self._committed,
            changed=self._changed,
        )
        shared = self.writer.path != MEMORY and ports.driver is None  # Nobody watches a rehearsal for signs of life.
        beat_ms = max(limits.lease_ms // 4, 1) if shared else None
        supervisor = SupervisorActor(self._reader, idle_ms=limits.idle_ms, beat_ms=beat_ms, dispatcher=ports.reading)
        self.supervisor: PooledRef[Any] = supervisor.actor_ref
        self.loader: PooledRef[Any] = LoaderActor.start_on(
            ports.reading, self._reader, self.definitions, self.directory
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
        self,
        instance: str,
        command: AnyCommand,
        *,
        graph: Graph | None = None,
        is_new: bool = False,
        patience_s: float = 10.0,
    ) -> Promise[Any]:
        """Send a command; the promise is settled after its commit."""
        promise = self.promise()
        self._enter(patience_s)
        promise.add_done_callback(lambda _: self._places.release())
        self.directory.tell(instance, Order(command, promise, graph), is_new=is_new)
        return promise

    def publish(self, message: Publish, *, patience_s: float = 10.0) -> Promise[Any]:
        promise = self.promise()
        self._enter(patience_s)
        promise.add_done_callback(lambda _: self._places.release())
        self.persistence.tell(Write(message, answer=promise))
        return promise

    def run(self, operation: Operation) -> Promise[Any]:
        self._check()
        promise = self.promise()
        self.persistence.tell(Run(operation, promise))
        return promise

    def promise(self) -> Promise[Any]:
        return Promise(driver=self.ports.driver)

    def _enter(self, patience_s: float) -> None:
        """Back-pressure: callers wait at the door, not in memory."""
        self._check()
        if self._places.acquire(blocking=False):
            return
        if self.ports.driver is not None or not self._places.acquire(timeout=patience_s):
            raise Unavailable(
                f"{self.limits.in_flight} commands are under way already; nothing was done, try again in a moment"
            )

    def _check(self) -> None:
        if self._closed:
            raise Closed()
        if self.health is Health.DEGRADED:
            raise Unavailable(f"the database cannot be written now ({self.reason}); nothing was done, try again")
        if self.health is Health.FENCED:
            raise Fenced(self.reason)
        if self.health is Health.DAMAGED:
            raise Damaged(self.reason)

    # --- called by actors ---

    def _activate(self, name: str, loaded: Loaded | None) -> PooledRef[InstanceActor]:
        return InstanceActor.start_on(self.ports.instances, self.services, name, loaded, next(self._activations))

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
            self.services.is_draining = True
            self.watch.wake_all()
            self.lost(reason)

    def _read_definition(self, no: int) -> tuple[str, int] | None:
        row = self._reader.connection().execute("SELECT body, version FROM definition WHERE no = ?", (no,)).fetchone()
        return None if row is None else (row[0], row[1])

    # --- the end ---

    def stop(self, *, timeout_s: float) -> bool:
        """Begin nothing new, let handlers finish within the limit, commit what they gave, close the file."""
        if self._closed:
            return True
        self._closed = True
        self.services.is_draining = True
        finished = self.ports.pool.stop(timeout_s)
        self.runner.close()
        self._settle(timeout_s)
        self._shut(timeout_s)
        return finished

    def _settle(self, timeout_s: float) -> None:
        """Wait until what is under way has been decided and committed: a message through each actor's queue, twice."""
        for _ in range(2):
            barrier = self.promise()
            self.persistence.tell(Run(_Nothing(), barrier))
            try:
                barrier.get(timeout=timeout_s)
            except (UnderstudyError, Exception):
                return

    def _shut(self, timeout_s: float) -> None:
        self.ports.clock.stop()
        self.ports.instances.stop(timeout_s)
        self.ports.reading.stop(timeout_s)
        stopped = self.persistence.stop(block=False)
        try:
            stopped.get(timeout=timeout_s)
        finally:
            self.ports.persistence.stop(timeout_s)
            if self._reader is not self.writer.database:
                self._reader.close()
        self.watch.wake_all()

    def kill(self) -> None:
        """Drop everything at once, as a crash would; for rehearsals."""
        self._closed = True
        self.services.is_draining = True
        self.ports.clock.stop()

    def close_files(self) -> None:
        """Close what a killed system has left open."""
        self.writer.close()
        if self._reader is not self.writer.database:
            self._reader.close()


class _Nothing:
    def run(self, _connection: Any) -> None:
        pass


def _nothing(_reason: str) -> None:
    pass
