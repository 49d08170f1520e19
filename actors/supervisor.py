"""The actor that fires timers, brings instances back after a crash, and lets resting ones go.

It keeps only the near timers in memory; the index of the store has them all. Recovery goes through what is runnable
or has a message, page by page, and through nothing else. It sleeps until the next alarm: nothing here polls.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from typing import Any, Final

from understudy.actors.dispatcher import PooledActor, PooledRef, Scheduler
from understudy.actors.messages import Arm, Barrier, Order, Run, Sweep, Tick, Wake
from understudy.actors.services import Services, dismiss
from understudy.model.commands import FireTimer
from understudy.store.operations import Purge
from understudy.store.recovery import due_waits, has_expired, next_due_ms, runnable, with_messages

HORIZON_MS: Final = 60_000  # Timers due within this time are kept in memory.
MOST_TIMERS: Final = 10_000  # Read at once.
MOST_ARMED: Final = 100_000  # Kept at once; the store reminds us of the others when they are due.
PAGE: Final = 500
PURGE_MS: Final = 3_600_000  # What has expired is never used; this only frees its space.
AGAIN_MS: Final = 1_000  # After what could not be read is asked for again.
FLOOD_MS: Final = 20  # When more timers are due than are fired at once: how long the first ones get to be consumed.
NEVER_MS: Final = 1 << 62

Due = tuple[int, str, int]  # The moment, the instance and its wait.

logger = logging.getLogger("understudy")


class SupervisorActor(PooledActor):
    """Owns the near timers. `services` and `loader` are given to it before its first message."""

    services: Services
    loader: PooledRef[Any]

    def __init__(self, database: Any, *, idle_ms: int, dispatcher: Scheduler) -> None:
        super().__init__(dispatcher=dispatcher)
        self._database = database
        self._idle_ms = idle_ms
        self._timers: list[Due] = []
        self._armed: set[tuple[str, int]] = set()
        self._fired: set[tuple[str, int]] = set()  # In a flood: those that were fired and may not be consumed yet.
        self._refill_ms = 0  # When the store is to be read again: no timer that is not in the heap is due earlier.
        self.fired = 0

    def on_receive(self, message: Any) -> None:
        kind = type(message)
        try:
            if kind is Arm:
                self._arm(message)
            elif kind is Tick:
                self._tick(message.name)
            else:
                assert kind is Sweep, message
                self._sweep(message)
        except Exception as error:
            # All timers hang on this actor: it lives on, and does later what it could not do now.
            if self.services.lost is None:
                logger.error("%s could not be done and is tried again: %r", message, error)
                self._later(message)

    def _tick(self, name: str) -> None:
        if self.services.is_draining:
            return
        if name == "timers":
            self._fire()
        elif name == "resting":
            self._alarm("idle", self.services.clock.now_ms() + self._idle_ms)
        elif name == "idle":
            self._let_go()
        else:
            assert name == "purge", name
            self._purge()

    def _later(self, message: Any) -> None:
        tell = self.actor_ref.tell
        self.services.clock.after(f"again {message}", AGAIN_MS, lambda: tell(message))

    # --- timers ---

    def _arm(self, arm: Arm) -> None:
        if (arm.instance, arm.wait) in self._armed:
            return
        is_far = arm.due_ms >= self.services.clock.now_ms() + HORIZON_MS
        if is_far or len(self._timers) >= MOST_ARMED:
            if arm.due_ms < self._refill_ms:
                self._refill_ms = arm.due_ms
                self._set_alarm()
            return
        self._push(((arm.due_ms, arm.instance, arm.wait),))
        if self._timers[0][2] == arm.wait:
            self._set_alarm()

    def _push(self, timers: Iterable[Due]) -> None:
        for due in timers:
            if due[1:] not in self._armed:
                self._armed.add(due[1:])
                heapq.heappush(self._timers, due)

    def _fire(self) -> None:
        services = self.services
        now_ms = services.clock.now_ms()
        if self._refill_ms <= now_ms:
            self._refill(now_ms)
        while self._timers and self._timers[0][0] <= now_ms:
            _due_ms, instance, wait = heapq.heappop(self._timers)
            self._armed.discard((instance, wait))
            self.fired += 1
            services.directory.tell(instance, Order(FireTimer(at_ms=now_ms, wait=wait)))
        self._set_alarm()

    def _refill(self, now_ms: int) -> None:
        """Read the near timers. One that was fired already but is not consumed yet comes again, and changes nothing.

        When there are more than fit, those that were fired are passed over while they last: they would come first every
        time, and some of them may stay for long, as those of paused instances do.
        """
        connection = self._database.connection()
        until_ms = now_ms + HORIZON_MS
        limit = MOST_TIMERS + len(self._fired)
        rows = due_waits(connection, until_ms, limit)
        if len(rows) < limit:
            self._fired.clear()
            self._push(rows)
            self._refill_ms = next_due_ms(connection, until_ms) or NEVER_MS
            return
        self._fired.intersection_update([row[1:] for row in rows])
        self._push(row for row in rows if row[1:] not in self._fired)
        self._fired.update(row[1:] for row in rows if row[0] <= now_ms)
        # The page may end inside a millisecond: that one is read again.
        self._refill_ms = max(rows[-1][0], now_ms + FLOOD_MS)

    def _set_alarm(self) -> None:
        due_ms = min(self._timers[0][0], self._refill_ms) if self._timers else self._refill_ms
        self._alarm("timers", due_ms)

    def _alarm(self, name: str, due_ms: int) -> None:
        tell = self.actor_ref.tell
        self.services.clock.alarm(name, None if due_ms == NEVER_MS else due_ms, lambda: tell(Tick(name)))

    # --- recovery ---

    def _sweep(self, message: Sweep) -> None:
        """One page; the next one follows when the loader has read this one."""
        if self.services.is_draining:
            return
        if message.after == 0 and not message.messages:
            self._begin()
        find = with_messages if message.messages else runnable
        page = find(self._database.connection(), message.after, PAGE)
        for _no, instance in page:
            self.services.directory.tell(instance, Wake())
        if len(page) == PAGE:
            self._then(Sweep(page[-1][0], message.messages))
        elif not message.messages:
            self._then(Sweep(0, True))
        else:
            self.loader.tell(Barrier(self._recovered))

    def _then(self, message: Sweep) -> None:
        tell = self.actor_ref.tell
        self.loader.tell(Barrier(lambda: tell(message)))

    def _recovered(self) -> None:
        self.services.is_recovered = True

    def _begin(self) -> None:
        self._timers.clear()
        self._armed.clear()
        self._fired.clear()
        self._refill_ms = 0
        self._fire()
        self._alarm("purge", self.services.clock.now_ms() + PURGE_MS)

    # --- housekeeping ---

    def _let_go(self) -> None:
        services = self.services
        now_ms = services.clock.now_ms()
        for instance in services.directory.resting_before(now_ms - self._idle_ms, PAGE):
            dismiss(services, instance)
        since_ms = services.directory.resting_since()
        if since_ms is not None:
            self._alarm("idle", max(since_ms + self._idle_ms, now_ms + 1))

    def _purge(self) -> None:
        now_ms = self.services.clock.now_ms()
        if has_expired(self._database.connection(), now_ms):
            self.services.persistence.tell(Run(Purge(now_ms)))
        self._alarm("purge", now_ms + PURGE_MS)
