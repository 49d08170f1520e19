"""Makes the saved database of today's schema: `python tests/compatibility/make.py`, once for each released schema.

The file is a contract: whatever this version has written, every later one must read, fold and carry on. It holds
instances in every state of life, and every type of event. Beside it stands what is to be found in it, as JSON. Nothing
in either depends on the machine or the moment.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from understudy.model import commands as c
from understudy.model.decide import decide
from understudy.model.definition import Definition, Edge, Graph, Input, Node
from understudy.model.instance import Fault, Instance, Token, facts
from understudy.model.kinds import (
    Choice,
    End,
    Fork,
    Join,
    Merge,
    Receive,
    Saga,
    Start,
    Task,
    Throw,
    Timer,
    UndoTask,
)
from understudy.model.retry import Backoff
from understudy.store.commit import Answered, Stored, pack
from understudy.store.connection import Settings
from understudy.store.lending import Loan
from understudy.store.migrations import LATEST
from understudy.store.operations import Deploy, Hold, MoveCursor
from understudy.store.writer import Landed, Publish, Writer

HERE = Path(__file__).parent
START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
HOUR_MS = 3_600_000
DECLINED = Fault("error", "Declined: no \N{DUCK}", types=("shop:Declined", "builtins:Exception"))

INSIDE = "saga"
NODES: tuple[Node, ...] = (
    Start(id="start"),
    Choice(id="size"),
    Task(id="approve", handler="approve", needs=("amount",), on_failure="incident"),
    Merge(id="sized"),
    Saga(id=INSIDE),
    Start(id="begin", within=INSIDE),
    Task(
        id="charge",
        within=INSIDE,
        handler="charge",
        needs=("order_id", "amount"),
        into="receipt",
        retry=Backoff(attempts=3, first_ms=1_000, jitter=0),
        undo=UndoTask(handler="refund", needs=("receipt",)),
    ),
    Fork(id="both", within=INSIDE),
    Task(id="pack", within=INSIDE, handler="pack"),
    Task(id="book", within=INSIDE, handler="book", needs=("receipt",), into="entry", transactional=True),
    Join(id="done", within=INSIDE),
    End(id="finish", within=INSIDE),
    Receive(id="delivered", message="delivered", key="order_id", into="parcel", timeout_ms=72 * HOUR_MS),
    Task(id="escalate", handler="escalate"),
    Merge(id="arrived"),
    Timer(id="nap", after="'1h'"),
    Throw(id="tell", message="shipped", key="order_id", payload="amount", ttl_ms=24 * HOUR_MS),
    Task(id="ship", handler="ship", needs=("order_id",), into="shipment"),
    End(id="end"),
)
PATHS = (
    ("start", "size", "approve", "sized", "saga", "delivered", "arrived", "nap", "tell", "ship", "end"),
    ("size", "sized"),
    ("delivered", "escalate", "arrived"),
    ("begin", "charge", "both", "pack", "done", "finish"),
    ("both", "book", "done"),
)


def definition() -> Definition:
    edges = [
        Edge(
            id=f"{source}-{target}",
            source=source,
            target=target,
            condition="amount > 100" if target == "approve" else "",
            is_default=(source, target) == ("size", "sized"),
            is_late=target == "escalate",
        )
        for path in PATHS
        for source, target in pairwise(path)
    ]
    inputs = (Input(name="order_id", type="str"), Input(name="amount", type="int"))
    return Definition(name="order", nodes=NODES, edges=tuple(edges), inputs=inputs, gives="shipment")


class Player:
    """Plays instances into a database, each command one commit."""

    def __init__(self, path: str) -> None:
        self.writer = Writer(path, Settings())
        self.writer.take_over("saved")
        no, version = self.writer.run(Deploy(definition()))
        self.graph = Graph(definition(), version=version, no=no)
        self.instances: dict[str, Instance] = {}
        self.stored: dict[str, Stored] = {}
        self.now_ms = START_MS

    def do(self, id: str, command: c.Command, **changes: Any) -> None:
        self.now_ms += 1
        order = msgspec.structs.replace(command, at_ms=self.now_ms, **changes)
        decision = decide(self.instances[id], self.graph, order)  # type: ignore[arg-type]
        assert decision.refusal is None, decision.refusal
        assert decision.entry is not None, (id, order)
        answered = [Answered(order.key, order.digest, "{}", self.now_ms + 24 * HOUR_MS)] if order.key else []
        commit = pack(
            self.instances[id],
            self.stored[id],
            [decision.entry],
            epoch=self.writer.epoch,
            activation=1,
            requests=answered,
        )
        (result,) = self.writer.write([commit], now_ms=self.now_ms).results
        assert isinstance(result, Landed), result
        assert result.stored is not None
        self.stored[id] = result.stored

    def start(self, id: str, amount: int = 40, **options: Any) -> None:
        self.instances[id], self.stored[id] = Instance(), Stored()
        variables = {"order_id": f'"{id}"', "amount": str(amount)}
        self.do(id, c.Start(at_ms=0, id=id, given_digest=f"digest of {id}", variables=variables, **options))

    def token(self, id: str, node: str) -> Token:
        return next(token for token in self.instances[id].tokens.values() if token.node == node)

    def done(self, id: str, *nodes: str) -> None:
        for node in nodes:
            token = self.token(id, node)
            self.do(id, c.CompleteTask(at_ms=0, token=token.id, task=token.task, attempt=token.attempt, result='"ok"'))

    def fails(self, id: str, node: str) -> None:
        token = self.token(id, node)
        self.do(id, c.FailTask(at_ms=0, token=token.id, task=token.task, attempt=token.attempt, fault=DECLINED))

    def fires(self, id: str, kind: str) -> None:
        wait = next(wait for wait in self.instances[id].waits.values() if wait.kind == kind)
        assert wait.due_ms is not None
        self.now_ms = max(self.now_ms, wait.due_ms)
        self.do(id, c.FireTimer(at_ms=0, wait=wait.id))

    def records(self, id: str, node: str) -> None:
        """A transactional task has committed, and its instance has not heard of it."""
        token = self.token(id, node)
        no = self.stored[id].no
        Loan(self.writer, instance=no, task=token.task, attempt=token.attempt).commit('"booked"')

    def publish(self, name: str, key: str, *, expires_ms: int | None = None) -> None:
        self.writer.write([Publish(name, key, '{"at":"door"}', expires_ms)], now_ms=self.now_ms)


# --- the cast: each is one state of life ------------------------------------------------------------------------------


def completed(play: Player, id: str) -> None:
    play.start(id, 150, title="A large order", tags={"customer": "Größe & Co"}, trigger="api", caused_by="test")
    play.fails(id, "approve")
    play.do(id, c.Resolve(at_ms=0, how="retry", by="operator", key="retry-1", digest="d"))
    play.done(id, "approve", "charge", "pack")
    play.records(id, "book")
    token = play.token(id, "book")
    recorded = c.CompleteTask(at_ms=0, token=token.id, task=token.task, attempt=1, result='"booked"', recorded=True)
    play.do(id, recorded)
    play.do(id, c.Send(at_ms=0, name="delivered", payload='{"at":"door"}', key="send-1", digest="d"))
    play.fires(id, "timer")
    play.done(id, "ship")


def failed(play: Player, id: str) -> None:
    play.start(id)
    play.done(id, "charge")
    play.fails(id, "pack")
    play.done(id, "charge")  # Its undo, at the same node.


def cancelled(play: Player, id: str) -> None:
    play.start(id)
    play.do(id, c.Cancel(at_ms=0, reason="changed my mind"))


def compensating(play: Player, id: str) -> None:
    play.start(id)
    play.done(id, "charge")
    play.fails(id, "pack")


def stuck_in_undo(play: Player, id: str) -> None:
    compensating(play, id)
    play.fails(id, "charge")


def executing(play: Player, id: str) -> None:
    play.start(id)


def lost(play: Player, id: str) -> None:
    play.start(id)
    play.do(id, c.Recover(at_ms=0))


def retrying(play: Player, id: str) -> None:
    play.start(id)
    play.fails(id, "charge")
    play.fires(id, "retry")
    play.fails(id, "charge")


def stuck(play: Player, id: str) -> None:
    play.start(id, 1_000)
    play.fails(id, "approve")


def recorded(play: Player, id: str) -> None:
    play.start(id)
    play.done(id, "charge", "pack")
    play.records(id, "book")


def joining(play: Player, id: str) -> None:
    play.start(id)
    play.done(id, "charge", "pack")


def waiting(play: Player, id: str) -> None:
    joining(play, id)
    play.done(id, "book")


def assigned(play: Player, id: str) -> None:
    """A message is its own, and it has not consumed it."""
    waiting(play, id)
    play.publish("delivered", id)


def buffering(play: Player, id: str) -> None:
    play.start(id)
    play.do(id, c.Send(at_ms=0, name="delivered", about=id, payload="1", expires_ms=play.now_ms + 1))
    play.do(id, c.Send(at_ms=0, name="delivered", about=id, payload="2"))
    play.do(id, c.Send(at_ms=0, name="delivered", about=id, payload="3"))
    play.done(id, "charge", "pack", "book")


def sleeping(play: Player, id: str) -> None:
    waiting(play, id)
    play.do(id, c.Send(at_ms=0, name="delivered"))


def escalated(play: Player, id: str) -> None:
    waiting(play, id)
    play.fires(id, "timer")


def paused(play: Player, id: str) -> None:
    waiting(play, id)
    play.do(id, c.Pause(at_ms=0, by="operator"))


def resumed(play: Player, id: str) -> None:
    paused(play, id)
    play.do(id, c.Resume(at_ms=0, by="operator"))


CAST: tuple[Callable[[Player, str], None], ...] = (
    completed,
    failed,
    cancelled,
    compensating,
    stuck_in_undo,
    executing,
    lost,
    retrying,
    stuck,
    recorded,
    joining,
    waiting,
    assigned,
    buffering,
    sleeping,
    escalated,
    paused,
    resumed,
)


def plain(instance: Instance) -> dict[str, Any]:
    """All that is stored of an instance, as JSON has it."""
    tables = instance.tables()
    known = {name: list(tables[name].values()) if name in tables else value for name, value in facts(instance).items()}
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(known))
    for name in tables:
        found[name].sort()
    return found


def expected(play: Player) -> dict[str, Any]:
    return {
        id: {"facts": plain(instance), "digest": play.stored[id].digest, "version": play.stored[id].version}
        for id, instance in play.instances.items()
    }


def main(folder: Path = HERE) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = f"{temporary}/saved.db"
        play = Player(path)
        for part in CAST:
            part(play, part.__name__)
        play.publish("delivered", "nobody", expires_ms=play.now_ms + HOUR_MS)
        play.publish("delivered", "nobody else")
        play.writer.run(MoveCursor("audit", 7, (Hold(1, 8, 2, None, "down"),)))
        text = msgspec.json.format(msgspec.json.encode(expected(play)), indent=1)
        play.writer.close()
        (folder / f"schema-{LATEST}.json").write_bytes(text + b"\n")
        content = gzip.compress(Path(path).read_bytes(), mtime=0)
        (folder / f"schema-{LATEST}.db.gz").write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
