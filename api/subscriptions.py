"""Followers of history, each with a durable cursor.

There is no second outbox: a subscriber reads the one sequence of commits from where it has come to, woken by commits.
Deliveries are in order for each instance and at least once. One that fails holds back its instance only; it is tried
again after a backoff, and after a number of tries it waits for an operator, visible in `doctor`.

A subscriber delivers where the database is owned. In a process that is a client it waits, and goes on from the stored
cursor when that process takes over: all workers of a service may subscribe under one name, and one of them delivers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Final

import attrs
import pykka

from understudy.actors.system import System
from understudy.model.errors import Closed, Rejected, UnderstudyError
from understudy.model.events import Entry
from understudy.model.values import check_name
from understudy.node import Node, Role
from understudy.store.operations import Hold, MoveCursor
from understudy.store.reads import Record
from understudy.views import waited

logger = logging.getLogger("understudy")
PAGE: Final = 200
LONGEST_BACKOFF_MS: Final = 3_600_000
LEAST_PAUSE_S: Final = 0.05  # After the database could not be read or written.
ERROR_LIMIT: Final = 500  # Characters of a failure that are kept.
MOVE_S: Final = 30.0


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
        self, node: Node, name: str, receive: Callable[[Change], Any], *, tries: int, backoff_s: float
    ) -> None:
        self.name = name
        self.cursor = 0  # How far it has come, durably.
        self._node = node
        self._receive = receive
        self._tries = tries
        self._backoff_s = backoff_s
        self._wake = threading.Event()
        self._closed = False
        self._pid = os.getpid()
        node.listen(self._wake.set)
        self._thread = threading.Thread(target=self._run, name=f"understudy-subscriber-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    # --- its thread ---

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            try:
                self._node.check()
                system = self._node.system
                if system is None:
                    self._wake.wait()  # Until this process owns the database.
                else:
                    self._follow(system)
            except Closed:
                pass  # Either of us: the next look says which.
            except Exception as error:
                logger.warning("subscriber %s goes on after an error: %r", self.name, error)
                self._wake.wait(max(self._backoff_s, LEAST_PAUSE_S))
            if self._node.is_closed:
                return

    def _follow(self, system: System) -> None:
        """Deliver for as long as these actors are the owner's."""
        unwatch = system.watch.add(None, self._wake.set)
        try:
            self.cursor = self._node.reads.cursor(self.name) or 0
            while not self._closed and self._node.system is system:
                while not self._closed and self._deliver_page():
                    pass
                self._wake.wait(self._patience_s())
                self._wake.clear()
        finally:
            unwatch()

    def _patience_s(self) -> float | None:
        """Until the next held delivery is due; without one, until a commit."""
        due = [hold[5] for hold in self._node.reads.held(self.name) if hold[5] is not None]
        return max(0.0, (min(due) - self._now_ms()) / 1_000) if due else None

    # --- delivering ---

    def _deliver_page(self) -> bool:
        """Whether more may be waiting. What is not stored at the end is delivered again: the cursor moves last."""
        move, is_full = self._delivered()
        if move is not None:
            self._move(move)
        return is_full

    def _delivered(self) -> tuple[MoveCursor | None, bool]:
        """Hand over a page; how the cursor is to be moved for it, and whether more may be waiting."""
        held = {hold[1]: hold for hold in self._node.reads.held(self.name)}
        released, holds = self._try_held(held)
        page = self._node.reads.after(self.cursor, PAGE)
        cursor = self.cursor
        for record, instance in page:
            if self._closed:
                break
            cursor = record.seq
            if record.instance in held and record.instance not in released:
                continue  # It waits behind the one that failed; `rows_of` finds it again from there.
            hold = self._deliver(record, instance, tries=0)
            if hold is not None:
                held[record.instance] = (self.name, record.instance, instance, *_fields(hold))
                released.discard(record.instance)
                holds[record.instance] = hold
        is_moved = cursor != self.cursor or released or holds
        move = MoveCursor(self.name, cursor, tuple(holds.values()), tuple(released)) if is_moved else None
        return move, len(page) == PAGE

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
        except BaseException as error:  # A subscriber that wants to end the process ends nothing but this delivery.
            tries += 1
            logger.warning("subscriber %s failed on commit %d of %s: %r", self.name, record.n, instance, error)
            delay_ms = min(int(self._backoff_s * 1_000) << min(tries - 1, 32), LONGEST_BACKOFF_MS)
            due_ms = self._now_ms() + delay_ms if tries < self._tries else None
            return Hold(record.instance, record.seq, tries, due_ms, _text(error))
        return None

    def _move(self, move: MoveCursor) -> None:
        system = self._node.system
        if system is None:
            raise Closed()
        try:
            system.run(move).get(timeout=MOVE_S)
        except pykka.Timeout as error:
            raise UnderstudyError(f"the cursor could not be stored within {MOVE_S:g} s") from error
        self.cursor = move.cursor

    def _now_ms(self) -> int:
        system = self._node.system
        if system is None:
            raise Closed()
        return system.ports.clock.now_ms()


def _fields(hold: Hold) -> tuple[int, int, int | None, str]:
    return hold.seq, hold.tries, hold.due_ms, hold.error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_LIMIT].encode("utf-8", "replace").decode().replace("\0", " ")


def follow(
    node: Node, name: str, receive: Callable[[Change], Any], *, from_start: bool, tries: int, backoff_s: float
) -> Subscription:
    """Start a follower where this name has come to; a new name begins now, or at the start of history."""
    node.check()
    check_name(name, what="subscriber")
    if node.role not in (Role.AUTO, Role.OWNER):
        raise Rejected(
            f"subscribers run where the database is owned, and a runtime with role={node.role.value!r} never is its "
            'owner; subscribe in a Runtime with role="auto"'
        )
    waited(node.submit("subscribe", {"subscriber": name, "from_start": from_start}), MOVE_S, "subscribe")
    return Subscription(node, name, receive, tries=tries, backoff_s=backoff_s)
