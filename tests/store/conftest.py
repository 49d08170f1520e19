"""A desk: one writer, and instances that are decided and packed as their actors would do it, one call at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from understudy.model import commands as c
from understudy.model.decide import Decision, decide
from understudy.model.definition import Definition, Edge, Graph, Node
from understudy.model.errors import Damaged
from understudy.model.instance import Instance
from understudy.model.kinds import Choice, End, Fork, Receive, Saga, Start, Task, Throw, UndoTask
from understudy.store.commit import Answered, Commit, Stored, pack
from understudy.store.connection import Settings
from understudy.store.loading import Loaded, load
from understudy.store.operations import Deploy
from understudy.store.schema import TABLES
from understudy.store.writer import Change, Landed, Publish, Refused, Writer, Written

Dump = dict[str, list[tuple[Any, ...]]]


def chain(name: str, *nodes: Node) -> Definition:
    every = (Start(id="start"), *nodes, End(id="end"))
    edges = tuple(Edge(id=f"{a.id}-{b.id}", source=a.id, target=b.id) for a, b in pairwise(every))
    return Definition(name=name, nodes=every, edges=edges, open_inputs=True)


STEPS = chain("steps", *(Task(id=f"step_{n}", handler="step", into=f"result_{n}") for n in range(5)))
WAITING = chain("waiting", Receive(id="paid", message="paid", key="about", into="payment"))
THROWING = chain("throwing", Throw(id="pay", message="paid", key="about", payload="about", ttl_ms=500))


def _rich() -> Definition:
    nodes = (
        Start(id="start"),
        Fork(id="fork"),
        Saga(id="saga"),
        Start(id="begin", within="saga"),
        Task(id="charge", within="saga", handler="charge", into="receipt", undo=UndoTask(handler="refund")),
        Task(id="confirm", within="saga", handler="confirm"),
        Receive(id="paid", message="paid", key="about", timeout_ms=3_600_000),
        Choice(id="choice"),
        End(id="end"),
    )
    ways = [
        ("start", "fork"),
        ("fork", "saga"),
        ("fork", "paid"),
        ("fork", "choice"),
        ("begin", "charge"),
        ("charge", "confirm"),
        ("saga", "end"),
        ("paid", "end"),
    ]
    edges = [Edge(id=f"{a}-{b}", source=a, target=b) for a, b in ways]
    never = Edge(id="never", source="choice", target="end", condition="about == 'never'")
    return Definition(name="rich", nodes=nodes, edges=(*edges, never), open_inputs=True)


def _twice() -> Definition:
    ends = [Receive(id=name, message="paid", key=name) for name in ("one", "two")]
    nodes = (Start(id="start"), Fork(id="fork"), *ends)
    ways = [("start", "fork"), ("fork", "one"), ("fork", "two")]
    edges = tuple(Edge(id=f"{a}-{b}", source=a, target=b) for a, b in ways)
    return Definition(name="twice", nodes=nodes, edges=edges, open_inputs=True)


RICH = _rich()
TWICE = _twice()


class Desk:
    """`start` and `order` decide and pack; `write` writes, and remembers what landed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.writer = Writer(path, Settings(durability="relaxed"))
        self.writer.take_over("test")
        self.graphs: dict[str, Graph] = {}
        for definition in (STEPS, WAITING, THROWING, RICH, TWICE):
            no, version = self.writer.run(Deploy(definition))
            self.graphs[definition.name] = Graph(definition, version=version, no=no)
        self.instances: dict[str, Instance] = {}
        self.stored: dict[str, Stored] = {}
        self.now_ms = 1_000

    def graph(self, no: int) -> Graph:
        found = next((graph for graph in self.graphs.values() if graph.no == no), None)
        if found is None:
            raise Damaged(f"no definition {no}")
        return found

    # --- deciding ---

    def start(self, id: str, process: str = "steps", /, **variables: str) -> Commit:
        """`variables` are encoded values; the commit is not written yet."""
        self.instances[id], self.stored[id] = Instance(), Stored()
        command = c.Start(at_ms=self.now_ms, id=id, given_digest="given", variables=variables)
        return self.pack(id, self.decide(id, command, process))

    def order(self, id: str, command: c.AnyCommand, *, requests: list[Answered] | None = None) -> Commit:
        return self.pack(id, self.decide(id, command), requests=requests)

    def complete(self, id: str, result: str = "null", *, requests: list[Answered] | None = None) -> Commit:
        """The first task that is out is done."""
        token = next(token for token in self.instances[id].tokens.values() if token.task and token.attempt)
        done = c.CompleteTask(at_ms=self.now_ms, token=token.id, task=token.task, attempt=token.attempt, result=result)
        return self.order(id, done, requests=requests)

    def decide(self, id: str, command: c.AnyCommand, process: str = "") -> Decision:
        instance = self.instances[id]
        decision = decide(instance, self.graphs[process or instance.process], command)
        assert decision.refusal is None, decision.refusal
        return decision

    def pack(self, id: str, decision: Decision, *, requests: list[Answered] | None = None) -> Commit:
        assert decision.entry is not None
        return pack(
            self.instances[id],
            self.stored[id],
            [decision.entry],
            epoch=self.writer.epoch,
            activation=1,
            requests=requests or [],
        )

    # --- writing ---

    def write(self, *changes: Change) -> Written:
        written = self.writer.write(changes, now_ms=self.now_ms)
        for change, result in zip(changes, written.results, strict=True):
            if isinstance(change, Commit) and isinstance(result, Landed):
                assert result.stored is not None
                self.stored[change.id] = result.stored
        return written

    def lands(self, *changes: Change) -> Written:
        """As `write`, for what is only there to be written."""
        written = self.write(*changes)
        refused = [result for result in written.results if isinstance(result, Refused)]
        assert not refused, refused
        return written

    def put(self, id: str, process: str = "steps", /, **variables: str) -> None:
        """Start and write."""
        self.lands(self.start(id, process, **variables))

    def publish(self, key: str, *, name: str = "paid", payload: str = "1", expires_ms: int | None = None) -> Written:
        return self.lands(Publish(name, key, payload, expires_ms))

    def put_rich(self, id: str) -> None:
        """An instance that has rows in every table."""
        self.put(id, "rich", about='"a"', amount="40", other='"b"')
        self.lands(self.complete(id, '{"receipt":1}'))
        self.lands(self.order(id, c.Send(at_ms=self.now_ms, name="early", payload="[1]", about="k")))
        self.lands(self.order(id, c.Send(at_ms=self.now_ms, name="early", payload="[2]", about="k")))

    # --- reading ---

    def read(self, statement: str, *parameters: Any) -> list[Any]:
        rows: list[Any] = self.writer.connection.execute(statement, parameters).fetchall()
        return rows

    def load(self, *ids: str) -> dict[str, Loaded | Damaged]:
        return load(self.writer.connection, ids, self.graph)

    def loaded(self, id: str) -> Loaded:
        found = self.load(id)[id]
        assert isinstance(found, Loaded), found
        return found

    def dump(self) -> Dump:
        """Every row of every table."""
        return {
            table._meta.table_name: self.read(f'SELECT * FROM "{table._meta.table_name}" ORDER BY 1, 2')
            for table in TABLES
        }

    def close(self) -> None:
        self.writer.close()


@pytest.fixture
def new_desk(tmp_path: Path) -> Iterator[Callable[[], Desk]]:
    """For tests that need one afresh for each example."""
    desks: list[Desk] = []

    def make() -> Desk:
        desks.append(Desk(str(tmp_path / f"{len(desks)}.db")))
        return desks[-1]

    yield make
    for desk in desks:
        desk.close()


@pytest.fixture
def desk(new_desk: Callable[[], Desk]) -> Desk:
    return new_desk()
