"""A whole system on a stage: real actors, a real file, one message at a time, and time that stands still."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import Process
from understudy.actors.clock import VirtualClock
from understudy.actors.handlers import Handler
from understudy.actors.messages import Order
from understudy.actors.pool import SteppingPool
from understudy.actors.promise import Promise
from understudy.actors.stepping import Stage
from understudy.actors.system import Limits, Ports, System
from understudy.model import commands as c
from understudy.model.definition import Graph
from understudy.store.connection import Settings, open_reader
from understudy.store.operations import Deploy
from understudy.store.reads import Readers, Reads
from understudy.store.writer import Writer

START_MS = 1_767_225_600_000


class Theatre:
    """One database, and one life of an owner after the other on it."""

    def __init__(self, path: Path, *processes: Process[Any, Any], limits: Limits | None = None) -> None:
        self.path = str(path)
        self.clock = VirtualClock(START_MS)
        self.limits = limits or Limits()
        self._processes = processes
        self._keys = itertools.count()
        self._readers = Readers(self.path, lambda: open_reader(self.path))
        self.reads = Reads(self._readers)
        self.handlers: dict[str, Handler] = {}
        self.graphs: dict[str, Graph] = {}
        self.open()

    def open(self, *, left: frozenset[str] | None = None) -> System:
        """Begin a life; `left` is what a former one that left in good order has left running."""
        self.stage = Stage()
        self.writer = Writer(self.path, Settings(durability="relaxed"))
        self.writer.take_over("theatre")
        ports = Ports(
            clock=self.clock,
            instances=self.stage.dispatcher("instances"),
            persistence=self.stage.dispatcher("persistence"),
            reading=self.stage.dispatcher("reading"),
            pool=SteppingPool(self.stage, self.clock),
            new_id=lambda: f"id-{next(self._keys)}",
            driver=self.stage,
            monotonic_s=lambda: 0.0,
        )
        self.system = System(self.writer, self.handlers, ports, self.limits, left=left)
        for process in self._processes:
            self.handlers.update(process.handlers)
        self.system.start()
        for process in self._processes:
            no, version = self.system.run(Deploy(process.definition)).get(timeout=1)
            self.graphs[process.name] = Graph(process.definition, version=version, no=no)
            self.system.definitions.add(self.graphs[process.name])
        return self.system

    def play(self) -> int:
        """Let everything that can move come to rest; the number of steps."""
        return self.stage.run_until_idle()

    def pass_ms(self, ms: int) -> None:
        """Let time pass; whatever becomes due happens at its moment."""
        end_ms = self.clock.now_ms() + ms
        self.play()
        while (due_ms := self.clock.next_due_ms()) is not None and due_ms <= end_ms:
            self.clock.set(max(due_ms, self.clock.now_ms()))
            self.play()
        self.clock.set(max(end_ms, self.clock.now_ms()))
        self.play()

    def crash(self) -> None:
        """End a life as a crash does."""
        self.system.kill()
        self.system.close_files()

    def close(self) -> None:
        self.system.kill()
        self.system.close_files()
        self._readers.close()

    # --- commands ---

    def start(self, id: str, process: str) -> Promise[Any]:
        command = c.Start(at_ms=self.clock.now_ms(), id=id, given_digest="same", variables={})
        return self.system.order(id, command, graph=self.graphs[process])

    def send(self, id: str, name: str, *, key: str = "", payload: str = "null") -> Promise[Any]:
        command = c.Send(at_ms=self.clock.now_ms(), name=name, payload=payload, key=key, digest=payload if key else "")
        return self.system.order(id, command)

    def tell(self, id: str, command: c.AnyCommand) -> None:
        """A command from inside, for whose answer nobody waits."""
        self.system.directory.tell(id, Order(command))

    # --- what has happened ---

    def events(self, id: str, *kinds: type) -> list[Any]:
        events = (event for record in self.reads.check_chain(id) for entry in record.entries for event in entry.events)
        return [event for event in events if not kinds or isinstance(event, kinds)]

    def status(self, id: str) -> str:
        return self.reads.summary(id).status


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[Callable[..., Theatre]]:
    made: list[Theatre] = []

    def make(*processes: Process[Any, Any], limits: Limits | None = None) -> Theatre:
        made.append(Theatre(tmp_path / f"play-{len(made)}.db", *processes, limits=limits))
        return made[-1]

    yield make
    for theatre in made:
        theatre.close()
