"""Followers of history, each with a durable cursor.

There is no second outbox: a subscriber reads the one sequence of commits from where it has come to, woken by commits.
Deliveries are in order for each instance and at least once. One that fails holds back its instance only; it is tried
again after a backoff, and after a number of tries it waits for an operator, visible in `doctor`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import attrs

from understudy.model.errors import Closed, Rejected, UnderstudyError
from understudy.model.events import Entry
from understudy.model.values import check_name
from understudy.node import Node
from understudy.store.operations import Hold, MoveCursor
from understudy.store.reads import Record

logger = logging.getLogger("understudy")
PAGE: Final = 200


@attrs.frozen(kw_only=True)
class Change:
    """One commit of one instance, as a subscriber gets it.

    `seq` is unique and rises: keep the highest to see repeats.
    """

    seq: int
    instance: str
    n: int
    at_ms: int
    entries: tuple[Entry, ...]


class Subscription:
    """A running follower. Its thread sleeps until there is something to deliver."""

    def __init__(
        self, node: Node, name: str, receive: Callable[[Change], Any], *, tries: int, backoff_s: float, cursor: int
    ) -> None:
        self.name = name
        self.cursor = cursor
        self._node = node
        self._receive = receive
        self._tries = tries
        self._backoff_s = backoff_s
        self._wake = threading.Event()
        self._closed = False
        self._unwatch = node.system.watch.add(None, self._wake.set) if node.system is not None else None
        self._thread = threading.Thread(target=self._run, name=f"understudy-subscriber-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._unwatch is not None:
            self._unwatch()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    # --- delivering ---

    def _run(self) -> None:
        self._wake.set()
        while not self._closed:
            self._wake.wait(self._patience_s())
            self._wake.clear()
            try:
                while not self._closed and self._deliver_page():
                    pass
            except Closed:
                return
            except UnderstudyError as error:
                logger.warning("subscriber %s: %s", self.name, error)
                self._wake.wait(self._backoff_s)

    def _patience_s(self) -> float | None:
        """Until the next held delivery is due; without one, until a commit."""
        due = [hold[5] for hold in self._node.reads.held(self.name) if hold[5] is not None]
        return max(0.0, (min(due) - self._now_ms()) / 1_000) if due else None

    def _deliver_page(self) -> bool:
        """Whether more may be waiting."""
        held = {hold[1]: hold for hold in self._node.reads.held(self.name)}
        released, holds = self._try_held(held)
        page = self._node.reads.after(self.cursor, PAGE)
        for record, instance in page:
            self.cursor = record.seq
            if record.instance in held and record.instance not in released:
                continue  # It waits behind the one that failed; `rows_of` finds it again from there.
            hold = self._deliver(record, instance, tries=0)
            if hold is not None:
                held[record.instance] = (self.name, record.instance, instance, *_fields(hold))
                released.discard(record.instance)
                holds[record.instance] = hold
        if page or released or holds:
            self._move(holds, released)
        return len(page) == PAGE

    def _try_held(self, held: dict[int, Any]) -> tuple[set[int], dict[int, Hold]]:
        released: set[int] = set()
        holds: dict[int, Hold] = {}
        for number, (_name, _no, instance, seq, tries, due_ms, _error) in held.items():
            if due_ms is None or due_ms > self._now_ms():
                continue
            hold: Hold | None = None
            for record in self._node.reads.rows_of(number, seq, self.cursor):
                hold = self._deliver(record, instance, tries=tries)
                if hold is not None:
                    break
                tries = 0
            if hold is None:
                released.add(number)
            else:
                holds[number] = hold
        return released, holds

    def _deliver(self, record: Record, instance: str, *, tries: int) -> Hold | None:
        """None when it was taken, else how the instance is held back."""
        change = Change(
            seq=record.seq, instance=instance, n=record.n, at_ms=record.at_ms, entries=tuple(record.entries)
        )
        try:
            self._receive(change)
        except Exception as error:
            tries += 1
            logger.warning("subscriber %s failed on commit %d of %s: %r", self.name, record.n, instance, error)
            delay_ms = int(self._backoff_s * 1_000) * 2 ** (tries - 1)
            due_ms = self._now_ms() + delay_ms if tries < self._tries else None
            return Hold(record.instance, record.seq, tries, due_ms, f"{type(error).__name__}: {error}")
        return None

    def _move(self, holds: dict[int, Hold], released: set[int]) -> None:
        system = self._node.system
        if system is None:
            raise Closed()
        move = MoveCursor(self.name, self.cursor, tuple(holds.values()), tuple(released))
        system.run(move).get(timeout=30)

    def _now_ms(self) -> int:
        system = self._node.system
        if system is None:
            raise Closed()
        return system.ports.clock.now_ms()


def _fields(hold: Hold) -> tuple[int, int, int | None, str]:
    return hold.seq, hold.tries, hold.due_ms, hold.error


def follow(
    node: Node, name: str, receive: Callable[[Change], Any], *, from_start: bool, tries: int, backoff_s: float
) -> Subscription:
    """Start a follower where this name has come to; a new name begins now, or at the start of history."""
    node.check()
    check_name(name, what="subscriber")
    if node.system is None:
        raise Rejected("subscribers run where the database is owned; subscribe in the owner's process")
    cursor = node.reads.cursor(name)
    if cursor is None:
        cursor = 0 if from_start else node.reads.last_seq()
        node.system.run(MoveCursor(name, cursor)).get(timeout=30)
    return Subscription(node, name, receive, tries=tries, backoff_s=backoff_s, cursor=cursor)
