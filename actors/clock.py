"""The clock: what time it is, one alarm for each name, and one delay for each name.

It owns the only thread that waits for time to pass. An alarm is a hint with a due time: it rings once, soon after it is
due and never before by `now_ms()`, and ringing must only `tell` somebody. A delay rings when so much time has passed,
whatever becomes of the wall clock meanwhile: whoever tries something again must not wait for days because somebody has
set the clock back. The clock keeps nothing durable and knows nothing of timers in the store: whoever owns those sets
the alarm for the nearest, and sets it again after a restart.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from understudy.model.errors import Rejected

REREAD_MS = 30_000
"""The longest wait without a look at the wall clock: a jump of it is noticed after this time at the latest."""

Ring = Callable[[], None]

_log = logging.getLogger(__name__)


class Clock(Protocol):
    """Tells the time and rings alarms."""

    def now_ms(self) -> int:
        """UTC in milliseconds since 1970."""

    def alarm(self, name: str, due_ms: int | None, ring: Ring) -> None:
        """Set the alarm of that name in place of the one it had; None clears it.

        A ring that has begun on the clock's thread while its alarm is replaced or cleared is still heard: the listener
        compares with `now_ms()`.
        """

    def after(self, name: str, delay_ms: int | None, ring: Ring) -> None:
        """Set the delay of that name in place of the one it had; None clears it. Alarms have names of their own."""

    def start(self) -> None:
        """Begin to ring. Alarms set earlier are kept."""

    def stop(self) -> None:
        """Ring no more, and forget every alarm."""


def utc_ms() -> int:
    return time.time_ns() // 1_000_000


def elapsed_ms() -> int:
    """Since some moment; it never goes back, and nobody can set it."""
    return time.monotonic_ns() // 1_000_000


class SystemClock:
    """The wall clock, and one daemon thread that sleeps until the nearest alarm."""

    def __init__(self, *, wall: Callable[[], int] = utc_ms, reread_ms: int = REREAD_MS) -> None:
        self._wall = wall
        self._reread_ms = reread_ms
        self._alarms = Alarms()
        self._delays = Alarms()
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None

    def now_ms(self) -> int:
        return self._wall()

    def alarm(self, name: str, due_ms: int | None, ring: Ring) -> None:
        with self._changed:
            before = self._alarms.next_due_ms()
            self._alarms.set(name, due_ms, ring)
            # Only an earlier due time cannot wait until the thread wakes up by itself.
            if due_ms is not None and (before is None or due_ms < before):
                self._changed.notify()

    def after(self, name: str, delay_ms: int | None, ring: Ring) -> None:
        with self._changed:
            # One more than asked for: what is left of the present millisecond must not be counted.
            self._delays.set(name, None if delay_ms is None else elapsed_ms() + delay_ms + 1, ring)
            self._changed.notify()

    def start(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="understudy-clock", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._changed:
            thread, self._thread = self._thread, None
            self._alarms = Alarms()
            self._delays = Alarms()
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (ring := self._wait()) is not None:
            try:
                ring()
            except BaseException:  # One listener's mistake must not cost all others their time.
                _log.exception("an alarm's listener raised; the clock goes on")

    def _wait(self) -> Ring | None:
        """The next ring, as soon as it is due; None once this thread is no longer the clock's."""
        with self._changed:
            while self._thread is threading.current_thread():
                now_ms = self._wall()
                ring = self._alarms.take_due(now_ms) or self._delays.take_due(elapsed_ms())
                if ring is not None:
                    return ring
                self._changed.wait(self._patience_s(now_ms))
            return None

    def _patience_s(self, now_ms: int) -> float | None:
        due_ms, delayed_ms = self._alarms.next_due_ms(), self._delays.next_due_ms()
        waits = []
        if due_ms is not None:
            # The wait runs on the monotonic clock, which neither jumps nor counts a suspended machine: hence the limit.
            waits.append(min(due_ms - now_ms, self._reread_ms))
        if delayed_ms is not None:
            waits.append(max(0, delayed_ms - elapsed_ms()))
        return min(waits) / 1000 if waits else None


class VirtualClock:
    """Time that passes only when told to, on the caller's thread."""

    def __init__(self, start_ms: int) -> None:
        self._now_ms = start_ms
        self._jumped_ms = 0  # By how much the wall clock was set, in all.
        self._alarms = Alarms()
        self._delays = Alarms()

    def now_ms(self) -> int:
        return self._now_ms

    def alarm(self, name: str, due_ms: int | None, ring: Ring) -> None:
        """As the protocol says; an alarm that is due already rings at the next move of time, be it `advance(0)`."""
        self._alarms.set(name, due_ms, ring)

    def after(self, name: str, delay_ms: int | None, ring: Ring) -> None:
        self._delays.set(name, None if delay_ms is None else self._elapsed_ms() + delay_ms, ring)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self._alarms = Alarms()
        self._delays = Alarms()

    def next_due_ms(self) -> int | None:
        """When the next alarm or delay rings, by the wall clock as it is set now."""
        delayed_ms = self._delays.next_due_ms()
        due = [self._alarms.next_due_ms(), None if delayed_ms is None else delayed_ms + self._jumped_ms]
        return min((due_ms for due_ms in due if due_ms is not None), default=None)

    def advance(self, ms: int) -> None:
        self.set(self._now_ms + ms)

    def set(self, ms: int) -> None:
        """Let time pass up to that moment: each alarm rings at its own due time, in their order."""
        if ms < self._now_ms:
            raise Rejected(
                f"time cannot pass from {self._now_ms} back to {ms}; use jump() for a wall clock that is set back"
            )
        while (due_ms := self.next_due_ms()) is not None and due_ms <= ms:
            self._now_ms = max(self._now_ms, due_ms)
            self._ring_due()
        self._now_ms = ms

    def jump(self, ms: int) -> None:
        """Move the wall clock by so much, also backwards, as an operator would: nobody sees a moment in between."""
        self._now_ms += ms
        self._jumped_ms += ms
        self._ring_due()

    def _elapsed_ms(self) -> int:
        return self._now_ms - self._jumped_ms

    def _ring_due(self) -> None:
        while (ring := self._alarms.take_due(self._now_ms) or self._delays.take_due(self._elapsed_ms())) is not None:
            ring()


class Alarms:
    """Alarms by name and by due time. Replaced ones stay in the heap until they come up or outnumber the living."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[int, int, Ring]] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._numbers = itertools.count()

    def set(self, name: str, due_ms: int | None, ring: Ring) -> None:
        if due_ms is None:
            self._by_name.pop(name, None)
            return
        number = next(self._numbers)  # Equal due times ring in the order in which they were set.
        self._by_name[name] = (due_ms, number, ring)
        heapq.heappush(self._heap, (due_ms, number, name))
        if len(self._heap) > 2 * len(self._by_name) + 64:
            self._heap = [(due, number, name) for name, (due, number, _) in self._by_name.items()]
            heapq.heapify(self._heap)

    def next_due_ms(self) -> int | None:
        while self._heap:
            due_ms, number, name = self._heap[0]
            alarm = self._by_name.get(name)
            if alarm is not None and alarm[1] == number:
                return due_ms
            heapq.heappop(self._heap)
        return None

    def take_due(self, now_ms: int) -> Ring | None:
        """The earliest alarm, if it is due; one at a time, because a ring may replace or clear the next one."""
        due_ms = self.next_due_ms()
        if due_ms is None or due_ms > now_ms:
            return None
        _, _, name = heapq.heappop(self._heap)
        return self._by_name.pop(name)[2]
