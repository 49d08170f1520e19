"""What the demonstration knows of its orders: committed rows, read beside the owner.

The board never asks the process that owns the database, which may be dead at any moment. It remembers the digest of
every commit that it has seen, so that at the end it can say whether one of them was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import attrs

from understudy.demo.orders import STEPS, Order, fulfil
from understudy.explain import Story
from understudy.model.definition import Graph
from understudy.model.events import (
    AnyEvent,
    AttemptFailed,
    TaskCompleted,
    TaskOpened,
    UndoFinished,
    WaitConsumed,
    WaitOpened,
)
from understudy.state import State, Waiting, state_of
from understudy.store.reads import Reads, Record

_PAGE: Final = 1_000


@attrs.define
class Line:
    """An order on the board: its state as it is stored, and how each of its steps stands."""

    order: Order
    state: State | None = None
    marks: dict[str, str] = attrs.field(factory=dict)  # running, waiting, done, failed, undoing or undone
    done: list[str] = attrs.field(factory=list)
    undone: list[str] = attrs.field(factory=list)
    failure: str = ""
    _story: Story = attrs.field(factory=Story)

    @property
    def id(self) -> str:
        return self.order.order_id

    @property
    def outcome(self) -> str | None:
        return None if self.state is None else self.state.outcome

    @property
    def steps_done(self) -> int:
        return len(STEPS) if self.outcome is not None else sum(self.mark(step) == "done" for step in STEPS)

    @property
    def where(self) -> str:
        """Where its tokens are: "pack, invoice (attempt 2)"."""
        if self.state is None:
            return ""
        return self.outcome or "; ".join(_places(self.state.leaves))

    def mark(self, step: str) -> str:
        return self.marks.get(step, "ahead")

    def is_waiting_for(self, message: str) -> bool:
        return self.state is not None and self.state.is_waiting_for(message)

    def take(self, record: Record) -> str:
        """Take in one commit, and tell it."""
        events = [event for entry in record.entries for event in entry.events]
        told = []
        for event in events:
            told.append(self._story.tell(event))
            self._follow(event)
        return "; ".join(filter(None, told))

    def _follow(self, event: AnyEvent) -> None:
        match event:
            case TaskOpened() | AttemptFailed() | TaskCompleted():
                self._follow_task(event, self._story.place(event.token), is_undo=self._story.is_undo(event.token))
            case UndoFinished():
                self.marks[self._story.undo_of(event.undo)] = "undone"
                self.undone.append(self._story.undo_of(event.undo))
            case WaitOpened() if event.kind == "message":
                self.marks[event.name] = "waiting"
            case WaitConsumed():
                self.marks["delivered"] = "done"  # There is no other wait in this process.

    def _follow_task(self, event: TaskOpened | AttemptFailed | TaskCompleted, node: str, *, is_undo: bool) -> None:
        if isinstance(event, TaskOpened):
            self.marks[node] = "undoing" if is_undo else "running"
        elif isinstance(event, AttemptFailed):
            self.marks[node] = "failed"
            self.failure = f"{node}: {event.message}"
        elif not is_undo:
            self.marks[node] = "done"
            self.done.append(node)


def _places(waits: Iterable[Waiting]) -> Iterator[str]:
    tasks: dict[int, list[str]] = {}  # By attempt.
    for wait in waits:
        if wait.kind == "task":
            tasks.setdefault(wait.attempt, []).append(f"{'undoing ' if wait.is_undo else ''}{wait.node}")
        elif wait.kind == "message":
            yield f"waits for {wait.name}"
        elif wait.kind != "join":  # A token at a join waits for another one, which is where everybody looks.
            yield f"{wait.kind} at {wait.node}"
    for attempt, nodes in tasks.items():
        yield ", ".join(nodes) + (f" (attempt {attempt})" if attempt > 1 else "")


@attrs.frozen(kw_only=True)
class News:
    """A commit that was not on the board before."""

    order: str
    words: str
    epoch: int


class Board:
    """All orders, and the commits seen so far."""

    def __init__(self, reads: Reads, orders: Sequence[Order]) -> None:
        self.reads = reads
        self.lines = {order.order_id: Line(order) for order in orders}
        self.commits: dict[int, str] = {}  # The digest of each commit, by its place in the one sequence.
        self.epoch = 0
        self.owner_pid = 0
        self._cursor = 0
        self._graph = Graph(fulfil.definition)

    def __getitem__(self, id_: str) -> Line:
        return self.lines[id_]

    @property
    def is_finished(self) -> bool:
        return all(line.outcome is not None for line in self.lines.values())

    def look(self) -> list[News]:
        """Read what has been committed since the last look."""
        news = [self._take(record, id_) for record, id_ in self.reads.after(self._cursor, _PAGE)]
        holder, self.epoch, _beat = self.reads.owner()  # After the commits, so that it is never older than they are.
        self.owner_pid = int(holder.rpartition(":")[2])
        for id_ in {one.order for one in news}:
            self.lines[id_].state = state_of(self.reads.detail(id_), self._graph)
        return news

    def _take(self, record: Record, id_: str) -> News:
        self._cursor = record.seq
        self.commits[record.seq] = record.digest
        return News(order=id_, words=self.lines[id_].take(record), epoch=record.epoch)

    def lost_commits(self) -> int:
        """How many of the commits seen are not in the database now, or not as they were."""
        stored: dict[int, str] = {}
        cursor = 0
        while page := self.reads.after(cursor, _PAGE):
            stored |= {record.seq: record.digest for record, _id in page}
            cursor = page[-1][0].seq
        return sum(stored.get(seq) != digest for seq, digest in self.commits.items())
