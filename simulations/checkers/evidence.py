"""What checkers share: what stands in the database, read once, and when each commit was written, as the world saw it.

`Evidence.of(world)` is one object for each world. Whoever wants to know when commits landed asks for it before the
first node opens, as every checker of this package does in `watch`. What is read from the database is kept until the
world goes on, and then read anew. Nothing here judges anything, and nothing here asks an actor.

    evidence = Evidence.of(world)
    evidence.rows                        all commits, in the one sequence
    evidence.histories["order-1"]        those of one instance
    evidence.instances["order-1"]        where it stands
    evidence.events("order-1")           (row, entry, event) of all that has happened to it
    evidence.turns()                     (row, entry, events) of all that has happened at all
    evidence.waits, .executing, .messages, .requests, .held, .cursors
    row.landing.step, .at_ms, .life      when, in the world's time, and by whom it was written; None: nobody looked on
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from understudy.actors.messages import Order
from understudy.model.definition import decode_definition
from understudy.model.events import Entry
from understudy.store.commit import Commit
from understudy.store.operations import Purge
from understudy.store.writer import Publish

if TYPE_CHECKING:
    from understudy.simulations.node import Life
    from understudy.simulations.world import World

_ENTRIES: Final = msgspec.json.Decoder(list[Entry])


class Landing(msgspec.Struct, frozen=True):
    """The moment at which something was written. Whether it landed only the database says."""

    step: int
    at_ms: int  # In the world's time.
    clock_ms: int  # As the writing node's clock showed it.
    life: str
    epoch: int
    highest_epoch: int  # That had been granted by then.


class Row(msgspec.Struct, frozen=True):
    """One commit, as it stands in history."""

    seq: int
    instance: str
    version: int
    at_ms: int
    epoch: int
    entries: list[Entry]
    digest: str
    landing: Landing | None

    @property
    def step(self) -> int:
        """When it was written; 0 if nobody looked on."""
        return 0 if self.landing is None else self.landing.step


class Report(NamedTuple):
    """A commit of which the writer was told that it is durable."""

    instance: str
    version: int
    digest: str
    step: int
    epoch: int


class Standing(NamedTuple):
    """Where an instance stands."""

    no: int
    id: str
    process: str
    status: str
    outcome: str | None
    version: int
    is_runnable: int

    @property
    def is_moving(self) -> bool:
        """Whether anything in it may go on by itself."""
        return self.status not in ("paused", "ended")


class Wait(NamedTuple):
    instance: str
    id: int
    token: int
    kind: str
    name: str
    key: str
    due_ms: int | None


class Executing(NamedTuple):
    """A token whose attempt is out."""

    instance: str
    token: int
    task: int
    attempt: int


class Message(NamedTuple):
    no: int
    name: str
    key: str
    expires_ms: int | None
    instance: str | None
    wait: int | None


class Request(NamedTuple):
    """An answer that is kept under its key."""

    answer: str
    expires_ms: int


class Held(NamedTuple):
    """What a subscriber could not take."""

    subscriber: str
    instance: str
    seq: int
    tries: int
    due_ms: int | None


class Evidence:
    """What a world has left behind, and what was seen while it did."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stamp: tuple[int, int, int] | None = None
        self._reading: Reading | None = None
        self.written: dict[str, Landing] = {}  # By the digest of the history row.
        self.reports: list[Report] = []
        self.publishes: list[tuple[Publish, Landing]] = []
        self.purged_ms = 0  # The latest moment by which something that had expired was purged.
        self.on_told: list[Callable[[Life, str, Any], None]] = []  # Each command on its way to an instance.
        world.on_writing.append(self._writing)
        world.on_landed.append(self._landed)
        world.on_opened.append(self._opened)

    @classmethod
    def of(cls, world: World) -> Evidence:
        if world.evidence is None:
            world.evidence = cls(world)
        found: Evidence = world.evidence
        return found

    # --- looking on ---

    def _writing(self, life: Life, changes: Sequence[Any]) -> None:
        world = self._world
        landing = Landing(
            world.steps, world.time.now_ms, life.clock.now_ms(), life.name, life.epoch, world.highest_epoch
        )
        for change in changes:
            kind = type(change)
            if kind is Commit:
                self.written[change.digest] = landing
            elif kind is Publish:
                self.publishes.append((change, landing))
            elif kind is Purge:
                self.purged_ms = max(self.purged_ms, change.now_ms)

    def _landed(self, life: Life, commit: Commit, version: int) -> None:
        self.reports.append(Report(commit.id, version, commit.digest, self._world.steps, life.epoch))

    def _opened(self, life: Life) -> None:
        """Look at everything that instances are told in this life."""
        directory: Any = life.system.directory
        tell: Callable[..., None] = directory.tell

        def told(instance: str, message: Any, *, is_new: bool = False) -> None:
            if type(message) is Order:
                for listener in self.on_told:
                    listener(life, instance, message.command)
            tell(instance, message, is_new=is_new)

        directory.tell = told

    # --- what is there ---

    @property
    def reading(self) -> Reading:
        """What stands in the database now."""
        stamp = (self._world.steps, self._world.time.now_ms, len(self.reports))
        if self._reading is None or self._stamp != stamp:
            self._reading = Reading(self._world, self.written)
            self._stamp = stamp
        return self._reading

    def forget(self) -> None:
        """Read anew: somebody has changed the database from outside."""
        self._reading = None

    @property
    def rows(self) -> list[Row]:
        return self.reading.rows

    @property
    def histories(self) -> dict[str, list[Row]]:
        return self.reading.histories

    @property
    def instances(self) -> dict[str, Standing]:
        return self.reading.instances

    @property
    def waits(self) -> list[Wait]:
        return self.reading.waits

    @property
    def executing(self) -> list[Executing]:
        return self.reading.executing

    @property
    def messages(self) -> list[Message]:
        return self.reading.messages

    @property
    def requests(self) -> dict[str, Request]:
        return self.reading.requests

    @property
    def held(self) -> list[Held]:
        return self.reading.held

    @property
    def cursors(self) -> dict[str, int]:
        return self.reading.cursors

    @property
    def transactional(self) -> frozenset[str]:
        return self.reading.transactional

    def turns(self) -> Iterator[tuple[Row, Entry, list[Any]]]:
        """All entries of all instances, in the one sequence, and their events."""
        return ((row, entry, entry.events) for row in self.rows for entry in row.entries)

    def events(self, instance: str) -> Iterator[tuple[Row, Entry, Any]]:
        """All that has happened to an instance."""
        for row in self.histories.get(instance, ()):
            for entry in row.entries:
                for event in entry.events:
                    yield row, entry, event


class Reading:
    """The tables, each read when it is first asked for."""

    def __init__(self, world: World, written: dict[str, Landing]) -> None:
        self._peek = world.peek
        self._written = written

    @cached_property
    def rows(self) -> list[Row]:
        read = self._peek(
            "SELECT h.seq, coalesce(i.id, ''), h.n, h.at_ms, h.epoch, h.events, h.digest "
            "FROM history h LEFT JOIN instance i ON i.no = h.instance ORDER BY h.seq"
        )
        found = self._written.get
        return [
            Row(seq, instance, version, at_ms, epoch, _ENTRIES.decode(events), digest, found(digest))
            for seq, instance, version, at_ms, epoch, events, digest in read
        ]

    @cached_property
    def histories(self) -> dict[str, list[Row]]:
        histories: dict[str, list[Row]] = {}
        for row in self.rows:
            histories.setdefault(row.instance, []).append(row)
        return histories

    @cached_property
    def instances(self) -> dict[str, Standing]:
        read = self._peek(
            "SELECT i.no, i.id, d.name, i.status, i.outcome, i.version, i.runnable "
            "FROM instance i JOIN definition d ON d.no = i.definition ORDER BY i.no"
        )
        return {row[1]: Standing(*row) for row in read}

    @cached_property
    def waits(self) -> list[Wait]:
        read = self._peek(
            "SELECT i.id, w.id, w.token, w.kind, w.name, w.key, w.due_ms "
            "FROM wait w JOIN instance i ON i.no = w.instance ORDER BY w.instance, w.id"
        )
        return [Wait(*row) for row in read]

    @cached_property
    def executing(self) -> list[Executing]:
        read = self._peek(
            "SELECT i.id, t.id, t.task, t.attempt FROM token t JOIN instance i ON i.no = t.instance "
            "WHERE t.status = 'executing' ORDER BY t.instance, t.id"
        )
        return [Executing(*row) for row in read]

    @cached_property
    def messages(self) -> list[Message]:
        read = self._peek(
            "SELECT m.no, m.name, m.key, m.expires_ms, i.id, m.wait "
            "FROM message m LEFT JOIN instance i ON i.no = m.instance ORDER BY m.no"
        )
        return [Message(*row) for row in read]

    @cached_property
    def requests(self) -> dict[str, Request]:
        return {row[0]: Request(*row[1:]) for row in self._peek("SELECT key, answer, expires_ms FROM request")}

    @cached_property
    def held(self) -> list[Held]:
        read = self._peek(
            "SELECT d.subscriber, i.id, d.seq, d.tries, d.due_ms FROM held d JOIN instance i ON i.no = d.instance "
            "ORDER BY d.subscriber, d.instance"
        )
        return [Held(*row) for row in read]

    @cached_property
    def cursors(self) -> dict[str, int]:
        return dict(self._peek("SELECT name, cursor FROM subscriber ORDER BY name"))

    @cached_property
    def definitions(self) -> dict[int, str]:
        return dict(self._peek("SELECT no, name FROM definition ORDER BY no"))

    @cached_property
    def transactional(self) -> frozenset[str]:
        """The handlers whose work is rolled back when it is not committed: only they are called again unnoticed."""
        definitions = [decode_definition(row[0]) for row in self._peek("SELECT body FROM definition")]
        return frozenset(
            node.handler  # type: ignore[attr-defined]
            for definition in definitions
            for node in definition.nodes
            if getattr(node, "transactional", False)
        )
